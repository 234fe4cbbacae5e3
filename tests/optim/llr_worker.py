"""One rank of the two-rank job of test_llr and of SPAM's sparse momentum: writes the figures as JSON."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.llr import layer_alphas
from trainwright.optim.spam import SPAM
from trainwright.optim.state import optimizer_state_bytes

SHAPES = {"a": (12, 12), "b": (8, 20), "c": (31, 9), "stack": (3, 8, 10), "embed": (11, 8)}
ROLES = {"stack": "expert", "embed": "embedding"}


def draw(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def llr_figures(rank, mesh):
    torch.set_num_threads(1 + rank)  # another order of summation must not matter
    params, sharded = [], []
    for i, (name, shape) in enumerate(SHAPES.items()):
        whole = draw(shape, i)
        dim = len(shape) - 1 if name == "b" else 0
        params.append(nn.Parameter(whole))
        part = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
        sharded.append(NamedParam(name, part, ROLES.get(name, "matrix")))
    optimizer = build("optimizer", {"name": "llr", "min_size": 8, "every": 6, "ramp": 4}).build(sharded)
    alphas = layer_alphas([n.param for n in sharded])
    for n in sharded:
        n.param.grad = torch.ones_like(n.param)
    optimizer.step()
    return {
        "whole": layer_alphas(params),
        "sharded": alphas,
        "factors": [optimizer.factors()[n.param] for n in sharded],
    }


def spam_figures(mesh):
    """Sparse momentum on uneven shards, through two resets."""
    start = draw((7, 16), 0)
    p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    settings = {"density": 0.25, "reset_every": 12, "reset_warmup": 6, "clip_after": 3, "weight_decay": 0.1}
    a, b = SPAM([p], **settings), SPAM([q], **settings)
    for t in range(30):
        p.grad = draw(p.shape, 100 + t)
        q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        a.step(), b.step()
    difference = float((q.full_tensor() - p).abs().max().detach())
    return {"difference": difference, "bytes": optimizer_state_bytes(b), "whole_bytes": optimizer_state_bytes(a)}


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {"llr": llr_figures(rank, mesh), "spam": spam_figures(mesh)}
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(found, f)
    dist.barrier()
    dist.destroy_process_group()
