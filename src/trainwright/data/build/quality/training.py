"""From labelled documents to a scorer, with what it is worth on labels that it has not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.hashed import HashedClassifier, HashedRegressor, HashedSettings

Kind = Literal["regressor", "classifier"]


@dataclass
class Trained:
    """The scorer, and its figures on ``held_out`` documents: ``spearman``, ``auc`` of a classifier."""

    scorer: HashedRegressor | HashedClassifier
    figures: dict[str, Any]


def train_scorer(
    documents: Iterable[Document],
    label: str = "edu_score",
    *,
    kind: Kind = "regressor",
    settings: HashedSettings | None = None,
    held_out: float = 0.1,
    low: float = 0.0,
    high: float = 5.0,
    positive: str | None = None,
) -> Trained:
    """Fit on the metadata ``label`` of the documents; ``held_out`` of them, chosen by hash of the id, judge the result.

    Documents without the label are left out and counted. Raises ConfigError for labels of one class, DataError where
    none is there.
    """
    if not 0 <= held_out < 1:
        raise ConfigError("should be at least 0 and below 1", key="held_out", value=held_out)
    if kind not in ("regressor", "classifier"):
        raise ConfigError("should be regressor or classifier", key="kind", value=kind)
    train: list[tuple[str, Any]] = []
    test: list[tuple[str, Any]] = []
    without = 0
    for d in documents:
        value = d.metadata.get(label)
        if value is None:
            without += 1
            continue
        part = (
            test
            if xxhash.xxh3_64_intdigest(f"scorer\0{d.id}".encode("utf-8", "surrogatepass")) < held_out * 2.0**64
            else train
        )
        part.append((d.text, value))
    if not train:
        raise DataError(f"no document has the metadata {label!r} to train on ({without} lack it)")
    texts, labels = [t for t, _ in train], [v for _, v in train]
    scorer: HashedRegressor | HashedClassifier
    if kind == "regressor":
        scorer = HashedRegressor.fit(texts, [float(v) for v in labels], settings, low, high)
    else:
        scorer = HashedClassifier.fit(texts, labels, settings, positive)
    figures: dict[str, Any] = {"trained_on": len(train), "held_out": len(test), "without_label": without}
    if len(test) >= 2:
        scores = np.array(scorer([t for t, _ in test]))
        if isinstance(scorer, HashedClassifier):
            figures["auc"] = auc(scores, np.array([str(v) == scorer.positive for _, v in test]))
        else:
            figures["spearman"] = spearman(scores, np.array([float(v) for _, v in test]))
    return Trained(scorer, figures)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2.0)[place]


def spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Rank correlation; None where one side is constant."""
    x, y = _ranks(np.asarray(a, float)), _ranks(np.asarray(b, float))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale else None


def auc(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float | None:
    """Chance that a positive document scores above a negative one; None without both."""
    p, n = int(positive.sum()), int((~positive).sum())
    if not p or not n:
        return None
    return (float(_ranks(np.asarray(scores, float))[positive].sum()) - p * (p + 1) / 2) / (p * n)


def precision_at(scores: NDArray[np.float64], positive: NDArray[np.bool_], share: float = 0.1) -> float:
    """Share of positives among the ``share`` of documents that score highest."""
    if not 0 < share <= 1:
        raise ConfigError("should be above 0 and at most 1", key="share", value=share)
    top = np.argsort(-np.asarray(scores), kind="stable")[: max(1, round(share * len(scores)))]
    return float(np.asarray(positive)[top].mean())
