"""Grass: the card's checks (a) to (f), moments that are carried over, and refusals."""

import copy

import pytest
import torch
from layouts_worker import GrassByUpdates, on_two_ranks
from optimizer_zoo import Zoo, named, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim import low_rank_inner
from trainwright.optim.base import reported
from trainwright.optim.grass import Grass
from trainwright.optim.grass_rows import carried, from_digits, select_rows, to_digits
from trainwright.optim.low_rank_parts import parts_of
from trainwright.optim.state import optimizer_state_bytes


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _rows(optimizer, p, rank):
    return optimizer.rows(parts_of(p, rank))[0]


# (a)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_all_rows_is_adam_bit_for_bit(shape):
    """Torch's kernel on the whole matrix, with the bias correction beside it, over four selections of all rows."""
    start = _randn(*shape, seed=1, dtype=torch.float32)
    p = nn.Parameter(start.clone())
    optimizer = Grass([p], 0.01, rank=1.0, scale=1.0, gap=5)
    w, m, v = start.clone(), torch.zeros(shape), torch.zeros(shape)
    for t in range(1, 21):
        g = _randn(*shape, seed=10 + t, dtype=torch.float32)
        p.grad = g.clone()
        optimizer.step()
        assert torch.equal(p.grad, g)
        u = torch.zeros(shape)
        torch._fused_adamw_(
            [u], [g], [m], [v], [], [torch.tensor(float("inf"))], lr=-1.0, beta1=0.9, beta2=0.999, weight_decay=0.0,
            eps=1e-6, amsgrad=False, maximize=False,
        )  # fmt: skip
        w = w + u * torch.tensor((1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * -0.01, dtype=torch.float64).float()
        assert torch.equal(p.data, w), t


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_fused_kernel_is_adam(dtype, tolerance):
    """Against the plain form, on tensors in any order of their numbers."""

    def tensors(seed):
        return [_randn(4, 6, seed=seed).to(dtype), _randn(5, 8, seed=seed).to(dtype).mT, _randn(3, 9).to(dtype)[:, 1:4]]

    ours, theirs = (
        [[torch.zeros_like(t).as_strided(t.shape, t.stride()) for t in tensors(0)[:2]] for _ in "mv"] for _ in "ab"
    )
    for moments in (ours, theirs):
        for held in moments:
            held.append(torch.zeros(3, 9, dtype=dtype)[:, 1:4])
    for t in range(4):
        grads = tensors(10 + t)
        wanted = low_rank_inner.adam([g.clone() for g in grads], *theirs, (0.8, 0.95), 1e-5)
        low_rank_inner.fused_adam(grads, *ours, (0.8, 0.95), 1e-5)
        for a, b in zip([*grads, *ours[0], *ours[1]], [*wanted, *theirs[0], *theirs[1]], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    empty = [torch.zeros(0, 4)]
    low_rank_inner.fused_adam(empty, [torch.zeros(0, 4)], [torch.zeros(0, 4)], (0.9, 0.999), 1e-6)
    low_rank_inner.fused_adam([], [], [], (0.9, 0.999), 1e-6)


def test_all_rows_is_torchs_adam():
    start = _randn(6, 9, seed=1)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = Grass([p], 0.01, weight_decay=0.1, rank=6, scale=1.0, eps=1e-14, gap=3)
    b = torch.optim.AdamW([q], 0.01, eps=1e-14, weight_decay=0.1)
    for t in range(10):
        p.grad = _randn(6, 9, seed=10 + t)
        q.grad = p.grad.clone()
        a.step(), b.step()
    torch.testing.assert_close(p.data, q.data, rtol=1e-9, atol=1e-11)


# (b)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
@pytest.mark.parametrize("selection", ["top_r", "multinomial", "uniform"])
def test_other_rows_stay_bit_for_bit(selection, shape):
    p = nn.Parameter(_randn(*shape, dtype=torch.float32))
    optimizer = Grass([p], weight_decay=0.1, rank=3, gap=4, selection=selection)
    dim = 0 if shape[0] < shape[1] else 1
    for t in range(9):
        before = p.detach().clone()
        p.grad = _randn(*shape, seed=t, dtype=torch.float32)
        optimizer.step()
        rows = _rows(optimizer, p, 3)
        moved = {i for i in range(8) if not torch.equal(p.data.select(dim, i), before.select(dim, i))}
        assert moved == set(rows.tolist())
        if t % 4 == 0 and selection == "top_r":
            norms = p.grad.norm(dim=1 - dim)
            assert moved == set(norms.topk(3).indices.tolist())


# (c)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("selection, power", [("multinomial", 1.0), ("multinomial", 2.0), ("uniform", 1.0)])
def test_draws_are_unbiased(selection, power, replacement):
    g = _randn(10, 6, seed=1) * torch.linspace(0.3, 2, 10, dtype=torch.float64)[:, None]
    norms, rank, draws = g.norm(dim=1), 4, 20_000 if replacement else 8_000
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(10, dtype=torch.float64)
    squares = 0.0
    for _ in range(draws):
        rows, rho = select_rows(norms, rank, selection, power, replacement, generator)
        diagonal = torch.zeros(10, dtype=torch.float64).index_add_(0, rows, rho.square())
        weights += diagonal
        squares += float(((diagonal - 1)[:, None] * g).square().sum())
    mean = weights[:, None] / draws * g
    assert (mean - g).norm() < 0.03 * g.norm()
    if replacement:
        q = norms**power if selection == "multinomial" else torch.ones(10, dtype=torch.float64)
        q = q / q.sum()
        wanted = float((norms.square() / (rank * q)).sum() - g.square().sum() / rank)
        assert squares / draws == pytest.approx(wanted, rel=0.03)


def test_variance_is_least_for_odds_by_the_norm():
    norms = torch.linspace(0.3, 2, 10, dtype=torch.float64)

    def variance(odds):
        q = odds / odds.sum()
        return float((norms.square() / q).sum())

    by_norm, by_square, uniform = variance(norms), variance(norms**2), variance(torch.ones(10, dtype=torch.float64))
    assert by_norm < 0.9 * by_square
    assert by_square == pytest.approx(uniform, rel=1e-12)


@pytest.mark.parametrize("selection", ["multinomial", "uniform"])
def test_draws_without_replacement_are_different_rows(selection):
    norms = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    for rank in (1, 3, 5):
        for _ in range(50):
            rows, rho = select_rows(norms, rank, selection, 1.0, False, generator)
            assert len(set(rows.tolist())) == rank and rows.tolist() == sorted(rows.tolist())
            assert rho.isfinite().all() and (rho >= 1).all()
    rows, rho = select_rows(norms, 5, selection, 1.0, False, generator)
    assert torch.equal(rho, torch.ones(5))


def test_rows_without_a_gradient_are_not_drawn():
    norms = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows, _ = select_rows(norms, 3, "multinomial", 1.0, True, generator)
        assert set(rows.tolist()) <= {1, 3}
    for replacement in (True, False):
        rows, rho = select_rows(torch.zeros(5), 3, "multinomial", 1.0, replacement, generator)
        assert rho.isfinite().all()


# (d) is in test_grass_linear.py


# (e)
def test_bytes_of_state():
    p = nn.Parameter(torch.zeros(1024, 4096))
    p.grad = torch.ones_like(p)
    optimizer = Grass([p], rank=128, carry=False)
    optimizer.step()
    moments = sum(optimizer.state[p][k].numel() for k in ("exp_avg", "exp_avg_sq"))
    assert moments == 1_048_576
    assert optimizer_state_bytes(optimizer) == 4 * moments + 3 * 128 + 1024  # indexes, marks of rows seen


# (f)
def test_two_ranks(tmp_path):
    found = on_two_ranks(tmp_path, "grass")
    # R as a partial sum, 2 x 100 numbers, and each rank's half of the update: r / m of the 800 of the matrix
    assert [f.pop("sent") for f in found] == [[[8 + 200 + 100, 200 + 100] * 2]] * 2
    for case in found[0]:
        for f in (f[case] for f in found):
            assert max(f["difference"], f["resumed"]) < 1e-12 < 1e-3 < f["way"], case
        rows = [f[case]["rows"] for f in found]
        if case.startswith(("experts", "fused experts")):  # each rank has its own
            assert all(a + b == w for a, b, w in zip(*rows, found[0][case]["whole_rows"], strict=True)), case
        else:
            assert rows[0] == rows[1] == found[0][case]["whole_rows"], case
    for case in ("columns", "rows over columns", "experts"):  # what is selected lies whole on each rank
        assert found[0][f"{case}, top_r"]["sent"] == 0, case


@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"selection": "multinomial"}, {"subspace": "lion"}])
def test_a_step_makes_nothing_of_the_size_of_the_matrix(shape, settings):
    """At a selection neither: every fresh tensor is R, or a vector."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                    seen.append(t.untyped_storage().nbytes() // 4)
            return out

    p = nn.Parameter(_randn(*shape, dtype=torch.float32))
    optimizer = Grass([p], rank=6, gap=3, **settings)
    for t in range(3):
        p.grad = _randn(*shape, seed=t, dtype=torch.float32)
        held = [p, p.grad, *(v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))]
        known = {t.untyped_storage().data_ptr() for t in held}
        seen.clear()
        with Watch():
            optimizer.step()
        assert max(seen) == 6 * 64, (t, seen)


def test_a_state_that_is_written_to_is_read_again():
    """What a step keeps of the selections is not what counts: the state does."""
    p, q = (nn.Parameter(_randn(8, 12)) for _ in range(2))
    a, b = Grass([p], rank=3, gap=9), Grass([q], rank=3, gap=9)
    for t in range(4):
        if t == 2:
            rows = torch.tensor([0, 4, 7])
            a.state[p]["rows"].copy_(to_digits(rows))  # in place
            b.state[q]["rows"] = to_digits(rows)
        p.grad, before = _randn(8, 12, seed=t), p.detach().clone()
        q.grad = p.grad.clone()
        a.step(), b.step()
        assert torch.equal(p, q)
    assert {i for i in range(8) if not torch.equal(p[i], before[i])} == {0, 4, 7}


# moments that stay
@pytest.mark.parametrize("subspace", ["adam", "lion", "sgd"])
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("selection, replacement", [("top_r", True), ("multinomial", True), ("multinomial", False)])
def test_selections_follow_each_other(selection, replacement, carry, subspace):
    """Row by row in float64: each has moments, an age and rho of its own."""
    start, lr, wd, b1, b2, eps, scale, gap, rank = _randn(8, 11, seed=1), 0.02, 0.3, 0.8, 0.9, 1e-5, 0.5, 3, 4
    p = nn.Parameter(start.clone())
    optimizer = Grass(
        [p], lr, wd, rank=rank, scale=scale, subspace=subspace, betas=(b1, b2), eps=eps, gap=gap,
        selection=selection, replacement=replacement, carry=carry, seed=7,
    )  # fmt: skip
    w, slots = start.clone(), []
    changes = 0
    for t in range(10):
        p.grad = _randn(8, 11, seed=10 + t)
        optimizer.step()
        if t % gap == 0:
            rows = _rows(optimizer, p, rank).tolist()
            rho = optimizer.state[p]["rho"].tolist() if selection != "top_r" else [1.0] * rank
            known = {s["row"]: s for s in slots} if carry else {}
            changes += 0 < len(known.keys() & set(rows)) < rank
            slots = [
                {
                    "row": i, "rho": r, "age": known.get(i, {"age": 0})["age"],
                    "m": known[i]["m"] * (r / known[i]["rho"]) if i in known else torch.zeros(11, dtype=torch.float64),
                    "v": known[i]["v"] * (r / known[i]["rho"]) ** 2 if i in known else torch.zeros(11).double(),
                }
                for i, r in zip(rows, rho, strict=True)
            ]  # fmt: skip
        for i in {s["row"] for s in slots}:
            w[i] *= 1 - lr * wd
        for s in slots:
            s["age"] += 1
            r = s["rho"] * p.grad[s["row"]]
            if subspace == "lion":
                n = (b1 * s["m"] + (1 - b1) * r).sign()
                s["m"] = b2 * s["m"] + (1 - b2) * r
            else:
                s["m"], s["v"] = b1 * s["m"] + (1 - b1) * r, b2 * s["v"] + (1 - b2) * r**2
                correction = (1 - b2 ** s["age"]) ** 0.5 / (1 - b1 ** s["age"])
                n = correction * s["m"] / (s["v"].sqrt() + eps) if subspace == "adam" else r
            w[s["row"]] -= lr * scale * s["rho"] * n
        torch.testing.assert_close(p.data, w, rtol=1e-10, atol=1e-12)
    assert changes > 0 or not carry


def test_experts_are_selected_one_by_one():
    stack = _randn(3, 6, 9)
    whole, singles = nn.Parameter(stack.clone()), [nn.Parameter(m.clone()) for m in stack]
    a, b = Grass([whole], rank=2, gap=2, weight_decay=0.1), Grass(singles, rank=2, gap=2, weight_decay=0.1)
    for t in range(5):
        whole.grad = _randn(3, 6, 9, seed=10 + t)
        for p, g in zip(singles, whole.grad, strict=True):
            p.grad = g.clone()
        a.step(), b.step()
    torch.testing.assert_close(whole.data, torch.stack([p.data for p in singles]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("selection", ["top_r", "multinomial"])
def test_whole_updates_give_the_same_step(selection):
    """What a wrapper does, against the step that writes to the selected rows alone."""
    settings = {"weight_decay": 0.1, "rank": 2, "gap": 3, "selection": selection}
    shapes = [((8, 5), ()), ((5, 8), ()), ((3, 6, 4), ()), ((9, 6), (4, 5)), ((0, 4), ())]
    a, b = ([nn.Parameter(_randn(*s, seed=i)) for i, (s, _) in enumerate(shapes)] for _ in range(2))
    one, two = (
        cls([{"params": [p], "splits": splits} for p, (_, splits) in zip(params, shapes, strict=True)], **settings)
        for cls, params in ((Grass, a), (GrassByUpdates, b))
    )
    for t in range(7):
        for i, (p, q) in enumerate(zip(a, b, strict=True)):
            p.grad = _randn(*p.shape, seed=10 * t + i)
            q.grad = p.grad.clone()
        one.step(), two.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p.data, q.data, rtol=1e-12, atol=1e-14)


def test_coverage():
    p = nn.Parameter(torch.zeros(4, 8))
    optimizer = Grass([p], rank=1, gap=1)
    assert float(optimizer.coverage()) == 0
    for i in (0, 0, 2):
        p.grad = torch.full((4, 8), 0.1)
        p.grad[i] = 1.0
        optimizer.step()
    assert float(optimizer.coverage()) == 0.5
    assert reported(optimizer) == {"grass_coverage": 0.5}


def test_where_rows_were():
    at, stays = carried(torch.tensor([1, 3, 6]), torch.tensor([0, 3, 6, 7]), 8)
    assert stays.tolist() == [False, True, True, False] and at.tolist() == [0, 1, 2, 0]


def test_indexes_survive_a_cast_to_bfloat16():
    rows = torch.tensor([[0, 255, 256], [70_000, 257, 16_777_215]])
    assert torch.equal(from_digits(to_digits(rows).bfloat16().to(torch.uint8)), rows)


@pytest.mark.parametrize("selection", ["top_r", "multinomial"])
def test_bf16_resumes_from_torchs_state_dict(selection):
    """More rows than bfloat16 can count."""
    p = nn.Parameter(_randn(600, 700, dtype=torch.bfloat16))
    q = nn.Parameter(p.detach().clone())
    a, b = (Grass([x], rank=40, gap=2, selection=selection) for x in (p, q))
    for t in range(6):
        if t == 3:
            with torch.no_grad():
                q.copy_(p)
            b.load_state_dict(copy.deepcopy(a.state_dict()))
        p.grad = _randn(600, 700, seed=t, dtype=torch.bfloat16)
        q.grad = p.grad.clone()
        a.step()
        if t >= 3:
            b.step()
    assert torch.equal(p, q)


def test_config_builds_all_selections():
    for settings in (
        {"selection": "multinomial", "proportional_to": "squared_norm", "replacement": False},
        {"selection": "uniform", "carry": False},
        {"subspace": "lion", "rank": 2},
    ):
        model = Zoo()
        optimizer = build("optimizer", {"name": "grass", "gap": 2, **settings}).build(named(model))
        losses = train(model, optimizer, 6)
        assert all(p.isfinite().all() for p in model.parameters()) and losses[-1] == losses[-1]
    group = build("optimizer", {"name": "grass", "selection": "multinomial", "proportional_to": "squared_norm"}).build(
        named(Zoo())
    )
    assert group.param_groups[0]["power"] == 2.0


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"gap": 0}, "greater than 0"),
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"selection": "best"}, "selection"),
        ({"subspace": "adam_8bit"}, "subspace"),
        ({"betas": [0.9, 1.0]}, r"in \[0, 1\)"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "grass", **settings})


def test_a_rank_above_the_side_is_refused():
    with pytest.raises(ConfigError, match=r"rank=7.*\(6\) of up"):
        build("optimizer", {"name": "grass", "rank": 7}).build(named(Zoo()))
    with pytest.raises(ValueError, match="larger than the shorter side"):
        Grass([nn.Parameter(torch.zeros(4, 8))], rank=5)
    with pytest.raises(ValueError, match="gap=0"):
        Grass([nn.Parameter(torch.zeros(4, 8))], gap=0)
    with pytest.raises(ValueError, match="takes matrices"):
        Grass([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="adam_8bit"):
        Grass([nn.Parameter(torch.zeros(4, 8))], subspace="adam_8bit")


def test_stochastic_rounding_decays_selected_rows_alone():
    config = {"name": "grass", "lr": 1e-3, "weight_decay": 0.5, "rank": 16, "stochastic_rounding": True}
    p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = build("optimizer", config).build([NamedParam("w", p, "matrix")])
    for _ in range(40):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    means = p.detach().float().mean(0).sort().values  # columns are selected
    assert torch.equal(means[16:], torch.ones(48))
    assert float(means[:16].mean()) == pytest.approx((1 - 5e-4) ** 40, abs=2e-3)  # 0.980


@pytest.mark.parametrize("gap, steps", [(1, 600), (2, 1100)])
def test_ages_of_bf16_weights_go_on_beyond_what_bfloat16_counts(gap, steps):
    p = nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
    optimizer = Grass([p], rank=4, gap=gap)
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["age"].tolist() == [steps - gap] * 4
