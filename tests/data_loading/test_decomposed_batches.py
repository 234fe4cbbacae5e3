"""DecomposedBatches: dataset decomposition in any DataLoader, in batches as wide as their pieces (card B005)."""

import itertools

import numpy as np
import pytest
import torch
from documents import documents
from torch.utils.data import DataLoader

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build
from trainwright.data.decomposed import DecomposedBatches

K_MIN, K_MAX, STEP = 3, 6, 512


def data(seed=0, count=300):
    rng = np.random.default_rng(seed)
    return documents(np.minimum(rng.lognormal(3.5, 1, count).astype(int) + 1, 900).tolist())


def batches(dataset=None, batch_tokens=STEP, k_max=K_MAX, settings=None, **rest):
    config = build("batcher", {"name": "dataset_decomposition", "k_min": K_MIN, "cycles": 2} | (settings or {}))
    return DecomposedBatches(dataset or data(), batch_tokens, k_max=k_max, config=config, **rest)


def same(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "targets", "weights", "positions"))


def test_batches_are_as_wide_as_their_pieces():
    found = batches()
    ks = found.plan().buckets.tolist()
    assert len(found) == len(ks) and set(ks) == set(range(K_MIN, K_MAX + 1))
    seen = set()
    for k, batch in zip(ks, found, strict=True):
        assert batch.shape == (STEP >> k, 1 << k)
        assert (batch.doc_ids == 0).all() and (batch.weights == 1).all()
        assert (batch.targets - batch.tokens == 1).all()  # tokens of a document count up: nothing crosses a seam
        assert (batch.positions == torch.arange(1 << k)).all()
        ids = batch.tokens.flatten().tolist()
        assert not seen & set(ids)
        seen |= set(ids)
    assert len(seen) == found.plan().num_tokens


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_parts_of_a_step_make_up_the_step(world_size, accumulation):
    """A loss that is a mean over tokens needs no weights: all parts of a step have as many."""
    ranks = [batches(rank=r, world_size=world_size, accumulation=accumulation) for r in range(world_size)]
    assert all(len(r) == len(batches()) * accumulation for r in ranks)
    parts = [chunks(r, accumulation) for r in ranks]
    for whole, *of_ranks in zip(batches(), *parts, strict=True):
        flat = [b for parts in of_ranks for b in parts]
        assert len({b.shape for b in flat}) == 1
        assert torch.equal(torch.cat([b.tokens for b in flat]), whole.tokens)


def chunks(values, n):
    values = iter(values)
    while chunk := tuple(itertools.islice(values, n)):
        yield chunk


def test_workers_give_the_same_batches_in_the_same_order():
    loads = DataLoader(batches(), batch_size=None, num_workers=2)
    assert len(loads) == len(batches())
    for a, b in zip(loads, batches(), strict=True):
        assert same(a, b)


def test_epochs_and_resuming():
    found = batches()
    first, second = list(found), list(found)
    assert found.epoch == 2 and not all(a.shape == b.shape and same(a, b) for a, b in zip(first, second, strict=False))
    again = batches()
    for _, _batch in zip(range(7), again, strict=False):
        state = again.state_dict()
    other = batches()
    other.load_state_dict(state)
    assert state["start"] == 7
    for a, b in zip(other, first[7:], strict=True):
        assert same(a, b)
    assert same(next(iter(other)), second[0])
    late = batches()
    late.set_epoch(1, 3)
    assert same(next(iter(late)), second[3])
    with pytest.raises(DataError, match="accumulation was 1 and is 2"):
        batches(accumulation=2).load_state_dict(state)


def test_tails_are_rows_of_several_documents():
    found = batches(settings={"tails": "keep"})
    rows = [b for k, b in zip(found.plan().buckets.tolist(), found, strict=True) if k < 0]
    assert rows and all(b.shape == (STEP >> K_MAX, 1 << K_MAX) for b in rows)
    assert max(int(b.doc_ids.max()) for b in rows) > 1
    assert all((b.targets - b.tokens)[b.weights > 0].eq(1).all() for b in rows)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"batch_tokens": 500}, "batch_tokens=500: should be a multiple of 64"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"world_size": 3}, r"batch_tokens=512: should be a multiple of 192 \(2\^k_max tokens x 3 ranks"),
        ({"accumulation": 3}, "multiple of 192"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"k_max": 2}, "data.batcher.k_min=3: .*use 2"),
        (
            {"k_max": 9, "max_length": 300},
            "k_max=9: gives pieces of 512 tokens, but the model takes 300; lower it to 8",
        ),
        ({"settings": {"k_max": 5}}, "config.k_max=5: is not k_max=6"),
        ({"batch_tokens": 1 << 20}, "give no whole step"),
    ],
)
def test_refused(settings, names):
    with pytest.raises(ConfigError, match=names):
        batches(**settings)
