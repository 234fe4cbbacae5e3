"""The next step's batch one step early, so that its plan is made on another process while this step runs.

Nothing that the run shows differs: the order of batches, the loader's state in a checkpoint, and the plans, which are
those of the same planner for the same lengths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainwright.core.batch import Batch

if TYPE_CHECKING:
    from trainwright.train.trainer import Trainer

log = logging.getLogger("trainwright")


class LookingAhead:
    """A loader that takes the next batch out as it hands one over, and calls ``begin`` with it.

    Where it stands (``state_dict``, ``epoch``) is behind the batch that was handed over last; all else is ``loader``'s.
    """

    def __init__(self, loader: Any, begin: Callable[[Batch], None]):
        self.loader, self.begin = loader, begin
        self._held: Batch | None = None
        self._place: tuple[Any, float] | None = None  # state and epoch in front of the held batch

    def next_batch(self) -> Batch:
        batch = self._held if self._held is not None else self.loader.next_batch()
        self._place, self._held = None, None
        place = self.loader.state_dict(), self.loader.epoch
        try:
            held = self.loader.next_batch()
        except Exception:  # behind the last batch, or unreadable: the next call tries again, and raises it
            return batch
        self._held, self._place = held, place
        self.begin(held)
        return batch

    def __next__(self) -> Batch:
        return self.next_batch()

    def __iter__(self) -> LookingAhead:
        return self

    @property
    def epoch(self) -> float:
        return float(self.loader.epoch if self._place is None else self._place[1])

    def state_dict(self) -> Any:
        return self.loader.state_dict() if self._place is None else self._place[0]

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        self._held = self._place = None
        return self.loader.load_state_dict(state, *args, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def looking_ahead(trainer: Trainer) -> Any:
    """The trainer's loader, in front of which this rank's context makes its plans ahead where the recipe says so."""
    context: Any = trainer.parallel.context
    wanted = getattr(context, "plans_ahead", False)
    if wanted and trainer.interaction is not None:
        log.warning("no plans ahead: what this recipe trains on is chosen step by step")
        wanted = False
    if not wanted:
        return trainer.loader
    rows = trainer.executor.micro_batch_size
    return LookingAhead(trainer.loader, lambda batch: context.plan_ahead(batch, rows))
