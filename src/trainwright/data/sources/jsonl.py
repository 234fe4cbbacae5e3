"""JSON Lines: one object a line, the text in one of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import FileSource, SourceFile, numbered_lines, open_binary, parse_json
from trainwright.data.sources._rows import RowOptions
from trainwright.data.sources.base import Document


@register("source", "jsonl")
class JsonlSource(RowOptions, FileSource):
    """JSON Lines files, one document a line; ids are ``path:line``."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def _read(self, file: SourceFile) -> Iterator[Document]:
        with open_binary(file.path) as stream:
            for number, offset, line in numbered_lines(stream):
                if not line.strip() or (number == 1 and line.strip() == b"\xef\xbb\xbf"):
                    continue
                try:
                    row = parse_json(line, file.path, offset, number)
                except DataError as error:
                    row = DataError(f"{error} (mend the line, or set skip_bad_rows: true)")
                text = self._usable(row, f"{file.path}:{number}")
                if text is not None:
                    yield Document(text, f"{file.id}:{number}", self._meta(row))
