"""What a released dataset says of each document, and the proof that it is the one it says.

JSON Lines: a head (name, version, licence of the compilation, ...), then a line a document. Grades of the evidence for
a licence: A, it stands in the document; B, the site says so; C, somebody else says so, or nobody. C is quarantined.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document, sha256

FORMAT = 1
Evidence = Literal["header", "page", "registry", "third-party", ""]
GRADES: dict[str, str] = {"header": "A", "page": "B", "registry": "B", "third-party": "C", "": "C"}


def content_hash(text: str) -> str:
    return f"sha256:{sha256(text).hex()}"


@dataclass(frozen=True)
class Entry:
    """One document. ``licence_evidence``: header (in the document), page (its site), registry, third-party, or "".

    ``retrieved_at`` is ISO 8601; ``processing`` lists operators with version and settings, ``opt_out_signals`` what the
    site said against use when it was fetched.
    """

    id: str
    content_hash: str
    source_url: str = ""
    retrieved_at: str = ""
    licence: str = ""
    licence_evidence: Evidence = ""
    jurisdiction: str = ""
    rights_holder: str = ""
    language: str = ""
    published: int | None = None
    died: int | None = None  # the author, a year
    processing: tuple[dict[str, Any], ...] = ()
    opt_out_signals: tuple[str, ...] = ()
    released: bool = True  # False: quarantined, kept but not for release

    @property
    def grade(self) -> str:
        return GRADES.get(self.licence_evidence, "C")

    def to_row(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        return {k: v for k, v in row.items() if k in ("id", "content_hash") or v not in ("", (), None, True)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Entry:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(row) - known)
        if unknown:
            raise DataError(f"unknown fields {', '.join(unknown)}")
        for key in ("id", "content_hash"):
            if not isinstance(row.get(key), str) or not row[key]:
                raise DataError(f"has no {key}")
        lists = {k: tuple(row[k]) for k in ("processing", "opt_out_signals") if k in row}
        return cls(**{**row, **lists})


def entry_of(document: Document, *, evidence: Evidence = "", retrieved_at: str = "", **more: Any) -> Entry:
    """The entry of a document: what its fields and metadata say, the rest by ``more``."""
    meta = document.metadata
    known = {"metadata": "page", "text": "header", "metadata and text": "header"}
    found = evidence or meta.get("evidence") or known.get(str(meta.get("licence_evidence", "")), "")
    values: dict[str, Any] = {
        "source_url": document.url or str(meta.get("source_url", "")),
        "retrieved_at": retrieved_at or str(meta.get("retrieved_at", "")),
        "licence": document.licence or "",
        "licence_evidence": found,
        "language": str(meta.get("language", "")),
        "jurisdiction": str(meta.get("jurisdiction", "")),
        "rights_holder": str(meta.get("rights_holder") or meta.get("creator") or ""),
        "published": meta.get("published"),
        "died": meta.get("died"),
        "processing": tuple(document.provenance),
        "opt_out_signals": tuple(meta.get("opt_out_signals", ())),
        **more,
    }
    entry = Entry(document.id, content_hash(document.text), **values)
    return dataclasses.replace(entry, released=entry.released and entry.grade != "C")


@dataclass
class Manifest:
    """Entries by id in their order, with a head. ``tombstones``: ids that were taken down, and in which version."""

    entries: dict[str, Entry] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    tombstones: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[Entry], **head: Any) -> Manifest:
        """Raises DataError for an id that comes twice."""
        found: dict[str, Entry] = {}
        for entry in entries:
            if entry.id in found:
                raise DataError(f"the id {entry.id!r} comes twice; give each document its own")
            found[entry.id] = entry
        return cls(found, {"version": 1, **head})

    @property
    def version(self) -> int:
        return int(self.head.get("version", 1))

    @property
    def corpus_hash(self) -> str:
        """Over ids and hashes of contents, in their order."""
        digest = hashlib.sha256()
        for entry in self.entries.values():
            digest.update(f"{entry.id}\0{entry.content_hash}\n".encode("utf-8", "surrogatepass"))
        return f"sha256:{digest.hexdigest()}"

    def lines(self) -> Iterator[str]:
        head = {"format": FORMAT, **self.head, "documents": len(self.entries), "corpus": self.corpus_hash}
        yield json.dumps({"manifest": {**head, "tombstones": self.tombstones}}, ensure_ascii=False, default=str)
        for entry in self.entries.values():
            yield json.dumps(entry.to_row(), ensure_ascii=False, default=str)

    def save(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in self.lines())
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Raises DataError for a file that is damaged, or whose hash is not that of its entries."""
        where = str(path)
        try:
            with path.open(encoding="utf-8") as file:
                head = dict(json.loads(next(file))["manifest"])
                entries = []
                for number, line in enumerate(file, 2):
                    where = f"{path}:{number}"
                    entries.append(Entry.from_row(json.loads(line)))
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise DataError(f"{where}: cannot be read as a manifest ({error})") from None
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if head.pop("format", None) != FORMAT:
            raise DataError(f"{path}: of another format")
        count, corpus, tombstones = head.pop("documents", None), head.pop("corpus", None), head.pop("tombstones", [])
        found = cls.of(entries, **head)
        found.tombstones = list(tombstones)
        if count != len(entries) or corpus != found.corpus_hash:
            raise DataError(f"{path}: changed since it was written: its hash is not that of its entries")
        return found

    def verify(self, documents: Iterable[Document]) -> list[str]:
        """What differs between manifest and texts: changed, missing, or unknown documents. One byte is enough."""
        wrong, seen = [], set()
        for document in documents:
            seen.add(document.id)
            entry = self.entries.get(document.id)
            if entry is None:
                wrong.append(f"{document.id}: not in the manifest")
            elif entry.content_hash != content_hash(document.text):
                wrong.append(f"{document.id}: its text is not the one that was hashed")
        return wrong + [f"{name}: missing" for name in self.entries if name not in seen]

    def quarantined(self) -> list[str]:
        return [e.id for e in self.entries.values() if not e.released]

    def publish(self, **head: Any) -> Manifest:
        """The manifest of a release. Raises ConfigError while quarantined documents are in it."""
        held = self.quarantined()
        if held:
            raise ConfigError(
                f"{len(held):,} quarantined documents would be published ({', '.join(held[:3])}, ...); take them down, "
                f"or give evidence for their licence", key="publish",
            )  # fmt: skip
        return Manifest(dict(self.entries), {**self.head, **head}, list(self.tombstones))
