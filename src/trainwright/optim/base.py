"""What optimizers, schedules, clippers and averages offer to the loop."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import MethodConfig

log = logging.getLogger("trainwright")
_nested: ContextVar[bool] = ContextVar("nested", default=False)  # inside the build of an outer optimizer


class OptimizerConfig(MethodConfig):
    """Base of optimizer configs.

    ``build`` of every subclass first checks its parameters: ConfigError when there are none or one comes twice, and a
    warning when weights have 16 bits or less, because usual updates round to nothing there.
    """

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay, on matrices only.")

    @model_validator(mode="after")
    def _decay_leaves_something(self) -> OptimizerConfig:
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"lr * weight_decay = {self.lr:g} * {self.weight_decay:g} is 1 or more: "
                "one step would wipe the weights out; lower one of them"
            )
        return self

    @abstractmethod
    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        """A torch optimizer over ``params``. Its groups hold ``lr``, which the loop scales by the schedule."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        build = cls.__dict__.get("build")
        if build is None or getattr(build, "__isabstractmethod__", False):
            return

        @functools.wraps(build)
        def checked(self: OptimizerConfig, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
            if _nested.get():
                return build(self, params)
            check_params(params)
            token = _nested.set(True)
            try:
                return build(self, params)
            finally:
                _nested.reset(token)

        cls.build = checked  # type: ignore[method-assign]


def check_params(params: Sequence[NamedParam]) -> None:
    """ConfigError for no parameters or one given twice; a warning for weights that usual updates cannot move."""
    if not params:
        raise ConfigError("the optimizer got no parameters; unfreeze some")
    names: dict[int, str] = {}
    for n in params:
        if id(n.param) in names:
            raise ConfigError(
                f"the parameter {names[id(n.param)]} is given twice, the second time as {n.name}; "
                "give a tied weight once"
            )
        names[id(n.param)] = n.name
    low = [n for n in params if n.param.is_floating_point() and n.param.element_size() < 4]
    if low:
        dtypes = ", ".join(sorted({str(n.param.dtype).removeprefix("torch.") for n in low}))
        log.warning(
            "%d parameters are %s (%s%s): updates too small for such a weight's last bit round to nothing; "
            "keep the weights in float32 and set precision=bf16, which computes in bfloat16",
            len(low),
            dtypes,
            ", ".join(n.name for n in low[:3]),
            ", ..." if len(low) > 3 else "",
        )


def by_mesh(tensors: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """``tensors`` by the mesh that they are sharded over, None: plain; one kernel cannot take several of these."""
    parts: dict[DeviceMesh | None, list[Tensor]] = {}
    for t in tensors:
        parts.setdefault(t.device_mesh if isinstance(t, DTensor) else None, []).append(t)
    return parts


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
