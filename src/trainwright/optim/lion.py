"""Lion: the sign of an interpolation between momentum and gradient; one state buffer.

u = sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g;  w = w (1 - lr wd) - lr u
Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675.

Every entry moves by lr in every step, so that the rate should be 3 to 10 times below AdamW's and the decay as much
above it. The paper trains language models with lr 1e-4 to 3e-4 and decay 1.0; the defaults here suit the small models
for which AdamW's default of 1e-3 to 3e-3 does. An entry without any gradient so far has sign 0 and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig, UpdateRule


def lion_update(momenta: list[Tensor], grads: list[Tensor], beta1: float, beta2: float) -> list[Tensor]:
    """``u`` of each gradient, of its shape and dtype; moves ``momenta`` in place."""
    updates = torch._foreach_lerp(momenta, grads, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(momenta, grads, 1 - beta2)
    return list(updates)


class Lion(UpdateRule):
    """Lion for parameters of any shape, plain or DTensor.

    betas    decay of the interpolation that is stepped along and of the momentum, each in [0, 1)
    State per parameter: ``momentum`` (its shape and dtype). Raises ValueError for betas out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 1.0
    ):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        return lion_update(self.state_of(params, "momentum"), grads, *group["betas"])


@register("optimizer", "lion", paper="arXiv:2302.06675")
class LionConfig(OptimizerConfig):
    """Sign of interpolated momentum: one state buffer, steps of equal size (Lion)."""

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate; 3 to 10 times below AdamW's (paper: 1e-4).")
    weight_decay: NonNegativeFloat = Field(
        0.3, description="Decoupled weight decay, on matrices only; 3 to 10 times AdamW's (paper: 1.0)."
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.99), description="Decay of the interpolation and of the momentum, each in [0, 1)."
    )

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    def build(self, params: Sequence[NamedParam]) -> Lion:
        return Lion(decay_groups(params, self.weight_decay), self.lr, self.betas)
