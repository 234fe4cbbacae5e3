"""Clusters against union-find and breadth-first search written out."""

import tracemalloc
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.data.build import clusters as module
from trainwright.data.build.clusters import ALL_PAIRS, bucket_pairs, cluster

edge_lists = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)).filter(lambda e: e[0] != e[1]), max_size=25)


def bands_of(edges, count):
    """One band an edge: its two documents share a key, all others have their own."""
    out = []
    for a, b in edges:
        keys = np.arange(count, dtype=np.uint64)
        keys[max(a, b)] = min(a, b)
        out.append(keys)
    return lambda: out


def everything(pairs):
    return np.ones(len(pairs))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(edge_lists)
def test_without_a_limit_it_is_union_find(edges):
    parent = list(range(15))

    def root(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for a, b in edges:
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    found = cluster(15, bands_of(edges, 15), everything, max_steps=None)
    assert found.keeper.tolist() == [root(i) for i in range(15)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(edge_lists, st.integers(1, 3))
def test_cap_on_the_diameter(edges, steps):
    """Every removed document is within ``steps`` edges of what is kept, and no two that are kept share an edge."""
    found = cluster(15, bands_of(edges, 15), everything, max_steps=steps)
    near = {i: {i} for i in range(15)}
    direct = {i: {i} for i in range(15)}
    for a, b in edges:
        direct[a].add(b)
        direct[b].add(a)
    for _ in range(steps):
        near = {i: set().union(*(direct[j] for j in reached)) for i, reached in near.items()}
    for i, keeper in enumerate(found.keeper):
        assert i in near[int(keeper)]
        assert keeper <= i and found.keeper[keeper] == keeper
    assert not any(found.kept[a] and found.kept[b] for a, b in edges)


def written_out(count, edges, strength, steps):
    """Breadth first from the best free document, its neighbours from the best to the worst."""
    near = {i: [] for i in range(count)}
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    keeper, similarity = list(range(count)), [1.0] * count
    taken = set()
    for node in range(count):
        if node in taken:
            continue
        taken.add(node)
        queue = deque([(node, 0)])
        while queue:
            here, far = queue.popleft()
            if steps is not None and far >= steps:
                continue
            for other in sorted(near[here]):
                if other not in taken:
                    taken.add(other)
                    keeper[other], similarity[other] = node, strength[min(here, other), max(here, other)]
                    queue.append((other, far + 1))
    return keeper, similarity


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(edge_lists, st.sampled_from([None, 1, 2, 3]), st.integers(1, 4), st.integers(0, 99))
def test_keepers_and_similarities_are_those_of_a_search_written_out(edges, steps, at_once, seed):
    edges = sorted({(min(e), max(e)) for e in edges})
    strength = np.random.default_rng(seed).random((15, 15)).astype(np.float32)
    expected = written_out(15, edges, strength, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PAIRS_AT_ONCE", at_once)
        found = cluster(15, bands_of(edges, 15), lambda p: strength[p[:, 0], p[:, 1]].astype(float), max_steps=steps)
    assert found.keeper.tolist() == expected[0]
    assert found.similarity.tolist() == pytest.approx(expected[1])
    assert found.edges == len(edges)


@pytest.mark.parametrize(("together", "most"), [(1, 75), (2, 85), (4, 180)])
def test_memory_a_document(together, most):
    """Where every document has a copy, or three, it is what the docstring says."""
    count = 100_000
    keys = np.repeat(np.arange(count // together, dtype=np.uint64), together) * np.uint64(0x9FB21C651E98DF25)
    tracemalloc.start()
    found = cluster(count, lambda: [keys], everything)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.kept.sum() == count // together
    assert peak < most * count


def test_a_chain_is_cut():
    edges = [(i, i + 1) for i in range(9)]
    assert cluster(10, bands_of(edges, 10), everything, max_steps=None).kept.sum() == 1
    assert cluster(10, bands_of(edges, 10), everything, max_steps=2).keeper.tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_a_pair_that_is_no_copy_is_no_edge():
    edges = [(0, 1), (1, 2)]
    found = cluster(3, bands_of(edges, 3), lambda p: np.where(p[:, 1] == 2, -1.0, 0.9), max_steps=None)
    assert found.keeper.tolist() == [0, 0, 2]
    assert found.similarity.tolist() == pytest.approx([1, 0.9, 1])
    assert (found.candidates, found.edges) == (2, 1)


def test_large_buckets():
    """A bucket of many documents costs two pairs a document, and is worked off until a second run removes nothing."""
    count = 40 * ALL_PAIRS
    keys = np.zeros(count, np.uint64)
    pairs, cut = bucket_pairs(keys, np.arange(count))
    assert cut and len(pairs) < 2 * count
    # Two documents are copies where they have the same remainder: neither the best nor the last neighbour need be one.
    group = np.random.default_rng(0).integers(0, 7, count)
    same = lambda p: np.where(group[p[:, 0]] == group[p[:, 1]], 1.0, -1.0)  # noqa: E731
    found = cluster(count, lambda: [keys], same)
    assert all(group[found.keeper[i]] == group[i] for i in range(count))
    assert found.rounds > 1
    again = cluster(int(found.kept.sum()), lambda: [keys[found.kept]], lambda p: same(np.flatnonzero(found.kept)[p]))
    assert again.kept.all()


def test_bands_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    bands = [rng.integers(0, 2**64, 300, dtype=np.uint64) for _ in range(3)]
    for keys in bands:
        keys[rng.permutation(300)[:100]] = keys[rng.permutation(300)[:100]]
    whole = cluster(300, lambda: bands, everything)
    monkeypatch.setattr(module, "KEYS_AT_ONCE", 40)
    parts = cluster(300, lambda: bands, everything)
    assert whole.kept.sum() < 290
    assert np.array_equal(whole.keeper, parts.keeper)


def test_not_eligible():
    found = cluster(3, lambda: [np.zeros(3, np.uint64)], everything, eligible=np.array([True, False, True]))
    assert found.keeper.tolist() == [0, 1, 0]
    assert cluster(0, lambda: [np.zeros(0, np.uint64)], everything).keeper.tolist() == []
