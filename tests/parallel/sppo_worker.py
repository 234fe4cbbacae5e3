"""The ranks of the SPPO tests: what each has, and what one process has without chunks.

python sppo_worker.py RESULT_FILE exact      trainings in float64 by name, see CELLS
python sppo_worker.py RESULT_FILE recipe     the recipe RESULT_FILE.recipe with every number of chunks, by the trainer
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import CPU, ROWS, decoder, global_batch, my_rows, precision
from pipeline_worker import EXPERTS, TIED, UNTIED, _fork, _launch, _wait

from trainwright.core.distributed import full_tensor, rank, world_size
from trainwright.core.divided import divided
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.optim.clipping.global_norm import GlobalNormConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.config import ParallelConfig
from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
from trainwright.parallel.weights import model_state
from trainwright.train.executor import forward_only
from trainwright.train.pipeline_executor import executor_kind

STEPS = 2
WINDOW = {**UNTIED, "sliding_window": 5}
BIAS = {**EXPERTS, "balance": "bias"}
AUX_LOSS = {**EXPERTS, "balance": "aux_loss"}  # of a chunk's tokens: against one process in chunks


def sppo(chunks: int, offload: float | None = None, cut: str = "balanced") -> dict[str, Any]:
    """The recipe's section. ``offload``: the share of all chunks but the last."""
    shares = "off" if offload is None else [offload] * (chunks - 1) + [0.0]
    return {"name": "sppo", "chunks": chunks, "cut": cut, "offload": shares, "min_chunk": 1}


# name -> the parallel section, the model, rows of a micro-batch
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    **{
        f"pp2_n{n}": ({"pp": 2, "context": sppo(n, 0.5 if n in (1, 4) else None)}, TIED, 4 if n < 8 else 8)
        for n in (1, 2, 4, 8)
    },
    "pp2_untied": ({"pp": 2, "context": sppo(4, 1.0, "equal"), "pipeline": {"layers": [1, 3]}}, WINDOW, 3),
    "pp2_experts": ({"pp": 2, "context": sppo(3)}, BIAS, 8),
    "pp2_aux_loss": ({"pp": 2, "context": sppo(3)}, AUX_LOSS, 4),
    "tp2": ({"tp": 2, "context": sppo(4, 0.5)}, TIED, 4),
    "shard2": ({"dp_shard": 2, "context": sppo(4, 0.5)}, TIED, 2),
    "shard2_whole": (
        {"dp_shard": 2, "accumulate": "whole", "reshard_after_forward": False, "context": sppo(3, 1.0)},
        UNTIED,
        2,
    ),
    "replicate2": ({"dp_replicate": 2, "context": sppo(4, 1.0)}, UNTIED, 4),
    "pp4": ({"pp": 4, "context": sppo(6, 0.5)}, TIED, 8),
    "pp4_shard2": ({"pp": 2, "dp_shard": 2, "context": sppo(4, 0.5)}, TIED, 2),
    "pp4_tp2": ({"pp": 2, "tp": 2, "context": sppo(4, 0.5)}, TIED, 4),
}


def world_of(name: str) -> int:
    return 4 if "4" in name.split("_")[0] else 2


def train(settings: dict[str, Any], model: dict[str, Any], micro: int) -> dict[str, Any]:
    config = ParallelConfig(**settings)
    mesh = build_mesh(config.resolve(world_size()), CPU)
    parallel = parallelize(decoder(**model).double(), mesh, config, precision(), CPU)
    params = [p for p in parallel.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)
    clip = GlobalNormConfig(max_norm=0.5).build()
    executor = executor_kind(parallel)(min(micro, ROWS // mesh.dp_size), precision())
    objective = NextTokenConfig().build()
    out: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(STEPS):
        with CommTrace() if step == STEPS - 1 else nullcontext() as trace:
            result = executor.run(parallel, objective, my_rows(global_batch(step), mesh))
        names = sorted(result.metrics)
        sums = torch.stack([result.loss_sum, *(result.metrics[n] for n in names)])
        if world_size() > 1:
            dist.all_reduce(sums)
            sums /= parallel.copies
        out["losses"].append((sums[0] / result.weight).item())
        out["metrics"].append({n: v.item() for n, v in zip(names, sums[1:], strict=True)})
        with divided(parallel.division):
            out["norms"].append(float(clip(params)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        parallel.model.update_balancing()  # type: ignore[operator]
    assert trace is not None
    out["sequence"] = trace.sequence()
    out["messages"] = [(r.kind, r.peer, r.size) for r in trace.records if r.kind in ("send", "recv")]
    parallel.module.eval()
    held_out = forward_only(parallel, objective, parallel.shard(my_rows(global_batch(99), mesh)), precision())
    nats = held_out.metrics.get("nll", held_out.sum).double()
    if world_size() > 1:
        dist.all_reduce(nats)
        nats /= parallel.copies
    out["validation"] = nats.item()
    out["weights"] = {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()}
    ledger = None if parallel.chunks is None else parallel.chunks.ledger
    out["ledger"] = None if ledger is None else vars(ledger)
    return out


def run_exact(out: str, names: list[str]) -> None:
    init_distributed(CPU, timeout_s=300)
    for name in names:
        torch.save(train(*CELLS[name]), f"{out}.{name}.{rank()}")
    shutdown()


def run_references(out: str) -> None:
    found = {}
    for name, (section, model, micro) in CELLS.items():
        key = json.dumps(model)
        if key not in found:
            chunked = model is AUX_LOSS
            found[key] = train({"context": section["context"]} if chunked else {}, model, micro if chunked else ROWS)
        torch.save(found[key], f"{out}.{name}.one")


def run_recipe(out: str, layouts: list[tuple[str, dict[str, Any]]]) -> None:
    """Several trainings in one set of processes, each in a group of its own."""
    from trainwright import RunConfig, Trainer

    for name, section in layouts:
        recipe = json.loads(Path(f"{out}.recipe").read_text())
        recipe["run"]["name"], recipe["parallel"] = name, section
        rows: list[dict[str, Any]] = []
        summary = Trainer(RunConfig.load(recipe)).fit(on_step=rows.append)
        if rank() == 0:
            torch.save({"rows": rows, "summary": summary}, f"{out}.{name}")
    shutdown()


RECIPES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("plain", {}), ("one_n4", {"context": sppo(4, 0.5)})],
    2: [(f"two_n{n}", {"pp": 2, "context": sppo(n, 0.5)}) for n in range(1, 9)],
}


def main(out: str, what: str) -> int:
    torch.set_num_threads(1)
    if what == "recipe":
        import trainwright.train.trainer  # noqa: F401

        return max(_launch(functools.partial(run_recipe, out, runs), world) for world, runs in RECIPES.items())
    failed = _wait([_fork(lambda: run_references(out), {})])
    for world in (2, 4):
        names = [n for n in CELLS if world_of(n) == world]
        failed |= _launch(functools.partial(run_exact, out, names), world)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
