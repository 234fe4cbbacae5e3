"""`data.batcher: odb` in the loop: the same gradients as padded rows, from fewer positions."""

import json
import random
import subprocess
import sys

import pytest
import yaml

from trainwright import RunConfig, Trainer


@pytest.fixture
def chats(tmp_path):
    """Rows of very different length, and a step's worth that are all short."""
    rng = random.Random(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as f:
        for i in range(200):
            n = rng.choice([1, 2, 3, 5, 8, 40])
            f.write(json.dumps({"text": " ".join(f"w{(i * j) % 7}" for j in range(n))}) + "\n")
    return {"data.sources": [{"name": "jsonl", "path": str(path)}], "train.seq_len": 64}


def settings(chats, batcher, name=None):
    return {
        **chats, "data.batcher": batcher, "train.global_batch_tokens": 1024, "train.micro_batch_size": 4,
        "train.steps": 8, "run.name": name or batcher, "checkpoint.every": 3,
    }  # fmt: skip


def rows_of(data):
    rows = []
    Trainer(RunConfig.load(data)).fit(on_step=rows.append)
    return rows


def test_the_gradients_of_padded_rows_from_fewer_positions(recipe, chats):
    padded, odb = (rows_of(recipe(**settings(chats, b))) for b in ("padded", "odb"))
    for a, b in zip(padded, odb, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        assert b["trained_share"] > 1.5 * a["trained_share"]
        assert b["trained_share"] <= 1


def test_resumes_exactly(recipe, chats):
    whole = rows_of(recipe(**settings(chats, "odb")))

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == 5:
            raise Kill

    data = recipe(**settings(chats, "odb"), **{"run.overwrite": True})
    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    again = []
    Trainer(RunConfig.load({**data, "run": {**data["run"], "overwrite": False}}), resume=True).fit(again.append)
    assert [r["loss"] for r in again] == [r["loss"] for r in whole[again[0]["step"] - 1 :]]


@pytest.mark.parametrize("way", ["parallel.dp_replicate=2", "parallel.dp_shard=2"])
def test_two_ranks_with_other_lengths_take_the_same_micro_steps(recipe, chats, tmp_path, way):
    one = rows_of(recipe(**settings(chats, "odb")))
    two = recipe(**settings(chats, "odb", "two"))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(two))
    command = [sys.executable, "-m", "trainwright", "train", str(tmp_path / "two.yaml"), "--nproc", "2", way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = RunConfig.load(two).run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for a, b in zip(one, [r for r in rows if "loss" in r], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
