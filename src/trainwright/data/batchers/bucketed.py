"""Batches of samples of similar length, for a DataLoader whose dataset knows its lengths: the baseline for ODB.

There is no recipe line of this name: rows of a recipe are all ``seq_len`` wide, so there is nothing to be had from
having similar ones meet. With ``window=None`` and a budget it is the offline oracle, which sorts the whole dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

from trainwright.core.errors import ConfigError
from trainwright.core.seeds import derive
from trainwright.data.permutation import Permutation


class BucketBatchSampler(Sampler[list[int]]):
    """Lists of indices, for ``DataLoader(batch_sampler=...)``: shuffled, sorted within windows, cut, shuffled again.

    lengths       tokens of each sample, >= 1
    batch_size    samples of a batch; or
    budget        most tokens of a batch, padding included (a longer sample is alone)
    window        samples that are sorted together; None: all
    rank, world_size   each rank gets as many batches, those of a step of similar lengths, and each index is on one
                       rank. Only where all are single samples and do not divide evenly, the shortest is repeated.

    An epoch is a function of settings and :meth:`set_epoch`; ``start`` leaves out that many batches, to resume.
    Raises ConfigError for settings that do not fit, also for fewer samples than ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        batch_size: int | None = None,
        budget: int | None = None,
        window: int | None = 1024,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if (batch_size is None) == (budget is None):
            raise ConfigError("give either batch_size or budget", key="batch_size", value=batch_size)
        for key, value in (("batch_size", batch_size), ("budget", budget), ("window", window)):
            if value is not None and value < 1:
                raise ConfigError("should be at least 1", key=key, value=value)
        if not 0 <= rank < world_size:
            raise ConfigError(f"should be in 0..{world_size - 1}", key="rank", value=rank)
        if len(self.lengths) < world_size:
            raise ConfigError(f"are fewer than the {world_size} ranks: {len(self.lengths)}", key="lengths")
        if self.lengths.min() < 1:
            first = int(np.argmax(self.lengths < 1))
            raise ConfigError(f"should be at least 1; that of sample {first} is {self.lengths[first]}", key="lengths")
        self.batch_size, self.budget, self.window = batch_size, budget, window
        self.rank, self.world_size, self.seed, self.shuffle = rank, world_size, seed, shuffle
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def batches(self) -> list[list[int]]:
        """This rank's batches of the epoch."""
        n = len(self.lengths)
        order = Permutation(n, derive(self.seed, "bucketed", self.epoch) if self.shuffle else None).all()
        window = self.window or n
        cut: list[np.ndarray] = []
        for i in range(0, n, window):
            part = order[i : i + window]
            part = part[np.argsort(-self.lengths[part], kind="stable")]
            cut += self._cut(part)
        # Batches of a step are neighbours in length. Where ranks do not divide their number, the largest are halved.
        while len(cut) % self.world_size:
            i = max(range(len(cut)), key=lambda j: len(cut[j]))
            half = len(cut[i]) // 2
            if half:
                cut[i : i + 1] = [cut[i][:half], cut[i][half:]]
            else:
                cut.append(np.array([int(np.argmin(self.lengths))]))
        steps = np.arange(len(cut) // self.world_size)
        if self.shuffle:
            np.random.default_rng(derive(self.seed, "bucketed steps", self.epoch)).shuffle(steps)
        return [cut[s * self.world_size + self.rank].tolist() for s in steps.tolist()]

    def _cut(self, part: np.ndarray) -> list[np.ndarray]:
        out, at = [], 0
        while at < len(part):
            take = self.batch_size or max(1, (self.budget or 1) // int(self.lengths[part[at]]))
            out.append(part[at : at + take])
            at += take
        return out

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches()[self.start :])

    def __len__(self) -> int:
        return len(self.batches()) - self.start
