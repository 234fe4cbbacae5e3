"""NuMuon: Muon whose step is kept to the top k singular directions, so that the weights become low-rank.

m = mu m + (1 - mu) g;  M = m, or (1 - mu) g + mu m (Nesterov), [out, in] = U S V^T
D = U_k V_k^T, the largest <M, D> over |D|_2 <= 1 and nuclear norm <= k;  k = ceil(r min(out, in))
w = w (1 - lr wd) - lr s D, with Muon's scale s = 0.2 sqrt(max(out, in)) or sqrt(max(1, out / in))

The share r follows a schedule over the run of T steps, t = 0, 1, ... being the step:

    fixed      r = rank
    piecewise  r = 1 before the first of ``pieces``, then the second number of the last one that t / T has reached
    cosine     r = rank + (1 - rank) (1 + cos(pi t / T)) / 2, and rank from T on

U_k V_k^T comes from a two-block Krylov space, with M or M^T on its shorter side, [m, n] with m <= n:

    K = orth[M O, M M^T M O], O [n, k + 8] Gaussian;  K^T M = A S B^T;  U_k = K A_k, V_k = B_k

or, where that space would be most of the matrix (2 (k + 8) >= m, all r > 1/2 among them), from its whole SVD (that of
its Gram matrix in double precision). At r = 1 it is Muon with Muon's Newton-Schulz iteration, whose singular values are
near 1 and not 1. On a GPU a decomposition waits for the device, unlike the rest of the step.

NuMuon: Nuclear-Norm-Constrained Muon for Compressible LLM Training, arXiv:2603.03597. The paper's constants for scale,
decay and the ends of the schedules were not to be had; these are Muon's scale and decay, and a quarter. Directions
whose singular value is zero to rounding are left out of D, so that a zero gradient gives a zero update.

Judge it by what it is for: the stable rank of the weights and the loss after truncating them, beside the plain loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim.muon import Muon, MuonConfig, update_scale
from trainwright.optim.whole import map_whole

OVERSAMPLING = 8  # columns of the Krylov blocks beyond k


def top_singular_directions(m: Tensor, k: int, omega: Tensor | None = None) -> Tensor:
    """``U_k V_k^T`` of matrices ``m [..., out, in]``, each alone; 1 <= k <= min(out, in).

    omega  Gaussian ``[max(out, in), p]`` with p >= k: from a Krylov space of 2 p dimensions; None: of the whole matrix.
    Directions without any singular value are left out; a matrix that is not finite gives NaN.
    """
    x = m if m.element_size() >= 4 else m.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    finite = x.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    x = torch.where(finite, x, 0)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    if omega is None:
        left, s, right = _leading(x, k)
    else:
        block = x @ omega.to(x.dtype)  # [..., m, p]
        basis = torch.linalg.qr(torch.cat([block, x @ (x.mT @ block)], dim=-1)).Q
        left, s, right = _leading(basis.mT @ x, k)
        left = basis @ left
    there = s > max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s[..., :1]
    found = (left * there[..., None, :]) @ right
    found = torch.where(finite, found, torch.nan).to(m.dtype)
    return found.mT if tall else found


def _leading(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k leading singular values of ``x [..., m, n]``, m <= n, with vectors ``[..., m, k]`` and ``[..., k, n]``."""
    if x.dtype == torch.float64:
        left, s, right = torch.linalg.svd(x, full_matrices=False)
        return left[..., :k], s[..., :k], right[..., :k, :]
    # Half the time of an SVD, and in double precision as exact as one in single.
    wide = x.double()
    squares, vectors = torch.linalg.eigh(wide @ wide.mT)  # ascending
    left = vectors[..., -k:].flip(-1)
    s = squares[..., -k:].flip(-1).clamp(min=0).sqrt()
    right = (left.mT @ wide) / s.clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    return left.to(x.dtype), s.to(x.dtype), right.to(x.dtype)


def rank_of(shape: Sequence[int], share: float) -> int:
    """``ceil(share min(out, in))``, from 1 to min(out, in); a product that rounding raised over an integer is that."""
    side = min(shape[-2:])
    return max(1, min(side, math.ceil(share * side - 1e-9)))


def share_at(
    progress: float, schedule: str, rank: float, pieces: Sequence[tuple[float, float]] = ((0.5, 0.25),)
) -> float:
    """The share r of singular directions after the part ``progress`` of the run."""
    if schedule == "cosine":
        return rank + (1 - rank) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    if schedule == "piecewise":
        return next((share for start, share in reversed(pieces) if progress >= start), 1.0)
    return rank


def stable_rank(w: Tensor) -> Tensor:
    """``|w|_F^2 / |w|_2^2`` of matrices ``[..., out, in]``: how many directions share the weight; 0 for w = 0."""
    s = torch.linalg.svdvals(w.float() if w.element_size() < 4 else w).square()
    return s.sum(-1) / s.amax(-1).clamp(min=torch.finfo(s.dtype).tiny)


class NuMuon(Muon):
    """NuMuon for parameters with two or more dimensions; the last two are the matrix, those before it a batch.

    params       matrices ``[out, in]`` or stacks ``[E, out, in]``, plain or DTensor
    rank         r in (0, 1]: share of the singular directions that is stepped along (fixed), or its end (cosine)
    schedule     "fixed", "piecewise" or "cosine"
    total_steps  T, for the two that change
    pieces       of "piecewise": pairs (part of the run, r from there on), in order
    seed         of the Gaussian blocks, which are drawn anew in every step
    The rest is Muon's. State per parameter: ``momentum``; per group ``step``.
    Raises ValueError for shares out of (0, 1], pieces out of order, and total_steps missing.
    """

    group_state = ("step",)

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = False,
        rank: float = 0.25,
        schedule: Literal["fixed", "piecewise", "cosine"] = "fixed",
        total_steps: int | None = None,
        pieces: Sequence[tuple[float, float]] = ((0.5, 0.25),),
        seed: int = 0,
        ns_steps: int = 5,
        adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        dtype: torch.dtype | None = None,
    ):
        check_schedule(schedule, rank, total_steps, pieces)
        self.rank, self.schedule, self.total_steps = rank, schedule, total_steps
        self.pieces, self.seed = tuple((float(start), float(share)) for start, share in pieces), seed
        super().__init__(params, lr, weight_decay, momentum, nesterov, ns_steps, adjust, dtype=dtype)
        for group in self.param_groups:
            group.setdefault("step", 0)

    def __getstate__(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("rank", "schedule", "total_steps", "pieces", "seed")}
        return {**super().__getstate__(), **own}

    def start(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def share(self, group: dict[str, Any]) -> float:
        """r in the step that is under way."""
        return share_at((group["step"] - 1) / (self.total_steps or 1), self.schedule, self.rank, self.pieces)

    def orthogonalise(self, directions: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        share = self.share(group)
        if share >= 1:
            return super().orthogonalise(directions, group)

        def function(stack: Tensor) -> Tensor:
            k = rank_of(stack.shape, share)
            width = k + OVERSAMPLING
            omega = None
            if 2 * width < min(stack.shape[-2:]):
                # The same for all matrices of a shape, whichever rank computes them and whatever their place.
                omega = gaussian(max(stack.shape[-2:]), width, self.seed, group["step"], stack.device)
            return top_singular_directions(stack, k, omega) * update_scale(stack.shape, group["adjust"])

        return map_whole(function, directions, splits=group["splits"])


def gaussian(rows: int, columns: int, seed: int, step: int, device: torch.device) -> Tensor:
    """Float32 ``[rows, columns]``, a function of the numbers alone; drawn on the CPU, so on all devices alike."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    return torch.randn(rows, columns, generator=generator).to(device, non_blocking=True)


def check_schedule(schedule: str, rank: float, total_steps: int | None, pieces: Sequence[tuple[float, float]]) -> None:
    """ValueError that says what does not fit."""
    if not 0 < rank <= 1:
        raise ValueError(f"rank={rank} is a share of the singular directions: it should be in (0, 1]")
    if schedule not in ("fixed", "piecewise", "cosine"):
        raise ValueError(f"schedule={schedule!r} should be fixed, piecewise or cosine")
    if schedule == "fixed" and total_steps is not None:
        raise ValueError("total_steps has no meaning with schedule=fixed; leave it out, or set schedule=cosine")
    if schedule != "fixed" and total_steps is None:
        raise ValueError(f"schedule={schedule} needs total_steps, the length of the run in steps")
    starts = [start for start, _ in pieces]
    if not starts or starts != sorted(set(starts)) or not all(0 <= s <= 1 for s in starts):
        raise ValueError("pieces should start at increasing parts of the run, each in [0, 1]")
    if not all(0 < share <= 1 for _, share in pieces):
        raise ValueError("each share in pieces should be in (0, 1]")


@register("optimizer", "numuon", paper="arXiv:2603.03597", seed_id="B084")
class NuMuonConfig(MuonConfig):
    """Muon kept to the top singular directions, for weights that compress well (NuMuon)."""

    nesterov: bool = Field(False, description="Nesterov's look-ahead.")
    rank: float = Field(
        0.25, gt=0, le=1, description="Share of a matrix's singular directions that is stepped along; cosine: its end."
    )
    schedule: Literal["fixed", "piecewise", "cosine"] = Field(
        "fixed", description="How the share goes through the run: always rank, as pieces says, or from 1 down to rank."
    )
    total_steps: PositiveInt | None = Field(
        None, description="Length of the run in optimizer steps; needed by piecewise and cosine. The run may go on."
    )
    pieces: tuple[tuple[float, float], ...] = Field(
        ((0.5, 0.25),), description="Of piecewise: pairs of a part of the run, in [0, 1], and the share from there on."
    )
    seed: int = Field(0, ge=0, description="Of the random blocks that find the singular directions.")

    @model_validator(mode="after")
    def _schedule_fits(self) -> NuMuonConfig:
        check_schedule(self.schedule, self.rank, self.total_steps, self.pieces)
        return self

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> NuMuon:
        return NuMuon(
            groups,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            rank=self.rank,
            schedule=self.schedule,
            total_steps=self.total_steps,
            pieces=self.pieces,
            seed=self.seed,
            ns_steps=self.ns_steps,
            adjust=self.adjust,
        )
