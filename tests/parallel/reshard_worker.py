"""One of four processes: trains under every layout, and loads what was saved under every other.

python reshard_worker.py FOLDER RANK

Stages with process groups of their own, so that one launch covers all sizes: ranks 0 and 1, all four, 0 and 1 again.
The one-process ends are in test_resharding.py, which shares what is here.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright import RunConfig, Trainer
from trainwright.core.distributed import barrier, full_tensor, gather_objects, is_main
from trainwright.optim.state import named_state
from trainwright.train.checkpoint import read_weights
from trainwright.train.checkpoint.inspection import manifest_of
from trainwright.train.checkpoint.reading import read_group

STEPS = 4
ALONE: dict[str, dict[str, Any]] = {"one": {}}
TWO: dict[str, dict[str, Any]] = {
    "replicate": {"dp_replicate": 2},
    "shard": {"dp_shard": 2},
    "tensor": {"tp": 2},
    "context": {"cp": 2},
    "pipeline": {"pp": 2},
    "expert": {"dp_shard": 2, "ep": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
    "shard_tensor": {"dp_shard": 2, "tp": 2},
    "context_tensor": {"cp": 2, "tp": 2},
    "pipeline_shard": {"pp": 2, "dp_shard": 2},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 3e-3},
    "muon": {"name": "muon", "lr": 1e-2},
}
MUON = ("one", "replicate", "shard")  # layouts that its step is tried under besides
# States of other shapes than the weights': of projections, of preconditioners, by group. New bases come in the second
# half of a run, so that the resumed one makes some.
FACTORED: dict[str, dict[str, Any]] = {
    "galore": {"name": "galore", "rank": 4, "gap": 3},
    "gradnormlorp": {"name": "gradnormlorp", "rank": 4, "gap": 3},
    "soap": {"name": "soap", "frequency": 3},
    "numuon": {"name": "numuon"},
    "adapm": {"name": "adapm", "rank": 4},
    "spectra": {"name": "spectra"},
}
CHAIN = ("one", "shard", "tensor", "shard")  # each reads what the one before wrote
OPTIMIZERS |= FACTORED


def pairs() -> dict[str, list[tuple[str, str, str]]]:
    """By stage, (optimizer, layout that wrote, layout that reads): all pairs on two ranks, some with four."""
    both = [
        (optimizer, source, target)
        for optimizer in OPTIMIZERS
        if optimizer not in FACTORED
        for source in layouts(optimizer, {**ALONE, **TWO})
        for target in layouts(optimizer, TWO)
    ]
    both += [(optimizer, *step) for optimizer in FACTORED for step in itertools.pairwise(CHAIN)]
    four = list(FOUR)
    up = [("adamw", source, four[i % len(four)]) for i, source in enumerate(TWO)]
    two = list(TWO)[1:]
    down = [("adamw", source, two[i % len(two)]) for i, source in enumerate(FOUR)]
    return {"a": both, "b": up, "c": down}


def layouts(optimizer: str, table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    taken = {"adamw": tuple(table), "muon": MUON}.get(optimizer, CHAIN)
    return {n: p for n, p in table.items() if n in taken}


def recipe(root: Path, optimizer: str, layout: str, parallel: dict[str, Any]) -> RunConfig:
    return RunConfig.load(
        {
            "run": {"name": f"{optimizer}-{layout}", "dir": str(root / "runs"), "device": "cpu"},
            "model": {
                "name": "decoder",
                "family": "qwen3_moe",
                "dim": 32,
                "n_layers": 2,
                "n_heads": 4,
                "n_kv_heads": 2,
                "head_dim": 8,
                "moe_ffn_dim": 16,
                "n_experts": 4,
                "n_experts_per_token": 2,
                "tie_embeddings": True,
            },
            "tokenizer": {"name": "bytes"},
            "data": {
                "sources": [{"name": "text", "path": str(root / "text")}],
                "cache_dir": str(root / "cache"),
                "validation_fraction": 0.1,
            },
            "optimizer": OPTIMIZERS[optimizer],
            "precision": {"name": "fp32"},
            "parallel": parallel,
            "train": {"steps": STEPS, "seq_len": 16, "global_batch_tokens": 128, "micro_batch_size": 2},
            "evaluate": {"tokens": 256},
            "checkpoint": {"every": STEPS // 2, "keep": 9, "async": False},
            "log": {"loggers": [], "progress": "none", "report": False},
        }
    )


def checkpoint(root: Path, optimizer: str, layout: str, step: int = STEPS) -> Path:
    return root / f"runs/{optimizer}-{layout}/checkpoints/step-{step:08d}"


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, whole."""
    state = read_group(path, manifest_of(path).files, "state")
    return {f"w {n}": t for n, t in read_weights(path).items()} | {f"s {n}": t for n, t in state.items()}


def save(root: Path, optimizer: str, layout: str, parallel: dict[str, Any]) -> None:
    """Train to the end; then again from the middle, which must give the same to the bit."""
    config = recipe(root, optimizer, layout, parallel)
    Trainer(config).fit()
    path = checkpoint(root, optimizer, layout)
    first = stored(path)
    barrier()
    if is_main():
        shutil.rmtree(path)
    barrier()
    Trainer(config, resume=True).fit()
    again = stored(path)
    differ = [n for n in first if not torch.equal(first[n], again[n])]
    if differ or first.keys() != again.keys():
        raise AssertionError(f"{optimizer} {layout} is not resumed exactly: {differ[:4]}")


def load(root: Path, optimizer: str, layout: str, parallel: dict[str, Any]) -> list[str]:
    """What differs when the checkpoint of ``layout`` is opened under ``parallel``: weights and optimizer state."""
    config = recipe(root, optimizer, layout, parallel)
    trainer = Trainer(config, resume=True)
    if trainer.progress.step != STEPS:
        return [f"it is at step {trainer.progress.step}"]
    want = stored(checkpoint(root, optimizer, layout))
    state = named_state(trainer.optimizer, trainer.params)["tensors"]
    got = {f"w {n}": full_tensor(t) for n, t in trainer.parallel.state().items()}
    for name, entries in state.items():
        for key, tensor in entries.items():
            got[f"s optimizer/{name}/{key}"] = full_tensor(tensor)
    wrong = [n for n, t in got.items() if n not in want or not torch.equal(t, want[n])]
    seen = set().union(*gather_objects(set(got)))
    trainer.close()
    return [*wrong, *(f"{n} is nowhere" for n in want.keys() - seen)]


def start(root: Path, stage: str, rank: int, world: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = f"file://{root}/store-{stage}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=800))


def end() -> None:
    gc.collect()
    barrier()
    dist.destroy_process_group()


def main(root: Path, rank: int) -> None:
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}

    def load_all(stage: str) -> None:
        for optimizer, source, target in pairs()[stage]:
            found[f"{optimizer}: {source} -> {target}"] = load(root, optimizer, source, {**TWO, **FOUR}[target])

    def save_all(table: dict[str, Any]) -> None:
        for optimizer in OPTIMIZERS if table is TWO else ("adamw",):
            for name, parallel in layouts(optimizer, table).items():
                save(root, optimizer, name, parallel)

    if rank < 2:
        start(root, "a", rank, 2)
        save_all(TWO)
        load_all("a")
        end()
    start(root, "b", rank, 4)
    save_all(FOUR)
    load_all("b")
    end()
    if rank < 2:
        start(root, "c", rank, 2)
        load_all("c")
        end()
    (root / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
