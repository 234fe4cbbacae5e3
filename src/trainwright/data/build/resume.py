"""A build that was killed goes on where it was; one that is whole and unchanged does nothing.

Beside the shards lies a hidden folder ``.build``. In it each row of stages that judge documents by themselves keeps
its results chunk by chunk, and deduplication keeps signatures and its decision, all under their operator hash: what is
there is never done twice, and a setting changed further on leaves the work before it standing. Finished shards stay.
Stages that are cheap and serial (unique ids, repeated lines) are run again over what was read. What is kept is a part
of a few chunks, renamed when it is whole; a broken one does not count. When the corpus is whole all of it goes but a
line that says which operators made it. Meanwhile it takes about what the texts take, packed, a row of stages.

The result is the same to the byte as that of a build that was never stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from trainwright.core.errors import DataError
from trainwright.data.build.composition import size_of
from trainwright.data.build.dedup import ExactDedup, Spool, _Dedup
from trainwright.data.build.documents import Document
from trainwright.data.build.index import Index
from trainwright.data.build.operator_hashes import hash_values
from trainwright.data.build.stage import DocumentStage, Stage, _Worker, chunks, parallel_map
from trainwright.data.build.statistics import Statistics, merge_all

FOLDER, DONE = ".build", "done.json"
PART_CHUNKS = 8  # results of this many chunks make a part; a kill costs their work


# -- what is kept ----------------------------------------------------------------------------------------------------


def write_whole(path: Path, write: Callable[[Any], None]) -> None:
    """A file under its name only when it is whole and on the disk."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Kept:
    """Results of chunks in their order, in a folder of one operator."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._end = folder / "finished.pkl"

    @property
    def finished(self) -> bool:
        return self._end.exists()

    def end(self) -> Any:
        return pickle.loads(self._end.read_bytes())

    def finish(self, value: Any) -> None:
        write_whole(self._end, lambda file: pickle.dump(value, file, protocol=5))

    def _parts(self) -> Iterator[Path]:
        number = 0
        while (path := self.folder / f"part-{number:06d}.zst").exists():
            yield path
            number += 1

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Key of each chunk, and its result."""
        import zstandard

        for path in self._parts():
            try:
                with zstandard.open(path, "rb") as file:
                    part = pickle.load(file)
            except (OSError, EOFError, pickle.UnpicklingError, zstandard.ZstdError) as error:
                raise DataError(f"{path}: damaged ({error}); remove {path.parent.parent} to build anew") from None
            yield from part

    def through(
        self, stream: Iterable[list[Document]], work: Callable[[Iterator[list[Document]]], Iterator[Any]]
    ) -> Iterator[Any]:
        """A result a chunk: those that are kept, then ``work`` on the chunks behind them, which is kept too."""
        import zstandard

        self.folder.mkdir(parents=True, exist_ok=True)
        keys: list[int] = []
        for key, row in self.rows():
            keys.append(key)
            yield row
        if self.finished:
            return
        number = sum(1 for _ in self._parts())
        waiting: list[int] = []
        held: list[tuple[int, Any]] = []

        def fresh() -> Iterator[list[Document]]:
            count = 0
            for count, chunk in enumerate(stream, 1):
                key = xxhash.xxh3_64_intdigest("\0".join(d.id for d in chunk).encode("utf-8", "surrogatepass"))
                if count > len(keys):
                    waiting.append(key)
                    yield chunk
                elif keys[count - 1] != key:
                    raise self._other()
            if count < len(keys):
                raise self._other()

        def flush() -> None:
            nonlocal number
            if held:

                def write(file: Any) -> None:
                    with zstandard.ZstdCompressor(level=1).stream_writer(file, closefd=False) as packed:
                        pickle.dump(held, packed, protocol=5)

                write_whole(self.folder / f"part-{number:06d}.zst", write)
                number += 1
                held.clear()

        try:
            for row in work(fresh()):
                held.append((waiting.pop(0), row))
                if len(held) >= PART_CHUNKS:
                    flush()
                yield row
        finally:
            flush()

    def _other(self) -> DataError:
        return DataError(
            f"the documents are others than when the build began; remove {self.folder.parent} and build anew"
        )


def lock(folder: Path) -> int:
    """Makes ``folder``, of one build, and keeps others out until the returned file descriptor is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error})") from None
    with contextlib.suppress(ModuleNotFoundError):  # no locks of this kind on Windows
        import fcntl

        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise DataError(f"{folder.parent}: another build writes here; wait for it, or stop it") from None
    return held


class Made:
    """The line in a finished corpus that says by which plan it was made."""

    def __init__(self, corpus: Path):
        self.corpus, self._path = corpus, corpus / FOLDER / DONE

    def by(self, plan: str | None) -> bool:
        """Whether the corpus stands there, whole and made by this plan. Raises DataError where it was touched."""
        found = _json(self._path)
        if found is None or plan is None or found.get("plan") != plan:
            return False
        for name, size in found["files"].items():
            path = self.corpus / name
            if not path.exists() or size_of(path) != size:
                raise DataError(
                    f"{path}: changed or removed since the corpus was built; empty the folder and build anew"
                )
        return True

    def note(self, plan: str | None, names: Sequence[str], **more: Any) -> None:
        if plan is not None:
            self._path.parent.mkdir(exist_ok=True)
            sizes = {n: size_of(self.corpus / n) for n in names}
            row = json.dumps({"plan": plan, **more, "files": sizes}).encode()
            write_whole(self._path, lambda file: file.write(row))

    def statistics(self) -> dict[str, Any]:
        path = self.corpus / "statistics.json"
        try:
            return {**json.loads(path.read_text("utf-8")), "operators_run": 0}
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: missing or damaged ({error}); empty the folder") from None


class Build:
    """The hidden folder of one build; a context manager that no second build can enter meanwhile."""

    def __init__(self, folder: Path, hashes: list[str], writer: Any):
        self.folder, self.hashes, self.writer = folder, hashes, writer
        about = [writer.format, writer.compression, writer.shard_bytes]
        self.plan = hash_values(hashes[-1], about)
        self._done, self._written = folder / DONE, folder / "written.json"
        self._lock = -1

    def __enter__(self) -> Build:
        self._lock = lock(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        if not (self._written.exists() or self._done.exists()):  # it never began: the folder is somebody else's
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def done(self) -> bool:
        """Whether the corpus stands there, whole and made by this plan. Raises DataError where it was touched."""
        return Made(self.folder.parent).by(self.plan)

    def begin(self) -> list[dict[str, Any]]:
        """Shards that are finished already; what else an unfinished build left is cleared away."""
        found = _json(self._written)
        if found is None or self._done.exists():
            return []
        files = found["files"] if found["plan"] == self.plan else []
        keep = {f["file"] for f in files}
        for name in ("statistics.json", "manifest.json", "samples.html"):
            (self.folder.parent / name).unlink(missing_ok=True)
        for path in [*self.folder.parent.iterdir(), *(self.folder.parent / "data").glob("*")]:
            name = path.relative_to(self.folder.parent).as_posix()
            if re.fullmatch(r"(?:data/)?\.?(?:part|train)-\d{5}(?:\..*)?", name) and name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return list(files)

    def shard(self, files: list[dict[str, Any]]) -> None:
        row = json.dumps({"plan": self.plan, "files": files}, default=str).encode()
        write_whole(self._written, lambda file: file.write(row))

    def finish(self, names: Sequence[str]) -> None:
        Made(self.folder.parent).note(self.plan, names, operators=self.hashes)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        self._written.unlink(missing_ok=True)

    # -- the stages ----------------------------------------------------------------------------------------------

    def chain(
        self,
        stages: Sequence[Stage],
        documents: Iterable[Document],
        workers: int,
        first: Callable[[], Statistics],
        restore: Callable[[Statistics], None],
    ) -> Iterable[Document]:
        """As ``pipeline.chain``, with what is kept. ``first`` gives the statistics of reading, ``restore`` takes
        those of a reading that need not be done again."""
        groups: list[tuple[int, list[Any]]] = []
        at = 0
        for alone, group in groupby(stages, lambda s: isinstance(s, DocumentStage)):
            members = list(group)
            for part in [members] if alone else [[m] for m in members]:
                groups.append((at, part))
                at += len(part)
        start = 0
        stream = documents
        for number, (at, part) in enumerate(groups):
            kept = Kept(self.folder / self.hashes[at + len(part)])
            if isinstance(part[0], DocumentStage) and kept.finished:
                start, saved, stream = number + 1, kept.end(), _Stored(kept)
        if start:
            restore(saved[0])
            for stage, statistics in zip(stages, saved[1:], strict=False):
                stage.statistics = statistics
        for at, part in groups[start:]:
            end = at + len(part)
            kept = Kept(self.folder / self.hashes[end])
            if isinstance(part[0], DocumentStage):
                before = stages[:end]
                stream = _Fused(part, stream, workers, kept, lambda b=before: [first(), *(s.statistics for s in b)])  # type: ignore[misc, arg-type]
            elif isinstance(part[0], _Dedup) and not _streams(part[0]):
                stream = _deduplicated(part[0], stream, workers, kept)
            else:
                stream = part[0].run(stream, workers)
        return stream


def _streams(stage: _Dedup) -> bool:
    return isinstance(stage, ExactDedup) and stage.keep == "first" and not stage.priority


class _Stored:
    """Documents that a finished run of stages gave."""

    def __init__(self, kept: Kept):
        self.kept = kept

    def __iter__(self) -> Iterator[Document]:
        for _, (documents, _) in self.kept.rows():
            yield from documents


class _Fused:
    """Documents through stages that judge each by itself; the results are kept, and can be read again."""

    def __init__(
        self,
        stages: list[DocumentStage],
        documents: Iterable[Document],
        workers: int,
        kept: Kept,
        statistics: Callable[[], list[Statistics]],
    ):
        self.stages, self.documents, self.workers, self.kept = stages, documents, workers, kept
        self._statistics = statistics

    def __iter__(self) -> Iterator[Document]:
        if self.kept.finished:
            yield from _Stored(self.kept)
            return
        rows = self.kept.through(
            chunks(self.documents), lambda fresh: parallel_map(_Worker(self.stages), fresh, self.workers)
        )
        with contextlib.closing(rows):  # type: ignore[type-var]
            for documents, statistics in rows:
                merge_all((s.statistics for s in self.stages), statistics)
                yield from documents
        self.kept.finish(self._statistics())


def _deduplicated(stage: Any, documents: Iterable[Document], workers: int, kept: Kept) -> Iterator[Document]:
    """As ``stage.run``, with signatures and decision kept."""
    kept.folder.mkdir(parents=True, exist_ok=True)
    decision = kept.folder / "decision.pkl"
    if stage.work_dir is not None:
        stage.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dedup-", dir=stage.work_dir) as folder:
        again = documents
        if not decision.exists():
            # Where all signatures are kept the documents are not read now, and so can be read later.
            spool = None
            if isinstance(documents, Iterator) and not kept.finished:
                spool = again = Spool(Path(folder) / "documents.zst")
            with Index(Path(folder), stage._bands, stage._permutations, stage._with_shingles) as index:
                for ids, sources, lengths, entries in kept.through(
                    _spooled(documents, spool), lambda fresh: _entries(stage, fresh, workers)
                ):
                    index.add(entries, ids, sources, lengths)
            if spool is not None:
                spool.close()
            if not kept.finished:
                kept.finish(None)
            found = stage._decide(index)
            texts = np.array(index.table()["text"])
            write_whole(decision, lambda file: pickle.dump((texts, *found, stage.statistics.figures), file, protocol=5))
            for part in kept._parts():
                part.unlink()
        with decision.open("rb") as file:
            texts, keeper, similarity, sizes, figures = pickle.load(file)
        stage.statistics.figures = figures
        yield from stage._second_reading(again, texts, keeper, similarity, sizes)


def _spooled(documents: Iterable[Document], spool: Spool | None) -> Iterator[list[Document]]:
    for chunk in chunks(documents):
        if spool is not None:
            spool.write(chunk)
        yield chunk


def _entries(stage: Any, fresh: Iterator[list[Document]], workers: int) -> Iterator[Any]:
    under_way: list[list[Document]] = []

    def texts() -> Iterator[list[str]]:
        for chunk in fresh:
            under_way.append(chunk)
            yield [d.text for d in chunk]

    for entries in parallel_map(stage._entries(), texts(), workers):
        chunk = under_way.pop(0)
        yield [d.id for d in chunk], [d.source for d in chunk], [len(d.text) for d in chunk], entries


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged ({error}); remove {path.parent} and build anew") from None
    return found if isinstance(found, dict) else None
