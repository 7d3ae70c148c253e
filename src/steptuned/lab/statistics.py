"""Paired comparisons of two methods: how large the difference is, how certain, and how frequent.

Smaller is better. Two values form a pair if they come from the same seed or the same instance of a
problem. The value of a run that diverged is infinite, and an infinite difference is larger than
every finite one: see :func:`finite`.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]
RESAMPLES = 9_999
MOST_PAIRS = 24
"""The exact test looks at 2^n flips of signs. With more pairs, flips are drawn at random."""


@dataclass(frozen=True)
class Comparison:
    """A against B, pair by pair."""

    kind: Literal["ratio", "difference"]
    n: int
    """Number of pairs."""
    wins: int
    """In how many of them A is below B."""
    median: float
    """Of the paired ratios A / B, or of the paired differences A - B."""
    low: float
    """The lower end of its 95 % interval (BCa bootstrap); NaN with a single pair."""
    high: float
    p: float
    """One-sided sign-flip test: small if A is below B. See :func:`sign_flip`."""
    better: float
    """The probability that A is below B: the share of pairs in which it is; ties count half."""


def compare_ratios(a: ArrayLike, b: ArrayLike) -> Comparison:
    """Compare values >= 0 by the logarithms of their ratios. Two runs that diverged are a tie."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    return _compare(logs, "ratio")


def compare_differences(a: ArrayLike, b: ArrayLike) -> Comparison:
    """Compare values by their differences."""
    with np.errstate(invalid="ignore"):
        differences = np.asarray(a, float) - np.asarray(b, float)
    return _compare(differences, "difference")


def _compare(differences: Array, kind: Literal["ratio", "difference"]) -> Comparison:
    differences = np.where(np.isnan(differences), 0.0, differences)
    values, largest = finite(differences)
    summary = np.array([np.median(values), *median_interval(values)])
    summary = np.where(np.abs(summary) > largest, np.copysign(np.inf, summary), summary)
    median, low, high = np.exp(summary) if kind == "ratio" else summary
    return Comparison(
        kind,
        len(values),
        int((differences < 0).sum()),
        float(median),
        float(low),
        float(high),
        sign_flip(values),
        probability_below(differences),
    )


def finite(differences: Array) -> tuple[Array, float]:
    """Replace infinite differences by twice the largest finite one, and return that one too.

    So a run that diverged counts for more than any that did not, but cannot outweigh all the others
    alone. Where there is no finite difference other than zero, infinite ones become 1.
    """
    is_finite = np.isfinite(differences)
    largest = float(np.max(np.abs(differences[is_finite]), initial=0.0))
    replacement = 2 * largest if largest > 0 else 1.0
    return np.where(is_finite, differences, np.copysign(replacement, differences)), largest


def sign_flip(differences: ArrayLike) -> float:
    """The one-sided p: how often the mean is as low or lower if every sign is a coin flip.

    Exact up to 24 pairs: the same as ``scipy.stats.permutation_test`` with
    ``permutation_type="samples", n_resamples=inf``, which takes most of a minute for 20 pairs.
    With more pairs, SciPy draws 9,999 flips of all signs at random, with a fixed seed.
    """
    values = np.asarray(differences, float)
    if len(values) > MOST_PAIRS:
        drawn = stats.permutation_test(
            (values,),
            np.mean,
            permutation_type="samples",
            alternative="less",
            n_resamples=RESAMPLES,
            random_state=np.random.default_rng(0),
        )
        return float(drawn.pvalue)
    sums = np.zeros(1)
    for value in np.abs(values):
        sums = np.concatenate((sums + value, sums - value))
    rounding = 1e-12 * float(np.abs(values).sum())
    return float(np.mean(sums <= values.sum() + rounding))


def median_interval(values: Array, confidence: float = 0.95) -> tuple[float, float]:
    """The bias-corrected and accelerated (BCa) bootstrap interval of the median.

    Where BCa is not defined, because most values are the same, it is the percentile interval.
    """
    if len(values) < 2:
        return np.nan, np.nan
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of degenerate data, which the second method is for
            found = stats.bootstrap(
                (values,),
                np.median,
                n_resamples=RESAMPLES,
                confidence_level=confidence,
                method=method,
                random_state=np.random.default_rng(0),
            ).confidence_interval
        if np.isfinite(found).all():
            break
    return float(found.low), float(found.high)


def probability_below(differences: ArrayLike) -> float:
    """The share of pairs with a negative difference; ties count half."""
    values = np.asarray(differences, float)
    return float(np.mean(values < 0) + np.mean(values == 0) / 2)


def performance_profiles(
    costs: Mapping[str, Sequence[float]],
    factors: Sequence[float],
) -> dict[str, list[float]]:
    """For each method the share of problems on which it is within a factor of the best.

    After Dolan and Moré, "Benchmarking optimization software with performance profiles" (2002).

    Args:
        costs: for each method its cost on every problem; infinite or NaN where it failed.
        factors: the factors tau, each at least 1.
    """
    table = np.array([list(values) for values in costs.values()], dtype=float)
    table = np.where(np.isfinite(table), table, np.inf)
    best = table.min(0)
    within = {tau: np.isfinite(table) & (table <= tau * best) for tau in factors}
    return {name: [float(within[tau][i].mean()) for tau in factors] for i, name in enumerate(costs)}


def wilson(wins: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if n == 0:
        return 0.0, 1.0
    interval = stats.binomtest(wins, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)
