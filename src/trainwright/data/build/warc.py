"""Web archives: the text of WET files, and of the pages in WARC files; through the package warcio (extra ``data``)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from trainwright.core.errors import DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.readers import BadRow, Reader
from trainwright.data.sources._files import SourceFile, need, open_binary

# What is on a page beside its text.
_LEFT_OUT = frozenset(
    ("script", "style", "noscript", "template", "svg", "nav", "header", "footer", "aside", "form", "button", "select")
)
_BLOCKS = frozenset(
    ("p", "div", "section", "article", "main", "li", "ul", "ol", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6",
     "pre", "blockquote", "br", "hr", "dd", "dt", "figcaption", "title")
)  # fmt: skip
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_\-]+)""", re.I)


class WarcReader(Reader):
    """WET (``conversion`` records) and WARC (``response`` records with HTML or plain text); other records are passed
    over and counted. The id is the record's, the URL its target, the licence the archive does not know."""

    format = "warc"
    suffixes = (".warc", ".wet", ".warc.wet")

    def _read(self, file: SourceFile) -> Iterator[Document | BadRow]:
        try:
            from warcio.archiveiterator import ArchiveIterator
            from warcio.exceptions import ArchiveLoadFailed
        except ModuleNotFoundError:
            raise need("warcio", "data") from None
        with open_binary(file.path) as stream:
            number = 0
            try:
                for record in ArchiveIterator(stream):
                    try:
                        document = self._record(record, file, number)
                        record.content_stream().read()
                        if getattr(record.raw_stream, "limit", 0) > 0:
                            raise BadRow("malformed record", f"{file.path}:{number}: the record is cut short")
                    except BadRow as bad:
                        yield bad
                    else:
                        if document is not None:
                            yield document
                        else:
                            self.statistics.counts["other records"] += 1
                    number += 1
                stream.read(1)  # warcio takes a packed file that is cut short for one that has ended
            except ArchiveLoadFailed as error:
                stream.read(1)
                # No way to find the next record: what follows in this file is lost.
                yield BadRow("malformed record", f"{file.path}:{number}: malformed record ({str(error).strip()[:200]})")
                return
        if number == 0 and file.path.stat().st_size:
            yield BadRow("malformed record", f"{file.path}:0: holds no WARC record")

    def _record(self, record: Any, file: SourceFile, number: int) -> Document | None:
        where = f"{file.path}:{number}"
        header = record.rec_headers.get_header
        if not header("WARC-Type") or header("Content-Length") is None:
            raise BadRow("malformed record", f"{where}: a record without WARC-Type or Content-Length")
        if record.rec_type == "conversion":
            text, decoded = self._decode(record.content_stream().read(), where)
        elif record.rec_type == "response" and record.http_headers is not None:
            kind = (record.http_headers.get_header("Content-Type") or "").lower()
            if "html" not in kind and "text/plain" not in kind:
                return None
            text, decoded = self._page(record.content_stream().read(), kind, where)
        else:
            return None
        metadata = {"date": header("WARC-Date")} if header("WARC-Date") else {}
        return Document(
            text=text,
            id=header("X-Document-Id") or (header("WARC-Record-ID") or f"{file.id}:{number}").strip("<>"),
            source=header("X-Document-Source") or self._source_of(),
            url=header("WARC-Target-URI"),
            licence=header("X-Document-Licence") or self.licence,
            metadata=metadata,
            provenance=decoded,
        )

    def _page(self, data: bytes, kind: str, where: str) -> tuple[str, list[dict[str, Any]]]:
        named = _CHARSET.search(kind.encode("latin-1", "ignore")) or _CHARSET.search(data[:2048])
        steps: list[dict[str, Any]] = []
        try:
            encoding = named[1].decode("ascii") if named else "utf-8"
            text = data.decode(encoding)
            if encoding.lower() not in ("utf-8", "utf8", "ascii"):
                steps.append({"step": "decode", "encoding": encoding.lower()})
        except (LookupError, UnicodeDecodeError):
            text, steps = self._decode(data, where)
        if "html" in kind:
            text = html_text(text)
            steps.append({"step": "html_text"})
        return text, steps


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._left_out: list[str] = []

    def parse_marked_section(self, i: int, report: Any = 1) -> int:
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:  # "<![" and a word that the parser does not know: a comment, as browsers read it
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in _LEFT_OUT:
            self._left_out.append(tag)
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._left_out:  # and whatever was opened inside and not closed
            del self._left_out[self._left_out.index(tag) :]
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self.parts.append(data)


def html_text(page: str) -> str:
    """The text of a page, a block a line, without scripts, menus and forms."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def write_record(writer: Any, document: Document) -> None:
    """``document`` as a conversion record; neither id nor date come from the clock: equal runs write equal files."""
    record_id = uuid.uuid5(uuid.NAMESPACE_URL, f"trainwright:{document.id}")
    headers = {
        "WARC-Record-ID": f"<urn:uuid:{record_id}>",
        "WARC-Date": str(document.metadata.get("date") or "1970-01-01T00:00:00Z"),
        "X-Document-Id": _header(document.id),
    }
    if document.source:
        headers["X-Document-Source"] = _header(document.source)
    if document.licence:
        headers["X-Document-Licence"] = _header(document.licence)
    from io import BytesIO

    record = writer.create_warc_record(
        document.url or f"urn:trainwright:{record_id}", "conversion", payload=BytesIO(document.text.encode()),
        warc_content_type="text/plain; charset=utf-8", warc_headers_dict=headers,
    )  # fmt: skip
    writer.write_record(record)


def _header(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise DataError(f"{text!r} holds a line break and cannot be a WARC header; rename it, or write another format")
    return text
