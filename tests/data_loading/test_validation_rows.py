"""Validation rows: one fixed set, whatever the ranks, with bytes for bits per byte."""

import math

import numpy as np
import pytest
import torch
from documents import documents, inputs

from trainwright.core.errors import ConfigError
from trainwright.data.validation import validation_batches

LENGTHS = [6, 8, 1, 40, 3, 16, 5, 9, 33, 2]
TOTAL = sum(LENGTHS)
BYTES = np.arange(10_000 + 100) % 5


def batches(rank=0, world_size=1, batch_rows=3, max_tokens=None, **kwargs):
    return list(
        validation_batches(
            documents(LENGTHS),
            seq_len=8,
            pad_id=0,
            batch_rows=batch_rows,
            rank=rank,
            world_size=world_size,
            max_tokens=max_tokens,
            **kwargs,
        )
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_rows", [1, 3, 100])
@pytest.mark.parametrize("max_tokens", [None, 40, 8])
def test_ranks_share_one_fixed_set_in_equal_batches(world_size, batch_rows, max_tokens):
    expected = sorted(t for b in batches(max_tokens=max_tokens) for t in inputs(b))
    per_rank = [batches(r, world_size, batch_rows, max_tokens) for r in range(world_size)]
    shapes = [[tuple(b.shape) for b in own] for own in per_rank]
    assert all(s == shapes[0] for s in shapes), "ranks would wait for each other"
    assert max(rows for rows, _ in shapes[0]) <= batch_rows
    assert sorted(t for own in per_rank for b in own for t in inputs(b)) == expected
    weight = sum(b.weight().item() for own in per_rank for b in own)
    assert weight == sum(b.weight().item() for b in batches(max_tokens=max_tokens))
    filler = world_size * sum(rows for rows, _ in shapes[0]) - math.ceil(min(max_tokens or TOTAL, TOTAL) / 8)
    assert 0 <= filler < world_size


def test_the_whole_split_trains_each_target_once():
    assert sum(b.weight().item() for b in batches()) == TOTAL - len(LENGTHS)


def test_a_part_is_drawn_from_the_whole_and_stays_the_same():
    assert sum(b.tokens.numel() for b in batches(max_tokens=40)) == 40
    assert sum(b.tokens.numel() for b in batches(max_tokens=3)) == 8  # at least a row
    few, more = ([t for b in batches(max_tokens=m) for t in inputs(b)] for m in (40, 80))
    assert more[: len(few)] == few
    assert few != sorted(few)


def test_bytes_of_trained_targets_only():
    for batch in batches(token_bytes=BYTES):
        size = batch.extras["target_bytes"]
        assert size.dtype == torch.int32 and size.shape == batch.tokens.shape
        expected = torch.from_numpy(BYTES)[batch.targets] * (batch.weights > 0)
        assert torch.equal(size, expected.to(torch.int32))
        assert torch.equal(batch.rows(0, 1).extras["target_bytes"], size[:1])
    total = sum(b.extras["target_bytes"].sum().item() for b in batches(token_bytes=BYTES))
    data = documents(LENGTHS)
    assert total == sum(int(BYTES[data.tokens(d)[1:]].sum()) for d in range(data.num_docs))


def test_nothing_to_validate_on_gives_no_batch():
    assert list(validation_batches(documents([]), seq_len=8, pad_id=0, batch_rows=2)) == []


@pytest.mark.parametrize("bad", [{"batch_rows": 0}, {"max_tokens": 0}, {"max_tokens": -5}])
def test_sizes_below_one_are_refused(bad):
    with pytest.raises(ConfigError, match="at least 1"):
        batches(**bad)
