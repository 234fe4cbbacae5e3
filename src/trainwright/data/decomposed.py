"""Dataset decomposition for any DataLoader: batches of the paper's shape, ``[b 2^(kmax-k), 2^k]``.

The plan is that of the batcher (data/batchers/dataset_decomposition.py), which a recipe uses with rows of one width;
here each batch is as wide as its pieces. Meant for a training loop of one's own, for a model that knows nothing of
several documents in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.batchers.dataset_decomposition import DatasetDecompositionConfig, DecompositionPlan
from trainwright.data.dataset import TokenDataset
from trainwright.data.packing import Segments, assemble

KEYS = ("batch_tokens", "accumulation", "k_max", "config", "seed", "shuffle", "fingerprint")


class DecomposedBatches(torch.utils.data.IterableDataset[Batch]):
    """Batches of an epoch, for ``DataLoader(dataset, batch_size=None, num_workers=...)`` or to iterate over as it is.

    dataset        tokenized documents (``ArrayDataset(list_of_ids)`` makes one)
    batch_tokens   tokens of an optimizer step over all ranks: a multiple of 2^k_max x ranks x accumulation
    k_max          longest piece is 2^k_max tokens; no more than the model can take (``max_length``, if given)
    config         the other settings, of the recipe's batcher
    accumulation   batches of a step, which this rank gets one after the other, all from one bucket
    rank, world_size   each rank gets its share of every step; all take the same bucket

    A batch is a :class:`Batch` of ``[B, T]`` tensors with T = 2^k and B T = batch_tokens / ranks / accumulation, each
    row of one document. With ``tails="keep"`` there are also rows of 2^k_max tokens with several tails each, told apart
    by ``doc_ids``, and padding of weight 0.
    An epoch is a function of settings and :meth:`set_epoch`; worker processes share its batches and keep their order.
    Iterated over anew it gives the next epoch; with workers the loop has to call ``set_epoch`` for that.
    Raises ConfigError for settings that do not fit and for data that does not fill a step.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        batch_tokens: int,
        *,
        k_max: int = 13,
        config: DatasetDecompositionConfig | None = None,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        max_length: int | None = None,
        pad_id: int = 0,
    ):
        config = config or DatasetDecompositionConfig()
        if config.k_max is not None and config.k_max != k_max:
            raise ConfigError(f"is not k_max={k_max}; give it once", key="config.k_max", value=config.k_max)
        if accumulation < 1:
            raise ConfigError("should be at least 1", key="accumulation", value=accumulation)
        if not 0 <= rank < world_size:
            raise ConfigError(f"should be in 0..{world_size - 1}", key="rank", value=rank)
        if max_length is not None and 1 << k_max > max_length:
            raise ConfigError(
                f"gives pieces of {1 << k_max} tokens, but the model takes {max_length}; lower it to "
                f"{max_length.bit_length() - 1}",
                key="k_max",
                value=k_max,
            )
        unit = (1 << k_max) * world_size * accumulation
        if batch_tokens < 1 or batch_tokens % unit:
            raise ConfigError(
                f"should be a multiple of {unit} (2^k_max tokens x {world_size} ranks x {accumulation} batches a "
                "step), so that every bucket fills it with whole pieces",
                key="batch_tokens",
                value=batch_tokens,
            )
        self.dataset, self.batch_tokens, self.k_max, self.config = dataset, batch_tokens, k_max, config
        self.accumulation, self.rank, self.world_size = accumulation, rank, world_size
        self.seed, self.shuffle, self.pad_id = seed, shuffle, pad_id
        self.fingerprint = dataset.fingerprint
        self.epoch = self.start = 0
        self._planned: tuple[int, DecompositionPlan] | None = None
        self.plan()  # what does not fit is said now and not in a worker

    def plan(self) -> DecompositionPlan:
        """The epoch's steps: ``buckets`` has the exponent of each, ``note`` says what became of the tokens."""
        if self._planned is None or self._planned[0] != self.epoch:
            seed = derive(self.seed, "documents", self.fingerprint, self.epoch) if self.shuffle else None
            rows = self.batch_tokens >> self.k_max
            plan = DecompositionPlan(self.config, self.dataset.lengths, 1 << self.k_max, seed, rows)
            self._planned = (self.epoch, plan)
        return self._planned[1]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """The epoch to give next, without its first ``start`` batches (of this rank) that were seen already."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        """Batches of this rank in the epoch, all told."""
        return len(self.plan().buckets) * self.accumulation

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(self.start + worker, len(self), workers):
            batch = self.batch(i)
            self.start = i + 1
            yield batch
        if info is None:
            self.set_epoch(self.epoch + 1)

    def batch(self, i: int) -> Batch:
        """Batch ``i`` of this rank: part ``i % accumulation`` of step ``i // accumulation``."""
        plan = self.plan()
        step, part = divmod(i, self.accumulation)
        rows = plan.step_rows // (self.world_size * self.accumulation)
        first = step * plan.step_rows + (self.rank * self.accumulation + part) * rows
        lying = [plan.segments(row) for row in range(first, first + rows)]
        k = int(plan.buckets[step])
        if k < 0:
            return assemble([(self.dataset, s) for s in lying], 1 << self.k_max, self.pad_id)
        pieces = [Segments(*(a[j : j + 1] for a in s)) for s in lying for j in range(len(s.docs))]
        return assemble([(self.dataset, s) for s in pieces], 1 << k, self.pad_id)

    def _settings(self) -> dict[str, Any]:
        found = {key: getattr(self, key) for key in KEYS}
        return found | {"config": self.config.model_dump(mode="json")}

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Behind a DataLoader with workers counting is the loop's: ``set_epoch(epoch, start)``."""
        return {"epoch": self.epoch, "start": self.start, "settings": self._settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind what ``state`` counts, on any number of ranks. Raises DataError where the order is another."""
        was = state["settings"]
        changed = [f"{k} was {was.get(k)!r} and is {v!r}" for k, v in self._settings().items() if was.get(k) != v]
        if changed:
            raise DataError(f"the epoch cannot be gone on with, its order is another one now: {'; '.join(changed)}")
        self.set_epoch(int(state["epoch"]), int(state["start"]))
