"""A random order that can be read at any place without being laid out first."""

from __future__ import annotations

import numpy as np

from trainwright.core.seeds import derive

_ROUNDS = 6
_CHUNK = 1 << 15  # indices worked on together: their temporaries stay in the cache


class Permutation:
    """A bijection of ``0 .. n-1`` drawn by ``seed``; ``seed=None`` is the identity.

    A Feistel network over the smallest even number of bits that holds ``n``; results beyond ``n`` are sent through it
    again until they fall into range (cycle walking). It takes no memory, any place can be asked for, and being integer
    arithmetic it is the same with every version of NumPy, whose own shuffles are not promised to be.
    """

    def __init__(self, n: int, seed: int | None):
        self.n, self.seed = n, seed
        bits = max(1, (n - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [] if seed is None else [np.uint64(derive(seed, "feistel", k)) for k in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Where each of ``indices`` (integers in ``0 .. n-1``) goes, int64 of the same length."""
        indices = np.asarray(indices)
        if self.seed is None:
            return indices.astype(np.int64)
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
            # The finalizer of SplitMix64, of which the top bits are the best mixed.
            h = right + key
            h ^= h >> np.uint64(30)
            h *= np.uint64(0xBF58476D1CE4E5B9)
            h ^= h >> np.uint64(27)
            h *= np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ (h >> np.uint64(32) & self._mask)
        return (left << self._half) | right
