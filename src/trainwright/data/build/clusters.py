"""Which documents are copies of which: from the keys of the bands to one kept document per cluster.

Documents are numbered by preference here: 0 is the one that is rather kept than any other. Everything is decided on
these numbers, so the result does not depend on the order in which the documents were read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALL_PAIRS = 12  # a bucket up to this size gives all its pairs; a larger one 2 a document
KEYS_AT_ONCE = 1 << 22  # keys of a band sorted at once: about 250 MB of working memory
_PAIRS_AT_ONCE = 1 << 20

Pairs = NDArray[np.int64]  # [pairs, 2], first < second
Verify = Callable[[Pairs], NDArray[np.float64]]  # similarity of each pair; below 0: no copies


@dataclass
class Clusters:
    """Per document, by preference number: the kept document of its cluster, and its similarity to the one that it was
    found through (1 where it is kept itself)."""

    keeper: NDArray[np.int64]
    similarity: NDArray[np.float32]
    candidates: int  # pairs that were looked at
    edges: int  # of these, copies
    rounds: int

    @property
    def kept(self) -> NDArray[np.bool_]:
        return self.keeper == np.arange(len(self.keeper))


def bucket_pairs(keys: NDArray[np.uint64], members: NDArray[np.int64]) -> tuple[Pairs, bool]:
    """Pairs within each bucket (equal keys), and whether a bucket was too large to give all of its pairs.

    keys, members: [documents], members ascending. A large bucket gives each member beside its best member and beside
    the one before it: that ties copies together, at 2 pairs a document instead of half the square.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.concatenate((np.ones(1, bool), ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.concatenate((first, np.array([len(ordered)]))))
    found: list[Pairs] = []
    for size in np.unique(sizes[(sizes > 1) & (sizes <= ALL_PAIRS)]):
        starts = first[sizes == size]
        a, b = np.triu_indices(int(size), 1)
        found.append(np.stack((order[(starts[:, None] + a).ravel()], order[(starts[:, None] + b).ravel()]), 1))
    large = np.flatnonzero(sizes > ALL_PAIRS)
    for g in large:
        bucket = order[first[g] : first[g] + sizes[g]]
        found.append(np.stack((np.repeat(bucket[:1], len(bucket) - 1), bucket[1:]), 1))
        found.append(np.stack((bucket[1:-1], bucket[2:]), 1))
    pairs = np.concatenate(found) if found else np.zeros((0, 2), np.int64)
    return members[pairs], bool(len(large))


def cluster(
    count: int,
    bands: Callable[[], Iterable[NDArray[np.uint64]]],
    verify: Verify,
    max_steps: int | None = 2,
    eligible: NDArray[np.bool_] | None = None,
    candidates: Callable[[NDArray[np.bool_]], tuple[NDArray[np.uint64], bool]] | None = None,
) -> Clusters:
    """Clusters of ``count`` documents.

    ``bands()`` gives the keys of each band [count], by preference number. Two documents with an equal key are a
    candidate pair; ``verify`` says how similar they are. The best document that is not yet in a cluster is kept and
    takes the documents within ``max_steps`` verified pairs from it (None: all that it reaches, the connected component
    of union-find). What is left is looked at again until nothing is removed, so a second run removes nothing.
    ``candidates`` stands in for ``bands`` where these lie on other machines: from the documents that are still looked
    at, the candidate pairs, sorted, as first << 32 | second, and whether a bucket was too large to give all its pairs.
    Memory: 22 bytes a document, and up to 100 a candidate pair while pairs are searched; 70 bytes a key while a band
    is sorted, of at most KEYS_AT_ONCE. Measured: 35 bytes a document for 16 million in twos, 146 in fours.
    """
    keeper = np.arange(count, dtype=np.int64)
    similarity = np.ones(count, np.float32)
    alive = np.ones(count, bool) if eligible is None else eligible.copy()
    looked_at = edges = rounds = 0
    again = True
    while again:
        rounds += 1
        again = False
        codes = np.zeros(0, np.uint64)
        if candidates is not None:
            codes, again = candidates(alive)
        for keys in bands():
            for pairs, cut in _band_pairs(keys, alive):
                again = again or cut
                codes = _merged(codes, pair_codes(pairs))
        looked_at += len(codes)
        codes, strength = _verified(codes, verify)
        edges += len(codes)
        removed = _spread(codes, strength, max_steps, keeper, similarity)
        alive &= keeper == np.arange(count)
        again = again and removed > 0
    _settle(keeper)
    return Clusters(keeper, similarity, looked_at, edges, rounds)


def _merged(codes: NDArray[np.uint64], more: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Both without repeats, sorted; ``codes`` are already."""
    if not len(more):
        return codes
    both = np.concatenate((codes, more))
    both.sort()
    new = np.ones(len(both), bool)
    np.not_equal(both[1:], both[:-1], out=new[1:])
    return both[new]


def _verified(codes: NDArray[np.uint64], verify: Verify) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """The pairs that are copies, moved to the front of ``codes``, and how similar each is."""
    codes = codes if codes.flags.writeable else codes.copy()
    strength = np.empty(len(codes), np.float32)
    end = 0
    for at in range(0, len(codes), _PAIRS_AT_ONCE):
        part = codes[at : at + _PAIRS_AT_ONCE]
        found = verify(np.stack(_sides(part), 1).astype(np.int64))
        copies = found >= 0
        kept = int(np.count_nonzero(copies))
        strength[end : end + kept] = found[copies]
        codes[end : end + kept] = part[copies]
        end += kept
    return codes[:end], strength[:end]


def pair_codes(pairs: Pairs) -> NDArray[np.uint64]:
    """A number for each pair, in the order of the pairs."""
    first, second = pairs.astype(np.uint64).T
    return first << np.uint64(32) | second


def _sides(codes: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    return (codes >> np.uint64(32)).astype(np.uint32), codes.astype(np.uint32)  # the lower 32 bits


def _band_pairs(keys: NDArray[np.uint64], alive: NDArray[np.bool_]) -> Iterator[tuple[Pairs, bool]]:
    """Pairs of one band; keys of more than KEYS_AT_ONCE documents by ranges of the key."""
    parts = max(1, -(-len(keys) // KEYS_AT_ONCE))
    if parts == 1:
        members = np.flatnonzero(alive)
        if len(members):
            yield bucket_pairs(keys[members], members)
        return
    bounds = [(i << 64) // parts for i in range(parts)] + [1 << 64]
    for low, high in itertools.pairwise(bounds):
        inside = alive & (keys >= np.uint64(low))
        if high < 1 << 64:
            inside &= keys < np.uint64(high)
        members = np.flatnonzero(inside)
        if len(members):
            yield bucket_pairs(keys[members], members)


def _spread(
    codes: NDArray[np.uint64],
    strength: NDArray[np.float32],
    max_steps: int | None,
    keeper: NDArray[np.int64],
    similarity: NDArray[np.float32],
) -> int:
    """Assign the documents of the pairs ``codes``, sorted, to keepers, best first; returns how many were removed."""
    first, second = _sides(codes)
    alone = _alone(first, second, len(keeper))
    # Most copies come in twos that are tied to nothing else: the better one is kept.
    keeper[second[alone]] = first[alone]
    similarity[second[alone]] = strength[alone]
    removed = int(np.count_nonzero(alone))
    if removed == len(first):
        return removed
    tied = np.flatnonzero(~alone)
    first, second, strength = first[tied], second[tied], strength[tied]
    del alone, tied
    return removed + _search(first, second, strength, max_steps, keeper, similarity)


def _alone(first: NDArray[np.uint32], second: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """Which pairs share no document with another pair."""
    degree = np.zeros(count, np.uint8)  # 0, 1, or 2 for more
    for side in (first, second):
        for at in range(0, len(side), _PAIRS_AT_ONCE):
            members, times = np.unique(side[at : at + _PAIRS_AT_ONCE], return_counts=True)
            degree[members] = np.minimum(degree[members] + np.minimum(times, 2), 2)
    return (degree[first] < 2) & (degree[second] < 2)


def _search(
    first: NDArray[np.uint32],
    second: NDArray[np.uint32],
    strength: NDArray[np.float32],
    max_steps: int | None,
    keeper: NDArray[np.int64],
    similarity: NDArray[np.float32],
) -> int:
    """Breadth first from the best document that is not taken; pairs sorted by ``first``, then by ``second``."""
    nodes = np.union1d(first, second)  # [linked], and all below by the place in it
    first = np.searchsorted(nodes, first).astype(np.uint32)
    second = np.searchsorted(nodes, second).astype(np.uint32)
    back: NDArray[Any] = np.argsort(second, kind="stable").astype(np.uint32 if len(second) < 1 << 32 else np.int64)
    bounds = np.arange(len(nodes) + 1)
    # Neighbours of a document: its worse ones from `after` in `second`, its better ones by `before` in `back`. Views of
    # memory, since items of an array are slow to take one by one and lists take eight times the space.
    after = np.searchsorted(first, bounds).data
    before = np.searchsorted(second, bounds, sorter=back).data
    del bounds
    worse, better, way_back = second.data, first.data, back.data
    taken = bytearray(len(nodes))
    owner = np.arange(len(nodes), dtype=np.uint32)
    edge = np.zeros(len(nodes), back.dtype)  # through which a document was found
    owners, edges = owner.data, edge.data
    removed = 0
    for node in range(len(nodes)):
        if taken[node]:
            continue
        taken[node] = 1
        front, steps = [node], 0
        while front and (max_steps is None or steps < max_steps):
            reached = []
            for here in front:
                for k in way_back[before[here] : before[here + 1]]:
                    other = better[k]
                    if not taken[other]:
                        taken[other] = 1
                        owners[other], edges[other] = node, k
                        reached.append(other)
                for k in range(after[here], after[here + 1]):
                    other = worse[k]
                    if not taken[other]:
                        taken[other] = 1
                        owners[other], edges[other] = node, k
                        reached.append(other)
            removed += len(reached)
            front, steps = reached, steps + 1
    gone = np.flatnonzero(owner != np.arange(len(nodes), dtype=np.uint32))
    keeper[nodes[gone]] = nodes[owner[gone]]
    similarity[nodes[gone]] = strength[edge[gone]]
    return removed


def _settle(keeper: NDArray[np.int64]) -> None:
    """A keeper of one round can fall to a better one in the next: point to the one that is kept in the end."""
    while True:
        further = keeper[keeper]
        if np.array_equal(further, keeper):
            return
        keeper[:] = further
