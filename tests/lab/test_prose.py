"""The sentences of the results page: their numbers are those of the logs."""

import numpy as np
import pytest

from made_up import OnePointGrids, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.claims.judging import TUNED
from steptuned.lab.claims.verdicts import judge
from steptuned.lab.measures import BY_KEY
from steptuned.lab.paired_runs import PairedAtScales, PairedRuns, Pairs
from steptuned.lab.report import prose, results, tables
from steptuned.lab.store import Store

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
    against, gamma, ends = prose.sentences(runs.outcome("figure-6f"), runs)
    assert against.startswith(
        "The final plain training loss of Step-Tuned SGD is below SGD's in all 5 seeds (median "
        "ratio 0."
    )
    assert against.endswith("p = 0.031).")
    assert (
        "inside its bounds [0.5, 2] in 50% of the iterations, at the lower bound in 50% "
        "and at the upper bound in 0%" in gamma
    )
    assert "the median raw gamma was 4 in the first tenth of the run and 0.2 in the last" in gamma
    assert ends.startswith("Step-Tuned SGD has the lowest mean plain training loss at the end (0.")
    assert ", and SGD the highest (" in ends


def regression(folder, name, times):
    """Runs of the regression that reach 0.5 after so many iterations, and end at 0.4."""

    def records(spec):
        at = times[spec.method]
        at = at(spec) if callable(at) else at
        return [
            {"bp": bp, "batches": bp, "samples": bp, "seconds": 0.0, "loss": loss}
            for bp, loss in ((0, 1.0), (at, 0.45), (spec.budget, 0.4 + at / 1e4))
            if bp <= spec.budget
        ]

    fill(folder, name, records, "small")
    return PairedRuns(folder, "small")


TIMES = {"step-tuned-gd": 20, "barzilai-borwein": 30, "armijo": 40, "gd": 50}


def test_the_full_batch_methods_are_told_by_when_they_come_near_j_star(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))
    runs = regression(tmp_path, "figure-2", TIMES)
    near, ends = prose.sentences(runs.outcome("figure-2"), runs)
    assert near == (
        "J comes within 0.1 of J* in 5 of 5 seeds with Algorithm 1 (median 20 back-propagations), "
        "in 5 of 5 with BB with absolute values (30), in 5 of 5 with Armijo (40) and "
        "in 5 of 5 with Gradient descent (50)."
    )
    assert ends == (
        "Algorithm 1 has the lowest mean J at the end (0.402), and Gradient descent the highest "
        "(0.405)."
    )


def test_instances_are_told_by_how_many_algorithm_1_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids())

    def slow(spec):
        return 60 if spec.options["instance"] < 8 else 20

    times = {**TIMES, "step-tuned-gd": slow, "armijo": 10**6}
    runs = regression(tmp_path, "figure-2-instances", times)
    near, sooner = prose.sentences(runs.outcome("figure-2-instances"), runs)
    assert near == (
        "J comes within 0.1 of J* in 20 of 20 instances with Algorithm 1 (median 20 "
        "back-propagations), in 20 of 20 with BB with absolute values (30), in 20 of 20 with "
        "Gradient descent (50) and in 0 of 20 with Armijo; the medians cover only the instances "
        "that reach it."
    )
    assert sooner == (
        "Algorithm 1 gets there sooner than Gradient descent on 12 of 20 instances, than BB with "
        "absolute values on 12 of 20 and than Armijo on 20 of 20. Instances on which neither gets "
        "there do not count as sooner."
    )


def test_the_rate_is_told_beside_that_of_the_theorem(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=3))

    def records(spec):
        ks = [2**i for i in range(14) if 2**i <= spec.budget / 2]
        more = {"samples": 0, "seconds": 0.0, "loss": 0.5}
        return [{"bp": 2 * k, "batches": k, **more, "gradient": k**-0.45} for k in ks]

    fill(tmp_path, "rate", records, "small")
    runs = PairedRuns(tmp_path, "small")
    falls, bound = prose.sentences(runs.outcome("rate"), runs)
    assert "k^-0.45 for delta 0.001 (the theorem: k^-0.50); " in falls
    assert "at most the theorem's exponent for 2 of 3 values of delta; where" in bound


def test_methods_without_finished_seeds_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))

    def records(spec):
        missing = spec.method == "adam" or spec.seed > 1
        return None if spec.method in (TUNED, "adam") and missing else tuned_records(spec)

    fill(tmp_path, "figure-4d", records, "short")
    runs = PairedRuns(tmp_path, "short")
    ends, missing = prose.sentences(runs.outcome("figure-4d"), runs)[-2:]
    assert "has the lowest mean plain training loss at the end" in ends
    assert "Step-Tuned" not in ends, "one seed is too few"
    assert missing == (
        "Incomplete: Step-Tuned SGD (1 of 5 seeds). Without a complete seed after the grid search: "
        "Adam."
    )


def test_shares_are_weighted_by_the_iterations_between_records():
    shares = {"at upper": 0.0, "negative curvature": 0.0, "raw gamma median": 1.0}
    records = [
        {"bp": bp, "at lower": lower, **shares} for bp, lower in ((1, 1.0), (10, 1.0), (100, 0.0))
    ]
    (at_lower, _, _), _ = prose._tuning_of_run(records)
    assert at_lower == pytest.approx(0.1)


def test_the_early_raw_gamma_is_that_of_most_iterations_and_not_of_most_records():
    """Records are log-spaced in the first tenth of a run."""
    shares = {"at lower": 0.0, "at upper": 0.0, "negative curvature": 0.0}
    early = [(1, 9.0), (2, 8.0), (4, 7.0), (8, 6.0), (60, 3.0), (100, 2.0)]
    late = [(900, 0.5), (950, 0.4), (1000, 0.3)]
    records = [{"bp": bp, "raw gamma median": raw, **shares} for bp, raw in early + late]
    assert prose._tuning_of_run(records)[1] == [3.0, 0.5]


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 2.0),
        ([3.0, 1.0, 2.0], [5.0, 1.0, 1.0], 3.0),
        ([1.0, np.nan, 2.0], [1.0, 9.0, 3.0], 2.0),
        ([np.nan], [1.0], np.nan),
    ],
)
def test_the_weighted_median(values, weights, expected):
    found = prose.weighted_median(np.array(values), np.array(weights))
    assert found == pytest.approx(expected, nan_ok=True)


def found_at(at, scales):
    """Gamma of Step-Tuned SGD at these scales."""
    found = []
    for scale in scales:
        outcome = at[scale].outcome("figure-6f")
        group = next(g for g in outcome.groups if g.entry.name == TUNED)
        found.append((outcome, prose.tuning_of(group, at[scale].results)))
    return found


def test_few_and_many_images_are_compared_if_both_were_run(store):
    at = PairedAtScales(store)
    (said,) = prose.few_and_many(found_at(at, ("short", "small")), at)
    assert said.startswith(
        "**figure-6f.** With 50,000 training images, 30 epochs, 5 seeds, gamma was inside its "
        "bounds [0.5, 2] in 50% of the iterations, at the lower bound in 50%"
    )
    assert "With 5,000 training images, 300 epochs, 5 seeds, gamma was inside its bounds" in said
    assert (
        "relative to SGD's: median ratio 0.555 [0.554, 0.556], p = 0.031 with many images, and"
        in said
    )
    assert said.endswith("p = 0.031 with few. By the median it is lower with both.")
    assert prose.few_and_many(found_at(at, ("short",)), at) == []


def test_few_and_many_images_may_disagree(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))

    def other(spec):
        more = {"plain loss": lambda share: 1.0 if spec.method == "sgd" else 2.0}
        return [
            {**own, **changed}
            for own, changed in zip(
                tuned_records(spec), records_of(spec, lambda share: 1.0, **more), strict=True
            )
        ]

    fill(tmp_path, "figure-6f", tuned_records, "short")
    fill(tmp_path, "figure-6f", other, "small")
    at = PairedAtScales(tmp_path)
    (said,) = prose.few_and_many(found_at(at, ("short", "small")), at)
    assert said.endswith("By the median it is lower with many and higher with few.")


def test_medians_are_told_where_they_have_another_order_than_means(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))
    ends = {"sgd": 0.2, "rmsprop": 0.16, "adam": 0.15, TUNED: 0.1}

    def records(spec):
        end = 2.0 if (spec.method, spec.seed) == (TUNED, 5) else ends[spec.method]
        return records_of(spec, lambda share: end)

    fill(tmp_path, "figure-6f", records, "short")
    runs = PairedRuns(tmp_path, "short")
    assert prose.sentences(runs.outcome("figure-6f"), runs)[-1] == (
        "Adam has the lowest mean J at the end (0.15), and Step-Tuned SGD the highest (0.48). "
        "Step-Tuned SGD has the lowest median (0.1), and SGD the highest (0.2)."
    )


def test_a_short_last_mini_batch_before_the_records_of_some_methods_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=3))

    def records(spec):
        """40 mini-batches per pass. Step-Tuned SGD reaches the last one at every other record."""
        uses = 2 if spec.method == TUNED else 1
        batches = [bp // uses for bp in range(0, spec.budget + 1, 40)]
        return [
            {"bp": n * uses, "batches": n, "samples": n, "seconds": 0.0, "loss": 1.0}
            | {"plain loss": 0.5 if n % 40 else 0.75}
            for n in batches
        ]

    fill(tmp_path, "figure-6f", records, "small")
    fill(tmp_path, "figure-6f", records, "short")
    at = PairedAtScales(tmp_path)
    last = prose.sentences(at["small"].outcome("figure-6f"), at["small"])[-1]
    assert last == (
        "In the second half of the run, all records of SGD, RMSprop and Adam were taken right "
        "after the last mini-batch of a pass, which has only 8 images instead of 128; so were 50% "
        "of those of Step-Tuned SGD, whose median plain training loss is 0.75 there and 0.5 "
        "elsewhere, which favors Step-Tuned SGD."
    )
    # With all images, the last mini-batch has 80 of 128.
    many = prose.sentences(at["short"].outcome("figure-6f"), at["short"])
    assert not any("last mini-batch" in sentence for sentence in many)


def test_the_readme_and_the_package_contain_the_verdicts(store):
    judged = judge(store)
    readme = "# Title\n\n<!-- verdicts -->\nold\n<!-- end of verdicts -->\n\nThe rest.\n"
    new = results.with_verdicts(readme, judged)
    assert "old" not in new
    told = "Of the paper's 16 claims: 16 not run. Of our own 5 claims: 5 not run."
    assert new.startswith(f"# Title\n\n<!-- verdicts -->\n\n{told}\n")
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


def variant_records(spec):
    """Every method with a tuned step ends at half the loss of the method it is based on."""
    ends = {"sgd": 0.8, "momentum": 0.4, "adamw": 0.2, TUNED: 0.6, "step-tuned-variant": 0.3}
    ends |= {"step-tuned-momentum": 0.2, "step-tuned-adamw": 0.1}
    end = ends[spec.method] * (1 + spec.seed / 100)
    return records_of(spec, lambda share: 2 - (2 - end) * share)


def test_variants_are_compared_with_the_method_they_are_based_on(tmp_path, monkeypatch):
    monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=5))
    for name in ("text", "beyond-f"):
        fill(tmp_path, name, variant_records, "small")
        runs = PairedRuns(tmp_path, "small")
        (table,) = tables.against_base(runs.outcome(name), runs, BY_KEY["loss"])
        rows = {row[0]: row[1:] for row in table.rows}
        assert set(rows) == {
            "Step-Tuned SGD, T = 4 / Step-Tuned SGD",
            "Step-Tuned SGD, T = 16 / Step-Tuned SGD",
            "Step-Tuned SGD, relative / Step-Tuned SGD",
            "Step-Tuned SGD, relative, T = 4 / Step-Tuned SGD",
            "Step-Tuned SGD, relative, T = 16 / Step-Tuned SGD",
            *(
                f"{tuned}, step-tuned{bounds}, T = {T} / {base}"
                for tuned, base in (("Momentum", "SGD with momentum"), ("AdamW", "AdamW"))
                for bounds in ("", ", absolute")
                for T in (1, 4, 16)
            ),
        }
        pairs, ratio, p, below = rows["AdamW, step-tuned, T = 4 / AdamW"]
        assert (pairs, p, below) == ("5", "0.031", "5 of 5")
        assert 0.4 < float(ratio.split()[0]) < 0.6


def test_text_is_among_the_variants_and_has_no_images(tmp_path, monkeypatch):
    small = OnePointGrids(seeds=5)
    monkeypatch.setattr(paired_runs, "experiment_named", small)
    for name in ("text", "figure-6f"):
        records = variant_records if name == "text" else tuned_records
        fill(tmp_path / "out", name, records, "small")
        contents = [small(name, "small").model_dump(mode="json")]
        Store(tmp_path / "out").remember(name, "small", contents, "steptuned reproduce")
    results.write(tmp_path / "out", tmp_path / "page.md", "steptuned results out")
    before, after = (tmp_path / "page.md").read_text().split("## Variants")
    assert "### figure-6f, scale small" in before
    assert "A tenth of the images" in before
    assert "### text, scale small" in after
    assert "4,000 training windows, 10 epochs, 5 seeds." in after
    assert "images" not in after.split("### text")[1].split("## The claims")[0]
    assert "| AdamW, step-tuned, T = 4 / AdamW | 5 |" in after


def test_an_order_needs_three_seeds_and_labels_may_have_commas(tmp_path, monkeypatch):
    for seeds in (2, 3):
        monkeypatch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds=seeds))
        fill(tmp_path / f"{seeds}", "text", variant_records, "small")
        runs = PairedRuns(tmp_path / f"{seeds}", "small")
        said = tables.ranking(runs.outcome("text"), runs.results)
        if seeds == 2:
            assert said == ""
    assert said.startswith("From best to worst at the end, by the mean of the seeds. Lowest J: ")
    assert "; AdamW; " in said
    assert "AdamW, step-tuned, T = 4; " in said
