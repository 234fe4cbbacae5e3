"""Clipping by the global norm (arXiv:1211.5063): g = g min(1, max_norm / |g|), |g| over all parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainwright.core.distributed import full_tensor
from trainwright.core.divided import current_division
from trainwright.core.registry import register
from trainwright.core.sliced_gradient import measured
from trainwright.optim.base import ClipConfig, by_mesh


class GlobalNormClipper:
    """Scales all gradients down to a norm of ``max_norm``, sharded ones counted whole; None: only measures."""

    def __init__(self, max_norm: float | None):
        self.max_norm = max_norm

    def __call__(self, params: Sequence[Tensor]) -> Tensor:
        norm, parts = total_norm(params)
        if self.max_norm is not None:
            for part in parts:
                clip_grads_with_norm_(part, self.max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


def total_norm(params: Sequence[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
    """Norm of all gradients together, 0-d and plain, without a host sync; and those of ``params`` that have one.

    Sharded gradients count whole; the parameters come as one list per mesh, see ``by_mesh``. Where parameters are
    divided over ranks (core/divided.py), all of them count, and every one of these ranks has to call.
    """
    # Gradients lie as their parameters do.
    parts = list(by_mesh(p for p in params if p.grad is not None).values())
    division = current_division()
    if division is None:
        return _norm(params, parts), parts
    counted = list(by_mesh(p for p in params if p.grad is not None and division.counts(p)).values())
    return division.norm(_norm(params, counted)), parts


def _norm(params: Sequence[Tensor], parts: list[list[Tensor]]) -> Tensor:
    if not parts:
        return torch.zeros((), device=params[0].device if params else None)
    norms = [
        full_tensor(norm) for part in parts for norm in _norms([measured(p.grad) for p in part if p.grad is not None])
    ]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """Norms of 0-d whose squares add up to that of ``grads``; 16-bit gradients are summed in float32."""
    low = [g for g in grads if g.element_size() < 4]
    norms = [get_total_norm(high)] if (high := [g for g in grads if g.element_size() >= 4]) else []
    if low:
        device = low[0].device
        each = torch._foreach_norm(low, 2.0, dtype=torch.float32)
        norms.append(torch.linalg.vector_norm(torch.stack([n.to(device) for n in each])))
    return norms


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
