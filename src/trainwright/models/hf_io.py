"""Hugging Face model folders in and out, with ``safetensors`` and ``json`` alone.

Reading asks for every weight by name and shape and refuses what is missing, misshapen or left over. Writing goes into a
folder beside the target that takes its name when all is on disk, so that a folder that is there is whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trainwright.core.distributed import barrier, broadcast_object, full_tensor, is_main
from trainwright.core.errors import ConfigError, ModelError
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.architecture import Architecture
from trainwright.models.base import LanguageModel
from trainwright.models.decoder import Decoder
from trainwright.models.hf_config import architecture_from_hf, hf_config, hf_constants, hf_model_type, hf_names

log = logging.getLogger("trainwright")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
KEPT = ("generation_config.json", "chat_template.jinja")
GIB = 1 << 30


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError when it is missing or not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a Hugging Face model folder: it has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return data


class WeightFolder:
    """The safetensors files of a folder, opened lazily: ``shape(name)`` and ``tensor(name)``.

    Raises ModelError when there are none, when a shard of the index is missing, or when a file is damaged.
    """

    def __init__(self, folder: Path, stack: ExitStack):
        from safetensors import SafetensorError, safe_open

        if (folder / INDEX).is_file():
            weight_map = read_json(folder / INDEX).get("weight_map", {})
            files = sorted(set(weight_map.values()))
            missing = [f for f in files if not (folder / f).is_file()]
            if missing:
                raise ModelError(f"{folder} misses {len(missing)} of {len(files)} weight files: {_some(missing)}")
        else:
            weight_map, files = {}, [SINGLE] if (folder / SINGLE).is_file() else []
        if not files:
            found = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.safetensors")]
            hint = (
                f" (it has {_some(found)}; save the model again with transformers in safetensors format)"
                if found
                else ""
            )
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
        self.folder = folder
        self._files: dict[str, Any] = {}
        for name in files:
            try:
                handle = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{folder / name} is damaged: {error}") from None
            self._files |= dict.fromkeys(handle.keys(), handle)
        lost = sorted(set(weight_map) - set(self._files))
        if lost:
            raise ModelError(f"{folder}: the index lists weights that its files do not hold: {_some(lost)}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


def _some(names: list[str], limit: int = 6) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def from_pretrained(
    folder: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    architecture: Callable[[Architecture], Architecture] | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE), on the default device.

    ``dtype`` (a torch dtype or its name) casts the weights; None keeps them as stored. ``architecture`` may change what
    does not touch the weights (dropout, balancing, context). Raises ModelError when the folder is no such model, when
    files or weights are missing or left over, or when a shape does not fit.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    arch = architecture_from_hf(config, str(folder))
    kind = config["model_type"]
    cast: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    device = torch.get_default_device()
    names = hf_names(arch, kind)
    model_arch = arch if architecture is None else architecture(arch)
    with torch.device("meta"):
        model = Decoder(model_arch)
    state = model.state_dict()
    with ExitStack() as stack:
        weights = WeightFolder(folder, stack)
        _check(names, state, weights, set(hf_constants(arch, kind)))
        loaded: dict[str, Tensor] = {}
        for ours, theirs in names.items():
            target = torch.float32 if ours.endswith(".expert_bias") else cast
            if isinstance(theirs, list):
                first = weights.tensor(theirs[0])
                value = torch.empty(state[ours].shape, dtype=target or first.dtype, device=device)
                for slot, name in zip(value, theirs, strict=True):
                    slot.copy_(weights.tensor(name))
            else:
                value = weights.tensor(theirs).to(device=device, dtype=target)
            loaded[ours] = value
    model.load_state_dict(loaded, strict=True, assign=True)
    model.requires_grad_(True)
    model.hf_files = _kept_files(folder)
    return model


def _check(
    names: dict[str, str | list[str]], state: dict[str, Tensor], weights: WeightFolder, constants: set[str]
) -> None:
    wanted: dict[str, tuple[int, ...]] = {}
    for ours, theirs in names.items():
        shape = tuple(state[ours].shape)
        wanted |= dict.fromkeys(theirs, shape[1:]) if isinstance(theirs, list) else {theirs: shape}
    missing = sorted(set(wanted) - weights.names())
    if missing:
        raise ModelError(f"{weights.folder} misses {len(missing)} weights: {_some(missing)}")
    # A tied head may be stored as a copy; old Llama folders hold their rotary frequencies.
    extra = sorted(n for n in weights.names() - set(wanted) - constants if not n.endswith("rotary_emb.inv_freq"))
    extra = [n for n in extra if not (n == "lm_head.weight" and "head.weight" not in names)]
    if extra:
        raise ModelError(
            f"{weights.folder} has {len(extra)} weights that its config.json does not account for: {_some(extra)}"
        )
    for name, shape in wanted.items():
        if weights.shape(name) != shape:
            raise ModelError(
                f"{weights.folder}: {name} has shape {list(weights.shape(name))}, config.json says {list(shape)}"
            )


def _kept_files(folder: Path) -> dict[str, str]:
    kept = {n: (folder / n).read_text(encoding="utf-8") for n in KEPT if (folder / n).is_file()}
    if "chat_template.jinja" not in kept and (folder / "tokenizer_config.json").is_file():
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(template, str):
            kept["chat_template.jinja"] = template
    return kept


def save_pretrained(
    model: LanguageModel,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    generation_config: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 4 * GIB,
) -> Path:
    """Write ``model`` as a Hugging Face folder that transformers loads: config, safetensors shards of at most
    ``max_shard_size`` bytes with their index, generation config, tokenizer and chat template.

    ``dtype`` casts the weights (None: as they are). In a distributed run every rank must call it; the first one writes.
    Attention that a transform has swapped is not in the folder: a warning says so, and config.json names the transform.
    Nor are early exits, likewise.
    Raises ConfigError when ``folder`` exists, ModelError when no transformers architecture computes what ours does.
    """
    folder = Path(folder)
    if broadcast_object(folder.exists()):
        raise ConfigError(f"{folder} exists; export to a new folder or remove it first", key="out", value=str(folder))
    plan = _writer(model, dtype)
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    try:
        if is_main():
            part.mkdir(parents=True)
        plan(part, max_shard_size)
        if is_main():
            _save_extras(model, part, tokenizer, generation_config)
            part.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}", key="out", value=str(folder)) from error
    finally:
        if is_main():
            shutil.rmtree(part, ignore_errors=True)
    barrier()
    return folder


def _writer(model: LanguageModel, dtype: torch.dtype | None) -> Callable[[Path, int], None]:
    if isinstance(model, Decoder):
        arch = model.arch
        stored = dtype or model.embed.weight.dtype
        config = hf_config(arch, str(stored).removeprefix("torch."))  # refuses before anything is written
        sparse = {name for block in model.blocks if (name := getattr(cast(Any, block.attn).attend, "transform", None))}
        if sparse:
            config["trainwright_transforms"] = sorted(sparse)
            log.warning(
                f"the folder holds the weights alone: transformers has no {', '.join(sorted(sparse))} and will compute "
                "dense attention, which gives other numbers than this model (noted in config.json)"
            )

        if model.exits is not None:
            config["trainwright_early_exits"] = {"after_layers": [int(p) for p in model.exits]}
            log.warning(
                "the folder holds the model without its early exits, which transformers has no place for: it computes "
                "what the last layer says (noted in config.json); the run's own checkpoints keep them"
            )

        def write(part: Path, max_shard_size: int) -> None:
            if is_main():
                (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            _write_shards(part, _hf_tensors(model, arch, stored), max_shard_size)

        return write
    save = getattr(model, "write_hf", None)
    if save is None:
        raise ModelError(f"{type(model).__name__} cannot be written as a Hugging Face folder")
    return save


def _hf_tensors(model: Decoder, arch: Architecture, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the CPU), one after another; a collective each where the weights are sharded."""
    kind = hf_model_type(arch)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("exits.")}
    names = hf_names(arch, kind)
    lost = sorted(set(names) - set(state))
    extra = sorted(set(state) - set(names))
    if lost or extra:
        raise ModelError(
            f"the model's weights are not those of a plain decoder (missing: {_some(lost) or 'none'}; "
            f"not known to transformers: {_some(extra) or 'none'}); merge or remove what was added before exporting"
        )
    for ours, theirs in names.items():
        value = full_tensor(state[ours].detach())
        value = value.to(device="cpu", dtype=value.dtype if ours.endswith(".expert_bias") else dtype)
        if isinstance(theirs, list):
            yield from ((name, matrix.clone()) for name, matrix in zip(theirs, value, strict=True))
        else:
            yield theirs, value.contiguous()
    for name, shape in hf_constants(arch, kind).items():
        yield name, torch.zeros(shape, dtype=torch.float32 if name.endswith("correction_bias") else dtype)


def _write_shards(part: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_size: int) -> None:
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = count = 0

    def flush() -> None:
        nonlocal pending, size
        if pending:
            if is_main():
                save_file(pending, part / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in tensors:
        if size + tensor.nbytes > max_shard_size:
            flush()
        pending[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        count += tensor.numel()
    flush()
    if not is_main():
        return
    if len(shards) == 1:
        (part / "shard-0").rename(part / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, held in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (part / f"shard-{i}").rename(part / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": total, "total_parameters": count}, "weight_map": weight_map}
    (part / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save_extras(
    model: LanguageModel, part: Path, tokenizer: Tokenizer | None, generation_config: dict[str, Any] | None
) -> None:
    kept: dict[str, str] = getattr(model, "hf_files", {})
    ids: dict[str, int] = {}
    if tokenizer is not None:
        tokenizer.save(part)
        ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        if tokenizer.bos_id is not None:
            ids["bos_token_id"] = tokenizer.bos_id
        config = read_json(part / "config.json")
        (part / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n")
        template = kept.get("chat_template.jinja")
        settings = part / "tokenizer_config.json"
        has_own = (part / "chat_template.jinja").exists() or (
            settings.exists() and "chat_template" in read_json(settings)
        )
        if template and not has_own:
            (part / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif "chat_template.jinja" in kept:
        (part / "chat_template.jinja").write_text(kept["chat_template.jinja"], encoding="utf-8")
    if generation_config is None:
        generation_config = json.loads(kept["generation_config.json"]) if "generation_config.json" in kept else ids
    (part / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
