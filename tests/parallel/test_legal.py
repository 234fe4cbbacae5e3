"""Degrees that a model cannot be cut by are refused with both numbers and the legal ones."""

import pytest

from trainwright.core.errors import ConfigError
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.legal import check_cut

DENSE = DecoderModelConfig(dim=48, n_layers=4, n_heads=6, n_kv_heads=3, ffn_dim=96).architecture(97)
EXPERTS = DecoderModelConfig(family="mixtral", dim=32, n_layers=2, n_heads=4, n_kv_heads=4, n_experts=6).architecture(
    97
)


@pytest.mark.parametrize(
    "degrees, settings, arch, says",
    [
        ({"tp": 4}, {}, DENSE, "parallel.tp=4: does not divide n_heads=6; use one of 1, 3"),
        ({"tp": 2}, {}, DENSE, "parallel.tp=2: does not divide n_kv_heads=3; use one of 1, 3"),
        ({"cp": 3}, {}, DENSE, "multiple of 6, and it is 32; use 30 or 36"),
        ({"cp": 4}, {"context": "ulysses"}, DENSE, "4 ranks .* the 6 heads of a rank; use one of 1, 2"),
        ({"cp": 4}, {"context": {"name": "usp", "ulysses": 3}}, DENSE, "3 ranks .* use one of 1, 2"),
        ({"pp": 8}, {}, DENSE, "parallel.pp=8: makes 8 stages of 4 layers; use at most 4"),
        ({"pp": 2}, {"pipeline": {"layers": [1, 2]}}, DENSE, "2 numbers that add up to 4 layers"),
        ({"pp": 2}, {"pipeline": {"stages_per_rank": 4}}, DENSE, "makes 8 stages of 4 layers; use at most 1"),
        ({"dp_shard": 2, "ep": 2}, {}, DENSE, "needs a model with experts"),
        ({"dp_shard": 4, "ep": 4}, {}, EXPERTS, "parallel.ep=4: does not divide the 6 experts; use one of 1, 2, 3, 6"),
        ({"tp": 2}, {}, None, "is for our own decoder"),
    ],
)
def test_refused(degrees, settings, arch, says):
    with pytest.raises(ConfigError, match=says):
        check_cut(Degrees(**degrees), ParallelConfig(**settings), arch, 32)


@pytest.mark.parametrize(
    "degrees, settings, arch",
    [
        ({"tp": 3}, {"sequence_parallel": False}, DENSE),
        ({"cp": 4}, {}, DENSE),
        ({"pp": 2}, {"pipeline": {"layers": [1, 3]}}, DENSE),
        ({"dp_shard": 2, "ep": 2}, {}, EXPERTS),
        ({"dp_shard": 8}, {}, None),
    ],
)
def test_allowed(degrees, settings, arch):
    check_cut(Degrees(**degrees), ParallelConfig(**settings), arch, 32)


@pytest.mark.parametrize(
    "settings, world, says",
    [
        ({"dp_shard": 2, "dp_replicate": 1, "ep": 1}, 4, "dp_replicate=1 x dp_shard=2 = 2 processes, but there are 4"),
    ],
)
def test_the_product_has_to_be_the_world(settings, world, says):
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**settings).resolve(world)
