"""Paired comparisons agree with SciPy and with what can be computed by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from steptuned.lab.statistics import (
    MOST_PAIRS,
    RESAMPLES,
    compare_differences,
    compare_ratios,
    finite,
    median_interval,
    performance_profiles,
    probability_below,
    sign_flip,
    wilson,
)


@pytest.mark.parametrize(
    ("n", "p"), [(1, 1 / 2), (3, 1 / 8), (4, 1 / 16), (5, 1 / 32), (20, 2.0**-20)]
)
def test_p_is_smallest_if_all_pairs_are_below(n, p):
    below = -np.arange(1.0, n + 1)
    assert sign_flip(below) == p
    assert sign_flip(-below) == 1.0


def test_p_computed_by_hand():
    # Of the 8 sums of +-1 +-2 +-3, those of at most -1 - 2 + 3 = 0 are -6, -4, -2, 0, 0.
    assert sign_flip([-1.0, -2.0, 3.0]) == 5 / 8
    assert sign_flip([0.0, 0.0, 0.0]) == 1.0
    assert sign_flip([0.0, -1.0]) == 1 / 2


@pytest.mark.parametrize("seed", range(5))
def test_p_equals_scipy(seed):
    values = np.random.default_rng(seed).normal(-0.3, 1, 9)
    expected = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="less", n_resamples=np.inf
    )
    assert sign_flip(values) == pytest.approx(expected.pvalue, abs=1e-12)


def test_more_than_24_pairs_are_tested_with_random_flips():
    n = MOST_PAIRS + 1
    assert sign_flip(-np.ones(n)) == pytest.approx(1 / (RESAMPLES + 1))
    assert sign_flip(np.ones(n)) == 1.0
    values = np.random.default_rng(0).normal(-0.3, 1, n)
    assert sign_flip(values) == sign_flip(values), "the seed is fixed"
    # One more pair that is almost a tie does not change the exact p of the other 24.
    near = np.append(values[:MOST_PAIRS], -1e-9)
    assert sign_flip(near) == pytest.approx(sign_flip(values[:MOST_PAIRS]), abs=0.01)
    assert compare_ratios(np.exp(values), np.ones(n)).n == n


@pytest.mark.parametrize("n", [3, 5, 20])
def test_the_interval_is_scipys_bca(n):
    values = np.random.default_rng(n).normal(size=n)
    expected = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=RESAMPLES,
        method="BCa",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    low, high = median_interval(values)
    assert (low, high) == (expected.low, expected.high)
    assert low <= np.median(values) <= high
    assert low < high


def test_intervals_of_degenerate_data():
    assert all(map(math.isnan, median_interval(np.array([2.0]))))
    assert median_interval(np.array([2.0, 2.0, 2.0])) == (2.0, 2.0)
    # The median of all five is that of any four of them, so BCa has no acceleration and the
    # percentiles remain: 5.8 % of the resamples have the median 5.
    assert median_interval(np.array([1.0, 1.0, 1.0, 1.0, 5.0])) == (1.0, 5.0)


def test_ratios_are_compared():
    c = compare_ratios([1.0, 2.0, 3.0], [2.0, 8.0, 6.0])
    assert (c.n, c.p, c.better) == (3, 1 / 8, 1.0)
    assert c.median == pytest.approx(0.5)
    assert c.low == pytest.approx(0.25)
    assert c.high == pytest.approx(0.5)


def test_differences_are_compared():
    c = compare_differences([1.0, 2.0, 9.0], [2.0, 4.0, 6.0])
    assert (c.n, c.p, c.median) == (3, 5 / 8, -1.0)
    assert c.better == pytest.approx(2 / 3)


def test_one_pair_and_equal_values():
    one = compare_ratios([1.0], [2.0])
    assert (one.n, one.median, one.p) == (1, 0.5, 0.5)
    assert math.isnan(one.low)
    equal = compare_ratios([2.0] * 5, [2.0] * 5)
    assert (equal.median, equal.low, equal.high, equal.p, equal.better) == (1.0, 1.0, 1.0, 1.0, 0.5)


def test_a_diverged_run_is_worse_than_any_other():
    fine = compare_ratios([0.5] * 5, [1.0] * 5)
    lost = compare_ratios([0.5, 0.5, 0.5, 0.5, math.inf], [1.0] * 5)
    other = compare_ratios([0.5] * 5, [1.0, 1.0, 1.0, 1.0, math.inf])
    assert fine.p == other.p == 1 / 32
    # In units of log 2: -1 -1 -1 -1 +2 = -2. Of the 32 sums, 12 are at most that.
    assert lost.p == 12 / 32
    assert (lost.median, lost.better) == (0.5, 0.8)
    assert lost.high == math.inf


def test_comparisons_where_all_runs_diverged():
    both = compare_ratios([math.inf] * 3, [math.inf] * 3)
    assert (both.p, both.better, both.median) == (1.0, 0.5, 1.0)
    mine = compare_ratios([math.inf] * 3, [1.0, 2.0, 3.0])
    assert (mine.p, mine.better, mine.median) == (1.0, 0.0, math.inf)
    theirs = compare_ratios([1.0, 2.0, 3.0], [math.inf] * 3)
    assert (theirs.p, theirs.better, theirs.median) == (1 / 8, 1.0, 0.0)


def test_infinite_differences_become_larger_than_every_finite_one():
    values, largest = finite(np.array([-3.0, 1.0, math.inf, -math.inf]))
    assert largest == 3.0
    assert values.tolist() == [-3.0, 1.0, 6.0, -6.0]
    assert finite(np.array([0.0, math.inf]))[0].tolist() == [0.0, 1.0]


def test_ties_count_half():
    assert probability_below([-1.0, -1.0, 0.0, 2.0]) == 0.625


def test_performance_profiles_computed_by_hand():
    costs = {"a": [1.0, 4.0, 3.0, math.inf], "b": [2.0, 2.0, math.nan, math.inf]}
    found = performance_profiles(costs, [1.0, 2.0, 10.0])
    assert found == {"a": [0.5, 0.75, 0.75], "b": [0.25, 0.5, 0.5]}


def test_wilsons_interval_has_textbook_values():
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3)
    assert high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0)
