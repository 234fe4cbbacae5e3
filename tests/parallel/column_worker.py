"""Four ranks, 2 columns of 2 stages: steps over random documents, and what every rank sent, in order.

python column_worker.py RESULT_FILE
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from parallel_worker import CPU, LENGTH, decoder, precision
from pipeline_worker import BYTESCALE, FLASHCP, FLEXSP, UNTIED, _launch, _pp

from trainwright.core.batch import Batch
from trainwright.core.distributed import rank, world_size
from trainwright.core.errors import ModelError
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.context.pieces import document_lengths
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.planning.comm_plan import Work, planned_transfers
from trainwright.train.pipeline_executor import PipelineExecutor

ROWS, MICRO, STEPS = 4, 2, 4
CONTEXTS: dict[str, Any] = {"bytescale": BYTESCALE, "flashcp": FLASHCP, "flexsp": FLEXSP, "ring": {"name": "ring"}}
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
CELLS = [*(f"bytescale {s}" for s in SCHEDULES), "flashcp interleaved", "flashcp zero_bubble", "flexsp 1f1b",
         "flexsp zero_bubble", "ring 1f1b"]  # fmt: skip


def batch(seed: int) -> Batch:
    """Rows of random documents; in the last but one step none is above 3 tokens, in the last each is a row."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(61, (ROWS, LENGTH + 1), generator=g)
    share = {STEPS - 2: 0.8, STEPS - 1: 0.0}.get(seed, 0.15 * (1 + seed))
    starts = torch.rand(ROWS, LENGTH, generator=g) < share
    starts[:, 0] = True
    if seed == STEPS - 2:
        starts[:, ::3] = True
    slots = torch.arange(LENGTH).expand(ROWS, LENGTH)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(ROWS, LENGTH), positions, starts.cumsum(1).int())


def spread(schedule: str, context: dict[str, Any], **more: Any) -> Any:
    config = ParallelConfig(**_pp(schedule, SCHEDULES[schedule], cp=2, context=context, **more))
    mesh = build_mesh(config.resolve(world_size()), CPU)
    model = decoder(**{**UNTIED, "sliding_window": 5}).double()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    return parallelize(model, mesh, config, precision(), CPU), config, mesh, model.arch, shapes


def steps(name: str, schedule: str) -> dict[str, Any]:
    parallel, config, mesh, arch, shapes = spread(schedule, CONTEXTS[name])
    executor, objective = PipelineExecutor(MICRO, precision()), NextTokenConfig().build()
    out: dict[str, Any] = {"steps": [], "planned": [], "recorded": [], "counts": []}
    for step in range(STEPS):
        rows = batch(step)
        parallel.model.zero_grad()
        with CommTrace() as trace:
            executor.run(parallel, objective, rows)
        out["steps"].append([(r.group, r.kind, r.peer, r.size) for r in trace.records])
        size = 8
        work = Work(
            arch, shapes, LENGTH, ROWS, MICRO, 1.0, activation_bytes=size, gathered_bytes=size, parameter_bytes=size,
            reduced_bytes=size, lengths=tuple(map(tuple, document_lengths(rows.doc_ids))),
        )  # fmt: skip
        planned: dict[str, int] = {}
        for t in planned_transfers(work, mesh.degrees, config):
            planned[t.kind] = planned.get(t.kind, 0) + t.bytes
        out["planned"].append(planned)
        out["recorded"].append({k: v.bytes for k, v in trace.summary().kinds.items() if v.bytes})
        found = executor.micro_batches(rows, parallel.context)
        out["counts"].append((len(found), {tuple(m.tokens.shape) for m in found}))
    return out


def refused() -> dict[str, str]:
    """Ranks that see other documents than the rest: each in turn."""
    out = {}
    for name in ("bytescale", "flashcp"):
        parallel = spread("1f1b", CONTEXTS[name])[0]
        for odd in ([1], [2, 3]):
            try:
                parallel.context.micro_batches(batch(1 if rank() in odd else 0), MICRO)
            except ModelError as error:
                out[f"{name} {odd}"] = str(error)
    return out


def run_rank(out: str) -> None:
    init_distributed(CPU, timeout_s=120)
    results: dict[str, Any] = {cell: steps(*cell.split()) for cell in CELLS}
    results["refused"] = refused()
    torch.save(results, f"{out}.{rank()}")
    shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(_launch(functools.partial(run_rank, sys.argv[1]), 4))
