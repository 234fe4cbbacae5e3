"""One rank of the two-rank job of test_fused_shards: fused matrices in every layout, against the unsharded step."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim import muon

# Shapes with the sizes of what is fused in them: rows, or negative for columns. Shards are uneven, some are empty.
CASES = [
    ((12, 7), (6, 4, 2)),
    ((7, 12), (-6, -4, -2)),
    ((3, 6, 8), (2, 4)),
    ((3, 8, 6), (-2, -4)),
    ((3, 5), ()),
    ((1, 9), ()),
]
METHODS = [
    {"name": "spectra", "c": 0.5},
    {"name": "spectra", "c": 0.5, "inner": "muon"},
    {"name": "numuon"},
    {"name": "spectral_sphere"},
    {"name": "spectral_sphere", "retract": "dynamic"},
]


def placements(shape):
    return {"rows": Shard(len(shape) - 2), "columns": Shard(len(shape) - 1), "first": Shard(0), "whole": Replicate()}


def figures(settings, layout, mesh):
    """Largest difference after four steps per case, and the smallest way that weights went."""
    g = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=g) for shape, _ in CASES]
    whole = [nn.Parameter(w.clone()) for w in starts]
    shards = [nn.Parameter(distribute_tensor(w.clone(), mesh, [placements(w.shape)[layout]])) for w in starts]
    a, b = (
        build("optimizer", settings).build(
            [NamedParam(str(i), p, "matrix", CASES[i][1]) for i, p in enumerate(params)],
        )
        for params in (whole, shards)
    )
    for _ in range(4):
        for p, q in zip(whole, shards, strict=True):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = distribute_tensor(p.grad.clone(), mesh, q.placements)
        a.step(), b.step()
    with torch.no_grad():
        differences = [float((p - q.full_tensor()).abs().max()) for p, q in zip(whole, shards, strict=True)]
        ways = [float((p - w).abs().max()) for p, w in zip(whole, starts, strict=True)]
    return {"differences": differences, "way": min(ways)}


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    muon.iteration_dtype = lambda device: torch.float32
    mesh = init_device_mesh("cpu", (2,))
    out = {
        f"{i} {layout}": figures(settings, layout, mesh)
        for i, settings in enumerate(METHODS)
        for layout in ("rows", "columns", "first", "whole")
    }
    if rank == 0:
        with open(f"{folder}/figures.json", "w") as f:
            json.dump(out, f)
    dist.barrier()
    dist.destroy_process_group()
