"""Dataset decomposition: pieces, quotas, the order of buckets, and rows (card B005: a-d, bad input)."""

from collections import Counter

import numpy as np
import pytest
import torch
from documents import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build
from trainwright.data.batchers.dataset_decomposition import (
    attention_cost,
    curriculum_odds,
    cycle_quotas,
    decompose,
    decompose_all,
    draw_order,
)
from trainwright.data.loader import Loader
from trainwright.data.rows import RowStream
from trainwright.models.attention import _pieces, document_mask, document_starts
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.models.ops.causal_attention import _blocks, first_visible

SEQ, K_MIN, K_MAX = 64, 2, 6


def some_documents(count=400, seed=0):
    rng = np.random.default_rng(seed)
    return documents(np.minimum(rng.lognormal(3, 1.1, count).astype(int) + 1, 900).tolist())


def stream(data=None, step_rows=4, seed=3, shuffle=True, seq_len=SEQ, **config):
    config = {"name": "dataset_decomposition", "k_min": K_MIN, "cycles": 2} | config
    out = RowStream(data or some_documents(), build("batcher", config), seq_len, seed, shuffle)
    out.set_step_rows(step_rows)
    return out


def plan_of(*args, **kwargs):
    return stream(*args, **kwargs)._at(0)[0]


def loader(rank=0, world_size=1, rows=4, data=None, prefetch=0, **config):
    return Loader(
        {"pool": stream(data, 1, **config)}, global_batch_rows=rows, rank=rank, world_size=world_size, prefetch=prefetch
    )


# -- (a) and (b): one document ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "ks", "left"),
    [
        (256, [], 256),
        (257, [8], 0),
        (1000, [9, 8], 230),
        (5000, [12, 9, 8], 133),
        (20000, [13, 13, 11, 10, 9], 27),
    ],
)
def test_a_closed_form(length, ks, left):
    assert decompose(length, 8, 13) == ks
    assert length - sum((1 << k) + 1 for k in ks) == left
    pieces, at = decompose_all(np.array([length]), 8, 13)
    assert pieces.ks.tolist() == ks and length - at[0] == left


def taken(length, pieces, doc):
    """Stretches of a document that its pieces read, targets included, sorted."""
    own = pieces.docs == doc
    return sorted(zip(pieces.starts[own].tolist(), (pieces.starts + (1 << pieces.ks) + 1)[own].tolist(), strict=True))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_b_pieces_lie_end_to_end_in_one_document(lengths, k_min, more, random):
    k_max = k_min + more
    pieces, at = decompose_all(np.array(lengths), k_min, k_max, 5 if random else None)
    assert ((pieces.ks >= k_min) & (pieces.ks <= k_max)).all()
    for doc, length in enumerate(lengths):
        stretches = taken(length, pieces, doc)
        assert [a for a, _ in stretches] == [0, *(b for _, b in stretches)][: len(stretches)]
        assert (stretches[-1][1] if stretches else 0) == at[doc] <= length
        assert length - at[doc] <= 1 << k_min  # what is left holds no piece
        if not random:
            assert [int(np.log2(b - a - 1)) for a, b in stretches] == decompose(length, k_min, k_max)


def test_drawn_lengths_favour_short_pieces():
    rng = np.random.default_rng(0)
    ks = Counter(k for _ in range(300) for k in decompose(3000, 4, 7, rng)[:4])
    for k in range(4, 8):
        assert ks[k] / ks.total() == pytest.approx(2.0 ** (7 - k) / 15, abs=0.05)
    pieces, _ = decompose_all(np.full(300, 3000), 4, 7, seed=0)
    first = pieces.ks[pieces.starts == 0]
    assert np.mean(first == 4) == pytest.approx(8 / 15, abs=0.1)


# -- (d): quotas and draws --------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from(["uniform", "grow_linear", "grow_p2", "grow_p100"]),
)
def test_d_quotas_are_used_exactly(steps, cycles, curriculum):
    quotas = cycle_quotas(steps, cycles)
    assert quotas.sum(0).tolist() == steps and (np.ptp(quotas, axis=0) <= 1).all()
    odds = curriculum_odds(curriculum, len(steps))
    for cycle, quota in enumerate(quotas):
        order = draw_order(quota, odds, np.random.default_rng(cycle))
        assert np.bincount(order, minlength=len(steps)).tolist() == quota.tolist()


def test_odds_of_the_curricula():
    assert curriculum_odds("uniform", 3).tolist() == [1, 1, 1]
    assert curriculum_odds("grow_linear", 6).tolist() == [6, 5, 4, 3, 2, 1]
    assert curriculum_odds("grow_p2", 6).tolist() == [32, 16, 8, 4, 2, 1]
    assert curriculum_odds("grow_p100", 3).tolist() == [10_000, 100, 1]
    assert curriculum_odds([3, 0.5], 2).tolist() == [3, 0.5]


def test_the_next_bucket_has_odds_quota_times_curriculum():
    quotas, odds = np.array([6, 2, 4]), curriculum_odds("grow_p2", 3)
    orders = [draw_order(quotas, odds, np.random.default_rng(i)) for i in range(4000)]
    weights = quotas * odds
    first = np.bincount([o[0] for o in orders], minlength=3) / len(orders)
    assert first == pytest.approx(weights / weights.sum(), abs=0.025)
    # The odds stay as they were while a bucket is being used up, and leave the used-up one out afterwards.
    second = [o[1] for o in orders if o[0] == 1]
    assert np.mean(np.array(second) == 0) == pytest.approx(weights[0] / weights.sum(), abs=0.05)
    rest = [o[7] for o in orders if (o[:6] == 0).all() and o[6] != 0]  # bucket 0 is used up behind place 5
    assert set(rest) <= {1, 2}
    after = np.array([o[6] for o in orders if (o[:6] == 0).all()])
    assert len(after) > 200 and np.mean(after == 1) == pytest.approx(4 / (4 + 4), abs=0.1)


def test_short_pieces_come_first_and_again_in_each_cycle():
    plan = plan_of(some_documents(4000), curriculum="grow_p100", cycles=3)
    ends = np.cumsum(plan.quotas.sum(1))
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        ks = plan.buckets[begin:end]
        half = len(ks) // 2
        assert ks[:half].mean() + 1 < ks[half:].mean()
    uniform = plan_of(some_documents(4000), curriculum="uniform", cycles=1).buckets
    assert abs(uniform[: len(uniform) // 2].mean() - uniform[len(uniform) // 2 :].mean()) < 1


# -- (c): steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_c_a_step_has_one_bucket_on_all_ranks_and_the_same_tokens(world_size):
    ranks = [loader(r, world_size) for r in range(world_size)]
    buckets = ranks[0]._planner.mixture.streams["pool"]._at(0)[0].buckets
    one = loader()
    for k in buckets.tolist():
        batches = [r.next_batch() for r in ranks]
        tokens = torch.cat([b.tokens for b in batches])
        assert torch.equal(tokens, one.next_batch().tokens)
        assert sum(b.weight().item() for b in batches) == 4 * SEQ  # every position has a target
        for b in batches:
            assert (b.positions == torch.arange(SEQ) % (1 << k)).all()
            assert (b.doc_ids == torch.arange(SEQ) // (1 << k)).all()


def test_rows_hold_the_pieces_of_the_documents():
    """Against the plain decomposition: each piece once, whole, with the target behind it."""
    data = some_documents(60)
    rows = stream(data, 1, leftovers="drop", cycles=1)
    expected = Counter()
    for doc, n in enumerate(data.lengths.tolist()):
        at = 0
        for k in decompose(n, K_MIN, K_MAX):
            expected[(doc, at, at + (1 << k))] += 1
            at += (1 << k) + 1
    seen = Counter()
    for s in rows.segments(0, range(rows.num_rows(0))):
        sizes = s.stops - s.starts
        assert sizes.sum() == SEQ and len(set(sizes.tolist())) == 1
        seen.update(zip(s.docs.tolist(), s.starts.tolist(), s.stops.tolist(), strict=True))
    assert set(seen.values()) == {1} and seen.keys() <= expected.keys()
    lost = sum(b - a for _, a, b in expected.keys() - seen.keys())
    assert lost <= (K_MAX - K_MIN + 1) * SEQ  # less than a step of each bucket
    assert rows.num_tokens(0) == sum(b - a for _, a, b in seen)


@pytest.mark.parametrize("step_rows", [1, 4, 16])
def test_leftovers_are_halved_and_tails_kept(step_rows):
    data = some_documents()
    dropping = plan_of(data, step_rows, leftovers="drop")
    splitting = plan_of(data, step_rows, leftovers="split")
    keeping = plan_of(data, step_rows, leftovers="split", tails="keep")
    pieces, at = decompose_all(data.lengths, K_MIN, K_MAX)
    inputs = int((1 << pieces.ks).sum())
    assert dropping.num_tokens <= splitting.num_tokens
    assert inputs - splitting.num_tokens < step_rows * SEQ
    tails = data.lengths - at
    assert keeping.num_tokens == inputs + tails[tails >= 2].sum()
    for plan in (splitting, keeping):
        covered = Counter()
        for row in range(plan.num_rows):
            s = plan.segments(row)
            assert (s.stops - s.starts).sum() <= SEQ
            for doc, a, b in zip(s.docs.tolist(), s.starts.tolist(), s.stops.tolist(), strict=True):
                covered.update((doc, t) for t in range(a, b))
        assert set(covered.values()) == {1} and covered.total() == plan.num_tokens
    assert (-1 in keeping.buckets) and keeping.num_rows % step_rows == 0
    assert "steps by length of piece" in splitting.note and "tails" in keeping.note


def test_lognormal_documents_lose_a_seventh_in_tails():
    """What was measured of the reference: 14 % of the tokens, which ``tails: keep`` keeps."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.1, 20_000).astype(int) + 1
    data = documents(lengths[:5000].tolist())
    plan = plan_of(data, 4, seq_len=8192, k_min=8)
    assert plan.tail_tokens / plan.tokens == pytest.approx(0.14, abs=0.01)
    keeping = plan_of(data, 4, seq_len=8192, k_min=8, tails="keep")
    assert (keeping.num_tokens + keeping.seams) / keeping.tokens > 0.9999


# -- (d): the cost of attention ---------------------------------------------------------------------------------------


def test_d_attention_falls_by_the_closed_form():
    """Pairs that attention works on: by definition, by SDPA document by document, and by our kernel."""
    seq_len, each = 512, 4
    data = documents(np.random.default_rng(1).lognormal(5, 1.2, 500).astype(int).clip(2).tolist())
    rows = stream(data, each, seq_len=seq_len, k_min=6)
    plan = rows._at(0)[0]
    mean = sum(n * each * seq_len * (1 << k) for k, n in plan.steps.items()) / plan.num_tokens  # token-weighted
    assert plan.attention_cost() == pytest.approx(mean / seq_len)
    assert attention_cost(np.concatenate([np.full(len(plan.docs[k]), k) for k in plan.docs]), 9) == pytest.approx(
        mean / seq_len
    )
    loads = Loader({"pool": rows}, global_batch_rows=each, prefetch=0)
    visible = squares = kernel = whole = 0
    for _ in range(plan.num_rows // each):
        batch = loads.next_batch()
        visible += int(document_mask(batch.doc_ids, seq_len, 0, torch.device("cpu")).sum())
        bounds = torch.cat([document_starts(batch.doc_ids), torch.tensor([each * seq_len])])
        squares += sum(p.rows * p.queries * p.keys for p in _pieces(bounds.tolist(), seq_len, 0))
        first = first_visible(bounds, each, seq_len)
        like = torch.empty(each, 2, seq_len, 8)
        kernel += sum(b.batch * (b.e - b.i) * (b.e - b.lo) for b in _blocks(like, 2, first))
        whole += sum(b.batch * (b.e - b.i) * (b.e - b.lo) for b in _blocks(like, 2, None))
    tokens = plan.num_tokens
    assert visible == tokens * (mean + 1) / 2  # n (n + 1) / 2 pairs of n tokens
    assert squares == tokens * mean
    assert kernel == tokens * (mean + 64) / 2  # 64 queries with all keys up to the last of them
    assert whole == tokens * (seq_len + 64) / 2
    assert kernel / whole < 0.7


def test_rows_are_the_papers_batch_in_another_shape():
    """Loss and gradient of [4, 64] with pieces as documents = those of [4 * 64 / 2^k, 2^k] single sequences."""
    torch.manual_seed(0)
    model = DecoderModelConfig(dim=32, n_layers=2, n_heads=2).build(64, SEQ).double()
    data = documents((np.random.default_rng(0).lognormal(3, 1, 100).astype(int) + 2).tolist())
    data._docs = [d % 64 for d in data._docs]
    loads = loader(data=data)
    seen = set()
    for k in loads._planner.mixture.streams["pool"]._at(0)[0].buckets.tolist():
        batch = loads.next_batch()
        if k in seen:
            continue
        seen.add(k)
        shape = (-1, 1 << k)
        grads = []
        for tokens, targets, ids, positions in (
            (batch.tokens, batch.targets, batch.doc_ids, batch.positions),
            (batch.tokens.view(shape), batch.targets.view(shape), None, None),
        ):
            model.zero_grad()
            logits = model(tokens, positions=positions, doc_ids=ids)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert torch.allclose(*grads, rtol=0, atol=1e-12)
        assert grads[0].abs().max() > 1e-3
    assert len(seen) >= 3


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_goes_on_where_it_was_on_other_ranks():
    whole = loader(prefetch=2)
    with whole:
        batches = [whole.next_batch().tokens for _ in range(12)]
    one = loader()
    for _ in range(5):
        one.next_batch()
    state = one.state_dict()
    ranks = [loader(r, 2) for r in range(2)]
    for r in ranks:
        r.load_state_dict(state)
    for i in range(5, 12):
        assert torch.equal(torch.cat([r.next_batch().tokens for r in ranks]), batches[i])


def test_another_step_size_is_another_order():
    one = loader()
    one.next_batch()
    with pytest.raises(DataError, match="rows a step was 4 and is 8"):
        loader(rows=8).load_state_dict(one.state_dict())
    other = loader(rows=8)
    other.load_state_dict(one.state_dict(), on_change="new_epoch")
    assert other.next_batch().tokens.shape == (8, SEQ)


def test_epochs_differ_and_repeat():
    a, b = stream(), stream()
    for epoch in (0, 1, 0):
        rows = range(a.num_rows(epoch))
        for x, y in zip(a.segments(epoch, rows), b.segments(epoch, rows), strict=True):
            assert all((p == q).all() for p, q in zip(x, y, strict=True))
    assert a._at(0)[0].buckets.tolist() != a._at(1)[0].buckets.tolist()
    assert stream(seed=4)._at(0)[0].buckets.tolist() != a._at(0)[0].buckets.tolist()
    still = [stream(shuffle=False, seed=s, leftovers="drop")._at(0)[0] for s in (1, 2)]
    assert still[0].buckets.tolist() == still[1].buckets.tolist()
    assert sorted(still[0].docs[K_MIN + 1].tolist()) == still[0].docs[K_MIN + 1].tolist()  # documents in their order


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "seq_len", "names"),
    [
        ({"k_min": 9}, 256, r"data.batcher.k_min=9: gives pieces of at least 512 tokens, but rows have 256; use 8"),
        ({"k_min": 9, "k_max": 8}, 512, "k_min=9: is above k_max=8"),
        ({"k_max": 7}, 64, r"data.batcher.k_max=7: .*longer than train.seq_len=64"),
        ({}, 96, r"train.seq_len=96: is no multiple of 2\^k_max=64.*use 64 or 128"),
        ({"curriculum": [1, 2]}, 64, "curriculum=.*should be 5 numbers above 0"),
        ({"curriculum": [1, 2, 3, 0, 1]}, 64, "numbers above 0"),
        ({"curriculum": "grow"}, 64, "curriculum"),
        ({"cycles": 0}, 64, "cycles"),
    ],
)
def test_refused(config, seq_len, names):
    with pytest.raises(ConfigError, match=names):
        stream(seq_len=seq_len, **config).num_rows(0)


def test_data_below_a_step_are_refused():
    with pytest.raises(ConfigError, match=r"train.global_batch_tokens=65536: .*give no whole step.*smaller steps"):
        stream(some_documents(20), step_rows=1024).num_rows(0)
    with pytest.raises(ConfigError, match="global_batch_tokens"):
        stream(documents([3, 3, 2]), step_rows=1).num_rows(0)


def test_a_bucket_below_the_number_of_cycles_is_told():
    plan = plan_of(some_documents(100), cycles=50)
    assert "fewer steps than the 50 cycles at length" in plan.note
    assert len(plan.buckets) * 4 == plan.num_rows


def test_sources_mixed_by_weights_are_refused():
    streams = {n: stream(some_documents(seed=i)) for i, n in enumerate("ab")}
    with pytest.raises(ConfigError, match=r"data.batcher='dataset_decomposition': .*leave the weights out"):
        Loader(streams, {"a": 1.0, "b": 1.0}, global_batch_rows=4)
