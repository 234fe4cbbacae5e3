"""A random order that can be read at any place without being laid out first."""

from __future__ import annotations

import numpy as np

from trainwright.core.seeds import derive

_ROUNDS = 6
_SMALL = 1 << 12
_CHUNK = 1 << 15  # indices worked on together: their temporaries stay in the cache


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer, uint64 to uint64; the top bits are the best mixed."""
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Permutation:
    """A bijection of ``0 .. n-1`` drawn by ``seed``; ``seed=None`` is the identity.

    A Feistel network over the smallest even number of bits that holds ``n``; results beyond ``n`` are sent through it
    again until they fall into range (cycle walking). It takes no memory, any place can be asked for, and being integer
    arithmetic it is the same with every version of NumPy, whose own shuffles are not promised to be. On few bits such a
    network favours some orders, so a small ``n`` is sorted by the hash of its numbers instead.
    """

    def __init__(self, n: int, seed: int | None):
        self.n, self.seed = n, seed
        self._half = np.uint64((max(1, (n - 1).bit_length()) + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.zeros(0, np.uint64)
        self._table: np.ndarray | None = None
        if seed is None:
            return
        start = np.uint64(derive(seed, "permutation"))
        if n <= _SMALL:
            # Steps of the golden ratio, as SplitMix64 takes; a few equal hashes would only keep their order.
            numbers = np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
            self._table = np.argsort(_mixed(numbers), kind="stable").astype(np.int64)
        else:
            rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self._keys = _mixed(rounds + start)

    def __len__(self) -> int:
        return self.n

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Where each of ``indices`` (integers in ``0 .. n-1``) goes, int64 of the same length."""
        indices = np.asarray(indices)
        if self.seed is None:
            return indices.astype(np.int64)
        if self._table is not None:
            return self._table[indices]
        x = self._encrypt(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(x >= np.uint64(self.n))):
            x[outside] = self._encrypt(x[outside])
        return x.astype(np.int64)

    def all(self) -> np.ndarray:
        """The whole order, int32 where that holds ``n``, else int64."""
        out = np.empty(self.n, dtype=np.int32 if self.n <= np.iinfo(np.int32).max else np.int64)
        for start in range(0, self.n, _CHUNK):
            stop = min(start + _CHUNK, self.n)
            out[start:stop] = self.at(np.arange(start, stop))
        return out

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) >> np.uint64(32) & self._mask)
        return (left << self._half) | right
