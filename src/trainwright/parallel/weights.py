"""Weights over ranks: their names, whether every rank built the same, and filling shards from whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainwright.core.distributed import gather_objects, rank
from trainwright.core.errors import ModelError


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by plain name, each storage once; the live tensors, DTensors where sharded.

    Takes the model itself or its DDP wrapper.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    seen: set[int] = set()
    out = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            out[name] = value.detach()
    return out


@torch.no_grad()
def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state``, as :func:`model_state` gives it, into the live tensors of ``model``.

    Values are whole tensors, the same on every rank, or DTensors of the same layout. Raises ModelError, before
    anything is changed, where names or shapes differ.
    """
    live = model_state(model)
    missing, extra = sorted(live.keys() - state.keys()), sorted(state.keys() - live.keys())
    if missing or extra:
        raise ModelError(
            f"weights do not fit the model: missing {missing[:4] or 'none'}, not in the model {extra[:4] or 'none'} "
            f"({len(missing)} and {len(extra)} in all)"
        )
    for name, target in live.items():
        if target.shape != state[name].shape:
            raise ModelError(f"{name} has shape {tuple(state[name].shape)}, the model needs {tuple(target.shape)}")
    for name, target in live.items():
        _copy(target, state[name])


def _copy(target: Tensor, value: Tensor) -> None:
    """``target.copy_(value)``; a whole ``value`` is cut to this rank's shard of a DTensor, without communication."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = value.to(target.device, target.dtype)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, the non-persistent ones too, each storage once."""
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@torch.no_grad()
def check_same_build(model: nn.Module, device: torch.device) -> bool:
    """Check that all ranks built the same model. A collective.

    Returns whether weights have to come from the first rank, because others hold the model on the meta device.
    Raises ModelError on every rank where names, shapes, dtypes or weights differ: sharding would silently mix them.
    """
    tensors = _tensors(model)
    layout = {n: (tuple(t.shape), str(t.dtype)) for n, t in tensors.items()}
    on_meta = any(t.is_meta for t in tensors.values())
    # Two sums in float64 tell different draws apart; the second one moves when values only trade places.
    sums = None if on_meta else {n: _sums(t) for n, t in tensors.items()}
    builds = gather_objects((layout, sums))
    first_layout, first_sums = builds[0]
    for r, (other, other_sums) in enumerate(builds):
        wrong = sorted(n for n in first_layout.keys() | other.keys() if first_layout.get(n) != other.get(n))
        if wrong:
            raise ModelError(
                f"rank {r} built another model than rank 0: {wrong[0]} is {other.get(wrong[0], 'absent')} there and "
                f"{first_layout.get(wrong[0], 'absent')} on rank 0 ({len(wrong)} tensors differ)"
            )
        if first_sums is None:
            raise ModelError("rank 0 holds the model on the meta device, so there are no weights to share")
        if other_sums is not None and other_sums != first_sums:
            wrong = sorted(n for n in first_sums if first_sums[n] != other_sums[n])
            raise ModelError(
                f"rank {r} built other weights than rank 0 ({len(wrong)} tensors differ, the first is {wrong[0]}); "
                "build the model from the same seed on every rank"
            )
    from_first = any(s is None for _, s in builds)
    shared = _tied(model)
    if from_first and shared:
        raise ModelError(
            f"{shared[0]} and {shared[1]} are one tied weight, which leaving the meta device would part; "
            "build this model on every rank"
        )
    return from_first


def _tied(model: nn.Module) -> tuple[str, str] | None:
    """Two names of one parameter, if there are."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            return first[id(param)], name
    return None


def _sums(tensor: Tensor) -> tuple[str, str]:
    flat = tensor.reshape(-1)
    odd = flat[1::2]
    return repr(flat.sum(dtype=torch.float64).item()), repr(odd.sum(dtype=torch.float64).item())


@contextmanager
def fill_from_first_rank(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside it ``model`` is sharded and moved from the meta device; afterwards it holds the first rank's weights.

    A collective: one broadcast of each whole tensor, which is freed before the next. The first rank keeps its whole
    model in memory until the end, every other rank one tensor besides its shards.
    """
    source = _tensors(model) if rank() == 0 else {}
    yield
    with torch.no_grad():
        for name, target in _tensors(model).items():
            if rank() == 0:
                whole = source.pop(name).to(device).contiguous()
            else:
                whole = torch.empty(target.shape, dtype=target.dtype, device=device)
            dist.broadcast(whole, src=0)
            _copy(target, whole)
