"""AdamW: Adam with decoupled weight decay, through torch's fused kernel.

m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, PositiveFloat, field_validator

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.base import OptimizerConfig, by_mesh

DECAYED = ("matrix", "expert", "embedding", "head", "router")


def decay_groups(params: Sequence[NamedParam], weight_decay: float) -> list[dict[str, object]]:
    """Groups with and without decay: norms, biases and scalars set scales, which decay has no business with.

    Each of the two once more by mesh. ``split_of`` tells which were one, so that a checkpoint does not depend on it.
    """
    decayed = [n.param for n in params if n.role in DECAYED]
    rest = [n.param for n in params if n.role not in DECAYED]
    return [
        {"params": part, "weight_decay": decay, "split_of": kind}
        for kind, members, decay in (("decayed", decayed, weight_decay), ("rest", rest, 0.0))
        for part in by_mesh(members).values()
    ]


@register("optimizer", "adamw", paper="arXiv:1711.05101")
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay (torch's fused kernel)."""

    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the first and second moment, each in [0, 1).")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            decay_groups(params, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps, fused=True
        )
