"""NuMuon's direction against singular value decompositions in float64, and Muon where nothing is left out."""

import copy
import math

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.muon import Muon
from trainwright.optim.numuon import NuMuon, gaussian, rank_of, share_at, stable_rank, top_singular_directions
from trainwright.optim.state import load_named_state, named_state


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthonormal(rows, columns, seed):
    return torch.linalg.qr(randn(rows, columns, seed=seed)).Q


def with_spectrum(rows, columns, s):
    side = len(s)
    return orthonormal(rows, side, 1) @ torch.diag(s) @ orthonormal(columns, side, 2).T


def polar(m):
    left, _, right = torch.linalg.svd(m.double(), full_matrices=False)
    return left @ right


@pytest.mark.parametrize("nesterov", [False, True])
def test_all_directions_are_muon(nesterov):
    """(a): bit for bit, as it is the same iteration."""
    one, two = Zoo(), Zoo()
    a = build("optimizer", {"name": "muon", "nesterov": nesterov}).build(named(one))
    b = build("optimizer", {"name": "numuon", "nesterov": nesterov, "rank": 1.0}).build(named(two))
    train(one, a, 5), train(two, b, 5)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (5, 1), (3, 6, 4)])
def test_all_directions_are_the_polar_factor(shape):
    """(a): of the direction as such."""
    m = randn(*shape)
    torch.testing.assert_close(top_singular_directions(m, min(shape[-2:])), polar(m), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (2, 30, 40)])
@pytest.mark.parametrize("k", [1, 7, 30])
def test_the_direction_is_the_ky_fan_maximiser(shape, k):
    """(b), (e): inner product, norms, rank and root mean square."""
    m = randn(*shape)
    d = top_singular_directions(m, k)
    s = torch.linalg.svdvals(m)
    torch.testing.assert_close((m * d).sum((-2, -1)), s[..., :k].sum(-1), atol=1e-10, rtol=1e-12)
    of_d = torch.linalg.svdvals(d)
    torch.testing.assert_close(of_d[..., :k], torch.ones_like(of_d[..., :k]), atol=1e-10, rtol=0)
    assert float(of_d[..., k:].sum()) < 1e-10
    rms = d.square().mean((-2, -1)).sqrt()
    torch.testing.assert_close(rms, torch.full_like(rms, math.sqrt(k / (shape[-1] * shape[-2]))), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("rows, columns", [(256, 512), (512, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_krylov_space_captures_the_ky_fan_value(rows, columns, dtype):
    """(c): on a slow spectrum, where one block would give 85 %."""
    k, s = 64, torch.arange(1, 257, dtype=torch.float64) ** -0.5
    m = with_spectrum(rows, columns, s)
    d = top_singular_directions(m.to(dtype), k, gaussian(512, k + 8, 0, 1, m.device))
    captured = float((m * d.double()).sum() / s[:k].sum())
    assert 0.985 <= captured <= 1 + 1e-6
    of_d = torch.linalg.svdvals(d.double())
    torch.testing.assert_close(of_d[:k], torch.ones(k, dtype=torch.float64), atol=1e-5, rtol=0)
    assert float(of_d[k:].max()) < 1e-5


@pytest.mark.parametrize("rows, columns", [(256, 512), (512, 256)])
@pytest.mark.parametrize("first", [0.0, 20.0, 100.0])
def test_a_space_chosen_in_bfloat16_captures_as_much(rows, columns, first):
    """(c), and beside one singular value that would drown the others if it were cubed."""
    k, s = 64, torch.arange(1, 257, dtype=torch.float64) ** -0.5
    s[0] += first
    m, omega = with_spectrum(rows, columns, s).float(), gaussian(512, 72, 0, 1, torch.device("cpu"))
    exact = top_singular_directions(m, k, omega).double()
    d = top_singular_directions(m, k, omega, torch.bfloat16)
    assert d.dtype == torch.bfloat16
    s[0] -= first
    others = with_spectrum(rows, columns, s)
    captured, reference = (float((others * x.double()).sum()) for x in (d, exact))
    assert captured > (0.97 if first == 100 else 0.99) * reference
    assert first or captured >= 0.985 * float(s[:k].sum())
    of_d = torch.linalg.svdvals(d.double())
    torch.testing.assert_close(of_d[:k], torch.ones(k, dtype=torch.float64), atol=5e-3, rtol=0)
    assert float(of_d[k:].max()) < 5e-3


@pytest.mark.parametrize("rate", [2.0, 6.0, 12.0])
def test_decaying_spectra_in_single_precision(rate):
    """Singular values far below 1e-3 of the largest, of which squares are noise: still orthonormal directions."""
    s = torch.exp(-torch.arange(128, dtype=torch.float64) / rate)
    m = with_spectrum(128, 200, s)
    d = top_singular_directions(m.float(), 40, gaussian(200, 48, 0, 1, m.device)).double()
    of_d = torch.linalg.svdvals(d)
    count = int((of_d > 0.5).sum())
    assert min(40, int((s > 1e-3).sum())) <= count <= 40
    torch.testing.assert_close(of_d[:count], torch.ones_like(of_d[:count]), atol=1e-3, rtol=0)
    assert float(of_d[count:].max()) < 1e-3
    assert float((m * d).sum() / s[:40].sum()) > 0.999


def test_matrices_that_are_zero_but_for_a_corner():
    m = torch.zeros(2, 64, 80)
    m[:, 0, 0], m[1, 1, 1] = 3.0, 2.0
    d = top_singular_directions(m, 4, gaussian(80, 12, 0, 1, m.device))
    torch.testing.assert_close(d, m.sign(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(40, 30), (2, 30, 40)])
def test_single_precision_is_as_exact_as_it_can_be(shape):
    """On singular values from 1 to 1e-3, where squares of them in single precision would be noise."""
    m = randn(*shape)
    left, s, right = torch.linalg.svd(m, full_matrices=False)
    m = left @ (torch.logspace(0, -3, 30, dtype=torch.float64)[:, None] * right)
    found = top_singular_directions(m.float(), 28).double()
    torch.testing.assert_close(found, top_singular_directions(m, 28), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.linalg.svdvals(found)[..., :28], torch.ones_like(s[..., :28]), atol=1e-4, rtol=0)


def test_krylov_space_is_exact_on_low_rank():
    m = with_spectrum(100, 60, torch.tensor([5.0, 4, 3, 2, 1], dtype=torch.float64))
    d = top_singular_directions(m, 3, gaussian(100, 11, 0, 1, m.device))
    torch.testing.assert_close(d, top_singular_directions(m, 3), atol=1e-10, rtol=0)


def test_rank_of_the_weights_grows_by_k_a_step():
    """(d): from zero, without decay."""
    p = nn.Parameter(torch.zeros(48, 64, dtype=torch.float64))
    optimizer = NuMuon([p], weight_decay=0.0, rank=3 / 48)
    for step in range(1, 5):
        p.grad = randn(48, 64, seed=step)
        optimizer.step()
        assert int(torch.linalg.matrix_rank(p.data)) == 3 * step


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 6, 4)])
def test_numuon_is_the_equation(shape, nesterov, adjust):
    start, lr, wd, mu = randn(*shape, seed=9), 0.02, 0.3, 0.9
    p = nn.Parameter(start.clone())
    optimizer = NuMuon([p], lr, wd, mu, nesterov, rank=0.4, adjust=adjust)
    w, m, k = start.clone(), torch.zeros_like(start), 2
    rows, columns = shape[-2:]
    scale = 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    for t in range(6):
        grad = randn(*shape, seed=20 + t)
        p.grad = grad.clone()
        optimizer.step()
        m = mu * m + (1 - mu) * grad
        left, _, right = torch.linalg.svd((1 - mu) * grad + mu * m if nesterov else m, full_matrices=False)
        w = w * (1 - lr * wd) - lr * scale * left[..., :k] @ right[..., :k, :]
    torch.testing.assert_close(p.data, w, atol=1e-10, rtol=1e-9)


def test_fused_matrices_have_their_own_directions():
    p = nn.Parameter(torch.zeros(12, 6, dtype=torch.float64))
    optimizer = build("optimizer", {"name": "numuon", "rank": 0.5, "weight_decay": 0, "adjust": "original"}).build(
        [NamedParam("p", p, "matrix", (6, 4, 2))]
    )
    p.grad = randn(12, 6)
    optimizer.step()
    for part, grad, k in zip(p.data.split([6, 4, 2]), p.grad.split([6, 4, 2]), (3, 2, 1), strict=True):
        torch.testing.assert_close(part, -0.02 * top_singular_directions(grad, k), atol=1e-12, rtol=0)


def test_schedules():
    assert [share_at(x, "fixed", 0.3) for x in (0, 0.5, 2)] == [0.3] * 3
    cosine = [share_at(x, "cosine", 0.2) for x in (0, 0.25, 0.5, 1, 1.5)]
    assert cosine == pytest.approx([1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.2, 0.2])
    pieces = ((0.25, 0.5), (0.5, 0.1))
    assert [share_at(x, "piecewise", 0.9, pieces) for x in (0, 0.24, 0.25, 0.49, 0.5, 3)] == [1, 1, 0.5, 0.5, 0.1, 0.1]
    assert [rank_of((30, 40), r) for r in (1e-9, 0.1, 0.101, 1)] == [1, 3, 4, 30]
    assert rank_of((3, 1, 7), 0.2) == 1


def ranks_of_the_steps(optimizer, p, steps, seed=0):
    found = []
    for i in range(steps):
        before = p.detach().clone()
        p.grad = randn(*p.shape, seed=seed + i)
        optimizer.step()
        found.append(int(torch.linalg.matrix_rank(p.detach() - before, rtol=1e-6)))
    return found


def test_the_rank_follows_the_schedule_and_the_checkpoint():
    settings = {"name": "numuon", "weight_decay": 0.0, "schedule": "piecewise", "total_steps": 6}
    settings["pieces"] = [[0.5, 0.5], [0.8, 0.125]]
    p = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    params = [NamedParam("p", p, "matrix")]
    optimizer = build("optimizer", settings).build(params)
    assert ranks_of_the_steps(optimizer, p, 4) == [8, 8, 8, 4]
    resumed = build("optimizer", settings).build(params)
    load_named_state(resumed, params, named_state(optimizer, params))
    for o in (copy.deepcopy((p, optimizer)), (p, resumed)):
        assert ranks_of_the_steps(o[1], o[0], 3, seed=4) == [4, 1, 1]


def test_random_blocks_differ_by_step_and_agree_by_seed():
    device = torch.device("cpu")
    assert torch.equal(gaussian(9, 4, 3, 7, device), gaussian(9, 4, 3, 7, device))
    assert not torch.equal(gaussian(9, 4, 3, 7, device), gaussian(9, 4, 3, 8, device))
    assert not torch.equal(gaussian(9, 4, 3, 7, device), gaussian(9, 4, 4, 7, device))
    ends = []
    for seed in (0, 0, 1):
        p = nn.Parameter(torch.zeros(64, 64))
        optimizer = NuMuon([p], rank=0.1, seed=seed)
        for i in range(2):
            p.grad = randn(64, 64, seed=i, dtype=torch.float32)
            optimizer.step()
        ends.append(p.detach().clone())
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_zero_low_rank_and_non_finite_gradients():
    for k, omega in ((2, None), (2, gaussian(40, 10, 0, 1, torch.device("cpu")))):
        assert not top_singular_directions(torch.zeros(30, 40), k, omega).any()
        one = torch.outer(randn(30, dtype=torch.float32), randn(40, seed=1, dtype=torch.float32))
        assert float(top_singular_directions(one, k, omega).square().sum()) == pytest.approx(1, abs=1e-5)
        tiny = top_singular_directions(1e-30 * one, k, omega)
        torch.testing.assert_close(tiny, top_singular_directions(one, k, omega), atol=1e-5, rtol=0)
        both = torch.stack([one, torch.full_like(one, math.nan)])
        found = top_singular_directions(both, k, omega)
        assert found[0].isfinite().all() and found[1].isnan().all()


def test_stable_rank():
    assert float(stable_rank(torch.eye(5))) == pytest.approx(5)
    assert stable_rank(torch.stack([torch.ones(3, 4), torch.zeros(3, 4)])).tolist() == pytest.approx([1, 0])
    m = with_spectrum(20, 10, torch.tensor([2.0, 1, 1], dtype=torch.float64))
    assert float(stable_rank(m)) == pytest.approx(1.5)


def test_steps_lower_the_stable_rank_of_the_weights():
    """What it is for, on a quadratic loss whose target has full rank."""
    ranks = {}
    for name, optimizer in (("muon", Muon), ("numuon", NuMuon)):
        p = nn.Parameter(torch.zeros(24, 32))
        target = randn(24, 32, dtype=torch.float32)
        o = optimizer([p], lr=0.02, weight_decay=0.0, dtype=torch.float32)
        for _ in range(20):
            p.grad = p.detach() - target
            o.step()
        ranks[name] = float(stable_rank(p.detach()))
    assert ranks["numuon"] < 0.7 * ranks["muon"]


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"rank": 0}, r"rank=0.*greater than 0"),
        ({"rank": -0.1}, "greater than 0"),
        ({"rank": 1.5}, "less than or equal to 1"),
        ({"total_steps": 100}, "no meaning with schedule=fixed"),
        ({"schedule": "cosine", "total_steps": 0}, "total_steps"),
        ({"schedule": "linear", "total_steps": 5}, "schedule"),
        ({"schedule": "piecewise", "total_steps": 5, "pieces": [[0.5, 0.0]]}, "share in pieces"),
        ({"schedule": "piecewise", "total_steps": 5, "pieces": [[0.5, 0.5], [0.2, 0.1]]}, "increasing"),
        ({"schedule": "piecewise", "total_steps": 5, "pieces": [[1.5, 0.5]]}, r"in \[0, 1\]"),
        ({"schedule": "piecewise", "total_steps": 5, "pieces": []}, "pieces"),
        ({"momentum": 0, "nesterov": True}, "nesterov needs momentum"),
        ({"inner": "muon"}, "cannot"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "numuon", **settings})


def test_the_plain_class_refuses_too():
    p = nn.Parameter(torch.zeros(3, 3))
    for settings in ({"rank": 0.0}, {"rank": 1.1}, {"schedule": "cosine"}, {"schedule": "steps", "total_steps": 3}):
        with pytest.raises(ValueError):
            NuMuon([p], **settings)
    with pytest.raises(ValueError, match="takes matrices"):
        NuMuon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ConfigError, match="no hidden matrices"):
        build("optimizer", "numuon").build([NamedParam("b", nn.Parameter(torch.zeros(3)), "bias")])
