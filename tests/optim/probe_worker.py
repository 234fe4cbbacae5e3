"""AdaPM's probe on two ranks: shards in every layout, ranks that measure differently, replicas."""

import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layouts_worker import LAYOUTS, randn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.core.params import NamedParam
from trainwright.optim.adapm_probe import ProbedAdaPM
from trainwright.optim.state import allocate_named_state, load_named_state, named_state

STEPS = 3


def gradients(i, shape, t):
    """Of three kinds in turn: steady, of rank 1 with a sign that changes, and noise."""
    if i % 3 == 0:
        return randn(*shape, seed=i)
    if i % 3 == 1:
        one = randn(*shape[:-1], 1, seed=i) * randn(*shape[:-2], 1, shape[-1], seed=i + 50)
        return one * (1 + 3 * float(randn(1, seed=100 * i + t)))
    return randn(*shape, seed=1000 * i + t)


def make(params, **more):
    groups = [{"params": [p], "momentum": "probe", "splits": LAYOUTS[n][2]} for n, p in params.items()]
    names = [NamedParam(n, p, "matrix") for n, p in params.items()]
    return ProbedAdaPM(groups, probe_steps=STEPS, rank=0.3, energy=0.95, names=names, **more), names


def steps(params, optimizer, first, last, place=lambda name, t: t):
    for t in range(first, last):
        for i, (n, p) in enumerate(params.items()):
            p.grad = place(n, gradients(i, LAYOUTS[n][0], t))
        optimizer.step()


def kinds(params, optimizer):
    return {n: optimizer.momentum_of(p) for n, p in params.items()}


def job(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def shard(name, t):
        return distribute_tensor(t, mesh, [Shard(LAYOUTS[name][1])])

    found = {}
    for second_moment in ("full", "blockwise"):
        whole = {n: nn.Parameter(randn(*shape)) for n, (shape, _, _) in LAYOUTS.items()}
        sharded = {n: nn.Parameter(shard(n, randn(*shape))) for n, (shape, _, _) in LAYOUTS.items()}
        (a, _), (b, names) = make(whole, second_moment=second_moment), make(sharded, second_moment=second_moment)
        steps(whole, a, 0, 6)
        steps(sharded, b, 0, 4, shard)
        # A checkpoint of the shards, read into other ones.
        state = named_state(b, names)
        again = {n: nn.Parameter(p.detach().clone()) for n, p in sharded.items()}
        c, new_names = make(again, second_moment=second_moment)
        tensors = allocate_named_state(new_names, state["scalars"])
        for n, entries in tensors.items():
            for key, t in entries.items():
                stored = state["tensors"][n][key]
                t.copy_(stored.redistribute(placements=t.placements) if isinstance(t, DTensor) else stored)
        load_named_state(c, new_names, {"tensors": tensors, "scalars": json.loads(json.dumps(state["scalars"]))})
        steps(sharded, b, 4, 6, shard)
        steps(again, c, 4, 6, shard)
        found[second_moment] = {
            "whole": kinds(whole, a),
            "sharded": kinds(sharded, b),
            "difference": max(
                float((p.full_tensor() - q).detach().abs().max())
                for p, q in zip(sharded.values(), whole.values(), strict=True)
            ),
            "resumed": max(
                float((p.to_local() - q.to_local()).abs().max()) if p.to_local().numel() else 0.0
                for p, q in zip((p.detach() for p in sharded.values()), again.values(), strict=True)
            ),
        }
    # Replicas, of which the second measures something else.
    params = {n: nn.Parameter(randn(*shape)) for n, (shape, _, _) in LAYOUTS.items()}
    optimizer, _ = make(params)
    measure = optimizer._measure

    def lying(p, group):
        (agreement, energy), leading = measure(p, group)
        return ((1 - agreement, 1 - energy) if rank else (agreement, energy)), leading

    optimizer._measure = lying
    steps(params, optimizer, 0, 4)
    found["replicas"] = kinds(params, optimizer)
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(found, f)
    dist.destroy_process_group()


def on_two_ranks(folder):
    mp.spawn(job, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(2)]
