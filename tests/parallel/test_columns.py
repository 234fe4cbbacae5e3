"""Columns of pipelines whose context groups exchange keys: four gloo ranks on random documents, as recorded, and many
more played action by action, under the lists that torch runs. What they compute is in test_pipeline.py.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from trainwright import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.parallel.config import PipelineSection
from trainwright.parallel.context.bytescale import largest_share
from trainwright.parallel.pipeline.legal import check_micro_batches, legal_micro_batches
from trainwright.planning.bytescale import Cost, in_buckets, make_plan
from trainwright.planning.flexsp import FlexSPPlanner
from trainwright.train.degrees import check

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
Action = tuple[int, str, int]  # stage, kind, micro-batch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of 4 ranks, 2 columns of 2 stages, sent and was refused."""
    out = tmp_path_factory.mktemp("columns") / "result"
    command = [sys.executable, str(Path(__file__).with_name("column_worker.py")), str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [torch.load(f"{out}.{r}") for r in range(4)]


CELLS = [*(f"bytescale {s}" for s in SCHEDULES), "flashcp interleaved", "flashcp zero_bubble", "flexsp 1f1b",
         "flexsp zero_bubble", "ring 1f1b"]  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_one_order_in_every_group(ranks, name):
    """Collectives of a group are the same list on all its ranks, and what a sends to b is what b receives from a."""
    met = 0
    for step in range(4):
        seen = [r[name]["steps"][step] for r in ranks]
        for group in {g for one in seen for g, *_ in one}:
            lists = [[e for e in seen[r] if e[0] == group] for r in group]
            joint = [[(kind, size) for _, kind, _, size in one if kind not in ("send", "recv")] for one in lists]
            assert all(x == joint[0] for x in joint)
            for i, a in enumerate(group):
                for j, b in enumerate(group):
                    sent = [size for _, kind, peer, size in lists[i] if kind == "send" and peer == b]
                    received = [size for _, kind, peer, size in lists[j] if kind == "recv" and peer == a]
                    assert sent == received
            talks = {e[1] for one in lists for e in one} & {"send", "all_to_all"}
            met += tuple(group) in ((0, 1), (2, 3)) and bool(talks)
        assert len({r[name]["counts"][step][0] for r in ranks}) == 1
        assert all(len(r[name]["counts"][step][1]) == 1 for r in ranks)  # one shape
    assert met >= 4  # columns did exchange something, in both stages and several steps


@pytest.mark.parametrize("name", CELLS)
def test_planned_bytes_are_the_recorded_ones(ranks, name):
    """trainwright plan comm, the mean over the ranks. Not planned: names of metrics and plans (broadcast), and the few
    bytes by which stages meet when a schedule is new."""
    for step in range(4):
        planned = ranks[0][name]["planned"][step]
        recorded = [r[name]["recorded"][step] for r in ranks]
        kinds = {kind for one in recorded for kind in one} - {"broadcast"}
        assert kinds == planned.keys()
        for kind in kinds:
            mean = sum(one.get(kind, 0) for one in recorded) / 4
            assert mean == pytest.approx(planned[kind], rel=0, abs=16 if kind == "send" else 1), (step, kind)


def test_other_documents_are_refused_in_every_stage_and_column(ranks):
    for number, rank in enumerate(ranks):
        for name in ("bytescale", "flashcp"):
            odd, stage = (rank["refused"][f"{name} {who}"] for who in ("[1]", "[2, 3]"))
            assert ("ranks 0 and 1 of the context group" if number < 2 else "stages 0 and 1 of the pipeline") in odd
            assert "stages 0 and 1 of the pipeline plan different layouts of the same rows" in stage


def actions(schedule: str, pp: int, count: int, rank: int) -> list[Action]:
    """What ``rank`` of a pipeline does, in order."""
    if schedule == "gpipe":
        return [(rank, kind, i) for kind in "FB" for i in range(count)]
    if schedule == "1f1b":
        ahead = min(count, pp - rank)
        found = [(rank, "F", i) for i in range(ahead)]
        for i in range(count):
            found.append((rank, "B", i))
            if ahead + i < count:
                found.append((rank, "F", ahead + i))
        return found
    parts = SimpleNamespace(pp_group_size=pp, n_local_stages=2, _n_microbatches=count, num_stages=2 * pp)
    if schedule == "interleaved":
        parts.number_of_rounds = max(1, count // pp)
        parts.microbatches_per_round = count // parts.number_of_rounds
        made = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(parts, rank)
    else:
        made = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(parts, rank)
    found = [re.fullmatch(r"(\d+)([FBIW])(\d+)", str(a)) for a in made if a is not None]
    assert all(found)
    return [(int(m[1]), m[2].replace("I", "B"), int(m[3])) for m in found]  # I: what goes back to the stage before


def comes_to_the_end(schedule: str, pp: int, counts: list[int], shared: list[list[range]]) -> bool:
    """Whether ``len(counts)`` columns do all their actions. ``shared[i]``: columns that meet in micro-batch i."""
    columns, last = len(counts), pp * SCHEDULES[schedule] - 1
    lists = {(r, c): actions(schedule, pp, counts[c], r) for r in range(pp) for c in range(columns)}
    at = dict.fromkeys(lists, 0)
    done: set[tuple[int, Action]] = set()

    def next_of(r: int, c: int) -> Action | None:
        return lists[r, c][at[r, c]] if at[r, c] < len(lists[r, c]) else None

    def may(c: int, action: Action) -> bool:
        stage, kind, i = action
        if kind == "F":
            return stage == 0 or (c, (stage - 1, "F", i)) in done
        return kind == "W" or stage == last or (c, (stage + 1, "B", i)) in done

    moved = True
    while moved:
        moved = False
        for r, c in lists:
            action = next_of(r, c)
            if action is None:
                continue
            groups = shared[action[2]] if action[1] != "W" else []
            together = next((list(g) for g in groups if c in g), [c])
            if all(next_of(r, d) == action and may(d, action) for d in together):
                for d in together:
                    at[r, d] += 1
                    done.add((d, action))
                moved = True
    return all(at[key] == len(made) for key, made in lists.items())


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.sampled_from(list(SCHEDULES)),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_columns_come_to_the_end(lengths, schedule, pp, columns):
    """Plans of ByteScale and FlexSP over random documents, as many micro-batches as the schedule takes."""
    section = PipelineSection(schedule=schedule, stages_per_rank=SCHEDULES[schedule])
    plan = make_plan(lengths, columns, 60 // columns, balance="pp", stages=pp, one_shape=True)
    flexible = FlexSPPlanner(columns, 60 // columns, method="layouts").plan(lengths)
    for shared in (
        [[m.span for m in plan.micro_batches if m.step == s] for s in range(plan.steps)],
        [[range(g.first, g.first + g.degree) for g in m.groups] for m in flexible.micro_batches],
    ):
        count = legal_micro_batches(section, pp, len(shared))
        check_micro_batches(section, pp, count)
        assert count - len(shared) < 2 * pp  # at most a round more
        shared += [[]] * (count - len(shared))
        assert comes_to_the_end(schedule, pp, [count] * columns, shared)


def test_unequal_numbers_of_micro_batches_do_not_come_to_the_end():
    """So the play can find what cannot go on: why all columns have as many."""
    everyone = [[range(2)]] * 4
    assert comes_to_the_end("interleaved", 2, [4, 4], everyone)
    assert not comes_to_the_end("interleaved", 2, [4, 3], everyone)
    assert not comes_to_the_end("gpipe", 2, [2, 1], everyone)  # waits for one that never comes


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.sampled_from([2, 4]),
    st.integers(2, 4),
)
@settings(max_examples=40, deadline=None)
def test_all_columns_do_all_steps(lengths, columns, pp):
    """Every document once, one micro-batch a column and step, none above the largest share."""
    capacity = math.ceil(60 / columns)
    plan = make_plan(lengths, columns, capacity, balance="pp", stages=pp, one_shape=True)
    assert sorted(k for m in plan.micro_batches for k in m.sequences) == list(range(len(lengths)))
    for column in range(columns):
        assert [m.step for m in plan.of(column)] == list(range(plan.steps))
    assert largest_share(plan) <= capacity + 1  # of a document that is cut, one rank has a token more
    for m in plan.micro_batches:
        pairs = sum(Cost().a * plan.lengths[k] ** 2 for k in m.sequences) / m.ranks
        assert m.seconds == pytest.approx(Cost().b * capacity + pairs)


def test_waiting_counts_when_buckets_are_chosen():
    """Never later than without, and on a long tail earlier: fewer steps, less waiting for a column's dear ones."""
    g = np.random.default_rng(0)
    cost = Cost(a=5.128e-9, b=1.8396e-4, c=0.62936)
    for sigma, longest, stages in ((1.4, 65536, 2), (1.4, 65536, 8), (1.0, 32768, 4)):
        lengths = [longest, *(int(np.clip(x, 16, longest)) for x in g.lognormal(8.0, sigma, 300))]
        dp = make_plan(lengths, 16, 8192, cost=cost).at_one_shape(8192, cost)
        pp = make_plan(lengths, 16, 8192, cost=cost, balance="pp", stages=stages, one_shape=True)
        assert pp.seconds(stages) <= dp.seconds(stages)
    lengths = [65536, *(int(np.clip(x, 16, 65536)) for x in np.random.default_rng(0).lognormal(8.0, 1.4, 511))]
    dp = make_plan(lengths, 32, 8192, cost=cost).at_one_shape(8192, cost)
    pp = make_plan(lengths, 32, 8192, cost=cost, balance="pp", stages=4, one_shape=True)
    assert pp.seconds(4) < dp.seconds(4) and pp.steps < dp.steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_of_a_column_cost_as_their_bucket_says(seed, count):
    """PP-balance: lengths of buckets do not mix, and no micro-batch of a column is out of its bucket's bounds."""
    lengths = [int(np.clip(x, 16, 8192)) for x in np.random.default_rng(seed).lognormal(7.0, 1.4, 600)]
    cost, capacity, columns = Cost(a=1e-6, b=1e-4, c=0.01), 2048, 16
    needed = [-(-n // capacity) for n in lengths]
    plan = in_buckets(lengths, needed, columns, capacity, cost, count)
    last = math.inf
    for pool in range(count):
        span = range(columns * pool // count, columns * (pool + 1) // count)
        mine = [m for m in plan.micro_batches if m.first in span]
        assert all(m.first + m.ranks <= span.stop for m in mine)
        held = [lengths[k] for m in mine for k in m.sequences]
        low, high = min(held), max(held)
        assert high <= last  # the next bucket begins where this one ends
        last = low
        for m in mine:
            assert m.seconds <= (cost.a * high + cost.b) * capacity + cost.c + 1e-9
            if m.ranks > 1:
                assert m.seconds >= (cost.a * low + cost.b) * capacity / 2 + cost.c
        whole = sum(cost(n) for n in lengths) / count
        assert sum(cost(n) for n in held) == pytest.approx(whole, abs=cost(max(lengths)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_of_micro_batches(schedule):
    section = PipelineSection(schedule=schedule, stages_per_rank=SCHEDULES[schedule])
    for pp in (2, 3, 4, 8):
        for count in range(20):
            legal = legal_micro_batches(section, pp, count)
            check_micro_batches(section, pp, legal)
            assert legal >= max(1, count)
    assert legal_micro_batches(PipelineSection(), 4, 2) == 4
    assert legal_micro_batches(PipelineSection(schedule="gpipe"), 4, 2) == 2
    assert legal_micro_batches(PipelineSection(schedule="interleaved", stages_per_rank=2), 2, 5) == 6


@pytest.fixture
def refused(recipe):
    """The refusal of a recipe on 8 ranks, or none."""

    def of(context, **settings):
        parallel = {"pp": 2, "cp": 2, "dp_shard": 2, "context": context}
        try:
            check(RunConfig.load(recipe(**{"model.n_kv_heads": 2, "parallel": parallel, **settings})), 8)
        except ConfigError as error:
            return str(error)
        return None

    return of


def test_recipes(refused):
    for name in ("bytescale", "flexsp", "flashcp"):
        assert refused(name) is None
    # Documents decide how many micro-batches there are, so rows do not have to.
    assert refused("bytescale", **{"train.micro_batch_size": 8}) is None
    assert "1f1b needs at least one" in refused("flashcp", **{"train.micro_batch_size": 8})
    offload = {"gb_per_s": 1.0, "bytes_per_token": 1000.0, "layers": 2}
    found = refused({"name": "bytescale", "capacity": 32, "offload": offload})
    assert "parallel.context.offload: does not go with pipelines" in found
    exits = {"transforms": [{"name": "early_exit", "after": [1]}], "train.global_batch_tokens": 1024}
    filled = {**exits, "parallel.pipeline": {"fill_warmup": 1}, "train.micro_batch_size": 2}
    assert refused("bytescale", **exits) is None
    assert "which of them fill bubbles is settled before" in refused("bytescale", **filled)
    assert "fill bubbles is settled" not in (refused("flashcp", **filled) or "")
