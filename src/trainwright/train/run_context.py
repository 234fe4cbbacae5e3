"""What an objective that asks for it is told of the run it trains in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.seeds import rng_state, set_rng_state
from trainwright.objectives.base import RunContext

if TYPE_CHECKING:
    from trainwright.train.trainer import Trainer


def prepare_objective(run: Trainer) -> None:
    """Calls ``prepare(context)`` of the run's objective where it has one."""
    prepare = getattr(run.objective, "prepare", None)
    if prepare is None:
        return
    from trainwright.train.runs import open_model

    def open_quietly(path: str, checkpoint: str) -> Any:
        """Building a model draws weights; that must not shift the draws of training."""
        state = rng_state()
        try:
            return open_model(path, checkpoint, str(run.device))
        finally:
            set_rng_state(state)

    prepare(
        RunContext(
            tokenizer=run.tokenizer,
            seq_len=run.config.train.seq_len,
            total_steps=run.total_steps,
            resumed=run.resume,
            device=run.device,
            tokens_per_step=run.config.train.global_batch_tokens,
            flops_per_token=run.flops_per_token,
            open_model=open_quietly,
            training_sets=run.data.train,
            cache_dir=run.config.data.cache(),
            split=next(
                (d for d in ("tp", "cp", "pp") if getattr(run.mesh.degrees, d) > 1),
                "context" if run.parallel.chunks else "",
            ),
        )
    )
