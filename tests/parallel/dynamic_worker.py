"""Trainings by 2 ranks of recipes whose data changes as they go: python dynamic_worker.py RECIPES.json RESULT_FILE"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
from pipeline_worker import _launch

from trainwright.core.distributed import full_tensor, rank
from trainwright.parallel.mesh import shutdown


def run_rank(recipes: dict[str, dict], out: str) -> None:
    from trainwright import RunConfig, Trainer

    found = {}
    for name, recipe in recipes.items():
        rows: list[dict] = []
        trainer = Trainer(RunConfig.load(recipe))
        trainer.fit(on_step=rows.append)
        weights = {n: full_tensor(p).detach().clone() for n, p in trainer.model.named_parameters()}
        found[name] = {"rows": rows, "weights": weights}
        print(f"rank {rank()}: {name}", flush=True)
    torch.save(found, f"{out}.{rank()}")
    shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    import trainwright.train.trainer  # noqa: F401

    recipes = json.loads(Path(sys.argv[1]).read_text())
    sys.exit(_launch(functools.partial(run_rank, recipes, sys.argv[2]), 2))
