"""Optimizer state by parameter name: what a checkpoint stores, independent of the order and layout of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import CheckpointError
from trainwright.core.params import NamedParam
from trainwright.optim.base import ROUNDINGS
from trainwright.optim.settings import differing, state_settings


def named_state(optimizer: torch.optim.Optimizer, params: Sequence[NamedParam]) -> dict[str, Any]:
    """``{"tensors": {param name: {key: tensor}}, "scalars": {...}}``; the tensors are live, the scalars JSON values.

    ``scalars`` holds the kind of optimizer, names and shapes of all parameters, shape, dtype and placement of every
    tensor (so that it can be allocated before it is read), numbers in the state, per group the names of its parameters,
    the entries that the optimizer lists in ``group_state`` and the settings that its state is made for, and what its
    ``extra_state()`` returns (generators, counters).
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    specs: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for n in params:
        for key, value in optimizer.state.get(n.param, {}).items():
            if isinstance(value, Tensor):
                tensors.setdefault(n.name, {})[key] = value
                specs.setdefault(n.name, {})[key] = _spec(value)
            else:
                numbers.setdefault(n.name, {})[key] = value
    keys = (*getattr(optimizer, "group_state", ()), ROUNDINGS)
    groups = [
        {
            "params": sorted(found.names),
            "entries": {k: found.members[0][k] for k in keys if k in found.members[0]},
            "settings": found.settings,
        }
        for found in _groups(optimizer, params)
    ]
    extra = optimizer.extra_state() if hasattr(optimizer, "extra_state") else {}
    scalars = {
        "kind": _kind(optimizer),
        "names": [n.name for n in params],
        "shapes": {n.name: list(n.param.shape) for n in params},
        "specs": specs,
        "numbers": numbers,
        "groups": groups,
        "extra": extra,
    }
    return {"tensors": tensors, "scalars": scalars}


def allocate_named_state(params: Sequence[NamedParam], scalars: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Empty tensors for a stored state, laid out for ``params`` as they are now, to be filled from the checkpoint.

    Raises CheckpointError naming the parameters that only one side has or whose shape is another.
    """
    by_name = {n.name: n.param for n in params}
    stored = set(scalars["names"])
    lost, new = sorted(stored - by_name.keys()), sorted(by_name.keys() - stored)
    if lost or new:
        sides = {"no longer trained": lost, "not stored": new}
        found = [f"{what}: {', '.join(which[:8])}" for what, which in sides.items() if which]
        raise CheckpointError(
            f"the optimizer state belongs to other parameters ({'; '.join(found)}); "
            "train the same parameters as before, or start a new run from the weights"
        )
    shapes = scalars.get("shapes", {})
    for name, param in by_name.items():
        if name in shapes and list(param.shape) != shapes[name]:
            raise CheckpointError(
                f"the optimizer state of {name} belongs to shape {shapes[name]}, "
                f"the parameter has {list(param.shape)}; "
                "resume with the same model, or start a new run from the weights"
            )
    return {
        name: {key: _allocate(by_name[name], spec) for key, spec in entries.items()}
        for name, entries in scalars["specs"].items()
    }


def load_named_state(
    optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], state: dict[str, Any], *, copy: bool = True
) -> None:
    """Put a state from :func:`named_state` (its tensors filled) into ``optimizer``, matched by name.

    copy  False: the tensors become the optimizer's own; for those of :func:`allocate_named_state`, held by no other.
    Raises CheckpointError, before anything is changed, when names, shapes, tensors, groups, the kind of optimizer or a
    setting that its state is made for differ.
    """
    scalars, given = state["scalars"], state["tensors"]
    allocate_named_state(params, {**scalars, "specs": {}})  # names and shapes must agree
    if scalars.get("kind", _kind(optimizer)) != _kind(optimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of {scalars['kind']}, the optimizer is {_kind(optimizer)}; "
            "resume with the same optimizer, or start a new run from the weights"
        )
    _check_settings(optimizer, params, scalars["groups"])
    _check_tensors(scalars["specs"], given)
    groups = _match_groups(optimizer, params, scalars["groups"])
    expected = set(optimizer.extra_state()) if hasattr(optimizer, "extra_state") else set()
    if expected != set(scalars["extra"]):
        raise CheckpointError(
            f"the optimizer keeps {sorted(expected)} beside its tensors, the checkpoint holds "
            f"{sorted(scalars['extra'])}; resume with the same optimizer, or start a new run from the weights"
        )
    # torch keeps step counts on the CPU, except for fused and capturable kernels, which read them on the device.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for n in params:
        tensors = dict(given.get(n.name, {}))
        for key, t in tensors.items():
            wanted = local_tensor(n.param).device if n.param in on_device and t.ndim == 0 else None
            tensors[key] = t.detach().to(wanted or t.device, copy=copy)
        entries = {**scalars["numbers"].get(n.name, {}), **tensors}
        if entries:
            optimizer.state[n.param] = entries
        elif n.param in optimizer.state:
            del optimizer.state[n.param]
    for group, stored in groups:
        group.update(deepcopy(stored))
    if hasattr(optimizer, "load_extra_state"):
        optimizer.load_extra_state(scalars["extra"])


def joined_scalars(parts: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """``scalars`` of :func:`named_state` for the whole model, from those of its stages; several ranks may have one.

    What belongs to a parameter is put together. Groups stay those of each stage, and ``extra`` is kept by stage.
    """
    stages = dict(sorted(parts, key=lambda part: part[0]))
    every = list(stages.values())
    return {
        "kind": max((s["kind"] for s in every), key=len),
        "names": list(dict.fromkeys(name for s in every for name in s["names"])),
        **{key: {n: v for s in every for n, v in s[key].items()} for key in ("shapes", "specs", "numbers")},
        "groups": [group for s in every for group in s["groups"]],
        "extra": every[0]["extra"],
        "stages": {str(number): s["extra"] for number, s in stages.items()},
    }


def scalars_of(
    scalars: dict[str, Any], optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], stage: int | None = None
) -> dict[str, Any]:
    """The part of stored ``scalars`` for ``params`` where they are those of one ``stage``, or were stored by stages.

    Otherwise ``scalars`` as they are. Stored groups that are equal but for their parameters, and together are one of
    ``optimizer``'s, count as that one.
    """
    by_stage = scalars.get("stages")
    if stage is None and by_stage is None:
        return scalars
    mine = {n.name for n in params}
    kept = dict(scalars)
    kept.pop("stages", None)
    if stage is not None:
        kept["names"] = [n for n in scalars["names"] if n in mine]
        for key in ("shapes", "specs", "numbers"):
            kept[key] = {n: v for n, v in scalars[key].items() if n in mine}
        kinds = set(scalars["kind"].split("+"))
        if set(_kind(optimizer).split("+")) <= kinds:
            kept["kind"] = _kind(optimizer)  # a stage may have no parameter for one of several parts
        if by_stage is not None:
            kept["extra"] = by_stage.get(str(stage), scalars["extra"])
    stored = [(set(g["params"]) & mine, {k: v for k, v in g.items() if k != "params"}) for g in scalars["groups"]]
    stored = [(names, rest) for names, rest in stored if names]
    groups = []
    for live in _groups(optimizer, params):
        parts = [(names, rest) for names, rest in stored if names <= live.names]
        if parts and set().union(*(n for n, _ in parts)) == live.names and all(r == parts[0][1] for _, r in parts):
            groups.append({"params": sorted(live.names), **parts[0][1]})
            stored = [part for part in stored if part not in parts]
    kept["groups"] = groups + [{"params": sorted(names), **rest} for names, rest in stored]
    return kept


class _Group(NamedTuple):
    """Parameters that are set alike: their names, the optimizer's groups, and the settings their state is made for."""

    names: frozenset[str]
    members: list[dict[str, Any]]
    settings: dict[str, Any]
    kind: str  # of optimizer


def _groups(optimizer: torch.optim.Optimizer, params: Sequence[NamedParam]) -> list[_Group]:
    """Those of ``optimizer``; groups that were split by layout alone (``split_of``) count as one."""
    name_of = {id(n.param): n.name for n in params}
    found: dict[Any, tuple[set[str], list[dict[str, Any]], torch.optim.Optimizer]] = {}
    parts = getattr(optimizer, "parts", None) or [optimizer]
    for i, j, group in ((i, j, group) for i, part in enumerate(parts) for j, group in enumerate(part.param_groups)):
        names, members, _ = found.setdefault((i, group.get("split_of", j)), (set(), [], parts[i]))
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise CheckpointError(
                f"the optimizer steps parameters without a name here, of shapes {unknown[:4]}; "
                "give all of its parameters with their names"
            )
        names |= {name_of[id(p)] for p in group["params"]}
        members.append(group)
    return [
        _Group(frozenset(names), members, state_settings(part, members[0]), _kind(part))
        for names, members, part in found.values()
    ]


def _check_settings(
    optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], stored: list[dict[str, Any]]
) -> None:
    """By parameter, since a setting may decide on the grouping. Older checkpoints do not tell theirs."""
    there = {name: g.get("settings", {}) for g in stored for name in g["params"]}
    for group in _groups(optimizer, params):
        for name in sorted(group.names):
            key = differing(group.settings, there.get(name, {}))
            if key is not None:
                value, before = group.settings[key], there[name][key]
                raise CheckpointError(
                    f"{key} is {value!r} now and was {before!r} when the checkpoint was written, and what {group.kind} "
                    f"keeps of {name} is made for the latter; set {key} back to {before!r} to go on with this run, or "
                    "start a new run from the weights"
                )


def _match_groups(
    optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], stored: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of ``optimizer`` with its stored entries. CheckpointError names what is grouped differently."""
    live = _groups(optimizer, params)
    entries = {frozenset(g["params"]): g["entries"] for g in stored}
    mine = {group.names for group in live}
    if entries.keys() != mine:
        sides = {
            "only in the optimizer": [group.names for group in live if group.names not in entries],
            "only in the checkpoint": [names for names in entries if names not in mine],
        }
        found = [f"{what}: {'; '.join(_listed(g) for g in which)}" for what, which in sides.items() if which]
        raise CheckpointError(
            f"the optimizer has {len(live)} parameter groups, the checkpoint {len(stored)}, and they differ "
            f"({' / '.join(found)}); resume with the same optimizer, or start a new run from the weights"
        )
    return [(member, entries[group.names]) for group in live for member in group.members]


def _listed(names: frozenset[str]) -> str:
    shown = sorted(names)
    return f"[{', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}]"


def _check_tensors(specs: dict[str, dict[str, Any]], tensors: dict[str, dict[str, Tensor]]) -> None:
    for name in specs.keys() | tensors.keys():
        wanted, got = specs.get(name, {}), tensors.get(name, {})
        if wanted.keys() != got.keys():
            raise CheckpointError(
                f"the optimizer state of {name} should hold {sorted(wanted)}, it holds {sorted(got)}; "
                "fill what allocate_named_state gives"
            )
        for key, spec in wanted.items():
            if list(got[key].shape) != spec["shape"]:
                raise CheckpointError(
                    f"{key} in the optimizer state of {name} should have shape {spec['shape']}, "
                    f"it has {list(got[key].shape)}; fill what allocate_named_state gives"
                )


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state tensors on this rank."""
    total = 0
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, Tensor):
                local = local_tensor(value)
                total += local.numel() * local.element_size()
    return total


def _kind(optimizer: torch.optim.Optimizer) -> str:
    parts = getattr(optimizer, "parts", None)
    return "+".join(_kind(part) for part in parts) if parts else type(optimizer).__name__


def _spec(value: Tensor) -> dict[str, Any]:
    placements = None
    if isinstance(value, DTensor):
        placements = [f"S{p.dim}" if isinstance(p, Shard) else "R" for p in value.placements]
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "placements": placements}


def _allocate(param: Tensor, spec: dict[str, Any]) -> Tensor:
    shape, dtype = torch.Size(spec["shape"]), getattr(torch, spec["dtype"])
    if isinstance(param, DTensor) and shape == param.shape:
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    if (
        isinstance(param, DTensor)
        and spec["placements"] is not None
        and len(spec["placements"]) == param.device_mesh.ndim
    ):
        placements = [Shard(int(p[1:])) if p.startswith("S") else Replicate() for p in spec["placements"]]
        return torch.distributed.tensor.empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)
    # Step counts; load_named_state moves them to where the optimizer wants them.
    device = torch.device("cpu") if len(shape) == 0 else local_tensor(param).device
    return torch.empty(shape, dtype=dtype, device=device)
