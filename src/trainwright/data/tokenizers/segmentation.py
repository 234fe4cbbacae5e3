"""Segmentations: words with the pieces (morphemes) that they consist of, from a file or shipped.

A file holds one word a line, in any of these forms, which may be mixed; ``#`` opens a comment line::

    happi|ness
    happiness<TAB>happi|ness
    happiness<TAB>happi ness
    happiness<TAB>happi @@ness<TAB>100        (SIGMORPHON: further columns are ignored)
    12 happi + ness                           (Morfessor: a count in front is ignored)

Pieces must join to the word as it is written: ``happi|ness``, not the dictionary forms ``happy|ness``. Languages whose
roots and patterns interleave (Arabic, Hebrew) need such a surface segmentation too.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from trainwright.core.errors import ConfigError, DataError

SHIPPED_FOLDER = Path(__file__).parent / "segmentations"
_SEPARATOR = re.compile(r"\s*\|\s*|\s+\+\s+|\s+@@|\s+")
_COUNT = re.compile(r"^\d+\s+(?=\S+\s+\+\s)")
# Of a file with errors a person wants to see some, not thousands.
_SHOWN = 3


class Segmentation(Mapping[str, tuple[str, ...]]):
    """Word -> its pieces. Raises DataError where it is empty, or pieces do not join to their word.

    Words are looked up as written, then in lower case: ``Walking`` is cut as ``walking``. Casing that changes a
    word's length (Turkish dotted capital I) finds nothing.
    """

    def __init__(self, words: Mapping[str, Iterable[str]], name: str = "segmentation"):
        self.name = name
        self._words = {word: tuple(pieces) for word, pieces in words.items()}
        if not self._words:
            raise DataError(f"{name}: holds no word; a segmentation needs at least one line such as happi|ness")
        for word, pieces in self._words.items():
            problem = mismatch(word, pieces)
            if problem:
                raise DataError(f"{name}: {problem}")

    def __getitem__(self, word: str) -> tuple[str, ...]:
        return self._words[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __len__(self) -> int:
        return len(self._words)

    def split(self, word: str) -> list[str]:
        """The pieces of ``word`` as it is written; the whole word where it is not known."""
        pieces = self._words.get(word)
        if pieces is None:
            lower = word.lower()
            pieces = self._words.get(lower) if len(lower) == len(word) else None
        if pieces is None or len(pieces) == 1:
            return [word]
        found, start = [], 0
        for piece in pieces:
            found.append(word[start : start + len(piece)])
            start += len(piece)
        return found

    def split_pretoken(self, text: str) -> list[str]:
        """As :meth:`split` for a word with its space or punctuation: the marks stay with the outer pieces."""
        start, end = 0, len(text)
        while start < end and not text[start].isalnum():
            start += 1
        while end > start and not text[end - 1].isalnum():
            end -= 1
        if start == end:
            return [text]
        pieces = self.split(text[start:end])
        pieces[0] = text[:start] + pieces[0]
        pieces[-1] += text[end:]
        return pieces

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for word in sorted(self._words):
            digest.update("\0".join((word, *self._words[word], "\n")).encode())
        return digest.hexdigest()


def mismatch(word: str, pieces: tuple[str, ...]) -> str | None:
    """What is wrong with ``pieces`` as those of ``word``, or None."""
    if not word or not all(pieces):
        return f"{word!r} has an empty piece"
    if "".join(pieces) != word:
        return (
            f"the pieces {'|'.join(pieces)} do not join to {word!r}; give the surface form (happi|ness, not happy|ness)"
        )
    return None


def read_segmentation(path: str | Path, invalid: Literal["refuse", "skip"] = "refuse") -> Segmentation:
    """The segmentation of a UTF-8 file, see the module's text for its forms.

    A line whose pieces do not join to its word, or a word that comes twice with different pieces, raises DataError
    with the line; with ``invalid="skip"`` such lines are left out (of a repeated word the first stays) and a warning
    counts them and shows some. More than half of the lines wrong is always an error: the file is of another kind.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"segmentation {path}: cannot be read ({error})") from error
    words: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    rows = 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        rows += 1
        word, pieces = _parse(line)
        problem = mismatch(word, pieces)
        if problem is None and words.setdefault(word, pieces) != pieces:
            problem = f"{word!r} has two segmentations, {'|'.join(words[word])} and {'|'.join(pieces)}"
        if problem:
            problems.append(f"line {number}: {problem}")
            if invalid == "refuse":
                raise DataError(f"segmentation {path}: {problems[0]}; mend it or skip such lines (invalid='skip')")
    if 2 * len(problems) > rows:
        raise DataError(
            f"segmentation {path}: {len(problems)} of {rows} lines are wrong; {'; '.join(problems[:_SHOWN])}"
        )
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        warnings.warn(f"segmentation {path}: {len(problems)} of {rows} lines skipped: {shown}", stacklevel=2)
    return Segmentation(words, f"segmentation {path}")


def _parse(line: str) -> tuple[str, tuple[str, ...]]:
    fields = [f.strip() for f in line.split("\t")]
    if len(fields) > 1:
        return fields[0], tuple(_SEPARATOR.split(fields[1]))
    pieces = tuple(_SEPARATOR.split(_COUNT.sub("", line)))
    return "".join(pieces), pieces


def shipped_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED_FOLDER.glob("*.txt"))


def load_segmentation(name: str, invalid: Literal["refuse", "skip"] = "refuse") -> Segmentation:
    """A shipped segmentation by its language (``en``, ``tr``), or that of a file."""
    if name in shipped_names():
        return read_segmentation(SHIPPED_FOLDER / f"{name}.txt")
    if not Path(name).expanduser().is_file():
        raise ConfigError(
            f"is neither a shipped segmentation ({', '.join(shipped_names())}) nor a file",
            key="segmentation",
            value=name,
        )
    return read_segmentation(name, invalid)
