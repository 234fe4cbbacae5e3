"""What ODB is measured against, and its grouping of padded rows in our own step."""

from collections import Counter

import numpy as np
import pytest
import torch
from documents import documents, stream
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.data.batchers.bucketed import BucketBatchSampler
from trainwright.data.batchers.multipack import first_fit_decreasing
from trainwright.data.odb_rows import micro_batches, used_lengths
from trainwright.data.packing import assemble
from trainwright.objectives.next_token import NextTokenConfig

# -- multipack ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 30), max_size=80), st.integers(1, 30))
def test_first_fit_equals_placing_one_by_one(sizes, capacity):
    sizes = np.minimum(np.array(sizes, dtype=np.int64), capacity)
    rooms, expected = [], np.zeros(len(sizes), int)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [b for b, room in enumerate(rooms) if room >= sizes[i]]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[fitting[0]] -= sizes[i]
        expected[i] = fitting[0]
    assert first_fit_decreasing(sizes, capacity).tolist() == expected.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(1, 99)), min_size=1, max_size=30))
def test_first_fit_decreasing_keeps_its_bound(cuts):
    """Items that fill k bins of 100 exactly: the optimum is k, and at most 11/9 k + 6/9 are used."""
    sizes = np.concatenate([np.diff([0, *sorted(c), 100]) for c in cuts])
    assert first_fit_decreasing(sizes, 100).max() + 1 <= 11 / 9 * len(cuts) + 6 / 9


def test_multipack_cuts_only_what_is_longer_than_a_row_and_packs_tightly():
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 3000).astype(int) + 1, 400).tolist()
    rows = stream(documents(lengths), build("batcher", "multipack"), 128)
    pieces = Counter()
    for s in rows.segments(0, range(rows.num_rows(0))):
        pieces.update(s.docs.tolist())
    assert all(pieces[d] == -(-n // 128) for d, n in enumerate(lengths))
    assert sum(lengths) / (rows.num_rows(0) * 128) > 0.98


# -- buckets ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=8, max_size=60),
    world=st.integers(1, 4),
    window=st.none() | st.integers(1, 30),
    by_budget=st.booleans(),
    size=st.integers(1, 200),
)
def test_buckets_give_each_index_once_and_as_many_batches_to_all(lengths, world, window, by_budget, size):
    kind = {"budget": size} if by_budget else {"batch_size": size}
    ranks = [BucketBatchSampler(lengths, window=window, rank=r, world_size=world, seed=3, **kind) for r in range(world)]
    assert len({len(list(r)) for r in ranks}) == 1
    seen = Counter(i for r in ranks for batch in r for i in batch)
    extra = sum(seen.values()) - len(lengths)
    assert set(seen) == set(range(len(lengths))) and extra < world
    assert extra == 0 or all(len(b) == 1 for r in ranks for b in r)
    for batch in (b for r in ranks for b in r):
        longest = max(lengths[i] for i in batch)
        assert longest * len(batch) <= max(size, longest) if by_budget else len(batch) <= size


def test_buckets_repeat_resume_and_change_with_the_epoch():
    sampler = BucketBatchSampler(range(1, 200), batch_size=4, window=50, seed=1)
    whole = list(sampler)
    assert whole == list(sampler) and len(sampler) == len(whole) == 52
    sampler.set_epoch(0, start=7)
    assert list(sampler) == whole[7:] and len(sampler) == 45
    sampler.set_epoch(1)
    assert sorted(map(sorted, sampler)) != sorted(map(sorted, whole))
    padded = sum(4 * max(b) for b in whole)
    assert 199 * 200 / 2 / padded > 0.85  # of the kind that matters: similar lengths meet


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either batch_size or budget"),
        ({"batch_size": 1, "budget": 1}, "either batch_size or budget"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"budget": -1}, "budget=-1"),
        ({"budget": 1, "window": 0}, "window=0"),
        ({"budget": 1, "rank": 2}, "rank=2"),
        ({"budget": 1, "world_size": 4}, "fewer than the 4 ranks"),
        ({"budget": 1, "lengths": [3, 0]}, "that of sample 1 is 0"),
    ],
)
def test_bad_buckets_are_refused(settings, message):
    with pytest.raises(ConfigError) as raised:
        BucketBatchSampler(**({"lengths": [3, 4, 5]} | settings))
    assert message in str(raised.value)


# -- padded rows in groups, in our own step -----------------------------------------------------------------------


def padded_batch(lengths, seq_len=32, weights=None, batcher="padded"):
    data = documents(lengths, weights=weights)
    rows = stream(data, build("batcher", batcher), seq_len, shuffle=False)
    batch = assemble([(data, s) for s in rows.segments(0, range(rows.num_rows(0)))], seq_len, pad_id=0)
    batch.tokens %= 64
    batch.targets %= 64
    return batch


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    small = build("model", {"name": "decoder", "vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2})
    return small.build(64, 32).double()


def loss_and_gradient(model, micros):
    objective = NextTokenConfig().build()
    model.zero_grad()
    total, weight = 0.0, 0.0
    for micro in micros:
        loss = objective(model, micro)
        loss.sum.backward()
        total, weight = total + loss.sum.item(), weight + micro.weight().item()
    return total, weight, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("batcher", ["padded", "packed", "best_fit", "multipack"])
@pytest.mark.parametrize("count", [None, 3, 20])
def test_grouped_rows_have_the_gradient_of_the_whole_batch(model, batcher, count):
    lengths = [3, 30, 5, 2, 17, 1, 8, 8, 32, 4]
    batch = padded_batch(lengths, batcher=batcher)
    micros = micro_batches(batch, 64, count)
    whole, grouped = loss_and_gradient(model, [batch]), loss_and_gradient(model, micros)
    assert grouped[:2] == pytest.approx(whole[:2], rel=1e-12)
    torch.testing.assert_close(grouped[2], whole[2], rtol=1e-9, atol=1e-11)
    for micro in micros:
        assert micro.tokens.numel() <= max(64, micro.shape[1])
    assert len(micros) == max(count or 0, len(micros))


def test_grouped_rows_cost_less():
    lengths = np.clip(np.random.default_rng(0).lognormal(2, 1, 64), 2, 32).astype(int).tolist()
    batch = padded_batch(lengths)
    used = sum(m.tokens.numel() for m in micro_batches(batch, 128))
    assert used < 0.5 * batch.tokens.numel()
    assert used_lengths(batch).tolist() == [n - 1 for n in lengths]  # the last token predicts nothing


def test_masked_and_empty_rows():
    weights = [np.array([1, 1, 1, 0, 0], np.float32), np.zeros(4, np.float32)]
    batch = padded_batch([5, 4], weights=weights)
    batch.extras = {"per token": torch.ones(2, 32), "per row": torch.ones(2)}
    one, other = micro_batches(batch, 2)
    assert one.shape == (1, 2) and other.shape == (1, 1) and other.weight() == 0
    assert one.extras["per token"].shape == (1, 2) and one.extras["per row"].shape == (1,)
    assert [m.weight().item() for m in micro_batches(batch, 64, 4)][2:] == [0, 0]
