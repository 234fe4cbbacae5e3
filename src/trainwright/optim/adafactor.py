"""Adafactor: second moments of a matrix as the product of one number a row and one a column; no momentum.

For a matrix W [m, n] at step t (from 1), with b = 1 - t^(-0.8) and RMS over the whole matrix:
    R = b R + (1 - b) mean_columns(g^2 + eps1)   [m, 1]
    C = b C + (1 - b) mean_rows(g^2 + eps1)      [1, n]
    V = R C / mean(R);  u = g / sqrt(V);  u = u / max(1, RMS(u) / d)
    rho = min(lr, 1 / sqrt(t))
    W = W (1 - lr wd) - rho max(eps2, RMS(W)) u
Vectors have a V of their own shape. Every expert of a stack and every matrix fused into one parameter is one W.
Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv:1804.04235, algorithms 4 and 5, without momentum.

Why not torch.optim.Adafactor: in torch 2.13 it fails on DTensors (an in-place product with a partial norm) and on empty
parameters (division by zero), and it waits for the device twice per parameter and step. This one equals it otherwise,
but for eps1, which torch sets a floor on sqrt(V) by, where the paper adds it to g^2.
Of a sharded matrix only row or column sums are sent, one number a row or column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import decay_groups
from trainwright.optim.base import OptimizerConfig, UpdateRule
from trainwright.optim.settings import Positive
from trainwright.optim.whole import BATCH_BYTES


class Adafactor(UpdateRule):
    """Adafactor for parameters of any shape, plain or DTensor.

    lr               upper bound of the rate
    beta2_decay      exponent of t above, below 0
    eps1, eps2       added to squared gradients; least RMS(W) to scale the rate by
    clip             d above: largest RMS of an update
    relative_step    lower the rate as 1 / sqrt(t)
    scale_parameter  multiply the rate by max(eps2, RMS(W))
    A group may hold ``splits``, rows (negative: columns) of each matrix that was fused into its parameters.
    State per parameter: ``row`` [..., out, 1] and ``column`` [..., 1, in], or [..., parts, in] of fused matrices
    (fused along columns: of the transposed one);
    of vectors and numbers ``variance`` (their shape); in float32 at least. ``step`` is in the groups.
    Raises ValueError for settings out of range.
    """

    group_state = ("step",)
    shapes_state = ("splits",)
    wide_state = ("row", "column", "variance")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: Annotated[float, Field(lt=0)] = -0.8,
        eps1: Positive = 1e-30,
        eps2: float = 1e-3,
        clip: Positive = 1.0,
        weight_decay: float = 0.0,
        relative_step: bool = True,
        scale_parameter: bool = True,
    ):
        defaults = {
            "lr": lr, "beta2_decay": beta2_decay, "eps1": eps1, "eps2": eps2, "clip": clip,
            "weight_decay": weight_decay, "relative_step": relative_step, "scale_parameter": scale_parameter,
            "splits": (), "step": 0,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.element_size() < 4:  # torch's load_state_dict
                    entries[key] = value.float()

    def start(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        updates = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        for some in _alike(params):
            found = self._updates([params[i] for i in some], [local_tensor(grads[i]) for i in some], group)
            torch._foreach_copy_([local_tensor(updates[i]) for i in some], list(found.unbind()))
        return updates

    def _updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> Tensor:
        """``u`` of parameters of one shape and layout, with all factors but lr: ``[n, ...]``, what this rank holds."""
        splits: Sequence[int] = group["splits"] if params[0].ndim >= 2 else ()
        turned = bool(splits) and splits[0] < 0  # fused along the columns: everything goes on the transposed matrix
        first = params[0].mT if turned else params[0]
        wide = torch.float32 if first.element_size() < 4 else first.dtype
        g = torch.stack(grads).to(wide)
        w = torch.stack([local_tensor(p) for p in params]).to(wide)
        if turned:
            g, w = g.mT, w.mT
        t, lr = group["step"], group["lr"]
        new = t ** group["beta2_decay"]  # 1 - b
        sums = _Sums(first, [abs(n) for n in splits])
        squares = g.square().add_(group["eps1"])
        if first.ndim >= 2:
            row = self._moved(params, "row", sums.rows(squares) / max(first.shape[-1], 1), new, turned)
            column = self._moved(params, "column", sums.columns(squares) / sums.lengths(g), new, turned)
            mean = sums.columns(row) / sums.lengths(g)
            roots = (row / sums.spread(mean)).sqrt() * sums.spread(column.sqrt())
            u = g / roots
        else:
            u = g / self._moved(params, "variance", squares, new).sqrt()
        u = u / (sums.rms(u) / group["clip"]).clamp(min=1.0)
        if group["scale_parameter"]:
            u = u * sums.rms(w).clamp(min=group["eps2"])
        if group["relative_step"] and lr * math.sqrt(t) > 1:
            u = u / (lr * math.sqrt(t))
        return (u.mT if turned else u).to(first.dtype)

    def _moved(self, params: list[Tensor], key: str, target: Tensor, weight: float, turned: bool = False) -> Tensor:
        """The state ``key`` after its step towards ``target [n, ...]``, which is of the same local shape."""
        kept = [self._state(p, key, t, turned) for p, t in zip(params, target.unbind(), strict=True)]
        torch._foreach_lerp_(kept, list(target.unbind()), weight)
        return torch.stack(kept)

    def _state(self, p: Tensor, key: str, example: Tensor, turned: bool) -> Tensor:
        """What this rank holds of the state; zeros like ``example`` where there is none yet."""
        state = self.state[p]
        p = p.mT if turned else p
        if not isinstance(p, DTensor):
            if key not in state:
                state[key] = torch.zeros_like(example)
            return cast(Tensor, state[key])
        # Replicated along the dimension that was summed over.
        gone = {"row": p.ndim - 1, "column": p.ndim - 2}.get(key)
        wanted: list[Placement] = [
            Replicate() if isinstance(s, Shard) and s.dim % p.ndim == gone else s for s in p.placements
        ]
        value = state.get(key)
        if value is None:
            shape = list(p.shape)
            if gone is not None:
                shape[gone] = example.shape[gone]
            value = DTensor.from_local(
                torch.zeros_like(example), p.device_mesh, wanted, run_check=False, shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )  # fmt: skip
        elif not isinstance(value, DTensor):  # from a run of one process
            value = distribute_tensor(value, p.device_mesh, wanted, src_data_rank=None)
        elif list(value.placements) != wanted:
            value = value.redistribute(placements=wanted)
        state[key] = value
        return local_tensor(value)


class _Sums:
    """Sums over rows and columns of what this rank holds of matrices ``[n, ..., out, in]``, counted whole.

    example  one of the parameters; its vectors count as one row
    splits   rows of each matrix fused into one; sums over rows are by these parts
    """

    def __init__(self, example: Tensor, splits: Sequence[int]):
        self.example, self.ndim = example, example.ndim
        self.splits = list(splits)
        self.part: Tensor | None = None  # of each row that this rank holds
        if splits:
            device = local_tensor(example).device  # made on the device, so that nothing waits for a copy
            rows = torch.cat([torch.full((size,), i, device=device) for i, size in enumerate(self.splits)])
            if isinstance(example, DTensor):
                by_rows = [
                    Shard(0) if isinstance(p, Shard) and p.dim % self.ndim == self.ndim - 2 else Replicate()
                    for p in example.placements
                ]
                mesh = example.device_mesh
                rows = distribute_tensor(rows, mesh, by_rows, src_data_rank=None).to_local()
            self.part = rows

    def _reduced(self, t: Tensor, *dims: int) -> Tensor:
        """``t``, sums over the dimensions ``dims`` (negative) of this rank's part, over all ranks."""
        p = self.example
        if isinstance(p, DTensor):
            for j, s in enumerate(p.placements):
                if isinstance(s, Shard) and s.dim % p.ndim - p.ndim in dims:
                    t = t.contiguous()
                    dist.all_reduce(t, group=p.device_mesh.get_group(j))
        return t

    def rows(self, t: Tensor) -> Tensor:
        """Over each row: ``[n, ..., out, 1]``."""
        return self._reduced(t.sum(-1, keepdim=True), -1)

    def columns(self, t: Tensor) -> Tensor:
        """Over each column, of every part: ``[n, ..., parts, in]``."""
        if self.part is None:
            return self._reduced(t.sum(-2, keepdim=True), -2)
        found = t.new_zeros((*t.shape[:-2], len(self.splits), t.shape[-1]))
        return self._reduced(found.index_add_(-2, self.part, t), -2)

    def lengths(self, t: Tensor) -> Tensor | int:
        """Rows of every part ``[parts, 1]``, or of the whole."""
        if self.part is None:
            return max(self.example.shape[-2], 1)
        return torch.cat([torch.full((1, 1), n, dtype=t.dtype, device=t.device) for n in self.splits])

    def spread(self, t: Tensor) -> Tensor:
        """What holds for the parts ``[..., parts, k]`` for each row."""
        return t if self.part is None else t.index_select(-2, self.part)

    def rms(self, t: Tensor) -> Tensor:
        """Of each matrix, or of a whole vector; to be multiplied with ``t``."""
        if self.ndim == 0:
            return t.abs()
        if self.ndim == 1:
            total = self._reduced(t.square().sum(-1, keepdim=True), -1)
            return (total / max(self.example.shape[-1], 1)).sqrt()
        total = self.columns(self.rows(t.square())) / (self.lengths(t) * max(self.example.shape[-1], 1))
        return self.spread(total.sqrt())


def _alike(params: Sequence[Tensor]) -> list[list[int]]:
    """Indexes of parameters of one shape, dtype and layout, in portions of at most BATCH_BYTES or one parameter."""
    found: dict[Any, list[list[int]]] = {}
    for i, p in enumerate(params):
        if p.numel() == 0:
            continue
        local = local_tensor(p)
        key = (p.shape, p.dtype, local.device, p.placements if isinstance(p, DTensor) else None)
        portions = found.setdefault(key, [[]])
        whole = p.numel() * p.element_size() // (p.device_mesh.size() if isinstance(p, DTensor) else 1)
        if portions[-1] and (len(portions[-1]) + 1) * whole > BATCH_BYTES:  # the same on all ranks
            portions.append([])
        portions[-1].append(i)
    return [some for portions in found.values() for some in portions]


@register("optimizer", "adafactor", paper="arXiv:1804.04235")
class AdafactorConfig(OptimizerConfig):
    """Adam's second moment kept as one number a row and one a column, no momentum (Adafactor)."""

    lr: PositiveFloat = Field(
        1e-2, description="Upper bound of the rate, relative to RMS(W); the schedule multiplies it."
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay, on matrices only.")
    beta2_decay: float = Field(-0.8, lt=0, description="Decay of the second moment is 1 - t^this.")
    eps1: PositiveFloat = Field(1e-30, description="Added to squared gradients.")
    eps2: NonNegativeFloat = Field(1e-3, description="Least RMS(W) that the rate is multiplied with.")
    clip: PositiveFloat = Field(1.0, description="Largest RMS of an update before it is multiplied with the rate.")
    relative_step: bool = Field(True, description="Lower the rate as 1 / sqrt(t).")
    scale_parameter: bool = Field(True, description="Multiply the rate with RMS(W).")

    def build(self, params: Sequence[NamedParam]) -> Adafactor:
        groups: list[dict[str, Any]] = []
        for splits in dict.fromkeys(tuple(n.splits) for n in params):
            for group in decay_groups([n for n in params if tuple(n.splits) == splits], self.weight_decay):
                groups.append({**group, "splits": splits, "split_of": f"{group['split_of']} {splits}"})
        return Adafactor(
            groups,
            lr=self.lr,
            beta2_decay=self.beta2_decay,
            eps1=self.eps1,
            eps2=self.eps2,
            clip=self.clip,
            relative_step=self.relative_step,
            scale_parameter=self.scale_parameter,
        )
