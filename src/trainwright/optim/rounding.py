"""Stochastic rounding to bfloat16: up or down with the odds that keep the expected value.

A step smaller than half of a bfloat16 weight's last bit (1/256 of the weight) is lost by usual rounding, every time;
here it is taken on average. With x in float32, 16 random bits are added below the bits that bfloat16 keeps, and the sum
is cut: P(up) is the share of the last bit that x has gone.
Revisiting BFloat16 Training, arXiv:2010.06192.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def round_stochastically_(targets: Sequence[Tensor], values: Sequence[Tensor], generator: torch.Generator) -> None:
    """Write float32 ``values`` into bfloat16 ``targets`` of the same shapes; ``values`` are used up.

    Infinities and NaN are written as they are. The draws come from ``generator``, on the tensors' device.
    """
    numels = [v.numel() for v in values]
    noise = torch.randint(
        0, 1 << 16, (sum(numels),), dtype=torch.int32, device=generator.device, generator=generator
    ).split(numels)
    plain = [v.contiguous() for v in values]
    special = [~v.isfinite() for v in plain]
    kept = [v.to(torch.bfloat16) for v in plain]
    torch._foreach_add_(
        [v.view(torch.int32) for v in plain], [n.view(v.shape) for n, v in zip(noise, plain, strict=True)]
    )
    high = 1 if sys.byteorder == "little" else 0  # the half of the 32 bits that is a bfloat16
    cut = [v.view(torch.bfloat16).view(*v.shape, 2)[..., high] for v in plain]
    torch._foreach_copy_(list(targets), [torch.where(s, k, c) for s, k, c in zip(special, kept, cut, strict=True)])
