"""``model: {name: decoder}``: a family, a named size, and any dimension of your own."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from trainwright.core.errors import ConfigError, nearest
from trainwright.core.registry import register
from trainwright.models.architecture import FAMILIES, SIZES, Architecture
from trainwright.models.base import ModelConfig
from trainwright.models.decoder import Decoder
from trainwright.models.rope import RopeScaling


def materialise(arch: Architecture) -> Decoder:
    """A decoder with fresh weights on the default device; on the meta device, without weights."""
    device = torch.get_default_device()
    with torch.device("meta"):
        model = Decoder(arch)
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights()
    return model


@register("model", "decoder")
class DecoderModelConfig(ModelConfig):
    """Decoder of the Llama, Mistral and Qwen families, dense or mixture of experts, with fresh weights.

    The size counts the whole model: with 4,096 ids up to 50m, 32,768 up to 3b, 131,072 from 8b on (exact counts in
    ``trainwright.models.architecture``). A mixture-of-experts family is sized by the parameters active per token.
    """

    family: str = Field("llama", description="Model family: " + ", ".join(FAMILIES) + ".")
    size: str = Field("2m", description="Named size: " + ", ".join(SIZES) + "; explicit dimensions override its own.")
    vocab_size: PositiveInt | None = Field(None, description="Ids the model knows; null: as many as the tokenizer has.")
    dim: PositiveInt | None = Field(None, description="Width of the residual stream.")
    n_layers: PositiveInt | None = Field(None, description="Number of blocks.")
    n_heads: PositiveInt | None = Field(None, description="Query heads.")
    n_kv_heads: PositiveInt | None = Field(None, description="Key-value heads; must divide n_heads.")
    head_dim: PositiveInt | None = Field(None, description="Width of a head, even; null: dim / n_heads.")
    ffn_dim: PositiveInt | None = Field(
        None, description="Width of the feed-forward; null with a dim: 8/3 dim, up to a multiple of 64."
    )
    max_seq_len: PositiveInt | None = Field(None, description="Longest sequence in tokens; null: the family's.")
    rope_theta: PositiveFloat | None = Field(None, description="Base of the rotary frequencies; null: the family's.")
    rope_scaling: RopeScaling | None = Field(None, description="Scaling of the rotary frequencies.")
    norm_eps: PositiveFloat | None = Field(None, description="Epsilon of RMSNorm; null: the family's.")
    tie_embeddings: bool | None = Field(None, description="Use the embedding as the head; null: tied below 8b.")
    qk_norm: bool | None = Field(None, description="RMSNorm on each query and key head; null: the family's.")
    attention_bias: bool | None = Field(None, description="Bias on q, k and v; null: the family's.")
    sliding_window: NonNegativeInt | None = Field(
        None, description="Tokens a query sees, itself included; 0: all; null: the family's."
    )
    n_experts: NonNegativeInt | None = Field(None, description="Experts per layer; 0: dense; null: the family's.")
    n_experts_per_token: PositiveInt | None = Field(None, description="Experts that each token goes to.")
    moe_ffn_dim: PositiveInt | None = Field(
        None, description="Width of an expert; null: ffn_dim / n_experts_per_token, up to a multiple of 32."
    )
    balance: Literal["aux_loss", "bias", "none"] = Field(
        "aux_loss",
        description="How experts are kept evenly loaded: auxiliary loss, bias without a loss (arXiv:2408.15664; scores "
        "are then sigmoids, as in the paper), or not at all. Dense models do not read it.",
    )
    aux_loss_coefficient: NonNegativeFloat = Field(
        0.001, description="Weight of the balancing loss (Mixtral, Qwen: 0.001)."
    )
    bias_update_rate: PositiveFloat = Field(0.001, description="Change of an expert's bias per step (paper: 0.001).")
    router_score: Literal["softmax", "sigmoid"] | None = Field(
        None, description="Scores of the experts; null: sigmoid with bias balancing, else softmax."
    )
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="Dropout on what attention and feed-forward add to the stream."
    )

    @model_validator(mode="after")
    def _check(self) -> DecoderModelConfig:
        self.architecture(self.vocab_size or 1)
        return self

    def architecture(self, vocab_size: int) -> Architecture:
        """The resolved architecture for ``vocab_size`` ids. Raises ConfigError where dimensions do not fit together."""
        if self.family not in FAMILIES:
            raise ConfigError(f"no such family; {nearest(self.family, FAMILIES)}", key="family", value=self.family)
        if self.size not in SIZES:
            # In full: the nearest name to 3m is 350m.
            meant = f"did you mean {self.size.lower()!r}? " if self.size.lower() in SIZES else ""
            raise ConfigError(f"no such size; {meant}sizes are {', '.join(SIZES)}", key="size", value=self.size)
        family, size = FAMILIES[self.family], SIZES[self.size]

        def pick(name: str, default: Any) -> Any:
            value = getattr(self, name)
            return default if value is None else value

        dim, n_layers = pick("dim", size.dim), pick("n_layers", size.n_layers)
        n_heads, n_kv_heads, head_dim = self._heads(dim)
        ffn_dim = pick("ffn_dim", size.ffn_dim if self.dim is None else -(-8 * dim // (3 * 64)) * 64)
        window = pick("sliding_window", family.window)
        n_experts = pick("n_experts", family.n_experts)
        top_k = pick("n_experts_per_token", family.n_experts_per_token or 2) if n_experts else 0
        if n_experts and top_k > n_experts:
            raise ConfigError(
                f"exceeds the {n_experts} experts; set n_experts_per_token <= n_experts",
                key="n_experts_per_token",
                value=top_k,
            )
        if not n_experts and (self.n_experts_per_token or self.moe_ffn_dim):
            key = "n_experts_per_token" if self.n_experts_per_token else "moe_ffn_dim"
            raise ConfigError("the model has no experts; set n_experts or choose family mixtral or qwen3_moe", key=key)
        score = self.router_score or ("sigmoid" if self.balance == "bias" else "softmax")
        return Architecture(
            vocab_size=vocab_size,
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_dim=ffn_dim,
            max_seq_len=pick("max_seq_len", family.max_seq_len),
            rope_theta=pick("rope_theta", family.rope_theta),
            rope_scaling=self.rope_scaling,
            norm_eps=pick("norm_eps", family.norm_eps),
            tie_embeddings=pick("tie_embeddings", size.tied),
            qk_norm=pick("qk_norm", family.qk_norm),
            qkv_bias=pick("attention_bias", family.qkv_bias),
            windows=(window,) * n_layers if window else (),
            n_experts=n_experts,
            n_experts_per_token=top_k,
            moe_ffn_dim=pick("moe_ffn_dim", -(-ffn_dim // (32 * top_k)) * 32) if n_experts else 0,
            router_score=score,  # type: ignore[arg-type]
            balance=self.balance if n_experts else "none",
            aux_loss_coefficient=self.aux_loss_coefficient,
            bias_update_rate=self.bias_update_rate,
            dropout=self.dropout,
            family=self.family,
        )

    def _heads(self, dim: int) -> tuple[int, int, int]:
        """Query heads, key-value heads and head width; what is not given follows from the rest."""
        size = SIZES[self.size]
        n_heads, head_dim = self.n_heads, self.head_dim
        if n_heads is None:
            width = head_dim or size.head_dim
            if self.dim is None and head_dim is None:
                n_heads = size.n_heads
            elif dim % width:
                raise ConfigError(
                    f"is not a multiple of the head width {width}; set n_heads, head_dim, or a dim it divides",
                    key="dim",
                    value=dim,
                )
            else:
                n_heads = dim // width
            head_dim = width
        if head_dim is None:
            if dim % n_heads:
                raise ConfigError(
                    f"does not divide dim={dim}; choose a divisor of {dim}, or set head_dim as well",
                    key="n_heads",
                    value=n_heads,
                )
            head_dim = dim // n_heads
        if head_dim % 2:
            raise ConfigError("is odd, and rotary embedding turns pairs; make it even", key="head_dim", value=head_dim)
        if self.n_kv_heads is not None:
            n_kv_heads = self.n_kv_heads
            if n_heads % n_kv_heads:
                raise ConfigError(
                    f"does not divide n_heads={n_heads}; choose a divisor of {n_heads}",
                    key="n_kv_heads",
                    value=n_kv_heads,
                )
        else:
            # The size's sharing of key-value heads where it fits the number of heads, else none.
            shared = size.n_heads // size.n_kv_heads
            n_kv_heads = n_heads // shared if n_heads % shared == 0 else n_heads
        return n_heads, n_kv_heads, head_dim

    def build(self, vocab_size: int, seq_len: int) -> Decoder:
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ConfigError(
                f"is smaller than the tokenizer's {vocab_size} ids; set at least that, or leave it out",
                key="vocab_size",
                value=self.vocab_size,
            )
        arch = self.architecture(self.vocab_size or vocab_size)
        if seq_len > arch.max_seq_len:
            raise ConfigError(
                f"seq_len={seq_len} is beyond it; set train.seq_len <= {arch.max_seq_len}, or a larger max_seq_len",
                key="max_seq_len",
                value=arch.max_seq_len,
            )
        return materialise(arch)
