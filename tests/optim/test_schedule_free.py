"""Schedule-free AdamW against its equations with all three sequences, and the public package."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.base import swapped_for_evaluation
from trainwright.optim.schedule_free import ScheduleFreeAdamW


def draws(shape, steps, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def reference(start, grads, rates, betas, decay, r=0.0, eps=1e-8):
    b1, b2 = betas
    x, y, z, v = start.clone(), start.clone(), start.clone(), torch.zeros_like(start)
    total = top = 0.0
    for t, (g, lr) in enumerate(zip(grads, rates, strict=True), 1):
        v = b2 * v + (1 - b2) * g**2
        d = g / ((v / (1 - b2**t)).sqrt() + eps) + decay * y
        top = max(top, lr)
        total += t**r * top**2
        c = t**r * top**2 / total
        z = z - lr * d
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
    return x, y, z


@pytest.mark.parametrize("r", [0.0, 2.0])
@pytest.mark.parametrize("role, decayed", [("matrix", True), ("norm", False)])
def test_it_is_the_equation(role, decayed, r):
    start, grads = draws((6, 5), 1, seed=1)[0], draws((6, 5), 15)
    rates = [0.01 * min(1, t / 5) for t in range(1, 16)]
    p = nn.Parameter(start.clone())
    config = build("optimizer", {"name": "schedule_free", "weight_decay": 0.2, "betas": [0.8, 0.99], "r": r})
    optimizer = config.build([NamedParam("p", p, role)])
    for g, lr in zip(grads, rates, strict=True):
        p.grad = g.clone()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    x, y, z = reference(start, grads, rates, (0.8, 0.99), 0.2 * decayed, r)
    torch.testing.assert_close(p.data, y, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(optimizer.state[p]["z"], z, atol=1e-12, rtol=1e-10)
    before = p.data.clone()
    with optimizer.swapped():
        torch.testing.assert_close(p.data, x, atol=1e-12, rtol=1e-10)
    assert torch.equal(p.data, before) and (x - y).abs().max() > 1e-3


def test_the_average_is_what_averaging_the_iterates_gives():
    """At a constant rate x is the plain mean of all z after their steps."""
    start, grads = draws((6,), 1, seed=1)[0], draws((6,), 9)
    p = nn.Parameter(start.clone())
    optimizer = ScheduleFreeAdamW([p], lr=0.01)
    iterates = []
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
        iterates.append(optimizer.state[p]["z"].clone())
    with optimizer.swapped():
        torch.testing.assert_close(p.data, torch.stack(iterates).mean(0), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("warmup", [0, 6])
def test_equals_the_package(warmup):
    peer = pytest.importorskip("schedulefree")
    starts = draws((6, 5), 2, torch.float32, seed=2) + draws((5,), 1, torch.float32, seed=3)
    ours, theirs = ([nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    a = ScheduleFreeAdamW(ours, lr=0.01, weight_decay=0.1)
    b = peer.AdamWScheduleFree(theirs, lr=0.01, weight_decay=0.1, warmup_steps=warmup)
    b.train()
    for t in range(20):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = draws(p.shape, 1, torch.float32, seed=100 * t + i)[0]
            q.grad = p.grad.clone()
        a.param_groups[0]["lr"] = 0.01 * min(1, (t + 1) / warmup) if warmup else 0.01
        a.step(), b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    b.eval()
    with a.swapped():
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, atol=2e-6, rtol=1e-5)


def test_evaluation_swaps_it():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = ScheduleFreeAdamW([p], lr=0.1)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    live = p.data.clone()
    with pytest.raises(RuntimeError, match="in evaluation"), swapped_for_evaluation(None, optimizer):
        assert not torch.equal(p.data, live)
        raise RuntimeError("in evaluation")
    assert torch.equal(p.data, live)
    fresh = ScheduleFreeAdamW([nn.Parameter(torch.ones(2))])
    with fresh.swapped():  # nothing stepped yet
        assert fresh.param_groups[0]["params"][0].tolist() == [1, 1]


def test_evaluating_changes_nothing_about_training():
    results = []
    for evaluates in (False, True):
        p = nn.Parameter(torch.ones(4, 4))
        optimizer = ScheduleFreeAdamW([p], lr=0.05)
        for g in draws((4, 4), 8, torch.float32):
            p.grad = g
            optimizer.step()
            if evaluates:
                with optimizer.swapped():
                    pass
        results.append(p.data)
    assert torch.equal(*results)


def test_it_finds_a_minimum_that_a_constant_rate_jitters_about():
    """Noisy gradients of a parabola: x comes nearer to its minimum than the weights of Adam at the same rate."""
    distance = []
    for make in (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0), lambda p: ScheduleFreeAdamW(p, lr=0.05)):
        p = nn.Parameter(torch.full((50,), 2.0))
        optimizer = make([p])
        for noise in draws((50,), 800, torch.float32):
            p.grad = p.data + noise
            optimizer.step()
        with getattr(optimizer, "swapped", torch.no_grad)():
            distance.append(float(p.detach().norm()))
    assert distance[1] < 0.6 * distance[0]


def test_a_rate_of_zero_moves_nothing():
    p = nn.Parameter(torch.ones(4))
    optimizer = ScheduleFreeAdamW([p], lr=0.1, weight_decay=0.1)
    for lr in (0.0, 0.1, 0.1, 0.0):
        before = copy.deepcopy((p.data, optimizer.state[p].get("z")))
        p.grad = torch.ones(4)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        assert torch.equal(p.data, before[0]) == (lr == 0)
        assert before[1] is None or torch.equal(optimizer.state[p]["z"], before[1]) == (lr == 0)


def test_shards(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        (start,) = draws((6, 8), 1, torch.float32, seed=1)
        p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        a, b = ScheduleFreeAdamW([p]), ScheduleFreeAdamW([q])
        for g in draws((6, 8), 4, torch.float32):
            p.grad, q.grad = g.clone(), distribute_tensor(g.clone(), mesh, [Shard(0)])
            a.step(), b.step()
        with a.swapped(), b.swapped():
            assert torch.equal(q.full_tensor(), p)
        assert torch.equal(q.full_tensor(), p)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("settings, says", [({"betas": [0.0, 0.9]}, "the first"), ({"betas": [0.9, 1]}, "the second")])
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "schedule_free", **settings})
    with pytest.raises(ValueError, match=says):
        ScheduleFreeAdamW([nn.Parameter(torch.ones(2))], betas=settings["betas"])


def test_schedules_and_averages_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="schedule: constant"):
        RunConfig.load({"optimizer": "schedule_free"})
    with pytest.raises(ConfigError, match="leave `average` out"):
        RunConfig.load({"optimizer": "schedule_free", "schedule": "constant", "average": "ema"})
    RunConfig.load({"optimizer": "schedule_free", "schedule": "constant"})
