"""What SPPO (B009) is planned by: cuts, ratios, solver and simulator; and what is refused. See also test_sppo.py."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from trainwright.core.errors import ConfigError
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.pipeline.legal import check_recipe as check_pipeline
from trainwright.parallel.sppo.chunks import ChunkedAttention
from trainwright.parallel.sppo.cut import Work, bounds, flops, pairs
from trainwright.parallel.sppo.legal import check_recipe
from trainwright.parallel.sppo.simulator import simulate
from trainwright.parallel.sppo.solver import (
    Machine,
    evaluate,
    exposed_seconds,
    offload_ratios,
    resident_peak,
    solve,
    step_seconds,
    working_peak,
)
from trainwright.parallel.sppo.sppo import SppoConfig

LENGTH = 24
MEASURED = {"bandwidth": 2e8, "token_seconds": 1e-6, "pair_seconds": 1e-9, "token_bytes": 2000, "kv_bytes": 100}
ARCH = DecoderModelConfig(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48).architecture(97)


# -- 2: the simulator ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 5, 16])
def test_bubble_in_unit_time(stages, chunks):
    """Must hold 2."""
    want = (stages - 1) / (chunks + stages - 1)
    assert simulate([1.0] * chunks, stages).bubble == pytest.approx(want, abs=1e-12)
    both = simulate([1.0] * chunks, stages, [2.0] * chunks)
    assert both.bubble == pytest.approx(want, abs=1e-12) and both.seconds == pytest.approx(3 * (chunks + stages - 1))
    for s, i in itertools.product(range(stages), range(chunks)):  # nothing begins before what it needs is there
        assert not s or both.forward[s][i][0] >= both.forward[s - 1][i][1]
        assert s == stages - 1 or both.backward[s][i][0] >= both.backward[s + 1][i][1]
        assert both.backward[s][i][0] >= both.forward[s][-1][1]


def test_sixteen_chunks_on_four_stages():
    """Effect of the card: at most 0.35 of the time of whole rows; the closed form is 19 / 64."""
    share = simulate([1 / 16] * 16, 4, [2 / 16] * 16).seconds / simulate([1.0], 4, [2.0]).seconds
    assert share == pytest.approx(19 / 64, abs=1e-12) and share <= 0.35


@pytest.mark.parametrize("seed", range(8))
def test_the_step_formula_is_the_simulated_step(seed):
    """Exact where chunks grow (equal cuts) or are alike; hidden copies cost nothing, others their excess."""
    r = random.Random(seed)
    times = sorted(r.uniform(1, 3) for _ in range(r.randint(1, 9)))
    stages = r.randint(1, 5)
    found = simulate(times, stages, [2 * t for t in times])
    assert found.seconds == pytest.approx(step_seconds(times, stages))
    hidden = [*times[1:], 0.0]
    assert simulate(times, stages, [2 * t for t in times], hidden).seconds == pytest.approx(found.seconds)
    late = simulate(times, stages, [2 * t for t in times], [5 * t for t in hidden])
    assert late.seconds > found.seconds or len(times) < 2


def test_simulator_refuses_what_has_no_meaning():
    for given in (([], 2), ([1.0], 0), ([1.0, 1.0], 2, [1.0])):
        with pytest.raises(ValueError):
            simulate(*given)


# -- 3: ratios and the solver -------------------------------------------------------------------------------------


def test_ratios_by_hand():
    assert offload_ratios([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], 1.0) == [0.5, 0.75, 0.0]
    assert offload_ratios([1.0, 2.0, 3.0], [4.0, 4.0, 4.0], 10.0) == [1.0, 1.0, 0.0]
    assert offload_ratios([1.0], [4.0], 10.0) == [0.0]
    for bandwidth in (None, 0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="has to be measured"):
            offload_ratios([1.0, 1.0], [1.0, 1.0], bandwidth)


@pytest.mark.parametrize("how", ["equal", "balanced"])
def test_ratios_of_a_row(how):
    """Must hold 3: within 0 .. 1, the last 0. They rise where chunks are equally long, as later ones are slower."""
    work = Work(1e-6, ((0, 1e-9),))
    machine = Machine(work, 2000.0, 2e8)
    for chunks in (1, 2, 3, 8, 16):
        choice = evaluate(bounds(16384, chunks, how, work), 4, machine)
        assert all(0 <= r <= 1 for r in choice.ratios) and choice.ratios[-1] == 0
        assert exposed_seconds(work.of(choice.bounds), _sizes(choice.bounds, 2000), choice.ratios, 2e8) == 0
        if how == "equal":
            assert list(choice.ratios[:-1]) == sorted(choice.ratios[:-1])
    assert 0 < evaluate(bounds(16384, 8, how, work), 4, machine).ratios[0] < 1


def _sizes(cut, of_a_token):
    return [of_a_token * (b - a) for a, b in itertools.pairwise(cut)]


@pytest.mark.parametrize("window", [0, 100])
def test_cuts(window):
    work = Work(3.0, ((0, 0.02), (window, 0.05)))
    for length, chunks in ((1000, 7), (4096, 16), (9, 9), (8, 1)):
        for how in ("equal", "balanced"):
            cut = bounds(length, chunks, how, work)
            assert cut[0] == 0 and cut[-1] == length and len(cut) == chunks + 1
            assert all(b > a for a, b in itertools.pairwise(cut))
            assert sum(work.of(cut)) == pytest.approx(work.upto(length))
        if length > 100:
            costs = work.of(bounds(length, chunks, "balanced", work))
            widest = 3.0 + 0.07 * length  # of one token
            assert max(costs) - min(costs) <= 2 * widest
            equal = work.of(bounds(length, chunks, "equal", work))
            assert equal == sorted(equal) and max(equal) > max(costs)
    with pytest.raises(ValueError, match="3 tokens cannot be cut into 4"):
        bounds(3, 4, "equal", work)


def test_the_cost_of_a_chunk_is_the_cards():
    """a l + b l (prefix + l / 2), up to the diagonal's half."""
    work = Work(3.0, ((0, 0.5),))
    (_, cost) = work.of((0, 100, 160))
    assert cost == pytest.approx(3 * 60 + 0.5 * 60 * (100 + 60 / 2), rel=0.005)
    assert pairs(7) == 28 and pairs(7, 3) == 1 + 2 + 3 * 5 and pairs(2, 3) == 3
    windowed = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "sliding_window": 5}
    arch = DecoderModelConfig(family="qwen3", **windowed).architecture(61)
    # Forward is a third of the FLOPs of training; the head and its pairs included.
    assert flops(arch).upto(LENGTH) * 3 == pytest.approx(arch.flops_per_token(LENGTH) * LENGTH)


@pytest.mark.parametrize("how", ["equal", "balanced"])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("memory", [None, 3e7, 1.2e7])
def test_solver_takes_the_fastest_that_fits(how, stages, memory):
    """Against all powers of two, each through the formulas."""
    length, min_chunk, machine = 16384, 256, Machine(Work(1e-6, ((0, 1e-9),)), 2000.0, 2e9, 100.0)
    rows = []
    for chunks in (1, 2, 4, 8, 16, 32, 64):
        cut = bounds(length, chunks, how, machine.work)
        if min(_sizes(cut, 1)) < min_chunk:
            continue
        times, sizes = machine.work.of(cut), _sizes(cut, 2000.0)
        ratios = offload_ratios(times, sizes, 2e9)
        peak = working_peak(sizes, ratios, 100.0 * length)
        assert peak >= resident_peak(sizes, ratios, 100.0 * length)
        if memory is None or peak <= memory:
            rows.append((round(3 * (sum(times) + (stages - 1) * max(times)), 12), chunks, peak))
    if not rows:
        with pytest.raises(ValueError, match=r"no number of chunks fits 1\.2e.07 bytes"):
            solve(length, stages, machine, min_chunk=min_chunk, memory=memory, how=how)
        return
    got = solve(length, stages, machine, min_chunk=min_chunk, memory=memory, how=how)
    seconds, chunks, peak = min(rows)
    assert (got.chunks, got.peak) == (chunks, peak) and got.seconds == pytest.approx(seconds)
    assert got.chunks > 1 or (stages == 1 and memory is None)


def test_solver_refuses():
    machine = Machine(Work(1e-6, ((0, 1e-9),)), 2000.0, None)
    with pytest.raises(ValueError, match="not measured"):
        solve(1024, 4, machine)
    with pytest.raises(ValueError, match="rows of 100 tokens are shorter than the smallest chunk, 128"):
        solve(100, 4, Machine(machine.work, 2000.0, 1e9), min_chunk=128)


# -- 6: bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"chunks": 8, "min_chunk": 1}, r"parallel\.context\.chunks=8: is more than the 6 tokens of a row; use 6"),
        (
            {"chunks": 4, "min_chunk": 2, "cut": "equal"},
            r"chunks=4: .* one has 1, fewer than min_chunk=2; use 3 or",
        ),
        ({"chunks": 2, "min_chunk": 4, "cut": "equal"}, r"chunks=2: .* one has 3, fewer than min_chunk=4; use 1 or"),
        ({"chunks": "auto", "min_chunk": 1}, r"chunks='auto': is decided by bandwidth .* not measured; set parallel"),
        ({"chunks": 2, "min_chunk": 1, "offload": "auto"}, r"offload='auto': is decided by bandwidth .* list or off"),
        ({"chunks": 2, "min_chunk": 1, "memory": 1.0}, r"memory=1\.0: is decided by bandwidth"),
        ({"chunks": 2, "min_chunk": 1, "offload": [0.5]}, "has 1 shares for 2 chunks"),
        ({"chunks": 2, "min_chunk": 1, "offload": [1.5, 0.0]}, "outside of 0 .. 1"),
        ({"chunks": 2, "min_chunk": 1, "offload": [0.5, 0.5]}, "last chunk, whose backward pass begins at once"),
        (
            {"chunks": "auto", "measured": MEASURED, "min_chunk": 1, "offload": [0.0]},
            "number of chunks is not known",
        ),
        ({"chunks": "auto", "measured": MEASURED, "min_chunk": 9}, r"min_chunk=9: is above rows of 6 tokens"),
        (
            {"chunks": "auto", "measured": MEASURED, "min_chunk": 1, "memory": 1e-6},
            "is too little: no number of",
        ),
        ({"chunks": 2, "measured": MEASURED, "min_chunk": 1, "memory": 1e-6}, "is too little: 2 chunks need 1.26e.04"),
    ],
)
def test_what_cannot_be_cut_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        SppoConfig(**settings).layout(ARCH, 6, 2)


def test_solved_layouts():
    config = SppoConfig(chunks="auto", offload="auto", measured=MEASURED, min_chunk=128, cut="equal")
    assert config.layout(ARCH, 4096, 4).chunks == 32 and config.layout(ARCH, 4096, 1).chunks == 1
    found = SppoConfig(chunks=4, offload="auto", measured=MEASURED, min_chunk=1, cut="equal").layout(ARCH, 4096, 4)
    want = offload_ratios(Work(1e-6, ((0, 1e-9),)).of(found.bounds), _sizes(found.bounds, 2000), 2e8)
    assert found.ratios == pytest.approx(want) and 0 < found.ratios[0] < 1
    assert SppoConfig(chunks=4, measured=MEASURED, min_chunk=1).layout(ARCH, 64).ratios is None
    # What a chunk saves whatever its length is shared by the rows of a micro-batch.
    heavy = {**MEASURED, "chunk_bytes": 2e6}
    for rows in (1, 4):
        found = SppoConfig(chunks=2, offload="auto", measured=heavy, min_chunk=1, cut="equal").layout(ARCH, 64, 4, rows)
        seconds = Work(1e-6, ((0, 1e-9),)).of((0, 32, 64))
        assert found.ratios == pytest.approx(offload_ratios(seconds, [2e6 / rows + 64000] * 2, 2e8))


@pytest.mark.parametrize("key", ["bandwidth", "token_seconds", "token_bytes"])
def test_what_was_measured_is_above_zero(key):
    with pytest.raises(ValueError):
        SppoConfig(measured={**MEASURED, key: 0.0})


def _recipe(context=None, **parts):
    named = SimpleNamespace
    settings = {"chunks": 4, "min_chunk": 1, **(context or {})}
    parallel = ParallelConfig(
        context={"name": "sppo", **settings}, pipeline=parts.get("pipeline", {}), pp=parts.get("pp", 1)
    )
    return named(
        parallel=parallel,
        data=named(batcher=named(regroups=parts.get("regroups", False), name="odb")),
        precision=named(name="bf16"),
        train=named(compile=parts.get("compile", False), seq_len=64),
        optimizer=named(name="adamw", inner=None),
        transforms=parts.get("transforms", []),
        memory=[named(name=m) for m in parts.get("memory", [])],
    )


@pytest.mark.parametrize(
    "parts, degrees, says",
    [
        ({}, {"cp": 2}, r"parallel\.cp=2: spreads rows over ranks, and sppo spreads them over time"),
        ({}, {"dp_shard": 2, "ep": 2}, r"parallel\.ep=2: does not go with context: sppo"),
        ({"pipeline": {"schedule": "zero_bubble"}}, {"pp": 2}, "schedule='zero_bubble': is an order of work"),
        ({"regroups": True}, {}, r"data\.batcher='odb': makes rows of different lengths"),
        ({"compile": True}, {}, r"train\.compile=True"),
        ({"memory": ["activation_checkpointing"]}, {}, "memory='activation_checkpointing'"),
        ({"memory": ["fused_backward"]}, {}, "memory='fused_backward'"),
        (
            {"transforms": [SimpleNamespace(swaps_attention=True, name="s2_attention")]},
            {},
            r"transforms\.0='s2_attention': swaps the attention",
        ),
        ({"transforms": [SimpleNamespace(name="early_exit")]}, {}, r"transforms\.0='early_exit'"),
        ({"context": {"chunks": 65}}, {}, r"chunks=65: is more than the 64 tokens"),
        ({"context": {"chunks": 8, "min_chunk": 16}}, {}, "fewer than min_chunk=16"),
    ],
)
def test_what_does_not_go_with_chunks(parts, degrees, says):
    check_recipe(Degrees(), _recipe(), ARCH, 2)
    check_pipeline(Degrees(pp=2), _recipe(), 8, 8)  # one micro-batch a step is enough
    with pytest.raises(ConfigError, match=says):
        check_recipe(Degrees(**degrees), _recipe(**parts), ARCH, 2)


def test_more_stages_than_layers_and_models_that_look_ahead(recipe):
    """Before any process group: the trainer's own check. A model whose attention is not ours may be bidirectional."""
    from trainwright import RunConfig
    from trainwright.train.degrees import check

    chunks = {"name": "sppo", "chunks": 4, "min_chunk": 1}
    config = RunConfig.load(recipe(parallel={"pp": 4, "context": chunks}))
    with pytest.raises(ConfigError, match=r"parallel\.pp=4: makes 4 stages of 2 layers; use at most 2"):
        check(config, 4)
    with pytest.raises(ConfigError, match="needs attention that looks back only"):
        check_recipe(Degrees(), _recipe(), None, 2)
    with pytest.raises(ConfigError, match="needs attention that looks back only"):
        ChunkedAttention().install(torch.nn.Linear(2, 2))
    spec = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    model = DecoderModelConfig(**spec).build(97, LENGTH)
    model.blocks[1].attn.attend = lambda *_: None
    with pytest.raises(ConfigError, match=r"something else .* has swapped it"):
        ChunkedAttention().install(model)
    long = RunConfig.load(recipe(parallel={"context": {"name": "sppo", "chunks": 64, "min_chunk": 1}}))
    with pytest.raises(ConfigError, match="is more than the 32 tokens of a row"):
        check(long, 1)


def test_what_is_measured_goes_into_a_recipe(tmp_path, capsys):
    """``trainwright plan sppo`` prints lines with which chunks and offloading can be left to the solver."""
    import yaml

    from trainwright import RunConfig
    from trainwright.cli import run
    from trainwright.train.degrees import architecture

    recipe = {
        "model": {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2},
        "tokenizer": {"name": "bytes"},
        "precision": {"name": "fp32"},
        "train": {"seq_len": 256, "global_batch_tokens": 256, "micro_batch_size": 1},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert run(["plan", "sppo", str(tmp_path / "r.yaml"), "run.device=cpu"]) == 0
    lines = yaml.safe_load(capsys.readouterr().out)
    lines["parallel"]["context"] |= {"chunks": "auto", "offload": "auto", "min_chunk": 64}
    config = RunConfig.load({**recipe, **lines})
    layout = config.parallel.context.layout(architecture(config), 256)
    assert layout.bounds[-1] == 256 and layout.ratios[-1] == 0
    assert run(["plan", "sppo", str(tmp_path / "r.yaml"), "model={name: hf, path: x}"]) == 2
