"""The form in which texts reach a quality classifier: blank lines and spaces collapsed, lower case, no diacritics,
line breaks and tabs kept as tokens, units joined by single spaces.

    normalize_text(t)   one text in, one text out; a second time changes nothing
    units(t)            the tokens that n-grams are made of
    normalize_line(t)   units joined by spaces: a line of a fastText training file

Paper: Ultra-FineWeb, arXiv:2505.05427. Where we differ, and why: the paper splits with the subword tokenizer of
DeepSeek-V2 before joining; here words are split by rule (``split=`` takes any tokenizer), because cutting a text that
is already cut into subwords cuts it once more, and a normalizer should be idempotent. The published script lower-cases
before it decomposes; letters that decompose into capitals then stay capital, so here it is done on both sides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Literal

from trainwright.core.errors import ConfigError
from trainwright.data.build.quality.chinese import HAN, UNSPACED

Unit = Literal["auto", "word", "char"]
UNITS = ("auto", "word", "char")
MOST_HAN = 0.2  # share of Han characters from which a text is not made of words between spaces

_SPACES = re.compile(r"[^\S\n\t\r]+")
_BLANK_LINES = re.compile(r"\n(?:[ ]*\n){2,}")
_AROUND_BREAK = re.compile(r" *\n *")
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
_BREAK = re.compile("[\n\t\r]")
_BY_SPACES = re.compile(r"\\[ntr]|\w+|[^\w\s]")
_BY_SCRIPT = re.compile(rf"\\[ntr]|{UNSPACED}|(?:(?!{UNSPACED})\w)+|[^\w\s]")
_BY_CHARACTER = re.compile(r"\\[ntr]|\S")


def normalize_text(text: str) -> str:
    """Idempotent; keeps line breaks (two in a row at most) and tabs."""
    if not text.isascii():
        # Twice: a letter may decompose into a capital, whose lower case may carry a mark again.
        for _ in range(2):
            text = unicodedata.normalize("NFKD", text).lower()
            text = "".join(c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) != "Mn")
    text = _SPACES.sub(" ", text.lower())
    text = _AROUND_BREAK.sub("\n", text)
    return _BLANK_LINES.sub("\n\n", text).strip()


def units(text: str, unit: Unit = "auto") -> list[str]:
    r"""Tokens of a normalized text: words and signs, and ``\n``, ``\t``, ``\r`` for what they stand for.

    auto: a character each in scripts without spaces (Han, kana, Thai, ...), words elsewhere. word: what stands between
    spaces and signs. char: every character.
    """
    pattern = {"auto": _BY_SCRIPT, "word": _BY_SPACES, "char": _BY_CHARACTER}[unit]
    return pattern.findall(_BREAK.sub(lambda m: f" {_ESCAPES[m[0]]} ", text))


def normalize_line(text: str, unit: Unit = "auto", split: Callable[[str], list[str]] | None = None) -> str:
    """One line: the text's tokens joined by spaces. ``split`` is a tokenizer of one's own, such as a subword one."""
    text = normalize_text(text)
    if split is None:
        return " ".join(units(text, unit))
    parts = [_BREAK.sub(lambda m: f" {_ESCAPES[m[0]]} ", p) for p in split(text)]
    return " ".join(" ".join(parts).split())


def check_unit(unit: str) -> Unit:
    if unit not in UNITS:
        raise ConfigError(f"should be one of {', '.join(UNITS)}", key="unit", value=unit)
    return unit  # type: ignore[return-value]


def check_words(texts: list[str], unit: Unit) -> None:
    """Refuse words for a language without spaces between them: a sentence would become one word. ConfigError."""
    if unit != "word":
        return
    shares = [len(HAN.findall(t)) / len(t) for t in texts if t]
    han = sum(s >= MOST_HAN for s in shares)
    if shares and han >= 0.05 * len(shares):
        raise ConfigError(
            f"{han} of {len(shares)} texts are Chinese, which has no spaces between words; use unit=char or auto",
            key="unit",
            value=unit,
        )
