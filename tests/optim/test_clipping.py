"""Gradient clipping. The sharded case is in test_optimizer_shards."""

import copy

import pytest
import torch
from optimizer_zoo import Zoo, backward, batch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build, methods

METHODS = [m.name for m in methods("clip")]
every = pytest.mark.parametrize("name", METHODS)


def gradients(scale=1.0):
    model = Zoo()
    backward(model, batch(0), scale)
    return model, list(model.parameters())


def norm_of(params):
    return torch.stack([p.grad.double().norm() for p in params if p.grad is not None]).norm()


@every
def test_returns_the_norm_before_clipping(name):
    for scale in (1e-3, 1e3):
        _, params = gradients(scale)
        before = norm_of(params)
        norm = build("clip", name).build()(params)
        assert norm.shape == () and float(norm) == pytest.approx(float(before), rel=1e-5)


@every
def test_never_scales_up_and_keeps_the_direction(name):
    for scale in (1e-3, 1e3):
        _, params = gradients(scale)
        before = torch.cat([p.grad.flatten() for p in params])
        build("clip", name).build()(params)
        after = torch.cat([p.grad.flatten() for p in params])
        assert after.norm() <= before.norm() * (1 + 1e-6)
        assert torch.cosine_similarity(before, after, dim=0) > 0.9999


@every
def test_no_gradients(name):
    clip = build("clip", name).build()
    assert float(clip([nn.Parameter(torch.ones(3))])) == 0
    assert float(clip([])) == 0


@every
def test_state_round_trip(name):
    clip = build("clip", name).build()
    clip(gradients()[1])
    other = build("clip", name).build()
    other.load_state_dict(copy.deepcopy(clip.state_dict()))
    assert other.state_dict() == clip.state_dict()


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_global_norm_equals_torch(max_norm):
    _, ours = gradients(50.0)
    theirs_model, theirs = gradients(50.0)
    assert float(norm_of(ours)) > 1
    norm = build("clip", {"name": "global_norm", "max_norm": max_norm}).build()(ours)
    expected = torch.nn.utils.clip_grad_norm_(theirs_model.parameters(), max_norm)
    assert torch.equal(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p.grad, q.grad)
    assert float(norm_of(ours)) == pytest.approx(min(float(expected), max_norm), rel=1e-4)


def test_none_leaves_gradients_alone():
    _, params = gradients(1e4)
    before = [p.grad.clone() for p in params]
    norm = build("clip", "none").build()(params)
    assert float(norm) > 1e3
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


@every
def test_infinite_gradients_show(name):
    _, params = gradients()
    params[0].grad[0, 0] = float("inf")
    assert not torch.isfinite(build("clip", name).build()(params))


def test_mixed_dtypes():
    a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    a.grad, b.grad = torch.full((4,), 3.0), torch.full((4,), 4.0, dtype=torch.bfloat16)
    assert float(build("clip", "global_norm").build()([a, b])) == pytest.approx(10.0)
    assert float(norm_of([a, b])) == pytest.approx(1.0, rel=1e-2)


def test_max_norm_has_to_be_positive():
    with pytest.raises(ConfigError, match="greater than 0"):
        build("clip", {"name": "global_norm", "max_norm": 0})


@every
def test_16_bit_gradients_are_summed_in_float32(name):
    """bfloat16 has 8 bits of mantissa; a norm held in it is off by up to 0.4 per cent."""
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        params = [nn.Parameter(torch.zeros(50 + i, 37, dtype=dtype)) for i in range(9)]
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(dtype)
        params.append(nn.Parameter(torch.zeros(5)))
        params[-1].grad = torch.ones(5)
        before = norm_of(params)
        norm = build("clip", name).build()(params)
        assert norm.dtype == torch.float32
        assert float(norm) == pytest.approx(float(before), rel=1e-5)
