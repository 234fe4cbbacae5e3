"""BM25 over a corpus whose documents are also the queries, and leave the index once they are used.

    score(q, d) = sum over words w of q:  idf(w) tf(w, d) (k1 + 1) / (tf(w, d) + k1 (1 - b + b |d| / mean |d|))
    idf(w)      = ln(1 + (N - n(w) + 0.5) / (n(w) + 0.5))        n(w) of N documents hold w

Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), with Lucene's idf. A word that
the query holds twice counts twice.

Why not a package: rank_bm25 scores every document for every query in Python; bm25s, which is fast and well kept, wants
the words of all documents in memory at once, holds scores of half the precision, and gives no way to take documents
out: packing asks once a document, for the best that is not used yet, and half of the work is saved if used documents
are gone.

Memory: 6 bytes for each different word of each document, 4 a document, about 100 a word of the vocabulary, and the
postings once more while they are sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError
from trainwright.data.build.minhash import words

_MOST = np.iinfo(np.uint16).max  # of one word in one document that is told apart


class BM25:
    """An inverted index: :meth:`add` texts, then ask. Documents are numbered as they were added.

    k1, b            saturation of a word's count, and how much longer documents pay
    first_words      of a text that are indexed and asked with; None: all. A text mostly begins with what it is about
    query_words      different words of a query that are asked with, those of the largest weight; None: all
    max_share        words in a larger share of the documents are left out of queries: they tell nothing and cost most
    Raises ConfigError for settings out of range.
    """

    def __init__(
        self,
        k1: float = 1.2,
        b: float = 0.75,
        first_words: int | None = 1000,
        query_words: int | None = 64,
        max_share: float = 0.2,
    ):
        if not k1 >= 0:
            raise ConfigError("should be at least 0", key="k1", value=k1)
        if not 0 <= b <= 1:
            raise ConfigError("should be between 0 and 1", key="b", value=b)
        for key, value in (("first_words", first_words), ("query_words", query_words)):
            if value is not None and value < 1:
                raise ConfigError("should be at least 1, or null for all", key=key, value=value)
        if not 0 < max_share <= 1:
            raise ConfigError("should be above 0 and at most 1", key="max_share", value=max_share)
        self.k1, self.b, self.first_words = k1, b, first_words
        self.query_words, self.max_share = query_words, max_share
        self.vocabulary: dict[str, int] = {}
        self._lengths: list[int] = []
        self._parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]] = []
        self._whole = False

    def add(self, texts: Iterable[str]) -> None:
        """Index more documents; a generator's texts are held one by one."""
        if self._whole:
            raise ValueError("the index has been asked already; make a new one for more documents")
        held: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]] = []
        vocabulary = self.vocabulary
        for text in texts:
            found = words(text)[: self.first_words]
            ids = [vocabulary.setdefault(w, len(vocabulary)) for w in found]
            terms, counts = np.unique(np.array(ids, np.int32), return_counts=True)
            doc = np.full(len(terms), len(self._lengths), np.int32)
            held.append((terms, doc, np.minimum(counts, _MOST).astype(np.uint16)))
            self._lengths.append(len(found))
            if len(held) == 512:
                self._parts.append(_joined(held))
                held = []
        if held:
            self._parts.append(_joined(held))

    def __len__(self) -> int:
        return len(self._lengths)

    def _finish(self) -> None:
        """Sort the postings by word: ``_docs[_first[w] : _first[w + 1]]`` hold word w."""
        if self._whole:
            return
        terms, docs, counts = _joined(self._parts) if self._parts else _NO_POSTINGS
        self._parts = []
        order = np.argsort(terms, kind="stable")
        self._docs, self._counts = docs[order], counts[order]
        self.frequency = np.bincount(terms, minlength=len(self.vocabulary))  # documents that hold each word
        self._first = np.concatenate([[0], np.cumsum(self.frequency)])
        n = len(self._lengths)
        self.idf = np.log1p((n - self.frequency + 0.5) / (self.frequency + 0.5))
        lengths = np.array(self._lengths, np.float64)
        mean = max(float(lengths.mean()), 1e-12) if n else 1.0
        self._norm = self.k1 * (1 - self.b + self.b * lengths / mean)
        self._whole = True

    def query(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Words that ``text`` asks with, as numbers of the vocabulary, and what each weighs (count x idf)."""
        self._finish()
        ids = [i for w in words(text)[: self.first_words] if (i := self.vocabulary.get(w)) is not None]
        terms, counts = np.unique(np.array(ids, np.int64), return_counts=True)
        common = max(self.max_share * len(self), 1.0)
        kept = self.frequency[terms] <= common
        terms, counts = terms[kept], counts[kept]
        weights = np.asarray(counts * self.idf[terms], np.float64)
        if self.query_words is not None and len(terms) > self.query_words:
            best = np.sort(np.argsort(-weights, kind="stable")[: self.query_words])
            terms, weights = terms[best], weights[best]
        return terms, weights

    def _matches(
        self, terms: NDArray[np.int64], weights: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Documents that hold a word of the query, ascending, and their scores."""
        here = [slice(self._first[t], self._first[t + 1]) for t in terms.tolist()]
        if not here:
            return np.zeros(0, np.int64), np.zeros(0)
        docs = np.concatenate([self._docs[s] for s in here])
        counts = np.concatenate([self._counts[s] for s in here]).astype(np.float64)
        parts = counts * (self.k1 + 1) / (counts + self._norm[docs])
        parts *= np.repeat(weights, [s.stop - s.start for s in here])
        if 4 * len(docs) < len(self):  # few: no array of all documents
            found, inverse = np.unique(docs, return_inverse=True)
            return found.astype(np.int64), np.asarray(np.bincount(inverse, parts), np.float64)
        scores = np.asarray(np.bincount(docs, parts, minlength=len(self)), np.float64)
        found = np.flatnonzero(np.bincount(docs, minlength=len(self)))
        return found, scores[found]

    def scores(self, text: str) -> NDArray[np.float64]:
        """Score of every document for ``text``; 0 where they share no word that is asked with."""
        out = np.zeros(len(self))
        docs, scores = self._matches(*self.query(text))
        out[docs] = scores
        return out

    def top(self, text: str, k: int, without: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """The ``k`` documents of the highest score above 0, best first and of equals the first one, but for those that
        ``without`` [documents] marks."""
        docs, scores = self._matches(*self.query(text))
        if without is not None:
            free = ~without[docs]
            docs, scores = docs[free], scores[free]
        if len(docs) > 4 * k:
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            kept = scores >= least
            docs, scores = docs[kept], scores[kept]
        return docs[np.lexsort((docs, -scores))[:k]]

    def remove(self, docs: NDArray[np.bool_]) -> None:
        """Forget the postings of marked documents. ``idf`` and mean length stay those of the whole corpus."""
        self._finish()
        kept = ~docs[self._docs]
        terms = np.repeat(np.arange(len(self._first) - 1), np.diff(self._first))[kept]
        self._docs, self._counts = self._docs[kept], self._counts[kept]
        self._first = np.concatenate([[0], np.cumsum(np.bincount(terms, minlength=len(self._first) - 1))])


_NO_POSTINGS = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint16))


def _joined(
    parts: Sequence[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]:
    terms, docs, counts = zip(*parts, strict=True)
    return np.concatenate(terms), np.concatenate(docs), np.concatenate(counts)
