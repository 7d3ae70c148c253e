"""Made-up stores with which each claim of the paper gets each verdict."""

import json
import math
import re

import pytest
from typer.testing import CliRunner

from made_up import CONTROLS, ENVIRONMENT, OnePointGrids, diverge, fill, records_of
from steptuned.lab import paired_runs
from steptuned.lab.claims.criteria import CRITERIA, RULES, criteria_hash, criterion
from steptuned.lab.claims.judging import ALPHA, TUNED, Finding
from steptuned.lab.claims.verdicts import CLAIMS, JUDGED, as_data, combine, judge
from steptuned.lab.cli import app
from steptuned.lab.paired_runs import ENOUGH, FEWEST, Pairs
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.report import results, tables, writing
from steptuned.lab.run import folder_of
from steptuned.lab.store import Store, write_json
from steptuned.lab.table2 import PAPER, TIMED, Timing, Timings
from test_timing import made_up

SIX = ["figure-4a", "figure-4b", "figure-4c", "figure-4d", "figure-6e", "figure-6f"]
PENALTY = 0.1
"""J minus the plain loss."""


@pytest.fixture(autouse=True)
def grids(monkeypatch):
    """Experiments with 5 seeds or 20 instances and one point in every grid."""
    small = OnePointGrids()
    monkeypatch.setattr(paired_runs, "experiment_named", small)
    return small


def judgement_of(folder, number):
    ((_, judgement),) = judge(folder, [CLAIMS[number]])
    return judgement


def falling(end, speed=1.0, start=1.0):
    """A loss that decreases exponentially to its end."""
    return lambda share: end + (start - end) * math.exp(-8 * speed * share)


def runs_of(folder, **wanted):
    """The runs whose spec has these values."""
    return [
        run
        for run in Store(folder).runs()
        if all(getattr(run.spec, key) == value for key, value in wanted.items())
    ]


# ------------------------------------------------------------------------------------- the criteria


def test_the_criteria_have_not_changed_since_they_were_fixed():
    assert criteria_hash() == "56837eeee9e5"


def test_every_criterion_has_one_judge():
    assert [c.number for c in CRITERIA] == list(range(1, 18))
    assert all(CLAIMS[c.number].criterion is c for c in CRITERIA)
    with pytest.raises(ValueError, match="there is no criterion 18 in CRITERIA"):
        criterion(18)


def test_the_numbers_in_the_code_are_those_of_the_rules():
    rules = " ".join(RULES)
    assert f"p <= {ALPHA}" in rules
    assert f"at least {ENOUGH['seeds']} seeds or {ENOUGH['instances']} instances" in rules
    assert f"{FEWEST['seeds']} or {ENOUGH['seeds'] - 1} seeds" in rules
    assert FEWEST["instances"] == ENOUGH["instances"]
    assert all(scale in RULES[4] for scale in JUDGED)
    assert "demo" not in JUDGED


# ---------------------------------------------------------------------------------------- combining


def finding(holds, n=5, scale="small", measure="J", kind="seeds"):
    return Finding(holds, f"{n} pairs", (), Pairs(kind, tuple(range(n))), scale, measure)


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([finding(True)], "reproduced"),
        ([finding(False)], "not reproduced"),
        ([finding(True, 3)], "consistent"),
        ([finding(False, 4)], "inconsistent"),
        ([finding(True, 20, kind="instances")], "reproduced"),
        ([finding(True, measure="plain loss"), finding(False)], "mixed"),
        ([finding(True), finding(False, scale="paper")], "mixed"),
        ([finding(True, 3), finding(False, 4, scale="paper")], "mixed"),
        ([finding(True, 3), finding(True, 5, scale="paper")], "reproduced"),
    ],
)
def test_findings_are_combined(findings, verdict):
    assert combine(findings).verdict == verdict


def test_what_was_measured_names_scale_pairs_and_direction():
    said = combine([finding(True, 3), finding(False, 5, scale="paper")])
    assert (
        said.measured == "small (3 seeds): holds, 3 pairs; paper (5 seeds): does not hold, 5 pairs"
    )
    assert (said.scales, said.n, said.pairs) == (("small", "paper"), 5, "seeds")
    alike = combine([finding(True, measure="plain loss"), finding(True)])
    assert alike.measured == "small (5 seeds): 5 pairs"


# --------------------------------------------------------------------------------------- regression


def figure_2(folder, speeds, scale="small"):
    def records(spec):
        speed = speeds[spec.method]
        speed = speed(spec.options["instance"]) if callable(speed) else speed
        return records_of(spec, falling(0.1, speed), points=50)

    return fill(folder, "figure-2-instances", records, scale)


FAST = {"step-tuned-gd": 3.0, "barzilai-borwein": 1.0, "armijo": 1.5, "gd": 0.5}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"armijo": 9.0}, "not reproduced"),
        ({"armijo": lambda instance: 9.0 if instance < 2 else 1.0}, "reproduced"),
        ({"armijo": lambda instance: 9.0 if instance < 8 else 1.5}, "not reproduced"),
    ],
)
def test_claim_1(tmp_path, changes, verdict):
    figure_2(tmp_path, {**FAST, **changes})
    judgement = judgement_of(tmp_path, 1)
    assert judgement.verdict == verdict, judgement.measured
    assert (judgement.n, judgement.pairs, judgement.scales) == (20, "instances", ("small",))
    assert [c.what for c in judgement.comparisons] == [
        "Algorithm 1 / BB with absolute values",
        "Algorithm 1 / Armijo",
    ]


def test_claim_1_counts_runs_that_never_get_there_as_twice_the_budget(tmp_path):
    figure_2(tmp_path, {**FAST, "armijo": 0.01})
    slow = judgement_of(tmp_path, 1).comparisons[1].result
    fast = judgement_of(tmp_path, 1).comparisons[0].result
    # Within 0.1 of J*: BB after 70 of 250 iterations, Algorithm 1 after 25.
    assert fast.median == pytest.approx(25 / 70)
    assert slow.median == pytest.approx(25 / 500)


def test_claim_1_needs_20_instances_and_the_long_runs_that_j_star_comes_from(tmp_path):
    outcome = figure_2(tmp_path, FAST)
    winners = {spec.identity for group in outcome.groups for spec in group.specs.values()}
    star = next(s for s in outcome.star_specs if s.method == "gd" and s.identity not in winners)
    (folder_of(Store(tmp_path), star).folder / "result.json").unlink()
    judgement = judgement_of(tmp_path, 1)
    assert judgement.verdict == "not run"
    assert "19 of at least 20 instances" in judgement.measured


GV = {
    "sgd": (0.2, 0.5),
    "exact-gv": (0.3, 4.0),
    "expected-gv": (0.3, 4.0),
    "stochastic-gv": (0.3, 0.7),
    TUNED: (0.3, 3.9),
}


def figure_3(folder, longer=None, **changes):
    """Ends and speeds, slightly different for each instance. Instance 0 contradicts the others."""
    curves = {**GV, **changes}

    def records(spec):
        end, speed = curves[spec.method]
        instance = spec.options["instance"]
        factor = 1 + instance / 1000
        if instance == 0:
            end, speed = 1 - end, 5 - speed
        return records_of(spec, falling(end * factor, speed), points=50)

    fill(folder, "figure-3-instances", records, "small")
    if longer is not None:

        def more(spec):
            end, speed = longer if spec.method == TUNED else curves["sgd"]
            return records_of(spec, falling(end, 10 * speed), points=500)

        fill(folder, "figure-3-longer", more, "small")


@pytest.mark.parametrize(
    ("number", "changes", "verdict"),
    [
        (2, {}, "reproduced"),
        (2, {"exact-gv": (0.3, 0.7)}, "not reproduced"),
        (2, {"exact-gv": (0.3, 0.3)}, "not reproduced"),
        (2, {"exact-gv": (0.1, 0.7)}, "reproduced"),
        (3, {}, "reproduced"),
        (3, {"stochastic-gv": (0.3, 2.0)}, "not reproduced"),
        (3, {"exact-gv": (0.3, 0.3)}, "not reproduced"),
        (4, {}, "reproduced"),
        (4, {"expected-gv": (0.303, 4.0)}, "reproduced"),
        (4, {"expected-gv": (0.31, 4.0)}, "not reproduced"),
        (5, {}, "reproduced"),
        (5, {TUNED: (0.3, 1.2)}, "not reproduced"),
        (6, {"longer": (0.15, 0.5)}, "reproduced"),
        (6, {"longer": (0.4, 1.0)}, "not reproduced"),
        (6, {"longer": (0.15, 0.5), "sgd": (0.5, 0.5)}, "not reproduced"),
        (6, {}, "not run"),
    ],
)
def test_claims_2_to_6(tmp_path, number, changes, verdict):
    figure_3(tmp_path, **changes)
    judgement = judgement_of(tmp_path, number)
    assert judgement.verdict == verdict, judgement.measured
    if verdict != "not run":
        expected = (5, "seeds") if number == 6 else (20, "instances")
        assert (judgement.n, judgement.pairs) == expected, "instance 0 chose the hyper-parameters"


def test_the_value_of_an_instance_is_the_mean_over_its_seeds(tmp_path, grids):
    grids.seeds_per_instance = 2

    def records(spec):
        end = 0.3 if spec.method == "exact-gv" else {1: 0.32, 2: 0.27}.get(spec.seed, 0.3)
        return records_of(spec, falling(end, 4.0))

    fill(tmp_path, "figure-3-instances", records, "small")
    judgement = judgement_of(tmp_path, 4)
    assert (judgement.verdict, judgement.n) == ("reproduced", 20)
    (run,) = [
        r for r in runs_of(tmp_path, method="exact-gv", seed=2) if r.spec.options["instance"] == 7
    ]
    (run.folder / "result.json").unlink()
    assert judgement_of(tmp_path, 4).verdict == "not run", "an instance needs all its seeds"


def test_an_instance_that_diverged_counts_against_the_method(tmp_path):
    figure_3(tmp_path)
    assert judgement_of(tmp_path, 4).verdict == "reproduced"
    for run in runs_of(tmp_path, method="expected-gv", seed=1):
        if run.spec.options["instance"] >= 6:
            diverge(tmp_path, run)
    assert judgement_of(tmp_path, 4).verdict == "not reproduced"
    assert judgement_of(tmp_path, 2).verdict == "reproduced", "which does not need it"


def test_instances_on_which_both_methods_diverged_do_not_support_claim_2(tmp_path):
    figure_3(tmp_path, **{"exact-gv": (0.3, 0.7)})
    assert judgement_of(tmp_path, 2).verdict == "not reproduced"
    for method in ("sgd", "exact-gv"):
        for run in runs_of(tmp_path, method=method, seed=1):
            if run.spec.options["instance"] >= 3:
                diverge(tmp_path, run)
    assert judgement_of(tmp_path, 2).verdict == "not reproduced"


@pytest.mark.parametrize(
    ("power", "seeds", "verdict"),
    [
        (lambda delta: 0.8, 20, "reproduced"),
        (lambda delta: 0.1, 20, "not reproduced"),
        (lambda delta: 0.8 if delta < 0.2 else 0.05, 20, "not reproduced"),
        (lambda delta: 0.0, 20, "not run"),
        (lambda delta: 0.8, 19, "not run"),
    ],
)
def test_claim_16(tmp_path, grids, power, seeds, verdict):
    def records(spec):
        start = 10.0 if power(0.0) else 1.0  # without any progress there is nothing to judge
        ks = sorted({round(1.3**i) for i in range(40) if 1.3**i <= spec.budget / 2})
        gradient = [k ** -power(spec.hyper["delta"]) if k > 1 else start for k in ks]
        more = {"samples": 0, "seconds": 0.0, "loss": 0.5}
        return [
            {"bp": 2 * k, "batches": k, **more, "gradient": g}
            for k, g in zip(ks, gradient, strict=True)
        ]

    grids.seeds = seeds
    fill(tmp_path, "rate", records, "small")
    judgement = judgement_of(tmp_path, 16)
    assert judgement.verdict == verdict, judgement.measured
    if verdict == "reproduced":
        assert "delta 0.1: slope -0.800 [-0.800, -0.800], at most -0.400" in judgement.measured
        diverge(tmp_path, runs_of(tmp_path, seed=3)[0])
        assert judgement_of(tmp_path, 16).verdict == "not reproduced"


# ----------------------------------------------------------------------------------------- networks


ENDS = {"sgd": 0.3, "rmsprop": 0.25, "adam": 0.2, TUNED: 0.1}


def networks(folder, names, ends=None, scale="small", j=None, seeds=None):
    """Make runs with these final plain losses by experiment and method; the default is ENDS.

    J is given likewise, or is the plain loss with a penalty.
    """

    def end(said, name, spec):
        value = {**ENDS, **(said or {}).get(name, {})}[spec.method]
        value = value(spec.seed) if callable(value) else value
        return value * (1 + spec.seed / 1000)

    for name in names:

        def records(spec, name=name):
            if seeds is not None and spec.seed not in (0, *seeds):
                return None
            plain = falling(end(ends, name, spec))
            loss = falling(end(j, name, spec)) if j is not None else plain
            more = {"plain loss": plain, "accuracy": lambda share: share}
            return records_of(spec, lambda share: loss(share) + PENALTY, **more)

        fill(folder, name, records, scale)


def test_claim_7(tmp_path):
    networks(tmp_path, ["figure-4a"])
    judgement = judgement_of(tmp_path, 7)
    assert judgement.verdict == "reproduced"
    assert judgement.problems == "(a) of two"
    assert judgement.measured.startswith("small (5 seeds): all 3 hold")
    assert len(judgement.comparisons) == 6, "by plain loss and by J"
    networks(tmp_path, ["figure-4b"], {"figure-4b": {"adam": 0.05}})
    judgement = judgement_of(tmp_path, 7)
    assert judgement.verdict == "not reproduced"
    assert judgement.problems == "(a) (b) of two"
    assert "1 of 6 fail: (b) Step-Tuned SGD / Adam: 1.99 [" in judgement.measured


def test_a_comparison_reports_its_numbers(tmp_path):
    networks(tmp_path, ["figure-4a"])
    first = judgement_of(tmp_path, 7).comparisons[0]
    assert (first.what, first.scale, first.measure) == (
        "(a) Step-Tuned SGD / SGD",
        "small",
        "plain loss",
    )
    assert first.result.median == pytest.approx(1 / 3, rel=2e-2)
    assert first.result.low <= first.result.median <= first.result.high
    assert (first.result.n, first.result.p, first.result.better) == (5, 1 / 32, 1.0)


@pytest.mark.parametrize(
    ("seeds", "adam", "verdict"),
    [
        ((1, 2, 3, 4, 5), 0.2, "reproduced"),
        ((1, 2, 4, 5), 0.2, "consistent"),
        ((1, 3, 5), 0.2, "consistent"),
        ((1, 3, 5), 0.05, "inconsistent"),
        ((1, 2, 3), lambda seed: 0.05 if seed == 2 else 0.2, "inconsistent"),
        ((1, 2), 0.2, "not run"),
        ((1, 2, 3, 4, 5), lambda seed: 0.099 if seed == 2 else 0.2, "not reproduced"),
    ],
)
def test_the_number_of_complete_seeds_decides_how_certain_a_verdict_is(
    tmp_path, seeds, adam, verdict
):
    networks(tmp_path, ["figure-4a"], {"figure-4a": {"adam": adam}}, seeds=seeds)
    judgement = judgement_of(tmp_path, 7)
    assert judgement.verdict == verdict, judgement.measured
    assert judgement.n == (0 if verdict == "not run" else len(seeds))


def test_only_seeds_that_are_complete_in_all_compared_entries_are_pairs(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    for method, seed in (("adam", 1), ("sgd", 2)):
        (run,) = runs_of(tmp_path, method=method, seed=seed)
        (run.folder / "result.json").unlink()
    judgement = judgement_of(tmp_path, 9)
    assert (judgement.verdict, judgement.n) == ("consistent", 3)


@pytest.mark.parametrize(
    ("names", "worse", "verdict"),
    [
        (SIX, 0, "reproduced"),
        (SIX, 1, "reproduced"),
        (SIX, 2, "not reproduced"),
        (SIX[2:], 1, "reproduced"),
        (SIX[3:], 0, "not run"),
    ],
)
def test_claim_8(tmp_path, names, worse, verdict):
    networks(tmp_path, names, {name: {TUNED: 0.9} for name in names[:worse]})
    judgement = judgement_of(tmp_path, 8)
    assert judgement.verdict == verdict, judgement.measured
    if names == SIX[2:]:
        assert judgement.problems == "(c) (d) (e) (f) of six"
        assert "below SGD on (d) (e) (f)" in judgement.measured


def test_a_scale_with_too_few_problems_is_named(tmp_path):
    networks(tmp_path, SIX)
    networks(tmp_path, SIX[4:], scale="short")
    judgement = judgement_of(tmp_path, 8)
    assert (judgement.verdict, judgement.scales) == ("reproduced", ("small",))
    expected = "; short: not judged, runs of (e) (f) only; 4 of the six problems are needed"
    assert judgement.measured.endswith(expected)


def test_a_claim_about_several_problems_is_as_certain_as_the_least_certain_of_them(tmp_path):
    networks(tmp_path, SIX[1:])
    networks(tmp_path, SIX[:1], seeds=(1, 2, 3))
    judgement = judgement_of(tmp_path, 8)
    assert (judgement.verdict, judgement.n) == ("consistent", 3)
    assert "seeds: (a) 3, (b) (c) (d) (e) (f) 5" in judgement.measured


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ({"adam": 0.01, "rmsprop": 0.02}, "reproduced"),
        ({"adam": 0.01}, "not reproduced"),
        ({"adam": 0.8, "rmsprop": 0.8}, "not reproduced"),
    ],
)
def test_claim_9(tmp_path, ends, verdict):
    networks(tmp_path, ["figure-4d"], {"figure-4d": ends})
    judgement = judgement_of(tmp_path, 9)
    assert judgement.verdict == verdict, judgement.measured
    assert len(judgement.comparisons) == 8


def test_a_claim_is_mixed_if_plain_loss_and_j_disagree(tmp_path):
    adaptive = {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}}
    networks(tmp_path, ["figure-4d"], adaptive, j={})
    judgement = judgement_of(tmp_path, 9)
    assert judgement.verdict == "mixed"
    assert "plain loss: holds" in judgement.measured
    assert "J: does not hold" in judgement.measured


def test_a_claim_is_mixed_if_two_scales_disagree(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    assert judgement_of(tmp_path, 9).verdict == "reproduced"
    networks(tmp_path, ["figure-4d"], scale="paper", seeds=(1, 2, 3))
    judgement = judgement_of(tmp_path, 9)
    assert (judgement.verdict, judgement.scales) == ("mixed", ("small", "paper"))
    assert {c.scale for c in judgement.comparisons} == {"small", "paper"}
    networks(tmp_path / "other", ["figure-4d"], scale="demo")
    assert judgement_of(tmp_path / "other", 9).verdict == "not run", "scale demo is never judged"


def dropping(
    folder,
    drop=0.5,
    gamma=(1.0, 0.5),
    accuracy=(0.6, 0.7),
    droppers=(TUNED,),
    failing=(),
    names=SIX[:2],
):
    """Runs whose loss, gamma and accuracy change in the middle; the failing seeds have no drop."""

    def records(spec):
        has_drop = spec.method in droppers and spec.seed not in failing

        def loss(share):
            return (1 - 0.1 * share) * (drop if share > 0.5 and has_drop else 1.0)

        def step(pair):
            return lambda share: pair[share > 0.5]

        more = {"plain loss": loss, "gamma": step((9, 9)), "gamma median": step(gamma)}
        return records_of(spec, loss, points=100, accuracy=step(accuracy), **more)

    for name in names:
        fill(folder, name, records, "small")


@pytest.mark.parametrize(
    ("changes", "ten", "eleven"),
    [
        ({}, "reproduced", "reproduced"),
        ({"names": ["figure-4b"]}, "reproduced", "reproduced"),
        ({"failing": (3,)}, "reproduced", "reproduced"),
        ({"failing": (3, 4)}, "not reproduced", "reproduced"),
        ({"gamma": (1.0, 0.8)}, "not reproduced", "reproduced"),
        ({"accuracy": (0.6, 0.61)}, "reproduced", "not reproduced"),
        ({"drop": 1.0}, "not reproduced", "not reproduced"),
        ({"droppers": (TUNED, "sgd")}, "not reproduced", "reproduced"),
    ],
    ids=["all", "one problem", "one exception", "two", "gamma", "accuracy", "no drop", "SGD too"],
)
def test_claims_10_and_11(tmp_path, changes, ten, eleven):
    dropping(tmp_path, **changes)
    for number, verdict in ((10, ten), (11, eleven)):
        judgement = judgement_of(tmp_path, number)
        assert judgement.verdict == verdict, judgement.measured
        assert (judgement.n, judgement.pairs) == (5, "seeds")
        letters = "(b)" if "names" in changes else "(a) (b)"
        assert judgement.problems == f"{letters} of two"


def test_a_single_drop_without_a_rise_is_not_excused(tmp_path):
    dropping(tmp_path, accuracy=(0.6, 0.6), failing=(2, 3, 4, 5), names=["figure-4a"])
    judgement = judgement_of(tmp_path, 11)
    assert judgement.verdict == "not reproduced"
    assert "a single drop cannot be the exception" in judgement.measured


def two_drops(folder, accuracy):
    """Runs of figure-4a that drop twice: first without a change of gamma, then less, with one."""

    def records(spec):
        def loss(share):
            fall = (0.3 if share > 0.3 else 1.0) * (0.6 if share > 0.6 else 1.0)
            return (1 - 0.1 * share) * (fall if spec.method == TUNED else 1.0)

        def gamma(share):
            return 0.5 if share > 0.6 else 1.0

        more = {"plain loss": loss, "gamma median": gamma, "accuracy": accuracy}
        return records_of(spec, loss, points=100, **more)

    fill(folder, "figure-4a", records, "small")


def test_a_drop_by_gamma_counts_even_if_another_drop_is_larger(tmp_path):
    two_drops(tmp_path, accuracy=lambda share: 0.6 if share > 0.3 else 0.5)
    judgement = judgement_of(tmp_path, 10)
    assert judgement.verdict == "reproduced", judgement.measured
    assert judgement_of(tmp_path, 11).verdict == "not reproduced", "it rises with the other drop"
    two_drops(tmp_path, accuracy=lambda share: 0.6 if share > 0.6 else 0.5)
    judgement = judgement_of(tmp_path, 11)
    assert judgement.verdict == "reproduced"
    assert "in 5 of 5 runs that have one (95 % interval 57% to 100%)" in judgement.measured
    assert "by a median of 10 points" in judgement.measured


def test_a_diverged_run_has_no_drop(tmp_path):
    dropping(tmp_path, failing=(3,), names=["figure-4a"])
    assert judgement_of(tmp_path, 10).verdict == "reproduced"
    (run,) = runs_of(tmp_path, method=TUNED, seed=1)
    diverge(tmp_path, run)
    judgement = judgement_of(tmp_path, 10)
    assert judgement.verdict == "not reproduced"
    assert "sudden drops in 3 of 5 runs" in judgement.measured


def test_records_too_far_apart_for_a_drop_are_not_judged(tmp_path):
    networks(tmp_path, ["figure-4a"])
    assert "too far apart" in judgement_of(tmp_path, 10).measured


def uses(letters, wrong=0):
    """Final losses with two uses of a mini-batch: as in the paper, except for some cases."""
    twice = {}
    for letter in letters:
        helps = {"sgd": False, "adam": letter == "c", "rmsprop": letter == "c"}
        twice[f"figure-5{letter}"] = {
            m: ENDS[m] * (0.5 if good else 2) for m, good in helps.items()
        }
    for method in ("adam", "sgd")[:wrong]:
        twice[f"figure-5{letters[0]}"][method] = ENDS[method]
    return twice


@pytest.mark.parametrize(
    ("letters", "wrong", "verdict"),
    [
        ("abcd", 0, "reproduced"),
        ("ac", 1, "reproduced"),
        ("ac", 2, "not reproduced"),
        ("a", 0, "not run"),
    ],
)
def test_claim_12(tmp_path, letters, wrong, verdict):
    networks(tmp_path, [f"figure-4{letter}" for letter in letters])
    twice = uses(letters, wrong)
    networks(tmp_path, twice, twice)
    judgement = judgement_of(tmp_path, 12)
    assert judgement.verdict == verdict, judgement.measured
    if verdict != "not run":
        cases = 3 * len(letters)
        assert judgement.problems == f"{' '.join(f'({letter})' for letter in letters)} of four"
        assert f"in {cases - wrong} of {cases} cases" in judgement.measured


@pytest.mark.parametrize(
    ("e", "f", "verdict"),
    [
        (0.3, 0.1, "reproduced"),
        (0.1, 0.3, "not reproduced"),
        (0.2, lambda seed: 0.3 if seed < 3 else 0.15, "not reproduced"),
    ],
)
def test_claim_13(tmp_path, e, f, verdict):
    networks(tmp_path, SIX[4:], {"figure-6e": {TUNED: e}, "figure-6f": {TUNED: f}})
    judgement = judgement_of(tmp_path, 13)
    assert judgement.verdict == verdict, judgement.measured
    assert len(judgement.comparisons) == 2


def test_claim_13_pairs_the_seeds_of_both_problems(tmp_path):
    networks(tmp_path, ["figure-6e"], {"figure-6e": {TUNED: 0.3}}, seeds=(1, 2, 3, 4))
    networks(tmp_path, ["figure-6f"], seeds=(2, 3, 4, 5))
    judgement = judgement_of(tmp_path, 13)
    assert (judgement.verdict, judgement.n) == ("consistent", 3)
    for run in runs_of(tmp_path, seed=2):  # on both problems, both methods: a tie
        diverge(tmp_path, run)
    judgement = judgement_of(tmp_path, 13)
    assert judgement.verdict == "inconsistent"
    assert judgement.comparisons[0].result.better == pytest.approx(2.5 / 3)


@pytest.mark.parametrize(
    ("smooth", "verdict"), [(0.1, "reproduced"), (0.9, "not reproduced"), (None, "not run")]
)
def test_claim_14(tmp_path, smooth, verdict):
    names = [f"activations-{kind}" for kind in ("relu", "elu", "silu")]
    names = names if smooth is not None else names[:2]
    networks(tmp_path, names, {names[1]: {TUNED: smooth or 0.1}})
    judgement = judgement_of(tmp_path, 14)
    assert judgement.verdict == verdict, judgement.measured


def time_all(folder, shift=0.0, rounds=15, scale="small", letters=tuple(TABLE_1), **environment):
    for letter in letters:
        ratio = PAPER[TUNED][letter] + (shift if letter == "e" else 0.0)
        seconds = {name: [1.0 + i for i in range(rounds)] for name in TIMED}
        seconds[TUNED] = [ratio * second for second in seconds["sgd"]]
        where = {"threads": 1, "criteria": criteria_hash(), **environment}
        Timings(folder).save(Timing(letter, scale, 10, seconds, made_up().optimizer, [0.1], where))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"shift": 0.09}, "reproduced"),
        ({"shift": -0.11}, "not reproduced"),
        ({"rounds": 14}, "not run"),
        ({"scale": "demo"}, "not run"),
        ({"letters": "abcde"}, "not run"),
    ],
)
def test_claim_15(tmp_path, changes, verdict):
    time_all(tmp_path, **changes)
    judgement = judgement_of(tmp_path, 15)
    assert judgement.verdict == verdict, judgement.measured
    if verdict != "not run":
        assert (judgement.n, judgement.pairs) == (15, "rounds")
        assert judgement.problems == "(a) (b) (c) (d) (e) (f) of six"


def controls(folder, names=("controls-f", "controls-a"), **ends):
    ends = {**dict.fromkeys(CONTROLS, 0.3), TUNED: 0.1, **ends}

    def records(spec, name):
        experiment = paired_runs.experiment_named(name, "small")
        (entry,) = [
            e.name
            for e in experiment.entries
            if (e.method, e.grid()[0]) == (spec.method, spec.hyper)
        ]
        end = ends[entry](name, spec.seed) if callable(ends[entry]) else ends[entry]
        plain = falling(end * (1 + spec.seed / 1000))
        return records_of(spec, lambda share: plain(share) + PENALTY, **{"plain loss": plain})

    for name in names:
        fill(folder, name, lambda spec, name=name: records(spec, name), "small")


@pytest.mark.parametrize(
    ("ends", "verdict", "said"),
    [
        ({"finer": 0.2}, "reproduced", "(f) step-tuned-sgd / finer"),
        ({"constant-2": 0.09}, "not reproduced", "step-tuned-sgd / constant-2"),
        (
            {"twice": lambda name, seed: 0.05 if name == "controls-a" else 0.3},
            "not reproduced",
            "(a) step-tuned-sgd / twice",
        ),
        ({"finer": lambda name, seed: 0.09 if seed == 1 else 0.2}, "not reproduced", "finer"),
    ],
)
def test_claim_17(tmp_path, ends, verdict, said):
    controls(tmp_path, **ends)
    judgement = judgement_of(tmp_path, 17)
    assert judgement.verdict == verdict, judgement.measured
    assert said in judgement.measured
    assert {c.measure for c in judgement.comparisons} == {"plain loss"}


def test_claim_17_needs_every_control(tmp_path):
    controls(tmp_path, names=["controls-f"])
    judgement = judgement_of(tmp_path, 17)
    assert judgement.problems == "(f) of two"
    assert judgement.measured.count("step-tuned-sgd / ") == 1, "said once"
    (run,) = [run for run in runs_of(tmp_path, seed=2) if run.spec.hyper.get("uses") == 2]
    (run.folder / "result.json").unlink()
    assert judgement_of(tmp_path, 17).verdict == "consistent"


def test_a_claim_on_an_unknown_experiment_is_not_run(tmp_path, monkeypatch):
    controls(tmp_path, names=["controls-f"])

    def absent(name, scale):
        raise paired_runs.MissingRuns(f"there is no experiment {name}")

    monkeypatch.setattr(paired_runs, "experiment_named", absent)
    judgement = judgement_of(tmp_path, 17)
    assert judgement.verdict == "not run"
    assert "there is no experiment controls-f" in judgement.measured


# --------------------------------------------------------------------------------- which runs count


def test_all_claims_are_not_run_in_an_empty_store(tmp_path):
    judged = judge(tmp_path)
    assert [claim.number for claim, _ in judged] == sorted(CLAIMS)
    assert {judgement.verdict for _, judgement in judged} == {"not run"}
    assert all(judgement.measured.startswith("runs missing (small: ") for _, judgement in judged)
    assert not any(tmp_path.iterdir()), "judging writes nothing"


def test_the_experiments_of_the_package_are_judged_with_their_whole_grids(
    tmp_path, monkeypatch, grids
):
    monkeypatch.setattr(paired_runs, "experiment_named", grids._named)
    adaptive = {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}}
    networks(tmp_path, ["figure-4d"], adaptive, scale="paper")
    experiment = paired_runs.experiment_named("figure-4d", "paper")
    judgement = judgement_of(tmp_path, 9)
    assert judgement.verdict == ("reproduced" if experiment.seeds >= 5 else "consistent")
    assert judgement.n == experiment.seeds
    grid = [run for run in runs_of(tmp_path, method="adam", seed=0) if run.spec.hyper["lr"] == 1e-4]
    (grid[0].folder / "result.json").unlink()
    assert judgement_of(tmp_path, 9).verdict == "not run", (
        "without its whole grid a winner is not known"
    )


def test_the_stored_experiment_is_judged_instead_of_the_packaged_one(tmp_path, monkeypatch, grids):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    edited = grids("figure-4d", "small")
    monkeypatch.setattr(paired_runs, "experiment_named", grids._named)
    assert judgement_of(tmp_path, 9).verdict == "not run", "the grids of the package were not run"
    Store(tmp_path).remember(
        "figure-4", "small", [edited.model_dump(mode="json")], "steptuned run mine.toml"
    )
    assert judgement_of(tmp_path, 9).verdict == "reproduced"


def test_runs_that_a_claim_does_not_need_may_be_missing(tmp_path):
    networks(tmp_path, SIX[4:], {"figure-6e": {TUNED: 0.3}})
    for run in runs_of(tmp_path, method="adam"):
        (run.folder / "result.json").unlink()
    assert judgement_of(tmp_path, 13).verdict == "reproduced"


def test_seed_0_is_not_among_the_pairs(tmp_path):
    worse_on_0 = {"figure-4a": {TUNED: lambda seed: 0.1 if seed else 9.0}}
    networks(tmp_path, ["figure-4a"], worse_on_0)
    assert judgement_of(tmp_path, 7).verdict == "reproduced"


def test_a_damaged_log_does_not_count(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    for method in ("adam", "sgd"):
        (run,) = runs_of(tmp_path, method=method, seed=4)
        content = run.log_path.read_bytes()
        run.log_path.write_bytes(content.replace(b"loss", b"lo$s", 1))
    assert (judgement_of(tmp_path, 9).verdict, judgement_of(tmp_path, 9).n) == ("consistent", 4)
    for run in runs_of(tmp_path, method="adam"):
        (run.folder / "result.json").write_text('["another"]')
    assert judgement_of(tmp_path, 9).verdict == "not run"


def test_logs_without_the_plain_loss_are_not_judged(tmp_path):
    def records(spec):
        return records_of(spec, falling(ENDS[spec.method]))

    fill(tmp_path, "figure-4d", records, "small")
    judgement = judgement_of(tmp_path, 9)
    assert judgement.verdict == "not run"
    assert "no plain loss" in judgement.measured


@pytest.mark.parametrize(("seeds", "verdict"), [((2,), "not reproduced"), ((), "reproduced")])
def test_a_run_that_diverged_is_worse_than_any_other(tmp_path, seeds, verdict):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    for seed in seeds:
        diverge(tmp_path, *runs_of(tmp_path, method="adam", seed=seed))
    for run in runs_of(tmp_path, method="sgd"):
        if run.spec.seed:
            diverge(tmp_path, run)  # all of them: Adam is better where it has not diverged
    judgement = judgement_of(tmp_path, 9)
    assert judgement.verdict == verdict, judgement.measured
    against_sgd = judgement.comparisons[0].result
    assert (against_sgd.median, against_sgd.better) == (0.0, 1 - 0.1 * len(seeds))


# ----------------------------------------------------------------------------------- other criteria


def test_runs_that_were_made_under_other_criteria_are_counted(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    assert judgement_of(tmp_path, 9).other_criteria == 0
    for run in runs_of(tmp_path, method="adam"):
        write_json(run.folder / "environment.json", {**ENVIRONMENT, "criteria": "another"})
    none = {key: value for key, value in ENVIRONMENT.items() if key != "criteria"}
    (first, second, third) = runs_of(tmp_path, method="sgd")[:3]
    write_json(first.folder / "environment.json", none)
    (second.folder / "environment.json").unlink()
    write_json(third.folder / "environment.json", {**ENVIRONMENT, "resumed in": [none]})
    assert judgement_of(tmp_path, 9).other_criteria == 8, "five of Adam and three"
    assert judgement_of(tmp_path, 7).other_criteria == 0, "which is based on other runs"


def test_timings_made_under_other_criteria_are_counted(tmp_path):
    time_all(tmp_path)
    assert judgement_of(tmp_path, 15).other_criteria == 0
    time_all(tmp_path, criteria="another")
    assert judgement_of(tmp_path, 15).other_criteria == 6


# ------------------------------------------------------------------------------------ what is shown


def test_every_list_of_claims_says_which_problems_are_in(tmp_path, monkeypatch):
    networks(tmp_path / "out", ["figure-4a"])
    networks(tmp_path / "out", SIX[:2], scale="paper")
    judged = judge(tmp_path / "out", [CLAIMS[7], CLAIMS[9]])
    said = "(a) of two (small), (a) (b) of two (paper)"
    assert [one["problems"] for one in as_data(judged)] == [said, ""]
    assert f"| reproduced | {said} | 5 seeds | small, paper |" in results.with_verdicts(
        "<!-- verdicts -->\n<!-- end of verdicts -->", judged
    )
    assert (
        tables.claim_block(*judged[0], 80)
        .splitlines()[0]
        .endswith(f"7. reproduced, {said}, 5 seeds, scale small, paper")
    )
    assert f"| {said} | 5 seeds |" in tables.claims(judged)[0].markdown()
    packaged = json.loads(results.as_published(judged))
    assert [one["problems"] for one in packaged] == [said, ""]
    packaged[0]["other_criteria"] = 2
    monkeypatch.setattr(writing, "published", lambda: packaged)
    page = writing.write(tmp_path / "out", tmp_path / "report", "steptuned report").read_text()
    assert f"<td>{said}</td>" in page
    (cell,) = re.findall(r'<td class="packaged">(✔\s+reproduced.*?)</td>', page, re.DOTALL)
    assert f"({said}, 5 seeds, small, paper)" in " ".join(cell.split())
    assert "made under other criteria: 2 runs" in cell


def test_the_data_are_valid_json_even_if_runs_diverged(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    for run in runs_of(tmp_path, method="sgd"):
        if run.spec.seed:
            diverge(tmp_path, run)
    (data,) = json.loads(json.dumps(as_data(judge(tmp_path, [CLAIMS[9]])), allow_nan=False))
    assert data["criterion"] == criterion(9).criterion
    assert (data["verdict"], data["n"], data["pairs"], data["scales"]) == (
        "reproduced",
        5,
        "seeds",
        ["small"],
    )
    first = data["comparisons"][0]
    assert first == {
        "what": "(d) Adam / SGD",
        "scale": "small",
        "measure": "plain loss",
        "pairs": "seeds",
        "kind": "ratio",
        "n": 5,
        "wins": 5,
        "median": 0.0,
        "low": 0.0,
        "high": 0.0,
        "p": 1 / 32,
        "better": 1.0,
        "below": True,
    }


def test_performance_profiles_include_the_complete_problems(tmp_path):
    networks(tmp_path, ["figure-4a", "figure-6e"], {"figure-6e": {"sgd": 0.05}})
    networks(tmp_path, ["figure-4d"], seeds=(1,))
    networks(tmp_path, ["figure-4a"], scale="paper")
    (table,) = tables.profiles(paired_runs.PairedAtScales(tmp_path))
    assert "(small), problems (a) (e): " in table.title
    assert table.columns == ["method", "1", "1.1", "1.5", "2", "5"]
    shares = {row[0]: row[1:] for row in table.rows}
    assert shares["Step-Tuned SGD"] == ["50%", "50%", "50%", "100%", "100%"]
    assert shares["SGD"] == ["50%", "50%", "50%", "50%", "100%"]
    assert shares["Adam"] == ["0%", "0%", "0%", "50%", "100%"]


def test_the_results_page_has_the_judged_claims(tmp_path):
    networks(tmp_path / "out", ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    results.write(tmp_path / "out", tmp_path / "results.md", "steptuned results out")
    text = (tmp_path / "results.md").read_text()
    assert "| 9 | reproduced |" in text
    assert criterion(9).criterion in text
    assert "Not judged (runs missing): 1, 2, 3, 4, 5, 6, 7, 8, 10," in text


def test_the_report_shows_verdict_criterion_interval_and_other_criteria(tmp_path):
    networks(
        tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}}, seeds=(1, 2, 3)
    )
    for run in runs_of(tmp_path, method="adam"):
        write_json(run.folder / "environment.json", {})
    page = writing.write(tmp_path, tmp_path / "report", "steptuned report").read_text()
    assert '<span class="verdict consistent">(✔) consistent</span> 1' in " ".join(page.split())
    assert page.count('<span class="verdict consistent">') == 2
    assert "made under other criteria: 3 runs" in page
    assert criterion(9).criterion.replace("'", "&#39;") in page
    assert re.search(r"the largest p: \(d\) Adam / SGD: 0\.0\d+ \[.*\], p = 0\.12", page)
    assert "<td>3 seeds</td>" in page
    assert "The 8 comparisons behind the verdicts" in page
    data = json.loads((tmp_path / "report" / "claims.json").read_text())
    assert (data[8]["verdict"], data[8]["other_criteria"]) == ("consistent", 3)


def test_the_command_prints_the_claims_and_writes_json_and_markdown(tmp_path):
    networks(tmp_path / "out", ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    (run,) = runs_of(tmp_path / "out", method="adam", seed=3)
    write_json(run.folder / "environment.json", {})
    written = [str(tmp_path / name) for name in ("c.json", "c.md")]
    command = ["claims", str(tmp_path / "out"), "--json", written[0], "--markdown", written[1]]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "reproduced" in done.stdout
    lines = done.stdout.splitlines()
    block = lines.index("  ✔  9. reproduced, 5 seeds, scale small")
    assert lines[block + 1].strip() == criterion(9).text
    assert "made under other criteria: 1 run" in " ".join(done.stdout.split())
    assert max(map(len, lines)) <= 80
    data = json.loads((tmp_path / "c.json").read_text())
    assert len(data) == len(CLAIMS)
    assert (data[8]["verdict"], data[8]["n"], data[8]["other_criteria"]) == ("reproduced", 5, 1)
    assert data[0]["verdict"] == "not run"
    text = (tmp_path / "c.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| 9 | reproduced |")]
    assert "5 seeds" in row
    assert "small" in row
    assert re.search(r"p = 0\.031", row)
    assert "made under other criteria: 1 run" in row
    assert criterion(9).criterion in text
    assert "| 9 | (d) Adam / SGD | small | plain loss | 5 seeds |" in text
    assert "| 1 | not run |" in text
