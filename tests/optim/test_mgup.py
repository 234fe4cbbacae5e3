"""MGUP: what it scales, by how much, and the limiting cases that are other optimizers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.mgup import MGUP, largest, selected
from trainwright.optim.muon import Muon
from trainwright.optim.state import optimizer_state_bytes


def draws(shape, steps, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


SHAPES = {"matrix": (8, 6), "expert": (3, 4, 5), "embedding": (7, 4), "norm": (9,), "scalar": ()}


def params_of(dtype=torch.float32):
    return [
        NamedParam(role, nn.Parameter(draws(shape, 1, dtype, seed=i)[0]), role)
        for i, (role, shape) in enumerate(SHAPES.items())
    ]


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, n in enumerate(params):
            n.param.grad = draws(n.param.shape, 1, n.param.dtype, seed=1000 * t + i)[0]
        optimizer.step()


# (a)
@pytest.mark.parametrize("inner", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("cautious", [False, True])
def test_factors_of_one_are_the_inner_optimizer_bit_for_bit(inner, cautious):
    one, two = params_of(), params_of()
    spec = {"name": "mgup", "inner": inner, "alpha": 1.0, "gamma": 1.0, "cautious": cautious}
    a, b = build("optimizer", inner).build_rule(one), build("optimizer", spec).build(two)
    run(a, one, 6), run(b, two, 6)
    assert all(torch.equal(p.param, q.param) for p, q in zip(one, two, strict=True))


# (b)
@pytest.mark.parametrize("tau, d", [(0.5, 7), (0.5, 8), (0.29, 100), (0.1, 30), (1.0, 5), (0.34, 3)])
def test_exactly_k_entries_are_chosen(tau, d):
    count = selected(d, tau)
    assert count == round(tau * d - 0.5 + 1e-3) or tau == 1.0
    torch.manual_seed(0)
    for scores in (torch.randn(3, d), torch.zeros(3, d), torch.randint(0, 3, (3, d)).float()):
        chosen = largest(scores, count)
        assert chosen.sum(-1).tolist() == [count] * 3
        for row, mask in zip(scores.tolist(), chosen.tolist(), strict=True):
            order = sorted(range(d), key=lambda i, row=row: (-row[i], i))  # stable
            assert {i for i, m in enumerate(mask) if m} == set(order[:count])


def test_k_of_decimal_fractions():
    assert [selected(100, 0.29), selected(1000, 0.003), selected(10, 0.7), selected(1, 0.5)] == [29, 3, 7, 0]


# (c)
@pytest.mark.parametrize("settings, mean", [({}, 1.25), ({"gamma": 0.1}, 1.05), ({"tau": 0.25}, 1 + 0.25 - 0.25**2)])
def test_mean_factor(settings, mean):
    p, q = (nn.Parameter(torch.zeros(8, 6, dtype=torch.float64)) for _ in range(2))
    settings = dict(settings)
    tau = settings.get("tau", 0.5)
    a, b = Lion([p], lr=1.0, weight_decay=0.0), MGUP(Lion([q], lr=1.0, weight_decay=0.0), **settings)
    p.grad, q.grad = draws(p.shape, 1)[0], draws(p.shape, 1)[0]
    a.step(), b.step()
    phi = q.data / p.data
    assert float(phi.mean()) == pytest.approx(mean)
    assert sorted(set(phi.flatten().tolist())) == [settings.get("gamma", tau), 1 / tau]
    assert int((phi == 1 / tau).sum()) == int(tau * 48)


# (d)
def test_gamma_of_zero_is_the_cautious_optimizer():
    """Cautious Optimizers (arXiv:2411.16085) without rescaling: where update and gradient disagree, nothing moves."""
    start, grads = draws((6, 5), 1, seed=9)[0], draws((6, 5), 12)
    grads[3][2] = 0.0
    p = nn.Parameter(start.clone())
    optimizer = MGUP(
        AdamW([p], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1), alpha=1, gamma=0, cautious=True, strict=True
    )
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    masked = 0
    for t, g in enumerate(grads, 1):
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        masked += int((u * g <= 0).sum())
        w = w * (1 - 0.01 * 0.1) - 0.01 * u * (u * g > 0)
    assert masked > 20
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)


def test_zero_scores_of_cautious():
    for strict, moved in ((False, 2.0), (True, 0.5)):
        p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = MGUP(Lion([p], lr=1.0, weight_decay=0.0), cautious=True, strict=strict)
        p.grad = torch.ones(2, dtype=torch.float64)
        optimizer.step()
        before = p.data.clone()
        p.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)  # the momentum alone moves the second
        optimizer.step()
        assert (before - p.data).tolist() == [2.0, moved]


# (e)
@pytest.mark.parametrize("inner", ["adamw", "lion", "muon"])
def test_no_state_of_its_own(inner):
    one, two = params_of(), params_of()
    a, b = build("optimizer", inner).build(one), build("optimizer", {"name": "mgup", "inner": inner}).build(two)
    run(a, one, 2), run(b, two, 2)
    assert optimizer_state_bytes(a) == optimizer_state_bytes(b) > 0


def test_adamw_is_the_equation():
    start, grads = draws((6, 5), 1, seed=9)[0], draws((6, 5), 10)
    p = nn.Parameter(start.clone())
    optimizer = MGUP(AdamW([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), tau=0.3, alpha=1.5, gamma=0.2)
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate(grads, 1):
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        order = (u * g).flatten().argsort(descending=True, stable=True)
        phi = torch.full((30,), 0.2, dtype=torch.float64)
        phi[order[:9]] = 1.5
        w = w * (1 - 0.01 * 0.1) - 0.01 * phi.view(6, 5) * u
    torch.testing.assert_close(p.data, w, atol=1e-13, rtol=1e-12)


def test_muon_is_scored_before_it_is_orthogonalised():
    start, (g,) = draws((6, 5), 1, seed=9)[0], draws((6, 5), 1)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    first = draws((6, 5), 1, seed=4)[0]
    a, b = MGUP(Muon([p], lr=1.0, weight_decay=0.0), gamma=0.1), Muon([q], lr=1.0, weight_decay=0.0)
    for grad in (first, g):
        before = p.data.clone()
        q.data.copy_(before)
        p.grad, q.grad = grad.clone(), grad.clone()
        a.step(), b.step()
    phi = (before - p.data) / (before - q.data)
    m = 0.95 * 0.05 * first + 0.05 * g
    score = (0.05 * g + 0.95 * m) * g
    chosen = (phi - 2.0).abs() < 1e-9
    assert set(score.flatten().argsort(descending=True)[:15].tolist()) == set(chosen.flatten().nonzero()[:, 0].tolist())
    assert torch.allclose(phi[~chosen], torch.full((15,), 0.1, dtype=torch.float64))


def test_of_muon_only_matrices_are_changed():
    one, two = params_of(), params_of()
    a = build("optimizer", "muon").build_rule(one)
    b = build("optimizer", {"name": "mgup", "inner": "muon"}).build(two)
    run(a, one, 3), run(b, two, 3)
    assert [torch.equal(p.param, q.param) for p, q in zip(one, two, strict=True)] == [False, False, True, True, True]


def test_scalars_are_stepped_as_by_the_inner_optimizer():
    p, q = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    a, b = Lion([p], lr=0.1), MGUP(Lion([q], lr=0.1))
    for o, x in ((a, p), (b, q)):
        x.grad = torch.ones(())
        o.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("shard_local", [False, True])
def test_sharded(shard_local, tmp_path):
    """One process: shard and whole are the same here; two processes are in test_optimizer_shards."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        (start,) = draws((6, 8), 1, torch.float32, seed=1)
        p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        a, b = MGUP(AdamW([p])), MGUP(AdamW([q]), shard_local=shard_local)
        for t in range(4):
            p.grad = draws(p.shape, 1, torch.float32, seed=t)[0]
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
            a.step(), b.step()
        torch.testing.assert_close(q.full_tensor(), p.data, atol=1e-7, rtol=1e-6)
    finally:
        dist.destroy_process_group()


def test_many_tensors_go_through_in_portions(monkeypatch):
    from trainwright.optim import mgup

    results = []
    for limit in (mgup.BATCH_BYTES, 1):
        monkeypatch.setattr(mgup, "BATCH_BYTES", limit)
        params = [NamedParam(str(i), nn.Parameter(torch.ones(4, 4)), "matrix") for i in range(5)]
        run(build("optimizer", "mgup").build(params), params, 3)
        results.append(torch.stack([n.param.data for n in params]))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"tau": 0}, "greater than 0"),
        ({"tau": 1.5}, "less than or equal to 1"),
        ({"gamma": -0.1}, "greater than or equal to 0"),
        ({"alpha": 0.2}, "alpha=0.2 is below gamma=0.5"),
        ({"alpha": 0.5, "gamma": 0.6}, "smaller step"),
        ({"strict": True}, "set cautious"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "mgup", **settings})


def test_coupled_decay_is_refused():
    """sgd adds its decay to the gradient, so that its update cannot be scaled apart from it."""
    with pytest.raises(ConfigError, match="inner"):
        build("optimizer", {"name": "mgup", "inner": "sgd"}).build(params_of())
    with pytest.raises(TypeError, match="wraps an UpdateRule"):
        MGUP(torch.optim.SGD([nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize(
    "settings, says", [({"tau": 0.0}, "tau"), ({"gamma": -1.0}, "gamma"), ({"alpha": 0.1}, "alpha")]
)
def test_the_class_refuses(settings, says):
    with pytest.raises(ValueError, match=says):
        MGUP(Lion([nn.Parameter(torch.ones(4))]), **settings)
