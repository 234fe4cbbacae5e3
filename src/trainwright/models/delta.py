"""Delta releases: what fine-tuning changed in a model's weights, without the weights themselves.

    delta = bits(model) - bits(base)        bits(model) = bits(base) + delta        modulo 2^n, n bits a weight

The difference is that of the bit patterns as integers, so base + delta is the model bit by bit, whatever the values (a
difference of floats would round). A base of another type is first converted to the model's. Weights that the base
lacks or has in another shape are stored whole. Hashes of the base's weights and of the result are in ``delta.json``:
another base is refused before anything is written, and a damaged delta when its result is not what it should be.

Panda LLM (arXiv:2305.03025) was released so, as are models on LLaMA's weights in general; the reference adds and
subtracts floats, which is not exact in 16 bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import ConfigError, ModelError
from trainwright.models.hf_io import GIB, WeightFolder, _some, _write_shards, read_json

DELTA = "delta.json"
FORMAT = 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as integers of the same size, a view."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def subtract(model: Tensor, base: Tensor) -> Tensor:
    """The integers by which ``model``'s bits differ from those of ``base``, converted to its type; of one shape."""
    return bits(model) - bits(base.to(model.dtype))


def add(base: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """The model's weight of ``dtype``: the inverse of :func:`subtract`, bit by bit."""
    return (bits(base.to(dtype)) + delta).view(dtype)


def tensor_hash(tensor: Tensor) -> str:
    """Hash of type, shape and bits."""
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(bits(tensor).flatten().view(torch.uint8).numpy().data)  # type: ignore[arg-type]
    return digest.hexdigest()


def make_delta(
    base: str | Path, model: str | Path, out: str | Path, max_shard_size: int = 4 * GIB
) -> dict[str, Any]:  # fmt: skip
    """Write the folder ``out`` that turns the Hugging Face folder ``base`` into ``model``; returns its description.

    Configuration, tokenizer and other small files of ``model`` are copied into it. One weight is held at a time, and a
    shard. Raises ConfigError when ``out`` exists, ModelError for folders without safetensors.
    """
    base, model, out = Path(base), Path(model), Path(out)
    with ExitStack() as stack:
        old, new = WeightFolder(base, stack), WeightFolder(model, stack)
        info: dict[str, Any] = {"format": FORMAT, "base": base.name, "tensors": {}}

        def differences() -> Iterator[tuple[str, Tensor]]:
            for name in sorted(new.names()):
                after = new.tensor(name)
                entry: dict[str, Any] = {"dtype": str(after.dtype).removeprefix("torch."), "hash": tensor_hash(after)}
                before = old.tensor(name) if name in old and old.shape(name) == new.shape(name) else None
                entry["base_hash"] = None if before is None else tensor_hash(before)
                info["tensors"][name] = entry
                yield name, after if before is None else subtract(after, before)

        def write(part: Path) -> None:
            _write_shards(part, differences(), max_shard_size)
            if all(t["base_hash"] is None for t in info["tensors"].values()):
                raise ModelError(f"{base} and {model} share no weight of one name and shape; is it the right base?")
            (part / DELTA).write_text(json.dumps(info, indent=1) + "\n")
            _copy_files(model, part)

        _into(out, write)
    return info


def apply_delta(
    base: str | Path, delta: str | Path, out: str | Path, max_shard_size: int = 4 * GIB
) -> Path:  # fmt: skip
    """Write the Hugging Face folder ``out``: ``base`` with ``delta``, bit by bit the model that it was made from.

    Raises ModelError for another base (before anything is written) and for a damaged delta, ConfigError when ``out``
    exists.
    """
    base, delta, out = Path(base), Path(delta), Path(out)
    info = read_json(delta / DELTA) if (delta / DELTA).is_file() else None
    if info is None:
        raise ModelError(f"{delta} is no delta: it has no {DELTA}; `trainwright delta make` writes one")
    if info.get("format") != FORMAT:
        raise ModelError(f"{delta}: its format is {info.get('format')!r}, and this version reads {FORMAT}")
    tensors: dict[str, dict[str, Any]] = info["tensors"]
    with ExitStack() as stack:
        old, change = WeightFolder(base, stack), WeightFolder(delta, stack)
        if lost := sorted(set(tensors) - change.names()):
            raise ModelError(f"{delta} lacks weights that its {DELTA} lists: {_some(lost)}")
        wrong = [n for n, t in tensors.items() if t["base_hash"] is not None and not _is(old, n, t["base_hash"])]
        if wrong:
            raise ModelError(
                f"{base} is not the base that this delta was made from ({info['base']}): {len(wrong)} of "
                f"{len(tensors)} weights differ, such as {_some(sorted(wrong), 3)}"
            )

        def sums() -> Iterator[tuple[str, Tensor]]:
            for name, entry in tensors.items():
                value = change.tensor(name)
                if entry["base_hash"] is not None:
                    value = add(old.tensor(name), value, getattr(torch, entry["dtype"]))
                if tensor_hash(value) != entry["hash"]:
                    raise ModelError(f"{delta}: the weight {name} is damaged; fetch the delta again")
                yield name, value

        def write(part: Path) -> None:
            _write_shards(part, sums(), max_shard_size)
            _copy_files(delta, part)

        _into(out, write)
    return out


def _is(folder: WeightFolder, name: str, digest: str) -> bool:
    return name in folder and tensor_hash(folder.tensor(name)) == digest


def _copy_files(source: Path, target: Path) -> None:
    """Everything but weights: configuration, tokenizer, licence, ..."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != DELTA:
            shutil.copyfile(path, target / path.name)


def _into(out: Path, write: Any) -> None:
    """``write(folder)``, and the folder takes its name when all is there."""
    if out.exists():
        raise ConfigError("exists; give a new folder or remove it first", key="out", value=str(out))
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        write(part)
        part.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", key="out", value=str(out)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
