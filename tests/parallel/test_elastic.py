"""Ranks killed in the middle of a training, with real processes: it goes on by itself and ends at the same weights."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from trainwright.train.checkpoint import read_weights

HERE = Path(__file__).parent
# The command as it is, with another module for the workers.
COMMAND = (
    "import functools\n"
    "from trainwright.parallel import launch\n"
    "launch.launch = functools.partial(launch.launch, module='elastic_worker', last_call_timeout=45,"
    " keep_alive_interval=1, keep_alive_max_attempt=2)\n"
    "from trainwright.cli import main\n"
    "main()"
)
STEPS = 9
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Run:
    """One start of the command: what it printed, the rows of each step, the weights at the end."""

    def __init__(self, folder: Path, recipe: dict, *options: str, kill: str | None = None):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        recipe["run"]["dir"] = str(folder / "runs")
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        env = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC")}
        env |= {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])}
        env |= {"ELASTIC_NOTES": str(folder), "OMP_NUM_THREADS": "1"} | ({"ELASTIC_KILL": kill} if kill else {})
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", COMMAND, "train", str(folder / "recipe.yaml"), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )

    def wait(self) -> "Run":
        try:
            self.out, _ = self.process.communicate(timeout=300)
        finally:
            self.process.kill()
        self.code = self.process.returncode
        return self

    @property
    def rows(self) -> dict[int, list[str]]:
        """Rows of each step in the order of the data-parallel ranks; a step that was repeated counts as done last."""
        out: dict[int, list[str]] = {}
        for path in sorted(self.folder.glob("rows-*")):
            out.setdefault(int(path.name.split("-")[1]), []).extend(path.read_text().split())
        return out

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return read_weights(self.folder / f"runs/t/checkpoints/step-{STEPS:08d}")


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """``make(corpus_recipe)``: the uninterrupted run, made once."""
    made = {}

    def run(recipe):
        if not made:
            made[0] = Run(tmp_path_factory.mktemp("elastic") / "whole", settings(recipe), "--nproc", "2").wait()
            assert made[0].code == 0, made[0].out
        return made[0]

    return run


def settings(recipe):
    return recipe(
        **{
            "model.dim": 32,
            "model.ffn_dim": 48,
            "train.steps": STEPS,
            "checkpoint": {"every": 2, "keep": 9},
            "schedule": {"name": "constant"},
        }
    )


def test_a_killed_rank_ends_at_the_same_weights(make, recipe, tmp_path):
    whole = make(recipe)
    run = Run(tmp_path / "run", settings(recipe), "--nproc", "2", "--restarts", "1", kill="1:5").wait()
    assert run.code == 0, run.out
    told = [line for line in run.out.splitlines() if "rank " in line]
    assert len(told) == 1, run.out
    assert told[0].startswith("rank 1 was ended by SIGKILL (out of memory?); starting again from the last checkpoint")
    assert "Traceback" not in run.out
    assert run.rows == whole.rows and len(whole.rows) == STEPS
    assert all(torch.equal(w, whole.weights[n]) for n, w in run.weights.items())


def test_a_stopped_rank_of_a_ring(recipe, tmp_path):
    """It is noticed within parallel.timeout, named, and all start again."""
    spec = settings(recipe)
    spec["parallel"] = {"cp": 2, "timeout": 4}
    run = Run(tmp_path / "run", spec, "--nproc", "2", "--restarts", "1", kill="stop 1:5").wait()
    assert run.code == 0, run.out
    assert "rank 1 did not answer; starting again from the last checkpoint with 2 processes" in run.out
    assert "Traceback" not in run.out


def test_it_goes_on_with_fewer(make, recipe, tmp_path):
    """The first rank dies; the other goes on alone with the rows of both."""
    whole = make(recipe)
    run = Run(tmp_path / "run", settings(recipe), "--nproc", "1:2", "--restarts", "2", kill="0:5").wait()
    assert run.code == 0, run.out
    assert re.search(r"rank 0 was ended by SIGKILL.* with 1 process here \(1 restart left\)", run.out)
    after = {step: rows for step, rows in run.rows.items() if step >= 4}
    assert len(after) == STEPS - 4
    for step, rows in after.items():
        # The second rank's notes of repeated steps, 4 and 5 at most, are those of the run before it was killed.
        assert rows[: len(whole.rows[step])] == whole.rows[step]
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=1e-4, atol=1e-5)


def test_it_goes_on_without_a_lost_machine(make, recipe, tmp_path):
    """Two launchers as on two machines; one is killed with all that it has started."""
    whole = make(recipe)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = ("--nnodes", "1:2", "--rdzv", f"127.0.0.1:{port}", "--rdzv-id", "job", "--restarts", "3")
    lasting = Run(tmp_path / "run", settings(recipe), *options)
    deadline = time.monotonic() + 120
    while True:  # the machine that stays is the one where they meet
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert time.monotonic() < deadline and lasting.process.poll() is None
        time.sleep(0.1)
    lost = Run(tmp_path / "run", settings(recipe), *options, kill="machine:5").wait()
    lasting.wait()
    assert lost.code == -9, lost.out
    assert lasting.code == 0, lasting.out
    assert "a rank on another machine was lost; starting again from the last checkpoint with 1 process" in lasting.out
    assert "Traceback" not in lasting.out
    for name, weight in lasting.weights.items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=1e-4, atol=1e-5)
