"""Trials: their identity, what is injected and probed, how they are judged. No other process."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.lab import Budget, identity
from trainwright.lab.injection import inject, parse_inject
from trainwright.lab.probes import measure, parse_probe, rounded, stable_rank, truncated, validation_loss
from trainwright.lab.trial import Trial, TrialResult, TrialStore, make_trial
from trainwright.lab.worker import dead_steps, judge, main, pace, summarise


def trial_of(recipe, budget="tokens=2560", seed=7, **overrides):
    return make_trial(recipe(**overrides), Budget.parse(budget), seed, device="cpu")


def test_a_trial_is_known_by_what_decides_its_outcome(recipe):
    one = trial_of(recipe)
    same = [
        trial_of(recipe, **{"run.name": "other", "run.dir": "elsewhere"}),
        trial_of(recipe, **{"train.steps": 9}),  # the budget decides
        trial_of(recipe, **{"log.every": 5, "checkpoint.keep": 2, "data.cache_dir": "/elsewhere"}),
        trial_of(recipe, **{"optimizer.weight_decay": 0.1}),  # the default, written out
    ]
    other = [
        trial_of(recipe, seed=8),
        trial_of(recipe, "tokens=5120"),
        trial_of(recipe, **{"optimizer.lr": 2e-3}),
        trial_of(recipe, **{"evaluate.tokens": 512}),
        Trial(one.recipe, {"spikes": {"factor": 10.0, "steps": [3]}}, (), one.inputs),
        Trial(one.recipe, None, ("stable_rank",), one.inputs),
    ]
    assert {t.key for t in same} == {one.key} and len({t.recipe_key for t in [one, *other]}) == 7
    again = json.loads(json.dumps(one.spec(keep=False)))  # as the worker reads it
    assert RunConfig.from_dict(again["recipe"]).to_dict() == one.recipe


def test_a_trial_is_known_by_the_files_that_it_reads(recipe, tmp_path):
    source, other, weights = tmp_path / "text.txt", tmp_path / "other.txt", tmp_path / "weights"
    source.write_text("one two three\n" * 100)
    other.write_text("one two three\n" * 100)
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"0" * 8)
    model = {"name": "pretrained", "path": str(weights)}

    def key(**more):
        return trial_of(recipe, **{"data.sources": [{"name": "text", "path": str(source)}], **more}).key

    plain, tuned = key(), key(model=model)
    assert key() == plain and key(model=model) == tuned != plain
    (weights / "model.safetensors").write_bytes(b"0" * 9)
    assert key() == plain and key(model=model) != tuned
    source.write_text("four five six\n" * 100)
    assert key() != plain
    changed = key()
    source.unlink()
    assert key() not in (plain, changed), "the trial itself says that there is no data"


def test_a_file_with_the_name_of_a_setting_is_no_input(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = trial_of(recipe).key
    for word in ("adamw", "decoder", "llama", "cpu", "fp32"):
        (tmp_path / word).write_text("something else")
    assert trial_of(recipe).key == before
    folder = tmp_path / "teacher"
    (folder / "sub").mkdir(parents=True)
    config = RunConfig.from_dict(trial_of(recipe, model={"name": "pretrained", "path": "teacher"}).recipe)
    assert identity.paths_in(config) == ["teacher"]
    empty = identity.files_digest(config)
    (folder / "sub" / "weights").write_text("1")
    assert identity.files_digest(config) != empty


def test_a_trial_is_known_by_the_code_that_runs_it(recipe, tmp_path, monkeypatch):
    """A copy of the package, one of whose files is edited."""
    package = tmp_path / "package"
    (package / "lab").mkdir(parents=True)
    (package / "optim.py").write_text("lr = 1\n")
    monkeypatch.setattr(identity, "__file__", str(package / "lab" / "identity.py"))
    before = identity.code_digest.__wrapped__()
    assert identity.code_digest.__wrapped__() == before
    (package / "notes.txt").write_text("no code\n")
    assert identity.code_digest.__wrapped__() == before
    (package / "optim.py").write_text("lr = 2\n")
    after = identity.code_digest.__wrapped__()
    assert after != before
    monkeypatch.setattr(identity, "code_digest", lambda: before)
    old = trial_of(recipe)
    monkeypatch.setattr(identity, "code_digest", lambda: after)
    new = trial_of(recipe)
    assert new.recipe == old.recipe and new.recipe_key == old.recipe_key and new.key != old.key
    store = TrialStore(tmp_path / "trials")
    leave(store, old, TrialResult("ok", val_loss=1.0, environment={"code": before}))
    assert store.finished(old) and store.finished(new) is None
    assert store.others(new) == ["code"] and store.others(old) == []
    leave(store, new, TrialResult("ok", val_loss=1.0, environment={"code": before}))
    assert store.finished(new) is None, "the worker found other code than the comparison"
    leave(store, new, TrialResult("failed", environment={"code": after}))
    assert store.finished(new) is None and store.others(old) == [], "a failed one is no finding"


def leave(store, trial, result):
    folder = store.folder(trial)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(trial.spec(keep=False)))
    (folder / "result.json").write_text(json.dumps(result.to_dict()))


def test_trials_are_light_and_validate_at_even_points(recipe):
    config = RunConfig.from_dict(trial_of(recipe, "tokens=256k", **{"evaluate.tokens": None}).recipe)
    assert config.train.tokens == 256_000 and config.evaluate.every == 100 and config.evaluate.at_start
    assert config.evaluate.tokens is None, "an own choice stays"
    assert config.checkpoint.every == 334 and config.checkpoint.keep == 1 and not config.log.loggers
    data = recipe()
    del data["evaluate"]
    wanted = {"tokens=100k": 16_384, "tokens=1.1M": 100_000, "tokens=1B": 262_144, "seconds=9": 65_536}
    for budget, tokens in wanted.items():
        found = RunConfig.from_dict(make_trial(data, Budget.parse(budget), 0, device="cpu").recipe)
        assert found.evaluate.tokens == tokens
    assert found.train.seconds == 9 and found.train.steps is None and found.train.tokens is None


def fit(data, spec=None):
    trainer = Trainer(RunConfig.load(data))
    inject(trainer, spec)
    rows = []
    trainer.fit(on_step=rows.append)
    return trainer, rows


def test_injection_multiplies_the_gradients_of_its_steps_before_the_clipper(recipe):
    settings = {"clip": "none", "optimizer": {"name": "sgd", "lr": 1e-30}, "train.steps": 8, "monitors": []}
    _, plain = fit(recipe(**settings, **{"run.name": "plain"}))
    spec = parse_inject({"spikes": {"factor": 1000.0, "steps": [2, 0.5]}})  # 0.5 of 8 steps: step 4
    _, spiked = fit(recipe(**settings, **{"run.name": "spiked"}), spec)
    ratios = [b["grad_norm"] / a["grad_norm"] for a, b in zip(plain, spiked, strict=True)]
    assert ratios == pytest.approx([1, 1000, 1, 1000, 1, 1, 1, 1], rel=1e-4)
    clipped = {**settings, "clip": {"name": "global_norm", "max_norm": 1.0}}
    trainer, rows = fit(recipe(**clipped, **{"run.name": "clipped"}), spec)
    assert rows[1]["grad_norm"] == pytest.approx(spiked[1]["grad_norm"]), "the norm is measured before clipping"
    assert trainer.clip.state_dict() == {}
    for bad in ({"spikes": {"factor": 0, "steps": [1]}}, {"spike": {}}, {"spikes": {"steps": [1.5]}}):
        with pytest.raises(ConfigError, match="inject"):
            parse_inject(bad)


def test_stable_rank_truncation_and_rounding_by_hand():
    q, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))
    w = (q[:, :3] * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)) @ q[:, 3:6].T
    assert stable_rank(w) == pytest.approx(6 / 4, rel=1e-5) and stable_rank(torch.zeros(3, 3)) == 0
    assert torch.linalg.matrix_rank(truncated(w, 1), tol=1e-4) == 1
    assert (w - truncated(w, 1)).norm() == pytest.approx(math.sqrt(2), rel=1e-4)
    assert torch.allclose(truncated(w, 3), w, atol=1e-5)
    # 2 bits over [-1, 2]: steps of 1, zero point 1; the second group [0, 3] by itself
    row = torch.tensor([[-1.0, 0.4, 2.0, 1.6, 0.0, 3.0, 1.4, 1.6]])
    assert rounded(row, 2, 4).tolist() == [[-1.0, 0.0, 2.0, 2.0, 0.0, 3.0, 1.0, 2.0]]
    error = (rounded(torch.randn(4, 256), 8, 128) - 0).isfinite().all()
    assert error and torch.equal(rounded(torch.zeros(2, 5), 3, 2), torch.zeros(2, 5))


def test_probes_measure_and_leave_the_weights_alone(recipe):
    probes = ["stable_rank", "weight_rms", {"truncated_loss": {"rank": 2}}, {"truncated_loss": {"rank": 64}}]
    probes += [{"rtn_loss": {"bits": 2, "group": 32}}, {"rtn_loss": {"bits": 12}}, "live_loss"]
    trainer, _ = fit(recipe(**{"train.steps": 30, "average": {"name": "ema", "decay": 0.9}}))
    before = copy.deepcopy(trainer.model.state_dict())
    found = measure(trainer, probes)
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    with trainer.average.swapped():
        averaged = validation_loss(trainer)
    assert found["truncated_loss@rank=64"] == pytest.approx(averaged, abs=1e-4), "full rank changes nothing"
    assert found["rtn_loss@bits=12,group=128"] == pytest.approx(averaged, abs=1e-3)
    assert found["truncated_loss"] == found["truncated_loss@rank=2"] > averaged + 0.01
    assert found["rtn_loss"] > averaged and found["live_loss"] == validation_loss(trainer) != averaged
    assert 1 < found["stable_rank"] < 64 and found["weight_rms"] > 0
    for bad in ("stable", {"truncated_loss": {"bits": 3}}, {"rtn_loss": {"bits": 0}}, 3):
        with pytest.raises(ConfigError, match="probes"):
            parse_probe(bad)


def test_the_worker_leaves_a_result_and_does_not_run_a_finished_trial_again(recipe, tmp_path):
    trial = trial_of(recipe)
    store = TrialStore(tmp_path / "trials")
    folder = store.folder(trial)
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(trial.spec(keep=False, jobs=3)))
    assert store.result(trial) is None
    assert main([str(folder / "spec.json")]) == 0
    result = store.result(trial)
    assert result.status == "ok" and result.steps == 10 and result.tokens == 2560 and result.val_loss < math.log(256)
    assert [p[0] for p in result.curve] == [256 * i for i in range(11)] and result.curve[0][1] == 0
    assert result.curve[-1][2] == result.val_loss and result.initial_val_loss == result.curve[0][2]
    assert result.optimizer_state_bytes > 0 and result.peak_memory_bytes > 2**20 and result.tokens_per_s > 0
    assert result.jobs == 3 and result.environment["code"] == trial.inputs["code"] == identity.code_digest()
    assert not (folder / "run" / "checkpoints").exists() and (folder / "run" / "metrics.jsonl").is_file()
    stamp = (folder / "result.json").stat().st_mtime_ns
    assert main([str(folder / "spec.json")]) == 0 and (folder / "result.json").stat().st_mtime_ns == stamp


def test_by_the_clock_the_pace_of_the_first_steps_sets_the_validations():
    train, evaluate = SimpleNamespace(tokens=None, seconds=10.0), SimpleNamespace(every=10**9)
    on_step = pace(SimpleNamespace(config=SimpleNamespace(train=train, evaluate=evaluate)))
    on_step({"seconds": 3.0})  # the first step warms caches
    for i in range(1, 9):
        on_step({"seconds": 3.0 + 0.1 * i})
    assert evaluate.every == 10, "100 steps of 0.1 s"
    train.tokens = 1000
    assert pace(SimpleNamespace(config=SimpleNamespace(train=train, evaluate=evaluate))) is None


def test_judgement():
    for kwargs, stopped, dead, status in (
        ({"val_loss": 2.0, "initial_val_loss": 5.0}, "", 0, "ok"),
        ({"val_loss": 2.0, "initial_val_loss": 5.0}, "", 1, "ok"),  # a bad batch
        ({"val_loss": 4.9, "initial_val_loss": 5.0}, "", 2, "diverged"),
        ({"val_loss": 5.0, "initial_val_loss": 5.0}, "", 0, "diverged"),
        ({"val_loss": math.nan, "initial_val_loss": 5.0}, "", 0, "diverged"),
        ({"val_loss": 2.0, "initial_val_loss": 5.0}, "stopped at step 3 by non_finite", 0, "diverged"),
        ({"initial_val_loss": 5.0}, "", 0, "failed"),
    ):
        result = TrialResult("", **kwargs)
        judge(result, stopped, dead)
        assert result.status == status and bool(result.error) == (status != "ok")


def test_steps_at_the_end_that_moved_nothing():
    def rows(*norms, skip=()):
        steps = [{"step": i, "loss": 1.0, "grad_norm": norm} for i, norm in enumerate(norms, 1)]
        return [*steps, *({"event": "skip", "step": i} for i in skip), {"step": len(norms), "val_loss": 1.0}]

    assert dead_steps(rows(1.0, 0.0, 2.0)) == 0 and dead_steps([]) == 0
    assert dead_steps(rows(1.0, 0.0, 0.0)) == 2 and dead_steps(rows(1.0, 0.0, math.nan, skip=[3])) == 2
    assert dead_steps(rows(1.0, 2.0, 3.0, skip=[1, 3])) == 1 and dead_steps(rows(None, None, skip=[2])) == 1


def test_weights_that_blew_up_to_even_odds_have_diverged(recipe, tmp_path):
    """Step 1 throws the weights so far out that all logits are 0: a finite loss of log 259, and no gradient."""
    settings = {"optimizer": {"name": "sgd", "lr": 1e6, "weight_decay": 0}, "schedule": {"name": "constant"}}
    trial = trial_of(recipe, **settings)
    folder = tmp_path / "trials" / trial.key
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps(trial.spec(keep=False)))
    assert main([str(folder / "spec.json")]) == 0
    result = TrialStore(tmp_path / "trials").result(trial)
    assert result.val_loss == pytest.approx(math.log(259), abs=1e-3), "stuck, and finite"
    assert result.status == "diverged" and "stuck" in result.error and result.steps == 10


def test_figures_leave_out_what_a_rollback_undid_and_the_first_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "tokens": 0, "val_loss": 5.0}]
    for step in range(1, 21):
        rows.append({"step": step, "tokens": 10 * step, "seconds": float(step), "loss": 5 - step / 10,
                     "tokens_per_s": 1.0 if step <= 5 else 100.0, "optimizer_state_bytes": 80})  # fmt: skip
    rows += [{"step": 20, "tokens": 200, "val_loss": 9.0}, {"event": "rollback", "step": 10, "from_step": 20}]
    rows += [{"step": 11, "tokens": 110, "seconds": 30.0, "loss": 1.0, "tokens_per_s": 100.0}]
    rows += [{"step": 11, "tokens": 110, "val_loss": 3.0}, {"step": 11, "tokens": 110, "val_loss": 3.5}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = summarise(path)
    assert found.curve == [[0, 0.0, 5.0], [110, 30.0, 3.5]] and found.val_loss == 3.5 and found.steps == 11
    assert found.tokens_per_s == 100.0 and found.events == {"rollback": 1} and found.optimizer_state_bytes == 80
