"""Clipping by the global norm (arXiv:1211.5063): g = g min(1, max_norm / |g|), |g| over all parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainwright.core.distributed import full_tensor
from trainwright.core.registry import register
from trainwright.optim.base import ClipConfig


class GlobalNormClipper:
    """``max_norm=None`` measures and clips nothing."""

    def __init__(self, max_norm: float | None):
        self.max_norm = max_norm

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return torch.zeros((), device=params[0].device if params else None)
        norm = full_tensor(get_total_norm(grads))
        if self.max_norm is not None:
            clip_grads_with_norm_(params, self.max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


@register("clip", "global_norm", paper="arXiv:1211.5063")
class GlobalNormConfig(ClipConfig):
    """Scale all gradients down when their norm together exceeds max_norm."""

    max_norm: PositiveFloat = Field(1.0, description="Largest global gradient norm let through.")

    def build(self) -> GlobalNormClipper:
        return GlobalNormClipper(self.max_norm)


@register("clip", "none")
class NoClipConfig(ClipConfig):
    """No clipping; the norm is still measured."""

    def build(self) -> GlobalNormClipper:
        return GlobalNormClipper(None)
