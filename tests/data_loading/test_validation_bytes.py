"""Validation: the same rows on any number of ranks, and every scored byte counted."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_docs import PAD, contents, numbered, pairs

from trainwright.core.errors import ConfigError
from trainwright.data.dataset import ArrayDataset
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.data.validation import validation_batches

LENGTHS = [1, 4, 3, 9, 2, 2, 17, 5, 1, 4, 4, 8, 6, 3, 11, 7]
TEXTS = ["plain ascii", "ümläut", "日本語のテキスト", "", "a", "emoji 🙂🙃 end", "x" * 70]


def on_ranks(dataset, world_size, **settings):
    """Batches of each rank."""
    settings = {"seq_len": 4, "pad_id": PAD, "batch_rows": 3} | settings
    return [list(validation_batches(dataset, rank=r, world_size=world_size, **settings)) for r in range(world_size)]


def rows_of(per_rank):
    return [row for batches in per_rank for batch in batches for row in contents(batch)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    world_size=st.integers(1, 5),
    batch_rows=st.integers(1, 7),
    max_tokens=st.one_of(st.none(), st.integers(1, 200)),
)
def test_the_ranks_share_one_set_of_rows(lengths, world_size, batch_rows, max_tokens):
    dataset = numbered(lengths)
    per_rank = on_ranks(dataset, world_size, batch_rows=batch_rows, max_tokens=max_tokens)
    assert rows_of(per_rank) == rows_of(on_ranks(dataset, 1, max_tokens=max_tokens))
    # As many forward passes on each rank, of the same sizes: none waits for another.
    assert len({tuple(b.shape[0] for b in batches) for batches in per_rank}) == 1
    assert all(1 <= b.shape[0] <= batch_rows for batches in per_rank for b in batches)


def test_without_a_limit_every_token_is_scored_once():
    rows = on_ranks(numbered(LENGTHS), 2)
    trained = [b.targets[b.weights > 0] for batches in rows for b in batches]
    assert sorted(p for t in trained for p in pairs(t)) == [(d, p) for d, n in enumerate(LENGTHS) for p in range(1, n)]


@pytest.mark.parametrize(("max_tokens", "rows"), [(1, 1), (4, 1), (7, 1), (8, 2), (40, 10), (87, 21), (10_000, 22)])
def test_max_tokens_limits_to_whole_rows(max_tokens, rows):
    got = rows_of(on_ranks(numbered(LENGTHS), 1, max_tokens=max_tokens))
    assert len(got) == rows  # of 22: 87 tokens in rows of 4
    assert got == rows_of(on_ranks(numbered(LENGTHS), 1))[:rows]


def test_a_limit_draws_from_the_whole_set():
    got = rows_of(on_ranks(numbered([4] * 200), 1, max_tokens=80))
    docs = [row[0] // 100_000 for row in got]
    assert len(docs) == 20 and min(docs) < 60 and max(docs) > 140


def encoded(texts):
    tokenizer = ByteTokenizer()
    return ArrayDataset([[*tokenizer.encode(t), tokenizer.eos_id] for t in texts if t]), tokenizer


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_target_bytes_are_the_utf8_bytes_that_are_scored(world_size):
    dataset, tokenizer = encoded(TEXTS)
    per_rank = on_ranks(
        dataset, world_size, pad_id=tokenizer.pad_id, seq_len=8, token_bytes=tokenizer.token_byte_lengths()
    )
    batches = [b for batches in per_rank for b in batches]
    for b in batches:
        assert b.extras["target_bytes"].shape == b.shape
        assert b.extras["target_bytes"].dtype == torch.int32
        assert (b.extras["target_bytes"][b.weights == 0] == 0).all()
    counted = sum(int(b.extras["target_bytes"].sum()) for b in batches)
    # The first byte of a document is predicted by nothing; EOS has no bytes but is scored.
    assert counted == sum(len(t.encode()) - 1 for t in TEXTS if t)
    assert sum(b.weight().item() for b in batches) == sum(len(t.encode()) for t in TEXTS if t)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=8), seq_len=st.integers(2, 12))
def test_any_text_counts_its_bytes(texts, seq_len):
    dataset, tokenizer = encoded(texts)
    (batches,) = on_ranks(dataset, 1, pad_id=258, seq_len=seq_len, token_bytes=tokenizer.token_byte_lengths())
    counted = sum(int(b.extras["target_bytes"].sum()) for b in batches)
    assert counted == sum(len(t.encode()) - 1 for t in texts if t)


def test_masked_targets_count_no_bytes():
    docs = [[1, 2, 3, 4], [5, 6, 7]]
    dataset = ArrayDataset(docs, [[1, 0, 1, 0.5], [1, 1, 0]])
    (batches,) = on_ranks(dataset, 1, pad_id=0, token_bytes=np.full(8, 3, dtype=np.int32))
    assert sum(int(b.extras["target_bytes"].sum()) for b in batches) == 3 * 3  # tokens 3, 4, 6


def test_nothing_to_validate_on_gives_no_batch():
    for dataset in (numbered([]), numbered([0, 0])):
        assert on_ranks(dataset, 2) == [[], []]


@pytest.mark.parametrize("setting", ["batch_rows", "max_tokens"])
def test_sizes_below_one_are_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting}=0"):
        on_ranks(numbered(LENGTHS), 1, **{setting: 0})
