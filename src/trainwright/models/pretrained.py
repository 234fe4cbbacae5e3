"""``model: {name: pretrained, path: FOLDER}``: train on from the weights of a Hugging Face folder, in our decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.registry import register
from trainwright.models.architecture import Architecture
from trainwright.models.base import ModelConfig
from trainwright.models.decoder import Decoder
from trainwright.models.hf_config import architecture_from_hf
from trainwright.models.hf_io import from_pretrained, read_json


@register("model", "pretrained")
class PretrainedModelConfig(ModelConfig):
    """Weights of a Llama, Mistral, Qwen2.5, Qwen3, Mixtral, Qwen3-MoE or GLM-4-MoE folder, in our decoder."""

    path: str = Field(description="Hugging Face model folder (config.json, safetensors).")
    dtype: Literal["float32", "bfloat16", "float16", "stored"] = Field(
        "float32",
        description="Type of the trained weights; small updates vanish in bfloat16. stored: as in the folder.",
    )
    max_seq_len: PositiveInt | None = Field(None, description="Longest sequence in tokens; null: the folder's.")
    dropout: float = Field(
        0.0, ge=0.0, lt=1.0, description="Dropout on what attention and feed-forward add to the stream."
    )
    balance: Literal["aux_loss", "bias", "none"] | None = Field(
        None, description="Load balancing of the experts; null: the folder's. Dense models do not read it."
    )
    aux_loss_coefficient: NonNegativeFloat | None = Field(
        None, description="Weight of the balancing loss; null: the folder's."
    )
    bias_update_rate: PositiveFloat = Field(0.001, description="Change of an expert's bias per step.")

    def _change(self, arch: Architecture) -> Architecture:
        changes = {"dropout": self.dropout, "bias_update_rate": self.bias_update_rate}
        for name in ("max_seq_len", "aux_loss_coefficient"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
        if self.balance is not None and arch.n_experts:
            if (self.balance == "bias") != (arch.balance == "bias"):
                raise ConfigError(
                    f"the folder's experts are balanced by {arch.balance}: their routing has "
                    f"{'a' if arch.balance == 'bias' else 'no'} bias, and no folder could hold another; leave it out",
                    key="balance",
                    value=self.balance,
                )
            changes["balance"] = self.balance  # type: ignore[assignment]
        return dataclasses.replace(arch, **changes)  # type: ignore[arg-type]

    def architecture(self, vocab_size: int) -> Architecture:
        """That of the folder, without reading weights; ``vocab_size`` is the folder's."""
        config = read_json(Path(self.path) / "config.json")
        return self._change(architecture_from_hf(config, self.path))

    def build(self, vocab_size: int, seq_len: int) -> Decoder:
        dtype = None if self.dtype == "stored" else self.dtype
        model = from_pretrained(self.path, dtype, architecture=self._change)
        check_fit(model.vocab_size, model.max_seq_len, vocab_size, seq_len, self.path)
        return model

    def tokenizer_path(self) -> str | None:
        return self.path


def check_fit(model_vocab: int, max_seq_len: int, vocab_size: int, seq_len: int, path: str) -> None:
    """Raises ModelError when the tokenizer has ids that the model lacks, ConfigError when ``seq_len`` is too long."""
    if vocab_size > model_vocab:
        raise ModelError(
            f"{path} knows {model_vocab} ids and the tokenizer has {vocab_size}: it does not belong to these weights; "
            "leave tokenizer out to use the folder's own"
        )
    if seq_len > max_seq_len:
        raise ConfigError(
            f"seq_len={seq_len} is beyond the {max_seq_len} tokens of {path}; set train.seq_len <= {max_seq_len}",
            key="max_seq_len",
            value=max_seq_len,
        )
