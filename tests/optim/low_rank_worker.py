"""One rank of the two-rank job of test_galore: methods in a low-rank subspace on all layouts of a matrix."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.optim.galore import GaLore
from trainwright.optim.natural_galore import NaturalGaLore
from trainwright.optim.online_subspace_descent import OnlineSubspaceDescent

RULES = {
    "galore": (GaLore, {"gap": 2}),
    "galore, randomised": (GaLore, {"gap": 2, "projection": "randomized_svd", "stagger": True}),
    "galore, random": (GaLore, {"gap": 2, "projection": "random"}),
    "galore, 8 bit": (GaLore, {"gap": 2, "subspace": "adam_8bit", "rank": 4}),
    "galore, lion": (GaLore, {"gap": 2, "subspace": "lion", "betas": (0.9, 0.99)}),
    "natural_galore": (NaturalGaLore, {"gap": 3, "history": 4}),
    "online_subspace_descent": (OnlineSubspaceDescent, {"kappa": 0.3}),
    "online_subspace_descent, 8 bit": (OnlineSubspaceDescent, {"projection_rule": "adam_8bit"}),
}
SHAPES = {
    "tall": ((13, 6), ()),
    "wide": ((6, 13), ()),
    "square": ((8, 8), ()),
    "one row less than ranks": ((9, 5), ()),
    "experts": ((3, 7, 5), ()),
    "fused rows": ((17, 7), (9, 4, 4)),
    "fused columns": ((6, 14), (-10, -4)),
}


def layouts(ndim, name):
    """(name, mesh, placements); all of them for the plain forms of the methods, the usual one for their variants."""
    yield "rows", "one", [Shard(ndim - 2)]
    if "," in name:
        return
    yield "columns", "one", [Shard(ndim - 1)]
    yield "replicated", "one", [Replicate()]
    yield "hybrid", "two", [Replicate(), Shard(ndim - 2)]
    yield "both", "two", [Shard(ndim - 2), Shard(ndim - 1)]
    if ndim == 3:
        yield "experts", "one", [Shard(0)]


def trained(rule, settings, shapes, meshes, layout=None):
    """Weights and state, whole, and bytes of this rank's state without projections, after 5 steps."""
    params = []
    for i, (shape, _) in enumerate(shapes):
        value = weights(i, shape)
        if layout is not None:
            value = distribute_tensor(value, meshes[layout[1]], layout[2], src_data_rank=None)
        params.append(nn.Parameter(value))
    groups = [{"params": [p], "splits": s} for p, (_, s) in zip(params, shapes, strict=True)]
    optimizer = rule(groups, lr=0.05, **settings)
    for t in range(5):
        for i, p in enumerate(params):
            grad = graded(p.shape, 100 * t + i)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if layout else grad
        optimizer.step()
    whole = [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]
    state = {}
    for i, p in enumerate(params):
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                state[f"{i} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    held = sum(
        (v.to_local() if isinstance(v, DTensor) else v).nbytes
        for p in params
        for k, v in optimizer.state[p].items()
        if isinstance(v, torch.Tensor) and not k.startswith("projection")
    )
    return whole, state, held


def weights(i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def graded(shape, seed):
    """A gradient with well separated singular values: its leading directions do not depend on rounding."""
    g = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=g, dtype=torch.float64), full_matrices=False)
    s = 2.0 ** -torch.arange(u.shape[-1], dtype=torch.float64)
    return ((u * s) @ vh).float()


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    meshes = {"one": init_device_mesh("cpu", (2,)), "two": init_device_mesh("cpu", (1, 2))}
    found = {}
    for name, (rule, settings) in RULES.items():
        for ndim in (2, 3):
            shapes = {k: v for k, v in SHAPES.items() if len(v[0]) == ndim}
            want, want_state, want_held = trained(rule, settings, list(shapes.values()), meshes)
            start = [weights(i, shape) for i, (shape, _) in enumerate(shapes.values())]
            for layout in layouts(ndim, name):
                got, state, held = trained(rule, settings, list(shapes.values()), meshes, layout)
                for key, a, b, c in zip(shapes, got, want, start, strict=True):
                    found[f"{name}: {key}, {layout[0]}"] = {
                        "difference": float((a - b).abs().max()),
                        "way": float((b - c).abs().max()),
                    }
                figures = found[f"{name}: {next(iter(shapes))}, {layout[0]}"]
                figures["shapes"] = {k: list(v.shape) for k, v in state.items()} == {
                    k: list(v.shape) for k, v in want_state.items()
                }
                figures["held"] = held / max(want_held, 1)
    with open(f"{folder}/low_rank{rank}.json", "w") as f:
        json.dump(found, f)
    dist.barrier()
    dist.destroy_process_group()
