"""Keep, rewrite or drop by scores of harm on five axes, 0 to 3 each.

    drop     where sum >= drop_sum or max >= drop_max
    rewrite  where sum >= rewrite_sum or max >= rewrite_max
    keep     else                                     so a higher score on an axis never gives a milder answer

Axes of toxic-commons ("Toxicity of the Commons", arXiv:2410.22587): race and origin, gender and sex, religion, ability,
violence. Its classifier Celadon is a model to run beside; ``scorer`` is any function from text to five numbers. The
published thresholds are not stated, so these are ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop

AXES = ("race_origin", "gender_sex", "religion", "ability", "violence")
ANSWERS = ("keep", "rewrite", "drop")


def decide(
    scores: Mapping[str, float],
    rewrite_sum: float = 4,
    rewrite_max: float = 2,
    drop_sum: float = 7,
    drop_max: float = 3,
) -> str:
    total, top = sum(scores.values()), max(scores.values())
    if total >= drop_sum or top >= drop_max:
        return "drop"
    return "rewrite" if total >= rewrite_sum or top >= rewrite_max else "keep"


def named(path: str | Callable[..., Any], key: str) -> Callable[..., Any]:
    """A function, or the one at ``module:name``. Raises ConfigError."""
    if callable(path):
        return path
    module, colon, name = path.partition(":")
    try:
        if not colon:
            raise ImportError("no colon")
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"should be module:function that can be imported ({error})", key=key, value=path) from None
    if not callable(found):
        raise ConfigError("is no function", key=key, value=path)
    return found  # type: ignore[no-any-return]


class Toxicity(DocumentStage):
    """Keep, rewrite or drop by a scorer's five axes.

    scorer: ``module:function`` (text -> five scores, by name or in the order of AXES), or "metadata": scores that
    ``metadata.toxicity`` holds already. rewriter: ``module:function`` (text -> text) for what is to be rewritten, and
    judged again; without one ``on_rewrite`` says what happens: drop, or keep with the metadata ``toxicity_flag``.
    """

    name = "toxicity"

    def __init__(
        self,
        scorer: str | Callable[[str], Any] = "metadata",
        rewrite_sum: float = 4,
        rewrite_max: float = 2,
        drop_sum: float = 7,
        drop_max: float = 3,
        rewriter: str | Callable[[str], str] | None = None,
        on_rewrite: str = "drop",
    ):
        super().__init__()
        if on_rewrite not in ("drop", "flag"):
            raise ConfigError("should be drop or flag", key="on_rewrite", value=on_rewrite)
        for low, high, what in ((rewrite_sum, drop_sum, "sum"), (rewrite_max, drop_max, "max")):
            if not 0 < low <= high:
                raise ConfigError(f"should be above 0 and at most drop_{what}={high}", key=f"rewrite_{what}", value=low)
        self.limits = (rewrite_sum, rewrite_max, drop_sum, drop_max)
        self.scorer = None if scorer == "metadata" else named(scorer, "scorer")
        self.rewriter = None if rewriter is None else named(rewriter, "rewriter")
        self.on_rewrite = on_rewrite

    def apply(self, document: Document) -> Document | Drop:
        given = document.metadata.get("toxicity") if self.scorer is None else self.scorer(document.text)
        if given is None:
            raise DataError(f"document {document.id!r} has no metadata.toxicity; name a scorer as module:function")
        scores = checked(given, document.id)
        answer = decide(scores, *self.limits)
        if answer == "rewrite" and self.rewriter is not None and self.scorer is not None:
            text = self.rewriter(document.text)
            scores = checked(self.scorer(text), document.id)
            if decide(scores, *self.limits) != "keep":
                return Drop("harmful after rewriting", _shown(scores))
            self.statistics.counts["rewritten"] += 1
            document = document.changed(text, self.name, rewritten=True)
        elif answer == "drop" or (answer == "rewrite" and self.on_rewrite == "drop"):
            return Drop("harmful" if answer == "drop" else "harmful, to be rewritten", _shown(scores))
        elif answer == "rewrite":
            self.statistics.counts["flagged"] += 1
            document = document.with_metadata(toxicity_flag=True)
        return document.with_metadata(toxicity=scores)


def checked(given: Mapping[str, float] | Sequence[float], name: str) -> dict[str, float]:
    """Five scores by axis. Raises DataError for what is not that."""
    try:
        values = [given[a] for a in AXES] if isinstance(given, Mapping) else list(given)
        found = {a: float(v) for a, v in zip(AXES, values, strict=True)}
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"document {name!r}: the scorer gave {given!r}, not a score for each of {', '.join(AXES)}"
        ) from None
    if not all(0 <= v <= 3 for v in found.values()):
        raise DataError(f"document {name!r}: scores should be between 0 and 3, not {found}")
    return found


def _shown(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {v:g}" for k, v in scores.items() if v)
