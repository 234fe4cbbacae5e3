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

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.memory.base import MemoryConfig
from trainwright.models.base import LanguageModel

# Matrix products, and attention where one kernel does all of it; not every release of torch has all of them.
_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
_KEPT = {getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)}


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Our own operators wrap products too: attention over documents, the experts of a layer.
    keep = op in _KEPT or getattr(op, "namespace", "") == "trainwright"
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputed(nn.Module):
    """Goes before the class of a block. A copy of the block recomputes itself, not the block it was copied from."""

    _plain_class: type[nn.Module]
    _keeps_products: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        extra: dict[str, Any] = {"context_fn": _selective_contexts} if self._keeps_products else {}
        return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # No module holds the class made below under its name, so pickles hold the plain one.
        reduced: tuple[Any, ...] = super().__reduce_ex__(max(int(protocol), 2))  # type: ignore[assignment]
        return (_new_recomputed, (self._plain_class,), *reduced[2:])


_classes: dict[type, type[nn.Module]] = {}  # plain: recomputed; one each, so that compiled code is shared


def _recomputed_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _classes:
        body = {"_plain_class": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        _classes[plain] = type(f"Checkpointed{plain.__name__}", (_Recomputed, plain), body)
    return _classes[plain]


def _new_recomputed(plain: type[nn.Module]) -> nn.Module:
    cls = _recomputed_class(plain)
    return cls.__new__(cls)


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)


def checkpoint_block(block: nn.Module, selective: bool = False) -> None:
    """Make ``block`` recompute its activations, by another class as FSDP2 does; names of parameters stay as they are.

    Again with the same ``selective`` changes nothing. Raises ConfigError when ``block`` does it the other way already,
    and when its ``forward`` was replaced on the instance, which would bypass the class.
    """
    if isinstance(block, _Recomputed):
        if block._keeps_products != selective:
            raise ConfigError(_APPLIED)
        return
    if "forward" in block.__dict__:
        raise ConfigError(
            f"forward of a {type(block).__name__} was replaced on the instance, which activation checkpointing cannot "
            "reach; apply it first, or make the change in a subclass"
        )
    block._keeps_products = selective  # type: ignore[assignment]
    block.__class__ = _recomputed_class(type(block))


_APPLIED = (
    "activation checkpointing was applied to this model before, with other settings; "
    "apply it once, or build the model anew"
)


@register("memory", "activation_checkpointing", paper="arXiv:1604.06174")
class ActivationCheckpointingConfig(MemoryConfig):
    """Recompute activations in the backward pass: less memory, up to a third more computation."""

    mode: Literal["none", "full", "every_n", "selective"] = Field(
        "full", description="full: every block; every_n: each n-th; selective: keep matrix products; none: off."
    )
    n: PositiveInt = Field(2, description="every_n: each n-th block is recomputed.")

    def apply(self, model: LanguageModel) -> None:
        step = {"none": 0, "full": 1, "selective": 1, "every_n": self.n}[self.mode]
        chosen = [block for i, block in enumerate(model.blocks) if step and i % step == 0]
        before = {id(block) for block in model.blocks if isinstance(block, _Recomputed)}
        if before and before != {id(block) for block in chosen}:
            raise ConfigError(_APPLIED, key="memory.mode", value=self.mode)
        for block in chosen:
            checkpoint_block(block, selective=self.mode == "selective")
