"""The loader: a global order of rows that depends on data and settings alone, and this rank's slice of each step.

The state counts rows that were handed out over all ranks. So a run saved on any number of ranks, with any global batch,
goes on with the next row on any other, and each row is seen once an epoch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError, TrainwrightError
from trainwright.data.dataset import TokenDataset
from trainwright.data.mixture import Mixture, RowRef
from trainwright.data.packing import NOTHING, Pool, Segments, assemble
from trainwright.data.prefetch import Prefetcher
from trainwright.data.rows import RowStream

VERSION = 1
OnChange = Literal["refuse", "new_epoch"]
PlannedRow = tuple[str, Segments]  # name of the stream, what lies in the row


@dataclass
class _Place:
    """Where the loader is after a step."""

    position: dict[str, Any]
    epoch: float


class _Planner:
    """What lies in this rank's rows of the next step. Every rank plans the same global steps."""

    def __init__(self, mixture: Mixture, global_rows: int, rank: int, world_size: int, max_rows: int | None):
        self.mixture, self.global_rows, self.max_rows = mixture, global_rows, max_rows
        self.rank, self.world_size = rank, world_size
        self.local_rows = -(-global_rows // world_size)

    def place(self) -> _Place:
        return _Place(self.mixture.position(), self.mixture.epoch)

    def step(self) -> tuple[list[PlannedRow], _Place]:
        """This rank's rows and the place behind the step. Raises StopIteration behind the last row."""
        count = self.global_rows
        if self.max_rows is not None:
            count = min(count, self.max_rows - self.mixture.rows)
            if count <= 0:
                raise StopIteration
        refs = self.mixture.take(count)
        mine = refs[self.rank * count // self.world_size : (self.rank + 1) * count // self.world_size]
        return self.rows(mine, self.local_rows), self.place()

    def rows(self, refs: Sequence[RowRef], count: int) -> list[PlannedRow]:
        """What lies in ``refs``, filled up to ``count`` with rows of padding."""
        rows: list[PlannedRow] = []
        at = 0
        while at < len(refs):
            name, epoch, _ = refs[at]
            run = at + 1
            while run < len(refs) and refs[run][:2] == (name, epoch):
                run += 1
            segments = self.mixture.streams[name].segments(epoch, [ref.row for ref in refs[at:run]])
            rows += [(name, s) for s in segments]
            at = run
        filler = (next(iter(self.mixture.streams)), NOTHING)
        return rows + [filler] * (count - len(rows))


class _Failure:
    """An error of ours on its way out of a worker process, to be raised as it is."""

    def __init__(self, error: TrainwrightError):
        self.error = error


class _Assembler(torch.utils.data.Dataset[Any]):
    """Planned rows to tensors; also the dataset that worker processes get."""

    def __init__(self, streams: Mapping[str, RowStream], pad_id: int, name_sources: bool = False):
        self.datasets: dict[str, TokenDataset] = {name: s.dataset for name, s in streams.items()}
        self.seq_len, self.pad_id = next(iter(streams.values())).seq_len, pad_id
        self.name_sources = name_sources

    def batch(self, rows: Sequence[PlannedRow]) -> Batch:
        batch = assemble([(self.datasets[name], s) for name, s in rows], self.seq_len, self.pad_id)
        if self.name_sources:
            number = {name: i for i, name in enumerate(self.datasets)}
            source = torch.tensor([number[name] for name, _ in rows])
            # [B, 1, K] and not [B, K], which could be taken for [B, T] where a batch is cut to its longest row
            batch.extras["source"] = torch.nn.functional.one_hot(source, len(number)).to(torch.float64)[:, None]
        return batch

    def __getitems__(self, rows: Sequence[PlannedRow]) -> dict[str, torch.Tensor] | _Failure:
        try:
            return vars(self.batch(rows))
        except TrainwrightError as error:
            return _Failure(error)


def _as_is(value: Any) -> Any:
    return value


class _Steps:
    """The planned steps, drawn by a torch DataLoader for its workers; the places behind them wait in order."""

    def __init__(self, planner: _Planner):
        self.planner, self.places = planner, deque[_Place]()

    def __iter__(self) -> Iterator[list[PlannedRow]]:
        while True:
            try:
                rows, place = self.planner.step()
            except StopIteration:
                return
            self.places.append(place)
            yield rows


class _Workers:
    """Assembles steps in worker processes, ahead of :meth:`get`, in order."""

    def __init__(self, planner: _Planner, assembler: _Assembler, workers: int, prefetch: int, pin_memory: bool):
        self._steps = _Steps(planner)
        loader = torch.utils.data.DataLoader(
            assembler,
            batch_sampler=self._steps,  # type: ignore[arg-type]
            collate_fn=_as_is,
            num_workers=workers,
            generator=torch.Generator(),  # else it draws from the global one, and training draws other numbers
            prefetch_factor=max(prefetch, 1),
            pin_memory=pin_memory,
        )
        self._iterator: Any = iter(loader)

    def get(self) -> tuple[Batch, _Place]:
        got = next(self._iterator)
        if isinstance(got, _Failure):
            raise got.error
        return Batch(**got), self._steps.places.popleft()

    def close(self) -> None:
        self._iterator = None  # ends the processes


class Loader:
    """Global batches of ``global_batch_rows`` rows over named streams; each rank gets its contiguous share of them.

    Every rank gets ``ceil(global_batch_rows / world_size)`` rows, so that all make the same number of forward passes.
    Where that does not divide evenly, ranks that have a row less get a row of padding with weight 0; each row of the
    global batch is on one rank. ``world_size`` above ``global_batch_rows`` is a ConfigError.

    streams, weights   as for :class:`~trainwright.data.mixture.Mixture`
    prefetch           steps made ahead by a background thread; 0 makes them when asked for
    workers            processes that assemble steps instead of that thread, ``prefetch`` steps ahead each; for datasets
                       whose ``tokens`` is slow. The batches are the same.
    pin_memory         page-locked tensors, for copies to a GPU; None: if there is one
    max_rows           rows after which the loader ends (StopIteration); the last step is filled up with padding rows
    on_change          what :meth:`load_state_dict` does when the data or a setting that decides the order of rows
                       differs: refuse, or begin a new epoch in the order as it is now
    name_sources       batches say which stream each row is of: ``extras["source"]``, one-hot ``[B, 1, K]`` over the
                       names in sorted order
    """

    def __init__(
        self,
        streams: Mapping[str, RowStream],
        weights: Mapping[str, float] | None = None,
        *,
        global_batch_rows: int,
        rank: int = 0,
        world_size: int = 1,
        pad_id: int = 0,
        prefetch: int = 2,
        workers: int = 0,
        pin_memory: bool | None = None,
        max_rows: int | None = None,
        on_change: OnChange = "refuse",
        name_sources: bool = False,
    ):
        if global_batch_rows < world_size:
            raise ConfigError(
                f"is fewer than the {world_size} ranks that share a global batch; use at least {world_size}",
                key="global_batch_rows",
                value=global_batch_rows,
            )
        if not 0 <= rank < world_size:
            raise ConfigError(f"should be in 0..{world_size - 1}", key="rank", value=rank)
        for stream in streams.values():
            if stream.batcher.orders_steps and len(streams) > 1:
                raise ConfigError(
                    "takes all rows of a step from one bucket, so it cannot mix sources by weights row by row; leave "
                    "the weights out, or use another batcher",
                    key="data.batcher",
                    value=stream.batcher.name,
                )
            stream.set_step_rows(global_batch_rows)
        self.mixture = Mixture(streams, weights)
        self.global_batch_rows, self.rank, self.world_size = global_batch_rows, rank, world_size
        self.prefetch, self.workers, self.on_change = prefetch, workers, on_change
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._mixed = weights is not None
        self._planner = _Planner(self.mixture, global_batch_rows, rank, world_size, max_rows)
        self._assembler = _Assembler(self.mixture.streams, pad_id, name_sources)
        self._delivered = _Place(self.mixture.position(), 0.0)
        self._absent: dict[str, Any] = {}  # what the run's earlier sources held, should they come back
        self._ahead: Prefetcher[tuple[Batch, _Place]] | _Workers | None = None
        self._end_ahead: weakref.finalize[Any, Any] | None = None

    # -- batches ------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """This rank's rows of the next step, on the CPU.

        Raises what reading the data raised (the next call tries the same step again) and StopIteration behind
        ``max_rows``.
        """
        try:
            if self._ahead is None and (self.workers or self.prefetch):
                self._start()
            batch, place = self._ahead.get() if self._ahead is not None else _make(self._parts())
        except BaseException:
            self.close()
            raise
        self._delivered = place
        return batch

    def __next__(self) -> Batch:
        return self.next_batch()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def _parts(self) -> tuple[_Planner, _Assembler, bool]:
        return self._planner, self._assembler, self.pin_memory

    def _start(self) -> None:
        if self.workers:
            self._ahead = _Workers(self._planner, self._assembler, self.workers, self.prefetch, self.pin_memory)
        else:
            parts = self._parts()  # not self: a loader that nobody holds any more should end its thread
            self._ahead = Prefetcher(lambda: _make(parts), self.prefetch)
        self._end_ahead = weakref.finalize(self, self._ahead.close)

    def close(self) -> None:
        """End thread and processes. What was made ahead and not handed out is made again if the loader goes on."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._end_ahead is not None:
            self._end_ahead.detach()
        self.mixture.set_position(self._delivered.position)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def change(self, what: Callable[[Mixture], None]) -> None:
        """Let ``what`` change what the mixture gives from the next row on: its weights, plan or chosen rows.

        Exactly there on every rank, whatever was made ahead: that is dropped and made again, which costs up to
        ``prefetch`` steps of assembling. Worker processes are started anew, which costs a second or so.
        """
        self.close()
        what(self.mixture)
        self._delivered = self._planner.place()

    def batch_of(self, refs: Sequence[RowRef], count: int | None = None) -> Batch:
        """These rows, on the CPU, filled up to ``count`` with padding; where the loader is does not change."""
        return self._assembler.batch(self._planner.rows(refs, len(refs) if count is None else count))

    # -- where it is --------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows handed out so far, over all ranks."""
        return int(self._delivered.position["rows"])

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with fraction; of a mixture, the mean over its rows."""
        return self._delivered.epoch

    def _settings(self) -> dict[str, Any]:
        first = next(iter(self.mixture.streams.values()))
        settings = {
            "seed": first.seed,
            "seq_len": first.seq_len,
            "shuffle": first.shuffle,
            "batcher": first.batcher.model_dump(mode="json"),
            "mixed by weights": self._mixed,
        }
        return settings | ({"rows a step": self.global_batch_rows} if first.batcher.orders_steps else {})

    def _data(self) -> dict[str, Any]:
        return {
            name: {
                "fingerprint": stream.dataset.fingerprint,
                "parts": {part: _describe(d) for part, d in _parts_of(name, stream.dataset).items()},
            }
            for name, stream in self.mixture.streams.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, small and the same on every rank; of what was handed out, not of what was made ahead."""
        return {
            "version": VERSION,
            "position": self._delivered.position,
            "settings": self._settings(),
            "data": self._absent | self._data(),
        }

    def load_state_dict(self, state: Mapping[str, Any], on_change: OnChange | None = None) -> None:
        """Go on behind the rows that ``state`` counts, on this loader's ranks and global batch.

        When data or settings differ so that the order of rows is another one: DataError naming each difference, or with
        ``on_change="new_epoch"`` a new epoch of what differs. Weights, and in a mixture the set of sources, may
        change: each source goes on where it was, a new one begins.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise DataError("the loader's state in the checkpoint is damaged or was written by another version")
        self.close()
        settings = self._settings()
        changes = [
            f"{key} was {state['settings'].get(key)!r} and is {value!r}"
            for key, value in settings.items()
            if state["settings"].get(key) != value
        ]
        position, changed_streams = self._carry_over(state)
        changes += [line for lines in changed_streams.values() for line in lines]
        if changes and (on_change or self.on_change) == "refuse":
            raise DataError(
                f"the run cannot go on in its data, whose order of rows is another one now: {'; '.join(changes)}. "
                "Restore that, set data.on_change=new_epoch to begin a new epoch in the new order, or start a new run "
                "from the weights"
            )
        self._absent = {
            name: data
            for name, data in state["data"].items()
            if name in position["sources"] and name not in self.mixture.streams
        }
        self.mixture.set_position(position)
        all_changed = settings != state["settings"]
        for name in self.mixture.streams if all_changed else changed_streams:
            self.mixture.restart(name)
        self._delivered = self._planner.place()

    def _carry_over(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The saved position under today's names of the sources, and per source what changed in it."""
        saved, now = state["data"], self._data()
        old_sources, old_shares = state["position"]["sources"], state["position"]["shares"]
        same = {name for name in now if name in saved and saved[name]["fingerprint"] == now[name]["fingerprint"]}
        # A source under another name (its folder was moved) is known by its content.
        by_content = {data["fingerprint"]: name for name, data in saved.items() if name not in same}
        came_from: dict[str, str] = {}
        changes: dict[str, list[str]] = {}
        for name, data in now.items():
            if name in same:
                came_from[name] = name
            elif data["fingerprint"] in by_content:
                came_from[name] = by_content.pop(data["fingerprint"])
            elif name in saved:
                came_from[name] = name
                changes[name] = _differences(saved[name]["parts"], data["parts"])
        kept = {old: old for old in old_sources if old not in came_from.values() and old not in now}
        names = came_from | kept
        sources = {name: dict(old_sources[old]) for name, old in names.items() if old in old_sources}
        shares = {name: old_shares[old] for name, old in names.items() if old in old_shares}
        return {**state["position"], "sources": sources, "shares": shares}, changes


def _make(parts: tuple[_Planner, _Assembler, bool]) -> tuple[Batch, _Place]:
    planner, assembler, pin_memory = parts
    rows, place = planner.step()
    batch = assembler.batch(rows)
    if pin_memory:
        batch = batch._map(lambda t: t.pin_memory())
    return batch, place


def _parts_of(name: str, dataset: TokenDataset) -> Mapping[str, TokenDataset]:
    return dataset.parts if isinstance(dataset, Pool) else {name: dataset}


def _describe(dataset: TokenDataset) -> dict[str, Any]:
    return {"fingerprint": dataset.fingerprint, "documents": dataset.num_docs, "tokens": dataset.num_tokens}


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two descriptions of a stream's parts, one line each."""
    out = [f"source {name} is gone" for name in was if name not in now]
    out += [f"source {name} is new" for name in now if name not in was]
    for name in was:
        if name in now and was[name]["fingerprint"] != now[name]["fingerprint"]:
            sizes = [f"{x['documents']} documents with {x['tokens']} tokens" for x in (was[name], now[name])]
            out.append(f"the content of source {name} changed ({sizes[0]} then, {sizes[1]} now)")
    return out or ["the order of the sources changed"]
