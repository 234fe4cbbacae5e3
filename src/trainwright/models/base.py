"""What every language model here offers, and the config it is built from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.core.params import Role
from trainwright.core.registry import MethodConfig

if TYPE_CHECKING:
    from trainwright.models.early_exit import Exit


@dataclass
class Head:
    """The output projection: ``logits = cap(hidden @ weight.T + bias)``, ``cap(x) = softcap * tanh(x / softcap)``."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None
    scale: float = 1.0  # multiplies hidden @ weight.T


@dataclass
class Hidden:
    """What a model hands to a ``head_fn``: final hidden states (after the last norm), before the head."""

    states: Tensor  # [B, T, D]
    head: Head
    aux_loss: Tensor | None = None  # scalar, already scaled by its coefficient (MoE balancing); mean per batch
    metrics: dict[str, Tensor] = field(default_factory=dict)  # scalars to log (no gradient)
    exits: list[Exit] = field(default_factory=list)  # early ones, whose losses are added


class LanguageModel(nn.Module):
    """Interface of all models. Knows nothing of how it is sharded."""

    blocks: nn.ModuleList  # the layers, in order: what FSDP, activation checkpointing and compile wrap
    vocab_size: int
    max_seq_len: int

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        *,
        positions: Tensor | None = None,  # [B, T] int64; None: 0..T-1
        doc_ids: Tensor | None = None,  # [B, T] int32; None: one document a row
        cache: Any = None,
        head_fn: Callable[[Hidden], Any] | None = None,
    ) -> Any:
        """Logits ``[B, T, V]``; with ``head_fn``, what it returns for the final :class:`Hidden`.

        Losses go through ``head_fn`` so that the full logits need never exist and so that a sharded head is
        used inside ``forward``, where FSDP has gathered it.
        """

    @abstractmethod
    def param_roles(self) -> dict[str, Role]:
        """Role of every parameter by its ``named_parameters()`` name."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Matrix-product FLOPs of forward + backward per token at ``seq_len``, causal attention counted as the
        triangle that it is, the embedding look-up as nothing, recomputation not counted."""

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())


class ModelConfig(MethodConfig):
    """Base of model configs."""

    @abstractmethod
    def build(self, vocab_size: int, seq_len: int) -> LanguageModel:
        """The model with fresh (or loaded) weights on the current default device.

        Fresh weights are drawn from torch's global generator.

        ``vocab_size`` is the tokenizer's. Raises ConfigError or ModelError when that or ``seq_len`` does not fit.
        """

    def tokenizer_path(self) -> str | None:
        """Folder whose tokenizer belongs to the weights, if any; used when the recipe names no tokenizer."""
        return None
