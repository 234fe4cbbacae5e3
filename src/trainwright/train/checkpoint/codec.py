"""Exact JSON for checkpoint metadata, and paths for trees of tensors.

JSON alone loses things that a resumed run needs back: NaN and infinities are not JSON, tuples come back as lists,
keys that are not strings come back as strings. Such values are written as an object with one key that begins with
``$``; everything else is plain JSON. Finite floats are written with ``repr``, which round-trips float64 exactly.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError


def encode(value: Any, tensors: dict[str, Tensor] | None = None, path: str = "") -> Any:
    """``value`` as plain JSON values. Tensors are put into ``tensors`` under their path, if that is given.

    Takes None, bool, int, float, str, bytes, lists, tuples, dicts and NumPy scalars (stored as Python numbers).
    Raises CheckpointError that names the path of anything else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, list):
        return [encode(v, tensors, join(path, str(i))) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, tensors, join(path, str(i))) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: encode(v, tensors, join(path, k)) for k, v in value.items()}
        # repr keeps the key 1 apart from the key "1" in the paths of tensors below
        return {"$dict": [[encode(k), encode(v, tensors, join(path, repr(k)))] for k, v in value.items()]}
    raise CheckpointError(
        f"cannot store {path or 'the value'} in a checkpoint: it is a {type(value).__name__}; "
        f"use numbers, strings, lists, dicts{' or tensors' if tensors is not None else ''}"
    )


def decode(value: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """Inverse of :func:`encode`. Raises CheckpointError for what encode never writes."""
    try:
        return _decode(value, tensors)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"a checkpoint's JSON is malformed: {error}") from error


def _decode(value: Any, tensors: dict[str, Tensor] | None) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "$bytes" and isinstance(content, str):
            return base64.b64decode(content, validate=True)
        if kind == "$tuple" and isinstance(content, list):
            return tuple(_decode(v, tensors) for v in content)
        if kind == "$dict" and isinstance(content, list):
            return {_decode(k, None): _decode(v, tensors) for k, v in content}
        if kind == "$tensor" and tensors is not None and content in tensors:
            return tensors[content]
        if kind.startswith("$"):
            raise CheckpointError(f"unknown entry {kind!r} in a checkpoint's JSON")
    return {k: _decode(v, tensors) for k, v in value.items()}


def dumps(value: Any) -> bytes:
    """Encoded JSON values as UTF-8 text with a final newline."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def loads(raw: bytes, name: str) -> Any:
    """Parsed JSON values, still encoded. Raises CheckpointError naming the file."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from error


def join(path: str, key: str) -> str:
    """Path of ``key`` below ``path``; ``/`` and ``~`` in keys are escaped as in JSON Pointer (RFC 6901)."""
    key = key.replace("~", "~0").replace("/", "~1")
    return f"{path}/{key}" if path else key


def split(path: str) -> list[str]:
    """Keys along a path made by :func:`join`."""
    return [key.replace("~1", "/").replace("~0", "~") for key in path.split("/")]


@dataclass
class Leaf:
    """A place in a tree: ``container[key]`` is ``value``. Inner tensors of a tensor subclass have no container."""

    value: Any
    container: Any = None
    key: Any = None


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """All leaves of nested dicts by path, in order. Lists are walked only where they hold tensors.

    A wrapper subclass other than DTensor (an 8-bit optimizer state, a quantized weight) is given as its inner
    tensors, so that nothing but plain tensors is stored and loading fills it in place.
    """
    if not isinstance(tree, dict | list):
        raise CheckpointError(f"tensors must be a dict of tensors, got a {type(tree).__name__}")
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(tree, dict) and not isinstance(key, str):
            raise CheckpointError(f"keys of a tensor tree must be strings; below {path or 'its root'} there is {key!r}")
        here = join(path, str(key))
        if isinstance(value, dict) or (isinstance(value, list) and _holds_tensor(value)):
            yield from leaves(value, here)
        elif isinstance(value, Tensor):
            for name, inner in plain_tensors(here, value):
                yield name, Leaf(inner, tree if inner is value else None, key)
        elif isinstance(value, tuple) and _holds_tensor(value):
            raise CheckpointError(f"{here} is a tuple that holds tensors, which cannot be filled in place; use a list")
        else:
            yield here, Leaf(value, tree, key)


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``tensor`` itself, or the inner tensors of a wrapper subclass under ``name/attribute``."""
    inner = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard, without importing DTensor
    if inner is not tensor:
        if is_wrapper(inner):
            raise CheckpointError(
                f"{name} is a DTensor over {type(inner).__name__}, which cannot be resharded; shard plain tensors"
            )
        yield name, tensor
    elif is_wrapper(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain_tensors(join(name, attribute), getattr(tensor, attribute))
    else:
        yield name, tensor


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts from values by path."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = split(path)
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, Tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is a DTensor or another subclass whose data lies in inner tensors."""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
