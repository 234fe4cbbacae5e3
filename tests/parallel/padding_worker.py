"""Ranks that fill up with padding while the model has experts; and what one process makes of the same micro-batches.

python padding_worker.py RESULT_FILE      forks 2 and then 4 ranks, so that torch is imported once
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import CPU, VOCAB, precision
from pipeline_worker import _launch, _pp

from trainwright.core.batch import Batch
from trainwright.core.distributed import full_tensor, gather_objects, rank, world_size
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.models.moe import MoE
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.train.executor import AutogradExecutor, forward_only
from trainwright.train.pipeline_executor import PipelineExecutor

LENGTH = 12
EXPERTS = {"family": "mixtral", "n_heads": 4, "n_kv_heads": 4, "n_experts": 4, "moe_ffn_dim": 24, "n_layers": 2}
AUX = {"balance": "aux_loss", "aux_loss_coefficient": 0.5}
BIAS = {"balance": "bias"}
V = {"n_layers": 4}  # for two stages a rank
FLASHCP = {"name": "flashcp", "min_chunk": 1, "slack": [0.3]}
BYTESCALE = {"name": "bytescale", "capacity": 6}  # the longest documents are shared
BYTESCALE_ODD = {"name": "bytescale", "capacity": 13}  # two rows that are not full
FLEXSP = {"name": "flexsp", "tokens_per_rank": 8, "overhead": 0}
# All of a step at once.
BYTESCALE_ONE, FLEXSP_ONE = {"name": "bytescale", "capacity": 40}, {"name": "flexsp", "tokens_per_rank": 40}

# By row the documents' lengths. Below 0: padding. Documents of one token have no weight, nor has the one of 5.
ROWS = [[7, 1, 4], [12], [1, 5, -6], [3, 3, 2, 1, -3], [-12]]
PROMPT = (2, 1)  # row and number of the document of 5


@dataclass
class Cell:
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: AUX)
    micro: int = 3  # of 5 rows: a pipeline fills up the last one
    recompute: bool = False
    one_step: bool = False  # all ranks' documents at once, as one process with one micro-batch has them


CELLS: dict[str, Cell] = {}
for name, few, some, one in (
    ("flashcp", FLASHCP, FLASHCP, FLASHCP),
    ("bytescale", BYTESCALE_ODD, BYTESCALE, BYTESCALE_ONE),
    ("flexsp", FLEXSP, FLEXSP, FLEXSP_ONE),
):
    CELLS |= {
        f"cp2 {name}": Cell({"cp": 2, "context": few}),
        f"cp2 {name} ep2": Cell({"cp": 2, "ep": 2, "context": few}),
        f"cp2 {name} one": Cell({"cp": 2, "context": one}, micro=5, one_step=True),
        f"cp4 {name} ep2 bias": Cell({"cp": 4, "ep": 2, "context": few}, BIAS),
        f"cp4 {name} ep4 one": Cell({"cp": 4, "ep": 4, "context": one}, micro=5, one_step=True),
        f"pp4 {name} ep2": Cell(_pp("1f1b", cp=2, ep=2, context=some)),
        f"pp4 {name} zero_bubble": Cell(_pp("zero_bubble", 2, cp=2, context=some), {**AUX, **V}),
        f"pp4 {name} interleaved ep2 bias": Cell(_pp("interleaved", 2, cp=2, ep=2, context=some), {**BIAS, **V}),
    }
CELLS |= {
    "cp2 bytescale recomputed": Cell({"cp": 2, "context": BYTESCALE}, recompute=True),
    # What others fill up: rows of a pipeline's last micro-batch, the stream under tp, rows of BASP.
    "pp2": Cell(_pp("1f1b")),
    "pp2 bias": Cell(_pp("1f1b"), BIAS),
    "tp2": Cell({"tp": 2}),
    "cp2 ring": Cell({"cp": 2}),
    "cp2 basp": Cell({"cp": 2, "context": {"name": "basp", "padding": 1.0}}),
    "pp4 tp2 ring": Cell({"tp": 2, "cp": 2}),
}


def batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (len(ROWS), LENGTH + 1), generator=g)
    weights = (torch.rand(len(ROWS), LENGTH, generator=g) < 0.8).float()
    ids, positions = [], []
    for r, row in enumerate(ROWS):
        at = 0
        for k, n in enumerate(row):
            size = abs(n)
            ids += [-1 if n < 0 else k] * size
            positions += range(size)
            weights[r, at + size - 1] = 0.0
            if n < 0 or (r, k) == PROMPT:
                weights[r, at : at + size] = 0.0
            at += size
    slots = torch.arange(len(ROWS) * LENGTH).view(len(ROWS), LENGTH)
    shape = slots.shape
    doc_ids = torch.tensor(ids, dtype=torch.int32).view(shape)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, torch.tensor(positions).view(shape), doc_ids, {"slot": slots})


def model(cell: Cell) -> Any:
    torch.manual_seed(0)
    found = DecoderModelConfig(**{"dim": 16, "ffn_dim": 24, **EXPERTS, **cell.model}).build(VOCAB, 128).double()
    if cell.recompute:
        from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig

        ActivationCheckpointingConfig().apply(found)
    return found


def loads(net: Any) -> dict[int, Any]:
    """By layer, of the bias."""
    blocks = net.blocks.items() if hasattr(net.blocks, "items") else enumerate(net.blocks)
    found = {int(i): next(m for m in block.modules() if isinstance(m, MoE)).load for i, block in blocks}
    return {i: load for i, load in found.items() if load is not None}


def step(cell: Cell, parallel: Any, rows: Batch, micro_batches: list[Batch] | None = None) -> dict[str, Any]:
    kind: Any = AutogradExecutor if parallel.pipeline is None else PipelineExecutor
    executor = kind(cell.micro, precision())
    found = executor.micro_batches(rows, parallel.context) if micro_batches is None else micro_batches
    executor.micro_batches = lambda *_: found
    result = executor.run(parallel, NextTokenConfig().build(), rows)
    sums = {name: value.double() for name, value in {"loss": result.loss_sum, **result.metrics}.items()}
    return {
        "sums": {n: float(v) for n, v in sums.items()},
        "weight": float(result.weight),
        "gradients": {n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters()},
        "load": loads(parallel.model),
        "slots": [micro.extras["slot"][micro.doc_ids >= 0].tolist() for micro in found],
        "padding": sum(int((micro.doc_ids < 0).sum()) for micro in found),
    }


def validated(parallel: Any, rows: Batch) -> float:
    """Nats of this rank."""
    parallel.module.eval()
    found = forward_only(parallel, NextTokenConfig().build(), parallel.shard(rows), precision())
    parallel.module.train()
    return float(found.metrics.get("nll", torch.zeros(())).double())


def alone(cell: Cell, slots: list[list[int]] | None = None) -> dict[str, Any]:
    """One process. ``slots``: of its micro-batches, in rows of their own; None: rows as they come."""
    parallel = parallelize(model(cell), build_mesh(Degrees(), CPU), ParallelConfig(), precision(), CPU)
    rows = batch()
    micro = None if slots is None else [picked(rows, s) for s in slots]
    return {**step(cell, parallel, rows, micro), "nats": validated(parallel, rows)}


def picked(rows: Batch, slots: list[int]) -> Batch:
    """``slots`` of the rows laid end to end, as one row."""
    index = torch.tensor(sorted(slots))
    found = rows._map(lambda t: t.flatten(0, 1)[index].unsqueeze(0))
    numbers = rows.doc_ids.flatten() + 100 * (torch.arange(rows.tokens.numel()) // LENGTH)
    found.doc_ids = numbers[index].int().unsqueeze(0)
    return found


def run_cell(cell: Cell) -> dict[str, Any]:
    config = ParallelConfig(**cell.parallel)
    parallel = parallelize(model(cell), build_mesh(config.resolve(world_size()), CPU), config, precision(), CPU)
    rows = batch()
    out = step(cell, parallel, rows)
    for name in sorted({n for one in gather_objects(list(out["sums"])) for n in one}):
        total = torch.tensor(out["sums"].get(name, 0.0), dtype=torch.float64)
        dist.all_reduce(total)
        out["sums"][name] = float(total) / parallel.copies
    out["nats"] = sum(gather_objects(validated(parallel, rows))) / parallel.copies
    gathered = gather_objects(out["load"])
    out["load"] = {i: sum(one[i] for one in gathered if i in one) for i in {i for one in gathered for i in one}}
    out["slots"] = gather_objects(out["slots"])
    out["padding"] = sum(gather_objects(out["padding"]))
    return out


def run_rank(out: str, names: list[str]) -> None:
    init_distributed(CPU, timeout_s=200)
    for name in names:
        torch.save(run_cell(CELLS[name]), f"{out}.{name.replace(' ', '-')}.{rank()}")
    shutdown()


def world_of(name: str) -> int:
    return 4 if "4" in name.partition(" ")[0] else 2


def main(out: str, chosen: list[str]) -> int:
    torch.set_num_threads(1)
    failed = 0
    for world in (2, 4):
        names = [n for n in chosen or CELLS if world_of(n) == world]
        if names:
            failed |= _launch(functools.partial(run_rank, out, names), world)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
