"""Preference pairs as batches: the chosen and the rejected answer to a prompt in neighbouring rows.

    row 2k      prompt + chosen of pair k       extras["pair_ids"] [B] int64, number of the pair in the dataset
    row 2k + 1  prompt + rejected of pair k     extras["chosen"]   [B] bool

A row holds one answer; what is left of it is padding, a document of its own with weight 0. Weights are those of
fine-tuning: 0 on the prompt, so that ``log P(answer | prompt) = sum(weights * logprobs)`` by row. Both rows of a pair
lie in one micro-batch as long as that is even; :func:`pair_sums` puts them side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainwright.core.batch import PADDING, Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.seeds import derive
from trainwright.data.chat.conversation import Preference
from trainwright.data.chat.masks import Encoded, Masker, TooLong, fit
from trainwright.data.permutation import Permutation

log = logging.getLogger("trainwright")


class Pair(NamedTuple):
    """Two answers to one prompt."""

    chosen: Encoded
    rejected: Encoded


@dataclass
class PairReport:
    """What became of the rows."""

    rows: int = 0
    pairs: int = 0
    too_long: int = 0  # a side does not fit, or is cut before its answer
    cut: int = 0  # a side was shortened
    same: int = 0  # both answers are one text: nothing to prefer
    untrained: int = 0  # a side has no answer to train on
    empty_answer: int = 0  # a side is trained on that says nothing
    left_out: int = 0  # the template leaves out thoughts, or what is said beside a call
    parted: int = 0  # an answer begins or ends within a token of the whole text, and others follow
    prompt_repeated: int = 0  # both texts began with the prompt, which was taken away
    prompt_guessed: int = 0  # texts without prompt or a mark such as Assistant:
    bad: int = 0  # rows that are no pair, or that the template refuses
    bad_samples: list[str] = field(default_factory=list)


class PairDataset(torch.utils.data.Dataset[Pair]):
    """Encoded pairs in memory, for any ``DataLoader`` with ``collate_fn=PairDataset.collate``.

    Items are :class:`Pair`. With the default ``drop`` a pair of which one side is longer than ``max_length`` is left
    out whole, else each side is cut; :attr:`report` counts. Raises DataError for rows that are no pairs unless
    ``skip_bad_rows``, and when no pair is left.
    """

    def __init__(
        self,
        examples: Iterable[Any],
        masker: Masker,
        max_length: int,
        too_long: TooLong = "drop",
        skip_bad_rows: bool = False,
    ):
        if max_length < 2:
            raise ConfigError("an answer and its prompt need at least 2 tokens", key="max_length", value=max_length)
        self.pad_id, self.max_length = masker.tokenizer.pad_id, max_length
        self.report = PairReport()
        self._pairs: list[Pair] = []
        for number, example in enumerate(examples):
            self.report.rows += 1
            try:
                pair = self._encode(example, masker, too_long)
            except DataError as error:
                if not skip_bad_rows:
                    raise DataError(f"pair {number}: {error} (mend the row, or set skip_bad_rows: true)") from None
                self.report.bad += 1
                if len(self.report.bad_samples) < 5:
                    self.report.bad_samples.append(f"pair {number}: {error}")
                continue
            if pair is not None:
                self._pairs.append(pair)
        self.report.pairs = len(self._pairs)
        if not self._pairs:
            raise DataError(f"no pair is left ({self.report})")
        report = self.report
        told = (report.cut, report.empty_answer, report.left_out, report.parted, report.prompt_guessed)
        if report.rows > report.pairs or any(told):
            log.warning("preference pairs: %s", self.report)

    def _encode(self, example: Any, masker: Masker, too_long: TooLong) -> Pair | None:
        if not isinstance(example, Preference):
            raise DataError(f"is a {type(example).__name__}, not a chosen and a rejected answer")
        sides = masker(example.chosen), masker(example.rejected)
        if np.array_equal(sides[0].ids, sides[1].ids):
            self.report.same += 1
            return None
        over = max(max(len(side.ids) for side in sides) - self.max_length, 0)
        if over and too_long == "truncate_left":  # both by as much: the prompt stays one prompt
            self.report.cut += 1
            sides = tuple(replace(s, ids=s.ids[over:], weights=s.weights[over:]) for s in sides)  # type: ignore[assignment]
        fitted = [fit(side, self.max_length, too_long) for side in sides]
        fates = [fate for _, fate in fitted]
        chosen, rejected = fitted[0][0], fitted[1][0]
        if chosen is None or rejected is None:
            self.report.untrained += "untrained" in fates
            self.report.too_long += "untrained" not in fates
            return None
        if np.array_equal(chosen.ids, rejected.ids):  # the cut took what told them apart
            self.report.same += 1
            return None
        self.report.cut += "cut" in fates
        for note in {*example.notes, *chosen.notes, *rejected.notes}:
            setattr(self.report, note, getattr(self.report, note) + 1)
        return Pair(chosen, rejected)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Pair:
        return self._pairs[index]

    def batch(self, indices: Sequence[int], seq_len: int | None = None) -> Batch:
        """The pairs ``indices`` as ``2 * len(indices)`` rows of ``seq_len`` tokens (None: as long as the longest)."""
        return collate_pairs([self[i] for i in indices], self.pad_id, seq_len, list(indices))

    def collate(self, items: Sequence[Pair]) -> Batch:
        """For a ``DataLoader``; pairs are numbered by their place in the batch."""
        return collate_pairs(items, self.pad_id)


def collate_pairs(
    pairs: Sequence[Pair], pad_id: int, seq_len: int | None = None, pair_ids: Sequence[int] | None = None
) -> Batch:
    """Rows of chosen and rejected in turn, each padded to ``seq_len`` (None: the longest side).

    Raises ValueError for a side longer than ``seq_len``.
    """
    sides = [side for pair in pairs for side in pair]
    longest = max(len(side.ids) for side in sides)
    width = longest if seq_len is None else seq_len
    if longest > width:
        raise ValueError(f"a side has {longest} tokens and a row {width}; fit the pairs first")
    shape = (len(sides), width)
    tokens, targets = np.full(shape, pad_id, np.int64), np.full(shape, pad_id, np.int64)
    weights, doc_ids = np.zeros(shape, np.float32), np.full(shape, PADDING, np.int32)
    positions = np.empty(shape, np.int64)
    for r, side in enumerate(sides):
        n = len(side.ids)
        tokens[r, :n], targets[r, : n - 1], weights[r, : n - 1] = side.ids, side.ids[1:], side.weights[1:]
        doc_ids[r, :n] = 0
        positions[r, :n], positions[r, n:] = np.arange(n), np.arange(width - n)
    numbers = torch.tensor(list(range(len(pairs))) if pair_ids is None else list(pair_ids), dtype=torch.int64)
    extras = {"pair_ids": numbers.repeat_interleave(2), "chosen": torch.tensor([True, False]).repeat(len(pairs))}
    make = torch.from_numpy
    return Batch(make(tokens), make(targets), make(weights), make(positions), make(doc_ids), extras)


def pair_sums(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted sums by row of ``values [B, T]`` (log-probabilities of the targets): ``(chosen [B/2], rejected [B/2])``.

    Raises ValueError for a batch in which a pair is torn apart.
    """
    ids, chosen = batch.extras["pair_ids"], batch.extras["chosen"]
    if len(ids) % 2 or not bool((ids[0::2] == ids[1::2]).all() & chosen[0::2].all() & ~chosen[1::2].any()):
        raise ValueError("a pair is torn apart: micro-batches of pairs need an even number of rows")
    sums = (values * batch.weights).sum(-1)
    return sums[0::2], sums[1::2]


class PairLoader:
    """Shuffled batches of whole pairs, epoch after epoch; the place fits into JSON and does not depend on the ranks.

    ``global_pairs`` pairs a step over all ranks, each rank its contiguous share; an epoch's last step takes what is
    left together with the first pairs of the next epoch, so that all steps are alike.
    """

    def __init__(
        self,
        dataset: PairDataset,
        global_pairs: int,
        *,
        seq_len: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ):
        if global_pairs < 1 or global_pairs % world_size:
            raise ConfigError(f"should be a multiple of the {world_size} ranks", key="global_pairs", value=global_pairs)
        if not 0 <= rank < world_size:
            raise ConfigError(f"should be in 0..{world_size - 1}", key="rank", value=rank)
        self.dataset, self.global_pairs, self.seq_len, self.seed = dataset, global_pairs, seq_len, seed
        self.rank, self.world_size = rank, world_size
        self.taken = 0  # pairs given out over all ranks
        self._order: tuple[int, Permutation] | None = None

    def _pair(self, place: int) -> int:
        epoch, at = divmod(place, len(self.dataset))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Permutation(len(self.dataset), derive(self.seed, "pairs", epoch))
        return int(self._order[1].at(np.array([at]))[0])

    def next_batch(self) -> Batch:
        share = self.global_pairs // self.world_size
        start = self.taken + self.rank * share
        batch = self.dataset.batch([self._pair(p) for p in range(start, start + share)], self.seq_len)
        self.taken += self.global_pairs
        return batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken, "pairs": len(self.dataset), "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises DataError when the pairs or the seed are others: the order would be another one."""
        if (state["pairs"], state["seed"]) != (len(self.dataset), self.seed):
            raise DataError(
                f"the state is of {state['pairs']} pairs and seed {state['seed']}, here are {len(self.dataset)} and "
                f"seed {self.seed}; go on with the data of before"
            )
        self.taken = int(state["taken"])


def read_pairs(source: Any, split: Any = "train", validation_fraction: float = 0.0) -> Iterator[Preference]:
    """The pairs of a chat source, whose rows have ``chosen`` and ``rejected``. Raises DataError for other rows."""
    for doc in source.documents(split, validation_fraction):
        example = doc.meta["example"]
        if not isinstance(example, Preference):
            raise DataError(f"{doc.meta['where']}: is of the format {doc.meta['format']}, not a preference pair")
        yield example
