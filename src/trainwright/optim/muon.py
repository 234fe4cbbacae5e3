"""Muon: momentum, orthogonalised by a Newton-Schulz iteration, for hidden matrices.

m = mu m + (1 - mu) g;  u = (1 - mu) g + mu m (Nesterov) or m;  o = NS5(u) ~ U V^T of u = U S V^T
w = w (1 - lr wd) - lr s o, with s = 0.2 sqrt(max(out, in)) ("match_rms_adamw": the update's RMS is that of AdamW, so
its rates and decay carry over) or s = sqrt(max(1, out / in)) ("original").
Keller Jordan, https://kellerjordan.github.io/posts/muon, 2024; Muon is Scalable for LLM Training, arXiv:2502.16982.

The iteration runs on whole matrices, since orthogonalising a shard gives another update: of a sharded model each rank
gets some of the matrices whole, and sends the updates back (whole.py). Matrices of one shape, and the experts of a
layer, go through it in batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from trainwright.core.hardware import cpu_features
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.matrix import MatrixRule, OneRateConfig
from trainwright.optim.whole import map_whole

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; steep at 0, within [0.7, 1.2] at the end


def newton_schulz(
    g: Tensor,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    coefficients: Sequence[float] = NS_COEFFICIENTS,
    scale: float = 1.0,
) -> Tensor:
    """About ``scale U V^T`` of ``g [..., m, n]``: singular values pushed towards 1 by ``steps`` rounds of a quintic.

    Computed in ``dtype`` (None: that of ``g``); returned in it. Zero stays zero.
    """
    a, b, c = coefficients
    x = g.to(dtype) if dtype is not None else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    flat = x.reshape(-1, *x.shape[-2:])
    flat, add_product = (flat[0], torch.addmm) if flat.shape[0] == 1 else (flat, torch.baddbmm)
    tall = x.shape[-2] > x.shape[-1]
    for i in range(steps):
        last = scale if i == steps - 1 else 1.0
        gram = flat.mT @ flat if tall else flat @ flat.mT  # [n, m, m], m the shorter side
        poly = add_product(gram, gram, gram, beta=b, alpha=c)
        first, second = (flat, poly) if tall else (poly, flat)
        flat = add_product(flat, first, second, beta=a * last, alpha=last)
    return flat.reshape(x.shape)


def update_scale(shape: Sequence[int], adjust: str) -> float:
    """Factor on the orthogonalised update of a matrix ``[..., out, in]``."""
    rows, columns = shape[-2], shape[-1]
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


@torch.compiler.assume_constant_result
def iteration_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it (CUDA from capability 8.0, CPUs with AVX512-BF16 or AMX), else float32.

    By the kind of hardware, not by measurement: all ranks have to agree, and a resumed run with the one before.
    Without such instructions bfloat16 products on a CPU are hundreds of times slower.
    """
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_features())
    return torch.bfloat16 if fast else torch.float32


class Muon(MatrixRule):
    """Muon for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params           matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor
    lr               step size, times the scale above
    adjust           "match_rms_adamw" or "original"
    dtype            of the iteration; None: float64 for such parameters, else what iteration_dtype() says
    Raises ValueError for parameters with fewer than two dimensions.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        eps: float = 1e-7,
        dtype: torch.dtype | None = None,
    ):
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "adjust": adjust, "eps": eps,
        }  # fmt: skip
        self.dtype = dtype
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dtype": self.dtype}  # torch's leaves out what it does not know

    def directions(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """What is orthogonalised: the momentum, or Nesterov's look-ahead. The caller must not write to it."""
        mu = group["momentum"]
        momenta = self.state_of(params, "momentum")
        torch._foreach_lerp_(momenta, grads, 1 - mu)
        return list(torch._foreach_lerp(grads, momenta, mu)) if group["nesterov"] else momenta

    def orthogonalise(self, directions: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The scaled updates of ``directions``."""
        given = directions[0].dtype
        dtype = self.dtype or (given if given == torch.float64 else iteration_dtype(directions[0].device))

        def function(stack: Tensor) -> Tensor:
            scale = update_scale(stack.shape, group["adjust"])
            return newton_schulz(stack, group["ns_steps"], group["eps"], dtype, scale=scale)

        narrow = dtype if dtype.itemsize < given.itemsize else given
        return map_whole(function, directions, splits=group["splits"], wire=narrow)

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        return self.orthogonalise(self.directions(params, grads, group), group)


@register("optimizer", "muon", paper="arXiv:2502.16982", seed_id="B033")
class MuonConfig(OneRateConfig):
    """Orthogonalised momentum for hidden matrices, another optimizer for the rest (Moonlight's scaling)."""

    lr: float = Field(2e-2, gt=0, description="Peak learning rate of the matrices; the schedule multiplies it.")
    momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the momentum.")
    nesterov: bool = Field(True, description="Nesterov's look-ahead.")
    ns_steps: PositiveInt = Field(5, le=20, description="Rounds of the Newton-Schulz iteration.")
    adjust: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="Scale of the update: 0.2 sqrt(max side), as Moonlight, or sqrt(max(1, out/in)), whose rate is not "
        "AdamW's: then inner has one of its own.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> MuonConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        return self

    def inner_rate(self) -> float | None:
        return self.lr if self.adjust == "match_rms_adamw" else None

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> Muon:
        return Muon(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust=self.adjust,
        )
