"""Number formats: what computes in which, what stays float32, and how overflows are met."""

import logging
import math

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build, methods
from trainwright.precision import autocast

CPU = torch.device("cpu")
METHODS = [m.name for m in methods("precision")]
every = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """Measured speeds are given: fp32 1, bf16 4, fp16 4 GFLOP/s; ``rates(bf16=...)`` changes them."""
    table = {"fp32": 1e9, "bf16": 4e9, "fp16": 4e9}
    monkeypatch.setattr(autocast, "fast_dtypes", lambda device: dict(table))
    return lambda **new: table.update(new)


def test_there_are_methods():
    assert {"fp32", "bf16", "fp16", "auto"} <= set(METHODS)


@every
def test_weights_and_gradients_stay_float32(name):
    precision = build("precision", name).build(CPU)
    layer = nn.Linear(8, 8)
    with precision.autocast():
        out = layer(torch.randn(4, 8))
    assert out.dtype == precision.compute_dtype
    out.float().sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    assert (precision.fsdp_param_dtype is None) == (precision.compute_dtype == torch.float32)


@every
def test_one_step_trains(name):
    torch.manual_seed(0)
    precision = build("precision", name).build(CPU)
    layer = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    for _ in range(20):
        with precision.autocast():
            loss = ((layer(x).float() - y) ** 2).mean()
        precision.backward(loss)
        precision.unscale(optimizer)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    assert precision.overflows == 0


def moved(weight, optimizer, precision, steps=100):
    start = weight.detach().float().clone()
    for _ in range(steps):
        with precision.autocast():
            weight.sum().backward()  # a constant gradient of 1
        precision.step(optimizer)
        optimizer.zero_grad()
    return float((start - weight.detach().float()).abs().mean())


def test_weights_of_1_move_under_bf16():
    """The update, 6e-4, is smaller than half of bfloat16's last bit at 1.0 (2^-9): in bfloat16 weights it is lost."""
    config = build("optimizer", {"name": "adamw", "lr": 6e-4, "weight_decay": 0.0})
    precision = build("precision", "bf16").build(CPU)
    weight = nn.Parameter(torch.ones(16, 4))
    assert moved(weight, config.build([NamedParam("w", weight, "matrix")]), precision) == pytest.approx(0.060, rel=0.01)


def test_bf16_weights_do_not_move_and_warn(caplog):
    config = build("optimizer", {"name": "adamw", "lr": 6e-4, "weight_decay": 0.0})
    weight = nn.Parameter(torch.ones(16, 4, dtype=torch.bfloat16))
    with caplog.at_level(logging.WARNING, "trainwright"):
        optimizer = config.build([NamedParam("w", weight, "matrix")])
    assert "bfloat16 (w)" in caplog.text and "precision=bf16" in caplog.text
    assert moved(weight, optimizer, build("precision", "fp32").build(CPU)) == 0.0


@pytest.mark.parametrize("bf16, dtype", [(0.0025e9, torch.float32), (1.2e9, torch.float32), (2e9, torch.bfloat16)])
def test_auto_takes_what_is_measured_to_be_fast(rates, bf16, dtype):
    rates(bf16=bf16)
    assert build("precision", "auto").build(CPU).compute_dtype == dtype


def test_slow_bf16_warns(rates, caplog):
    rates(bf16=0.0025e9)
    with caplog.at_level(logging.WARNING, "trainwright"):
        assert build("precision", "bf16").build(CPU).compute_dtype == torch.bfloat16
    assert "2.5 MFLOP/s" in caplog.text or "0.0025 GFLOP/s" in caplog.text
    assert "400 times" in caplog.text and "precision=fp32" in caplog.text


def test_fast_bf16_does_not_warn(caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        build("precision", "bf16").build(CPU)
        build("precision", "auto").build(CPU)
    assert not caplog.records


def test_fp16_without_a_matrix_product_is_refused(rates):
    rates(fp16=0.0)
    with pytest.raises(ConfigError, match="use auto"):
        build("precision", "fp16").build(CPU)


def _fp16(**settings):
    precision = build("precision", {"name": "fp16", **settings}).build(CPU)
    precision.backward(nn.Parameter(torch.ones(())) * 1)  # the scaler makes its scale at the first backward
    weight = nn.Parameter(torch.ones(4))
    return precision, weight, torch.optim.SGD([weight], lr=0.1)


def test_scaled_gradients_come_back_to_scale():
    precision, weight, optimizer = _fp16()
    precision.backward((weight * 1e-6).sum())
    assert float(weight.grad[0]) == pytest.approx(65536e-6)
    precision.unscale(optimizer)
    assert float(weight.grad[0]) == pytest.approx(1e-6)
    assert precision.step(optimizer)
    assert float(1 - weight[0].detach()) == pytest.approx(1e-7, rel=0.3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_overflow_skips_lowers_the_scale_and_is_counted(bad):
    precision, weight, optimizer = _fp16(initial_scale=1024.0, growth_interval=2)
    for expected in (1, 2):
        weight.grad = torch.tensor([1.0, bad, 1.0, 1.0])
        precision.unscale(optimizer)
        assert not precision.step(optimizer)
        assert torch.equal(weight.detach(), torch.ones(4))
        assert precision.overflows == expected
        assert precision.scaler.get_scale() == 1024.0 / 2**expected
    for expected in (256.0, 512.0):  # two good steps double it again
        weight.grad = torch.full((4,), 256.0)
        assert precision.step(optimizer)
        assert precision.scaler.get_scale() == expected
    assert precision.overflows == 2
    assert float(weight[0].detach()) == pytest.approx(1 - 0.1 * (1 + 1))


def test_a_step_that_is_skipped_for_another_reason():
    """A monitor's verdict may skip the update after unscaling; the next step has to work."""
    precision, weight, optimizer = _fp16(initial_scale=4.0)
    for verdict in ("skip", "ok"):
        optimizer.zero_grad()
        precision.backward(weight.sum())
        precision.unscale(optimizer)
        if verdict == "ok":
            assert precision.step(optimizer)
        else:
            precision.skip(optimizer)
    assert precision.overflows == 0
    assert float(weight[0].detach()) == pytest.approx(0.9)
    precision.backward(weight.sum())
    weight.grad[0] = math.inf
    precision.unscale(optimizer)
    precision.skip(optimizer)
    assert precision.overflows == 1 and precision.scaler.get_scale() == 2.0


def test_scaler_state_round_trip():
    precision, weight, optimizer = _fp16(initial_scale=1024.0)
    weight.grad = torch.full((4,), math.inf)
    precision.step(optimizer)
    other, _, _ = _fp16()
    other.load_state_dict(precision.state_dict())
    assert other.state_dict() == precision.state_dict()
    assert other.overflows == 1 and other.scaler.get_scale() == 512.0
    plain = build("precision", "fp32").build(CPU)
    assert plain.state_dict() == {}
    plain.load_state_dict(precision.state_dict())  # resumed in another precision: nothing to scale
    assert plain.scaler is None


@pytest.mark.parametrize("settings", [{"initial_scale": 0}, {"growth_interval": 0}, {"initial_scale": 1e9, "scale": 2}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ConfigError):
        build("precision", {"name": "fp16", **settings})
