"""The commented recipe of ``trainwright init``, made from RunConfig so that it never falls behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trainwright.config import RunConfig
from trainwright.core.errors import ConfigError, InputError

# The lines that a first recipe sets. Everything else stands below as a comment with its default.
CHOSEN: dict[str, dict[str, Any]] = {
    "run": {"name": "", "dir": "runs", "seed": 0},
    "model": {"name": "decoder", "family": "llama", "size": "2m"},
    "tokenizer": {"name": "bpe", "vocab_size": 4096},
    "data": {"sources": [{"name": "python_stdlib"}]},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"name": "cosine"},
    "train": {"steps": 500, "seq_len": 256, "global_batch_tokens": 4096},
    "checkpoint": {"every": 100, "keep": 3},
    "evaluate": {"every": 100},
}
_OPEN_MODEL: dict[str, Any] = {
    "model": {"name": "pretrained", "path": "models/base"},
    "tokenizer": None,
    "schedule": {"name": "cosine", "warmup": 0.03},
}
_CHATS: dict[str, Any] = {
    **_OPEN_MODEL,
    "data": {"sources": [{"name": "chat", "path": "chats.jsonl"}]},
    "objective": {"name": "sft"},
    "train": {"epochs": 3, "seq_len": 2048, "global_batch_tokens": 65536},
}
# What a task sets otherwise; None leaves the section to its default.
TASKS: dict[str, dict[str, Any]] = {
    "pretrain": {},
    "continue": {
        **_OPEN_MODEL,
        "data": {"sources": [{"name": "text", "path": "corpus/"}]},
        "optimizer": {"name": "adamw", "lr": 5e-5},
        "train": {"epochs": 1, "seq_len": 2048, "global_batch_tokens": 131072},
    },
    "sft": {**_CHATS, "optimizer": {"name": "adamw", "lr": 2e-5}},
    "lora": {
        **_CHATS,
        "optimizer": {"name": "adamw", "lr": 2e-4},
        "transforms": [{"name": "lora", "rank": 16, "alpha": 32}],
    },
}
NOTES = {
    "model": "`trainwright methods model` lists them; {name: pretrained, path: FOLDER} goes on from weights.",
    "data": "Your own text: {name: text, path: 'docs/**/*.txt'}, jsonl, parquet, hf; each takes a weight.",
    "optimizer": "`trainwright methods optimizer` lists them; `trainwright methods adamw` explains one.",
    "schedule": "Multiplies the learning rate over the run.",
    "tokenizer": "A BPE trained on the data; or {name: bytes}, or {name: hf, path: FOLDER}.",
    "train": "The length is one of steps, tokens, epochs; seconds may end it earlier.",
    "objective": "The loss; sft trains on the answers alone.",
    "transforms": "Changes to the model, in order; without lora all weights are trained.",
}
TASK_NOTES = {
    "model": "A folder that transformers loads, as `hf download Qwen/Qwen2.5-0.5B --local-dir models/base` makes one.",
    "tokenizer": "That of the model's folder.",
}


def write(path: Path, force: bool = False, task: str = "pretrain") -> None:
    """Write the recipe to ``path``. Raises InputError when it exists (without ``force``) or cannot be written."""
    if task not in TASKS:
        raise InputError(f"no recipe for {task!r}; there is one for each of {', '.join(TASKS)}")
    if path.exists() and not force:
        raise InputError(f"{path} exists; choose another file, or replace it with --force")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(path.stem, task), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None


def text(run_name: str, task: str = "pretrain") -> str:
    """The recipe as text. Its active lines are checked here, so that ``init`` never gives a recipe that fails."""
    chosen = {**CHOSEN, **TASKS[task], "run": {**CHOSEN["run"], "name": run_name or "my-run"}}
    chosen = {key: value for key, value in chosen.items() if value is not None}
    notes = NOTES if task == "pretrain" else {**NOTES, **TASK_NOTES}
    try:
        config = RunConfig.from_dict(chosen)
    except ConfigError as error:
        raise ConfigError(f"the recipe for {run_name!r} would not be valid: {error}") from None
    lines = [
        "# A Trainwright recipe. `trainwright config check FILE` finds mistakes before any work,",
        "# `trainwright config show FILE` prints it with every default filled in.",
        "",
    ]
    for key in RunConfig.model_fields:
        lines += _section(key, chosen.get(key), getattr(config, key), notes.get(key))
    return "\n".join(lines).rstrip() + "\n"


def _section(key: str, chosen: Any, value: Any, note: str | None) -> list[str]:
    """One section: what is set as lines, the other fields as comments with default and meaning."""
    field = RunConfig.model_fields[key]
    about = note or field.description or _first_line(value)
    lines = [f"# {about}"] if about else []
    if isinstance(chosen, list):
        return [*lines, f"{key}: {_inline(chosen)}", ""]
    if chosen is None:
        return [*lines, f"# {key}: {_inline(_dump(value))}", ""]
    lines.append(f"{key}:")
    fields = type(value).model_fields
    for name, entry in chosen.items():
        lines.append(f"  {name}: {_inline(entry)}{_meaning(fields, name)}")
    for name, info in fields.items():
        shown = info.alias or name
        if shown not in chosen and name not in chosen:
            lines.append(f"  # {shown}: {_inline(_dump(getattr(value, name)))}{_meaning(fields, name)}")
    return [*lines, ""]


def _first_line(value: Any) -> str:
    return "" if value is None or isinstance(value, list) else (type(value).__doc__ or "").strip().split("\n")[0]


def _meaning(fields: Any, name: str) -> str:
    info = fields.get(name)
    return f"  # {info.description}" if info is not None and info.description else ""


def _dump(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_dump(v) for v in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    return str(value) if isinstance(value, Path) else value


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return dumped.strip().removesuffix("...").strip()
