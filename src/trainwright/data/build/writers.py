"""Documents into shards: JSON Lines, parquet, a `datasets` folder, WARC, or plain text.

A shard gets its name when it is whole. Equal documents in equal order give equal files.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import Composition
from trainwright.data.build.documents import FIELDS, Document
from trainwright.data.sources._files import need

FORMATS = ("jsonl", "parquet", "hf", "warc", "text")
_COLUMNS = FIELDS
_ROW_GROUP = 4096  # documents, or ROW_GROUP_CHARACTERS of text, whichever is first
_ROW_GROUP_CHARACTERS = 1 << 26


class Writer:
    """Write documents to ``folder``; a context manager.

    format: ``jsonl`` (all fields), ``parquet`` (metadata and provenance as JSON), ``hf`` (parquet where load_dataset
    looks for the split ``train``), ``warc`` (conversion records; no metadata), ``text`` (a file a document; text only).
    compression: ``none``, ``gz`` or ``zst`` for jsonl and warc (warc: none or gz). shard_bytes: about how much text
    goes into one file. Raises ConfigError for settings that do not fit, DataError for a folder that holds a corpus.
    """

    def __init__(
        self, folder: str | Path, format: str = "jsonl", compression: str = "none", shard_bytes: int = 512 << 20
    ):
        if format not in FORMATS:
            raise ConfigError(f"should be one of {', '.join(FORMATS)}", key="format", value=format)
        allowed = {"jsonl": ("none", "gz", "zst"), "warc": ("none", "gz")}.get(format, ("none",))
        if compression not in allowed:
            raise ConfigError(f"should be {' or '.join(allowed)} for {format}", key="compression", value=compression)
        if shard_bytes < 1:
            raise ConfigError("should be at least 1", key="shard_bytes", value=shard_bytes)
        self.folder = Path(folder)
        self.format, self.compression, self.shard_bytes = format, compression, shard_bytes
        self.files: list[dict[str, Any]] = []
        self.compositions: list[dict[str, Any]] = []  # of each file, as a manifest holds them
        self.on_shard: Callable[[], None] | None = None  # called when a file is whole
        self._composition = Composition()
        self._shard: Any = None
        self._held = 0
        self._documents = 0

    def go_on(self, shards: Sequence[dict[str, Any]]) -> int:
        """Take files that an earlier writer finished as one's own; how many documents they hold."""
        self.compositions = [dict(s) for s in shards]
        self.files = [
            {"file": s["file"], "documents": s["documents"], "text_bytes": s["bytes"]} for s in self.compositions
        ]
        return sum(f["documents"] for f in self.files)

    def __enter__(self) -> Writer:
        own = {f["file"].split("/")[0] for f in self.files} | ({"data"} if self.format == "hf" else set())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = [p.name for p in self.folder.iterdir() if not p.name.startswith(".") and p.name not in own]
            if (
                self.format == "hf"
                and not self.files
                and (self.folder / "data").is_dir()
                and any((self.folder / "data").iterdir())
            ):
                held.append("data")
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be written ({error.strerror or error})") from None
        if held:
            raise DataError(f"{self.folder} is not empty ({sorted(held)[0]}, ...); name another folder, or empty it")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shard is not None:
            self._finish(whole=kind is None)

    def write(self, document: Document) -> None:
        if self._shard is None:
            self._open()
        self._shard.write(document)
        self._documents += 1
        self._composition.add(document)
        self._held = self._composition.total["bytes"]
        if self._held >= self.shard_bytes:
            self._finish(whole=True)

    def _open(self) -> None:
        number = len(self.files)
        packed = "" if self.compression == "none" else f".{self.compression}"
        if self.format == "hf":
            (self.folder / "data").mkdir(exist_ok=True)
        name = {
            "jsonl": f"part-{number:05d}.jsonl{packed}",
            "parquet": f"part-{number:05d}.parquet",
            "hf": f"data/train-{number:05d}.parquet",
            "warc": f"part-{number:05d}.warc.wet{packed}",
            "text": f"part-{number:05d}",
        }[self.format]
        self._target = self.folder / name
        self._partial = self._target.with_name(f".{self._target.name}.partial")
        kind = {"jsonl": _JsonlShard, "warc": _WarcShard, "text": _TextShard}.get(self.format, _ParquetShard)
        self._shard = kind(self._partial, self.compression)

    def _finish(self, whole: bool) -> None:
        shard, self._shard = self._shard, None
        shard.close()
        if whole:
            self._partial.replace(self._target)
            name = self._target.relative_to(self.folder).as_posix()
            self.files.append({"file": name, "documents": self._documents, "text_bytes": self._held})
            self.compositions.append({"file": name, **self._composition.to_json()})
            if self.on_shard is not None:
                self.on_shard()
        self._held = self._documents = 0
        self._composition = Composition()


class _JsonlShard:
    def __init__(self, path: Path, compression: str):
        self._file = _open_packed(path, compression)

    def write(self, document: Document) -> None:
        self._file.write((document.to_json() + "\n").encode())

    def close(self) -> None:
        self._file.close()


class _ParquetShard:
    def __init__(self, path: Path, compression: str):
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise need("pyarrow", "parquet") from None
        self._pa = pa
        self._schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._characters = 0

    def write(self, document: Document) -> None:
        row = {name: getattr(document, name) for name in _COLUMNS}
        for name in ("metadata", "provenance"):
            row[name] = json.dumps(row[name], ensure_ascii=False, default=str) if row[name] else None
        self._rows.append(row)
        self._characters += len(document.text)
        if len(self._rows) >= _ROW_GROUP or self._characters >= _ROW_GROUP_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._characters = [], 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


class _WarcShard:
    def __init__(self, path: Path, compression: str):
        try:
            from warcio.warcwriter import WARCWriter
        except ModuleNotFoundError:
            raise need("warcio", "data") from None
        self._file = path.open("wb")
        self._writer = WARCWriter(self._file, gzip=compression == "gz")

    def write(self, document: Document) -> None:
        from trainwright.data.build.warc import write_record

        write_record(self._writer, document)

    def close(self) -> None:
        self._file.close()


class _TextShard:
    """A folder with a file a document."""

    def __init__(self, path: Path, compression: str):
        self._folder = path
        self._count = 0
        path.mkdir(parents=True, exist_ok=True)

    def write(self, document: Document) -> None:
        (self._folder / f"{self._count:08d}.txt").write_text(document.text, "utf-8", newline="")
        self._count += 1

    def close(self) -> None: ...


def _open_packed(path: Path, compression: str) -> Any:
    if compression == "gz":
        return gzip.GzipFile(filename="", fileobj=path.open("wb"), mode="wb", compresslevel=6, mtime=0)
    if compression == "zst":
        import zstandard

        return zstandard.open(path, "wb")
    return path.open("wb")


def write_documents(documents: Sequence[Document], folder: str | Path, format: str = "jsonl", **settings: Any) -> None:
    """Write documents that are in memory; a pipeline uses ``Writer``."""
    with Writer(folder, format, **settings) as writer:
        for document in documents:
            writer.write(document)
