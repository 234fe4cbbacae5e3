"""Several optimizers as one: a matrix method for the hidden matrices and an inner one for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.optim.settings import keep_wide, refuse_other_settings


class _RoutedState(MutableMapping[Tensor, Any]):
    """The parts' states as one mapping; a parameter's entry lives in the part that owns it."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self._parts = parts
        self._owner = {p: part for part in parts for group in part.param_groups for p in group["params"]}

    def _state(self, param: Tensor) -> Any:
        try:
            return self._owner[param].state
        except KeyError:
            raise KeyError("the parameter belongs to no part of this optimizer") from None

    def __getitem__(self, param: Tensor) -> Any:
        return self._state(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._state(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._state(param)[param]

    def __contains__(self, param: object) -> bool:
        owner = self._owner.get(param) if isinstance(param, Tensor) else None
        return owner is not None and param in owner.state

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)


class CompositeOptimizer(torch.optim.Optimizer):
    """Steps its parts in order. ``param_groups`` are the parts' own, so a schedule reaches all of them."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = [part for part in parts if any(group["params"] for group in part.param_groups)]
        if not self.parts:
            raise ValueError("optimizer got no parameters")
        # torch keeps the group dicts as they are, so they stay shared with the parts. A parameter in two is refused.
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.state = _RoutedState(self.parts)  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(getattr(self, "state", None), _RoutedState):
            raise ValueError("add the group to the part that should step it, before the parts are put together")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. ValueError for the state of other settings, and then nothing is changed."""
        live = [(part, group) for part in self.parts for group in part.param_groups]
        refuse_other_settings((*own, group) for own, group in zip(live, state_dict["param_groups"], strict=False))
        super().load_state_dict(state_dict)
        keep_wide(self.parts, state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts, "defaults": self.defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "parts" in state:  # a copy or a pickle
            self.parts = state["parts"]
        else:  # torch's load_state_dict: the state of all parts together, groups in their order
            groups = iter(state["param_groups"])
            for part in self.parts:
                mine = [next(groups) for _ in part.param_groups]
                entries: defaultdict[Tensor, Any] = defaultdict(dict)
                entries.update({p: state["state"][p] for g in mine for p in g["params"] if p in state["state"]})
                part.__setstate__({"state": entries, "param_groups": mine})
        shared = [group for part in self.parts for group in part.param_groups]
        routed = {"param_groups": shared, "state": _RoutedState(self.parts)}
        super().__setstate__({"defaults": state.get("defaults", self.__dict__.get("defaults", {})), **routed})

    @property
    def group_state(self) -> tuple[str, ...]:
        return tuple({key for part in self.parts for key in getattr(part, "group_state", ())})

    def extra_state(self) -> dict[str, Any]:
        return {str(i): part.extra_state() for i, part in enumerate(self.parts) if hasattr(part, "extra_state")}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            if hasattr(part, "load_extra_state"):
                part.load_extra_state(state[str(i)])
