"""Stochastic gradient descent with momentum, through torch.

b = mu b + g;  w = w - lr b (Nesterov: w - lr (g + mu b)); weight decay is added to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig


@register("optimizer", "sgd")
class SGDConfig(OptimizerConfig):
    """Gradient descent with momentum (torch's multi-tensor kernel)."""

    lr: PositiveFloat = Field(0.1, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Added to the gradient, on matrices only.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the momentum; 0: none is kept.")
    nesterov: bool = Field(False, description="Nesterov's look-ahead; needs momentum.")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        return self

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            decay_groups(params, self.weight_decay),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            foreach=True,  # torch's fused SGD has no rule for sharded parameters
        )
