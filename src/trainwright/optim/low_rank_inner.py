"""Update rules inside a low-rank subspace: Adam, Adam with 8-bit moments, Lion, SGD.

Pure functions of lists of tensors; they write to the moments given and return fresh updates. Adam's second moments may
have a wider dtype than gradients and momenta, and it is then computed in that one.

8-bit moments (8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861): of each block the largest magnitude,
float32, and one byte per number: the nearest entry of the dynamic table, whose entries are dense around every power
of ten. A block is a run of at most 256 numbers along the rank, for one row or column of the kept side, so that the
blocks are the same however the kept side is sharded. (torchao and bitsandbytes cut the flattened tensor into blocks,
which ties the state to the layout; the table is theirs.) A second moment is never rounded to 0, but to the smallest
entry: divided by a root that lost its value, a small momentum would give an update of any size. Codes and scales are
plain tensors, as checkpoints want them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256
CACHED = 2**16  # numbers of one operand that a core's cache holds beside the others


def bias_correction(step: int, betas: Sequence[float]) -> float:
    """Factor on Adam's update after ``step`` steps; it leaves eps alone, as GaLore's code does."""
    return math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


def adam(
    grads: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], betas: Sequence[float], eps: float
) -> list[Tensor]:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  m / (sqrt(v) + eps), without the bias correction."""
    updates: list[Tensor] = []
    for at in portions(grads, CACHED):
        v = exp_avg_sq[at]
        g, m = ([t.to(w.dtype) for t, w in zip(tensors[at], v, strict=True)] for tensors in (grads, exp_avg))
        torch._foreach_mul_(m, betas[0])
        torch._foreach_add_(m, g, alpha=1 - betas[0])
        torch._foreach_mul_(v, betas[1])
        torch._foreach_addcmul_(v, g, g, value=1 - betas[1])
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, eps)
        for held, moved in zip(exp_avg[at], m, strict=True):
            if moved is not held:
                held.copy_(moved)
        updates += [u.to(t.dtype) for u, t in zip(torch._foreach_div(m, roots), grads[at], strict=True)]
    return updates


def fused_adam(
    grads: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], betas: Sequence[float], eps: float
) -> list[Tensor]:
    """:func:`adam` to rounding, written over ``grads``, by torch's fused kernel: one pass in place of eight."""
    for at in _by_kind(exp_avg_sq):
        lists = [[tensors[i] for i in at] for tensors in (grads, exp_avg, exp_avg_sq)]
        dtype = exp_avg_sq[at[0]].dtype  # the kernel takes one, and on CPUs no strides
        dense = [[t.to(dtype).contiguous() for t in tensors] for tensors in lists]
        own, first, second = dense
        # The kernel's weights are the gradients themselves, which it reads before it writes. With rate and decay of -1
        # it makes them 0 w + u; at step infinity there is no bias correction.
        steps = [torch.full((), math.inf, dtype=torch.float32, device=own[0].device)] * len(own)
        torch._fused_adamw_(
            own, own, first, second, [], steps, lr=-1.0, beta1=betas[0], beta2=betas[1], weight_decay=-1.0, eps=eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        for tensors, written in zip(lists, dense, strict=True):
            for t, new in zip(tensors, written, strict=True):
                if new is not t:
                    t.copy_(new)
    return grads


def _by_kind(tensors: list[Tensor]) -> list[list[int]]:
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(tensors):
        found.setdefault((t.dtype, t.device), []).append(i)
    return list(found.values())


def portions(tensors: Sequence[Tensor], numbers: float) -> list[slice]:
    """``tensors`` in runs of about so many numbers on a CPU, whose caches then hold them from pass to pass; else one.

    (A kernel for several tensors is a loop over them there, and would read all of them from memory in every pass.)
    """
    if not tensors or tensors[0].device.type != "cpu":
        return [slice(0, len(tensors))] if tensors else []
    starts, held = [0], 0
    for i, t in enumerate(tensors):
        if i > starts[-1] and held + t.numel() > numbers:
            starts.append(i)
            held = 0
        held += t.numel()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(tensors)], strict=True)]


def lion(grads: list[Tensor], exp_avg: list[Tensor], betas: Sequence[float]) -> list[Tensor]:
    """sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g."""
    updates = torch._foreach_lerp(exp_avg, grads, 1 - betas[0])
    torch._foreach_sign_(updates)
    torch._foreach_lerp_(exp_avg, grads, 1 - betas[1])
    return list(updates)


def adam_8bit(
    grads: list[Tensor],
    exp_avg: tuple[list[Tensor], list[Tensor]],
    exp_avg_sq: tuple[list[Tensor], list[Tensor]],
    rank_dims: list[int],
    betas: Sequence[float],
    eps: float,
) -> list[Tensor]:
    """Adam whose moments are held as (codes, scales); ``rank_dims`` says which dimension of each has the rank.

    Tensors of one rank go through as the rows of one matrix.
    """
    updates: list[Tensor] = list(grads)
    for members in _by_rank(grads, rank_dims):
        dims = [rank_dims[i] for i in members]

        def rows(tensors: list[Tensor], members: list[int] = members, dims: list[int] = dims) -> Tensor:
            return torch.cat([_rows(tensors[i], d) for i, d in zip(members, dims, strict=True)])

        g = rows(grads).float()
        m = dequantise(rows(exp_avg[0]), rows(exp_avg[1]), True).lerp_(g, 1 - betas[0])
        v = dequantise(rows(exp_avg_sq[0]), rows(exp_avg_sq[1]), False).mul_(betas[1])
        v.addcmul_(g, g, value=1 - betas[1])
        for moment, (codes, scales), signed in ((m, exp_avg, True), (v, exp_avg_sq, False)):
            for held, new in zip((codes, scales), quantise(moment, signed), strict=True):
                targets = [held[i] for i in members]
                torch._foreach_copy_(targets, _unrow(new, targets, dims))
        done = m / v.sqrt_().add_(eps)
        for i, u in zip(members, _unrow(done, [grads[i] for i in members], dims), strict=True):
            updates[i] = u.to(grads[i].dtype)
    return updates


def quantise(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales [rows, blocks] (float32) of ``x [rows, rank]``."""
    scales = torch.cat([c.abs().amax(-1, keepdim=True) for c in x.split(BLOCK, -1)], -1).float()
    _, middles = _tables(signed, x.device)
    normed = x / _spread(scales, x.shape[-1]).clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(normed, middles, out_int32=True)
    return (codes if signed else codes.clamp_(min=1)).to(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Float32 numbers of ``codes [rows, rank]``; codes and scales of zeros, as a fresh state has them, give zeros."""
    table, _ = _tables(signed, codes.device)
    return table[codes.int()] * _spread(scales, codes.shape[-1])


def scales_shape(reduced: Sequence[int], rank_dim: int) -> list[int]:
    """Shape of the scales of a tensor of shape ``reduced``."""
    shape = list(reduced)
    shape[rank_dim] = -(-shape[rank_dim] // BLOCK)
    return shape


def dynamic_table(signed: bool) -> list[float]:
    """256 numbers in [-1, 1] or [0, 1]: a sign, a decimal exponent in unary, and what bits are left as a fraction."""
    fraction_bits = 0 if signed else 1
    found = [0.0, 1.0]
    for exponent in range(-6, 1):
        count = 2 ** (6 + exponent + fraction_bits)
        for i in range(count):
            middle = (0.1 + 0.9 * (i + 0.5) / count) * 10.0**exponent
            found += [middle, -middle] if signed else [middle]
    return sorted(found)


@functools.cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table and the middles between its entries."""
    table = torch.tensor(dynamic_table(signed), dtype=torch.float32)
    return table.to(device), ((table[1:] + table[:-1]) / 2).to(device)


def _spread(scales: Tensor, length: int) -> Tensor:
    return scales if scales.shape[-1] == 1 else scales.repeat_interleave(BLOCK, dim=-1)[..., :length]


def _by_rank(tensors: list[Tensor], rank_dims: list[int]) -> list[list[int]]:
    found: dict[tuple[int, torch.device], list[int]] = {}
    for i, (t, d) in enumerate(zip(tensors, rank_dims, strict=True)):
        found.setdefault((t.shape[d], t.device), []).append(i)
    return list(found.values())


def _rows(t: Tensor, rank_dim: int) -> Tensor:
    """``t`` with the rank as columns."""
    t = t.mT if rank_dim == -2 else t
    return t.reshape(-1, t.shape[-1])


def _unrow(rows: Tensor, targets: list[Tensor], rank_dims: list[int]) -> list[Tensor]:
    """The inverse of :func:`_rows` for each of ``targets``, whose shapes it gives."""
    width = rows.shape[-1]
    pieces = rows.split([t.numel() // width for t in targets])
    return [
        p.view(t.mT.shape).mT if d == -2 else p.view(t.shape)
        for p, t, d in zip(pieces, targets, rank_dims, strict=True)
    ]
