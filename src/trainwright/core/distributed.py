"""Small helpers over torch.distributed that also work with one process and no process group."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.errors import ConfigError


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def launched_world_size() -> int:
    """World size that torchrun announced through the environment; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of ``value`` over all ranks, in place where there is more than one."""
    if world_size() > 1:
        dist.all_reduce(value, group=group)
    return value


def max_over_ranks(value: int, device: torch.device) -> int:
    """The largest ``value`` of any rank; waits for the device."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def all_gather_single(out: Tensor, value: Tensor, group: Any = None) -> None:
    """``value`` of every rank, one behind the other along the first dimension, into ``out``."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    function(out, value, group=group)


def reduce_scatter_single(out: Tensor, value: Tensor, group: Any = None) -> None:
    """This rank's piece, along the first dimension, of the sum of ``value`` over ranks into ``out``."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(out, value, group=group)


def broadcast_object(value: Any, src: int = 0) -> Any:
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """``value`` of every rank, on every rank."""
    if world_size() == 1:
        return [value]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a DTensor (a collective), or the tensor itself."""
    full = getattr(value, "full_tensor", None)
    return full() if full is not None else value


def local_tensor(value: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return value.to_local() if hasattr(value, "to_local") else value


def default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def chosen_device(wanted: str) -> torch.device:
    """The device that ``run.device`` names; raises ConfigError where it is not there."""
    if wanted == "auto":
        return default_device()
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is usable here; use run.device=cpu", key="run.device", value=wanted)
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("no Apple GPU is usable here; use run.device=cpu", key="run.device", value=wanted)
    if wanted == "cuda":
        return default_device()
    return torch.device(wanted)
