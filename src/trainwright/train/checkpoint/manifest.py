"""manifest.json: the last file of a save, which says what a whole checkpoint is made of.

It holds size and checksum of every file. Its own bytes are covered too: it carries the checksum of its content,
and it must be, byte for byte, what this module writes for that content; so a flip of any bit of it is seen.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint.codec import decode, dumps, encode
from trainwright.train.checkpoint.files import HASH, FileRecord, checksum_file, digest

FILE = "manifest.json"
META = "meta.json"  # the caller's meta
VALUES = "state.json"  # JSON leaves of the tensor tree, by path
FORMAT = "trainwright-checkpoint"
VERSION = 1
FOLDER = re.compile(r"step-(\d+)")
Depth = Literal["full", "size"]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Manifest:
    step: int
    run_id: str  # the run that wrote it; kept over resumes
    sequence: int  # 1 + the highest in the folder when it was written: the order of writing, whatever clocks say
    world_size: int
    created: str  # ISO 8601, UTC
    torch: str  # version that wrote it
    metric: tuple[str, float] | None  # name and value that retention compares
    files: dict[str, FileRecord]  # by path relative to the checkpoint, "/" between parts

    @property
    def size(self) -> int:
        """Bytes of all files it lists."""
        return sum(record.size for record in self.files.values())

    def render(self) -> bytes:
        body = {"format": FORMAT, "version": VERSION, "hash": HASH, **encode(asdict(self))}
        return dumps({**body, "checksum": digest(json.dumps(body, sort_keys=True).encode())})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError with the reason alone (the caller names the folder)."""
    try:
        raw = (folder / FILE).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{FILE} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{FILE} cannot be read: {error.strerror}") from error
    try:
        data = json.loads(raw)
        version = data.get("version") if data.get("format") == FORMAT else None
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(f"its format version {version} is newer than this program's ({VERSION}); update it")
        manifest = _parse(data)
        whole = manifest.render() == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{FILE} is damaged")
    return manifest


def _parse(data: dict[str, Any]) -> Manifest:
    metric = decode(data["metric"])
    files = {_safe(name): FileRecord(int(r["size"]), str(r["checksum"])) for name, r in data["files"].items()}
    return Manifest(
        step=int(data["step"]),
        run_id=str(data["run_id"]),
        sequence=int(data["sequence"]),
        world_size=int(data["world_size"]),
        created=str(data["created"]),
        torch=str(data["torch"]),
        metric=None if metric is None else (str(metric[0]), float(metric[1])),
        files=files,
    )


def _safe(name: str) -> str:
    """``name`` if it stays within the checkpoint: one from elsewhere must not make us read other files."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name or name == FILE:
        raise ValueError(f"unsafe file name {name!r}")
    return name


def verify(folder: Path, depth: Depth = "full", part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with a checkpoint's files, one line each; empty if nothing is.

    ``depth="size"`` compares sizes only, ``"full"`` checksums too. ``part`` of ``parts`` shares the reading among
    ranks: every ``parts``-th file, the largest first. Raises CheckpointError if the manifest itself is not whole.
    """
    manifest = read_manifest(folder)
    problems = []
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
    for name, record in by_size[part::parts]:
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.size:
                problems.append(f"{name} has {size} bytes instead of {record.size}")
            elif depth == "full" and checksum_file(path) != record.checksum:
                problems.append(f"{name} does not match its checksum")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems
