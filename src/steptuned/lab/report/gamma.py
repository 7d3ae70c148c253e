"""What gamma does, from the logs: the bounds that clip it and the axis that shows it."""

from collections.abc import Iterable

import numpy as np

from steptuned.lab.methods.base import widened
from steptuned.lab.report.bands import BEYOND, Array, Band
from steptuned.lab.search import Group

Bounds = tuple[float, float]
NEAR = 10.0
"""An extreme at most this factor beyond the other values is not an outlier."""


def bounds_of(group: Group) -> Bounds | None:
    """m and M of the winner, with M as the method uses it (at least nu)."""
    if group.winner is None or not {"bounds", "nu"} <= group.winner.hyper.keys():
        return None
    return widened(group.winner.hyper["bounds"], group.winner.hyper["nu"])


def has_relative_bounds(group: Group) -> bool:
    """Whether the raw gamma is divided by its running reference before it is clipped."""
    return group.winner is not None and bool(group.winner.hyper.get("relative"))


def is_fixed(bounds: Bounds | None) -> bool:
    """Whether the bounds are equal, so that gamma is constant and nothing is tuned."""
    return bounds is not None and bounds[0] == bounds[1]


def extent(low: Array, high: Array, outside: float = 0.02) -> Bounds | None:
    """The range of a band without its outliers; None if nothing of it is positive."""
    low, high = low[low > 0], high[high > 0]
    if not len(low) or not len(high):
        return None
    # Without interpolation: an outlier of 1e20 would still move the result far away.
    first = float(np.quantile(low, outside, method="higher"))
    last = float(np.quantile(high, 1 - outside, method="lower"))
    least, most = float(low.min()), float(high.max())
    return (
        least if least >= first / NEAR else first,
        most if most <= last * NEAR else last,
    )


def limits(bands: Iterable[Band], bounds: Iterable[Bounds]) -> Bounds | None:
    """Limits of a logarithmic axis that show the bounds and the bands without their outliers."""
    extents = [extent(band.low, band.high) for band in bands]
    ends = [end for pair in (*bounds, *extents) if pair for end in pair if 0 < end < BEYOND]
    if not ends:
        return None
    margin = max(1.15, (max(ends) / min(ends)) ** 0.06)
    return min(ends) / margin, max(ends) * margin
