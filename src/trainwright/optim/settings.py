"""Settings of optimizer classes: which values they may have, which of them a stored state was made for; its precision.

The annotations of a class's constructor say what may be given. A ``Literal`` admits its values and nothing else, and a
number the range that stands beside it in an ``Annotated``, or that its name has in ``RANGES``, or from 0 up. Parameter
groups are held to the same, whenever they are added: :class:`CheckedOptimizer` is the base that does it.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NUMBERS = {float: Annotated[float, Field(ge=0, allow_inf_nan=False)], int: Annotated[int, Field(ge=0)]}


def _is_rank(rank: int | float) -> int | float:
    if not (rank >= 1 if isinstance(rank, int) else 0 < rank <= 1):
        raise ValueError("should be a whole number of 1 or more, or a share in (0, 1]")
    return rank


RANGES: dict[str, Any] = {  # of numbers that are called the same in all methods
    "betas": tuple[Decay, Decay],
    "momentum": Decay,
    "rank": Annotated[int | float, AfterValidator(_is_rank)],
    "ns_steps": Count,
    "gap": Count | None,
}


def checks(cls: type) -> dict[str, TypeAdapter[Any]]:
    """What validates each setting of ``cls``, by name: its constructor's, and those of its bases' constructors."""
    return dict(_checks(cls))


@functools.cache
def _checks(cls: type) -> tuple[tuple[str, TypeAdapter[Any]], ...]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base) and issubclass(base, CheckedOptimizer):
            hints |= typing.get_type_hints(vars(base)["__init__"], include_extras=True)
        hints |= vars(base).get("allowed", {})
    found = []
    for name, hint in hints.items():
        if _is_checked(hint):
            ranged = RANGES[name] if name in RANGES and _has_number(hint) else _ranged(hint)
            found.append((name, TypeAdapter(ranged)))
    return tuple(found)


def _is_checked(hint: Any) -> bool:
    """Whether a hint is made of numbers, literals and None alone."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_checked(typing.get_args(hint)[0])
    if origin in (Union, UnionType, tuple, Sequence):
        return all(_is_checked(h) for h in typing.get_args(hint) if h is not Ellipsis)
    return hint in (float, int, NoneType)


def is_number(hint: Any) -> bool:
    """Whether a setting with this hint takes numbers (or None, or words) and nothing else, such as True."""
    return _is_checked(hint) and _has_number(hint)


def _has_number(hint: Any) -> bool:
    return hint in (float, int) or (
        typing.get_origin(hint) is not Literal and any(_has_number(h) for h in typing.get_args(hint))
    )


def _ranged(hint: Any) -> Any:
    """``hint`` with the range of plain numbers."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(_ranged(h) for h in args)]  # noqa: UP007
    if origin in (tuple, Sequence):
        return origin[tuple(h if h is Ellipsis else _ranged(h) for h in args)]
    return NUMBERS.get(hint, hint)


def check(cls: type, settings: dict[str, Any]) -> None:
    """ValueError for the first of ``settings`` that ``cls`` does not take; names that it does not know are passed."""
    for name, adapter in _checks(cls):
        if name not in settings or isinstance(settings[name], Tensor):  # a rate may be a tensor, for capture
            continue
        value = settings[name]
        if isinstance(value, bool):  # pydantic takes True to be 1
            raise ValueError(f"{name}={value!r} should be a number")
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            said = dict.fromkeys(e["msg"].removeprefix("Input ").removeprefix("Value error, ") for e in error.errors())
            raise ValueError(f"{name}={value!r} {', or '.join(said)}") from None


class CheckedOptimizer(torch.optim.Optimizer):
    """An optimizer that refuses settings out of range, and a state that was made for other settings.

    allowed       annotations of entries of the groups that the constructor does not have, or has more narrowly
    shapes_state  settings that the state is made for: it means nothing with others
    wide_state    what the names of state begin with that is held in float32 at least, see :meth:`state_dtype`
    """

    allowed: ClassVar[dict[str, Any]] = {}
    shapes_state: ClassVar[tuple[str, ...]] = ()
    wide_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)

    def is_wide(self, key: str) -> bool:
        """Whether the state ``key`` is held in float32 at least."""
        return key.startswith(self.wide_state)

    def state_dtype(self, param: Tensor, key: str) -> torch.dtype:
        """What the state ``key`` of ``param`` is held in: the parameter's dtype, but float32 where 16 bits stand still.

        A second moment may change by a thousandth of itself in a step, and bfloat16 has 1/256 between two numbers:
        v b2 would be rounded back to v, and v could only grow.
        """
        return torch.promote_types(param.dtype, torch.float32) if self.is_wide(key) else param.dtype

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, which the constructor calls too. ValueError leaves the optimizer as it was."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def check_group(self, group: dict[str, Any]) -> None:
        """ValueError for settings out of range or parameters that the method cannot step. Methods add to it."""
        check(type(self), vars(self) | group)

    def state_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Those settings of ``group`` that its state is made for."""
        return {name: group[name] for name in self.shapes_state if name in group}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. ValueError for the state of other settings, and then nothing is changed."""
        refuse_other_settings(
            (self, live, stored) for live, stored in zip(self.param_groups, state_dict["param_groups"], strict=False)
        )
        super().load_state_dict(state_dict)
        keep_wide([self], state_dict)


def keep_wide(parts: Sequence[torch.optim.Optimizer], state_dict: dict[str, Any]) -> None:
    """Give ``parts``, which torch has loaded ``state_dict`` into, back what it rounded to the parameters' dtype."""
    owners = [(part, p) for part in parts for group in part.param_groups for p in group["params"]]
    stored = [state_dict["state"].get(i, {}) for group in state_dict["param_groups"] for i in group["params"]]
    for (part, p), entries in zip(owners, stored, strict=True):
        if not isinstance(part, CheckedOptimizer) or not p.is_floating_point():
            continue
        for key, value in entries.items():
            wide = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > p.element_size()
            if wide and part.is_wide(key):
                part.state[p][key] = value.to(p.device)


def state_settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The settings that the state of ``group`` is made for, as JSON has them; none of a foreign optimizer."""
    if not isinstance(optimizer, CheckedOptimizer):
        return {}
    return {name: _plain(value) for name, value in optimizer.state_settings(group).items()}


def differing(here: dict[str, Any], stored: dict[str, Any]) -> str | None:
    """The first setting that both have with different values; None: they agree."""
    return next((name for name in here if name in stored and here[name] != stored[name]), None)


def refuse_other_settings(
    groups: Iterable[tuple[torch.optim.Optimizer, dict[str, Any], dict[str, Any]]],
) -> None:
    """ValueError where one of (optimizer, its group, the stored group) has a state made for another setting."""
    for optimizer, live, stored in groups:
        here, there = state_settings(optimizer, live), state_settings(optimizer, {**live, **stored})
        name = differing(here, there)
        if name is not None:
            raise ValueError(
                f"{name}={here[name]!r}, and the state was made with {name}={there[name]!r}, which says what it holds; "
                "build the optimizer with that, or start without the state"
            )


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
