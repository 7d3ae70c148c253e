"""Numbers that figures and tables show, from an outcome and its logs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.results import Results
from steptuned.lab.search import Group, Outcome, first_below

Table = dict[str, list[float | None]]
"""For each entry a number on every instance; None where there is none."""


def ends(outcome: Outcome, results: Results) -> Table:
    """The loss at the end, mean over the seeds."""

    def end(group: Group) -> float | None:
        lasts = [results.final(spec) for spec in group.specs.values()]
        losses = [last["loss"] for last in lasts if last is not None]
        return float(np.mean(losses)) if losses else None

    return _table(outcome, end)


def instances_to_level(outcome: Outcome, results: Results) -> Table:
    """Back-propagations until the loss is near J*, mean over the seeds that get there."""
    within = outcome.experiment.selection.within

    def reached(group: Group) -> float | None:
        stars = outcome.star
        times = [
            first_below(results.records(spec), stars[group.instance, seed] + within)
            for seed, spec in group.specs.items()
            if (group.instance, seed) in stars
        ]
        there = [t for t in times if t is not None]
        return float(np.mean(there)) if there else None

    return _table(outcome, reached)


def _table(outcome: Outcome, number: Any) -> Table:
    table: Table = {}
    for group in outcome.groups:
        table.setdefault(group.entry.name, []).append(number(group))
    return table


@dataclass
class Comparison:
    """On how many instances one entry has the smaller number, with a 95 % interval (Wilson) of that share."""

    wins: int
    instances: int
    low: float
    high: float
    median_ratio: float


def compare(table: Table, entry: str, other: str) -> Comparison:
    """An entry against another one. A number beats none; none against none is no instance."""
    pairs = [(a, b) for a, b in zip(table[entry], table[other], strict=True) if a is not None or b is not None]
    wins = sum(b is None or (a is not None and a < b) for a, b in pairs)
    both = [a / b for a, b in pairs if a is not None and b is not None]
    low, high = wilson(wins, len(pairs))
    return Comparison(wins, len(pairs), low, high, float(np.median(both)) if both else float("nan"))


def wilson(wins: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    if n == 0:
        return 0.0, 1.0
    p, zz = wins / n, z * z / n
    middle, half = (p + zz / 2) / (1 + zz), z / (1 + zz) * (p * (1 - p) / n + zz / (4 * n)) ** 0.5
    return middle - half, middle + half


@dataclass
class Rate:
    """The decrease of min_{j<k} E|grad J(theta_j)|^2, fitted on log-log axes over the last decade of k."""

    delta: float
    k: NDArray[np.float64]
    smallest: NDArray[np.float64]
    slope: float
    low: float
    high: float

    @property
    def bound(self) -> float:
        """The theorem's slope."""
        return -(0.5 - self.delta)

    @property
    def remaining(self) -> float:
        """The smallest value at the end, as a share of the one at the start."""
        return float(self.smallest[-1] / self.smallest[0])

    @property
    def verdict(self) -> str:
        """Supported where the slope is at most -(1/2 - delta), within its interval: the theorem is an upper bound.

        It says nothing of the beginning, where this J is flat and its gradient small before there is any progress.
        """
        from steptuned.lab.claims import criterion  # which reads what is measured here

        if self.remaining > criterion(16).thresholds["fallen to"]:
            return "k too small: the smallest gradient is about that of the start"
        return "supported" if self.low <= self.bound else "not supported"


def rate_of(group: Group, results: Results, decades: float = 1.0, resamples: int = 500) -> Rate | None:
    """The rate over the last decades of k, with a 95 % interval by resampling the seeds."""
    logs = [results.records(spec) for spec in group.specs.values()]
    logs = [log for log in logs if log]
    if not logs or group.winner is None:
        return None
    shortest = min(map(len, logs))
    k = np.array([record["batches"] for record in logs[0][:shortest]], dtype=float)
    squares = np.array([[record["gradient"] for record in log[:shortest]] for log in logs])
    keep = k > 0
    k, squares = k[keep], squares[:, keep]
    fitted = k >= k[-1] / 10**decades

    def slope(sample: NDArray[np.float64]) -> float:
        smallest = np.minimum.accumulate(sample.mean(0))
        return float(np.polyfit(np.log(k[fitted]), np.log(smallest[fitted]), 1)[0])

    generator = np.random.default_rng(0)
    slopes = [slope(squares[generator.integers(len(squares), size=len(squares))]) for _ in range(resamples)]
    low, high = np.quantile(slopes, (0.025, 0.975))
    return Rate(group.winner.hyper["delta"], k, np.minimum.accumulate(squares.mean(0)), slope(squares), float(low), float(high))
