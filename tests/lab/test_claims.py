"""Each claim of the paper can come out either way, from made-up stores."""

import json
import math

import pytest
from made_up import fill, put, records_of
from test_cli import steptuned
from test_timing import made_up

from steptuned.lab.claims import CLAIMS, TUNED, below, drop_of, judge
from steptuned.lab.problems.table1 import TABLE_1
from steptuned.lab.run import folder_of
from steptuned.lab.store import Store
from steptuned.lab.timing import TIMED, Timing, Timings


def verdict_of(folder, number):
    ((_, judgement),) = judge(folder, [claim for claim in CLAIMS if claim.number == number])
    return judgement


def falling(end, seed=0, speed=1.0, start=1.0):
    """From the start to its end, exponentially; a seed changes it by a thousandth."""
    end = end * (1 + seed / 1000)
    return lambda share: end + (start - end) * math.exp(-8 * speed * share)


# ---------------------------------------------------------------------------------------------- regression


def figure_2(folder, speeds, name="figure-2", scale="demo"):
    def records(spec):
        speed = speeds[spec.method](spec) if callable(speeds[spec.method]) else speeds[spec.method]
        return records_of(spec, falling(0.1, speed=speed), points=200, gradient=lambda _: 1.0)

    return fill(folder, name, records, scale)


FAST = {"step-tuned-gd": 3.0, "barzilai-borwein": 1.0, "armijo": 1.5, "gd": 0.5}


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        (FAST, "reproduced"),
        ({**FAST, "armijo": 9.0}, "not reproduced"),
        ({**FAST, "armijo": lambda spec: 9.0 if spec.seed else 1.5}, "partly"),
    ],
)
def test_claim_1_from_seeds(tmp_path, speeds, verdict):
    figure_2(tmp_path, speeds)
    judgement = verdict_of(tmp_path, 1)
    assert judgement.verdict == verdict, judgement.measured
    assert "Armijo" in judgement.measured
    assert (judgement.scale, judgement.instances) == ("demo", 1)


def test_claim_1_from_instances_with_an_interval(tmp_path):
    speeds = {**FAST, "armijo": 9.0}
    figure_2(tmp_path, speeds, scale="small")
    assert verdict_of(tmp_path, 1).verdict == "not reproduced"
    figure_2(tmp_path, speeds, "figure-2-instances", scale="small")
    judgement = verdict_of(tmp_path, 1)
    assert judgement.verdict == "partly", "sooner than one, not than the other: the instances count, not the seeds"
    assert judgement.instances >= 10
    assert "share" in judgement.measured
    figure_2(tmp_path / "other", FAST, scale="small")
    figure_2(tmp_path / "other", FAST, "figure-2-instances", scale="small")
    assert verdict_of(tmp_path / "other", 1).verdict == "reproduced"


def test_three_instances_are_too_few_for_an_interval(tmp_path):
    figure_2(tmp_path, FAST)
    figure_2(tmp_path, FAST, "figure-2-instances")
    assert verdict_of(tmp_path, 1).instances == 1
    assert verdict_of(tmp_path, 1).verdict == "reproduced"


def test_claim_1_needs_the_long_runs_that_j_star_comes_from(tmp_path):
    outcome = figure_2(tmp_path, FAST)
    winners = {spec.identity for group in outcome.groups for spec in group.specs.values()}
    star = next(spec for spec in outcome.star_specs if spec.identity not in winners)
    (folder_of(Store(tmp_path), star).folder / "result.json").unlink()
    assert verdict_of(tmp_path, 1).verdict == "not run"


GV = {
    "sgd": (0.2, 0.5),
    "exact-gv": (0.3, 4.0),
    "expected-gv": (0.3, 4.0),
    "stochastic-gv": (0.3, 0.7),
    "step-tuned-sgd": (0.3, 3.9),
}


def figure_3(folder, **changes):
    curves = {**GV, **changes}
    budget = {"figure-3": 1, "figure-3-longer": 10}
    for name, factor in budget.items():

        def records(spec, factor=factor, name=name):
            end, speed = curves[spec.method]
            if name == "figure-3-longer" and spec.method == TUNED:
                end, speed = curves.get("longer", (0.15, 0.5))
            return records_of(spec, falling(end, spec.seed, speed * factor), points=250)

        fill(folder, name, records)


@pytest.mark.parametrize(
    ("number", "changes", "verdict"),
    [
        (2, {}, "reproduced"),
        (2, {"exact-gv": (0.3, 0.7)}, "partly"),
        (2, {"exact-gv": (0.3, 0.3)}, "not reproduced"),
        (2, {"exact-gv": (2.0, 4.0)}, "not reproduced"),
        (3, {}, "reproduced"),
        (3, {"stochastic-gv": (0.3, 2.0)}, "partly"),
        (3, {"stochastic-gv": (0.3, 5.0)}, "not reproduced"),
        (3, {"exact-gv": (0.3, 0.3)}, "not reproduced"),
        (4, {}, "reproduced"),
        (4, {"expected-gv": (0.3, 2.0)}, "not reproduced"),
        (5, {}, "reproduced"),
        (5, {"step-tuned-sgd": (0.3, 1.0)}, "partly"),
        (5, {"step-tuned-sgd": (0.3, 0.2)}, "not reproduced"),
        (6, {}, "reproduced"),
        (6, {"longer": (0.4, 1.0)}, "partly"),
        (6, {"sgd": (0.5, 1.0), "longer": (0.9, 1.0)}, "not reproduced"),
    ],
)
def test_claims_2_to_6(tmp_path, number, changes, verdict):
    figure_3(tmp_path, **changes)
    judgement = verdict_of(tmp_path, number)
    assert judgement.verdict == verdict, judgement.measured
    assert judgement.seeds == 2


@pytest.mark.parametrize(
    ("slope", "verdict"),
    [(0.8, "reproduced"), (0.1, "not reproduced"), (lambda delta: 0.8 if delta < 0.2 else 0.05, "partly"), (None, "not run")],
)
def test_claim_16(tmp_path, slope, verdict):
    def records(spec):
        power = slope(spec.hyper["delta"]) if callable(slope) else slope or 0.0
        start = 1.0 if slope is None else 10.0  # without any progress there is nothing to judge
        ks = sorted({round(1.1**i) for i in range(80) if 1.1**i <= spec.budget / 2})
        rows = [
            {"bp": 2 * k, "batches": k, "samples": k, "seconds": 0.0, "loss": 0.5, "gradient": k**-power if k > 1 else start}
            for k in ks
        ]
        return [{**rows[0], "bp": 0, "batches": 0}, *rows]

    fill(tmp_path, "rate", records)
    judgement = verdict_of(tmp_path, 16)
    assert judgement.verdict == verdict, judgement.measured


# ---------------------------------------------------------------------------------------------- networks


ENDS = {"sgd": 0.3, "rmsprop": 0.25, "adam": 0.2, TUNED: 0.1}


def networks(folder, names, ends=None, scale="small", **more):
    """Final losses by experiment and method; those of ENDS where nothing is said."""
    for name in names:

        def records(spec, name=name):
            said = {**ENDS, **(ends or {}).get(name, {})}[spec.method]
            end = said(spec.seed) if callable(said) else said
            return records_of(spec, falling(end, spec.seed), points=100, accuracy=lambda s: s, gamma=lambda _: 1.0, **more)

        fill(folder, name, records, scale)


SIX = ["figure-4a", "figure-4b", "figure-4c", "figure-4d", "figure-6e", "figure-6f"]


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ({}, "reproduced"),
        ({"figure-4b": {"adam": 0.05}}, "partly"),
        ({name: {"adam": 0.01, "rmsprop": 0.01, "sgd": 0.01} for name in SIX[:2]}, "not reproduced"),
        ({name: {TUNED: lambda seed: 0.1 if seed else 0.22} for name in SIX[:2]}, "partly"),
    ],
)
def test_claim_7(tmp_path, ends, verdict):
    networks(tmp_path, SIX[:2], ends)
    judgement = verdict_of(tmp_path, 7)
    assert judgement.verdict == verdict, judgement.measured


@pytest.mark.parametrize(("worse", "verdict"), [(0, "reproduced"), (1, "reproduced"), (2, "partly"), (4, "not reproduced")])
def test_claim_8(tmp_path, worse, verdict):
    networks(tmp_path, SIX, {name: {TUNED: 0.9} for name in SIX[:worse]})
    judgement = verdict_of(tmp_path, 8)
    assert judgement.verdict == verdict, judgement.measured
    assert f"on {6 - worse} of 6" in judgement.measured


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ({"adam": 0.01, "rmsprop": 0.02}, "reproduced"),
        ({"adam": 0.01}, "partly"),
        ({"adam": 0.8, "rmsprop": 0.8}, "not reproduced"),
    ],
)
def test_claim_9(tmp_path, ends, verdict):
    networks(tmp_path, ["figure-4d"], {"figure-4d": ends})
    assert verdict_of(tmp_path, 9).verdict == verdict


def dropping(folder, drop=0.5, gamma=(1.0, 0.5), accuracy=(0.6, 0.7), scale="small", droppers=(TUNED,)):
    for name in SIX[:2]:

        def records(spec):
            def loss(share):
                return (1 - 0.1 * share) * (drop if share > 0.5 and spec.method in droppers else 1.0)

            def step(pair):
                return lambda share: pair[share > 0.5]

            return records_of(spec, loss, points=100, gamma=step(gamma), accuracy=step(accuracy))

        fill(folder, name, records, scale)


@pytest.mark.parametrize(
    ("changes", "ten", "eleven"),
    [
        ({}, "reproduced", "reproduced"),
        ({"gamma": (1.0, 1.0)}, "partly", "reproduced"),
        ({"accuracy": (0.6, 0.6)}, "reproduced", "not reproduced"),
        ({"drop": 1.0}, "not reproduced", "not reproduced"),
        ({"scale": "demo"}, "partly", "partly"),
        ({"droppers": (TUNED, "sgd")}, "partly", "reproduced"),
    ],
    ids=["all", "no change of gamma", "no change of accuracy", "no drop", "one seed", "SGD too"],
)
def test_claims_10_and_11(tmp_path, changes, ten, eleven):
    dropping(tmp_path, **changes)
    assert verdict_of(tmp_path, 10).verdict == ten
    assert verdict_of(tmp_path, 11).verdict == eleven


def test_a_drop_is_found_where_it_is_and_a_short_log_has_none(tmp_path):
    spec = type("Spec", (), {"budget": 1000})
    records = records_of(spec, lambda s: 1.0 if s < 0.4 else 0.5, points=100, gamma=lambda s: 1.0, accuracy=lambda s: 0.5)
    drop = drop_of(records)
    assert drop.at == pytest.approx(0.38, abs=0.021)
    assert drop.fall == pytest.approx(math.log10(2))
    assert drop_of(records_of(spec, lambda s: 1.0, points=20, gamma=lambda s: 1.0, accuracy=lambda s: 0.5)) is None


@pytest.mark.parametrize(("agree", "verdict"), [(True, "reproduced"), (False, "not reproduced")])
def test_claim_12(tmp_path, agree, verdict):
    networks(tmp_path, SIX[:4])
    twice = {}
    for letter in "abcd":
        helps = {"sgd": False, "adam": letter == "c", "rmsprop": letter == "c"}
        twice[f"figure-5{letter}"] = {m: ENDS[m] * (0.5 if good == agree else 2) for m, good in helps.items()}
    networks(tmp_path, twice, twice)
    judgement = verdict_of(tmp_path, 12)
    assert judgement.verdict == verdict, judgement.measured
    assert f"{12 if agree else 0} of 12" in judgement.measured


@pytest.mark.parametrize(
    ("e", "f", "verdict"),
    [(0.3, 0.1, "reproduced"), (0.1, 0.3, "not reproduced"), (0.2, lambda seed: 0.3 if seed == 0 else 0.05, "partly")],
)
def test_claim_13(tmp_path, e, f, verdict):
    networks(tmp_path, SIX[4:], {"figure-6e": {TUNED: e}, "figure-6f": {TUNED: f}})
    assert verdict_of(tmp_path, 13).verdict == verdict


@pytest.mark.parametrize(
    ("smooth", "verdict"),
    [(0.1, "reproduced"), (0.9, "not reproduced"), (lambda seed: 0.31 if seed else 0.3, "partly"), (0.25, "reproduced")],
)
def test_claim_14(tmp_path, smooth, verdict):
    names = [f"activations-{kind}" for kind in ("relu", "elu", "silu")]
    networks(tmp_path, names, {names[1]: {TUNED: smooth}})
    assert verdict_of(tmp_path, 14).verdict == verdict


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, "reproduced"), (-0.5, "not reproduced")])
def test_claim_15(tmp_path, shift, verdict):
    from steptuned.lab.timing import PAPER

    for letter in TABLE_1:
        ratio = PAPER[TUNED][letter] + shift
        seconds = {name: [1.0, 2.0] for name in TIMED} | {TUNED: [ratio, 2 * ratio]}
        assert verdict_of(tmp_path, 15).verdict == "not run", "until all six are measured"
        Timings(tmp_path).save(Timing(letter, "small", 10, seconds, made_up().optimizer, [0.1], {"threads": 1}))
    assert verdict_of(tmp_path, 15).verdict == verdict


# ---------------------------------------------------------------------------------------------- not enough runs


def test_an_empty_store_has_run_nothing(tmp_path):
    judged = judge(tmp_path)
    assert [claim.number for claim, _ in judged] == list(range(1, 17))
    assert {judgement.verdict for _, judgement in judged} == {"not run"}
    assert not any(tmp_path.iterdir()), "judging writes nothing"


def test_one_missing_run_is_not_enough_and_the_next_smaller_scale_is_taken(tmp_path):
    networks(tmp_path, ["figure-4d"], scale="small")
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}}, scale="demo")
    assert verdict_of(tmp_path, 9).scale == "small"
    lost = next(run for run in Store(tmp_path).runs() if run.spec.scale == "small" and run.spec.seed == 1)
    (lost.folder / "result.json").unlink()
    judgement = verdict_of(tmp_path, 9)
    assert judgement.scale == "demo"
    assert judgement.verdict == "partly"
    assert "one seed is not enough" in judgement.measured


def test_a_damaged_log_is_no_evidence(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    run = Store(tmp_path).runs()[0]
    content = run.log_path.read_bytes()
    for damage in (content.replace(b"loss", b"lo$s", 1), b"x" + content[1:]):
        run.log_path.write_bytes(damage)
        judgement = verdict_of(tmp_path, 9)
        assert judgement.verdict == "not run"
        assert "can be trusted" in judgement.measured
    (run.folder / "result.json").write_text('["another"]')
    assert verdict_of(tmp_path, 9).verdict == "not run"


def test_what_is_not_a_number_is_never_smaller():
    assert below([0.1, math.nan], [1.0, 1.0]) == "not reproduced"
    assert below([0.1, math.inf], [math.inf, math.inf]) == "not reproduced"
    assert below([0.1, 0.2], [0.3, math.nan]) == "partly"
    assert below([0.1, 0.2], [math.inf, 0.3]) == "reproduced"


def test_a_run_that_diverged_counts_as_infinitely_bad(tmp_path):
    networks(tmp_path, ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    assert verdict_of(tmp_path, 9).verdict == "reproduced"
    for run in Store(tmp_path).runs():
        if run.spec.method == "adam" and run.spec.seed == 1:
            put(Store(tmp_path), run.spec, [*run.records(), {**run.records()[-1], "loss": math.nan}], "diverged")
    assert verdict_of(tmp_path, 9).verdict == "partly"
    assert "inf" in verdict_of(tmp_path, 9).measured


def test_the_command_prints_the_claims_and_writes_json_and_markdown(tmp_path):
    networks(tmp_path / "out", ["figure-4d"], {"figure-4d": {"adam": 0.01, "rmsprop": 0.02}})
    done = steptuned("claims", tmp_path / "out", "--json", tmp_path / "c.json", "--markdown", tmp_path / "c.md")
    assert done.returncode == 0, done.stderr
    assert "reproduced" in done.stdout
    written = json.loads((tmp_path / "c.json").read_text())
    assert len(written) == 16
    assert written[8]["verdict"] == "reproduced"
    assert written[8]["seeds"] == 2
    assert written[0]["verdict"] == "not run"
    lines = (tmp_path / "c.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == 18
