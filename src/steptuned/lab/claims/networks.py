"""Judges of claims 7 to 14 and 17: the networks of Figures 4 to 6, and the controls."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.claims.criteria import criterion
from steptuned.lab.claims.judging import (
    OTHERS,
    TRAINING_LOSS,
    TUNED,
    Compared,
    Finding,
    TooFewProblems,
    all_hold,
    final_below,
    finding,
    judges,
    problem_letter,
    problems_in,
    where_run,
)
from steptuned.lab.curves import Drop, sudden_drops
from steptuned.lab.paired_runs import MissingRuns, PairedRuns, Pairs
from steptuned.lab.statistics import compare_ratios, wilson

Array = NDArray[np.float64]
RESIDUAL = ("figure-4a", "figure-4b")
SIX = (*RESIDUAL, "figure-4c", "figure-4d", "figure-6e", "figure-6f")


def _letters(names: Iterable[str]) -> str:
    return " ".join(map(problem_letter, names))


def _seeds(found: Mapping[str, list[Compared]]) -> str:
    """The number of pairs of each problem, such as "(a) 3, (d) (e) 5"."""
    numbers: dict[int, list[str]] = {}
    for name, comparisons in found.items():
        numbers.setdefault(comparisons[0].pairs.n, []).append(name)
    return ", ".join(f"{_letters(names)} {n}" for n, names in numbers.items())


def _flat(found: Mapping[str, list[Compared]]) -> list[Compared]:
    return [compared for comparisons in found.values() for compared in comparisons]


@judges(7, TRAINING_LOSS)
def lowest(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        pairs = e.pairs((TUNED, *OTHERS), name)
        return [final_below(e, name, TUNED, other, pairs, measure) for other in OTHERS]

    found = where_run(RESIDUAL, compare)
    return all_hold(_flat(found), problems=problems_in(found, "two"))


@judges(8, TRAINING_LOSS)
def beats_sgd(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        return [final_below(e, name, TUNED, "sgd", e.pairs((TUNED, "sgd"), name), measure)]

    found = where_run(SIX, compare)
    if len(found) < limits["problems"]:
        wanted = f"{limits['problems']:g} of the six problems are needed"
        raise TooFewProblems(f"runs of {_letters(found)} only; {wanted}")
    lower = [name for name, comparisons in found.items() if comparisons[0].below]
    told = f"below SGD on {_letters(lower) or 'none'}; seeds: {_seeds(found)}"
    holds = len(found) - len(lower) <= limits["exceptions"]
    return finding(holds, told, _flat(found), problems=problems_in(found, "six"))


@judges(9, TRAINING_LOSS)
def adaptive_win(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    name, first, last = "figure-4d", ("adam", "rmsprop"), ("sgd", TUNED)
    pairs = e.pairs((*first, *last), name)
    return all_hold([final_below(e, name, a, b, pairs, measure) for a in first for b in last])


def _sudden_drops(
    e: PairedRuns,
    name: str,
    entry: str,
    pairs: Pairs,
    measure: str,
    side: float,
) -> list[list[Drop]]:
    """The sudden drops of each run that has any. A run that diverged has none."""
    limits = {**criterion(10).thresholds, "side": side}
    found = []
    for records in e.records(name, entry, pairs):
        if records and measure not in records[-1]:
            raise MissingRuns(f"{name}: its runs have no {measure}")
        drops = sudden_drops(records, measure, limits) if records else []
        if drops is None:
            raise MissingRuns(f"{name}: its records are too far apart to look for a drop")
        if drops:
            found.append(drops)
    return found


def share(runs: int, n: int) -> str:
    """Wilson's interval of the share of runs: these claims count runs, so they have no test."""
    low, high = wilson(runs, n)
    return f"{low:.0%} to {high:.0%}"


def _caused_by_gamma(drops: Iterable[Drop]) -> list[Drop]:
    return [drop for drop in drops if drop.is_caused_by_gamma(criterion(10).thresholds)]


@judges(10, TRAINING_LOSS)
def sudden_drop(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def look(name: str) -> Finding:
        pairs = e.pairs((TUNED, "sgd"), name)
        side = limits["side"]
        tuned, sgd = (_sudden_drops(e, name, x, pairs, measure, side) for x in (TUNED, "sgd"))
        caused = sum(bool(_caused_by_gamma(drops)) for drops in tuned)
        exceptions = limits["exceptions"]
        told = (
            f"{_letters([name])} sudden drops in {len(tuned)} of {pairs.n} runs of Step-Tuned SGD, "
            f"{caused} with a change of gamma (95 % interval {share(caused, pairs.n)}), and in "
            f"{len(sgd)} of SGD ({share(len(sgd), pairs.n)})"
        )
        holds = caused >= pairs.n - exceptions and len(sgd) <= exceptions
        return finding(holds, told, pairs=[pairs])

    found = where_run(RESIDUAL, look)
    told = "; ".join(one.measured for one in found.values())
    holds = all(one.holds for one in found.values())
    pairs = [one.pairs for one in found.values()]
    return finding(holds, told, pairs=pairs, problems=problems_in(found, "two"))


def _that_drop(drops: list[Drop]) -> Drop:
    """The drop of a run that claim 11 is about: the largest one, of those caused by gamma if any.

    The claim is about the drop of claim 10, which gamma causes.
    """
    return max(_caused_by_gamma(drops) or drops, key=lambda drop: drop.fall)


@judges(11, TRAINING_LOSS)
def accuracy_rises(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def look(name: str) -> tuple[Pairs, list[Drop]]:
        pairs = e.pairs((TUNED,), name)
        of_runs = _sudden_drops(e, name, TUNED, pairs, measure, limits["side"])
        return pairs, [_that_drop(drops) for drops in of_runs]

    found = where_run(RESIDUAL, look)
    all_pairs, problems = [pairs for pairs, _ in found.values()], problems_in(found, "two")
    rises = [drop.rise for _, drops in found.values() for drop in drops]
    if not rises:
        told = "no run has a sudden drop"
        return finding(False, told, pairs=all_pairs, problems=problems)
    enough = sum(rise >= limits["rise"] for rise in rises)
    median = 100 * float(np.median(rises))
    told = f"accuracy rises with the drop in {enough} of {len(rises)} runs that have one"
    told += f" (95 % interval {share(enough, len(rises))}), by a median of {median:.2g} points"
    # "All but at most one" would also hold if there were one drop, without a rise.
    if len(rises) == 1:
        told += "; a single drop cannot be the exception"
    holds = enough >= max(1, len(rises) - limits["exceptions"])
    return finding(holds, told, pairs=all_pairs, problems=problems)


@judges(12, TRAINING_LOSS)
def twice_is_worse(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(once: str) -> list[Compared]:
        twice = once.replace("figure-4", "figure-5")
        pairs = e.pairs(OTHERS, once, twice)
        cases = []
        for entry in OTHERS:
            ends = [e.finals(name, entry, pairs, measure) for name in (once, twice)]
            uses = ["one use", "two uses"]
            if once.endswith("c") and entry != "sgd":
                ends, uses = ends[::-1], uses[::-1]
            what = f"{problem_letter(once)} {e.label(once, entry)}: {uses[0]} / {uses[1]}"
            cases.append(Compared(what, compare_ratios(*ends), pairs))
        return cases

    found = where_run([f"figure-4{letter}" for letter in "abcd"], compare)
    if len(found) < limits["problems"]:
        wanted = f"{limits['problems']:g} of the four problems are needed"
        raise TooFewProblems(f"runs of {_letters(found)} only; {wanted}")
    cases = _flat(found)
    failing = [case for case in cases if not case.below]
    told = f"as the paper says in {len(cases) - len(failing)} of {len(cases)} cases"
    told += f"; not: {'; '.join(map(str, failing))}" if failing else ""
    holds = len(failing) <= limits["exceptions"]
    return finding(holds, told, cases, problems=problems_in(found, "four"))


@judges(13, TRAINING_LOSS)
def batchnorm_helps(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    without, with_ = "figure-6e", "figure-6f"
    pairs = e.pairs((TUNED, "sgd"), without, with_)

    def ratio(name: str) -> Array:
        tuned, sgd = (e.finals(name, entry, pairs, measure) for entry in (TUNED, "sgd"))
        both_diverged = np.isinf(tuned) & np.isinf(sgd)
        return np.divide(tuned, sgd, out=np.ones_like(tuned), where=~both_diverged)

    ratios = {name: ratio(name) for name in (with_, without)}
    result = compare_ratios(ratios[with_], ratios[without])
    compared = Compared("(f) Step-Tuned SGD / SGD, divided by the same ratio on (e)", result, pairs)
    medians = [f"{_letters([name])} {np.median(values):.3g}" for name, values in ratios.items()]
    told = f"Step-Tuned SGD / SGD: {', '.join(medians)}; {compared}"
    return finding(compared.below, told, [compared])


@judges(14, TRAINING_LOSS)
def activations_alike(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    kinds = {"relu": "ReLU", "elu": "ELU", "silu": "SiLU"}
    compared = []
    for kind, label in kinds.items():
        name = f"activations-{kind}"
        one = final_below(e, name, TUNED, "sgd", e.pairs((TUNED, "sgd"), name), measure)
        compared.append(replace(one, what=f"{label}: {one.what}", is_test=False))
    sides = {float(np.sign(one.result.median - 1)) for one in compared}
    return finding(len(sides) == 1, "; ".join(map(str, compared)), compared)


@judges(17, ("plain loss",))
def tuning_helps(e: PairedRuns, limits: Mapping[str, float], measure: str) -> Finding:
    def compare(name: str) -> list[Compared]:
        entries = [entry.name for entry in e.outcome(name).experiment.entries]
        pairs = e.pairs(entries, name)
        controls = [entry for entry in entries if entry != TUNED]
        best = min(controls, key=lambda entry: float(e.finals(name, entry, pairs, measure).mean()))
        return [final_below(e, name, TUNED, best, pairs, measure)]

    found = where_run(("controls-f", "controls-a"), compare)
    compared = _flat(found)
    told = f"against the best control: {'; '.join(map(str, compared))}"
    holds = all(one.below for one in compared)
    return finding(holds, told, compared, problems=problems_in(found, "two"))
