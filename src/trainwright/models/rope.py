"""Rotary position embedding: inverse frequencies with the families' scalings, and the cos/sin tables.

Frequency i of a head of width d turns by ``position * theta**(-2i/d)`` radians (arXiv:2104.09864). The scalings stretch
the context beyond the length trained on: linear interpolation (arXiv:2306.15595), dynamic NTK, YaRN (arXiv:2309.00071)
and Llama 3.1's wavelength bands (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from torch import Tensor


class RopeScaling(BaseModel):
    """How rotary frequencies are changed to reach a longer context."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    type: Literal["linear", "dynamic", "yarn", "llama3"] = Field(description="Scaling rule.")
    factor: PositiveFloat = Field(description="How many times longer the context becomes.")
    original_max_seq_len: PositiveInt | None = Field(
        None, description="Context length in tokens before scaling; null: the model's max_seq_len."
    )
    low_freq_factor: PositiveFloat = Field(
        1.0, description="llama3: waves longer than original/low are divided by factor."
    )
    high_freq_factor: PositiveFloat = Field(
        4.0, description="llama3: waves shorter than original/high stay as they are."
    )
    beta_fast: PositiveFloat = Field(
        32.0, description="yarn: turns within the original context above which waves stay."
    )
    beta_slow: PositiveFloat = Field(1.0, description="yarn: turns below which waves are divided by factor.")
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: factor on cos and sin; null: from the factor."
    )
    mscale: float | None = Field(None, description="yarn: numerator of the attention factor (DeepSeek).")
    mscale_all_dim: float | None = Field(None, description="yarn: denominator of the attention factor (DeepSeek).")
    truncate: bool = Field(True, description="yarn: round the ramp's ends to whole dimensions.")

    @classmethod
    def from_hf(cls, rope: dict[str, Any]) -> RopeScaling | None:
        """From ``rope_parameters`` (transformers 5) or ``rope_scaling`` (transformers 4); None for plain RoPE.

        Raises KeyError / ValueError for a rule that is not one of ours.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        names = set(cls.model_fields) - {"type", "original_max_seq_len"}
        fields = {k: v for k, v in rope.items() if k in names and v is not None}
        return cls(type=kind, original_max_seq_len=rope.get("original_max_position_embeddings"), **fields)

    def to_hf(self, max_seq_len: int) -> dict[str, Any]:
        out: dict[str, Any] = {"rope_type": self.type, "factor": self.factor}
        if self.type in ("yarn", "llama3"):
            out["original_max_position_embeddings"] = self.original_max_seq_len or max_seq_len
        if self.type == "llama3":
            out |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.type == "yarn":
            out |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
            optional = ("attention_factor", "mscale", "mscale_all_dim")
            out |= {k: getattr(self, k) for k in optional if getattr(self, k) is not None}
        return out


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, max_seq_len: int, length: int | None = None
) -> tuple[Tensor, float]:
    """Radians per position ``[head_dim / 2]`` (float32, CPU) and the factor on cos and sin.

    ``length`` is the sequence length in tokens that dynamic scaling adapts to; the others do not read it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    inv = 1.0 / theta**exponents
    if scaling is None:
        return inv, 1.0
    factor = scaling.factor
    original = scaling.original_max_seq_len or max_seq_len
    if scaling.type == "linear":
        return inv / factor, 1.0
    if scaling.type == "dynamic":
        stretch = factor * max(length or 0, original) / original - (factor - 1)
        return 1.0 / (theta * stretch ** (head_dim / (head_dim - 2))) ** exponents, 1.0
    if scaling.type == "llama3":
        waves = 2 * math.pi / inv
        keep = (original / waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: short waves, kept; 0: long waves, divided
        return keep * inv + (1 - keep) * inv / factor, 1.0
    return _yarn(inv, head_dim, theta, scaling, original)


def _yarn(inv: Tensor, head_dim: int, theta: float, s: RopeScaling, original: int) -> tuple[Tensor, float]:
    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)

    def mscale(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    attention = s.attention_factor
    if attention is None:
        both = s.mscale and s.mscale_all_dim
        attention = mscale(s.mscale) / mscale(s.mscale_all_dim) if both else mscale(1.0)  # type: ignore[arg-type]
    return inv / s.factor * ramp + inv * (1 - ramp), attention


class RotaryTables:
    """cos and sin of every position, made on first use per device and kept in float32.

    Not a buffer: it survives ``to_empty``, is not saved, and no precision recipe can round it.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None, max_seq_len: int):
        self.head_dim, self.theta, self.scaling, self.max_seq_len = head_dim, theta, scaling, max_seq_len
        self._tables: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, positions: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin ``[B, T, head_dim]`` at ``positions [B, T]``; ``[1, length, head_dim]`` for positions 0..length-1.

        ``length`` is the number of positions in play; only dynamic scaling reads it when positions are given.
        """
        cos, sin = self._table(length, device)
        if positions is None:
            return cos[:length].unsqueeze(0), sin[:length].unsqueeze(0)
        return cos[positions], sin[positions]

    def _table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        dynamic = self.scaling is not None and self.scaling.type == "dynamic"
        adapt = max(length, self.scaling.original_max_seq_len or self.max_seq_len) if dynamic and self.scaling else 0
        key = (device, adapt)
        if key not in self._tables:
            # Made outside inference mode: a table first used while sampling serves training later.
            with torch.inference_mode(False), torch.no_grad():
                inv, attention = inverse_frequencies(self.head_dim, self.theta, self.scaling, self.max_seq_len, adapt)
                count = max(self.max_seq_len, adapt)
                angles = torch.outer(torch.arange(count, dtype=torch.float32, device=device), inv.to(device))
                angles = torch.cat((angles, angles), dim=-1)  # "rotate half": both halves turn alike
                if dynamic:
                    self._tables.clear()  # one length at a time
                self._tables[key] = (angles.cos() * attention, angles.sin() * attention)
        return self._tables[key]
