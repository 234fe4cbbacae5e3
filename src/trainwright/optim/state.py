"""Optimizer state by parameter name: what a checkpoint stores, independent of the order and layout of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import CheckpointError
from trainwright.core.params import NamedParam


def named_state(optimizer: torch.optim.Optimizer, params: Sequence[NamedParam]) -> dict[str, Any]:
    """``{"tensors": {param name: {key: tensor}}, "scalars": {...}}``; the tensors are live, the scalars JSON values.

    ``scalars`` holds the kind of optimizer, names and shapes of all parameters, shape, dtype and placement of every
    tensor (so that it can be allocated before it is read), numbers in the state, the group entries that the optimizer
    lists in ``group_state``, and what its ``extra_state()`` returns (generators, counters).
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
    keys = getattr(optimizer, "group_state", ())
    groups = [{k: g[k] for k in keys if k in g} for g in optimizer.param_groups]
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


def load_named_state(optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], state: dict[str, Any]) -> None:
    """Put a state from :func:`named_state` (its tensors filled) into ``optimizer``, matched by name."""
    scalars = state["scalars"]
    allocate_named_state(params, {**scalars, "specs": {}})  # names and shapes must agree
    if scalars.get("kind", _kind(optimizer)) != _kind(optimizer):
        raise CheckpointError(
            f"the checkpoint holds the state of {scalars['kind']}, the optimizer is {_kind(optimizer)}; "
            "resume with the same optimizer, or start a new run from the weights"
        )
    # torch keeps step counts on the CPU, except for fused and capturable kernels, which read them on the device.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for n in params:
        tensors = state["tensors"].get(n.name, {})
        if n.param in on_device:
            device = local_tensor(n.param).device
            tensors = {key: t.to(device) if t.ndim == 0 else t for key, t in tensors.items()}
        entries = {**scalars["numbers"].get(n.name, {}), **tensors}
        if entries:
            optimizer.state[n.param] = entries
        elif n.param in optimizer.state:
            del optimizer.state[n.param]
    if len(scalars["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, "
            f"the checkpoint {len(scalars['groups'])}; resume with the same optimizer"
        )
    for group, stored in zip(optimizer.param_groups, scalars["groups"], strict=True):
        group.update(stored)
    if hasattr(optimizer, "load_extra_state"):
        optimizer.load_extra_state(scalars["extra"])


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
