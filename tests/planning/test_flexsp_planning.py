"""FlexSP's planner: the card's numbers, dynamic programs and the mixed-integer program against brute force."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from trainwright.planning import flexsp
from trainwright.planning.flexsp import (
    CostModel,
    FlexSPPlanner,
    greedy,
    layouts,
    powers_of_two,
    static_plan,
    token_cap,
)
from trainwright.planning.flexsp_ahead import PlanAhead
from trainwright.planning.flexsp_cuts import blast, bucket_bounds, rounded

K = 1024
FREE = CostModel(1e-4, 0.1, 1.0, 1, 64, bandwidth={2: 0.01, 4: 0.01, 8: 0.002, 16: 0.001})


def check(planner, plan, lengths):
    """Every sequence once, every rank in one group, nobody above the cap, times as the cost model says."""
    placed = [i for m in plan.micro_batches for g in m.groups for i in g.sequences]
    assert sorted(placed) == list(range(len(lengths)))
    for micro in plan.micro_batches:
        ranks = [r for g in micro.groups for r in range(g.first, g.first + g.degree)]
        assert ranks == list(range(planner.ranks))
        for g in micro.groups:
            assert g.first % g.degree == 0
            assert sum(lengths[i] for i in g.sequences) <= planner.cap * g.degree
        slowest = max(planner.cost.group([lengths[i] for i in g.sequences], g.degree) for g in micro.groups)
        assert micro.time == pytest.approx(slowest, rel=1e-12)


def test_cap_and_layouts_of_the_card():
    assert token_cap(80, 7, 16) == 15870
    assert len(list(layouts(16, powers_of_two(16)))) == 36
    assert len(list(layouts(32, powers_of_two(32)))) == 202
    assert all(sum(x) == 16 and list(x) == sorted(x, reverse=True) for x in layouts(16, powers_of_two(16)))


def test_cost_by_hand():
    """A 7B model's 4,096 tokens over two ranks: 8 x 32 x 4096 x 4096 x 2 / 2 bytes at 154 GB/s."""
    cost = CostModel()
    compute = (5.128e-6 * 4096**2 + 0.18396 * 4096) / 2
    sent = 8 * 32 * 4096 * 4096 * 2 / 2 / 154e9 * 1e3
    assert cost.sequence(4096, 2) == pytest.approx(compute + sent)
    assert cost.sequence(4096, 1) == pytest.approx(2 * compute)
    assert cost.group([4096, 4096], 2) == pytest.approx(2 * (compute + sent) + 629.36)
    assert cost.group([], 2) == 0


@pytest.mark.parametrize("seed", range(6))
def test_blaster_equals_brute_force(seed):
    r = random.Random(seed)
    n = r.randint(2, 9)
    lengths = [r.randint(1, 40) for _ in range(n)]
    ordered = sorted(lengths, reverse=True)
    for parts in range(1, n + 1):
        found = blast(lengths, parts)
        assert len(found) == parts and sorted(i for p in found for i in p) == list(range(n))
        assert [lengths[i] for p in found for i in p] == ordered
        best = min(
            max(sum(ordered[a:b]) for a, b in itertools.pairwise((0, *cut, n)))
            for cut in itertools.combinations(range(1, n), parts - 1)
        )
        assert max(sum(lengths[i] for i in p) for p in found) == best


@pytest.mark.parametrize("seed", range(6))
def test_bucketing_equals_brute_force(seed):
    r = random.Random(seed)
    n = r.randint(2, 9)
    lengths = [r.randint(1, 40) for _ in range(n)]
    values = sorted(set(lengths))

    def added(bounds):
        return sum(min(b for b in bounds if b >= s) - s for s in lengths)

    for buckets in range(1, n + 1):
        found = bucket_bounds(lengths, buckets)
        assert len(found) <= buckets and found == sorted(found) and found[-1] == values[-1]
        best = min(
            added((*c, values[-1]))
            for k in range(min(buckets, len(values)))
            for c in itertools.combinations(values[:-1], k)
        )
        assert added(found) == best


def test_more_buckets_while_rounding_fills_the_cluster():
    lengths = list(range(101, 141))
    bounds, which = rounded(lengths, 10**6)
    assert len(bounds) == 16 and all(bounds[b] >= s for b, s in zip(which, lengths, strict=True))
    padded = sum(bounds[b] for b in which)
    tight = padded - 10  # less room than 16 buckets take
    bounds, which = rounded(lengths, tight)
    assert len(bounds) > 16
    assert sum(bounds[b] for b in which) <= (sum(lengths) + tight) / 2
    assert rounded([7] * 50, 1)[0] == [7]  # nothing left to round


@pytest.mark.parametrize("seed", range(5))
def test_program_equals_brute_force(seed):
    """All layouts of four ranks, all ways to place up to five sequences; few distinct lengths, so none is rounded."""
    r = random.Random(seed)
    lengths = [r.randint(5, 120) for _ in range(r.randint(2, 5))]
    planner = FlexSPPlanner(4, 40, FREE, gap=0.0, seconds=30)
    best = float("inf")
    for layout in layouts(4, [1, 2, 4]):
        for choice in itertools.product(range(len(layout)), repeat=len(lengths)):
            shares = [[s for s, c in zip(lengths, choice, strict=True) if c == g] for g in range(len(layout))]
            if all(sum(s) <= 40 * d for s, d in zip(shares, layout, strict=True)):
                best = min(best, max(FREE.group(s, d) for s, d in zip(shares, layout, strict=True)))
    found = flexsp._solve(planner, lengths, range(len(lengths)), float("inf"))
    if best == float("inf"):
        assert found is None
    else:
        assert found.time == pytest.approx(best, rel=1e-6)


def test_greedy_of_a_layout_is_never_better_than_all_of_them():
    r = random.Random(1)
    lengths = [r.randint(1, 100) for _ in range(40)]
    planner = FlexSPPlanner(8, 400, FREE, method="layouts")
    best = planner._greedy(lengths, list(range(40)))
    for layout in layouts(8, [1, 2, 4, 8]):
        found = greedy(lengths, layout, 400, FREE)
        assert found is None or found[1] >= best.time * (1 - 1e-9)


@pytest.mark.parametrize("method", ["layouts", "milp"])
def test_random_plans_are_legal(method):
    for seed in range(12 if method == "layouts" else 3):
        r = random.Random(seed)
        lengths = [r.choice([3, 9, 30, 100, 250]) for _ in range(r.randint(1, 30))]
        planner = FlexSPPlanner(8, 32, FREE, method=method, seconds=0.3)
        check(planner, planner.plan(lengths), lengths)
    assert planner.plan([]).micro_batches == ()


@pytest.mark.parametrize("method", ["layouts", "milp"])
@pytest.mark.parametrize("length, count, ranks", [(16 * K, 40, 16), (3 * K, 13, 4), (9 * K, 5, 8), (1000, 7, 4)])
def test_equal_lengths_give_groups_of_one_size(method, length, count, ranks):
    planner = FlexSPPlanner(ranks, 15870, method=method, seconds=0.3)
    plan = planner.plan([length] * count)
    check(planner, plan, [length] * count)
    assert all(len(set(m.layout)) == 1 for m in plan.micro_batches)


@pytest.mark.parametrize("seed", range(3))
def test_speed_up_of_the_card(seed):
    """One of 150K, twenty of 5 to 40K, sixty of 1 to 10K on sixteen ranks: the longest one forces groups of 16 on a
    static mesh. Modelled; enumeration and greedy."""
    r = random.Random(seed)
    lengths = [150 * K] + [r.choice([5, 9, 20, 40]) * K for _ in range(20)] + [r.randint(K, 10 * K) for _ in range(60)]
    planner = FlexSPPlanner(16, token_cap(80, 7, 16), method="layouts")
    with pytest.raises(ValueError, match="is longer than"):
        static_plan(planner, lengths, 8)
    plan, static = planner.plan(lengths), static_plan(planner, lengths, 16)
    check(planner, plan, lengths)
    assert static.time / plan.time >= 1.15


def test_the_longest_may_lie_in_the_smallest_group_that_holds_it():
    planner = FlexSPPlanner(8, 100, FREE, method="layouts")
    plan = planner.plan([200])
    assert plan.micro_batches[0].groups[0].degree >= 2
    assert FlexSPPlanner(1, 100, FREE).plan([50, 60, 100]).micro_batches[0].layout == (1,)


def test_planning_ahead():
    planner = FlexSPPlanner(8, 32, FREE, method="layouts")
    lengths = [3, 9, 30, 100]
    with ThreadPoolExecutor(1) as pool:
        ahead = PlanAhead(planner, pool)
        ahead.submit(lengths)
        ahead.submit([1000])
        assert ahead.result(lengths) == planner.plan(lengths)
        assert ahead.result([5, 6]) == planner.plan([5, 6])  # one that was not announced
        with pytest.raises(ValueError, match="a sequence of 1000 tokens"):
            ahead.result([1000])


def test_planning_ahead_on_a_process_of_its_own():
    planner = FlexSPPlanner(4, 32, FREE, method="layouts")
    ahead = PlanAhead(planner)
    ahead.submit([3, 9, 30])
    assert ahead.result([3, 9, 30]) == planner.plan([3, 9, 30])  # made here where the process is not there yet
    ahead._ready.result(timeout=60)
    assert ahead.result([3, 9, 30]) == planner.plan([3, 9, 30])
    # A process that is gone is planned without, and followed by another.
    for process in ahead._executor._processes.values():
        process.kill()
    ahead.submit([5, 9])
    assert ahead.result([5, 9]) == planner.plan([5, 9])
    ahead.submit([7, 9])
    assert ahead.result([7, 9]) == planner.plan([7, 9])
    ahead.close()


def test_steps_of_equal_lengths_share_a_plan_and_old_ones_go():
    class Counting(FlexSPPlanner):
        made: ClassVar[list] = []

        def plan(self, lengths):
            self.made.append(tuple(lengths))
            return super().plan(lengths)

    planner = Counting(4, 32, FREE, method="layouts")
    with ThreadPoolExecutor(1) as pool:
        ahead = PlanAhead(planner, pool)
        ahead.submit([3, 9])
        for _ in range(3):  # the next step is submitted before this one asks
            ahead.submit([3, 9])
            ahead.result([3, 9])
        assert planner.made == [(3, 9)]
        ahead.submit([4])
        ahead.submit([5])
        ahead.result([3, 9])
        assert planner.made.count((3, 9)) == 2


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FlexSPPlanner(16, 1000).plan([16_001]), "16001 tokens is longer than 16000"),
        (lambda: FlexSPPlanner(12, 1000), "12 ranks are not a power of two; use 8 or 16"),
        (lambda: FlexSPPlanner(8, 1000, heads=12), "degree 8 does not divide the 12 heads; use 1, 2, 4"),
        (lambda: FlexSPPlanner(32, 1000), r"no value for groups of 32 ranks \(only for 2, 4, 8, 16\)"),
        (lambda: token_cap(40, 70, 16), "the states of 70B parameters take 70.0 GB"),
        (lambda: FlexSPPlanner(8, 0), "a cap of 0 tokens"),
        (lambda: FlexSPPlanner(8, 10, degrees=(3,)), "degree 3 is no power of two up to 8"),
        (lambda: FlexSPPlanner(8, 10, method="exact"), "milp or layouts"),
        (lambda: FlexSPPlanner(8, 10).plan([5, 0]), "no tokens"),
        (lambda: blast([1, 2], 3), "2 sequences cannot be cut into 3"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_planning_process_ends_with_a_killed_trainer():
    script = (
        "import os, signal\n"
        "from trainwright.planning.flexsp import FlexSPPlanner\n"
        "from trainwright.planning.flexsp_ahead import PlanAhead\n"
        "if __name__ == '__main__':\n"
        "    ahead = PlanAhead(FlexSPPlanner(4, 32, method='layouts'))\n"
        "    ahead.submit([3, 9])\n"
        "    ahead._ready.result(timeout=60)\n"
        "    print(*ahead._executor._processes, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Ends only when nobody holds its pipe any more.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (pid,) = map(int, done.stdout.split())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.05)
