"""What every batcher must do, for each that is registered."""

import math
from collections import Counter

import numpy as np
import pytest
from documents import START, documents, inputs, single_ids, stream, trained_targets
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build, methods
from trainwright.data.loader import Loader
from trainwright.data.packing import assemble

# Those that leave tokens out on purpose have tests of their own.
BATCHERS = [m.name for m in methods("batcher") if m.config.keeps_all]
LENGTHS = [6, 8, 1, 40, 3, 16, 1, 2, 25, 8, 7, 9, 100, 5]


@pytest.fixture(params=BATCHERS)
def batcher(request):
    return build("batcher", request.param)


def epoch_batch(dataset, batcher, seq_len, epoch=0, seed=0, shuffle=True):
    rows = stream(dataset, batcher, seq_len, seed, shuffle)
    segments = rows.segments(epoch, range(rows.num_rows(epoch)))
    return assemble([(dataset, s) for s in segments], seq_len, pad_id=0), segments


def check_rows(dataset, batch, segments, seq_len, own_weights=None):
    """Every property that a batch of a whole epoch must have."""
    tokens, targets = batch.tokens.numpy(), batch.targets.numpy()
    weights, positions, ids = batch.weights.numpy(), batch.positions.numpy(), batch.doc_ids.numpy()
    covered = Counter()
    for r, (docs, starts, stops) in enumerate(segments):
        at = 0
        for i, (doc, start, stop) in enumerate(zip(docs.tolist(), starts.tolist(), stops.tolist(), strict=True)):
            n = stop - start
            assert n > 0 and 0 <= start < stop <= dataset.lengths[doc]
            own = slice(at, at + n)
            assert tokens[r, own].tolist() == dataset.tokens(doc, start, stop).tolist()
            assert positions[r, own].tolist() == list(range(n))
            assert set(ids[r, own].tolist()) == {i}
            # The last token of a document predicts nothing; the last before a cut predicts what follows the cut.
            has_next = stop < dataset.lengths[doc]
            trained = n if has_next else n - 1
            assert targets[r, at : at + trained].tolist() == dataset.tokens(doc, start + 1, stop + 1)[:trained].tolist()
            expected = np.ones(trained) if own_weights is None else own_weights[doc][start + 1 : start + 1 + trained]
            assert weights[r, at : at + trained].tolist() == np.asarray(expected, np.float32).tolist()
            assert not weights[r, at + trained : at + n].any(), "a seam is trained on"
            covered.update((doc, t) for t in range(start, stop))
            at += n
        assert at <= seq_len
        if at < seq_len:  # padding: a document of its own, not trained on
            assert not weights[r, at:].any() and not tokens[r, at:].any()
            assert set(ids[r, at:].tolist()) == {-1}
            assert positions[r, at:].tolist() == list(range(seq_len - at))
    expected_cover = {(d, t) for d, n in enumerate(dataset.lengths.tolist()) for t in range(n)}
    assert covered.keys() == expected_cover and set(covered.values()) <= {1}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seq_len", [2, 8, 16, 64, 1000])
def test_rows_hold_every_token_once(batcher, seq_len, shuffle):
    data = documents(LENGTHS)
    batch, segments = epoch_batch(data, batcher, seq_len, shuffle=shuffle)
    check_rows(data, batch, segments, seq_len)
    assert sorted(inputs(batch)) == sorted(np.concatenate([data.tokens(d) for d in range(data.num_docs)]).tolist())


@settings(deadline=None, max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("name", BATCHERS)
def test_rows_of_random_documents(name, data):
    seq_len = data.draw(st.integers(2, 40), "seq_len")
    lengths = data.draw(st.lists(st.one_of(st.integers(1, 12), st.integers(1, 6 * seq_len)), min_size=1, max_size=40))
    masked = data.draw(st.booleans(), "masked")
    own = [np.arange(n) % 3 * 0.5 for n in lengths] if masked else None
    config = build("batcher", name)
    dataset = documents(lengths, weights=own)
    batch, segments = epoch_batch(
        dataset,
        config,
        seq_len,
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 2**40)),
        data.draw(st.booleans()),
    )
    check_rows(dataset, batch, segments, seq_len, own)
    formula = sum(n - 1 for n in lengths) if own is None else sum(float(np.float32(w)[1:].sum()) for w in own)
    assert batch.weight().item() == pytest.approx(formula)


def test_every_token_but_each_first_is_a_target_once(batcher):
    data = documents(LENGTHS)
    batch, _ = epoch_batch(data, batcher, 16)
    expected = [1 + START * d + t for d, n in enumerate(LENGTHS) for t in range(1, n)]
    assert sorted(trained_targets(batch)) == expected
    assert batch.weight().item() == sum(LENGTHS) - len(LENGTHS)


def test_documents_without_a_token_take_no_room(batcher):
    data = documents([0, 5, 0, 0, 9, 0])
    batch, segments = epoch_batch(data, batcher, 4)
    check_rows(data, batch, segments, 4)
    without, _ = epoch_batch(documents([5, 9]), batcher, 4)
    assert batch.tokens.shape == without.tokens.shape and batch.weight() == without.weight() > 0


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_no_token_at_all_is_refused(batcher, lengths):
    with pytest.raises(DataError, match="docs has no training document"):
        stream(documents(lengths), batcher, 4)


@pytest.mark.parametrize("seq_len", [1, 0, -4])
def test_rows_too_short_to_train_are_refused(batcher, seq_len):
    with pytest.raises(ConfigError, match=r"seq_len=.*at least 2"):
        stream(documents([4]), batcher, seq_len)


def test_epochs_and_seeds_differ_and_repeat(batcher):
    data = documents([3 + i % 5 for i in range(60)])

    def order(epoch, seed, shuffle=True):
        return epoch_batch(data, batcher, 16, epoch, seed, shuffle)[0].tokens.tolist()

    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(1, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1, False) == order(5, 9, False)


def test_unshuffled_rows_follow_the_corpus(batcher):
    data = documents([4] * 32)
    batch, _ = epoch_batch(data, batcher, 4, shuffle=False)
    assert batch.tokens[:, 0].tolist() == [1 + START * d for d in range(32)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_id_once_an_epoch(batcher, workers, world_size):
    """The fault seen in others: an iterable read once per worker and per rank."""
    data = single_ids(8, width=4, first=1)
    seen = []
    for rank in range(world_size):
        with Loader(
            {"ids": stream(data, batcher, 4)},
            global_batch_rows=4, rank=rank, world_size=world_size, workers=workers, max_rows=16, prefetch=1,
        ) as loader:  # fmt: skip
            seen += [t for b in loader for t in inputs(b) if t != 90_000]
    assert Counter(seen) == dict.fromkeys(range(1, 9), 2)  # two epochs


def test_weights_of_targets_reach_the_batch(batcher):
    weights = [np.array([9, 0, 0.5, 2], np.float32), np.array([9, 0, 0, 1, 1], np.float32)]
    data = documents([4, 5], weights=weights)
    batch, segments = epoch_batch(data, batcher, 3)
    check_rows(data, batch, segments, 3, weights)
    assert batch.weight().item() == pytest.approx(4.5)  # the first token's 9 is never a target's


# -- what single batchers promise ---------------------------------------------------------------------------------


def test_packed_wastes_nothing_but_the_last_row():
    data = documents(LENGTHS)
    rows = stream(data, build("batcher", "packed"), 16)
    assert rows.num_rows(0) == math.ceil(sum(LENGTHS) / 16)


def test_packed_seam_and_cut():
    """Documents of 6 and 8 in rows of 10: the seam is masked, the cut is not."""
    batch, _ = epoch_batch(documents([6, 8]), build("batcher", "packed"), 10, shuffle=False)
    assert batch.weights.tolist() == [[1] * 5 + [0] + [1] * 4, [1] * 3 + [0] * 7]
    assert batch.targets[0, 9].item() == batch.tokens[1, 0].item() == 1 + START + 4
    assert batch.doc_ids.tolist() == [[0] * 6 + [1] * 4, [0] * 4 + [-1] * 6]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=80), st.integers(1, 30))
def test_best_fit_equals_placing_one_by_one(sizes, capacity):
    from trainwright.data.batchers.best_fit import best_fit_decreasing

    sizes = np.minimum(np.array(sizes), capacity)
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda i: rooms[i])] -= size
    bins = best_fit_decreasing(sizes, capacity)
    left = capacity - np.bincount(bins, weights=sizes)
    assert sorted(left.tolist()) == sorted(rooms)


def test_best_fit_cuts_only_what_is_longer_than_a_row_and_packs_tightly():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3, 1, 3000).astype(int) + 1, 400).tolist()
    data = documents(lengths)
    rows = stream(data, build("batcher", "best_fit"), 128)
    pieces = Counter()
    for s in rows.segments(0, range(rows.num_rows(0))):
        pieces.update(s.docs.tolist())
    assert all(pieces[d] == math.ceil(n / 128) for d, n in enumerate(lengths))
    assert sum(lengths) / (rows.num_rows(0) * 128) > 0.99
    windows = stream(data, build("batcher", {"name": "best_fit", "window": 100}), 128)
    assert windows.num_rows(0) >= rows.num_rows(0)


def test_padded_has_one_document_a_row():
    data = documents(LENGTHS)
    rows = stream(data, build("batcher", "padded"), 16)
    assert rows.num_rows(0) == sum(math.ceil(n / 16) for n in LENGTHS)
    assert all(len(s.docs) == 1 for s in rows.segments(0, range(rows.num_rows(0))))
