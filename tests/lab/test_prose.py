"""The sentences of the results page: their numbers are those of the logs."""

import numpy as np
import pytest

from made_up import OnePointGrids, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.claims.judging import TUNED
from steptuned.lab.claims.verdicts import judge
from steptuned.lab.measures import BY_KEY
from steptuned.lab.paired_runs import PairedRuns, Pairs
from steptuned.lab.report import prose, results, tables

SEEDS = Pairs("seeds", (1, 2, 3, 4, 5))


def tuned_records(spec):
    """Step-Tuned SGD ends at half of SGD's loss.

    Gamma is at its lower bound in the second half of the run.
    """
    tuned = spec.method == "step-tuned-sgd"
    end = (0.1 if tuned else 0.2) * (1 + spec.seed / 100)
    more = {"plain loss": lambda share: 2 - (2 - end) * share}
    if tuned:
        more |= {
            "gamma median": lambda share: 0.5 if share > 0.5 else 1.0,
            "raw gamma median": lambda share: 4.0 if share <= 0.1 else 0.2,
            "at lower": lambda share: float(share > 0.5),
            "at upper": lambda share: 0.0,
            "negative curvature": lambda share: 0.25,
        }
    return records_of(spec, lambda share: 3 - 2 * share, **more)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))
    for scale in ("short", "small"):
        fill(tmp_path, "figure-6f", tuned_records, scale)
    return tmp_path


def test_sentences_compare_the_methods_pairwise_and_describe_gamma(store):
    runs = PairedRuns(store, "short")
    against, gamma = prose.sentences(runs.outcome("figure-6f"), runs)
    assert against.startswith(
        "By final plain training loss, Step-Tuned SGD is below SGD in 5 of 5 seeds: median ratio 0."
    )
    assert against.endswith("p = 0.031.")
    assert (
        "inside its bounds [0.5, 2] in 50% of the iterations, at the lower one in 50% "
        "and at the upper one in 0%" in gamma
    )
    assert "the median raw gamma was 4 in the first tenth of the run and 0.2 in the last" in gamma


def test_shares_are_weighted_by_the_iterations_between_records():
    shares = {"at upper": 0.0, "negative curvature": 0.0, "raw gamma median": 1.0}
    records = [
        {"bp": bp, "at lower": lower, **shares} for bp, lower in ((1, 1.0), (10, 1.0), (100, 0.0))
    ]
    (at_lower, _, _), _ = prose._tuning_of_run(records)
    assert at_lower == pytest.approx(0.1)


def test_few_and_many_images_are_compared_if_both_were_run(store):
    found = []
    for scale in ("short", "small"):
        runs = PairedRuns(store, scale)
        group = next(
            g for g in runs.outcome("figure-6f").groups if g.entry.name == "step-tuned-sgd"
        )
        found.append(("figure-6f", scale, prose.tuning_of(group, runs.results)))
    (said,) = prose.few_and_many(found)
    assert said.startswith(
        "figure-6f: with all images and a tenth of the epochs gamma is inside its bounds in 50%"
    )
    assert prose.few_and_many(found[:1]) == []


def test_the_readme_and_the_package_contain_the_verdicts(store):
    judged = judge(store)
    readme = "# Title\n\n<!-- verdicts -->\nold\n<!-- end of verdicts -->\n\nThe rest.\n"
    new = results.with_verdicts(readme, judged)
    assert "old" not in new
    assert new.startswith(f"# Title\n\n<!-- verdicts -->\n\nOf {len(judged)} claims: ")
    assert new.endswith("<!-- end of verdicts -->\n\nThe rest.\n")
    assert results.with_verdicts(new, judged) == new
    with pytest.raises(ValueError, match="the README has no lines"):
        results.with_verdicts("# Title", judged)
    assert results.as_published(judged).count("\n") == len(judged) + 2


def test_the_table_of_an_experiment_compares_all_entries_with_sgd_pair_by_pair(store):
    runs = PairedRuns(store, "short")
    (table,) = tables.against_sgd(runs.outcome("figure-6f"), runs, BY_KEY["plain loss"])
    rows = {row[0].split(" (")[0]: row[1:] for row in table.rows}
    assert rows["SGD"][2:] == ["1", "", ""]
    pairs, mean, ratio, p, below = rows["Step-Tuned SGD"]
    assert (pairs, p, below) == ("5", "0.031", "5 of 5")
    tuned, sgd = (runs.finals("figure-6f", name, SEEDS, "plain loss") for name in (TUNED, "sgd"))
    assert mean == f"{tuned.mean():.4g}"
    assert ratio.split()[0] == f"{np.median(tuned / sgd):.3g}"
