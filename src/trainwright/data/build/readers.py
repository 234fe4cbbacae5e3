"""Documents from the files people have: text, JSON Lines, parquet, WARC and WET, folders of the `datasets` library.

Every reader is an iterable that may be read again. It streams, passes over and counts empty texts, deals with bad rows
by a policy, and raises DataError for a file that changed while it was read.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.documents import Document
from trainwright.data.build.statistics import Statistics, excerpt
from trainwright.data.sources._files import (
    COMPRESSED,
    SourceFile,
    arrow_rows,
    checked_text,
    find_files,
    need,
    open_binary,
    parquet_error,
)

MAX_LINE = 1 << 28  # bytes; a longer line is a bad row and not a document
BATCH_ROWS = 1024
_BYTE_ORDER_MARKS = ((b"\xff\xfe\x00\x00", "utf-32"), (b"\x00\x00\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"),
                     (b"\xfe\xff", "utf-16"), (b"\xef\xbb\xbf", "utf-8-sig"))  # fmt: skip


class BadRow(Exception):
    """A row that cannot be used; ``reason`` is the same for all rows of its kind."""

    def __init__(self, reason: str, message: str, row: str = ""):
        super().__init__(message)
        self.reason, self.row = reason, row


class Reader(ABC):
    """Base of the readers.

    paths: files, globs or folders. source, licence: of the documents that name none themselves; the source is else
    the name of the folder or file that was asked for. encodings: tried one after the other for each row; which one
    was needed stands in the document's provenance unless it is the first. metadata_keys: further fields that become
    metadata; None: all. bad_rows: the policy.
    """

    format: ClassVar[str] = ""
    suffixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        source: str | None = None,
        licence: str | None = None,
        text_key: str = "text",
        id_key: str = "id",
        metadata_keys: Sequence[str] | None = None,
        encodings: Sequence[str] = ("utf-8",),
        bad_rows: BadRows | None = None,
    ):
        entries = [paths] if isinstance(paths, str | Path) else list(paths)
        self.paths = [str(p) for p in entries]
        self.source, self.licence = source, licence
        self.text_key, self.id_key, self.metadata_keys = text_key, id_key, metadata_keys
        for name in encodings:
            try:
                codecs.lookup(name)
            except LookupError:
                raise ConfigError("is no encoding that Python knows", key="encodings", value=name) from None
        if not encodings:
            raise ConfigError("names no encoding; utf-8 is the usual one", key="encodings")
        self.encodings = tuple(encodings)
        self.bad_rows = bad_rows or BadRows()
        self.statistics = Statistics("read")

    def files(self) -> list[SourceFile]:
        return find_files(self.paths, self.suffixes, "input")

    def __iter__(self) -> Iterator[Document]:
        self.statistics = Statistics("read")
        self.bad_rows.start(self.statistics)
        for file in self.files():
            yield from self.read_file(file)
        self.bad_rows.end()

    def read_file(self, file: SourceFile) -> Iterator[Document]:
        """Documents of one file, counted in the statistics of the reading that is under way."""
        before = _stamp(file.path)
        for item in self._read(SourceFile(file.path, _writable(file.id))):
            if isinstance(item, BadRow):
                where, _, _ = str(item).partition(": ")
                self.bad_rows.found(DataError(str(item)), where, item.reason, excerpt(item.row, 200))
                continue
            self.bad_rows.good()
            self.statistics.see(item.text)
            if not item.text.strip():
                self.statistics.counts["empty texts"] += 1
                continue
            self.statistics.documents_out += 1
            self.statistics.characters_out += len(item.text)
            yield item
        if _stamp(file.path) != before:
            raise DataError(
                f"{file.path}: changed while it was read; wait until what writes it has ended, and start again"
            )
        self.statistics.counts["files"] += 1

    @abstractmethod
    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        """Documents and bad rows of one file, in order."""

    def _decode(self, data: bytes, where: str) -> tuple[str, list[dict[str, Any]]]:
        """Text of ``data`` and what is to be known of its encoding. Raises BadRow."""
        marked = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
        for name in (marked,) if marked else self.encodings:
            try:
                text = data.decode(name)
            except UnicodeDecodeError:
                continue
            if "\0" in text:
                raise BadRow("not text", f"{where}: holds NUL characters: binary data, or UTF-16 without its mark")
            plain = name in (self.encodings[0], "utf-8-sig")
            return text, [] if plain else [{"step": "decode", "encoding": name}]
        tried = marked or ", ".join(self.encodings)
        raise BadRow(
            "encoding",
            f"{where}: not {tried} text; name further encodings to try, such as cp1252",
            data[:200].decode("latin-1"),
        )

    def _document(self, row: Any, file: SourceFile, number: int, decoded: Sequence[dict[str, Any]] = ()) -> Document:
        """Document of a row with named fields. Raises BadRow."""
        where = f"{file.path}:{number}"
        if not isinstance(row, Mapping):
            more = "; a JSON array is not read: write one object a line" if isinstance(row, list) else ""
            raise BadRow(
                "no object", f"{where}: expected an object with the field {self.text_key!r}{more}", str(row)[:200]
            )
        text = row.get(self.text_key)
        if not isinstance(text, str):
            fields = ", ".join(map(str, row)) or "none"
            what = "is not a string" if self.text_key in row else "is missing"
            raise BadRow("no text", f"{where}: field {self.text_key!r} {what}; its fields: {fields}", str(row)[:200])
        try:
            checked_text(text, where)
        except DataError as error:
            raise BadRow("not text", str(error)) from None
        given = row.get(self.id_key)
        named = {self.text_key, self.id_key, "source", "url", "licence", "license", "metadata", "provenance"}
        metadata = dict(_mapping(row.get("metadata")))
        for key, value in row.items():
            if key not in named and value is not None and (self.metadata_keys is None or key in self.metadata_keys):
                metadata[str(key)] = value
        provenance = _json(row.get("provenance"))
        return Document(
            text=text,
            id=str(given) if isinstance(given, str | int) and str(given) else f"{file.id}:{number}",
            source=_name(row.get("source")) or self._source_of(),
            url=_name(row.get("url")),
            licence=_name(row.get("licence")) or _name(row.get("license")) or self.licence,
            metadata=metadata,
            provenance=[*(provenance if isinstance(provenance, list) else []), *decoded],
        )

    def _source_of(self) -> str:
        if self.source is not None:
            return self.source
        path = Path(self.paths[0])
        name = path.name
        for suffix in (*COMPRESSED, *self.suffixes):
            name = name.removesuffix(suffix)
        return _writable(name if "*" not in name else path.parent.name)


class TextReader(Reader):
    """Text files, a document a file, or with ``lines=True`` a document a line."""

    format = "text"
    suffixes = (".txt", ".text", ".md", ".rst")

    def __init__(self, *args: Any, lines: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lines = lines

    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        with open_binary(file.path) as stream:
            if not self.lines:
                try:
                    data = stream.read(MAX_LINE + 1)
                    _check_length(data, str(file.path), "file; read it a document a line (lines), or cut it")
                    text, decoded = self._decode(data, str(file.path))
                    yield self._plain(text, file.id, decoded)
                except BadRow as bad:
                    yield bad
                return
            for number, line in _lines(stream):
                try:
                    _check_length(line, f"{file.path}:{number}", "line")
                    text, decoded = self._decode(line, f"{file.path}:{number}")
                    yield self._plain(text.rstrip("\r\n"), f"{file.id}:{number}", decoded)
                except BadRow as bad:
                    yield bad

    def _plain(self, text: str, name: str, decoded: list[dict[str, Any]]) -> Document:
        return Document(text, name, self._source_of(), None, self.licence, {}, decoded)


class JsonlReader(Reader):
    """JSON Lines."""

    format = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        with open_binary(file.path) as stream:
            for number, line in _lines(stream):
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                try:
                    _check_length(line, where, "line")
                    text, decoded = self._decode(line, where)
                    try:
                        row = json.loads(text)
                    except json.JSONDecodeError as error:
                        array = number == 1 and text.lstrip().startswith("[")
                        more = "; a JSON array is not read: write one object a line" if array else ""
                        raise BadRow("malformed JSON", f"{where}: malformed JSON: {error}{more}", text[:200]) from None
                    except RecursionError:
                        raise BadRow("malformed JSON", f"{where}: JSON nested too deeply", text[:200]) from None
                    except ValueError as error:  # a whole number of thousands of digits
                        message = str(error).split(";")[0]
                        raise BadRow("malformed JSON", f"{where}: malformed JSON: {message}", text[:200]) from None
                    if "\\ud" in text or "\\uD" in text:
                        _check_pairs(row, where)
                    yield self._document(row, file, number, decoded)
                except BadRow as bad:
                    yield bad


class ParquetReader(Reader):
    """Parquet files, read in batches of rows."""

    format = "parquet"
    suffixes = (".parquet", ".pq")

    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise need("pyarrow", "parquet") from None
        try:
            with pq.ParquetFile(file.path) as reader:
                names = reader.schema_arrow.names
                if self.text_key not in names:
                    raise DataError(f"{file.path}: no column {self.text_key!r}; its columns: {', '.join(names)}")
                number = 0
                for batch in reader.iter_batches(batch_size=BATCH_ROWS):
                    for row in arrow_rows(batch):
                        try:
                            if isinstance(row, UnicodeDecodeError):
                                raise BadRow("encoding", f"{file.path}:{number}: not UTF-8 text ({row.reason})")
                            yield self._document(row, file, number)
                        except BadRow as bad:
                            yield bad
                        number += 1
        except (pa.ArrowException, OSError) as error:
            raise parquet_error(file.path, error) from error


class HfReader(Reader):
    """A folder of the `datasets` library: written by save_to_disk, or one that load_dataset reads."""

    format = "hf"

    def __init__(self, *args: Any, split: str = "train", **kwargs: Any):
        super().__init__(*args, **kwargs)
        if len(self.paths) != 1:
            raise ConfigError("takes one dataset folder at a time", key="input", value=self.paths)
        self.split = split

    def files(self) -> list[SourceFile]:
        folder = Path(self.paths[0])
        if not folder.is_dir():
            raise DataError(f"input: {folder} is no folder")
        return [SourceFile(folder, self.split)]

    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        from trainwright.data.sources.hf import HfSource

        rows = HfSource.model_validate({"name": "hf", "path": str(file.path), "split": self.split})
        found = rows._dataset(self.split)
        for name, number in rows.other_splits(self.split).items():
            self.statistics.counts[f"rows of the split {name}, not read"] += number
        number = 0
        for batch in rows._batches(found, str(file.path)):
            columns = list(batch)
            for values in zip(*batch.values(), strict=True):
                try:
                    yield self._document(dict(zip(columns, values, strict=True)), file, number)
                except BadRow as bad:
                    yield bad
                number += 1


def _check_length(data: bytes, where: str, what: str) -> None:
    if len(data) > MAX_LINE:
        raise BadRow("too long", f"{where}: more than {MAX_LINE >> 20} MiB in one {what}")


def _check_pairs(row: Any, where: str) -> None:
    """JSON can spell half a surrogate pair, in any field; nothing could write it again."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise BadRow("not text", f"{where}: a field holds the lone surrogate U+{code:04X}, which is not text") from None


def _writable(name: str) -> str:
    """A file's name that is not UTF-8 with its odd bytes written out."""
    return name.encode("utf-8", "backslashreplace").decode()


def _name(value: Any) -> str | None:
    """A field that names something; what is no text there is written as JSON."""
    if value is None or value == "" or value == []:
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _lines(stream: Any) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; of one that is too long its first part, the rest is passed over. UTF-16 and UTF-32 files, told by
    their mark, come as UTF-8."""
    head = stream.peek(4)[:4] if hasattr(stream, "peek") else b""
    wide = next((name for mark, name in _BYTE_ORDER_MARKS if head.startswith(mark) and name != "utf-8-sig"), None)
    if wide is not None:
        import io

        try:
            yield from enumerate((line.encode() for line in io.TextIOWrapper(stream, wide, newline="\n")), 1)
        except UnicodeError as error:
            raise DataError(f"damaged {wide} text ({error})") from None
        return
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        rest = line
        while len(line) > MAX_LINE and rest and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE)
        yield number, line


def _stamp(path: Path) -> tuple[Any, ...]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        return tuple((str(f), (s := f.stat()).st_size, s.st_mtime_ns, s.st_ino) for f in files)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return None
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    found = _json(value)
    if found is None and isinstance(value, str) and value not in ("", "null"):
        found = value  # plain text
    if isinstance(found, Mapping):
        return {k: v for k, v in found.items() if v is not None}
    return {} if found is None else {"metadata": found}
