"""FlashCP and ByteScale with four gloo processes against one: outputs, gradients, bytes, order of messages."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from trainwright import RunConfig
from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, ModelError
from trainwright.models.attention import document_mask
from trainwright.parallel.context.bytescale import ByteScale, ByteScaleConfig
from trainwright.parallel.context.flashcp import FlashCP, FlashCPConfig
from trainwright.parallel.context.pieces import Document, decode, encode, piece_plan

WORKER = Path(__file__).parent / "pieces_worker.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the four ranks found, one start for all."""
    out = tmp_path_factory.mktemp("pieces") / "result"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(WORKER), str(out)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    return [torch.load(f"{out}.{r}") for r in range(4)]


PLANS = [f"any-{s}-{w}-{k}" for s in (2, 4) for w in (0, 7) for k in (True, False)]
PLANS += [f"{name}-{s}" for s in (2, 4) for name in ("search", "cut", "again", "whole")]


@pytest.mark.parametrize("name", PLANS)
def test_flashcp_equals_one_process(ranks, name):
    """Must hold 1 and 4: output and gradients of any plan, and every token on one rank of each group."""
    found = [r["flashcp"][name] for r in ranks]
    assert max(f["worst"] for f in found) < 1e-12
    size = int(name.split("-")[1])
    for start in range(0, 4, size):
        slots = sorted(s for f in found[start : start + size] for s in f["slots"])
        assert slots == list(range(128))
        assert len({f["shape"] for f in found[start : start + size]}) == 1
    assert all(f["padded"] == 0 for f in found)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_cut_documents(ranks, size):
    """Must hold 2: three quarters of a recorded all-gather, forward; gradients the same back."""
    sent = sum(r["flashcp"][f"cut-{size}"]["forward"] for r in ranks[:size])
    gathered = sum(r["flashcp"][f"all-gather-{size}"] for r in ranks[:size])
    assert sent * 4 == gathered * 3
    assert sum(r["flashcp"][f"cut-{size}"]["bytes"] for r in ranks[:size]) == 2 * sent
    assert sum(r["flashcp"][f"again-{size}"]["bytes"] for r in ranks[:size]) == 3 * sent


@pytest.mark.parametrize("size", [2, 4])
def test_whole_documents_send_nothing(ranks, size):
    """Must hold 3: not even a message."""
    assert all(r["flashcp"][f"whole-{size}"]["kinds"] == set() for r in ranks)


def test_a_window_sends_less(ranks):
    for size in (2, 4):
        wide, narrow = (sum(r["flashcp"][f"any-{size}-{w}-True"]["bytes"] for r in ranks) for w in (0, 7))
        assert 0 < narrow < wide


def test_different_plans_are_refused_everywhere(ranks):
    assert all("ranks 0 and 3 of the context group plan different layouts" in r["different"] for r in ranks)


HYBRID = ["mixed", "again", "short", "all", *(f"ragged-{i}" for i in range(4))]


@pytest.mark.parametrize("name", HYBRID)
def test_bytescale_equals_one_process(ranks, name):
    """Must hold 1, 2, 3 and 5: loss and gradients of a decoder, every token once, as many micro-batches on all."""
    found = [r["bytescale"][name] for r in ranks]
    assert max(f["worst"] for f in found) < 1e-10
    assert len({f["count"] for f in found}) == 1
    slots = sorted(s for part in found[0]["slots"] for s in part)
    assert slots == list(range(len(slots))) and len(slots) == {"all": 96}.get(name, 144)
    assert found[0]["weights"] == pytest.approx(0, abs=1e-9)


def test_bytescale_degrees(ranks):
    found = ranks[0]["bytescale"]
    assert found["mixed"]["ranks"] == {1, 2}
    assert found["all"]["ranks"] == {4}
    assert found["short"]["ranks"] == {1}
    assert any(len(found[f"ragged-{i}"]["ranks"]) >= 3 for i in range(4))


def test_bytescale_short_sequences_send_nothing(ranks):
    assert all(not talk for talk in ranks[0]["bytescale"]["short"]["talk"])
    assert any(ranks[0]["bytescale"]["mixed"]["talk"])


@pytest.mark.parametrize("name", HYBRID)
def test_messages_between_two_ranks_are_in_one_order(ranks, name):
    """Must hold 4, as recorded: what a sends to b is what b receives from a, in order, and nothing else is said."""
    talk = ranks[0]["bytescale"][name]["talk"]
    for a in range(4):
        assert {kind for kind, _, _ in talk[a]} <= {"send", "recv"}
        for b in range(4):
            sent = [size for kind, peer, size in talk[a] if kind == "send" and peer == b]
            received = [size for kind, peer, size in talk[b] if kind == "recv" and peer == a]
            assert sent == received


@pytest.mark.parametrize("name", ["mixed", "window", "static"])
def test_bytescale_shard_as_one(ranks, name):
    found = [r["bytescale"][f"shard-{name}"] for r in ranks]
    assert max(f["worst"] for f in found) < 1e-12
    slots = sorted(s for f in found for s in f["slots"])
    assert slots == list(range(48 if name == "static" else 96))


def test_bytescale_of_all_ranks_is_static(ranks):
    """Must hold 2: D = N for all is one document cut over all."""
    for r in ranks:
        found, static = r["bytescale"]["shard-static"], r["bytescale"]["static-flashcp"]
        assert found["bytes"] == static["bytes"] and found["slots"] == static["slots"]


def test_bytescale_refuses(ranks):
    for r in ranks:
        assert "a document has 48; use at least 12" in r["bytescale"]["too small"]
        assert "'reward' has one value a row" in r["bytescale"]["of rows"]


# -- without other processes ------------------------------------------------------------------------------------------


def one_row(*lengths):
    total = sum(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()
    slots = torch.arange(total)[None]
    return Batch(slots, slots, torch.ones(1, total), slots, ids)


@pytest.mark.parametrize("context", [FlashCP(None), ByteScale(None, 40)], ids=["flashcp", "bytescale"])
@pytest.mark.parametrize("window", [0, 5])
def test_one_rank_is_the_identity(context, window):
    batch = one_row(3, 10, 1, 26)
    shard = context.shard(batch)
    for name in ("tokens", "targets", "weights", "positions"):
        assert torch.equal(getattr(shard, name), getattr(batch, name))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    got = context.attend(q, k, v, context.plan(shard.doc_ids, 1, 40, window, CPU))
    mask = document_mask(batch.doc_ids, 40, window, CPU)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=0, atol=1e-13)


def test_numbers_of_documents_hold_all():
    for document in (Document(0, 1), Document(2**21 - 1, 2**22 - 1, 1022, 1023), Document(7, 300, 3, 5)):
        assert decode(encode(document)) == document
    with pytest.raises(ConfigError, match="length below 4194304, and this is 4194304"):
        encode(Document(0, 2**22))


def test_changed_doc_ids_are_refused():
    code = encode(Document(0, 16, 0, 2))
    piece_plan([code], [8], 0, 0, CPU)
    with pytest.raises(ModelError, match="got 7 tokens of document 0, and holds 8 of its 16"):
        piece_plan([code], [7], 0, 0, CPU)
    with pytest.raises(ModelError, match="needs the doc_ids"):
        FlashCP(None).plan(None, 1, 8, 0, CPU)


@pytest.mark.parametrize(
    "method, setting",
    [
        (FlashCPConfig, {"slack": [-0.1]}),
        (FlashCPConfig, {"slack": []}),
        (FlashCPConfig, {"imbalance": 0.9}),
        (FlashCPConfig, {"min_chunk": 0}),
        (ByteScaleConfig, {"capacity": 0}),
        (ByteScaleConfig, {"pair": -1.0}),
    ],
)
def test_settings_that_make_no_sense(method, setting):
    with pytest.raises(ValidationError, match=next(iter(setting))):
        method(**setting)


def test_recipes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"holds 4000 tokens on 4 ranks.*train.seq_len=4096; use at least 1024"):
        ByteScaleConfig(capacity=1000).check(4, 8, 8, 4096)
    ByteScaleConfig(capacity=1024).check(4, 8, 8, 4096)
    with pytest.raises(ConfigError, match="at most 4194303"):
        FlashCPConfig().check(4, 8, 8, 2**22)
    FlashCPConfig().check_pipeline()
    ByteScaleConfig(capacity=16).check_pipeline()
    offload = {"gb_per_s": 1.0, "bytes_per_token": 1000.0, "layers": 2}
    with pytest.raises(ConfigError, match=r"parallel\.context\.offload: does not go with pipelines.*context: sppo"):
        ByteScaleConfig(capacity=16, offload=offload).check_pipeline()


def test_a_recipe_plans_with_its_settings():
    lengths = [2048, *[100] * 40]
    assert FlashCPConfig().planner(lengths, 4).cut == (0,)
    costs = {"pair": 1e-9, "token": 1e-9, "send": 1.0}
    assert FlashCPConfig(costs=costs).planner(lengths, 4).cut == ()


def test_long_documents_are_offloaded(recipe):
    """Documents above the capacity need fewer ranks; the share that goes is at most the one asked for, and what is left
    on the device shrinks by it."""
    from trainwright.models.decoder_config import DecoderModelConfig

    section = {"gb_per_s": 1.0, "bytes_per_token": 1000.0, "layers": 2}
    config = ByteScaleConfig(capacity=16, pair=0.0, token=1.5e-6, offload=section)
    assert config.ratio(16) == 0.0 and config.ratio(40) == pytest.approx(0.75)
    assert [m.ranks for m in config.over(None).as_rank(0, 4).plan_step([40, 12], 16).micro_batches] == [1, 1]
    assert [m.ranks for m in ByteScale(None, 16).as_rank(0, 4).plan_step([40, 12], 16).micro_batches] == [3, 1]
    config.check(1, 4, 4, 40)
    with pytest.raises(ConfigError, match="use at least"):
        ByteScaleConfig(capacity=16).check(1, 4, 4, 40)

    torch.manual_seed(0)
    model = DecoderModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4).build(61, 64)
    ids = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([40, 12]))[None]
    tokens = torch.randint(61, (1, 52))
    batch = Batch(tokens, tokens, torch.ones(1, 52), torch.cat([torch.arange(40), torch.arange(12)])[None], ids.int())
    context = config.over(None)
    model.plan_attention = context.plan
    for block in model.blocks:
        block.attn.attend = context.attend
    peaks, gradients = [], []
    for offloaded in (True, False):
        model.zero_grad()
        for micro in context.micro_batches(batch, 1):
            with context.saving(micro, model) if offloaded else contextlib.nullcontext():
                loss = model(micro.tokens, positions=micro.positions, doc_ids=micro.doc_ids).logsumexp(-1).sum()
            if offloaded and micro.tokens.numel() > 16:
                ledger = context.ledger
                peaks = [ledger.forward_peak, sum(ledger.saved), ledger.ratios[0], ledger.sent]
            loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert 0.6 < peaks[2] <= 0.75 and peaks[3][1] == 0  # the last layer stays
    assert peaks[0] == peaks[1] - sum(peaks[3])
    with torch.no_grad():
        before = context.ledger
        context.saving(context.micro_batches(batch, 1)[0], model)
        assert context.ledger is before
    with pytest.raises(ConfigError, match="goes by a capacity"):
        RunConfig.load(recipe(**{"parallel.cp": 2, "parallel.context": {"name": "bytescale", "offload": section}}))
