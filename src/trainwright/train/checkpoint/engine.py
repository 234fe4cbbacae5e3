"""The checkpoint engine: saves that are whole or absent, found by content, loaded onto any number of ranks.

A save, in order (``R`` on every rank, ``0`` on rank 0):

1. R   wait for the save before; its error is raised here
2. R   plan which rank writes which shard (kept while nothing changes in shape or layout)
3. R   copy the shards to host memory: from here on the caller may change them
4. 0   check free space, make ``.tmp-step-N-...`` beside the checkpoints
5. R   write tensor files and this rank's own state, each hashed while written and fsynced
6. 0   write the JSON files, then manifest.json with sizes and checksums of all; fsync the folders
7. 0   rename to ``step-N``, fsync the parent; only then retention deletes

4-7 run on a background thread when asynchronous. A process killed at any instant leaves a temporary folder, which
the next start removes, or a whole checkpoint. All ranks must see one file system.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.parallel.launch import lost_another
from trainwright.train.checkpoint import codec, folders
from trainwright.train.checkpoint.files import (
    FileRecord,
    check_space,
    disk_error,
    read_json,
    sync_folder,
    write_file,
    write_safetensors,
)
from trainwright.train.checkpoint.inspection import manifest_of
from trainwright.train.checkpoint.manifest import FILE as MANIFEST
from trainwright.train.checkpoint.manifest import META, VALUES, Depth, Manifest, folder_name, read_manifest, verify
from trainwright.train.checkpoint.ranks import Ranks

if TYPE_CHECKING:
    from trainwright.train.checkpoint.planning import HostBuffers, Planner, WritePlan

logger = logging.getLogger(__name__)

RANKS = "ranks"
SUBFOLDERS = ("weights", "state", RANKS)
SPARE_BYTES = 1 << 20  # room asked for beyond the tensors: JSON files, folder entries


@dataclass(frozen=True)
class SaveStats:
    """What the last save cost."""

    step: int
    bytes: int  # of the whole checkpoint
    blocked_seconds: float  # the caller waited, without waiting for the save before
    write_seconds: float  # from the first file to the renamed folder


@dataclass
class _Job:
    """A planned save: all that the writing needs, nothing of it shared with the training."""

    step: int
    metric: float | None
    meta: bytes
    values: dict[str, Any]  # encoded JSON leaves of the tensor tree, by path
    own_json: bytes | None
    own_tensors: dict[str, Tensor]
    plan: WritePlan
    data: Any  # WriteItem -> the tensor to write
    error: Exception | None = None  # why the tensors could not be copied
    blocked: float = 0.0


class Checkpointer:
    """Writes and reads the checkpoints of one run in ``directory``.

    Creating it, and :meth:`save`, :meth:`wait`, :meth:`latest`, :meth:`load` and :meth:`close`, are collective: all
    ranks call them, in the same order.

    directory     folder of the checkpoints; made at the first save. What killed saves left in it is removed here.
    keep          newest checkpoints of this run to keep
    asynchronous  write on a background thread; one save at a time
    best_metric   name of the metric given to :meth:`save` by which the best checkpoint is kept too
    best_mode     whether the lowest or the highest value is best
    verify        how much :meth:`latest` and :meth:`load` check: ``"full"`` reads every file, ``"size"`` does not
    run_id        the run that writes; None: taken over from the checkpoint that is loaded, else a new one.
                  Retention never touches other runs' checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        verify: Depth = "full",
        run_id: str | None = None,
    ):
        if keep < 1:
            raise ConfigError(
                "must be at least 1: the newest checkpoint is always kept", key="checkpoint.keep", value=keep
            )
        self.directory = Path(directory)
        self.keep, self.asynchronous = keep, asynchronous
        self.best_metric, self.best_mode = best_metric, best_mode
        self.depth: Depth = verify
        self.stats: SaveStats | None = None
        self._ranks = Ranks()
        self._run_id = run_id
        self._new_run_id = self._ranks.lead(lambda: uuid.uuid4().hex)
        self._planner: Planner | None = None
        self._buffers: HostBuffers | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._verified: dict[Path, list[tuple[int, int]]] = {}
        self._closed = self._saved = False
        self._ranks.lead(self._guarded(lambda: folders.clean(self.directory)))

    @property
    def run_id(self) -> str:
        """The run that the next save belongs to."""
        return self._run_id or self._new_run_id

    @staticmethod
    def warm_up() -> None:
        """Import what the first save needs (torch's DCP, about half a second), at a moment when time is free."""
        import trainwright.train.checkpoint.planning  # noqa: F401

    # ---------------------------------------------------------------- save

    def save(
        self,
        step: int,
        tensors: dict[str, Any],
        meta: dict[str, Any],
        weights: dict[str, Tensor] | None = None,
        per_rank: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> None:
        """Save as ``step-N``; an older checkpoint of that number is replaced once this one is whole.

        tensors   nested dict with string keys; leaves are tensors or DTensors of any dense dtype, or JSON values.
                  Plain tensors must be the same on all ranks; each is written once.
        meta      JSON values, rank 0's; NaN, infinities, tuples and bytes come back as they were
        weights   model parameters and buffers by name: safetensors files under ``weights/``
        per_rank  this rank's own state: nested dicts and lists of tensors and JSON values
        metric    value of ``best_metric`` at this step

        When it returns the caller may change everything it passed, whether the files are written yet or not.
        Raises CheckpointError: of the save before (then this one was not started), or of this one when it cannot be
        planned, or, when not asynchronous, written. Older checkpoints stay whole in every case.
        """
        self._open()
        self.wait()
        start = time.perf_counter()
        job = self._prepare(step, tensors, meta, weights, per_rank, metric)
        job.blocked = time.perf_counter() - start
        if self.asynchronous:
            # Not a daemon: the interpreter waits for it at exit, so that the last save of a run is never lost.
            self._thread = threading.Thread(target=self._write_in_background, args=(job,), name=f"checkpoint-{step}")
            self._thread.start()
        else:
            try:
                self._write(job)
            finally:
                if self._planner is not None:
                    self._planner.release()

    def wait(self) -> None:
        """Return when the pending save is durable. Raises its CheckpointError, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the pending save and free buffers and the process group. Raises the save's error."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            self._planner = self._buffers = None
            self._ranks.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the checkpointer of {self.directory} is closed")

    def _prepare(
        self,
        step: int,
        tensors: dict[str, Any],
        meta: dict[str, Any],
        weights: dict[str, Tensor] | None,
        per_rank: dict[str, Any] | None,
        metric: float | None,
    ) -> _Job:
        from trainwright.train.checkpoint.planning import STATE, WEIGHTS, HostBuffers, Planner, check_storable

        if self._planner is None:
            self._planner, self._buffers = Planner(self._ranks), HostBuffers()
        values: dict[str, Any] = {}
        own: dict[str, Tensor] = {}
        encoded: dict[str, bytes] = {}

        def local() -> dict[str, Tensor]:
            if step < 0:
                raise CheckpointError(f"cannot save a checkpoint of step {step}: steps count from 0")
            flat = {}
            for name, weight in (weights or {}).items():
                if not isinstance(weight, Tensor):
                    raise CheckpointError(f"weights[{name!r}] is a {type(weight).__name__}, not a tensor")
                for key, tensor in codec.plain_tensors(name, weight):
                    flat[f"{WEIGHTS}/{key}"] = tensor
            for path, leaf in codec.leaves(tensors):
                if isinstance(leaf.value, Tensor):
                    flat[f"{STATE}/{path}"] = leaf.value
                else:
                    values[path] = codec.encode(leaf.value, path=path)
            encoded["meta"] = codec.dumps(codec.encode(meta, path="meta"))
            if per_rank is not None:
                encoded["own"] = codec.dumps(codec.encode(per_rank, own, "per_rank"))
                check_storable(own)
                for name, tensor in own.items():
                    if codec.is_wrapper(tensor):
                        raise CheckpointError(f"{name} is a {type(tensor).__name__}; per_rank takes plain tensors")
            return flat

        plan = self._planner.plan(local)
        job = _Job(step, metric, encoded["meta"], values, encoded.get("own"), own, plan, self._planner.tensor)
        try:
            # The caller goes on changing its tensors, so what is written later is a copy.
            job.own_tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.items()}
            if self.asynchronous and self._buffers is not None:
                copies = self._buffers.snapshot(plan, self._planner.tensor)
                self._planner.release()
                job.data = lambda item: copies[item.index]
        except RuntimeError as error:  # no host memory; raised in step 5, where the other ranks hear of it
            job.error = error
        return job

    def _write_in_background(self, job: _Job) -> None:
        try:
            self._write(job)
        except Exception as error:  # raised again on the calling thread, by wait()
            if not lost_another(error):  # what is to be said of a lost rank is said once, elsewhere
                logger.error("checkpoint of step %d failed: %s", job.step, error)
            self._error = error

    def _write(self, job: _Job) -> None:
        start = time.perf_counter()
        temporary = self._ranks.lead(self._guarded(lambda: self._begin(job), job))
        try:
            reports = self._ranks.each(self._guarded(lambda: self._write_rank(job, temporary), job))
            size = self._ranks.lead(self._guarded(lambda: self._commit(job, temporary, reports), job))
        except BaseException:
            # Every rank has stopped writing: an error leaves the collectives on all of them.
            if self._ranks.leads:
                folders.remove_tree(temporary)
            raise
        self._saved = True
        self.stats = SaveStats(job.step, size, job.blocked, time.perf_counter() - start)
        if self._ranks.leads:
            self._retain(self.directory / folder_name(job.step))

    def _guarded(self, work: Any, job: _Job | None = None) -> Any:
        """``work`` with the disk's errors turned into one clear message."""

        def run() -> Any:
            try:
                return work()
            except OSError as error:
                raise disk_error(error, self.directory, job.plan.total_bytes if job else 0) from error

        return run

    def _begin(self, job: _Job) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._saved:  # the run writes here now, so what another host's dead run left may go too
            folders.clean(self.directory, other_hosts=True)
        check_space(self.directory, job.plan.total_bytes + SPARE_BYTES)
        temporary = folders.owned_path(self.directory, "tmp", folder_name(job.step))
        folders.remove_tree(temporary)
        temporary.mkdir()
        try:
            for name in SUBFOLDERS:
                (temporary / name).mkdir()
        except OSError:
            folders.remove_tree(temporary)
            raise
        return temporary

    def _write_rank(self, job: _Job, temporary: Path) -> tuple[dict[str, FileRecord], dict[str, Any]]:
        from trainwright.train.checkpoint.planning import write_plan

        if job.error is not None:
            raise CheckpointError(f"cannot copy the tensors of step {job.step}: {job.error}") from job.error
        records = write_plan(temporary, job.plan, job.data)
        if job.own_json is not None:
            stem = f"{RANKS}/rank-{self._ranks.rank:05d}"
            if job.own_tensors:
                named = list(job.own_tensors.items())
                records[f"{stem}.safetensors"] = write_safetensors(temporary / f"{stem}.safetensors", named)
            records[f"{stem}.json"] = write_file(temporary / f"{stem}.json", [job.own_json])
        return records, job.values

    def _commit(self, job: _Job, temporary: Path, reports: list[tuple[dict[str, FileRecord], dict[str, Any]]]) -> int:
        files: dict[str, FileRecord] = {}
        values: dict[str, Any] = {}
        for rank, (records, own_values) in enumerate(reports):
            files |= records
            for path, value in own_values.items():
                if values.setdefault(path, value) != value:
                    raise CheckpointError(
                        f"{path} is {values[path]!r} on one rank and {value!r} on rank {rank}; "
                        "state that differs between ranks goes into per_rank"
                    )
        small = {**job.plan.index_files, META: job.meta, VALUES: codec.dumps(values)}
        for name, content in small.items():
            files[name] = write_file(temporary / name, [content])
        for name in SUBFOLDERS:
            sync_folder(temporary / name)
        metric = None if job.metric is None or self.best_metric is None else (self.best_metric, float(job.metric))
        earlier = [e.manifest.sequence for e in folders.scan(self.directory) if e.manifest is not None]
        manifest = Manifest(
            step=job.step,
            run_id=self.run_id,
            sequence=max(earlier, default=0) + 1,
            world_size=self._ranks.world,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            torch=torch.__version__,
            metric=metric,
            files=dict(sorted(files.items())),
        )
        write_file(temporary / MANIFEST, [manifest.render()])
        sync_folder(temporary)
        folders.publish(temporary, self.directory / folder_name(job.step))
        return manifest.size

    def _retain(self, newest: Path) -> None:
        entries = [e for e in folders.scan(self.directory) if e.path == newest or folders.sizes_match(e)]
        for path in folders.to_delete(entries, newest, self.run_id, self.keep, self.best_metric, self.best_mode):
            try:
                folders.discard(path)
            except OSError as error:  # the new checkpoint is whole; an old one too many is no reason to stop
                logger.warning("cannot remove the old checkpoint %s: %s", path, error)

    # ---------------------------------------------------------------- find

    def latest(self, before: int | None = None) -> Path | None:
        """The last written checkpoint that is whole; None if there is none at all.

        Order and wholeness come from the manifests, not from names or times of files. Each one that is not whole is
        named in a warning with the reason. Raises CheckpointError listing them if none is whole. With ``before``,
        only steps below it count, and where none of those is whole the answer is None.
        """
        self._open()
        self.wait()
        entries = self._ranks.lead(self._guarded(lambda: folders.scan(self.directory)))
        bad = [(e.path, e.problem) for e in entries if e.manifest is None]
        found = None
        for entry in entries:
            if entry.manifest is None or (before is not None and entry.manifest.step >= before):
                continue
            problems = self._verify(entry.path)
            if not problems:
                found = entry.path
                break
            bad.append((entry.path, "; ".join(problems)))
        if found is None and bad and before is None:
            listing = "\n".join(f"  {path}: {problem}" for path, problem in bad)
            raise CheckpointError(f"no checkpoint in {self.directory} is whole:\n{listing}")
        if self._ranks.leads:
            for path, problem in bad:
                logger.warning("checkpoint %s is not whole and is passed over: %s", path, problem)
        return found

    def best(self) -> Path | None:
        """The checkpoint with the best ``best_metric`` of this run, or of the last one that wrote here if this run
        has not begun; None if there is none. Not verified."""
        self._open()
        self.wait()

        def find() -> Path | None:
            entries = [e for e in folders.scan(self.directory) if folders.sizes_match(e)]
            run = self._run_id or next((e.manifest.run_id for e in entries if e.manifest), None)
            own = [e for e in entries if e.manifest is not None and e.manifest.run_id == run]
            top = folders.best(own, self.best_metric, self.best_mode)
            return None if top is None else top.path

        return self._ranks.lead(self._guarded(find))

    def _verify(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint, the same on all ranks, which share the reading."""
        ranks = self._ranks

        def check() -> list[str]:
            try:
                return verify(path, self.depth, ranks.rank, ranks.world)
            except CheckpointError as error:
                return [str(error)]

        problems = list(dict.fromkeys(p for found in ranks.each(check) for p in found))
        if not problems:
            self._verified[path] = self._stamp(path)
        return problems

    @staticmethod
    def _stamp(path: Path) -> list[tuple[int, int]]:
        """Changes when a file of the checkpoint is written to: saves a second reading when latest() did the first."""
        names = [MANIFEST, *read_manifest(path).files]
        stats = [(path / name).stat() for name in names]
        return [(s.st_mtime_ns, s.st_size) for s in stats]

    # ---------------------------------------------------------------- load

    def load(
        self,
        path: Path,
        tensors: dict[str, Any] | None = None,
        *,
        weights: dict[str, Tensor] | None = None,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Fill ``tensors`` and ``weights`` in place from a checkpoint and return its ``meta``.

        tensors  a tree as given to :meth:`save`, on any number of ranks and in any layout; tensors are filled, JSON
                 leaves replaced. None: not loaded.
        weights  parameters and buffers by name, likewise. Passing the parameters themselves fills the model.
        strict   names, shapes and dtypes must be those stored. False: what is missing keeps its value, what is
                 left over is not read, dtypes are converted; shapes must agree all the same.

        Everything is checked before the first tensor is touched. Raises CheckpointError naming what is damaged,
        missing, left over or of another shape.
        """
        from trainwright.train.checkpoint.reading import load_tensors

        self._open()
        self.wait()
        path = Path(path)
        self._require_whole(path)
        manifest = read_manifest(path)
        load_tensors(path, manifest.files, self._ranks, tensors, weights, strict)
        if self._run_id is None and path.resolve().parent == self.directory.resolve():
            self._run_id = manifest.run_id
        return codec.decode(read_json(path / META))

    def per_rank(self, path: Path) -> dict[str, Any] | None:
        """What this rank passed as ``per_rank``; None if the checkpoint has nothing for a rank of this number."""
        path = Path(path)
        files = manifest_of(path).files
        stem = f"{RANKS}/rank-{self._ranks.rank:05d}"
        if f"{stem}.json" not in files:
            return None
        own: dict[str, Tensor] = {}
        if f"{stem}.safetensors" in files:
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                own = load_file(path / f"{stem}.safetensors")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path / stem}.safetensors cannot be read: {error}") from error
        return codec.decode(read_json(path / f"{stem}.json"), own)

    def _require_whole(self, path: Path) -> None:
        def unchanged() -> bool:
            try:
                return path in self._verified and self._verified[path] == self._stamp(path)
            except (OSError, CheckpointError):
                return False  # the full check says what is wrong

        if self._ranks.agree(unchanged()):
            return
        if problems := self._verify(path):
            raise CheckpointError(f"checkpoint {path} is not whole, nothing was loaded: {'; '.join(problems)}")
