"""SPPO (B009): rows in chunks against whole rows, on one process and through pipelines. See also test_sppo_plan.py."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.models.attention import attention, plan_attention
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.apply import parallelize
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import build_mesh
from trainwright.parallel.sppo.chunks import ChunkedAttention
from trainwright.parallel.sppo.measure import measure
from trainwright.parallel.sppo.solver import resident_peak, working_peak
from trainwright.precision.base import Precision
from trainwright.train.pipeline_executor import executor_kind

HERE = Path(__file__).parent
CPU = torch.device("cpu")
VOCAB, LENGTH = 61, 24

sys.path.insert(0, str(HERE))
spec = importlib.util.spec_from_file_location("sppo_worker", HERE / "sppo_worker.py")
worker = importlib.util.module_from_spec(spec)
sys.modules["sppo_worker"] = worker
try:
    spec.loader.exec_module(worker)
finally:
    sys.path.remove(str(HERE))


def decoder(dtype=torch.float64, **more):
    torch.manual_seed(0)
    dims = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
    return DecoderModelConfig(family="qwen3", **dims, **more).build(VOCAB, LENGTH).to(dtype)


def batch(rows=4, seed=0, documents=True):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1), generator=g)
    starts = torch.rand(rows, LENGTH, generator=g) < (0.15 if documents else 0.0)
    starts[:, 0] = True
    slots = torch.arange(LENGTH).expand(rows, LENGTH)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    ids = (starts.cumsum(1) % 3).int()  # ids come back
    weights = (torch.rand(rows, LENGTH, generator=g) < 0.7).float()
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, ids)


def step(model, rows, settings=None, micro=2, dtype=torch.float32, device=CPU):
    """A step's loss, gradients and what it went by."""
    config = ParallelConfig(**({} if settings is None else {"context": {"name": "sppo", "min_chunk": 1, **settings}}))
    parallel = parallelize(model, build_mesh(Degrees(), device), config, Precision(dtype, device.type), device)
    executor = executor_kind(parallel)(micro, Precision(dtype, device.type), device=device)
    result = executor.run(parallel, NextTokenConfig(z_loss=1e-3).build(), rows)
    return result, {n: p.grad for n, p in model.named_parameters()}, parallel


# -- 1: equal to whole rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"sliding_window": 5}, {"tie_embeddings": True}], ids=["full", "window", "tied"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_loss_and_gradients_are_those_of_whole_rows(chunks, model):
    """Must hold 1: 1e-10 in float64, documents that cross chunks, several micro-batches, both cuts, with offloading."""
    rows = batch()
    want, gradients, _ = step(decoder(**model), rows)
    for cut, offload in (("equal", "off"), ("balanced", [0.5] * (chunks - 1) + [0.0])):
        got, found, _ = step(decoder(**model), rows, {"chunks": chunks, "cut": cut, "offload": offload})
        torch.testing.assert_close(got.loss_sum, want.loss_sum, rtol=1e-12, atol=0)
        assert got.metrics.keys() == want.metrics.keys() and got.positions == want.positions
        for name in want.metrics:
            torch.testing.assert_close(got.metrics[name], want.metrics[name], rtol=1e-12, atol=0)
        for name in gradients:
            torch.testing.assert_close(found[name], gradients[name], rtol=1e-10, atol=1e-15, msg=name)


def chunked_losses(model, tokens, targets, cut, doc_ids=None, **names):
    chunked = ChunkedAttention()
    chunked.install(model)
    chunked.start(cut, doc_ids)
    losses = []
    for i, (a, b) in enumerate(itertools.pairwise(cut)):
        chunked.chunk = i
        ids = {"doc_ids": doc_ids[:, a:b]} if doc_ids is not None else {}
        logits = model(tokens[:, a:b], **ids, **names)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets[:, a:b].flatten(), reduction="sum"))
    chunked.chunk = None
    return losses


@pytest.mark.parametrize("scaling", [None, {"type": "dynamic", "factor": 2.0, "original_max_seq_len": 8}])
def test_positions_go_on_over_chunks(scaling):
    """RoPE without positions, and a scaling that depends on the length of the row: alone, as plain PyTorch."""
    rows = batch(documents=False)
    want = decoder(rope_scaling=scaling)
    whole = F.cross_entropy(want(rows.tokens).flatten(0, 1), rows.targets.flatten(), reduction="sum")
    whole.backward()
    model = decoder(rope_scaling=scaling)
    losses = chunked_losses(model, rows.tokens, rows.targets, (0, 3, 4, 17, LENGTH))
    for loss in reversed(losses):
        loss.backward()
    torch.testing.assert_close(sum(x.detach() for x in losses), whole.detach(), rtol=1e-13, atol=0)
    for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_random_chunks_and_documents(seed):
    """Any bounds, documents, windows and grouped heads: outputs and gradients of plain attention over whole rows."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    length, window = r.randint(5, 40), r.choice([0, 0, 3, 9])
    cut = (0, *sorted(r.sample(range(1, length), r.randint(0, min(6, length - 1)))), length)
    ids = (torch.rand(2, length, generator=g) < r.choice([0.0, 0.2, 0.6])).cumsum(1).int() % 4
    kv = r.choice([1, 2, 4])
    q, k, v = (torch.randn(2, length, h, 8, generator=g, dtype=torch.float64).requires_grad_() for h in (4, kv, kv))
    grad = torch.randn(2, length, 4, 8, generator=g, dtype=torch.float64)
    want = attention(q, k, v, plan_attention(ids, 2, length, window, CPU))
    gradients = torch.autograd.grad(want, (q, k, v), grad)
    chunked = ChunkedAttention()
    store = chunked.start(cut, ids)
    outs = [
        chunked.attend(q[:, a:b], k[:, a:b], v[:, a:b], store.plan(i, window), layer=0)
        for i, (a, b) in enumerate(itertools.pairwise(cut))
    ]
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-12, atol=1e-13)
    for out, (a, b) in reversed(list(zip(outs, itertools.pairwise(cut), strict=True))):
        out.backward(grad[:, a:b])
    for x, expected in zip((q, k, v), gradients, strict=True):
        torch.testing.assert_close(x.grad, expected, rtol=1e-10, atol=1e-13)
    assert not store.held and not store.gradients  # the first chunk's backward pass is the last use


def test_documents_do_not_see_each_other_over_chunks():
    """Another first document leaves the loss of the second as it is, in chunks that hold some of both."""
    rows = batch(rows=1, documents=False)
    ids = torch.zeros(1, LENGTH, dtype=torch.int32)
    ids[:, 10:] = 1
    losses = []
    for shift in (0, 7):
        tokens = rows.tokens.clone()
        tokens[:, :10] = (tokens[:, :10] + shift) % VOCAB
        with torch.no_grad():
            losses.append(chunked_losses(decoder(), tokens, rows.targets, (0, 8, 12, 18, LENGTH), ids))
    assert losses[0][0] != losses[1][0]
    assert losses[0][2:] == losses[1][2:]


def test_pairs_that_no_token_sees_are_left_out():
    ids = torch.tensor([[0] * 10 + [1] * 14], dtype=torch.int32)
    store = ChunkedAttention().start((0, 8, 12, 18, 24), ids)
    assert [[p.k.start for p in store.plan(i, 0).pairs] for i in range(4)] == [[0], [0, 8], [8, 12], [8, 12, 18]]
    assert [[p.k.start for p in store.plan(i, 3).pairs] for i in range(4)] == [[0], [0, 8], [8, 12], [12, 18]]
    assert store.plan(3, 0).pairs[1].mask is None  # whole chunks of one document need no mask


def test_chunks_go_backward_last_to_first():
    rows = batch()
    losses = chunked_losses(decoder(), rows.tokens, rows.targets, (0, 12, LENGTH), rows.doc_ids)
    with pytest.raises(RuntimeError, match="the backward pass of chunk 1 of layer 1 is due, not that of chunk 0"):
        losses[0].backward()


def test_validation_sees_whole_rows():
    rows = batch()
    _, _, parallel = step(decoder(), rows, {"chunks": 4})
    with torch.no_grad():
        got = NextTokenConfig().build()(parallel.module, rows).sum
        torch.testing.assert_close(got, NextTokenConfig().build()(decoder(), rows).sum, rtol=1e-13, atol=0)


def test_weights_are_cast_once_for_all_chunks():
    """bfloat16: a chunk's activations are its own; the casts of the weights are in the first one's."""
    rows = batch(rows=2)
    want, gradients, _ = step(decoder(torch.float32), rows, dtype=torch.bfloat16)
    settings = {"chunks": 4, "cut": "equal", "offload": [1.0, 1.0, 1.0, 0.0]}
    got, found, parallel = step(decoder(torch.float32), rows, settings, dtype=torch.bfloat16)
    torch.testing.assert_close(got.loss_sum, want.loss_sum, rtol=1e-3, atol=0)
    for name in gradients:
        # Of chunks, gradients are sums of four rounded ones.
        scale = gradients[name].abs().max()
        torch.testing.assert_close(found[name] / scale, gradients[name] / scale, rtol=0, atol=0.03, msg=name)
    saved = parallel.chunks.ledger.saved
    weights = sum(2 * p.numel() for n, p in decoder().named_parameters() if p.ndim == 2 and n.startswith("blocks."))
    assert saved[1] == saved[2] == saved[3] and saved[0] == saved[1] + weights


# -- 4: what is on the device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["equal", "balanced"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_recorded_peaks_are_the_formulas(chunks, share, cut):
    """Must hold 4, in whole bytes: behind forward passes, and with the chunk that goes backward brought back."""
    asked = [share] * (chunks - 1) + [0.0]
    _, _, parallel = step(decoder(), batch(rows=2), {"chunks": chunks, "cut": cut, "offload": asked})
    ledger = parallel.chunks.ledger
    assert ledger.forward_peak == round(resident_peak(ledger.saved, ledger.ratios))
    assert ledger.peak == round(working_peak(ledger.saved, ledger.ratios))
    assert ledger.resident == 0 and min(ledger.saved) > 0 and ledger.sent[-1] == 0
    # A storage of a large tensor is too much where its share isn't: never above the share, and at most one such below.
    largest = 2 * LENGTH * 2 * 48 * 8
    for saved, sent, ratio in zip(ledger.saved, ledger.sent, asked, strict=True):
        assert ratio * saved - largest <= sent <= ratio * saved
        assert share not in (0.0, 1.0) or sent == ratio * saved


def test_what_is_offloaded_is_gone():
    """The storages themselves, not only the count: behind the forward pass nothing of the first chunks is left."""
    rows = batch(rows=2)
    model = decoder()
    config = ParallelConfig(context={"name": "sppo", "chunks": 3, "offload": [1.0, 0.0, 0.0], "min_chunk": 1})
    parallel = parallelize(model, build_mesh(Degrees(), CPU), config, Precision(torch.float32, "cpu"), CPU)
    losses = []
    for i, chunk in enumerate(parallel.chunks.begin(rows, [model])):
        with parallel.chunks.forward(i):
            losses.append(NextTokenConfig().build()(model, chunk).sum)
    offload = parallel.chunks.offload
    alive = [not reference.expired() for reference, held in offload._known.values() if held().host is not None]
    here = [not reference.expired() for reference, held in offload._known.values() if held().host is None]
    assert len(alive) > 20 and sum(alive) == 0
    assert len(here) > 40 and all(here)
    kv = 2 * model.arch.n_layers * 2 * LENGTH * model.arch.n_kv_heads * model.arch.head_dim * 8
    assert parallel.chunks.attention.store.bytes == kv  # resident, whatever is offloaded
    for i in (2, 1, 0):
        parallel.chunks.before_backward(i)
        losses[i].backward()
    assert all(reference.expired() for reference, _ in offload._known.values() if reference is not None)


def test_measured_figures():
    model = decoder(torch.float32)
    found = measure(model, LENGTH, rows=2, repeats=1)
    assert found.bandwidth > 1e6 and found.token_seconds > 0 and found.pair_seconds >= 0
    assert found.kv_bytes == 2 * model.arch.n_layers * model.arch.n_kv_heads * model.arch.head_dim * (4 + 4)
    _, _, parallel = step(model, batch(rows=2), {"chunks": 2, "cut": "equal", "offload": [0.0, 0.0]})
    (saved, _) = parallel.chunks.ledger.saved
    assert found.chunk_bytes + found.token_bytes * 2 * LENGTH / 2 == saved
    assert found.chunk_bytes == pytest.approx(4 * VOCAB * 32, rel=0.05)  # the gradient of the head
    assert measure(decoder(torch.float32), LENGTH, stages=2, repeats=1).kv_bytes == found.kv_bytes / 2
    clean = decoder()
    measure(clean, LENGTH, repeats=1)
    assert all(block.attn.attend is attention for block in clean.blocks) and clean.plan_attention is plan_attention


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_on_a_gpu():
    device = torch.device("cuda", 0)
    rows = batch().to(device)
    want, gradients, _ = step(decoder().to(device), rows, device=device)
    got, found, parallel = step(
        decoder().to(device), rows, {"chunks": 4, "offload": [1.0, 0.5, 1.0, 0.0]}, device=device
    )
    torch.testing.assert_close(got.loss_sum, want.loss_sum, rtol=1e-10, atol=0)
    for name in gradients:
        torch.testing.assert_close(found[name], gradients[name], rtol=1e-8, atol=1e-12, msg=name)
    assert parallel.chunks.ledger.sent[0] == parallel.chunks.ledger.saved[0] > 0


# -- 5: through a pipeline ----------------------------------------------------------------------------------------


def _run(out, what):
    done = subprocess.run(
        [sys.executable, str(HERE / "sppo_worker.py"), str(out), what],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    out = tmp_path_factory.mktemp("sppo") / "result"
    _run(out, "exact")

    def of(name):
        ranks = [torch.load(f"{out}.{name}.{r}") for r in range(worker.world_of(name))]
        return ranks, torch.load(f"{out}.{name}.one")

    return of


@pytest.mark.parametrize("name", worker.CELLS)
def test_training_equals_one_process(exact, name):
    """Must hold 5 in float64: AdamW steps with clipping over stages, shards and heads, against whole rows."""
    ranks, want = exact(name)
    names = set()
    for got in ranks:
        for key in ("losses", "norms", "validation"):
            torch.testing.assert_close(got[key], want[key], rtol=1e-10, atol=0)
        for mine, one in zip(got["metrics"], want["metrics"], strict=True):
            torch.testing.assert_close(mine["nll"], one["nll"], rtol=1e-10, atol=0)
        names |= got["weights"].keys()
        for key, weight in got["weights"].items():
            torch.testing.assert_close(weight, want["weights"][key], rtol=0, atol=1e-10, msg=f"{name} {key}")
    assert names == want["weights"].keys()


@pytest.mark.parametrize("name", worker.CELLS)
def test_every_rank_sends_what_another_receives(exact, name):
    """The same collectives per group, and between two ranks messages of the same sizes in the same order."""
    ranks, _ = exact(name)
    for one, other in itertools.combinations(range(len(ranks)), 2):
        for group in ranks[one]["sequence"].keys() & ranks[other]["sequence"].keys():
            assert ranks[one]["sequence"][group] == ranks[other]["sequence"][group]
    for one, other in itertools.permutations(range(len(ranks)), 2):
        sent = [size for kind, peer, size in ranks[one]["messages"] if kind == "send" and peer == other]
        got = [size for kind, peer, size in ranks[other]["messages"] if kind == "recv" and peer == one]
        assert sent == got
    if name.startswith("pp2_n"):
        chunks, micro_batches = int(name.removeprefix("pp2_n")), worker.ROWS // worker.CELLS[name][2]
        sent = [r for r in ranks[0]["messages"] if r[0] == "send"]
        # Activations there, gradients back; one more each way for the tied head.
        assert len(sent) == chunks * micro_batches + 1


def test_stages_offload_their_own(exact):
    for got in exact("pp4")[0]:
        ledger = got["ledger"]
        assert len(ledger["saved"]) == 6 and sum(ledger["sent"]) > 0 and ledger["sent"][-1] == 0
        assert ledger["peak"] < sum(ledger["saved"]) and ledger["resident"] == 0


@pytest.mark.parametrize("name", ["shard2", "shard2_whole", "tp2", "replicate2"])
def test_weights_are_no_activations(exact, name):
    """Gathered or cut: chunks of equal length save as much, also the first, which would be the one to count them."""
    for got in exact(name)[0]:
        assert len(set(got["ledger"]["saved"])) == 1 and got["ledger"]["sent"][0] > 0


def test_recipes_with_every_number_of_chunks(recipe, tmp_path):
    """Must hold 5: two gloo processes, the trainer, n = 1 .. 8, and one process in chunks; against whole rows."""
    out = tmp_path / "result"
    Path(f"{out}.recipe").write_text(json.dumps(recipe(**{"train.steps": 2, "evaluate.tokens": 256})))
    _run(out, "recipe")
    plain = torch.load(f"{out}.plain")
    for name in ("one_n4", *(f"two_n{n}" for n in range(1, 9))):
        run = torch.load(f"{out}.{name}")
        assert [r["step"] for r in run["rows"]] == [1, 2]
        for row, want in zip(run["rows"], plain["rows"], strict=True):
            for key in ("loss", "grad_norm", "nll", "trained_share", "lr"):
                assert row[key] == pytest.approx(want[key], rel=1e-5), (name, key)
        for key in ("val_loss", "val_tokens"):
            assert run["summary"][key] == pytest.approx(plain["summary"][key], rel=1e-5)


def test_documents_without_a_mask_are_refused():
    rows = batch()
    chunked, model = ChunkedAttention(), decoder()
    chunked.install(model)
    chunked.start((0, 12, LENGTH), rows.doc_ids)
    chunked.chunk = 0
    with pytest.raises(ConfigError, match="documents go on over chunks, and the model was not given their ids"):
        model(rows.tokens[:, :12])
    with pytest.raises(ConfigError, match="a chunk of 12 tokens came as 11"):
        model(rows.tokens[:, :11], doc_ids=rows.doc_ids[:, :11])
    chunked.start((0, 12, LENGTH), None)
    with pytest.raises(ConfigError, match="the rows were started without any"):
        model(rows.tokens[:, :12], doc_ids=rows.doc_ids[:, :12])


def test_objectives_that_need_whole_rows_are_told(recipe):
    """As with cp: what an objective learns of how rows are spread."""
    from trainwright import RunConfig, Trainer
    from trainwright.train.run_context import prepare_objective

    seen = []
    trainer = Trainer(RunConfig.load(recipe(parallel={"context": {"name": "sppo", "chunks": 2, "min_chunk": 1}})))
    trainer.objective = SimpleNamespace(prepare=lambda context: seen.append(context.split))
    prepare_objective(trainer)
    trainer.close()
    assert seen == ["context"]
