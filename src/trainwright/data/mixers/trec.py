"""TREC placement: one source goes where the final model will remember it best, all others keep their proportions.

Before the run the curve of planning/trec.py is predicted from the recipe's learning rates and weight decay. The source
gets the window of that many steps in which the curve's mean is lowest, with share ``density`` of the rows in it; the
other sources fill the rest. Every source gives exactly the rows that it would have given without placement (its
weight's share of the run, rounded), and none more than one epoch, because the curve is of data that is seen once.

Predicting Training Re-evaluation Curves Enables Effective Data Curriculums for LLMs, arXiv:2509.25380.
"""

from __future__ import annotations

import logging
import math
from typing import ClassVar

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.data.mixers.base import MixContext, MixerConfig, find_name
from trainwright.data.mixers.schedule import ScheduleMixer, apportion
from trainwright.data.mixture import Segment
from trainwright.planning.trec import MLaw, Placement, place, predicted_curve, timescale

log = logging.getLogger("trainwright")
# Optimizers whose decay is lr * weight_decay of the weights and whose steps are of steady size.
ADAMW = ("adamw", "adamw8bit")


class TrecMixer(ScheduleMixer):
    """Rows of ``source`` in one window of steps.

    totals     rows of each source over the run
    placement  the window
    """

    def __init__(self, totals: dict[str, int], source: str, placement: Placement, step_rows: int, density: float = 1.0):
        rows = sum(totals.values())
        start = min(placement.start * step_rows, rows)
        stop = min(placement.stop * step_rows, rows)
        inside = stop - start
        if totals[source] > inside:
            raise ValueError(f"{totals[source]} rows of {source} do not fit into a window of {inside}")
        names = list(totals)
        left = np.array([0 if n == source else totals[n] for n in names], np.int64)
        plan = []
        for number, (length, own) in enumerate(((start, 0), (inside, totals[source]), (rows - stop, 0))):
            free = length - own
            # The last stretch takes what is left, so that totals are exact.
            counts = left.copy() if number == 2 else apportion(free, left) if free else np.zeros_like(left)
            left = left - counts
            counts[names.index(source)] = own
            plan.append(Segment(dict(zip(names, counts.tolist(), strict=True))))
        self.names, self.plan, self.step_rows = names, plan, step_rows
        self.source, self.placement, self.density = source, placement, density


@register("mixer", "trec", paper="arXiv:2509.25380", seed_id="B118")
class TrecMixerConfig(MixerConfig):
    """One source is placed where AdamW's averaging makes the final model remember it best."""

    by_size: ClassVar[bool] = True
    source: str = Field(description="The source to place: the one with the best data.")
    density: float = Field(1.0, gt=0, le=1, description="Its share of the rows within the window.")
    m: NonNegativeFloat | None = Field(
        None, description="Exponent of the curve; null: by law, else 1. Fit it with `trainwright plan reevaluate`."
    )
    law: tuple[float, float, float] | None = Field(
        None, description="[C, mu1, mu2] of m = C * tokens_per_parameter^mu1 * tau^mu2, fitted on your own runs."
    )
    noise: NonNegativeFloat = Field(
        0.05, description="Warn when the curve in the window is not lower than its mean by this, of its range of 1."
    )
    critical_batch_tokens: PositiveInt | None = Field(
        None, description="Batch size above which steps stop paying, where known; larger ones are refused."
    )

    def curve(self, context: MixContext) -> np.ndarray:
        """The predicted curve of the run, ``[steps]``. Raises ConfigError for a run that has none."""
        if context.optimizer not in ADAMW:
            raise ConfigError(
                f"the curve is AdamW's, and optimizer={context.optimizer} averages its updates otherwise; use adamw, "
                "or give the shares yourself with data.mixer=schedule",
                key="name",
                value=self.name,
            )
        if context.lr is None or not len(context.lr):
            raise ConfigError(
                "needs a run of known length; set train.steps, tokens or epochs and leave train.seconds out",
                key="name",
                value=self.name,
            )
        if self.critical_batch_tokens is not None and context.batch_tokens > self.critical_batch_tokens:
            raise ConfigError(
                f"is below the batch of {context.batch_tokens} tokens; beyond it the curve is another one",
                key="critical_batch_tokens",
                value=self.critical_batch_tokens,
            )
        try:
            return predicted_curve(context.lr, context.weight_decay, self.exponent(context))
        except ConfigError as error:
            raise (error.under("optimizer") if error.key == "weight_decay" else error) from None

    def exponent(self, context: MixContext) -> float:
        if self.m is not None:
            return self.m
        if self.law is None:
            return 1.0
        rates = np.zeros(0) if context.lr is None else context.lr
        tau = timescale(float(np.max(rates, initial=0.0)), context.weight_decay, len(rates))
        return MLaw(*self.law)(context.tokens_per_parameter, tau)

    def build(self, context: MixContext) -> TrecMixer:
        names = list(context.proportions)
        source = find_name(self.source, names, "source")
        if len(names) < 2:
            raise ConfigError("is the only source; there is nothing to place it among", key="source", value=self.source)
        curve = self.curve(context)
        counts = apportion(context.total_rows, np.array(list(context.proportions.values())))
        totals = dict(zip(names, counts.tolist(), strict=True))
        for name, rows in totals.items():
            if rows > context.epoch_rows.get(name, rows):
                raise ConfigError(
                    f"the run takes {rows} rows of {name}, more than the {context.epoch_rows[name]} of one epoch; the "
                    "curve is of data seen once. Train for fewer steps, or give the source a smaller weight",
                    key="name",
                    value=self.name,
                )
        if not totals[source]:
            raise ConfigError("gets no row in this run; give it a larger weight", key="source", value=self.source)
        steps = math.ceil(totals[source] / self.density / context.step_rows)
        placement = place(curve, min(steps, len(curve)))
        if placement.dip < self.noise:
            log.warning(
                "data.mixer=trec: the curve is only %.3f below its mean in the best window (data.mixer.noise=%g), so "
                "where %s goes will hardly matter; a smaller timescale (more weight decay) makes it deeper",
                placement.dip, self.noise, self.source,
            )  # fmt: skip
        return TrecMixer(totals, source, placement, context.step_rows, self.density)
