"""Language models: our decoder, Hugging Face folders in and out, generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.models.generate import generate_ids, stream
    from trainwright.models.hf_io import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "generate_ids", "save_pretrained", "stream"]


def __getattr__(name: str) -> Any:
    """Import on first use: ``import trainwright.models`` costs nothing."""
    import importlib

    if name in ("from_pretrained", "save_pretrained"):
        return getattr(importlib.import_module("trainwright.models.hf_io"), name)
    if name in ("generate_ids", "stream"):
        return getattr(importlib.import_module("trainwright.models.generate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
