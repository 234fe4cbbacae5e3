"""Corrections of scanned text by a model, under a cap: models invent and leave out words.

    change = edit distance (Levenshtein) / length of the longer text;  above the cap the original stays

The original is kept in the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.common_corpus.toxicity import named
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance by Myers 1999 (Hyyro's form): a column of the table in the bits of one number."""
    if len(a) < len(b):
        a, b = b, a
    if not b:
        return len(a)
    masks: dict[str, int] = {}
    for i, c in enumerate(b):
        masks[c] = masks.get(c, 0) | 1 << i
    every, last = (1 << len(b)) - 1, 1 << (len(b) - 1)
    plus, minus, distance = every, 0, len(b)  # vertical differences of +1 and -1
    for c in a:
        match = masks.get(c, 0)
        zero = (((match & plus) + plus) ^ plus) | match | minus
        up, down = minus | (~(zero | plus) & every), zero & plus
        distance += (up & last != 0) - (down & last != 0)
        up = (up << 1 | 1) & every
        plus, minus = (down << 1 & every) | (~(zero | up) & every), up & zero
    return distance


class OcrCorrect(DocumentStage):
    """Texts put right by ``corrector`` (``module:function``, paragraph -> paragraph), each paragraph under the cap.

    cap: greatest share of a paragraph that may change; above it the paragraph stays as it was. The text before is kept
    as the metadata ``original_text``. Paragraphs of more than ``longest`` characters are not sent.
    """

    name = "ocr_correct"

    def __init__(self, corrector: str | Callable[[str], str], cap: float = 0.3, longest: int = 4000):
        super().__init__()
        if not 0 < cap < 1:
            raise ConfigError("should be above 0 and below 1", key="cap", value=cap)
        if longest < 1:
            raise ConfigError("should be at least 1", key="longest", value=longest)
        self.corrector, self.cap, self.longest = named(corrector, "corrector"), cap, longest

    def apply(self, document: Document) -> Document | Drop:
        parts = re.split(r"(\n\s*\n)", document.text)
        changed = rejected = 0
        for i in range(0, len(parts), 2):
            before = parts[i]
            if not before.strip() or len(before) > self.longest:
                continue
            after = self.corrector(before)
            if not isinstance(after, str):
                raise DataError(f"document {document.id!r}: the corrector gave {type(after).__name__}, not a text")
            if after == before:
                continue
            # The difference of lengths alone may be too much; the distance is never less.
            longer = max(len(after), len(before))
            if abs(len(after) - len(before)) > self.cap * longer or edit_distance(before, after) > self.cap * longer:
                rejected += 1
                continue
            changed += 1
            parts[i] = after
        self.statistics.counts["corrections taken"] += changed
        self.statistics.counts["corrections rejected"] += rejected
        if not changed:
            return document
        out = document.changed("".join(parts), self.name, corrected=changed, rejected=rejected)
        return out.with_metadata(original_text=document.metadata.get("original_text", document.text))
