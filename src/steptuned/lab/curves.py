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
NEAR = 1e-9
"""Shares of a budget this close to each other are the same."""


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
    """A sudden fall of a loss within a short window, away from both ends of the run."""

    at: float
    """Where the window begins, as a share of the budget."""
    fall: float
    """How far log10 of the loss falls."""
    gamma: tuple[float, float]
    """Median of gamma before and after; NaN if it is not logged."""
    accuracy: tuple[float, float]
    """Mean test accuracy before and after."""

    def is_caused_by_gamma(self, limits: Mapping[str, float]) -> bool:
        before, after = self.gamma
        return abs(after - before) >= limits["change of gamma"] * before

    @property
    def rise(self) -> float:
        """The rise of the test accuracy."""
        return self.accuracy[1] - self.accuracy[0]


def sudden_drops(records: Records, key: str, limits: Mapping[str, float]) -> list[Drop] | None:
    """All windows in which the running minimum of the smoothed loss falls suddenly, in log10.

    A window begins at a record. It ends exactly ``limits["window"]`` of the run later, where the
    curve is interpolated linearly between two records. Windows that overlap are drops of their own.

    None if the records are too far apart for a window to contain a second one. ``limits`` are the
    thresholds of claim 10.
    """
    loss = curve_of(records, key).smoothed(int(limits["median over records"]))
    logs = np.log10(np.maximum(np.minimum.accumulate(loss.values), 1e-300))
    share = loss.bp / loss.bp[-1]
    ends = share + limits["window"]
    following = np.append(share[1:], np.inf)
    inside = (share >= limits["first"] - NEAR) & (ends <= limits["last"] + NEAR)
    starts = np.flatnonzero(inside & (following <= ends + NEAR))
    if not len(starts):
        return None
    falls = logs[starts] - np.interp(ends[starts], share, logs)
    least = max(limits["fall"], limits["times the median"] * float(np.median(falls)))
    gammas = [record.get("gamma median", record.get("gamma", math.nan)) for record in records]
    gamma = np.array(gammas, dtype=float)
    accuracy = curve_of(records, "accuracy").values
    drops = []
    for start, fall in zip(starts, falls, strict=True):
        if fall < least:
            continue
        begin, end, side = share[start], ends[start], limits["side"] + NEAR
        sides = [
            (share >= begin - side) & (share <= begin),
            (share >= end - NEAR) & (share <= end + side),
        ]
        gamma_before, gamma_after = (float(np.median(gamma[part])) for part in sides)
        before, after = (float(np.mean(accuracy[part])) for part in sides)
        drop = Drop(float(begin), float(fall), (gamma_before, gamma_after), (before, after))
        drops.append(drop)
    return drops
