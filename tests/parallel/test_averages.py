"""Validation of averaged weights, and of schedule-free's, after that of the live ones: sharded as in one process."""

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from trainwright.config.run_config import RunConfig
from trainwright.train.trainer import Trainer

HERE = Path(__file__).parent
LAYOUTS = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "cp_shard": {"cp": 2, "dp_shard": 2},
    "tp_replicate": {"tp": 2, "dp_replicate": 2},
}
AVERAGED = {
    "ema": {"average": {"name": "ema", "decay": 0.5}},
    "schedule_free": {"optimizer": {"name": "schedule_free", "lr": 1e-2}, "schedule": {"name": "constant"}},
}
RUNS = {**{f"ema-{layout}": ("ema", layout) for layout in LAYOUTS}, "schedule_free-hsdp": ("schedule_free", "hsdp")}


def spec(recipe, name, kind, layout=None):
    settings = {
        "run.name": name,
        "model.dim": 32,
        "model.ffn_dim": 48,
        "model.n_kv_heads": 2,
        "optimizer.lr": 1e-2,
        "train.steps": 5,
        "evaluate": {"tokens": 512, "every": 3},
        "checkpoint": {"keep": 1},
        **AVERAGED[kind],
    }
    return recipe(**settings, **({} if layout is None else {"parallel": LAYOUTS[layout]}))


@pytest.mark.timeout(300)
def test_averages_are_validated_as_in_one_process(recipe, tmp_path):
    want = {}
    for kind in AVERAGED:
        trainer = Trainer(RunConfig.from_dict(spec(recipe, f"alone-{kind}", kind)))
        summary = trainer.fit()
        want[kind] = {k: v for k, v in summary.items() if k.startswith("val_loss")}
        want[kind]["best"] = trainer.progress.best_loss
        assert abs(want[kind]["val_loss"] - want[kind]["val_loss_live"]) > 0.02
    recipes = {name: spec(recipe, name, *run) for name, run in RUNS.items()}
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    run_ranks("average_worker.py", tmp_path / "recipes.json", tmp_path / "out", timeout=240)
    found = torch.load(tmp_path / "out")
    for name, (kind, _) in RUNS.items():
        assert found[name] == pytest.approx(want[kind], rel=1e-3), name
