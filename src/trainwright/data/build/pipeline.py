"""A corpus from its files to its shards: stages in a row, progress on the way, figures and samples in the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import MANIFEST, write_manifest
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs
from trainwright.data.build.readers import Reader
from trainwright.data.build.stage import DocumentStage, Stage, check_workers, run_fused
from trainwright.data.build.statistics import Statistics
from trainwright.data.build.writers import Writer

if TYPE_CHECKING:
    from trainwright.data.build.resume import Build

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
    resume: bool = False,
    fingerprint: str | None = None,
    refuse_empty: bool = False,
) -> dict[str, Any]:
    """Read ``documents`` (a Reader, or any iterable), send them through ``stages``, write them to ``out``.

    Returns the statistics, which also stand in ``statistics.json`` beside the shards, with samples of what each stage
    kept, changed and dropped (``trainwright data`` makes a page of them). A stage can be used in one run only.
    ``manifest.json`` has sizes, hashes and composition of each shard, and their totals.
    ``watch`` hears about once a second how far it is.
    Shards and statistics (but for the seconds) are the same with any number of workers.

    resume: keep what is done beside the shards, so that a run that was killed goes on by the same call, and one whose
    inputs, stages and settings have not changed since it ended does nothing (``operators_run`` is 0 then); see
    ``resume``. Documents that come from no reader need a ``fingerprint`` for that, a text that changes with them.
    refuse_empty: raise DataError where no document is left in the end, instead of writing a corpus of none.
    """
    check_workers(workers)
    used = [s.name for s in stages if s.statistics.documents_in]
    if used:
        raise ConfigError(f"stage {used[0]} has run before; make a new one for each run", key="stages")
    if not resume:
        return _run(stages, documents, out, workers, settings, watch, None, refuse_empty)
    from trainwright.data.build.operator_hashes import operator_hashes
    from trainwright.data.build.resume import FOLDER, Build, Made

    with Build(out.folder / FOLDER, operator_hashes(documents, stages, fingerprint), out) as build:
        if build.done():
            return Made(out.folder).statistics()
        return _run(stages, documents, out, workers, settings, watch, build, refuse_empty)


def _run(
    stages: Sequence[Stage],
    documents: Iterable[Document],
    out: Writer,
    workers: int,
    settings: dict[str, Any] | None,
    watch: Watcher | None,
    build: Build | None,
    refuse_empty: bool,
) -> dict[str, Any]:
    started = time.monotonic()
    progress = Progress()
    arrived = Statistics("read")
    restored: list[Statistics] = []

    def reading() -> Statistics:
        if restored:
            return restored[0]
        return documents.statistics if isinstance(documents, Reader | Inputs) else arrived

    def restore(statistics: Statistics) -> None:
        restored.append(statistics)
        progress.read = statistics.documents_out

    written = 0  # documents in shards that a run before this one finished
    if build is not None:
        written = out.go_on(build.begin())
        out.on_shard = lambda: build.shard(out.compositions)
    sources: dict[str, dict[str, int]] = {}
    with out, contextlib.ExitStack() as stack:
        if build is not None:
            build.shard(out.compositions)
        counted: Iterable[Document] = _Counted(documents, arrived, progress)
        if isinstance(documents, Iterator):  # it can be read once only, and a stage that would read it twice is to know
            counted = iter(counted)
        if build is None:
            stream = chain(stages, counted, workers)
        else:
            stream = build.chain(stages, counted, workers, reading, restore)
        if hasattr(stream, "close"):
            stack.callback(stream.close)
        told = started
        for document in stream:
            if progress.written >= written:
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
    if refuse_empty and not progress.written:
        raise nothing_left([reading(), *(s.statistics for s in stages)])
    found = {
        "documents": progress.written,
        "characters": progress.characters,
        "seconds": round(progress.seconds, 3),
        "settings": settings or {},
        "sources": dict(sorted(sources.items())),
        "stages": [reading().to_json(), *(s.statistics.to_json() for s in stages)],
        "files": out.files,
    }
    write_manifest(out.folder, out.compositions, settings=settings or {})
    save_statistics(found, out.folder)
    if build is not None:
        build.finish([*(f["file"] for f in out.files), MANIFEST])
        found["operators_run"] = len(stages)
    return found


def nothing_left(statistics: Sequence[Statistics]) -> DataError:
    """What to tell where the stages threw out all documents."""
    lost = [f"{s.name}: {reason} {n:,}" for s in statistics for reason, n in s.dropped.most_common(5)]
    return DataError(
        f"no document is left of {statistics[0].documents_out:,}, so nothing is written ({'; '.join(lost)}); "
        f"look at the documents' fields with trainwright data inspect, or relax a condition"
    )


def save_statistics(found: dict[str, Any], folder: Path) -> Path:
    path = folder / STATISTICS
    partial = folder / f".{STATISTICS}.partial"
    partial.write_text(json.dumps(found, ensure_ascii=False, indent=1, default=str) + "\n", "utf-8", "backslashreplace")
    return partial.replace(path)


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
