"""GradNormLoRP: hidden matrices as magnitude and direction; the direction is stepped in a low-rank subspace.

Of a matrix W [out, in] with gradient G, both split by row at every step, s the norms of the rows of W:
    W = s V / |V|, V = W in place;   D = W / s [out, in]
    gs = <G, D> by row [out, 1];     GV = G - D gs, which is orthogonal to W in every row
    V = W - lr (GaLore's update of GV: projection of rank r every ``gap`` steps, Adam in the subspace, times scale)
    s = s (1 - lr wd) - lr (Adam's update of gs);   W = s V / |V|
Gradient Weight-normalized Low-rank Projection for Efficient LLM Training, arXiv:2412.19616.

State of m x n with m <= n: m r numbers of projection, 2 n r of moments (low_rank.py) and 2 for each row.

The equations are ours, from the paper's parametrisation. Its code keeps a copy of all weights, overwrites the magnitude
in every step, so that what is learned of it is lost, and leaves out the projection on the tangent (in another class
the new weights are never written back). Further:
- V is the weight itself and s its row norms, computed afresh, since after each step |V| = s: neither is stored. A
  magnitude that passes zero turns its row round.
- A row of zeros has no direction. Its first update is taken as it is and gives it one, so that matrices which start
  from zero are trained.
- Decay acts on the magnitudes alone, where it is that of W; on V it would change nothing.
- Rows are output features. Of matrices that are stored transposed and fused (GPT-2's) these are the columns, and the
  norms are theirs; a transposed matrix that is not fused cannot be told from another, and goes by row.

Fine-tuning, W = m V / |V| with V = W0 + (alpha / r) B A and W0 frozen, is DoRA (``dora: true`` of the transform lora):
the norm is the layer's, so that the gradients of A [r, in] and B [out, r] are projected as GaLore's and nothing else
is done to them; m, a vector, goes to the inner optimizer. Parameters are known as A and B by their names. The paper's
settings are alpha 16 and dropout 0.1; lr 3e-5, rank at most r, scale 4 and gap 500. Its script for GLUE does not have
this form: it gives GaLore the weights of the modules that a LoRA would be put into.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import low_rank_inner
from trainwright.optim.low_rank import LowRankRule, RefreshedConfig
from trainwright.optim.whole import beside, like

log = logging.getLogger("trainwright")
FACTOR = re.compile(r"lora_[abAB](\.|$)")  # names of an adapter's A and B, ours and PEFT's
TINY = 1e-12  # rows with a smaller norm have no direction


def row_norms(t: Tensor, dim: int) -> Tensor:
    """Norms over ``dim`` (kept, of length 1), whole even where that one is sharded."""
    return _whole(torch.linalg.vector_norm(t, dim=dim, keepdim=True))


def row_products(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Inner products over ``dim`` likewise."""
    return _whole((a * b).sum(dim, keepdim=True))


def _whole(t: Tensor) -> Tensor:
    if isinstance(t, DTensor) and any(p.is_partial() for p in t.placements):
        return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
    return t


def split_gradient(weight: Tensor, grad: Tensor, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Norms of the rows, gradient of the magnitudes (both ``[..., out, 1]``) and of V, which is the weight.

    dim  that a norm is taken over. Rows of zeros have all of their gradient in V.
    """
    norms = row_norms(weight, dim)
    guarded = norms.clamp(min=TINY)
    to_norms = row_products(grad, weight, dim) / guarded
    return norms, to_norms, torch.addcmul(grad, weight, to_norms / guarded, value=-1)


def rebuild_(moved: Tensor, norms: Tensor, magnitudes: Tensor, dim: int = -1) -> None:
    """Make W of V after its step, in place, with the new ``magnitudes``; ``norms`` are those before the step."""
    new_norms = row_norms(moved, dim)
    moved.mul_(beside(torch.where(norms > TINY, magnitudes, new_norms) / new_norms.clamp(min=TINY), moved))


class GradNormLoRP(LowRankRule):
    """GradNormLoRP as a plain optimizer, for matrices ``[..., out, in]``, plain or DTensor.

    learn_magnitude  False: the norms of the rows stay as they are
    settings         those of LowRankRule; ``subspace`` is the rule of the magnitudes too (adam for adam_8bit)
    A group with ``normalized: False`` holds factors of an adapter, whose product is normalised by the layer: GaLore.
    State besides that of LowRankRule: ``norm_avg`` and ``norm_avg_sq`` [..., out, 1], sharded as the rows are.
    Raises ValueError for vectors, a rank above the shorter side of a matrix and settings out of range.
    """

    shapes_state = (*LowRankRule.shapes_state, "learn_magnitude", "normalized")
    adam = staticmethod(low_rank_inner.fused_adam)
    wide_state = (*LowRankRule.wide_state, "norm_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        learn_magnitude: bool = True,
        **settings: Any,
    ):
        super().__init__(
            params, lr, weight_decay, more={"learn_magnitude": learn_magnitude, "normalized": True}, **settings
        )

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> NoReturn:
        raise NotImplementedError("the step is not linear in the rate, so that there is no update apart from it")

    def step_part(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        if not group["normalized"]:
            super().step_part(params, grads, group)
            return
        some = [(p, g) for p, g in zip(params, grads, strict=True) if p.numel()]
        if not some:
            return
        params, grads = [p for p, _ in some], [g for _, g in some]
        # Rows are columns of the transposed matrices that GPT-2 fuses.
        dim = -2 if group["splits"] and group["splits"][0] < 0 else -1
        weights = _wide(params)  # themselves, or copies of 16-bit ones
        # Parameter by parameter: no kernel for several takes rows and matrices together.
        split = [split_gradient(w, g, dim) for w, g in zip(weights, _wide(grads), strict=True)]
        norms, to_norms = [s[0] for s in split], [s[1] for s in split]
        updates, factors = self.directions(
            params, [s[2].to(p.dtype) for s, p in zip(split, params, strict=True)], group
        )
        magnitudes = list(torch._foreach_mul(norms, 1 - group["lr"] * group["weight_decay"]))
        if group["learn_magnitude"]:
            torch._foreach_add_(magnitudes, self._magnitude_updates(params, to_norms, group), alpha=-group["lr"])
            # The direction of a row that turned round has turned, and with it the gradient of its norm.
            signs = torch._foreach_sign(magnitudes)
            kept = self._vectors(params, "norm_avg", to_norms)
            torch._foreach_mul_(kept, [s.to(k.dtype) for s, k in zip(signs, kept, strict=True)])
        self.apply_scaled(weights, _wide(updates), factors, {**group, "weight_decay": 0.0})
        for p, w, n, m in zip(params, weights, norms, magnitudes, strict=True):
            rebuild_(w, n, m, dim)
            if w is not p:
                p.copy_(w)

    def _magnitude_updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        rule, betas = group["subspace"], group["betas"]
        if rule == "sgd":
            return grads
        narrow = [g.to(p.dtype) for g, p in zip(grads, params, strict=True)]
        first = self._vectors(params, "norm_avg", grads)
        if rule == "lion":
            return _wide(low_rank_inner.lion(narrow, first, betas))
        second = self._vectors(params, "norm_avg_sq", grads)
        found = _wide(low_rank_inner.adam(narrow, first, second, betas, group["eps"]))
        torch._foreach_mul_(found, [low_rank_inner.bias_correction(self.state[p]["step"], betas) for p in params])
        return found

    def _vectors(self, params: list[Tensor], key: str, templates: list[Tensor]) -> list[Tensor]:
        """State with an entry per row, laid out as ``templates``; zeros at first."""
        found = []
        for p, t in zip(params, templates, strict=True):
            state = self.state[p]
            if key not in state:
                state[key] = torch.zeros_like(t, dtype=self.state_dtype(p, key))
            state[key] = state[key].to(self.state_dtype(p, key))  # of an older checkpoint
            if isinstance(t, DTensor) and not isinstance(state[key], DTensor):
                state[key] = like(state[key], t)  # from a checkpoint of another layout
            found.append(state[key])
        return found


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    """In float32 at least."""
    return [t.float() if t.element_size() < 4 else t for t in tensors]


@register("optimizer", "gradnormlorp", paper="arXiv:2412.19616", seed_id="B093")
class GradNormLoRPConfig(RefreshedConfig):
    """GaLore on the directions of the rows of each hidden matrix, whose norms are learned apart."""

    gap: PositiveInt = Field(250, description="Steps between new projections.")
    learn_magnitude: bool = Field(True, description="Whether the norms of the rows are learned.")

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        adapted = sum(FACTOR.search(n.name) is not None for n in params)
        if adapted and not any("lora_magnitude" in n.name for n in params):
            log.warning(
                "gradnormlorp: the A and B of %d adapters have no magnitudes beside them, which makes this GaLore; "
                "set transforms: [{name: lora, dora: true}]",
                adapted // 2,
            )
        return super().build(params)

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> GradNormLoRP:
        self.check_ranks(params)
        factors = {id(n.param) for n in params if FACTOR.search(n.name)}
        groups = [
            {**g, "params": some, "normalized": not adapted}
            for g in groups
            for adapted in (False, True)
            if (some := [p for p in g["params"] if (id(p) in factors) == adapted])
        ]
        return GradNormLoRP(groups, **self.shared_settings(), learn_magnitude=self.learn_magnitude)

    def build_rule(self, params: Sequence[NamedParam]) -> NoReturn:
        raise ConfigError(
            "its step is not linear in the rate, so that another method cannot change its update; use galore",
            key="name",
            value=self.name,
        )
