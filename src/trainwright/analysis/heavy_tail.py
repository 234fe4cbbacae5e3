"""How heavy the tail of a weight matrix's spectrum is: the exponent alpha of a power law fitted by Hill's estimator.

With e the squared singular values of W [m, n] in ascending order, N = min(m, n), i = floor(N / 2), k = N - i:
    alpha = 1 + k / sum_{j >= i} ln(e_j / e_i)
that is, the density of the upper half of the spectrum is taken to fall as e^(-alpha). A small alpha is a heavy tail, as
trained layers have it; large ones are near to random weights of the same shape.
Hill, A Simple General Approach to Inference About the Tail of a Distribution, 1975; as used in arXiv:2605.22297.

alpha depends on the shape: a Gaussian matrix has 2.1 if it is square and 5.9 at 64 x 1024. :func:`gaussian_alpha` gives
that value, to be taken off when matrices of different shapes are compared.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def hill_alpha(values: Tensor, longer_side: int | None = None) -> Tensor:
    """Exponent of the tails of positive ``values [..., N]``, in any order: ``[...]``, from the upper half of each row.

    longer_side  of the matrices that the values are squared singular values of: tells rounding errors from values
    NaN where the tail reaches values that are 0 or rounding errors; inf where all of it is equal.
    """
    e = values.sort(dim=-1).values
    count = e.shape[-1]
    if count == 0:
        return e.new_full(e.shape[:-1], math.nan)
    cut = count // 2
    least, largest = e[..., cut], e[..., -1]
    logs = (e[..., cut:] / least[..., None]).log().sum(-1)
    alpha = 1 + (count - cut) / logs
    floor = torch.zeros_like(largest)
    if longer_side is not None:
        floor = largest * (longer_side * torch.finfo(e.dtype).eps) ** 2
    return torch.where(least > floor, alpha, math.nan)


def spectrum(matrices: Tensor) -> Tensor:
    """Squared singular values of ``matrices [..., m, n]``, descending: ``[..., min(m, n)]``, in at least float32."""
    wide = matrices if matrices.element_size() >= 4 else matrices.float()
    return torch.linalg.svdvals(wide).square()


def alpha(matrices: Tensor) -> Tensor:
    """:func:`hill_alpha` of the spectra of ``matrices [..., m, n]``: ``[...]``. The larger, the lighter the tail."""
    if matrices.ndim < 2:
        raise ValueError(f"alpha is of matrices, got a tensor of shape {tuple(matrices.shape)}")
    return hill_alpha(spectrum(matrices), max(matrices.shape[-2:]))


@functools.lru_cache(maxsize=4096)
def gaussian_alpha(rows: int, columns: int, points: int = 20_000) -> float:
    """alpha of a large matrix of independent Gaussians with this ratio of sides, from the law of its spectrum.

    That is Marchenko and Pastur's: with y = min / max, density sqrt((b - e) (e - a)) / (2 pi y e) on [a, b],
    a and b = (1 -+ sqrt(y))^2.
    """
    y = min(rows, columns) / max(rows, columns)
    middle, radius = 1 + y, 2 * math.sqrt(y)
    # e = middle + radius cos(t): the density becomes smooth in t, so that midpoints do.
    t = (torch.arange(points, dtype=torch.float64) + 0.5) * (math.pi / points)
    e = (middle + radius * t.cos()).flip(0)  # ascending
    weight = t.sin().square().flip(0) / e
    weight = weight / weight.sum()
    share = weight.cumsum(0)
    upper = share > 0.5
    least = e[upper][0]
    return float(1 + weight[upper].sum() / (weight[upper] * (e[upper] / least).log()).sum())
