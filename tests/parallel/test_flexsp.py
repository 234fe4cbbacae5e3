"""FlexSP over four ranks against one process, and its parts that need no second process."""

import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.parallel.context.flexsp import FlexSPConfig, FlexSPContext, aligned_groups, documents, part
from trainwright.planning.flexsp import FlexSPPlanner

WORKER = Path(__file__).with_name("flexsp_worker.py")
RANKS = 4


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("flexsp_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("flexsp") / "result"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(out)],
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(RANKS)
    ]
    try:
        logs = [p.communicate(timeout=300)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert all(p.returncode == 0 for p in started), "\n".join(logs)[-6000:]
    return [torch.load(f"{out}.{r}") for r in range(RANKS)]


@pytest.mark.parametrize("name", ["flexsp", "flexsp_shard2"])
def test_training_equals_one_process(ranks, worker, name):
    """20 AdamW steps in float64 on ragged rows; the decoder's norms compute in float32 there."""
    want = worker.base.reference(worker.TRAININGS[name])
    for result in ranks:
        got = result[name]
        for key, rtol in (("losses", 1e-7), ("norms", 1e-6), ("validation", 1e-7)):
            torch.testing.assert_close(got[key], want[key], rtol=rtol, atol=0)
        for key, weight in got["weights"].items():
            torch.testing.assert_close(weight, want["weights"][key], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("float64", 1e-7)])
def test_gradients_of_a_mixed_plan(ranks, worker, dtype, rtol):
    """Groups of 2, 1, 1 ranks, then of 1, 1, 2 with one document in all: relative to the largest entry."""
    model = worker.base.decoder(**worker.MODEL)
    model = model.double() if dtype == "float64" else model
    batch = worker.base.global_batch(0)
    (worker.NextTokenConfig().build()(model, batch).sum / batch.weight()).backward()
    for result in ranks:
        for name, param in model.named_parameters():
            got = result["mixed"][dtype][name]
            assert (got - param.grad).abs().max() <= rtol * param.grad.abs().max(), name


def test_every_rank_of_a_group_issues_the_same_collectives(ranks):
    """And all ranks go through the groups in one order, so that nobody waits for somebody who waits for him."""
    steps = [r["ragged"] for r in ranks]
    mixes = set()
    for step in range(8):
        layouts = [s[step][0] for s in steps]
        assert all(x == layouts[0] for x in layouts)
        mixes |= set(layouts[0])
        groups = {g for s in steps for g, _, _ in s[step][1]}
        assert (0, 1, 2, 3) in groups
        for group in groups:
            seen = [[e for e in steps[r][step][1] if e[0] == group] for r in group]
            assert all(x == seen[0] for x in seen)
    assert {(2, 2), (2, 1, 1), (1, 1, 1, 1)} <= mixes


def test_what_does_not_fit_is_an_error_on_every_rank(ranks):
    for result in ranks:
        assert "a sequence of" in result["refused"][0] and "longer than 8" in result["refused"][0]


# -- without processes --


def rows(seed=0, count=4, length=24):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (count, length), generator=g)
    starts = torch.rand(count, length, generator=g) < 0.2
    starts[:, 0] = True
    slots = torch.arange(length).expand(count, length)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    weights = torch.ones(count, length)
    weights[-1, length // 2 :] = 0
    return Batch(tokens, tokens + 1, weights, positions, (starts.cumsum(1) % 3).int(), extras={"log": tokens * 2.0})


def context(rank, size, **settings):
    config = FlexSPConfig(**settings)
    found = FlexSPContext({}, rank, size, config, 8)
    planner = {}

    def plan(batch, n, lengths):
        planner.setdefault("plan", found.planner_of(batch, n).plan(lengths))
        return planner["plan"]

    found._plan = plan
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("whole", [False, True])
def test_every_trained_token_is_on_one_rank(seed, whole):
    batch = rows(seed)
    parts = []
    for rank in range(4):
        found = context(rank, 4, method="layouts", tokens_per_rank=8)
        parts.append([found.shard(batch)] if whole else found.micro_batches(batch, 2))
    assert len({len(p) for p in parts}) == 1
    flat = [m for p in parts for m in p]
    tokens = torch.cat([m.tokens[m.weights > 0] for m in flat])
    assert sorted(tokens.tolist()) == sorted(batch.tokens[batch.weights > 0].tolist())
    for m in flat:
        assert m.doc_ids.dtype == torch.int32 and m.shape[0] == 1
        assert torch.equal(m.extras["log"], m.tokens * 2.0)
        if not whole:
            assert m.tokens.numel() <= 8
    assert sum(m.weights.sum() for m in flat) == batch.weights.sum()


def test_a_document_is_laid_end_to_end_over_its_group():
    batch = rows()
    spans = documents(batch)[:3]
    whole = torch.cat([batch.tokens[s.row, s.start : s.stop] for s in spans])
    pieces = [part(batch, spans, 4, place) for place in range(4)]
    assert len({p.shape for p in pieces}) == 1
    assert torch.equal(torch.cat([p.tokens[0] for p in pieces])[: len(whole)], whole)
    ids = torch.cat([p.doc_ids[0] for p in pieces])
    assert ids.unique_consecutive().numel() == ids.unique().numel()
    assert (torch.where(ids < 0, -1 - ids, ids) >> 24 == 2).all()
    assert (ids < 0).tolist() == [False] * len(whole) + [True] * (len(ids) - len(whole))  # padding is below 0


def test_documents_without_weight_are_left_out():
    batch = rows()
    batch.weights[1] = 0
    assert all(s.row != 1 for s in documents(batch))
    batch.weights.zero_()
    assert documents(batch) == []
    found = context(1, 4, method="layouts").micro_batches(batch, 2)
    assert len(found) == 1 and found[0].weights.sum() == 0  # still a forward pass, for those who wait


def test_extras_of_whole_rows_are_refused():
    batch = rows()
    batch.extras["advantage"] = torch.ones(4)
    with pytest.raises(ConfigError, match="advantage belongs to whole rows"):
        part(batch, documents(batch)[:1], 1, 0)


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64])
def test_groups_are_aligned_and_number_2n_minus_1(size):
    groups = aligned_groups(size)
    assert len(groups) == 2 * size - 1
    assert all(g.start % len(g) == 0 for g in groups)


def test_random_plans_are_played_without_deadlock():
    """Every rank does its list in order; a group goes on when all its members are there. All lists get done."""
    r = random.Random(0)
    for _ in range(20):
        lengths = [r.choice([3, 9, 30, 100, 250]) for _ in range(r.randint(1, 60))]
        plan = FlexSPPlanner(8, 32, method="layouts").plan(lengths)
        assert sorted(i for m in plan.micro_batches for g in m.groups for i in g.sequences) == list(range(len(lengths)))
        todo = {rank: [m.group_of(rank) for m in plan.micro_batches] for rank in range(8)}
        while any(todo.values()):
            ready = [
                g for g in {q[0] for q in todo.values() if q}
                if all(todo[x] and todo[x][0] == g for x in range(g.first, g.first + g.degree))
            ]  # fmt: skip
            assert ready, "deadlock"
            for x in range(ready[0].first, ready[0].first + ready[0].degree):
                todo[x].pop(0)


@pytest.mark.parametrize(
    "settings, cp, heads, message",
    [
        ({}, 6, 6, "parallel.cp=6"),
        ({"max_degree": 8}, 4, 8, "parallel.context.max_degree=8: should be a power of two up to cp=4"),
        ({"max_degree": 4}, 4, 6, "does not divide the 6 heads of a rank; use one of 1, 2"),
        ({"bandwidth": {2: 100.0}}, 4, 8, "no value for groups of 4 ranks"),
        ({"tokens_per_rank": 10}, 4, 8, "train.seq_len=64; use at least 16"),
    ],
)
def test_bad_input_is_refused_before_any_group(settings, cp, heads, message):
    with pytest.raises(ConfigError, match=message):
        FlexSPConfig(**settings).check(cp, heads, heads, 64)


def test_heads_limit_the_groups():
    assert FlexSPConfig().degrees(16, 4) == [1, 2, 4]
    assert FlexSPConfig().degrees(8, 6) == [1, 2]
    FlexSPConfig().check(16, 4, 4, 64)
