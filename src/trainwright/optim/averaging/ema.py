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

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import CheckpointError
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
        live, averages = self._shards()
        if self.updates == 0 and self.start > 0:
            torch._foreach_copy_(averages, live)
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        torch._foreach_lerp_(averages, [p.float() for p in live], 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters hold the averages inside, and what they held before afterwards.

        Before the first update there is no average yet, and they keep what they hold.
        """
        if self.updates == 0:
            yield
            return
        live, averages = self._shards()
        kept = [p.clone() for p in live]
        try:
            with torch.no_grad():
                torch._foreach_copy_(live, averages)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, kept)

    def _shards(self) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and averages as this rank holds them; both are laid out alike, so plain kernels do."""
        return [local_tensor(n.param.detach()) for n in self.params], [local_tensor(a) for a in self.averages]

    def state_dict(self) -> dict[str, Any]:
        tensors = {n.name: {"average": a} for n, a in zip(self.params, self.averages, strict=True)}
        return {"tensors": tensors, "scalars": {"updates": self.updates}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [n.name for n in self.params if n.name not in state["tensors"]]
        if missing:
            raise CheckpointError(
                f"holds no average of {', '.join(missing[:8])}; resume with the same trained parameters and average"
            )
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
