"""Grass with sliced gradients on two ranks: weights, selections, norms and what is sent; one process alone; recipes.

python sliced_worker.py FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set; runs FOLDER/*.json as recipes
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import RunConfig, Trainer
from trainwright.core.distributed import full_tensor
from trainwright.core.params import named_params
from trainwright.core.registry import build
from trainwright.core.sliced_gradient import SlicedGradient, add_up
from trainwright.models.transforms.grass_linear import follow_sharding, slice_gradients
from trainwright.optim.clipping.global_norm import GlobalNormClipper
from trainwright.optim.grass import Grass
from trainwright.parallel.apply import parallelize
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.precision.base import Precision

CPU = torch.device("cpu")
DENSE = {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 44, "max_seq_len": 32}
GRASS = {"name": "grass", "lr": 0.01, "rank": 6, "scale": 1.0, "gap": 3}
STEPS, MICRO, WORLD = 8, 2, 2
CASES = {  # degrees, settings of the optimizer, of the layout, dtype
    "replicate": ({"dp_replicate": 2}, {}, {}, torch.float64),
    "replicate, draws": ({"dp_replicate": 2}, {"selection": "multinomial", "weight_decay": 0.1}, {}, torch.float64),
    "shard": ({"dp_shard": 2}, {}, {}, torch.float64),
    "shard, draws": ({"dp_shard": 2}, {"selection": "multinomial", "weight_decay": 0.1}, {}, torch.float64),
    "shard, whole": ({"dp_shard": 2}, {"subspace": "lion"}, {"accumulate": "whole"}, torch.float64),
    "shard, dense": ({"dp_shard": 2}, {}, {}, torch.float64),
    "replicate, tied": ({"dp_replicate": 2}, {}, {}, torch.float64),
    "shard, tied": ({"dp_shard": 2}, {}, {}, torch.float64),
    "shard, recomputed": ({"dp_shard": 2}, {}, {}, torch.float64),
}


class Sent(TorchDispatchMode):
    """Bytes that go into reductions of floating-point numbers, by kind."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("_c10d_functional", "c10d") and "reduce" in func.__name__:
            kind = "reduce_scatter" if "reduce_scatter" in func.__name__ else "all_reduce"
            whole = args[1] if func.namespace == "c10d" and kind == "reduce_scatter" else args[0]
            tensors = whole if isinstance(whole, list) else [whole]
            self.bytes[kind] += sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def loss_of(model, step, micro, rows):
    """Of some of 4 rows, divided by those of all micro-batches and ranks."""
    tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(100 * step + micro))
    found = nn.functional.cross_entropy(model(tokens[rows, :-1]).flatten(0, 1), tokens[rows, 1:].flatten())
    return found * (rows.stop - rows.start) / (4 * MICRO)


def train(case, rank):
    """Weights, rows, norms and bytes by step of a rank; of one process for ``rank`` None."""
    degrees, settings, layout, dtype = CASES[case]
    torch.manual_seed(0)
    model = build("model", dict(DENSE)).build(61, 32).to(dtype)
    if "tied" in case:  # within a block: FSDP2 takes no weight in two of them
        model.blocks[0].attn.q.weight = model.blocks[0].attn.o.weight
    if "dense" not in case:
        slice_gradients(model)
    scale, sync, rows = 1.0, None, slice(0, 4)
    if rank is not None:
        config = ParallelConfig(**degrees, **layout)
        parallel = parallelize(
            model, build_mesh(config.resolve(WORLD), CPU), config, Precision(torch.float32, "cpu"), CPU
        )
        scale, sync, rows = parallel.loss_scale, parallel.no_sync, slice(2 * rank, 2 * rank + 2)
        assert not isinstance(parallel.module, nn.parallel.DistributedDataParallel)
    if "recomputed" in case:
        for block in model.blocks:
            block.mlp.forward = _recomputed(block.mlp.forward)
    named = named_params(model)
    optimizer = build("optimizer", {**GRASS, **settings}).build(named)
    names = {id(n.param): n.name for n in named}
    norms, sent, sliced = [], [], []
    for t in range(STEPS):
        with Sent() as counted:
            for m in range(MICRO):
                ended = m == MICRO - 1
                with contextlib.nullcontext() if sync is None else sync(last_micro_batch=ended):
                    (loss_of(model, t, m, rows) * scale).backward()
        grads = [p.grad for p in model.parameters()]
        sliced.append(sum(isinstance(g, SlicedGradient) for g in grads))
        sent.append(dict(counted.bytes))
        norms.append(float(GlobalNormClipper(None)(list(model.parameters()))))
        optimizer.step(), optimizer.zero_grad()
    state = {
        f"{names[id(p)]} {key}": full_tensor(v).clone()
        for part in getattr(optimizer, "parts", [optimizer])
        for p, entries in part.state.items()
        for key, v in entries.items()
        if isinstance(v, torch.Tensor)
    }
    weights = {n: full_tensor(p.detach()).clone() for n, p in model.named_parameters()}
    return {"weights": weights, "state": state, "norms": norms, "sent": sent, "sliced": sliced}


def _recomputed(forward):
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(forward, x, use_reentrant=False)


def layouts(rank):
    """Slices of ranks added up, for matrices in all layouts: what every rank has then, whole, and its shard."""
    found = {}
    meshes = {1: init_device_mesh("cpu", (2,)), 2: init_device_mesh("cpu", (1, 2)), 3: init_device_mesh("cpu", (2, 1))}
    for shape in ((8, 12), (7, 11), (12, 8), (11, 5), (1, 9)):
        for at, placements in (
            (1, [Replicate()]), (1, [Shard(0)]), (1, [Shard(1)]), (2, [Replicate(), Shard(0)]),
            (3, [Replicate(), Shard(0)]), (3, [Shard(1), Replicate()]),
        ):  # fmt: skip
            params, wholes = [], []
            for side in (-2, -1):
                p = nn.Parameter(distribute_tensor(torch.zeros(shape, dtype=torch.float64), meshes[at], placements))
                mine = randn(*shape, seed=rank)
                indexes = torch.arange(0, shape[side], 2)
                p.grad = SlicedGradient(mine.index_select(side, indexes).contiguous(), indexes, side, p.shape)
                wholes.append(((randn(*shape, seed=0) + randn(*shape, seed=1)) / 2).index_select(side, indexes))
                params.append(p)
            add_up(params)
            add_up(params)  # nothing is left to do
            for p, whole in zip(params, wholes, strict=True):
                kept = p.grad.kept
                cut = 1 if p.grad.side == -2 else 0
                wanted = distribute_tensor(whole, kept.device_mesh, kept.placements, src_data_rank=None)
                placed = [Shard(cut) if isinstance(q, Shard) else q for q in p.placements]
                found[f"{shape} {placements} {p.grad.side}"] = (
                    isinstance(kept, DTensor) and list(kept.placements) == placed and kept.shape == whole.shape,
                    float((kept.to_local() - wanted.to_local()).abs().max()) if wanted.to_local().numel() else 0.0,
                    float((kept.full_tensor() - whole).abs().max()),
                )
    return found


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def refusals():
    """What is said to a step without the sum over ranks, and to a backward pass after it."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(8, 12, bias=False, dtype=torch.float64))
    slice_gradients(model)
    fully_shard(model, mesh=mesh)
    weights = follow_sharding(model)
    optimizer = Grass(weights, rank=2, gap=3)
    said = []
    for t in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
        if t == 0:
            optimizer.step()
    for call in (optimizer.step, lambda: model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        add_up(weights)
    try:
        add_up([_sliced_twice()])
    except ValueError as error:
        said.append(str(error))
    return said


def _sliced_twice():
    mesh = init_device_mesh("cpu", (1, 2))
    p = nn.Parameter(distribute_tensor(torch.zeros(8, 12), mesh, [Shard(0), Shard(1)]))
    p.grad = SlicedGradient(torch.ones(2, 12), torch.arange(2), -2, p.shape)
    return p


def fit(recipe, name, resume=False, stop=None, **more):
    """A run of a recipe: rows of its log, and whether slices were made of it."""
    trainer = Trainer(RunConfig.load({**recipe, **more, "run": {**recipe["run"], "name": name}}), resume=resume)
    if stop is not None:
        trainer._finished = lambda: trainer.progress.step >= stop
    rows = []
    trainer.fit(on_step=rows.append)
    weights = {n: full_tensor(p.detach()).clone() for n, p in trainer.model.named_parameters()}
    return {"rows": [(r["loss"], r["grad_norm"]) for r in rows], "weights": weights}


def runs(folder):
    """Of each recipe in the folder: the run with slices, the one without, and the first stopped and resumed."""
    found = {}
    for file in sorted(Path(folder).glob("*.json")):
        recipe, name = json.loads(file.read_text()), file.stem
        sliced = {"transforms": ["grass_linear"]}
        found[name] = {"sliced": fit(recipe, f"{name}-sliced", **sliced), "whole": fit(recipe, f"{name}-whole")}
        if "checkpoint" in recipe:
            first = fit(recipe, f"{name}-parts", stop=4, **sliced)
            second = fit(recipe, f"{name}-parts", resume=True, **sliced)
            found[name]["resumed"] = {"rows": first["rows"] + second["rows"], "weights": second["weights"]}
    return found


def main(folder):
    torch.set_num_threads(1)
    init_distributed(CPU)
    rank = dist.get_rank()
    found = {case: train(case, rank) for case in CASES}
    found |= {"layouts": layouts(rank), "refusals": refusals(), "runs": runs(folder)}
    torch.save(found, f"{folder}/{rank}.pt")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
