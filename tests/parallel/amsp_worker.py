"""One of four processes of test_amsp.py: runs every part on its share of the ranks and saves what came out.

python amsp_worker.py FOLDER RANK engine|checkpoints
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainwright.core.distributed import full_tensor, local_tensor
from trainwright.core.errors import ConfigError
from trainwright.core.params import named_params
from trainwright.parallel.amsp.chain import Chain, chains
from trainwright.parallel.amsp.engine import Amsp
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.weights import fill_from_first_rank

STEPS, MICRO, DIM, IDS = 5, 2, 6, 7


class Layer(nn.Module):
    """``frozen`` weights are read in the backward pass when all trained ones have their gradients."""

    def __init__(self, dim: int, recompute: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.frozen = nn.Linear(dim, dim, bias=False).requires_grad_(False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.recompute = recompute

    def inner(self, x):
        return x + self.down(torch.tanh(self.up(self.frozen(self.norm(x)))))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


class Model(nn.Module):
    """Embedding and head are one weight; no first dimension divides by 4."""

    def __init__(self, recompute: bool = False, dim: int = DIM):
        super().__init__()
        self.embed = nn.Embedding(IDS, dim)
        self.layers = nn.ModuleList(Layer(dim, recompute) for _ in range(3))
        self.head = nn.Linear(dim, IDS, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.Parameter(torch.zeros(dim))
        self.use_extra = True

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + self.extra if self.use_extra else x)


def build(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings).double()


def rows(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged: as many rows and tokens as chance will have it, in some steps none."""
    g = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    shape = tuple(torch.randint(1, 5, (2,), generator=g).tolist())
    tokens = torch.randint(IDS, shape, generator=g)
    weights = torch.rand(shape, generator=g) * ((step + micro + rank) % 3 > 0)
    return tokens, weights


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, weights = batch
    each = F.cross_entropy(model(tokens).flatten(0, -2), tokens.roll(1, -1).flatten(), reduction="none")
    return (each * weights.flatten()).sum()


def reference(ranks: int, optimizer: str = "adamw") -> dict[str, Any]:
    """The same steps by one process with every rank's rows."""
    model = build()
    step_with = OPTIMIZERS[optimizer](model)
    norms = []
    for step in range(STEPS):
        for micro in range(MICRO):
            sum(loss(model, rows(step, micro, r)) for r in range(ranks)).div(ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        step_with.step()
        step_with.zero_grad()
    return {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}, "norms": norms}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    from trainwright.optim.muon import MuonConfig

    return MuonConfig(lr=1e-2).build(named_params(model))


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: full_tensor(p.detach()).clone() for n, p in model.named_parameters()}


def train(chain: Chain, optimizer: str = "adamw", recompute: bool = False) -> dict[str, Any]:
    """What every step gave, what a rank holds, how many layers were whole at once, what was sent."""
    model = build(recompute=recompute)
    amsp = Amsp(model, chain, blocks=model.layers)
    step_with = OPTIMIZERS[optimizer](model)
    norms, most = [], 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(u.full or "gather" in u.pending for u in amsp.units[1:]))

    for layer in model.layers:
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    rank = dist.get_rank()
    with CommTrace() as trace:
        for step in range(STEPS):
            for micro in range(MICRO):
                with amsp.micro_step(last=micro == MICRO - 1):
                    loss(model, rows(step, micro, rank)).backward()
            norms.append(float(amsp.clip_grad_norm_(0.3)))
            step_with.step()
            step_with.zero_grad()
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for r in trace.records:
        groups.setdefault(r.group, []).append((r.kind, r.size))
    with torch.no_grad():
        evaluated = loss(model, rows(0, 0, 0))
    held = sum(u.whole.untyped_storage().nbytes() for u in amsp.units if u.shard is not None)
    return {
        "weights": whole(model),
        "norms": norms,
        "nbytes": amsp.nbytes(step_with),
        "padding": [sum(u.layout.chunk for u in amsp.units), sum(u.grad_layout.chunk for u in amsp.units)],
        "most": most,
        "left_whole": held,
        "groups": groups,
        "evaluated": evaluated,
    }


def every_chain() -> dict[Any, Any]:
    return {chain: train(chain) for chain in chains(dist.get_world_size())}


def others() -> dict[str, Any]:
    world = dist.get_world_size()
    middle = Chain(1, 2, world) if world == 4 else Chain(1, 1, 2)
    return {
        "recompute": train(Chain(2, 2, world), recompute=True),
        "muon": train(middle, "muon"),
        "two_forwards": two_forwards(Chain(2, 2, world)),
        "changed": changed(middle),
        "from_meta": [from_meta(chain) for chain in (middle, Chain(2, 2, 2))],
        "unused": unused(middle),
        "refused": refused(middle),
        "mixed": mixed(Chain(2, 2, world)),
    }


def two_forwards(chain: Chain) -> Any:
    """Two forward passes and one backward pass, as objectives of pairs have."""
    model, alone = build(), build()
    Amsp(model, chain, blocks=model.layers)
    a, b = rows(0, 1, 0), rows(0, 1, 1)
    (loss(model, a) + 2 * loss(model, b)).backward()
    (loss(alone, a) + 2 * loss(alone, b)).backward()
    return worst({n: p.grad for n, p in model.named_parameters()}, alone)


def from_meta(chain: Chain) -> float:
    """Ranks other than the first hold no weights before."""
    torch.manual_seed(0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with fill_from_first_rank(model, torch.device("cpu")):
        Amsp(model, chain, blocks=[model[1]], device=torch.device("cpu"))
    x = torch.ones(2, 3)
    return float((model(x) - alone(x)).detach().abs().max())


def worst(grads: dict[str, Any], alone: nn.Module) -> float:
    found = 0.0
    for n, p in alone.named_parameters():
        if p.grad is not None:
            found = max(found, float((full_tensor(grads[n]) - p.grad).abs().max()))
    return found


def changed(chain: Chain) -> Any:
    """Weights that change otherwise than by a step are seen by the next forward pass, however they are written to."""
    model, alone = build(), build()
    Amsp(model, chain, blocks=model.layers)
    found = []
    for p in [*model.parameters(), *alone.parameters()]:
        local_tensor(p.detach()).mul_(2)  # as averages are swapped in, and checkpoints loaded
    with torch.no_grad():
        found.append(float((loss(model, rows(0, 1, 0)) - loss(alone, rows(0, 1, 0))).abs()))
    for factor in (1.0, 3.0):
        with torch.no_grad():
            for p in [*model.parameters(), *alone.parameters()]:
                p.mul_(factor)
            found.append(float((loss(model, rows(0, 1, 0)) - loss(alone, rows(0, 1, 0))).abs()))
    return found


def unused(chain: Chain) -> dict[str, Any]:
    """A parameter that one rank uses, or none, where that is allowed and where not."""
    out: dict[str, Any] = {}
    for name, users in {"one": (0,), "none": ()}.items():
        model, alone = build(), build()
        Amsp(model, chain, blocks=model.layers, find_unused_parameters=True)
        model.use_extra = dist.get_rank() in users
        loss(model, rows(0, 1, dist.get_rank())).backward()
        for r in range(dist.get_world_size()):
            alone.use_extra = r in users
            loss(alone, rows(0, 1, r)).div(dist.get_world_size()).backward()
        out[name] = (worst({n: p.grad for n, p in model.named_parameters()}, alone), model.extra.grad is None)
    model = build()
    Amsp(model, chain, blocks=model.layers)
    model.use_extra = False
    try:
        loss(model, rows(0, 1, 0)).backward()
    except ConfigError as error:
        out["refused"] = str(error)
    return out


def refused(chain: Chain) -> dict[str, str]:
    out = {}
    model = build()
    amsp = Amsp(model, Chain(1, 2, 2), blocks=model.layers, accumulation_buffer=False)
    loss(model, rows(0, 1, 0)).backward()
    first = {n: full_tensor(p.grad) for n, p in model.named_parameters() if p.requires_grad}
    alone = build()
    loss(alone, rows(0, 1, 0)).backward()
    out["without a buffer"] = worst(first, alone)
    for name, call in {
        "buffer": lambda: amsp.micro_step(last=False).__enter__(),
        "clip": lambda: amsp.clip_grad_norm_(
            1.0, [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        ),
        "chain": lambda: Amsp(build(), Chain(2, 3, 4)),
        "dtypes": lambda: Amsp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), Chain(1, 1, 2)),
    }.items():
        try:
            call()
            out[name] = "no error"
        except ValueError as error:
            out[name] = str(error)
    return out


def mixed(chain: Chain) -> dict[str, Any]:
    """The formula's sizes: 16-bit parameters and gradients, master weights and two moments in float32."""
    torch.manual_seed(0)
    model = Model(dim=16).float()
    for p in model.parameters():
        p.requires_grad_(True)
    alone = Model(dim=16).float()
    alone.load_state_dict(model.state_dict())
    half = torch.bfloat16
    amsp = Amsp(model, chain, blocks=model.layers, compute_dtype=half, gradient_dtype=half)
    optimizer, other = adamw(model), torch.optim.AdamW(alone.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        loss(model, rows(step, 1, 0)).backward()
        loss(alone, rows(step, 1, 0)).backward()
        for o in (optimizer, other):
            o.step()
            o.zero_grad()
    far = max(
        float((full_tensor(p.detach()) - q.detach()).abs().max())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    return {
        "nbytes": amsp.nbytes(optimizer),
        "chunk": sum(u.layout.chunk for u in amsp.units),
        "dtypes": {str(p.dtype) for p in model.parameters()},
        "far": far,
    }


def sharding(*factors: int) -> dict[str, Any]:
    return {"sharding": dict(zip(("parameters", "gradients", "states"), factors, strict=True)) | {"name": "amsp"}}


# Recipe under which a checkpoint is saved on four ranks -> those that it is opened under.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "amsp": ("adamw", sharding(1, 2, 4), [sharding(2, 2, 4), sharding(4, 4, 4), sharding(1, 1, 2), {"dp_shard": 4}]),
    "hybrid": ("adamw", {"dp_replicate": 2, "dp_shard": 2}, [sharding(1, 2, 4), sharding(2, 2, 2)]),
    "matrices": ("muon", sharding(2, 2, 4), [sharding(1, 1, 4)]),
}


def checkpoints(root: Path) -> dict[str, list[str]]:
    """Through the trainer: saved, gone on with, and opened under other layouts; what was wrong."""
    reshard_worker = resharding()
    found = {}
    for name, (optimizer, parallel, others) in CHECKPOINTS.items():
        reshard_worker.save(root, optimizer, name, parallel)
        for i, other in enumerate(others):
            found[f"{name} {i}"] = reshard_worker.load(root, optimizer, name, other)
    return found


def resharding() -> Any:
    """The module that saves and opens a recipe's checkpoints, by its place."""
    spec = importlib.util.spec_from_file_location("reshard_worker", Path(__file__).parent / "reshard_worker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_text(root: Path) -> None:
    (root / "text").mkdir()
    for i in range(30):
        (root / f"text/{i:02d}.txt").write_text("\n".join(f"{i} plus {j} is {i + j}" for j in range(30)))


def sequences(results: list[dict[str, Any]], name: Any) -> list[Any]:
    """Per group of ranks the collectives of each member, which have to be the same."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for result in results:
        for group, calls in result[name]["groups"].items():
            found.setdefault(group, []).append(calls)
    return list(found.values())


def start(root: Path, stage: str, rank: int, world: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = f"file://{root}/store-{stage}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def end() -> None:
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def main(root: Path, rank: int, part: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if part == "checkpoints":
        start(root, part, rank, 4)
        found = checkpoints(root)
        end()
    for world in (2, 4) if part == "engine" else ():
        if rank < world:
            start(root, str(world), rank, world)
            found[f"chains {world}"] = every_chain()
            if world == 4:
                found["others"] = others()
            end()
    torch.save(found, root / f"{part}-{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
