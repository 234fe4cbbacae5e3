"""Trainings in stages: each goes on from the weights before it, and one of no length changes nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from trainwright.core.errors import ConfigError
from trainwright.lab.stages import run_stages, stage_recipe


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def stages(recipe, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"inputs": f"say {i}:", "targets": f"{i}!"}) + "\n" for i in range(40)))
    first = recipe(**{"train.steps": 3})
    second = recipe(
        **{"train.steps": 2, "data.sources": [{"name": "panda_llm", "path": str(path)}], "objective": "sft"}
    )
    return first, second


def test_staged_and_its_limits(stages, tmp_path):
    """(b) A second stage of fraction 0 is the first stage alone, bit by bit."""
    first, second = stages
    none = {**second, "train": {**second["train"], "steps": 0}}
    alone = run_stages([first], tmp_path / "alone")
    zero = run_stages([first, none], tmp_path / "zero")
    a, b = weights(alone), weights(zero)
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    assert zero.name == "stage-1.hf" and not (tmp_path / "zero" / "stage-2").exists()

    rows = []
    both = run_stages([first, second], tmp_path / "both", on_stage=lambda n, figures: rows.append((n, figures["step"])))
    assert rows == [(1, 3), (2, 2)] and both.name == "stage-2.hf"
    c = weights(both)
    assert any(not torch.equal(a[n], c[n]) for n in a)
    # The second stage began where the first ended: at a learning rate of next to nothing it stays there.
    still = {**second, "optimizer": {"name": "adamw", "lr": 1e-30, "weight_decay": 0.0}}
    d = weights(run_stages([first, still], tmp_path / "still"))
    assert all(torch.equal(a[n], d[n]) for n in a)
    # What is finished is not trained again.
    assert run_stages([first, second], tmp_path / "both", on_stage=lambda n, f: rows.append("again")) == both
    assert len(rows) == 2


def test_a_stage_takes_model_and_tokenizer_from_the_one_before(recipe, tmp_path):
    data = stage_recipe(recipe(**{"train.tokens": 4096}), tmp_path, 2, tmp_path / "stage-1.hf")
    assert data["model"] == {"name": "pretrained", "path": str(tmp_path / "stage-1.hf")} and "tokenizer" not in data
    kept = stage_recipe(recipe(model={"name": "hf", "path": "x"}), tmp_path, 2, tmp_path / "a")
    assert kept["model"] == {"name": "hf", "path": str(tmp_path / "a")}
    with pytest.raises(ConfigError, match="no stage has any length"):
        run_stages([{"train": {"tokens": 0}}], tmp_path)
