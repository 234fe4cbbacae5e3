"""Weight averages."""

import json

import pytest
import torch
from optimizer_zoo import Zoo, named
from shards_worker import average_config

from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build, methods

METHODS = [m.name for m in methods("average")]
every = pytest.mark.parametrize("name", METHODS)


def walk(model, step):
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g).to(p.dtype) * 0.1)


def run(model, average, first, last):
    for step in range(first, last + 1):
        walk(model, step)
        average.update(step)


def averaged(model, average):
    with average.swapped():
        return {n: p.detach().clone() for n, p in model.named_parameters()}


@every
def test_swapping_restores_bitwise(name):
    for dtype in (torch.float32, torch.bfloat16):
        model = Zoo(dtype=dtype)
        average = average_config(name).build(named(model))
        run(model, average, 1, 20)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        inside = averaged(model, average)
        assert any(not torch.equal(inside[n], before[n]) for n in before)
        with pytest.raises(RuntimeError, match="stop"), average.swapped():
            raise RuntimeError("stop")
        assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in model.named_parameters())


@every
def test_state_round_trip(name):
    model, straight = Zoo(), Zoo()
    reference = average_config(name).build(named(straight))
    run(straight, reference, 1, 10)
    average = average_config(name).build(named(model))
    run(model, average, 1, 5)
    state = average.state_dict()
    scalars = json.loads(json.dumps(state["scalars"]))
    tensors = {n: {k: t.clone() for k, t in e.items()} for n, e in state["tensors"].items()}
    run(model, average, 6, 7)  # moves on; the load takes it back
    restored = Zoo()
    run(restored, average_config(name).build(named(restored)), 1, 5)
    fresh = average_config(name).build(list(reversed(named(restored))))
    fresh.load_state_dict({"tensors": tensors, "scalars": scalars})
    run(restored, fresh, 6, 10)
    a, b = averaged(straight, reference), averaged(restored, fresh)
    assert all(torch.equal(a[n], b[n]) for n in a)


@every
def test_other_parameters_are_refused_by_name(name):
    model = Zoo()
    state = average_config(name).build(named(model)).state_dict()
    other = average_config(name).build([*named(model)[1:], NamedParam("new", named(model)[0].param, "matrix")])
    with pytest.raises(CheckpointError, match="new"):
        other.load_state_dict(state)


@pytest.mark.parametrize("warmup", [False, True])
def test_ema_is_the_equation(warmup):
    model = Zoo()
    average = build("average", {"name": "ema", "decay": 0.9, "every": 2, "warmup": warmup}).build(named(model))
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    updates = 0
    for step in range(1, 41):
        walk(model, step)
        average.update(step)
        if step % 2 == 0:
            d = min(0.9, (1 + updates) / (10 + updates)) if warmup else 0.9
            updates += 1
            for n, p in model.named_parameters():
                expected[n] = d * expected[n] + (1 - d) * p.detach().double()
    for n, p in averaged(model, average).items():
        torch.testing.assert_close(p.double(), expected[n], atol=1e-6, rtol=1e-5)


def test_ema_starts_from_the_weights_at_start():
    model = Zoo()
    average = build("average", {"name": "ema", "decay": 0.9, "start": 5, "warmup": False}).build(named(model))
    run(model, average, 1, 4)
    # nothing averaged yet: inside are the live weights, not those of the initialisation
    assert all(torch.equal(t, dict(model.named_parameters())[n]) for n, t in averaged(model, average).items())
    run(model, average, 5, 5)
    assert all(torch.equal(t, dict(model.named_parameters())[n]) for n, t in averaged(model, average).items())


def test_ema_of_bf16_weights_is_kept_in_float32():
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    average = build("average", {"name": "ema", "decay": 0.999, "warmup": False}).build([NamedParam("p", p, "norm")])
    with torch.no_grad():
        p.fill_(2.0)
    for step in range(1, 501):
        average.update(step)
    value = average.state_dict()["tensors"]["p"]["average"]
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(2 - 0.999**500, rel=1e-4)


@pytest.mark.parametrize("settings", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"start": -1}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ConfigError):
        build("average", {"name": "ema", **settings})
