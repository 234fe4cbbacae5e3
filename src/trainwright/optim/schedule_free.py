"""Schedule-free AdamW: a running average of the iterates takes the place of a decaying rate.

y are the live weights, at which gradients are taken; z the iterate; x the average, which is what to evaluate and keep:
    v = b2 v + (1 - b2) g^2;  d = g / (sqrt(v / (1 - b2^t)) + eps) + wd y
    c = lr_max^2 / (sum of lr_max^2 so far);  z = z - lr d;  x = (1 - c) x + c z;  y = (1 - b1) z + b1 x
x is not stored: y = y + c (z - y) + lr (b1 (1 - c) - 1) d, with z from before the step, moves y alike, and
x = (y - (1 - b1) z) / b1.
lr_max is the highest rate so far, so that steps of a warm-up weigh less; r > 0 gives step t the weight t^r besides.
The Road Less Scheduled, arXiv:2405.15682; code: PyPI schedulefree, which this equals (tested side by side).

Use it with a constant rate after a warm-up, without another average. ``swapped()`` puts x into the weights, as the
running averages do, so that evaluation, export and samples see x while checkpoints keep y and z; the package has
train() and eval() modes instead, and must be in the right one whenever weights are read. A step at rate 0 moves nothing
here; in the package it still draws y towards z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator
from torch import Tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig
from trainwright.optim.settings import CheckedOptimizer


class ScheduleFreeAdamW(CheckedOptimizer):
    """Schedule-free AdamW for parameters of any shape, plain or DTensor.

    betas  interpolation between z and x, in (0, 1), and decay of the second moment, in [0, 1)
    r      power of t in the weights of the average
    State per parameter: ``z``, ``exp_avg_sq`` (its shape; the second in float32 at least); ``step``, ``weight_sum`` and
    ``lr_max`` in the groups.
    Raises ValueError for betas out of range.
    """

    group_state = ("step", "weight_sum", "lr_max")

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
    ):
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "r": r, "step": 0,
            "weight_sum": 0.0, "lr_max": 0.0,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        super().check_group(group)

    def state_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"betas[0]": group["betas"][0]}  # what x is told by, from y and z

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(params, group)
        return loss

    def _step_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        group["step"] += 1
        lr, (b1, b2) = group["lr"], group["betas"]
        group["lr_max"] = max(group["lr_max"], lr)
        weight = group["step"] ** group["r"] * group["lr_max"] ** 2 if lr else 0.0
        group["weight_sum"] += weight
        c = weight / group["weight_sum"] if weight else 0.0
        for p in params:
            state = self.state[p]
            if "z" not in state:
                state["z"] = p.detach().clone(memory_format=torch.preserve_format)
                dtype = self.state_dtype(p, "exp_avg_sq")
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = state["exp_avg_sq"].to(self.state_dtype(p, "exp_avg_sq"))  # of an older checkpoint
        # Everything is per entry: each rank works on what it holds.
        y = [local_tensor(p) for p in params]
        z, v = ([local_tensor(self.state[p][key]) for p in params] for key in ("z", "exp_avg_sq"))
        grads = [local_tensor(cast(Tensor, p.grad)).to(second.dtype) for p, second in zip(params, v, strict=True)]
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - b2)
        roots = torch._foreach_div(v, 1 - b2 ** group["step"])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        directions = [d.to(p.dtype) for d, p in zip(torch._foreach_div(grads, roots), params, strict=True)]
        if group["weight_decay"]:
            torch._foreach_add_(directions, y, alpha=group["weight_decay"])
        torch._foreach_lerp_(y, z, c)
        torch._foreach_add_(y, directions, alpha=lr * (b1 * (1 - c) - 1))
        torch._foreach_sub_(z, directions, alpha=lr)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the parameters hold x, and afterwards bit for bit what they held before."""
        every = ((p, group["betas"][0]) for group in self.param_groups for p in group["params"])
        moved = [(p, b1) for p, b1 in every if "z" in self.state.get(p, {})]
        live = [local_tensor(p.detach()) for p, _ in moved]
        kept = [p.clone() for p in live]
        try:
            with torch.no_grad():
                for y, (p, b1) in zip(live, moved, strict=True):
                    y.lerp_(local_tensor(self.state[p]["z"]), 1 - 1 / b1)
            yield
        finally:
            if live:
                with torch.no_grad():
                    torch._foreach_copy_(live, kept)


def check_betas(betas: Sequence[float]) -> None:
    """ValueError for betas out of range."""
    if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
        raise ValueError(f"betas={tuple(betas)}: the first should be in (0, 1), the second in [0, 1)")


ONE_RATE = "it averages its iterates instead of lowering the rate; write `schedule: constant`"


@register(
    "optimizer",
    "schedule_free",
    paper="arXiv:2405.15682",
    conflicts={
        "schedule.cosine": ONE_RATE,
        "schedule.linear": ONE_RATE,
        "schedule.inverse_sqrt": ONE_RATE,
        "schedule.wsd": ONE_RATE,
        "average": "it is an average of the weights already, which validation uses; leave `average` out",
    },
)
class ScheduleFreeConfig(OptimizerConfig):
    """AdamW at a constant rate whose weights are averaged as it goes (schedule-free)."""

    lr: PositiveFloat = Field(2.5e-3, description="Learning rate, constant but for a warm-up.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay at y, on matrices only.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Share of the average in the live weights (try 0.95 for long runs); decay of v."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")
    r: NonNegativeFloat = Field(0.0, description="Power of the step in the weights of the average.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        check_betas(betas)
        return betas

    def build(self, params: Sequence[NamedParam]) -> ScheduleFreeAdamW:
        return ScheduleFreeAdamW(decay_groups(params, self.weight_decay), self.lr, self.betas, self.eps, r=self.r)
