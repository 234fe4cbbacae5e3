"""SPLiCe: long training examples put together from documents that have to do with each other.

    C = Q = [root]                           a document drawn from those that are not used yet
    while length(C) < L:
        q = next of Q, or, where Q is empty, another root drawn
        for d in the k unused documents nearest to q, while length(C) < L:  add d to C and to Q, mark it used
    order C (as it grew, breadth first; shuffled; reversed), join it, trim it to L

Paper: Structured Packing in LLM Training Improves Long Context Utilization, arXiv:2312.17296. Trained on half and half
with ordinary packing, with attention across the documents of an example: that is what it is for, so an example is one
document for all that comes behind, and a document mask inside of it is refused.

Where it differs, and why. A neighbour whose Jaccard similarity with a document of the example is above
``max_similarity`` is passed over: copies are the nearest of all, and teach to copy. ``caps`` limit the share of
an example that comes from one source. The last document that still fits ends the example, where the paper adds all k.
``trim: return`` gives a document that does not fit back, whole, where cutting loses its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.build.documents import Document
from trainwright.data.build.minhash import MinHasher, jaccard
from trainwright.data.build.retrievers import Retriever, fingerprint
from trainwright.data.permutation import Permutation

log = logging.getLogger("trainwright")

Order = Literal["identity", "shuffle", "reverse"]
Trim = Literal["cut", "return"]
MARGIN = 8  # neighbours asked for beyond k, some of which may be copies or of a source that has had its share


class Measure(Protocol):
    """The length of texts, in tokens or what stands for them."""

    def count(self, text: str) -> int: ...

    def cut(self, text: str, length: int) -> str:
        """The beginning of ``text``, at most ``length`` long."""


class Characters:
    """Length estimated from characters: 4 a token in English text, 3 in code."""

    def __init__(self, per_token: float = 4.0):
        if not per_token > 0:
            raise ConfigError("should be above 0", key="characters_per_token", value=per_token)
        self.per_token = per_token

    def count(self, text: str) -> int:
        return -int(-len(text) // self.per_token)

    def cut(self, text: str, length: int) -> str:
        return text[: int(length * self.per_token)]


class Tokens:
    """Length by a tokenizer: ``encode(text) -> ids``, without special tokens, and ``decode(ids) -> text``."""

    def __init__(self, encode: Callable[[str], Sequence[int]], decode: Callable[[list[int]], str]):
        self.encode, self.decode = encode, decode

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def cut(self, text: str, length: int) -> str:
        return self.decode(list(self.encode(text)[:length]))


@dataclass
class Example:
    """One long example. ``documents`` are positions in the corpus, in the order of the text."""

    text: str
    documents: list[int]
    length: int  # of the text, by the measure, before trimming
    roots: int  # documents that were drawn and not found; 1 where the neighbours were enough
    cut: int = 0  # length that trimming cut off


@dataclass
class Report:
    """What happened in a run of :class:`Examples`."""

    examples: int = 0
    documents: int = 0
    roots: int = 0
    near_copies: int = 0  # neighbours that were passed over
    capped: int = 0  # neighbours that were passed over for their source
    over_cap: int = 0  # roots taken although their source had its share: there was nothing else
    cut: int = 0
    returned: int = 0
    short: int = 0  # examples below L: what was left of the corpus
    by_source: Counter[str] = field(default_factory=Counter)


class Examples:
    """The examples of a corpus, one after the other; :attr:`report` counts. Iterate once.

    documents       at random access: a list, or whatever reads them by position
    retriever       built on the same documents
    length          L, by ``measure``
    k               neighbours of each document: 1 is a chain, 2 and 3 shallow trees
    order           of an example's documents: as they were found (identity), shuffled, reversed
    trim            cut: what is beyond L is cut off and lost. return: a document that does not fit goes back to the
                    corpus, so that only one longer than L is cut. None: nothing is, and a longer document is refused
    max_similarity  Jaccard similarity by word 5-grams above which a neighbour is a copy; None: take copies
    caps            most of L that documents of a source may fill, ``{"source": 0.5}``, ``"*"`` for those not named
    separator       between documents
    lengths         of the documents by ``measure``, where they are known already; sources: likewise

    Memory: 13 bytes a document, the documents of one example, and what the retriever holds.
    Raises ConfigError for settings that do not fit, DataError for a retriever of another corpus.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        retriever: Retriever,
        length: int,
        *,
        k: int = 1,
        order: Order = "identity",
        trim: Trim | None = "cut",
        max_similarity: float | None = 0.8,
        caps: Mapping[str, float] | None = None,
        separator: str = "\n\n",
        measure: Measure | None = None,
        lengths: NDArray[np.int64] | None = None,
        sources: Sequence[str] | None = None,
        seed: int = 0,
        document_mask: bool = False,
        check: bool = True,
    ):
        check_settings(length, k, order, trim, max_similarity, caps, document_mask)
        self.documents, self.retriever, self.length, self.k = documents, retriever, length, k
        self.order, self.trim, self.max_similarity = order, trim, max_similarity
        self.caps, self.separator, self.seed = dict(caps or {}), separator, seed
        self.measure = measure or Characters()
        if check and fingerprint(documents) != retriever.fingerprint:
            raise DataError(
                "the retriever was built on other documents, or on these in another order; build it anew on this corpus"
            )
        if lengths is None:
            lengths = np.array([self.measure.count(d.text) for d in documents], np.int64)
        self.lengths = lengths
        if sources is None and caps:
            sources = [d.source for d in documents]
        self.sources = sources
        longest = int(lengths.max()) if len(lengths) else 0
        if trim is None and longest > length:
            raise ConfigError(
                f"is below the longest document ({longest}); raise it, or say with trim=cut or trim=return what to do "
                "with what is beyond",
                key="length",
                value=length,
            )
        self._gap = self.measure.count(separator) if separator else 0
        self._used = np.zeros(len(lengths), bool)
        self._roots = Permutation(len(lengths), derive(seed, "roots"))
        self._next = 0  # all before it among the roots are used, but for those that came back
        self._back: list[int] = []
        self._hasher = MinHasher()
        self.report = Report()

    def __iter__(self) -> Iterator[Example]:
        while (example := self._example()) is not None:
            r = self.report
            r.examples += 1
            r.documents += len(example.documents)
            r.roots += example.roots
            r.cut += example.cut
            r.short += example.length < self.length
            self.retriever.retire(self._used)
            yield example
        if self.report.near_copies > max(10, 0.01 * len(self.lengths)):
            log.warning(
                "splice: %s near copies were passed over as neighbours; the corpus was not deduplicated, run "
                "near_dedup before",
                f"{self.report.near_copies:,}",
            )

    def _draw(self, filled: Counter[str]) -> int | None:
        """An unused document, if there is one whose source has room, else any."""
        while self._next < len(self._used) and self._used[self._root(self._next)]:
            self._next += 1
        self._back = [doc for doc in self._back if not self._used[doc]]
        first = next(self._free(), None)
        if first is None or not self.caps or not filled or self.sources is None:
            return first
        for doc in self._free():
            if self._has_room(doc, self.sources[doc], filled):
                return doc
        self.report.over_cap += 1
        return first

    def _free(self) -> Iterator[int]:
        """Unused documents in the order of roots; those that came back first."""
        yield from self._back
        for i in range(self._next, len(self._used)):
            if not self._used[doc := self._root(i)]:
                yield doc

    def _root(self, i: int) -> int:
        return int(self._roots.at(np.array([i]))[0])

    def _has_room(self, doc: int, source: str, filled: Counter[str]) -> bool:
        cap = self.caps.get(source, self.caps.get("*"))
        return cap is None or filled[source] + int(self.lengths[doc]) <= cap * self.length

    def _example(self) -> Example | None:
        chosen: list[int] = []
        shingles: list[NDArray[np.uint32]] = []
        texts: dict[int, Document] = {}
        filled: Counter[str] = Counter()
        total = roots = 0

        def add(doc: int, document: Document, own: NDArray[np.uint32]) -> None:
            nonlocal total
            total += int(self.lengths[doc]) + (self._gap if chosen else 0)
            chosen.append(doc)
            shingles.append(own)
            texts[doc] = document
            filled[document.source] += int(self.lengths[doc])
            self._used[doc] = True

        at = 0  # of the queue, which is what is chosen and not asked for yet
        while total < self.length:
            if at == len(chosen):
                root = self._draw(filled)
                if root is None:
                    break
                roots += 1
                document = self.documents[root]
                add(root, document, self._shingles(document))
                continue
            for doc, document, own in self._near(chosen[at], filled, shingles):
                add(doc, document, own)
                if total >= self.length:
                    break
            at += 1
        return self._joined(chosen, texts, total, roots) if chosen else None

    def _near(
        self, doc: int, filled: Counter[str], held: list[NDArray[np.uint32]]
    ) -> Iterator[tuple[int, Document, NDArray[np.uint32]]]:
        """The ``k`` nearest documents that may be taken; asks for more as long as some were passed over."""
        given, seen, asked = 0, set[int](), self.k
        blocked = self._used.copy()
        while given < self.k:
            found = [int(i) for i in self.retriever.neighbours(doc, asked, blocked) if int(i) not in seen]
            for i in found[:]:
                seen.add(i)
                if blocked[i] or i == doc:
                    raise DataError(f"the retriever gave document {i}, which it was told not to")
                blocked[i] = True
                document = self.documents[i]
                if not self._has_room(i, document.source, filled):
                    self.report.capped += 1
                    continue
                own = self._shingles(document)
                if self.max_similarity is not None and any(jaccard(own, h) > self.max_similarity for h in held):
                    self.report.near_copies += 1
                    continue
                given += 1
                yield i, document, own
                if given == self.k:
                    return
            if len(found) < asked:
                return
            asked = self.k - given + MARGIN

    def _shingles(self, document: Document) -> NDArray[np.uint32]:
        if self.max_similarity is None:
            return np.zeros(0, np.uint32)
        return np.unique(self._hasher.shingles([document.text]).values)

    def _joined(self, chosen: list[int], texts: dict[int, Document], total: int, roots: int) -> Example:
        if self.order == "shuffle":
            label = derive(self.seed, "order", self.report.examples)
            chosen = [chosen[i] for i in Permutation(len(chosen), label).all().tolist()]
        elif self.order == "reverse":
            chosen = chosen[::-1]
        if self.trim == "return" and total > self.length:
            kept: list[int] = []
            at = 0
            for doc in chosen:
                more = int(self.lengths[doc]) + (self._gap if kept else 0)
                if kept and at + more > self.length:
                    self._used[doc] = False
                    self._back.append(doc)
                    self.report.returned += 1
                else:
                    kept.append(doc)
                    at += more
            chosen = kept
        for doc in chosen:
            self.report.by_source[texts[doc].source] += 1
        text = self.separator.join(texts[d].text for d in chosen)
        cut = 0
        if self.trim is not None:
            whole = sum(int(self.lengths[d]) for d in chosen) + self._gap * (len(chosen) - 1)
            if whole > self.length:
                text, cut = self.measure.cut(text, self.length), whole - self.length
        return Example(text, chosen, total, roots, cut)


def build_examples(
    documents: Sequence[Document], retriever: Retriever, length: int, **settings: Any
) -> Iterator[Example]:
    """SPLiCe's examples of ``documents``, each about ``length`` long; for the settings see :class:`Examples`."""
    return iter(Examples(documents, retriever, length, **settings))


def check_settings(
    length: int,
    k: int,
    order: str,
    trim: str | None,
    max_similarity: float | None,
    caps: Mapping[str, float] | None,
    document_mask: bool,
) -> None:
    """Raises ConfigError for what cannot be meant."""
    for key, value in (("length", length), ("k", k)):
        if value < 1:
            raise ConfigError("should be at least 1", key=key, value=value)
    if order not in ("identity", "shuffle", "reverse"):
        raise ConfigError("should be identity, shuffle or reverse", key="order", value=order)
    if trim not in ("cut", "return", None):
        raise ConfigError("should be cut, return or null", key="trim", value=trim)
    if max_similarity is not None and not 0 < max_similarity <= 1:
        raise ConfigError("should be above 0 and at most 1, or null", key="max_similarity", value=max_similarity)
    for name, cap in (caps or {}).items():
        if not 0 < cap <= 1:
            raise ConfigError("should be above 0 and at most 1", key=f"caps.{name}", value=cap)
    if document_mask:
        raise ConfigError(
            "hides the documents of an example from each other, and to see each other they were put together; train "
            "on each example as one document",
            key="document_mask",
            value=True,
        )
