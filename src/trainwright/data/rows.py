"""Rows of a dataset, epoch after epoch: a function of data, batcher, seq_len and seed alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.packed import PackedConfig
from trainwright.data.dataset import TokenDataset
from trainwright.data.packing import RowPlan, Segments, assemble
from trainwright.data.permutation import Permutation


class RowStream:
    """Rows by epoch and number, at random access. Any thread may ask.

    Raises ConfigError for ``seq_len`` < 2 (no position could have a target) and DataError when there is no token.
    """

    def __init__(
        self, dataset: TokenDataset, batcher: BatcherConfig, seq_len: int, seed: int = 0, shuffle: bool = True
    ):
        if seq_len < 2:
            raise ConfigError("a row needs at least 2 tokens, one to predict the other", key="seq_len", value=seq_len)
        if dataset.num_docs == 0 or dataset.num_tokens == 0:
            raise DataError(f"source {dataset.name} has no training document; take it out or give it data")
        self.dataset, self.batcher, self.seq_len, self.seed, self.shuffle = dataset, batcher, seq_len, seed, shuffle
        self.step_rows = 1
        self._lock = threading.Lock()
        self._epoch = -1
        self._plan: RowPlan | None = None
        self._order = Permutation(0, None)

    def _at(self, epoch: int) -> tuple[RowPlan, Permutation]:
        with self._lock:
            if epoch != self._epoch or self._plan is None:
                self._plan = None  # let go of the last epoch's before the next is made
                seed = derive(self.seed, "documents", self.dataset.fingerprint, epoch) if self.shuffle else None
                lengths = self.dataset.lengths
                if self.batcher.orders_steps:
                    plan, seed = self.batcher.plan_steps(lengths, self.seq_len, seed, self.step_rows), None
                else:
                    plan = self.batcher.plan(lengths, self.seq_len, seed)
                    # Rows are shuffled as well as documents: those of a long document would else make up a batch alone.
                    seed = derive(self.seed, "rows", self.dataset.fingerprint, epoch) if self.shuffle else None
                self._plan, self._epoch, self._order = plan, epoch, Permutation(plan.num_rows, seed)
            return self._plan, self._order

    def set_step_rows(self, rows: int) -> None:
        """Rows of a step over all ranks, for batchers that give whole steps; the others have no use for it."""
        if self.batcher.orders_steps and rows != self.step_rows:
            with self._lock:
                self.step_rows, self._plan = rows, None

    def num_rows(self, epoch: int) -> int:
        return self._at(epoch)[0].num_rows

    def num_tokens(self, epoch: int) -> int:
        """Tokens in the rows of an epoch: all of the data, where the batcher leaves none out."""
        return int(getattr(self._at(epoch)[0], "num_tokens", self.dataset.num_tokens))

    @property
    def note(self) -> str:
        """What the batcher has to say about the first epoch; mostly nothing."""
        return str(getattr(self._at(0)[0], "note", "")) if self.batcher.orders_steps else ""

    def segments(self, epoch: int, rows: Sequence[int]) -> list[Segments]:
        """What lies in ``rows`` (numbers in ``0 .. num_rows(epoch) - 1``)."""
        plan, order = self._at(epoch)
        return [plan.segments(r) for r in order.at(np.asarray(rows, dtype=np.int64)).tolist()]


class RowDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of one epoch as a plain PyTorch dataset, for any ``DataLoader`` and sampler.

    An item is a dict of ``[T]`` tensors: tokens, targets, positions int64; weights float32; doc_ids int32. Pass
    ``collate_fn=RowDataset.collate`` for a :class:`Batch`; the default collation gives a dict of ``[B, T]`` tensors.
    :meth:`set_epoch` shuffles anew; call it before the loader's workers start.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        seq_len: int,
        pad_id: int = 0,
        batcher: BatcherConfig | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self._make = (dataset, batcher or PackedConfig(), seq_len, seed, shuffle)
        self.pad_id, self.epoch = pad_id, 0
        self.stream = RowStream(*self._make)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.stream.num_rows(self.epoch)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        segments = self.stream.segments(self.epoch, [row])
        batch = assemble([(self.stream.dataset, s) for s in segments], self.stream.seq_len, self.pad_id)
        return {k: v[0] for k, v in vars(batch).items() if k != "extras"}

    @staticmethod
    def collate(items: Sequence[dict[str, torch.Tensor]]) -> Batch:
        def stack(name: str) -> torch.Tensor:
            return torch.stack([item[name] for item in items])

        return Batch(stack("tokens"), stack("targets"), stack("weights"), stack("positions"), stack("doc_ids"))

    def __getstate__(self) -> dict[str, Any]:
        return {"make": self._make, "pad_id": self.pad_id, "epoch": self.epoch}  # plans are made where it arrives

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_make=state["make"], pad_id=state["pad_id"], epoch=state["epoch"])
        self.stream = RowStream(*self._make)
