"""Documents that repeat what a model will be judged on.

A document goes where it shares ``ngram`` words in a row with one of the held-out texts (lower case, punctuation aside).
A held-out text shorter than that is looked for as a whole, and one of fewer than 5 words, which any text may hold, only
as the whole of a document. Paper: GPT-3, arXiv:2005.14165, appendix C, with its 13 words; there
the text around a hit is cut out, here the document goes as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.minhash import words
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

LEAST = 5  # words


class NgramDecontaminate(DocumentStage):
    """Drop documents that share ``ngram`` words in a row with a held-out text. Memory: 80 bytes a held-out word."""

    name = "decontaminate_ngrams"

    def __init__(self, held_out: Iterable[Document | str], ngram: int = 13):
        super().__init__()
        if ngram < 1:
            raise ConfigError("should be at least 1", key="ngram", value=ngram)
        self.ngram = ngram
        by_length: dict[int, set[int]] = {}
        self._wholes: set[int] = set()
        for text in held_out:
            found = words(text if isinstance(text, str) else text.text)
            if 0 < len(found) < min(LEAST, ngram):
                self._wholes.update(_hashes(found, len(found)))
            elif found:
                length = min(ngram, len(found))
                by_length.setdefault(length, set()).update(_hashes(found, length))
        self._held = sorted(by_length.items())

    def apply(self, document: Document) -> Document | Drop:
        found = words(document.text)
        if 0 < len(found) < LEAST and next(iter(_hashes(found, len(found)))) in self._wholes:
            return Drop("shares words with a held-out text", " ".join(found))
        for length, held in self._held:
            if len(found) >= length:
                for place, value in enumerate(_hashes(found, length)):
                    if value in held:
                        return Drop("shares words with a held-out text", " ".join(found[place : place + length]))
        return document


def _hashes(found: list[str], length: int) -> Iterable[int]:
    for i in range(len(found) - length + 1):
        yield xxhash.xxh3_64_intdigest(" ".join(found[i : i + length]).encode("utf-8", "surrogatepass"))
