"""NuMuon: Muon whose step is kept to the top k singular directions, so that the weights become low-rank.

m = mu m + (1 - mu) g;  M = m, or (1 - mu) g + mu m (Nesterov), [out, in] = U S V^T
D = U_k V_k^T, the largest <M, D> over |D|_2 <= 1 and nuclear norm <= k;  k = ceil(r min(out, in))
w = w (1 - lr wd) - lr s D, with Muon's scale s = 0.2 sqrt(max(out, in)) or sqrt(max(1, out / in))

The share r follows a schedule over the run of T steps, t = 0, 1, ... being the step:

    fixed      r = rank
    piecewise  r = 1 before the first of ``pieces``, then the second number of the last one that t / T has reached
    cosine     r = rank + (1 - rank) (1 + cos(pi t / T)) / 2, and rank from T on

U_k V_k^T comes from a two-block Krylov space, with M or M^T on its shorter side, [m, n] with m <= n:

    Q = orth[M O], O [n, k + 8] Gaussian;  K = orth[Q, M M^T Q] [m, 2 (k + 8)], the space of M O and M M^T M O
    A [2 (k + 8), k]: leading eigenvectors of K^T M M^T K;  U_k = K A;  V_k^T: rows of A^T K^T M, made orthonormal

or, where that space would be most of the matrix (2 (k + 8) >= m, all r > 1/2 among them), from its whole SVD (that of
its Gram matrix in double precision). The three products that choose the space and the last, U_k V_k^T, are in bfloat16
where Muon's iteration is; what they lose of <M, D> is less than the space's own share. At r = 1 it is Muon with Muon's
Newton-Schulz iteration, whose singular values are near 1 and not 1. On a GPU a decomposition waits for the device,
unlike the rest of the step.

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

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import muon
from trainwright.optim.muon import Muon, MuonConfig, update_scale
from trainwright.optim.whole import map_whole

OVERSAMPLING = 8  # columns of the Krylov blocks beyond k


def top_singular_directions(
    m: Tensor, k: int, omega: Tensor | None = None, dtype: torch.dtype | None = None, scale: float = 1.0
) -> Tensor:
    """``scale U_k V_k^T`` of matrices ``m [..., out, in]``, each alone; 1 <= k <= min(out, in).

    omega  Gaussian ``[max(out, in), p]`` with p >= k: from a Krylov space of 2 p dimensions; None: of the whole matrix.
    dtype  of the products that only choose that space, and of the last; None: that of the rest, at least float32
    Directions without any singular value are left out; a matrix that is not finite gives NaN.
    """
    x = m if m.element_size() >= 4 else m.float()
    peak = x.abs().amax(dim=(-2, -1), keepdim=True)
    finite = peak.isfinite()
    x = (x * torch.where(finite, 1 / peak.clamp(min=torch.finfo(x.dtype).tiny), 0)).nan_to_num_()  # 0 inf is NaN
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    flat = x.reshape(-1, *x.shape[-2:])
    flat = flat[0] if flat.shape[0] == 1 else flat  # a product is faster than a batch of one
    narrow = dtype or x.dtype
    left, right = _of_the_whole(flat, k) if omega is None else _of_krylov_space(flat, k, omega, narrow)
    left = left * torch.where(finite, x.new_full((), scale), torch.nan).reshape(*flat.shape[:-2], 1, 1)
    found = (left.to(narrow) @ right.to(narrow)).reshape(x.shape)
    found = found.mT if tall else found
    return found if dtype is not None else found.to(m.dtype)


def _of_krylov_space(x: Tensor, k: int, omega: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """About U_k ``[..., m, k]`` and V_k^T ``[..., k, n]`` of ``x [..., m, n]``, m <= n: the best of the space."""
    narrow = x.to(dtype)
    # Orthonormal in between: else a large singular value, cubed, would drown the others in rounding.
    first = torch.linalg.qr((narrow @ omega.to(dtype)).to(x.dtype)).Q  # [..., m, p]
    more = narrow @ (narrow.mT @ first.to(dtype))
    basis = torch.linalg.qr(torch.cat([first, more.to(x.dtype)], dim=-1)).Q  # [..., m, 2 p]
    images = basis.mT @ x  # [..., 2 p, n]
    vectors = torch.linalg.eigh(images @ images.mT).eigenvectors[..., -k:].mT  # of ascending values; [..., k, 2 p]
    return basis @ vectors.mT, _orthonormal_rows(vectors @ images, max(x.shape[-2:]))


def _orthonormal_rows(rows: Tensor, side: int) -> Tensor:
    """The orthonormal rows nearest to the normalised ``rows [..., k, n]``; vanishing ones, and combinations, stay 0.

    They are orthogonal already, but for small ones: squares of what is below 1e-3 of the largest are noise in float32.
    """
    eps = torch.finfo(rows.dtype).eps
    size = rows.norm(dim=-1, keepdim=True)
    rows = torch.where(size > side * eps * size.amax(-2, keepdim=True), rows / size, 0)
    squares, vectors = torch.linalg.eigh(rows @ rows.mT)
    roots = torch.where(squares > 32 * rows.shape[-2] * eps, squares.rsqrt(), 0)
    return (vectors * roots.unsqueeze(-2)) @ (vectors.mT @ rows)


def _of_the_whole(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """U_k ``[..., m, k]`` and V_k^T ``[..., k, n]`` of ``x [..., m, n]``, m <= n."""
    if x.dtype == torch.float64:
        left, s, right = torch.linalg.svd(x, full_matrices=False)
        left, s, right = left[..., :k], s[..., :k], right[..., :k, :]
    else:
        # Half the time of an SVD, and in double precision as exact as one in single.
        wide = x.double()
        squares, vectors = torch.linalg.eigh(wide @ wide.mT)  # ascending
        left = vectors[..., -k:].flip(-1)
        s = squares[..., -k:].flip(-1).clamp(min=0).sqrt()
        right = (left.mT @ wide) / s.clamp(min=torch.finfo(x.dtype).tiny)[..., None]
    there = s > max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s[..., :1]
    return (left * there[..., None, :]).to(x.dtype), right.to(x.dtype)


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
    dtype        of the products named above; None: float64 for such parameters, else muon.iteration_dtype()'s
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
        if schedule != "fixed" and total_steps is None:
            raise ValueError(f"schedule={schedule} needs total_steps, the length of the run in steps")
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

        given, device = directions[0].dtype, directions[0].device
        dtype = self.dtype or (given if given == torch.float64 else muon.iteration_dtype(device))
        blocks: dict[tuple[int, int], Tensor] = {}

        def function(stack: Tensor) -> Tensor:
            k, long = rank_of(stack.shape, share), max(stack.shape[-2:])
            width = k + OVERSAMPLING
            omega = None
            if 2 * width < min(stack.shape[-2:]):
                # The same for all matrices of a shape, whichever rank computes them and whatever their place.
                if (long, width) not in blocks:
                    blocks[long, width] = gaussian(long, width, self.seed, group["step"], stack.device)
                omega = blocks[long, width]
            return top_singular_directions(stack, k, omega, dtype, update_scale(stack.shape, group["adjust"]))

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
        None,
        description="Of piecewise and cosine: over how many optimizer steps they go, after which the run may go on; "
        "null: all of the run.",
    )
    pieces: tuple[tuple[float, float], ...] = Field(
        ((0.5, 0.25),), description="Of piecewise: pairs of a part of the run, in [0, 1], and the share from there on."
    )
    seed: int = Field(0, ge=0, description="Of the random blocks that find the singular directions.")

    @model_validator(mode="after")
    def _schedule_fits(self) -> NuMuonConfig:
        check_schedule(self.schedule, self.rank, self.total_steps, self.pieces)
        return self

    def for_run(self, total_steps: int | None) -> NuMuonConfig:
        found = super().for_run(total_steps)
        if self.schedule == "fixed" or (self.total_steps is None and total_steps is None):
            return found
        length = self.total_steps or total_steps
        if total_steps is not None and length is not None and length > total_steps:
            raise ConfigError(
                f"is longer than the run of {total_steps} steps, so that schedule={self.schedule} would not come to "
                "its end; leave it out for the length of the run",
                key="total_steps",
                value=self.total_steps,
            )
        return found.model_copy(update={"total_steps": length})

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> NuMuon:
        if self.schedule != "fixed" and self.total_steps is None:
            raise ConfigError(
                f"schedule={self.schedule} needs the length in steps of a run whose end is not known; set it, or "
                "train.steps",
                key="total_steps",
            )
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
