"""The process groups of a chain, from its factors and a rank's number."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.parallel.amsp.chain import Chain
from trainwright.parallel.mesh import groups_within

Members = dict[str, list[list[int]]]


def members(chain: Chain, ranks: int) -> Members:
    """By what they do, the groups of more than one rank; each list holds every rank once.

    gather   s_p neighbours, who hold the parameters together
    scatter  s_g neighbours, who hold the gradient together
    towards  the s_o / s_g ranks within s_o neighbours with the same gradient shard
    replicas the N / s_o ranks with the same optimizer shard
    publish  the s_o / s_p ranks within s_o neighbours with the same parameter shard
    """
    p, g, o = chain.parameters, chain.gradients, chain.states
    wanted = {
        "gather": [list(range(start, start + p)) for start in range(0, ranks, p)],
        "scatter": [list(range(start, start + g)) for start in range(0, ranks, g)],
        "towards": [list(range(start + i, start + o, g)) for start in range(0, ranks, o) for i in range(g)],
        "replicas": [list(range(i, ranks, o)) for i in range(o)],
        "publish": [list(range(start + i, start + o, p)) for start in range(0, ranks, o) for i in range(p)],
    }
    return {name: lists for name, lists in wanted.items() if len(lists[0]) > 1}


@dataclass
class Groups:
    """This rank's groups of a chain; None where it would be alone. ``mesh``: that optimizer shards are DTensors on."""

    chain: Chain
    ranks: int
    rank: int
    mesh: DeviceMesh | None = None
    gather: Any = None
    scatter: Any = None
    towards: Any = None
    replicas: Any = None
    publish: Any = None

    @classmethod
    def build(cls, chain: Chain, device_type: str, timeout_s: float | None = None) -> Groups:
        """Collective. Raises ValueError, before any group is made, where the chain does not fit the number of ranks."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        chain.check(ranks)
        groups = cls(chain, ranks, dist.get_rank() if ranks > 1 else 0)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for name, lists in members(chain, ranks).items():
            setattr(groups, name, dist.new_subgroups_by_enumeration(lists, timeout=timeout)[0])
        if chain.states > 1:
            shape, names = (ranks // chain.states, chain.states), ("amsp_replicate", "amsp_shard")
            if shape[0] == 1:
                shape, names = shape[1:], names[1:]  # type: ignore[assignment]
            with groups_within(timeout_s):
                groups.mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        return groups
