"""The one training loop and what belongs to a run: checkpoints, metrics, evaluation, the run's folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Trainer", "evaluate_run", "load_run"]

if TYPE_CHECKING:
    from trainwright.train.runs import evaluate_run, load_run
    from trainwright.train.trainer import Trainer

_LAZY = {
    "Trainer": "trainwright.train.trainer",
    "load_run": "trainwright.train.runs",
    "evaluate_run": "trainwright.train.runs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
