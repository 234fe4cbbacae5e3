"""Batchers: how the documents of an epoch are laid out in rows."""

from trainwright.data.batchers.base import BatcherConfig

__all__ = ["BatcherConfig"]
