"""Early exits of a decoder: heads that read the residual stream behind some of its layers, trained with it.

    s_p = norm(x_p + mlp(mlp_norm(x_p)))        [B, T, D]     x_p: the stream behind p layers; norm and mlp optional
    y_p = s_p @ U.T                             [B, T, V]     U: the model's own unembedding (tied), or one of the exit
    loss = CE(y_L) + sum_p w_p(t) CE(y_p)
    w_p(t) = w_0 + r (w_p - w_0)                              linear;   r = min(t / warmup_steps, 1)
    w_p(t) = w_0 + (1 - cos(pi r)) / 2 (w_p - w_0)            cosine

The objective makes the losses (:attr:`trainwright.models.base.Hidden.exits`), from states that are computed when it
asks for them: generation without exits pays nothing, a pipeline makes logits when their gradient is due.

EE-LLM, arXiv:2312.04916; with the rest of the model frozen EE-Tuning, arXiv:2402.00518. Where this differs: an exit has
no attention block of its own, which would need a key-value cache of its own; a tied exit shares the unembedding, which
is the embedding only where the model's head is; weights are multiples of a sum over tokens, as all losses here are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.core.errors import ConfigError
from trainwright.models.architecture import Architecture
from trainwright.models.base import Head, Hidden
from trainwright.models.decoder import INIT_STD, MLP, Decoder, RMSNorm

FIGURES = ("nll", "correct")  # sums that are logged of each exit


def exit_weight(step: int, weight: float, *, init: float = 0.0, warmup_steps: int = 0, shape: str = "linear") -> float:
    """The weight of an exit's loss with ``step`` steps done: from ``init`` to ``weight``."""
    if step >= warmup_steps:
        return weight
    ratio = step / warmup_steps
    if shape == "cosine":
        ratio = (1.0 - math.cos(math.pi * ratio)) / 2.0
    return init + ratio * (weight - init)


def check_exits(after: Iterable[int], weights: Iterable[float], n_layers: int) -> None:
    """Raises ConfigError for exits that a model of ``n_layers`` does not have, or lists of other lengths."""
    after, weights = list(after), list(weights)
    for n in after:
        if not 1 <= n <= n_layers:
            raise ConfigError(
                f"names layer {n}, and the model has layers 1 to {n_layers}; choose among these",
                key="after",
                value=after,
            )
    if not after or len(set(after)) < len(after):
        raise ConfigError("should name each layer once, and at least one", key="after", value=after)
    if len(weights) != len(after):
        raise ConfigError(
            f"are {len(weights)} numbers for {len(after)} exits ({after}); give one for each",
            key="weights",
            value=weights,
        )


@dataclass(frozen=True)
class ExitSettings:
    """positions  layers that the stream has gone through before each exit, in order; ``weights`` of their losses"""

    positions: tuple[int, ...]
    weights: tuple[float, ...]
    init_weight: float = 0.0
    warmup_steps: int = 0
    warmup: str = "linear"
    tied: bool = True
    frozen: bool = False  # nothing but the exits is trained

    def names(self) -> list[str]:
        """Of the figures that the exits log."""
        return [f"exit_{p}_{figure}" for p in self.positions for figure in FIGURES]


class ExitHead(nn.Module):
    """``x [B, T, D]`` -> what goes through the unembedding, ``[B, T, D]``. ``head`` is its own, None where tied."""

    def __init__(self, arch: Architecture, *, norm: bool = True, mlp: bool = False, tied: bool = True):
        super().__init__()
        self.mlp_norm = RMSNorm(arch.dim, arch.norm_eps) if mlp else None
        self.mlp = MLP(arch.dim, arch.ffn_dim or arch.moe_ffn_dim) if mlp else None
        self.norm = RMSNorm(arch.dim, arch.norm_eps) if norm else None
        self.head = None if tied else nn.Linear(arch.dim, arch.vocab_size, bias=False)

    @torch.no_grad()
    def init_weights(self, n_layers: int) -> None:
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
        if self.mlp is not None:
            nn.init.normal_(self.mlp.down.weight, std=INIT_STD / math.sqrt(2 * n_layers))

    def forward(self, x: Tensor) -> Tensor:
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x if self.norm is None else cast(Tensor, self.norm(x))


@dataclass
class Exit:
    """An exit of one forward pass: the stream there, and how to go on to logits."""

    position: int
    weight: float  # of its loss, at this step
    x: Tensor  # [B, T, D]
    module: ExitHead
    unembedding: Head | None  # the model's; None where the exit has its own

    @property
    def name(self) -> str:
        return f"exit_{self.position}"

    def hidden(self) -> Hidden:
        """States and head; computed now."""
        own = self.module.head
        return Hidden(self.module(self.x), cast(Head, self.unembedding) if own is None else Head(own.weight))


class EarlyExits(nn.ModuleDict):
    """The exits of a model, or those of them that one stage of a pipeline has: an :class:`ExitHead` by position."""

    def __init__(self, settings: ExitSettings, heads: Mapping[str, ExitHead]):
        super().__init__(cast(Any, dict(heads)))
        self.settings = settings
        self.weights: dict[int, float] = {}
        self.at_step(0)

    def at_step(self, step: int) -> None:
        """Set the weights of the losses for the step that follows ``step`` others."""
        s = self.settings
        self.weights = {
            p: exit_weight(step, w, init=s.init_weight, warmup_steps=s.warmup_steps, shape=s.warmup)
            for p, w in zip(s.positions, s.weights, strict=True)
        }

    def has(self, position: int) -> bool:
        return str(position) in self

    def at(self, position: int, x: Tensor, unembedding: Head | None) -> Exit:
        module = cast(ExitHead, self[str(position)])
        return Exit(position, self.weights[position], x, module, unembedding)

    def subset(self, positions: Iterable[int]) -> EarlyExits | None:
        """Those at ``positions``, sharing modules; None where there is none."""
        keys = [str(p) for p in positions if self.has(p)]
        return EarlyExits(self.settings, {k: cast(ExitHead, self[k]) for k in keys}) if keys else None

    def own_heads(self) -> list[Tensor]:
        return [head.weight for m in self.values() if (head := cast(ExitHead, m).head) is not None]

    def flops_per_token(self, arch: Architecture) -> float:
        """Of all exits, forward and backward: 2 per weight each for states, their gradient, and the weight's own."""
        out = 0.0
        for module in self.values():
            sizes = [p for p in module.parameters() if p.ndim == 2]
            out += sum((6.0 if p.requires_grad else 4.0) * p.numel() for p in sizes)
            if cast(ExitHead, module).head is None:
                out += (4.0 if self.settings.frozen else 6.0) * arch.vocab_size * arch.dim
        return out


def add_exits(
    model: Decoder, settings: ExitSettings, *, norm: bool = True, mlp: bool = False, copy: bool = False
) -> None:
    """Give ``model`` exits with fresh weights, or with ``copy`` those of its last norm and its unembedding.

    Raises ConfigError for a model that has some already, and where nothing would be trained.
    """
    if model.exits is not None:
        raise ConfigError("the model has early exits already; name them all in one early_exit", key="transforms")
    if settings.frozen:
        if settings.tied and not norm and not mlp:
            raise ConfigError(
                "freezes the model, and a tied exit without norm and mlp has no weight of its own: nothing would be "
                "trained; set norm, mlp or tied=false",
                key="freeze",
                value=True,
            )
        for p in model.parameters():
            p.requires_grad_(False)
    weight = model.embed.weight
    heads = {}
    for position in settings.positions:
        head = ExitHead(model.arch, norm=norm, mlp=mlp, tied=settings.tied).to(weight.device, weight.dtype)
        if not weight.is_meta:
            head.init_weights(model.arch.n_layers)
            if copy:
                _copy(head, model)
        heads[str(position)] = head
    model.exits = EarlyExits(settings, heads)


def check_objective(model: Any, objective: Any) -> None:
    """Raises ConfigError for an objective that would leave the exits of ``model`` untrained."""
    if getattr(model, "exits", None) is not None and not hasattr(objective, "exit_loss"):
        raise ConfigError(
            "does not reach the model's early exits, which would stay untrained; use next_token or sft, or leave "
            "transforms.early_exit out",
            key="objective",
        )


@torch.no_grad()
def _copy(head: ExitHead, model: Decoder) -> None:
    if head.norm is not None:
        head.norm.weight.copy_(model.norm.weight)
    if head.head is not None:
        head.head.weight.copy_(model.embed.weight if model.head is None else model.head.weight)
