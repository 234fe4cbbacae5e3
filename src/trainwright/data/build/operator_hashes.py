"""What makes two operators of a pipeline the same: inputs, classes, settings and source code, hashed in a chain.

h_0 = hash(files, readers' settings);  h_i = hash(h_{i-1}, class, its settings, its module's source)
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from trainwright.core.errors import ConfigError
from trainwright.data.build.formats import Inputs
from trainwright.data.build.readers import Reader
from trainwright.data.build.stage import Stage
from trainwright.data.sources._files import SourceFile, _walk, stat_files

FORMAT = 1
NOT_SETTINGS = {"statistics", "work_dir"}  # neither changes what a stage gives


def operator_hashes(documents: Any, stages: Sequence[Stage], fingerprint: str | None = None) -> list[str]:
    """h_0 of what is read, then one a stage. Raises ConfigError for what cannot be told apart."""
    if fingerprint is not None:
        read: Any = fingerprint
    elif isinstance(documents, Reader | Inputs):
        readers = documents.readers if isinstance(documents, Inputs) else [documents]
        read = [(_plain(r, "input"), [(i, s, t) for i, _, s, t in stat_files(_listed(r))]) for r in readers]
    else:
        raise ConfigError("give a fingerprint of the documents: they come from no reader", key="fingerprint")
    found = [hash_values(FORMAT, read)]
    for stage in stages:
        found.append(hash_values(found[-1], _plain(stage, stage.name), _source(type(stage))))
    return found


def _listed(reader: Reader) -> list[Any]:
    out = []
    for file in reader.files():
        inside = sorted(_walk(file.path)) if file.path.is_dir() else [file.path]
        out += [SourceFile(p, f"{file.id}/{p.relative_to(file.path)}" if p != file.path else file.id) for p in inside]
    return out


def hash_values(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _source(kind: type) -> str:
    try:
        return hash_values(inspect.getsource(inspect.getmodule(kind) or kind))
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any, where: str, within: tuple[int, ...] = ()) -> Any:
    """A value as JSON that is the same in every process; the settings of an object are its attributes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return sorted(([_plain(k, where, within), _plain(v, where, within)] for k, v in value.items()), key=json.dumps)
    if isinstance(value, set | frozenset):
        return sorted((_plain(v, where, within) for v in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(v, where, within) for v in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, FunctionType):
        code = value.__code__
        held = [_plain(c.cell_contents, where, within) for c in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, code.co_code.hex(), repr(code.co_names), held]
    if callable(value) and hasattr(value, "__qualname__"):  # built in, or of C
        return [getattr(value, "__module__", ""), value.__qualname__]
    if hasattr(value, "__array__"):  # tensors
        return _plain(np.asarray(value), where)
    state = getattr(value, "__dict__", None)
    if state is None and hasattr(type(value), "__slots__"):
        state = {k: getattr(value, k, None) for k in type(value).__slots__}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if state is None:
        # Of C, such as a compiled model: what it would be sent to a worker as. Should that differ in another process,
        # what is kept is not found there, and the work is done again.
        try:
            return [kind, hashlib.sha256(pickle.dumps(value, protocol=5)).hexdigest()]
        except Exception as error:  # pickling raises whatever it meets
            raise ConfigError(
                f"{where} holds {kind}, which cannot be told from another ({error})", key="stages"
            ) from None
    if id(value) in within:
        return kind
    kept = {k: v for k, v in state.items() if k not in NOT_SETTINGS and not k.startswith("__")}
    if isinstance(value, Reader):
        kept = {k: v for k, v in kept.items() if k != "paths"}
        kept["bad_rows"] = [value.bad_rows.on_bad, repr(value.bad_rows.limit)]
    return [kind, _plain(kept, where, (*within, id(value)))]
