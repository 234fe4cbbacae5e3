"""Signum: the sign of the momentum, one state buffer.

m = b m + (1 - b) g;  w = w (1 - lr wd) - lr sign(m)
signSGD: Compressed Optimisation for Non-Convex Problems, arXiv:1802.04434, algorithm 2. With beta = 0 it is signSGD.
Lion differs in stepping along another interpolation than the one it keeps; with equal betas the two are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig, UpdateRule


class Signum(UpdateRule):
    """Signum for parameters of any shape, plain or DTensor.

    momentum  decay of the momentum, in [0, 1); 0: none is kept
    State per parameter: ``momentum`` (its shape and dtype). Raises ValueError for a momentum out of range.
    """

    def __init__(self, params: Any, lr: float = 1e-4, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if group["momentum"] == 0:
            return list(torch._foreach_sign(grads))
        momenta = self.state_of(params, "momentum")
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        return list(torch._foreach_sign(momenta))


@register("optimizer", "signum", paper="arXiv:1802.04434")
class SignumConfig(OptimizerConfig):
    """Sign of the momentum: steps of equal size (Signum, signSGD)."""

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate; 3 to 10 times below AdamW's (paper: 1e-4).")
    weight_decay: NonNegativeFloat = Field(
        0.3, description="Decoupled weight decay, on matrices only; as much above AdamW's."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the momentum; 0: signSGD.")

    def build(self, params: Sequence[NamedParam]) -> Signum:
        return Signum(decay_groups(params, self.weight_decay), self.lr, self.momentum)
