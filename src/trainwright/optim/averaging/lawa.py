"""LAWA: the plain mean of the last k snapshots of the weights, taken every so many steps.

    average = (1/k) sum_{i<k} w_{T - i every}           over the newest snapshot, taken at step T, and those before it

Early Weight Averaging meets High Learning Rates for LLM Pre-training, arXiv:2306.03241. It is for a high, constant
learning rate, where it stands in for the decay, and for snapshots far apart: for weights that move around one point
with correlation r between neighbouring snapshots, the variance left is (1/k)[1 + 2 sum_{j<k} (1 - j/k) r^j] of that of
a single one. After a full decay of the rate there is little left to gain.

The window slides, as the paper describes it; the authors' code averages separate windows of 5 saved files. With fewer
than k snapshots those that are there are averaged. Snapshots are float32 in host memory (4 k bytes a weight, and as
much in every checkpoint), none on the GPU; the mean is computed anew when it is asked for. Parameters alone are
averaged: buffers, as those of rotary embeddings and integer counts, and the optimizer's state stay those of the live
model. ``flush`` forgets the snapshots, for when the learning rate is raised again or weights are merged.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveInt

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.averaging._ring import RingAverage
from trainwright.optim.base import AverageConfig


class LAWA(RingAverage):
    """Mean of the last ``k`` snapshots of ``params``, one after each ``every``-th step from step ``start`` on.

    ``k=1`` is the last snapshot itself. Raises ValueError for k, every < 1 and start < 0.
    """

    name, size_name = "lawa", "k"

    def __init__(self, params: Sequence[NamedParam], k: int = 5, every: int = 100, start: int = 0):
        super().__init__(params, k, every, start)

    def weights(self, count: int) -> list[float]:
        return [1 / count] * count


@register("average", "lawa", paper="arXiv:2306.03241", seed_id="B069")
class LAWAConfig(AverageConfig):
    """Mean of the last k snapshots of the weights, kept in host memory."""

    k: PositiveInt = Field(5, description="Snapshots that are averaged; each takes 4 bytes a weight of host memory.")
    every: PositiveInt = Field(
        100, description="Steps between snapshots; the gain grows with it, up to the time over which weights drift."
    )
    start: int = Field(0, ge=0, description="First step of which a snapshot may be taken.")

    def build(self, params: Sequence[NamedParam]) -> LAWA:
        return LAWA(params, self.k, self.every, self.start)
