"""MorphBPE: byte-level BPE whose merges never join two morphemes of a word while it is trained.

Training words w with counts c_w are cut into morphemes by a segmentation (words that it does not know are one
morpheme). Pairs of adjacent symbols are counted inside morphemes only, and the most frequent pair is merged until the
vocabulary is full::

    n(a, b)     = sum_w c_w * (occurrences of a b inside one morpheme of w)
    score(a, b) = n(a, b)                             hard (alpha = null)
    score(a, b) = n(a, b) + n_across(a, b) / alpha    soft; alpha = 1 is plain BPE, and alpha -> inf approaches hard

The result is an ordinary vocabulary with merges: encoding needs no segmentation, and any BPE library runs it.

Asgari et al., "MorphBPE: A Morpho-Aware Tokenizer Bridging Linguistic Complexity for Efficient LLM Training Across
Morphologies", arXiv:2502.00894. Its code is not public; this follows the paper's description. Where we choose:

- Ties go to the pair with the lower ids, as in the `tokenizers` library, so that without cuts the merges are those
  of the method ``bpe``. Lexicographic order would give other, equally frequent merges.
- The space or mark in front of a word belongs to its first morpheme, as byte-level BPE has it.
- A word of more than 1024 bytes is cut into parts of that size, so that text without spaces does not stall training.
- The soft form is not the paper's. With it a chosen pair is merged everywhere, across boundaries too.

Ordinary BPE at inference sees no boundaries: a pair learned inside one morpheme may be merged across two others.
:func:`trainwright.data.tokenizers.morph_metrics.crossing_rate` measures how often.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from trainwright.core.registry import register
from trainwright.data.tokenizers._fast import byte_alphabet
from trainwright.data.tokenizers._trained import PATTERN, ByteLevelConfig, byte_level
from trainwright.data.tokenizers.segmentation import Segmentation, load_segmentation

_LETTERS = byte_alphabet()
# A merge costs time by the length of the words that it is in; longer ones (a genome without spaces) go in parts.
MAX_BYTES = 1024
Pair = tuple[int, int]
# A word as its morphemes, each a string of byte letters.
Morphemes = tuple[str, ...]


def count_words(texts: Iterable[str], pattern: str = PATTERN) -> Counter[str]:
    """How often each piece that ``pattern`` cuts from ``texts`` occurs."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(piece for piece, _ in split.pre_tokenize_str(text))
    return counts


def byte_letters(text: str) -> str:
    """UTF-8 bytes of ``text``, each as the printable character that byte-level vocabularies write for it."""
    return "".join(_LETTERS[b] for b in text.encode())


def learn_merges(
    words: Mapping[Morphemes, int],
    tokens: Iterable[str],
    vocab_size: int,
    min_frequency: int = 2,
    alpha: float | None = None,
) -> tuple[list[str], list[tuple[str, str]]]:
    """Vocabulary and merges, in order, from ``words`` (morphemes -> count), starting with the symbols ``tokens``.

    ``alpha=None`` counts pairs inside morphemes only; a number >= 1 adds 1/alpha of those across. Merging stops at
    ``vocab_size`` tokens or where no pair scores ``min_frequency``. Pair counts are kept up to date merge by merge.
    Raises ValueError where ``tokens`` alone exceed ``vocab_size``, lack a symbol of the words, or alpha < 1.
    """
    if alpha is not None and not alpha >= 1:
        raise ValueError(f"alpha={alpha} should be at least 1 (plain BPE), or None for the hard form")
    tokens = list(tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(tokens) > vocab_size:
        raise ValueError(f"vocab_size={vocab_size} does not hold the alphabet of {len(tokens)} symbols")
    units = _units(words, hard=alpha is None)
    try:
        symbols = [[ids[letter] for letter in letters] for letters, _ in units]
    except KeyError as error:
        raise ValueError(f"the symbol {error.args[0]!r} of the words is not in the alphabet") from None
    # starts[w][i]: does a morpheme begin at symbol i? Never looked at for i = 0.
    starts = [[i in cuts for i in range(len(letters))] for letters, cuts in units]
    counts = list(units.values())

    inside: dict[Pair, int] = defaultdict(int)
    across: dict[Pair, int] = defaultdict(int)
    where: dict[Pair, set[int]] = defaultdict(set)
    for w, (word, start) in enumerate(zip(symbols, starts, strict=True)):
        for i in range(len(word) - 1):
            pair = word[i], word[i + 1]
            (across if start[i + 1] else inside)[pair] += counts[w]
            where[pair].add(w)

    def score(pair: Pair) -> float:
        found = inside.get(pair, 0)
        return found if alpha is None else found + across.get(pair, 0) / alpha

    heap = [(-score(pair), pair) for pair in where]
    heapq.heapify(heap)
    merges: dict[Pair, None] = {}
    while len(tokens) < vocab_size and heap:
        claimed, pair = heapq.heappop(heap)
        now = score(pair)
        if now != -claimed:
            # Counts only fall without an entry of their own, so this is too early, never too late.
            if now >= min_frequency:
                heapq.heappush(heap, (-now, pair))
            continue
        if now < min_frequency:
            break
        text = tokens[pair[0]] + tokens[pair[1]]
        new = ids.get(text)
        if new is None:
            new = ids[text] = len(tokens)
            tokens.append(text)
        merges[pair] = None
        grown: set[Pair] = set()
        for w in where.pop(pair):
            for other, crosses, change in _merge(symbols[w], starts[w], pair, new):
                (across if crosses else inside)[other] += change * counts[w]
                if change > 0:
                    where[other].add(w)
                    grown.add(other)
        for other in grown:
            heapq.heappush(heap, (-score(other), other))
    return tokens, [(tokens[a], tokens[b]) for a, b in merges]


def _units(words: Mapping[Morphemes, int], hard: bool) -> dict[tuple[str, tuple[int, ...]], int]:
    """``(letters, positions where a further morpheme starts)`` -> count. In the hard form morphemes are the units."""
    units: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for morphemes, count in words.items():
        if hard:
            for morpheme in morphemes:
                units[morpheme, ()] += count
        else:
            cuts, end = [], 0
            for morpheme in morphemes[:-1]:
                end += len(morpheme)
                cuts.append(end)
            units["".join(morphemes), tuple(cuts)] += count
    return dict(units)


def _merge(word: list[int], start: list[bool], pair: Pair, new: int) -> list[tuple[Pair, bool, int]]:
    """Merge ``pair`` into ``new`` in place, from left to right; the changes of pair counts: (pair, across, +-1)."""
    changes: list[tuple[Pair, bool, int]] = []
    first, second = pair
    i = -1
    while True:
        try:
            i = word.index(first, i + 1, len(word) - 1)
        except ValueError:
            break
        if word[i + 1] != second:
            continue
        changes.append((pair, start[i + 1], -1))
        if i > 0:
            changes.append(((word[i - 1], first), start[i], -1))
            changes.append(((word[i - 1], new), start[i], 1))
        if i + 2 < len(word):
            changes.append(((second, word[i + 2]), start[i + 2], -1))
            changes.append(((new, word[i + 2]), start[i + 2], 1))
        word[i : i + 2] = [new]
        del start[i + 1]
    return changes


def _bounded(morphemes: Iterable[str]) -> Iterator[str]:
    for morpheme in morphemes:
        for start in range(0, len(morpheme), MAX_BYTES):
            yield morpheme[start : start + MAX_BYTES]


def train_morph_bpe(
    texts: Iterable[str],
    segmentation: Segmentation,
    vocab_size: int,
    pattern: str = PATTERN,
    special_tokens: Iterable[str] = (),
    alpha: float | None = None,
    min_frequency: int = 2,
) -> Any:
    """A trained ``tokenizers.Tokenizer`` of at most ``vocab_size`` ids: special tokens, 256 bytes, merges.

    Raises ValueError where ``vocab_size`` does not hold the special tokens and the 256 bytes.
    """
    from tokenizers import models

    words: dict[Morphemes, int] = defaultdict(int)
    for piece, count in count_words(texts, pattern).items():
        words[tuple(_bounded(map(byte_letters, segmentation.split_pretoken(piece))))] += count
    alphabet = [*special_tokens, *sorted(_LETTERS.values())]
    tokens, merges = learn_merges(words, alphabet, vocab_size, min_frequency, alpha)
    backend = byte_level(models.BPE({token: i for i, token in enumerate(tokens)}, merges), pattern)
    backend.add_special_tokens(list(special_tokens))
    return backend


@register("tokenizer", "morph_bpe", paper="arXiv:2502.00894", seed_id="B076")
class MorphBpeConfig(ByteLevelConfig):
    """A byte-level BPE whose merges stay inside morphemes while it is trained; encoding is ordinary BPE."""

    segmentation: str = Field(
        "en", min_length=1, description="A shipped segmentation (en, tr), or a file with one word a line: happi|ness."
    )
    invalid: Literal["refuse", "skip"] = Field(
        "refuse", description="What to do with lines of the file whose pieces do not join to their word."
    )
    alpha: float | None = Field(
        None, ge=1, description="Soft form: pairs across a boundary count 1/alpha; 1 is plain BPE, null forbids them."
    )

    def train(self, texts: list[str]) -> Any:
        segmentation = load_segmentation(self.segmentation, self.invalid)
        return train_morph_bpe(texts, segmentation, self.vocab_size, self.pattern, self._special(), self.alpha)

    def _cache_key(self) -> list[Any]:
        # The file may change under the same name.
        return [*super()._cache_key(), load_segmentation(self.segmentation, self.invalid).fingerprint]
