"""A corpus from its files to its shards: stages in a row, progress on the way, figures and samples in the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs
from trainwright.data.build.readers import Reader
from trainwright.data.build.stage import DocumentStage, Stage, check_workers, run_fused
from trainwright.data.build.statistics import Statistics
from trainwright.data.build.writers import Writer

STATISTICS = "statistics.json"


@dataclass
class Progress:
    """How far a pipeline is."""

    read: int = 0
    written: int = 0
    characters: int = 0  # written
    seconds: float = 0.0


Watcher = Callable[[Progress], None]


def chain(stages: Sequence[Stage], documents: Iterable[Document], workers: int = 0) -> Iterable[Document]:
    """``documents`` through ``stages``. Stages that judge each document by itself go through the workers together."""
    for alone, group in groupby(stages, lambda s: isinstance(s, DocumentStage)):
        if alone:
            documents = run_fused([s for s in group if isinstance(s, DocumentStage)], documents, workers)
        else:
            for stage in group:
                documents = stage.run(documents, workers)
    return documents


def run_pipeline(
    stages: Sequence[Stage],
    documents: Iterable[Document],
    out: Writer,
    *,
    workers: int = 0,
    settings: dict[str, Any] | None = None,
    watch: Watcher | None = None,
) -> dict[str, Any]:
    """Read ``documents`` (a Reader, or any iterable), send them through ``stages``, write them to ``out``.

    Returns the statistics, which also stand in ``statistics.json`` beside the shards, with samples of what each stage
    kept, changed and dropped (``trainwright data`` makes a page of them). A stage can be used in one run only.
    ``watch`` hears about once a second how far it is.
    Shards and statistics (but for the seconds) are the same with any number of workers.
    """
    check_workers(workers)
    used = [s.name for s in stages if s.statistics.documents_in]
    if used:
        raise ConfigError(f"stage {used[0]} has run before; make a new one for each run", key="stages")
    started = time.monotonic()
    progress = Progress()
    arrived = Statistics("read")
    sources: dict[str, dict[str, int]] = {}
    with out, contextlib.ExitStack() as stack:
        counted: Iterable[Document] = _Counted(documents, arrived, progress)
        if isinstance(documents, Iterator):  # it can be read once only, and a stage that would read it twice is to know
            counted = iter(counted)
        stream = chain(stages, counted, workers)
        if hasattr(stream, "close"):
            stack.callback(stream.close)
        told = started
        for document in stream:
            out.write(document)
            progress.written += 1
            progress.characters += len(document.text)
            row = sources.setdefault(document.source, {"documents": 0, "characters": 0})
            row["documents"] += 1
            row["characters"] += len(document.text)
            if watch is not None and (now := time.monotonic()) - told >= 1.0:
                told, progress.seconds = now, now - started
                watch(progress)
    progress.seconds = time.monotonic() - started
    if watch is not None:
        watch(progress)
    first = documents.statistics if isinstance(documents, Reader | Inputs) else arrived
    found = {
        "documents": progress.written,
        "characters": progress.characters,
        "seconds": round(progress.seconds, 3),
        "settings": settings or {},
        "sources": dict(sorted(sources.items())),
        "stages": [first.to_json(), *(s.statistics.to_json() for s in stages)],
        "files": out.files,
    }
    save_statistics(found, out.folder)
    return found


def save_statistics(found: dict[str, Any], folder: Path) -> Path:
    path = folder / STATISTICS
    path.write_text(json.dumps(found, ensure_ascii=False, indent=1, default=str) + "\n", "utf-8")
    return path


class _Counted:
    """Documents, counted as they are read the first time; can be read again where they can."""

    def __init__(self, documents: Iterable[Document], statistics: Statistics, progress: Progress):
        self.documents, self.statistics, self.progress = documents, statistics, progress
        self._whole = False

    def __iter__(self) -> Iterator[Document]:
        return self._first() if not self._whole else iter(self.documents)

    def _first(self) -> Iterator[Document]:
        for document in self.documents:
            self.progress.read += 1
            self.statistics.see(document.text)
            self.statistics.documents_out += 1
            self.statistics.characters_out += len(document.text)
            yield document
        self._whole = True
