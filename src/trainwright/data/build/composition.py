"""What a corpus is made of: documents and bytes by source, licence, language and by what was done to them.

A built corpus carries it by shard in ``manifest.json``; the totals there are the sums of its shards, exactly. Any
other folder or file is read through.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.errors import DataError
from trainwright.data.build.documents import Document

MANIFEST = "manifest.json"
FORMAT = 1
NONE = "none given"
GROUPS = ("source", "licence", "language", "step")
Counts = dict[str, int]  # documents, bytes, characters


def _nothing() -> Counts:
    return {"documents": 0, "bytes": 0, "characters": 0}


@dataclass
class Composition:
    """Sums over documents; ``groups[kind][name]`` of those that share a source, licence, language or step.

    A document under several steps counts in each. ``bytes`` are those of its text in UTF-8.
    """

    total: Counts = field(default_factory=_nothing)
    groups: dict[str, dict[str, Counts]] = field(default_factory=lambda: {k: {} for k in GROUPS})

    def add(self, document: Document) -> None:
        language = document.metadata.get("language")
        steps = {str(p.get("step")) for p in document.provenance if isinstance(p, dict)}
        self.count(
            document.text, document.source, document.licence, language if isinstance(language, str) else None, steps
        )

    def count(
        self,
        text: str | None,
        source: str | None = None,
        licence: str | None = None,
        language: str | None = None,
        steps: Iterable[str] = (),
    ) -> None:
        size = (1, len(text.encode("utf-8", "surrogatepass")), len(text)) if text is not None else (1, 0, 0)
        _add(self.total, size)
        for kind, name in (("source", source), ("licence", licence), ("language", language)):
            _add(self.groups[kind].setdefault(name or NONE, _nothing()), size)
        for step in steps:
            _add(self.groups["step"].setdefault(step, _nothing()), size)

    def merge(self, other: Composition) -> None:
        for mine, theirs in [(self.total, other.total)] + [
            (self.groups[k].setdefault(n, _nothing()), c) for k in GROUPS for n, c in other.groups[k].items()
        ]:
            for key in mine:
                mine[key] += theirs[key]

    def to_json(self) -> dict[str, Any]:
        return {**self.total, **{k: dict(sorted(self.groups[k].items())) for k in GROUPS}}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Composition:
        return cls({k: int(row[k]) for k in _nothing()}, {k: {n: dict(c) for n, c in row[k].items()} for k in GROUPS})


def _add(counts: Counts, size: tuple[int, int, int]) -> None:
    for key, value in zip(counts, size, strict=True):
        counts[key] += value


def file_hash(path: Path) -> str:
    """SHA-256 of a file; of a folder, over the names and contents of its files."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        if path.is_dir():
            digest.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def write_manifest(folder: Path, shards: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """``manifest.json`` of shards (``file`` and their composition); adds sizes, hashes and totals."""
    whole = Composition()
    rows = []
    for shard in shards:
        path = folder / shard["file"]
        whole.merge(Composition.from_json(shard))
        rows.append({"file": shard["file"], "sha256": file_hash(path), "size": size_of(path), **shard})
    corpus = hashlib.sha256("".join(r["sha256"] for r in rows).encode()).hexdigest()
    found = {"format": FORMAT, **about, "corpus": f"sha256:{corpus}", "total": whole.to_json(), "shards": rows}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(found, ensure_ascii=False, indent=1, default=str) + "\n", "utf-8")
    partial.replace(folder / MANIFEST)
    return found


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a built corpus, None where there is none. Raises DataError for a damaged one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        if found["format"] != FORMAT:
            raise DataError(f"{path}: of format {found['format']}, not {FORMAT}; build the corpus anew")
        for shard in (found["total"], *found["shards"]):
            Composition.from_json(shard)
        return dict(found)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path}: damaged ({error}); remove it, and the documents are read instead") from None


def verify_shards(folder: Path) -> list[str]:
    """What is not as the manifest says: files missing, changed, or too many, and totals that are no sums."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder} has no {MANIFEST}; it is no corpus built here")
    wrong = []
    whole = Composition()
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        whole.merge(Composition.from_json(shard))
        if not path.exists():
            wrong.append(f"{shard['file']}: missing")
        elif file_hash(path) != shard["sha256"]:
            wrong.append(f"{shard['file']}: changed since it was written")
    if whole.to_json() != manifest["total"]:
        wrong.append("the totals are not the sums of the shards")
    return wrong


def shard_compositions(files: Iterable[Path]) -> tuple[Composition, list[Path]]:
    """Of files of built corpora, by their manifests; and the files that no manifest speaks of as they are now."""
    found, rest = Composition(), []
    known: dict[Path, dict[Path, dict[str, Any]]] = {}
    for file in files:
        shard = None
        for folder in (file.parent, file.parent.parent):
            if folder not in known:
                manifest = read_manifest(folder)
                known[folder] = {folder / s["file"]: s for s in manifest["shards"]} if manifest else {}
            shard = shard or known[folder].get(file)
        if shard is None or not file.exists() or size_of(file) != shard["size"]:
            rest.append(file)
        else:
            found.merge(Composition.from_json(shard))
    return found, rest


def rows_composition(files: Iterable[Path], text_key: str = "text") -> Composition:
    """Of JSON Lines and parquet files, by the fields of their rows; a row that cannot be read counts without them."""
    found = Composition()
    for file in files:
        for row in _rows(file, text_key):
            text = row.get(text_key)
            metadata = row.get("metadata")
            if isinstance(metadata, str):
                metadata = _json(metadata)
            language = row.get("language") or (metadata.get("language") if isinstance(metadata, dict) else None)
            steps = row.get("provenance")
            steps = _json(steps) if isinstance(steps, str) else steps
            found.count(
                text if isinstance(text, str) else None,
                _text(row.get("source") or row.get("collection")),
                _text(row.get("licence") or row.get("license")),
                _text(language),
                {str(s.get("step")) for s in steps if isinstance(s, dict)} if isinstance(steps, list) else (),
            )
    return found


COLUMNS = ("source", "collection", "licence", "license", "language", "metadata", "provenance")


def _rows(file: Path, text_key: str) -> Iterator[dict[str, Any]]:
    from trainwright.data.sources._files import need, open_binary

    name = file.name.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".parquet", ".pq")):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise need("pyarrow", "parquet") from None
        try:
            with pq.ParquetFile(file) as reader:
                wanted = [c for c in reader.schema_arrow.names if c in (*COLUMNS, text_key)]
                for batch in reader.iter_batches(batch_size=1024, columns=wanted):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: damaged, or not a parquet file ({error})") from error
    elif name.endswith((".jsonl", ".ndjson")):
        with open_binary(file) as stream:
            for line in stream:
                if line.strip():
                    row = _json(line)
                    yield row if isinstance(row, dict) else {}
    else:
        raise DataError(f"{file}: its rows say nothing of licences; build a corpus of it (trainwright data build)")


def _json(value: str | bytes) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
