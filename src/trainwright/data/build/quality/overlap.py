"""Documents of an evaluation set that a training set holds too, found by stretches of tokens that both have.

A held-out document counts as held by the other side where at least ``least`` of its stretches of ``window`` tokens are
there; one that is shorter, where it is there whole. Memory: 9 bytes a held-out token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.data.dataset import TokenDataset

WINDOW = 32
BLOCK = 1 << 20  # tokens hashed at once
_FACTORS = np.random.Generator(np.random.PCG64(32)).integers(0, 1 << 63, 512, dtype=np.uint64) | np.uint64(1)


def overlapping(
    training: TokenDataset, held_out: TokenDataset, window: int = WINDOW, least: float = 0.5
) -> NDArray[np.int64]:
    """Numbers of the documents of ``held_out`` that ``training`` holds."""
    hashes, owners = _held_out_windows(held_out, window)
    if not len(hashes):
        return np.zeros(0, np.int64)
    known, place = np.unique(hashes, return_inverse=True)
    seen = np.zeros(len(known), bool)
    shorts = sorted({int(n) - 1 for n in held_out.lengths if 0 < n - 1 < window})
    for tokens in _blocks(training):
        _mark(known, seen, _windows(tokens, window))
    if shorts:
        wanted = set(shorts)
        for doc in np.flatnonzero(np.isin(training.lengths - 1, shorts)).tolist():
            n = int(training.lengths[doc]) - 1
            if n in wanted:
                _mark(known, seen, _windows(np.asarray(training.tokens(doc, 0, n)), n))
    total = np.bincount(owners, minlength=held_out.num_docs)
    found = np.bincount(owners, weights=seen[place], minlength=held_out.num_docs)
    return np.flatnonzero((total > 0) & (found >= least * total))


def _held_out_windows(dataset: TokenDataset, window: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes, owners = [], []
    for doc in range(dataset.num_docs):
        n = int(dataset.lengths[doc]) - 1  # without what ends the document
        if n < 1:
            continue
        found = _windows(np.asarray(dataset.tokens(doc, 0, n)), min(window, n))
        hashes.append(found)
        owners.append(np.full(len(found), doc, np.int64))
    if not hashes:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return np.concatenate(hashes), np.concatenate(owners)


def _blocks(dataset: TokenDataset):  # type: ignore[no-untyped-def]
    """Tokens of whole documents, together; what reaches from one into the next is a stretch of nobody's."""
    parts, size = [], 0
    for doc in range(dataset.num_docs):
        tokens = np.asarray(dataset.tokens(doc))
        parts.append(tokens)
        size += len(tokens)
        if size >= BLOCK:
            yield np.concatenate(parts)
            parts, size = [], 0
    if parts:
        yield np.concatenate(parts)


def _windows(tokens: NDArray[np.integer], window: int) -> NDArray[np.uint64]:
    count = len(tokens) - window + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    ids = tokens.astype(np.uint64) + np.uint64(1)
    mixed = ids[:count] * _FACTORS[0]  # sums modulo 2^64
    for j in range(1, window):
        mixed += ids[j : j + count] * _FACTORS[j]
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93) + np.uint64(window)


def _mark(known: NDArray[np.uint64], seen: NDArray[np.bool_], hashes: NDArray[np.uint64]) -> None:
    if len(hashes):
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        seen[at[known[at] == hashes]] = True
