"""How a run ends, what it says of itself before, and what a resumed one does that has nothing left to do."""

import json
import logging
import math
import os

import pytest
import yaml

from trainwright import RunConfig, Trainer, cli
from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.train import runs


def state_of(folder):
    """Every file with its content, and times: nothing may be written."""
    return {
        p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()
    }


def fit(data, resume=False):
    trainer = Trainer(RunConfig.load(data), resume=resume)
    rows = []
    return trainer, rows, trainer.fit(on_step=rows.append)


@pytest.fixture
def messages(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trainwright"), "propagate", True)
    caplog.set_level(logging.INFO, logger="trainwright")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("trainwright")]


@pytest.mark.parametrize(
    ("length", "raise_it"), [({"steps": 4}, "steps"), ({"tokens": 1024}, "tokens"), ({"epochs": 0.05}, "epochs")]
)
def test_a_finished_run_is_left_alone(recipe, tmp_path, capsys, length, raise_it):
    more = {"log.report": True, "log.sample": "a", "log.loggers": [{"name": "tensorboard"}]}
    data = recipe(**more, train={**recipe()["train"], **length, "steps": length.get("steps")})
    _, rows, first = fit(data)
    folder = RunConfig.load(data).run_dir
    before = state_of(folder)
    for override in ([], ["optimizer.lr=0.5"], ["log.every=2"]):
        code = cli.run(["train", "--resume", str(folder), *override])
        out = capsys.readouterr().out
        assert code == 0 and f"had ended at step {len(rows)} of {len(rows)}" in out, out
        assert f"raise train.{raise_it}" in out and "done" not in out
        assert state_of(folder) == before
    trainer, made, again = fit({**data, "optimizer": {"name": "adamw", "lr": 0.5}}, resume=True)
    assert not made and trainer.progress.step == len(rows) and state_of(folder) == before
    for key in ("step", "loss", "val_loss", "tokens", "run_dir"):
        assert again[key] == first[key], key


def test_what_is_missing_behind_the_last_step_is_made_up_for(recipe):
    """A run killed between its last checkpoint and its validation, or its report."""
    data = recipe(**{"log.report": True, "checkpoint.every": 4})
    trainer, _, _ = fit(data)
    folder = trainer.config.run_dir
    recipe_before = (folder / "config.yaml").read_text()
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "val_loss" not in line))
    other = {**data, "optimizer": {"name": "adamw", "lr": 0.5}}
    _, made, summary = fit(other, resume=True)
    assert not made and math.isfinite(summary["val_loss"]) and "val_loss" in metrics.read_text()
    assert (folder / "config.yaml").read_text() == recipe_before  # that by which it was trained
    (folder / "report.html").unlink()
    fit(data, resume=True)
    assert (folder / "report.html").is_file()
    before = state_of(folder)
    fit(data, resume=True)
    assert state_of(folder) == before


def test_a_prolonged_run_says_that_the_rate_goes_up(recipe, messages):
    data = recipe(**{"train.steps": 4, "schedule": {"name": "cosine", "warmup": 0}})
    _, first, _ = fit(data)
    assert not any("learning rate goes up" in m for m in messages())
    longer = recipe(**{"train.steps": 8, "schedule": {"name": "cosine", "warmup": 0}})
    _, more, _ = fit(longer, resume=True)
    (said,) = [m for m in messages() if "learning rate goes up" in m]
    assert f"{first[-1]['lr']:.3g} in step 4, {more[0]['lr']:.3g} in the next" in said and "over 8 steps" in said


@pytest.mark.parametrize("warmup", [0.0, 0.75])
def test_a_run_that_just_goes_on_says_nothing_of_it(recipe, messages, warmup):
    """Also within the warm-up, where the rate goes up by the recipe."""
    data = recipe(**{"train.steps": 8, "checkpoint.every": 2, "schedule": {"name": "cosine", "warmup": warmup}})

    def die(row):
        if row["step"] == 4:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    _, rows, _ = fit(data, resume=True)
    assert rows[0]["step"] in (3, 5) and not any("learning rate" in m for m in messages())


def test_the_clock_is_named_where_it_ends_a_run(recipe, tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe(**{"train.steps": 100_000, "train.seconds": 0.2, "log.progress": "none"})))
    assert cli.run(["train", str(path)]) == 0
    out = capsys.readouterr().out
    steps = int(out.split("done: step ")[1].split()[0])
    assert f"train.seconds=0.2 is up; step {steps:,} of 100,000" in out
    folder = tmp_path / "runs" / "t"
    assert cli.run(["train", "--resume", str(folder)]) == 0
    assert "raise train.seconds" in capsys.readouterr().out


def test_steps_that_end_a_run_are_not_named(recipe):
    assert "ended" not in fit(recipe(**{"train.seconds": 600}))[2]


# -- nothing held out ---------------------------------------------------------------------------------------------


def test_without_held_out_documents_there_is_no_validation(recipe, capsys):
    data = recipe(**{"data.validation_fraction": 0, "evaluate.every": 2, "evaluate.at_start": True, "log.report": True})
    data["log"]["progress"] = "lines"
    trainer, _, summary = fit(data)
    out = capsys.readouterr().out
    assert "val_loss" not in summary and "nan" not in out.lower() and "validation loss" not in out
    assert "nothing held out: no validation, and no checkpoint is the best" in out
    rows = [json.loads(line) for line in (trainer.config.run_dir / "metrics.jsonl").open()]
    assert len(rows) == 4 and all("loss" in r and "val_loss" not in r for r in rows)
    with pytest.raises(CheckpointError, match="has a validation loss, so none is the best"):
        runs.load_run(trainer.config.run_dir, "best")
    with pytest.raises(ConfigError, match="the run holds nothing out"):
        runs.evaluate_run(trainer.config.run_dir)
    before = state_of(trainer.config.run_dir)
    fit(data, resume=True)
    assert state_of(trainer.config.run_dir) == before


# -- the first lines ----------------------------------------------------------------------------------------------


def lines_of(data, capsys, resume=False):
    data["log"]["progress"] = "lines"
    trainer, _, _ = fit(data, resume)
    found = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines()[:5])
    return trainer, found


def test_a_run_says_what_it_is(recipe, capsys):
    data = recipe(**{"train.steps": 2})
    trainer, said = lines_of(data, capsys)
    assert list(said) == ["model", "device", "data", "length", "run"]
    count = sum(p.numel() for p in trainer.model.parameters())
    assert said["model"] == f"decoder, {count / 1e3:.3g}k parameters, all trained"
    assert said["device"].startswith("cpu (") and said["device"].endswith("computing in float32, weights in float32")
    documents, held = (sum(d.num_docs for d in part.values()) for part in (trainer.data.train, trainer.data.validation))
    assert said["data"].startswith(f"{documents} documents, ") and f"held out {held}, " in said["data"]
    assert "cache" not in said["data"]
    epochs = 16 / trainer.data.rows_per_epoch
    assert said["length"] == f"2 steps, 256 tokens a step: 512 tokens, {epochs:.3g} epochs"
    assert said["run"] == str(trainer.config.run_dir)
    _, said = lines_of(recipe(**{"train.steps": 3, "train.seconds": 75}), capsys, resume=True)
    assert "(from the cache)" in said["data"] and said["run"].endswith("; goes on behind step 2")
    assert said["length"].endswith("; 1:15 of training at the most")


def test_it_says_what_of_a_model_is_trained(recipe, capsys):
    trainer, said = lines_of(recipe(transforms=[{"name": "lora", "rank": 2}]), capsys)
    every = sum(p.numel() for p in trainer.model.parameters())
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert f"{trained / 1e3:.3g}k of them trained ({100 * trained / every:.2g} %)" in said["model"]


def test_no_display_no_lines(recipe, capsys):
    fit(recipe())
    assert capsys.readouterr().out == ""


def test_a_start_that_fails_leaves_no_folder(recipe, tmp_path):
    with pytest.raises(ConfigError, match="smaller than the tokenizer"):
        Trainer(RunConfig.load(recipe(**{"model.vocab_size": 100})))
    assert os.listdir(tmp_path / "runs") == []
