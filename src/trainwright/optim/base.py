"""What optimizers, schedules, clippers and averages offer to the loop."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self, cast

import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import MethodConfig, config_error
from trainwright.core.seeds import derive
from trainwright.optim.rounding import round_stochastically_
from trainwright.optim.settings import CheckedOptimizer, is_number

log = logging.getLogger("trainwright")
ROUNDINGS = "roundings"  # entry of a group: how often its weights were rounded
_nested: ContextVar[bool] = ContextVar("nested", default=False)  # inside the build of an outer optimizer


class OptimizerConfig(MethodConfig):
    """Base of optimizer configs.

    ``build`` of every subclass first checks its parameters: ConfigError when there are none or one comes twice, and a
    warning when weights have 16 bits or less, because usual updates round to nothing there.
    """

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decoupled weight decay, on matrices only.")
    stochastic_rounding: bool = Field(
        False, description="bfloat16 weights are rounded up or down at random, so that small steps count on average."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and is_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("should be a number")  # pydantic takes True to be 1
        return value

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

    def changed(self, **settings: Any) -> Self:
        """The same with other ``settings``; what was left out and hangs on them is found anew. Raises ConfigError."""
        given = {key: getattr(self, key) for key in self.model_fields_set}
        try:
            return type(self).model_validate({**given, **settings})
        except ValidationError as error:
            raise config_error(error, type(self)) from None

    def at_rate(self, lr: float) -> Self:
        """The same at the rate of an outer optimizer, or as it is where it was given a rate. Raises ConfigError."""
        if "lr" in self.model_fields_set:
            return self
        found = self.changed(lr=lr)
        found.model_fields_set.discard("lr")  # not given: an optimizer further out may still change it
        return found

    def for_run(self, total_steps: int | None) -> Self:
        """The same for a run of ``total_steps`` (None: not known beforehand), with what is derived from that filled in.

        Raises ConfigError for settings that do not fit into the run.
        """
        inner = getattr(self, "inner", None)
        if not isinstance(inner, OptimizerConfig):
            return self
        try:
            return self.model_copy(update={"inner": inner.for_run(total_steps)})
        except ConfigError as error:
            raise error.under("inner") from None

    def build_rule(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        """The same as UpdateRule, or several in a CompositeOptimizer: for methods that change another one's update.

        Raises ConfigError for methods whose update cannot be had apart from the step.
        """
        built = self.build(params)
        if not all(isinstance(part, UpdateRule) for part in getattr(built, "parts", [built])):
            raise ConfigError(
                "its update cannot be changed by another method; use adamw, lion, signum or muon",
                key="name",
                value=self.name,
            )
        return built

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for name in ("build", "build_rule"):
            build = cls.__dict__.get(name)
            if build is not None and not getattr(build, "__isabstractmethod__", False):
                setattr(cls, name, _checked(build))


def _checked(build: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    @functools.wraps(build)
    def checked(self: OptimizerConfig, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        if _nested.get():
            return build(self, params)
        check_params(params, self.stochastic_rounding)
        token = _nested.set(True)
        try:
            if not self.stochastic_rounding:
                return build(self, params)
            try:
                built = self.build_rule(params)
            except ConfigError:
                raise ConfigError(
                    f"{self.name} cannot round stochastically; use adamw, lion or muon, or float32 weights",
                    key="stochastic_rounding",
                    value=True,
                ) from None
            for group in built.param_groups:
                group |= {"stochastic_rounding": True, ROUNDINGS: 0}
            return built
        finally:
            _nested.reset(token)

    return checked


def check_params(params: Sequence[NamedParam], stochastic_rounding: bool = False) -> None:
    """ConfigError for no parameters, one given twice, or no use of stochastic rounding.

    Warns about weights that usual updates cannot move.
    """
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
    if stochastic_rounding:
        other = next((n for n in params if n.param.dtype != torch.bfloat16), None)
        if other is not None:
            raise ConfigError(
                f"is for bfloat16 weights, but {other.name} is {str(other.param.dtype).removeprefix('torch.')}; "
                "load the model with dtype: bfloat16, or leave it out",
                key="stochastic_rounding",
                value=True,
            )
    elif low:
        dtypes = ", ".join(sorted({str(n.param.dtype).removeprefix("torch.") for n in low}))
        log.warning(
            "%d parameters are %s (%s%s): updates too small for such a weight's last bit round to nothing; "
            "keep the weights in float32 and set precision=bf16, which computes in bfloat16, "
            "or set optimizer.stochastic_rounding=true",
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


class UpdateRule(CheckedOptimizer):
    """An optimizer whose step is ``w = w (1 - lr weight_decay) - lr u``; a subclass says what ``u`` is.

    Groups hold ``lr`` and may hold ``weight_decay``. Wrappers call :meth:`updates`, change what it gives, and
    :meth:`apply` it, so the two together are the step. Raises ValueError for settings out of range (settings.py).
    """

    @abstractmethod
    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """``u`` of each of ``params``: fresh tensors laid out as they are, without rate and decay; moves the state.

        All tensors of one call are plain or lie on one mesh.
        """

    def start(self, group: dict[str, Any]) -> None:
        """Called once per step and group that has a gradient, before :meth:`updates`: the place to count steps."""

    def apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        """The step, given ``u``; rounded at random where the group says so. Subclasses change :meth:`move`."""
        if not group.get("stochastic_rounding"):
            self.move(params, updates, params, group)
            return
        values = [p.float() for p in params]
        self.move(values, [u.float() for u in updates], params, group)
        targets = [local_tensor(p) for p in params]
        # From the count of steps alone, so that replicas draw alike and a resumed run goes on as it would have.
        generator = torch.Generator(targets[0].device).manual_seed(derive(group[ROUNDINGS], "rounding"))
        group[ROUNDINGS] += 1
        round_stochastically_(targets, [local_tensor(v) for v in values], generator)

    def move(self, values: list[Tensor], updates: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> None:
        """The step, written to ``values``: ``params`` themselves, or float32 copies that are rounded afterwards."""
        if group.get("weight_decay"):
            torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(values, updates, alpha=-group["lr"])

    def decayed(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor] | None:
        """What :meth:`move` takes lr weight_decay of: the weights, with 0 where they do not decay. None: of nothing."""
        return params if group.get("weight_decay") else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parts = by_mesh(p for p in group["params"] if p.grad is not None)
            if parts:
                self.start(group)
            for params in parts.values():
                self.step_part(params, [cast(Tensor, p.grad) for p in params], group)
        return loss

    def step_part(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """The step of parameters of one group and mesh; for rules that can write the weights with less than ``u``."""
        self.apply(params, self.updates(params, grads, group), group)

    def state_of(self, params: Sequence[Tensor], key: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The state tensor ``key`` of each parameter, of its shape and layout; zeros where there is none yet.

        dtype  None: as :meth:`state_dtype` says
        """
        found = []
        for p in params:
            state, wanted = self.state[p], dtype or self.state_dtype(p, key)
            if key not in state:
                state[key] = torch.zeros_like(p, dtype=wanted, memory_format=torch.preserve_format)
            elif state[key].dtype != wanted:  # from an older checkpoint, or another model's
                state[key] = state[key].to(wanted)
            found.append(state[key])
        return found


Factor = Callable[[int], float]  # 0-based step -> factor on every group's initial lr


class ScheduleConfig(MethodConfig):
    """Base of schedule configs."""

    @abstractmethod
    def build(self, total_steps: int) -> Factor: ...


def reported(part: Any) -> dict[str, float]:
    """Figures for the log that ``part`` (an optimizer, a clipper) offers by a method ``metrics()``; of this rank alone.

    Optional: ``metrics() -> dict[str, float | Tensor]``, called when a row is logged, without collectives.
    """
    found: dict[str, float] = {}
    for one in getattr(part, "parts", [part]):
        if hasattr(one, "metrics"):
            found |= {key: float(value) for key, value in one.metrics().items()}
    return found


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


def swapped_for_evaluation(
    average: Average | None, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[None] | None:
    """The context in which the model holds the weights that count: the average's, or those of an optimizer that
    evaluates at another point than it trains at (schedule-free). None: the live weights are the ones."""
    if average is not None:
        return average.swapped()
    parts = [part for part in getattr(optimizer, "parts", [optimizer]) if hasattr(part, "swapped")]
    if not parts:
        return None

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as entered:
            for part in parts:
                entered.enter_context(part.swapped())
            yield

    return all_of_them()


class AverageConfig(MethodConfig):
    """Base of weight-averaging configs."""

    @abstractmethod
    def build(self, params: Sequence[NamedParam]) -> Average: ...
