"""SOAP: Adam in the eigenbases of Shampoo's two preconditioners, for hidden matrices.

For a matrix W [m, n] with gradient G, bases P [m, m] and Q [n, n] and moments M (of W's space), V (of the bases'):
    M = b1 M + (1 - b1) G;  V = b2 V + (1 - b2) (P^T G Q)^2
    u = sqrt(1 - b2^t) / (1 - b1^t) P ((P^T M Q) / (sqrt(V) + eps)) Q^T
    w = w (1 - lr wd) - lr u
    L = bs L + (1 - bs) G G^T;  R = bs R + (1 - bs) G^T G
and every ``frequency`` steps one power iteration: P = QR(L P), its columns first put in the order of falling
eigenvalues, and the rows of V with them; Q from R likewise. A side longer than ``max_side`` keeps P = I.
The first gradient gives L and R, whose eigenvectors are the first bases; M, V and t start with the second one.
SOAP: Improving and Stabilizing Shampoo using Adam, arXiv:2409.11321; code: nikhilvyas/SOAP (MIT).

Differences. The first step moves the weights by Adam's first step, g / (|g| + eps), where the code does not move them.
Decay comes before the step, as everywhere here. Eigenvectors of equal eigenvalues (the first L has rank min(m, n)) are
any basis of their space: a small diagonal that differs from entry to entry is added to L and R for the first bases,
so that rounding does not choose among them, and runs on other numbers of ranks agree.

Memory per matrix: 2 (m n + m^2 + n^2) numbers. Sharded matrices are gathered on every rank, which all compute the
same; M and V are sharded as W is, L, R and the bases are held by all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.matrix import MatrixRule, OneRateConfig
from trainwright.optim.settings import Count, Decay
from trainwright.optim.whole import batches, gather, like, matrices, split_dim

TIE_BREAK = 1e-2  # of the mean eigenvalue


def first_basis(gram: Tensor) -> Tensor:
    """Eigenvectors of ``gram [N, m, m]`` as columns, of falling eigenvalues; ties are broken by the diagonal."""
    m = gram.shape[-1]
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # [N, 1]
    order = torch.linspace(1, 0, m, dtype=gram.dtype, device=gram.device)
    return torch.linalg.eigh(gram + torch.diag_embed(TIE_BREAK * mean * order)).eigenvectors.flip(-1)


def next_basis(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration of ``basis [N, m, m]``, and the order ``[N, m]`` that its columns were put into."""
    turned = gram @ basis
    order = (basis * turned).sum(-2).argsort(-1, descending=True)
    turned = turned.gather(-1, order[:, None, :].expand_as(turned))
    return torch.linalg.qr(turned).Q, order


def rotate(x: Tensor, left: Tensor | None, right: Tensor | None, back: bool = False) -> Tensor:
    """``P^T x Q`` of ``x [N, m, n]``, or ``P x Q^T``; None is the identity."""
    if left is not None:
        x = (left if back else left.mT) @ x
    if right is not None:
        x = x @ (right.mT if back else right)
    return x


class SOAP(MatrixRule):
    """SOAP for matrices ``[out, in]`` and stacks of them, plain or DTensor.

    betas         decay of the moments, each in [0, 1)
    shampoo_beta  decay of L and R; None: the second of ``betas``
    frequency     steps between power iterations
    max_side      longest side that is preconditioned
    State per parameter: ``exp_avg``, ``exp_avg_sq`` (its shape); per part of a fused one (".1" and so on after the
    first) ``left`` [..., m, m], ``right`` [..., n, n], ``left_basis``, ``right_basis``; the number ``step``.
    Raises ValueError for parameters with fewer than two dimensions and for settings out of range.
    """

    shapes_state = ("max_side", "splits")
    wide_state = (*MatrixRule.wide_state, "left", "right")

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        shampoo_beta: Decay | None = None,
        frequency: Count = 10,
        max_side: int = 10_000,
    ):
        shampoo_beta = betas[1] if shampoo_beta is None else shampoo_beta
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "shampoo_beta": shampoo_beta,
            "frequency": frequency, "max_side": max_side,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            for key, value in entries.items():
                if key.startswith(("left", "right")) and value.element_size() < 4:  # torch's load_state_dict
                    entries[key] = value.float()

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        first, second = self.state_of(params, "exp_avg"), self.state_of(params, "exp_avg_sq")
        out = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in params]
        alike: dict[Any, list[int]] = {}
        for i, p in enumerate(params):
            self.state[p]["step"] = self.state[p].get("step", -1) + 1
            if p.numel():
                alike.setdefault((p.shape, self.state[p]["step"]), []).append(i)
        for (_, step), ready in alike.items():
            for some in batches([params[i] for i in ready]):
                columns = [[column[ready[k]] for k in some] for column in (params, grads, first, second, out)]
                self._turn(columns, step, group)
        return out

    def _turn(self, columns: list[list[Tensor]], step: int, group: dict[str, Any]) -> None:
        """Of parameters of one shape, their gradients, moments and updates: fills the last and moves the state."""
        params, grads, first, second, out = columns
        b1, b2 = group["betas"]
        scale = math.sqrt(1 - b2**step) / (1 - b1**step) if step else 1.0
        if step:
            torch._foreach_lerp_(first, grads, 1 - b1)
        wide = torch.float32 if grads[0].element_size() < 4 else grads[0].dtype
        parts = [
            [
                torch.cat(column)
                for column in zip(*[matrices(gather(t).to(wide), group["splits"]) for t in some], strict=True)
            ]
            for some in (grads, first, second)
        ]
        lead = params[0].shape[:-2]
        updates, moments = [], []
        for k, (g, m, v) in enumerate(zip(*parts, strict=True)):
            names = [key if k == 0 else f"{key}.{k}" for key in ("left", "right")]
            if step == 0:
                self._begin(params, names, g, group)
            p, q = (self._stack(params, f"{name}_basis") for name in names)
            if step:
                v = torch.lerp(v, rotate(g, p, q).square(), 1 - b2)
                u = rotate(rotate(m, p, q) / (v.sqrt() + group["eps"]), p, q, back=True) * scale
            else:
                u = g / (g.abs() + group["eps"])
            updates.append(u)
            moments.append(self._learn(params, names, g, v, step, group))
        for targets, found in ((out, updates), (second, moments)):
            whole = torch.cat(found, dim=split_dim(group["splits"])).reshape(len(params), *lead, *params[0].shape[-2:])
            for target, t in zip(targets, whole, strict=True):
                target.copy_(like(t.to(target.dtype), target))

    def _begin(self, params: list[Tensor], names: list[str], g: Tensor, group: dict[str, Any]) -> None:
        """The first preconditioners and bases, from the first gradients ``g [N, m, n]``."""
        lead = params[0].shape[:-2]
        for name, x in zip(names, (g, g.mT), strict=True):
            side = x.shape[-2]
            if side > group["max_side"]:
                continue
            gram = x @ x.mT
            found = {name: gram * (1 - group["shampoo_beta"]), f"{name}_basis": first_basis(gram)}
            for key, stack in found.items():
                for p, t in zip(params, stack.view(len(params), *lead, side, side), strict=True):
                    self.state[p][key] = t.clone()

    def _learn(
        self, params: list[Tensor], names: list[str], g: Tensor, v: Tensor, step: int, group: dict[str, Any]
    ) -> Tensor:
        """Moves preconditioners and, when it is time, bases; gives ``v`` in the order of the new ones."""
        for side, name in enumerate(names):
            gram = self._stack(params, name)
            if gram is None or step == 0:
                continue
            gram = torch.lerp(gram, g @ g.mT if side == 0 else g.mT @ g, 1 - group["shampoo_beta"])
            self._store(params, name, gram)
            if step % group["frequency"] == 0:
                basis, order = next_basis(gram, self._stack(params, f"{name}_basis"))  # type: ignore[arg-type]
                self._store(params, f"{name}_basis", basis)
                index = order[:, :, None] if side == 0 else order[:, None, :]
                v = v.gather(-2 + side, index.expand_as(v))
        return v

    def _stack(self, params: list[Tensor], name: str) -> Tensor | None:
        """The state ``name`` of ``params`` as one stack, or None for a side that has none."""
        if name not in self.state[params[0]]:
            return None
        for p in params:
            # A checkpoint gives what has the shape of a sharded parameter its layout: L of a square one.
            self.state[p][name] = gather(self.state[p][name])
        return torch.cat([t.reshape(-1, *t.shape[-2:]) for t in (self.state[p][name] for p in params)])

    def _store(self, params: list[Tensor], name: str, stack: Tensor) -> None:
        kept = [self.state[p][name] for p in params]
        torch._foreach_copy_(kept, list(stack.view(len(params), *kept[0].shape).unbind()))


@register("optimizer", "soap", paper="arXiv:2409.11321")
class SOAPConfig(OneRateConfig):
    """Adam in the eigenbases of Shampoo's preconditioners for hidden matrices (SOAP)."""

    lr: PositiveFloat = Field(3e-3, description="Peak learning rate of the matrices; the schedule multiplies it.")
    betas: tuple[float, float] = Field(
        (0.95, 0.95), description="Decay of the first and second moment, each in [0, 1)."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment.")
    shampoo_beta: float | None = Field(
        None, ge=0, lt=1, description="Decay of the preconditioners; null: that of the second moment."
    )
    frequency: PositiveInt = Field(10, description="Steps between updates of the bases.")
    max_side: PositiveInt = Field(10_000, description="Longest side of a matrix that is preconditioned.")

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> SOAP:
        return SOAP(
            groups,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            shampoo_beta=self.shampoo_beta,
            frequency=self.frequency,
            max_side=self.max_side,
        )
