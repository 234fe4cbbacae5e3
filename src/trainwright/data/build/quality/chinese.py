"""Chinese text in one form, and back: half-width signs, simplified characters, character n-grams.

    normalize(t)      -> text of the same length, and the runs of it that were something else
    restore(text, runs) == t

Each character is replaced by one character, so positions stay and the runs that changed are all that has to be kept:
``[[start, "as it was"], ...]``. The full-width forms U+FF01..U+FF5E and the ideographic space become ASCII; traditional
characters become simplified ones by the table of OpenCC (package ``opencc``, extra ``data``), character by character.

Paper: OpenCSG Chinese Corpus, arXiv:2501.08197. Where we differ, and why: OpenCC also converts whole phrases, which
is better prose but moves positions; for scoring and finding copies characters are enough, and it can be undone.
"""

from __future__ import annotations

import re
from functools import cache

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop
from trainwright.data.sources._files import need

Runs = list[list[int | str]]
ORIGINAL = "chinese_original"  # metadata that holds the runs

HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
# Scripts written without spaces: kana, Han, Thai, Lao, Khmer, Burmese. A character class for other patterns.
UNSPACED = (
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]"
)
_WIDTH = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}


@cache
def _simplified() -> dict[int, int]:
    """Traditional to simplified, where both are one character."""
    try:
        import opencc
    except ModuleNotFoundError:
        raise need("opencc", "data") from None
    ranges = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x2A6E0))
    converter = opencc.OpenCC("t2s")
    # One by one inside one call: a line break between keeps characters from making a phrase.
    before = "\n".join(chr(c) for first, end in ranges for c in range(first, end))
    pairs = zip(before.split("\n"), converter.convert(before).split("\n"), strict=True)
    table = {ord(a): ord(b) for a, b in pairs if len(b) == 1 and a != b}
    # A target that has a target itself would make a second pass change the text once more.
    return {a: table.get(b, b) for a, b in table.items()}


def _table(width: bool, simplify: bool) -> dict[int, int]:
    return (_WIDTH if width else {}) | (_simplified() if simplify else {})


def normalize(text: str, width: bool = True, simplify: bool = True) -> tuple[str, Runs]:
    """The text with one character for each, and what :func:`restore` needs. Idempotent in its text."""
    if text.isascii():
        return text, []
    new = text.translate(_table(width, simplify))
    if new == text:
        return new, []
    runs: Runs = []
    end = -1
    for i, (was, now) in enumerate(zip(text, new, strict=True)):
        if was == now:
            continue
        if i == end:
            runs[-1][1] = f"{runs[-1][1]}{was}"
        else:
            runs.append([i, was])
        end = i + 1
    return new, runs


def restore(text: str, runs: Runs) -> str:
    """The text before :func:`normalize`. Raises DataError where the runs do not lie in it."""
    parts, at = [], 0
    for start, was in runs:
        if not isinstance(start, int) or not isinstance(was, str) or start < at or start + len(was) > len(text):
            raise DataError(f"{ORIGINAL}: does not belong to this text; it was changed after it was normalized")
        parts += [text[at:start], was]
        at = start + len(was)
    return "".join([*parts, text[at:]])


def restored(document: Document) -> Document:
    """``document`` with the text it had before ``normalize_chinese``."""
    if ORIGINAL not in document.metadata:
        return document
    metadata = {k: v for k, v in document.metadata.items() if k != ORIGINAL}
    text = restore(document.text, document.metadata[ORIGINAL])
    provenance = [*document.provenance, {"step": "restore_chinese"}]
    return Document(
        text, document.id, document.source, document.url, document.licence, metadata, provenance
    )  # fmt: skip


class NormalizeChinese(DocumentStage):
    """Full-width signs to ASCII and traditional to simplified characters, so that copies which differ in these only are
    copies for the stages behind.

    What was there stands in the metadata ``chinese_original``; ``reversible=False`` leaves it out.
    """

    name = "normalize_chinese"

    def __init__(self, width: bool = True, simplify: bool = True, reversible: bool = True):
        super().__init__()
        if not width and not simplify:
            raise ConfigError("nothing to do; leave width or simplify on", key="width", value=width)
        self.width, self.simplify, self.reversible = width, simplify, reversible
        _table(width, simplify)  # the package is missed here and not in a worker

    def apply(self, document: Document) -> Document | Drop:
        text, runs = normalize(document.text, self.width, self.simplify)
        if not runs:
            return document
        changed = sum(len(str(was)) for _, was in runs)
        self.statistics.counts["characters changed"] += changed
        if self.reversible and ORIGINAL not in document.metadata:
            document = document.with_metadata(**{ORIGINAL: runs})
        return document.changed(text, self.name, width=self.width, simplify=self.simplify, characters=changed)
