import random

import pytest


@pytest.fixture(scope="session")
def domains(tmp_path_factory):
    """Three folders: ``plain`` (two words), ``digits``, ``noise`` (random letters)."""
    folder = tmp_path_factory.mktemp("domains")
    rng = random.Random(0)
    words = {
        "plain": ["ab", "cd"],
        "digits": [str(k) for k in range(10)],
        "noise": ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(5)) for _ in range(500)],
    }
    for name, choices in words.items():
        (folder / name).mkdir()
        for i in range(30):
            (folder / name / f"{i}.txt").write_text(" ".join(rng.choice(choices) for _ in range(150)))
    return folder


@pytest.fixture
def mixed(recipe, domains):
    """``mixed(**overrides)`` -> a recipe over the three domains: one layer, hidden 32, 8 rows of 32 bytes a step."""

    def make(weights=(1.0, 1.0, 1.0), **overrides):
        names = ("plain", "digits", "noise")
        sources = [{"name": "text", "path": str(domains / n)} for n in names]
        if weights is not None:
            sources = [{**s, "weight": w} for s, w in zip(sources, weights, strict=True)]
        base = {
            "data.sources": sources, "train.steps": 8,
            "model": {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64},
        }  # fmt: skip
        return recipe(**{**base, **overrides})

    return make
