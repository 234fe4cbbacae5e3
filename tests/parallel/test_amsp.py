"""AMSP: every chain of sharding factors against one process, its planner against brute force, its recipe."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from trainwright import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.parallel.amsp.chain import Chain, chains
from trainwright.parallel.amsp.groups import members
from trainwright.parallel.amsp.layout import Layout
from trainwright.planning.amsp import Hop, NothingFits, Problem, cost, plan, state_bytes, terms
from trainwright.train.degrees import check
from trainwright.train.sharding import settled_sharding

WORKER = Path(__file__).parent / "amsp_worker.py"
spec = importlib.util.spec_from_file_location("amsp_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
sys.modules["amsp_worker"] = worker
spec.loader.exec_module(worker)

pytestmark = pytest.mark.timeout(900)  # a start of all parts takes minutes on a busy machine
GIB = 2**30
BIG = 7e9


def launch(root, part):
    """Results by rank."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(r), part],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(4)
    ]
    try:
        logs = [p.communicate(timeout=800)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert all(p.returncode == 0 for p in ranks), "\n".join(logs)[-6000:]
    return [torch.load(root / f"{part}-{r}", weights_only=False) for r in range(4)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """``launched[world]``: results of all parts, by rank."""
    found = launch(tmp_path_factory.mktemp("amsp"), "engine")
    return {world: found[:world] for world in (2, 4)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, and by rank what was wrong with the checkpoints."""
    root = tmp_path_factory.mktemp("amsp_checkpoints")
    worker.write_text(root)
    return root, launch(root, "checkpoints")


# -- chains and layout ------------------------------------------------------------------------------------------------


def test_chains_are_counted():
    assert len(chains(8)) == 20 and len(chains(1024)) == 286 and chains(1) == [Chain()]
    for found in (chains(12), chains(8)):
        n = max(c.states for c in found)
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        every = {
            Chain(p, g, o)
            for p, g, o in itertools.product(divisors, repeat=3)
            if g % p == 0 and o % g == 0
        }  # fmt: skip
        assert set(found) == every and len(found) == len(every)


def test_named_points():
    assert Chain(1, 1, 1).name(8) == "DDP" and Chain(1, 1, 8).name(8) == "ZeRO-1"
    assert Chain(1, 8, 8).name(8) == "ZeRO-2" and Chain(8, 8, 8).name(8) == "ZeRO-3"
    assert Chain(4, 4, 4).name(8) == "MiCS, HSDP" and Chain(1, 2, 4).name(8) == ""


@pytest.mark.parametrize(
    "chain, ranks, said",
    [
        (Chain(2, 3, 6), 6, "parameters=2: does not divide gradients=3"),
        (Chain(4, 2, 4), 4, "parameters=4: does not divide gradients=2"),
        (Chain(1, 4, 2), 4, "gradients=4: does not divide states=2"),
        (Chain(1, 1, 3), 4, "states=3: does not divide the number of processes, 4; use one of 1, 2, 4"),
        (Chain(1, 1, 8), 4, "states=8"),
        (Chain(0, 1, 1), 4, "parameters=0: should be at least 1"),
    ],
)
def test_chains_that_cannot_be(chain, ranks, said):
    with pytest.raises(ValueError, match=said):
        chain.check(ranks)


@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_groups_are_neighbours_and_hold_every_rank_once(ranks):
    for chain in chains(ranks):
        found = members(chain, ranks)
        for lists in found.values():
            assert sorted(r for group in lists for r in group) == list(range(ranks))
        for name, size in (("gather", chain.parameters), ("scatter", chain.gradients)):
            for group in found.get(name, []):
                assert group == list(range(group[0], group[0] + size)) and group[0] % size == 0


@pytest.mark.parametrize("shapes", [[(5, 3), (1,), (8,)], [(2, 2, 2)]])
def test_shards_are_nested(shapes):
    """What a rank gathers, sends and steps are the same rows, for every chain of 8."""
    shapes = [torch.Size(s) for s in shapes]
    for chain in chains(8):
        layout = Layout(shapes, chain.states, 4)
        p, o = chain.parameters, chain.states
        values = [torch.arange(float(s.numel())).view(s) + 100 * i + 1 for i, s in enumerate(shapes)]
        sent = layout.send_form(values, p, torch.empty(p, o // p, layout.chunk))
        whole = torch.zeros(layout.whole)
        layout.fill_whole(whole, sent)
        assert all(torch.equal(v, got) for v, got in zip(values, layout.parameters(whole), strict=True))
        scattered = layout.send_form(
            values, chain.gradients, torch.empty(chain.gradients, o // chain.gradients, layout.chunk)
        )
        for rank in range(8):
            mine = scattered[rank % chain.gradients][rank % o // chain.gradients]
            assert torch.equal(mine, sent[rank % p][rank % o // p])
            for i, piece in enumerate(layout.pieces(mine)):
                shape = layout.local_shape(i, rank % o)
                start = rank % o * layout.rows[i]
                want = values[i][start : start + shape[0]] if o > 1 else values[i]
                assert torch.equal(piece[: shape.numel()].view(shape), want)


# -- the planner ------------------------------------------------------------------------------------------------------


def test_bytes_of_the_card():
    problem = Problem(BIG, ranks=64)
    assert state_bytes(problem, Chain(1, 1, 8)) / GIB == pytest.approx(35.86, abs=0.005)
    assert state_bytes(problem, Chain(8, 8, 64)) / GIB == pytest.approx(4.48, abs=0.005)


def test_bytes_that_leave_a_node():
    problem = Problem(BIG, ranks=1024, micro_steps=4)
    mics, zero3 = cost(problem, Chain(8, 8, 8)), cost(problem, Chain(1024, 1024, 1024))
    assert mics.leaving == pytest.approx(4 * BIG * 127 / 128)
    assert zero3.leaving == pytest.approx(24 * BIG * 1023 / 1024)
    assert mics.leaving / zero3.leaving == pytest.approx(0.166, abs=0.0005)
    once = Problem(BIG, ranks=1024, micro_steps=1)
    ratio = cost(once, Chain(8, 8, 8)).leaving / cost(once, Chain(1024, 1024, 1024)).leaving
    assert ratio == pytest.approx(2 / 3, abs=0.005)


def test_the_plan_avoids_zero_3():
    """The card's case: nodes of 8, 150 and 25 GB/s, 7B on 1024 ranks, 4 micro-steps."""
    for memory in (80, 40, 24, 12, 8, 5):
        problem = Problem(BIG, ranks=1024, micro_steps=4, memory=memory * GIB)
        found, zero3 = plan(problem), cost(problem, Chain(1024, 1024, 1024))
        assert found.bytes <= problem.memory
        assert found.chain.parameters <= 8 and found.exposed_s < zero3.exposed_s / 4


def by_hand(problem: Problem, chain: Chain) -> tuple[float, float]:
    """Bytes held and seconds of all transfers by the card's formulas, group by group from the ranks themselves."""
    f, (p, g, o), n = problem.parameters, (chain.parameters, chain.gradients, chain.states), problem.ranks
    size = {
        "gather": 2 * (p - 1) / p * f * 2 * problem.micro_steps,
        "scatter": 2 * (g - 1) / g * f * problem.micro_steps,
        "towards": 2 * f / g * (o // g - 1) / (o // g),
        "replicas": 4 * f / o * (n // o - 1) / (n // o),
        "publish": 2 * f / p * (o // p - 1) / (o // p),
    }
    rounds = {"gather": 2 * problem.micro_steps, "scatter": problem.micro_steps, "replicas": 2}
    seconds = 0.0
    for name, lists in members(chain, n).items():
        crosses = any(len({r // problem.ranks_per_node for r in group}) > 1 for group in lists)
        hop = problem.between if crosses else problem.inside
        seconds += size[name] / hop.bytes_per_s
        seconds += rounds.get(name, 1) * (len(lists[0]) - 1) * problem.layers * hop.latency_s
    return f * (2 / p + 2 / g + 12 / o), seconds


def test_the_plan_is_the_brute_force_minimum():
    random.seed(0)
    for _ in range(40):
        ranks = random.choice([4, 6, 8, 12, 16, 64])
        problem = Problem(
            random.uniform(1e8, 1e10),
            ranks,
            ranks_per_node=random.choice([2, 4, 8]),
            inside=Hop(random.uniform(50e9, 300e9), random.choice([0, 3e-6])),
            between=Hop(random.uniform(5e9, 50e9), random.choice([0, 2e-5])),
            micro_steps=random.choice([1, 2, 7]),
            layers=random.choice([1, 33]),
        )
        divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
        every = {
            Chain(p, g, o): by_hand(problem, Chain(p, g, o))
            for p, g, o in itertools.product(divisors, repeat=3)
            if g % p == 0 and o % g == 0
        }
        for chain, (held, seconds) in every.items():
            found = cost(problem, chain)
            assert found.bytes == pytest.approx(held) and found.seconds == pytest.approx(seconds)
            assert found.exposed_s == pytest.approx(seconds)  # nothing is computed that could hide it
        memory = random.choice(sorted(held for held, _ in every.values()))
        limited = Problem(**{**vars(problem), "memory": memory * (1 + 1e-9)})
        fits = [(float(f"{s:.9g}"), held, chain) for chain, (held, s) in every.items() if held <= memory * (1 + 1e-9)]
        assert plan(limited).chain == min(fits)[2]


def test_what_computing_hides_is_a_tie_and_memory_decides():
    problem = Problem(1e9, 8, compute_s=100.0)
    assert cost(problem, Chain(1, 1, 8)).exposed_s == 0 and plan(problem).chain == Chain(8, 8, 8)
    half = Problem(1e9, 8, micro_steps=3, compute_s=0.02)
    for chain in chains(8):
        found, alone = cost(half, chain), cost(Problem(1e9, 8, micro_steps=3), chain)
        assert 0 <= alone.exposed_s - found.exposed_s <= 3 * half.compute_s + 1e-12


def test_nothing_fits():
    with pytest.raises(
        NothingFits, match=r"closest one, \(8, 8, 8\), needs 13.04 GiB a rank, 3.04 GiB too many"
    ) as caught:
        plan(Problem(BIG, 8, memory=10 * GIB))
    assert caught.value.closest.chain == Chain(8, 8, 8)
    assert caught.value.shortfall == pytest.approx(16 * BIG / 8 - 10 * GIB)


def test_terms_add_up_to_the_ring_bytes():
    """DDP's all-reduce is 2 (N-1)/N; ZeRO-1's halves, one each way, come to the same."""
    problem = Problem(1.0, 16, parameter_size=1, gradient_size=1)
    ddp = sum(t.bytes for t in terms(problem, Chain()))
    assert ddp == pytest.approx(2 * 15 / 16)
    for chain in (Chain(1, 1, 16), Chain(1, 16, 16), Chain(1, 1, 4)):
        assert sum(t.bytes * t.times for t in terms(problem, chain)) == pytest.approx(ddp)


# -- the recipe -------------------------------------------------------------------------------------------------------


def recipe(sharding, parallel=None, **train):
    return RunConfig.load(
        {
            "model": {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2},
            "tokenizer": {"name": "bytes"},
            "precision": {"name": "fp32"},
            "parallel": {"sharding": sharding, **(parallel or {})},
            "train": {"steps": 1, "seq_len": 16, "global_batch_tokens": 512, "micro_batch_size": 2, **train},
            "run": {"device": "cpu"},
        }
    )


FACTORS = {"name": "amsp", "parameters": 1, "gradients": 2, "states": 4}


@pytest.mark.parametrize(
    "sharding, parallel, said",
    [
        ({**FACTORS, "parameters": 4}, {}, "parallel.sharding.parameters=4: does not divide gradients=2"),
        ({**FACTORS, "states": 6}, {}, "parallel.sharding.states=6: does not divide the number of processes, 4"),
        ({"name": "amsp", "states": 4}, {}, "parallel.sharding: has no parameters, gradients; give all three"),
        (FACTORS, {"dp_shard": 2}, "parallel.dp_shard=2: does not go with sharding"),
        (FACTORS, {"tp": 2}, "parallel.tp=2: does not go with sharding"),
        (FACTORS, {"pp": 2}, "parallel.pp=2: does not go with sharding"),
        (FACTORS, {"accumulate": "whole"}, "parallel.accumulate='whole': is for FSDP2"),
        (
            {**FACTORS, "accumulation_buffer": False},
            {},
            "parallel.sharding.accumulation_buffer=False: leaves no place where 4 micro-batches",
        ),
    ],
)
def test_bad_recipes_are_refused_before_a_process_group(sharding, parallel, said):
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError) as caught:
        check(recipe(sharding, parallel), 4)
    assert str(caught.value).startswith(said)


def test_recipes_that_are_right():
    assert check(recipe(FACTORS), 4).dp_replicate == 4
    assert check(recipe(FACTORS, {"cp": 2}), 4).cp == 2
    check(recipe({**FACTORS, "accumulation_buffer": False}, micro_batch_size=8), 4)
    check(recipe({**FACTORS, "accumulation_buffer": False, "gradients": 1}), 4)
    check(recipe("amsp"), 1)


def test_a_plan_for_a_recipe(tmp_path):
    """Room for all: DDP; little: what fits; none: the closest, and what it lacks. Measured bandwidth counts."""
    roomy = settled_sharding(recipe("amsp"), 4).parallel.sharding
    assert roomy.auto and roomy.chain.states >= 1
    again = settled_sharding(recipe(roomy.model_dump()), 2).parallel.sharding
    assert again.chain.fault(2) is None  # planned anew on other ranks
    with pytest.raises(ConfigError, match=r"parallel.sharding='amsp': no chain .* the closest one, .* too many"):
        settled_sharding(recipe("amsp", {"device_memory": 1e-4}), 4)
    slow = {"name": "amsp", "inside_gb_per_s": 1e-3, "between_gb_per_s": 1e-3}
    assert settled_sharding(recipe(slow), 4).parallel.sharding.parameters == 1
    machines = tmp_path / "cluster.yaml"
    machines.write_text(yaml.safe_dump({"ranks_per_node": 2, "memory_gb": 1e-6}))
    with pytest.raises(ConfigError, match="too many"):
        settled_sharding(recipe({"name": "amsp", "cluster": str(machines)}), 4)


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_every_chain_trains_as_one_process(launched, world):
    """Five AdamW steps of three ragged micro-batches with clipping: weights and norms, whatever the chain."""
    want = worker.reference(world)
    for result in launched[world]:
        found = result[f"chains {world}"]
        assert set(found) == set(chains(world))
        for chain, got in found.items():
            torch.testing.assert_close(got["norms"], want["norms"], rtol=1e-12, atol=0, msg=str(chain))
            assert got["weights"].keys() == want["weights"].keys()
            for name, weight in got["weights"].items():
                torch.testing.assert_close(weight, want["weights"][name], rtol=0, atol=1e-12, msg=f"{chain} {name}")


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_what_the_formula_says(launched, world):
    """In float64: parameters 8 F / s_p, gradients 8 F / s_g, moments 16 F / s_o, F padded up to rows of s_o ranks."""
    model = worker.build()
    numbers = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for result in launched[world]:
        for chain, got in result[f"chains {world}"].items():
            chunk, grad_chunk = got["padding"]
            rows = sum(1 for _ in model.parameters()) * chain.states * 2 * worker.DIM
            assert numbers <= chunk * chain.states <= numbers + rows
            assert trained <= grad_chunk * chain.states <= trained + rows
            aligned = 16 * len(list(model.parameters())) if chain.parameters == 1 else 0
            held = got["nbytes"]
            want = 8 * chunk * chain.states / chain.parameters
            assert want <= held["parameters"] <= want + aligned
            assert held["gradients"] == 8 * grad_chunk * chain.states / chain.gradients
            assert held["states"] <= 16 * grad_chunk
            assert got["left_whole"] == 0
    for chain in chains(world):
        total = sum(r[f"chains {world}"][chain]["nbytes"]["states"] for r in launched[world])
        assert total == 16 * trained * world / chain.states
    # A rank of the first row holds full chunks.
    for chain, got in launched[world][0][f"chains {world}"].items():
        assert got["nbytes"]["states"] == 16 * got["padding"][1], chain


@pytest.mark.parametrize("world", [2, 4])
def test_ragged_work_cannot_lock(launched, world):
    """Every member of a group makes the same collectives of the same sizes in the same order; two layers at most are
    whole."""
    for chain in chains(world):
        for calls in worker.sequences([r[f"chains {world}"] for r in launched[world]], chain):
            assert all(c == calls[0] for c in calls), chain
        if chain.parameters > 1:
            assert max(r[f"chains {world}"][chain]["most"] for r in launched[world]) <= 2


def test_recomputation(launched):
    want = worker.reference(4)
    for result in launched[4]:
        for name, weight in result["others"]["recompute"]["weights"].items():
            torch.testing.assert_close(weight, want["weights"][name], rtol=0, atol=1e-12)


def test_matrix_optimizers_step_whole_matrices(launched):
    want = worker.reference(4, "muon")
    for result in launched[4]:
        for name, weight in result["others"]["muon"]["weights"].items():
            torch.testing.assert_close(weight, want["weights"][name], rtol=0, atol=1e-6, msg=name)


def test_forward_passes(launched):
    for result in launched[4]:
        other = result["others"]
        assert other["two_forwards"] < 1e-12
        assert max(other["changed"]) < 1e-12 and max(other["from_meta"]) == 0
        assert other["unused"]["one"][0] < 1e-12 and not other["unused"]["one"][1]
        assert other["unused"]["none"][0] < 1e-12 and other["unused"]["none"][1]
        assert other["unused"]["refused"].startswith("parallel.find_unused_parameters=False: the step gave no gradient")
        assert "extra" in other["unused"]["refused"]


def test_refused(launched):
    said = launched[4][0]["others"]["refused"]
    assert said["without a buffer"] < 1e-12
    assert "need an accumulation buffer where they are sharded over 2 ranks" in said["buffer"]
    assert "the norm is that of all shards" in said["clip"]
    assert said["chain"].startswith("parameters=2: does not divide gradients=3")
    assert "different dtypes (float32, float64)" in said["dtypes"]


def test_sixteen_bit_bytes(launched):
    """2 F / s_p + 2 F / s_g + 12 F / s_o to the byte, and near to float32's weights."""
    for result in launched[4]:
        got = result["others"]["mixed"]
        chain = Chain(2, 2, 4)
        padded = got["chunk"] * chain.states
        assert got["nbytes"]["parameters"] == 2 * padded / chain.parameters
        assert got["nbytes"]["gradients"] == 2 * padded / chain.gradients
        assert got["nbytes"]["states"] <= 12 * padded / chain.states
        assert got["dtypes"] == {"torch.float32"} and got["far"] < 0.05
    first = launched[4][0]["others"]["mixed"]
    assert first["nbytes"]["states"] == 12 * first["chunk"]
    assert math.isclose(sum(first["nbytes"].values()), first["chunk"] * 4 * (2 / 2 + 2 / 2 + 12 / 4))


# -- through the trainer ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_move_between_chains(saved):
    """Weights and states to the bit: to other chains and FSDP2, from FSDP2, and to one process."""
    root, ranks = saved
    for found in ranks:
        assert found and all(wrong == [] for wrong in found.values()), found
    for name, (optimizer, _, _) in worker.CHECKPOINTS.items():
        assert worker.resharding().load(root, optimizer, name, {}) == []


@pytest.mark.slow
def test_a_recipe_trains_as_one_process(saved):
    root, resharding = saved[0], worker.resharding()
    resharding.save(root, "adamw", "one", {})
    one, amsp = (resharding.stored(resharding.checkpoint(root, "adamw", name)) for name in ("one", "amsp"))
    assert one.keys() == amsp.keys()
    for name, value in one.items():
        torch.testing.assert_close(amsp[name].double(), value.double(), rtol=1e-3, atol=2e-4, msg=name)
