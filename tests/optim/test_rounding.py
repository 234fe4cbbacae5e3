"""Stochastic rounding of bfloat16 weights."""

import copy
import json

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.rounding import round_stochastically_
from trainwright.optim.state import allocate_named_state, load_named_state, named_state


def rounded(values, seed=0):
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically_([target], [values.clone()], torch.Generator().manual_seed(seed))
    return target


@pytest.mark.parametrize("value", [1.0 + 0.3 / 128, -1.0 - 0.3 / 128, 3.14159e-3, -2.71828e20])
def test_the_expected_value_is_kept(value):
    n = 200_000
    drawn = rounded(torch.full((n,), value))
    down, up = sorted(drawn.float().unique().tolist())
    assert down < torch.tensor(value).item() < up
    gap = up - down
    # the mean of n draws of a value within one gap: five standard errors
    assert abs(drawn.double().mean().item() - torch.tensor(value).double().item()) < 5 * 0.5 * gap / n**0.5


def test_what_bfloat16_holds_is_left_alone():
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    assert torch.equal(rounded(special).view(torch.int16), special.bfloat16().view(torch.int16))


def weight(shape=(64, 64)):
    return nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


def steps(optimizer, p, count):
    for _ in range(count):
        p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_small_steps_count_on_average(name):
    moved = {}
    for stochastic in (False, True):
        p = weight()
        spec = {"name": name, "lr": 6e-4, "weight_decay": 0.0, "stochastic_rounding": stochastic}
        optimizer = build("optimizer", spec).build([NamedParam("p", p, "matrix")])
        steps(optimizer, p, 100)
        moved[stochastic] = float(1 - p.float().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(0.06, rel=0.1)


def test_a_checkpoint_goes_on_with_the_same_draws():
    config = build("optimizer", {"name": "muon", "lr": 1e-3, "stochastic_rounding": True, "inner": {"name": "adamw"}})

    def make(p, q):
        params = [NamedParam("p", p, "matrix"), NamedParam("q", q, "norm")]
        return params, config.build(params)

    p, q = weight(), weight((64,))
    params, optimizer = make(p, q)
    grads = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def run(optimizer, p, q, first, last):
        for g in grads[first:last]:
            p.grad, q.grad = g.clone(), g[0].clone()
            optimizer.step()

    run(optimizer, p, q, 0, 2)
    p2, q2 = copy.deepcopy(p), copy.deepcopy(q)
    state = named_state(optimizer, params)
    scalars = json.loads(json.dumps(state["scalars"]))
    params2, resumed = make(p2, q2)
    tensors = allocate_named_state(params2, scalars)
    for name, entries in tensors.items():
        for key, tensor in entries.items():
            tensor.copy_(state["tensors"][name][key])
    load_named_state(resumed, params2, {"tensors": tensors, "scalars": scalars})
    run(optimizer, p, q, 2, 4), run(resumed, p2, q2, 2, 4)
    assert torch.equal(p, p2) and torch.equal(q, q2)


def test_refusals():
    half, single = (
        NamedParam("half", weight(), "matrix"),
        NamedParam("single", nn.Parameter(torch.ones(4, 4)), "matrix"),
    )
    with pytest.raises(ConfigError, match=r"single is float32.*dtype: bfloat16"):
        build("optimizer", {"name": "adamw", "stochastic_rounding": True}).build([half, single])
    with pytest.raises(ConfigError, match="sgd cannot round stochastically; use adamw"):
        build("optimizer", {"name": "sgd", "stochastic_rounding": True}).build([half])
