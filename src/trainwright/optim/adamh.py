"""AdamH and MuonH: steps of fixed relative length on the sphere of each hidden matrix's initial norm ("hyperball").

Per matrix W [m, n] with n0 = |W_0|_F and u the direction of Adam or of Muon:
V = W - lr n0 u / |u|_F;  W = n0 V / |V|_F
So lr is the step relative to the weights (for u orthogonal to W it turns W by atan(lr)), whatever width, depth,
initialisation and gradient: rates found on small models carry over. Decay has nothing to do here: with decay d inside
the step the rate lr acts as lr / (1 - lr d), exactly; a ``weight_decay`` is refused.
Fantastic Pretraining Optimizers and Where to Find Them 2.1: Hyperball Optimization, arXiv:2606.16899; used for the
transfer of rates in On the Nonlinearity of Learning Rate Scaling for LLM Training, arXiv:2606.29158, whose
measurement and fits are in trainwright.planning.effective_lr.

n0 is state, so that rounding does not let norms drift (the JAX reference takes the norm of the weights before each
step). Adam's bias correction cancels in u / |u| but for eps, so one count of steps per group does. A matrix of zeros
has no norm to keep: it is refused, or takes the norm sqrt(m) of entries with variance 1/n (``zero_init="fan_in"``)
and is on that sphere after its first step. Norm gains before each matrix should be learnable, since its own norm is
fixed; embeddings and head keep the inner optimizer's rate, which does not transfer by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.adamw import adam_updates
from trainwright.optim.matrix import MatrixConfig, MatrixRule
from trainwright.optim.muon import Muon
from trainwright.optim.slices import Slices, local_norms, rounds
from trainwright.optim.swan import FLOOR
from trainwright.optim.whole import matrices

Norms = Callable[[int, Sequence[Tensor]], list[Tensor]]
NO_DECAY = "norms are fixed, so decay would act as a rate of lr / (1 - lr weight_decay); set weight_decay=0"
ZeroInit = Literal["refuse", "fan_in"]


def hyperball_step(
    w: Sequence[Tensor], u: Sequence[Tensor], radii: Sequence[Tensor], lr: float, norms: Norms = local_norms
) -> list[Tensor]:
    """New weights of stacks ``[n, rows, columns]`` of weights and directions, on spheres of ``radii [n, 1, 1]``.

    ``norms`` is that of a Slices where ranks hold parts of the matrices. Matrices with u = 0 stay as they are.
    """
    lengths = norms(0, u)
    v = [a.addcmul(b, r / size.clamp(min=FLOOR), value=-lr) for a, b, r, size in zip(w, u, radii, lengths, strict=True)]
    return [
        x.mul_(torch.where(size > 0, r / now.clamp(min=FLOOR), 1.0))
        for x, r, size, now in zip(v, radii, lengths, norms(0, v), strict=True)
    ]


class Hyperball(MatrixRule):
    """Base of AdamH and MuonH: what they share is the step, given the direction.

    State: ``norm``, ``[..., parts]`` for a parameter ``[..., out, in]``: that of each matrix (of each fused part)
    before its first step, in the parameter's dtype.
    """

    group_state: tuple[str, ...] = ()
    shapes_state = ("splits",)

    def check_group(self, group: dict[str, Any]) -> None:
        """And ValueError for weight decay and, where ``zero_init`` says so, for matrices of zeros."""
        super().check_group(group)
        if group.get("weight_decay"):
            raise ValueError(f"weight_decay={group['weight_decay']}: {NO_DECAY}")
        if group["zero_init"] == "refuse" and (found := zero_matrices(group["params"], group["splits"])):
            shapes = [tuple(group["params"][i].shape) for i in found]
            raise ValueError(
                f"parameters of shapes {shapes[:4]} hold a matrix of zeros, which has no norm to keep; "
                "initialise them otherwise or set zero_init='fan_in'"
            )

    def apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        if group["lr"]:  # at 0 rounding would still move the weights
            super().apply(params, updates, group)

    def move(self, values: list[Tensor], updates: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> None:
        for some in rounds(params):
            slices = Slices([params[i] for i in some], group["splits"])
            targets = [values[i] for i in some]
            w = slices.stacks(targets)
            radii = [r.to(x.dtype) for r, x in zip(self._radii(slices, w, group), w, strict=True)]
            new = hyperball_step(w, slices.stacks([updates[i] for i in some]), radii, group["lr"], slices.norms)
            joined = slices.join(new, targets[0].dtype)
            torch._foreach_copy_([_local(t) for t in targets], [_local(x) for x in joined])

    def _radii(self, slices: Slices, w: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if any("norm" not in self.state[p] for p in slices.params):
            norms = slices.norms(0, w)
            if group["zero_init"] == "fan_in":
                norms = [torch.where(s > 0, s, math.sqrt(m)) for s, (m, _) in zip(norms, slices.shapes, strict=True)]
            for p, found in zip(slices.params, slices.join_values(norms), strict=True):
                if "norm" not in self.state[p]:
                    self.state[p]["norm"] = _as_state(found.to(p.dtype), p)
        return slices.stack_values([self._local_norm(p) for p in slices.params])

    def _local_norm(self, p: Tensor) -> Tensor:
        norm = self.state[p]["norm"]
        if isinstance(p, DTensor) and not isinstance(norm, DTensor) and _placements(p) is not None:
            # From a checkpoint of whole parameters.
            norm = distribute_tensor(norm, p.device_mesh, _placements(p), src_data_rank=None)
            self.state[p]["norm"] = norm
        local = _local(norm)
        return local.reshape(-1, local.shape[-1]) if local.numel() else local.new_zeros((0, local.shape[-1]))


def _placements(p: DTensor) -> list[Shard | Replicate] | None:
    """How the norms of ``p`` are shared out, if they are: as its leading dimensions."""
    if any(type(x) not in (Shard, Replicate) for x in p.placements):
        return None
    found = [x if isinstance(x, Shard) and x.dim % p.ndim < p.ndim - 2 else Replicate() for x in p.placements]
    cut = sum(isinstance(x, Shard) for x in p.placements) - sum(isinstance(x, Shard) for x in found)
    return found if cut < 2 and any(isinstance(x, Shard) for x in found) else None


def _as_state(norms: Tensor, p: Tensor) -> Tensor:
    """``norms [n, parts]`` of the matrices here, as the state of ``p [..., out, in]``."""
    if isinstance(p, DTensor) and (placements := _placements(p)) is not None:
        shape = torch.Size((*p.shape[:-2], norms.shape[-1]))
        local = norms.reshape(*p.to_local().shape[:-2], norms.shape[-1])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, p.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return norms.reshape(*p.shape[:-2], norms.shape[-1])


@torch.no_grad()
def zero_matrices(params: Sequence[Tensor], splits: Sequence[int] = ()) -> list[int]:
    """Indexes of parameters ``[..., out, in]`` that hold a matrix of zeros. Waits for the device."""
    found = []
    for i, p in enumerate(params):
        if p.numel() == 0 or p.is_meta:
            continue
        parts = matrices(_whole(p.detach()).abs(), splits)
        sizes = torch.stack([x.amax((-2, -1)).min() for x in parts])
        if bool((sizes == 0).any()):
            found.append(i)
    return found


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


class AdamH(Hyperball):
    """AdamH for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params     matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor; each matrix keeps its norm
    lr         length of the step over that of the weights
    zero_init  "refuse" matrices of zeros, or give them the norm of a "fan_in" initialisation
    State: ``exp_avg``, ``exp_avg_sq`` (shape of the parameter), ``norm``; in the group ``step``.
    Raises ValueError for parameters with fewer than two dimensions, matrices of zeros, weight decay.
    """

    group_state = ("step",)

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        zero_init: ZeroInit = "refuse",
    ):
        defaults = {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "zero_init": zero_init,
            "step": 0,
        }  # fmt: skip
        super().__init__(params, defaults)

    def start(self, group: dict[str, Any]) -> None:
        group["step"] += 1

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        # Where the fused kernel reads it.
        counts = {d: torch.full((), float(group["step"]), device=d) for d in {p.device for p in params}}
        first, second = self.state_of(params, "exp_avg"), self.state_of(params, "exp_avg_sq")
        steps = [counts[p.device] for p in params]
        return adam_updates(params, grads, first, second, steps, group["betas"], group["eps"], ascending=True)


class MuonH(Hyperball, Muon):
    """MuonH: the same step with Muon's direction. Parameters, errors and the state ``norm`` as AdamH.

    State: ``momentum`` (shape of the parameter), ``norm``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        zero_init: ZeroInit = "refuse",
        dtype: torch.dtype | None = None,
    ):
        self.zero_init = zero_init
        Muon.__init__(self, params, lr, weight_decay, momentum, nesterov, ns_steps, dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "zero_init": self.zero_init}

    def check_group(self, group: dict[str, Any]) -> None:
        group.setdefault("zero_init", self.zero_init)
        super().check_group(group)


@register("optimizer", "adamh", paper="arXiv:2606.16899", seed_id="B090")
class AdamHConfig(MatrixConfig):
    """Adam's or Muon's direction with steps of fixed relative length; hidden matrices keep their initial norm."""

    lr: PositiveFloat = Field(2e-2, description="Peak length of a matrix's step over the length of its weights.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Has to be 0: norms are fixed.")
    base: Literal["adam", "muon"] = Field("adam", description="Where the direction comes from: AdamH or MuonH.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="adam: decay of the moments, each in [0, 1).")
    eps: PositiveFloat = Field(1e-8, description="adam: added to the root of the second moment.")
    momentum: float = Field(0.95, ge=0, lt=1, description="muon: decay of the momentum.")
    nesterov: bool = Field(True, description="muon: Nesterov's look-ahead.")
    ns_steps: PositiveInt = Field(5, le=20, description="muon: rounds of the Newton-Schulz iteration.")
    zero_init: ZeroInit = Field(
        "refuse", description="Matrices of zeros: refuse, or fan_in, the norm of entries with variance 1/fan_in."
    )

    @field_validator("weight_decay")
    @classmethod
    def _no_decay(cls, weight_decay: float) -> float:
        if weight_decay:
            raise ValueError(NO_DECAY)
        return weight_decay

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _makes_sense(self) -> AdamHConfig:
        if self.base == "muon" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        return self

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> Hyperball:
        if self.zero_init == "refuse":
            for n in params:
                if zero_matrices([n.param], n.splits):
                    raise ConfigError(
                        f"{n.name} holds a matrix of zeros, which has no norm to keep; "
                        "initialise it otherwise or set zero_init=fan_in",
                        key="zero_init",
                        value=self.zero_init,
                    )
        if self.base == "muon":
            return MuonH(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                ns_steps=self.ns_steps,
                zero_init=self.zero_init,
            )
        return AdamH(groups, lr=self.lr, betas=self.betas, eps=self.eps, zero_init=self.zero_init)
