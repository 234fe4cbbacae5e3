"""Clipping by the global norm (arXiv:1211.5063): g = g min(1, max_norm / |g|), |g| over all parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainwright.core.distributed import full_tensor
from trainwright.core.registry import register
from trainwright.optim.base import ClipConfig


class GlobalNormClipper:
    """Scales all gradients down to a norm of ``max_norm``, sharded ones counted whole; None: only measures."""

    def __init__(self, max_norm: float | None):
        self.max_norm = max_norm

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        # Parameters on different meshes, or on none, cannot go through one kernel together.
        parts: dict[DeviceMesh | None, list[Tensor]] = {}
        for p in params:
            if p.grad is not None:
                parts.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
        if not parts:
            return torch.zeros((), device=params[0].device if params else None)
        norms = [full_tensor(get_total_norm([p.grad for p in part if p.grad is not None])) for part in parts.values()]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        if self.max_norm is not None:
            for part in parts.values():
                clip_grads_with_norm_(part, self.max_norm, norm)
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
