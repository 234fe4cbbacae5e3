"""SWAN: stochastic gradient descent on gradients whose rows are standardised and which are then whitened; no state.

G [m, n] of one linear layer:
GradNorm       G~ = (G - mean of its row) / std of its row (over the n columns, population std)
GradWhitening  D = (G~ G~^T)^(-1/2) G~, the polar factor; tall matrices are transposed, which leaves it the same
W = W - lr scale D |G~|_F / |D|_F, so the update's RMS is lr scale
Newton-Schulz: X = G~ / sqrt(|G~ G~^T|_F); k times: X = b (3 I - X X^T) X; D = X
NSDS, which needs no product of square matrices in its rounds: Y = b Y (3 - z y) by column, Z = b (3 I - diag(z) Y)
diag(z), with z, y the diagonals; k = 2, b = 0.4.
SWAN: SGD with Normalization and Whitening Enables Stateless LLM Training, arXiv:2412.13148.

The settings handed on for the paper are b = 0.8 and k = 10, but with them the iteration does not converge: at the
fixed point its derivative is 3 - 6 b = -1.8 (b in (1/3, 2/3) is stable), and the singular values of D end anywhere in
[0.56, 1.60]. The inverse root that the paper defines is that of b = 1/2, which is the default here. In return b = 0.8
lifts small singular values 1.6 times faster a round; with b = 1/2 and 10 rounds those below some 2 % of the largest
stay below 1. The paper's printed GradNorm mixes a sum and a mean; the mean is meant. A row without variance gives a
zero row. Of square and tall matrices centring leaves one singular value zero.

``whitening: polar`` computes the same D, which is the polar factor of G~, as the other matrix methods do: 6 rounds of
the Polar Express quintic (spectral_sphere.msign), in bfloat16 where Muon's iteration is. Their products lift small
singular values 1800 times, against 57 times by 10 rounds of the above, at less than half of its cost in bfloat16.

The paper writes the iteration for a pair: Y = G~ G~^T / |.|_F, Z = I; T = 3 I - Z Y, Y = b Y T, Z = b T Z; D = Z X.
In exact arithmetic that is ours (Z Y = X X^T), but in float32 rounding makes small eigenvalues of Y negative, which
grow 2.25 times a round: on matrices of low rank, as gradients are, some 20 rounds end in NaN. X X^T cannot do that.
As in the paper that iteration runs in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import muon
from trainwright.optim.matrix import MatrixRule, OneRateConfig
from trainwright.optim.settings import Count
from trainwright.optim.spectral_sphere import msign
from trainwright.optim.whole import map_whole

Whitening = Literal["newton_schulz", "nsds", "exact", "polar"]
FLOOR = 1e-18  # of norms: squares of what is smaller vanish in float32


def grad_norm(g: Tensor, centre: bool = True) -> Tensor:
    """Rows of ``g [..., m, n]`` with mean 0 (``centre``) and mean square 1; rows without variance become zero."""
    mean = g.mean(-1, keepdim=True) if centre else torch.zeros_like(g[..., :1])
    x = g - mean
    std = x.square().mean(-1, keepdim=True).sqrt()
    # What is left of a constant row is the rounding of its mean.
    varies = std > 16 * torch.finfo(g.dtype).eps * mean.abs()
    return torch.where(varies, x / std.clamp(min=FLOOR), 0.0)


def whiten(
    g: Tensor, method: Whitening = "newton_schulz", steps: int = 10, beta: float = 0.5, eps: float = FLOOR
) -> Tensor:
    """``(g g^T)^(-1/2) g`` of ``g [..., m, n]``, or about that; for m > n ``g (g^T g)^(-1/2)``. Zero stays zero."""
    if method == "exact":
        left, s, right = torch.linalg.svd(g, full_matrices=False)
        kept = s > s[..., :1] * max(g.shape[-2:]) * torch.finfo(g.dtype).eps
        return (left * kept.unsqueeze(-2)) @ right
    if method == "polar":
        dtype = g.dtype if g.dtype == torch.float64 else muon.iteration_dtype(g.device)
        x = g / g.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
        return msign(x.reshape(-1, *g.shape[-2:]), steps, dtype).to(g.dtype).reshape(g.shape)
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # no overflow in what follows
    y = x @ x.mT  # [..., m, m], m the shorter side
    size = y.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    y = y / size
    x = x / size.sqrt()
    if method == "nsds":
        x = _nsds(y, steps, beta) @ x
    else:
        flat = x.reshape(-1, *x.shape[-2:])
        for _ in range(steps):
            flat = torch.baddbmm(flat, flat @ flat.mT, flat, beta=3 * beta, alpha=-beta)
        x = flat.reshape(x.shape)
    return x.mT if tall else x


def _nsds(y: Tensor, steps: int, beta: float) -> Tensor:
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    z = eye.expand(y.shape)
    for _ in range(steps):
        z_diagonal, y_diagonal = z.diagonal(dim1=-2, dim2=-1), y.diagonal(dim1=-2, dim2=-1)
        z = beta * (3 * eye - z_diagonal.unsqueeze(-1) * y) * z_diagonal.unsqueeze(-2)
        y = beta * y * (3 - z_diagonal * y_diagonal).unsqueeze(-2)
    return z


def of_norm(x: Tensor, norm: Tensor | float) -> Tensor:
    """``x [..., m, n]`` scaled to this Frobenius norm; zero stays zero."""
    return x * (norm / x.norm(dim=(-2, -1), keepdim=True).clamp(min=FLOOR))


def swan_direction(
    g: Tensor,
    normalise: bool = True,
    centre: bool = True,
    method: Whitening = "newton_schulz",
    steps: int = 10,
    beta: float = 0.5,
) -> Tensor:
    """``D`` of gradients ``g [..., m, n]``, of the Frobenius norm of what was whitened."""
    x = grad_norm(g, centre) if normalise else g
    return of_norm(whiten(x, method, steps, beta), x.norm(dim=(-2, -1), keepdim=True))


class Swan(MatrixRule):
    """SWAN for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params     matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor
    lr, scale  the update's RMS is their product
    normalise  GradNorm; False: whitening alone, scaled to the gradient's norm
    centre     subtract the row's mean in GradNorm
    whitening  "newton_schulz", "nsds", "exact" (by singular values) or "polar" (as Newton-Schulz, but cheaper)
    steps      of the iteration; None: 10, of nsds 2, of polar 6
    No state. Raises ValueError for parameters with fewer than two dimensions and for an unknown whitening.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        scale: float = 1.0,
        normalise: bool = True,
        centre: bool = True,
        whitening: Whitening = "newton_schulz",
        steps: Count | None = None,
        beta: Annotated[float, Field(gt=0, lt=1)] | None = None,
    ):
        cheap = whitening == "nsds"
        rounds = {"nsds": 2, "polar": 6}.get(whitening, 10)
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "scale": scale, "normalise": normalise, "centre": centre,
            "whitening": whitening, "steps": rounds if steps is None else steps,
            "beta": (0.4 if cheap else 0.5) if beta is None else beta,
        }  # fmt: skip
        super().__init__(params, defaults)

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        for p in params:
            self.state.setdefault(p, {})  # torch's set_optimizer_state_dict wants an entry for all that was stepped

        def function(stack: Tensor) -> Tensor:
            g = stack.float() if stack.element_size() < 4 else stack
            found = swan_direction(
                g, group["normalise"], group["centre"], group["whitening"], group["steps"], group["beta"]
            )
            return found * group["scale"]

        return map_whole(function, grads, splits=group["splits"])


@register("optimizer", "swan", paper="arXiv:2412.13148", seed_id="B101")
class SwanConfig(OneRateConfig):
    """Stateless: gradients of hidden matrices with standardised rows, whitened; another optimizer for the rest."""

    lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the matrices: Adam's, as for SWAN-0.")
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay of the matrices.")
    scale: PositiveFloat = Field(1.0, description="RMS of the update before the learning rate.")
    normalise: bool = Field(True, description="GradNorm before whitening.")
    centre: bool = Field(True, description="Subtract the row's mean in GradNorm.")
    whitening: Whitening = Field(
        "newton_schulz",
        description="newton_schulz, polar (the same, by cheaper rounds), nsds (diagonal products) or exact (slow).",
    )
    steps: PositiveInt | None = Field(
        None, le=30, description="Rounds of the iteration; null: 10, for nsds 2, for polar 6."
    )
    beta: float | None = Field(
        None, gt=0, lt=1, description="Step of the iteration; null: 0.5, which converges (paper: 0.8), for nsds 0.4."
    )

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> Swan:
        return Swan(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            scale=self.scale,
            normalise=self.normalise,
            centre=self.centre,
            whitening=self.whitening,
            steps=self.steps,
            beta=self.beta,
        )
