"""Token shards with a loss weight per token: those of data/shards.py and one file more.

``weights.bin`` holds the weight of every token over all shards, uint8 where all are 0 or 1, else float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.data.shards import SHARD_BYTES, ShardedDataset, ShardWriter, _File

WEIGHTS = "weights.bin"


class FractionalWeights(ValueError):
    """A weight is neither 0 nor 1, and the writer was not made for that."""


class WeightedShardWriter(ShardWriter):
    """As ShardWriter; :meth:`write_weighted` takes float32 weights beside the ids.

    ``fractions`` must be set where a weight may be other than 0 and 1.
    """

    def __init__(self, folder: Path, vocab_size: int, fractions: bool = False, shard_bytes: int = SHARD_BYTES):
        import xxhash

        super().__init__(folder, vocab_size, shard_bytes)
        self.weight_dtype = np.dtype("<f4" if fractions else "u1")
        self._index[WEIGHTS] = _File(folder / WEIGHTS)
        self._weights = xxhash.xxh3_128()

    def write_weighted(
        self, docs: Sequence[np.ndarray], weights: Sequence[np.ndarray], ids: Sequence[str], text_bytes: Sequence[int]
    ) -> None:
        """Append documents with their weights. Raises ValueError for weights that do not fit."""
        for doc, given in zip(docs, weights, strict=True):
            if len(doc) != len(given):
                raise ValueError(f"{len(doc)} tokens and {len(given)} weights")
        if not docs:
            return
        flat = np.concatenate(weights).astype("<f4")
        if self.weight_dtype == np.dtype("u1") and not np.isin(flat, (0.0, 1.0)).all():
            raise FractionalWeights("a weight is neither 0 nor 1; the writer needs fractions=True")
        self.write(docs, ids, text_bytes)
        self._weights.update(flat.tobytes())
        self._index[WEIGHTS].write(flat.astype(self.weight_dtype).tobytes())

    def close(self, **meta: Any) -> None:
        import xxhash

        both = xxhash.xxh3_128(self._content.digest() + self._weights.digest()).hexdigest()
        super().close(**{"fingerprint": both, "weight_dtype": self.weight_dtype.str, **meta})


class WeightedDataset(ShardedDataset):
    """Documents with loss weights, memory-mapped. ``report`` says how they were made."""

    @property
    def report(self) -> dict[str, Any]:
        return dict(self.meta.get("report", {}))

    def _open(self) -> None:
        super()._open()
        self._weights = self._map(WEIGHTS, np.dtype(self.meta["weight_dtype"]))

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        first, length = int(self._starts[doc]), int(self.lengths[doc])
        return self._weights[first : first + length][start:stop].astype(np.float32)
