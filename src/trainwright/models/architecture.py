"""What a decoder is made of, apart from its weights: dimensions, families, named sizes, exact counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.models.rope import RopeScaling


@dataclass(frozen=True)
class Architecture:
    """Everything that decides a decoder's parameters and function. Sizes count elements."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int  # of dense layers; 0 where there is none
    max_seq_len: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    qkv_bias: bool = False
    out_bias: bool = False  # bias of attention's output projection
    windows: tuple[int, ...] = ()  # per layer, tokens a query sees, 0 = all; () = all layers see all
    n_experts: int = 0  # 0 = dense
    n_experts_per_token: int = 0
    moe_ffn_dim: int = 0
    dense_layers: tuple[int, ...] = ()  # layers of a mixture-of-experts model that have a plain feed-forward
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalise: bool = True  # weights of the chosen experts sum to 1
    balance: Literal["aux_loss", "bias", "none"] = "none"
    aux_loss_coefficient: float = 0.001
    bias_update_rate: float = 0.001
    dropout: float = 0.0
    family: str = "llama"  # whose name an export takes where two families compute the same

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def is_moe(self, layer: int) -> bool:
        return self.n_experts > 0 and layer not in self.dense_layers

    def matmul_params(self, layer: int) -> int:
        """Weights of layer ``layer`` that one token is multiplied by (of the experts, the active ones)."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        if self.is_moe(layer):
            return attention + self.dim * (self.n_experts + 3 * self.n_experts_per_token * self.moe_ffn_dim)
        return attention + 3 * self.dim * self.ffn_dim

    def attended(self, layer: int, seq_len: int) -> float:
        """Keys that a query sees, averaged over the positions of one document of ``seq_len`` tokens."""
        w = min(self.window(layer) or seq_len, seq_len)
        return (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward: 3 x 2 FLOPs per weight and per pair that is attended, the head counted once."""
        per_key = 2 * self.n_heads * self.head_dim  # multiply-adds: q k^T and p v
        macs: float = self.vocab_size * self.dim
        for layer in range(self.n_layers):
            macs += self.matmul_params(layer) + per_key * self.attended(layer, seq_len)
        return 6.0 * macs


@dataclass(frozen=True)
class Family:
    """Where a family departs from plain Llama."""

    summary: str
    rope_theta: float
    norm_eps: float
    max_seq_len: int
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int = 0
    n_experts: int = 0
    n_experts_per_token: int = 0


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 3 (arXiv:2407.21783)", 500_000.0, 1e-5, 8192),
    "llama2": Family("Llama 2 (arXiv:2307.09288)", 10_000.0, 1e-5, 4096),
    "mistral": Family("Mistral 7B (arXiv:2310.06825): sliding window", 10_000.0, 1e-5, 32_768, window=4096),
    "qwen2.5": Family("Qwen2.5 (arXiv:2412.15115): bias on q, k, v", 1_000_000.0, 1e-6, 32_768, qkv_bias=True),
    "qwen3": Family("Qwen3 (arXiv:2505.09388): norm on q and k", 1_000_000.0, 1e-6, 32_768, qk_norm=True),
    "mixtral": Family("Mixtral (arXiv:2401.04088)", 1_000_000.0, 1e-5, 32_768, n_experts=8, n_experts_per_token=2),
    "qwen3_moe": Family(
        "Qwen3-MoE (arXiv:2505.09388)", 1_000_000.0, 1e-6, 32_768, qk_norm=True, n_experts=16, n_experts_per_token=4
    ),
}


@dataclass(frozen=True)
class Size:
    """Dimensions under a name."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    tied: bool


# Small sizes are wide and shallow, with as many key-value heads as heads: on a CPU a matrix product of 256 columns runs
# near the peak and one of 64 does not, and a grouped head saves no work. From 1b on the dimensions are those of the
# released models (Llama 3.2 1B and 3B, Llama 3.1 8B and 70B, Qwen3 14B and 32B).
# Llama-family parameters: 1m..50m with 4,096 ids, 125m..3b with 32,768, 8b..70b with 131,072.
SIZES: dict[str, Size] = {
    "1m": Size(128, 3, 4, 4, 32, 384, True),  # 1,164,160 (672,768 with 257 ids)
    "2m": Size(192, 3, 3, 3, 64, 512, True),  # 2,114,880
    "5m": Size(256, 5, 4, 4, 64, 704, True),  # 5,065,472
    "10m": Size(384, 5, 6, 6, 64, 1024, True),  # 10,424,448
    "25m": Size(512, 7, 8, 8, 64, 1408, True),  # 24,583,680
    "50m": Size(640, 10, 10, 10, 64, 1664, True),  # 50,967,680
    "125m": Size(768, 14, 12, 12, 64, 2048, True),  # 124,278,528
    "350m": Size(1024, 24, 16, 16, 64, 2816, True),  # 341,885,952
    "1b": Size(2048, 16, 32, 8, 64, 8192, True),  # 1,040,254,976
    "3b": Size(3072, 28, 24, 8, 128, 8192, True),  # 2,919,410,688
    "8b": Size(4096, 32, 32, 8, 128, 14_336, False),  # 8,053,329,920
    "14b": Size(5120, 40, 40, 8, 128, 17_408, False),  # 14,554,649,600
    "32b": Size(5120, 64, 64, 8, 128, 25_600, False),  # 32,548,459,520
    "70b": Size(8192, 80, 64, 8, 128, 28_672, False),  # 70,599,843,840
}
