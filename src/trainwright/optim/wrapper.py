"""What wrappers share: methods that change the update of another method, which they hold as ``inner``.

The convention of all wrappers: ``lr`` and ``weight_decay`` are the inner method's. Given on the wrapper (which is where
a sweep of ``optimizer.lr`` puts them) they replace the inner one's; left out, the inner one's count. An inner method
with an ``inner`` of its own (Muon's AdamW for embeddings) does with that one as it does alone: a rate that was given to
it stays, and else it is the one of the method, where matrix.py says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import Slot
from trainwright.optim.base import OptimizerConfig, UpdateRule, reported
from trainwright.optim.composite import CompositeOptimizer
from trainwright.optim.settings import check


class WrappedRule(UpdateRule):
    """An update rule that changes what ``inner`` gives. Groups and state are the inner rule's own, shared.

    inner  an UpdateRule that is built already; from now on step this one, not ``inner``
    Raises TypeError when ``inner`` is no UpdateRule.
    """

    kept: tuple[str, ...] = ()  # own attributes that copies and pickles have to keep
    own_group_state: tuple[str, ...] = ()  # own entries of the groups that checkpoints have to keep

    def __init__(self, inner: UpdateRule):
        if not isinstance(inner, UpdateRule):
            raise TypeError(f"{type(self).__name__} wraps an UpdateRule, got {type(inner).__name__}")
        self.inner = inner
        super().__init__(inner.param_groups, {})  # torch keeps the group dicts as they are, so they stay shared
        self._share()

    def change(
        self, updates: list[Tensor], params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        """The update to apply, given the inner rule's ``updates``, which may be written to."""
        raise NotImplementedError

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        return self.change(self.inner.updates(params, grads, group), params, grads, group)

    def start(self, group: dict[str, Any]) -> None:
        self.inner.start(group)

    def apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        self.inner.apply(params, updates, group)

    def decayed(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor] | None:
        return self.inner.decayed(params, group)

    def is_wide(self, key: str) -> bool:
        return self.inner.is_wide(key)

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def check_group(self, group: dict[str, Any]) -> None:
        """The wrapper's own settings; the inner rule has checked the group."""
        check(type(self), vars(self))

    def state_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return self.inner.state_settings(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.__dict__.get("param_groups") is self.inner.param_groups:
            self.inner.add_param_group(param_group)
        else:  # torch's constructor
            super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in self.kept}
        return {"inner": self.inner, "defaults": self.defaults, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "inner" in state:  # a copy or a pickle
            self.inner = state["inner"]
            own = {key: state[key] for key in self.kept}
        else:  # torch's load_state_dict
            self.inner.__setstate__(state)
            own = {}
        shared = {"param_groups": self.inner.param_groups, "state": self.inner.state}
        super().__setstate__({"defaults": state.get("defaults", self.__dict__.get("defaults", {})), **shared, **own})
        self._share()

    @property
    def group_state(self) -> tuple[str, ...]:
        return (*getattr(self.inner, "group_state", ()), *self.own_group_state)

    def metrics(self) -> dict[str, float]:
        return reported(self.inner)

    def extra_state(self) -> dict[str, Any]:
        """The inner rule's, under its class name, so that the state of another inner rule is told apart."""
        return {type(self.inner).__name__: self.inner.extra_state() if hasattr(self.inner, "extra_state") else {}}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        kind = type(self.inner).__name__
        if kind not in state:
            raise CheckpointError(
                f"the checkpoint's {type(self).__name__} wraps {' and '.join(state)}, this one wraps {kind}; "
                "resume with the same optimizer, or start a new run from the weights"
            )
        if hasattr(self.inner, "load_extra_state"):
            self.inner.load_extra_state(state[kind])


def wrap(built: torch.optim.Optimizer, make: Callable[[UpdateRule], UpdateRule]) -> torch.optim.Optimizer:
    """``make`` of the rule, or of every part of a CompositeOptimizer."""
    if isinstance(built, CompositeOptimizer):
        return CompositeOptimizer([wrap(part, make) for part in built.parts])
    return make(cast(UpdateRule, built))


class WrapperConfig(OptimizerConfig):
    """Base of configs of wrappers."""

    lr: PositiveFloat | None = Field(  # type: ignore[assignment]
        None, description="Peak learning rate of the inner optimizer; null: what that one says."
    )
    weight_decay: NonNegativeFloat | None = Field(  # type: ignore[assignment]
        None, description="Decoupled weight decay of the inner optimizer, on matrices only; null: what that one says."
    )
    inner: Annotated[OptimizerConfig, Slot("optimizer", default="adamw")] = Field(
        cast(OptimizerConfig, {"name": "adamw"}), description="The optimizer whose update is changed."
    )

    @model_validator(mode="after")
    def _decay_leaves_something(self) -> WrapperConfig:
        """Instead of the base's check, which the inner config makes of the values that it is given here."""
        given = {k: v for k in ("lr", "weight_decay") if (v := getattr(self, k)) is not None}
        if any(getattr(self.inner, k) != v for k, v in given.items()):
            self.inner = self.inner.changed(**given)
        # Set up by the outermost optimizer, wherever in the nest it is asked for.
        self.stochastic_rounding = self.stochastic_rounding or self.inner.stochastic_rounding
        return self

    def at_rate(self, lr: float) -> Self:
        return self if self.lr is not None else self.changed(inner=self.inner.at_rate(lr))

    @abstractmethod
    def wrapped(self, rule: UpdateRule, params: Sequence[NamedParam]) -> UpdateRule:
        """The method around ``rule``: the inner optimizer, or one part of it; ``params`` are those of all parts."""

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        try:
            built = self.inner.build_rule(params)
        except ConfigError as error:
            raise error.under("inner") from None
        return wrap(built, lambda rule: self.wrapped(rule, params))
