"""DoReMi: more of the sources in which a model is furthest above a reference model, which is what it can still learn.

With proportions a [K], excess losses e [K] (nats a token, at least 0), step size eta and smoothing c::

    a_i <- a_i exp(eta e_i) / sum_j a_j exp(eta e_j)
    a   <- (1 - c) a + c / K                         so a_i >= c / K
    result of the run: the average of a over its updates

The excess of a source is the mean over its tokens of max(l - l_ref, 0), clipped token by token; without the reference's
losses of each token (``reference_losses``), max(L - L_ref, 0) of the source's mean losses, which is not more.

DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining, arXiv:2305.10429. There a small proxy model
draws all sources alike and has its loss weighted by a; here rows are drawn by a, with the same expected gradient, so
that tokens are spent where a says. The paper's use is had too: take ``average`` of the run as the weights of the next.
A source of which the batch has no row keeps its last excess (0 at first). DataFlex takes the mean off the excess and
clips to [-5, 5]; the first changes nothing after normalising, the second is not in the paper. Neither is done here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, NonNegativeFloat, model_validator

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.data.mixers.base import MixContext, MixStats, UpdatingMixerConfig, by_name, check_names, normalised
from trainwright.data.mixture import Segment


def doremi_update(proportions: np.ndarray, excess: np.ndarray, eta: float, smoothing: float) -> np.ndarray:
    """One update of ``proportions [K]`` by ``excess [K]``; see the module's equations."""
    exponent = eta * np.maximum(excess, 0.0)
    raised = proportions * np.exp(exponent - exponent.max())
    return (1 - smoothing) * raised / raised.sum() + smoothing / len(proportions)


class DoReMiMixer:
    """Proportions by excess loss over a reference.

    proportions       to begin with, by source
    eta               step size
    smoothing         share of every update that is spread evenly
    reference_losses  nats a token of the reference model by source; None: :meth:`mix` gets ``stats.excess``
    """

    plan: Sequence[Segment] | None = None

    def __init__(
        self,
        proportions: Mapping[str, float],
        eta: float = 1.0,
        smoothing: float = 1e-3,
        reference_losses: Mapping[str, float] | None = None,
    ):
        if not (math.isfinite(eta) and eta >= 0 and 0 <= smoothing <= 1):
            raise ValueError(f"eta={eta} should be at least 0 and smoothing={smoothing} in 0..1")
        self.names = check_names(list(proportions))
        self.eta, self.smoothing = eta, smoothing
        self.a = np.array(list(normalised(proportions).values()))
        self.reference = None if reference_losses is None else by_name(self.names, reference_losses, "reference_losses")
        self.excess = np.zeros(len(self.names))
        self._sum, self._updates = np.zeros(len(self.names)), 0

    def mix(self, stats: MixStats) -> dict[str, float]:
        if self.reference is not None:
            found = {
                n: stats.losses[n] - r for n, r in zip(self.names, self.reference, strict=True) if n in stats.losses
            }
        else:
            found = dict(stats.excess)
            if not found:
                raise ValueError("DoReMi needs a reference: reference_losses, or stats.excess at each update")
        for i, name in enumerate(self.names):
            if math.isfinite(found.get(name, math.nan)):
                self.excess[i] = max(found[name], 0.0)
        self.a = doremi_update(self.a, self.excess, self.eta, self.smoothing)
        self._sum += self.a
        self._updates += 1
        return dict(zip(self.names, self.a.tolist(), strict=True))

    @property
    def average(self) -> dict[str, float]:
        """Mean of the proportions over all updates: what DoReMi gives out in the end."""
        mean = self._sum / self._updates if self._updates else self.a
        return dict(zip(self.names, mean.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        arrays = {"proportions": self.a, "excess": self.excess, "sum": self._sum}
        return {**{k: v.tolist() for k, v in arrays.items()}, "updates": self._updates, "names": self.names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_names(self.names, state)
        self.a, self.excess, self._sum = (np.array(state[k], float) for k in ("proportions", "excess", "sum"))
        self._updates = int(state["updates"])


def check_same_names(names: Sequence[str], state: Mapping[str, Any]) -> None:
    if list(state["names"]) != list(names):
        raise ConfigError(
            f"the run mixed {list(state['names'])} so far and would mix {list(names)} now; its proportions cannot be "
            "carried over. Restore the sources, or start a new run from the weights",
            key="data.sources",
        )


@register("mixer", "doremi", paper="arXiv:2305.10429", seed_id="B046")
class DoReMiConfig(UpdatingMixerConfig):
    """More of the sources whose loss is furthest above that of a reference model."""

    reference: Path | None = Field(None, description="Folder of a finished run with the same tokenizer.")
    reference_losses: dict[str, float] | None = Field(
        None, description="Instead: the reference's loss by source, in nats a token."
    )
    eta: NonNegativeFloat = Field(1.0, description="Step size of an update.")
    smoothing: float = Field(1e-3, ge=0, le=1, description="Share of the proportions that is spread evenly.")

    @model_validator(mode="after")
    def _has_reference(self) -> DoReMiConfig:
        if (self.reference is None) == (self.reference_losses is None):
            raise ValueError(
                "doremi compares with a reference: give reference, the folder of a run trained on the sources in equal "
                "shares, or reference_losses, a loss for each source; one of the two"
            )
        return self

    def build(self, context: MixContext) -> DoReMiMixer:
        return DoReMiMixer(context.proportions, self.eta, self.smoothing, self.reference_losses)
