"""Keep documents whose score is high enough, and say by source what that keeps.

A classifier's P(positive) has to be above the threshold (0.5; Ultra-FineWeb), a score on a scale at least at it (3 of
5; Fineweb-edu-chinese-v2 - its first version kept what is above 4: ``threshold=4, strict=True``).

People report that such filters drift to a style. So the figures hold, beside the kept share of each source, the mean
length before and after: a filter that keeps long texts only, or one source only, shows it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.scorers import Scorer, load_scorer, scored
from trainwright.data.build.stage import chunks, parallel_map
from trainwright.data.build.statistics import Drop, Statistics


class _Score:
    """Scores of a list of texts, in whatever process; a scorer given by its name is loaded there."""

    def __init__(self, spec: str | Path | Scorer):
        self.spec = spec
        self._scorer: Scorer | None = None

    @property
    def scorer(self) -> Scorer:
        if self._scorer is None:
            self._scorer = load_scorer(self.spec)
        return self._scorer

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return scored(self.scorer, texts)

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "_scorer": None}


class QualityFilter:
    """Documents whose score passes the threshold; the score becomes metadata.

    model       a scorer or its name, see :func:`~trainwright.data.build.quality.scorers.load_scorer`
    threshold   None: 0.5 for probabilities, 3 for other scales
    strict      whether a score at the threshold fails; None: for probabilities it does
    score_key   name of the metadata
    Raises ConfigError for a threshold off the scorer's scale: on or outside 0 and 1 for probabilities.
    """

    name = "quality"

    def __init__(
        self,
        model: str | Path | Scorer,
        threshold: float | None = None,
        strict: bool | None = None,
        score_key: str = "quality",
    ):
        self._score = _Score(model)
        low, high = (getattr(self._score.scorer, k, None) for k in ("low", "high"))
        probability = (low, high) == (0.0, 1.0)
        self.threshold = float((0.5 if probability else 3.0) if threshold is None else threshold)
        self.strict = probability if strict is None else strict
        self.score_key = score_key
        if not math.isfinite(self.threshold):
            raise ConfigError("should be a finite number", key="threshold", value=threshold)
        if probability and not 0 < self.threshold < 1:
            raise ConfigError(
                "should be between 0 and 1: the scores are probabilities", key="threshold", value=threshold
            )
        if low is not None and high is not None and not low <= self.threshold <= high:
            raise ConfigError(
                f"should be on the scale of the scores, {low:g}..{high:g}", key="threshold", value=threshold
            )
        self.statistics = Statistics(self.name)
        self.statistics.figures = {"threshold": self.threshold, "strict": self.strict}

    def passes(self, score: float) -> bool:
        return score > self.threshold if self.strict else score >= self.threshold

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        """In chunks, so that a scorer sees many texts at once; the same result with any number of workers."""
        sources = self.statistics.figures["sources"] = {}
        waiting: list[list[Document]] = []

        def texts() -> Iterator[list[str]]:
            for chunk in chunks(documents):
                waiting.append(chunk)
                yield [d.text for d in chunk]

        for scores in parallel_map(self._score, texts(), workers):
            for document, score in zip(waiting.pop(0), scores, strict=True):
                self.statistics.see(document.text)
                row = sources.setdefault(document.source, _empty())
                kept = self.passes(score)
                _count(row, document, kept)
                if not kept:
                    self.statistics.drop(document, Drop("low quality", f"score {score:.4g}"))
                    continue
                document = document.with_metadata(**{self.score_key: round(score, 6)})
                self.statistics.keep(document)
                yield document
        for row in sources.values():
            _finish(row)


def _empty() -> dict[str, Any]:
    return {"documents": 0, "kept": 0, "characters": 0, "characters_kept": 0}


def _count(row: dict[str, Any], document: Document, kept: bool) -> None:
    row["documents"] += 1
    row["kept"] += kept
    row["characters"] += len(document.text)
    row["characters_kept"] += len(document.text) if kept else 0


def _finish(row: dict[str, Any]) -> None:
    row["kept_share"] = round(row["kept"] / row["documents"], 6)
    row["mean_length"] = round(row["characters"] / row["documents"], 1)
    row["mean_length_kept"] = round(row["characters_kept"] / row["kept"], 1) if row["kept"] else None
