"""GaLore against its equations in float64, its package, and its limiting cases; the subspace rules; layouts."""

import importlib.util
import json
import math
import sys
import time
import types

import low_rank_worker
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim import low_rank_inner, muon
from trainwright.optim.galore import GaLore
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes

F64 = torch.float64
SHAPES = [(13, 7), (7, 13), (8, 8), (3, 6, 9)]


def draw(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = draw(p.shape, 1000 * t + i, p.dtype)
        optimizer.step()


def by_hand(w, grads, rank, gap, inner, lr, wd, scale):
    """One matrix in float64; the projection as the orthogonal projector's factor, from an eigendecomposition."""
    m, n = w.shape
    state = {}
    for t, g in enumerate(grads):
        if t % gap == 0:
            gram = g.T @ g if m >= n else g @ g.T
            p = torch.linalg.eigh(gram)[1].flip(-1)[:, :rank]  # [k, r]
        r = g @ p if m >= n else p.T @ g
        if "signs" not in state or t % gap == 0:
            # A singular vector's sign is anybody's choice, and the moments see it: take that of LAPACK's SVD.
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            theirs = vh[:rank].T if m >= n else u[:, :rank]
            state["signs"] = (theirs * p).sum(0).sign()
            p = p * state["signs"]
            r = g @ p if m >= n else p.T @ g
        step = inner(state, r, t + 1)
        w = w * (1 - lr * wd) - lr * scale * (step @ p.T if m >= n else p @ step)
    return w


def adam_by_hand(state, r, t, b1=0.9, b2=0.99, eps=1e-6):
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * r
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * r**2
    return math.sqrt(1 - b2**t) / (1 - b1**t) * state["m"] / (state["v"].sqrt() + eps)


def lion_by_hand(state, r, t, b1=0.9, b2=0.99):
    update = torch.sign(b1 * state.get("m", 0) + (1 - b1) * r)
    state["m"] = b2 * state.get("m", 0) + (1 - b2) * r
    return update


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "rule, inner", [("adam", adam_by_hand), ("lion", lion_by_hand), ("sgd", lambda state, r, t: r)]
)
def test_is_the_equation(shape, rule, inner):
    start = draw(shape, 77)
    p = nn.Parameter(start.clone())
    settings = {"rank": 3, "gap": 3, "scale": 0.4, "lr": 0.02, "weight_decay": 0.3}
    optimizer = GaLore([p], subspace=rule, betas=(0.9, 0.99), **settings)
    run(optimizer, [p], 8)
    grads = [draw(shape, 1000 * t) for t in range(8)]
    for i, w in enumerate(start.reshape(-1, *shape[-2:])):
        want = by_hand(
            w, [g.reshape(-1, *shape[-2:])[i] for g in grads], 3, 3, inner, lr=0.02, wd=0.3, scale=0.4
        )  # fmt: skip
        torch.testing.assert_close(p.data.reshape(-1, *shape[-2:])[i], want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_rank_with_sgd_is_sgd(shape):
    """Card (a)."""
    p, q = nn.Parameter(draw(shape, 1, torch.float32)), nn.Parameter(draw(shape, 1, torch.float32))
    run(GaLore([p], lr=0.1, rank=1.0, scale=1.0, subspace="sgd"), [p], 4)
    run(torch.optim.SGD([q], lr=0.1), [q], 4)
    way = (q - draw(shape, 1, torch.float32)).norm()
    assert (p - q).norm() < 1e-6 * way


@pytest.mark.parametrize("name", ["galore", "natural_galore", "online_subspace_descent", "gradnormlorp"])
def test_fast_products_are_the_full_ones_to_bfloat16(name, monkeypatch):
    """Those of float32 weights; of float64 weights there are none. Updates of one matrix at a time are those of all."""
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.bfloat16)
    shapes = [*SHAPES, (400, 300), (300, 400)]
    for dtype in (F64, torch.float32):
        ends = {}
        for products in ("full", "fast"):
            params = [nn.Parameter(draw(s, i, dtype)) for i, s in enumerate(shapes)]
            named = [NamedParam(str(i), p, "expert" if p.ndim > 2 else "matrix") for i, p in enumerate(params)]
            run(build("optimizer", {"name": name, "products": products}).build(named), params, 4)
            ends[products] = [p.detach() for p in params]
        for i, (a, b) in enumerate(zip(ends["full"], ends["fast"], strict=True)):
            way = (a - draw(shapes[i], i, dtype)).norm()
            assert torch.equal(a, b) if dtype == F64 else 0 < (a - b).norm() < 0.03 * way
    with pytest.raises(ConfigError, match="products"):
        build("optimizer", {"name": name, "products": "quick"})


@pytest.mark.skipif(importlib.util.find_spec("galore_torch") is None, reason="galore-torch is not installed")
@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (32, 32), (256, 100)])
def test_b_equals_the_package_bit_for_bit(shape, monkeypatch):
    """Card (b)."""
    spec = importlib.util.find_spec("galore_torch")
    package = types.ModuleType("galore_torch")  # its __init__ wants bitsandbytes, the module needed here does not
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "galore_torch", package)
    from galore_torch.adamw import AdamW as Theirs

    p, q = nn.Parameter(draw(shape, 1, torch.float32)), nn.Parameter(draw(shape, 1, torch.float32))
    group = {"params": [q], "rank": 8, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
    run(GaLore([p], lr=1e-2, rank=8, gap=3), [p], 10)
    run(Theirs([group], lr=1e-2, no_deprecation_warning=True), [q], 10)
    assert torch.equal(p, q)


def test_c_state_is_the_papers_formula():
    """Card (c): 1,179,648 numbers for 1024 x 4096 at rank 128."""
    p = nn.Parameter(torch.zeros(1024, 4096))
    optimizer = GaLore([p], rank=128, projection="random")
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == 4 * 1_179_648


@pytest.mark.parametrize("projection", ["svd", "randomized_svd", "random"])
@pytest.mark.parametrize("shape", SHAPES)
def test_d_the_update_lies_in_the_subspace(shape, projection):
    """Card (d)."""
    p = nn.Parameter(torch.zeros(shape))
    optimizer = GaLore([p], rank=3, projection=projection)
    run(optimizer, [p], 3)
    basis = optimizer.state[p]["projection"]  # [..., k, r]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3).expand(*shape[:-2], 3, 3), atol=1e-5, rtol=0)
    change = p.data
    inside = basis @ (basis.mT @ change) if shape[-2] < shape[-1] else change @ basis @ basis.mT
    assert (change - inside).norm() < 1e-5 * change.norm() and change.norm() > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"projection": "random", "stagger": True, "seed": 3},
        {"projection": "randomized_svd"},
        {"subspace": "adam_8bit"},
        {"subspace": "lion"},
        {"subspace": "sgd"},
    ],
)
def test_e_a_resumed_run_is_the_same(settings):
    """Card (e), over renewals of the projection, through both kinds of checkpoint."""
    results = []
    for way in ("straight", "named", "torch"):
        params = [nn.Parameter(draw(s, i, torch.float32)) for i, s in enumerate(SHAPES)]
        optimizer = GaLore(params, gap=3, rank=4, **settings)
        run(optimizer, params, 4)
        if way != "straight":
            others = [nn.Parameter(p.detach().clone()) for p in params]
            resumed = GaLore(others, gap=3, rank=4, **settings)
            if way == "torch":
                resumed.load_state_dict(optimizer.state_dict())
            else:
                names = [[NamedParam(str(i), p, "matrix") for i, p in enumerate(ps)] for ps in (params, others)]
                state = named_state(optimizer, names[0])
                scalars = json.loads(json.dumps(state["scalars"]))
                tensors = allocate_named_state(names[1], scalars)
                for n, entries in tensors.items():
                    for key, t in entries.items():
                        t.copy_(state["tensors"][n][key])
                load_named_state(resumed, names[1], {"tensors": tensors, "scalars": scalars})
            params, optimizer = others, resumed
        run(optimizer, params, 6, first=4)
        results.append([p.detach() for p in params])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_projections_are_renewed_when_they_should_be():
    def changes(**settings):
        params = [nn.Parameter(draw((6, 5), i, torch.float32)) for i in range(4)]
        optimizer = GaLore(params, rank=2, gap=4, **settings)
        found, before = [], [None] * 4
        for t in range(9):
            run(optimizer, params, 1, first=t)
            now = [optimizer.state[p]["projection"] for p in params]
            found.append([a is None or not torch.equal(a, b) for a, b in zip(before, now, strict=True)])
            before = now
        return [[t for t in range(9) if found[t][i]] for i in range(4)]

    assert changes() == [[0, 4, 8]] * 4
    assert changes(projection="random") == [[0, 4, 8]] * 4
    # staggered: all have to start, then one a step
    assert changes(stagger=True) == [[0, 4, 8], [0, 3, 7], [0, 2, 6], [0, 1, 5]]


def test_a_late_first_gradient_gets_its_own_count():
    p, q = nn.Parameter(draw((6, 5), 0)), nn.Parameter(draw((6, 5), 0))
    optimizer, alone = GaLore([nn.Parameter(draw((6, 5), 1)), p], gap=3), GaLore([q], gap=3)
    run(optimizer, optimizer.param_groups[0]["params"][:1], 2)
    assert torch.equal(p, q)
    for t in range(4):
        p.grad, q.grad = draw((6, 5), t), draw((6, 5), t)
        optimizer.step(), alone.step()
    assert torch.equal(p, q)


def test_randomised_svd_finds_the_leading_directions():
    for shape in [(60, 40), (40, 60), (2, 30, 20)]:
        g = low_rank_worker.graded(shape, 0).double()
        exact, fast = nn.Parameter(torch.zeros_like(g)), nn.Parameter(torch.zeros_like(g))
        spans = []
        for p, projection in ((exact, "svd"), (fast, "randomized_svd")):
            optimizer = GaLore([p], rank=5, projection=projection)
            p.grad = g
            optimizer.step()
            basis = optimizer.state[p]["projection"]
            spans.append(basis @ basis.mT)
        torch.testing.assert_close(spans[0], spans[1], atol=1e-5, rtol=0)


def test_chance_differs_by_matrix_step_and_seed():
    def projections(seed):
        params = [nn.Parameter(torch.zeros(6, 5)) for _ in range(2)]
        optimizer = GaLore(params, rank=2, projection="random", seed=seed, gap=1)
        found = []
        for t in range(2):
            run(optimizer, params, 1, first=t)
            found += [optimizer.state[p]["projection"].clone() for p in params]
        return found

    one, same, other = projections(0), projections(0), projections(1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    distinct = one + other
    assert all(not torch.equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])


@pytest.mark.parametrize("splits", [(8, 3, 3), (-4, -4, -2)])
@pytest.mark.parametrize("settings", [{}, {"subspace": "adam_8bit"}, {"projection": "randomized_svd"}])
def test_fused_matrices_are_stepped_one_by_one(splits, settings):
    dim = 0 if splits[0] > 0 else 1
    start = draw((14, 10), 1, torch.float32)
    whole = nn.Parameter(start.clone())
    pieces = [nn.Parameter(t.clone()) for t in start.split([abs(n) for n in splits], dim)]
    a = GaLore([{"params": [whole], "splits": splits}], rank=2, gap=2, **settings)
    b = GaLore(pieces, rank=2, gap=2, **settings)
    for t in range(4):
        whole.grad = low_rank_worker.graded((14, 10), t)
        for p, g in zip(pieces, whole.grad.split([abs(n) for n in splits], dim), strict=True):
            p.grad = g.clone()
        a.step(), b.step()
    # randomised: another sketch for each place
    tolerance = 2e-4 if "projection" in settings else 1e-6
    torch.testing.assert_close(whole.data, torch.cat([p.data for p in pieces], dim), atol=tolerance, rtol=0)
    assert not torch.equal(whole.data, start)


def test_updates_and_apply_are_the_step():
    p, q = nn.Parameter(draw((9, 5), 0)), nn.Parameter(draw((9, 5), 0))
    a, b = GaLore([p], weight_decay=0.1), GaLore([q], weight_decay=0.1)
    group = b.param_groups[0]
    for t in range(3):
        run(a, [p], 1, first=t)
        with torch.no_grad():
            b.apply([q], b.updates([q], [draw((9, 5), 1000 * t)], group), group)
    torch.testing.assert_close(p, q, atol=1e-12, rtol=1e-12)


def test_stochastic_rounding_moves_weights_that_nearest_rounding_leaves():
    moved = {}
    for stochastic in (False, True):
        spec = {"name": "galore", "lr": 4e-3, "rank": 1.0, "stochastic_rounding": stochastic}
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = build("optimizer", spec).build([NamedParam("p", p, "matrix")])
        for t in range(20):
            p.grad = draw(p.shape, t, torch.bfloat16).abs()
            optimizer.step()
        moved[stochastic] = float((1 - p.detach().float()).abs().mean())
    assert moved[True] > 3 * moved[False]


def test_numbers_that_are_not_finite_do_not_end_the_step_half_way():
    params = [nn.Parameter(torch.ones(6, 5)) for _ in range(2)]
    optimizer = GaLore(params)
    params[0].grad, params[1].grad = torch.full((6, 5), float("nan")), torch.ones(6, 5)
    optimizer.step()
    assert params[0].isnan().all() and params[1].isfinite().all()


# --- 8-bit moments ---


def test_the_8_bit_table():
    for signed in (True, False):
        table = low_rank_inner.dynamic_table(signed)
        assert len(set(table)) == 256 and table == sorted(table) and table[-1] == 1 and 0 in table
        assert (min(table) < -0.99) == signed
        if importlib.util.find_spec("torchao") is not None:
            from torchao.optim.quant_utils import create_dynamic_map

            torch.testing.assert_close(torch.tensor(table), torch.tensor(create_dynamic_map(signed)))


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_numbers_come_back_nearly(signed):
    x = draw((50, 300), 0, torch.float32)
    x = x if signed else x.square()
    codes, scales = low_rank_inner.quantise(x, signed)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, x.shape, (50, 2))  # blocks of 256 and 44
    torch.testing.assert_close(scales[:, 1], x[:, 256:].abs().amax(-1))
    back = low_rank_inner.dequantise(codes, scales, signed)
    blocks = scales.repeat_interleave(256, -1)[:, :300]
    assert ((back - x).abs() <= 0.01 * blocks).all()  # half the widest gap, 0.9 / 64 or 0.9 / 128
    table = torch.tensor(low_rank_inner.dynamic_table(signed))
    nearest = (x / blocks).unsqueeze(-1).sub(table).abs().argmin(-1)
    wrong = (codes != nearest.clamp(min=0 if signed else 1)).float().mean()
    assert wrong < 1e-3  # ties by rounding
    zeros = low_rank_inner.quantise(torch.zeros(3, 4), signed)
    assert torch.equal(low_rank_inner.dequantise(*zeros, signed), torch.zeros(3, 4))


def test_a_small_second_moment_does_not_vanish():
    """Rounded to 0, it would blow up the update of a coordinate far below the largest one of its block."""
    grads = [torch.tensor([[1.0, 1e-4]])]
    moments = [([torch.zeros(1, 2, dtype=torch.uint8)], [torch.zeros(1, 1)]) for _ in range(2)]
    for _ in range(50):
        (update,) = low_rank_inner.adam_8bit(grads, *moments, [-1], (0.9, 0.999), 1e-12)
    assert update.abs().max() < 30 and moments[1][0][0][0, 1] == 1


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (3, 16, 12)])
def test_8_bit_is_adam_nearly(shape):
    start = draw(shape, 1, torch.float32)
    results = {}
    for rule in ("adam", "adam_8bit"):
        p = nn.Parameter(start.clone())
        optimizer = GaLore([p], rank=6, subspace=rule)
        run(optimizer, [p], 10)
        results[rule] = p.data - start
        state = optimizer.state[p]
    assert (results["adam"] - results["adam_8bit"]).norm() < 0.1 * results["adam"].norm()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    numbers = math.prod(shape[:-2]) * 6 * max(shape[-2:])
    bytes_ = 2 * numbers + 2 * 4 * numbers // 6 + 4 * math.prod(shape[:-2]) * 6 * min(shape[-2:])
    assert optimizer_state_bytes(optimizer) == bytes_


# --- layouts ---


def test_all_layouts_equal_the_whole(tmp_path):
    """Two ranks; methods of the family on rows, columns, experts, fused matrices and two-dimensional meshes."""
    job = mp.spawn(low_rank_worker.main, args=(str(tmp_path),), nprocs=2, join=False)
    deadline = time.monotonic() + 150
    while not (finished := job.join(timeout=1)) and time.monotonic() < deadline:
        pass
    if not finished:
        for process in job.processes:
            process.kill()
        pytest.fail("the two-rank job did not end within 150 s")
    for rank in range(2):
        found = json.loads((tmp_path / f"low_rank{rank}.json").read_text())
        assert len(found) > 140
        for key, figures in found.items():
            assert figures["way"] > 0.01, key
            assert figures["difference"] < 2e-5, key
            assert figures.get("shapes", True), key
            if "held" in figures and "replicated" not in key:
                assert figures["held"] < 0.7, key


# --- bad input ---


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"gap": 0}, "gap=0: should be greater than 0"),
        ({"rank": 0}, "rank=0: should be a whole number"),
        ({"rank": 1.5}, "rank=1.5: .* or a share"),
        ({"rank": "all"}, "rank='all': should be a whole number"),
        ({"scale": 0}, "greater than 0"),
        ({"betas": [0.9, 1.0]}, r"in \[0, 1\)"),
        ({"projection": "qr"}, "projection"),
        ({"subspace": "adagrad"}, "subspace"),
        ({"inner": {"name": "galore"}}, "inner.*adamw"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "galore", **settings})


def test_a_rank_above_a_side_is_refused_by_name():
    params = [
        NamedParam("layers.0.up", nn.Parameter(torch.zeros(9, 6)), "matrix"),
        NamedParam("layers.0.down", nn.Parameter(torch.zeros(4, 9)), "matrix"),
        NamedParam("empty", nn.Parameter(torch.zeros(0, 9)), "matrix"),
    ]
    says = r"rank=5: is larger than the shorter side \(4\) of layers.0.down; set rank <= 4"
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "galore", "rank": 5}).build(params)
    build("optimizer", {"name": "galore", "rank": 4}).build(params)
    fused = NamedParam("qkv", nn.Parameter(torch.zeros(12, 6)), "matrix", (8, 2, 2))
    with pytest.raises(ConfigError, match=r"shorter side \(2\) of qkv"):
        build("optimizer", {"name": "galore", "rank": 3}).build([fused])


def test_the_rank_as_a_share():
    for rank, shape, want in [(0.25, (512, 2048), 128), (1.0, (5, 9), 5), (0.01, (5, 9), 1), (3, (5, 9), 3)]:
        p = nn.Parameter(torch.zeros(shape))
        optimizer = GaLore([p], rank=rank, projection="random")
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert optimizer.state[p]["projection"].shape == (min(shape), want)
    assert build("optimizer", {"name": "galore", "rank": 1}).rank == 1
    assert isinstance(build("optimizer", {"name": "galore", "rank": 1.0}).rank, float)


@pytest.mark.parametrize(
    "shape, settings, says",
    [
        ((5,), {}, "takes matrices"),
        ((5, 4), {"rank": 5}, "larger than the shorter side"),
        ((5, 4), {"rank": 0}, "1 or more"),
        ((5, 4), {"rank": 1.5}, "share"),
        ((5, 4), {"gap": 0}, "gap=0"),
        ((5, 4), {"betas": (1.0, 0.9)}, "betas"),
    ],
)
def test_the_class_refuses(shape, settings, says):
    with pytest.raises(ValueError, match=says):
        GaLore([nn.Parameter(torch.zeros(shape))], **settings)
