"""A recorder of what this rank sends: every collective with its group, bytes and times, and the waits for them.

    with CommTrace() as trace:
        step()
    trace.summary()                         # per kind: calls, bytes, seconds under way; seconds waited
    trace.export("rank-0.json")             # for chrome://tracing and https://ui.perfetto.dev

It sees what goes through torch.distributed on this thread and the backward pass: calls in Python, DDP, FSDP2, DTensor
and functional collectives. Bytes are those that a rank sends under the usual ring algorithms (:func:`bytes_sent`),
whatever the backend really does. Recording costs some microseconds per operation of the model; leave it off otherwise.

On a GPU times are those of its streams: a collective from where it is started to its end, a wait for as long as the
stream that asked stands still. :meth:`summary` and what exports wait for the device to read them. What waits without
asking torch.distributed in Python (FSDP2 by its own events, DDP in its reducer) is not among the waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.parallel.comm.device_times import DeviceTimes, device_times

# Operator -> kind, and which argument holds what the rank gives.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def bytes_sent(kind: str, size: int, ranks: int, here: int = 0) -> int:
    """Bytes that one of ``ranks`` sends in a collective over ``size`` bytes that it gives.

    all_reduce 2 (n-1)/n size;  reduce_scatter (n-1)/n size;  all_gather (n-1) size (what it gives goes to all others);
    all_to_all size less what it keeps (``here``, size/n if not given);  send size;  broadcast and reduce (n-1)/n size,
    the mean over the ranks of a pipelined chain;  gather size, scatter (n-1)/n of what the root gives;  recv 0.
    """
    if ranks <= 1 or kind in ("recv", "barrier"):
        return 0
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) // ranks
    if kind == "all_gather":
        return size * (ranks - 1)
    if kind == "all_to_all":
        return size - (here or size // ranks)
    if kind in ("reduce_scatter", "broadcast", "reduce", "scatter"):
        return size * (ranks - 1) // ranks
    return size  # send, gather


@dataclass
class Record:
    """One collective. Times are seconds since the epoch; ``end`` is None where it was not over at the last look."""

    kind: str
    group: tuple[int, ...]  # ranks
    bytes: int  # that this rank sends, see bytes_sent
    size: int  # that this rank gives
    start: float
    rank: int
    sequence: int  # of this rank's collectives
    end: float | None = None
    peer: int | None = None  # send, recv: the other rank


@dataclass
class Wait:
    """A stretch in which this rank (on a GPU: one of its streams) stood still for a collective."""

    start: float
    end: float


@dataclass
class Kind:
    """Sums over the collectives of one kind."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Summary:
    """``kinds``: per kind of collective; ``waited``: seconds in which the calling thread, or on a GPU its
    stream, stood still for any."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    waited: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(k.bytes for k in self.kinds.values())


class CommTrace(TorchDispatchMode):
    """Records the collectives made inside its context; see the module. ``records`` and ``waits`` grow with each.

    most   records kept; beyond these only ``dropped`` counts. A run of days must not fill the memory.
    times  of a device that the host runs ahead of; None: of the GPU, where this process uses one
    """

    def __init__(self, most: int = 1_000_000, times: DeviceTimes | None = None):
        super().__init__()
        self.records: list[Record] = []
        self.waits: list[Wait] = []
        self.most, self.dropped = most, 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._offset = time.time() - time.perf_counter()
        self._lock = threading.Lock()
        self._wait: Any = None
        self.times = device_times() if times is None else times
        self._open: dict[int, Record] = {}  # on a device: functional collectives that nobody has waited for, by result

    def __enter__(self) -> CommTrace:
        work = dist.Work
        original = self._wait = work.wait

        def wait(this: Any, *args: Any, **kwargs: Any) -> Any:
            with self._waiting():
                return original(this, *args, **kwargs)

        if self.times is not None:
            self.times.begin(self._now)
        work.wait = wait  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        dist.Work.wait = self._wait  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func.namespace, func._opname
        if namespace == "c10d" and name in _C10D:
            return self._c10d(func, name, args, kwargs)
        if namespace == "_c10d_functional":
            if name == "wait_tensor":
                with self._waiting():
                    out = func(*args, **kwargs)
                record = self._open.pop(args[0].data_ptr(), None)
                if record is not None and self.times is not None:
                    self.times.note(record, "end")
                return out
            if name in _FUNCTIONAL:
                return self._functional(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _c10d(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        kind, given = _C10D[name]
        position, holder = next((i, a) for i, a in enumerate(args) if isinstance(a, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(holder)
        ranks = tuple(dist.get_process_group_ranks(group))
        size = sum(t.nbytes for t in _tensors(args[given]))
        peer = here = None
        if kind in ("send", "recv") and name != "recv_any_source_":
            peer = ranks[args[position + 1]]
        if name == "alltoall_base_" and args[position + 2]:
            element = args[1].nbytes // max(args[1].shape[0], 1)
            here = args[position + 2][ranks.index(self.rank)] * element
            sent = size - here
        else:
            sent = bytes_sent(kind, size, len(ranks))
        times = self._times_of(args[given])
        begun = None if times is None else times.mark()
        record = self._record(kind, ranks, sent, size, peer)
        out = func(*args, **kwargs)
        work = next((w for w in _leaves(out) if isinstance(w, torch.ScriptObject)), None)
        if record is not None:
            self._end_with(record, None if work is None else dist.Work.unbox(work), times, begun)
        return out

    def _functional(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        names = [a.name for a in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        group = values["group_name"]
        if isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(cast(Any, group))
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = _FUNCTIONAL[name]
        size = sum(t.nbytes for t in _tensors(args[0]))
        splits = values.get("input_split_sizes")
        sent = bytes_sent(kind, size, len(ranks))
        if kind == "all_to_all" and splits:
            element = args[0].nbytes // max(args[0].shape[0], 1)
            sent = size - int(splits[ranks.index(self.rank)]) * element
        times = self._times_of(args[0])
        begun = None if times is None else times.mark()
        record = self._record(kind, ranks, sent, size, None)
        out = func(*args, **kwargs)
        if record is not None:
            record.end = self._now()  # of the call; the wait for it is a wait_tensor
            if times is not None:
                times.note(record, "start", begun)
                times.note(record, "end")
                self._open.update({t.data_ptr(): record for t in _tensors(out)})
        return out

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        found = Wait(self._now(), 0.0)
        before = None if self.times is None else self.times.mark()
        try:
            yield
        finally:
            found.end = self._now()
            if self.times is not None:
                self.times.note(found, "start", before)
                self.times.note(found, "end")
            self.waits.append(found)

    def _times_of(self, given: Any) -> DeviceTimes | None:
        """Where a collective of ``given`` runs; None: on the host."""
        tensors = _tensors(given)
        return self.times if self.times is not None and tensors and self.times.holds(tensors[0]) else None

    def _record(self, kind: str, ranks: tuple[int, ...], sent: int, size: int, peer: int | None) -> Record | None:
        with self._lock:
            if len(self.records) >= self.most:
                self.dropped += 1
                return None
            record = Record(kind, ranks, sent, size, self._now(), self.rank, len(self.records), peer=peer)
            self.records.append(record)
            return record

    def _end_with(self, record: Record, work: Any, times: DeviceTimes | None, begun: Any) -> None:
        """``begun``: the mark of ``times`` in front of it."""
        if times is not None:
            times.note(record, "start", begun)
        if work is None:
            record.end = self._now()
            if times is not None:  # it ran in the stream that asked, which did nothing else
                stood, over = Wait(record.start, record.end), times.mark()
                for owner, name, mark in ((record, "end", over), (stood, "start", begun), (stood, "end", over)):
                    times.note(owner, name, mark)
                self.waits.append(stood)
            return

        def done(_: Any) -> None:
            record.end = self._now()
            if times is not None:  # on a GPU the future calls at once, in a stream that comes behind the collective
                times.note(record, "end")

        try:
            work.get_future().add_done_callback(done)
        except RuntimeError:  # a backend whose works have no futures
            record.end = self._now()

    def _now(self) -> float:
        return time.perf_counter() + self._offset

    def _read(self) -> None:
        if self.times is not None:
            self.times.read()

    # -- what it says -------------------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        self._read()
        found = Summary(waited=sum(w.end - w.start for w in self.waits))
        for r in self.records:
            kind = found.kinds.setdefault(r.kind, Kind())
            kind.calls += 1
            kind.bytes += r.bytes
            kind.seconds += (r.end or r.start) - r.start
        return found

    def sequence(self) -> dict[tuple[int, ...], list[tuple[str, int]]]:
        """Per group the collectives in order, as kind and size. All ranks of a group must have the same list: another
        one, and a run hangs. Sends and receives are left out, as they are between two ranks."""
        found: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for r in self.records:
            if r.kind not in ("send", "recv"):
                found.setdefault(r.group, []).append((r.kind, r.size))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The records as plain values, for JSON."""
        self._read()
        return [asdict(r) for r in self.records]

    def export(self, path: str | Path) -> None:
        """Chrome's trace format: a process per rank, a track per group and one for the waits."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}), "utf-8")

    def events(self) -> list[dict[str, Any]]:
        self._read()
        base: dict[str, Any] = {"pid": self.rank, "cat": "comm"}
        out = [{"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}]
        for r in self.records:
            args = {"bytes": r.bytes, "size": r.size, "sequence": r.sequence}
            args |= {} if r.peer is None else {"peer": r.peer}
            out.append(
                base
                | {
                    "ph": "X",
                    "name": r.kind,
                    "tid": "group " + ",".join(map(str, r.group)),
                    "ts": r.start * 1e6,
                    "dur": ((r.end or r.start) - r.start) * 1e6,
                    "args": args,
                }
            )
        for w in self.waits:
            out.append(
                base | {"ph": "X", "name": "wait", "tid": "waits", "ts": w.start * 1e6, "dur": (w.end - w.start) * 1e6}
            )
        return out


def merged(events: Iterable[list[dict[str, Any]]]) -> dict[str, Any]:
    """Traces of several ranks as one."""
    return {"traceEvents": [e for one in events for e in one], "displayTimeUnit": "ms"}


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in _leaves(value) if isinstance(x, Tensor)]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [x for item in value for x in _leaves(item)]
    return [value]
