"""GaLore: Adam on the gradient projected on its leading singular vectors, for hidden matrices.

Of a matrix with gradient G [m, n]; sides, layouts and the loop around it are in low_rank.py
    every ``gap`` steps:  U S V^T = G;  P = V[:, :r] (m >= n) or U[:, :r] (m < n)
    R = G P [m, r] or P^T G [r, n];  M, V = Adam's moments of R;  N = M / (sqrt(V) + eps)
    w = w (1 - lr wd) - lr scale sqrt(1 - b2^t) / (1 - b1^t) (N P^T or P N)
GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, arXiv:2403.03507.

State of m x n with m <= n: m r numbers of projection and 2 n r of moments, against 2 m n of Adam.

Its time is that of two products of m n r a step, which ``products: fast`` computes in bfloat16 (low_rank.py).

Where we differ:
- Decay comes before the update, as everywhere here, not after it: a difference of lr^2 wd u. Without decay the weights
  are those of the package galore-torch bit for bit.
- The rank may be a share of each matrix's shorter side (the paper's are 1/4 to 1/2), since a rank above a side is
  refused, where the code silently takes less.
- Moments stay as they are when the subspace is renewed, as in the paper and its code.
- Projections are tensors in the state, and SVDs of sharded matrices are shared out over the ranks.
- The per-layer mode is not the optimizer's but the loop's, for any optimizer: ``memory: [{name: fused_backward}]``
  (memory/fused_backward.py). Without it peak memory has all gradients.
- Adafactor in the subspace is not here; adam_8bit, lion and sgd are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.low_rank import LowRankRule, RefreshedConfig


class GaLore(LowRankRule):
    """GaLore as a plain optimizer; see LowRankRule for parameters, state and errors."""


@register("optimizer", "galore", paper="arXiv:2403.03507", seed_id="B019")
class GaLoreConfig(RefreshedConfig):
    """Adam in a low-rank subspace of the gradient that an SVD renews from time to time; saves optimizer memory."""

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> GaLore:
        self.check_ranks(params)
        return GaLore(groups, **self.shared_settings())
