"""Micro-batches of a token budget out of padded rows, as ODB groups them.

Rows of different length (one document each) padded to T cost T positions each. Here the rows of a step are grouped by
length, each group trimmed to its longest row. Positions behind the last weight above 0 have no part in a causal
model's loss, so loss sum, weight and gradient of the step are those of the untrimmed batch, whatever the grouping. The
executor divides by the weight of the global batch, so no loss scale is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainwright.core.batch import Batch, as_padding
from trainwright.data.odb_align import align, group_sizes, longest_first


def used_lengths(batch: Batch) -> Tensor:
    """int64 ``[B]``: positions of each row up to the last one with a weight above 0; at least 1."""
    places = torch.arange(1, batch.shape[1] + 1, device=batch.weights.device)
    return ((batch.weights > 0) * places).amax(dim=1).clamp_min(1)


def micro_batches(batch: Batch, budget: int, count: int | None = None) -> list[Batch]:
    """Groups of rows of at most ``budget`` positions each (a longer row is alone), those of the longest rows first.

    count   at least this many, for ranks that have to make the same number: rows are split off, and where there are
            too few of them a row of weight 0 is repeated

    Meant for batches on the CPU: the shapes depend on the weights.
    """
    lengths = used_lengths(batch).tolist()
    order = longest_first(lengths)
    sizes = group_sizes([lengths[i] for i in order], budget)
    pieces = align(sizes, max(len(sizes), count or 0))
    out = [_rows(batch, order[p.start : p.stop], lengths[order[p.start]]) for p in pieces]
    while len(out) < (count or 0):
        empty = _rows(batch, order[-1:], lengths[order[-1]])
        empty.weights = torch.zeros_like(empty.weights)
        empty.doc_ids = as_padding(empty.doc_ids)
        out.append(empty)
    return out


def _rows(batch: Batch, rows: list[int], width: int) -> Batch:
    index = torch.tensor(rows, device=batch.tokens.device)
    full = batch.shape[1]

    def cut(value: Tensor) -> Tensor:
        value = value.index_select(0, index)
        return value[:, :width] if value.ndim > 1 and value.shape[1] == full else value

    return batch._map(cut)
