"""The loop around a quality classifier: train it, classify a slice of the crawl, verify what it accepts by training on
it, renew the seeds with its own extremes, and go on until that gains nothing more.

Verification is a callable, since it trains a model: ``trainwright.lab.verification`` has one. The classifier of the
best verified round is returned, with what every round found.

Paper: Ultra-FineWeb, arXiv:2505.05427.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.hashed import HashedClassifier, HashedSettings
from trainwright.data.build.quality.scorers import scored
from trainwright.data.build.quality.seeds import POSITIVE, Seeds, refresh, shift

Verify = Callable[[Sequence[Document]], float]
"""What accepted documents are worth: the lower the better, such as the difference in held-out loss to the default."""


@dataclass
class Round:
    number: int
    accepted: int
    documents: int
    value: float | None  # of the verification; None where nothing was accepted
    seeds: dict[str, Any]
    shift: dict[str, Any]


@dataclass
class Refinement:
    """The best classifier, and the rounds on the way to it. ``best`` is a round's number, None where none helped."""

    classifier: HashedClassifier
    seeds: Seeds
    best: int | None = None
    rounds: list[Round] = field(default_factory=list)


def refine(
    seeds: Seeds,
    slices: Iterable[Sequence[Document]],
    verify: Verify,
    *,
    settings: HashedSettings | None = None,
    threshold: float = 0.5,
    share: float = 0.5,
    min_gain: float = 0.0,
    max_rounds: int = 5,
) -> Refinement:
    """Rounds until one is not better than the best by more than ``min_gain``, the slices end, or ``max_rounds``.

    slices: of the crawl, one for each round; each is held in memory while its round lasts. share: see ``refresh``.
    """
    if not 0 < threshold < 1:
        raise ConfigError("should be between 0 and 1", key="threshold", value=threshold)
    if max_rounds < 1:
        raise ConfigError("should be at least 1", key="max_rounds", value=max_rounds)
    found: Refinement | None = None
    best = float("inf")
    for number, documents in zip(range(max_rounds), slices, strict=False):
        classifier = HashedClassifier.fit(seeds.texts, seeds.labels, settings, positive=POSITIVE)
        scores = scored(classifier, [d.text for d in documents])
        accepted = [d for d, s in zip(documents, scores, strict=True) if s > threshold]
        value = float(verify(accepted)) if accepted else None
        if found is None:
            found = Refinement(classifier, seeds)
        found.rounds.append(
            Round(number, len(accepted), len(documents), value, seeds.figures(), shift(documents, accepted))
        )
        if value is None or not value < best - (min_gain if number else 0.0):
            break
        best = value
        found.classifier, found.seeds, found.best = classifier, seeds, number
        seeds = refresh(seeds, documents, scores, threshold, share)
    if found is None:
        raise ConfigError("there is no slice of documents to classify", key="slices")
    return found
