"""Mixers, selectors and weighters in whole runs: the plain loop untouched, resuming exactly, every source's total."""

import copy
import json

import numpy as np
import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, DataError
from trainwright.objectives.token_losses import row_losses, token_losses
from trainwright.train.replay import Replay


def run(data, **fit):
    rows = []
    trainer = Trainer(RunConfig.load(data), **fit)
    trainer.fit(on_step=rows.append)
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return rows, weights, trainer


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


STATIC = {"data.mixer": "static", "data.selector": "none", "data.weighter": "uniform"}


def test_static_and_uniform_are_the_plain_loop(mixed):
    _, plain, trainer = run(mixed())
    assert trainer.interaction is None
    assert same(plain, run(mixed(**STATIC, **{"run.name": "named"}))[1])


def test_watching_the_losses_by_source_changes_nothing(mixed):
    """An update that comes after the run: the mixer looks on, and the rows and weights are the plain loop's."""
    _, plain, _ = run(mixed())
    rows, watched, _ = run(mixed(**{"run.name": "w", "data.mixer": {"name": "odm", "update_step": 99}}))
    assert same(plain, watched)
    assert all(r["share/noise"] == pytest.approx(1 / 3) for r in rows)


def test_losses_by_source_add_up_to_the_loss(mixed):
    rows, _, trainer = run(mixed(**{"data.mixer": {"name": "odm", "update_step": 99}, "train.steps": 2}))
    assert {k for k in rows[0] if k.startswith("loss/")} == {"loss/plain", "loss/digits", "loss/noise"}
    trainer.loader.load_state_dict({**trainer.loader.state_dict(), "position": _start(trainer)})
    batch = trainer.loader.next_batch()
    losses = row_losses(token_losses(trainer.model, batch), batch.weights)
    result = trainer.executor.run(trainer.parallel, trainer.objective, batch)
    nll = torch.stack([result.metrics[f"source_nll_{k}"] for k in range(3)])
    weight = torch.stack([result.metrics[f"source_weight_{k}"] for k in range(3)])
    assert float(nll.sum()) == pytest.approx(float(result.loss_sum), rel=1e-5)
    source = batch.extras["source"].flatten(1).argmax(1)
    for k in range(3):
        mine = source == k
        expected = (losses * batch.weights.double().sum(1))[mine].sum()
        assert float(nll[k]) == pytest.approx(float(expected), rel=1e-5)
        assert float(weight[k]) == float(batch.weights[mine].sum())
    trainer.loader.close()


def _start(trainer):
    position = copy.deepcopy(trainer.loader.state_dict()["position"])
    position["rows"] = 0
    for place in position["sources"].values():
        place.update(epoch=0, row=0, credit=0)
    return position


REFERENCE = {"plain": 0.5, "digits": 2.0, "noise": 3.3}
DYNAMIC = {
    "odm": {"data.mixer": {"name": "odm"}},
    "doremi": {"data.mixer": {"name": "doremi", "reference_losses": REFERENCE, "update_step": 2, "warmup_step": 1}},
    "trec": {"data.mixer": {"name": "trec", "source": "digits"}},
    "loss": {"data.selector": {"name": "loss", "update_step": 3, "pool_rows": 60}},
    "renewed": {"data.selector": {"name": "loss", "update_step": 3, "pool_rows": 40, "renew": True}},
    "delta_loss": {"data.selector": {"name": "delta_loss", "update_step": 2, "pool_rows": 60}},
    "less": {"data.selector": {"name": "less", "update_step": 3, "pool_rows": 30, "dim": 32}},
    "weighter": {"data.weighter": {"name": "loss", "warmup_step": 1}},
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_resuming_in_mid_run_reproduces_the_same_rows(mixed, name):
    whole_rows, whole, _ = run(mixed(**DYNAMIC[name]))

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == 5:
            raise Kill

    data = mixed(**DYNAMIC[name], **{"run.name": "killed", "checkpoint.every": 4, "checkpoint.async": False})
    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    rows, resumed, _ = run(data, resume=True)
    assert [r["step"] for r in rows] == [5, 6, 7, 8]
    for a, b in zip(rows, whole_rows[4:], strict=True):
        assert {k: v for k, v in a.items() if "/" in k or k == "loss"} == {
            k: v for k, v in b.items() if "/" in k or k == "loss"
        }
    assert same(whole, resumed)


@pytest.mark.parametrize("name", ["odm", "loss"])
def test_what_is_made_ahead_does_not_matter(mixed, name):
    found = [run(mixed(**DYNAMIC[name], **{"data.prefetch": p, "run.name": f"p{p}"}))[1] for p in (0, 3)]
    assert same(*found)


def test_proportions_are_logged_and_followed(mixed):
    shares = {"data.mixer": {"name": "doremi", "reference_losses": {"plain": 0, "digits": 9, "noise": 9}}}
    rows, _, trainer = run(mixed(**shares, **{"train.steps": 12}))
    logged = [json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [r for r in logged if "share/plain" in r]
    assert [r["share/plain"] for r in logged] == [r["share/plain"] for r in rows]
    for r in rows:
        assert sum(v for k, v in r.items() if k.startswith("share/")) == pytest.approx(1, abs=1e-9)
    assert rows[-1]["share/plain"] > 0.99 and rows[-1]["share_average/plain"] > 0.8
    assert {k for k in rows[-1] if k.startswith("loss/")} == {"loss/plain"}  # no row of the others any more


def test_doremi_against_a_finished_run(mixed):
    _, _, reference = run(mixed(**{"run.name": "reference", "train.steps": 30, "optimizer.lr": 1e-2}))
    settings = {"name": "doremi", "reference": str(reference.config.run_dir), "eta": 5.0}
    rows, _, trainer = run(mixed(**{"data.mixer": settings}))
    assert rows[0]["share/noise"] != rows[-1]["share/noise"]
    # The excess of the last batch, written out: clipped token by token.
    batch = trainer.loader.next_batch()
    trainer.interaction.mixing.look(0, batch)
    own = token_losses(trainer.model.eval(), batch)
    other = token_losses(trainer.interaction.mixing.reference, batch)
    source = batch.extras["source"].flatten(1).argmax(1)
    for k, name in enumerate(trainer.interaction.mixing.names):
        w = batch.weights * (source == k)[:, None]
        if float(w.sum()):
            expected = float(((own - other).clamp(min=0) * w).sum() / w.sum())
            assert trainer.interaction.mixing._excess[name] == pytest.approx(expected, rel=1e-4)
    trainer.loader.close()


def test_the_weighter_scales_rows_and_keeps_the_batch_s_weight(mixed):
    data = mixed(**{"data.weighter": "loss"})
    trainer = Trainer(RunConfig.load(data))
    batch = trainer.loader.next_batch()
    before = batch.weights.clone()
    losses = row_losses(token_losses(trainer.model.eval(), batch), before)
    scaled = trainer.interaction.prepare(0, batch)
    assert float(scaled.weights.sum()) == pytest.approx(float(before.sum()), rel=1e-5)
    ratio = scaled.weights.sum(1) / before.sum(1)
    expected = trainer.interaction.weighter.weights(losses)
    assert (ratio / ratio.sum()).tolist() == pytest.approx((expected / expected.sum()).tolist(), rel=1e-5)
    trainer.close()


@pytest.mark.parametrize("mixer", ["trec", "schedule"])
def test_a_schedule_gives_every_source_its_exact_rows(mixed, mixer):
    settings = {
        "trec": {"name": "trec", "source": "digits", "m": 0.5},
        "schedule": {"name": "schedule", "segments": [
            {"until": 0.4, "shares": {"plain": 3, "noise": 1}},
            {"until": 1, "shares": {"plain": 1, "digits": 2, "noise": 1}},
        ]},
    }[mixer]  # fmt: skip
    rows, _, trainer = run(mixed(weights=(3.0, 2.0, 5.0), **{"data.mixer": settings, "train.steps": 10}))
    taken = {n: p["row"] + p["epoch"] * 10**6 for n, p in trainer.loader.mixture.position()["sources"].items()}
    totals = {n: sum(s.rows[n] for s in trainer.interaction.mixing.mixer.plan) for n in taken}
    assert taken == totals and sum(taken.values()) == 80
    if mixer == "trec":
        assert sorted(totals.values()) == [16, 24, 40]
        inside = [r["share/digits"] for r in rows]
        assert max(inside) == 1.0 and sum(inside) == pytest.approx(2.0)  # 16 rows of 8 a step, and none elsewhere


def test_selected_rows_are_those_of_the_pool(mixed):
    _, _, trainer = run(mixed(**DYNAMIC["loss"], **{"train.steps": 3}))
    selection = trainer.interaction.selection
    assert len(selection.ids) == 24 and len(set(selection.ids)) == 24 and max(selection.ids) < 60
    assert len(set(selection.pool)) == 60


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.selector": {"name": "loss", "update_step": 200}}, "more than the pool"),
        ({"data.selector": {"name": "loss", "pool_rows": 10**6, "update_step": 1}}, "rows of the data"),
        ({"data.selector": {"name": "loss", "renew": True, "update_step": 1}}, "needs pool_rows"),
        ({"data.selector": {"name": "delta_loss", "renew": True, "pool_rows": 50, "update_step": 1}}, "one pool"),
        ({"data.selector": {"name": "less", "update_step": 1}, "optimizer": {"name": "lion"}}, "Adam's moments"),
        ({"data.selector": {"name": "less", "update_step": 1}, "data.validation_fraction": 0.0}, "validation"),
        ({"data.selector": "random", "data.mixer": "odm"}, "keep one"),
        ({"data.mixer": {"name": "doremi"}}, "reference"),
        ({"data.mixer": {"name": "doremi", "reference": "nowhere"}}, "no finished run"),
        ({"data.mixer": {"name": "odm", "update_step": 0}}, "update_step"),
        ({"data.mixer": {"name": "trec", "source": "nowhere"}}, "no such source"),
        ({"data.mixer": {"name": "trec", "source": "plain"}, "optimizer": {"name": "muon"}}, "AdamW"),
        ({"data.mixer": {"name": "trec", "source": "plain"}, "optimizer.weight_decay": 0.0}, "remember every step"),
        ({"data.mixer": {"name": "trec", "source": "plain"}, "train.steps": 5000}, "one epoch"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(mixed, settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(RunConfig.load(mixed(**settings)))


def test_a_domain_without_data_is_named(mixed, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").write_text("")
    data = mixed(**{"data.mixer": "odm"})
    data["data"]["sources"].append({"name": "text", "path": str(tmp_path / "empty"), "weight": 1.0})
    with pytest.raises(DataError, match="empty"):
        Trainer(RunConfig.load(data))


def test_a_finished_run_is_replayed_batch_by_batch(mixed):
    from trainwright.train.checkpoint import Checkpointer, inspect

    data = mixed(**{"data.mixer": {"name": "trec", "source": "digits"}})
    seen = []
    trainer = Trainer(RunConfig.load(data))
    get = trainer.loader.next_batch
    trainer.loader.next_batch = lambda: seen.append(get()) or seen[-1]
    trainer.fit()
    meta = inspect(Checkpointer(trainer.config.checkpoint_dir).latest()).meta
    replay = Replay(trainer.config, trainer.data, meta)
    again = list(replay.batches())
    assert len(again) == 8 and all(torch.equal(a.tokens, b.tokens) for a, b in zip(again, seen, strict=True))
    assert replay.lr[-1] == pytest.approx(trainer.optimizer.param_groups[0]["lr"])
    shifted = copy.deepcopy(meta)
    shifted["loader"]["position"]["rows"] += 8
    with pytest.raises(DataError, match="passed over"):
        Replay(trainer.config, trainer.data, shifted)
    other = copy.deepcopy(meta)
    other["loader"]["settings"]["seed"] += 1
    with pytest.raises(DataError, match="seed"):
        Replay(trainer.config, trainer.data, other)
    twice = copy.deepcopy(meta)
    next(iter(twice["loader"]["position"]["sources"].values()))["epoch"] = 2
    with pytest.raises(DataError, match="more than once"):
        Replay(trainer.config, trainer.data, twice)


def test_plan_commands(mixed, tmp_path, capsys):
    from trainwright.cli import run as command

    data = mixed(**{"data.mixer": {"name": "trec", "source": "digits"}})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(data))
    assert command(["plan", "placement", str(recipe), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "digits" and found["steps"] == 8 and len(found["curve"]) == 8
    assert sum(sum(s.values()) for s in found["rows"]) == 64
    _, _, trainer = run(data)
    assert command(["plan", "reevaluate", str(trainer.config.run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["curve"]) == 8 and np.isfinite(found["curve"]).all() and found["steps"] == 8
