"""MinHash signatures of many texts at once: an estimate of how much two texts have in common, 4 bytes a permutation.

    words(t)   = lower-case words of the NFC text, without punctuation; a word a character in scripts without spaces
    S(t)       = { hash(n words in a row) }                      a set of 32-bit shingles, or of n characters in a row
    sig_p(t)   = min over x in S(t) of (a_p x + b_p) mod 2^32    p = 1..P, a_p odd
    J(s, t)    = |S(s) & S(t)| / |S(s) | S(t)|  ~  mean_p [sig_p(s) = sig_p(t)]
    P(a band of r rows agrees among b) = 1 - (1 - J^r)^b

Source: Broder, On the resemblance and containment of documents (1997); SlimPajama-DC, arXiv:2309.10818.

Where we differ from the paper's code, and why: shingles are of words and not of characters, because character n-grams
are shared by unrelated texts of one language and tie them together; n is 5 and not 13, since one changed word alters n
shingles; the bands are chosen for a stated hit rate at the threshold, where the usual choice (9 bands of 13 rows) finds
40% of the pairs at the threshold: what comes in too much is checked pair by pair later.
a_p x + b_p modulo 2^32 on shingles that are hashes already is a random order for each p, at two cheap instructions.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError

Unit = Literal["word", "char"]
WORDS = 1 << 20  # hashes of words that are remembered; a cache, so its size changes only speed
BLOCK = 1 << 15  # shingles worked on at once; three such arrays of 4 bytes stay in a core's cache
_WORD = re.compile(r"\w+")
# Scripts written without spaces: kana, Han, Thai, Lao, Khmer, Burmese.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_WORD_OR_SIGN = re.compile(_UNSPACED.pattern + rf"|(?:(?!{_UNSPACED.pattern})\w)+")
_PADDING = np.uint64(0x9E3779B97F4A7C15)  # stands for the words that a text shorter than n lacks


class Shingles(NamedTuple):
    """Shingles of several texts, one text's after the other's."""

    values: NDArray[np.uint32]  # [S]
    starts: NDArray[np.int64]  # [texts + 1]; an empty stretch is a text without any word
    short: int  # texts with fewer than n words, which count as one shingle each

    def of(self, i: int) -> NDArray[np.uint32]:
        return self.values[self.starts[i] : self.starts[i + 1]]


class _WordHashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= WORDS:
            self.clear()
        value = self[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        return value


def words(text: str) -> list[str]:
    """The words that two copies of a text share however they are set: lower case, no punctuation, any white space."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        if _UNSPACED.search(text):
            return _WORD_OR_SIGN.findall(text.lower())
    return _WORD.findall(text.lower())


class MinHasher:
    """Shingles and signatures of texts; two of them with the same settings agree on every machine.

    Raises ConfigError for counts below 1 and an unknown ``unit``.
    """

    def __init__(self, permutations: int = 128, ngram: int = 5, unit: Unit = "word", seed: int = 0):
        for key, value in (("permutations", permutations), ("ngram", ngram)):
            if value < 1:
                raise ConfigError("should be at least 1", key=key, value=value)
        if unit not in ("word", "char"):
            raise ConfigError("should be word or char", key="unit", value=unit)
        self.permutations, self.ngram, self.unit, self.seed = permutations, ngram, unit, seed
        rng = np.random.Generator(np.random.PCG64(seed))
        self._a = rng.integers(0, 1 << 32, permutations, dtype=np.uint32) | np.uint32(1)
        self._b = rng.integers(0, 1 << 32, permutations, dtype=np.uint32)
        self._factors = rng.integers(0, 1 << 63, ngram, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._hashes = _WordHashes()

    def __reduce__(self) -> tuple[type[MinHasher], tuple[int, int, Unit, int]]:
        return type(self), (self.permutations, self.ngram, self.unit, self.seed)

    def shingles(self, texts: Sequence[str]) -> Shingles:
        """The shingles of each text, repeats included."""
        n = self.ngram
        parts: list[NDArray[np.uint64]] = []
        counts = np.zeros(len(texts), np.int64)  # units of each text, padded to n where it has some but fewer
        short = 0
        for i, text in enumerate(texts):
            units = self._units(text)
            if len(units) == 0:
                continue
            if len(units) < n:
                short += 1
                units = np.concatenate((units, np.full(n - len(units), _PADDING)))
            parts.append(units)
            counts[i] = len(units)
        sizes = np.maximum(counts - (n - 1), 0)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        if not parts:
            return Shingles(np.zeros(0, np.uint32), starts, short)
        units = np.concatenate(parts)
        total = len(units) - n + 1
        mixed = units[:total] * self._factors[0]  # [units - n + 1], sums modulo 2^64
        for j in range(1, n):
            mixed += units[j : j + total] * self._factors[j]
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        values = (mixed >> np.uint64(32)).astype(np.uint32)
        if n > 1:  # n-grams that reach into the next text are not anybody's
            inside = np.ones(total, bool)
            ends = np.cumsum(counts[counts > 0])[:-1]
            for j in range(1, n):
                inside[ends - j] = False
            values = values[inside]
        return Shingles(values, starts, short)

    def _units(self, text: str) -> NDArray[np.uint64]:
        found = words(text)
        if self.unit == "char":
            joined = " ".join(found).encode("utf-32-le", "surrogatepass")
            points = np.frombuffer(joined, np.uint32).astype(np.uint64)
            return (points + np.uint64(1)) * np.uint64(0x9FB21C651E98DF25)
        if len(found) < 2:
            return np.array([self._hashes[w] for w in found], np.uint64)
        return np.array(operator.itemgetter(*found)(self._hashes), np.uint64)

    def signatures(self, shingles: Shingles) -> NDArray[np.uint32]:
        """[texts, permutations]; rows of texts without any word are all 2^32 - 1."""
        starts = shingles.starts
        out = np.full((len(starts) - 1, self.permutations), 0xFFFFFFFF, np.uint32)
        rows = np.flatnonzero(np.diff(starts))
        at = 0
        while at < len(rows):
            first = starts[rows[at]]
            end = max(at + 1, int(np.searchsorted(starts[rows + 1], first + BLOCK, side="right")))
            block = rows[at:end]
            out[block] = self._signatures(
                shingles.values[first : starts[block[-1] + 1]], (starts[block] - first).astype(np.intp)
            )
            at = end
        return out

    def _signatures(self, values: NDArray[np.uint32], starts: NDArray[np.intp]) -> NDArray[np.uint32]:
        permuted = np.empty_like(values)
        lowest = np.empty((self.permutations, len(starts)), np.uint32)
        for p in range(self.permutations):
            np.multiply(values, self._a[p], out=permuted)
            permuted += self._b[p]
            np.minimum.reduceat(permuted, starts, out=lowest[p])
        return np.ascontiguousarray(lowest.T)


def hit_rate(similarity: float, bands: int, rows: int) -> float:
    """Probability that two texts of this Jaccard similarity agree in a whole band."""
    return 1.0 - (1.0 - similarity**rows) ** bands


def choose_bands(threshold: float, permutations: int, least_hit_rate: float = 0.9) -> tuple[int, int]:
    """Bands and rows: the most rows, thus the fewest false candidates, that still find ``least_hit_rate`` of the pairs
    at ``threshold``."""
    for rows in range(permutations, 0, -1):
        bands = permutations // rows
        if hit_rate(threshold, bands, rows) >= least_hit_rate:
            return bands, rows
    return permutations, 1


def check_bands(bands: int, rows: int, permutations: int) -> None:
    if bands < 1 or rows < 1:
        raise ConfigError(f"bands and rows should be at least 1, got {bands} and {rows}", key="bands")
    if bands * rows > permutations:
        raise ConfigError(
            f"{bands} bands of {rows} rows need {bands * rows} permutations; there are {permutations}: raise "
            f"permutations, or take fewer bands or rows",
            key="bands",
            value=bands,
        )


def band_keys(signatures: NDArray[np.uint32], bands: int, rows: int) -> NDArray[np.uint64]:
    """[texts, bands]: one 64-bit number for the rows of each band, equal where all of them are."""
    parts = signatures[:, : bands * rows].reshape(-1, bands, rows)
    keys = np.zeros(parts.shape[:2], np.uint64)
    for r in range(rows):
        keys ^= parts[:, :, r]
        keys *= np.uint64(0x9FB21C651E98DF25)
        keys ^= keys >> np.uint64(29)
    return keys


def jaccard(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> float:
    """Exact Jaccard similarity of two sets, each given sorted and without repeats."""
    if not len(a) or not len(b):
        return 0.0
    both = np.concatenate((a, b))
    both.sort()
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(both) - common)
