"""What a stage did, in figures and in samples that a person can read."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

EXCERPT = 600  # characters of a text that a sample holds


class Drop(NamedTuple):
    """A stage's answer for a document that it throws out."""

    reason: str  # a few words, the same for all documents of one kind
    detail: str = ""  # what is particular to this one


@dataclass(slots=True)
class Sample:
    id: str
    source: str
    text: str
    detail: str = ""
    other: str = ""  # the text before a change, or the copy that was kept


def excerpt(text: str, length: int = EXCERPT) -> str:
    return text if len(text) <= length else text[: length * 2 // 3] + " […] " + text[-length // 3 :]


@dataclass
class Statistics:
    """Counts of one stage and a few samples per outcome.

    The samples of an outcome are the documents whose ids hash lowest: they depend neither on the order of the
    documents nor on how they were shared among workers, and cost the memory of ``samples_each`` texts.
    """

    name: str = ""
    samples_each: int = 5
    documents_in: int = 0
    documents_out: int = 0
    characters_in: int = 0
    characters_out: int = 0
    changed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # whatever else the stage counts
    figures: dict[str, Any] = field(default_factory=dict)  # settings and results of the whole stage
    _samples: dict[str, list[tuple[int, str, Sample]]] = field(default_factory=dict)

    def see(self, text: str) -> None:
        self.documents_in += 1
        self.characters_in += len(text)

    def keep(self, document: Any, before: str | None = None) -> None:
        """``document`` goes on; ``before`` is its text at the entry where the stage may have changed it."""
        self.documents_out += 1
        self.characters_out += len(document.text)
        if before is not None and before != document.text:
            self.changed += 1
            detail = str(document.provenance[-1]) if document.provenance else ""
            self.sample("changed", document, detail, before)
        else:
            self.sample("kept", document)

    def drop(self, document: Any, drop: Drop, other: str = "") -> None:
        self.dropped[drop.reason] += 1
        self.sample(f"dropped: {drop.reason}", document, drop.detail, other)

    def sample(self, outcome: str, document: Any, detail: str = "", other: str = "") -> None:
        rank = -xxhash.xxh3_64_intdigest(f"{self.name}\0{outcome}\0{document.id}".encode("utf-8", "surrogatepass"))
        held = self._samples.setdefault(outcome, [])
        if len(held) >= self.samples_each and rank <= held[0][0]:
            return
        text, other = _around(document.text, other)
        self._push(outcome, (rank, document.id, Sample(document.id, document.source, text, detail, other)))

    def drop_sample(self, outcome: str, sample: Sample) -> None:
        """A sample that the stage has chosen itself."""
        self._push(outcome, (-len(self._samples.get(outcome, [])), sample.id, sample))

    def _push(self, outcome: str, entry: tuple[int, str, Sample]) -> None:
        held = self._samples.setdefault(outcome, [])
        if self.samples_each < 1 or any(e[:2] == entry[:2] for e in held):
            return
        if len(held) < self.samples_each:
            heapq.heappush(held, entry)
        elif entry[0] > held[0][0]:
            heapq.heapreplace(held, entry)

    def merge(self, other: Statistics) -> None:
        """Add what another worker counted in the same stage."""
        for name in ("documents_in", "documents_out", "characters_in", "characters_out", "changed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.counts.update(other.counts)
        for outcome, held in other._samples.items():
            for entry in held:
                self._push(outcome, entry)

    @property
    def samples(self) -> dict[str, list[Sample]]:
        return {o: [e[2] for e in sorted(h, key=lambda e: (-e[0], e[1]))] for o, h in sorted(self._samples.items())}

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "documents_in": self.documents_in,
            "documents_out": self.documents_out,
            "characters_in": self.characters_in,
            "characters_out": self.characters_out,
            "changed": self.changed,
            "dropped": dict(sorted(self.dropped.items())),
            "counts": dict(sorted(self.counts.items())),
            **self.figures,
            "samples": {
                outcome: [{k: v for k in Sample.__slots__ if (v := getattr(s, k))} for s in found]
                for outcome, found in self.samples.items()
            },
        }


def _around(text: str, other: str) -> tuple[str, str]:
    """Excerpts of a text and the one it is held against; of long ones the part around the first difference."""
    if not other or max(len(text), len(other)) <= EXCERPT:
        return excerpt(text), excerpt(other)
    first = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, first - EXCERPT // 3)
    mark = "[…] " if start else ""
    return mark + excerpt(text[start : start + EXCERPT]), mark + excerpt(other[start : start + EXCERPT])


def merge_all(into: Iterable[Statistics], parts: Iterable[Statistics]) -> None:
    for whole, part in zip(into, parts, strict=True):
        whole.merge(part)
