"""``parallel: auto``: legal over a grid of everything, least communication first, and in the resolved config."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.models.architecture import FAMILIES, Architecture
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.auto import SHARE, Machine, Work, block_params, choose, device_bytes, root_params
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.legal import check_cut
from trainwright.train.degrees import check, settled

GIB = 2**30


def arch(n_heads=8, n_kv_heads=4, dim=512, n_layers=8, ffn_dim=1408, experts=0):
    moe = {"n_experts": experts, "n_experts_per_token": 2, "moe_ffn_dim": 256} if experts else {}
    return Architecture(32_000, dim, n_layers, n_heads, n_kv_heads, 64, 0 if experts else ffn_dim, 4096, **moe)


def big(size="70b", seq_len=8192):
    return DecoderModelConfig(size=size, vocab_size=131_072, max_seq_len=seq_len).architecture(131_072)


heads = st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3), (8, 8), (12, 4), (32, 8), (64, 8)])


@settings(max_examples=300, deadline=None)
@given(
    world=st.integers(1, 256),
    heads=heads,
    dim=st.sampled_from([64, 1024, 8192]),
    layers=st.integers(1, 80),
    ffn=st.sampled_from([96, 1408, 28_672, 1001]),
    experts=st.sampled_from([0, 4, 16]),
    seq_len=st.sampled_from([48, 1000, 4096, 131_072]),
    rows=st.integers(1, 512),
    memory=st.sampled_from([1, 16, 80, 192]),
    devices=st.sampled_from([1, 2, 4, 6, 8]),
    pp=st.sampled_from([1, 1, 2, 4]),
    ep=st.sampled_from([1, 1, 2, 4]),
    context=st.sampled_from([None, "ulysses", "ring"]),
    known=st.booleans(),
)
def test_never_illegal(
    world, heads, dim, layers, ffn, experts, seq_len, rows, memory, devices, pp, ep, context, known
):  # fmt: skip
    config = ParallelConfig(pp=pp, ep=ep, context=context)
    work = Work(arch(*heads, dim, layers, ffn, experts) if known else None, seq_len, rows, seq_len)
    machine = Machine(memory * GIB, devices)
    try:
        choice = choose(world, config, work, machine)
    except ConfigError as error:
        assert "no legal degrees" in str(error)
        # Then plain data parallelism is not legal either: for too many ranks, or by what the recipe has fixed.
        assert world // pp > rows or pp > 1 or ep > 1
        return
    d = choice.degrees
    assert d.world_size == world and (d.pp, d.ep) == (pp, ep)
    assert d.dp_replicate * d.dp_shard <= rows
    assert d.tp <= 8 and devices % d.tp == 0
    check_cut(d, config, work.arch, seq_len)
    chosen = ParallelConfig(
        dp_replicate=d.dp_replicate, dp_shard=d.dp_shard, cp=d.cp, tp=d.tp, pp=pp, ep=ep, context=context
    )
    assert chosen.resolve(world) == d
    if known and choice.fits:
        assert device_bytes(d, config, work) <= SHARE * machine.memory
        # Nothing that talks less fits: neither without shards, nor with half of the tensor-parallel ranks.
        plain = Degrees(dp_replicate=world // pp, pp=pp)
        if d != plain and world // pp <= rows and ep == 1:
            assert device_bytes(plain, config, work) > SHARE * machine.memory


def pick(world, work, memory=80, devices=8, **given):
    return choose(world, ParallelConfig(**given), work, Machine(memory * GIB, devices)).degrees


def test_the_rule():
    small = Work(big("125m"), 2048, 512, 8192)
    assert pick(16, small) == Degrees(dp_replicate=16)
    # 16 bytes of state for each of 8 billion parameters: 120 GiB, two shards of it and what is gathered fit into 80.
    assert pick(16, Work(big("8b"), 2048, 512, 2048)) == Degrees(dp_replicate=4, dp_shard=4)
    assert pick(64, Work(big("70b"), 4096, 512, 4096, recompute=True)).dp_shard >= 16
    # Fewer rows than processes: what is over goes into the rows and the layers.
    d = pick(16, Work(big("8b"), 8192, 4, 8192))
    assert d.dp_replicate * d.dp_shard <= 4 and d.tp * d.cp >= 4
    # Long rows: activations do not fit before they are spread.
    d = pick(16, Work(big("8b"), 131_072, 512, 131_072, recompute=True))
    assert d.cp * d.tp > 1 and d.dp_shard > 1
    # Tensor parallelism stays in a machine.
    assert pick(16, Work(big("8b"), 131_072, 512, 131_072), devices=1).tp == 1


def test_nothing_fits_is_said():
    choice = choose(2, ParallelConfig(), Work(big("70b"), 4096, 8, 4096), Machine(16 * GIB, 8))
    assert not choice.fits and "nothing that is legal here fits" in choice.sentence()
    assert choice.degrees.world_size == 2


def test_no_legal_degrees():
    with pytest.raises(ConfigError, match=r"parallel='auto': there are no legal degrees for 7 processes with 4 rows"):
        pick(7, Work(arch(), 4096, 4, 4096))
    with pytest.raises(ConfigError, match=r"start 4 \(--nproc 4\)"):
        pick(5, Work(None, 64, 4, 64))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted(family, tied):
    config = DecoderModelConfig(
        family=family, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=97, tie_embeddings=tied
    )
    made = config.build(97, 32)
    counted = root_params(made.arch) + sum(block_params(made.arch, layer)[0] for layer in range(made.arch.n_layers))
    assert counted == made.num_params()


def test_in_a_recipe(recipe, caplog, monkeypatch):
    config = RunConfig.load(recipe(), ["parallel=auto"])
    assert config.parallel.auto and RunConfig.load(config.to_dict()).parallel == config.parallel
    assert RunConfig.load(recipe(), ["parallel=auto", "parallel.timeout=30"]).parallel.timeout == 30
    assert RunConfig.load(recipe(parallel={"auto": True, "pp": 2})).parallel.pp == 2
    with caplog.at_level(logging.INFO, "trainwright"):
        done = settled(config, 4)
    assert "parallel: auto chose dp_replicate=4 (about" in caplog.text
    assert done.to_dict()["parallel"]["dp_replicate"] == 4 and done.parallel.auto
    # The folder's recipe is opened on another number of processes: chosen anew.
    assert settled(done, 2).parallel.dp_replicate == 2
    assert check(config, 8) == Degrees(dp_replicate=8)
    small = RunConfig.load(recipe(), ["parallel=auto", "parallel.device_memory=0.002"])
    assert check(small, 8).dp_shard > 1
    with pytest.raises(ConfigError, match="8 rows a step"):
        check(RunConfig.load(recipe(), ["parallel=auto", "model.n_heads=1", "model.n_kv_heads=1", "train.seq_len=31",
                                        "train.global_batch_tokens=248"]), 16)  # fmt: skip
    with pytest.raises(ConfigError, match="parallel='autos': should be a mapping"):
        RunConfig.load(recipe(), ["parallel=autos"])
