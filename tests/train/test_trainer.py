"""The loop: equal gradients however a batch is cut, bit-exact resume, verdicts acted on."""

import json
import math

import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, StoppedByMonitor
from trainwright.resilience.base import Verdict


def fit(data, resume=False, **kwargs):
    rows = []
    trainer = Trainer(RunConfig.load(data), resume=resume, **kwargs)
    summary = trainer.fit(on_step=rows.append)
    return trainer, rows, summary


def weights_of(trainer):
    return {k: v.detach().clone() for k, v in trainer.parallel.state().items()}


def assert_bitwise(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_it_learns_and_leaves_a_whole_run(recipe):
    trainer, rows, summary = fit(recipe(**{"train.steps": 40, "evaluate.every": 20, "log.report": True}))
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2), rel=0.05)
    folder = trainer.config.run_dir
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "report.html",
        "checkpoints/step-00000040",
        "tokenizer",
    ):
        assert (folder / name).exists(), name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 41))
    for key in (
        "tokens",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "flops_utilization",
        "memory_bytes",
        "optimizer_state_bytes",
    ):
        assert key in steps[-1], key
    assert [line["step"] for line in lines if "val_loss" in line] == [20, 40]
    assert steps[-1]["loss"] == rows[-1]["loss"]


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_micro_batches_do_not_change_the_run(recipe, micro):
    _, one, _ = fit(recipe(**{"run.name": "one", "train.micro_batch_size": 8}))
    _, many, _ = fit(recipe(**{"run.name": "many", "train.micro_batch_size": micro}))
    for a, b in zip(one, many, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_resume_is_bit_exact_with_dropout(recipe, optimizer):
    """Dropout 0.5; 6 steps against 3 + a new process's worth of state + 3, with a validation at the save."""
    common = {
        "model.dropout": 0.5,
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "average": {"name": "ema", "decay": 0.9},
        "train.steps": 6,
        "checkpoint.every": 3,
        "evaluate.every": 3,
    }
    whole, rows, _ = fit(recipe(**common, **{"run.name": "whole"}))
    data = recipe(**common, **{"run.name": "halves"})

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == 5:
            raise Kill

    torch.manual_seed(99)
    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    torch.manual_seed(1234)
    resumed, later, _ = fit(data, resume=True)
    assert [r["step"] for r in later] == [4, 5, 6]
    assert [r["loss"] for r in later] == [r["loss"] for r in rows[3:]]
    assert_bitwise(weights_of(whole), weights_of(resumed))
    lines = [json.loads(x) for x in (resumed.config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "loss" in x] == [1, 2, 3, 4, 5, 6]


def test_resume_at_the_end_of_an_epoch(recipe):
    probe = Trainer(RunConfig.load(recipe(**{"run.name": "probe"})))
    per_epoch = math.ceil(probe.data.rows_per_epoch / probe.rows)
    probe.close()
    common = {"train.steps": per_epoch + 3, "checkpoint.every": per_epoch, "model.dropout": 0.5}
    whole, rows, _ = fit(recipe(**common, **{"run.name": "whole"}))
    data = recipe(**common, **{"run.name": "halves"})

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == per_epoch + 1:
            raise Kill

    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    resumed, later, _ = fit(data, resume=True)
    assert [r["loss"] for r in later] == [r["loss"] for r in rows[per_epoch:]]
    assert_bitwise(weights_of(whole), weights_of(resumed))


def test_validation_does_not_disturb_training(recipe):
    _, plain, _ = fit(recipe(**{"run.name": "a", "model.dropout": 0.2}))
    _, watched, _ = fit(
        recipe(**{"run.name": "b", "model.dropout": 0.2, "evaluate.every": 1, "evaluate.at_start": True})
    )
    assert [r["loss"] for r in plain] == [r["loss"] for r in watched]


def test_resume_without_a_checkpoint_starts_over(recipe):
    data = recipe()

    class Kill(Exception):
        pass

    def die(row):
        raise Kill

    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    _, rows, _ = fit(data, resume=True)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]


def test_existing_run_is_kept_unless_told_otherwise(recipe):
    fit(recipe())
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*run\.overwrite=true"):
        Trainer(RunConfig.load(recipe()))
    fit(recipe(**{"run.overwrite": True}))


def test_a_folder_that_is_no_run_is_never_overwritten(recipe):
    data = recipe(**{"run.overwrite": True})
    folder = RunConfig.load(data).run_dir
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a run"):
        Trainer(RunConfig.load(data))
    assert (folder / "thesis.txt").read_text() == "mine"


def test_resume_with_another_model_names_the_fields(recipe):
    fit(recipe())
    with pytest.raises(ConfigError, match=r"model\.n_layers was 2, is 3"):
        Trainer(RunConfig.load(recipe(**{"model.n_layers": 3})), resume=True)


def test_unwritable_run_dir(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*cannot write"):
        Trainer(RunConfig.load(recipe(**{"run.dir": str(tmp_path / "file" / "runs")})))


def test_seq_len_beyond_the_models_limit(recipe):
    with pytest.raises(ConfigError, match="max_seq_len"):
        Trainer(RunConfig.load(recipe(**{"model.max_seq_len": 16})))


class Scripted:
    """A monitor that says what it is told at given steps."""

    def __init__(self, script):
        self.script, self.seen = dict(script), []

    def inspect(self, step):
        self.seen.append(step)
        action = self.script.pop(step.step, "ok")
        return Verdict(action, "scripted", "scripted") if action != "ok" else Verdict()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_skip_leaves_weights_and_optimizer_as_they_were(recipe):
    trainer = Trainer(RunConfig.load(recipe()))
    trainer.monitors = [("scripted", Scripted({2: "skip"}))]
    seen = []
    trainer.fit(on_step=lambda row: seen.append(weights_of(trainer)))
    assert_bitwise(seen[0], seen[1])
    assert any(not torch.equal(seen[1][k], seen[2][k]) for k in seen[1])
    events = [
        json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines() if "event" in x
    ]
    assert [(e["event"], e["step"]) for e in events] == [("skip", 2)]


def test_stop_ends_the_run_with_the_reason(recipe):
    trainer = Trainer(RunConfig.load(recipe()))
    trainer.monitors = [("scripted", Scripted({3: "stop"}))]
    with pytest.raises(StoppedByMonitor, match="step 3 by scripted: scripted") as error:
        trainer.fit()
    assert error.value.exit_code == 3


def test_rollback_restores_skips_data_and_lowers_the_rate(recipe):
    data = recipe(**{"train.steps": 7, "checkpoint.every": 2, "schedule": {"name": "constant", "warmup": 0}})
    data["recovery"] = {"skip_steps": 2, "lr_factor": 0.5}
    trainer = Trainer(RunConfig.load(data))
    trainer.monitors = [("scripted", Scripted({5: "rollback"}))]
    rows, states = [], {}

    def on_step(row):
        rows.append(row)
        states[len(rows)] = (weights_of(trainer), trainer.loader.state_dict())

    trainer.fit(on_step=on_step)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 5, 6, 7]
    assert rows[5]["lr"] == pytest.approx(0.5 * rows[3]["lr"])
    events = [
        json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines() if "event" in x
    ]
    assert [e["event"] for e in events][-1] == "rollback" and events[-1]["skipped_steps"] == 3
    # The data went on: 7 steps kept, 1 failed and 2 passed over.
    clean = Trainer(RunConfig.load(recipe(**{"run.name": "clean"})))
    for _ in range(7 + 1 + 2):
        clean.loader.next_batch()
    assert clean.loader.state_dict() == trainer.loader.state_dict()
    clean.close()


def test_non_finite_loss_is_skipped_by_default(recipe):
    trainer = Trainer(RunConfig.load(recipe()))
    inner = trainer.objective

    def poisoned(model, batch):
        loss = inner(model, batch)
        if trainer.progress.step == 1:
            loss.sum = loss.sum * float("nan")
        return loss

    trainer.objective = poisoned
    trainer.fit()
    assert all(torch.isfinite(w).all() for w in weights_of(trainer).values())
    events = [
        json.loads(x) for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines() if "event" in x
    ]
    assert [(e["event"], e["step"]) for e in events] == [("skip", 2)]


def test_clock_limit_ends_the_run(recipe):
    _, rows, _ = fit(recipe(**{"train.steps": None, "train.seconds": 1.0}))
    assert rows[-1]["seconds"] >= 1.0 and rows[-2]["seconds"] < 1.0


def test_moved_run_is_opened_evaluated_and_sampled(recipe, tmp_path):
    from trainwright.train import evaluate_run, load_run

    trainer, _, summary = fit(recipe(**{"train.steps": 6}))
    moved = tmp_path / "elsewhere"
    trainer.config.run_dir.rename(moved)
    _model, _tokenizer, _config = load_run(moved)
    assert_bitwise(
        weights_of(trainer), {k: v for k, v in trainer.parallel.model.state_dict().items() if k in weights_of(trainer)}
    )
    assert evaluate_run(moved)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)


def test_float16_overflow_lowers_the_scale_and_is_no_fault_of_the_run(recipe):
    """A scale far too high: the first steps overflow, leave the weights alone, and the run goes on; it resumes too."""
    data = recipe(
        **{"train.steps": 20, "checkpoint.every": 19, "precision": {"name": "fp16", "initial_scale": 2.0**28}}
    )
    trainer = Trainer(RunConfig.load(data))
    before = weights_of(trainer)
    rows, first = [], []

    def on_step(row):
        rows.append(row)
        if row["step"] == 1:
            first.append(weights_of(trainer))

    trainer.fit(on_step=on_step)
    assert_bitwise(before, first[0])
    assert rows[0]["overflows"] == 1 and 1 < rows[-1]["overflows"] < 20
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert not [x for x in (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines() if "event" in x]
    data["train"]["steps"] = 22
    again, more, _ = fit(data, resume=True)
    assert again.precision.scaler.get_scale() == trainer.precision.scaler.get_scale()
    assert more[0]["overflows"] == rows[-1]["overflows"]


def test_another_compute_dtype_on_resume_is_said(recipe, caplog):
    data = recipe(**{"train.steps": 2})
    fit(data)
    data["precision"], data["train"]["steps"] = {"name": "bf16"}, 3
    fit(data, resume=True)
    assert "computed in torch.float32 so far and goes on in torch.bfloat16" in caplog.text


def test_a_skipped_step_under_float16_leaves_the_scaler_ready(recipe):
    trainer = Trainer(RunConfig.load(recipe(**{"precision": "fp16"})))
    trainer.monitors = [("scripted", Scripted({2: "skip"}))]
    rows = []
    trainer.fit(on_step=rows.append)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]


def test_epochs_see_every_row_once_and_end_with_what_is_left(recipe):
    trainer = Trainer(
        RunConfig.load(recipe(**{"train.steps": None, "train.epochs": 2, "train.global_batch_tokens": 7 * 32}))
    )
    rows = 2 * trainer.data.rows_per_epoch
    assert rows % trainer.rows, "the case wants a last step that is not full"
    trained = []
    inner = trainer.executor.run

    def watch(parallel, objective, batch):
        trained.append(int((batch.weights > 0).sum()))
        return inner(parallel, objective, batch)

    trainer.executor.run = watch
    summary = trainer.fit()
    assert summary["step"] == math.ceil(rows / trainer.rows) and summary["epoch"] == pytest.approx(2)
    docs = sum(d.num_docs for d in trainer.data.train.values())
    assert sum(trained) == 2 * (trainer.data.train_tokens - docs)
