import random

import numpy as np
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, nearest
from trainwright.core.params import named_params
from trainwright.core.seeds import derive, rng_state, seed_everything, set_rng_state


def _batch(rows: int = 5, length: int = 4) -> Batch:
    tokens = torch.arange(rows * length).reshape(rows, length)
    return Batch(
        tokens,
        tokens + 1,
        torch.ones(rows, length),
        tokens % length,
        torch.zeros(rows, length, dtype=torch.int32),
        {"advantages": torch.arange(rows).float()},
    )


def test_split_keeps_every_row_and_shares_memory():
    batch = _batch(5)
    parts = batch.split(2)
    assert [p.shape[0] for p in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([p.tokens for p in parts]), batch.tokens)
    assert torch.equal(torch.cat([p.extras["advantages"] for p in parts]), batch.extras["advantages"])
    assert parts[0].tokens.data_ptr() == batch.tokens.data_ptr()


def test_weight_counts_beyond_float32():
    batch = _batch(1, 1)
    batch.weights = torch.ones(1, 1).expand(1, 2**24 + 3)
    assert batch.weight().item() == 2**24 + 3


def test_random_state_round_trip_covers_all_generators():
    seed_everything(3)
    random.random(), np.random.rand(), torch.rand(1)
    state = rng_state()
    first = (random.random(), np.random.rand(3).tolist(), torch.randn(5).tolist(), random.gauss(0, 1))
    set_rng_state(state)
    assert (random.random(), np.random.rand(3).tolist(), torch.randn(5).tolist(), random.gauss(0, 1)) == first


def test_derived_seeds_differ_and_are_stable():
    assert derive(1, "data") != derive(1, "weights") != derive(2, "weights")
    assert derive(0, "data") == 2460214435513486726


def test_error_from_one_level_out():
    error = ConfigError("is too large; set rank <= 4", key="rank", value=9).under("optimizer")
    assert str(error) == "optimizer.rank=9: is too large; set rank <= 4" and error.exit_code == 2


def test_nearest_falls_back_to_the_list():
    assert "adamw" in nearest("adam", ["adamw", "sgd"]) and "valid names" in nearest("zzz", ["adamw", "sgd"])


def test_roles_are_guessed_for_foreign_models():
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    roles = {n.name: n.role for n in named_params(model)}
    assert roles == {
        "0.weight": "embedding",
        "1.weight": "matrix",
        "1.bias": "bias",
        "2.weight": "norm",
        "2.bias": "bias",
    }
