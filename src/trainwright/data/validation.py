"""Validation rows: a fixed set, the same whatever the seed and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.packed import PackedConfig
from trainwright.data.dataset import TokenDataset
from trainwright.data.packing import NOTHING, assemble
from trainwright.data.rows import RowStream


def validation_batches(
    dataset: TokenDataset,
    *,
    seq_len: int,
    pad_id: int,
    batch_rows: int,
    rank: int = 0,
    world_size: int = 1,
    max_tokens: int | None = None,
    token_bytes: np.ndarray | None = None,
    batcher: BatcherConfig | None = None,
) -> Iterator[Batch]:
    """Rows of ``dataset``, packed or as ``batcher`` says, at most ``batch_rows`` in a batch, divided over the ranks.

    They are rows of one fixed shuffle, so that the first ``max_tokens`` (rounded down to whole rows, at least one) are
    drawn from the whole dataset; None: all rows. Every rank gets the same number of batches of the same sizes; the last
    rows of some ranks may be padding of weight 0. A dataset without tokens has no batches.

    With ``token_bytes`` (integers ``[vocab]``, UTF-8 bytes of each id) each batch has ``extras["target_bytes"]`` int32
    ``[B, T]``: bytes of each target of weight > 0, else 0. Bits per byte = nats / (ln 2 * sum of these).
    """
    if batch_rows < 1:
        raise ConfigError("should be at least 1", key="batch_rows", value=batch_rows)
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError("should be at least 1", key="max_tokens", value=max_tokens)
    if dataset.num_docs == 0 or dataset.num_tokens == 0:
        return
    stream = RowStream(dataset, batcher or PackedConfig(), seq_len, seed=0)
    total = stream.num_rows(0)
    if max_tokens is not None:
        total = min(total, max(1, max_tokens // seq_len))
    mine = range(rank * total // world_size, (rank + 1) * total // world_size)
    most = -(-total // world_size)
    table = None if token_bytes is None else torch.from_numpy(np.asarray(token_bytes, dtype=np.int32))
    for start in range(0, most, batch_rows):
        size = min(batch_rows, most - start)
        rows = stream.segments(0, mine[start : start + size])
        rows += [NOTHING] * (size - len(rows))
        batch = assemble([(dataset, s) for s in rows], seq_len, pad_id)
        if table is not None:
            batch.extras["target_bytes"] = table[batch.targets] * (batch.weights > 0)
        yield batch
