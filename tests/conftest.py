"""Shared by all tests: one thread a process, and a tiny recipe on text made here."""

from __future__ import annotations

import copy
import os
import random

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    """A folder of text files with structure that a tiny model can learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    names = ["alpha", "beta", "gamma", "delta"]
    for i in range(40):
        lines = [f"{rng.choice(names)} = {rng.choice(names)} + {j}" for j in range(rng.randint(5, 60))]
        (folder / f"doc{i:03d}.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.fixture
def recipe(tmp_path, corpus):
    """``recipe(**{"train.steps": 4})`` -> a recipe dict: 2 layers, hidden 64, bytes, fp32, CPU."""
    base = {
        "run": {"name": "t", "dir": str(tmp_path / "runs"), "seed": 7, "device": "cpu"},
        "model": {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [{"name": "text", "path": corpus}],
            "cache_dir": str(tmp_path / "cache"),
            "validation_fraction": 0.1,
        },
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "precision": {"name": "fp32"},
        "train": {"steps": 4, "seq_len": 32, "global_batch_tokens": 256},
        "evaluate": {"tokens": 1024},
        "log": {"loggers": [], "progress": "none", "report": False},
    }

    def make(**overrides):
        data = copy.deepcopy(base)
        for key, value in overrides.items():
            node = data
            *path, last = key.split(".")
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        return data

    return make
