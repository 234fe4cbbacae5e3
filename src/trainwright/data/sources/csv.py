"""CSV files: a header, then one document a row, the text in one of the columns. Read by Python's csv module.

Quoting is that of RFC 4180, and strict: a quote that is not closed, or text behind one that is, makes a bad row and not
a document that swallows those behind it.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

from pydantic import Field

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import (
    MAX_LINE,
    PARQUET_MAGIC,
    FileSource,
    SourceFile,
    decode,
    numbered_lines,
    open_binary,
)
from trainwright.data.sources._rows import RowOptions, missing_key
from trainwright.data.sources.base import Document

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@register("source", "csv")
class CsvSource(RowOptions, FileSource):
    """CSV files with a header, one document a row; ids are ``path:line``, of the line on which the row begins."""

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")

    delimiter: str | None = Field(
        None,
        min_length=1,
        max_length=1,
        description="What stands between fields; null: a tab in .tsv files, else a comma.",
    )

    def _read(self, file: SourceFile) -> Iterator[Document]:
        # The module's own limit, of 128 KiB, is less than many a document; it has one for the whole process.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
        delimiter = self.delimiter or ("\t" if ".tsv" in file.path.name.lower() else ",")
        with open_binary(file.path) as stream:
            rows = csv.reader(_lines(stream, file), delimiter=delimiter, strict=True)
            header: list[str] | None = None
            while True:
                number = rows.line_num + 1
                where = f"{file.path}:{number}"
                try:
                    fields = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    problem = DataError(f"{where}: malformed CSV: {error} (mend the row, or set skip_bad_rows: true)")
                    if header is None:
                        raise problem from None
                    self._bad_row(problem)
                    continue
                if not fields:
                    continue
                if header is None:
                    header = self._header(fields, where, delimiter)
                    continue
                row = dict(zip(header, fields, strict=False))
                text = self._usable(_problem(fields, header, where) or row, where)
                if text is not None:
                    yield Document(text, f"{file.id}:{number}", self._meta(row))

    def _header(self, fields: list[str], where: str, delimiter: str) -> list[str]:
        if self.text_key not in fields:
            error = missing_key(self.text_key, fields, where)
            other = next((c for c in ",;\t|" if c != delimiter and len(fields) == 1 and c in fields[0]), None)
            raise DataError(f"{error}; or set delimiter: {other!r}") if other else error
        for name in (self.text_key, *self.meta_keys):
            if fields.count(name) > 1:
                raise DataError(f"{where}: two columns have the name {name!r}; give them different names")
        return fields


def _lines(stream: BinaryIO, file: SourceFile) -> Iterator[str]:
    """Lines as text. A byte that is no UTF-8 stays as half a surrogate pair, for its row alone is bad."""
    for number, offset, line in numbered_lines(stream):
        if number == 1:
            if line.startswith((*_UTF16, PARQUET_MAGIC)):
                decode(line, file.path, offset, number)  # says what it is
            line = line.removeprefix(codecs.BOM_UTF8)
        yield line.decode("utf-8", "surrogateescape")


def _problem(fields: list[str], header: list[str], where: str) -> DataError | None:
    """What is wrong with a row, whatever column is wanted of it."""
    if len(fields) != len(header):
        return DataError(
            f"{where}: {len(fields)} fields, and the header has {len(header)}; quote fields that hold the delimiter, "
            f"mend the row, or set skip_bad_rows: true"
        )
    for value in fields:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                byte = ord(value[error.start]) & 0xFF
                return DataError(
                    f"{where}: not UTF-8 text: byte 0x{byte:02x}; give a UTF-8 file (iconv -t UTF-8 converts)"
                )
        if "\0" in value:
            return DataError(f"{where}: holds a NUL byte, so is no text; mend the row, or set skip_bad_rows: true")
    return None
