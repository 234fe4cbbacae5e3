"""The loss of rows whose logits are spread over ranks by vocabulary: each holds ``y[:, start : start + V_local]``.

    top = max over ranks of max y;   S = sum over ranks of sum exp(y - top);   lse = top + log S
    nll = lse - y_target (held by one rank);   gradient of the logits here: p - onehot, of this rank's columns

Three all-reduces of a number or two per row, instead of gathering ``V`` of them. Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Rows of a head ``[vocab, D]`` from ``start`` on are here; the others on the other ranks of ``group``."""

    start: int
    vocab: int
    group: Any

    @property
    def widest(self) -> int:
        """Rows of the largest shard: what all ranks size their chunks by, so that they make as many of them."""
        return -(-self.vocab // dist.get_world_size(self.group))

    def row_loss(self, logits: Tensor, targets: Tensor, weights: Tensor, options: Any, out: Tensor | None) -> Tensor:
        """As linear_cross_entropy.row_loss, for ``logits [C, V_local]``: the terms of the whole rows, and the gradient
        of the columns here. All ranks of the group pass the same rows."""
        y, local = logits, targets - self.start
        slope = None
        if options.softcap is not None:
            y.div_(options.softcap).tanh_()
            slope = y.square().neg_().add_(1) if out is not None else None
            y.mul_(options.softcap)
        here = (local >= 0) & (local < y.shape[1])
        column = local.clamp(0, max(y.shape[1] - 1, 0))[:, None]
        nothing = y.new_full((y.shape[0],), float("-inf"))
        if y.shape[1]:
            own = torch.where(here, y.gather(1, column).squeeze(1), nothing)
            tops = torch.stack([y.amax(-1), own])
        else:  # more ranks than pieces of the vocabulary
            tops = torch.stack([nothing, nothing])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=self.group)
        top, own = tops
        first = self._first(y, top)
        smooth = options.label_smoothing
        sums = [y.sum(-1)] if smooth else []
        y.sub_(top[:, None]).exp_()
        stacked = torch.stack([y.sum(-1), *sums])
        dist.all_reduce(stacked, group=self.group)
        lse = top + stacked[0].log()
        mean = stacked[1] / self.vocab if smooth else None
        terms = torch.stack([
            lse - own, lse, lse - mean if mean is not None else torch.zeros_like(lse), (first == targets).to(lse.dtype)
        ])  # fmt: skip
        if out is None:
            return terms
        w = weights[:, None]
        y.mul_(w * ((1 + 2 * options.z_loss * lse) / stacked[0])[:, None])
        if y.shape[1]:
            y.scatter_add_(1, column, (smooth - 1) * w * here[:, None])
        if smooth:
            y.sub_(w * (smooth / self.vocab))
        if slope is not None:
            y.mul_(slope)
        if out is not y:
            out.copy_(y)
        return terms

    def _first(self, y: Tensor, top: Tensor) -> Tensor:
        """Id of the first largest logit of each row, over all ranks."""
        if y.shape[1]:
            value, index = y.max(-1)
            found = torch.where(value == top, index + self.start, self.vocab)
        else:
            found = torch.full_like(top, self.vocab, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return found


def vocab_shard(weight: Any) -> VocabShard | None:
    """Of a head that is a DTensor cut along its first dimension; None for a plain one.

    Raises ValueError for any other cut.
    """
    if not hasattr(weight, "device_mesh"):
        return None
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(f"a head can be cut by its rows over one dimension of the mesh, got {weight.placements}")
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return VocabShard(offset[0], weight.shape[0], weight.device_mesh.get_group())
