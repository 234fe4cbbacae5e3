"""One rank of the four-rank job of test_whole: measures, and writes the figures as JSON."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.optim.muon import Muon
from trainwright.optim.whole import map_whole

SHAPES = [(13, 6), (6, 13), (6, 6), (13, 6), (3, 6, 6), (2, 5), (1, 7), (40, 8)]


def draw(shapes, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def polar(stack):
    """U V^T of each matrix; by the SVD, which looks at all of a matrix."""
    left, _, right = torch.linalg.svd(stack.double(), full_matrices=False)
    return (left @ right).to(stack.dtype)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts = {
        "rows": (flat, [Shard(0)]),
        "columns": (flat, [Shard(-1)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "both": (grid, [Shard(0), Shard(-1)]),
        "replicated": (flat, [Replicate()]),
    }
    out = {}
    tensors, second = draw(SHAPES), draw(SHAPES, 9)
    expected = [polar(a) + b for a, b in zip(tensors, second, strict=True)]
    for name, (mesh, placements) in layouts.items():

        def place(ts, mesh=mesh, placements=placements):
            return [
                distribute_tensor(t, mesh, [Shard(p.dim % t.ndim) if isinstance(p, Shard) else p for p in placements])
                for t in ts
            ]

        for divide in (True, False):
            seen = []

            def fn(a, b, seen=seen):
                seen.append(a.shape[0] * a.shape[-1] * a.shape[-2] * min(a.shape[-2:]))
                return polar(a) + b

            found = map_whole(fn, place(tensors), place(second), divide=divide)
            out[f"{name} {divide}"] = {
                "error": max(float((t.full_tensor() - e).abs().max()) for t, e in zip(found, expected, strict=True)),
                "laid_out": all(
                    t.placements == p.placements and t.to_local().shape == p.to_local().shape
                    for t, p in zip(found, place(tensors), strict=True)
                ),
                "work": sum(seen),
            }
    fused = distribute_tensor(tensors[0], flat, [Shard(0)])
    (u,) = map_whole(polar, [fused], splits=(6, 7))
    parts = torch.cat([polar(tensors[0][:6]), polar(tensors[0][6:])])
    out["fused"] = float((u.full_tensor() - parts).abs().max())
    (u,) = map_whole(polar, [fused], wire=torch.bfloat16)
    out["bf16"] = float((u.full_tensor() - polar(tensors[0])).abs().max())

    starts = draw(SHAPES, 3)
    one = [nn.Parameter(s.clone()) for s in starts]
    four = [nn.Parameter(distribute_tensor(s, flat, [Shard(0)])) for s in starts]
    a, b = Muon(one, dtype=torch.float32), Muon(four, dtype=torch.float32)
    for step in range(5):
        for p, q, g in zip(one, four, draw(SHAPES, 20 + step), strict=True):
            p.grad, q.grad = g, distribute_tensor(g, flat, [Shard(0)])
        a.step(), b.step()
    out["muon"] = max(float((p - q.full_tensor()).abs().max()) for p, q in zip(one, four, strict=True))
    out["muon_state"] = sum(s["momentum"].to_local().numel() for s in b.state.values())
    assert all(isinstance(p, DTensor) for p in four)
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(out, f)
    dist.barrier()
    dist.destroy_process_group()
