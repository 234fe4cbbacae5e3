"""What optimizers, schedules, clippers and averages offer to the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import MethodConfig


class OptimizerConfig(MethodConfig):
    """Base of optimizer configs."""

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay, on matrices only.")

    @abstractmethod
    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        """A torch optimizer over ``params``. Its groups hold ``lr``, which the loop scales by the schedule."""


Factor = Callable[[int], float]  # 0-based step -> factor on every group's initial lr


class ScheduleConfig(MethodConfig):
    """Base of schedule configs."""

    @abstractmethod
    def build(self, total_steps: int) -> Factor: ...


class Clipper(Protocol):
    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        """Scale the gradients of ``params`` in place; returns the global norm before clipping, without a host sync."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ClipConfig(MethodConfig):
    """Base of gradient-clipping configs."""

    @abstractmethod
    def build(self) -> Clipper: ...


class Average(Protocol):
    """A running average of the weights beside the live ones."""

    def update(self, step: int) -> None: ...
    def swapped(self) -> AbstractContextManager[None]:
        """Inside it the model holds the averaged weights."""

    def state_dict(self) -> dict[str, Any]:
        """``{"tensors": {param name: {key: tensor}}, "scalars": {...JSON...}}``"""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class AverageConfig(MethodConfig):
    """Base of weight-averaging configs."""

    @abstractmethod
    def build(self, params: Sequence[NamedParam]) -> Average: ...
