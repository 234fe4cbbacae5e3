"""LESS: the rows whose gradient points where that of the validation rows points.

For row i of the pool with gradient g_i, and validation rows v with gradients h_v, all projected to ``dim`` numbers::

    u_i = (b1 m + (1 - b1) g_i) / (sqrt(b2 s + (1 - b2) g_i^2) + eps)      Adam's moments m, s; or u_i = g_i ("sgd")
    score_i = mean_v cos(P u_i, P h_v);  the n rows of the highest scores

LESS: Selecting Influential Data for Targeted Instruction Tuning, arXiv:2402.04333. The projection P there is a dense
matrix of random signs; here it is a sparse one with a single random sign in each column (CountSketch), as unbiased for
inner products and one addition a parameter. Scores use the model of the moment (as DataFlex), not a set of checkpoints.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from trainwright.core.registry import register
from trainwright.data.selectors.base import Candidates, PoolSelectorConfig, StatelessSelector, check_n


class Sketch:
    """The projection of flat gradients ``[N]`` to ``[dim]``; the same for the same seed.

    Holds 9 bytes a parameter. Lengths of the result are right on average, with relative error about sqrt(2 / dim).
    """

    def __init__(self, size: int, dim: int, seed: int = 0, device: torch.device | None = None):
        generator = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.bucket = torch.randint(dim, (size,), generator=generator).to(device)
        self.sign = (torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1).to(device)

    def __call__(self, gradient: Tensor) -> Tensor:
        out = torch.zeros(self.dim, dtype=torch.float32, device=gradient.device)
        return out.index_add_(0, self.bucket, gradient.float() * self.sign)


def adam_direction(
    gradient: Tensor, mean: Tensor, square: Tensor, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> Tensor:
    """The update that Adam would make of ``gradient``, with its moments of the moment; all ``[N]``."""
    b1, b2 = betas
    return (b1 * mean + (1 - b1) * gradient) / ((b2 * square + (1 - b2) * gradient.square()).sqrt() + eps)


def influence(pool: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Mean cosine of each line of ``pool [N, D]`` with those of ``target [M, D]``; 0 for a line of zeros."""

    def unit(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    return unit(pool) @ unit(target).mean(0)


class LessSelector(StatelessSelector):
    """See the module. ``dim`` numbers a row are kept, of gradients of ``kind``."""

    def __init__(self, dim: int = 4096, kind: Literal["adam", "sgd"] = "adam"):
        if dim < 1 or kind not in ("adam", "sgd"):
            raise ValueError(f"dim={dim} should be at least 1 and kind={kind!r} adam or sgd")
        self.dim, self.kind = dim, kind

    def select(self, model: Candidates, step: int, n: int) -> np.ndarray:
        check_n(n, model.size)
        pool, target = model.gradients(self.dim, self.kind)
        return np.argsort(-influence(pool, target), kind="stable")[:n].astype(np.int64)


@register("selector", "less", paper="arXiv:2402.04333", seed_id="B046")
class LessConfig(PoolSelectorConfig):
    """Rows whose gradient is most like that of the validation rows."""

    dim: PositiveInt = Field(4096, description="Numbers kept of each gradient.")
    gradient: Literal["adam", "sgd"] = Field(
        "adam", description="adam: the update that Adam would make of it; needs an optimizer with Adam's moments."
    )

    def build(self, seed: int) -> LessSelector:
        return LessSelector(self.dim, self.gradient)
