"""Trainwright: train language models with the published methods, one recipe line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["RunConfig", "Trainer", "__version__"]

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.train import Trainer

_LAZY = {"RunConfig": "trainwright.config", "Trainer": "trainwright.train"}


def __getattr__(name: str) -> Any:
    """Import on first use: ``import trainwright`` costs nothing."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
