"""Curves of runs: smoothing, levels and drops."""

import math

import numpy as np
import pytest

from made_up import records_of
from steptuned.lab.claims.criteria import criterion
from steptuned.lab.curves import Curve, curve_of, sudden_drops
from steptuned.lab.paired_runs import experiment_named

LIMITS = criterion(10).thresholds


class Spec:
    budget = 1000


def curve(*values):
    return Curve(np.arange(len(values), dtype=float), np.array(values, dtype=float))


def test_the_running_median_ignores_a_spike_and_is_shorter_at_the_ends():
    assert curve(1, 2, 90, 4, 5, 6).smoothed(3).values.tolist() == [1.5, 2, 4, 5, 5, 5.5]


def test_a_curve_has_values_levels_and_stretches():
    c = curve(5, 4, 3, 2, 3)
    assert (c.at(2), c.at(2.9), c.at(99)) == (3, 3, 3)
    assert (c.first_below(3), c.first_below(2)) == (3, math.inf)
    assert c.between(1, 3).tolist() == [4, 3, 2]


def test_a_measure_missing_from_a_record_is_nan():
    found = curve_of([{"bp": 0}, {"bp": 2, "loss": 1.0}], "loss")
    assert found.bp.tolist() == [0, 2]
    assert math.isnan(found.values[0])


def made(loss, points=100, gamma=lambda s: 1.0, accuracy=lambda s: 0.5):
    return records_of(Spec, loss, points=points, gamma=gamma, accuracy=accuracy)


def largest(drops):
    return max(drops, key=lambda drop: drop.fall)


def test_a_drop_is_located():
    def step(share):
        return 1.0 if share < 0.4 else 0.5

    drop = largest(sudden_drops(made(step, gamma=step, accuracy=step), "loss", LIMITS))
    assert drop.at == pytest.approx(0.385, abs=0.016)
    assert drop.fall == pytest.approx(math.log10(2))
    assert drop.gamma == (1.0, 0.5)
    assert drop.rise == -0.5
    assert drop.is_caused_by_gamma(LIMITS)
    assert not largest(sudden_drops(made(step), "loss", LIMITS)).is_caused_by_gamma(LIMITS)


@pytest.mark.parametrize(
    "loss",
    [
        lambda s: 1.0 if s < 0.05 else 0.5,
        lambda s: 1.0 if s < 0.95 else 0.5,
        lambda s: 1.0 if s < 0.4 else 0.85,
        lambda s: 10 ** (-10 * s) / (1 if s < 0.4 else 10**0.3),
    ],
    ids=["at the beginning", "at the end", "too small", "not more than usual"],
)
def test_falls_at_the_ends_or_too_small_are_not_sudden_drops(loss):
    assert sudden_drops(made(loss), "loss", LIMITS) == []


def test_the_recovery_from_a_spike_is_not_a_drop():
    loss = made(lambda s: 9.0 if 0.3 < s < 0.5 else 1 - s / 2)
    assert sudden_drops(loss, "loss", LIMITS) == []


def test_unevenly_spaced_records_do_not_move_the_drop():
    records = made(lambda s: 1.0 if s < 0.4 else 0.5)
    early = [{**records[0], "bp": bp} for bp in range(1, 10)]
    assert sudden_drops([records[0], *early, *records[1:]], "loss", LIMITS) == sudden_drops(
        records, "loss", LIMITS
    )


def test_records_too_far_apart_have_no_drop():
    assert sudden_drops(made(lambda s: 1.0 if s < 0.4 else 0.5, points=20), "loss", LIMITS) is None


def test_all_drops_of_a_run_are_found():
    def loss(share):
        return 1.0 if share < 0.3 else 0.3 if share < 0.6 else 0.15

    def gamma(share):
        return 1.0 if share < 0.6 else 0.5

    drops = sudden_drops(made(loss, gamma=gamma), "loss", LIMITS)
    assert {round(drop.at, 1) for drop in drops} == {0.3, 0.6}
    assert not largest(drops).is_caused_by_gamma(LIMITS)
    assert {round(d.at, 1) for d in drops if d.is_caused_by_gamma(LIMITS)} == {0.6}


@pytest.mark.parametrize("log_every", [150, 195, 196, 300, 391])
def test_a_window_is_a_fiftieth_of_the_run_wherever_its_records_are(log_every):
    """A loss that is steep over a stretch, logged as figure-4a is at scale short."""
    experiment = experiment_named("figure-4a", "short")
    entry = next(entry for entry in experiment.entries if entry.name == "step-tuned-sgd")
    spec = experiment.spec(entry, entry.grid()[0], 1, 0, experiment.budget)
    spec = spec.model_copy(update={"log_every": log_every})
    steps = [0]
    while steps[-1] < spec.budget:
        steps.append(min(spec.next_record(steps[-1]), spec.budget))

    def log(share):
        return -8 * min(max(share - 0.3, 0.0), 0.1)

    records = [{"bp": step, "loss": 10 ** log(step / spec.budget)} for step in steps]
    falls = [drop.fall for drop in sudden_drops(records, "loss", LIMITS)]
    assert max(falls) == pytest.approx(8 * LIMITS["window"], rel=1e-9)
