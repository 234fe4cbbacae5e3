"""AdaPM's probe: what it measures, what it decides, the state that it makes of full momentum, and its bookkeeping."""

import copy
import io
import json
import pickle

import pytest
import torch
from layouts_worker import LAYOUTS
from optimizer_zoo import Zoo, named, train
from probe_worker import STEPS, gradients, on_two_ranks
from torch import nn

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam, named_params
from trainwright.core.registry import build
from trainwright.optim.adapm import AdaPM
from trainwright.optim.adapm_probe import ProbedAdaPM, decide, spectrum
from trainwright.optim.base import reported
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _probe(params, **more):
    return ProbedAdaPM(
        [{"params": params, "momentum": "probe"}], **{"probe_steps": STEPS, "rank": 0.3, "energy": 0.95, **more}
    )


def _step(optimizer, params, t, kind):
    for p in params:
        p.grad = gradients(kind, p.shape, t)
    optimizer.step()


# measuring


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (3, 5, 8), (3, 8, 5)])
def test_spectrum_is_that_of_an_svd(shape):
    momentum, rank = _randn(*shape, seed=1), 2
    top, total, leading = spectrum(momentum, rank)
    u, s, vh = torch.linalg.svd(momentum, full_matrices=False)
    torch.testing.assert_close(top, s[..., :rank].square().sum(), rtol=1e-10, atol=0)
    torch.testing.assert_close(total, momentum.square().sum(), rtol=1e-10, atol=0)
    wanted = u[..., :rank] if shape[-2] < shape[-1] else vh[..., :rank, :].mT
    torch.testing.assert_close(leading @ leading.mT, wanted @ wanted.mT, rtol=1e-8, atol=1e-9)


def test_agreement_of_steady_gradients_and_of_noise():
    """1, and (1 - b1) / (1 + b1) for independent gradients."""
    p, q = (nn.Parameter(_randn(40, 60)) for _ in range(2))
    optimizer = _probe([p, q], probe_steps=100, lr=1e-6)
    for t in range(100):
        p.grad, q.grad = _randn(40, 60, seed=1), _randn(40, 60, seed=10 + t)
        optimizer.step()
    assert optimizer.state[p]["agreement"] == pytest.approx(1, rel=1e-6)
    assert optimizer.state[q]["agreement"] == pytest.approx(0.1 / 1.9, rel=0.1)
    kept = torch.linalg.svdvals(p.grad).square()
    assert optimizer.state[p]["energy"] == pytest.approx(float(kept[:12].sum() / kept.sum()), rel=1e-6)


def test_decisions():
    assert decide(0.6, 0.1, 0.5, 0.8) == decide(0.5, 0.9, 0.5, 0.8) == "none"
    assert decide(0.4, 0.8, 0.5, 0.8) == "low_rank" and decide(0.4, 0.79, 0.5, 0.8) == "full"


# what it becomes

KINDS = {0: "none", 1: "low_rank", 2: "full"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 5, 8)])
@pytest.mark.parametrize("second_moment", ["full", "blockwise"])
def test_until_the_probe_adamw_and_then_the_momentum_that_it_found(kind, shape, second_moment):
    """Beside it an AdaPM with full momentum, whose state is turned by hand into that of one with the found momentum."""
    p, q, r = (nn.Parameter(_randn(*shape)) for _ in range(3))
    optimizer = _probe([p], second_moment=second_moment)
    full = AdaPM([q], momentum="full", second_moment=second_moment)
    for t in range(STEPS):
        assert "momentum" not in optimizer.state[p]
        _step(optimizer, [p], t, kind), _step(full, [q], t, kind)
        assert torch.equal(p, q)
    state = optimizer.state[p]
    assert optimizer.momentum_of(p) == KINDS[kind]
    assert ("exp_avg" in state) == (kind == 2) and ("basis" in state) == (kind == 1)
    then = AdaPM([r], momentum=KINDS[kind], rank=0.3, second_moment=second_moment)
    r.data.copy_(q.data)
    held = {k: v.clone() if torch.is_tensor(v) else v for k, v in full.state[q].items()}
    if kind != 2:
        momentum = held.pop("exp_avg")
        held["step"] = STEPS
    if kind == 1:
        rank = 2
        u, s, vh = torch.linalg.svd(momentum, full_matrices=False)
        left = shape[-2] < shape[-1]
        held["basis"] = u[..., :rank] if left else vh[..., :rank, :].mT
        kept = s[..., :rank]
        held["factor"] = kept[..., None] * vh[..., :rank, :] if left else u[..., :rank] * kept[..., None, :]
    then.state[r] = held
    for t in range(STEPS, STEPS + 4):
        _step(optimizer, [p], t, kind), _step(then, [r], t, kind)
        torch.testing.assert_close(p.data, r.data, rtol=1e-9, atol=1e-11)
    assert (p - q).norm() > 1e-3


def test_full_rank_stays_adamw():
    p, q = (nn.Parameter(_randn(6, 9)) for _ in range(2))
    optimizer = _probe([p], rank=1.0, agreement=2.0)
    adamw = torch.optim.AdamW([q], betas=(0.9, 0.95), weight_decay=0.1)
    for t in range(20):
        _step(optimizer, [p], t, 2), _step(adamw, [q], t, 2)
    assert optimizer.momentum_of(p) == "low_rank"
    assert (p - q).norm() < 1e-4 * (q - _randn(6, 9)).norm()


def test_parts_and_stacks_are_measured_each_and_decided_as_one():
    """One rank-1 matrix beside a larger one of noise: the parameter is judged by both together."""
    loud, quiet = _randn(4, 8, seed=5), _randn(5, 1, seed=6) @ _randn(1, 8, seed=7)
    for weight, kind in ((10.0, "low_rank"), (0.01, "full")):
        p = nn.Parameter(_randn(9, 8))
        optimizer = ProbedAdaPM(
            [{"params": [p], "momentum": "probe", "splits": (4, 5)}], probe_steps=2, rank=1, agreement=2.0
        )
        for t in range(2):
            p.grad = torch.cat([loud, weight * quiet]) * (1 + t)
            optimizer.step()
        assert optimizer.momentum_of(p) == kind
        assert ("basis_1" in optimizer.state[p]) == (kind == "low_rank")


def test_bytes_go_down_and_are_logged():
    shapes = [(6, 9), (9, 6), (7, 11)]
    params = [nn.Parameter(_randn(*s)) for s in shapes]
    optimizer = _probe(params)
    for t in range(STEPS):
        for i, p in enumerate(params):
            p.grad = gradients(i, p.shape, t)
        before = optimizer_state_bytes(optimizer)
        optimizer.step()
    full = sum(p.numel() for p in params)
    assert before == 8 * 2 * full + 3 * 4  # two moments, and torch's counts of steps
    kept = 0 + 2 * (6 + 9) + 7 * 11
    assert optimizer_state_bytes(optimizer) == 8 * (full + kept) + 4
    assert reported(optimizer) == {"adapm_momentum_share": pytest.approx(kept / full)}


def test_a_parameter_without_gradient_keeps_full_momentum():
    p, late = nn.Parameter(_randn(6, 9)), nn.Parameter(_randn(6, 9))
    optimizer = _probe([p, late])
    for t in range(STEPS + 2):
        p.grad = gradients(0, p.shape, t)
        late.grad = gradients(0, p.shape, t) if t > STEPS else None
        optimizer.step()
    assert [optimizer.momentum_of(x) for x in (p, late)] == ["none", "full"]
    assert "exp_avg" in optimizer.state[late]


def test_zero_gradients_are_no_evidence():
    p = nn.Parameter(_randn(6, 9))
    optimizer = _probe([p])
    for _ in range(STEPS):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert optimizer.momentum_of(p) == "full" and p.isfinite().all()


# bookkeeping


def _names(params):
    return [NamedParam(f"m{i}", p, "matrix") for i, p in enumerate(params)]


@pytest.mark.parametrize("at", [STEPS - 1, STEPS, STEPS + 2])
def test_state_by_name_and_torchs_own_go_on_exactly(at):
    shapes = [(6, 9), (9, 6), (7, 11)]

    def fresh():
        params = [nn.Parameter(_randn(*s)) for s in shapes]
        return params, _probe(params, names=_names(params))

    def run(params, optimizer, first, last):
        for t in range(first, last):
            for i, p in enumerate(params):
                p.grad = gradients(i, p.shape, t)
            optimizer.step()

    params, optimizer = fresh()
    run(params, optimizer, 0, at)
    kept = copy.deepcopy([p.data for p in params])
    state = named_state(optimizer, _names(params))
    scalars = json.loads(json.dumps(state["scalars"]))
    tensors = copy.deepcopy(state["tensors"])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    run(params, optimizer, at, at + 4)
    assert [optimizer.momentum_of(p) for p in params] == ["none", "low_rank", "full"]
    for way in ("by name", "torch"):
        others, again = fresh()
        for p, v in zip(others, kept, strict=True):
            p.data.copy_(v)
        if way == "torch":
            file.seek(0)
            again.load_state_dict(torch.load(file))
        else:
            filled = allocate_named_state(_names(others), scalars)
            for n, entries in filled.items():
                for key, t in entries.items():
                    t.copy_(tensors[n][key])
            load_named_state(again, _names(others), {"tensors": filled, "scalars": scalars})
        run(others, again, at, at + 4)
        for p, q in zip(params, others, strict=True):
            assert torch.equal(p, q), way


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_decide_too(how):
    p = nn.Parameter(_randn(6, 9))
    optimizer = _probe([p])
    _step(optimizer, [p], 0, 0)
    twin = how(optimizer)
    (q,) = twin.param_groups[0]["params"]
    for t in range(1, STEPS + 1):
        _step(optimizer, [p], t, 0), _step(twin, [q], t, 0)
    assert twin.momentum_of(q) == "none" and torch.equal(p, q)


def test_two_ranks(tmp_path):
    a, b = on_two_ranks(tmp_path)
    assert a == {**b, **{k: a[k] for k in ("full", "blockwise")}}
    for second_moment in ("full", "blockwise"):
        for found in (a[second_moment], b[second_moment]):
            assert found["sharded"] == found["whole"] == a[second_moment]["whole"]
            assert found["difference"] < 1e-11 and found["resumed"] == 0
    expected = dict(zip(LAYOUTS, ["none", "low_rank", "full"] * 4, strict=False))
    assert a["replicas"] == b["replicas"] == a["full"]["whole"] == expected


# recipes


def test_embeddings_and_vectors_keep_the_policy_and_patterns_come_first(caplog):
    caplog.set_level("INFO", "trainwright")
    model = Zoo()
    config = build("optimizer", {"name": "adapm", "roles": "probe", "probe_steps": 3, "policy": {"squ*": "none"}})
    optimizer = config.build(named(model))
    kinds = {id(p): g["momentum"] for g in optimizer.param_groups for p in g["params"]}
    found = {n: kinds[id(p)] for n, p in model.named_parameters()}
    assert found["embed.weight"] == found["head"] == found["square"] == "none" and found["router"] == "full"
    assert found["up"] == found["down"] == found["experts"] == "probe"
    assert "full momentum for 3 hidden matrices until step 3, then by probe" in caplog.text
    losses = train(model, optimizer, 30)
    assert losses[-1] < losses[0]
    assert "adapm: up: " in caplog.text and {optimizer.momentum_of(p) for p in (model.up, model.experts)}


def test_matrices_without_a_name_that_says_something_and_fused_ones_are_probed():
    params = [NamedParam(n, nn.Parameter(_randn(9, 9)), "matrix") for n in ("h.c_attn.weight", "x.mixer.weight")]
    optimizer = build("optimizer", {"name": "adapm", "roles": "probe"}).build(params)
    assert [g["momentum"] for g in optimizer.param_groups] == ["probe"]


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"roles": "guess"}, "roles"),
        ({"roles": "probe", "probe_steps": 0}, "greater than 0"),
        ({"roles": "probe", "probe_energy": 1.5}, "less than or equal to 1"),
        ({"roles": "probe", "probe_agreement": 0}, "greater than 0"),
        ({"roles": "probe", "policy": {"q": "full"}}, r"policy\.q says which momentum the probe is to find"),
        ({"roles": "probe", "policy": {"qkv": "full"}}, r"policy\.qkv says"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", {"name": "adapm", **settings})


def test_what_takes_the_step_itself_is_refused():
    probe = {"name": "adapm", "roles": "probe"}
    with pytest.raises(ConfigError, match="roles='probe': needs the optimizer's own step"):
        build("optimizer", {"name": "mgup", "inner": probe}).build(named(Zoo()))
    with pytest.raises(ConfigError, match="needs the optimizer's own step"):
        build("optimizer", probe).build_rule(named(Zoo()))
    assert isinstance(build("optimizer", "adapm").build_rule(named(Zoo())), AdaPM)
    for settings in ({"probe_steps": 0}, {"agreement": 0.0}, {"energy": -1.0}, {"rank": 7}):
        with pytest.raises(ValueError, match=r"should be|larger"):
            _probe([nn.Parameter(_randn(6, 9))], **settings)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_resumes_exactly_before_and_after_the_probe(recipe, stop):
    settings = {"name": "adapm", "roles": "probe", "probe_steps": 3, "probe_energy": 0.7, "lr": 0.003}
    rows, runs = {"whole": [], "parts": []}, {}
    for name in rows:
        data = recipe(
            optimizer=settings,
            checkpoint={"every": stop, "asynchronous": False},
            **{"train.steps": 6, "run.name": name, "log.every": 1},
        )
        trainer = runs[name] = Trainer(RunConfig.load(data))
        if name == "parts":
            trainer._finished = lambda trainer=trainer: trainer.progress.step >= stop
        trainer.fit(on_step=rows[name].append)
    again = Trainer(RunConfig.load(data), resume=True)
    again.fit(on_step=rows["parts"].append)
    assert [r["loss"] for r in rows["parts"]] == [r["loss"] for r in rows["whole"]] and len(rows["whole"]) == 6
    found = [{n.name: t.optimizer.momentum_of(n.param) for n in named_params(t.model)} for t in (runs["whole"], again)]
    assert found[0] == found[1] and "low_rank" in found[0].values()
    assert rows["whole"][-1]["adapm_momentum_share"] < 1 == rows["whole"][0]["adapm_momentum_share"]
