"""Spectral Sphere Optimizer (SSO): steepest descent in the spectral norm on the sphere of fixed spectral norm.

W [out, in] of a hidden matrix, R = radius sqrt(out / in), and per step:

    m = mu m + (1 - mu) g;  M = (1 - mu) g + mu m (Nesterov) or m, over its Frobenius norm
    s, u, v: the largest singular value of W and its vectors;  T = u v^T
    W = (R / s) W ("hard") or W (1 - alpha lr sign(s - R)) ("dynamic"; hard in a matrix's first step)
    l such that <T, msign(M + l T)> = 0;  P = msign(M + l T);  W = W - lr R P

msign(X) = U V^T of X = U S V^T by 8 rounds of the Polar Express quintic. The condition keeps P tangential, so that s
stays R to second order in lr. With ``solve: false`` (l = 0) it is MuonSphere, at a fifth of the cost.
Controlled LLM Training on Spectral Sphere, arXiv:2601.08393; code: Unakar/Spectral-Sphere-Optimizer and the branch
spectral_ball of Unakar/Megatron-LM (Apache-2.0). Its README (8 rounds of msign, 20 products, rate scaled by R) is
followed where its code has other defaults.

Where we differ, with the reason:

- s, u, v come from the Krylov space of 20 products with W^T W that starts from the last v, which is state (of 60 in the
  first step), instead of the last vector of a power iteration: where singular values are nearly equal, as they become
  on the sphere, the same products give s to 1e-6 instead of 1e-3. Of a sharded matrix only vectors are sent for it.
- The root l lies in [-1.023, 1.023]; there the code's ten doublings of 1e-3 end too. It is found in a fixed number of
  rounds, for all matrices of a shape at once and without waiting for the device, by a bracketed secant on g, in which
  h = <T, P> is nearly straight, since h(l) is about x / sqrt(x^2 + c^2), x = l minus the root:

      g = h / sqrt(1 - h^2);  l_0 = 0;  l_1 = -0.6 c g_0, or -<T, M> where |h_0| > 0.9 (M is nearly T);
      c = <M - <T, M> T, P_0> / min(out, in), a mean singular value;  then l = l_a - g_a (l_a - l_b) / (g_a - g_b)

  of the two with the smallest |h|; one that leaves the bracket, and from the fifth on every other, halves it. Five
  evaluations leave |<T, P>| at 1e-7 in the median and below 1e-4 in float32 (at 3e-4 in bfloat16, which rounds so),
  where bisection takes up to ten doublings and 20 halvings. P is that of the best, so that none is spent on it.
  No multiplier is kept from step to step: on momenta of trained nets the last one is worth one evaluation, and it would
  have to come back from the rank that owns the matrix. Where M is square and of low rank h jumps within 1e-3 of the
  root; after five evaluations |h| can then be 0.1 still: raise ``solver_steps`` to 8 for such.
- Where all evaluations were on one side and |h| > 0.01 at the best, the step is that one (the code takes MuonSphere's,
  which is further from tangential), and ``bracket_failures`` counts it (``metrics()``, one warning).
- The weights are brought to the sphere in the first step and not at construction, so that weights loaded in between
  are too. A matrix whose momentum is zero (no gradient so far) stays where it is, and so do all at rate 0.
- Weight decay is applied before the retraction, as in the code, where hard retraction undoes it: it warns.
- Fused q, k, v and gate, up are taken apart where the model says so, and every expert counts alone. Attention heads are
  not known to the optimizer, so q, k and v are whole matrices, the authors' default ("component").
- A matrix of zeros is on no sphere and is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from trainwright.core.distributed import local_tensor
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import muon
from trainwright.optim.gauge import Gauge
from trainwright.optim.leading import Matrices, leading_triplets, zero_matrices
from trainwright.optim.matrix import MatrixConfig, MatrixRule
from trainwright.optim.settings import Count, Positive, Share
from trainwright.optim.slices import rounds
from trainwright.optim.whole import map_whole

log = logging.getLogger("trainwright")

POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),  # and all rounds after these
)
BRACKET = 1e-3 * (2**10 - 1)
TOLERANCE = 1e-2  # of <T, P>: what is above it and always on one side counts as no root


def msign(x: Tensor, steps: int = 8, dtype: torch.dtype | None = None) -> Tensor:
    """About ``U V^T`` of matrices ``x [n, out, in]``, computed and returned in ``dtype`` (None: x's); 0 stays 0."""
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype or x.dtype)
    x, add_product = (x[0], torch.addmm) if shape[0] == 1 else (x, torch.baddbmm)
    for i in range(steps):
        a, b, c = POLAR_EXPRESS[min(i, len(POLAR_EXPRESS) - 1)]
        gram = x.mT @ x if tall else x @ x.mT  # [n, m, m], m the shorter side
        poly = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, x, poly, beta=a) if tall else add_product(x, poly, x, beta=a)
    return x.reshape(shape)


def solve_multiplier(
    m: Tensor, theta: Tensor, sign: Callable[[Tensor], Tensor] = msign, steps: int = 5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The root ``l [n]`` of ``h(l) = <T, sign(m + l T)>`` for each of the matrices ``m``, ``theta [n, out, in]``.

    m of Frobenius norm 1 (or 0), theta = u v^T; h does not decrease. ``steps`` evaluations of h, the first of l = 0.
    Returns the l of smallest |h| among them, sign(m + l T), h(l), and whether that is a root or was enclosed by two.
    """

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((-2, -1))

    tiny = torch.finfo(m.dtype).eps
    along = inner(theta, m)
    low, high = along.new_full(along.shape, -BRACKET), along.new_full(along.shape, BRACKET)
    below = above = torch.zeros_like(along, dtype=torch.bool)
    at = width = torch.zeros_like(along)
    for i in range(steps):
        p = sign(m + at[:, None, None] * theta)
        h = inner(theta, p)
        g = h * (1 - h.square()).clamp(min=tiny).rsqrt()  # nearly linear in l, where h levels off towards -1 and 1
        below, above = below | (h <= 0), above | (h >= 0)
        low, high = torch.where(h <= 0, at, low), torch.where(h >= 0, at, high)
        if i == 0:
            # Mean singular value of what is not along T, over which h goes from one side to the other.
            width = ((inner(m, p) - along * h) / min(m.shape[-2:])).clamp(min=tiny)
            best, sign_there, residual, best_g = at, p, h, g
            guess = torch.where(h.abs() > 0.9, -along, -0.6 * width * g)
        else:
            better = h.abs() < residual.abs()
            other, other_g = torch.where(better, best, at), torch.where(better, best_g, g)
            best, best_g = torch.where(better, at, best), torch.where(better, g, best_g)
            residual = torch.where(better, h, residual)
            sign_there = torch.where(better[:, None, None], p, sign_there)
            slope = (best - other) / (best_g - other_g)
            guess = best - torch.where(slope.isfinite() & (slope > 0), slope, width) * best_g
        # A secant that leaves the bracket, and every other step once four did not do, halves it.
        middle = (low + high) / 2
        inside = (guess > low) & (guess < high)
        at = torch.where(inside, guess, middle) if i < 4 or i % 2 == 0 else middle
    return best, sign_there, residual, (below & above) | (residual.abs() < TOLERANCE)


class SpectralSphere(MatrixRule):
    """SSO for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params         matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor
    lr             length of a step, in the spectral norm, over R
    radius         the factor in R = radius sqrt(out / in)
    retract        "hard", "dynamic" (by retract_alpha lr) or "none"
    solve          False: MuonSphere, without the multiplier
    solver_steps   evaluations of the condition, each an msign; the best is the step
    msign_steps    rounds of Polar Express
    power_steps    products with W^T W; three times as many in the first step
    dtype          of msign; None: float64 for such parameters, else what muon.iteration_dtype() says
    State per parameter ``[..., out, in]``: ``momentum``, of its shape, and ``leading [..., parts, in]``, the right
    singular vector of each (of each fused part; see leading.Matrices), in the parameter's dtype.
    Raises ValueError for fewer than two dimensions, matrices of zeros, and settings out of range.
    """

    shapes_state = ("splits",)

    def __init__(
        self,
        params: Any,
        lr: float = 5e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        nesterov: bool = True,
        radius: Positive = 1.0,
        retract: Literal["hard", "dynamic", "none"] = "hard",
        retract_alpha: Share = 0.05,
        solve: bool = True,
        solver_steps: Count = 5,
        msign_steps: Count = 8,
        power_steps: Count = 20,
        dtype: torch.dtype | None = None,
    ):
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "radius": radius,
            "retract": retract, "retract_alpha": retract_alpha, "solve": solve, "solver_steps": solver_steps,
            "msign_steps": msign_steps, "power_steps": power_steps,
        }  # fmt: skip
        self.dtype = dtype
        super().__init__(params, defaults)
        self._begin()

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("nesterov needs momentum > 0")
        if found := zero_matrices(group["params"], group["splits"]):
            shapes = [tuple(group["params"][i].shape) for i in found]
            raise ValueError(f"parameters of shapes {shapes[:4]} hold a matrix of zeros, which is on no sphere")

    def _begin(self) -> None:
        self._failures = Gauge()
        self._warned = False
        self._factors: list[tuple[Matrices, list[Tensor]]] = []  # of the weights, from updates() to apply()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    @property
    def bracket_failures(self) -> int:
        """How many matrices this rank found no multiplier for, over all steps; waits for the device."""
        return int(self._failures.value())

    def metrics(self) -> dict[str, float]:
        return {"bracket_failures": self.bracket_failures}

    def start(self, group: dict[str, Any]) -> None:
        if not self._warned and (count := self._failures.seen()):
            self._warned = True
            log.warning(
                "spectral_sphere: no multiplier found for %d matrices so far; their steps are not quite tangential. "
                "bracket_failures in the metrics goes on counting",
                count,
            )

    def directions(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The momentum, or Nesterov's look-ahead. The caller must not write to it."""
        mu = group["momentum"]
        momenta = self.state_of(params, "momentum")
        torch._foreach_lerp_(momenta, grads, 1 - mu)
        return list(torch._foreach_lerp(grads, momenta, mu)) if group["nesterov"] else momenta

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        directions = self.directions(params, grads, group)
        self._factors = []
        thetas: dict[int, Tensor] = {}
        if group["solve"] or group["retract"] != "none":
            known = [i for i, p in enumerate(params) if "leading" in self.state[p]]
            begun = set(known)
            for some, first in ((known, False), ([i for i in range(len(params)) if i not in begun], True)):
                for part in rounds([params[i] for i in some]):
                    members = [some[j] for j in part]
                    found = self._look_at([params[i] for i in members], [directions[i] for i in members], group, first)
                    thetas.update(zip(members, found, strict=False))
        given = directions[0].dtype
        dtype = self.dtype or (given if given == torch.float64 else muon.iteration_dtype(directions[0].device))
        exact = given if given.itemsize >= 4 else torch.float32

        def sign(x: Tensor) -> Tensor:
            return msign(x, group["msign_steps"], dtype).to(exact)

        def function(direction: Tensor, *theta: Tensor) -> Tensor:
            m = direction.to(exact)
            m = m / m.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(exact).tiny)
            if not theta:
                return sign(m) * target_radius(m.shape, group["radius"])
            _, p, _, found = solve_multiplier(m, theta[0].to(exact), sign, group["solver_steps"])
            self._failures.put((~found).sum())
            return p * target_radius(m.shape, group["radius"])

        columns = [[thetas[i] for i in range(len(params))]] if group["solve"] else []
        return map_whole(function, directions, *columns, splits=group["splits"])

    def _look_at(
        self, params: list[Tensor], directions: list[Tensor], group: dict[str, Any], first: bool
    ) -> list[Tensor]:
        """``u v^T`` of the weights, laid out as they are; keeps v, and by what apply() is to scale the weights.

        first  no v is known yet: it is the first step of these
        """
        matrices = Matrices(params, group["splits"])
        starts = matrices.starts([self.state[p].get("leading") for p in params])
        steps = group["power_steps"] * (3 if first else 1)
        sigma, left, right = leading_triplets(matrices.stacks(params), starts, steps, matrices.sums)
        kept = right
        if group["retract"] != "none":
            moving = [m > 0 for m in matrices.norms(0, matrices.stacks(directions))]
            (squares,) = matrices.sums(-1, [x.square() for x in starts])
            new = [n == 0 for n in squares]
            if group["lr"] > 0:
                radii = [target_radius(shape, group["radius"]) for shape in matrices.shapes]
                factors = [
                    torch.where(m & (s > torch.finfo(s.dtype).tiny), _factor(s, r, group, n), 1)
                    for m, s, r, n in zip(moving, sigma, radii, new, strict=True)
                ]
                self._factors.append((matrices, factors))
            # The first step of a matrix is that which brings it to the sphere: until then its v is not kept.
            stays = [n if group["lr"] == 0 else n & ~m for n, m in zip(new, moving, strict=True)]
            kept = [torch.where(x, 0, v) for x, v in zip(stays, right, strict=True)]
        for p, v in zip(params, matrices.vectors(kept), strict=True):
            self.state[p]["leading"] = v
        return matrices.join([u @ v for u, v in zip(left, right, strict=True)]) if group["solve"] else []

    def apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        if group["lr"]:
            super().apply(params, updates, group)

    def move(self, values: list[Tensor], updates: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> None:
        of_param = {id(p): v for p, v in zip(params, values, strict=True)}
        for matrices, factors in self._factors:
            targets = [of_param[id(p)] for p in matrices.params]
            stacks = [x * f for x, f in zip(matrices.stacks(targets), factors, strict=True)]
            scaled = matrices.join(stacks, targets[0].dtype)
            torch._foreach_copy_([local_tensor(t) for t in targets], [local_tensor(x) for x in scaled])
        self._factors = []
        super().move(values, updates, params, group)

    def decayed(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor] | None:
        return None if group["retract"] == "hard" else super().decayed(params, group)  # which undoes it


def target_radius(shape: Sequence[int], radius: float = 1.0) -> float:
    """R of a matrix ``[..., out, in]``."""
    return radius * math.sqrt(shape[-2] / max(shape[-1], 1))


def _factor(sigma: Tensor, radius: float, group: dict[str, Any], new: Tensor) -> Tensor:
    """What the retraction multiplies weights with; the decay, which comes with the step, is taken to come before it."""
    decay = 1 - group["lr"] * group["weight_decay"]
    hard = radius / (sigma * decay)
    if group["retract"] == "hard":
        return hard
    return torch.where(new, hard, 1 - group["retract_alpha"] * group["lr"] * (sigma * decay - radius).sign())


@register("optimizer", "spectral_sphere", paper="arXiv:2601.08393", seed_id="B012")
class SpectralSphereConfig(MatrixConfig):
    """Muon's relative that keeps each hidden matrix at a fixed spectral norm and steps along that sphere (SSO)."""

    lr: PositiveFloat = Field(5e-3, description="Peak length of a matrix's step over that of its weights (spectral).")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decoupled weight decay of the matrices; without any effect under hard retraction."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the momentum.")
    nesterov: bool = Field(True, description="Nesterov's look-ahead.")
    radius: PositiveFloat = Field(1.0, description="Spectral norm of the weights over sqrt(out / in).")
    retract: Literal["hard", "dynamic", "none"] = Field(
        "hard", description="Back to the sphere at once, by retract_alpha lr a step, or not at all."
    )
    retract_alpha: float = Field(0.05, gt=0, le=1, description="dynamic: share of lr that weights shrink or grow by.")
    solve: bool = Field(True, description="Keep the step tangential to the sphere; false: MuonSphere, much cheaper.")
    solver_steps: PositiveInt = Field(5, le=100, description="Evaluations to find a tangential step, each an msign.")
    msign_steps: PositiveInt = Field(8, le=30, description="Rounds of the Polar Express iteration.")
    power_steps: PositiveInt = Field(
        20, le=200, description="Products with W^T W to find its largest singular value; thrice at first."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> SpectralSphereConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0")
        return self

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> SpectralSphere:
        for n in params:
            if zero_matrices([n.param], n.splits):
                raise ConfigError(
                    f"{n.name} holds a matrix of zeros, which is on no sphere; initialise it otherwise or use muon",
                    key="name",
                    value=self.name,
                )
        if self.weight_decay and self.retract == "hard":
            log.warning(
                "spectral_sphere: weight_decay=%g has no effect, as hard retraction undoes it; set weight_decay=0",
                self.weight_decay,
            )
        return SpectralSphere(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            radius=self.radius,
            retract=self.retract,
            retract_alpha=self.retract_alpha,
            solve=self.solve,
            solver_steps=self.solver_steps,
            msign_steps=self.msign_steps,
            power_steps=self.power_steps,
        )
