"""The record that flows through a corpus: a text, where it comes from, and what was done to it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

FIELDS = ("id", "text", "source", "url", "licence", "metadata", "provenance")


@dataclass(slots=True)
class Document:
    """One text of a corpus.

    ``provenance`` lists the transformations in their order, each ``{"step": name, ...}`` with plain JSON values; a
    stage that changes a text adds one, so that a card of the corpus can say what was done to which share of it.
    """

    text: str
    id: str
    source: str = ""
    url: str | None = None
    licence: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    provenance: list[dict[str, Any]] = field(default_factory=list)

    def changed(self, text: str, step: str, **details: Any) -> Document:
        """A copy with another text, and ``step`` in its provenance."""
        return dataclasses.replace(self, text=text, provenance=[*self.provenance, {"step": step, **details}])

    def with_metadata(self, **values: Any) -> Document:
        return dataclasses.replace(self, metadata={**self.metadata, **values})

    def to_row(self) -> dict[str, Any]:
        """Plain values, without what is empty; ``text`` and ``id`` are always there."""
        row: dict[str, Any] = {"id": self.id, "text": self.text}
        for name in FIELDS[2:]:
            value = getattr(self, name)
            if value:
                row[name] = value
        return row

    def to_json(self) -> str:
        return json.dumps(self.to_row(), ensure_ascii=False, default=str)


def sha256(text: str) -> bytes:
    """SHA-256 of the text's UTF-8 bytes: what two exact copies share."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
