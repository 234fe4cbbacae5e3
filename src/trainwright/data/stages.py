"""Stages of a run's data: a chosen part of the documents first, all of them then, documents free of metadata last.

``data.first_stage`` is the selection of SALT-DS (arXiv:2410.18779): the documents that a small model of early training
finds hard and yet learnable, for as many steps as it teaches. Their scores are made by ``trainwright data score``
(:mod:`trainwright.data.scoring`). ``data.metadata.cooldown`` is MeCo's last stage (arXiv:2501.01956). The order of rows
is a plan with exact counts (:meth:`trainwright.data.mixture.Mixture.follow`), a function of the rows taken: resuming
and other numbers of ranks change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.dataset import Columns, TokenDataset
from trainwright.data.mixture import Segment


class FirstStageConfig(BaseModel):
    """The best part of the documents for the first steps."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    scores: Path = Field(description="File written by `trainwright data score` for this data and tokenizer.")
    fraction: float = Field(gt=0, le=1, description="Share of the documents to keep, those of the highest scores.")
    steps: NonNegativeInt | None = Field(None, description="Steps of the stage; null: by share.")
    share: float = Field(0.173, ge=0, le=1, description="Share of the run's steps; that of objective salt.")

    @model_validator(mode="after")
    def _one_length(self) -> FirstStageConfig:
        if self.steps is not None and "share" in self.model_fields_set:
            raise ValueError("steps and share both say how long the stage is; give one")
        return self


class Subset(TokenDataset):
    """Some documents of a dataset, in their order; ``docs`` are their numbers there, int64."""

    def __init__(self, dataset: TokenDataset, docs: np.ndarray):
        self.dataset, self.docs, self.name = dataset, np.asarray(docs, dtype=np.int64), dataset.name
        self.lengths = np.asarray(dataset.lengths)[self.docs]
        digest = hashlib.blake2b(dataset.fingerprint.encode() + self.docs.astype("<i8").tobytes(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.dataset.tokens(int(self.docs[doc]), start, stop)

    def loss_weights(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray | None:
        return self.dataset.loss_weights(int(self.docs[doc]), start, stop)

    def columns_of(self, doc: int) -> tuple[Columns | None, int]:
        return self.dataset.columns_of(int(self.docs[doc]))

    def column_shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype]]:
        return self.dataset.column_shapes()


# -- scores ---------------------------------------------------------------------------------------------------------


def save_scores(path: Path, scores: Mapping[str, np.ndarray], datasets: Mapping[str, TokenDataset]) -> None:
    """Write float32 scores by source, each under the fingerprint of the documents they are of."""
    arrays = {datasets[name].fingerprint: np.asarray(s, dtype=np.float32) for name, s in scores.items()}
    with Path(path).open("wb") as handle:
        np.savez(handle, allow_pickle=False, **arrays)  # type: ignore[arg-type]


def load_scores(path: Path, datasets: Mapping[str, TokenDataset]) -> dict[str, np.ndarray]:
    """Scores of each dataset. Raises DataError where the file is damaged or of other documents."""
    try:
        with np.load(path, allow_pickle=False) as found:
            held = {key: found[key] for key in found.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"data.first_stage.scores: {path} cannot be read as scores ({error})") from None
    out = {}
    for name, dataset in datasets.items():
        scores = held.get(dataset.fingerprint)
        if scores is None or len(scores) != dataset.num_docs:
            raise DataError(
                f"data.first_stage.scores: {path} has no scores of source {name} as it is now; score it again: "
                "trainwright data score RECIPE --teacher TEACHER --out FILE"
            )
        out[name] = scores
    return out


def best_documents(scores: Mapping[str, np.ndarray], fraction: float, together: bool) -> dict[str, np.ndarray]:
    """Numbers of the ``round(fraction * n)`` (at least one) documents of the highest scores, in their order.

    ``together`` ranks all sources as one; else each has its own fraction. Of equal scores the earlier document counts
    as higher, sources by name. NaN counts as lowest.
    """
    if not 0 < fraction <= 1:
        raise ConfigError("should be above 0 and at most 1", key="fraction", value=fraction)
    names = sorted(scores)
    if not together:
        return {n: best_documents({n: scores[n]}, fraction, True)[n] for n in names}
    every = np.nan_to_num(np.concatenate([np.asarray(scores[n], np.float64) for n in names]), nan=-np.inf)
    kept = np.zeros(len(every), dtype=bool)
    count = min(len(every), max(1, round(fraction * len(every))))
    kept[np.argsort(-every, kind="stable")[:count]] = True
    out, at = {}, 0
    for name in names:
        out[name] = np.flatnonzero(kept[at : at + len(scores[name])])
        at += len(scores[name])
    return out


def first_stage(
    config: FirstStageConfig, datasets: Mapping[str, TokenDataset], together: bool
) -> dict[str, TokenDataset]:
    """The datasets with their best documents alone; those without any are left out."""
    chosen = best_documents(load_scores(config.scores, datasets), config.fraction, together)
    return {n: Subset(d, chosen[n]) for n, d in datasets.items() if len(chosen[n])}


# -- the plan -------------------------------------------------------------------------------------------------------


def apportion(count: int, weights: Mapping[str, float]) -> dict[str, int]:
    """``count`` in whole parts by ``weights``, largest remainders first; the sum is exact."""
    total = sum(weights.values())
    exact = {n: count * w / total for n, w in weights.items()}
    out = {n: int(x) for n, x in exact.items()}
    rest = sorted(exact, key=lambda n: (out[n] - exact[n], n))
    for name in rest[: count - sum(out.values())]:
        out[name] += 1
    return out


def rows_of_stages(
    first: FirstStageConfig | None,
    cooldown: float | None,
    steps: int | None,
    step_rows: int,
    max_rows: int | None = None,
) -> tuple[int, int, int]:
    """Rows of the first stage, the middle and the cooldown, in a run of ``steps`` steps of ``step_rows`` rows.

    ``max_rows`` is where the data ends, if that is earlier. Raises ConfigError for a stage longer than the run, and for
    one given as a share of a run whose length is not known (``steps`` None).
    """
    early = 0
    if first is not None:
        if first.steps is None and steps is None:
            raise ConfigError("needs a run of known length; set steps", key="data.first_stage.share")
        early = round(first.share * (steps or 0)) if first.steps is None else first.steps
        if steps is not None and early > steps:
            raise ConfigError(
                f"is more than the run's {steps} steps; lower it", key="data.first_stage.steps", value=early
            )
    late = 0
    if cooldown is not None:
        if steps is None:
            raise ConfigError(
                "needs a run of known length; set train.steps, tokens or epochs", key="data.metadata.cooldown"
            )
        late = min(round(cooldown * steps), steps - early)
    total = (steps or early) * step_rows
    total = total if max_rows is None else min(total, max_rows)
    return early * step_rows, max(total - (early + late) * step_rows, 0), late * step_rows


def stage_plan(rows: Sequence[int], weights: Sequence[Mapping[str, float]]) -> tuple[list[Segment], dict[str, float]]:
    """Segments of all stages but the last, each of its ``rows``, and the weights behind them, which are the last's.

    ``weights`` maps the streams of each stage, which share no name, to their proportions; a stage without is left out.
    """
    stages = [(n, w) for n, w in zip(rows, weights, strict=True) if w]
    plan = [Segment(apportion(n, w)) for n, w in stages[:-1]]
    final = {name: 0.0 for _, w in stages for name in w}
    return plan, final | {n: float(w) for n, w in stages[-1][1].items()}
