"""Online Dynamic Batching (ODB): batches of about one token budget, formed where the true length is known.

Single samples come out of the data pipeline, with all that only it knows of their length (chat template, truncation,
augmentation, image tokens). A window of W of them is sorted and cut into groups of similar length, short samples in
large groups, long ones in small groups; all ranks make the same number of steps. No length has to be known before.

    loader = DataLoader(dataset, batch_size=1, shuffle=True, num_workers=4, collate_fn=pad)
    batches = OnlineDynamicBatches(loader, budget=16384)
    for step in batches:
        loss = model(**step.batch).loss * step.loss_scale   # loss: mean over the tokens of the batch; DDP
        loss.backward()

Online Dynamic Batching with Formal Guarantees for LLM Training, arXiv:2606.19989; the arithmetic is in
:mod:`trainwright.data.odb_align`. Where we differ from the authors' package:

* Grouping runs in the training process, between two of its steps, and not in a process of its own that must inherit the
  process group by fork. So it works with any start method, and no rank can run ahead.
* A rank is finished when its source has ended and its window is empty. So each sample comes once a pass also where
  ranks have different numbers of samples.
* A rank that has nothing for a step (IDLE) yields a real batch with ``loss_scale`` 0 unless told to skip, so that a
  collective backward pass finds all ranks; no join hook is needed.
* Lengths below 1 are an error, not left out silently; what fails on one rank ends all; passes can be resumed.

Loss scale: with the loss of a rank its mean over its tokens (weights w) and gradients averaged over the ranks, the
gradient of the mean over all tokens needs ``loss * world_size * w_rank / w_all``. A trainer that divides sums by the
global weight itself, as ours does, needs no scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.odb_align import FAILED, FINISHED, MAX_LENGTH, Entry, LossScale, Step, Window
from trainwright.data.odb_exchange import Alone, Exchange, GlooExchange, RankLost, default_exchange
from trainwright.data.odb_source import Source

VERSION = 1


@dataclass
class DynamicBatch:
    """What one rank does in a step.

    batch          the samples, collated
    loss_scale     factor for the mean loss of this batch where gradients are averaged over the ranks; 1.0 if not asked
    samples        here, and ``all_samples`` over all ranks
    weight         loss tokens here, and ``all_weight`` over all ranks (an estimate with loss_scale="approx")
    idle           this rank had nothing: ``batch`` is an old sample that the loss scale of 0 takes out
    """

    batch: Any
    loss_scale: float
    samples: int
    all_samples: int
    weight: int
    all_weight: float
    idle: bool = False


def token_count(sample: Any) -> int:
    """The default length: of ``input_ids`` or ``tokens`` in a mapping, or of a 1-D tensor, array or list itself."""
    if isinstance(sample, Mapping):
        for key in ("input_ids", "tokens"):
            if key in sample:
                return len(sample[key])
        raise ConfigError(
            f"samples have no input_ids or tokens (but {', '.join(map(str, sample))}); give a function", key="length"
        )
    if isinstance(sample, (Tensor, np.ndarray, list)):
        return len(sample)
    raise ConfigError(f"what is the length of a {type(sample).__name__}? Give a function", key="length")


class OnlineDynamicBatches:
    """An iterable of :class:`DynamicBatch`; one iteration is one pass over ``loader``, or several up to a quota.

    loader        a DataLoader with ``batch_size=1`` or None and any sampler (its workers, sampler and collate function
                  are used), or any iterable of samples that gives the same ones each time
    budget        most tokens of a batch, padding included; a longer sample is a batch alone
    length        function of a sample to its tokens; default :func:`token_count`
    weight        function of a sample to its integer loss weight (tokens trained on), for the loss scale; default its
                  length
    collate       function of a list of samples to a batch; default that of ``loader``
    window        samples that wait, W, all of them in memory; default workers x prefetch_factor of the loader, at least
                  1024. Padding falls as the tokens of a window grow over the budget; fewer where samples are images.
    exchange      how ranks agree: "auto" (over all ranks where there are several, which then must all construct this at
                  the same place), a gloo process group, an :class:`~trainwright.data.odb_exchange.Exchange`, or None
                  for a process that trains alone
    join          True: a pass ends when every rank has ended, each sample comes once. False: it ends when the first
                  rank has; what the others still hold is dropped and counted in ``dropped``.
    sample_quota  go on through passes and end with the step that makes it this many samples, over all ranks and
                  passes of this object; None: an iteration is one pass
    idle          "batch": see :class:`DynamicBatch`; "skip": a rank without samples makes no step
    loss_scale    "exact", "approx" (weights of peeled groups estimated by their mean) or None
    slots         most steps of a round; fewer leave more of the window to be grouped again with fresh samples
    warmup        share by which the part of the window that is filled grows each round of a pass, until it is full: the
                  first steps come earlier and are smaller. 1.0: full from the start, better for passes of less than
                  some 20 windows.
    patience      rounds after which a sample goes first
    max_length    longest sample that is allowed; a longer one is an error
    timeout       seconds to wait for a rank in an exchange

    All ranks must pass the same settings, which is checked. Raises ConfigError for settings that do not fit, DataError
    for a sample whose length is below 1 or above ``max_length``, RankLost when another rank fails or ends.
    """

    def __init__(
        self,
        loader: DataLoader[Any] | Iterable[Any],
        budget: int,
        *,
        length: Callable[[Any], int] = token_count,
        weight: Callable[[Any], int] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        window: int | None = None,
        exchange: Exchange | dist.ProcessGroup | Literal["auto"] | None = "auto",
        join: bool = True,
        sample_quota: int | None = None,
        idle: Literal["batch", "skip"] = "batch",
        loss_scale: LossScale | None = "exact",
        slots: int | None = None,
        warmup: float = 0.05,
        patience: int = 8,
        max_length: int = MAX_LENGTH,
        shuffle: bool = True,
        seed: int = 0,
        timeout: float = 600.0,
    ):
        choices = (("idle", idle, ("batch", "skip")), ("loss_scale", loss_scale, ("exact", "approx", None)))
        for key, value, valid in choices:
            if value not in valid:
                raise ConfigError(f"should be one of {', '.join(map(str, valid))}", key=key, value=value)
        for key, number in (("sample_quota", sample_quota), ("slots", slots), ("max_length", max_length)):
            if number is not None and number < 1:
                raise ConfigError("should be at least 1", key=key, value=number)
        if not 0 < warmup <= 1:
            raise ConfigError("should be above 0 and at most 1", key="warmup", value=warmup)
        if max_length > MAX_LENGTH:
            raise ConfigError(f"should be at most {MAX_LENGTH}", key="max_length", value=max_length)
        self._source = Source(loader, seed)
        if window is None:
            window = max(1024, self._source.ahead)
        self.budget, self.window, self.join, self.sample_quota = budget, window, join, sample_quota
        self.idle, self.loss_scale, self.slots, self.warmup = idle, loss_scale, slots or window, warmup
        self.patience, self.max_length, self.shuffle, self.seed = patience, max_length, shuffle, seed
        self._window = Window(window, budget, loss_scale, patience)
        self._length, self._weight = length, weight
        self._collate = collate or self._source.collate or default_collate
        self._exchange: Exchange
        if exchange == "auto":
            self._exchange = default_exchange(timeout)
        elif exchange is None:
            self._exchange = Alone()
        elif isinstance(exchange, dist.ProcessGroup):
            self._exchange = GlooExchange(exchange, timeout)
        else:
            self._exchange = exchange  # type: ignore[assignment]
        self.rank, self.world_size = self._exchange.rank, self._exchange.world_size
        self.epoch = 0  # the pass that is under way or comes next
        self.samples = 0  # that came out so far, over all ranks and passes
        self.dropped = 0  # samples of this rank that ends of passes have dropped (join=False)
        self._agreed = False
        self._passes = 0  # begun by this object
        self._begin()

    def _begin(self) -> None:
        self._round = self._read = 0
        self._ended = False  # the source has
        self._window.entries = []
        self._steps: list[Step] = []  # of the round, that have not come out yet
        self._filler: Entry | None = None  # this rank's shortest sample of the pass so far
        self._resumed: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is pass ``epoch``, which decides the sampler's order and that of the steps."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin()

    def __iter__(self) -> Iterator[DynamicBatch]:
        """A pass from its beginning; the first time after :meth:`load_state_dict`, from there on."""
        self._agree()
        if self._resumed is None:
            self._begin()
        while self.sample_quota is None or self.samples < self.sample_quota:
            came = self.samples
            yield from self._pass()
            if self.sample_quota is None:
                return
            if self.samples == came:
                raise DataError("a pass gave no sample, so that sample_quota is never reached")

    def _pass(self) -> Iterator[DynamicBatch]:
        resumed, self._resumed = self._resumed, None
        self._passes += 1
        stream = self._source.open(self.epoch, _numbers_in(resumed), self._read)
        failed: Exception | None = None
        try:
            if resumed is not None:
                try:
                    self._restore(stream, resumed)
                except Exception as error:  # raised below, when the others know
                    failed, self._steps = error, []
            while True:
                while self._steps:
                    step = self._steps.pop(0)
                    self.samples += step.all_samples
                    batch = self._batch(step)
                    at_quota = self.sample_quota is not None and self.samples >= self.sample_quota
                    if at_quota:
                        self._end_pass()  # before the last step comes out: a state saved there is behind it
                    if batch is not None:
                        yield batch
                    if at_quota:
                        return
                if not self._next_round(stream, failed):
                    self._end_pass()
                    return
        finally:
            stream.close()

    def _end_pass(self) -> None:
        self.dropped += len(self._window) + sum(len(step.entries) for step in self._steps)
        self.epoch += 1
        self._begin()

    # -- a round ------------------------------------------------------------------------------------------------

    def _next_round(self, stream: Iterator[tuple[int, Any]], failed: Exception | None) -> bool:
        """Fill the window, agree, and put the round's steps in the queue. False: the pass has ended."""
        try:
            if failed is None:
                self._fill(stream)
            if failed is None and self.idle == "batch" and self.world_size > 1 and self._filler is None:
                raise DataError(
                    f"rank {self.rank} has no sample at all; give each rank some, or pass idle='skip' where ranks need "
                    "not make the same steps"
                )
        except Exception as error:  # told to the others, which would else wait for this rank
            failed = error
        groups = FAILED if failed is not None else None if len(self._window) else FINISHED
        row = self._window.row((self._passes << 32) + self._round, self.slots, groups)
        try:
            rows = self._exchange(row)
        except RankLost:
            if failed is None:
                raise
        if failed is not None:
            raise failed
        self._check(rows)
        counts = rows[:, 2]
        if (counts == FINISHED).all() or (not self.join and (counts == FINISHED).any()):
            return False
        steps = self._window.take(rows, self.rank)
        if self.shuffle:  # the same order on all ranks: the groups that meet in a step stay together
            order = np.random.default_rng(derive(self.seed, "odb", self.epoch, self._round)).permutation(len(steps))
            steps = [steps[i] for i in order]
        self._steps = steps
        self._round += 1
        return True

    def _fill(self, stream: Iterator[tuple[int, Any]]) -> None:
        wanted = max(1, int(self.window * min(1.0, (self._round + 1) * self.warmup)))
        while len(self._window) < wanted and not self._ended:
            try:
                number, sample = next(stream)
            except StopIteration:
                self._ended = True
                return
            self._window.add(self._entry(number, sample))
            self._read = number + 1

    def _entry(self, number: int, sample: Any) -> Entry:
        length = int(self._length(sample))
        if not 1 <= length <= self.max_length:
            way_out = "leave it out, or let `length` count what the model sees" if length < 1 else "cut or leave it out"
            raise DataError(
                f"sample {number} of rank {self.rank} has length {length}, not in 1..{self.max_length}; {way_out}"
            )
        weight = length if self._weight is None else self._weight(sample)
        if int(weight) != weight or not 0 <= weight <= MAX_LENGTH:
            raise DataError(
                f"sample {number} of rank {self.rank} has weight {weight}; `weight` should give whole numbers >= 0"
            )
        entry = Entry(sample, number, length, int(weight))
        if self._filler is None or length < self._filler.length:
            self._filler = entry
        return entry

    def _check(self, rows: np.ndarray) -> None:
        lost = [r for r, n in enumerate(rows[:, 2].tolist()) if n == FAILED]
        if lost:
            raise RankLost(f"rank {', '.join(map(str, lost))} failed while it read its samples; see its own error")
        if len(set(rows[:, 0].tolist())) > 1:
            raise RankLost(
                "the ranks are in different rounds or passes; did some leave the loop over the batches before others?"
            )

    def _batch(self, step: Step) -> DynamicBatch | None:
        entries, idle = step.entries, not step.entries
        if idle:
            if self.idle == "skip" or self._filler is None:
                return None
            entries = [self._filler]
        weight = sum(e.weight for e in step.entries)
        scale = 0.0 if idle else 1.0
        if self.loss_scale is not None:
            scale = self.world_size * weight / step.all_weight if step.all_weight else 0.0
        batch = self._collate([e.sample for e in entries])
        if self._source.pin_memory:
            batch = pin_memory(batch)
        return DynamicBatch(batch, scale, len(step.entries), step.all_samples, weight, step.all_weight, idle)

    # -- agreement and state ------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "budget": self.budget,
            "window": self.window,
            "join": self.join,
            "sample_quota": self.sample_quota,
            "idle": self.idle,
            "loss_scale": self.loss_scale,
            "slots": self.slots,
            "warmup": self.warmup,
            "patience": self.patience,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _agree(self) -> None:
        """All ranks have the same settings and are at the same place; else their exchanges would not fit together."""
        if self._agreed or self.world_size == 1:
            return
        mine = {**self._settings(), "epoch": self.epoch, "round": self._round, "steps left": len(self._steps)}
        rows = self._exchange(np.array([derive(0, key, value) for key, value in mine.items()], dtype=np.int64))
        for key, column in zip(mine, rows.T, strict=True):
            odd = [r for r, value in enumerate(column.tolist()) if value != column[0]]
            if odd:
                raise ConfigError(
                    f"rank {', '.join(map(str, odd))} has another value than rank 0; all ranks need the same",
                    key=key,
                    value=mine[key],
                )
        self._agreed = True

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the place behind the step that came last. Each rank has its own; save all of them."""

        if self._resumed is not None:
            return dict(self._resumed)  # loaded, and not gone on from yet: its samples have not been read again

        def numbers(entries: Iterable[Entry]) -> list[list[int]]:
            return [[e.number, e.age] for e in entries]

        return {
            "version": VERSION,
            "settings": self._settings(),
            "rank": self.rank,
            "epoch": self.epoch,
            "round": self._round,
            "read": self._read,
            "window": numbers(self._window.entries),
            "steps": [[numbers(s.entries), s.all_samples, s.all_weight] for s in self._steps],
            "filler": self._filler.number if self._filler is not None else None,
            "samples": self.samples,
            "dropped": self.dropped,
        }

    def _restore(self, stream: Iterator[tuple[int, Any]], state: Mapping[str, Any]) -> None:
        """Read the samples again that were waiting."""
        numbers = _numbers_in(state)
        entries: dict[int, Entry] = {}
        while len(entries) < len(numbers):
            got = next(stream, None)
            if got is None or got[0] not in numbers:
                raise DataError("the data has fewer samples than when the state was saved; begin anew with set_epoch")
            entries[got[0]] = self._entry(*got)

        def again(pairs: Iterable[Iterable[int]]) -> list[Entry]:
            out = [entries[number] for number, _ in pairs]
            for entry, (_, age) in zip(out, pairs, strict=True):
                entry.age = age
            return out

        self._window.entries = again(state["window"])
        self._steps = [Step(again(pairs), samples, weight) for pairs, samples, weight in state["steps"]]
        self._filler = entries.get(state["filler"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the step of ``state``, of the same rank of as many ranks, with the same settings and data.

        Samples that were waiting are read again by their number in the pass: of a map-style dataset only those, of an
        iterable all before them. That these are the same is up to the data: random transforms draw anew. Raises
        DataError where the state does not fit.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise DataError("the state of the dynamic batches is damaged or was written by another version")
        settings = {**self._settings(), "rank": self.rank}
        saved = {**state["settings"], "rank": state["rank"]}
        changes = [f"{k} was {saved.get(k)!r} and is {v!r}" for k, v in settings.items() if saved.get(k) != v]
        if changes:
            raise DataError(
                f"the pass cannot go on: {'; '.join(changes)}. Restore that, or begin the pass anew with set_epoch"
            )
        self.epoch = int(state["epoch"])
        self._begin()
        self.samples, self.dropped, self._round = (int(state[k]) for k in ("samples", "dropped", "round"))
        self._read, self._resumed, self._agreed = int(state["read"]), dict(state), False


def _numbers_in(state: Mapping[str, Any] | None) -> set[int]:
    """Of the samples that a state needs."""
    if state is None:
        return set()
    lists = [state["window"], *(pairs for pairs, _, _ in state["steps"])]
    filler = [] if state["filler"] is None else [state["filler"]]
    return {number for pairs in lists for number, _ in pairs} | set(filler)
