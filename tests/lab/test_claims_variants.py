"""Claims 18 to 21: what the variants of the method are good for."""

import hashlib
from dataclasses import asdict

import pytest

from made_up import OnePointGrids, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.claims.verdicts import CLAIMS, judge
from steptuned.lab.spec import canonical

TESTS = {
    18: [("every-4", "step-tuned-sgd")],
    19: [("relative", "step-tuned-sgd")],
    20: [("relative-4", "sgd")],
    21: [("step-tuned-momentum-4", "momentum"), ("step-tuned-adamw-4", "adamw")],
}
"""Which entry must end below which, for each claim."""


def store(folder, low, names=("beyond-a", "beyond-f", "text"), seeds=5):
    """Runs in which these entries end lower than all others."""
    experiment_named = OnePointGrids(seeds)
    for name in names:
        experiment = experiment_named(name, "short")
        entries = {(e.method, canonical(e.grid()[0])): e.name for e in experiment.entries}

        def records(spec, entries=entries):
            entry = entries[spec.method, canonical(spec.hyper)]
            end = (0.1 if entry in low else 0.2) + 0.001 * spec.seed
            return records_of(
                spec,
                lambda share: 1 - (1 - end) * share,
                **{"plain loss": lambda share: 1 - (1 - end) * share},
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paired_runs, "experiment_named", experiment_named)
            fill(folder, name, records, "short")
    return folder


def verdict_on(number, folder, seeds=5):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paired_runs, "experiment_named", OnePointGrids(seeds))
        ((_, judgement),) = judge(folder, [CLAIMS[number]])
    return judgement


def test_the_criteria_have_not_changed_since_before_the_runs():
    texts = canonical([asdict(CLAIMS[number].criterion) for number in TESTS])
    assert hashlib.sha256(texts.encode()).hexdigest()[:12] == "6efcf0bca2c5"
    assert {CLAIMS[number].measures for number in TESTS} == {("plain loss",)}


@pytest.mark.parametrize("number", TESTS)
def test_a_claim_holds_if_every_first_entry_ends_below_its_second_on_every_problem(
    tmp_path, number
):
    better = {a for a, _ in TESTS[number]}
    judgement = verdict_on(number, store(tmp_path / "holds", better))
    assert (judgement.verdict, judgement.n) == ("reproduced", 5)
    assert judgement.problems == "(a) (f) text of three"
    assert len(judgement.comparisons) == 3 * len(TESTS[number])
    for a, b in TESTS[number]:
        folder = store(tmp_path / a, better - {a} | {b})
        assert verdict_on(number, folder).verdict == "not reproduced"


def test_problems_without_runs_are_left_out_and_three_seeds_are_only_consistent(tmp_path):
    store(tmp_path, {"relative"}, names=["text"], seeds=3)
    judgement = verdict_on(19, tmp_path, seeds=3)
    assert (judgement.verdict, judgement.problems) == ("consistent", "text of three")


def test_one_problem_on_which_it_does_not_hold_is_enough(tmp_path):
    store(tmp_path, {"relative"}, names=["beyond-f"])
    store(tmp_path, {"step-tuned-sgd"}, names=["text"])
    assert verdict_on(19, tmp_path).verdict == "not reproduced"
