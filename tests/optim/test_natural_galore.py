"""Natural GaLore: the preconditioner against dense solves, the limiting case, what a renewal does, bad input."""

import copy
import json
import logging

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.galore import GaLore
from trainwright.optim.natural_galore import NaturalGaLore, weights_of_history
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes

F64 = torch.float64


def draw(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = draw(p.shape, 1000 * t + i, p.dtype)
        optimizer.step()


def preconditioned(shape, history, damping, steps, dtype=F64, rank=1.0):
    """The steps' gradients in the subspace, and what the inner rule got: with SGD, rate and scale 1, the way moved."""
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = NaturalGaLore(
        [p], lr=1.0, weight_decay=0.0, rank=rank, scale=1.0, subspace="sgd", history=history, damping=damping
    )
    grads, moved = [], []
    for t in range(steps):
        before = p.detach().clone()
        run(optimizer, [p], 1, first=t)
        basis = optimizer.state[p]["projection"]
        left = shape[-2] < shape[-1]
        grads.append(basis.mT @ p.grad if left else p.grad @ basis)
        moved.append(basis.mT @ (before - p.detach()) if left else (before - p.detach()) @ basis)
    return grads, moved


def dense(grads, history, damping):
    """F^-1 g for the last of ``grads`` (vectors), with F of the last ``history`` of them."""
    h = torch.stack(grads[-history:], 1).to(F64)
    f = damping * torch.eye(h.shape[0], dtype=F64) + h @ h.T
    return torch.linalg.solve(f, h[:, -1])


def woodbury(grads, history, damping):
    """The paper's form."""
    h = torch.stack(grads[-history:], 1)
    s = torch.eye(h.shape[1], dtype=h.dtype) + h.T @ h / damping
    z = torch.linalg.solve(s, h.T @ h[:, -1])
    return h[:, -1] / damping - h @ z / damping**2


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (3, 6, 4)])
def test_a_a_history_of_one_has_a_closed_form(shape):
    """Card (a)."""
    grads, moved = preconditioned(shape, 1, 1e-3, 3, rank=2)
    for r, u in zip(grads, moved, strict=True):
        torch.testing.assert_close(u, r / (1e-3 + r.square().sum((-2, -1), keepdim=True)), atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize("shape", [(10, 5), (5, 10), (2, 10, 5)])
@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_b_equals_a_dense_solve(shape, damping):
    """Card (b): k = 50, s = 5, while the history fills and after."""
    grads, moved = preconditioned(shape, 5, damping, 8)
    for t in range(8):
        for i, u in enumerate(moved[t].reshape(-1, 50)):
            vectors = [r.reshape(-1, 50)[i] for r in grads[: t + 1]]
            want = dense(vectors, 5, damping)
            torch.testing.assert_close(u, want, atol=1e-10 * float(want.abs().max()), rtol=1e-8)


def test_c_float32_keeps_its_digits():
    """Card (c): the form used here, against the paper's, which cancels."""
    grads = [draw((200,), t, torch.float32) for t in range(20)]
    want = dense(grads, 20, 1e-3)
    h = torch.stack(grads)
    weights, raised = weights_of_history((h @ h.T)[None], torch.tensor([19]), 1e-3)
    ours = weights[0].float() @ h
    theirs = woodbury(grads, 20, 1e-3)
    assert not raised.any()
    assert (ours - want).norm() < 2e-6 * want.norm()
    assert (theirs - want).norm() > 1e-4 * want.norm()


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (3, 6, 4)])
def test_d_much_damping_is_galore(shape):
    """Card (d)."""
    start = draw(shape, 99)
    results = []
    for rule, more in ((GaLore, {}), (NaturalGaLore, {"damping": 1e8, "history": 5})):
        p = nn.Parameter(start.clone())
        optimizer = rule([p], weight_decay=0.0, rank=2, gap=4, eps=1e-30, **more)
        run(optimizer, [p], 10)
        results.append(p.data - start)
    assert (results[0] - results[1]).norm() < 1e-4 * results[0].norm()


def test_little_damping_is_not_galore():
    start = draw((7, 5), 99)
    results = []
    for rule, more in ((GaLore, {}), (NaturalGaLore, {"damping": 1e-3, "history": 5})):
        p = nn.Parameter(start.clone())
        run(rule([p], weight_decay=0.0, rank=2, **more), [p], 10)
        results.append(p.data - start)
    assert (results[0] - results[1]).norm() > 0.1 * results[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e_state_is_galores_and_the_history(dtype):
    """Card (e): s r n numbers more, ten times the moments at s = 20; float32 whatever the weights are. And s s.

    The second moment is in float32 too."""
    p = nn.Parameter(torch.zeros(32, 128, dtype=dtype))
    optimizer = NaturalGaLore([p], rank=8)
    run(optimizer, [p], 1)
    moment, of_history = 8 * 128, 20 * 8 * 128
    assert of_history == 10 * 2 * moment
    of_galore = p.element_size() * (32 * 8 + moment) + 4 * moment
    assert optimizer_state_bytes(optimizer) == of_galore + 4 * (of_history + 20 * 20)


@pytest.mark.parametrize("gap", [4, 100])
def test_the_gram_matrix_is_that_of_the_history(gap):
    """While the history fills, when it goes round, after renewals, and of a checkpoint that has none."""
    p = nn.Parameter(torch.zeros(2, 5, 9, dtype=F64))
    optimizer = NaturalGaLore([p], rank=2, history=3, gap=gap)
    for t in range(11):
        run(optimizer, [p], 1, t)
        state = optimizer.state[p]
        history = state["history"].flatten(2).transpose(0, 1)  # [2, 3, 18]
        torch.testing.assert_close(state["gram"], history @ history.mT, atol=1e-12, rtol=1e-12)
        if t == 6:
            del state["gram"]


def test_f_a_renewal_drops_the_history():
    """Card (f): after it, gradients of the new subspace alone are in the Fisher matrix."""
    p = nn.Parameter(torch.zeros(7, 5, dtype=F64))
    optimizer = NaturalGaLore(
        [p], lr=1.0, weight_decay=0.0, rank=2, scale=1.0, subspace="sgd", history=6, gap=4, damping=0.1
    )
    vectors = []
    for t in range(10):
        if t % 4 == 0:
            vectors = []
        before = p.detach().clone()
        run(optimizer, [p], 1, first=t)
        basis = optimizer.state[p]["projection"]
        vectors.append((p.grad @ basis).flatten())
        moved = ((before - p.detach()) @ basis).flatten()
        torch.testing.assert_close(moved, dense(vectors, 6, 0.1), atol=1e-10, rtol=1e-9)
        history = optimizer.state[p]["history"].flatten(1)
        assert (history.norm(dim=1) > 0).sum() == len(vectors)


def test_zero_gradients_in_between():
    p = nn.Parameter(torch.zeros(7, 5, dtype=F64))
    optimizer = NaturalGaLore([p], weight_decay=0.0, rank=2, history=3, subspace="sgd")
    run(optimizer, [p], 4)
    before = p.detach().clone()
    for _ in range(4):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)


def test_an_indefinite_matrix_gets_more_damping(caplog):
    indefinite = torch.tensor([[1.0, 1.0 + 1e-5], [1.0 + 1e-5, 1.0]], dtype=F64)  # the lesser eigenvalue is -1e-5
    good = torch.eye(2, dtype=F64)
    weights, raised = weights_of_history(torch.stack([indefinite, good, 0 * good]), torch.tensor([1, 1, 0]), 1e-7)
    assert raised.tolist() == [True, False, False]
    want = torch.linalg.solve(indefinite + 1e-4 * good, torch.tensor([0.0, 1.0], dtype=F64))  # 1e-7, -6, -5 fail
    torch.testing.assert_close(weights[0], want)
    torch.testing.assert_close(weights[1:], torch.tensor([[0, 1 / (1 + 1e-7)], [1e7, 0]], dtype=F64))
    weights, _ = weights_of_history(torch.full((1, 2, 2), float("nan")), torch.tensor([0]), 1e-3)
    assert not weights.isfinite().any()  # as the gradients were


def test_raised_damping_is_told_at_the_next_renewal(caplog):
    p = nn.Parameter(torch.zeros(20, 10))
    optimizer = NaturalGaLore([p], rank=5, history=8, gap=4, damping=1e-30)
    grad = 1e4 * draw((20, 10), 0, torch.float32)
    with caplog.at_level(logging.WARNING, "trainwright"):
        for _ in range(4):  # one direction over and over: singular but for the damping
            p.grad = grad.clone()
            optimizer.step()
        assert not caplog.records
        optimizer.step()
    (record,) = caplog.records
    assert "3 times" in record.getMessage() and "damping" in record.getMessage()
    assert p.isfinite().all()


@pytest.mark.parametrize("way", ["named", "torch"])
def test_a_resumed_run_is_the_same(way):
    shapes = [(7, 5), (5, 7), (3, 6, 4)]
    settings = {"rank": 2, "history": 3, "gap": 5}
    params = [nn.Parameter(draw(s, i, torch.float32)) for i, s in enumerate(shapes)]
    optimizer = NaturalGaLore(params, **settings)
    run(optimizer, params, 4)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = NaturalGaLore(others, **settings)
    if way == "torch":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        names = [[NamedParam(str(i), p, "matrix") for i, p in enumerate(ps)] for ps in (params, others)]
        state = named_state(optimizer, names[0])
        scalars = json.loads(json.dumps(state["scalars"]))
        tensors = allocate_named_state(names[1], scalars)
        for n, entries in tensors.items():
            for key, t in entries.items():
                t.copy_(state["tensors"][n][key])
        load_named_state(resumed, names[1], {"tensors": tensors, "scalars": scalars})
    run(optimizer, params, 4, first=4), run(resumed, others, 4, first=4)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"history": 0}, "history"),
        ({"damping": 0}, "greater than 0"),
        ({"gap": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "natural_galore", **settings})


def test_a_history_longer_than_the_gradient_is_refused_by_name():
    params = [NamedParam("a", nn.Parameter(torch.zeros(9, 6)), "matrix")]
    params.append(NamedParam("b", nn.Parameter(torch.zeros(4, 3)), "matrix"))
    with pytest.raises(ConfigError, match=r"history=9: is longer than the 8 numbers.* of b; set it lower"):
        build("optimizer", {"name": "natural_galore", "history": 9, "rank": 2}).build(params)
    build("optimizer", {"name": "natural_galore", "history": 8, "rank": 2}).build(params)
    with pytest.raises(ConfigError, match="larger than the shorter side"):
        build("optimizer", {"name": "natural_galore", "rank": 4}).build(params)
    for bad in ({"history": 0}, {"history": 9, "rank": 2}, {"damping": 0.0}, {"damping": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            NaturalGaLore([n.param for n in params], **bad)
