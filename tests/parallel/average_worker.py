"""One of four ranks of the checks of averaged weights: trains recipes and saves what their validations said.

python average_worker.py RECIPES.json RESULT_FILE      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from trainwright.config.run_config import RunConfig
from trainwright.parallel.mesh import shutdown
from trainwright.train.trainer import Trainer


def main(recipes: str, out: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, recipe in json.loads(Path(recipes).read_text()).items():
        trainer = Trainer(RunConfig.from_dict(recipe))
        summary = trainer.fit()
        found[name] = {k: v for k, v in summary.items() if k.startswith("val_loss")}
        found[name]["best"] = trainer.progress.best_loss
    rank = torch.distributed.get_rank()
    if rank == 0:
        torch.save(found, out)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
