"""JSON Lines: one object a line, the text in one of its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from trainwright.core.errors import DataError
from trainwright.core.registry import register
from trainwright.data.sources._files import FileSource, SourceFile, decode, open_binary
from trainwright.data.sources._rows import RowOptions
from trainwright.data.sources.base import Document


@register("source", "jsonl")
class JsonlSource(RowOptions, FileSource):
    """JSON Lines files, one document a line; ids are ``path:line``."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def _read(self, file: SourceFile) -> Iterator[Document]:
        offset = 0
        with open_binary(file.path) as stream:
            for number, line in enumerate(stream, 1):
                start, offset = offset, offset + len(line)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                where = f"{file.path}:{number}"
                try:
                    row = self._parse(line, file, start, number)
                    text = self._text(row, where)
                except DataError:
                    if not self.skip_bad_rows:
                        raise
                    self._bad_rows += 1
                    continue
                yield Document(text, f"{file.id}:{number}", self._meta(row))

    def _parse(self, line: bytes, file: SourceFile, offset: int, number: int) -> Any:
        text = decode(line, file.path, offset, number)
        try:
            return json.loads(text.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            hint = ""
            if number == 1 and text.lstrip()[:1] == "[":
                hint = "; the file looks like one JSON array: write one object a line"
            raise DataError(
                f"{file.path}:{number}: malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint} "
                f"(mend the line, or set skip_bad_rows: true)"
            ) from None
        except RecursionError:
            raise DataError(f"{file.path}:{number}: malformed JSON: nested too deeply") from None
