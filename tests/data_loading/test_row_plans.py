"""Plans as functions: repeatable, in any order, of several datasets as of one, and beyond 32 bits."""

import numpy as np
import pytest
import torch
from numbered_docs import PAD, STEP, all_rows, numbered, stream

from trainwright.core.registry import build, methods
from trainwright.data.batchers.best_fit import BestFitConfig
from trainwright.data.packing import Pool, assemble

every = pytest.mark.parametrize("name", [m.name for m in methods("batcher") if m.config.keeps_all])
LENGTHS = [1, 1, 8, 7, 9, 3, 50, 2, 16, 1, 24, 5, 5, 4, 8, 100, 6, 1]


def rows_of(plan, order):
    return [list(zip(*(a.tolist() for a in plan.segments(r)), strict=True)) for r in order]


@every
def test_a_plan_depends_on_its_arguments_alone(name):
    lengths = np.random.default_rng(0).integers(1, 30, 200).astype(np.int32)
    config = build("batcher", name)
    one, again, other, unshuffled = (all_rows(config.plan(lengths, 16, seed)) for seed in (1, 1, 2, None))
    assert one == again
    assert one != other
    assert one != unshuffled


@every
def test_rows_do_not_depend_on_what_was_asked_before(name):
    plan = build("batcher", name).plan(np.array(LENGTHS, np.int32), 8, 1)
    forward = all_rows(plan)
    assert rows_of(plan, reversed(range(plan.num_rows))) == forward[::-1]


@every
def test_a_pool_is_its_parts_one_after_the_other(name):
    pool = Pool({"a": numbered([3, 9, 1], "a"), "b": numbered([], "b"), "c": numbered([5, 30], "c", first=3)})
    whole = numbered([3, 9, 1, 5, 30])
    batches = []
    for dataset in (pool, whole):
        plan = build("batcher", name).plan(dataset.lengths, 8, 1)
        batches.append(assemble([(dataset, plan.segments(r)) for r in range(plan.num_rows)], 8, PAD))
    for field in ("tokens", "targets", "weights", "positions", "doc_ids"):
        assert torch.equal(getattr(batches[0], field), getattr(batches[1], field))


@every
def test_ids_survive_whatever_type_the_data_has(name):
    """Caches hold uint16 and uint32; a batch is int64 whatever comes in."""
    dataset = numbered([5, 3, 9])
    plan = build("batcher", name).plan(dataset.lengths, 4, 1)
    small = [np.array(d % STEP, dtype=np.uint16) + 60_000 for d in (dataset.tokens(k) for k in range(3))]
    dataset.tokens = lambda doc, start=0, stop=None: small[doc][start:stop]
    batch = assemble([(dataset, plan.segments(r)) for r in range(plan.num_rows)], 4, PAD)
    assert batch.tokens.dtype == torch.int64
    real = batch.tokens[batch.tokens != PAD]
    assert real.min() == 60_000 and real.max() == 60_008


def epoch_rows(rows, epoch):
    segments = rows.segments(epoch, range(rows.num_rows(epoch)))
    return [tuple(zip(*(a.tolist() for a in s), strict=True)) for s in segments]


@every
def test_rows_of_one_long_document_are_shuffled_by_epoch_and_seed(name):
    dataset = numbered([4 * 50])
    orders = [epoch_rows(stream(dataset, name, 4, seed), epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]
    in_order = sum(a[0][2] == b[0][1] for a, b in zip(orders[0], orders[0][1:], strict=False))
    assert in_order < 10  # neighbours in the document are not neighbours in a batch


@pytest.mark.parametrize("name", ["packed", "best_fit"])
def test_documents_meet_others_in_each_epoch(name):
    rows = stream(numbered(np.random.default_rng(0).integers(1, 9, 200).tolist()), name, 16)
    one, other = (set(epoch_rows(rows, epoch)) for epoch in (0, 1))
    assert len(one & other) < 0.2 * len(one)


def test_windows_of_best_fit_hold_each_document_once_too():
    lengths = np.random.default_rng(3).integers(1, 40, 300).astype(np.int32)
    rows = all_rows(BestFitConfig(window=17).plan(lengths, 16, 1))
    assert sorted((d, p) for row in rows for d, a, b in row for p in range(a, b)) == [
        (d, p) for d, n in enumerate(lengths.tolist()) for p in range(n)
    ]


@every
def test_more_tokens_than_32_bits_count(name):
    lengths = np.full(3000, 2**20, dtype=np.int32)  # 3.1e9 tokens
    lengths[7] = 2**31 - 1
    lengths[8] = 1_234_567
    plan = build("batcher", name).plan(lengths, 2**22, None)
    covered = {}
    for doc, start, stop in sorted(piece for row in all_rows(plan) for piece in row):
        assert start == covered.get(doc, 0) < stop
        covered[doc] = stop
    assert covered == dict(enumerate(lengths.tolist()))
