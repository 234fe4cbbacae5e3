"""Domino on two ranks against plain tensor parallelism and one process, its order, its waits, and what it hides."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.domino import Call, Half, Projections, join, run_halves, split
from trainwright.parallel.domino_decoder import Domino, slice_blocks
from trainwright.parallel.pipeline.stage import Stage, Work

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent


def module(path):
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


parallel_worker = module(HERE / "parallel_worker.py")
worker = module(HERE / "domino_worker.py")
benchmark = module(HERE.parents[1] / "benchmarks" / "parallel_domino.py")
STREAM, LAYERS = worker.STREAM, worker.LAYERS


def trained(recipe_data):
    """Twenty AdamW steps of a recipe in this process."""
    rows = []
    trainer = Trainer(RunConfig.load(recipe_data))
    summary = trainer.fit(on_step=rows.append)
    weights = {n: p.detach().clone() for n, p in trainer.parallel.model.named_parameters()}
    return {"losses": [r["loss"] for r in rows], "validation": summary["val_loss"], "weights": weights}


def base(folder, corpus, name, **parallel):
    dims = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    return {
        "run": {"name": name, "dir": str(folder / "runs"), "seed": 7, "device": "cpu"},
        "model": {"name": "decoder", **dims, "dropout": 0.1},
        "tokenizer": {"name": "bytes"},
        "data": {
            "sources": [{"name": "text", "path": corpus}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "memory": ["activation_checkpointing"],
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "precision": {"name": "fp32"},
        "train": {"steps": 20, "seq_len": 32, "global_batch_tokens": 256, "micro_batch_size": 4},
        "evaluate": {"tokens": 1024},
        "log": {"loggers": [], "progress": "none", "report": False},
        "parallel": parallel,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus):
    return trained(base(tmp_path_factory.mktemp("alone"), corpus, "alone"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, corpus):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("domino")
    recipe = base(folder, corpus, "domino", tp=2, tensor={"name": "domino", "row": 2, "column": 2})
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "domino_worker.py"), str(folder / "out"), str(folder / "recipe.json")]
    started = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        logs = [p.communicate(timeout=400)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert all(p.returncode == 0 for p in started), "\n".join(logs)[-6000:]
    return [torch.load(folder / f"out.{r}") for r in range(2)]


def assert_gradients(got, want, tolerance=1e-12):
    """Relative to the largest of each parameter."""
    assert got.keys() == want.keys()
    for name, g in want.items():
        assert (got[name] - g).abs().max() <= tolerance * g.abs().max(), name


# -- must hold --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k", worker.SLICES)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_1_loss_and_gradients_equal_plain_and_one_process(ranks, family, n, k):
    for result in ranks:
        cases = result["exact"][family]
        for other in ("alone", "plain"):
            assert cases[n, k]["loss"] == pytest.approx(cases[other]["loss"], rel=1e-12)
            assert_gradients(cases[n, k]["gradients"], cases[other]["gradients"])


@pytest.mark.parametrize("n, k", worker.SLICES)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_2_all_reduces_and_bytes(ranks, family, n, k):
    """n 4 L all-reduces of a step's layers (k pieces of those forward), with the bytes of plain tensor parallelism."""
    for result in ranks:
        got, plain = result["exact"][family][n, k], result["exact"][family]["plain"]
        assert got["started"] == 2 * n * (k + 1) * LAYERS
        assert k > 1 or got["started"] == n * 4 * LAYERS
        whole = [s for s in plain["sizes"] if s == STREAM]
        assert len(whole) == 4 * LAYERS + 2  # besides the embedding's, and the last norm's backward
        pieces = [STREAM] * 2 + [STREAM // n] * (2 * n * LAYERS) + [STREAM // (n * k)] * (2 * n * k * LAYERS)
        others = [s for s in plain["sizes"] if s != STREAM]
        assert sorted(got["sizes"]) == sorted(pieces + others)
        assert got["bytes"] == plain["bytes"] and got["kinds"] == plain["kinds"] == ["all_reduce"]


def test_3_no_handle_is_left(ranks):
    for result in ranks:
        cases = [c for f in result["exact"].values() for c in f.values()] + list(result["recomputed"].values())
        cases = [c for c in cases if c.get("started")]
        assert len(cases) > 30 and all(c["unwaited"] == 0 for c in cases)
        # Of each all-reduce of the step there is a wait, by whoever.
        assert all(c["waits"] == len(c["sizes"]) for c in cases)
        assert result["two_models"]["unwaited"] == result["parts"]["unwaited"] == result["recipe"]["unwaited"] == 0
        assert all(c["unwaited"] == 0 for c in result["gpt2"].values())


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("row", [2, 4])
def test_4_exposed_wait_of_a_simulated_clock(row, layers, ratio):
    """u >= c: at most 30% of the blocking version's, which waits for every one of n 4 L all-reduces of c."""
    clock = benchmark.simulated(layers, row, 1, ratio)
    plain = benchmark.simulated(layers, row, 1, ratio, blocking=True)
    assert clock.calls == plain.calls == row * 4 * layers and clock.open == plain.open == 0
    assert plain.exposed == pytest.approx(plain.calls / ratio)
    assert clock.exposed <= 0.3 * plain.exposed
    assert clock.now - clock.exposed == pytest.approx(plain.now - plain.exposed)  # the products are the same
    assert row == 2 or clock.exposed <= 0.06 * plain.exposed


def test_4_columns_alone_hide_part_of_it():
    """The last piece of a product is exposed, and backward only the weights' gradients hide."""
    for column, share in ((2, 0.6), (4, 0.55)):
        clock = benchmark.simulated(4, 1, column, 1.0, by_bytes=True)
        plain = benchmark.simulated(4, 1, column, 1.0, by_bytes=True, blocking=True)
        none = benchmark.simulated(4, 1, 1, 1.0, by_bytes=True)
        assert clock.calls == 2 * (column + 1) * 4
        assert clock.exposed < share * plain.exposed and clock.exposed < none.exposed
    both = benchmark.simulated(4, 2, 2, 1.0, by_bytes=True)
    assert both.exposed < benchmark.simulated(4, 2, 1, 1.0, by_bytes=True).exposed


# -- order ------------------------------------------------------------------------------------------------------------


class Log:
    """Reductions and halves that write down when they happen; ``name`` of a reduction is that of its half."""

    def __init__(self, n, halves, pieces=1):
        self.lines, self.n = [], n
        self.going = None
        weights = [torch.eye(4).requires_grad_() for _ in range(2 * halves)]
        norm = nn.Identity()
        self.halves = []
        for j in range(halves):

            def inner(project, c, j=j):
                self.lines.append(f"{'am'[j % 2]}{j // 2}({c})")
                self.going = f"{'am'[j % 2]}{j // 2}({c})"
                return project([weights[2 * j]])[0]

            self.halves.append(Half(norm, inner, weights[2 * j + 1]))
        self.row_of = {}

    def reduce(self, x):
        name = f"AR{len([line for line in self.lines if line.startswith('start')])}"
        self.lines.append(f"start {name}")
        return LoggedWait(self.lines, name)


class LoggedWait:
    def __init__(self, lines, name):
        self.lines, self.name = lines, name

    def wait(self):
        self.lines.append(f"wait {self.name}")


def test_forward_order_is_the_cards():
    log = Log(2, 4)
    join(run_halves(split(torch.randn(2, 3, 4, requires_grad=True), 2, log.reduce), log.halves))
    layer0 = "a0(0) | start AR0 | a0(1) | wait AR0 | start AR1 | m0(0) | wait AR1 | start AR2 | m0(1) | wait AR2"
    # The feed-forward's second all-reduce is waited for inside the next layer, behind a(0).
    layer1 = "a1(0) | wait AR3 | start AR4 | a1(1) | wait AR4 | start AR5 | m1(0) | wait AR5 | start AR6 | m1(1)"
    assert log.lines == f"{layer0} | start AR3 | {layer1} | start AR7 | wait AR6 | wait AR7".split(" | ")


def test_backward_order_has_a_product_between_start_and_wait():
    """Each sum of an input's gradient is under way during the weights' gradients and the other chunk's B."""
    log = Log(2, 4)
    x = torch.randn(2, 3, 4, requires_grad=True)
    out = join(run_halves(split(x, 2, log.reduce), log.halves))
    log.lines.clear()

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._overloadpacket.__name__ == "mm":
                log.lines.append("mm")
            return func(*args, **(kwargs or {}))

    with Products():
        out.square().sum().backward()
    text = " ".join(line.split()[0] if line != "mm" else line for line in log.lines)
    # B of the last slot; then per slot: dz, start, dA, B of the slot before (dh, dB), wait
    steady = "mm start mm mm mm wait"
    assert text == f"mm mm {' '.join([steady] * 7)} mm start mm wait"


def test_one_chunk_waits_at_once_but_its_pieces_overlap():
    log = Log(1, 2)
    join(run_halves(split(torch.randn(2, 3, 4), 1, log.reduce), log.halves, pieces=2))
    first = "a0(0) | start AR0 | start AR1 | wait AR0 | wait AR1"
    assert log.lines == f"{first} | m0(0) | start AR2 | start AR3 | wait AR2 | wait AR3".split(" | ")


def test_the_input_of_a_half_is_multiplied_once():
    projections = Projections(torch.ones(1, 2, 4), Call(lambda x: None))
    projections([torch.eye(4)])
    with pytest.raises(ValueError, match="give all its matrices together"):
        projections([torch.eye(4)])


def test_ranks_make_the_same_collectives(ranks):
    for part in ("exact", "recomputed"):
        first, second = (r[part] for r in ranks)
        flat = [(c, second[f][k]) for f, cs in first.items() for k, c in cs.items()] if part == "exact" else [
            (c, second[k]) for k, c in first.items()
        ]  # fmt: skip
        for a, b in flat:
            assert a.get("sequence") == b.get("sequence")


# -- recomputation, dropout, several models ---------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["none", "full", "selective", "every_n"])
def test_recomputation_and_dropout_change_nothing(ranks, mode, dropout):
    """Also the noise is that of plain training, however many chunks."""
    for result in ranks:
        cases = result["recomputed"]
        for n, k in ((2, 1), (4, 2)):
            got = cases[mode, dropout, n, k]
            again = {"none": 0, "full": LAYERS, "selective": LAYERS, "every_n": 1}[mode]
            assert got["started"] == 2 * n * (k + 1) * LAYERS + n * k * again  # attention's sums come again, no others
            for other in ("alone", "plain"):
                assert got["loss"] == pytest.approx(cases[other, dropout]["loss"], rel=1e-12)
                assert_gradients(got["gradients"], cases[other, dropout]["gradients"])
    assert ranks[0]["recomputed"]["alone", 0.3]["loss"] != ranks[0]["recomputed"]["alone", 0.0]["loss"]


def test_chunks_have_noise_of_their_own():
    half = Half(nn.Identity(), lambda project, c: project([torch.eye(64)])[0], torch.eye(64), None, 0.5)
    torch.manual_seed(0)
    x = torch.ones(4, 1, 64)
    out = join(run_halves(split(x, 4, lambda t: LoggedWait([], "")), [half])) - x
    assert all(not torch.equal(out[i], out[j]) for i in range(4) for j in range(i))
    torch.manual_seed(0)
    assert torch.equal(out, nn.functional.dropout(x, 0.5))


def test_two_models_at_once(ranks):
    for result in ranks:
        for got, want in zip(result["two_models"]["got"], result["two_models"]["wanted"], strict=True):
            assert_gradients(got, want)


def test_parts_of_a_graph(ranks):
    for result in ranks:
        got = result["parts"]
        assert got["unwaited_of_a_part"] == 0 and got["twice"]
        for a, b in got["of_a_part"] + got["frozen"]:
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
        # Frozen below: forward 2 n k L; backward only the second layer's inputs.
        assert got["frozen_started"] == 2 * 2 * 2 * LAYERS + 2 * 2
        mine, alone = got["validation"]
        assert mine == pytest.approx(alone, rel=1e-12)
        assert got["three_rows"].startswith("ConfigError: parallel.tensor.row=2: cuts a micro-batch into 2 chunks")


@pytest.mark.parametrize("n, k", worker.SLICES)
def test_gpt2_layers(ranks, n, k):
    """LayerNorm, GELU and biases, as plain PyTorch, in the order across layers."""
    for result in ranks:
        got = result["gpt2"][n, k]
        torch.testing.assert_close(*got["output"], rtol=1e-12, atol=1e-12)
        scale = max(want.abs().max() for _, want in got["gradients"])
        for g, want in got["gradients"]:
            torch.testing.assert_close(g, want, rtol=1e-12, atol=1e-14 * scale.item())
        assert got["started"] == 2 * n * (k + 1) * 3


# -- one process, whose sums have one summand -------------------------------------------------------------------------


def sliced(n, k, started=None, **dims):
    """A model and its sliced copy."""
    plain = parallel_worker.decoder("qwen3", n_heads=4, n_kv_heads=2, **dims)
    copied = copy.deepcopy(plain)

    def reduce(x):
        if started is not None:
            started.append(x)
        return LoggedWait([], "")

    slice_blocks(copied, Domino(n, k, reduce))
    return plain, copied


def test_generation_with_a_cache():
    plain, model = sliced(2, 2, sliding_window=5)
    tokens = parallel_worker.global_batch(0).tokens[:4]
    with torch.no_grad():
        caches = [m.new_cache(12) for m in (plain, model)]
        for part in (tokens[:, :7], tokens[:, 7:8], tokens[:, 8:]):
            want, got = (m(part, cache=c) for m, c in zip((plain, model), caches, strict=True))
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n, k", [(1, 2), (2, 1), (4, 2)])
def test_stages_hand_on_the_whole_stream(n, k):
    """Two stages of a sliced decoder, one after the other: what goes between is whole, and no sum is left over."""
    lines = []

    def reduce(x):
        lines.append("start")
        return LoggedWait(lines, "")

    plain = parallel_worker.decoder("qwen3", n_heads=4, n_kv_heads=2, n_layers=3).double()
    model = copy.deepcopy(plain)
    slice_blocks(model, Domino(n, k, reduce))
    first, last = Stage(model, range(1), first=True, last=False), Stage(model, range(1, 3), first=False, last=True)
    batch, objective = parallel_worker.global_batch(0), worker.NextTokenConfig().build()
    for stage in (first, last):
        stage.work = Work(objective, [batch], parallel_worker.precision())
    sent = first(index=0)
    assert sent.shape == first.stream(*batch.tokens.shape, grad=True)[0].shape and not sent._is_view()
    assert lines.count("start") == lines.count("wait ") == 2 * n * k
    received = sent.detach().requires_grad_()
    loss = last(received, index=0)
    loss.backward()
    assert lines.count("start") == lines.count("wait ") == 2 * n * k + 4 * n * (k + 1)
    sent.backward(received.grad)
    assert lines.count("start") == lines.count("wait ") == 6 * n * (k + 1)
    want = objective(plain, batch).sum
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    assert_gradients(worker.gradients(model), worker.gradients(plain))


def test_a_stage_exposes_one_sum_more_each_way():
    """A stage of some layers is a model of as many: its last sum forward and its first gradient's have no cover."""
    whole = benchmark.simulated(6, 2, 1, 1.0)
    cut = benchmark.simulated(3, 2, 1, 1.0)
    per_stage = 2 * cut.exposed - whole.exposed
    assert 0 < per_stage <= 2.0  # in sums of a chunk: of 2 stages in place of 1
    assert 2 * cut.calls == whole.calls


def test_autocast_reduces_what_was_computed_in():
    started = []
    plain, model = sliced(2, 2, started, dropout=0.0)
    batch, objective = parallel_worker.global_batch(0), worker.NextTokenConfig().build()
    losses = []
    for m in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(objective(m, batch).sum)
        losses[-1].backward()
    assert {x.dtype for x in started} == {torch.bfloat16} and len(started) == 2 * 2 * 3 * LAYERS
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.999, name


def test_experts_are_refused_also_without_a_recipe():
    model = parallel_worker.decoder("mixtral", n_experts=4, moe_ffn_dim=32)
    with pytest.raises(ConfigError, match="does not go with experts"):
        slice_blocks(model, Domino(2, 1, None))


@pytest.mark.parametrize("first", ["slices", "recomputation"])
def test_a_copy_of_a_model_is_its_own(first):
    started = []
    plain = parallel_worker.decoder("llama", n_heads=4, n_kv_heads=2)
    model = copy.deepcopy(plain)

    def slices():
        slice_blocks(model, Domino(2, 1, lambda x: started.append(x) or LoggedWait([], "")))

    def recomputation():
        ActivationCheckpointingConfig().apply(model)

    for change in (slices, recomputation) if first == "slices" else (recomputation, slices):
        change()
    other = copy.deepcopy(model)
    batch, objective = parallel_worker.global_batch(0), worker.NextTokenConfig().build()
    for m in (plain, model, other):
        started.clear()
        objective(m, batch).sum.backward()
        assert len(started) == (0 if m is plain else 2 * 5 * LAYERS)
    assert_gradients(worker.gradients(other), worker.gradients(model), 0)
    assert_gradients(worker.gradients(model), worker.gradients(plain), 1e-5)


# -- through the trainer ----------------------------------------------------------------------------------------------


def test_twenty_adamw_steps_equal_one_process(ranks):
    cell = worker.Long({}, worker.LLAMA, double=True)
    want = worker.train(cell, parallel_worker.build_mesh(Degrees(), torch.device("cpu")), ParallelConfig())
    assert len(want["losses"]) == 20
    for result in ranks:
        got = result["twenty_steps"]
        for key in ("losses", "norms", "validation"):
            assert got[key] == pytest.approx(want[key], rel=1e-10)
        for name, weight in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-9, msg=name)


def test_a_recipe_equals_one_process(ranks, alone):
    """Twenty AdamW steps in float32 with dropout and recomputation, two micro-batches a step, and validations."""
    for result in ranks:
        got = result["recipe"]
        assert got["started"] > 20 * 2 * (2 * 2 * 3 * LAYERS)
        assert got["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert got["validation"] == pytest.approx(alone["validation"], rel=1e-5)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, rtol=0, atol=1e-4, msg=name)
