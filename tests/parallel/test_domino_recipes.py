"""Recipes with Domino: what is refused before any process group is made, and what a line stands for."""

import copy

import pytest

from trainwright import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.core.registry import get
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.legal import check_cut
from trainwright.train.degrees import check, settled

DENSE = DecoderModelConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=96).architecture(97)
ODD = DecoderModelConfig(dim=48, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=90).architecture(97)
EXPERTS = DecoderModelConfig(family="mixtral", dim=32, n_layers=2, n_heads=4, n_kv_heads=4).architecture(97)
DOMINO = {"tp": 2, "tensor": {"name": "domino"}}


@pytest.mark.parametrize(
    "degrees, settings, arch, says",
    [
        (
            {"tp": 2},
            {"tensor": {"name": "domino", "column": 5}},
            DENSE,
            r"column=5: does not divide .*, 48; use one of",
        ),
        ({"tp": 2}, {"tensor": {"name": "domino", "column": 2}}, ODD, r"column=2: .* of a rank \(tp=2\), 45; .* 1, 3"),
        ({"tp": 2}, {"sequence_parallel": True}, DENSE, "sequence_parallel=True: norms of a part"),
        (
            {"tp": 2, "pp": 2},
            {"pipeline": {"schedule": "zero_bubble", "stages_per_rank": 2}},
            DENSE,
            "schedule='zero_bubble': computes the weights' gradients later.*use 1f1b",
        ),
        *(
            ({"tp": 2, "cp": 2}, {"context": name}, DENSE, f"context='{name}': deals out .* use ring, ulysses or usp")
            for name in ("basp", "bytescale", "flashcp", "flexsp", "sppo")
        ),
        ({"tp": 2}, {}, EXPERTS, "the model has 8 experts"),
        ({}, {}, DENSE, "parallel.tensor='domino': hides what tensor parallelism communicates, and tp=1"),
        ({}, {}, None, "hides what tensor parallelism communicates, and tp=1"),
    ],
)
def test_refused(degrees, settings, arch, says):
    with pytest.raises(ConfigError, match=says):
        check_cut(Degrees(**degrees), ParallelConfig.model_validate({**DOMINO, **settings}), arch, 32)


@pytest.mark.parametrize("column, arch", [(1, ODD), (3, ODD), (8, DENSE)])
def test_allowed(column, arch):
    config = ParallelConfig.model_validate({"tp": 2, "tensor": {"name": "domino", "column": column}})
    check_cut(Degrees(tp=2), config, arch, 32)


@pytest.mark.parametrize(
    "degrees, settings",
    [
        ({"pp": 2}, {}),
        ({"pp": 2}, {"pipeline": {"schedule": "gpipe", "layers": [1, 1]}}),
        ({"cp": 2}, {}),
        ({"cp": 2}, {"context": "ulysses"}),
        ({"pp": 2, "cp": 2}, {"context": {"name": "usp", "ulysses": 2}}),
    ],
)
def test_dimensions_that_it_goes_with(degrees, settings):
    config = ParallelConfig.model_validate({**DOMINO, **settings})
    check_cut(Degrees(tp=2, **degrees), config, DENSE, 32)


@pytest.mark.parametrize(
    "changes, world, says",
    [
        # A pipeline's micro-batches are all of one size: of 8 rows, 3 of 3 (one is filled up), not 3, 3 and 2.
        ({"parallel.pp": 2, "train.micro_batch_size": 3}, 4, r"row=2: .* of 3 rows \(a rank has 8 rows"),
        (
            {
                "parallel.pp": 2,
                "train.micro_batch_size": 4,
                "transforms": [{"name": "early_exit", "after": [1]}],
                "parallel.pipeline": {"schedule": "gpipe"},
            },
            4,
            "parallel.tensor='domino': has sums under way between blocks, where early exits look",
        ),
        ({"parallel.tensor.row": 16}, 2, r"row=16: does not divide a micro-batch of 8 rows .*; use one of 1, 2, 4, 8"),
        ({"parallel.tensor.row": 3}, 2, r"row=3: does not divide a micro-batch of 8 rows"),
        ({"train.micro_batch_size": 3}, 2, r"row=2: .* micro-batch of 3 rows \(a rank has 8 rows.*use one of 1"),
        ({"train.micro_batch_size": 6, "parallel.tensor.row": 4}, 2, r"row=4: .* a micro-batch of 2 rows .* 1, 2"),
        ({"train.global_batch_tokens": 192}, 4, r"row=2: .* of 3 rows \(a rank has 3 rows"),
        ({"train.compile": True}, 2, "train.compile=True: does not go with parallel.tensor=domino"),
        ({"data.batcher": "odb"}, 2, "data.batcher='odb': makes micro-batches of any number of rows"),
        ({"parallel.tp": 1}, 1, "hides what tensor parallelism communicates, and tp=1"),
        ({"parallel.tp": 1}, 2, "hides what tensor parallelism communicates, and tp=1"),
        ({"parallel.sequence_parallel": True}, 2, "sequence_parallel=True: norms of a part"),
    ],
)
def test_recipes_refused(recipe, changes, world, says):
    start = {"parallel": {"tp": 2, "tensor": {"name": "domino"}}, "model.n_kv_heads": 2}
    with pytest.raises(ConfigError, match=says):
        check(RunConfig.load(recipe(**start, **changes)), world)


@pytest.mark.parametrize(
    "changes, world",
    [
        ({}, 2),
        ({"train.micro_batch_size": 4}, 2),
        ({"parallel.tensor.row": 8}, 2),
        ({"parallel.pp": 2, "train.micro_batch_size": 2}, 4),
        ({"parallel.cp": 2}, 4),
        ({"parallel.pp": 2, "parallel.cp": 2, "train.micro_batch_size": 4}, 8),
    ],
)
def test_recipes_allowed(recipe, changes, world):
    start = {"parallel": {"tp": 2, "tensor": {"name": "domino"}}, "model.n_kv_heads": 2}
    check(RunConfig.load(recipe(**start, **changes)), world)


def test_a_recipe_line():
    """The stream is whole where the recipe is silent, also in what a run writes down."""
    config = ParallelConfig.model_validate({"tp": 2, "tensor": "domino"})
    assert config.tensor == get("tensor", "domino").config(row=2, column=1) and not config.sequence_parallel
    again = ParallelConfig.model_validate(copy.deepcopy(config.model_dump(mode="json")))
    assert again == config
    assert ParallelConfig(tp=2).sequence_parallel and ParallelConfig(tp=2).tensor is None
    assert get("tensor", "domino").seed_id == "B028"


def test_auto_takes_degrees_that_domino_goes_with(recipe):
    data = recipe(**{"parallel": {"auto": True, "tensor": "domino"}, "model.n_kv_heads": 2})
    assert settled(RunConfig.load(data), 2, quietly=True).parallel.tp == 2
