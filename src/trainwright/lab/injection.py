"""Faults put into a training on purpose: gradient spikes between the backward pass and the clipper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import ConfigError
from trainwright.core.registry import config_error
from trainwright.optim.base import Clipper


class Spikes(BaseModel):
    """All gradients times ``factor`` at ``steps``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    factor: PositiveFloat = Field(1000.0, description="What the gradients are multiplied by.")
    steps: list[PositiveInt | float] = Field(
        description="Steps, counted from 1; a number below 1 is that share of the run, so that tuning runs get it too."
    )

    def at(self, total_steps: int) -> set[int]:
        out = set()
        for step in self.steps:
            if isinstance(step, float) and not 0 < step < 1:
                raise ValueError(f"inject.spikes.steps: {step} should be a whole step or a share between 0 and 1")
            out.add(max(1, math.ceil(step * total_steps)) if isinstance(step, float) else step)
        return out


class Inject(BaseModel):
    """What is injected."""

    model_config = ConfigDict(extra="forbid")
    spikes: Spikes | None = Field(None, description="Gradient spikes.")


class HasProgress(Protocol):
    progress: Any


class SpikedClipper:
    """Stands before a clipper and multiplies the gradients of the chosen steps."""

    def __init__(self, inner: Clipper, trainer: HasProgress, factor: float, steps: set[int]):
        self.inner, self.trainer, self.factor, self.steps = inner, trainer, factor, steps

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        if self.trainer.progress.step + 1 in self.steps:
            grads = [local_tensor(p.grad) for p in params if p.grad is not None]
            torch._foreach_mul_(grads, self.factor)
        return self.inner(params)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def inject(trainer: Any, spec: dict[str, Any] | None) -> None:
    """Put the faults of ``spec`` into a built Trainer."""
    found = Inject.model_validate(spec or {})
    if found.spikes is not None:
        steps = found.spikes.at(trainer.total_steps)
        trainer.clip = SpikedClipper(trainer.clip, trainer, found.spikes.factor, steps)


def parse_inject(spec: dict[str, Any]) -> dict[str, Any]:
    """``spec`` checked, as plain values. Raises ConfigError."""
    try:
        found = Inject.model_validate(spec)
        if found.spikes is not None:
            found.spikes.at(1)
    except ValidationError as error:
        raise config_error(error, Inject).under("inject") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found.model_dump(mode="json", exclude_none=True)
