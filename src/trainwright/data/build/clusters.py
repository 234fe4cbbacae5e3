"""Which documents are copies of which: from the keys of the bands to one kept document per cluster.

Documents are numbered by preference here: 0 is the one that is rather kept than any other. Everything is decided on
these numbers, so the result does not depend on the order in which the documents were read.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALL_PAIRS = 12  # a bucket up to this size gives all its pairs; a larger one 2 a document
KEYS_AT_ONCE = 1 << 25  # keys of a band sorted at once: about 1 GB of working memory
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
    Memory: 8 bytes a candidate pair, and 17 bytes a document, plus the working memory of KEYS_AT_ONCE keys.
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
                codes = np.union1d(codes, pair_codes(pairs))
        looked_at += len(codes)
        linked: list[Pairs] = []
        strength: list[NDArray[np.float64]] = []
        for at in range(0, len(codes), _PAIRS_AT_ONCE):
            part = codes[at : at + _PAIRS_AT_ONCE]
            pairs = np.stack((part >> np.uint64(32), part & np.uint64(0xFFFFFFFF)), 1).astype(np.int64)
            found = verify(pairs)
            linked.append(pairs[found >= 0])
            strength.append(found[found >= 0])
        pairs = np.concatenate(linked) if linked else np.zeros((0, 2), np.int64)
        edges += len(pairs)
        removed = _spread(pairs, np.concatenate(strength) if strength else np.zeros(0), max_steps, keeper, similarity)
        alive &= keeper == np.arange(count)
        again = again and removed > 0
    _settle(keeper)
    return Clusters(keeper, similarity, looked_at, edges, rounds)


def pair_codes(pairs: Pairs) -> NDArray[np.uint64]:
    """A number for each pair, in the order of the pairs."""
    first, second = pairs.astype(np.uint64).T
    return first << np.uint64(32) | second


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
    pairs: Pairs,
    strength: NDArray[np.float64],
    max_steps: int | None,
    keeper: NDArray[np.int64],
    similarity: NDArray[np.float32],
) -> int:
    """Assign the documents of ``pairs`` to keepers, best first; returns how many were removed."""
    if not len(pairs):
        return 0
    both = np.concatenate((pairs, pairs[:, ::-1]))
    weight = np.concatenate((strength, strength))
    order = np.lexsort((both[:, 1], both[:, 0]))
    nodes, starts = np.unique(both[order, 0], return_index=True)
    ends = np.concatenate((starts[1:], np.array([len(both)])))
    where = {int(node): (int(s), int(e)) for node, s, e in zip(nodes, starts, ends, strict=True)}
    neighbours, weights = both[order, 1].tolist(), weight[order].tolist()
    taken: set[int] = set()
    removed = 0
    for node in nodes.tolist():
        if node in taken:
            continue
        taken.add(node)
        queue = deque([(node, 0)])
        while queue:
            here, steps = queue.popleft()
            if max_steps is not None and steps >= max_steps:
                continue
            start, end = where[here]
            for k in range(start, end):
                other = neighbours[k]
                if other not in taken:
                    taken.add(other)
                    keeper[other], similarity[other] = node, weights[k]
                    removed += 1
                    queue.append((other, steps + 1))
    return removed


def _settle(keeper: NDArray[np.int64]) -> None:
    """A keeper of one round can fall to a better one in the next: point to the one that is kept in the end."""
    while True:
        further = keeper[keeper]
        if np.array_equal(further, keeper):
            return
        keeper[:] = further
