"""The process group and the device mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.parallel.config import Degrees


def init_distributed(device: torch.device, timeout_s: float = 600.0) -> None:
    """Join the process group that torchrun announced; nothing to do for one process or an existing group."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def shutdown() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Mesh:
    """The processes of a run by role. ``mesh`` is None for a single process."""

    degrees: Degrees
    mesh: DeviceMesh | None

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def dp_size(self) -> int:
        """Ranks that see different rows."""
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def dp_rank(self) -> int:
        return dist.get_rank() if self.mesh is not None else 0


def build_mesh(degrees: Degrees, device: torch.device) -> Mesh:
    """The mesh ``[dp_replicate, dp_shard]``; shards of one replica are neighbours, so they share a node."""
    if degrees.world_size == 1:
        return Mesh(degrees, None)
    mesh = init_device_mesh(
        device.type, (degrees.dp_replicate, degrees.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return Mesh(degrees, mesh)
