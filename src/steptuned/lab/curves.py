"""The curve of a run: its value at a step, when it passes a level, and sudden drops."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[np.float64]
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Curve:
    """One measure of one run, record by record."""

    bp: Array
    """Back-propagations."""
    values: Array

    def smoothed(self, records: int) -> "Curve":
        """The running median over this odd number of records, fewer at both ends."""
        side = records // 2
        padded = np.pad(self.values, side, constant_values=np.nan)
        return replace(self, values=np.nanmedian(sliding_window_view(padded, records), axis=1))

    def at(self, bp: float) -> float:
        """The value of the last record at or before this number of back-propagations."""
        return float(self.values[self.bp <= bp][-1])

    def first_below(self, level: float) -> float:
        """Back-propagations until the value is first below the level; infinite if it never is."""
        return float(np.min(self.bp[self.values < level], initial=math.inf))

    def between(self, first: float, last: float) -> Array:
        """The values between two numbers of back-propagations, both included."""
        return self.values[(first <= self.bp) & (self.bp <= last)]


def curve_of(records: Records, key: str) -> Curve:
    bp = np.array([record["bp"] for record in records], dtype=float)
    return Curve(bp, np.array([record.get(key, math.nan) for record in records], dtype=float))


@dataclass(frozen=True)
class Drop:
    """The largest fall of a loss within a short window, away from both ends of the run."""

    at: float
    """Where the window begins, as a share of the budget."""
    fall: float
    """How far log10 of the loss falls."""
    typical: float
    """The median fall in such a window."""
    gamma: tuple[float, float]
    """Median of gamma before and after; NaN if it is not logged."""
    accuracy: tuple[float, float]
    """Mean test accuracy before and after."""

    def is_sudden(self, limits: Mapping[str, float]) -> bool:
        return self.fall >= max(limits["fall"], limits["times the median"] * self.typical)

    def is_caused_by_gamma(self, limits: Mapping[str, float]) -> bool:
        before, after = self.gamma
        return abs(after - before) >= limits["change of gamma"] * before

    @property
    def rise(self) -> float:
        """The rise of the test accuracy."""
        return self.accuracy[1] - self.accuracy[0]


def drop_of(records: Records, key: str, limits: Mapping[str, float]) -> Drop | None:
    """The largest fall of the running minimum of the smoothed loss, in log10.

    None if the records are too far apart for a window to contain any. ``limits`` are the thresholds
    of claim 10.
    """
    loss = curve_of(records, key).smoothed(int(limits["median over records"]))
    logs = np.log10(np.maximum(np.minimum.accumulate(loss.values), 1e-300))
    budget = loss.bp[-1]
    share = loss.bp / budget
    ends = np.searchsorted(share, share + limits["window"] + 1e-9, side="right") - 1
    inside = (share >= limits["first"] - 1e-9) & (share[ends] <= limits["last"] + 1e-9)
    starts = np.flatnonzero(inside & (ends > np.arange(len(share))))
    if not len(starts):
        return None
    falls = logs[starts] - logs[ends[starts]]
    start = int(starts[falls.argmax()])
    end = int(ends[start])
    before = (share >= share[start] - limits["side"] - 1e-9) & (share <= share[start])
    after = (share >= share[end]) & (share <= share[end] + limits["side"] + 1e-9)
    gammas = [record.get("gamma median", record.get("gamma", math.nan)) for record in records]
    gamma = np.array(gammas, dtype=float)
    accuracy = curve_of(records, "accuracy").values
    return Drop(
        float(share[start]),
        float(falls.max()),
        float(np.median(falls)),
        (float(np.median(gamma[before])), float(np.median(gamma[after]))),
        (float(np.mean(accuracy[before])), float(np.mean(accuracy[after]))),
    )
