"""Adapters out of a model: merged, with a proof that nothing was lost, or alone in PEFT's format.

The proof compares logits on random ids, all computed in float32: of the model with adapters, of the merged weights as
they will be stored, and of the folder that was written, read anew. 16-bit weights are coarse: where rounding to them
loses more than ``TOLERANCE`` of what the adapters do, the merged model is stored in float32.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import ConfigError, ModelError
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.base import LanguageModel
from trainwright.models.decoder import Decoder
from trainwright.models.hf_config import hf_model_type, hf_names
from trainwright.models.hf_io import from_pretrained, save_pretrained
from trainwright.models.transforms.lora import LoraConfig, LoRALinear, adapters, adapters_off, remove_adapters

log = logging.getLogger("trainwright")
PROOF = "merge_proof.json"
TOLERANCE = 0.02  # of the adapters' effect on the logits (root mean square), what 16-bit weights may change
EXACT = 1e-3  # what float32 ones may
ROUNDING = 1e-5  # of the logits themselves (root mean square), what float32 arithmetic changes


@dataclass
class MergeProof:
    """Root mean squares over the logits of the probe, in float32."""

    dtype: str  # of the stored weights
    kept_in_float32: bool  # because the type of the weights was too coarse for what was learned
    logits: float
    adapter_effect: float  # with adapters against without
    merged_error: float  # merged weights, as stored, against with adapters
    exported_error: float  # the folder, read anew, against merged weights
    largest_error: float  # of any logit: the folder against with adapters
    same_argmax: float  # share of positions
    probe: str

    def __str__(self) -> str:
        kept = " (16-bit weights would have lost what was learned)" if self.kept_in_float32 else ""
        return (
            f"merged in {self.dtype}{kept}: logits of the written folder differ from the adapters' by "
            f"{self.largest_error:.2g} at most, {self.merged_error:.2g} rms, where the adapters' effect is "
            f"{self.adapter_effect:.2g} rms; same likeliest token at {self.same_argmax:.1%} of positions"
        )


def has_adapters(model: nn.Module) -> bool:
    return next(adapters(model), None) is not None


def export_merged(
    model: LanguageModel,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    tolerance: float = TOLERANCE,
    probe: Tensor | None = None,
) -> MergeProof:
    """Merge the adapters of ``model``, which is changed, and write it as a Hugging Face folder with its proof.

    probe  ids [B, T] to compare logits on; None: random ones
    Raises ConfigError when ``folder`` exists and ModelError, leaving no folder, where the logits differ.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists; export to a new folder or remove it first", key="out", value=str(folder))
    tokens = _probe(model) if probe is None else probe
    stored = _dtype(model)
    model.eval().to("cpu", torch.float32)
    want = _logits(model, tokens)
    with adapters_off(model):
        effect = _rms(want - _logits(model, tokens))
    allowed = EXACT * effect + ROUNDING * _rms(want)
    remove_adapters(model)
    dtype, merged = torch.float32, _logits(model, tokens)
    if not _rms(merged - want) <= allowed:  # also where it is not a number
        raise ModelError(
            f"merging changes the logits by {_rms(merged - want):.3g} (rms) even in float32, more than {allowed:.3g}; "
            "the model is not exported. Something in it reads an adapted weight other than by its layer"
        )
    if stored != torch.float32:
        rounded = _logits(copy.deepcopy(model).to(stored).to(torch.float32), tokens)
        if _rms(rounded - want) <= tolerance * effect + ROUNDING * _rms(want):
            dtype, merged = stored, rounded
        else:
            log.warning(
                "%s would lose %.0f%% of what the adapters do; the merged model is stored in float32",
                str(stored).removeprefix("torch."),
                100 * _rms(rounded - want) / max(effect, 1e-30),
            )
    part = folder.with_name(f".{folder.name}.unproven-{os.getpid()}")
    try:
        save_pretrained(model.to(dtype), part, tokenizer)
        found = _logits(_read(model, part, tokenizer), tokens)
        proof = MergeProof(
            dtype=str(dtype).removeprefix("torch."),
            kept_in_float32=dtype != stored,
            logits=_rms(want),
            adapter_effect=effect,
            merged_error=_rms(merged - want),
            exported_error=_rms(found - merged),
            largest_error=float((found - want).abs().max()),
            same_argmax=float((found.argmax(-1) == want.argmax(-1)).double().mean()),
            probe=f"{tokens.shape[0]} x {tokens.shape[1]} ids" + (", random, seed 0" if probe is None else ""),
        )
        if not proof.exported_error <= ROUNDING * proof.logits:  # also where it is not a number
            raise ModelError(
                f"the written folder computes other logits than the merged model ({proof.exported_error:.3g} rms); "
                "it is not exported"
            )
        (part / PROOF).write_text(json.dumps(asdict(proof), indent=2) + "\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return proof


def read_proof(folder: str | Path) -> MergeProof | None:
    """The proof that an exported folder carries, if its model was merged."""
    path = Path(folder) / PROOF
    return MergeProof(**json.loads(path.read_text())) if path.is_file() else None


def _dtype(model: nn.Module) -> torch.dtype:
    embed = model.embed if isinstance(model, Decoder) else model.hf.get_input_embeddings()  # type: ignore[union-attr, operator]
    return embed.weight.dtype  # type: ignore[union-attr, return-value]


def _probe(model: LanguageModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (4, min(64, model.max_seq_len)), generator=generator)


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).double()


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _read(model: LanguageModel, folder: Path, tokenizer: Tokenizer | None) -> LanguageModel:
    if isinstance(model, Decoder):
        return from_pretrained(folder, dtype=torch.float32).eval()
    from trainwright.models.hf import HFModelConfig

    vocab = model.vocab_size if tokenizer is None else tokenizer.vocab_size
    return HFModelConfig(path=str(folder), dtype="float32").build(vocab, 2).eval()


# -- the adapter alone ------------------------------------------------------------------------------------------------


def save_adapter(
    model: LanguageModel,
    folder: str | Path,
    lora: LoraConfig,
    base: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the adapters of ``model`` as a folder that PEFT loads onto ``base``, the folder of the frozen model.

    Raises ConfigError when ``folder`` exists, ModelError for what PEFT's format does not hold as we do: adapters of
    experts, and parameters that were trained in full.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists; export to a new folder or remove it first", key="out", value=str(folder))
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    transposed = set()
    for name, module in adapters(model):
        if not isinstance(module, LoRALinear):
            raise ModelError(f"{name} has adapters of experts, which PEFT stores otherwise; export the merged model")
        theirs = _hf_name(model, name)
        modules.append(theirs)
        transposed.add(module.transposed)
        prefix = f"base_model.model.{theirs}"
        tensors[f"{prefix}.lora_A.weight"] = module.lora_a.detach().cpu().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = module.lora_b.detach().cpu().contiguous()
        if module.lora_magnitude is not None:
            tensors[f"{prefix}.lora_magnitude_vector"] = module.lora_magnitude.detach().cpu().contiguous()
    if not tensors:
        raise ModelError("the model has no adapters; export it without --adapter")
    if lora.also_train:
        raise ModelError("parameters of also_train are no part of an adapter; export the merged model")
    if len(transposed) > 1:
        raise ModelError("PEFT takes matrices of one orientation alone; export the merged model")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "fan_in_fan_out": transposed == {True},
        "bias": "none",
        "inference_mode": True,
    }
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        save_file(tensors, part / "adapter_model.safetensors", metadata={"format": "pt"})
        (part / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(part)
        part.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}", key="out", value=str(folder)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _hf_name(model: LanguageModel, name: str) -> str:
    if not isinstance(model, Decoder):
        return name.removeprefix("hf.")
    theirs = hf_names(model.arch, hf_model_type(model.arch))[f"{name}.weight"]
    return str(theirs).removesuffix(".weight")
