"""LLR: the factors it gives, when, and the optimizers it must then equal."""

import copy
import json
import logging
import math

import llr_worker
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from trainwright.analysis.heavy_tail import alpha, gaussian_alpha
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam, named_params
from trainwright.core.registry import build
from trainwright.optim.adamh import AdamH, MuonH
from trainwright.optim.adamw import AdamW
from trainwright.optim.grass import Grass
from trainwright.optim.llr import LLR, layer_alphas, rate_factors
from trainwright.optim.spam import SPAM
from trainwright.optim.spectral_sphere import SpectralSphere
from trainwright.optim.state import allocate_named_state, load_named_state, named_state

SHAPES = {
    "a": (12, 12),
    "b": (8, 20),
    "c": (30, 9),
    "stack": (3, 8, 10),
    "embed": (11, 8),
    "head": (5, 8),
    "norm": (8,),
}
ROLES = {"a": "matrix", "b": "matrix", "c": "matrix", "stack": "expert", "embed": "embedding", "head": "head"}
SMALL = {"min_size": 8, "every": 6, "ramp": 4, "until": 14}


def draws(shape, steps, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def params_of(dtype=torch.float32):
    return [
        NamedParam(n, nn.Parameter(draws(shape, 1, dtype, seed=i)[0]), ROLES.get(n, "norm"))
        for i, (n, shape) in enumerate(SHAPES.items())
    ]


def run(optimizer, params, steps, first=0):
    for t in range(first, first + steps):
        for i, n in enumerate(params):
            n.param.grad = draws(n.param.shape, 1, n.param.dtype, seed=1000 * t + i)[0]
        optimizer.step()


def make(params, inner="adamw", **settings):
    return build("optimizer", {"name": "llr", "inner": inner, **SMALL, **settings}).build(params)


# (b)
@pytest.mark.parametrize("inner", ["adamw", "lion", "muon"])
def test_equal_factors_are_the_inner_optimizer_bit_for_bit(inner):
    one, two = params_of(), params_of()
    a, b = build("optimizer", inner).build_rule(one), make(two, inner, s1=1.0, s2=1.0)
    run(a, one, 9), run(b, two, 9)
    assert all(torch.equal(p.param, q.param) for p, q in zip(one, two, strict=True))


# (c)
def test_factors_and_their_ramp():
    params = params_of()
    optimizer = make(params, s1=1.1, s2=4.3)
    by_name = {n.name: n.param for n in params}
    expected = dict.fromkeys(by_name, 1.0)
    for t in range(1, 31):
        if t in (1, 7, 13):  # and not 19, which is after ``until``
            alphas = {n: float(alpha(by_name[n].detach()).mean()) for n in ("a", "b", "c", "stack")}
            low, high = min(alphas.values()), max(alphas.values())
            before = dict(expected)
            target = {n: 1.1 + 3.2 * (v - low) / (high - low) for n, v in alphas.items()} | {"embed": 4.3, "head": 4.3}
            begun = t
        run(optimizer, params, 1, first=t)
        factors = {n: optimizer.factors().get(p, 1.0) for n, p in by_name.items()}
        x = min((t - begun + 1) / 4, 1.0)
        for n, value in target.items():
            assert factors[n] == pytest.approx(before[n] + x * (value - before[n]), rel=1e-6), (t, n)
        assert factors["norm"] == 1.0
        if x == 1.0:  # exactly at the last step of the ramp
            tuned = [factors[n] for n in alphas]
            assert (min(tuned), max(tuned)) == (1.1, 4.3)
            expected = factors
    assert t - begun > 6


@pytest.mark.parametrize("hold_decay", [False, True])
def test_it_is_adamw_with_groups_of_their_own_rates(hold_decay):
    one, two = params_of(torch.float64), params_of(torch.float64)
    a = make(two, hold_decay=hold_decay, inner={"name": "adamw", "lr": 0.01, "weight_decay": 0.3})
    decayed = {n.name: n.role != "norm" for n in one}
    groups = [{"params": [n.param], "weight_decay": 0.3 * decayed[n.name]} for n in one]
    b = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for t in range(12):
        run(a, two, 1, first=t)
        for n, q, group in zip(one, two, b.param_groups, strict=True):
            factor = a.factors().get(q.param, 1.0)
            group["lr"] = 0.01 * factor
            if hold_decay:
                group["weight_decay"] = 0.3 * decayed[n.name] / factor
        run(b, one, 1, first=t)
    assert max(a.factors().values()) == 5.0
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p.param, q.param, atol=1e-12, rtol=1e-10, msg=p.name)


def test_muon_and_its_embeddings():
    params = params_of()
    optimizer = make(params, "muon")
    run(optimizer, params, 6)
    factors = [part.factors() for part in optimizer.parts]
    assert [len(f) for f in factors] == [4, 2]
    assert {min(factors[0].values()), max(factors[0].values())} == {1.0, 5.0} and set(factors[1].values()) == {5.0}


# (d)
def test_at_the_start_shapes_are_ranked_and_the_correction_undoes_it():
    shapes = [(128, 128), (128, 344), (64, 1024)]
    params = [nn.Parameter(draws(s, 1, seed=i)[0]) for i, s in enumerate(shapes)]
    plain = layer_alphas(params)
    assert plain == pytest.approx([2.1, 3.05, 5.9], abs=0.25)
    corrected = layer_alphas(params, shape_correction=True)
    assert corrected == pytest.approx([a - gaussian_alpha(*s) for a, s in zip(plain, shapes, strict=True)])
    assert max(map(abs, corrected)) < 0.25
    assert rate_factors(plain, 1.0, 5.0)[0] == 1.0 and rate_factors(plain, 1.0, 5.0)[2] == 5.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(llr_worker.main, args=(str(folder),), nprocs=2)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


# (e)
def test_ranks_get_the_same_factors(ranks):
    one, two = (r["llr"] for r in ranks)
    assert one["sharded"] == two["sharded"] and one["factors"] == two["factors"]
    assert one["sharded"] == pytest.approx(one["whole"], rel=1e-5)
    assert len(set(one["factors"])) >= 4


def test_sparse_momentum_of_spam_on_shards(ranks):
    one, two = (r["spam"] for r in ranks)
    assert one["difference"] < 1e-6 and two["difference"] < 1e-6
    assert one["bytes"] + two["bytes"] == one["whole_bytes"] == 3 * 7 * 16


@pytest.mark.parametrize("through", ["names", "torch", "copy"])
def test_resume_in_mid_ramp_is_exact(through):
    straight, halted = params_of(), params_of()
    a, b = make(straight), make(halted)
    run(a, straight, 20), run(b, halted, 8)
    if through == "copy":
        resumed, c = copy.deepcopy((halted, b))
    else:
        resumed = [NamedParam(n.name, nn.Parameter(n.param.detach().clone()), n.role) for n in halted]
        c = make(resumed)
    if through == "torch":
        c.load_state_dict(copy.deepcopy(b.state_dict()))
    elif through == "names":
        state = named_state(b, halted)
        scalars = json.loads(json.dumps(state["scalars"]))
        tensors = allocate_named_state(resumed, scalars)
        for n, entries in tensors.items():
            for key, t in entries.items():
                t.copy_(state["tensors"][n][key])
        load_named_state(c, resumed, {"tensors": tensors, "scalars": scalars})
    run(c, resumed, 12, first=8)
    assert all(torch.equal(p.param, q.param) for p, q in zip(straight, resumed, strict=True))


def test_maps():
    alphas = [2.0, 3.0, 5.0]
    assert rate_factors(alphas, 1.0, 4.0) == pytest.approx([1.0, 2.0, 4.0])
    roots = [math.sqrt(a) for a in alphas]
    assert rate_factors(alphas, 1.0, 4.0, "sqrt") == pytest.approx([3 * r / sum(roots) for r in roots])
    logs = [math.log2(a) for a in alphas]
    assert rate_factors(alphas, 1.0, 4.0, "log2") == pytest.approx([3 * x / sum(logs) for x in logs])
    z = [(a - 10 / 3) / math.sqrt(14 / 9) for a in alphas]
    assert rate_factors(alphas, 1.0, 4.0, "sigmoid") == pytest.approx([2 / (1 + math.exp(-4 * x)) for x in z])


@pytest.mark.parametrize("map", ["linear", "sqrt", "log2", "sigmoid"])
def test_equal_and_missing_alphas(map):
    equal = rate_factors([3.0, 3.0], 0.5, 4.0, map)
    assert equal == pytest.approx([0.5 if map == "linear" else 1.0] * 2)
    assert rate_factors([], 0.5, 4.0, map) == []
    assert rate_factors([math.nan, math.inf], 0.5, 4.0, map) == [0.5, 0.5]
    mixed = rate_factors([math.nan, 2.0, 3.0, math.inf], 0.5, 4.0, map)
    assert mixed[1:3] == rate_factors([2.0, 3.0], 0.5, 4.0, map) and mixed[0] == mixed[3] == 0.5


def test_matrices_of_low_rank_keep_s1_and_are_told_of_once(caplog):
    params = params_of()
    with torch.no_grad():
        params[1].param.zero_()
    optimizer = make(params)
    with caplog.at_level(logging.WARNING, "trainwright"):
        run(optimizer, params, 6)
        assert optimizer.factors()[params[1].param] == 1.0
        with torch.no_grad():
            params[1].param.zero_()
        run(optimizer, params, 2, first=6)
    assert [r.getMessage()[:21] for r in caplog.records] == ["llr: 1 of 4 matrices "]


def test_small_matrices_keep_the_common_rate():
    params = params_of()
    optimizer = make(params, min_size=9)
    run(optimizer, params, 6)
    names = {n.name for n in params if n.param in optimizer.factors()}
    assert names == {"a", "c", "embed", "head"}


def test_a_tied_embedding_is_raised_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(12, 10), nn.Linear(10, 10), nn.Linear(10, 12, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    params = named_params(model)
    optimizer = make(params, ramp=1)
    run(optimizer, params, 1)
    assert optimizer.factors() == {model.embed.weight: 5.0, model.mix.weight: 1.0}


def test_fused_matrices_are_taken_apart():
    q, k = draws((16, 16), 1, seed=1)[0], 30 * draws((8, 16), 1, seed=2)[0]
    fused = nn.Parameter(torch.cat([q, k]))
    (found,) = layer_alphas([fused], [(16, 8)])
    assert found == pytest.approx((float(alpha(q)) + float(alpha(k))) / 2, rel=1e-5)
    assert abs(found - layer_alphas([fused])[0]) > 0.1
    params = [
        NamedParam("qk", fused, "matrix", (16, 8)),
        NamedParam("o", nn.Parameter(draws((16, 16), 1)[0]), "matrix"),
    ]
    optimizer = make(params)
    run(optimizer, params, 4)
    assert set(optimizer.factors().values()) == {1.0, 5.0}


def test_the_class_alone_tunes_all_matrices():
    params = [nn.Parameter(draws((10, 10), 1, seed=i)[0]) for i in range(3)] + [nn.Parameter(torch.ones(10))]
    optimizer = LLR(AdamW(params), min_size=8, ramp=1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    factors = sorted(optimizer.factors()[p] for p in params[:3])
    assert (factors[0], factors[-1]) == (1.0, 5.0) and params[3] not in optimizer.factors()


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"s1": 0}, "greater than 0"),
        ({"s1": 3, "s2": 2}, "at most s2"),
        ({"ramp": 60}, "longer than every"),
        ({"shape_correction": True, "map": "sqrt"}, "use linear"),
        ({"map": "cube"}, "linear"),
        ({"every": 0}, "greater than 0"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "llr", **settings})


@pytest.mark.parametrize(
    "spec, says",
    [
        ({"inner": "llr"}, "llr in llr"),
        ({"inner": {"name": "mgup", "inner": "llr"}}, "llr in llr"),
        ({"inner": {"name": "muon", "inner": "llr"}}, "llr in llr"),
        ({"inner": "adamh"}, "llr around adamh: its steps have a fixed length"),
        ({"inner": {"name": "adamh", "base": "muon"}}, "llr around adamh"),
        ({"inner": {"name": "mgup", "inner": "adamh"}}, "llr around adamh"),
    ],
)
def test_what_it_would_do_twice_or_not_at_all_is_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "llr", **spec})


def test_the_class_refuses_it_too():
    for inner, says in ((AdamH, "LLR around AdamH"), (MuonH, "LLR around MuonH"), (lambda p: LLR(AdamW(p)), "in LLR")):
        with pytest.raises(ValueError, match=says):
            LLR(inner([nn.Parameter(torch.ones(9, 9))]))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(
    "inner", [lambda p, wd: Grass(p, rank=6, weight_decay=wd), lambda p, wd: SPAM(p, density=0.25, weight_decay=wd)]
)
def test_what_the_inner_rule_leaves_alone_stays_bit_for_bit(inner, stochastic):
    """Rows that Grass has not selected and entries that SPAM has not drawn do not decay either."""
    starts = [draws((24, 24), 1, seed=i)[0] @ torch.diag(torch.logspace(0, -i, 24)) for i in range(3)]
    starts = [s.bfloat16() for s in starts] if stochastic else starts

    def moved(wrap, wd, draw=0):
        params = [nn.Parameter(s.clone()) for s in starts]
        optimizer = wrap(inner(params, wd))
        for group in optimizer.param_groups:
            group |= {"lr": 0.1, "stochastic_rounding": stochastic, "roundings": 1000 * draw}
        for t in range(3):
            for i, p in enumerate(params):
                p.grad = draws(p.shape, 1, p.dtype, seed=10 * t + i)[0]
            optimizer.step()
        return optimizer, [p.detach() != s for p, s in zip(params, starts, strict=True)]

    # A step may be rounded to nothing: what is stepped is what moves by any of some draws of the rounding.
    runs = [moved(lambda rule: rule, 0.1, draw)[1] for draw in range(8 if stochastic else 1)]
    expected = [torch.stack(masks).any(0) for masks in zip(*runs, strict=True)]
    optimizer, found = moved(lambda rule: LLR(rule, every=3, ramp=1, min_size=3), 0.1)
    assert len(set(optimizer.factors().values())) == 3
    for e, f in zip(expected, found, strict=True):
        assert 0.2 < e.float().mean() < 0.3 and not (f & ~e).any()


def test_the_decay_of_what_is_stepped_has_the_factor():
    """Of Grass with a gradient of zeros after the selection: rows shrink by lr s wd, others do not."""
    tails = [torch.diag(torch.logspace(0, -i, 24, dtype=torch.float64)) for i in (0, 1)]
    starts = [draws((24, 24), 1, torch.float64, seed=i)[0] @ tail for i, tail in enumerate(tails)]
    params = [nn.Parameter(s.clone()) for s in starts]
    optimizer = LLR(
        Grass(params, rank=6, lr=0.1, weight_decay=0.5, subspace="sgd"), every=3, ramp=1, min_size=3, s2=3.0
    )
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    factors = optimizer.factors()
    assert sorted(factors.values()) == [1.0, 3.0]
    for p, s in zip(params, starts, strict=True):
        shrunk = (p.detach() / s).mean(0)  # a column is selected as a whole
        expected = 1 - 0.1 * 0.5 * factors[p]
        assert int((shrunk - expected).abs().lt(1e-12).sum()) == 6 and int((shrunk - 1).abs().lt(1e-12).sum()) == 18


def test_hard_retraction_leaves_no_decay_to_multiply():
    p = nn.Parameter(torch.ones(4, 4))
    for retract, nothing in (("hard", True), ("dynamic", False)):
        rule = SpectralSphere([p], retract=retract, weight_decay=0.1)
        assert (rule.decayed([p], rule.param_groups[0]) is None) == nothing


def test_weights_that_are_not_finite_keep_s1(caplog):
    """A run that diverged is to end as diverged, not with LAPACK's refusal."""
    params = [nn.Parameter(s) for s in draws((12, 12), 3)]
    with torch.no_grad():
        params[0][0, 0], params[1][0, 0] = float("nan"), float("inf")
    stack = torch.stack([p.detach() for p in params])
    assert layer_alphas([stack])[0] != layer_alphas([stack])[0]
    optimizer = LLR(AdamW(params), every=1, ramp=1, min_size=3)
    for p in params:
        p.grad = torch.ones_like(p)
    with caplog.at_level(logging.WARNING, "trainwright"):
        optimizer.step()
    assert [optimizer.factors()[p] for p in params[:2]] == [1.0, 1.0]
    assert "not finite" in caplog.text


def test_the_class_refuses():
    with pytest.raises(ValueError, match="s1"):
        LLR(AdamW([nn.Parameter(torch.ones(2, 2))]), s1=2.0, s2=1.0)


def test_matrices_fused_by_columns_are_tuned():
    """As GPT-2's c_attn: q, k and v side by side. The result is that of the same matrices one upon the other."""
    draw = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    columns = nn.Parameter(draw.clone())
    rows = nn.Parameter(torch.cat(draw.split(64, dim=1)))
    a = LLR(AdamW([columns]), splits={columns: (-64, -64, -64)})
    b = LLR(AdamW([rows]), splits={rows: (64, 64, 64)})
    assert a.tuned == [columns] and b.tuned == [rows]
    assert LLR(AdamW([columns]), splits={columns: (-64, -64, -64)}, min_size=65).tuned == []
    assert LLR(AdamW([columns]), splits={columns: (-20, -100, -72)}).tuned == []
    assert layer_alphas(a.tuned, [(-64, -64, -64)]) == pytest.approx(layer_alphas(b.tuned, [(64, 64, 64)]), rel=1e-5)
    for p, o in ((columns, a), (rows, b)):
        p.grad = torch.ones_like(p)
        o.step()
    torch.testing.assert_close(torch.cat(columns.detach().split(64, dim=1)), rows.detach())
