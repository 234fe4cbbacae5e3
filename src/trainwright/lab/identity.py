"""What decides a trial's outcome beside its recipe: the files that the recipe names, the package's code, torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import TrainwrightError
from trainwright.core.registry import ENTRY_POINTS

Inputs = dict[str, str]
PATH_KEYS = {"path", "teacher", "scores", "file", "folder", "dir"}  # of recipes
# What is in these parts of a recipe is written by the run or has a fingerprint of its own.
PASSED_OVER = {("run",), ("log",), ("checkpoint",), ("data", "sources"), ("data", "cache_dir")}


def inputs_of(config: RunConfig) -> Inputs:
    """Digests by what they are of: ``data`` (every file that the recipe names), ``code``, ``torch`` (its version)."""
    return {"data": files_digest(config), "code": code_digest(), "torch": importlib.metadata.version("torch")}


@cache
def code_digest() -> str:
    """Of the package's source as it was when this process first asked, and of the versions of plugins."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.value):
        version = point.dist.version if point.dist is not None else ""
        digest.update(f"{point.value} {version}\n".encode())
    return digest.hexdigest()


def files_digest(config: RunConfig) -> str:
    """Of the data sources, as the token cache knows them, and of size and time of every other file the recipe names.

    Those are the folder of pretrained weights, a teacher, a tokenizer, a file of scores. What cannot be read counts as
    such: the trial itself says what is wrong.
    """
    sources: list[str] = []
    for source in config.data.sources:
        try:
            sources.append(source.fingerprint())
        except TrainwrightError:
            sources.append("cannot be read")
    files = [[text, _stat(Path(text))] for text in paths_in(config) if os.path.exists(text)]
    return hashlib.blake2b(json.dumps([sources, files]).encode(), digest_size=8).hexdigest()


def paths_in(config: RunConfig) -> list[str]:
    """What a recipe names besides the sources that may be a path, whether it is there or not."""
    return sorted(set(_paths(config.to_dict())))


def _paths(value: Any, at: tuple[str, ...] = ()) -> Iterator[str]:
    if at in PASSED_OVER:
        return
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _paths(entry, (*at, key))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _paths(entry, at)
    elif isinstance(value, str) and _may_be_path(value, at[-1]):
        yield value


def _may_be_path(text: str, key: str) -> bool:
    """Plain words are settings, though a folder of that name may lie about; so is punctuation, such as ``/`` alone."""
    return bool(re.search(r"\w", text)) and "\0" not in text and (key in PATH_KEYS or "/" in text or os.sep in text)


def _stat(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of all files below a folder."""
    out = []
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        try:
            stat = file.stat()
        except OSError:
            continue  # gone meanwhile, or a link to nowhere
        if not file.is_dir():
            out.append((file.relative_to(path).as_posix(), stat.st_size, stat.st_mtime_ns))
    return out
