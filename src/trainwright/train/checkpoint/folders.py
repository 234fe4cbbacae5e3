"""The folder of checkpoints: what is in it, what may go, and what an interrupted save left behind.

Names that are not ``step-N`` carry their owner, ``.tmp-step-00000100-HOST-PID-START``, so that a start cleans up
after dead processes without touching the save of one that lives (START tells a reused process id apart).
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint.files import sync_folder
from trainwright.train.checkpoint.manifest import FOLDER, Manifest, read_manifest

logger = logging.getLogger(__name__)

Purpose = Literal["tmp", "replaced", "trash"]
_OWNED = re.compile(r"\.(tmp|replaced|trash)-(step-\d+)-(.+)-(\d+)-(\d+)")


@dataclass(frozen=True)
class Entry:
    """One ``step-N`` in the folder: its manifest, or why it has none."""

    path: Path
    manifest: Manifest | None
    problem: str = ""

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Sorts by time of writing. Of two copies of one checkpoint, the one with the right name is later."""
        number = int(FOLDER.fullmatch(self.path.name)[1])  # type: ignore[index]
        if self.manifest is None:
            return (-1, number, False, number)
        return (self.manifest.sequence, self.manifest.step, number == self.manifest.step, number)


def scan(directory: Path) -> list[Entry]:
    """All checkpoints in ``directory``, the last written first, those without a whole manifest at the end."""
    entries = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if FOLDER.fullmatch(path.name):
            try:
                entries.append(Entry(path, read_manifest(path)))
            except CheckpointError as error:
                entries.append(Entry(path, None, str(error)))
    return sorted(entries, key=lambda e: e.order, reverse=True)


def to_delete(
    entries: Sequence[Entry], newest: Path, run_id: str, keep: int, best_metric: str | None, best_mode: str = "min"
) -> list[Path]:
    """Which of ``entries`` retention removes after ``newest`` was written.

    Kept are the ``keep`` last written of this run, ``newest`` itself, and the best by ``best_metric`` (the later of
    equals). Never touched are other runs' checkpoints and those that are not whole: they are not ours to count.
    """
    own = sorted(
        (e for e in entries if e.manifest is not None and e.manifest.run_id == run_id),
        key=lambda e: e.order,
        reverse=True,
    )
    kept = {e.path for e in own[:keep]} | {newest}
    if (top := best(own, best_metric, best_mode)) is not None:
        kept.add(top.path)
    return [e.path for e in own if e.path not in kept]


def best(entries: Sequence[Entry], metric: str | None, mode: str = "min") -> Entry | None:
    """The entry with the best value of ``metric``, the later written of equals; None if none has a usable one."""
    sign = 1 if mode == "min" else -1
    rated = [
        (sign * e.manifest.metric[1], e)
        for e in sorted(entries, key=lambda e: e.order, reverse=True)
        if e.manifest is not None and e.manifest.metric is not None and e.manifest.metric[0] == metric
    ]
    rated = [(value, e) for value, e in rated if not math.isnan(value)]
    return min(rated, key=lambda pair: pair[0])[1] if rated else None


def sizes_match(entry: Entry) -> bool:
    """Whether all files are there with their right sizes: the check that costs nothing."""
    if entry.manifest is None:
        return False
    try:
        return all((entry.path / name).stat().st_size == r.size for name, r in entry.manifest.files.items())
    except OSError:
        return False


def _start_time(pid: int) -> int:
    return int(psutil.Process(pid).create_time())


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "host"


def owned_path(directory: Path, purpose: Purpose, name: str) -> Path:
    """A hidden path beside the checkpoints for ``name`` that belongs to this process."""
    return directory / f".{purpose}-{name}-{_host()}-{os.getpid()}-{_start_time(os.getpid())}"


def clean(directory: Path, other_hosts: bool = False) -> None:
    """Remove what killed saves left; put back a checkpoint that was being replaced when its process died.

    Leaves what belongs to a living process of this host, and to other hosts unless ``other_hosts``.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        match = _OWNED.fullmatch(path.name)
        if match is None:
            continue
        purpose, name, host, pid, start = match.groups()
        if (host != _host() and not other_hosts) or (host == _host() and _alive(int(pid), int(start))):
            continue
        if purpose == "replaced" and not (directory / name).exists():
            path.rename(directory / name)
            logger.warning("put back %s, which an interrupted save was replacing", directory / name)
        else:
            logger.info("removing %s, left by an interrupted save", path)
            remove_tree(path)
    # a second look, for the put-back above to be durable
    if directory.is_dir():
        sync_folder(directory)


def _alive(pid: int, start: int) -> bool:
    try:
        return abs(_start_time(pid) - start) <= 2  # seconds; the boot time it is based on may be corrected
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def discard(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that dying half-way leaves nothing that looks like one."""
    aside = owned_path(path.parent, "trash", path.name)
    remove_tree(aside)  # left by an earlier failure of ours
    path.rename(aside)
    remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Delete a folder if it is there; a warning where that fails, as nothing depends on its absence."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)


def publish(temporary: Path, final: Path) -> None:
    """Give a whole checkpoint its name, durably. One of the same name goes only after the new one is in place."""
    directory, aside = final.parent, None
    if final.exists():
        aside = owned_path(directory, "replaced", final.name)
        remove_tree(aside)
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside is not None:
            aside.rename(final)
        raise
    sync_folder(directory)
    if aside is not None:
        remove_tree(aside)
