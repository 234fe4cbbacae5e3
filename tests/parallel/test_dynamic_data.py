"""Mixers, selectors and weighters on two ranks: what they decide, and what comes of it, is what one process does."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, Trainer

HERE = Path(__file__).parent


def _load(path):
    spec = importlib.util.spec_from_file_location(f"shared_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dynamic = HERE.parent / "dynamic_data"
domains, mixed = (getattr(_load(dynamic / "conftest.py"), name) for name in ("domains", "mixed"))
METHODS = _load(dynamic / "test_dynamic_runs.py").DYNAMIC
WAYS = {"replicas": {}, "shards": {"parallel.dp_shard": 2}}


def test_two_ranks_decide_as_one_process(mixed, tmp_path):
    recipes = {
        f"{method}_{way}": mixed(**settings, **layout, **{"run.name": f"{method}_{way}", "train.micro_batch_size": 4})
        for method, settings in METHODS.items()
        for way, layout in WAYS.items()
        if way == "replicas" or method in ("odm", "loss", "weighter")  # less is refused there
    }
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    command = [sys.executable, str(HERE / "dynamic_worker.py"), str(tmp_path / "recipes.json"), str(tmp_path / "out")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    first, second = (torch.load(tmp_path / f"out.{r}") for r in range(2))
    for method, settings in METHODS.items():
        rows: list[dict] = []
        trainer = Trainer(RunConfig.load(mixed(**settings, **{"run.name": method, "train.micro_batch_size": 4})))
        trainer.fit(on_step=rows.append)
        for way in WAYS:
            got = first.get(f"{method}_{way}")
            if got is None:
                continue
            assert [r["step"] for r in got["rows"]] == [r["step"] for r in rows]
            compared = 0
            for mine, one in zip(got["rows"], rows, strict=True):
                for key in one:
                    if "/" in key or key in ("loss", "grad_norm"):
                        assert mine[key] == pytest.approx(one[key], rel=2e-4, abs=1e-6), (method, way, one["step"], key)
                        compared += 1
            assert compared >= 2 * len(rows)
            for name, weight in trainer.model.named_parameters():
                torch.testing.assert_close(
                    got["weights"][name], weight, rtol=0, atol=2e-4, msg=f"{method} {way} {name}"
                )
                assert torch.equal(got["weights"][name], second[f"{method}_{way}"]["weights"][name])
