"""Permutations: bijective, the same in bulk and singly, uniform, and pinned to known values."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.data.permutation import Permutation


@given(st.one_of(st.integers(0, 200), st.integers(4090, 9000)), st.integers(0, 2**63 - 1))
def test_every_number_once_in_bulk_and_singly(n, seed):
    p = Permutation(n, seed)
    whole = p.all()
    assert sorted(whole.tolist()) == list(range(n))
    some = np.arange(n)[::7][::-1]
    assert p.at(some).tolist() == whole[some].tolist()


@pytest.mark.parametrize("n", [4096, 4097, 2**15 - 1, 2**15, 2**15 + 1, 2**16 + 1, 100_003])
def test_large_sizes_across_chunks(n):
    assert np.array_equal(np.sort(Permutation(n, 5).all()), np.arange(n))


def test_without_a_seed_nothing_moves():
    assert Permutation(9, None).all().tolist() == list(range(9))
    assert Permutation(9, None).at(np.array([4, 2])).tolist() == [4, 2]


@pytest.mark.parametrize(("n", "limit"), [(3, 30), (4, 65), (5, 200)])
def test_small_permutations_are_uniform(n, limit):
    draws, orders = 6_000, list(itertools.permutations(range(n)))
    counts = Counter(tuple(Permutation(n, seed).all().tolist()) for seed in range(draws))
    expected = draws / len(orders)
    chi2 = sum((counts[order] - expected) ** 2 / expected for order in orders)
    assert chi2 < limit  # passed by chance but for 1 in 10,000


def test_neighbours_do_not_stay_together():
    order = Permutation(50_000, 3).all().astype(np.int64)
    steps = np.abs(np.diff(order))
    assert (steps == 1).sum() < 20  # 2 expected
    assert abs(np.corrcoef(order, np.arange(50_000))[0, 1]) < 0.02
    assert steps.mean() == pytest.approx(50_000 / 3, rel=0.02)


def test_seeds_are_independent():
    a, b = (Permutation(10_000, s).all() for s in (1, 2))
    assert (a == b).sum() < 12  # 1 expected


def test_the_order_is_pinned():
    """A change here would send resumed runs over other rows."""
    assert Permutation(10, 7).all().tolist() == [5, 6, 7, 0, 2, 4, 1, 3, 8, 9]
    assert Permutation(5000, 7).at(np.arange(6)).tolist() == [3213, 4129, 70, 4670, 4412, 4635]
