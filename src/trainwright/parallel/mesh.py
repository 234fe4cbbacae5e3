"""The process group and the device mesh."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.core.errors import ConfigError
from trainwright.parallel.config import Degrees

# Outermost first. Neighbouring ranks share a node, so the dimensions that talk most lie innermost.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def init_distributed(device: torch.device, timeout_s: float = 600.0) -> None:
    """Join the process group that torchrun announced; nothing to do for one process or an existing group."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


@contextmanager
def groups_within(timeout_s: float | None) -> Iterator[None]:
    """Process groups made inside let a collective take ``timeout_s`` seconds; None: torch's own 10 or 30 minutes.

    Meshes make groups without asking for how long, and gloo keeps what it was made with, whatever is set later.
    """
    if timeout_s is None:
        yield
        return
    makers: Any = dist.distributed_c10d
    kept = makers._get_default_timeout
    makers._get_default_timeout = lambda backend: timedelta(seconds=timeout_s)
    try:
        yield
    finally:
        makers._get_default_timeout = kept


def subgroup(ranks: list[int], of: dist.ProcessGroup) -> Any:
    """``dist.new_group(ranks)``, called by every process of the run, with the timeout of the group ``of``."""
    times = [getattr(of._get_backend(device).options, "_timeout", None) for device in of._device_types]
    return dist.new_group(ranks, timeout=min((t for t in times if t is not None), default=None))


def shutdown() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@dataclass
class Mesh:
    """The processes of a run by role.

    ``mesh`` holds the dimensions of degree above 1, in the order of :data:`DIMENSIONS`, so that no process group is
    made for a dimension that is not used; it is None for a single process.
    """

    degrees: Degrees
    mesh: DeviceMesh | None
    timeout_s: float | None = None  # of groups that are made later

    @property
    def world_size(self) -> int:
        return self.degrees.world_size

    @property
    def dp_size(self) -> int:
        """Ranks that see different rows."""
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which rows this process sees: the same for all ranks of one tensor, context or pipeline group."""
        return self.rank_in("dp_replicate") * self.degrees.dp_shard + self.rank_in("dp_shard")

    def draws_apart(self, sequence_parallel: bool) -> tuple[object, ...]:
        """Labels for the seed of what training draws (dropout): other ones on ranks that hold other tokens or layers,
        the same where ranks hold the same stream, whose masks have to agree.

        sequence_parallel  tensor-parallel ranks hold other tokens of the stream
        """
        dims = ("pp", "cp", "tp") if sequence_parallel else ("pp", "cp")
        return (self.dp_rank, *(f"{dim}{here}" for dim in dims if (here := self.rank_in(dim))))

    def rank_in(self, dim: str) -> int:
        """This process's coordinate along ``dim``; 0 where the degree is 1."""
        sub = self.submesh(dim)
        return 0 if sub is None else sub.get_local_rank()

    def submesh(self, *dims: str) -> DeviceMesh | None:
        """The mesh over those of ``dims`` with degree above 1, in mesh order; None when there is none.

        Raises ValueError for an unknown dimension.
        """
        unknown = [d for d in dims if d not in DIMENSIONS]
        if unknown:
            raise ValueError(f"unknown mesh dimension {unknown[0]!r}; there are {', '.join(DIMENSIONS)}")
        used = tuple(d for d in DIMENSIONS if d in dims and getattr(self.degrees, d) > 1)
        if self.mesh is None or not used:
            return None
        return self.mesh if used == self.mesh.mesh_dim_names else self.mesh[used]

    def data_mesh(self) -> DeviceMesh | None:
        """The mesh that gradients are added up over: replicas, and shards together with the ranks of a context group.

        One dimension, or two where there are replicas of sharded models. A collective at the first call."""
        degrees = self.degrees
        if self.mesh is None:
            return None
        # Experts that are spread need a group of ranks that each hold some, so all of it is sharded over these.
        sharded = degrees.dp_shard > 1 or degrees.ep > 1
        inner = self._flat("dp_shard", "cp") if sharded else self._flat("dp_replicate", "cp")
        if not sharded or degrees.dp_replicate == 1:
            return inner
        if degrees.cp == 1 or degrees.dp_shard == 1:
            return self.submesh("dp_replicate", "dp_shard", "cp")
        return self.mesh["dp_replicate", "dp_shard_cp"]

    def expert_meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """``ep`` above 1: the mesh over ranks with the same experts, and the one that experts are spread over.

        Neighbours among the ``dp_shard x cp`` ranks hold different experts; those ``ep`` apart hold the same, which
        FSDP2 shards over them. The first has one dimension (which may be 1 rank), or two where there are replicas.
        Collective. Raises ConfigError where torch is too old to take a dimension of a mesh apart.
        """
        degrees = self.degrees
        flat = self._flat("dp_shard", "cp")
        if flat is None or not hasattr(flat, "_unflatten"):
            raise ConfigError(f"needs a newer torch than {torch.__version__}", key="parallel.ep", value=degrees.ep)
        with groups_within(self.timeout_s):
            parts = flat._unflatten(0, (flat.size() // degrees.ep, degrees.ep), ("expert_shard", "ep"))
            parts._flatten("expert_shard_ep")  # DTensor finds it: a norm is then one collective, not two
        same = parts["expert_shard"]
        replicas = self.submesh("dp_replicate")
        return (same if replicas is None else DeviceMesh._concatenate([replicas, same])), parts["ep"]

    def _flat(self, *dims: str) -> DeviceMesh | None:
        sub = self.submesh(*dims)
        if sub is None or sub.ndim == 1:
            return sub
        with groups_within(self.timeout_s):
            return sub._flatten("_".join(dims))

    def group(self, *dims: str) -> dist.ProcessGroup | None:
        """The process group over those of ``dims`` together; None when all have degree 1.

        The first call for a set of several dimensions makes the group: every process of the run has to make it.
        """
        sub = self.submesh(*dims)
        if sub is None:
            return None
        if sub.ndim == 1:
            return sub.get_group()
        with groups_within(self.timeout_s):
            return sub._flatten().get_group()


def build_mesh(degrees: Degrees, device: torch.device, timeout_s: float | None = None) -> Mesh:
    """The mesh of ``degrees``; shards of one replica are neighbours, so they share a node.

    timeout_s  seconds that a collective of its groups may take; None: torch's own
    """
    names = tuple(d for d in DIMENSIONS if getattr(degrees, d) > 1)
    if not names:
        return Mesh(degrees, None)
    shape = tuple(getattr(degrees, d) for d in names)
    with groups_within(timeout_s):
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    return Mesh(degrees, mesh, timeout_s)
