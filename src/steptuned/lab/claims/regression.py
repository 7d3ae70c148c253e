"""Judges of claims 1 to 6 and 16: the regression of Figures 2 and 3, and the rate."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.claims.judging import (
    TUNED,
    Compared,
    Finding,
    all_hold,
    final_below,
    finding,
    judges,
)
from steptuned.lab.paired_runs import MissingRuns, PairedRuns
from steptuned.lab.rate import rate_of
from steptuned.lab.spec import RunSpec
from steptuned.lab.statistics import compare_differences, compare_ratios

Array = NDArray[np.float64]
INSTANCES_2, INSTANCES_3 = "figure-2-instances", "figure-3-instances"


@judges(1)
def soonest(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    mine, others = "step-tuned-gd", ("barzilai-borwein", "armijo")
    pairs = e.pairs((mine, *others), INSTANCES_2)
    outcome = e.outcome(INSTANCES_2)

    def time(spec: RunSpec) -> float:
        if e.diverged(spec):
            return math.inf
        star = outcome.star[spec.options["instance"], spec.seed]
        reached = e.curve(spec, measure).first_below(star + outcome.experiment.selection.within)
        return min(reached, limits["never, in budgets"] * spec.budget)

    times = {entry: e.values(INSTANCES_2, (entry,), pairs, time) for entry in (mine, *others)}
    labels = {entry: e.label(INSTANCES_2, entry) for entry in times}
    compared = []
    for other in others:
        result = compare_ratios(times[mine], times[other])
        compared.append(Compared(f"{labels[mine]} / {labels[other]}", result, pairs))
    return all_hold(compared, "iterations to J* + 0.1")


@judges(2)
def faster_at_first(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    pairs = e.pairs(("sgd", "exact-gv"), INSTANCES_3)
    early = limits["epoch"] * e.per_epoch(INSTANCES_3)
    width = int(limits["median over records"])

    def ratio(sgd: RunSpec, exact: RunSpec) -> float:
        if e.diverged(sgd) and e.diverged(exact):
            return limits["ratio"]  # a tie
        if e.diverged(sgd):
            return math.inf
        level = e.curve(exact, measure).smoothed(width).at(early)
        reached = e.curve(sgd, measure).smoothed(width).first_below(level)
        return min(reached, sgd.budget) / early

    ratios = e.values(INSTANCES_3, ("sgd", "exact-gv"), pairs, ratio)
    against = np.full_like(ratios, limits["ratio"])
    what = f"{limits['ratio']} / (time of SGD / time of Exact-GV)"
    compared = Compared(what, compare_ratios(against, ratios), pairs)
    told = f"SGD takes a median of {np.median(ratios):.3g} times as long; {compared}"
    return finding(compared.below, told, [compared])


@judges(3)
def loses_most(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = ("sgd", "exact-gv", "stochastic-gv")
    pairs = e.pairs(entries, INSTANCES_3)
    early = limits["epoch"] * e.per_epoch(INSTANCES_3)
    width = int(limits["median over records"])

    def at(entry: str) -> Array:
        def value(spec: RunSpec) -> float:
            return e.curve(spec, measure).smoothed(width).at(early)

        return e.values(INSTANCES_3, (entry,), pairs, value)

    sgd, exact, stochastic = map(at, entries)
    with np.errstate(invalid="ignore"):
        gain, left = sgd - exact, sgd - stochastic
    compared = [
        Compared("Exact-GV / SGD", compare_ratios(exact, sgd), pairs),
        Compared(
            f"advantage of Stochastic-GV - {limits['share']:g} x advantage of Exact-GV",
            compare_differences(left, limits["share"] * gain),
            pairs,
        ),
    ]
    return all_hold(compared, f"J at epoch {limits['epoch']:g}")


def _start(e: PairedRuns, spec: RunSpec, epochs: float, measure: str) -> Array:
    """log10 of J over the first epochs."""
    values = e.curve(spec, measure).between(0, epochs * e.per_epoch(INSTANCES_3))
    return np.log10(np.maximum(values, 1e-300))


@judges(4)
def as_good(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = ("expected-gv", "exact-gv")
    pairs = e.pairs(entries, INSTANCES_3)

    def mean(spec: RunSpec) -> float:
        return float(_start(e, spec, limits["epochs"], measure).mean())

    expected, exact = (e.values(INSTANCES_3, (entry,), pairs, mean) for entry in entries)
    margin = limits["margin"]
    result = compare_differences(expected, exact + margin)
    compared = Compared(f"Expected-GV - (Exact-GV + {margin:g})", result, pairs)
    return all_hold([compared], f"mean of log10 J over {limits['epochs']:g} epochs")


@judges(5)
def very_close(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = (TUNED, "sgd", "expected-gv")
    pairs = e.pairs(entries, INSTANCES_3)

    def distance(spec: RunSpec, expected: RunSpec) -> float:
        if e.diverged(spec) or e.diverged(expected):
            return math.inf
        logs = [_start(e, one, limits["epochs"], measure) for one in (spec, expected)]
        return float(np.abs(logs[0] - logs[1]).mean())

    base, share = entries[-1], limits["share"]
    tuned, sgd = (e.values(INSTANCES_3, (x, base), pairs, distance) for x in entries[:2])
    result = compare_differences(tuned, share * sgd)
    compared = Compared(f"Step-Tuned SGD - {share:g} x SGD", result, pairs)
    told = f"Step-Tuned SGD {tuned.mean():.3g}, SGD {sgd.mean():.3g}; {compared}"
    measured = f"mean distance of log10 J from Expected-GV: {told}"
    return finding(compared.below, measured, [compared])


@judges(6)
def lower_in_the_end(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    fast = ("exact-gv", "expected-gv", TUNED)
    pairs = e.pairs(("sgd", *fast), INSTANCES_3)
    compared = [final_below(e, INSTANCES_3, "sgd", other, pairs, measure) for other in fast]
    ends = all_hold(compared, "final J")
    longer = "figure-3-longer"
    seeds = e.pairs(("sgd", TUNED), longer)
    epoch, width = e.per_epoch(longer), int(limits["median over records"])

    def epochs(sgd: RunSpec, tuned: RunSpec) -> float:
        stretch = limits["from epoch"] * epoch, limits["to epoch"] * epoch
        level = float(np.mean(e.curve(sgd, measure).between(*stretch)))
        return e.curve(tuned, measure).smoothed(width).first_below(level) / epoch

    reached = e.values(longer, ("sgd", TUNED), seeds, epochs)
    there = int(np.isfinite(reached).sum())
    when = f" after a median of {np.median(reached):.4g} epochs" if there == seeds.n else ""
    told = f"Step-Tuned SGD reaches SGD's level in {there} of {seeds.n} seeds{when}"
    holds = ends.holds and there == seeds.n
    return finding(holds, f"{ends.measured}; {told}", compared, [seeds])


@judges(16, ("gradient",))
def rate_holds(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    entries = [entry.name for entry in e.outcome("rate").experiment.entries]
    pairs = e.pairs(entries, "rate")
    if pairs.n < limits["seeds"]:
        raise MissingRuns(f"rate: {pairs.n} of at least {limits['seeds']:g} seeds complete")
    groups = [e.group("rate", entry, pairs) for entry in entries]
    diverged = sum(e.diverged(spec) for group in groups for spec in group.specs.values())
    if diverged:
        return finding(False, f"{diverged} runs diverged", pairs=[pairs])
    rates = [rate_of(group, e.results, limits["decades"]) for group in groups]
    fits = [fit for fit in rates if fit is not None]
    if any(fit.remaining > limits["fallen to"] for fit in fits):
        raise MissingRuns("rate: too few iterations, the smallest gradient is that of the start")
    told = []
    for fit in fits:
        slope = f"{fit.slope:.3f} [{fit.low:.3f}, {fit.high:.3f}]"
        told.append(f"delta {fit.delta:g}: slope {slope}, at most {fit.bound:.3f}")
    return finding(all(fit.low <= fit.bound for fit in fits), "; ".join(told), pairs=[pairs])
