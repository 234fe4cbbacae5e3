"""Real processes: killed, interrupted, several of them. The reference is always one process that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from trainwright import RunConfig

TIMEOUT = 120


def start(recipe_file, *args, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "trainwright", "train", str(recipe_file), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def finish(process, code=0):
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, out
    return out


def write(tmp_path, data, name="recipe.yaml"):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(data))
    return path


def losses(data):
    path = RunConfig.load(data).run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {r["step"]: r["loss"] for r in rows if "loss" in r}


def wait_for_step(data, step, process):
    path = RunConfig.load(data).run_dir / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"step {step} never came")


LONG = {"train.steps": 120, "checkpoint.every": 10, "model.dropout": 0.1, "optimizer": {"name": "adamw", "lr": 1e-3}}


def test_killed_run_goes_on_to_the_last_bit(recipe, tmp_path):
    whole = recipe(**LONG, **{"run.name": "whole"})
    data = recipe(**LONG, **{"run.name": "killed"})
    finish(start(write(tmp_path, whole, "whole.yaml")))
    path = write(tmp_path, data)
    process = start(path)
    wait_for_step(data, 35, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(start(path, "--resume", str(RunConfig.load(data).run_dir)))
    assert losses(data) == losses(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupt_saves_the_step_and_says_how_to_go_on(recipe, tmp_path, number):
    data = recipe(**{**LONG, "train.steps": 100_000, "checkpoint.every": None})
    process = start(write(tmp_path, data))
    wait_for_step(data, 5, process)
    process.send_signal(number)
    out = finish(process, 130)
    done = max(losses(data))
    run_dir = RunConfig.load(data).run_dir
    assert (run_dir / f"checkpoints/step-{done:08d}/manifest.json").exists() and f"saved step {done}" in out
    again = subprocess.run(
        [sys.executable, "-m", "trainwright", "train", "--resume", str(run_dir), f"train.steps={done + 2}"],
        capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert sorted(losses(data)) == list(range(1, done + 3))


SHORT = {"train.steps": 20, "train.seq_len": 32, "train.global_batch_tokens": 256, "checkpoint.every": 10}


@pytest.mark.parametrize(
    "ways",
    [["parallel.dp_replicate=2"], ["parallel.dp_shard=2"], ["parallel.dp_shard=2", "parallel.dp_replicate=2"]],
    ids=["ddp", "fsdp2", "hsdp"],
)
def test_several_processes_equal_one(recipe, tmp_path, ways):
    one = recipe(**SHORT, **{"run.name": "one"})
    many = recipe(**SHORT, **{"run.name": "many", "log.sample": "alpha"})
    finish(start(write(tmp_path, one, "one.yaml")))
    nproc = 4 if len(ways) == 2 else 2
    finish(start(write(tmp_path, many), "--nproc", str(nproc), *ways))
    a, b = losses(one), losses(many)
    assert a.keys() == b.keys()
    for step in a:
        assert b[step] == pytest.approx(a[step], rel=1e-5), step
    assert (RunConfig.load(many).run_dir / "sample.txt").read_text().startswith("alpha")


@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_resume_on_another_number_of_processes(recipe, tmp_path, before, after):
    data = recipe(**SHORT, **{"run.name": "moved"})
    path = write(tmp_path, data)
    args = {1: (), 2: ("--nproc", "2", "parallel.dp_shard=2")}
    short = [f"train.steps={10}", "schedule={name: constant, warmup: 0}"]
    finish(start(path, *args[before], *short))
    finish(
        start(path, *args[after], "schedule={name: constant, warmup: 0}", "--resume", str(RunConfig.load(data).run_dir))
    )
    whole = recipe(**SHORT, **{"run.name": "whole", "schedule": {"name": "constant", "warmup": 0}})
    finish(start(write(tmp_path, whole, "whole.yaml")))
    a, b = losses(whole), losses(data)
    for step in range(1, 21):
        assert b[step] == pytest.approx(a[step], rel=1e-5), step


def test_world_size_that_does_not_fit_is_refused_before_any_process_group(recipe, tmp_path):
    out = finish(start(write(tmp_path, recipe()), "--nproc", "2", "parallel.dp_shard=3"), 2)
    assert "dp_shard" in out and "2" in out and "Traceback" not in out
