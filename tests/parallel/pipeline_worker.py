"""The ranks of the pipeline tests: runs cells by name and saves what came out. Also the one-process references.

python pipeline_worker.py RESULT_FILE CELL[,CELL...]      forks the ranks, so that torch is imported once
python pipeline_worker.py RESULT_FILE runs                trainings of RESULT_FILE.recipe that change their layout
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import CPU, ROWS, decoder, global_batch, my_rows, precision

from trainwright.core.distributed import full_tensor, rank, world_size
from trainwright.core.divided import divided
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.optim.clipping.global_norm import GlobalNormConfig
from trainwright.optim.clipping.zclip import ZClipConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import Mesh, build_mesh, init_distributed, shutdown
from trainwright.parallel.weights import model_state
from trainwright.train.executor import AutogradExecutor, forward_only
from trainwright.train.pipeline_executor import PipelineExecutor

STEPS = 8
TIED = {"family": "qwen3", "tie_embeddings": True, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
UNTIED = {**TIED, "tie_embeddings": False}
EXPERTS = {
    "family": "mixtral",
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_experts": 4,
    "moe_ffn_dim": 32,
    "balance": "aux_loss",
}


@dataclass
class Cell:
    """A training of AdamW steps with clipping: what is trained, and how it is spread."""

    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: TIED)
    micro: int = 2
    recompute: bool = False
    clip: str = "global_norm"
    dtype: torch.dtype = torch.float32
    steps: int = STEPS


def _pp(
    schedule: str = "1f1b", stages_per_rank: int = 1, layers: list[int] | None = None, **more: Any
) -> dict[str, Any]:
    section = {"schedule": schedule, "stages_per_rank": stages_per_rank, "layers": layers}
    return {"pp": 2, "pipeline": section, **more}


# Documents of up to 12 tokens: some lie on both columns, some on one.
BYTESCALE = {"name": "bytescale", "capacity": 6}
FLASHCP = {"name": "flashcp", "min_chunk": 1}
FLEXSP = {"name": "flexsp", "tokens_per_rank": 8, "overhead": 0}


def _domino(row: int = 2, column: int = 1, **more: Any) -> dict[str, Any]:
    """Slices: the stages of a decoder whose blocks take chunks of rows."""
    return {"tp": 2, "tensor": {"name": "domino", "row": row, "column": column}, **more}


CELLS = {
    "pp2_gpipe": Cell(_pp("gpipe"), UNTIED),
    "pp2_1f1b_tied": Cell(_pp("1f1b"), recompute=True),
    "pp2_uneven": Cell(_pp("1f1b", layers=[1, 3]), {**UNTIED, "sliding_window": 5}, clip="zclip"),
    "pp2_padded": Cell(_pp("1f1b"), micro=3),
    "pp2_interleaved": Cell(_pp("interleaved", 2)),
    "pp2_zero_bubble": Cell(_pp("zero_bubble", 2), micro=1),
    "pp2_zero_bubble_untied": Cell(_pp("zero_bubble", 2), UNTIED, recompute=True),
    "pp2_experts": Cell(_pp("1f1b"), EXPERTS),
    "pp2_experts_bias": Cell(_pp("interleaved", 2), {**EXPERTS, "balance": "bias"}),
    "pp2_bf16": Cell(_pp("1f1b"), dtype=torch.bfloat16),
    "pp4_1f1b": Cell({**_pp("1f1b"), "pp": 4}),
    "pp4_shard2": Cell(_pp("1f1b", dp_shard=2)),
    "pp4_shard2_gpipe": Cell(_pp("gpipe", dp_shard=2), UNTIED, recompute=True),
    "pp4_shard2_zero_bubble": Cell(_pp("zero_bubble", 2, dp_shard=2)),
    "pp4_shard2_experts": Cell(_pp("interleaved", 2, dp_shard=2), {**EXPERTS, "balance": "bias"}),
    "pp4_shard2_bf16": Cell(_pp("1f1b", dp_shard=2), dtype=torch.bfloat16),
    "pp4_replicate2": Cell(_pp("1f1b")),
    "pp4_replicate2_zero_bubble": Cell(_pp("zero_bubble", 2)),
    "pp4_tp2": Cell(_pp("1f1b", tp=2)),
    "pp4_tp2_zero_bubble": Cell(_pp("zero_bubble", 2, tp=2)),
    "pp4_tp2_whole_stream": Cell(_pp("gpipe", tp=2, sequence_parallel=False), UNTIED),
    "pp4_tp2_domino": Cell(_pp("1f1b", **_domino()), recompute=True, steps=20),
    "pp4_tp2_domino_gpipe": Cell(_pp("gpipe", layers=[1, 3], **_domino(4, 2)), UNTIED, micro=4),
    "pp4_tp2_domino_interleaved": Cell(_pp("interleaved", 2, **_domino()), {**TIED, "sliding_window": 5}),
    "pp4_tp2_domino_columns": Cell(_pp("1f1b", **_domino(1, 2)), UNTIED, micro=3),
    "pp4_cp2": Cell(_pp("1f1b", cp=2)),
    "pp4_cp2_interleaved": Cell(_pp("interleaved", 2, cp=2, context="ulysses"), UNTIED),
    # What follows the documents: 2 columns of 2 stages, which exchange other keys in every micro-batch.
    "pp4_bytescale": Cell(_pp("1f1b", cp=2, context=BYTESCALE), steps=20),
    "pp4_bytescale_interleaved": Cell(_pp("interleaved", 2, cp=2, context=BYTESCALE), {**TIED, "sliding_window": 5}),
    "pp4_bytescale_zero_bubble": Cell(_pp("zero_bubble", 2, cp=2, context=BYTESCALE), UNTIED),
    "pp4_flashcp": Cell(_pp("1f1b", cp=2, context=FLASHCP), {**UNTIED, "sliding_window": 5}, micro=3, steps=20),
    "pp4_flashcp_gpipe": Cell(_pp("gpipe", cp=2, context=FLASHCP), recompute=True),
    "pp4_flashcp_zero_bubble": Cell(_pp("zero_bubble", 2, cp=2, context=FLASHCP)),
    "pp4_flexsp": Cell(_pp("1f1b", cp=2, context=FLEXSP), {**TIED, "sliding_window": 5}, steps=20),
    "pp4_flexsp_interleaved": Cell(_pp("interleaved", 2, cp=2, context=FLEXSP), UNTIED),
    "pp4_flexsp_zero_bubble": Cell(_pp("zero_bubble", 2, cp=2, context=FLEXSP)),
    "pp4_ep2": Cell(_pp("1f1b", dp_shard=2, ep=2), EXPERTS),
    "pp4_ep2_cp2": Cell(_pp("gpipe", cp=2, ep=2), {**EXPERTS, "balance": "bias"}),
    "pp4_ep2_zero_bubble": Cell(_pp("zero_bubble", 2, dp_shard=2, ep=2), {**EXPERTS, "balance": "bias"}, micro=1),
    "tp2_experts": Cell({"tp": 2}, EXPERTS),
    "cp2_experts": Cell({"cp": 2}, EXPERTS),
    "pp4_cp2_experts": Cell(_pp("1f1b", cp=2), EXPERTS),
    "tp4_cp2_experts": Cell({"tp": 2, "cp": 2}, EXPERTS),
    "tp8_experts": Cell({"tp": 8}, {**EXPERTS, "n_heads": 8, "n_kv_heads": 8}),  # 12 tokens, filled up to 16
    # Three dimensions at once, on 8 ranks.
    "pp8_cp2_tp2": Cell(_pp("1f1b", cp=2, tp=2)),
    "pp8_cp2_tp2_domino": Cell(_pp("1f1b", cp=2, **_domino()), micro=4),
    "pp8_shard2_tp2_domino": Cell(_pp("1f1b", dp_shard=2, **_domino())),
    "pp8_shard2_tp2": Cell(_pp("interleaved", 2, dp_shard=2, tp=2)),
    "pp8_shard2_bytescale": Cell(_pp("1f1b", dp_shard=2, cp=2, context=BYTESCALE)),
    "pp8_shard2_cp2": Cell(_pp("zero_bubble", 2, dp_shard=2, cp=2, context="ulysses")),
    "pp8_ep2_tp2": Cell(_pp("1f1b", dp_shard=2, ep=2, tp=2), EXPERTS),
    "shard8_cp2_tp2": Cell({"dp_shard": 2, "cp": 2, "tp": 2}),
    "hsdp8_tp2": Cell({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, UNTIED),
    "ep8_shard4_tp2": Cell({"dp_shard": 4, "ep": 2, "tp": 2}, {**EXPERTS, "balance": "bias"}),
}


def train(cell: Cell, mesh: Mesh, config: ParallelConfig) -> dict[str, Any]:
    model = decoder(**cell.model)
    if cell.dtype == torch.float32:
        model = model.double()
    if cell.recompute:
        from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig

        ActivationCheckpointingConfig().apply(model)
    parallel = parallelize(model, mesh, config, precision(cell.dtype), CPU)
    params = [p for p in parallel.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)
    clip = (
        ZClipConfig(max_norm=0.5, warmup_steps=2) if cell.clip == "zclip" else GlobalNormConfig(max_norm=0.5)
    ).build()
    kind = AutogradExecutor if parallel.pipeline is None else PipelineExecutor
    executor = kind(min(cell.micro, ROWS // mesh.dp_size), precision(cell.dtype))
    objective = NextTokenConfig().build()
    losses, norms, validation, metrics = [], [], [], []
    for step in range(cell.steps):
        result = executor.run(parallel, objective, my_rows(global_batch(step), mesh))
        sums = torch.stack([result.loss_sum, *result.metrics.values()])
        if world_size() > 1:
            dist.all_reduce(sums)
            sums /= parallel.copies
        losses.append((sums[0] / result.weight).item())
        metrics.append({n: (v / result.weight).item() for n, v in zip(result.metrics, sums[1:], strict=True)})
        with divided(parallel.division):
            norms.append(float(clip(params)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parallel.model.update_balancing()
        if step % 4 == 2:  # a validation between steps must not disturb what follows
            parallel.module.eval()
            held_out = forward_only(
                parallel, objective, parallel.shard(my_rows(global_batch(99), mesh)), precision(cell.dtype)
            )
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
        "weights": {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()},
    }


def reference(cell: Cell) -> dict[str, Any]:
    """The same training by one process."""
    return train(cell, build_mesh(Degrees(), CPU), ParallelConfig())


def run_rank(out: str, names: list[str]) -> None:
    init_distributed(CPU, timeout_s=300)
    for name in names:
        cell = CELLS[name]
        config = ParallelConfig(**cell.parallel)
        torch.save(train(cell, build_mesh(config.resolve(world_size()), CPU), config), f"{out}.{name}.{rank()}")
        print(f"rank {rank()}: {name}", flush=True)
    shutdown()


def run_references(out: str, names: list[str]) -> None:
    for name in names:
        torch.save(reference(CELLS[name]), f"{out}.{name}.one")


# A run that is stopped behind its checkpoint of step 3 and goes on in another layout: (name, layout, ends at step 5).
RUNS = [
    ("whole", {}, False),
    ("from_two", _pp("1f1b"), True),
    ("from_two", {}, False),
    ("from_one", {}, True),
    ("from_one", _pp("zero_bubble", 2), False),
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
        if stops and row["step"] == 5:
            raise Stopped

    try:
        summary = Trainer(RunConfig.load(recipe), resume=number in (2, 4)).fit(on_step=on_step)
    except Stopped:
        summary = {}
    if rank() == 0:
        torch.save({"rows": rows, "summary": summary}, f"{out}.run{number}")
    shutdown()


def world_of(name: str) -> int:
    """pp4_tp2 runs on 4 ranks."""
    return next(n for n in (8, 4, 2) if f"{n}" in name.partition("_")[0])


def _fork(work: Callable[[], None], env: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ |= env
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(children: list[int]) -> int:
    """0 when all end well; the others are ended when one does not, for they would wait for it."""
    failed = 0
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGTERM)
    return failed


def _launch(work: Callable[[], None], world: int) -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return _wait([_fork(work, {**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(world)])


def main(out: str, names: list[str]) -> int:
    torch.set_num_threads(1)
    if names == ["runs"]:
        import trainwright.train.trainer  # noqa: F401

        return max(
            _launch(functools.partial(run_training, out, i), layout.get("pp", 1))
            for i, (_, layout, _) in enumerate(RUNS)
        )
    # Forked before anything has gone backward here: autograd does not survive it.
    failed = _wait([_fork(lambda: run_references(out, names), {})])
    for world in sorted({world_of(n) for n in names}):
        cells = [n for n in names if world_of(n) == world]
        failed |= _launch(functools.partial(run_rank, out, cells), world)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2].split(",")))
