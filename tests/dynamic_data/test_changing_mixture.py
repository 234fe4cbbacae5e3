"""What the loader gives when the mixture changes in mid-run: from an exact row, whatever was made ahead."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.batchers.padded import PaddedConfig
from trainwright.data.dataset import ArrayDataset
from trainwright.data.loader import Loader
from trainwright.data.mixture import Mixture, Segment
from trainwright.data.rows import RowStream

sys.path.insert(0, str(Path(__file__).parent))
SIZES = {"a": 40, "b": 30, "c": 20}


def streams(sizes=SIZES):
    """A row a document; every token of row i of source k is 1000 k + i."""
    found = {}
    for k, (name, n) in enumerate(sizes.items()):
        data = ArrayDataset([[1000 * k + i] * 4 for i in range(n)], name=name)
        found[name] = RowStream(data, PaddedConfig(), 4, seed=3)
    return found


def loader(prefetch=0, workers=0, rank=0, world_size=1, rows=6, **more):
    even = dict.fromkeys(SIZES, 1.0)
    return Loader(
        streams(), even, global_batch_rows=rows, prefetch=prefetch, workers=workers, rank=rank, world_size=world_size,
        pin_memory=False, **more,
    )  # fmt: skip


def weights_at(step):
    return {"a": 1.0 + step % 3, "b": 0.3 * (step % 4), "c": 2.0}


def firsts(batch):
    return batch.tokens[:, 0].tolist()


def drive(it, steps, first=0):
    out = []
    for step in range(first, first + steps):
        out.append(firsts(it.next_batch()))
        if step % 2:
            it.change(lambda m, s=step: m.set_weights(weights_at(s)))
    return out


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_rows_do_not_depend_on_what_was_made_ahead(prefetch):
    with loader() as plain, loader(prefetch) as ahead:
        assert drive(ahead, 12) == drive(plain, 12)


def test_nor_on_worker_processes():
    with loader() as plain, loader(2, workers=1) as worked:
        assert drive(worked, 4) == drive(plain, 4)


def test_all_ranks_see_the_same_change():
    with loader() as whole:
        expected = drive(whole, 8)
    parts = []
    for rank in range(2):
        with loader(2, rank=rank, world_size=2) as it:
            parts.append(drive(it, 8))
    assert [a + b for a, b in zip(*parts, strict=True)] == expected


def test_resuming_after_changes_goes_on_with_the_same_rows():
    with loader() as whole:
        expected = drive(whole, 12)
    with loader(2) as first:
        drive(first, 7)
        state = first.state_dict()
    with loader(2) as second:
        second.change(lambda m: m.set_weights(weights_at(5)))  # what the mixer's own state says
        second.load_state_dict(state)
        assert drive(second, 5, first=7) == expected[7:]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any), min_size=1, max_size=30))
def test_shares_that_change_at_every_step_are_kept_on_average(changes):
    mixture = Mixture(streams(), dict.fromkeys(SIZES, 1.0))
    owed, given_rows = Counter(), Counter()
    for line in changes:
        weights = dict(zip(SIZES, map(float, line), strict=True))
        mixture.set_weights(weights)
        given_rows.update(ref.stream for ref in mixture.take(3))
        for name, w in weights.items():
            owed[name] += 3 * w / sum(line)
        assert max(abs(owed[n] - given_rows[n]) for n in SIZES) < 2


def test_a_plan_gives_exact_counts_in_each_stretch():
    plan = [Segment({"a": 20, "b": 4, "c": 0}), Segment({"a": 3, "b": 3, "c": 13}), Segment({"a": 7, "b": 7, "c": 0})]
    mixture = Mixture(streams(), dict.fromkeys(SIZES, 1.0))
    mixture.follow(plan)
    for segment in plan:
        assert Counter(ref.stream for ref in mixture.take(segment.total)) == Counter(
            {n: c for n, c in segment.rows.items() if c}
        )
    assert {ref.stream for ref in mixture.take(9)} == set(SIZES)  # behind the plan: the weights


@pytest.mark.parametrize("step", [1, 5, 7, 57])
def test_a_plan_does_not_depend_on_the_size_of_steps_and_resumes(step):
    plan = [Segment({"a": 20, "b": 4, "c": 0}), Segment({"a": 3, "b": 3, "c": 13}), Segment({"a": 7, "b": 7, "c": 0})]

    def make():
        mixture = Mixture(streams(), dict.fromkeys(SIZES, 1.0))
        mixture.follow(plan)
        return mixture

    whole, other = make().take(80), make()
    got = []
    while len(got) < 57:
        got += other.take(step)
        fresh = make()
        fresh.set_position(other.position())
        other = fresh
    assert got == whole[: len(got)]


def test_a_plan_of_an_unknown_source_is_refused():
    from trainwright.core.errors import ConfigError

    with pytest.raises(ConfigError, match="nowhere"):
        Mixture(streams(), dict.fromkeys(SIZES, 1.0)).follow([Segment({"nowhere": 3})])


def test_chosen_rows_come_first_and_the_order_goes_on_behind_them():
    with loader(2) as it, loader() as plain:
        before = [firsts(it.next_batch()) for _ in range(2)]
        order = [firsts(plain.next_batch()) for _ in range(4)]
        assert before == order[:2]
        pool = Mixture(streams(), dict.fromkeys(SIZES, 1.0)).draw(30)
        chosen = [pool[i] for i in (29, 3, 3, 17, 8, 11, 2, 4, 6)]
        it.change(lambda m: m.choose(chosen))
        got = [*firsts(it.next_batch()), *firsts(it.next_batch())]
        assert got[:9] == firsts(it.batch_of(chosen))
        assert got[9:] == order[2][:3]
        assert it.rows == 24


def test_chosen_rows_resume_in_their_middle():
    pool = Mixture(streams(), dict.fromkeys(SIZES, 1.0)).draw(30)

    def choose(it):
        it.change(lambda m: m.choose(pool[::-1]))

    with loader(2) as whole:
        choose(whole)
        expected = [firsts(whole.next_batch()) for _ in range(7)]
    with loader(2) as first:
        choose(first)
        for _ in range(3):
            first.next_batch()
        state = first.state_dict()
    with loader(2) as second:
        choose(second)
        second.load_state_dict(state)
        assert [firsts(second.next_batch()) for _ in range(4)] == expected[3:]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_name_the_source_of_each_row(workers):
    with loader(1, workers=workers, name_sources=True) as it:
        batch = it.next_batch()
    source = batch.extras["source"]
    assert source.shape == (6, 1, 3) and source.dtype == torch.float64
    assert source.flatten(1).argmax(1).tolist() == [t // 1000 for t in firsts(batch)]
    with loader() as plain:
        assert plain.next_batch().extras == {}
