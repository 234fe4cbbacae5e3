"""AdamW whose moments are held in 8 bits: 2 bytes a weight instead of 8.

The moments of a matrix are runs of at most 256 numbers along its rows, each with its largest magnitude (float32) and a
byte a number, the nearest entry of a table that is dense around every power of ten (low_rank_inner.py). A step turns
them into float32, does AdamW's step and rounds the new ones:
    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
Vectors, and tensors with fewer than ``min_size`` numbers, keep float32 moments, which cost nothing.
8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

Why not torchao's AdamW8bit: its state is a tensor subclass that cannot be copied (torchao 0.18: no aten.clone), so that
checkpoints that copy it and ``copy.deepcopy`` fail, and its blocks are cut from the flattened tensor, which ties a
checkpoint to the number of ranks. Here blocks follow the rows, codes and scales are plain tensors, and a run goes on
with other ranks. The two agree where a row is a block (tested side by side), but that a second moment is never rounded
to 0 here. A matrix sharded by columns is refused, since its blocks would depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as distributed_zeros

from trainwright.core.distributed import local_tensor
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import AdamW, AdamWConfig, decay_groups
from trainwright.optim.low_rank_inner import adam_8bit, bias_correction, scales_shape
from trainwright.optim.whole import BATCH_BYTES, like

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments for parameters of any shape, plain or DTensor.

    min_size  numbers that a matrix or stack of matrices must have for 8-bit moments
    State per large parameter: ``exp_avg``, ``exp_avg_sq`` (uint8, its shape), ``exp_avg_scale``, ``exp_avg_sq_scale``
    (float32, [..., out, in / 256 rounded up]), the number ``step``; of the others as AdamW's.
    Raises ValueError for large matrices that are sharded by columns.
    """

    shapes_state = ("min_size",)
    wide_state = (*AdamW.wide_state, "exp_avg_scale")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        min_size: int = 4096,
    ):
        self.min_size = min_size
        super().__init__(params, lr, betas, eps, weight_decay)

    def check_group(self, group: dict[str, Any]) -> None:
        group.setdefault("min_size", self.min_size)  # beside the state that it shapes
        super().check_group(group)
        for p in (p for p in group["params"] if self._is_large(p, group)):
            if isinstance(p, DTensor) and any(
                isinstance(s, Shard) and s.dim % p.ndim == p.ndim - 1 for s in p.placements
            ):
                raise ValueError(
                    f"a matrix {tuple(p.shape)} is sharded by columns, and 8-bit moments go by rows; "
                    "shard it by rows, or use adamw"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "min_size": self.min_size}  # torch's leaves out what it does not know

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            for key in MOMENTS:
                if f"{key}_scale" in entries:  # torch's load_state_dict gives both the dtype of the weights
                    entries[key] = entries[key].to(torch.uint8)
                    entries[f"{key}_scale"] = entries[f"{key}_scale"].float()

    def _is_large(self, p: Tensor, group: dict[str, Any]) -> bool:
        return p.ndim >= 2 and p.numel() >= max(group.get("min_size", self.min_size), 1)

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        large = [i for i, p in enumerate(params) if self._is_large(p, group)]
        rest = [i for i, p in enumerate(params) if not self._is_large(p, group)]
        out: list[Tensor] = list(params)
        if rest:
            for i, u in zip(
                rest, super().updates([params[i] for i in rest], [grads[i] for i in rest], group), strict=True
            ):
                out[i] = u
        for some in self._portions(params, large):
            members = [params[i] for i in some]
            found = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in members]
            self._update(members, [grads[i] for i in some], found, group)
            for i, u in zip(some, found, strict=True):
                out[i] = u
        return out

    def _portions(self, params: list[Tensor], large: list[int]) -> list[list[int]]:
        """Parameters of one count of steps and length of rows, in portions that are turned into float32 together."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        held: dict[tuple[int, int], int] = {}
        for i in large:
            state = self.state[params[i]]
            state["step"] = state.get("step", 0) + 1
            key = (state["step"], params[i].shape[-1])
            size = 4 * local_tensor(params[i]).numel()
            portions = found.setdefault(key, [])
            if not portions or held[key] + size > BATCH_BYTES:
                portions.append([])
                held[key] = 0
            portions[-1].append(i)
            held[key] += size
        return [some for portions in found.values() for some in portions]

    def _update(self, params: list[Tensor], grads: list[Tensor], out: list[Tensor], group: dict[str, Any]) -> None:
        step, betas = self.state[params[0]]["step"], group["betas"]
        first, second = (self._moments(params, key) for key in MOMENTS)
        # Of AdamW's two corrections the second one goes into eps, so that one factor is left.
        eps = group["eps"] * (1 - betas[1] ** step) ** 0.5
        updates = adam_8bit([local_tensor(g) for g in grads], first, second, [-1] * len(params), betas, eps)
        torch._foreach_mul_(updates, bias_correction(step, betas))
        torch._foreach_copy_([local_tensor(u) for u in out], updates)

    def _moments(self, params: list[Tensor], key: str) -> tuple[list[Tensor], list[Tensor]]:
        """What this rank holds of codes and scales."""
        codes = [local_tensor(t) for t in self.state_of(params, key, torch.uint8)]
        scales = []
        for p in params:
            state, name = self.state[p], f"{key}_scale"
            if name not in state:
                shape = scales_shape(p.shape, -1)
                if isinstance(p, DTensor):
                    state[name] = distributed_zeros(
                        *shape, dtype=torch.float32, device_mesh=p.device_mesh, placements=p.placements
                    )
                else:
                    state[name] = torch.zeros(shape, dtype=torch.float32, device=p.device)
            elif isinstance(p, DTensor) and not isinstance(state[name], DTensor):  # from a run of one process
                state[name] = like(state[name], p)
            scales.append(local_tensor(state[name]))
        return codes, scales


@register("optimizer", "adamw8bit", paper="arXiv:2110.02861")
class AdamW8bitConfig(AdamWConfig):
    """AdamW whose moments are held in 8 bits, in blocks with a scale each."""

    min_size: NonNegativeInt = Field(4096, description="Matrices with fewer numbers keep moments of 32 bits.")

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        return self.build_rule(params)

    def build_rule(self, params: Sequence[NamedParam]) -> AdamW8bit:
        return AdamW8bit(decay_groups(params, self.weight_decay), self.lr, self.betas, self.eps, min_size=self.min_size)
