"""How well a tokenizer's tokens agree with the morphemes of a segmentation: two metrics and the share of crossings.

- Morphological edit distance (mu_e, lower is better): mean over words of the Levenshtein distance between the list of
  morphemes and the list of tokens, where inserting, deleting or replacing a whole unit costs 1.
- Morphological consistency (mu_c, higher is better): over pairs of words, with S = "they share a morpheme" and
  T = "they share a token", precision P = |S and T| / |T|, recall R = |S and T| / |S|, mu_c = 2PR / (P + R).
- Crossing rate: share of the boundaries between morphemes that a token spans.

From arXiv:2502.00894, which leaves the normalisation open: mu_e is a plain mean unless ``normalize`` divides each
word's distance by its number of morphemes. All three take any tokenizer of ours and any segmentation.

Units are compared as bytes of the text, so that tokens that are part of a character count as what they are. A word is
encoded as it stands in running text, after a space, which is then taken off its first token.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from trainwright.data.tokenizers.base import Tokenizer
from trainwright.data.tokenizers.segmentation import Segmentation

# All pairs of this many words are half a million.
PAIR_WORDS = 1000


class Consistency(NamedTuple):
    f1: float  # mu_c; nan where no pair shares anything
    precision: float
    recall: float
    pairs: int


def word_tokens(tokenizer: Tokenizer, words: Sequence[str], prefix: str = " ") -> list[list[bytes]]:
    """The bytes of each token of each word, ``prefix`` not counted: the tokens of a word join to it.

    A token that is the prefix alone stays, as an empty unit: it is one that the word costs.
    Raises ValueError where a tokenizer's tokens are not the bytes of the text (it lower-cases, say).
    """
    lengths = tokenizer.token_byte_lengths()
    out = []
    for word, ids in zip(words, tokenizer.encode_batch([prefix + w for w in words]), strict=True):
        data = (prefix + word).encode()
        sizes = lengths[ids]
        missing = int(sizes.sum()) - len(data)
        if 0 < missing <= 1:  # SentencePiece style puts a space of its own in front
            data = b" " + data
        elif -len(prefix) <= missing < 0 and prefix.isspace():  # WordPiece style drops the space
            data = data[-missing:]
        elif missing:
            raise ValueError(f"the tokens of {word!r} do not cover its bytes; this tokenizer changes the text")
        skip = len(data) - len(word.encode())
        ends = np.cumsum(sizes)
        out.append([data[max(e - s, skip) : max(e, skip)] for s, e in zip(sizes.tolist(), ends.tolist(), strict=True)])
    return out


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Levenshtein distance of two lists, unit cost on whole elements."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def morphological_edit_distance(
    tokenizer: Tokenizer,
    segmentation: Segmentation,
    words: Iterable[str] | None = None,
    normalize: bool = False,
    prefix: str = " ",
) -> float:
    """mu_e over ``words`` (default: all of the segmentation); with ``normalize`` per morpheme."""
    chosen = _chosen(segmentation, words)
    total = 0.0
    for word, tokens in zip(chosen, word_tokens(tokenizer, chosen, prefix), strict=True):
        morphemes = _morphemes(segmentation, word)
        total += edit_distance(morphemes, tokens) / (len(morphemes) if normalize else 1)
    return total / len(chosen)


def morphological_consistency(
    tokenizer: Tokenizer,
    segmentation: Segmentation,
    words: Iterable[str] | None = None,
    max_words: int = PAIR_WORDS,
    seed: int = 0,
    ignore_single: bool = False,
    prefix: str = " ",
) -> Consistency:
    """mu_c over all pairs of ``words`` (default: those of the segmentation), of which at most ``max_words`` are drawn.

    ``ignore_single`` leaves out tokens of one character. Precision is 1 where no pair shares a token, and recall where
    none shares a morpheme. Raises ValueError for fewer than two words.
    """
    chosen = _chosen(segmentation, words)
    if len(chosen) > max_words:
        chosen = random.Random(seed).sample(sorted(chosen), max_words)
    if len(chosen) < 2:
        raise ValueError("consistency is of pairs: give at least two words")
    tokens = [
        {t for t in units if t and not (ignore_single and _characters(t) <= 1)}
        for units in word_tokens(tokenizer, chosen, prefix)
    ]
    return consistency([set(_morphemes(segmentation, w)) for w in chosen], tokens)


def consistency(morphemes: Sequence[set[bytes]], tokens: Sequence[set[bytes]]) -> Consistency:
    """mu_c of words given as the sets of their morphemes and of their tokens, over all pairs of words."""
    share_morpheme, share_token = _sharing(morphemes), _sharing(tokens)
    both = len(share_morpheme & share_token)
    precision = both / len(share_token) if share_token else 1.0
    recall = both / len(share_morpheme) if share_morpheme else 1.0
    if not share_token and not share_morpheme:
        f1 = math.nan
    else:
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Consistency(f1, precision, recall, len(tokens) * (len(tokens) - 1) // 2)


def crossing_rate(
    tokenizer: Tokenizer, segmentation: Segmentation, words: Iterable[str] | None = None, prefix: str = " "
) -> float:
    """Share of all boundaries inside ``words`` that lie within a token; nan where there is no boundary.

    For MorphBPE this is what ordinary BPE at inference takes back of what the training kept apart.
    """
    chosen = _chosen(segmentation, words)
    crossed = total = 0
    for word, tokens in zip(chosen, word_tokens(tokenizer, chosen, prefix), strict=True):
        cuts = set(itertools.accumulate(map(len, _morphemes(segmentation, word)[:-1])))
        total += len(cuts)
        crossed += len(cuts - set(itertools.accumulate(map(len, tokens))))
    return crossed / total if total else math.nan


def _chosen(segmentation: Segmentation, words: Iterable[str] | None) -> list[str]:
    chosen = list(dict.fromkeys(segmentation if words is None else words))
    if not chosen:
        raise ValueError("no words to measure; give at least one")
    return chosen


def _morphemes(segmentation: Segmentation, word: str) -> list[bytes]:
    return [m.encode() for m in segmentation.split(word)]


def _characters(token: bytes) -> int:
    """Characters that begin in ``token``."""
    return sum(b & 0xC0 != 0x80 for b in token)


def _sharing(units: Sequence[set[bytes]]) -> set[tuple[int, int]]:
    """Pairs of words that have a unit in common."""
    words: dict[bytes, list[int]] = defaultdict(list)
    for i, own in enumerate(units):
        for unit in own:
            words[unit].append(i)
    return {pair for having in words.values() for pair in itertools.combinations(having, 2)}
