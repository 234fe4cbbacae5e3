"""SPECTRA: soft spectral clipping of the update of any optimizer with decoupled decay.

U [out, in] is the inner optimizer's update, without rate and decay:

    H_c(U) = (I + U U^T / c^2)^(-1/2) U                     each singular value s -> s / sqrt(1 + s^2 / c^2) < c
    w = w (1 - lr wd) - lr a H_c(U),  a = sqrt(max(1, out / in))
    a vector u or a scalar: u / sqrt(1 + |u|^2 / c^2), the same map of its norm; a = 1
    while the rate warms up: c_t = c lr_peak / lr_t, so that c lr, the longest step, is the same; c from then on

The inverse root by Newton-Schulz, on the shorter side m of U, with X = U or U^T [m, n]:

    b = min(largest absolute row sum, Frobenius norm) of X X^T / c^2;  A = (I + X X^T / c^2) / (1 + b)
    Y = A, Z = I, l = (1 + b)^(-1/2), below which no singular value of A^(1/2) lies;  6 times:
        e = max(l, 0.1);  q = sqrt(3 / (1 + e + e^2));  T = (3 q I - q^3 Z Y) / 2;  Y = Y T;  Z = T Z
        l = q l (3 - q^2 l^2) / 2
    then H = Z X / sqrt(1 + b)

Enhancing LLM Training via Spectral Clipping, arXiv:2603.14315; code: mlolab/llm-spectral-clipping (Apache-2.0).
The paper's settings at 160M parameters: c 5, rate 2e-3, decay 0.1, betas (0.8, 0.999), gradient norm clipped at 0.5.

Where we differ from the authors' code:

- The iteration is stretched by q to the interval that is left, [l, 1] (the scaling of Chen and Chow, 2014); the
  authors' takes q = 1 and 10 rounds, which are less exact than 6 of these where an update is many times c.
- The update is changed before it is applied. There it is found again from the difference of the weights, which takes
  a copy of all of them and loses bits.
- Vectors follow the one map. There a vector with |u| <= c is left alone, and the result jumps from c to c / sqrt(2).
- Every expert of a stack and every matrix fused into one parameter has its own bound b; there the largest counts.
- Warm-up ends when the rate reaches its peak or stops rising; there its number of steps is set a second time.
- The last product, with X, is in the update's dtype, so that a c that clips nothing changes nothing, in bfloat16 too.

The optional pre-clip is the same map of each raw gradient, as there; a ``clip`` of the recipe would come before it
(there the norm is clipped afterwards), so that the two are refused together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import muon
from trainwright.optim.base import UpdateRule
from trainwright.optim.gauge import Gauge
from trainwright.optim.muon import update_scale
from trainwright.optim.whole import map_whole
from trainwright.optim.wrapper import WrappedRule, WrapperConfig

log = logging.getLogger("trainwright")


def soft_clip(u: Tensor, c: float, steps: int = 6, dtype: torch.dtype | None = None) -> Tensor:
    """``H_c`` of matrices ``u [..., m, n]``, each alone; ``dtype`` is that of the inverse root, None: that of ``u``."""
    return _soft_clip(u, c, steps, dtype)[0]


def _soft_clip(u: Tensor, c: float, steps: int, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """:func:`soft_clip` and, per matrix, sqrt(1 + b): by how much the iteration's input had to be shrunk."""
    work = u if u.element_size() >= 4 else u.float()
    x = work.mT if u.shape[-2] > u.shape[-1] else work
    narrow = x.to(dtype or x.dtype) / c
    gram = (narrow @ narrow.mT).reshape(-1, x.shape[-2], x.shape[-2])  # [N, m, m]
    bound = torch.minimum(gram.abs().sum(-1).amax(-1), torch.linalg.matrix_norm(gram))[:, None, None]
    shrunk = (1 + bound).to(x.dtype).sqrt()
    stretches = _stretches(1 / shrunk, steps)
    eye = torch.eye(x.shape[-2], dtype=gram.dtype, device=gram.device)
    y = (gram + eye) / (1 + bound)
    z = None
    for q in stretches:
        product = y if z is None else z @ y
        t = torch.addcmul(eye * (1.5 * q).to(eye), product, (-0.5 * q**3).to(eye))
        z = t if z is None else t @ z
        y = y @ t if q is not stretches[-1] else y
    assert z is not None
    out = (z.to(x.dtype) / shrunk).reshape(*x.shape[:-1], x.shape[-2]) @ x
    return (out.mT if u.shape[-2] > u.shape[-1] else out).to(u.dtype), shrunk.flatten()


def _stretches(low: Tensor, steps: int) -> list[Tensor]:
    """The factors q for singular values within [low, 1], which stay within."""
    found = []
    for _ in range(steps):
        # Never as if the interval began below 0.1: rounding lifts values above 1, and the full stretch would turn them.
        e = low.clamp(min=0.1)
        q = (3 / (1 + e + e.square())).sqrt()
        low = 0.5 * q * low * (3 - (q * low).square())
        found.append(q)
    return found


def soft_clip_vectors(vectors: Sequence[Tensor], c: float) -> list[Tensor]:
    """``H_c`` of whole vectors, the map of each one's norm; tensors of any shape, plain or all DTensors of one mesh."""
    parts: dict[Any, list[int]] = {}
    for i, v in enumerate(vectors):
        parts.setdefault((v.dtype, v.placements if isinstance(v, DTensor) else v.device), []).append(i)
    out: list[Tensor] = list(vectors)
    for members in parts.values():
        some = [vectors[i] for i in members]
        first = some[0]
        local = [v.to_local() if isinstance(v, DTensor) else v for v in some]
        exact = torch.float32 if first.element_size() < 4 else first.dtype
        squares = torch.stack([n.square() for n in torch._foreach_norm(local, 2.0, dtype=exact)])
        if isinstance(first, DTensor):
            how = [Partial() if isinstance(p, Shard) else p for p in first.placements]
            squares = DTensor.from_local(squares, first.device_mesh, how, run_check=False).full_tensor()
        factors = (1 + squares / c**2).rsqrt().to(first.dtype)
        for i, scaled in zip(members, torch._foreach_mul(some, list(factors.unbind())), strict=True):
            out[i] = scaled
    return out


class Spectra(WrappedRule):
    """SPECTRA around an update rule that is built already, for parameters of any shape, plain or DTensor.

    inner      the rule whose update is clipped; its groups and its state are shared
    c          largest singular value let through; None: no clipping of the update
    pre_clip   the same for gradients; None: none
    vectors    clip parameters with less than two dimensions too
    adjust     "original": scale matrices by sqrt(max(1, out / in)); "none": leave them
    warm_up    hold c lr while a group's rate rises to ``initial_lr`` (that of the construction where a group has none)
    ns_steps   rounds of the inverse root
    dtype      of the inverse root; None: float64 for such parameters, else what muon.iteration_dtype() says
    splits     rows of the matrices fused into a parameter, by parameter
    No state of its own but, per group, ``spectra_warming`` and ``spectra_lr``, which follow the warm-up.
    Raises ValueError for c or pre_clip of 0 or less, for neither, and for a Spectra inside.
    """

    kept = ("c", "pre_clip", "vectors", "adjust", "warm_up", "ns_steps", "dtype", "splits", "warned")
    own_group_state = ("spectra_warming", "spectra_lr")

    def __init__(
        self,
        inner: UpdateRule,
        c: float | None = 5.0,
        pre_clip: float | None = None,
        vectors: bool = True,
        adjust: Literal["original", "none"] = "original",
        warm_up: bool = True,
        ns_steps: int = 6,
        dtype: torch.dtype | None = None,
        splits: dict[Tensor, Sequence[int]] | None = None,
    ):
        for name, value in (("c", c), ("pre_clip", pre_clip)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} should be greater than 0")
        if c is None and pre_clip is None:
            raise ValueError("neither c nor pre_clip is given: nothing would be clipped")
        self.c, self.pre_clip, self.vectors, self.adjust, self.warm_up = c, pre_clip, vectors, adjust, warm_up
        self.ns_steps, self.dtype, self.splits = ns_steps, dtype, dict(splits or {})
        self.longest = Gauge(largest=True)  # update so far, in units of c
        self.warned = False
        super().__init__(inner)
        while isinstance(inner, WrappedRule):
            if isinstance(inner, Spectra):
                raise ValueError("Spectra in Spectra: the outer one alone does it")
            inner = inner.inner
        for group in self.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.longest = Gauge(largest=True)

    def start(self, group: dict[str, Any]) -> None:
        super().start(group)
        warming, last, lr = group.get("spectra_warming", True), group.get("spectra_lr", 0.0), group["lr"]
        if lr > 0:
            group["spectra_warming"] = warming and last < lr < group.get("initial_lr", lr)
            group["spectra_lr"] = lr
        self._warn()

    def threshold(self, group: dict[str, Any]) -> float | None:
        """The group's c in this step; None: nothing is to be clipped."""
        if self.c is None or group["lr"] == 0:
            return None
        warming = self.warm_up and group.get("spectra_warming", False)
        return self.c * group["initial_lr"] / group["lr"] if warming else self.c

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if self.pre_clip is not None:
            clipped = self._clipped(grads, params, group, self.pre_clip, "none")
            # Fused kernels take gradients to lie in memory as the parameters do.
            grads = [
                c if c.stride() == g.stride() else torch.empty_like(g, memory_format=torch.preserve_format).copy_(c)
                for c, g in zip(clipped, grads, strict=True)
            ]
        return super().updates(params, grads, group)

    def change(
        self, updates: list[Tensor], params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        c = self.threshold(group)
        return updates if c is None else self._clipped(updates, params, group, c, self.adjust)

    def _clipped(
        self, tensors: list[Tensor], params: list[Tensor], group: dict[str, Any], c: float, adjust: str
    ) -> list[Tensor]:
        """``tensors``, which lie as ``params`` do, clipped; those that stay are the same objects."""
        out = list(tensors)
        flat = [i for i, t in enumerate(tensors) if t.ndim < 2]
        if flat and self.vectors:
            for i, clipped in zip(flat, soft_clip_vectors([tensors[i] for i in flat], c), strict=True):
                out[i] = clipped
        matrices: dict[tuple[int, ...], list[int]] = {}
        for i, t in enumerate(tensors):
            if t.ndim >= 2:
                splits = tuple(self.splits.get(params[i], ()) or group.get("splits", ()))
                matrices.setdefault(splits, []).append(i)

        def function(stack: Tensor) -> Tensor:
            dtype = self.dtype or (stack.dtype if stack.dtype == torch.float64 else muon.iteration_dtype(stack.device))
            clipped, shrunk = _soft_clip(stack, c, self.ns_steps, dtype)
            if not self.warned:
                self.longest.put(torch.where(shrunk.isfinite(), shrunk, 0).amax())  # one NaN would hide the others
            return clipped.contiguous() if adjust == "none" else clipped * update_scale(stack.shape, adjust)

        for splits, members in matrices.items():
            whole = map_whole(function, [tensors[i] for i in members], splits=splits)
            for i, clipped in zip(members, whole, strict=True):
                out[i] = clipped
        return out

    def _warn(self) -> None:
        """Says once that the iteration may be too short: each round raises small eigenvalues' roots 2.4 times."""
        if self.warned or (length := self.longest.seen()) <= 0.27 * 2.4**self.ns_steps:
            return
        self.warned = True
        log.warning(
            "spectra: an update is up to %.0f times as long as c, too long for ns_steps=%d: where a matrix has "
            "small singular values too, as square ones do, these shrink; set ns_steps=%d",
            length,
            self.ns_steps,
            math.ceil(math.log(length / 0.27, 2.4)),
        )


RAW = (
    "pre_clip is of raw gradients, and a spike that first scales the whole gradient down hides in it; write "
    "`clip: none`, or leave pre_clip out"
)


@register("optimizer", "spectra", paper="arXiv:2603.14315", seed_id="B013")
class SpectraConfig(WrapperConfig):
    """Clips the singular values of another optimizer's update softly at c (SPECTRA)."""

    c: PositiveFloat | None = Field(
        5.0, description="Largest singular value of an update; has to be tuned with lr and size. Null: no clipping."
    )
    pre_clip: PositiveFloat | None = Field(
        None, description="Largest singular value of a gradient (paper: 0.1, with c: null); null: no clipping."
    )
    vectors: bool = Field(True, description="Clip the norm of norms, biases and scalars too.")
    adjust: Literal["original", "none"] = Field(
        "original", description="Scale of a matrix's update after clipping: sqrt(max(1, out/in)), or 1."
    )
    warm_up: bool = Field(True, description="Raise c while the rate warms up, so that c times the rate stays.")
    ns_steps: PositiveInt = Field(6, le=40, description="Rounds of the Newton-Schulz iteration.")

    @model_validator(mode="after")
    def _makes_sense(self) -> SpectraConfig:
        if self.c is None and self.pre_clip is None:
            raise ValueError("neither c nor pre_clip is given: nothing would be clipped; use the inner optimizer alone")
        inner: Any = self.inner
        while inner is not None:
            if isinstance(inner, SpectraConfig):
                raise ValueError("spectra in spectra: the outer one alone does it")
            inner = getattr(inner, "inner", None)
        return self

    def excludes(self) -> dict[str, str]:
        return super().excludes() | ({"clip.global_norm": RAW, "clip.zclip": RAW} if self.pre_clip is not None else {})

    def build(self, params: Sequence[NamedParam]) -> torch.optim.Optimizer:
        if self.c is not None and self.pre_clip is not None:
            log.warning(
                "spectra: c=%g and pre_clip=%g together; the authors advise one of them (pre_clip with c: null)",
                self.c,
                self.pre_clip,
            )
        return super().build(params)

    def wrapped(self, rule: UpdateRule, params: Sequence[NamedParam]) -> Spectra:
        return Spectra(
            rule,
            c=self.c,
            pre_clip=self.pre_clip,
            vectors=self.vectors,
            adjust=self.adjust,
            warm_up=self.warm_up,
            ns_steps=self.ns_steps,
            splits={n.param: n.splits for n in params if n.splits},
        )
