"""One of four ranks: recipes with dropout, and what the first masks of a step are on each rank.

python dropout_worker.py RECIPES.json RESULT_FILE      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.config.run_config import RunConfig
from trainwright.core.distributed import gather_objects
from trainwright.parallel.mesh import shutdown
from trainwright.train.trainer import Trainer

KEPT = 4  # masks


def masks_of(trainer: Trainer) -> list[Tensor]:
    """What the first dropouts of a step leave out: it is drawn, whatever it is of."""
    found: list[Tensor] = []
    dropout = F.dropout

    def watched(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out: Tensor = dropout(torch.ones_like(x), p, training)
        if training and len(found) < KEPT:
            found.append((out == 0).detach().flatten())
        return x * out

    F.dropout = watched  # type: ignore[assignment]
    try:
        trainer._step()
    finally:
        F.dropout = dropout  # type: ignore[assignment]
        trainer.close()
    return found


def main(recipes: str, out: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, recipe in json.loads(Path(recipes).read_text()).items():
        trainer = Trainer(RunConfig.from_dict(recipe))
        mesh = trainer.mesh
        where = {dim: mesh.rank_in(dim) for dim in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        found[name] = gather_objects((where, masks_of(trainer)))
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
