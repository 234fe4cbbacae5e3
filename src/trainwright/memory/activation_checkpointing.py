"""Activation checkpointing: blocks forget their activations and make them again in the backward pass.

Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174; selective: keep what matrix products made, recompute
the rest (Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.core.registry import register
from trainwright.memory.base import MemoryConfig
from trainwright.models.base import LanguageModel

# Matrix products, and attention where one kernel does all of it.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Our own operators wrap products too: attention over documents, the experts of a layer.
    keep = op in _KEPT or getattr(op, "namespace", "") == "trainwright"
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_block(block: nn.Module, selective: bool = False) -> None:
    """Make ``block`` recompute its activations. Replaces its ``forward``, so names of parameters stay as they are."""
    forward = block.forward
    extra: dict[str, Any] = (
        {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)} if selective else {}
    )

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    block.forward = recomputed  # type: ignore[method-assign]


@register("memory", "activation_checkpointing", paper="arXiv:1604.06174")
class ActivationCheckpointingConfig(MemoryConfig):
    """Recompute activations in the backward pass: less memory, up to a third more computation."""

    mode: Literal["none", "full", "every_n", "selective"] = Field(
        "full", description="full: every block; every_n: each n-th; selective: keep matrix products; none: off."
    )
    n: PositiveInt = Field(2, description="every_n: each n-th block is recomputed.")

    def apply(self, model: LanguageModel) -> None:
        step = {"none": 0, "full": 1, "selective": 1, "every_n": self.n}[self.mode]
        for i, block in enumerate(model.blocks):
            if step and i % step == 0:
                checkpoint_block(block, selective=self.mode == "selective")
