"""`data.batcher: dataset_decomposition` in the loop: whole steps of one bucket, resumed exactly, on two ranks alike."""

import json
import random
import subprocess
import sys

import pytest
import yaml

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, DataError


@pytest.fixture
def texts(tmp_path):
    """Documents of very different length."""
    rng = random.Random(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as f:
        for i in range(300):
            n = rng.choice([2, 4, 6, 9, 20, 60])
            f.write(json.dumps({"text": " ".join(f"w{(i * j) % 7}" for j in range(n))}) + "\n")
    return {"data.sources": [{"name": "jsonl", "path": str(path)}]}


def settings(texts, name="dd", **more):
    return {
        **texts, "data.batcher": {"name": "dataset_decomposition", "k_min": 3, "cycles": 2}, "train.seq_len": 64,
        "train.global_batch_tokens": 512, "train.micro_batch_size": 3, "train.steps": 8, "run.name": name,
        "checkpoint.every": 3, **more,
    }  # fmt: skip


def rows_of(data, **kwargs):
    rows = []
    trainer = Trainer(RunConfig.load(data), **kwargs)
    trainer.fit(on_step=rows.append)
    return rows, trainer


def test_resumes_exactly_and_learns(recipe, texts):
    """Micro-batches of 3 rows do not divide the 8 of a step: the gradient is that of the step all the same."""
    whole, trainer = rows_of(recipe(**settings(texts)))
    assert all(r["trained_share"] == 1 for r in whole)
    assert trainer.data.summary()["padding_share"] == 0
    assert len(set(trainer.data.streams["pool"]._at(0)[0].buckets.tolist())) == 4
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.5
    even, _ = rows_of(recipe(**settings(texts, "even", **{"train.micro_batch_size": 4})))
    assert [r["loss"] for r in even] == pytest.approx([r["loss"] for r in whole], rel=1e-5)

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == 5:
            raise Kill

    data = recipe(**settings(texts, "killed"))
    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    again, _ = rows_of(data, resume=True)
    assert [r["loss"] for r in again] == [r["loss"] for r in whole[again[0]["step"] - 1 :]]
    other = recipe(**settings(texts, "killed", **{"train.global_batch_tokens": 1024, "train.steps": 12}))
    with pytest.raises((DataError, ConfigError), match=r"rows a step was 8 and is 16|global_batch_tokens"):
        Trainer(RunConfig.load(other), resume=True).fit()


def test_an_epoch_is_of_whole_steps(recipe, texts):
    data = recipe(**settings(texts, "epoch", **{"train.epochs": 1}))
    del data["train"]["steps"]
    rows, trainer = rows_of(data)
    assert len(rows) == len(trainer.data.streams["pool"]._at(0)[0].buckets) > 10
    assert all(r["trained_share"] == 1 for r in rows)


@pytest.mark.slow
def test_two_ranks_take_the_same_steps(recipe, texts, tmp_path):
    one, _ = rows_of(recipe(**settings(texts)))
    two = recipe(**settings(texts, "two"))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    command = [sys.executable, "-m", "trainwright", "train", str(tmp_path / "two.yaml"), "--nproc", "2"]
    done = subprocess.run([*command, "parallel.dp_shard=2"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = RunConfig.load(two).run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for a, b in zip(one, [r for r in rows if "loss" in r], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_weights_of_sources_are_refused(recipe, texts, corpus):
    sources = [{"name": "text", "path": corpus, "weight": w} for w in (1, 2)]
    with pytest.raises(ConfigError, match=r"data.batcher='dataset_decomposition': .*leave the weights out"):
        Trainer(RunConfig.load(recipe(**settings(texts, **{"data.sources": sources}))))


def test_rows_that_hold_no_whole_pieces_are_refused(recipe, texts):
    with pytest.raises(ConfigError, match=r"train.seq_len=48: .*use 32 or 64"):
        Trainer(RunConfig.load(recipe(**settings(texts, **{"train.seq_len": 48, "train.global_batch_tokens": 480}))))


def test_documents_that_should_stay_whole_are_refused(recipe, texts, monkeypatch):
    monkeypatch.setattr("trainwright.data.module._whole", lambda config: True)
    with pytest.raises(ConfigError, match=r"leaves their ends out.*use best_fit or multipack"):
        Trainer(RunConfig.load(recipe(**settings(texts))))
