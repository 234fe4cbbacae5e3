"""What of a run is in a checkpoint, and how it comes back: weights, optimizer, data position, draws and the rest."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.distributed import gather_objects
from trainwright.core.seeds import rng_state, set_rng_state
from trainwright.optim.averaging._ring import RingAverage
from trainwright.optim.averaging._weights import require_same
from trainwright.optim.state import (
    allocate_named_state,
    joined_scalars,
    load_named_state,
    named_state,
    scalars_of,
)
from trainwright.train.finish import reached

if TYPE_CHECKING:
    from trainwright.train.trainer import Trainer

log = logging.getLogger("trainwright")


@dataclass
class Progress:
    """Where a run is. Saved with every checkpoint."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens processed, padding included
    seconds: float = 0.0  # training time, without evaluation and waiting
    best_loss: float = math.inf
    extra: dict[str, Any] = field(default_factory=dict)


def save(run: Trainer, metric: float | None = None) -> None:
    """A checkpoint of ``run`` as it is. Asynchronous saves return once the state is copied."""
    state = named_state(run.optimizer, run.params)
    if run.parallel.pipeline is not None:
        state["scalars"] = joined_scalars(gather_objects((run.mesh.rank_in("pp"), state["scalars"])))
    meta = {
        "progress": vars(run.progress),
        "rate": run.rate(),
        "lr": float(run.optimizer.param_groups[0]["lr"]),
        "loader": run.loader.state_dict(),
        "interaction": None if run.interaction is None else run.interaction.state_dict(),
        "optimizer": state["scalars"],
        "average": run.average.state_dict()["scalars"] if run.average else None,
        "clip": run.clip.state_dict(),
        "monitors": {name: monitor.state_dict() for name, monitor in run.monitors},
        "policy": run.policy.state_dict(),
        "precision": {"compute_dtype": str(run.precision.compute_dtype), **run.precision.state_dict()},
        "config": run.config.to_dict(),
    }
    run.checkpointer.save(
        run.progress.step,
        tensors=_tensors(run, state["tensors"]),
        meta=meta,
        weights=run.parallel.state(),
        per_rank={"rng": rng_state()},
        metric=metric,
    )


def restore(run: Trainer, path: Path, *, loader: bool) -> None:
    """Load everything of ``path``; ``loader=False`` leaves the data position where it is (after a rollback)."""
    from trainwright.train.checkpoint import inspect

    stage = None if run.parallel.pipeline is None else run.mesh.rank_in("pp")
    stored = inspect(path).meta
    require_same(run.average, stored.get("average"))
    scalars = scalars_of(stored["optimizer"], run.optimizer, run.params, stage)
    tree = _tensors(run, allocate_named_state(run.params, scalars))
    meta = run.checkpointer.load(path, tensors=tree, weights=run.parallel.state())
    load_named_state(run.optimizer, run.params, {"tensors": tree["optimizer"], "scalars": scalars}, copy=False)
    if run.average is not None:
        run.average.load_state_dict({"tensors": tree["average"], "scalars": meta["average"]})
    run.clip.load_state_dict(meta["clip"])
    before, now = meta["precision"].pop("compute_dtype"), str(run.precision.compute_dtype)
    if before != now:
        log.warning("this run computed in %s so far and goes on in %s; set precision to keep one", before, now)
    run.precision.load_state_dict(meta["precision"])
    run.progress = Progress(**meta["progress"])
    goes_up = run.rate() > 1.01 * meta.get("rate", math.inf)
    if isinstance(run.average, RingAverage) and goes_up:
        log.warning("the learning rate goes up again here: the average forgets the snapshots from before")
        run.average.flush()
    if loader:
        if goes_up and not reached(run, run.progress):
            # By the schedule alone, as a rollback's factor is in neither.
            last = meta.get("lr", meta["rate"]) / (meta["policy"].get("lr_multiplier") or 1.0)
            log.warning(
                "the learning rate goes up: %.3g in step %d, %.3g in the next, by the recipe as it is now%s",
                last, run.progress.step, run.rate(),
                "" if run.by_clock else f" (a schedule over {run.total_steps} steps)",
            )  # fmt: skip
        if run.interaction is not None:
            run.interaction.load_state_dict(meta.get("interaction"))
        run.loader.load_state_dict(meta["loader"])
        for name, monitor in run.monitors:
            if name in meta["monitors"]:
                monitor.load_state_dict(meta["monitors"][name])
        run.policy.load_state_dict(meta["policy"])
        own = run.checkpointer.per_rank(path)
        if own is not None:
            set_rng_state(own["rng"])


def _tensors(run: Trainer, optimizer_tensors: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"optimizer": optimizer_tensors}
    if run.average is not None:
        tree["average"] = run.average.state_dict()["tensors"]
    return tree
