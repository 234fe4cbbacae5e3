"""Web archives: the text of WET files, and of the pages in WARC files; through the package warcio (extra ``data``)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

from trainwright.core.errors import DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.readers import BadRow, Reader
from trainwright.data.build.web_page import decode_page, html_text
from trainwright.data.sources._files import SourceFile, need, open_binary

_STATUS = re.compile(r"[1-9]\d\d", re.A)
_MARKED = re.compile(rb"\xef\xbb\xbf|\xff\xfe|\xfe\xff")
_CHARSET = re.compile(rb"""charset\s*=\s*["']?\s*([A-Za-z0-9_\-:.]+)""", re.I)


class WarcReader(Reader):
    """WET (``conversion`` records) and WARC (``response`` records with HTML or plain text and the status 200); other
    records are passed over and counted, by status. The id is the record's, the URL its target, the licence the archive
    does not know."""

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
                        if isinstance(document, str):
                            self.statistics.counts[document] += 1
                        else:
                            yield document
                    number += 1
                stream.read(1)  # warcio takes a packed file that is cut short for one that has ended
            except ArchiveLoadFailed as error:
                stream.read(1)
                # No way to find the next record: what follows in this file is lost.
                yield BadRow("malformed record", f"{file.path}:{number}: malformed record ({str(error).strip()[:200]})")
                return
        if number == 0 and file.path.stat().st_size:
            yield BadRow("malformed record", f"{file.path}:0: holds no WARC record")

    def _record(self, record: Any, file: SourceFile, number: int) -> Document | str:
        """The record's document, or what a record without one counts as."""
        where = f"{file.path}:{number}"
        header = record.rec_headers.get_header
        if not header("WARC-Type") or header("Content-Length") is None:
            raise BadRow("malformed record", f"{where}: a record without WARC-Type or Content-Length")
        if record.rec_type == "conversion":
            text, decoded = self._decode(record.content_stream().read(), where)
        elif record.rec_type == "response" and record.http_headers is not None:
            kind = (record.http_headers.get_header("Content-Type") or "").lower()
            if "html" not in kind and "text/plain" not in kind:
                return "other records"
            status = record.http_headers.get_statuscode() or ""
            if status != "200":  # errors, redirections and parts have texts that are no page's
                return f"pages with status {status}" if _STATUS.fullmatch(status) else "pages without a status"
            data = record.content_stream().read()
            packed = (record.http_headers.get_header("Content-Encoding") or "").strip().lower()
            if (
                packed in ("br", "zstd", "compress")
                and not self._unpacked(packed)
                and not data.lstrip().startswith(b"<")
            ):
                what = "; install the package brotli to read it" if packed == "br" else ", which is not read"
                raise BadRow("packed page", f"{where}: the page is packed with {packed}{what}")
            text, decoded = self._page(data, kind, where)
        else:
            return "other records"
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

    def _unpacked(self, packed: str) -> bool:
        from warcio.bufferedreaders import BufferedReader

        return packed in BufferedReader.DECOMPRESSORS

    def _page(self, data: bytes, kind: str, where: str) -> tuple[str, list[dict[str, Any]]]:
        steps: list[dict[str, Any]] = []
        header, inside = _CHARSET.search(kind.encode("latin-1", "ignore")), _CHARSET.search(data[:2048])
        label = named[1].decode("ascii") if (named := header or inside) else "utf-8"
        # A byte order mark says more; and what reads charset=utf-16 in a page byte by byte is not in it.
        if _MARKED.match(data) or (not header and label.lower().startswith("utf-16")):
            label = "utf-8"
        try:
            text, encoding = decode_page(data.removeprefix(b"\xef\xbb\xbf"), label)
            if encoding != "utf-8":
                steps.append({"step": "decode", "encoding": encoding})
        except (LookupError, UnicodeDecodeError):
            text, steps = self._decode(data, where)
        if "html" in kind:
            text = html_text(text)
            steps.append({"step": "html_text"})
        return text, steps


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
