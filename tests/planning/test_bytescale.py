"""The planner of hybrid data parallelism: which ranks get which sequences, in which order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.planning.bytescale import Cost, MicroBatch, Plan, buckets, make_plan, offload_ratio, ranks_needed

LENGTHS = st.lists(st.integers(1, 400), max_size=24)


def long_tail(n=512, most=65536, mu=8.0, sigma=1.4, seed=0):
    g = np.random.default_rng(seed)
    return [int(np.clip(x, 16, most)) for x in g.lognormal(mu, sigma, n)]


@given(LENGTHS, st.sampled_from([1, 2, 4, 7, 8]), st.integers(50, 120), st.sampled_from(["dp", "pp"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_sequence_once_in_one_order(lengths, ranks, capacity, balance, per_batch):
    """Must hold 3 and 4."""
    lengths = [n for n in lengths if n <= capacity * ranks]
    plan = make_plan(lengths, ranks, capacity, cost=Cost(c=3e-3 if per_batch else 0.0), balance=balance)
    assert sorted(k for m in plan.micro_batches for k in m.sequences) == list(range(len(lengths)))
    for m in plan.micro_batches:
        assert m.first >= 0 and m.first + m.ranks <= ranks
        if m.ranks > 1:
            assert len(m.sequences) == 1
        assert m.ranks == max(math.ceil(lengths[k] / capacity) for k in m.sequences)
        assert sum(lengths[k] for k in m.sequences) <= capacity * m.ranks
        assert m.seconds == pytest.approx(
            sum(Cost()(lengths[k], m.ranks) for k in m.sequences) + (3e-3 if per_batch else 0.0)
        )
    for rank in range(ranks):
        steps = [m.step for m in plan.of(rank)]
        assert len(set(steps)) == len(steps) and steps == sorted(steps)
    assert in_one_order(plan)
    assert max(plan.load(), default=0.0) <= plan.seconds() + 1e-9


def in_one_order(plan):
    """Whether ranks that do their lists and wait for each other at shared micro-batches all come to the end."""
    lists = [plan.of(r) for r in range(plan.ranks)]
    while any(lists):
        heads = {id(m): m for mine in lists for m in mine[:1]}
        ready = [m for m in heads.values() if all(lists[r] and lists[r][0] is m for r in m.span)]
        if not ready:
            return False
        for m in ready:
            for r in m.span:
                lists[r].pop(0)
    return True


def test_the_check_of_the_order_can_fail():
    a, b = MicroBatch((0,), 0, 2, 0, 1.0), MicroBatch((1,), 0, 2, 1, 1.0)

    class Crossed(Plan):
        def of(self, rank):
            return [a, b] if rank else [b, a]

    assert not in_one_order(Crossed((5, 5), 2, (a, b)))
    assert in_one_order(Plan((5, 5), 2, (a, b)))


def test_short_sequences_send_nothing():
    """Must hold 1."""
    plan = make_plan([100] * 30, 4, 128)
    assert plan.sent() == 0 and {m.ranks for m in plan.micro_batches} == {1}


def test_all_ranks_for_all_is_static():
    """Must hold 2: one after the other on all ranks."""
    plan = make_plan([400, 390], 4, 100)
    assert [(m.first, m.ranks, m.step) for m in plan.micro_batches] == [(0, 4, 0), (0, 4, 1)]
    assert plan.imbalance == pytest.approx(1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mu", [7.5, 8.0])
def test_effect_on_lognormal_lengths(mu, seed):
    """The card's figure: N = 32, C = 8192, at most 64K, 512 sequences."""
    lengths = long_tail(mu=mu, seed=seed)
    plan = make_plan(lengths, 32, 8192)
    static = math.ceil(max(lengths) / 8192)
    assert plan.imbalance <= 1.02
    assert plan.sent() <= 0.5 * sum(n * (static - 1) for n in lengths)
    assert plan.seconds() * 32 <= 1.02 * sum(plan.load())  # nor do ranks wait for each other


def test_pipelines_wait_less_with_buckets():
    """Chosen for 4 stages: done before the plan that evens out sums, and each pipeline's own cost alike."""
    lengths = long_tail(mu=7.5)
    dp, pp = make_plan(lengths, 32, 8192), make_plan(lengths, 32, 8192, balance="pp", stages=4)
    assert pp.seconds(4) < dp.seconds(4)

    def spread(plan):
        times = [[m.seconds for m in plan.of(r)] for r in range(32)]
        return float(np.median([max(t) / min(t) for t in times]))

    assert spread(pp) < 0.5 * spread(dp)


def test_seconds_of_a_pipeline():
    """Equal micro-batches: (m + p - 1) t; a dear one holds every beat that it is part of."""
    equal = Plan((1,) * 5, 1, tuple(MicroBatch((i,), 0, 1, i, 2.0) for i in range(5)))
    assert equal.seconds(3) == pytest.approx((5 + 2) * 2.0)
    dear = Plan((1,) * 3, 1, tuple(MicroBatch((i,), 0, 1, i, t) for i, t in enumerate((1.0, 5.0, 1.0))))
    assert dear.seconds(2) == pytest.approx(1 + 5 + 5 + 1)
    assert dear.seconds() == pytest.approx(7)


def test_waiting_is_counted():
    """Two ranks meet after one has done 3 seconds of its own."""
    plan = Plan((9, 9, 9), 2, (MicroBatch((0,), 0, 1, 0, 3.0), MicroBatch((1,), 0, 2, 1, 1.0)))
    assert plan.load() == [4.0, 1.0] and plan.seconds() == 4.0


def test_buckets_of_equal_cost():
    cost = Cost(a=0.0, b=1.0)
    assert buckets([8, 4, 4, 2, 2, 2, 2], cost, [1, 1, 1]) == [1, 2, 4]
    assert sum(buckets(sorted(long_tail(), reverse=True), cost, [1] * 7)) == 512


def test_offload():
    """r * bytes / BW = T, and D = ceil((1 - r) s / C)."""
    layer = lambda s: 1e-9 * s * s + 1e-6 * s  # noqa: E731
    short, long = (offload_ratio(s, 1e5, 2e10, layer) for s in (1000, 3000))
    assert short == pytest.approx(layer(1000) * 2e10 / (1000 * 1e5)) and short < long < 1
    assert offload_ratio(10**6, 1e5, 2e10, layer) == 1
    assert [ranks_needed(s, 100) for s in (1, 100, 101, 399, 400)] == [1, 1, 2, 4, 4]
    assert [ranks_needed(400, 100, r) for r in (0.25, 0.5, 0.6, 0.9, 1.0)] == [3, 2, 2, 1, 1]
    plan = make_plan([400, 50], 4, 100, ratio=lambda s: 0.5 if s > 100 else 0.0)
    assert sorted(m.ranks for m in plan.micro_batches) == [1, 2]
    assert len(make_plan([400, 50, 50], 4, 100, ratio=lambda s: 0.9).micro_batches) >= 2
    with pytest.raises(ValueError, match="above 0"):
        offload_ratio(10, 0, 1e9, layer)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ([401], 4, 100),
            "sequence 0 of 401 tokens needs 5 ranks of 100 tokens, there are 4; raise the capacity to 101",
        ),
        (([5], 4, 0), "capacity=0"),
        (([5, 0], 4, 10), "sequence 1 has 0 tokens"),
        (([5], 0, 10), "ranks=0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments)
    with pytest.raises(ValueError, match="use pp"):
        make_plan([5], 4, 10, stages=2)
    with pytest.raises(ValueError, match="not between 0 and 1"):
        ranks_needed(5, 4, 1.5)
