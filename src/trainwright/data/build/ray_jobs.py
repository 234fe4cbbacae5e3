"""The stages of a build as Ray Data jobs on one or several machines; shards and statistics are those of run_pipeline.

    a file a task: documents in chunks, numbered by file and by place in it      failures retried, bad rows recorded
    stages that judge each document by itself: chunk -> chunk                    fused with what stands before them
    unique_ids, exact_dedup, near_dedup: hashes or MinHash bands shuffled, decided, applied to the chunks
    any other stage: its documents pass through this process, in their order
    a shard a task: what it holds follows from the sizes of the texts

Between stages that need the whole corpus its chunks lie in Ray's object store, which spills them to disk. Inputs and
output must be paths that every machine sees. Ray, arXiv:1712.05889, through its package (extra ``cluster``).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainwright.core.errors import ConfigError, DataError, TrainwrightError
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.composition import write_manifest
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs
from trainwright.data.build.pipeline import Progress, Watcher, nothing_left, save_statistics
from trainwright.data.build.readers import Reader
from trainwright.data.build.stage import DocumentStage, Stage, _Worker, chunks
from trainwright.data.build.statistics import Statistics, merge_all
from trainwright.data.build.writers import Writer
from trainwright.data.sources._files import SourceFile, need

# A row of the datasets is a chunk: number of its file, its number in the file, count of its documents, the documents
# and what is to be told about them (pickled).
Row = dict[str, Any]
ROW_SAMPLES = 5  # bad rows of a file and reason whose content is kept
# A process takes seconds to start: idle ones are kept.
OWN_RAY = {"idle_worker_killing_time_threshold_ms": 600_000}
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN, errno.ENETUNREACH)


def run_on_ray(
    stages: Sequence[Stage],
    documents: Iterable[Document],
    out: Writer,
    *,
    address: str | None = None,
    retries: int = 3,
    work_dir: Path | None = None,
    settings: dict[str, Any] | None = None,
    watch: Watcher | None = None,
    num_cpus: int | None = None,
    object_store_memory: int | None = None,
    refuse_empty: bool = False,
) -> dict[str, Any]:
    """``run_pipeline`` on Ray: the same arguments, shards and statistics (but for the seconds).

    documents: a Reader or Inputs, whose files are read in tasks; another iterable is sent from here. address: of a
    running cluster (``auto``: the one that this machine belongs to); None: a Ray of this machine's own with
    ``num_cpus`` and ``object_store_memory`` bytes, ended with the run. A Ray that this process is connected to already
    is used. retries: how often a file is read again after an error of its file system that may pass; a task whose
    process or machine was lost Ray runs again by itself. work_dir: for the small tables of a
    deduplication, on this machine.

    Memory here: about 75 bytes a document and 100 a candidate pair while a stage deduplicates, else a few chunks.
    Raises ConfigError where ray is missing or does not answer; what a stage raises comes out as it is.
    """
    ray = _import_ray()
    if retries < 0:
        raise ConfigError("should be at least 0", key="retries", value=retries)
    used = [s.name for s in stages if s.statistics.documents_in]
    if used:
        raise ConfigError(f"stage {used[0]} has run before; make a new one for each run", key="stages")
    started = time.monotonic()
    progress = Progress()
    sources: dict[str, dict[str, int]] = {}
    arrived = Statistics("read")
    with out, _connected(ray, address, num_cpus, object_store_memory), _errors_as_they_are(ray):
        run = Run(ray, retries, work_dir)
        tell = _Telling(progress, started, watch)
        data = run.read(documents, arrived)
        for alone, group in groupby(stages, lambda s: isinstance(s, DocumentStage)):
            if alone:
                data = run.through([s for s in group if isinstance(s, DocumentStage)], data)
            else:
                for stage in group:
                    data = run.whole(stage, data)
        data = data.settled()
        if isinstance(documents, Inputs):
            documents.check_filled()
        progress.read = arrived.documents_out
        tell()
        if refuse_empty and not data.count:
            raise nothing_left([arrived, *(s.statistics for s in stages)])
        run.write(data, out, sources, tell)
    found = {
        "documents": progress.written,
        "characters": progress.characters,
        "seconds": round(progress.seconds, 3),
        "settings": settings or {},
        "sources": dict(sorted(sources.items())),
        "stages": [arrived.to_json(), *(s.statistics.to_json() for s in stages)],
        "files": out.files,
    }
    write_manifest(out.folder, out.compositions, settings=settings or {})
    save_statistics(found, out.folder)
    return found


class _Telling:
    def __init__(self, progress: Progress, started: float, watch: Watcher | None):
        self.progress, self.started, self.watch = progress, started, watch

    def __call__(self) -> None:
        self.progress.seconds = time.monotonic() - self.started
        if self.watch is not None:
            self.watch(self.progress)


class Piece(NamedTuple):
    """Where a chunk stands in the corpus."""

    part: int
    chunk: int
    start: int  # documents before it
    size: int


class Chunks:
    """A dataset of chunks, and what to do with the notes that its tasks leave."""

    def __init__(self, run: Run, dataset: Any, readers: Sequence[Callable[[Any], None]] = ()):
        self.run, self.dataset, self.readers = run, dataset, list(readers)
        self.pieces: list[Piece] | None = None

    def map(self, function: Callable[[list[Document], Piece], tuple[list[Document], Any]], read: Callable[[Any], None],
            pieces: Mapping[tuple[int, int], int] | None = None) -> Chunks:  # fmt: skip
        """Each chunk's documents through ``function``, whose notes ``read`` gets here, in the order of the chunks."""
        task = partial(_map_row, function=function, starts=None if pieces is None else self.run.share(pieces))
        return Chunks(self.run, self.dataset.map(task), [*self.readers, read])

    def settled(self) -> Chunks:
        """Worked out, all notes read, and each chunk's place in the corpus known."""
        if self.pieces is not None:
            return self
        done = Chunks(self.run, self.dataset.materialize())
        done.pieces, start, last = [], 0, (-1, -1)
        for row in done.dataset.select_columns(["part", "chunk", "count", "notes"]).iter_rows():
            if (row["part"], row["chunk"]) <= last:
                raise RuntimeError("Ray gave the chunks in another order than they were made in")
            last = (row["part"], row["chunk"])
            done.pieces.append(Piece(*last, start, row["count"]))
            start += row["count"]
            for read, note in zip(self.readers, pickle.loads(row["notes"]), strict=True):
                read(note)
        done.dataset = done.dataset.map(_without_notes)
        return done

    @property
    def starts(self) -> dict[tuple[int, int], int]:
        return {(p.part, p.chunk): p.start for p in self.settled().pieces or ()}

    @property
    def count(self) -> int:
        return sum(p.size for p in self.settled().pieces or ())


class Run:
    """What the jobs of one build have in common."""

    def __init__(self, ray: Any, retries: int, work_dir: Path | None):
        self.ray, self.retries, self.work_dir = ray, retries, work_dir

    def share(self, value: Any) -> Any:
        """A value for many tasks, sent to each machine once."""
        return self.ray.put(value)

    @property
    def width(self) -> int:
        """Partitions of a shuffle."""
        return max(2, 2 * int(self.ray.cluster_resources().get("CPU", 1)))

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, documents: Iterable[Document], statistics: Statistics) -> Chunks:
        if isinstance(documents, Inputs | Reader):
            readers = documents.readers if isinstance(documents, Inputs) else [documents]
            return self._read_files(readers, statistics)
        return self.put(_counted(documents, statistics))

    def _read_files(self, readers: Sequence[Reader], statistics: Statistics) -> Chunks:
        files = [(number, file) for number, reader in enumerate(readers) for file in reader.files()]
        items = [{"part": i, "reader": n, "file": str(f.path), "id": f.id} for i, (n, f) in enumerate(files)]
        blank = [copy.copy(r) for r in readers]
        dataset = self.ray.data.from_items(items, override_num_blocks=max(1, len(items)))
        dataset = dataset.map_batches(partial(_read_rows, readers=blank, retries=self.retries), batch_size=1)
        return Chunks(self, dataset, [_Reports(readers, [n for n, _ in files], statistics)])

    def put(self, documents: Iterable[Document]) -> Chunks:
        """Documents of this process as chunks."""
        import pyarrow as pa

        refs, last = [], -1
        for last, chunk in enumerate(chunks(documents)):
            refs.append(self.ray.put(pa.Table.from_pylist([_row(0, last, chunk)])))
        refs.append(self.ray.put(pa.Table.from_pylist([_row(0, last + 1, [])])))  # an empty corpus is a dataset too
        return Chunks(self, self.ray.data.from_arrow_refs(refs))

    # -- stages ------------------------------------------------------------------------------------------------------

    def through(self, stages: Sequence[DocumentStage], data: Chunks) -> Chunks:
        """Stages that judge each document by itself."""
        worker = _Worker(stages)
        return data.map(
            lambda documents, _: worker(documents), lambda found: merge_all((s.statistics for s in stages), found)
        )

    def whole(self, stage: Stage, data: Chunks) -> Chunks:
        """A stage that must know the whole corpus."""
        from trainwright.data.build import ray_dedup

        data = data.settled()
        known = ray_dedup.JOBS.get(type(stage))
        if known is not None:
            return known(self, stage, data)
        return self.put(stage.run(self.documents(data))).settled()

    def documents(self, data: Chunks) -> Iterator[Document]:
        for row in data.settled().dataset.iter_rows():
            yield from pickle.loads(row["documents"])

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, data: Chunks, out: Writer, sources: dict[str, dict[str, int]], tell: _Telling) -> None:
        """Shards, a task each; where one ends and the next begins is what ``out`` would do."""
        measure = self.ray.remote(max_retries=self.retries)(_measure)
        write = self.ray.remote(max_retries=self.retries)(_write_shard)
        blocks = data.settled().dataset.to_arrow_refs()
        shards: list[tuple[list[Any], int, int]] = []  # blocks, first document in the first, end in the last
        refs: list[Any] = []
        first = end = held = 0
        for block, measured in zip(blocks, [measure.remote(b) for b in blocks], strict=True):
            sizes, found = self.ray.get(measured)
            for name, (documents, characters) in found.items():
                row = sources.setdefault(name, {"documents": 0, "characters": 0})
                row["documents"] += documents
                row["characters"] += characters
                tell.progress.written += documents
                tell.progress.characters += characters
            end = 0
            for size in sizes.tolist():
                if not refs or refs[-1] is not block:
                    first = first if refs else end
                    refs.append(block)
                end += 1
                held += size
                if held >= out.shard_bytes:
                    shards.append((refs, first, end))
                    refs, first, held = [], 0, 0
            if refs and refs[-1] is block:
                last = end
        if refs:
            shards.append((refs, first, last))
        plan = {"folder": out.folder, "format": out.format, "compression": out.compression}
        tasks = [write.remote(plan, number, *shard) for number, shard in enumerate(shards)]
        for task in tasks:
            file, composition = self.ray.get(task)
            out.files.append(file)
            out.compositions.append(composition)
            tell()


def _row(part: int, chunk: int, documents: list[Document], notes: Sequence[Any] = ()) -> Row:
    return {
        "part": part,
        "chunk": chunk,
        "count": len(documents),
        "documents": pickle.dumps(documents, protocol=5),
        "notes": pickle.dumps(list(notes), protocol=5),
    }


def _map_row(
    row: Row, function: Callable[[list[Document], Piece], tuple[list[Document], Any]], starts: Any = None
) -> Row:
    start = 0
    if starts is not None:
        import ray

        start = ray.get(starts)[row["part"], row["chunk"]]
    piece = Piece(row["part"], row["chunk"], start, row["count"])
    documents, note = function(pickle.loads(row["documents"]), piece)
    return _row(row["part"], row["chunk"], documents, [*pickle.loads(row["notes"]), note])


def _without_notes(row: Row) -> Row:
    return {**row, "notes": pickle.dumps([])}


def _counted(documents: Iterable[Document], statistics: Statistics) -> Iterator[Document]:
    for document in documents:
        statistics.see(document.text)
        statistics.documents_out += 1
        statistics.characters_out += len(document.text)
        yield document


# -- reading, in tasks -------------------------------------------------------------------------------------------------


class _Recorded(BadRows):
    """Bad rows of one file, kept for the policy, which judges all files of an input together. Only a file that alone
    has too many ends at once."""

    def __init__(self, policy: BadRows):
        super().__init__(policy.on_bad, policy.limit)
        self.events: list[tuple[int, str, str, str, str]] = []

    def found(self, error: DataError, where: str, reason: str, row: str = "") -> None:
        if self.on_bad == "refuse":
            super().found(error, where, reason, row)
        self.rows += 1
        self.bad += 1
        few = sum(e[3] == reason for e in self.events[: 10 * ROW_SAMPLES]) < ROW_SAMPLES
        self.events.append((self.rows, str(error), where, reason, row if few else ""))
        if (self.limit >= 1 or self.limit == 0) and self.bad > self.limit:
            raise _TooMany


class _TooMany(Exception):
    pass


class _Report(NamedTuple):
    """What reading a file counted."""

    part: int
    rows: int
    events: list[tuple[int, str, str, str, str]]
    statistics: Statistics


def _read_rows(batch: Row, readers: Sequence[Reader], retries: int) -> Iterator[Row]:
    """Chunks of one file, the last one with a report."""
    part = int(batch["part"][0])
    file = SourceFile(Path(str(batch["file"][0])), str(batch["id"][0]))
    reader = readers[int(batch["reader"][0])]
    sent = 0
    for attempt in range(retries + 1):
        reader.statistics = Statistics("read")
        recorded = _Recorded(reader.bad_rows)
        recorded.start(reader.statistics)
        reading = copy.copy(reader)
        reading.bad_rows = recorded
        number = -1
        try:
            with contextlib.suppress(_TooMany):
                for number, chunk in enumerate(chunks(reading.read_file(file))):
                    if number >= sent:  # what was given before an error is not given again
                        yield _column(_row(part, number, chunk, [None]))
                        sent = number + 1
        except DataError as error:
            if attempt == retries or getattr(error.__cause__, "errno", None) not in _PASSING:
                raise
            time.sleep(min(2.0**attempt, 30.0))
            continue
        report = _Report(part, recorded.rows, recorded.events, reading.statistics)
        yield _column(_row(part, max(number + 1, sent), [], [report]))
        return


def _column(row: Row) -> Row:
    return {name: [value] for name, value in row.items()}


class _Reports:
    """Counts of the files, in their order, put together as one reading would have counted them."""

    def __init__(self, readers: Sequence[Reader], reader_of: Sequence[int], statistics: Statistics):
        self.readers, self.reader_of, self.whole = readers, reader_of, statistics
        self._base = 0
        for reader in readers:
            reader.statistics = Statistics("read")

    def __call__(self, report: _Report | None) -> None:
        if report is None:
            return
        number = self.reader_of[report.part]
        reader, policy = self.readers[number], self.readers[number].bad_rows
        if report.part == 0 or self.reader_of[report.part - 1] != number:
            policy.start(reader.statistics)
            self._base = 0
        for place, message, where, reason, row in report.events:
            policy.rows = self._base + place - 1
            policy.found(DataError(message), where, reason, row)
        self._base += report.rows
        policy.rows = self._base
        reader.statistics.merge(report.statistics)
        if report.part + 1 == len(self.reader_of) or self.reader_of[report.part + 1] != number:
            policy.end()
            self.whole.merge(reader.statistics)


# -- writing, in tasks -------------------------------------------------------------------------------------------------


def _measure(block: Any) -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
    """UTF-8 bytes of each text of a block, and per source its documents and characters."""
    sizes: list[int] = []
    found: dict[str, tuple[int, int]] = {}
    for document in _documents_of(block):
        sizes.append(len(document.text.encode("utf-8", "surrogatepass")))
        count, characters = found.get(document.source, (0, 0))
        found[document.source] = (count + 1, characters + len(document.text))
    return np.array(sizes, np.int64), found


def _write_shard(
    plan: dict[str, Any], number: int, refs: Sequence[Any], first: int, last: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shard ``number``: from document ``first`` of the first block to before ``last`` of the last one."""
    import ray

    out = Writer(**plan, shard_bytes=1 << 62)  # where a shard ends is decided
    out.files = [{}] * number
    with contextlib.ExitStack() as stack:
        stack.push(out.__exit__)
        for i, ref in enumerate(refs):
            documents = list(_documents_of(ray.get(ref)))
            end = last if i == len(refs) - 1 else None
            for document in documents[first if i == 0 else 0 : end]:
                out.write(document)
    return out.files[number], out.compositions[0]


def _documents_of(block: Any) -> Iterator[Document]:
    for data in block.column("documents"):
        yield from pickle.loads(data.as_py())


# -- Ray itself --------------------------------------------------------------------------------------------------------


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it reports home otherwise
    try:
        import pyarrow  # noqa: F401
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise need("ray[data]", "cluster") from None
    return ray


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, num_cpus: int | None, object_store_memory: int | None) -> Iterator[None]:
    """Connected to a Ray, with results in the order of their input; as before in the end."""
    ours = not ray.is_initialized()
    if ours:
        own = {} if address else {"num_cpus": num_cpus, "object_store_memory": object_store_memory}
        try:
            ray.init(
                address=address or "local", include_dashboard=None if address else False, log_to_driver=False,
                logging_level=logging.ERROR, _system_config=None if address else OWN_RAY, **own,
            )  # fmt: skip
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray answers there ({str(error).splitlines()[0]})", key="ray", value=address
            ) from None
    context = ray.data.DataContext.get_current()
    before = copy.deepcopy(context.execution_options), context.enable_progress_bars
    loggers = [logging.getLogger(n) for n in ("ray.data", "ray.data._internal")]
    levels = [logger.level for logger in loggers]
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.execution_options, context.enable_progress_bars = before
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _errors_as_they_are(ray: Any) -> Iterator[None]:
    """What a task raised, instead of Ray's account of it."""
    try:
        yield
    except ray.exceptions.RayError as error:
        seen: BaseException | None = error
        while seen is not None:
            cause = getattr(seen, "cause", None) or seen.__cause__
            if isinstance(cause, Exception) and not isinstance(cause, ray.exceptions.RayError):
                raise cause from None
            seen = cause if isinstance(cause, BaseException) else None
        raise DataError(
            f"a task of the data pipeline was lost and could not be run again ({str(error).strip().splitlines()[-1]}); "
            f"its process may have run out of memory"
        ) from error
    except TrainwrightError:
        raise
