"""The rate of convergence: how fast the smallest gradient decreases."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steptuned.lab.claims.criteria import criterion
from steptuned.lab.results import Results
from steptuned.lab.search import Group

Array = NDArray[np.float64]
INTERVAL = (0.025, 0.975)


@dataclass
class Rate:
    """The decrease of min_{j<k} E|grad J(theta_j)|^2, fitted over the last decade of k."""

    delta: float
    k: Array
    smallest: Array
    slope: float
    low: float
    high: float
    band: tuple[Array, Array]
    """A 95 % interval of the smallest values, for each k."""

    @property
    def bound(self) -> float:
        """The slope that the theorem guarantees."""
        return -(0.5 - self.delta)

    @property
    def remaining(self) -> float:
        """The smallest value at the end, as a share of the first one."""
        return float(self.smallest[-1] / self.smallest[0])

    @property
    def verdict(self) -> str:
        """Supported if the slope is at most -(1/2 - delta), within its interval.

        The theorem is an upper bound. It says nothing about the beginning, where this J is flat and
        its gradient small before there is any progress.
        """
        if self.remaining > criterion(16).thresholds["fallen to"]:
            return "k too small: the smallest gradient is about that of the start"
        return "supported" if self.low <= self.bound else "not supported"


def rate_of(
    group: Group,
    results: Results,
    decades: float = 1.0,
    resamples: int = 500,
) -> Rate | None:
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

    def smallest(sample: Array) -> Array:
        return np.minimum.accumulate(sample.mean(0))

    def slope(curve: Array) -> float:
        return float(np.polyfit(np.log(k[fitted]), np.log(curve[fitted]), 1)[0])

    generator, n = np.random.default_rng(0), len(squares)
    curves = [smallest(squares[generator.integers(n, size=n)]) for _ in range(resamples)]
    low, high = np.quantile([slope(curve) for curve in curves], INTERVAL)
    lows, highs = np.quantile(curves, INTERVAL, axis=0)
    delta, found = group.winner.hyper["delta"], smallest(squares)
    return Rate(delta, k, found, slope(found), float(low), float(high), (lows, highs))
