"""How alike texts are, and how much markdown they hold: what to watch in synthetic data.

distinct_n = different n-grams / n-grams, of the first ``limit`` n-grams (it falls with their number, so compare
             equal limits)
markdown   = share of lines that are headings, list items, tables, fences or quotes, or hold bold text
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.normalize import Unit, check_unit, normalize_text, units
from trainwright.data.build.statistics import Statistics

_MARKDOWN = re.compile(
    r"\s*(?:#{1,6}\s|[-*+]\s|\d+[.)]\s|>\s|\||```|~~~|(?:-{3,}|\*{3,})\s*$)|.*(?:\*\*|__)\S.*\S?(?:\*\*|__)"
)


def markdown_share(text: str) -> float:
    """Of the lines that are not blank."""
    lines = [line for line in text.split("\n") if line.strip()]
    return sum(bool(_MARKDOWN.match(line)) for line in lines) / len(lines) if lines else 0.0


class Diversity:
    """Counts over a stream of texts. Memory: about 100 bytes for each of ``limit`` n-grams, for each n."""

    def __init__(self, ngrams: tuple[int, ...] = (1, 2, 3), limit: int = 1_000_000, unit: Unit = "auto"):
        if limit < 1 or not ngrams or min(ngrams) < 1:
            raise ConfigError("should be at least 1", key="limit" if limit < 1 else "ngrams", value=limit)
        self.ngrams, self.limit, self.unit = ngrams, limit, check_unit(unit)
        self._seen: dict[int, set[int]] = {n: set() for n in ngrams}
        self._count = dict.fromkeys(ngrams, 0)
        self.texts = self.lines = 0
        self._markdown = 0.0
        self._marked = 0

    def add(self, text: str) -> None:
        self.texts += 1
        share = markdown_share(text)
        self._markdown += share
        self._marked += share > 0
        if all(c >= self.limit for c in self._count.values()):
            return
        found = units(normalize_text(text), self.unit)
        for n in self.ngrams:
            room = self.limit - self._count[n]
            grams = [hash(tuple(found[i : i + n])) for i in range(min(len(found) - n + 1, room))]
            self._count[n] += len(grams)
            self._seen[n].update(grams)

    def figures(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            f"distinct_{n}": round(len(self._seen[n]) / self._count[n], 4) if self._count[n] else None
            for n in self.ngrams
        }
        out["markdown_share"] = round(self._markdown / self.texts, 4) if self.texts else None
        out["texts_with_markdown"] = round(self._marked / self.texts, 4) if self.texts else None
        return out


class TrackDiversity:
    """A stage that lets all documents pass and reports distinct-n and the share of markdown of each source."""

    name = "diversity"

    def __init__(self, limit: int = 1_000_000):
        self.statistics = Statistics(self.name)
        self.limit = limit
        Diversity(limit=limit)

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        found: dict[str, Diversity] = {}
        for document in documents:
            self.statistics.see(document.text)
            found.setdefault(document.source, Diversity(limit=self.limit)).add(document.text)
            self.statistics.keep(document)
            yield document
        self.statistics.figures["sources"] = {k: v.figures() for k, v in sorted(found.items())}
