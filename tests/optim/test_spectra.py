"""SPECTRA against singular values in float64, its inner optimizers, and the authors' way by difference of weights."""

import copy
import logging
import math

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build
from trainwright.optim.adamw import AdamW
from trainwright.optim.composite import CompositeOptimizer
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.optim.spectra import Spectra, soft_clip, soft_clip_vectors
from trainwright.optim.state import load_named_state, named_state


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def signs(*shape):
    return randn(*shape).sign()


def by_svd(u, c):
    left, s, right = torch.linalg.svd(u.double(), full_matrices=False)
    return left @ torch.diag_embed(s / (1 + s**2 / c**2).sqrt()) @ right


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def spectra(model, **settings):
    return build("optimizer", {"name": "spectra", **settings}).build(named(model))


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12), (1, 9), (9, 1), (3, 6, 4), (2, 3, 4, 7)])
@pytest.mark.parametrize("c", [0.5, 3.0])
def test_soft_clip_is_the_map_of_singular_values(shape, c):
    u = randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(soft_clip(u, c, steps=20), by_svd(u, c), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("inner", ["adamw", "lion", "muon"])
def test_a_large_c_is_the_inner_optimizer(inner):
    """(a): c = 1e6 equals the inner one."""
    one, two = Zoo(), Zoo()
    train(one, build("optimizer", inner).build(named(one)), 4)
    train(two, spectra(two, inner=inner, c=1e6, adjust="none"), 4)
    for (n, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-6, msg=n)


def test_a_large_c_changes_nothing_in_bfloat16_either():
    u = randn(24, 16)
    torch.testing.assert_close(soft_clip(u, 1e6, dtype=torch.bfloat16), u, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (96, 96)])
@pytest.mark.parametrize("c", [1.0, 5.0])
def test_spectral_norm_stays_below_c(shape, c):
    """(b)"""
    for u in (randn(*shape), signs(*shape), 100 * randn(*shape)):
        assert torch.linalg.matrix_norm(soft_clip(u, c).double(), 2) < c * (1 + 1e-3)


def test_accuracy_on_sign_matrices():
    """(c): of the iteration against singular values."""
    wide, square = signs(128, 512), signs(128, 128)
    assert relative(soft_clip(wide, 5.0), by_svd(wide, 5.0)) < 1e-5
    assert relative(soft_clip(wide, 5.0, dtype=torch.bfloat16), by_svd(wide, 5.0)) < 1e-2
    assert relative(soft_clip(square, 1.0), by_svd(square, 1.0)) < 1e-3  # the unstretched one: 3e-3 after 10 rounds
    assert relative(soft_clip(square, 1.0, steps=8), by_svd(square, 1.0)) < 1e-5
    assert relative(soft_clip(square, 1.0, steps=8, dtype=torch.bfloat16), by_svd(square, 1.0)) < 5e-2


@pytest.mark.parametrize("c, warns", [(0.25, True), (1.0, False)])
def test_warns_once_when_the_iteration_is_too_short(c, warns, caplog):
    """(c): 128 x 128 signs have a norm of 22, at which 6 rounds leave an error of 0.05 %."""
    p = nn.Parameter(torch.zeros(128, 128))
    optimizer = Spectra(Lion([p]), c=c)
    with caplog.at_level(logging.WARNING, "trainwright"):
        for i in range(4):
            p.grad = randn(128, 128, seed=i)
            optimizer.step()
    assert [("set ns_steps=8" in r.getMessage()) for r in caplog.records] == ([True] if warns else [])


@pytest.mark.parametrize("length", [1e-3, 2.0, 5.0, 400.0])
def test_rank_one_and_vectors_have_a_closed_form(length):
    """(d), and a vector is what the matrix with one row is; nothing jumps where |u| = c."""
    c, left, right = 5.0, randn(6, dtype=torch.float64), randn(9, seed=1, dtype=torch.float64)
    u = length * torch.outer(left / left.norm(), right / right.norm())
    torch.testing.assert_close(soft_clip(u, c, steps=30), u / math.sqrt(1 + (length / c) ** 2), atol=1e-9, rtol=1e-9)
    v = length * right / right.norm()
    expected = v / math.sqrt(1 + (length / c) ** 2)
    torch.testing.assert_close(soft_clip_vectors([v, v[:0], v.sum()], c)[0], expected)
    torch.testing.assert_close(soft_clip(v[None], c, steps=30)[0], expected, atol=1e-9, rtol=1e-9)
    a, b = soft_clip_vectors([v * (1 - 1e-9), v * (1 + 1e-9)], c)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (8,)])
def test_equals_the_authors_way_by_difference(shape, weight_decay):
    """(e): the update found again from the weights that the inner optimizer leaves."""
    lr, c = 0.01, 1.5
    start = randn(*shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = Spectra(AdamW([ours], lr=lr, weight_decay=weight_decay), c=c)
    b = torch.optim.AdamW([theirs], lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    for i in range(10):
        ours.grad = randn(*shape, seed=i + 1)
        theirs.grad = ours.grad.clone()
        before = theirs.detach().clone()
        a.step(), b.step()
        u = (before - theirs.detach()) / lr - weight_decay * before
        if u.ndim == 1:
            clipped = u / (1 + (u.norm() / c) ** 2).sqrt()
        else:
            clipped = by_svd(u, c).float() * math.sqrt(max(1, shape[0] / shape[1]))
        theirs.data.copy_((1 - lr * weight_decay) * before - lr * clipped)
    torch.testing.assert_close(ours.data, theirs.data, atol=1e-5, rtol=1e-5)
    assert (ours - start).norm() > 0.05


def step_length(model, optimizer, grads, lr):
    before = {n: p.detach().clone() for n, p in model.items()}
    for p, g in zip(model.values(), grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    return {n: (before[n] - p.detach()) / lr for n, p in model.items()}


def test_threshold_follows_the_warm_up():
    """c lr stays while the rate rises, then c; a fall later does not raise it again, and rate 0 does nothing."""
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = Spectra(Lion([p], lr=0.1, weight_decay=0.0), c=0.5)
    group = optimizer.param_groups[0]
    longest = []
    for lr in (0.0, 0.025, 0.05, 0.1, 0.1, 0.05, 0.01):
        group["lr"] = lr
        before = p.detach().clone()
        p.grad = 1e3 * randn(4, 4, dtype=torch.float64)
        optimizer.step()
        longest.append(float(torch.linalg.matrix_norm(p.detach() - before, 2)))
        threshold = optimizer.threshold(group)
        wanted = {0.0: None, 0.025: 2.0, 0.05: 1.0}.get(lr, 0.5) if len(longest) < 4 else 0.5
        assert threshold == (wanted if wanted is None else pytest.approx(wanted))
    assert longest[0] == 0.0 and all(x < 0.5 * 0.1 for x in longest)
    assert longest[-1] < 0.5 * 0.01


def test_warm_up_ends_where_the_rate_stops_rising_below_its_peak():
    p = nn.Parameter(torch.zeros(4, 4))
    optimizer = Spectra(Lion([p]), c=1.0)
    group = optimizer.param_groups[0]
    group["initial_lr"], found = 1.0, []
    for lr in (0.25, 0.5, 0.98, 0.97, 0.99):
        group["lr"], p.grad = lr, torch.ones(4, 4)
        optimizer.step()
        found.append(optimizer.threshold(group))
    assert found == pytest.approx([4, 2, 1 / 0.98, 1, 1])
    constant = Spectra(Lion([p]), c=1.0, warm_up=False)
    constant.param_groups[0]["lr"] /= 10
    constant.step()
    assert constant.threshold(constant.param_groups[0]) == 1.0


def test_warm_up_goes_on_after_a_checkpoint():
    first = Zoo()
    optimizer = spectra(first)
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * group["initial_lr"]
    train(first, optimizer, 1)
    other = Zoo()
    resumed = spectra(other)
    load_named_state(resumed, named(other), named_state(optimizer, named(first)))
    for o, model in ((optimizer, first), (resumed, other)):
        for group in o.param_groups:
            group["lr"] = 0.5 * group["initial_lr"]  # no longer rises
        train(model, o, 1)
        assert [o.threshold(g) for g in o.param_groups] == [5.0, 5.0]


def test_experts_and_fused_matrices_are_clipped_one_by_one():
    grads = {"stack": randn(3, 6, 4), "fused": randn(12, 4, seed=1)}
    grads["stack"][0] *= 1e3  # with one bound for all, the others would not converge
    lr, c = 0.1, 0.7
    params = {n: nn.Parameter(torch.zeros_like(g)) for n, g in grads.items()}
    named_ = [NamedParam("stack", params["stack"], "expert"), NamedParam("fused", params["fused"], "matrix", (6, 4, 2))]
    for inner in ({"name": "adamw"}, {"name": "muon"}):
        inner |= {"weight_decay": 0.0, "lr": lr}
        optimizer = build("optimizer", {"name": "spectra", "c": c, "inner": inner}).build(named_)
        plain = {n: nn.Parameter(torch.zeros_like(g)) for n, g in grads.items()}
        base = build("optimizer", inner).build(
            [NamedParam(n.name, plain[n.name], n.role, n.splits) for n in named_],
        )
        found = step_length(params, optimizer, grads.values(), lr)
        raw = step_length(plain, base, grads.values(), lr)
        for i in range(3):
            wanted = by_svd(raw["stack"][i], c) * math.sqrt(6 / 4)
            torch.testing.assert_close(found["stack"][i].double(), wanted, atol=2e-5, rtol=1e-4)
        rows = zip(found["fused"].split([6, 4, 2]), raw["fused"].split([6, 4, 2]), strict=True)
        for part, u in rows:
            wanted = by_svd(u, c) * math.sqrt(max(1, len(u) / 4))
            torch.testing.assert_close(part.double(), wanted, atol=2e-5, rtol=1e-4)
        for p in params.values():
            p.data.zero_()


def test_vectors_can_be_left_alone():
    p, q = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    a, b = Spectra(Lion([p]), c=0.1, vectors=False), Spectra(Lion([q]), c=0.1)
    for o, x in ((a, p), (b, q)):
        x.grad = torch.ones(5)
        o.step()
    assert p[0].item() == pytest.approx(-1e-4) and q.norm().item() == pytest.approx(
        1e-4 * 0.1 / math.sqrt(1 + 0.01 / 5), rel=1e-5
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_pre_clip_is_the_map_of_the_gradient(transposed):
    """AdamW's second moment shows what it was given; a weight that lies transposed in memory is stepped alike."""
    p = nn.Parameter(torch.zeros(6, 4) if not transposed else torch.zeros(4, 6).t())
    optimizer = Spectra(AdamW([p]), c=None, pre_clip=0.1)
    p.grad = torch.empty_like(p).copy_(randn(6, 4))
    kept = p.grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, kept)
    wanted = 0.05 * by_svd(kept, 0.1).square()
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"].double(), wanted, atol=1e-6, rtol=1e-3)
    # the first step of AdamW is the sign
    torch.testing.assert_close(p.data / 1e-3, -by_svd(kept, 0.1).sign().float(), atol=1e-3, rtol=0)


def test_every_part_of_a_composite_is_wrapped():
    model = Zoo()
    optimizer = spectra(model, inner="muon")
    assert isinstance(optimizer, CompositeOptimizer)
    assert [type(p).__name__ + type(p.inner).__name__ for p in optimizer.parts] == ["SpectraMuon", "SpectraAdamW"]
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 0.02, 0.02]


def test_rate_and_decay_of_the_wrapper_are_the_inner_ones():
    config = build("optimizer", {"name": "spectra", "lr": 0.003, "weight_decay": 0.2, "inner": "muon"})
    assert (config.inner.lr, config.inner.weight_decay) == (0.003, 0.2)
    assert (config.inner.inner.lr, config.inner.inner.weight_decay) == (0.003, 0.1), "Muon's own, at the new rate"
    left = build("optimizer", {"name": "spectra", "inner": {"name": "lion", "lr": 0.004}})
    assert left.lr is None and (left.inner.lr, left.inner.weight_decay) == (0.004, 0.3)
    again = build("optimizer", {**config.model_dump(), "lr": 0.005})  # a resolved recipe, swept
    assert (again.inner.lr, again.inner.weight_decay) == (0.005, 0.2)
    groups = again.build(named(Zoo())).param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.005, 0.2), (0.003, 0.1), (0.003, 0.0)], "as it says"
    nested = build("optimizer", {"name": "muon", "inner": {"name": "spectra", "lr": 0.002}})
    assert nested.inner.inner.lr == 0.002


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"c": 0}, r"c=0.*greater than 0"),
        ({"c": -1.0}, "greater than 0"),
        ({"pre_clip": 0}, "pre_clip.*greater than 0"),
        ({"c": None}, "nothing would be clipped"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"lr": 0}, "greater than 0"),
        ({"lr": 20.0}, r"lr \* weight_decay"),
        ({"inner": "spectra"}, "spectra in spectra"),
        ({"inner": {"name": "adamw", "lr": -1}}, "inner.lr"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "spectra", **settings})


def test_coupled_decay_is_refused():
    with pytest.raises(ConfigError, match=r"inner\.name='sgd'.*adamw"):
        spectra(Zoo(), inner="sgd")
    with pytest.raises(TypeError, match="UpdateRule"):
        Spectra(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    rule = Lion([nn.Parameter(torch.zeros(2))])
    for settings in ({"c": 0.0}, {"pre_clip": -1.0}, {"c": None}):
        with pytest.raises(ValueError):
            Spectra(rule, **settings)
    with pytest.raises(ValueError, match="Spectra in Spectra"):
        Spectra(Spectra(rule))


def test_both_clippings_together_warn(caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        spectra(Zoo(), pre_clip=0.1)
    assert "one of them" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainwright"):
        spectra(Zoo(), pre_clip=0.1, c=None)
    assert not caplog.records


@pytest.mark.parametrize("clip", ["global_norm", "zclip"])
def test_pre_clip_refuses_clipping_before_it(clip):
    pre = {"name": "spectra", "pre_clip": 0.1, "c": None}
    for optimizer in (pre, {"name": "mgup", "inner": pre}):
        with pytest.raises(ConfigError, match=r"spectra cannot be combined with clip.*raw gradients.*clip: none"):
            RunConfig.from_dict({"optimizer": optimizer, "clip": clip})
    RunConfig.from_dict({"optimizer": pre, "clip": "none"})
    RunConfig.from_dict({"optimizer": "spectra", "clip": clip})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_does_not_end_the_run_by_its_warning(bad, caplog):
    p, q = nn.Parameter(torch.eye(6)), nn.Parameter(torch.eye(6))
    optimizer = Spectra(AdamW([p, q]), c=1e-3)
    with caplog.at_level(logging.WARNING, "trainwright"):
        for step in range(4):
            p.grad, q.grad = torch.ones(6, 6), torch.ones(6, 6)
            if step == 0:
                p.grad[0, 0] = bad
            optimizer.step()
    assert q.isfinite().all()
    assert caplog.text.count("times as long as c") == 1  # the finite one's


@pytest.mark.parametrize("inner", ["lion", "muon"])
def test_copies_and_checkpoints_of_other_inner_optimizers(inner):
    model = Zoo()
    optimizer = spectra(model, inner=inner, c=0.8)
    train(model, optimizer, 2)
    other, copied = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    loaded = spectra(third, inner=inner, c=0.8)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fourth = copy.deepcopy(model)
    named_one = spectra(fourth, inner=inner, c=0.8)
    load_named_state(named_one, named(fourth), named_state(optimizer, named(model)))
    for m, o in ((model, optimizer), (other, copied), (third, loaded), (fourth, named_one)):
        train(m, o, 2, first=2)
    for p, *rest in zip(*(m.parameters() for m in (model, other, third, fourth)), strict=True):
        assert all(torch.equal(p, q) for q in rest)
    adamw = spectra(third)
    with pytest.raises(CheckpointError, match="resume with the same optimizer"):
        load_named_state(adamw, named(third), named_state(optimizer, named(model)))


def test_groups_can_be_added():
    p, q = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2))
    optimizer = Spectra(Muon([p], lr=0.1), c=0.5)
    with pytest.raises(ValueError, match="takes matrices"):
        Spectra(Muon([q]))
    optimizer = Spectra(Lion([p], lr=0.1))
    optimizer.add_param_group({"params": [q], "lr": 0.2})
    q.grad = torch.ones(2)
    optimizer.step()
    assert q[0] < 0.9 and optimizer.inner.param_groups is optimizer.param_groups
