"""The cross-entropy of every token of a batch, without a gradient: what methods that choose data look at."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.models.base import Hidden
from trainwright.objectives.linear_cross_entropy import linear_cross_entropy


@torch.no_grad()
def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Nats of each target, float32 ``[B, T]``; 0 where the weight is 0. The logits are made chunk by chunk.

    ``model`` may be wrapped (DDP, FSDP). It is used in the mode it is in: call ``model.eval()`` first to leave dropout
    out.
    """

    def head(hidden: Hidden) -> Tensor:
        h = hidden.head
        _, metrics = linear_cross_entropy(
            hidden.states.flatten(0, 1), h.weight, batch.targets.flatten(), (batch.weights > 0).flatten().float(),
            bias=h.bias, softcap=h.softcap, scale=h.scale, token_losses=True,
        )  # fmt: skip
        return metrics["token_nll"]

    losses: Tensor = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, head_fn=head)
    return losses.view_as(batch.weights).float()


def row_losses(losses: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of each row's token losses, float64 ``[B]``; NaN for a row whose weights are all 0."""
    weights = weights.double()
    return (losses.double() * weights).sum(1) / weights.sum(1)
