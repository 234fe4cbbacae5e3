"""Stages that only choose: by id, licence, a field's value, or overlap with texts that are held out."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document, sha256
from trainwright.data.build.licences import FAMILIES, covers, normalise
from trainwright.data.build.seen import SeenHashes
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop, Statistics


class UniqueIds:
    """Ids that come twice: refused, renamed (``id#2``), or the later document dropped. Serial; 8 bytes a document."""

    name = "unique_ids"

    def __init__(self, on_duplicate: Literal["refuse", "rename", "drop"] = "refuse"):
        if on_duplicate not in ("refuse", "rename", "drop"):
            raise ConfigError("should be refuse, rename or drop", key="on_duplicate", value=on_duplicate)
        self.on_duplicate = on_duplicate
        self.statistics = Statistics(self.name)

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        seen = SeenHashes()
        for document in documents:
            self.statistics.see(document.text)
            if not seen.add(document.id):
                self.statistics.counts["duplicate ids"] += 1
                if self.on_duplicate == "refuse":
                    raise self._refusal(document)
                if self.on_duplicate == "drop":
                    self.statistics.drop(document, Drop("duplicate id"))
                    continue
                number = 2
                while not seen.add(f"{document.id}#{number}"):
                    number += 1
                document = self._renamed(document, f"{document.id}#{number}")
            self.statistics.keep(document)
            yield document

    @staticmethod
    def _refusal(document: Document) -> DataError:
        return DataError(
            f"the id {document.id!r} comes twice (the second time in source {document.source!r}); give "
            f"each document its own, or choose on_duplicate=rename or drop"
        )

    def _renamed(self, document: Document, name: str) -> Document:
        provenance = [*document.provenance, {"step": self.name, "was": document.id}]
        return dataclasses.replace(document, id=name, provenance=provenance)


class Licences(DocumentStage):
    """Keep documents whose licence is on the list; without one only where ``unknown`` allows it."""

    name = "licences"

    def __init__(self, allowed: Sequence[str], unknown: bool = False):
        super().__init__()
        if not allowed:
            raise ConfigError("names no licence; give at least one", key="licences")
        self.allowed, self.unknown = {a.strip().lower() for a in allowed}, unknown
        # A name of a licence stands for all spellings and versions; what is none is compared as it is.
        self.names = [a.strip() if a.strip() in FAMILIES else n for a in allowed if (n := normalise(a)) is not None]

    def apply(self, document: Document) -> Document | Drop:
        if not document.licence:
            return document if self.unknown else Drop("no licence given")
        if document.licence.strip().lower() in self.allowed:
            return document
        name = normalise(document.licence) if self.names else None
        if name is not None and any(covers(entry, name) for entry in self.names):
            return document
        return Drop("licence not allowed", document.licence)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, "=": operator.eq,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([\w.\-]+)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*")


class Where(DocumentStage):
    """Keep documents that meet a condition on a field: ``language_score >= 0.9``, ``source != forum``.

    The field is one of the document's, or of its metadata (dots go into nested ones). Numbers are compared as numbers.
    A document without the field is dropped and counted.
    """

    name = "where"

    def __init__(self, condition: str):
        super().__init__()
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise ConfigError(
                "should look like field >= value, with >=, <=, >, <, = or !=", key="where", value=condition
            )
        self.condition = condition
        self.field, self._operator, value = match[1], match[2], match[3].strip("\"'")
        try:
            self._value: float | str = float(value)
        except ValueError:
            self._value = value
            if self._operator not in ("=", "==", "!="):
                raise ConfigError(
                    "compares by size with something that is no number", key="where", value=condition
                ) from None

    def apply(self, document: Document) -> Document | Drop:
        value: Any = document.metadata
        if self.field in ("id", "source", "url", "licence"):
            value = getattr(document, self.field)
        else:
            for part in self.field.removeprefix("metadata.").split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            return Drop(f"no field {self.field}")
        wanted = self._value
        if isinstance(wanted, float):
            try:
                value = float(value)
            except (TypeError, ValueError):
                return Drop(f"{self.field} is no number", str(value)[:80])
        elif not isinstance(value, str):
            value = str(value)
        if _OPERATORS[self._operator](value, wanted):
            return document
        return Drop(f"not {self.condition}", f"{self.field} is {value}")


class Decontaminate(DocumentStage):
    """Drop documents that are equal, by SHA-256, to one of ``held_out``: what a model is judged on it must not read."""

    name = "decontaminate"

    def __init__(self, held_out: Iterable[Document | str]):
        super().__init__()
        self._hashes = {sha256(d if isinstance(d, str) else d.text) for d in held_out}

    def apply(self, document: Document) -> Document | Drop:
        return Drop("in the held-out set") if sha256(document.text) in self._hashes else document
