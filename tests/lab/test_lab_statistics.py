import math
import random

import pytest
from scipy import stats

from trainwright.lab.statistics import covers, first_reach, mean_interval, median, paired, t_quantile


def test_mean_interval_by_hand():
    # 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.30265, half = 4.30265 / sqrt(3)
    mean, interval = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and interval == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)
    assert mean_interval([]) == (None, None) and mean_interval([1.5]) == (1.5, None)
    assert mean_interval([2.0, 2.0]) == (2.0, (2.0, 2.0))


@pytest.mark.parametrize("n", [2, 3, 10])
def test_intervals_are_those_of_scipy(n):
    rng = random.Random(n)
    a = {seed: rng.gauss(2, 1) for seed in range(n)}
    b = {seed: rng.gauss(2, 1) for seed in range(n)}
    test = stats.ttest_rel(list(a.values()), list(b.values()))
    mean, interval = mean_interval(paired(a, b))
    assert mean == pytest.approx(math.fsum(a[s] - b[s] for s in a) / n)
    assert interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert covers(interval, 0.0) == (test.pvalue >= 0.05)
    assert t_quantile(0.975, n - 1) == pytest.approx(stats.t.ppf(0.975, n - 1))


def test_pairs_are_of_common_seeds_only():
    assert paired({1: 5.0, 3: 7.0, 2: 6.0}, {3: 1.0, 1: 2.0, 9: 0.0}) == [3.0, 6.0]


def test_pairing_removes_what_seeds_have_in_common():
    base = {0: 1.0, 1: 5.0, 2: 9.0}
    arm = {0: 0.9, 1: 4.92, 2: 8.91}
    assert covers(mean_interval(paired(arm, base))[1], -0.09) and not covers(mean_interval(paired(arm, base))[1], 0)
    assert covers(mean_interval(list(arm.values()))[1], 5.0)


def test_first_reach_interpolates():
    xs, losses = [0, 100, 200, 300], [4.0, 3.0, 2.0, 2.5]
    assert first_reach(xs, losses, 2.5) == 150 and first_reach(xs, losses, 3.0) == 100
    assert first_reach(xs, losses, 4.0) == 0 and first_reach(xs, losses, 1.9) is None
    assert first_reach([0, 1, 2], [4.0, None, 3.0], 3.5) == 2, "nothing is known across a gap"
    assert first_reach([], [], 1.0) is None
    assert median([3, 1, 2]) == 2 and median([1, 2, 3, 10]) == 2.5 and median([]) is None
