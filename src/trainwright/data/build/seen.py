"""Hashes that were seen before: 8 bytes each, in sorted runs."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

BUFFER = 1 << 16


class SeenHashes:
    """A growing set of 64-bit hashes of texts.

    New hashes gather in a set; a full one becomes a sorted array, and arrays of about equal size are merged, so that
    a look-up is a binary search in few of them.
    """

    def __init__(self) -> None:
        self._new: set[int] = set()
        self._runs: list[NDArray[np.uint64]] = []

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._runs))

    def add(self, text: str) -> bool:
        """Whether ``text`` is new; it is not, from now on."""
        value = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
        if value in self._new:
            return False
        key = np.uint64(value)
        for run in self._runs:
            place = int(np.searchsorted(run, key))
            if place < len(run) and run[place] == key:
                return False
        self._new.add(value)
        if len(self._new) >= BUFFER:
            self._flush()
        return True

    def _flush(self) -> None:
        run = np.fromiter(self._new, np.uint64, len(self._new))
        run.sort()
        self._new = set()
        while self._runs and len(self._runs[-1]) <= len(run):
            run = np.concatenate((self._runs.pop(), run))
            run.sort(kind="stable")
        self._runs.append(run)
