"""Rows for a plain PyTorch DataLoader, without our loader or trainer."""

import pickle
from collections import Counter

import pytest
import torch
from numbered_docs import PAD, numbered, pairs
from torch.utils.data import DataLoader, DistributedSampler

from trainwright.core.batch import Batch
from trainwright.core.registry import build, methods
from trainwright.data.rows import RowDataset

LENGTHS = [4] * 8


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_id_once_for_workers_and_ranks(num_workers, world_size):
    rows = RowDataset(numbered(LENGTHS), 4, PAD)
    for epoch in (0, 1):
        rows.set_epoch(epoch)
        seen = []
        for rank in range(world_size):
            sampler = DistributedSampler(rows, world_size, rank, shuffle=False)
            for batch in DataLoader(rows, batch_size=2, sampler=sampler, num_workers=num_workers):
                assert batch["tokens"].shape == (2, 4)
                seen += pairs(batch["tokens"])
        assert Counter(seen) == Counter((d, p) for d in range(8) for p in range(4))


@pytest.mark.parametrize("batcher", [m.name for m in methods("batcher") if m.config.keeps_all])
def test_an_item_is_a_row_of_tensors_and_collates_to_a_batch(batcher):
    dataset = numbered([3, 9, 1, 6])
    rows = RowDataset(dataset, 5, PAD, build("batcher", batcher))
    items = [rows[i] for i in range(len(rows))]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in items[0].items()} == {
        "tokens": (torch.int64, (5,)),
        "targets": (torch.int64, (5,)),
        "weights": (torch.float32, (5,)),
        "positions": (torch.int64, (5,)),
        "doc_ids": (torch.int32, (5,)),
    }
    (batch,) = DataLoader(rows, batch_size=len(rows), collate_fn=RowDataset.collate)
    assert isinstance(batch, Batch)
    assert batch.tokens.tolist() == [item["tokens"].tolist() for item in items]
    assert Counter(pairs(batch.tokens)) == Counter((d, p) for d, n in enumerate([3, 9, 1, 6]) for p in range(n))
    for bad in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[bad]


def test_epochs_are_shuffled_anew_and_the_same_again():
    rows = RowDataset(numbered(list(range(1, 30))), 8, PAD, seed=5)
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        epochs.append([rows[i]["tokens"].tolist() for i in range(len(rows))])
    assert epochs[0] == epochs[2] != epochs[1]


def test_it_pickles_without_its_plan():
    rows = RowDataset(numbered(LENGTHS * 50), 4, PAD, build("batcher", "best_fit"), seed=2)
    small = len(pickle.dumps(rows))
    expected = [rows[i]["tokens"].tolist() for i in range(len(rows))]  # makes the plan
    assert len(pickle.dumps(rows)) == small
    copy = pickle.loads(pickle.dumps(rows))
    assert [copy[i]["tokens"].tolist() for i in range(len(copy))] == expected
