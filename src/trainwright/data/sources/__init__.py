"""Data sources: streams of documents with stable ids."""

from trainwright.data.sources.base import Document, SourceConfig, Split

__all__ = ["Document", "SourceConfig", "Split"]
