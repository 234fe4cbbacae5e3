"""ZClip: the equations, the limiting cases, bad norms, resume, and what it does to a run of norms with spikes."""

import json
import math
import statistics

import pytest
import side_worker
import torch
from torch import nn

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.core.registry import build
from trainwright.optim.clipping.zclip import ZClip, spike_limit
from trainwright.train.checkpoint import codec


def parameter(norm, size=5):
    """One parameter whose gradient has this norm."""
    p = nn.Parameter(torch.zeros(size))
    p.grad = torch.zeros(size)
    p.grad[1] = norm
    return p


def clipped(clip, norm):
    """Norm of a gradient of norm ``norm`` after ``clip``."""
    p = parameter(norm)
    clip([p])
    return float(p.grad.norm())


def warmed(mean=1.0, std=0.1, **settings):
    """A clipper whose two warm-up norms have this mean and deviation."""
    clip = ZClip(warmup_steps=2, **{"max_norm": None, **settings})
    clipped(clip, mean - std), clipped(clip, mean + std)
    return clip


class Reference:
    """The same in Python numbers, step by step."""

    def __init__(
        self, z_threshold=2.5, max_norm=1.0, alpha=0.97, mode="adaptive", factor=1.0, update_on_spike=True, warmup=25
    ):
        self.z, self.max, self.alpha, self.warmup = z_threshold, max_norm, alpha, warmup
        self.mode, self.factor, self.update = mode, factor, update_on_spike
        self.norms, self.mean, self.var = [], None, None

    def factor_of(self, g):
        if self.mean is None:
            self.norms.append(g)
            if len(self.norms) == self.warmup:
                self.mean, self.var = statistics.fmean(self.norms), statistics.pvariance(self.norms)
            return 1.0 if self.max is None else min(1.0, self.max / (g + 1e-6))
        std = max(math.sqrt(self.var), 1e-3 * self.mean)
        z = (g - self.mean) / (std + 1e-6)
        spike, limit = z > self.z, g
        if spike:
            limit = {
                "adaptive": self.factor * (self.mean + self.z * std / (z / self.z)),
                "mean": self.mean,
                "percentile": self.mean + self.z * std,
            }[self.mode]
        bound = min(limit if spike else math.inf, math.inf if self.max is None else self.max)
        if not spike or self.update:
            self.mean = self.alpha * self.mean + (1 - self.alpha) * limit
            self.var = self.alpha * self.var + (1 - self.alpha) * (limit - self.mean) ** 2
        return min(1.0, bound / (g + 1e-6))


def norms_with_spikes(steps, seed=0, spikes=0.01, first=25):
    """Log-normal norms with deviation 0.1; after ``first`` steps one in a hundred is ten times as large."""
    g = torch.Generator().manual_seed(seed)
    clean = torch.exp(0.1 * torch.randn(steps, generator=g))
    spike = (torch.rand(steps, generator=g) < spikes) & (torch.arange(steps) >= first)
    return clean * torch.where(spike, 10.0, 1.0), spike


# -- (a) the closed form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "limit"), [("adaptive", 1.0625), ("mean", 1.0), ("percentile", 1.25)])
def test_closed_form(mode, limit):
    one = torch.ones(())
    assert float(spike_limit(2 * one, one, 0.01 * one, 2.5, mode)) == pytest.approx(limit, rel=1e-5)
    clip = warmed(mode=mode)
    assert float(clip.mean) == pytest.approx(1.0) and float(clip.var) == pytest.approx(0.01, rel=1e-5)
    assert clipped(clip, 2.0) == pytest.approx(limit, rel=1e-5)
    mean = 0.97 + 0.03 * limit
    assert float(clip.mean) == pytest.approx(mean, rel=1e-6)
    assert float(clip.var) == pytest.approx(0.97 * 0.01 + 0.03 * (limit - mean) ** 2, rel=1e-5)


def test_factor_lowers_the_limit():
    assert clipped(warmed(factor=0.5), 2.0) == pytest.approx(0.53125, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_norm": None},
        {"max_norm": None, "mode": "mean"},
        {"max_norm": None, "mode": "percentile", "z_threshold": 1.5},
        {"max_norm": 1.05, "factor": 0.9, "alpha": 0.9},
        {"max_norm": None, "update_on_spike": False},
    ],
    ids=str,
)
def test_equals_the_equations_over_many_steps(settings):
    reference = Reference(**settings)
    clip = ZClip(**settings)
    norms, _ = norms_with_spikes(400, spikes=0.05)
    for g in norms:
        assert float(clip.observe(g)) == pytest.approx(reference.factor_of(float(g)), rel=2e-5)
    assert float(clip.mean) == pytest.approx(reference.mean, rel=1e-5)
    assert float(clip.var) == pytest.approx(reference.var, rel=1e-4)


# -- (b), (c) limiting cases ----------------------------------------------------------------------------------------


def test_norms_that_are_no_spike_leave_gradients_bit_for_bit():
    clip = warmed()
    for z in (-5.0, 0.0, 1.0, 2.4):
        p = parameter(1.0)
        p.grad = torch.randn(5, generator=torch.Generator().manual_seed(1))
        norm = 1 + 0.1 * z
        p.grad *= norm / p.grad.norm()
        before = p.grad.clone()
        clip.load_state_dict({**clip.state_dict(), "mean": 1.0, "var": 0.01})
        clip([p])
        assert torch.equal(p.grad, before), z
    assert clipped(clip, 1.3) < 1.3  # and z = 3 does not
    assert int(clip.clipped_by_zscore) == 1


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_without_a_threshold_it_is_torch(max_norm):
    g = torch.Generator().manual_seed(0)
    clip = ZClip(z_threshold=math.inf, max_norm=max_norm, warmup_steps=3)
    for scale in (1.0, 0.3, 2.0, 1.0, 50.0, 0.1, 1.0):  # past the warm-up, with a step that would be a spike
        ours, theirs = ([nn.Parameter(torch.zeros(s)) for s in ((7, 3), (4,), ())] for _ in range(2))
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=g) * scale
            q.grad = p.grad.clone()
        norm = clip(ours)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True))
    assert int(clip.clipped_by_zscore) == 0


def test_warm_up_clips_by_max_norm_alone():
    clip = ZClip(max_norm=2.0, warmup_steps=5)
    norms = [1.0, 1.1, 30.0, 0.9, 1.0]
    assert [clipped(clip, g) for g in norms] == pytest.approx([min(g, 2.0) for g in norms], rel=1e-5)
    assert float(clip.mean) == pytest.approx(statistics.fmean(norms))  # of the norms before clipping
    assert float(clip.var) == pytest.approx(statistics.pvariance(norms), rel=1e-5)


# -- (d) bad norms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("seen", [0, 1, 2, 10])
def test_a_bad_norm_touches_nothing(bad, seen):
    clip = ZClip(warmup_steps=2)
    for i in range(seen):
        clipped(clip, 1 + 0.1 * (i % 2))
    before = clip.state_dict()
    p = parameter(1.0)
    p.grad[:] = torch.tensor([1.0, bad, -2.0, 0.0, 1e-30])
    held = p.grad.clone()
    norm = clip([p])
    assert not torch.isfinite(norm)
    assert torch.equal(p.grad.nan_to_num(nan=7.0), held.nan_to_num(nan=7.0))
    assert clip.state_dict() == before
    assert all(math.isfinite(v) for v in before.values())


def test_a_norm_whose_square_overflows_is_cut_and_not_counted():
    clip = ZClip(max_norm=1.0, warmup_steps=2)
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    for g in (1e30, 1.0, 1.2, 1e30):
        p.grad = torch.tensor([g], dtype=torch.float64)
        clip([p])
        assert float(p.grad) <= 1.0
    state = clip.state_dict()
    assert 1 < state["mean"] < 1.2 and math.isfinite(state["var"])


def test_the_loop_skips_the_step_and_goes_on(recipe, monkeypatch):
    """An infinity in one step: the verdict is skip, the weights stay, statistics are those without the step."""
    data = recipe(**{"clip": {"name": "zclip", "warmup_steps": 2}, "train.steps": 4, "monitors": ["non_finite"]})
    trainer = Trainer(RunConfig.load(data))
    clip, states = trainer.clip, []
    original = trainer.executor.run

    def run(*args):
        result = original(*args)
        if trainer.progress.step == 2:
            trainer._tensors[0].grad.view(-1)[0] = math.inf
        return result

    def note(row):
        states.append((clip.state_dict()["count"], trainer._tensors[1].detach().clone()))

    monkeypatch.setattr(trainer.executor, "run", run)
    trainer.fit(on_step=note)
    assert [count for count, _ in states] == [1, 2, 2, 3]
    assert torch.equal(states[1][1], states[2][1]) and not torch.equal(states[2][1], states[3][1])


def test_constant_norms():
    """Variance 0: the floor of 0.1 % of the mean lets through what differs by less than 2.5 times that."""
    clip = warmed(std=0.0)
    for _ in range(50):
        assert clipped(clip, 1.0) == 1.0
    assert clipped(clip, 1.002) == pytest.approx(1.002, rel=1e-6)
    assert int(clip.clipped_by_zscore) == 0
    assert clipped(warmed(std=0.0), 1.01) == pytest.approx(1 + 2.5**2 * 1e-3 / 10, rel=1e-4)


def test_zero_norms_do_not_shut_the_gate():
    clip = ZClip(max_norm=None, warmup_steps=2)
    for _ in range(5):
        assert clipped(clip, 0.0) == 0.0
    assert clipped(clip, 1.0) == 1.0
    for _ in range(200):
        clipped(clip, 1.0)
    assert clipped(clip, 1.0) == 1.0
    assert float(clip.mean) == pytest.approx(1.0, rel=0.1)


# -- (e) ranks ------------------------------------------------------------------------------------------------------


def test_four_ranks_equal_one(tmp_path):
    """Two ranks are in test_optimizer_shards, which runs every clip, though not past the warm-up."""
    for figures in side_worker.run(tmp_path, 4, "zclip"):
        assert figures["cut"] == [4]
        assert max(figures["differences"]) < 1e-6
        one, four = figures["states"]
        assert four["mean"] == pytest.approx(one["mean"], rel=1e-6)
        assert four["var"] == pytest.approx(one["var"], abs=1e-6 * one["mean"] ** 2)  # of differences of norms
        assert {**four, "mean": 0, "var": 0} == {**one, "mean": 0, "var": 0}
        assert one["clipped_by_zscore"] == 1 and one["count"] == 6


# -- (f) resume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 10, 25, 60])
def test_state_goes_through_a_checkpoint_exactly(at):
    norms, _ = norms_with_spikes(100, spikes=0.1)
    whole, first, second = ZClip(), ZClip(), ZClip()
    factors = [whole.observe(g) for g in norms]
    for g in norms[:at]:
        first.observe(g)
    stored = codec.dumps(codec.encode(first.state_dict()))
    second.load_state_dict(codec.decode(json.loads(stored)))
    assert all(torch.equal(second.observe(g), f) for g, f in zip(norms[at:], factors[at:], strict=True))
    assert second.state_dict() == whole.state_dict()


def test_a_killed_run_goes_on_bit_for_bit(recipe):
    common = {
        "clip": {"name": "zclip", "warmup_steps": 3, "z_threshold": 0.2, "max_norm": None},
        "optimizer.lr": 1e-6,
        "train.global_batch_tokens": 64,  # small batches, whose norms go up and down
        "train.steps": 8,
        "checkpoint.every": 5,
    }
    rows = []
    whole = Trainer(RunConfig.load(recipe(**common, **{"run.name": "whole"})))
    whole.fit(on_step=rows.append)
    data = recipe(**common, **{"run.name": "halves"})

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == 6:
            raise Kill

    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    later = []
    resumed = Trainer(RunConfig.load(data), resume=True)
    resumed.fit(on_step=later.append)
    assert [(r["loss"], r["grad_norm"]) for r in later] == [(r["loss"], r["grad_norm"]) for r in rows[5:]]
    assert resumed.clip.state_dict() == whole.clip.state_dict()
    assert resumed.clip.state_dict()["clipped_by_zscore"] > 0


# -- what it does ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_of_norms_with_spikes(seed):
    """4,000 log-normal norms, deviation 0.1, one in a hundred ten times as large."""
    norms, spikes = norms_with_spikes(4000, seed)
    clip = ZClip(max_norm=None)
    after, means, stds = [], [], []
    for g in norms:
        after.append(g * clip.observe(g))
        means.append(clip.mean), stds.append(clip.metrics()["clip_norm_std"])
    after, means, stds = torch.stack(after), torch.stack(means), torch.stack(stds)
    late = torch.arange(4000) >= 25
    cut = after < norms * (1 - 1e-5)
    assert int(spikes.sum()) > 20 and cut[spikes].all()
    assert (after[spikes] < 1.5 * means[spikes]).all()
    assert float(cut[late & ~spikes].float().mean()) <= 0.03
    true_mean = math.exp(0.005)
    true_std = true_mean * math.sqrt(math.exp(0.01) - 1)
    assert float(means[late].mean()) == pytest.approx(true_mean, rel=0.02)
    assert 0.8 < float(stds[late].mean()) / true_std < 1.0
    assert int(clip.clipped_by_zscore) == int(cut.sum())
    assert int(clip.clipped_by_max_norm) == 0


def test_which_limit_acted_is_counted():
    clip = warmed(max_norm=1.5)  # warm-up norms are below it
    for g, by_zscore, by_max_norm in [
        (1.0, 0, 0),
        (2.0, 1, 0),  # the limit of the spike, about 1.06, is the lower one
        (1.0, 1, 0),
    ]:
        clipped(clip, g)
        assert (int(clip.clipped_by_zscore), int(clip.clipped_by_max_norm)) == (by_zscore, by_max_norm)
    hidden = ZClip(max_norm=1.0, warmup_steps=2)  # max_norm below all norms hides the method
    for g in (4.0, 5.0, 4.5, 40.0):
        assert clipped(hidden, g) == pytest.approx(1.0, rel=1e-5)
    assert hidden.state_dict()["clipped_by_max_norm"] == 4
    assert hidden.state_dict()["clipped_by_zscore"] == 0
    assert {k: int(v) for k, v in hidden.metrics().items() if k.startswith("clipped")} == {
        "clipped_by_zscore": 0,
        "clipped_by_max_norm": 4,
    }


def test_no_host_sync(monkeypatch):
    """None of the calls that read a tensor from the host is made once the gradients are there."""
    clip = warmed()
    ps = [parameter(3.0), parameter(1.0)]

    def read(*_):
        raise AssertionError("a tensor was read by the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, read)
    clip(ps)
    clip.metrics()


def test_spikes_can_be_kept_out_of_the_statistics():
    clip = warmed(update_on_spike=False)
    before = clip.state_dict()
    assert clipped(clip, 2.0) == pytest.approx(1.0625, rel=1e-5)
    assert clip.state_dict() == {**before, "clipped_by_zscore": 1}


# -- bad settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"z_threshold": 0.0}, "z_threshold"),
        ({"z_threshold": -1.0}, "z_threshold"),
        ({"warmup_steps": 1}, "warmup_steps"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"mode": "median"}, "mode"),
        ({"factor": 0.0}, "factor"),
        ({"factor": 1.5}, "factor"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ConfigError, match=words):
        build("clip", {"name": "zclip", **settings})
    with pytest.raises(ValueError, match=words):
        ZClip(**settings)


def test_a_factor_that_would_not_act():
    with pytest.raises(ConfigError, match="mode=adaptive"):
        build("clip", {"name": "zclip", "factor": 0.5, "mode": "mean"})
