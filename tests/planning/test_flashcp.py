"""The planner of FlashCP: which documents are cut."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.planning.flashcp import CUT, Costs, Plan, chunk, chunks_of, make_plan, per_document

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=14)
RANKS = st.sampled_from([1, 2, 3, 4, 8])


def lognormal_packs(n, total=131072, mu=7.5, sigma=1.4):
    g = np.random.default_rng(0)
    for _ in range(n):
        out, left = [], total
        while left:
            out.append(min(left, max(1, int(g.lognormal(mu, sigma)))))
            left -= out[-1]
        yield out


@given(LENGTHS, RANKS, st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_token_is_on_one_rank(lengths, ranks, min_chunk):
    """Must hold: the partition is exact, the sums are those of the pieces, a search does no worse than it says."""
    plan = make_plan(lengths, ranks, total=sum(lengths), min_chunk=min_chunk)
    held = [list(plan.pieces(r)) for r in range(ranks)]
    tokens = sorted((k, t) for mine in held for k, span in mine for t in span)
    assert tokens == [(k, t) for k, n in enumerate(lengths) for t in range(n)]
    assert plan.tokens() == [sum(len(s) for _, s in mine) for mine in held]
    assert plan.work() == [sum(t + 1 for _, s in mine for t in s) for mine in held]
    for r, mine in enumerate(held):
        assert [k for k, _ in mine] == sorted(k for k, _ in mine)
        sends = sum(
            len(s) * sum(any(k2 == k and s2.start > s.start for k2, s2 in held[p]) for p in range(ranks) if p != r)
            for k, s in mine
        )
        assert plan.sent()[r] == sends


@given(LENGTHS, st.sampled_from([2, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_limits(lengths, ranks):
    """Even where evenness can be had by cutting everything long enough; tokens within the largest slack there."""
    plan = make_plan(lengths, ranks, min_chunk=1)
    assert plan == make_plan(list(lengths), ranks, min_chunk=1)
    if plan.imbalance <= 1.05:
        assert max(plan.tokens()) <= 1.1 * sum(lengths) / ranks + 1
    all_cut = per_document(lengths, ranks)
    # Chunks differ by a token at most, so work is even up to that.
    if min(lengths) >= 100 * ranks:
        assert all_cut.imbalance < 1.05 and plan.imbalance <= 1.05
        assert sum(plan.sent()) <= sum(all_cut.sent())


@given(st.integers(1, 500), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_chunks(length, ranks):
    spans = [chunk(length, ranks, i) for i in range(2 * ranks)]
    assert [t for s in spans for t in s] == list(range(length))
    assert max(map(len, spans)) - min(map(len, spans)) <= 1
    together = sorted(t for r in range(ranks) for s in chunks_of(length, ranks, r) for t in s)
    assert together == list(range(length))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_cut_documents_send_three_quarters_of_an_all_gather(ranks):
    """1.5 R (R - 1) chunks of the 2 R (R - 1) that an all-gather sends, and equal work and tokens."""
    lengths = [2 * ranks * n for n in (1, 5, 300)]
    plan = per_document(lengths, ranks)
    assert 4 * sum(plan.sent()) == 3 * sum(lengths) * (ranks - 1)
    assert len(set(plan.work())) == len(set(plan.tokens())) == 1


def test_whole_documents_send_nothing():
    plan = make_plan([100] * 8, 4, min_chunk=1)
    assert plan.cut == () and sum(plan.sent()) == 0 and plan.imbalance == 1


def test_one_document_is_cut_and_one_rank_has_all():
    for length in (4096, 64):  # 64: too short for chunks of 128, but nothing else is even
        assert make_plan([length], 4) == per_document([length], 4)
    assert make_plan([5, 9, 1], 1) == Plan((5, 9, 1), 1, (0, 0, 0))


def test_short_documents_stay_whole_where_work_is_even_so():
    lengths = [2048, *[100] * 40]
    plan = make_plan(lengths, 4)
    assert plan.cut == (0,) and plan.imbalance <= 1.05


def brute(lengths, ranks, imbalance=1.05, eps=0.1):
    """Least sends over all plans that are even enough."""
    limit = (1 + eps) * sum(lengths) / ranks
    best = None
    for homes in itertools.product(range(-1, ranks), repeat=len(lengths)):
        plan = Plan(tuple(lengths), ranks, homes)
        if plan.imbalance <= imbalance and max(plan.tokens()) <= limit + 1:
            best = min(sum(plan.sent()), best if best is not None else 10**9)
    return best


def test_search_is_near_the_best_of_all_plans():
    g = np.random.default_rng(1)
    found = []
    for _ in range(12):
        lengths = [int(x) for x in g.integers(40, 400, 6)]
        best = brute(lengths, 2)
        plan = make_plan(lengths, 2, min_chunk=1)
        assert plan.imbalance <= 1.05
        assert sum(plan.sent()) >= best
        found.append(
            sum(plan.sent()) / max(sum(per_document(lengths, 2).sent()), 1)
            - best / sum(per_document(lengths, 2).sent())
        )
    assert statistics.median(found) <= 0.1


def test_effect_on_lognormal_packs():
    """The card's figure: 40 packs of 131072 tokens for 8 ranks."""
    shares, kv = [], []
    for lengths in lognormal_packs(40):
        plan = make_plan(lengths, 8, total=131072)
        assert plan.imbalance <= 1.05
        shares.append(sum(lengths[k] for k in plan.cut) / 131072)
        kv.append(sum(plan.sent()) / (131072 * 7))
    assert statistics.median(shares) <= 0.75
    assert statistics.median(kv) <= 0.6  # of static per-document sharding with an all-gather


def test_costs_choose_the_faster_plan():
    lengths = [900, 700, 500, 300, 200, 100]
    dear = make_plan(lengths, 4, min_chunk=1, costs=Costs(pair=1e-9, token=1e-9, send=1.0))
    assert sum(dear.sent()) == 0
    free = make_plan(lengths, 4, min_chunk=1, costs=Costs(pair=1e-3, token=1e-9, send=0.0))
    assert free.imbalance < 1.01 and sum(free.sent()) > 0
    costs = Costs(pair=1e-6, token=1e-4, send=2e-4)
    best = make_plan(lengths, 4, min_chunk=1, costs=costs)
    assert costs.of(best) <= min(costs.of(p) for p in (dear, free, per_document(lengths, 4)))


def test_digests_differ():
    a = per_document([64, 32], 2)
    others = [per_document([32, 64], 2), per_document([64, 32], 4), Plan((64, 32), 2, (CUT, 0))]
    assert len({p.digest() for p in (a, *others)}) == 4
    assert a.digest() == per_document((64, 32), 2).digest()


@pytest.mark.parametrize(
    "settings_, message",
    [
        ({"lengths": [5, 0], "ranks": 2}, "document 1 has 0 tokens"),
        ({"lengths": [5], "ranks": 2, "total": 6}, "5 tokens together, the row has 6"),
        ({"lengths": [5], "ranks": 0}, "ranks=0"),
        ({"lengths": [5], "ranks": 2, "slack": [-0.1]}, "at least 0"),
        ({"lengths": [5], "ranks": 2, "slack": []}, "at least 0"),
        ({"lengths": [5], "ranks": 2, "imbalance": 0.9}, "below 1"),
    ],
)
def test_bad_input(settings_, message):
    with pytest.raises(ValueError, match=message):
        make_plan(**settings_)
