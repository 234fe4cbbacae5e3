"""Seeds of a quality classifier: as many good as bad examples, each from many domains; and their renewal.

Positives come from sources that a verification has shown to help (``trainwright data verify``), negatives from raw
crawls. ``select`` streams: of each domain it holds the documents whose ids hash lowest, which is a random choice that
does not depend on the order of reading. ``refresh`` takes what the classifier itself is surest of into the next round.

Paper: Ultra-FineWeb, arXiv:2505.05427.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import xxhash

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.statistics import Statistics

By = Literal["source", "site"]
POSITIVE, NEGATIVE = "positive", "negative"


@dataclass
class Seeds:
    """Labelled examples; ``texts`` and ``labels`` are what a classifier is fitted on, mixed by hash."""

    positives: list[Document]
    negatives: list[Document]
    seed: int = 0

    def _mixed(self) -> list[tuple[Document, str]]:
        pairs = [(d, POSITIVE) for d in self.positives] + [(d, NEGATIVE) for d in self.negatives]
        return sorted(pairs, key=lambda p: _rank(p[0].id, self.seed, p[1]))

    @property
    def texts(self) -> list[str]:
        return [d.text for d, _ in self._mixed()]

    @property
    def labels(self) -> list[str]:
        return [label for _, label in self._mixed()]

    def figures(self) -> dict[str, Any]:
        def of(documents: list[Document]) -> dict[str, Any]:
            sources: dict[str, int] = {}
            for d in documents:
                sources[d.source] = sources.get(d.source, 0) + 1
            return {"documents": len(documents), "sources": dict(sorted(sources.items()))}

        return {POSITIVE: of(self.positives), NEGATIVE: of(self.negatives)}


def select(
    positives: Iterable[Document],
    negatives: Iterable[Document],
    per_class: int = 300_000,
    *,
    by: By | Callable[[Document], str] = "source",
    max_domain_share: float = 1.0,
    seed: int = 0,
) -> Seeds:
    """Equally many of both, at most ``per_class``, spread evenly over domains as far as they reach.

    by                 what a domain is: the source, the site of the URL, or a function of the document
    max_domain_share   the most that one domain may make up of its class
    A text that both sides have is left out of both. Raises ConfigError where a side is empty.
    """
    if per_class < 1:
        raise ConfigError("should be at least 1", key="per_class", value=per_class)
    if not 0 < max_domain_share <= 1:
        raise ConfigError("should be above 0 and at most 1", key="max_domain_share", value=max_domain_share)
    domain = by if callable(by) else {"source": lambda d: d.source, "site": _site}.get(by)
    if domain is None:
        raise ConfigError("should be source, site or a function", key="by", value=by)
    held = [_lowest(side, per_class, domain, seed) for side in (positives, negatives)]
    texts = [{d.text for group in side.values() for d in group} for side in held]
    both = texts[0] & texts[1]
    held = [{k: [d for d in g if d.text not in both] for k, g in side.items()} for side in held]
    for side, name in zip(held, ("positives", "negatives"), strict=True):
        if not any(side.values()):
            raise ConfigError(
                "hold no document that only this side has; a classifier needs examples of both classes", key=name
            )
    count = min(per_class, *(sum(map(len, side.values())) for side in held))
    return _balanced(held, count, max_domain_share, seed)


def _balanced(held: list[dict[str, list[Document]]], count: int, share: float, seed: int) -> Seeds:
    while True:
        chosen = [_spread(side, count, share) for side in held]
        least = min(map(len, chosen))
        if least == count or all(len(c) == least for c in chosen):
            return Seeds(chosen[0], chosen[1], seed)
        count = least


def _lowest(
    documents: Iterable[Document], most: int, domain: Callable[[Document], str], seed: int
) -> dict[str, list[Document]]:
    heaps: dict[str, list[tuple[int, int, Document]]] = {}
    numbers = itertools.count()
    for d in documents:
        heap = heaps.setdefault(domain(d), [])
        entry = (-_rank(d.id, seed, ""), next(numbers), d)
        if len(heap) < most:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    return {k: [e[2] for e in sorted(h, key=lambda e: (-e[0], e[1]))] for k, h in sorted(heaps.items())}


def _spread(side: dict[str, list[Document]], count: int, share: float) -> list[Document]:
    """``count`` documents, as evenly from the domains as they reach: one of each in turn."""
    cap = max(1, int(share * count))
    out: list[Document] = []
    for turn in range(cap):
        for group in side.values():
            if turn < len(group) and len(out) < count:
                out.append(group[turn])
    return out


def _rank(id: str, seed: int, salt: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}\0{salt}\0{id}".encode("utf-8", "surrogatepass"))


def _site(document: Document) -> str:
    return urlsplit(document.url or "").hostname or document.source


def refresh(
    seeds: Seeds, documents: Sequence[Document], scores: Sequence[float], threshold: float = 0.5, share: float = 0.5
) -> Seeds:
    """Seeds of the next round: ``share`` of each class from the documents scored last, the rest of the old ones.

    New positives are the accepted documents with the highest scores, new negatives the rejected ones with the lowest;
    both classes stay equally large.
    """
    if not 0 < threshold < 1:
        raise ConfigError("should be between 0 and 1", key="threshold", value=threshold)
    if not 0 <= share <= 1:
        raise ConfigError("should be between 0 and 1", key="share", value=share)
    if len(documents) != len(scores):
        raise ConfigError(f"{len(scores)} scores for {len(documents)} documents", key="scores")
    order = sorted(range(len(documents)), key=lambda i: (scores[i], documents[i].id))
    size = min(len(seeds.positives), len(seeds.negatives))
    wanted = round(share * size)
    rejected = [documents[i] for i in order if scores[i] <= threshold][:wanted]
    accepted = [documents[i] for i in reversed(order) if scores[i] > threshold][:wanted]
    new = min(len(rejected), len(accepted))
    return Seeds(
        accepted[:new] + seeds.positives[: size - new], rejected[:new] + seeds.negatives[: size - new], seeds.seed
    )


def shift(before: Iterable[Document], after: Iterable[Document]) -> dict[str, Any]:
    """How lengths and sources of accepted documents differ from those of all: what a drift to a style looks like."""
    out: dict[str, Any] = {}
    for name, documents in (("all", before), ("accepted", after)):
        statistics = Statistics(name)
        sources: dict[str, int] = {}
        for d in documents:
            statistics.see(d.text)
            sources[d.source] = sources.get(d.source, 0) + 1
        n = max(statistics.documents_in, 1)
        out[name] = {
            "documents": statistics.documents_in,
            "mean_length": round(statistics.characters_in / n, 1),
            "source_shares": {k: round(v / n, 4) for k, v in sorted(sources.items())},
        }
    return out
