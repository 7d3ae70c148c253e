"""What gamma does, from the logs: its quartiles over time, and the bounds that clip it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.methods.base import widened
from steptuned.lab.results import Results
from steptuned.lab.search import Group

Curve = NDArray[np.float64]

BEYOND = 1e30
"""Stands for an infinite raw gamma (zero curvature) on an axis."""
NEAR = 10.0
"""An extreme that is at most this factor beyond the others is no outlier."""


@dataclass(frozen=True)
class Quartiles:
    """Quartiles of gamma or raw gamma between log records, each the median over the seeds."""

    x: Curve
    low: Curve
    median: Curve
    high: Curve

    @property
    def varies(self) -> bool:
        return bool((self.high > self.low).any())


def quartiles_of(
    group: Group,
    results: Results,
    key: str,
    x: Callable[[dict[str, Any]], float],
) -> Quartiles | None:
    """The quartiles of ``key`` (``gamma`` or ``raw gamma``); None if no log has them."""
    names = [f"{key} {part}" for part in ("low", "median", "high")]
    runs = []
    for spec in group.specs.values():
        records = [record for record in results.records(spec) if names[1] in record]
        rows = [(x(record), *(record[name] for name in names)) for record in records]
        if rows:
            run = np.nan_to_num(np.array(rows, dtype=float).T, nan=np.nan, posinf=BEYOND)
            runs.append(run[:, np.isfinite(run).all(0)])
    if not runs:
        return None
    shortest = min(run.shape[1] for run in runs)
    at, low, median, high = np.median([run[:, :shortest] for run in runs], axis=0)
    return Quartiles(at, low, median, high)


def bounds_of(group: Group) -> tuple[float, float] | None:
    """m and M of the winner, M as the method uses it: not below nu."""
    if group.winner is None or not {"bounds", "nu"} <= group.winner.hyper.keys():
        return None
    return widened(group.winner.hyper["bounds"], group.winner.hyper["nu"])


def is_fixed(bounds: tuple[float, float] | None) -> bool:
    """Whether the bounds are equal, so that gamma is a constant and nothing is tuned."""
    return bounds is not None and bounds[0] == bounds[1]


def limits(
    bands: Iterable[Quartiles],
    bounds: Iterable[tuple[float, float]],
    outside: float = 0.02,
) -> tuple[float, float] | None:
    """Limits of a logarithmic axis that show the bounds and all but the outliers of the bands."""
    ends = [value for pair in bounds for value in pair]
    for band in bands:
        low, high = (curve[curve > 0] for curve in (band.low, band.high))
        if len(low) and len(high):
            # Without interpolation, which an outlier of 1e20 would still pull far away.
            trimmed = np.quantile(low, outside, method="higher") / NEAR
            ends.append(float(low.min() if low.min() >= trimmed else trimmed * NEAR))
            trimmed = np.quantile(high, 1 - outside, method="lower") * NEAR
            ends.append(float(high.max() if high.max() <= trimmed else trimmed / NEAR))
    ends = [end for end in ends if 0 < end < BEYOND]
    if not ends:
        return None
    margin = max(1.15, (max(ends) / min(ends)) ** 0.06)
    return min(ends) / margin, max(ends) * margin
