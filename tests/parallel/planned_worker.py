"""One of two or four ranks: a step of each recipe, what it sent and what ``trainwright plan comm`` says.

python planned_worker.py RECIPES.json RESULT_FILE      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainwright.cli.plan_comm import not_counted, work_of
from trainwright.config.run_config import RunConfig
from trainwright.core.distributed import gather_objects
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.context.pieces import document_lengths
from trainwright.parallel.mesh import shutdown
from trainwright.planning.comm_plan import Transfer, planned_transfers
from trainwright.train.trainer import Trainer


def by_kind(transfers: Iterable[Transfer]) -> dict[str, int]:
    found: dict[str, int] = {}
    for t in transfers:
        found[t.kind] = found.get(t.kind, 0) + t.bytes
    return found


def recorded(trace: CommTrace) -> dict[str, int]:
    return {kind: of.bytes for kind, of in trace.summary().kinds.items() if of.bytes}


def step(recipe: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind of the forward and backward passes, and of the optimizer's step: recorded and planned."""
    trainer = Trainer(RunConfig.from_dict(recipe))
    config, degrees = trainer.config, trainer.mesh.degrees
    batch = trainer.loader.next_batch()
    batch.weights = torch.ones_like(batch.weights)
    # DDP tells its buckets once, after the first; a pipeline the names of its figures.
    again = degrees.pp > 1 or (degrees.world_size > 1 and degrees.dp_shard == degrees.tp == 1)
    for _ in range(2 if again else 0):
        trainer.executor.run(trainer.parallel, trainer.objective, batch)
        trainer.optimizer.zero_grad()
    with CommTrace() as passes:
        trainer.executor.run(trainer.parallel, trainer.objective, batch)
    with CommTrace() as stepped:
        trainer.optimizer.step()
    work = replace(work_of(config), lengths=tuple(map(tuple, document_lengths(batch.doc_ids))))
    alone = by_kind(planned_transfers(replace(work, exchanges=()), degrees, config.parallel))
    both = by_kind(planned_transfers(work, degrees, config.parallel))
    trainer.close()
    return {
        "passes": (recorded(passes), alone),
        "optimizer": (recorded(stepped), {k: n - alone.get(k, 0) for k, n in both.items() if n > alone.get(k, 0)}),
        "not_counted": not_counted(config, work, degrees),
        "stage": trainer.mesh.rank_in("pp"),
    }


def main(recipes: str, out: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, recipe in json.loads(Path(recipes).read_text()).items():
        try:
            found[name] = gather_objects(step(recipe))
        except Exception as error:
            raise RuntimeError(f"in {name}") from error
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
