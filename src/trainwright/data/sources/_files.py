"""Finding and opening the files of a source: paths, globs and folders; plain, gzip and zstandard."""

from __future__ import annotations

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from pydantic import Field, field_validator

from trainwright.core.errors import ConfigError, DataError, nearest
from trainwright.data.sources._split import SplitSource
from trainwright.data.sources.base import Document, Split

COMPRESSED = (".gz", ".zst")
BLOCK = 1 << 20  # bytes per read
MAX_LINE = 1 << 28  # bytes; a longer line is a bad row, and is never held whole
# Files of rows, whatever source is asked to read them: suffix -> the source that does.
ROW_FILES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class SourceFile:
    path: Path  # absolute
    id: str  # POSIX path below the source's own folder, so that machines agree


def find_files(spec: str | Sequence[str], suffixes: tuple[str, ...], key: str = "path") -> list[SourceFile]:
    """The files that ``spec`` names, each once: entries in their order, sorted within a glob or folder.

    ``suffixes`` selects inside folders (also with .gz or .zst behind). Raises DataError for a path that does not
    exist, a glob without match and a folder without such files.
    """
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError(f"{key} is an empty list; name at least one file, glob or folder")
    found: list[Path] = []
    roots: list[str] = []
    for entry in entries:
        root, paths = _expand(entry, suffixes, key)
        roots.append(str(root))
        found += paths
    common = Path(os.path.commonpath(roots))
    files: dict[str, SourceFile] = {}
    for path in found:
        real = os.path.realpath(path)
        files.setdefault(real, SourceFile(path, path.relative_to(common).as_posix()))
    return list(files.values())


def _expand(entry: str, suffixes: tuple[str, ...], key: str) -> tuple[Path, list[Path]]:
    if not entry:
        raise DataError(f"{key} is an empty string; name a file, glob or folder")
    path = Path(os.path.abspath(Path(entry).expanduser()))
    if path.is_dir():
        files = sorted(p for p in _walk(path) if _has_suffix(p, suffixes))
        if not files:
            wanted = ", ".join(suffixes)
            raise DataError(
                f"{key}: folder {entry} holds no {wanted} files (plain, .gz or .zst); "
                f"name other files by a glob such as {entry}/**/*"
            )
        return path, files
    if path.exists():
        return path.parent, [path]
    if glob.has_magic(entry):
        matches = sorted(p for m in glob.glob(str(path), recursive=True) if (p := Path(m)).is_file())
        if not matches:
            raise DataError(f"{key}: no file matches the glob {entry} (looked in {Path.cwd()})")
        parts = path.parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        return Path(*parts[:fixed]), matches
    raise DataError(f"{key}: {entry} does not exist (looked in {Path.cwd()}){_near(path)}")


def _near(path: Path) -> str:
    """A clause that names what lies beside the missing ``path`` under a name like its own."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    guess = nearest(path.name, names)
    return f"; {guess}" if guess.startswith("did you mean") else ""


def _walk(folder: Path) -> Iterator[Path]:
    for current, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        yield from (Path(current, n) for n in names if not n.startswith("."))


def _refuse_folder(error: OSError) -> None:
    """A folder that cannot be listed must not go missing silently."""
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _has_suffix(path: Path, suffixes: tuple[str, ...]) -> bool:
    return _unpacked_name(path).endswith(suffixes)


def _unpacked_name(path: Path) -> str:
    name = path.name.lower()
    for packed in COMPRESSED:
        name = name.removesuffix(packed)
    return name


class _ZstdReader(io.RawIOBase):
    """Bytes of a .zst file of one or more frames. Unlike zstandard's own reader it reports a file that is cut short."""

    def __init__(self, raw: BinaryIO):
        import zstandard

        # 2**31: files packed with `zstd --long=31` need such a window.
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._raw = raw
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._ready:
            between = self._frame is None or self._frame.eof
            data = self._frame.unused_data if self._frame is not None and between else b""
            data = data or self._raw.read(1 << 14)
            if not data:
                if between:
                    return 0
                raise EOFError("the zstd stream is cut short")
            if between:
                self._frame = self._unpacker.decompressobj()
            self._ready = memoryview(self._frame.decompress(data))
        n = min(len(target), len(self._ready))
        target[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked where its name ends in .gz or .zst. Reading errors become DataErrors with its name."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if path.suffix.lower() == ".zst":
        import zstandard

        errors = (*errors, zstandard.ZstdError)
    try:
        with contextlib.ExitStack() as stack:
            raw: BinaryIO = stack.enter_context(path.open("rb", buffering=BLOCK))
            if path.suffix.lower() == ".gz":
                raw = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK))  # type: ignore[assignment]
            elif path.suffix.lower() == ".zst":
                raw = stack.enter_context(io.BufferedReader(_ZstdReader(raw), BLOCK))  # type: ignore[assignment]
            yield raw
    except errors as error:
        if path.suffix.lower() in COMPRESSED and not (isinstance(error, OSError) and error.errno):
            raise DataError(
                f"{path}: damaged or cut short {path.suffix} file ({error}); unpack it or fetch it again"
            ) from error
        raise DataError(f"{path}: cannot be read ({error})") from error


def decode(data: bytes, path: Path, offset: int = 0, line: int | None = None) -> str:
    """UTF-8 text of ``data``, which stands ``offset`` bytes into ``path`` (unpacked)."""
    where = f"{path}" if line is None else f"{path}:{line}"
    nul = data.find(0)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if nul < 0 or error.start < nul:
            if offset == 0 and data.startswith(PARQUET_MAGIC):
                raise _is_parquet(where) from None
            hint = "it looks like UTF-16; " if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
            raise DataError(
                f"{where}: not UTF-8 text: byte 0x{data[error.start]:02x} at byte offset {offset + error.start}; "
                f"{hint}give a UTF-8 text file (iconv -t UTF-8 converts)"
            ) from None
    if nul >= 0:
        if offset == 0 and data.startswith(PARQUET_MAGIC):
            raise _is_parquet(where)
        raise DataError(
            f"{where}: a binary file, not text: NUL byte at byte offset {offset + nul}; give a UTF-8 text file"
        )
    return text


def _is_parquet(where: str) -> DataError:
    return DataError(f"{where}: a parquet file; read it by the source {{name: parquet}}")


def numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, byte offset, line); of one longer than MAX_LINE its first bytes, one more than that."""
    number = offset = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        start, offset = offset, offset + len(line)
        rest = line
        while len(line) > MAX_LINE and rest and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE)
            offset += len(rest)
        yield number, start, line


def parse_json(line: bytes, path: Path, offset: int, number: int) -> Any:
    """The value of one line. Raises DataError."""
    where = f"{path}:{number}"
    if len(line) > MAX_LINE:
        raise DataError(f"{where}: a line of more than {MAX_LINE >> 20} MiB; write one object a line")
    if number == 1:
        if line.startswith(PARQUET_MAGIC):
            raise _is_parquet(where)
        line = line.removeprefix(b"\xef\xbb\xbf")
    text = decode(line, path, offset, number)
    try:
        return json.loads(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        hint = ""
        if number == 1 and text.lstrip()[:1] == "[":
            hint = "; the file looks like one JSON array: write one object a line"
        raise DataError(
            f"{where}: malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint}"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: malformed JSON: nested too deeply") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise DataError(f"{where}: malformed JSON: {str(error).split(';')[0]}") from None


def arrow_rows(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Rows of an Arrow batch; the error for one whose text is not UTF-8, which Arrow does not check."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):
        try:
            (row,) = batch.slice(i, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield error
        else:
            yield row


def parquet_error(path: Path, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.errno:
        return DataError(f"{path}: cannot be read ({error.strerror or error})")
    return DataError(f"{path}: damaged or cut short, or not a parquet file ({str(error).splitlines()[0][:200]})")


def checked_text(text: str, where: str) -> str:
    """``text``, or a DataError where it cannot be written as UTF-8 (JSON can spell half a surrogate pair)."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
                f"which is not Unicode text; remove it"
            ) from None
    return text


def hash_json(*parts: Any) -> str:
    """Hash of JSON-like values, 128 bits in hex."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stat_files(files: Sequence[SourceFile]) -> list[tuple[str, str, int, int]]:
    """Per file: id, absolute path, size in bytes, mtime in ns."""
    out = []
    for file in files:
        try:
            stat = file.path.stat()
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error
        out.append((file.id, str(file.path), stat.st_size, stat.st_mtime_ns))
    return out


class FileSource(SplitSource):
    """Documents from files."""

    suffixes: ClassVar[tuple[str, ...]] = ()

    path: str | list[str] = Field(
        description="File, glob or folder, or a list of them. Files may be packed (.gz, .zst); ** goes into subfolders."
    )
    validation_path: str | list[str] | None = Field(
        None,
        description="Files, globs or folders that are the validation split; path, less these, is for training then.",
    )

    @field_validator("path", "validation_path", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [os.fspath(v) if isinstance(v, os.PathLike) else v for v in value]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @property
    def label(self) -> str:
        first = self.path if isinstance(self.path, str) else (self.path or [""])[0]
        return f"{self.name}:{first}"

    def files(self, split: Split | None = None) -> list[SourceFile]:
        """The source's files in reading order; those of one split where validation_path is given."""
        if self.validation_path is None or split is None:
            return self._found("path")
        held_out = self._found("validation_path")
        if split == "validation":
            return held_out
        real = {os.path.realpath(f.path) for f in held_out}
        files = [f for f in self._found("path") if os.path.realpath(f.path) not in real]
        if not files:
            raise DataError(f"source {self.label}: every file of path is in validation_path; none is left for training")
        return files

    def _found(self, key: str) -> list[SourceFile]:
        """The files of ``path`` or ``validation_path``. Raises DataError where all are rows of a kind not read here."""
        files = find_files(getattr(self, key), self.suffixes, key)
        kinds = {next((s for s in ROW_FILES if _unpacked_name(f.path).endswith(s)), "") for f in files}
        if "" in kinds or not kinds.isdisjoint(self.suffixes):
            return files  # a folder of many things, whose CSV is text among others
        kind = min(kinds)
        raise DataError(
            f"{key}: {files[0].path} is a {kind} file, which the source {self.name} does not read; a column of its "
            f"rows as text is read by {{name: {ROW_FILES[kind]}, path: ..., text_key: ...}}"
        )

    def on_disk(self) -> tuple[int, int]:
        files = (
            self.files("train") if self.validation_path is None else [*self.files("train"), *self.files("validation")]
        )
        return len(files), sum(size for _, _, size, _ in stat_files(files))

    def _has_validation(self) -> bool:
        return self.validation_path is not None

    def _stream(self, split: Split | None) -> Iterator[Document]:
        for file in self.files(split):
            yield from self._read(file)

    @abstractmethod
    def _read(self, file: SourceFile) -> Iterator[Document]:
        """Documents of one file, empty ones included."""

    def fingerprint(self) -> str:
        settings = self.model_dump(mode="json", exclude={"path", "validation_path", *self.outside, *self.not_content})
        held_out = stat_files(self.files("validation")) if self._has_validation() else None
        return hash_json(settings, stat_files(self.files()), held_out)


def need(package: str, extra: str) -> ConfigError:
    return ConfigError(f"needs the package {package}; install it with: pip install 'trainwright[{extra}]'")
