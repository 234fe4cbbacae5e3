"""One rank of the FlexSP tests: python flexsp_worker.py RESULT_FILE, with RANK, WORLD_SIZE, MASTER_* set."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.core.batch import Batch
from trainwright.core.distributed import rank, world_size
from trainwright.core.errors import ConfigError
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.context.flexsp import documents
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.planning.flexsp import Group, MicroPlan, Plan
from trainwright.train.executor import AutogradExecutor

spec = importlib.util.spec_from_file_location("parallel_worker", Path(__file__).with_name("parallel_worker.py"))
base = importlib.util.module_from_spec(spec)
sys.modules["parallel_worker"] = base
spec.loader.exec_module(base)

MODEL = {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2, "tie_embeddings": True}
SLOW_LINKS = {"bandwidth": {2: 10.0, 4: 1.0}, "overhead": 1.0}  # small groups pay, so that plans are mixed
# Eight tokens a rank: a document of up to 8 can go to one rank, of up to 12 to two.
TRAININGS = {
    "flexsp": base.Cell(
        {"cp": 4, "context": {"name": "flexsp", "method": "milp", "tokens_per_rank": 8, "seconds": 0.2, **SLOW_LINKS}},
        MODEL, micro=4, double=True,
    ),
    "flexsp_shard2": base.Cell(
        {"cp": 2, "dp_shard": 2, "context": {"name": "flexsp", "method": "layouts", "tokens_per_rank": 6}},
        {**MODEL, "sliding_window": 5}, micro=2, double=True,
    ),
}  # fmt: skip


def mixed_plan(batch: Batch) -> Plan:
    """{2, 1, 1} for all documents but the last, which goes through {1, 2, 1}: the pair is not always the same ranks."""
    n = len(documents(batch))
    one = MicroPlan((Group(2, 0, tuple(range(0, n - 1, 2))), Group(1, 2, tuple(range(1, n - 1, 4))),
                     Group(1, 3, tuple(range(3, n - 1, 4)))), 0.0)  # fmt: skip
    two = MicroPlan((Group(1, 0, ()), Group(1, 1, ()), Group(2, 2, (n - 1,))), 0.0)
    return Plan((one, two))


def spread(double: bool, **settings: Any) -> Any:
    config = ParallelConfig(cp=4, context={"name": "flexsp", **settings})
    model = base.decoder(**MODEL)
    model = model.double() if double else model
    return parallelize(model, build_mesh(config.resolve(world_size()), base.CPU), config, base.precision(), base.CPU)


def mixed() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, double in (("float32", False), ("float64", True)):
        parallel = spread(double)
        parallel.context._plan = lambda batch, *_: mixed_plan(batch)
        executor = AutogradExecutor(base.ROWS, base.precision())
        executor.run(parallel, NextTokenConfig().build(), base.global_batch(0))
        out[name] = {n: p.grad.clone() for n, p in parallel.model.named_parameters()}
    return out


def ragged() -> list[Any]:
    """Collectives of steps over random batches: group, kind and bytes, in order."""
    parallel = spread(True, tokens_per_rank=8, method="layouts", **SLOW_LINKS)
    executor, objective = AutogradExecutor(2, base.precision()), NextTokenConfig().build()
    out = []
    for step in range(8):
        parallel.model.zero_grad()
        with CommTrace() as trace:
            executor.run(parallel, objective, base.global_batch(step))
        layouts = [m.layout for m in parallel.context.last.micro_batches]
        out.append((layouts, [(r.group, r.kind, r.size) for r in trace.records]))
    return out


def refused() -> list[str]:
    parallel = spread(True, tokens_per_rank=2)
    try:
        parallel.context.micro_batches(base.global_batch(0), 8)
    except ConfigError as error:
        return [str(error)]
    return []


def main() -> None:
    init_distributed(base.CPU)
    results: dict[str, Any] = {}
    for name, cell in TRAININGS.items():
        config = ParallelConfig(**cell.parallel)
        results[name] = base.train(cell, build_mesh(config.resolve(world_size()), base.CPU), config)
    results["mixed"], results["ragged"], results["refused"] = mixed(), ragged(), refused()
    torch.save(results, f"{sys.argv[1]}.{rank()}")
    dist.barrier()
    shutdown()


if __name__ == "__main__":
    main()
