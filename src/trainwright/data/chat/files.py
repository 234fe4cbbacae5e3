"""Rows of JSON Lines, JSON arrays and parquet files, one after another; those of parquet without the
keys of inner objects that are null, for that is how an absent one is spelt there."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from trainwright.core.errors import DataError
from trainwright.data.chat.conversation import without_null
from trainwright.data.sources._files import (
    COMPRESSED,
    SourceFile,
    arrow_rows,
    need,
    numbered_lines,
    open_binary,
    parquet_error,
    parse_json,
)

BLOCK = 1 << 16
BATCH_ROWS = 1024
# Blanks and the UTF-8 byte order mark may stand before the first bracket.
_BEFORE = b"\xef\xbb\xbf \t\r\n"

Row = tuple[int, Any]  # number: of the line, from 1, or of the row, from 0; value or DataError


def read_rows(file: SourceFile) -> Iterator[Row]:
    """Rows of a file with their numbers; a row that cannot be parsed comes as the DataError that says why.

    Raises DataError where nothing behind the place can be read: a damaged file, a broken array.
    """
    name = file.path.name.lower()
    if name.endswith((".parquet", ".pq")):
        yield from _parquet(file)
        return
    with open_binary(file.path) as stream:
        start = stream.read(1)
        while start and start in _BEFORE:
            start = stream.read(1)
        array = start == b"["
    with open_binary(file.path) as stream:
        yield from _array(stream, file) if array else _lines(stream, file)


def _lines(stream: BinaryIO, file: SourceFile) -> Iterator[Row]:
    for number, offset, line in numbered_lines(stream):
        if not line.strip() or (number == 1 and line.strip() == codecs.BOM_UTF8):
            continue
        try:
            yield number, parse_json(line, file.path, offset, number)
        except DataError as error:
            yield number, error


def _array(stream: BinaryIO, file: SourceFile) -> Iterator[Row]:
    """Values of one big array; memory holds a value and a block."""
    reader = codecs.getincrementaldecoder("utf-8-sig")()
    parser = json.JSONDecoder()
    text, at, number, wanted = "", 0, 0, BLOCK
    ended = False

    def more() -> None:
        nonlocal text, at, ended
        block = stream.read(wanted)
        ended = not block
        try:
            text, at = text[at:] + reader.decode(block, ended), 0
        except UnicodeDecodeError as error:
            raise DataError(f"{file.path}: not UTF-8 text ({error.reason}); convert it (iconv -t UTF-8)") from None

    def skip() -> str:
        """The next character that is no white space; empty at the end."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    def broken(what: str) -> DataError:
        return DataError(f"{file.path}: malformed JSON array: {what} behind row {number - 1}; mend the file")

    skip()
    at += 1  # the bracket
    if skip() == "]":
        return
    while True:
        wanted = BLOCK
        while True:
            try:
                skip()
                value, at = parser.raw_decode(text, at)
                break
            except json.JSONDecodeError as error:
                if ended:
                    raise broken(error.msg) from None
                wanted *= 2  # so that a long value is not parsed anew for every block
                more()
            except RecursionError:
                raise broken("nested too deeply") from None
            except ValueError as error:  # a whole number of thousands of digits
                raise broken(str(error).split(";")[0]) from None
        yield number, value
        number += 1
        mark = skip()
        if mark == "]":
            return
        if mark != ",":
            raise broken("expected a comma")
        at += 1


def _parquet(file: SourceFile) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise need("pyarrow", "parquet") from None
    if file.path.suffix.lower() in COMPRESSED:
        raise DataError(f"{file.path}: parquet files are packed inside; unpack it")
    try:
        with pq.ParquetFile(file.path) as reader:
            number = 0
            for batch in reader.iter_batches(batch_size=BATCH_ROWS):
                for row in arrow_rows(batch):
                    if isinstance(row, UnicodeDecodeError):
                        yield number, DataError(f"{file.path}:{number}: not UTF-8 text ({row.reason})")
                    else:
                        yield number, {k: without_null(v) for k, v in row.items()}
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise parquet_error(file.path, error) from error
