"""AdamW: Adam with decoupled weight decay, through torch's fused kernel.

m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
Decoupled Weight Decay Regularization, arXiv:1711.05101.

Of bfloat16 weights torch's keeps both moments in bfloat16, where v does not shrink with b2 of 0.997 or more. The rule
here, which stochastic rounding and wrappers use, keeps v in float32.
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


def adam_updates(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    betas: Sequence[float],
    eps: float,
    ascending: bool = False,
) -> list[Tensor]:
    """Adam's update of each gradient, corrected for ``steps``, laid out as ``params``; moves both moments.

    Computed by torch's fused kernel in the dtype of ``second``, which may be a wider one than that of the others.
    ascending  ``first`` is the mean of the negative gradients
    """
    found = list(params)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, v in enumerate(second):
        alike.setdefault((v.device, v.dtype), []).append(i)
    for (_, dtype), some in alike.items():
        moments = [first[i].to(dtype) for i in some]
        updates = [torch.zeros_like(params[i], dtype=dtype, memory_format=torch.preserve_format) for i in some]
        # The fused kernel's step from zero weights with rate -1 is u, and that upwards with rate 1.
        torch._fused_adamw_(
            updates,
            [grads[i].to(dtype) for i in some],
            moments,
            [second[i] for i in some],
            [],
            [steps[i] for i in some],
            lr=1.0 if ascending else -1.0,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=0.0,
            eps=eps,
            amsgrad=False,
            maximize=ascending,
        )
        for i, m, u in zip(some, moments, updates, strict=True):
            if m is not first[i]:
                first[i].copy_(m)
            found[i] = u.to(params[i].dtype)
    return found


class AdamW(UpdateRule):
    """AdamW whose update methods like MGUP and SPECTRA can change; torch.optim.AdamW is the faster one alone.

    State per parameter: ``exp_avg``, ``exp_avg_sq`` (its shape; the second in float32 at least, which torch's keeps in
    the dtype of the parameter), ``step`` (float32 scalar).
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
        for p in params:
            if "step" not in self.state[p]:
                # Like torch's: float32 by the parameter, where the fused kernel reads it.
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        steps = [self.state[p]["step"] for p in params]
        for device in {s.device for s in steps}:
            torch._foreach_add_([s for s in steps if s.device == device], 1)
        first, second = self.state_of(params, "exp_avg"), self.state_of(params, "exp_avg_sq")
        return adam_updates(params, grads, first, second, steps, group["betas"], group["eps"])


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
