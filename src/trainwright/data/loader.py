"""The loader: a global order of rows that depends on data and seed alone, and this rank's slice of it.

The state counts rows handed out over all ranks. So a run saved on any number of ranks goes on with the next row on any
other, and a row is seen once an epoch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import DataError
from trainwright.core.seeds import derive
from trainwright.data.batchers.base import BatcherConfig, order
from trainwright.data.dataset import TokenDataset
from trainwright.data.packing import Row, RowPlan, assemble, empty_row


@dataclass
class Stream:
    """Rows of one dataset, epoch after epoch."""

    dataset: TokenDataset
    batcher: BatcherConfig
    seq_len: int
    pad_id: int
    seed: int
    shuffle: bool = True
    _plan: RowPlan | None = field(default=None, repr=False)
    _epoch: int = field(default=-1, repr=False)
    _rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)  # order of the plan's rows

    def plan(self, epoch: int) -> RowPlan:
        if epoch != self._epoch or self._plan is None:
            seed = derive(self.seed, self.dataset.name, epoch) if self.shuffle else None
            self._plan, self._epoch = self.batcher.plan(self.dataset.lengths, self.seq_len, seed), epoch
            # Rows are shuffled as well as documents: the rows of one long document would else make up a batch alone.
            self._rows = order(self._plan.num_rows, None if seed is None else derive(seed, "rows"))
        return self._plan

    def row(self, epoch: int, index: int) -> Row:
        segments = self.plan(epoch).segments(int(self._rows[index]))
        return assemble(self.dataset, segments, self.seq_len, self.pad_id)


class Order(Protocol):
    """A global order of rows: where it is (JSON), and the places of the next rows."""

    position: dict[str, Any]

    def advance(self) -> tuple[int, int, int]:
        """(stream, epoch, row) of the next row; moves on."""

    @property
    def epoch(self) -> float: ...


class OnePool:
    """All rows of one stream, then the next epoch's."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.position: dict[str, Any] = {"epoch": 0, "row": 0}

    def advance(self) -> tuple[int, int, int]:
        epoch, row = self.position["epoch"], self.position["row"]
        if row >= self.stream.plan(epoch).num_rows:
            epoch, row = epoch + 1, 0
        self.position = {"epoch": epoch, "row": row + 1}
        return 0, epoch, row

    @property
    def epoch(self) -> float:
        return self.position["epoch"] + self.position["row"] / self.stream.plan(self.position["epoch"]).num_rows


class Mixture:
    """Rows of several streams in fixed shares: the next row comes from the stream that is furthest behind its share.

    The state holds a place per source by name, so shares may change in mid-run and each source goes on where it was.
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]):
        total = sum(weights)
        self.streams, self.shares = list(streams), [w / total for w in weights]
        self.position: dict[str, Any] = {
            "rows": 0, "sources": {s.dataset.name: {"epoch": 0, "row": 0, "taken": 0} for s in self.streams}
        }  # fmt: skip

    def advance(self) -> tuple[int, int, int]:
        at = self.position
        sources = {**at["sources"]}
        names = [s.dataset.name for s in self.streams]
        for name in names:
            sources.setdefault(name, {"epoch": 0, "row": 0, "taken": 0})
        behind = [
            share * (at["rows"] + 1) - sources[name]["taken"] for share, name in zip(self.shares, names, strict=True)
        ]
        i = int(np.argmax(behind))
        here = sources[names[i]]
        epoch, row = here["epoch"], here["row"]
        if row >= self.streams[i].plan(epoch).num_rows:
            epoch, row = epoch + 1, 0
        sources[names[i]] = {"epoch": epoch, "row": row + 1, "taken": here["taken"] + 1}
        self.position = {"rows": at["rows"] + 1, "sources": sources}
        return i, epoch, row

    def rebase(self) -> None:
        """Begin to count shares anew, after the shares have changed."""
        sources = {name: {**s, "taken": 0} for name, s in self.position["sources"].items()}
        self.position = {"rows": 0, "sources": sources}

    @property
    def epoch(self) -> float:
        sources = self.position["sources"]
        return min(
            sources[s.dataset.name]["epoch"]
            + sources[s.dataset.name]["row"] / s.plan(sources[s.dataset.name]["epoch"]).num_rows
            for s in self.streams
        )


def make_batch(rows: Sequence[Row]) -> Batch:
    def stack(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(r, name) for r in rows]))

    return Batch(stack("tokens"), stack("targets"), stack("weights"), stack("positions"), stack("doc_ids"))


class Loader:
    """Global batches of ``global_rows`` rows; this rank gets rows ``rank * n : (rank + 1) * n``, ``n = ceil(global / world)``.

    Where the rows don't divide evenly the last ranks are filled up with rows of weight 0, so that all ranks have the
    same number of rows and every global row is seen once.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        weights: Sequence[float] | None,
        global_rows: int,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 2,
    ):
        self.streams = list(streams)
        self.global_rows, self.rank, self.world_size, self.prefetch = global_rows, rank, world_size, prefetch
        self.weights = None if weights is None else list(weights)
        self._order: OnePool | Mixture = OnePool(self.streams[0]) if weights is None else Mixture(self.streams, weights)
        self._delivered = self._order.position
        self._epoch = 0.0
        self._queue: queue.Queue[Any] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    # -- what comes next ----------------------------------------------------------------------------------------

    def _make(self) -> tuple[Batch, dict[str, Any], float]:
        local = -(-self.global_rows // self.world_size)
        mine = range(self.rank * local, min((self.rank + 1) * local, self.global_rows))
        rows = []
        for i in range(self.global_rows):
            stream, epoch, row = self._order.advance()
            if i in mine:
                rows.append(self.streams[stream].row(epoch, row))
        first = self.streams[0]
        rows += [empty_row(first.seq_len, first.pad_id)] * (local - len(rows))
        return make_batch(rows), self._order.position, self._order.epoch

    def next_batch(self) -> Batch:
        """This rank's rows of the next global batch. Raises what reading the data raised."""
        if self.prefetch < 1:
            batch, self._delivered, self._epoch = self._make()
            return batch
        if self._thread is None:
            self._start()
        assert_queue = self._queue
        if assert_queue is None:
            raise DataError("the loader is closed")
        item = assert_queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self._delivered, self._epoch = item
        return batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with fraction."""
        return self._epoch

    # -- prefetching --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._stop = threading.Event()
        self._queue = queue.Queue(maxsize=self.prefetch)
        self._thread = threading.Thread(target=self._work, args=(self._queue, self._stop), daemon=True, name="loader")
        self._thread.start()

    def _work(self, out: queue.Queue[Any], stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                item: Any = self._make()
            except BaseException as error:  # handed over to the training thread
                item = error
            while not stop.is_set():
                try:
                    out.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def close(self) -> None:
        """End the prefetching; what was not handed out is made again later."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = self._queue = None
        self._order.position = self._delivered

    # -- state --------------------------------------------------------------------------------------------------

    def _must_match(self) -> dict[str, Any]:
        first = self.streams[0]
        return {
            "seq_len": first.seq_len,
            "seed": first.seed,
            "shuffle": first.shuffle,
            "batcher": first.batcher.model_dump(mode="json"),
            "mixed": self.weights is not None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, the same on every rank; of what was handed out, not of what is prefetched."""
        data = {s.dataset.name: s.dataset.fingerprint for s in self.streams}
        return {"position": self._delivered, "settings": self._must_match(), "data": data, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises DataError naming what differs in the data or the order of its rows."""
        self.close()
        now = self.state_dict()
        different = [
            f"{key} was {state['settings'].get(key)!r}, is {value!r}"
            for key, value in now["settings"].items()
            if state["settings"].get(key) != value
        ]
        for name, fingerprint in state["data"].items():
            if name not in now["data"]:
                if not now["settings"]["mixed"]:
                    different.append(f"source {name} is gone")
            elif now["data"][name] != fingerprint:
                different.append(f"the content of source {name} changed")
        if different:
            raise DataError(
                f"the run cannot go on in its data: {'; '.join(different)}. Restore the data and settings, "
                "or start a new run from the weights"
            )
        self._delivered = self._order.position = state["position"]
        if isinstance(self._order, Mixture) and state["weights"] != self.weights:
            self._order.rebase()
            self._delivered = self._order.position
        self._epoch = self._order.epoch
