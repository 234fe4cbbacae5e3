"""The loader: each row once an epoch on any number of ranks, and the same again after a resume."""

import gc
import json
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_docs import PAD, contents, global_steps, loader, numbered, pairs, ranks, stream

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import methods
from trainwright.data.dataset import ArrayDataset
from trainwright.data.loader import Loader

METHODS = [m.name for m in methods("batcher") if m.config.keeps_all]
every = pytest.mark.parametrize("batcher", METHODS)
LENGTHS = [1, 4, 3, 9, 2, 2, 17, 5, 1, 4, 4, 8, 6, 3, 11, 7]


def rows_in_order(lengths, count, batcher="packed", **settings):
    """The global order of rows: what one process gets, a row at a time."""
    one = loader(lengths, batch=1, batcher=batcher, **settings)
    return [contents(one.next_batch())[0] for _ in range(count)]


def same(one, other):
    return all(
        torch.equal(getattr(one, f), getattr(other, f))
        for f in ("tokens", "targets", "weights", "positions", "doc_ids")
    )


# -- each id once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("ahead", [{"prefetch": 0}, {"prefetch": 2}, {"workers": 1}, {"workers": 2}])
def test_each_id_once_an_epoch_for_any_ranks_and_workers(world_size, ahead):
    loaders = ranks(lambda **kw: loader([4] * 8, batch=4, **kw, **ahead), world_size)
    for _ in range(2):
        seen = [p for step in global_steps(loaders, 2) for row in step for p in pairs(row)]
        assert Counter(seen) == Counter((d, p) for d in range(8) for p in range(4))
    for one in loaders:
        one.close()


@every
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_global_batches_do_not_depend_on_the_ranks(batcher, world_size):
    expected = rows_in_order(LENGTHS, 40, batcher)
    steps = global_steps(ranks(lambda **kw: loader(LENGTHS, batch=4, batcher=batcher, **kw), world_size), 10)
    assert steps == [expected[i : i + 4] for i in range(0, 40, 4)]


@pytest.mark.parametrize("batch", [3, 5, 7])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_global_batch_that_ranks_do_not_divide(batch, world_size):
    expected = rows_in_order(LENGTHS, 4 * batch)
    loaders = ranks(lambda **kw: loader(LENGTHS, batch=batch, **kw), world_size)
    for step in range(4):
        batches = [one.next_batch() for one in loaders]
        assert {b.shape[0] for b in batches} == {-(-batch // world_size)}  # as many forward passes on each
        assert [row for b in batches for row in contents(b)] == expected[step * batch : (step + 1) * batch]
        for b in batches:
            filler = (b.tokens == PAD).all(dim=1)
            assert b.weights[filler].sum() == 0
            assert (b.doc_ids[filler] == -1).all() and torch.equal(
                b.positions[filler][:1].flatten()[:4], torch.arange(4)[: 4 * int(filler.any())]
            )


def test_fewer_rows_than_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"global_batch_rows=3.*4 ranks"):
        loader(LENGTHS, batch=3, rank=0, world_size=4)
    with pytest.raises(ConfigError, match=r"rank=2"):
        loader(LENGTHS, batch=4, rank=2, world_size=2)


# -- resuming on other ranks ----------------------------------------------------------------------------------------


def resumed(loaders, make, world_size):
    """New loaders on ``world_size`` ranks that go on from the state of the old ones, through JSON."""
    states = [json.dumps(one.state_dict(), sort_keys=True) for one in loaders]
    assert len(set(states)) == 1
    fresh = ranks(make, world_size)
    for one in fresh:
        one.load_state_dict(json.loads(states[0]))
    return fresh


def test_ids_0_to_15_saved_on_one_rank_go_on_with_4_to_11_on_two():
    """Rows 0..15 in order: one rank reads 0-3; two ranks with a global batch of 8 go on with 4..11."""
    one = loader([4] * 16, batch=4, shuffle=False)
    assert [row[0] // 100_000 for row in contents(one.next_batch())] == [0, 1, 2, 3]
    two = resumed([one], lambda **kw: loader([4] * 16, batch=8, shuffle=False, **kw), 2)
    (step,) = global_steps(two, 1)
    assert [row[0] // 100_000 for row in step] == list(range(4, 12))


@every
@pytest.mark.parametrize(
    ("before", "after"), [((1, 4), (2, 8)), ((2, 4), (1, 4)), ((4, 8), (2, 6)), ((1, 3), (4, 5)), ((3, 7), (2, 2))]
)
def test_resume_on_another_world_size_goes_on_with_the_next_row(batcher, before, after):
    expected = rows_in_order(LENGTHS, 60, batcher)
    ranks_before, batch_before = before
    ranks_after, batch_after = after
    old = ranks(lambda **kw: loader(LENGTHS, batch=batch_before, batcher=batcher, **kw), ranks_before)
    rows = [row for step in global_steps(old, 3) for row in step]
    new = resumed(old, lambda **kw: loader(LENGTHS, batch=batch_after, batcher=batcher, **kw), ranks_after)
    assert new[0].rows == len(rows) == 3 * batch_before
    rows += [row for step in global_steps(new, 3) for row in step]
    assert rows == expected[: len(rows)]


phases = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 6), st.sampled_from([1, 4, 40])), min_size=1, max_size=25),
    phases=phases,
    batcher=st.sampled_from(METHODS),
    seq_len=st.integers(2, 9),
    shuffle=st.booleans(),
)
def test_any_chain_of_saves_and_world_sizes_reads_the_rows_in_their_order(lengths, phases, batcher, seq_len, shuffle):
    config = {"batcher": batcher, "seq_len": seq_len, "shuffle": shuffle}
    got, state = [], None
    for world_size, more_rows, steps, prefetch in phases:
        batch = world_size + more_rows
        make = ranks(lambda **kw: loader(lengths, batch=batch, prefetch=prefetch, **config, **kw), world_size)  # noqa: B023
        for one in make:
            if state is not None:
                one.load_state_dict(json.loads(state))
        got += [row for step in global_steps(make, steps) for row in step]
        state = json.dumps(make[-1].state_dict())
        for one in make:
            one.close()
    assert got == rows_in_order(lengths, len(got), **config)


# -- made ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ahead", [{"prefetch": 1}, {"prefetch": 3}, {"workers": 1}, {"workers": 2, "prefetch": 2}], ids=str
)
def test_making_ahead_changes_nothing(ahead):
    with loader(LENGTHS) as plain, loader(LENGTHS, **ahead) as made_ahead:
        for _ in range(12):
            assert same(plain.next_batch(), made_ahead.next_batch())
            # The state is of what was handed out, however much is ready.
            assert plain.state_dict() == made_ahead.state_dict()
            assert plain.epoch == made_ahead.epoch


@pytest.mark.parametrize("ahead", [{"prefetch": 0}, {"prefetch": 2}, {"workers": 1}], ids=str)
def test_a_closed_loader_can_go_on(ahead):
    expected = rows_in_order(LENGTHS, 32)
    one = loader(LENGTHS, **ahead)
    got = []
    for steps in (0, 2, 1, 3, 2):
        got += [row for _ in range(steps) for row in contents(one.next_batch())]
        one.close()
        one.close()
    assert got == expected


def test_a_state_may_be_loaded_while_steps_are_ready():
    one = loader(LENGTHS, prefetch=3)
    one.next_batch()
    state = one.state_dict()
    expected = [one.next_batch() for _ in range(3)]
    one.load_state_dict(state)
    assert all(same(a, one.next_batch()) for a in expected)
    one.close()


def test_a_loader_that_nobody_holds_ends_its_thread():
    before = threading.active_count()
    one = loader(LENGTHS, prefetch=2)
    one.next_batch()
    assert threading.active_count() == before + 1
    del one
    gc.collect()
    assert threading.active_count() == before


class Failing(ArrayDataset):
    """Raises at some documents for as long as ``broken``."""

    broken: Exception | None = None

    def tokens(self, doc, start=0, stop=None):
        if self.broken is not None and doc == 5:
            raise self.broken
        return super().tokens(doc, start, stop)


@pytest.mark.parametrize("ahead", [{"prefetch": 0}, {"prefetch": 2}, {"workers": 1}], ids=str)
def test_an_error_while_reading_comes_out_of_next_batch_and_loses_nothing(ahead):
    dataset = Failing([row * 100 + np.arange(4) for row in range(12)])
    dataset.broken = DataError("shard 3 is unreadable")
    one = Loader({"pool": stream(dataset, shuffle=False)}, global_batch_rows=2, pad_id=PAD, **{"prefetch": 0} | ahead)
    got = [row for _ in range(2) for row in contents(one.next_batch())]
    for _ in range(2):
        with pytest.raises(DataError, match="shard 3 is unreadable"):
            one.next_batch()
    assert one.rows == 4
    dataset.broken = None
    got += [row for _ in range(4) for row in contents(one.next_batch())]
    assert [row[0] // 100 for row in got] == list(range(12))
    one.close()


def test_an_error_of_another_kind_comes_out_as_it_is():
    dataset = Failing([row * 100 + np.arange(4) for row in range(12)])
    dataset.broken = OSError("disk gone")
    one = Loader({"pool": stream(dataset, shuffle=False)}, global_batch_rows=6, prefetch=2)
    with pytest.raises(OSError, match="disk gone"):
        one.next_batch()
    one.close()


def test_fewer_tokens_than_the_index_says_is_an_error():
    dataset = numbered([4, 4, 4])
    dataset.lengths = np.array([4, 6, 4], dtype=np.int32)
    one = Loader({"pool": stream(dataset, shuffle=False)}, global_batch_rows=4, prefetch=2)
    with pytest.raises(DataError, match=r"document 1 has fewer tokens than its index says"):
        one.next_batch()
    one.close()


def test_the_loader_ends_behind_max_rows():
    for ahead in ({"prefetch": 0}, {"prefetch": 2}, {"workers": 1}):
        one = loader(LENGTHS, max_rows=10, **ahead)
        batches = list(one)
        assert [len(contents(b)) for b in batches] == [4, 4, 2]
        assert {b.shape[0] for b in batches} == {4}
        assert one.rows == 10
        with pytest.raises(StopIteration):
            one.next_batch()
        one.close()


# -- epochs ---------------------------------------------------------------------------------------------------------


@every
def test_epochs_follow_each_other_within_a_step_and_each_has_every_token(batcher):
    one = loader(LENGTHS, batch=5, batcher=batcher)
    everything = sorted((d, p) for d, n in enumerate(LENGTHS) for p in range(n))
    seen, rows, epochs = [], 0, []
    while len(epochs) < 4:
        for row in contents(one.next_batch()):
            seen += pairs(row)
            rows += 1
            if len(seen) == len(everything):
                assert sorted(seen) == everything
                epochs.append(tuple(seen))
                seen = []
    assert len(set(epochs)) == 4  # shuffled anew
    assert one.rows >= rows


def test_epoch_counts_passes_with_their_fraction():
    one = loader([4] * 10, batch=4)
    assert one.epoch == 0
    epochs = []
    for _ in range(6):
        one.next_batch()
        epochs.append(one.epoch)
    assert epochs == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.4])
    again = loader([4] * 10, batch=4)
    again.load_state_dict(one.state_dict())
    assert again.epoch == pytest.approx(2.4)


def test_a_global_batch_larger_than_several_epochs():
    one = loader([4] * 3, batch=8)
    counts = Counter(row[0] // 100_000 for row in contents(one.next_batch()))
    assert sorted(counts.values()) == [2, 3, 3]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, r"seed was 3 and is 4"),
        ({"seq_len": 8}, r"seq_len was 4 and is 8"),
        ({"shuffle": False}, r"shuffle was True and is False"),
        ({"batcher": "best_fit"}, r"batcher was .*packed.* and is .*best_fit"),
        (
            {"lengths": [*LENGTHS[:-1], 8]},
            r"content of source pool changed \(16 documents with 87 tokens then, 16 .* 88",
        ),
        ({"lengths": LENGTHS[:-1]}, r"content of source pool changed .*15 documents"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_another_order_of_rows_is_refused_and_named(change, named):
    make = {"lengths": LENGTHS, "batcher": "packed", "seq_len": 4, "seed": 3, "shuffle": True}
    one = loader(**make)
    one.next_batch()
    state = json.loads(json.dumps(one.state_dict()))
    other = loader(**make | change)
    with pytest.raises(DataError, match=named) as error:
        other.load_state_dict(state)
    assert "new_epoch" in str(error.value)
    # A refusal leaves the loader as it was.
    assert other.rows == 0
    first = other.next_batch()
    assert same(first, loader(**make | change).next_batch())
    # On request it begins a whole epoch in the new order instead.
    other.load_state_dict(state, on_change="new_epoch")
    assert other.rows == 4 and other.epoch == 1
    lengths = (make | change)["lengths"]
    seen = []
    while len(seen) < sum(lengths):
        seen += [p for row in contents(other.next_batch()) for p in pairs(row)]
    assert Counter(seen[: sum(lengths)]) == Counter((d, p) for d, n in enumerate(lengths) for p in range(n))


@pytest.mark.parametrize("state", [{}, {"version": 0}, None, [1], "x"])
def test_a_state_of_another_version_is_refused(state):
    with pytest.raises(DataError, match="damaged or was written by another version"):
        loader(LENGTHS).load_state_dict(state)


def test_the_state_is_small_and_plain():
    one = loader([4] * 5000, prefetch=2)
    for _ in range(30):
        one.next_batch()
    state = one.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1500
    one.close()


def test_a_saved_state_does_not_move_with_the_loader():
    one = loader(LENGTHS)
    one.next_batch()
    state = one.state_dict()
    text = json.dumps(state)
    one.next_batch()
    assert json.dumps(state) == text


def test_nothing_to_read_and_rows_too_short_are_errors():
    with pytest.raises(DataError, match="source empty has no training document"):
        stream(numbered([], "empty"))
    with pytest.raises(DataError, match="no training document"):
        stream(numbered([0, 0]))
    with pytest.raises(ConfigError, match="seq_len=1"):
        stream(numbered([4]), seq_len=1)
