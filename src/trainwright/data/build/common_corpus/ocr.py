"""How well a scanned text was read, by its characters alone.

    score = 1 - sum over words of length x oddness / sum of lengths                  in [0, 1]
    oddness of a word = min(1, signs inside + letters beside digits + case that jumps + scripts that mix + rare pairs)

Rare pairs are judged by a table of letter pairs of English (bits of surprise, from the docstrings of Python's library),
or of any language by a text of it (``reference``), for words in Latin letters; in other scripts the other four count.
OCRoscope and Common Corpus (arXiv:2506.01732) use language models and classifiers; this needs neither.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

# Bits of surprise, 9 for 9 and more: a row for each letter a to z and the word's edge, in it the letter that follows.
ENGLISH = (
    "954497594972429593325688596", "385819994393894795573989395", "396939934944992994724999894",
    "489529693995994996575999791", "484365797995539673339675791", "399945992996992993864999791",
    "599929543995856994473999991", "399909993998993996968999993", "564554599973413695239597968",
    "699909998999994999593999994", "489719593995959599396959991", "378526993993993798544989492",
    "249919994998483399695999893", "494336395976864899436699791", "755473697975426492544658993",
    "299729974993993492635999593", "998999999998999999790999996", "396518593977543895445779592",
    "596929954988985499425999691", "497939913996993894454979692", "555636695993337492339999995",
    "199909993999995999999999997", "399939921996953994599989993", "383937983997999397719999782",
    "988869895996654398439969990", "399909993999794999969999894", "343454663975443484325649899",
)  # fmt: skip
EDGE = "{"  # stands behind z
_INNER = set("'’‘-–—./@_&:")  # signs that words and addresses hold
_UNSPACED = "\u3005-\u30ff\u3400-\u9fff\uf900-\ufaff\uac00-\ud7af\u0e00-\u0eff"  # scripts that part no words
_WORD = re.compile(rf"[{_UNSPACED}]+|[^\s{_UNSPACED}\u3000-\u3004\uff00-\uff0f\uff1a-\uff20]+")
_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_NUMBER = re.compile(r"[\d.,:;/%+\-−–°'’()]+(?:st|nd|rd|th|er|e|s|km|mm|cm|kg|m|g|h|am|pm)?", re.I)


class Letters:
    """Surprise of letter pairs, in bits, 0 to 9."""

    def __init__(self, rows: tuple[str, ...] = ENGLISH):
        self.bits = {a + b: int(rows[i][j]) for i, a in enumerate(_alphabet()) for j, b in enumerate(_alphabet())}

    @classmethod
    def of(cls, text: str) -> Letters:
        """Of a text of the language. Raises DataError where it is too short to say anything."""
        counts: Counter[str] = Counter()
        for word in re.findall(r"[^\W\d_]+", _folded(text)):
            if word.isascii():
                edged = f"{EDGE}{word}{EDGE}"
                counts.update(edged[i : i + 2] for i in range(len(edged) - 1))
        if counts.total() < 20_000:
            raise DataError(f"a reference of {counts.total()} pairs of letters is too short; give at least 20,000")
        rows = []
        for a in _alphabet():
            whole = sum(counts[a + b] for b in _alphabet()) + 2.7
            rows.append("".join(str(min(9, int(-math.log2((counts[a + b] + 0.1) / whole)))) for b in _alphabet()))
        return cls(tuple(rows))

    def oddness(self, word: str) -> float:
        """0 for an ordinary word in a to z, 1 for one that cannot be."""
        edged = f"{EDGE}{word}{EDGE}"
        bits = [self.bits[edged[i : i + 2]] for i in range(len(edged) - 1)]
        rare = sum(b >= 8 for b in bits) * 0.35
        return min(1.0, rare + max(0.0, (sum(bits) / len(bits) - 4.2) / 3))


def _alphabet() -> str:
    return "abcdefghijklmnopqrstuvwxyz" + EDGE


@lru_cache(4096)
def _fold(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter)
    return {"ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "ı": "i", "đ": "d"}.get(letter, plain[:1])


def _folded(text: str) -> str:
    """Lower case without accents: é is judged as e."""
    text = text.lower()
    return text if text.isascii() else "".join(c if c.isascii() else _fold(c) for c in text)


@lru_cache(4096)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").split(" ")[0]


class OcrScorer:
    """``scorer(text)`` in [0, 1]; 1 for a text without a word, of which nothing can be said."""

    def __init__(self, letters: Letters | None = None):
        self.letters = letters or Letters()

    def __call__(self, text: str) -> float:
        odd = total = 0.0
        end, after_unspaced = -1, False
        for match in _WORD.finditer(text):
            word, unspaced = match[0], _IS_UNSPACED.match(match[0]) is not None
            weight, oddness = float(len(word)), self.word(word)
            # A letter or sign amid a script without spaces is what a broken word is elsewhere; numbers are not.
            glued = match.start() == end and after_unspaced != unspaced and after_unspaced
            if glued and len(word) <= 2 and not word.isdigit():
                weight, oddness = 5.0 * weight, max(oddness, 0.8)
            end, after_unspaced = match.end(), unspaced
            total += weight
            odd += weight * oddness
        return 1.0 - odd / total if total else 1.0

    def word(self, word: str) -> float:
        core = word.strip("\"'“”„«»‘’`()[]{}<>.,;:!?…-–—*_/|=&§†")
        if not core:
            return 0.2 if len(word) < 4 else 0.0  # a lone sign; longer ones are rules and ellipses
        outside = len(word) - len(core)
        out = 0.25 * max(0, outside - 3)
        if _NUMBER.fullmatch(core):
            return min(1.0, out)
        letters = [c for c in core if c.isalpha()]
        digits = sum(c.isdigit() for c in core)
        if not letters:
            return 0.6
        inner = sum(not (c.isalnum() or c in _INNER or unicodedata.category(c)[0] == "M") for c in core)
        out += inner * 0.7
        if digits:
            out += 0.5
        jumps = sum(core[i].islower() and core[i + 1].isupper() for i in range(len(core) - 1))
        upper = sum(c.isupper() for c in letters)
        if jumps or (1 < upper < len(letters) and len(letters) > 2 and not core.istitle()):
            out += 0.4
        scripts = {_script(c) for c in letters if not c.isascii()} | (
            {"LATIN"} if any(map(str.isascii, letters)) else set()
        )
        if len(scripts - {"MODIFIER", "FEMININE", "MASCULINE", "MICRO"}) > 1 and not scripts <= {
            "HIRAGANA",
            "KATAKANA",
            "CJK",
            "KATAKANA-HIRAGANA",
        }:
            out += 0.8
        if scripts == {"LATIN"}:
            for part in re.findall(r"[a-z]+", _folded(core)):
                if len(part) == 1:
                    out += 0.0 if part in "aioyes" or len(core) > 1 else 0.3
                elif not (len(part) < 6 and core.isupper()):  # IBM and DNA are no words
                    out += self.letters.oddness(part) * len(part) / len(core)
        return min(1.0, out)


class OcrQuality(DocumentStage):
    """Drop scanned texts that were read badly; the score becomes the metadata ``ocr_score``.

    least: of the score. By paragraph where ``segments``: paragraphs below it are left out, and a document that would
    keep less than ``least_kept`` of its characters goes. reference: a file with text of the language, else English.
    """

    name = "ocr_quality"

    def __init__(
        self, least: float = 0.8, segments: bool = False, least_kept: float = 0.5, reference: str | Path | None = None
    ):
        super().__init__()
        for key, value in (("least", least), ("least_kept", least_kept)):
            if not 0 <= value <= 1:
                raise ConfigError("should be between 0 and 1", key=key, value=value)
        letters = None
        if reference is not None:
            try:
                letters = Letters.of(Path(reference).read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot be read ({error})", key="reference", value=str(reference)) from None
        self.least, self.segments, self.least_kept = least, segments, least_kept
        self.scorer = OcrScorer(letters)

    def apply(self, document: Document) -> Document | Drop:
        text = document.text
        if self.segments:
            parts = re.split(r"(\n\s*\n)", text)
            kept = [p for i, p in enumerate(parts) if i % 2 == 0 and self.scorer(p) >= self.least]
            whole = "\n\n".join(kept)
            left_out = (len(parts) + 1) // 2 - len(kept)
            if left_out:
                self.statistics.counts["segments left out"] += left_out
                if not whole.strip() or len(whole) < self.least_kept * len(text):
                    return Drop("badly read", f"{left_out} of {(len(parts) + 1) // 2} segments")
                document = document.changed(whole, self.name, segments=left_out)
        score = round(self.scorer(document.text), 4)
        if score < self.least:
            return Drop("badly read", f"score {score:.2f}")
        return document.with_metadata(ocr_score=score)


def add_noise(text: str, share: float, rng: Any) -> str:
    """``text`` with about ``share`` of its characters replaced at random, as tests and experiments want it."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:'!|/\\()[]{}<>^~*#%&$ "
    return "".join(rng.choice(letters) if rng.random() < share else c for c in text)
