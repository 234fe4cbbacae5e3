"""Stepping inside the backward pass gives the ordinary step, with one gradient alive at a time."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError, StoppedByMonitor
from trainwright.core.registry import build, methods
from trainwright.memory.fused_backward import FusedBackward
from trainwright.optim import Muon
from trainwright.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))
from optimizer_zoo import Zoo, batch, named, train


def rules():
    """Optimizers whose step can be taken for one parameter."""
    found = []
    for m in methods("optimizer"):
        try:
            build("optimizer", {"name": m.name}).build_rule(named(Zoo()))
        except ConfigError:
            continue
        found.append(m.name)
    return found


def loss_of(model, data):
    tokens, wanted = data
    return ((model(tokens) - wanted) ** 2).mean()


def test_most_optimizers_are_covered():
    assert {"adamw", "lion", "muon", "galore", "grass", "adapm", "spam", "mgup", "llr", "spectra"} <= set(rules())


@pytest.mark.parametrize("name", rules())
def test_is_the_ordinary_step(name, monkeypatch):
    from trainwright.optim import muon

    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.float32)
    one, two = Zoo(), Zoo()
    settings = {"name": name, "lr": 1e-3} | ({"gap": 2} if "gap" in type(build("optimizer", name)).model_fields else {})
    train(one, build("optimizer", settings).build_rule(named(one)), 4)
    fused = FusedBackward(build("optimizer", settings).build_rule(named(two)))
    for i in range(4):
        with fused.step():
            loss_of(two, batch(i)).backward()
        assert all(p.grad is None for p in two.parameters())
    for (n, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=2e-6, rtol=2e-5, msg=lambda m, n=n: f"{n}: {m}")


def test_one_gradient_lives_at_a_time():
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
    optimizer = Muon(model.parameters())
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
        )
    fused = FusedBackward(optimizer)
    with fused.step():
        model(torch.randn(4, 8)).square().sum().backward()
    assert alive == [1] * 6


def test_reports_the_norm_of_all_gradients():
    one, two = Zoo(), Zoo()
    loss_of(one, batch(0)).backward()
    expected = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in one.parameters()]))
    fused = FusedBackward(build("optimizer", "adamw").build_rule(named(two)))
    with fused.step():
        loss_of(two, batch(0)).backward()
    torch.testing.assert_close(fused.grad_norm(), expected)


def test_a_tied_weight_is_stepped_once_and_unused_ones_not_at_all():
    model = nn.Linear(4, 4, bias=False)
    unused = nn.Parameter(torch.ones(4, 4))
    rule = Muon([model.weight, unused], weight_decay=0.0)
    calls = []
    original = rule.step_part
    rule.step_part = lambda params, grads, group: (calls.append(len(params)), original(params, grads, group))[1]
    fused = FusedBackward(rule)
    x = torch.randn(3, 4)
    with fused.step():
        model(model(x)).sum().backward()
    assert calls == [1] and bool((unused == 1).all())


def test_outside_its_context_and_after_removal_gradients_stay():
    model = nn.Linear(4, 4, bias=False)
    fused = FusedBackward(Muon(model.parameters()))
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight, before)
    fused.remove()
    model.weight.grad = None
    with fused.step():
        model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight, before)


def test_refuses_an_optimizer_that_cannot_step_one_parameter():
    with pytest.raises(TypeError, match="build_rule"):
        FusedBackward(torch.optim.AdamW(nn.Linear(2, 2).parameters()))


def recipe(tmp_path, corpus, **more):
    return {
        "run": {"dir": str(tmp_path), "name": "fused"},
        "model": {"name": "decoder", "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 32},
        "tokenizer": {"name": "bytes"},
        "data": {"sources": [{"name": "text", "path": str(corpus)}], "validation_fraction": 0.2},
        "train": {"seq_len": 16, "global_batch_tokens": 64, "steps": 6},
        "optimizer": {"name": "galore", "rank": 4, "gap": 2},
        "clip": {"name": "none"},
        "checkpoint": {"every": 3},
        "log": {"progress": "none", "report": False, "every": 1},
        **more,
    }


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"line {i} of a text about nothing in particular" for i in range(200)))
    return path


def losses(folder):
    import json

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows if "loss" in r]


def test_a_run_is_the_same_with_it_and_resumes(tmp_path, corpus):
    plain = recipe(tmp_path / "a", corpus)
    Trainer(RunConfig.from_dict(plain)).fit()
    fused = recipe(tmp_path / "b", corpus, memory=[{"name": "fused_backward"}])
    Trainer(RunConfig.from_dict(fused)).fit()
    expected, got = losses(tmp_path / "a" / "fused"), losses(tmp_path / "b" / "fused")
    assert len(got) == 6 and got == pytest.approx(expected, rel=1e-4)
    longer = recipe(tmp_path / "b", corpus, memory=[{"name": "fused_backward"}])
    longer["train"]["steps"] = 8
    Trainer(RunConfig.from_dict(longer), resume=True).fit()
    assert len(losses(tmp_path / "b" / "fused")) == 8


@pytest.mark.parametrize(
    "more, words",
    [
        ({"clip": {"name": "global_norm"}}, "clip"),
        (
            {"train": {"seq_len": 16, "global_batch_tokens": 64, "steps": 6, "micro_batch_size": 2}},
            "micro_batch_size=4",
        ),
    ],
)
def test_what_needs_all_gradients_is_refused(tmp_path, corpus, more, words):
    settings = recipe(tmp_path, corpus, memory=[{"name": "fused_backward"}]) | more
    with pytest.raises(ConfigError, match=words):
        Trainer(RunConfig.from_dict(settings))


def test_a_step_that_should_be_skipped_stops_the_run(tmp_path, corpus, monkeypatch):
    trainer = Trainer(RunConfig.from_dict(recipe(tmp_path, corpus, memory=[{"name": "fused_backward"}])))
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(float("nan"))
    with pytest.raises(StoppedByMonitor, match="has stepped already"):
        trainer.fit()
