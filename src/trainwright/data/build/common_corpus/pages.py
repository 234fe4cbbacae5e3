"""Headings and feet that a book prints on every page, and page numbers."""

from __future__ import annotations

import re
from collections import Counter

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

_NUMBER = re.compile(
    r"\W*(?:page|seite|pag\.?|p\.|s\.)?\s*(?:\d{1,4}|[ivxlc]{1,7})\s*(?:(?:of|von|/|de)\s*\d{1,4})?\W*", re.I
)


class RunningHeads(DocumentStage):
    """Leave out lines at the top and the foot of pages that come on ``share`` of them, digits aside, and page numbers.

    Pages are parted by ``page_mark`` (a regular expression; a form feed, as OCR writes it); a document of fewer than
    ``least_pages`` stays. edge: lines from the top and from the foot that are looked at. A word cut at a page's end is
    joined again.
    """

    name = "running_heads"

    def __init__(self, page_mark: str = "\f", edge: int = 2, share: float = 0.4, least_pages: int = 3):
        super().__init__()
        for key, value in (("edge", edge), ("least_pages", least_pages)):
            if value < 1:
                raise ConfigError("should be at least 1", key=key, value=value)
        if not 0 < share <= 1:
            raise ConfigError("should be above 0 and at most 1", key="share", value=share)
        try:
            self._mark = re.compile(page_mark)
        except re.error as error:
            raise ConfigError(f"is no regular expression ({error})", key="page_mark", value=page_mark) from None
        self.edge, self.share, self.least_pages = edge, share, least_pages

    def apply(self, document: Document) -> Document | Drop:
        pages = [p.split("\n") for p in self._mark.split(document.text)]
        if len(pages) < self.least_pages:
            return document
        edges = [self._edges(page) for page in pages]
        # Even and odd pages of a book have heads of their own.
        counts = Counter(k for page, places in zip(pages, edges, strict=True) for k in {_form(page[i]) for i in places})
        repeated = {k for k, n in counts.items() if n >= max(2, self.share * len(pages) / 2) and k}
        kept: list[str] = []
        removed = 0
        for page, places in zip(pages, edges, strict=True):
            out = {i for i in places if _form(page[i]) in repeated or _NUMBER.fullmatch(page[i])}
            removed += len(out)
            kept.append("\n".join(line for i, line in enumerate(page) if i not in out).strip("\n"))
        if not removed:
            return document
        self.statistics.counts["lines left out"] += removed
        text = re.sub(r"(\w)[-¬\u00ad]\n(?=[^\W\d_]*[a-zß-öø-ÿ])", r"\1", "\n".join(p for p in kept if p.strip()))
        if not text.strip():
            return Drop("only heads and feet")
        return document.changed(text, self.name, lines=removed, pages=len(pages))

    def _edges(self, page: list[str]) -> list[int]:
        filled = [i for i, line in enumerate(page) if line.strip()]
        return sorted({*filled[: self.edge], *filled[-self.edge :]})


def _form(line: str) -> str:
    return re.sub(r"\d+", "#", " ".join(line.lower().split()))
