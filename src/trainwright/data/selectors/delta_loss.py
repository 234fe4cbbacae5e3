"""Selection by how much the loss has fallen: a window that goes from the fastest learnt rows to the slower ones.

The first selection is random and remembers the pool's losses l0. At selection u of U (u = 1 .. U-1), rows are sorted by
l0 - l, falling; the window of ``window`` times the pool begins at sigmoid(10 (u / (U - 1) - 1/2)) of what is left of
the pool behind it, and ends before the first row whose loss has risen. Rows inside have weight 1, outside 0.025.
The selector of DataFlex (``delta_loss``), with its constants; losses are remembered in the checkpoint, not in files.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, PoolSelectorConfig, draw

OUTSIDE = 0.025


def window(update: int, updates: int, size: int, share: float, steepness: float = 10.0) -> tuple[int, int]:
    """Where the window of selection ``update`` of ``updates`` lies in the sorted pool."""
    way = update / max(updates, 1)
    start = size * (1 - share) / (1 + math.exp(-steepness * (way - 0.5)))
    return int(start), int(start + share * size)


class DeltaLossSelector:
    """See the module. Raises ValueError for a window outside of (0, 1] and for a pool of another size than at first."""

    def __init__(self, window_share: float = 0.2, seed: int = 0):
        if not 0 < window_share <= 1:
            raise ValueError(f"window_share={window_share} should be in (0, 1]")
        self.window_share, self.seed = window_share, seed
        self.first: np.ndarray | None = None  # float32 [N]
        self.update = 0

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        losses = model.losses()
        if self.first is None:
            self.first, self.update = losses.astype(np.float32), 1
            return draw(np.ones(model.size), n, self.seed, step)
        if len(self.first) != len(losses):
            raise ValueError(f"the pool had {len(self.first)} rows at first and has {len(losses)} now")
        fall = np.where(np.isfinite(losses) & np.isfinite(self.first), self.first - losses, -np.inf)
        order = np.argsort(-fall, kind="stable")
        start, stop = window(self.update, model.updates - 1, len(order), self.window_share)
        risen = np.flatnonzero(fall[order] < 0)
        stop = min(stop, int(risen[0])) if risen.size else stop
        weights = np.full(len(order), OUTSIDE)
        weights[order[start:stop]] = 1.0
        self.update += 1
        return draw(weights, n, self.seed, step)

    def state_dict(self) -> dict[str, Any]:
        first = None if self.first is None else base64.b64encode(self.first.astype("<f4").tobytes()).decode()
        return {"update": self.update, "first": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.update, first = int(state["update"]), state["first"]
        self.first = None if first is None else np.frombuffer(base64.b64decode(first), "<f4").astype(np.float32)


@register("selector", "delta_loss", seed_id="B046")
class DeltaLossConfig(PoolSelectorConfig):
    """Rows by how far their loss has fallen, from the fastest learnt to the slower ones."""

    fixed_pool: ClassVar[bool] = True
    window: float = Field(0.2, gt=0, le=1, description="Share of the pool that is favoured at a time.")

    def build(self, seed: int) -> DeltaLossSelector:
        return DeltaLossSelector(self.window, seed)
