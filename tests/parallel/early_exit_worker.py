"""The ranks of the early-exit tests: runs cells by name and saves what came out. Also the one-process references.

python early_exit_worker.py RESULT_FILE CELL[,CELL...]      forks the ranks, so that torch is imported once
python early_exit_worker.py RESULT_FILE runs                trainings of RESULT_FILE.recipe that change their layout
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import CPU, ROWS, decoder, global_batch, my_rows, precision
from pipeline_worker import _fork, _launch, _wait, world_of

from trainwright.core.batch import Batch
from trainwright.core.distributed import full_tensor, rank, world_size
from trainwright.core.divided import divided
from trainwright.models.early_exit import Exit
from trainwright.models.transforms.early_exit import EarlyExitConfig
from trainwright.objectives.next_token import NextToken
from trainwright.optim.clipping.global_norm import GlobalNormConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import Mesh, build_mesh, init_distributed, shutdown
from trainwright.parallel.weights import model_state
from trainwright.train.executor import AutogradExecutor, forward_only
from trainwright.train.pipeline_executor import PipelineExecutor

STEPS = 3
TIED = {"family": "qwen3", "tie_embeddings": True, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1}
UNTIED = {**TIED, "tie_embeddings": False}
EXPERTS = {
    "family": "mixtral", "tie_embeddings": True, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "n_experts": 4,
    "moe_ffn_dim": 32, "balance": "aux_loss",
}  # fmt: skip
EVERYWHERE = {"after": [1, 2, 3, 4], "weights": [0.25, 0.5, 0.75, 0.1], "before": True}  # each stage of 4 has one


@dataclass
class Cell:
    """Some AdamW steps of a model with exits, or the gradients of one step (``alike``: of micro-batches that are)."""

    parallel: dict[str, Any]
    exits: dict[str, Any] | None
    model: dict[str, Any] = field(default_factory=lambda: TIED)
    micro: int = 2
    alike: bool = False
    gradients: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    every: bool = False  # token counts


def _pp(pp: int = 2, schedule: str = "1f1b", fill: tuple[int, int] = (0, 0), **more: Any) -> dict[str, Any]:
    layers = more.pop("layers", None)
    section = {"schedule": schedule, "layers": layers, "fill_warmup": fill[0], "fill_cooldown": fill[1]}
    return {"pp": pp, "pipeline": section, **more}


HALF = {"after": [2], "weights": [0.5]}
# How many micro-batches go through everything; of those of the cool-down, which follow, the first stage that takes each
# backward; of those of the warm-up, which come last, the last stage that each reaches. A stage is a layer and its exit.
FILLED = {
    "pp4_fill": (4, (2, 3), (1, 0)), "pp4_fill_middle": (5, (2, 3), (1,)), "pp8_tp2_fill": (4, (2, 3), (1, 0))
}  # fmt: skip
CUT = {**TIED, "n_heads": 4, "n_kv_heads": 2}  # by heads over two ranks
CUT_UNTIED = {**CUT, "tie_embeddings": False}
OWN = {"after": [1, 3], "tied": False, "mlp": True}
CELLS = {
    "pp2_boundary": Cell(_pp(), HALF),
    "pp2_gpipe_own": Cell(_pp(schedule="gpipe"), {"after": [1, 3], "tied": False, "mlp": True}, UNTIED),
    "pp2_untied_shared": Cell(_pp(), {"after": [1], "weights": [0.7]}, UNTIED, recompute=True),
    "pp2_uneven_last": Cell(_pp(layers=[1, 3]), {"after": [3, 4], "norm": False, "warmup_steps": 5}),
    "pp2_zero": Cell(_pp(), {**HALF, "weights": [0.0]}),
    "pp2_none": Cell(_pp(), None),
    "pp2_own": Cell(_pp(), {"after": [1, 2], "tied": False}),
    "pp2_frozen": Cell(_pp(), {"after": [1, 3], "freeze": True}),
    "pp2_experts": Cell(_pp(), HALF, EXPERTS),
    "pp2_fill": Cell(_pp(fill=(2, 2)), {"after": [1, 3]}, micro=1, gradients=True, alike=True),
    "pp4_everywhere": Cell(_pp(4), EVERYWHERE, micro=1, recompute=True),
    "pp4_own_first": Cell(_pp(4), {"after": [1, 2], "tied": False}, micro=1),
    "pp4_shard2": Cell(_pp(dp_shard=2), {"after": [1, 3]}, micro=1),
    "pp4_replicate2_own": Cell(_pp(), {"after": [1, 3], "tied": False}, micro=1),
    "pp4_shard2_frozen": Cell(_pp(dp_shard=2), {"after": [1, 3], "freeze": True}, micro=1),
    "pp4_shard2_bf16": Cell(_pp(dp_shard=2), {"after": [1, 3]}, micro=1, dtype=torch.bfloat16),
    "pp4_cp2": Cell(_pp(cp=2), {"after": [1, 3]}),
    "pp4_fill": Cell(_pp(4, fill=(2, 2)), EVERYWHERE, micro=1, gradients=True),
    "pp4_fill_middle": Cell(_pp(4, fill=(9, 9)), {"after": [1]}, micro=1, gradients=True),
    "pp4_fill_alike": Cell(_pp(4, fill=(2, 2)), EVERYWHERE, micro=1, gradients=True, alike=True),
    # With tensor parallelism: heads by vocabulary, norms on a part of the tokens or on whole rows.
    "tp2_shared": Cell({"tp": 2}, {"after": [1, 3], "weights": [0.3, 0.7]}, CUT, steps=20),
    "tp2_own": Cell({"tp": 2}, OWN, CUT_UNTIED, recompute=True),
    "tp2_untied_bare": Cell({"tp": 2}, {"after": [2], "norm": False}, CUT_UNTIED),
    "tp2_whole_stream": Cell({"tp": 2, "sequence_parallel": False}, {"after": [1, 4], "mlp": True, "norm": False}, CUT),
    "tp2_planned": Cell({"tp": 2}, OWN, CUT_UNTIED, gradients=True, every=True),
    "tp2_planned_whole_stream": Cell({"tp": 2, "sequence_parallel": False}, OWN, CUT, gradients=True, every=True),
    "tp2_planned_shared": Cell({"tp": 2}, {"after": [2]}, CUT, gradients=True, every=True),
    "tp2_frozen": Cell({"tp": 2}, {"after": [1, 3], "mlp": True, "freeze": True}, CUT),
    "tp2_experts": Cell({"tp": 2}, {"after": [1, 3], "mlp": True}, EXPERTS),
    "tp4_shard2": Cell({"tp": 2, "dp_shard": 2}, {"after": [1, 3], "tied": False}, CUT),
    "tp4_replicate2": Cell({"tp": 2}, {"after": [1, 3], "mlp": True}, CUT),
    "tp4_cp2": Cell({"tp": 2, "cp": 2}, {"after": [1, 3], "mlp": True}, CUT),
    "pp4_tp2": Cell(_pp(tp=2), {"after": [1, 2], "weights": [0.3, 0.7]}, CUT, recompute=True, steps=20),
    "pp4_tp2_own": Cell(_pp(tp=2), OWN, CUT_UNTIED),
    "pp4_tp2_whole_stream": Cell(
        _pp(schedule="gpipe", tp=2, sequence_parallel=False), {"after": [1], "mlp": True}, CUT_UNTIED
    ),
    "pp4_tp2_frozen": Cell(_pp(tp=2), {"after": [1, 3], "freeze": True}, CUT),
    "pp8_tp2_fill": Cell(_pp(4, fill=(2, 2), tp=2), EVERYWHERE, CUT, micro=1, gradients=True),
}  # fmt: skip


class Watched(NextToken):
    """Counts the exits whose logits have been made and whose backward pass has not begun."""

    alive = most = 0

    def exit_loss(self, early: Exit, batch: Batch) -> Any:
        total, figures = super().exit_loss(early, batch)
        if total.requires_grad:
            Watched.alive += 1
            Watched.most = max(Watched.most, Watched.alive)
            total.register_hook(self._gone)
        return total, figures

    @staticmethod
    def _gone(grad: torch.Tensor) -> None:
        Watched.alive -= 1


def build(cell: Cell) -> Any:
    model = decoder(**cell.model)
    model = model.double() if cell.dtype == torch.float32 else model
    if cell.exits is not None:
        torch.manual_seed(1)
        EarlyExitConfig(**cell.exits).apply(model)
    if cell.recompute:
        from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig

        ActivationCheckpointingConfig().apply(model)
    return model


def batch_of(cell: Cell, step: int) -> Batch:
    batch = global_batch(step)
    if cell.every:
        batch.weights = torch.ones_like(batch.weights)
    if cell.alike:
        one = batch.rows(0, 1)
        return one._map(lambda t: t.expand(ROWS, *t.shape[1:]).contiguous())
    return batch


def train(cell: Cell, mesh: Mesh, config: ParallelConfig) -> dict[str, Any]:
    model = build(cell)
    parallel = parallelize(model, mesh, config, precision(cell.dtype), CPU)
    params = [p for p in parallel.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)
    clip = GlobalNormConfig(max_norm=0.5).build()
    kind = AutogradExecutor if parallel.pipeline is None else PipelineExecutor
    executor = kind(min(cell.micro, ROWS // mesh.dp_size), precision(cell.dtype))
    objective = Watched(z_loss=1e-3)
    losses, norms, validation, metrics = [], [], [], []
    gradients: dict[str, Any] = {}
    messages, sent = (0, 0), {}
    for step in range(1 if cell.gradients else cell.steps):
        if getattr(parallel.model, "exits", None) is not None:
            parallel.model.exits.at_step(step)
        with CommTrace() if world_size() > 1 and step == 0 else nullcontext() as trace:
            result = executor.run(parallel, objective, my_rows(batch_of(cell, step), mesh))
        if trace is not None:
            sends = [r for r in trace.records if r.kind == "send"]
            messages = (len(sends), sum(r.bytes for r in sends))
            sent = {kind: found.bytes for kind, found in trace.summary().kinds.items() if found.bytes}
        sums = torch.stack([result.loss_sum, *result.metrics.values()])
        if world_size() > 1:
            dist.all_reduce(sums)
            sums /= parallel.copies
        losses.append((sums[0] / result.weight).item())
        metrics.append({n: (v / result.weight).item() for n, v in zip(result.metrics, sums[1:], strict=True)})
        if step == 0:
            gradients = {n: _full(p.grad) for n, p in parallel.model.named_parameters() if p.grad is not None}
        if cell.gradients:
            break
        with divided(parallel.division):
            norms.append(float(clip(params)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1:  # a validation between steps must not disturb what follows
            parallel.module.eval()
            rows = parallel.shard(my_rows(global_batch(99), mesh))
            held_out = forward_only(parallel, objective, rows, precision(cell.dtype))
            parallel.module.train()
            sums = torch.stack([held_out.metrics.get("nll", held_out.sum).double(), held_out.weight])
            if world_size() > 1:
                dist.all_reduce(sums)
                sums /= torch.tensor([parallel.copies, parallel.weight_copies], dtype=sums.dtype)
            validation += sums.tolist()
    return {
        "losses": losses,
        "norms": norms,
        "validation": validation,
        "metrics": metrics,
        "gradients": gradients,
        "messages": messages,
        "sent": sent,
        "alive": objective.most,
        "weights": {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()},
    }


def filled_reference(cell: Cell, full: int, shallowest: tuple[int, ...], deepest: tuple[int, ...]) -> dict[str, Any]:
    """The gradient of a filled step from those of each loss of each micro-batch alone; 4 stages of a layer each.

    Each stage's part of the shared weight needs a name: the loss is that of a model whose heads are apart, and equal.
    """
    model = build(replace(cell, exits={**cell.exits, "tied": False}, model={**cell.model, "tie_embeddings": False}))
    shared = build(cell)
    values = shared.state_dict()
    for name, p in model.named_parameters():
        p.data.copy_(values["embed.weight" if name.endswith("head.weight") else name])
    exits = dict(zip(cell.exits["after"], cell.exits.get("weights", [1.0] * 4), strict=False))
    exits = {n - bool(cell.exits.get("before")): w for n, w in exits.items()}
    stage_of = {n: int(n.split(".")[1]) for n in model.state_dict() if n.startswith(("blocks.", "exits."))}
    stage_of |= {"embed.weight": 0, "head.weight": 3, "norm.weight": 3}
    batch = batch_of(cell, 0)
    w = batch.weights.double().sum(1)
    cooling = range(full, full + len(shallowest))
    warming = range(full + len(shallowest), ROWS)
    w_full = w[:full].sum()
    rounded = (1 / w.sum()).float().double() * w.sum()  # the executor's 1 / weight is float32
    expected: dict[str, torch.Tensor] = {}
    for m in range(ROWS):
        for k in range(4):
            if m in warming and deepest[m - warming.start] < k:
                continue
            loss = stage_loss(model, batch.rows(m, m + 1), k, exits)
            if loss is None:
                continue
            loss.backward()
            warm_k = sum(w[i] for i in warming if deepest[i - warming.start] >= k)
            for name, p in model.named_parameters():
                r = stage_of[name]
                if p.grad is None or r > k or (m in cooling and shallowest[m - full] > r):
                    continue
                cool_r = sum(w[i] for i in cooling if shallowest[i - full] <= r)
                factor = rounded * w_full / (w_full + cool_r) / (w_full if m in cooling else w_full + warm_k)
                plain = "embed.weight" if name.endswith("head.weight") else name
                expected[plain] = expected.get(plain, 0.0) + factor * p.grad
            model.zero_grad()
    return {"gradients": expected}


def stage_loss(model: Any, micro: Batch, stage: int, exits: dict[int, float]) -> torch.Tensor | None:
    """What stage ``stage`` adds to the loss, in plain torch, with the z-loss of :func:`train`."""
    x = model.embed(micro.tokens)
    cos, sin = model.rope(micro.positions, x.shape[1], CPU)
    plan = model.plan_attention(micro.doc_ids, 1, x.shape[1], 0, CPU)
    for block in model.blocks[: 4 if stage == 3 else stage]:
        if block is model.blocks[stage]:
            at_exit = x
        x = block(x, cos, sin, plan)
    parts = []
    if stage in exits:
        module = model.exits[str(stage)]
        parts.append((exits[stage], module.norm(at_exit if stage == 3 else x) @ module.head.weight.T))
    if stage == 3:
        parts.append((1.0, model.norm(x) @ model.head.weight.T))
    total = None
    for weight, logits in parts:
        lse = logits.logsumexp(-1)
        nll = lse - logits.gather(-1, micro.targets[..., None]).squeeze(-1)
        loss = weight * ((nll + 1e-3 * lse.square()) * micro.weights).sum()
        total = loss if total is None else total + loss
    return total


def _full(grad: torch.Tensor) -> torch.Tensor:
    return full_tensor(grad).clone()


def run_rank(out: str, names: list[str]) -> None:
    init_distributed(CPU, timeout_s=120)
    for name in names:
        cell = CELLS[name]
        config = ParallelConfig(**cell.parallel)
        torch.save(train(cell, build_mesh(config.resolve(world_size()), CPU), config), f"{out}.{name}.{rank()}")
        print(f"rank {rank()}: {name}", flush=True)
    shutdown()


def run_references(out: str, names: list[str]) -> None:
    for name in names:
        if name in FILLED:
            torch.save(filled_reference(CELLS[name], *FILLED[name]), f"{out}.{name}.filled")
        torch.save(train(CELLS[name], build_mesh(Degrees(), CPU), ParallelConfig()), f"{out}.{name}.one")


# Three stages of a layer; the exit, and with it a copy of the embedding, is on the one in the middle. The second run
# ends behind its checkpoint of step 2, and goes on in one process.
RUNS: list[tuple[str, dict[str, Any], bool]] = [
    ("one", {}, False),
    ("three", _pp(3), True),
    ("three", {}, False),
    ("filled", _pp(3, fill=(1, 1)), False),
    ("cut", {"tp": 2}, False),
]


class Stopped(Exception):
    pass


def run_training(out: str, number: int) -> None:
    from trainwright import RunConfig, Trainer

    name, layout, stops = RUNS[number]
    recipe = json.loads(Path(f"{out}.recipe").read_text())
    recipe["run"]["name"], recipe["parallel"] = name, layout
    rows: list[dict[str, Any]] = []

    def on_step(row: dict[str, Any]) -> None:
        rows.append(row)
        if stops and row["step"] == 3:
            raise Stopped

    with suppress(Stopped):
        Trainer(RunConfig.load(recipe), resume=number == 2).fit(on_step=on_step)
    if rank() == 0:
        torch.save(rows, f"{out}.run{number}")
    shutdown()


def main(out: str, names: list[str]) -> int:
    torch.set_num_threads(1)
    if names == ["runs"]:
        import trainwright.train.trainer  # noqa: F401

        works = [functools.partial(run_training, out, i) for i in range(len(RUNS))]
        return max(_launch(work, RUNS[i][1].get("pp", 1) * RUNS[i][1].get("tp", 1)) for i, work in enumerate(works))
    # Forked before anything has gone backward here: autograd does not survive it.
    failed = _wait([_fork(lambda: run_references(out, names), {})])
    for world in sorted({world_of(n) for n in names}):
        cells = [n for n in names if world_of(n) == world]
        failed |= _launch(functools.partial(run_rank, out, cells), world)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2].split(",")))
