"""The seeds of a method as one curve: a line in the middle of a band, record by record."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.curves import Records
from steptuned.lab.measures import Measure

Array = NDArray[np.float64]
Values = Sequence[float | None]

BEYOND = 1e30
"""Replaces an infinite raw gamma (zero curvature), which no axis can show."""


@dataclass(frozen=True)
class Band:
    """A curve with a band, at the records where every seed has a value."""

    records: NDArray[np.int64]
    """Indices into the logs."""
    low: Array
    middle: Array
    high: Array
    quartiles: bool = False
    """The band shows quartiles over iterations. Otherwise it is the range of the seeds."""

    @property
    def varies(self) -> bool:
        return bool((self.high > self.low).any())

    def where(self, kept: NDArray[np.bool_]) -> "Band":
        """The band at some of its records."""
        low, middle, high = (curve[kept] for curve in (self.low, self.middle, self.high))
        return Band(self.records[kept], low, middle, high, self.quartiles)


def over_seeds(curves: Sequence[Values]) -> Band | None:
    """The median of the seeds, between the smallest and the largest. None without seeds.

    A mean would follow a single seed on a log axis.
    """
    if not curves:
        return None
    values = _matrix(curves)
    records = np.flatnonzero(np.isfinite(values).all(0))
    values = values[:, records]
    if not len(records):
        return None
    return Band(records, values.min(0), np.median(values, axis=0), values.max(0))


def of_quartiles(low: Sequence[Values], middle: Sequence[Values], high: Sequence[Values]) -> Band:
    """Each quartile as its median over the seeds."""
    quartiles = np.stack([_matrix(curves) for curves in (low, middle, high)])
    quartiles = np.nan_to_num(quartiles, nan=np.nan, posinf=BEYOND)
    records = np.flatnonzero(np.isfinite(quartiles).all((0, 1)))
    first, second, third = np.median(quartiles[:, :, records], axis=1)
    return Band(records, first, second, third, quartiles=True)


def band_of(logs: Sequence[Records], measure: Measure) -> Band | None:
    """The band of a measure over the logs that have it; None if none has it.

    Older logs have single values of a measure that is logged as quartiles today.
    """
    if measure.quartiles and (having := logs_with(logs, measure.middle)):
        return of_quartiles(*(curves_of(having, key) for key in measure.keys))
    return over_seeds(curves_of(logs_with(logs, measure.key), measure.key))


def logs_with(logs: Sequence[Records], key: str) -> list[Records]:
    return [log for log in logs if any(key in record for record in log)]


def curves_of(logs: Sequence[Records], key: str) -> list[Values]:
    """The values of a key, log by log; None where a record does not have it."""
    return [[record.get(key) for record in log] for log in logs]


def _matrix(curves: Sequence[Values]) -> Array:
    """One row per seed, as long as the shortest, with NaN for missing values."""
    shortest = min(map(len, curves))
    return np.array([curve[:shortest] for curve in curves], dtype=float)
