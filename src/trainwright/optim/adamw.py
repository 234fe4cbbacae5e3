"""AdamW: Adam with decoupled weight decay, through torch's fused kernel.

m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat, field_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.base import OptimizerConfig, UpdateRule, by_mesh

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


class AdamW(UpdateRule):
    """AdamW whose update methods like MGUP and SPECTRA can change; torch.optim.AdamW is the faster one alone.

    State per parameter: ``exp_avg``, ``exp_avg_sq`` (its shape), ``step`` (float32 scalar).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        updates = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        for device in {p.device for p in params}:
            some = [i for i, p in enumerate(params) if p.device == device]
            own = [params[i] for i in some]
            for p in own:
                if "step" not in self.state[p]:
                    # Like torch's: float32 by the parameter, where the fused kernel reads it.
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)
            steps = [self.state[p]["step"] for p in own]
            torch._foreach_add_(steps, 1)
            # The fused kernel's step from zero weights with rate -1 is u.
            torch._fused_adamw_(
                [updates[i] for i in some],
                [grads[i] for i in some],
                self.state_of(own, "exp_avg"),
                self.state_of(own, "exp_avg_sq"),
                [],
                steps,
                lr=-1.0,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return updates


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

    def build_rule(self, params: Sequence[NamedParam]) -> AdamW:
        return AdamW(decay_groups(params, self.weight_decay), self.lr, self.betas, self.eps)
