"""Pipelines of 2, 4 and 8 gloo ranks, and triples of dimensions, against one process; checkpoints; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainwright.core.errors import ConfigError, TrainwrightError
from trainwright.parallel.config import Degrees, PipelineSection
from trainwright.parallel.pipeline.layout import stage_layers, stage_ranks
from trainwright.parallel.pipeline.legal import check_micro_batches, check_recipe, check_schedule
from trainwright.parallel.pipeline.pipeline import Pipeline
from trainwright.train.checkpoint import read_weights

pytestmark = pytest.mark.timeout(900)  # a start of all cells takes minutes on a busy machine
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
spec = importlib.util.spec_from_file_location("pipeline_worker", HERE / "pipeline_worker.py")
worker = importlib.util.module_from_spec(spec)
sys.modules["pipeline_worker"] = worker
try:
    spec.loader.exec_module(worker)
finally:
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``results(cell)``: what each rank has, and what one process has; all cells are run by one start of Python."""
    out = tmp_path_factory.mktemp("pipeline") / "result"
    command = [sys.executable, str(HERE / "pipeline_worker.py"), str(out), ",".join(worker.CELLS)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]

    def of(name):
        return [torch.load(f"{out}.{name}.{r}") for r in range(worker.world_of(name))], torch.load(f"{out}.{name}.one")

    return of


def tolerance(name):
    """Relative for losses and norms, absolute for weights. Norms and routers compute in float32 also in float64, and
    where rows are grouped otherwise their rounding differs."""
    if worker.CELLS[name].dtype == torch.bfloat16:
        return 1e-2, 5e-2, 3e-2
    # One process with the same micro-batches does the same sums in the same order.
    return (1e-10, 1e-10, 1e-10) if "pp2" in name or name == "pp4_1f1b" else (1e-7, 1e-6, 1e-5)


@pytest.mark.parametrize("name", worker.CELLS)
def test_training_equals_one_process(results, name):
    """AdamW steps with clipping over all stages: losses, metrics, norms, validation, and weights under their names."""
    ranks, want = results(name)
    loss_rtol, norm_rtol, weight_atol = tolerance(name)
    names = set()
    for got in ranks:
        for key in ("losses", "norms", "validation"):
            torch.testing.assert_close(got[key], want[key], rtol=norm_rtol if key == "norms" else loss_rtol, atol=1e-12)
        assert [m.keys() for m in got["metrics"]] == [m.keys() for m in want["metrics"]]
        for mine, one in zip(got["metrics"], want["metrics"], strict=True):
            torch.testing.assert_close(mine["nll"], one["nll"], rtol=loss_rtol, atol=1e-12)
        names |= got["weights"].keys()
        for key, weight in got["weights"].items():
            torch.testing.assert_close(weight, want["weights"][key], rtol=0, atol=weight_atol, msg=f"{name} {key}")
    assert names == want["weights"].keys()


@pytest.mark.parametrize("name", ["pp2_1f1b_tied", "pp2_uneven", "pp4_1f1b"])
def test_a_rank_holds_its_layers(results, name):
    cell = worker.CELLS[name]
    pp = cell.parallel["pp"]
    layers = stage_layers(4, pp, cell.parallel["pipeline"]["layers"])
    for rank, got in enumerate(results(name)[0]):
        held = {int(n.split(".")[1]) for n in got["weights"] if n.startswith("blocks.")}
        assert held == set(layers[rank])
        tied = cell.model["tie_embeddings"]
        assert ("embed.weight" in got["weights"]) == (rank == 0 or (tied and rank == pp - 1))
        assert ("norm.weight" in got["weights"]) == (rank == pp - 1)


def test_checkpoints_change_hands(recipe, tmp_path):
    """Weights, optimizer (of several parts), average and clipper, from two stages to one process and the other way."""
    data = recipe(
        **{
            "model.n_layers": 4,
            "model.tie_embeddings": True,
            "optimizer": {"name": "muon", "lr": 3e-3},
            "clip": {"name": "zclip", "warmup_steps": 2},
            "average": {"name": "ema", "decay": 0.9},
            "train.steps": 6,
            "train.micro_batch_size": 2,
            "checkpoint.every": 3,
            "evaluate.every": 3,
            "log.sample": "a",
        }
    )
    out = tmp_path / "result"
    Path(f"{out}.recipe").write_text(json.dumps(data))
    command = [sys.executable, str(HERE / "pipeline_worker.py"), str(out), "runs"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    whole, *halves = (torch.load(f"{out}.run{i}") for i in range(len(worker.RUNS)))
    for run, steps in zip(halves, ([1, 2, 3, 4, 5], [4, 5, 6]) * 2, strict=True):
        assert [r["step"] for r in run["rows"]] == steps
        for row in run["rows"]:
            want = whole["rows"][row["step"] - 1]
            for key in ("loss", "grad_norm", "nll", "trained_share", "lr"):
                assert row[key] == pytest.approx(want[key], rel=1e-4), (row["step"], key)
        if steps[-1] == 6:
            for key in ("val_loss", "val_loss_live", "val_tokens"):
                assert run["summary"][key] == pytest.approx(whole["summary"][key], rel=1e-4)
    runs = Path(data["run"]["dir"])
    assert (runs / "from_two" / "sample.txt").exists() and not (runs / "from_one" / "sample.txt").exists()
    names = {}
    for name in ("whole", "from_two", "from_one"):
        newest = sorted((runs / name / "checkpoints").glob("step-*"))[-1]
        names[name] = {n: t.shape for n, t in read_weights(newest).items()}
    assert names["whole"] == names["from_two"] == names["from_one"]


def test_layout():
    assert stage_layers(7, 2) == [range(4), range(4, 7)]
    assert [len(s) for s in stage_layers(10, 4)] == [2, 3, 3, 2]
    assert [len(s) for s in stage_layers(11, 4)] == [3, 3, 3, 2]
    assert [len(s) for s in stage_layers(9, 3, [1, 5, 3])] == [1, 5, 3]
    assert stage_layers(9, 3, [1, 5, 3])[1] == range(1, 6)
    for n in range(4, 30):
        cut = stage_layers(n, 4)
        assert [i for s in cut for i in s] == list(range(n)) and min(map(len, cut)) >= n // 4
    assert stage_ranks(3, PipelineSection(stages_per_rank=2, schedule="interleaved")) == [0, 1, 2, 0, 1, 2]
    assert stage_ranks(3, PipelineSection(stages_per_rank=2, schedule="zero_bubble")) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "section, says",
    [
        ({"schedule": "zero_bubble"}, "stages_per_rank=1: zero_bubble takes 2 stages a rank; set it to 2"),
        ({"schedule": "zero_bubble", "stages_per_rank": 3}, "zero_bubble takes 2 stages .* or schedule=interleaved"),
        ({"schedule": "interleaved"}, "interleaved takes 2 or more stages a rank; set it to 2"),
        ({"schedule": "gpipe", "stages_per_rank": 2}, "gpipe takes 1 stages a rank"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "stages_per_rank=2: 1f1b takes 1"),
    ],
)
def test_schedules_want_their_number_of_stages(section, says):
    with pytest.raises(ConfigError, match=says):
        check_schedule(PipelineSection(**section), 2)


def test_schedules_want_enough_micro_batches():
    with pytest.raises(
        ConfigError, match="makes 3 micro-batches a step, and 1f1b needs at least one for each of the 4"
    ):
        check_micro_batches(PipelineSection(), 4, 3)
    with pytest.raises(ConfigError, match=r"makes 7 micro-batches .* use a multiple of 2"):
        check_micro_batches(PipelineSection(schedule="interleaved", stages_per_rank=2), 2, 7)
    check_micro_batches(PipelineSection(), 4, 4)
    check_micro_batches(PipelineSection(schedule="gpipe"), 4, 1)
    check_micro_batches(PipelineSection(schedule="interleaved", stages_per_rank=2), 2, 6)


def _recipe(**parts):
    names = SimpleNamespace
    return names(
        parallel=names(pipeline=PipelineSection(**parts.get("pipeline", {}))),
        data=names(batcher=names(regroups=parts.get("regroups", False), name="odb")),
        precision=names(name=parts.get("precision", "bf16")),
        train=names(compile=parts.get("compile", False)),
        optimizer=names(name=parts.get("optimizer", "adamw"), inner=parts.get("inner")),
    )


@pytest.mark.parametrize(
    "parts, says",
    [
        ({"regroups": True}, "data.batcher='odb': makes micro-batches of different shapes"),
        ({"precision": "fp16"}, "precision='fp16': has a loss scale"),
        ({"optimizer": "llr"}, "optimizer='llr': spreads rates over the layers"),
        ({"optimizer": "mgup", "inner": SimpleNamespace(name="llr")}, "optimizer='llr'"),
        (
            {"compile": True, "pipeline": {"schedule": "zero_bubble", "stages_per_rank": 2}},
            "train.compile=True: does not go with schedule=zero_bubble",
        ),
    ],
)
def test_what_does_not_go_with_a_pipeline(parts, says):
    check_recipe(Degrees(pp=2), _recipe(), 8, 2)
    with pytest.raises(ConfigError, match=says):
        check_recipe(Degrees(pp=2), _recipe(**parts), 8, 2)


def test_too_few_micro_batches_are_refused_before_the_start():
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size: makes 1 micro-batches"):
        check_recipe(Degrees(pp=2), _recipe(), 8, 8)


def test_figures_are_those_of_the_first_step():
    """Names are told to the other stages once; a name that comes later is an error, not a sum that hangs."""
    objective, one = object(), torch.ones(())
    kept = SimpleNamespace(_names=(objective, ["nll", "z_loss"]))
    assert Pipeline._figures(kept, objective, {"nll": one}) == ["nll", "z_loss"]
    with pytest.raises(TrainwrightError, match="logs accuracy and did not in its first step"):
        Pipeline._figures(kept, objective, {"nll": one, "accuracy": one})
