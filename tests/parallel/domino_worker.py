"""One of two ranks of Domino's checks: losses, gradients, sums and waits for them.

python domino_worker.py RESULT_FILE [RECIPE.json]      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import CPU, Cell, decoder, global_batch, precision, train
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.distributed import full_tensor, rank
from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel import domino_decoder
from trainwright.parallel.apply import Parallelized, parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.domino import Half, Projections, join, run_halves, split
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.train.executor import AutogradExecutor, forward_only

LAYERS, DIM, ROWS, LENGTH = 2, 32, 8, 12
STREAM = ROWS * LENGTH * DIM * 8  # bytes of the residual stream of a micro-batch
LLAMA = {"family": "llama", "n_heads": 4, "n_kv_heads": 2, "tie_embeddings": False}
FAMILIES = {
    "llama": LLAMA,
    "qwen3": {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2, "tie_embeddings": True},
    "qwen2.5": {"family": "qwen2.5", "n_heads": 4, "n_kv_heads": 2},
}
SLICES = [(n, k) for n in (1, 2, 4) for k in (1, 2)]


class Watched:
    """An all-reduce that says whether it was waited for."""

    def __init__(self, work: Any):
        self.work, self.waited = work, False

    def wait(self) -> None:
        self.work.wait()
        self.waited = True


started: list[Watched] = []


def watch() -> None:
    """All of Domino's all-reduces from now on go through ``started``."""
    plain = domino_decoder.over

    def over(mesh: Any) -> Any:
        reduce = plain(mesh)

        def start(x: Tensor) -> Watched:
            started.append(Watched(reduce(x)))
            return started[-1]

        return start

    domino_decoder.over = over


def build(spec: dict[str, Any], recompute: str = "none") -> Any:
    model = decoder(**spec).double()
    ActivationCheckpointingConfig(mode=recompute).apply(model)
    return model


def spread(model: Any, tensor: dict[str, Any] | None) -> Parallelized:
    config = ParallelConfig.model_validate(
        {"tp": 2, "sequence_parallel": False, **({} if tensor is None else {"tensor": {"name": "domino", **tensor}})}
    )
    return parallelize(model, build_mesh(Degrees(tp=2), CPU), config, precision(), CPU)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: full_tensor(p.grad).clone() for n, p in model.named_parameters()}  # type: ignore[arg-type]


def step(parallel: Parallelized, batch: Batch, seed: int = 5) -> dict[str, Any]:
    """A step's loss and gradients, and the sizes of its all-reduces of the stream."""
    executor, objective = AutogradExecutor(ROWS, precision()), NextTokenConfig().build()
    first = len(started)
    torch.manual_seed(seed)
    with CommTrace() as trace:
        result = executor.run(parallel, objective, batch)
    mine = started[first:]
    return {
        "loss": (result.loss_sum / result.weight).item(),
        "sizes": [r.size for r in trace.records if r.kind == "all_reduce"],
        "bytes": trace.summary().bytes,
        "kinds": sorted(trace.summary().kinds),
        "waits": len(trace.waits),
        "started": len(mine),
        "unwaited": sum(not h.waited for h in mine),
        "sequence": trace.sequence(),
        "gradients": gradients(parallel.model),
    }


def alone(spec: dict[str, Any], batch: Batch, seed: int = 5) -> dict[str, Any]:
    """The same by one process, with the plain model."""
    model = decoder(**spec).double()
    torch.manual_seed(seed)
    loss, weight = NextTokenConfig().build()(model, batch).sum, batch.weight()
    (loss * (1 / weight).float()).backward()  # the executor's factor
    return {"loss": (loss / weight).item(), "gradients": gradients(model)}


def exact() -> dict[str, Any]:
    out: dict[str, Any] = {}
    batch = global_batch(0)
    for family, spec in FAMILIES.items():
        out[family] = {"alone": alone(spec, batch), "plain": step(spread(build(spec), None), batch)}
        for n, k in SLICES:
            out[family][n, k] = step(spread(build(spec), {"row": n, "column": k}), batch)
    return out


def recomputed() -> dict[str, Any]:
    """Activation checkpointing of every kind, also with dropout: noise comes again as it was."""
    out: dict[str, Any] = {}
    batch = global_batch(1)
    for dropout in (0.0, 0.3):
        spec = {**LLAMA, "dropout": dropout}
        out["alone", dropout] = alone(spec, batch)
        out["plain", dropout] = step(spread(build(spec, "full"), None), batch)
        for mode in ("none", "full", "selective", "every_n"):
            for n, k in ((2, 1), (4, 2)):
                out[mode, dropout, n, k] = step(spread(build(spec, mode), {"row": n, "column": k}), batch)
    return out


def two_models() -> dict[str, Any]:
    """Two models, one recomputed, whose passes lie inside one another, and a micro-batch of each kept under way."""
    objective = NextTokenConfig().build()
    specs = (LLAMA, FAMILIES["qwen3"])
    models = [
        spread(build(spec, mode), {"row": 2, "column": k})
        for spec, mode, k in zip(specs, ("full", "none"), (1, 2), strict=True)
    ]
    batches = [global_batch(2), global_batch(4)]
    first = len(started)
    losses = [[objective(m.module, b).sum for b in batches] for m in models]  # type: ignore[arg-type]
    for i, j in ((0, 1), (1, 0), (0, 0), (1, 1)):
        losses[i][j].backward()
    wanted = []
    for spec in specs:
        model = decoder(**spec).double()
        for b in batches:
            objective(model, b).sum.backward()
        wanted.append(gradients(model))
    return {
        "got": [gradients(m.model) for m in models],
        "wanted": wanted,
        "unwaited": sum(not h.waited for h in started[first:]),
    }


def parts() -> dict[str, Any]:
    """Backward passes over a part of the graph, frozen parts, several passes over one graph, and rows to validate."""
    out: dict[str, Any] = {}
    objective = NextTokenConfig().build()
    batch = global_batch(0)
    first = len(started)
    parallel = spread(build(LLAMA), {"row": 2})
    block: Any = parallel.model.blocks[0]
    loss = objective(parallel.module, batch).sum  # type: ignore[arg-type]
    wanted = [block.attn.v.weight, block.mlp.gate.weight]
    some = torch.autograd.grad(loss, wanted, retain_graph=True)
    out["unwaited_of_a_part"] = sum(not h.waited for h in started[first:])
    loss.backward(retain_graph=True)
    out["of_a_part"] = [(full_tensor(a), full_tensor(p.grad)) for a, p in zip(some, wanted, strict=True)]
    once = gradients(parallel.model)
    loss.backward()
    out["twice"] = all(torch.allclose(g, 2 * once[n], rtol=1e-12) for n, g in gradients(parallel.model).items())

    frozen = build(LLAMA)
    for p in (*frozen.embed.parameters(), *frozen.blocks[0].parameters()):
        p.requires_grad_(False)
    reference = copy.deepcopy(frozen)
    sliced = spread(frozen, {"row": 2, "column": 2})
    before = len(started)
    objective(sliced.module, batch).sum.backward()  # type: ignore[arg-type]
    out["frozen_started"] = len(started) - before
    objective(reference, batch).sum.backward()
    out["frozen"] = [
        (full_tensor(p.grad), q.grad)  # type: ignore[arg-type]
        for p, q in zip(sliced.model.parameters(), reference.parameters(), strict=True)
        if q.requires_grad
    ]
    sliced.module.eval()
    rows = [forward_only(sliced, objective, batch.rows(0, b), precision()).sum.item() for b in (8, 5, 2, 1)]
    out["validation"] = rows, [forward_only(reference, objective, batch.rows(0, b), precision()).sum.item()
                               for b in (8, 5, 2, 1)]  # fmt: skip
    sliced.module.train()
    try:
        objective(sliced.module, batch.rows(0, 3))  # type: ignore[arg-type]
    except Exception as error:
        out["three_rows"] = f"{type(error).__name__}: {error}"
    out["unwaited"] = sum(not h.waited for h in started[first:])
    return out


# -- GPT-2's layer, in plain PyTorch ----------------------------------------------------------------------------------


class GPT2Layer(nn.Module):
    """LayerNorm, GELU, biases everywhere; ``here`` of ``ranks`` ranks' heads and columns, or all."""

    def __init__(self, dim: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[0](x)
        x = x + self.o(self.attend(self.q(z), self.k(z), self.v(z)))
        return x + self.fc2(F.gelu(self.fc1(self.norms[1](x))))

    def cut(self, here: int, ranks: int) -> None:
        """This rank's rows of q, k, v, fc1 and columns of o, fc2."""
        for layer in (self.q, self.k, self.v, self.fc1):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks, 0)[here].clone())
            layer.bias = nn.Parameter(layer.bias.detach().chunk(ranks)[here].clone())
        for layer in (self.o, self.fc2):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks, 1)[here].clone())

    def halves(self) -> list[Half]:
        qkv, fc1 = (self.q, self.k, self.v), self.fc1

        def attention(project: Projections, chunk: int) -> Tensor:
            return self.attend(*project([m.weight for m in qkv], [m.bias for m in qkv]))

        def feed_forward(project: Projections, chunk: int) -> Tensor:
            return F.gelu(project([fc1.weight], [fc1.bias])[0])

        return [
            Half(self.norms[0], attention, self.o.weight, self.o.bias),
            Half(self.norms[1], feed_forward, self.fc2.weight, self.fc2.bias),
        ]


def gpt2() -> dict[str, Any]:
    """Three layers, all halves in one call: the paper's order across layers."""
    torch.manual_seed(0)
    whole = nn.ModuleList(GPT2Layer().double() for _ in range(3))
    for p in whole.parameters():
        nn.init.normal_(p, std=0.2)
    x, target = torch.randn(2, 8, 6, 32, dtype=torch.float64)
    y = x
    for layer in whole:
        y = layer(y)
    (y - target).square().mean().backward()
    out: dict[str, Any] = {}
    for n, k in SLICES:
        mine = copy.deepcopy(whole)
        for layer in mine:
            layer.cut(rank(), 2)
        handles: list[Watched] = []

        def reduce(t: Tensor, handles: list[Watched] = handles) -> Watched:
            handles.append(Watched(dist.all_reduce(t, async_op=True)))
            return handles[-1]

        halves = [half for layer in mine for half in layer.halves()]
        z = join(run_halves(split(x, n, reduce), halves, k))
        (z - target).square().mean().backward()
        pairs = []
        for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
            dim = next((d for d in range(p.ndim) if p.shape[d] != q.shape[d]), None)
            pairs.append((p.grad, q.grad if dim is None else q.grad.chunk(2, dim)[rank()]))
        out[n, k] = {
            "output": (z.detach(), y.detach()),
            "gradients": pairs,
            "started": len(handles),
            "unwaited": sum(not h.waited for h in handles),
        }
    return out


class Long(Cell):
    @property
    def steps(self) -> int:
        return 20


def twenty_steps() -> dict[str, Any]:
    """AdamW with clipping on ragged rows, micro-batches of 4."""
    cell = Long({"tp": 2, "tensor": "domino"}, LLAMA, micro=4, double=True)
    config = ParallelConfig(**cell.parallel)
    return train(cell, build_mesh(config.resolve(2), CPU), config)


def recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """A recipe through the trainer."""
    from trainwright import RunConfig, Trainer

    before, rows = len(started), []
    trainer = Trainer(RunConfig.load(settings))
    summary = trainer.fit(on_step=rows.append)
    return {
        "losses": [r["loss"] for r in rows],
        "validation": summary["val_loss"],
        "weights": {n: full_tensor(p).detach().clone() for n, p in trainer.parallel.model.named_parameters()},
        "started": len(started) - before,
        "unwaited": sum(not h.waited for h in started[before:]),
    }


def main(out: str, recipe_file: str = "") -> None:
    torch.set_num_threads(1)
    init_distributed(CPU, timeout_s=300)
    watch()
    results: dict[str, Any] = {f.__name__: f() for f in (exact, recomputed, two_models, parts, gpt2, twenty_steps)}
    if recipe_file:
        results["recipe"] = recipe(json.loads(Path(recipe_file).read_text()))
    torch.save(results, f"{out}.{rank()}")
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
