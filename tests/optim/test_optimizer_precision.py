"""What every registered optimizer must do with 16-bit weights, and with gradients that are not finite."""

import copy

import pytest
import torch
from optimizer_zoo import Zoo, backward, batch, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build, methods
from trainwright.optim.settings import CheckedOptimizer
from trainwright.optim.state import load_named_state, named_state

METHODS = [m.name for m in methods("optimizer")]
every = pytest.mark.parametrize("name", METHODS)


def rule_of(config, params):
    """The method as a rule of our own where it can be had: torch's fused AdamW keeps its state as torch does."""
    try:
        return config.build_rule(params)
    except ConfigError:
        return config.build(params)


def wide_state(optimizer):
    """(parameter, key, tensor) of what our rules hold in float32 at least."""
    parts = [part for part in getattr(optimizer, "parts", [optimizer]) if isinstance(part, CheckedOptimizer)]
    return [
        (p, key, value)
        for part in parts
        for p, entries in part.state.items()
        for key, value in entries.items()
        if part.is_wide(key) and isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def single(name, start, **settings):
    """The method on one matrix."""
    fields = type(build("optimizer", name)).model_fields
    config = build("optimizer", {"name": name, **{k: v for k, v in settings.items() if k in fields}})
    p = nn.Parameter(start.clone())
    return p, rule_of(config, [NamedParam("w", p, "matrix")])


SLOW = (0.9, 0.999)
INNER = {"name": "adamw", "betas": SLOW}


@every
def test_second_moments_of_bf16_weights_shrink(name):
    """Without a gradient they do so by beta2 each step, which bfloat16 would round away."""
    start = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    settings = {"betas": SLOW, "lr": 1e-9, "gap": 10_000, "rank": 1.0, "reset_every": 0, "inner": INNER}
    p, optimizer = single(name, start, **settings)
    p.grad = torch.ones_like(p)
    optimizer.step()
    if not any(key.endswith("avg_sq") for _, key, _ in wide_state(optimizer)):
        pytest.skip("has no second moment that decays by beta2")
    for seed in range(20):
        p.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()
    moments = {key: v for _, key, v in wide_state(optimizer) if key.endswith("avg_sq")}
    before = {key: float(v.mean()) for key, v in moments.items()}
    for _ in range(2000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    for _, key, v in wide_state(optimizer):
        # That of a projection has a gradient of its own, which pulls it towards orthonormal columns.
        if key in before and not key.startswith("projection"):
            assert float(v.mean()) == pytest.approx(before[key] * SLOW[1] ** 2000, rel=0.02), key


@every
def test_wide_state_of_bf16_weights(name):
    """It is float32; through torch's state dict it comes back bit for bit; that of older checkpoints is taken."""

    def grads(model, seed):
        backward(model, batch(seed, dtype=torch.bfloat16))

    model = Zoo(dtype=torch.bfloat16)
    optimizer = rule_of(build("optimizer", name), named(model))
    for i in range(2):
        grads(model, i), optimizer.step(), optimizer.zero_grad()
    found = wide_state(optimizer)
    assert all(v.dtype == torch.float32 for _, _, v in found)

    second = copy.deepcopy(model)
    resumed = rule_of(build("optimizer", name), named(second))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = named_state(optimizer, named(model))
    third = copy.deepcopy(model)
    old = copy.deepcopy(state)
    for entries in old["tensors"].values():
        for key, value in entries.items():
            if "avg_sq" in key and value.is_floating_point() and not key.endswith("scale"):
                entries[key] = value.bfloat16()
    older = rule_of(build("optimizer", name), named(third))
    load_named_state(older, named(third), old)
    for m, o in ((model, optimizer), (second, resumed), (third, older)):
        grads(m, 2), o.step(), o.zero_grad()
    for (n, p), q, r in zip(model.named_parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(p, q), n
        torch.testing.assert_close(r, p, atol=2e-2, rtol=2e-2, msg=n)
    for o in (resumed, older):
        now = wide_state(o)
        assert len(now) == len(found) and all(v.dtype == torch.float32 for _, _, v in now)


@every
def test_stochastic_rounding_keeps_the_mean_step_or_is_refused(name):
    """Steps of a quarter of the last bit: their sum is that in float32, within what chance allows."""
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).sign().mul(1.1).bfloat16()
    start = start + (0.5 * torch.randn(64, 64, generator=torch.Generator().manual_seed(1))).bfloat16()
    settings = {"weight_decay": 0.0, "gap": 50, "retract": "dynamic", "inner": {"name": "adamw", "weight_decay": 0.0}}

    def way(dtype, rate, stochastic):
        config = {"lr": rate, "stochastic_rounding": stochastic, **settings}
        fields = type(build("optimizer", name)).model_fields
        config = build("optimizer", {"name": name, **{k: v for k, v in config.items() if k in fields}})
        p = nn.Parameter(start.to(dtype, copy=True))
        params = [NamedParam("w", p, "matrix")]
        optimizer = config.build(params) if stochastic else rule_of(config, params)
        steady = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
        for seed in range(16):
            noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 + seed)).bfloat16()
            p.grad = (steady + 0.2 * noise).to(dtype)
            optimizer.step()
        return p.detach().float() - start.float()

    rate = 1e-4
    try:
        way(torch.bfloat16, rate, True)
    except ConfigError as error:
        assert "round stochastically" in str(error)
        return
    rate *= 4e-3 / float(way(torch.float32, rate, False).square().mean().sqrt())
    exact = way(torch.float32, rate, False)
    rounded = way(torch.bfloat16, rate, True)
    along = float((rounded * exact).sum() / exact.square().sum())
    assert along == pytest.approx(1, abs=0.1)


STRICT = {"llr": {"every": 1, "ramp": 1, "min_size": 3}}  # looks at the weights in every step


@every
def test_a_gradient_that_is_not_finite_does_not_end_the_run(name):
    """Its parameter is lost, which the loop says; nothing raises, then or later, and no other one is touched."""
    for bad in (float("nan"), float("inf")):
        model = Zoo()
        params = named(model)
        config = build("optimizer", {"name": name, **STRICT.get(name, {})})
        optimizer = rule_of(config, params)
        for step in range(5):
            for i, n in enumerate(params):
                n.param.grad = torch.randn(n.param.shape, generator=torch.Generator().manual_seed(100 * step + i))
            if step == 1:
                model.up.grad[0, 0] = bad
            optimizer.step()
        assert all(n.param.isfinite().all() for n in params if n.name != "up")


@every
def test_true_is_no_number(name):
    with pytest.raises(ConfigError, match=r"lr.*should be a number"):
        build("optimizer", {"name": name, "lr": True})


def test_true_is_no_number_for_the_classes_either():
    from trainwright.optim import GaLore
    from trainwright.optim.adapm import AdaPM

    with pytest.raises(ConfigError, match="rank"):
        build("optimizer", {"name": "adapm", "rank": True})
    for cls in (GaLore, AdaPM):
        with pytest.raises(ValueError, match="rank=True should be a number"):
            cls([nn.Parameter(torch.ones(4, 4))], rank=True)


def test_training_goes_on_after_a_bad_step_in_bf16():
    """Of SPECTRA, whose warning once took the length of such an update for a number."""
    model = Zoo()
    optimizer = build("optimizer", "spectra").build(named(model))
    train(model, optimizer, 1)
    backward(model, batch(1))
    model.up.grad[0, 0] = float("nan")
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p is not model.up and p.grad is not None}
    assert before
    optimizer.step(), optimizer.step()
    for name, p in model.named_parameters():
        if name in before:  # the others' steps are not touched by it
            assert p.isfinite().all() and not torch.equal(p, before[name]), name
