"""ODM: a bandit that draws more from the sources in which the loss is high, and tries all of them now and then.

Exp3 with a moving average. For K sources, update t = 1, 2, ..., reward = the source's loss (nats a token), and pi the
proportions by which it was drawn::

    R_i   <- alpha R_i + (1 - alpha) loss_i / pi_i          for each source that was drawn; alpha = 0.9, R = 0 at first
    eps_t  = min(1/K, sqrt(ln K / (K t))),   eps_0 = 1/K
    pi_i   = (1 - K eps_t) softmax(eps_{t-1} R)_i + eps_t   so pi_i >= eps_t

Efficient Online Data Mixing For Language Model Pre-Training, arXiv:2312.02406. The loss is of the tokens since the last
update. High loss is not the same as much to learn: pure noise has the highest loss of all and gets the most rows (see
docs/dynamic_data.md); use doremi, which compares with what can be reached, where sources may be noise.
DataFlex multiplies rewards by 15, clips exponents to [-5, 0], keeps eps above 0.03 and begins anew when proportions do
not fit; none of it is in the paper and none is done here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from trainwright.core.registry import register
from trainwright.data.mixers.base import MixContext, MixStats, UpdatingMixerConfig, check_names, normalised
from trainwright.data.mixers.doremi import check_same_names
from trainwright.data.mixture import Segment


def exploration(sources: int, update: int) -> float:
    """eps_t."""
    return 1 / sources if update < 1 else min(1 / sources, math.sqrt(math.log(sources) / (sources * update)))


def odm_proportions(rewards: np.ndarray, update: int) -> np.ndarray:
    """pi [K] after update ``update`` >= 1, by the averaged rewards ``[K]``."""
    k = len(rewards)
    before, now = exploration(k, update - 1), exploration(k, update)
    e = np.exp(before * (rewards - rewards.max()))
    return (1 - k * now) * e / e.sum() + now


class OdmMixer:
    """Proportions by the losses themselves.

    proportions  to begin with, by source
    alpha        how much of the averaged reward an update keeps
    """

    plan: Sequence[Segment] | None = None

    def __init__(self, proportions: Mapping[str, float], alpha: float = 0.9):
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha={alpha} should be in [0, 1)")
        self.names, self.alpha = check_names(list(proportions)), alpha
        self.pi = np.array(list(normalised(proportions).values()))
        self.rewards, self._updates = np.zeros(len(self.names)), 0

    def mix(self, stats: MixStats) -> dict[str, float]:
        for i, name in enumerate(self.names):
            loss = stats.losses.get(name, math.nan)
            if math.isfinite(loss) and self.pi[i] > 0:
                self.rewards[i] = self.alpha * self.rewards[i] + (1 - self.alpha) * loss / self.pi[i]
        self._updates += 1
        self.pi = odm_proportions(self.rewards, self._updates)
        return dict(zip(self.names, self.pi.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": self.names, "proportions": self.pi.tolist(), "rewards": self.rewards.tolist(),
            "updates": self._updates,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_same_names(self.names, state)
        self.pi, self.rewards = np.array(state["proportions"], float), np.array(state["rewards"], float)
        self._updates = int(state["updates"])


@register("mixer", "odm", paper="arXiv:2312.02406", seed_id="B046")
class OdmConfig(UpdatingMixerConfig):
    """A bandit over the sources whose reward is their loss; drifts to noise."""

    alpha: float = Field(0.9, ge=0, lt=1, description="How much of the averaged reward an update keeps.")

    def build(self, context: MixContext) -> OdmMixer:
        return OdmMixer(context.proportions, self.alpha)
