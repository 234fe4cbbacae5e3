"""Plain-text files. A file is a document, or holds several with a separator between them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, ClassVar

from pydantic import Field, PositiveInt

from trainwright.core.registry import register
from trainwright.data.sources._files import BLOCK, FileSource, SourceFile, decode, open_binary
from trainwright.data.sources.base import Document

BLANK_LINE = "blank_line"
_BLANK = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")


@register("source", "text")
class TextSource(FileSource):
    """Plain-text UTF-8 files, one document a file or split at a separator.

    Document ids are the file's path below the source's folder, with ``#k`` behind for the k-th document of a file.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md", ".rst")

    separator: str | None = Field(
        None,
        min_length=1,
        description="What stands between documents of one file: a string, or blank_line for one or more blank lines; "
        "null: a file is a document.",
    )
    max_document_bytes: PositiveInt = Field(
        1 << 20,
        description="Longer documents are cut at a line end below this size, in bytes, so that memory stays bounded.",
    )

    def _read(self, file: SourceFile) -> Iterator[Document]:
        pattern = None
        if self.separator is not None:
            pattern = _BLANK if self.separator == BLANK_LINE else re.compile(re.escape(self.separator.encode()))
        with open_binary(file.path) as stream:
            # Held back by one: the first document's id depends on whether a second follows.
            held: Document | None = None
            for k, (offset, data) in enumerate(cut_stream(stream, pattern, self.max_document_bytes)):
                text = decode(data, file.path, offset)
                if offset == 0:
                    text = text.removeprefix("\ufeff")
                if held is not None:
                    yield held
                    held = None
                if k == 0:
                    held = Document(text, file.id if pattern is None else f"{file.id}#0")
                    first = held
                else:
                    first.id = f"{file.id}#0"
                    yield Document(text, f"{file.id}#{k}")
            if held is not None:
                yield held


def cut_stream(stream: BinaryIO, separator: re.Pattern[bytes] | None, limit: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, bytes) of each document; holds at most ``limit`` and two blocks in memory."""
    buffer = bytearray()
    offset, ended = 0, False
    while True:
        match = separator.search(buffer) if separator is not None else None
        # A match at the end of the buffer may go on in the next block.
        if match is not None and match.start() <= limit and (ended or match.end() < len(buffer)):
            end, resume = match.span()
        elif len(buffer) > limit:
            end = resume = _line_end(buffer, limit)
        elif not ended:
            block = stream.read(BLOCK)
            ended = not block
            buffer += block
            continue
        else:
            if buffer:
                yield offset, bytes(buffer)
            return
        yield offset, bytes(buffer[:end])
        del buffer[:resume]
        offset += resume


def _line_end(buffer: bytearray, limit: int) -> int:
    """Where to cut so that the part is at most ``limit`` long: after a line feed, else between characters."""
    line = buffer.rfind(b"\n", limit // 2, limit) + 1
    if line:
        return line
    for cut in range(limit, max(limit - 4, 0), -1):
        if buffer[cut] & 0xC0 != 0x80:
            return cut
    return limit
