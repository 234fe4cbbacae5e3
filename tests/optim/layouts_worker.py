"""Matrix methods on two ranks in every layout a matrix may have, in float64, against the unsharded step."""

import json

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.optim.adapm import AdaPM
from trainwright.optim.base import UpdateRule
from trainwright.optim.gradnormlorp import GradNormLoRP
from trainwright.optim.grass import Grass
from trainwright.optim.low_rank_parts import parts_of

LAYOUTS = {  # shape, sharded dimension, fused parts
    "rows": ((8, 12), 0, ()), "columns": ((12, 8), 0, ()), "rows over columns": ((8, 12), 1, ()),
    "uneven": ((7, 11), 0, ()), "empty": ((1, 9), 0, ()), "experts": ((3, 6, 9), 0, ()),
    "in experts": ((2, 6, 9), 1, ()), "fused": ((12, 9), 0, (5, 7)), "fused columns": ((9, 12), 0, (-5, -7)),
    "fused experts": ((3, 9, 5), 0, (4, 5)),
}  # fmt: skip


class GrassByUpdates(Grass):
    """Stepped as wrappers do it: the whole update, then its application."""

    step_part = UpdateRule.step_part


LOW_RANK = {"weight_decay": 0.1, "rank": 0.3, "gap": 3}
METHODS = {
    "grass": {
        "top_r": lambda groups: Grass(groups, **LOW_RANK),
        "multinomial": lambda groups: Grass(groups, **LOW_RANK, selection="multinomial"),
        "by updates": lambda groups: GrassByUpdates(groups, **LOW_RANK),
    },
    "gradnormlorp": {
        "svd": lambda groups: GradNormLoRP(groups, **LOW_RANK),
        "frozen": lambda groups: GradNormLoRP(groups, **LOW_RANK, learn_magnitude=False, subspace="lion"),
        "factors": lambda groups: GradNormLoRP([{**g, "normalized": False} for g in groups], **LOW_RANK),
    },
    "adapm": {
        "full": lambda groups: AdaPM(groups, momentum="low_rank", rank=0.3),
        "blockwise": lambda groups: AdaPM(groups, momentum="low_rank", rank=0.3, second_moment="blockwise"),
    },
}


class Count(TorchDispatchMode):
    """Numbers that go into collectives."""

    sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "c10d") and not func.__name__.startswith(("wait", "_wrap")):
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            self.sent += sum(t.numel() for t in tensors)
        return func(*args, **(kwargs or {}))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(make, shape, dim, splits, mesh, placements=None):
    """Five steps of the sharded and the whole matrix; two more of another sharded one that starts from the whole's."""
    placements = placements or [Shard(dim)]

    def shard(t):
        return distribute_tensor(t, mesh, placements)

    p, q = nn.Parameter(randn(*shape)), nn.Parameter(shard(randn(*shape)))
    a, b = (make([{"params": [x], "splits": splits}]) for x in (p, q))
    for t in range(5):
        p.grad = randn(*shape, seed=10 + t)
        q.grad = shard(p.grad)
        with Count() as count:
            b.step()
        a.step()
    found = {
        "difference": float((q.full_tensor() - p).detach().abs().max()),
        "way": float((p.detach() - randn(*shape)).abs().max()),
        "sent": count.sent,
    }
    if isinstance(a, Grass):
        for key, optimizer, x in (("rows", b, q), ("whole_rows", a, p)):
            found[key] = [r.tolist() for r in optimizer.rows(parts_of(x, LOW_RANK["rank"], splits))]
    # A checkpoint of the whole gives tensors of the parameter's shape sharded and others as they are.
    r = nn.Parameter(shard(p.detach()))
    c = make([{"params": [r], "splits": splits}])
    c.state[r] = {
        key: v if not isinstance(v, torch.Tensor) else shard(v) if v.shape == p.shape else v.clone()
        for key, v in a.state[p].items()
    }
    for t in range(2):
        p.grad = randn(*shape, seed=20 + t)
        r.grad = shard(p.grad)
        a.step(), c.step()
    found["resumed"] = float((r.full_tensor() - p).detach().abs().max())
    return found


def traffic(make, shape, dim, mesh, steps=4):
    """Numbers sent by each step."""
    q = nn.Parameter(distribute_tensor(randn(*shape), mesh, [Shard(dim)]))
    optimizer = make([q])
    sent = []
    for t in range(steps):
        q.grad = distribute_tensor(randn(*shape, seed=t), mesh, [Shard(dim)])
        with Count() as count:
            optimizer.step()
        sent.append(count.sent)
    return sent


TRAFFIC = {  # optimizer, shape, sharded dimension
    "grass": [(lambda q: Grass(q, rank=2, gap=2), (8, 100), 0)],
    "adapm": [(lambda q: AdaPM(q, momentum="low_rank", rank=2), (64, 96), dim) for dim in (0, 1)],
    "gradnormlorp": [],
}


def job(rank, folder, method):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {
        f"{layout}, {variant}": compare(make, *LAYOUTS[layout], mesh)
        for layout in LAYOUTS
        for variant, make in METHODS[method].items()
    }
    square = init_device_mesh("cpu", (1, 2)), init_device_mesh("cpu", (2, 1))
    for variant, make in list(METHODS[method].items())[:1]:
        for i, placements in enumerate([[Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(1)]]):
            for shape in ((8, 12), (12, 8)):
                case = f"two dimensions {i} {shape}, {variant}"
                found[case] = compare(make, shape, 0, (), square[placements[0] == Shard(1)], placements)
    found["sent"] = [traffic(*case, mesh) for case in TRAFFIC[method]]
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump(found, f)
    dist.destroy_process_group()


def on_two_ranks(folder, method):
    """Figures of each rank."""
    mp.spawn(job, args=(str(folder), method), nprocs=2)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(2)]
