"""Which reader a path needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import read_manifest
from trainwright.data.build.documents import Document
from trainwright.data.build.readers import HfReader, JsonlReader, ParquetReader, Reader, TextReader
from trainwright.data.build.statistics import Statistics
from trainwright.data.build.warc import WarcReader
from trainwright.data.sources._files import _walk, find_files

# What people have lying about and what to do with it.
OTHERS = {
    ".json": "a JSON array is not read; write one object a line (.jsonl), such as with jq -c '.[]'; where it holds "
    "that already, give the format jsonl",
    ".csv": "tables of this kind are not read; write one JSON object a line (.jsonl), or parquet",
    ".tsv": "tables of this kind are not read; write one JSON object a line (.jsonl), or parquet",
}
READERS: dict[str, type[Reader]] = {r.format: r for r in (TextReader, JsonlReader, ParquetReader, WarcReader, HfReader)}


def open_reader(paths: str | Path | Sequence[str | Path], format: str | None = None, **settings: Any) -> Reader:
    """The reader of ``format``, or of the one that the names of the files tell. Raises DataError where they tell none
    or several."""
    if format is None:
        format = guess_format([paths] if isinstance(paths, str | Path) else list(paths))
    if format not in READERS:
        raise ConfigError(f"should be one of {', '.join(READERS)}", key="format", value=format)
    return READERS[format](paths, **settings)


class Inputs:
    """Several readers as one, each for ``NAME=PATH`` or ``PATH``; NAME is the source of documents that name none.

    A limit on bad rows is each input's own. Reading raises DataError where no input holds a document.
    """

    def __init__(self, inputs: Sequence[str], format: str | None = None, **settings: Any):
        if not inputs:
            raise DataError("no input; name at least one file, glob or folder")
        self.readers: list[Reader] = []
        for item in inputs:
            name, equals, path = item.partition("=")
            named = bool(equals) and bool(path) and "/" not in name and not Path(item).exists()
            own = {**settings, "source": name} if named else settings
            self.readers.append(open_reader(path if named else item, format, **own))

    @property
    def statistics(self) -> Statistics:
        """Of the latest reading."""
        whole = Statistics("read")
        for reader in self.readers:
            whole.merge(reader.statistics)
        return whole

    def __iter__(self) -> Iterator[Document]:
        for reader in self.readers:
            yield from reader
        self.check_filled()

    def check_filled(self) -> None:
        """Raise DataError where the latest reading found no document."""
        read = self.statistics
        if not read.documents_out:
            found = ", ".join(f"{read.counts[k]:,} {k}" for k in ("files", "empty texts", "bad rows"))
            raise DataError(f"input: holds no document ({found}); name files that do")


def guess_format(paths: Sequence[str | Path]) -> str:
    if len(paths) == 1 and Path(paths[0]).is_dir():
        folder = Path(paths[0])
        if any((folder / name).exists() for name in ("dataset_dict.json", "state.json", "dataset_info.json")):
            return "hf"
        names = [str(p) for p in _walk(folder)]
        known = [k for n in names if (k := _kind(n)) is not None]
    else:
        every = tuple(s for r in READERS.values() for s in r.suffixes)
        names = [str(f.path) for f in find_files([str(p) for p in paths], every, "input")]
        known = [_kind(n) or "" for n in names]
    kinds = sorted(set(known))
    if len(kinds) == 1 and kinds[0]:
        return kinds[0]
    shown = ", ".join(str(p) for p in paths[:3])
    if not kinds and len(paths) == 1 and read_manifest(Path(paths[0])) is not None:
        raise DataError(f"input: {shown} is a built corpus without a document; trainwright data inspect tells why")
    if not kinds or kinds == [""]:
        suffixes = {Path(n).suffix.lower() for n in names or map(str, paths)}
        for suffix, what in OTHERS.items():
            if suffixes == {suffix}:
                raise DataError(f"input: {shown}: {what}")
        raise DataError(f"input: cannot tell the format of {shown} by its name; give one of {', '.join(READERS)}")
    raise DataError(f"input: {shown} holds files of several formats ({', '.join(k or 'unknown' for k in kinds)}); "
                    f"name the files of one, or give the format")  # fmt: skip


def _kind(name: str) -> str | None:
    name = name.lower()
    for packed in (".gz", ".zst"):
        name = name.removesuffix(packed)
    return next((r.format for r in READERS.values() if r.suffixes and name.endswith(r.suffixes)), None)
