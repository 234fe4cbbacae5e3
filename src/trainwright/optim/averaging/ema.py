"""Exponential moving average of the weights: a = d a + (1 - d) w after each ``every``-th step.

With ``warmup`` the decay is min(d, (1 + n) / (10 + n)) at the n-th update, so that the random start is forgotten soon.
Acceleration of stochastic approximation by averaging, Polyak and Juditsky, 1992; the warm-up is TensorFlow's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.averaging._weights import require_names, shards, swapped_for
from trainwright.optim.base import AverageConfig


class EMA:
    """Keeps float32 averages of ``params`` (sharded as they are)."""

    def __init__(self, params: Sequence[NamedParam], decay: float, every: int = 1, start: int = 0, warmup: bool = True):
        self.params = list(params)
        self.decay, self.every, self.start, self.warmup = decay, every, start, warmup
        self.updates = 0
        self.averages: list[Tensor] = [n.param.detach().float().clone() for n in params]

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step < self.start or step % self.every:
            return
        live, averages = shards(n.param for n in self.params), shards(self.averages)
        if self.updates == 0 and self.start > 0:
            torch._foreach_copy_(averages, live)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        torch._foreach_lerp_(averages, [p.float() for p in live], 1 - decay)
        self.updates += 1

    def swapped(self) -> AbstractContextManager[None]:
        """The parameters hold the averages inside, and what they held before afterwards.

        Before the first update there is no average yet, and they keep what they hold.
        """
        return swapped_for(self.params, shards(self.averages) if self.updates else None)

    def state_dict(self) -> dict[str, Any]:
        tensors = {n.name: {"average": a} for n, a in zip(self.params, self.averages, strict=True)}
        return {"tensors": tensors, "scalars": {"updates": self.updates, "made_for": {"average": "ema"}}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_names(self.params, state["tensors"])
        for n, average in zip(self.params, self.averages, strict=True):
            average.copy_(state["tensors"][n.name]["average"])
        self.updates = int(state["scalars"]["updates"])


@register("average", "ema")
class EMAConfig(AverageConfig):
    """Exponential moving average of the weights, kept in float32."""

    decay: float = Field(0.999, ge=0, lt=1, description="Share of the old average that an update keeps.")
    every: PositiveInt = Field(1, description="Steps between updates.")
    start: int = Field(0, ge=0, description="First step that counts; the average starts from the weights there.")
    warmup: bool = Field(True, description="Smaller decay in the first updates, so that the random start is forgotten.")

    def build(self, params: Sequence[NamedParam]) -> EMA:
        return EMA(params, self.decay, self.every, self.start, self.warmup)
