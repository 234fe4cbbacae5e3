"""Which documents are held out for validation: by a hash of the document's id, the same on every machine."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import PrivateAttr

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.sources.base import Document, SourceConfig, Split


def hash_fraction(doc_id: str) -> float:
    """A number in [0, 1) that depends on ``doc_id`` alone, uniform over ids."""
    # 53 bits are what a float holds; more would round up to 1.0 now and then.
    return (
        int.from_bytes(hashlib.blake2b(doc_id.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 11
    ) / 2**53


def split_tail(text: str, wanted: int) -> tuple[str, str]:
    """``text`` cut in two, the tail about ``wanted`` UTF-8 bytes long, at a line end where there is one.

    Both parts hold more than white space, or the tail is empty.
    """
    data = text.encode()
    at = max(len(data) - max(wanted, 1), 0)
    cuts = [data.find(b"\n", at) + 1, data.rfind(b"\n", 0, at) + 1, _boundary(data, at)]
    for cut in cuts:
        if 0 < cut < len(data):
            head, tail = data[:cut].decode(), data[cut:].decode()
            if head.strip() and tail.strip():
                return head, tail
    return text, ""


def _boundary(data: bytes, at: int) -> int:
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


@dataclass(frozen=True)
class _Tail:
    """The hold-out of a corpus that is too small for hashing: up to ``size`` bytes from the end of one document."""

    doc_id: str
    size: int


class SplitSource(SourceConfig):
    """A source whose validation documents are those with ``hash_fraction(id) < validation_fraction``.

    A corpus so small that this leaves a split empty holds out the end of the document with the lowest hash instead,
    ``validation_fraction`` of the corpus long, cut at a line end (or that whole document where it is shorter).
    Documents that hold only white space are skipped and counted in :attr:`empty_documents`.
    """

    not_content: ClassVar[frozenset[str]] = frozenset()  # fields that do not change the documents
    _empty: int = PrivateAttr(0)
    _bad_rows: int = PrivateAttr(0)

    @property
    def empty_documents(self) -> int:
        """Empty documents skipped by the last pass, over both splits."""
        return self._empty

    @property
    def bad_rows(self) -> int:
        """Unusable rows skipped by the last pass (``skip_bad_rows``)."""
        return self._bad_rows

    @property
    def label(self) -> str:
        """What messages and folders call this source."""
        return self.name

    def _split_key(self, doc: Document) -> str:
        """What decides on which side a document falls; documents that share it fall together."""
        return doc.id

    def _has_validation(self) -> bool:
        """Whether the validation documents are given explicitly."""
        return False

    @abstractmethod
    def _stream(self, split: Split | None) -> Iterator[Document]:
        """Every document in a fixed order; ``split`` selects where validation is given explicitly."""

    def _filled(self, split: Split | None) -> Iterator[Document]:
        self._empty = self._bad_rows = 0
        for doc in self._stream(split):
            if not doc.text or doc.text.isspace():
                self._empty += 1
            else:
                yield doc

    def _no_documents(self) -> DataError:
        detail = f" ({self._empty} empty ones skipped)" if self._empty else ""
        return DataError(f"source {self.label}: holds no text{detail}; point path at files that do")

    def documents(self, split: Split, validation_fraction: float) -> Iterator[Document]:
        if not 0 <= validation_fraction < 1:
            raise ConfigError("should be at least 0 and below 1", key="validation_fraction", value=validation_fraction)
        if self._has_validation():
            yield from self._whole(split)
        elif validation_fraction == 0:
            if split == "train":
                yield from self._whole(None)
        else:
            yield from self._by_hash(split, validation_fraction)

    def _whole(self, split: Split | None) -> Iterator[Document]:
        found = False
        for doc in self._filled(split):
            found = True
            yield doc
        if not found:
            raise self._no_documents()

    def _by_hash(self, split: Split, fraction: float) -> Iterator[Document]:
        tail = self._plan(fraction)
        for doc in self._filled(None):
            if tail is None:
                if (hash_fraction(self._split_key(doc)) < fraction) == (split == "validation"):
                    yield doc
            elif self._split_key(doc) != tail.doc_id:
                if split == "train":
                    yield doc
            elif len(doc.text.encode()) <= tail.size:
                if split == "validation":
                    yield doc
            else:
                head, end = split_tail(doc.text, tail.size)
                if split == "train":
                    yield Document(head, doc.id, doc.meta)
                elif end:
                    yield Document(end, f"{doc.id}#tail", doc.meta)

    def _plan(self, fraction: float) -> _Tail | None:
        """None where hashing fills both splits; that is known after some ``1 / fraction`` documents."""
        sides: set[bool] = set()
        lowest: tuple[float, str] | None = None
        total = 0
        for doc in self._filled(None):
            key = self._split_key(doc)
            value = hash_fraction(key)
            sides.add(value < fraction)
            if len(sides) == 2:
                return None
            lowest = min(lowest or (value, key), (value, key))
            total += len(doc.text.encode())
        if lowest is None:
            raise self._no_documents()
        return _Tail(lowest[1], max(int(total * fraction), 1))
