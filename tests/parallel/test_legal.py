"""Degrees that a model cannot be cut by are refused with both numbers and the legal ones."""

import pytest

from trainwright.config import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.legal import check_cut
from trainwright.train.degrees import check

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


LORA, MIXTURE = {"name": "lora", "rank": 4}, {"family": "mixtral", "n_experts": 4}
SALT = {"name": "salt", "teacher": "unread", "share": 1.0}
S2 = {"name": "s2_attention", "block_size": 16, "local_blocks": 1, "stride": 2}


def recipe(**parts):
    return RunConfig.from_dict({
        "model": {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, **parts.pop("model", {})},
        "tokenizer": "bytes",
        "data": {"sources": [{"name": "text", "path": "unread.txt"}]},
        "train": {"seq_len": 32, "global_batch_tokens": 256, "steps": 2},
        **parts,
    })  # fmt: skip


@pytest.mark.parametrize(
    "world, parts, says",
    [
        (2, {"transforms": [LORA], "parallel": {"tp": 2}}, r"transforms\.0='lora'.*parallel\.tp cuts plain ones"),
        (
            2,
            {"transforms": [LORA], "parallel": {"dp_shard": 2, "ep": 2}, "model": MIXTURE},
            r"transforms\.0='lora'.*parallel\.ep spreads plain ones",
        ),
        (
            2,
            {
                "transforms": [{**LORA, "targets": [r"blocks\.1\.mlp\.up"]}],
                "parallel": {"dp_shard": 2, "ep": 2},
                "model": MIXTURE,
            },
            r"transforms\.0='lora'.*parallel\.ep spreads plain ones",
        ),
        (
            2,
            {"parallel": {"tp": 2, "sequence_parallel": False}, "model": MIXTURE},
            r"parallel\.sequence_parallel=False.*experts take the tokens that a rank has",
        ),
        (
            2,
            {"transforms": ["grass_linear"], "optimizer": "grass", "clip": "none", "parallel": {"tp": 2}},
            r"transforms\.0='grass_linear'.*not with parallel\.tp; leave it out",
        ),
        (
            2,
            {"transforms": ["grass_linear"], "optimizer": "grass", "clip": "none", "parallel": {"pp": 2}},
            r"transforms\.0='grass_linear'.*not with parallel\.pp; leave it out",
        ),
        (
            2,
            {
                "transforms": ["grass_linear"],
                "optimizer": "grass",
                "clip": "none",
                "parallel": {"dp_shard": 2, "find_unused_parameters": True},
            },
            r"transforms\.0='grass_linear'.*find_unused_parameters makes zeros of it",
        ),
        (2, {"memory": ["fused_backward"], "clip": "none"}, "memory='fused_backward': steps before 2 ranks"),
        (
            1,
            {"memory": ["fused_backward"], "clip": "none", "data": {"sources": ["python_stdlib"], "batcher": "odb"}},
            "memory='fused_backward': takes the whole batch at once",
        ),
        (2, {"parallel": {"context": "ulysses"}}, r"parallel\.context='ulysses'.*cp is 1; set cp, or leave it out"),
        (1, {"parallel": {"context": "ring"}}, r"parallel\.context='ring'.*cp is 1"),
        (
            2,
            {"parallel": {"pipeline": {"schedule": "zero_bubble", "stages_per_rank": 2}}},
            r"parallel\.pipeline\.schedule='zero_bubble'.*parallel\.pp is 1; set pp, or leave it out",
        ),
        (1, {"parallel": {"pipeline": {"layers": [1, 1]}}}, r"parallel\.pipeline\.layers=\[1, 1\].*"),
        *(
            (
                2,
                {"data": {"sources": ["python_stdlib"], **data}, "parallel": {key: 2}},
                rf"{says}.*set parallel\.{key}=1",
            )
            for key in ("tp", "pp", "cp")
            for data, says in (
                ({"selector": {"name": "loss", "update_step": 2, "pool_rows": 32}}, r"data\.selector='loss'"),
                ({"selector": {"name": "random", "update_step": 2, "pool_rows": 32}}, r"data\.selector='random'"),
                ({"weighter": "loss"}, r"data\.weighter='loss'"),
                ({"mixer": {"name": "odm", "update_step": 1}}, r"data\.mixer='odm'"),
            )
        ),
        *(
            (2, {"objective": SALT, "parallel": {key: 2}}, rf"objective\.name='salt'.*parallel\.{key} divides them")
            for key in ("tp", "pp", "cp")
        ),
        (
            1,
            {"objective": SALT, "parallel": {"context": {"name": "sppo", "chunks": 2, "min_chunk": 4}}},
            r"objective\.name='salt'.*parallel\.context divides them",
        ),
        (
            2,
            {"objective": {"name": "salt", "teacher": "unread", "steps": 9}, "parallel": {"tp": 2}},
            r"objective\.steps=9.*the run's 2 steps",
        ),
        (1, {"transforms": [{**S2, "block_size": 8}]}, r"block_size=8.*at least 16"),
        (1, {"transforms": [{**S2, "block_size": 24}]}, r"block_size=24.*power of two"),
        (2, {"transforms": [{**S2, "stride": 8}], "parallel": {"tp": 2}}, r"stride=8.*"),
        (2, {"transforms": [{**S2, "dense_layers": [2]}]}, r"dense_layers=\[2\].*layers 0 to 1"),
        (2, {"transforms": [{**LORA, "rank": 33}]}, r"rank=33.*"),
        (2, {"transforms": [{**LORA, "targets": ["attn.qq"]}]}, r"targets=.*'attn.qq' matches the end of no linear"),
        (2, {"parallel": {"sequence_parallel": False, "dp_shard": 2}}, r"sequence_parallel=False.*parallel\.tp is 1"),
        (2, {"parallel": {"accumulate": "whole"}}, r"parallel\.accumulate='whole'.*is for FSDP2.*set dp_shard"),
        (2, {"parallel": {"reshard_after_forward": False, "tp": 2}}, r"reshard_after_forward=False.*is for FSDP2"),
        (2, {"parallel": {"reshard_after_forward": False, "pp": 2}}, r"reshard_after_forward=False.*is for FSDP2"),
        (2, {"parallel": {"find_unused_parameters": True, "tp": 2}}, r"find_unused_parameters=True.*parallel\.tp"),
        (
            4,
            {"parallel": {"find_unused_parameters": True, "pp": 2, "dp_shard": 2}},
            r"find_unused_parameters=True.*parallel\.pp",
        ),
    ],
)
def test_recipes_are_refused_before_anything_is_built(world, parts, says):
    with pytest.raises(ConfigError, match=says):
        check(recipe(**parts), world)


@pytest.mark.parametrize(
    "world, parts",
    [
        (2, {"transforms": [LORA], "parallel": {"dp_shard": 2}}),
        (2, {"transforms": [LORA], "parallel": {"pp": 2}, "train": {"seq_len": 32, "global_batch_tokens": 256}}),
        (
            2,
            {
                "transforms": [{**LORA, "targets": ["attn.q"]}],
                "parallel": {"dp_shard": 2, "ep": 2},
                "model": MIXTURE,
            },
        ),
        (2, {"parallel": {"tp": 2}, "model": MIXTURE}),
        (1, {"memory": ["fused_backward"], "clip": "none"}),
        # auto may leave a context without ranks; sppo cuts rows in time.
        (2, {"parallel": {"auto": True, "context": "ulysses", "device_memory": 4.0}}),
        (1, {"parallel": {"context": {"name": "sppo", "chunks": 2, "min_chunk": 4}}}),
        (2, {"parallel": {"cp": 2, "context": "ulysses"}}),
        (2, {"data": {"sources": ["python_stdlib"], "weighter": "loss", "mixer": {"name": "odm", "update_step": 1}}}),
        (2, {"data": {"sources": ["python_stdlib"], "mixer": "static"}, "parallel": {"tp": 2}}),
        (2, {"objective": SALT, "parallel": {"dp_shard": 2}}),
        (2, {"objective": {**SALT, "weight": 0.0}, "parallel": {"tp": 2}}),
        (2, {"objective": {**SALT, "share": 0.0}, "parallel": {"pp": 2}}),
        (2, {"transforms": [S2], "parallel": {"tp": 2}}),
        (1, {"transforms": [{**S2, "stride": 8, "allow_uncovered": True}]}),
        (2, {"parallel": {"sequence_parallel": False, "tp": 2}}),
        (2, {"parallel": {"dp_shard": 2, "accumulate": "whole", "reshard_after_forward": False}}),
        (2, {"parallel": {"auto": True, "accumulate": "whole", "sequence_parallel": False, "device_memory": 4.0}}),
        (2, {"parallel": {"find_unused_parameters": True}}),
        (4, {"parallel": {"find_unused_parameters": True, "tp": 2, "dp_shard": 2}}),
        (
            2,
            {
                "parallel": {
                    "find_unused_parameters": True,
                    "sharding": {"name": "amsp", "parameters": 1, "gradients": 2, "states": 2},
                }
            },
        ),
    ],
)
def test_recipes_that_can_run_are_let_through(world, parts):
    assert check(recipe(**parts), world).world_size == world


@pytest.mark.parametrize(
    "settings, world, says",
    [
        ({"dp_shard": 2, "dp_replicate": 1, "ep": 1}, 4, "dp_replicate=1 x dp_shard=2 = 2 processes, but there are 4"),
    ],
)
def test_the_product_has_to_be_the_world(settings, world, says):
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**settings).resolve(world)
