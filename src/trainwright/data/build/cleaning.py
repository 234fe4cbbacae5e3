"""Cleaning stages: Unicode, boilerplate lines, length, language. Each judges a document by itself, but for repeated
lines."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import xxhash

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop, Statistics
from trainwright.data.sources._files import need

# Control characters but tab and newline; zero-width marks that only a renderer needs; the byte order mark; half pairs.
# The joiners U+200C and U+200D stay: Persian, the scripts of India and emoji mean something by them.
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufff9-\ufffb\ud800-\udfff]")
_BREAKS = re.compile("\r\n|[\r\x85\u2028\u2029]")
# How UTF-8 read as Windows-1252 or Latin-1 looks: a lead byte as a letter, then continuation bytes.
_MOJIBAKE = re.compile(
    "[\u00c2-\u00c3][\u0080-\u00bf\u0152-\u0192]|\u00e2[\u0080-\u20ac]|[\u00d0\u00d1][\u0080-\u00bf]"
)


class NormalizeUnicode(DocumentStage):
    """One form of Unicode, one kind of line break, nothing unseen; with ``mojibake`` UTF-8 that was read as something
    else is put right (package ftfy, extra ``data``).

    form: NFC (SlimPajama's; keeps meaning) or NFKC, None to leave characters as they are.
    """

    name = "normalize_unicode"

    def __init__(self, form: str | None = "NFC", mojibake: bool = True):
        if form not in ("NFC", "NFKC", None):
            raise ConfigError("should be NFC, NFKC or null", key="form", value=form)
        if mojibake:
            try:
                import ftfy  # noqa: F401
            except ModuleNotFoundError:
                raise need("ftfy", "data") from None
        super().__init__()
        self.form, self.mojibake = form, mojibake

    def apply(self, document: Document) -> Document | Drop:
        text = document.text
        if "\r" in text or not text.isascii():
            text = _BREAKS.sub("\n", text)
        if self.mojibake and not text.isascii() and _MOJIBAKE.search(text):
            import ftfy

            fixed = ftfy.fix_encoding(text)
            if fixed != text:
                self.statistics.counts["mojibake mended"] += 1
            text = fixed
        text = _UNSEEN.sub("", text)
        if self.form is not None and not text.isascii():
            text = unicodedata.normalize(self.form, text)  # type: ignore[arg-type]
        if text == document.text:
            return document
        if not text.strip():
            return Drop("nothing left")
        return document.changed(text, self.name, form=self.form)


# What pages say to people and not about their subject. Whole lines only, so that prose which mentions these stays.
_BOILERPLATE = re.compile(
    r"""^\W*(?:
      (?:we|this\s(?:web)?site)\suses?\scookies.*
    | (?:accept|reject|manage)\s(?:all\s)?cookies.*
    | cookie\s(?:policy|settings).*
    | (?:please\s)?(?:enable|turn\son)\sjavascript.*
    | javascript\s(?:is|must\sbe|seems\sto\sbe)\s(?:disabled|enabled|required).*
    | all\srights\sreserved.* | copyright\s.*all\srights\sreserved | ©.*
    | (?:privacy\spolicy|terms\s(?:of\s(?:use|service)|and\sconditions)).{0,40}
    | (?:share|tweet|pin|follow\sus|like\sus)(?:\s(?:this|on|it|via)\b.{0,60})?
    | (?:sign|log)\s?(?:in|up|out)(?:\s(?:to|with|here|now|or)\b.{0,40})?
    | subscribe(?:\s(?:to|now|here|for)\b.{0,60})?
    | (?:read|show|load|see|view)\smore(?:\s.{0,30})?
    | (?:click|tap)\shere.{0,40}
    | (?:skip|back)\sto\s(?:main|content|top|the\stop|navigation|home|search)\b.{0,30}
    | (?:previous|next)(?:\s(?:post|page|article)\b.{0,60})?
    | leave\sa\s(?:reply|comment).*
    | (?:\d+\s)?(?:comments?|shares?|likes?|views?)
    | home | menu | search | advertisement | print(?:\sthis\spage)? | loading | please\swait
    | posted\s(?:by|on|in)\s.{0,80} | filed\sunder\W.{0,80} | tags?\s?:.{0,120}
    )\W*$""",
    re.I | re.X,
)
_LOREM = re.compile(r"lorem ipsum dolor sit amet", re.I)


class BoilerplateLines(DocumentStage):
    """Leave out lines that web pages carry beside their text: cookie notices, menus, share buttons.

    patterns: further regular expressions for whole lines. least_kept: a document that would keep less of its
    characters is dropped as a whole.
    """

    name = "boilerplate_lines"

    def __init__(self, patterns: Sequence[str] = (), least_kept: float = 0.3):
        super().__init__()
        if not 0 <= least_kept <= 1:
            raise ConfigError("should be between 0 and 1", key="least_kept", value=least_kept)
        try:
            self._own = re.compile("|".join(f"(?:{p})" for p in patterns), re.I) if patterns else None
        except re.error as error:
            raise ConfigError(f"is no regular expression ({error})", key="patterns", value=list(patterns)) from None
        self.least_kept = least_kept

    def apply(self, document: Document) -> Document | Drop:
        if _LOREM.search(document.text):
            return Drop("lorem ipsum")
        lines = document.text.split("\n")
        kept = [line for line in lines if not self._is_boilerplate(line)]
        if len(kept) == len(lines):
            return document
        self.statistics.counts["lines left out"] += len(lines) - len(kept)
        text = "\n".join(kept).strip("\n")
        if not text.strip() or len(text) < self.least_kept * len(document.text):
            return Drop("mostly boilerplate", f"{len(lines) - len(kept)} of {len(lines)} lines")
        return document.changed(text, self.name, lines=len(lines) - len(kept))

    def _is_boilerplate(self, line: str) -> bool:
        line = line.strip()
        if not line or len(line) > 200:
            return False
        return bool(_BOILERPLATE.match(line)) or (self._own is not None and bool(self._own.fullmatch(line)))


class RepeatedLines:
    """Leave out lines that the corpus has had ``most`` times before: what templates print on every page.

    Serial, since it must see the documents in their order. Counts are kept in a count-min sketch (Cormode and
    Muthukrishnan 2005) of 4 x ``width`` numbers, so memory does not grow; a line is never counted too low, and with
    fewer lines than ``width`` hardly ever too high. by_source: count within each source.
    """

    name = "repeated_lines"

    def __init__(self, most: int = 6, least_characters: int = 20, width: int = 1 << 22, by_source: bool = True):
        for key, value in (("most", most), ("width", width)):
            if value < 1:
                raise ConfigError("should be at least 1", key=key, value=value)
        self.most, self.least_characters, self.by_source = most, least_characters, by_source
        self._width = width
        self.statistics = Statistics(self.name)

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        sketch = np.zeros((4, self._width), np.uint32)
        rows = np.arange(4)
        for document in documents:
            self.statistics.see(document.text)
            kept: list[str] = []
            lines = document.text.split("\n")
            salt = document.source if self.by_source else ""
            for line in lines:
                if len(line.strip()) < self.least_characters:
                    kept.append(line)
                    continue
                h = xxhash.xxh3_128_intdigest(f"{salt}\0{line.strip()}".encode("utf-8", "surrogatepass"))
                places = [(h >> (32 * r) & 0xFFFFFFFF) % self._width for r in range(4)]
                cells = sketch[rows, places]
                seen = int(cells.min())
                sketch[rows, places] = np.maximum(cells, np.uint32(seen + 1))
                if seen < self.most:
                    kept.append(line)
            text = "\n".join(kept)
            if len(kept) == len(lines):
                self.statistics.keep(document)
                yield document
                continue
            self.statistics.counts["lines left out"] += len(lines) - len(kept)
            if not text.strip():
                self.statistics.drop(document, Drop("only repeated lines"))
                continue
            before = document.text
            document = document.changed(text.strip("\n"), self.name, lines=len(lines) - len(kept))
            self.statistics.keep(document, before)
            yield document


_LEFT_BLANK = str.maketrans("", "", string.punctuation + string.whitespace)


class Lengths(DocumentStage):
    """Drop short documents, by characters without punctuation and white space (SlimPajama: 200), and long ones, by
    characters in all."""

    name = "lengths"

    def __init__(self, least: int = 200, most: int | None = None):
        super().__init__()
        if least < 0:
            raise ConfigError("should be at least 0", key="least", value=least)
        if most is not None and most < max(least, 1):
            raise ConfigError(f"should be at least {max(least, 1)}", key="most", value=most)
        self.least, self.most = least, most

    def apply(self, document: Document) -> Document | Drop:
        if self.most is not None and len(document.text) > self.most:
            return Drop("too long", f"{len(document.text)} characters")
        found = _letters(document.text)
        return document if found >= self.least else Drop("too short", f"{found} characters")


def _letters(text: str) -> int:
    if text.isascii():
        return len(text.translate(_LEFT_BLANK))
    return sum(1 for c in text if not c.isspace() and unicodedata.category(c)[0] != "P")


@cache
def _identifier(languages: tuple[str, ...] | None = None) -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError:
        raise need("py3langid", "data") from None
    found = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if languages is not None:
        found.set_languages(languages)
    return found


def _names(given: Sequence[str] | str | None) -> Sequence[str] | None:
    return [given] if isinstance(given, str) else given


class Language(DocumentStage):
    """Name each document's language (package py3langid, extra ``data``), and keep only ``keep``.

    The language and its probability become the metadata ``language`` and ``language_score``. languages: choose among
    these only, which makes the answer surer. least_score: what is less sure is dropped. It looks at the first
    ``characters`` characters.
    """

    name = "language"

    def __init__(
        self,
        keep: Sequence[str] | str | None = None,
        least_score: float = 0.0,
        languages: Sequence[str] | str | None = None,
        characters: int = 4000,
    ):
        super().__init__()
        if not 0 <= least_score <= 1:
            raise ConfigError("should be between 0 and 1", key="least_score", value=least_score)
        keep, languages = _names(keep), _names(languages)
        self.keep = None if keep is None else set(keep)
        self.least_score, self.characters = least_score, characters
        self.languages = None if languages is None else tuple(languages)
        known = set(_identifier().nb_classes)
        for key, names in (("keep", self.keep or ()), ("languages", self.languages or ())):
            unknown = sorted(set(names) - known)
            if unknown:
                raise ConfigError(f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}", key=key)

    def apply(self, document: Document) -> Document | Drop:
        code, score = _identifier(self.languages).classify(document.text[: self.characters])
        self.statistics.counts[f"language {code}"] += 1
        if score < self.least_score:
            return Drop("language not sure", f"{code} {score:.2f}")
        if self.keep is not None and code not in self.keep:
            return Drop(f"language {code}", f"{score:.2f}")
        return document.with_metadata(language=code, language_score=round(float(score), 4))
