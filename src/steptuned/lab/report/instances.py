"""One number per method and instance, and how often one method has the smaller one."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptuned.lab.claims.criteria import criterion
from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below
from steptuned.lab.statistics import wilson

Table = dict[str, list[float | None]]
"""For each method one number per instance; None where there is none.

An instance on which hyper-parameters were chosen for all others is not among them.
"""


def ends(outcome: Outcome, results: Results) -> Table:
    """The final loss, as the mean over the seeds."""

    def end(group: Group) -> float | None:
        finals = [results.final(spec) for spec in group.specs.values()]
        losses = [final["loss"] for final in finals if final is not None]
        return float(np.mean(losses)) if losses else None

    return _table(outcome, end)


def back_propagations_to_level(outcome: Outcome, results: Results) -> Table:
    """Back-propagations until the loss is near J*, as the mean over the seeds.

    A run that never gets there counts as in claim 1. None: no run is complete.
    """
    within, stars, limit = outcome.experiment.selection.within, outcome.star, never(outcome)

    def reached(group: Group) -> float | None:
        logs = {seed: results.records(spec) for seed, spec in group.specs.items()}
        times = [
            first_below(log, stars[group.instance, seed] + within)
            for seed, log in logs.items()
            if log and (group.instance, seed) in stars
        ]
        return float(np.mean([limit if t is None else t for t in times])) if times else None

    return _table(outcome, reached)


def never(outcome: Outcome) -> float:
    """What claim 1 counts for a run that never comes near J*: twice the budget."""
    experiment = outcome.experiment
    budget = experiment.budget.back_propagations(experiment.problem_options.per_epoch)
    return criterion(1).thresholds["never, in budgets"] * budget


def _table(outcome: Outcome, number: Callable[[Group], float | None]) -> Table:
    table: Table = {}
    first = 1 if outcome.experiment.tune == "first" and outcome.experiment.instances > 1 else 0
    for group in outcome.groups:
        if group.instance >= first:
            table.setdefault(group.entry.name, []).append(number(group))
    return table


@dataclass
class Comparison:
    """On how many instances a method has the smaller number, with Wilson's 95 % interval."""

    wins: int
    instances: int
    low: float
    high: float
    median_ratio: float


def compare(table: Table, entry: str, other: str) -> Comparison:
    """Compare two methods. A number beats None. Instances where both have None do not count."""
    pairs = list(zip(table[entry], table[other], strict=True))
    pairs = [(a, b) for a, b in pairs if a is not None or b is not None]
    wins = sum(b is None or (a is not None and a < b) for a, b in pairs)
    both = [a / b for a, b in pairs if a is not None and b is not None]
    low, high = wilson(wins, len(pairs))
    median = float(np.median(both)) if both else float("nan")
    return Comparison(wins, len(pairs), low, high, median)
