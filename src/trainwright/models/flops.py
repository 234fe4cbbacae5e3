"""Matrix-product FLOPs per token of training where not all weights are trained.

    a trained weight       forward 2, gradient of its input 2, its own gradient 2       as counted for a whole model
    a frozen weight        forward 2, gradient of its input 2
    an adapter's weight    forward 2, gradient of its input 2, its own gradient 2
    below the first trained weight of the model nothing is differentiated: forward 2, attended pairs too

Of stacked experts [E, out, in] a token meets the share that is active. What is done once per step and not per token (a
DoRA's norms) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainwright.models.base import LanguageModel


def frozen_correction(
    model: LanguageModel, head: Tensor | None, active_experts: float, pair_flops: Sequence[float]
) -> float:
    """What to add to the FLOPs per token of training all weights, at most 0 but for adapters; 0 where all are trained.

    active_experts  experts that a token is sent to
    pair_flops      FLOPs per token of each block's attended pairs, forward and backward

    Left out, as it depends on how a block is made: the first block that is differentiated needs no gradient for its own
    input, which saves 2 FLOPs for each weight that reads it.
    """
    named = dict(model.named_parameters())
    if all(p.requires_grad for p in named.values()) and not any("lora_" in n for n in named):
        return 0.0
    roles = model.param_roles()
    trained = [any(p.requires_grad for p in block.parameters()) for block in model.blocks]
    embedded = any(p.requires_grad for n, p in named.items() if roles.get(n) == "embedding")
    first = 0 if embedded else next((i for i, t in enumerate(trained) if t), len(trained))
    out = 0.0
    for i, block in enumerate(model.blocks):
        differentiated = i >= first
        if not differentiated:
            out -= pair_flops[i] * 2 / 3
        for name, param in block.named_parameters():
            if param.ndim not in (2, 3):
                continue
            macs = param.numel() * (1.0 if param.ndim == 2 else active_experts / param.shape[0])
            if "lora_" in name:
                out += 6.0 * macs
            elif not param.requires_grad:
                out -= (2.0 if differentiated else 4.0) * macs
    if head is not None and not head.requires_grad:
        out -= 2.0 * head.numel()
    return out
