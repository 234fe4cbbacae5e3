"""Exponential moving average of the weights: a = d a + (1 - d) w after each ``every``-th step.

With ``warmup`` the decay is min(d, (1 + n) / (10 + n)) at the n-th update, so that the random start is forgotten soon.
Acceleration of stochastic approximation by averaging, Polyak and Juditsky, 1992; the warm-up is TensorFlow's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
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
        live = [n.param.detach() for n in self.params]
        if self.updates == 0 and self.start > 0:
            torch._foreach_copy_(self.averages, live)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        same = all(a.dtype == p.dtype for a, p in zip(self.averages, live, strict=True))
        torch._foreach_lerp_(self.averages, live if same else [p.float() for p in live], 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters hold the averages inside, and what they held before afterwards."""
        live = [n.param.detach() for n in self.params]
        kept = [p.clone() for p in live]
        try:
            with torch.no_grad():
                torch._foreach_copy_(live, self.averages)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, kept)

    def state_dict(self) -> dict[str, Any]:
        tensors = {n.name: {"average": a} for n, a in zip(self.params, self.averages, strict=True)}
        return {"tensors": tensors, "scalars": {"updates": self.updates}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
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
