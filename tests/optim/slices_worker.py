"""One rank of the four-rank job of test_slices: steps sharded and whole parameters, and writes the figures as JSON."""

import json
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from trainwright.optim.adamh import AdamH, MuonH
from trainwright.optim.mano import Mano
from trainwright.optim.sinkgd import SinkGD
from trainwright.optim.slices import Slices, local_norms, local_sums
from trainwright.optim.swan import Swan

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# shape, splits, mesh dimensions, placements
CASES = {
    "rows": ((37, 12), (), 1, [S0]),
    "as many rows": ((37, 12), (), 1, [S0]),
    "empty shards": ((3, 10), (), 1, [S0]),
    "columns": ((12, 37), (), 1, [S1]),
    "whole experts": ((6, 8, 5), (), 1, [S0]),
    "rows of experts": ((3, 9, 5), (), 1, [S1]),
    "fused": ((13, 6), (6, 4, 3), 1, [S0]),
    "fused columns": ((6, 13), (-6, -4, -3), 1, [S1]),
    "fused columns by rows": ((6, 13), (-6, -4, -3), 1, [S0]),
    "fused experts": ((2, 13, 6), (6, 4, 3), 1, [S1]),
    "fused, replicated": ((13, 6), (6, 4, 3), 1, [R]),
    "hybrid": ((11, 6), (), 2, [R, S0]),
    "experts and rows": ((4, 9, 6), (), 2, [S0, S1]),
    "rows and columns": ((12, 10), (), 2, [S0, S1]),
    "rows twice": ((12, 10), (), 2, [S0, S0]),
}
METHODS = {
    "mano v1": lambda groups: Mano(groups, 0.01, version="v1"),
    "mano v2": lambda groups: Mano(groups, 0.01),
    "mano both": lambda groups: Mano(groups, 0.01, both=True),
    "sinkgd": lambda groups: SinkGD(groups),
    "sinkgd momentum": lambda groups: SinkGD(groups, momentum=0.9, momentum_at="after"),
    "sinkgd others": lambda groups: SinkGD(groups, norms=("frobenius", "sign", "column")),
    "sinkgd spectral": lambda groups: SinkGD(groups, norms=("row", "spectral"), passes=1),
    "swan": lambda groups: Swan(groups),
    "adamh": lambda groups: AdamH(groups),
    "muonh": lambda groups: MuonH(groups),
}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))}
    figures = {
        "steps": {name: steps(make, meshes) for name, make in METHODS.items()},
        "sent": {name: sent(METHODS[name], meshes[1]) for name in METHODS},
        "norms": norms_state(meshes),
        "sums": sums(meshes[1]),
    }
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(figures, f)
    dist.barrier()
    dist.destroy_process_group()


def groups_of(params):
    by_splits = {}
    for name, p in params.items():
        by_splits.setdefault(CASES[name][1], []).append(p)
    return [{"params": some, "splits": splits} for splits, some in by_splits.items()]


def steps(make, meshes):
    """Largest difference after 4 steps, by case, and the smallest way gone."""
    whole = {name: nn.Parameter(draw(*case[0], seed=i)) for i, (name, case) in enumerate(CASES.items())}
    sharded = {
        name: nn.Parameter(distribute_tensor(whole[name].detach().clone(), meshes[case[2]], case[3]))
        for name, case in CASES.items()
    }
    a, b = make(groups_of(whole)), make(groups_of(sharded))
    start = {name: p.detach().clone() for name, p in whole.items()}
    for t in range(4):
        for i, name in enumerate(CASES):
            g = draw(*CASES[name][0], seed=1000 + 100 * t + i)
            whole[name].grad = g
            sharded[name].grad = distribute_tensor(g, meshes[CASES[name][2]], CASES[name][3])
        a.step(), b.step()
    difference = {n: float((p.detach().full_tensor() - whole[n].detach()).abs().max()) for n, p in sharded.items()}
    way = min(float((p.detach() - start[n]).norm()) for n, p in whole.items())
    return {"difference": difference, "way": way}


def sent(make, mesh):
    """What goes between ranks in the first two steps of one matrix [37, 12] sharded by rows."""
    p = nn.Parameter(distribute_tensor(draw(37, 12), mesh, [S0]))
    optimizer = make([p])
    found = []
    for t in range(2):
        p.grad = distribute_tensor(draw(37, 12, seed=1 + t), mesh, [S0])
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce, CommDebugMode() as mode:
            optimizer.step()
        sizes = [call.args[0].numel() for call in reduce.call_args_list]
        found.append({"reduced": sizes, "collectives": mode.get_total_counts()})
    return found


def norms_state(meshes):
    """AdamH's norms of a stack of experts, from a checkpoint of the whole one."""
    stack = draw(6, 8, 5)
    p = nn.Parameter(distribute_tensor(stack, meshes[1], [S0]))
    optimizer = AdamH([p])
    optimizer.state[p]["norm"] = stack.norm(dim=(1, 2))[:, None] * 2
    optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    p.grad = distribute_tensor(draw(6, 8, 5, seed=1), meshes[1], [S0])
    optimizer.step()
    norm = optimizer.state[p]["norm"]
    return {
        "ratio": (p.detach().full_tensor().norm(dim=(1, 2)) / stack.norm(dim=(1, 2))).tolist(),
        "sharded": isinstance(norm, DTensor) and norm.to_local().shape[0] < 6,
    }


def sums(mesh):
    whole = draw(11, 6)
    slices = Slices([distribute_tensor(whole, mesh, [S0])])
    stacks = slices.stacks(slices.params)
    off = 0.0
    for dim in (-2, 0):
        wanted = local_sums(dim, [whole[None]], [whole[None] ** 2]), local_norms(dim, [whole[None]])
        got = slices.sums(dim, stacks, [s**2 for s in stacks]), slices.norms(dim, stacks)
        for (x,), (y,) in zip([*got[0], got[1]], [*wanted[0], wanted[1]], strict=True):
            off = max(off, float((x - y).abs().max()))
    return off
