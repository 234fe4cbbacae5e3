"""What planning reads comes from the host: no wait for the device, and no masks where none are needed.

The device here is torch's meta device: whoever asks for a value that lies on it gets an error.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.parallel.context import basp, flexsp, host, unified
from trainwright.parallel.context.basp import Basp
from trainwright.parallel.context.bytescale import ByteScale
from trainwright.parallel.context.flashcp import FlashCP
from trainwright.parallel.context.flexsp import FlexSPConfig, FlexSPContext
from trainwright.parallel.context.host import chunked, kept, moved, on_host, sent, split
from trainwright.parallel.context.unified import UnifiedContext, _pair

CPU, DEVICE = torch.device("cpu"), torch.device("meta")


def rows(lengths: list[list[int]]) -> Batch:
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).int()
    tokens = torch.arange(ids.numel()).view(ids.shape)
    return Batch(tokens, tokens, torch.ones(ids.shape), tokens, ids)


BATCH = rows([[10, 22, 32], [64], [1, 40, 23], [33, 31]])


def spread(rank: int, size: int, ulysses: int) -> UnifiedContext:
    found = UnifiedContext.__new__(UnifiedContext)
    found.size, found.ulysses, found.places = size, ulysses, size // ulysses
    found.rank, found.place = rank, rank // ulysses
    found.ring = None if ulysses == size else SimpleNamespace()
    return found


def based(rank: int) -> Basp:
    found = Basp.__new__(Basp)
    found.size, found.rank, found.n_heads, found.padding, found.multiple_of = 2, rank, 2, 0.0, 1
    found.sizes, found.groups, found._said = [1, 2], {2: None}, set()
    return found


CONTEXTS = {
    "ring": lambda: spread(1, 4, 1),
    "ulysses": lambda: spread(1, 4, 4),
    "usp": lambda: spread(1, 4, 2),
    "basp": lambda: based(1),
    "flashcp": lambda: FlashCP(None).as_rank(1, 2),
    "bytescale": lambda: ByteScale(None, capacity=64).as_rank(1, 2),
    "flexsp": lambda: FlexSPContext({1: None}, 0, 1, FlexSPConfig(), 2),
}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    """What goes over a group is not the matter here."""

    def gather(out: Tensor, mine: Tensor, group: Any) -> None:
        out.copy_(mine.repeat(out.shape[0] // mine.shape[0], 1))

    monkeypatch.setattr(basp, "all_gather_single", gather)
    monkeypatch.setattr(flexsp, "all_gather_single", gather)


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("window", [0, 7])
def test_planning_asks_the_device_for_nothing(name, window):
    context = CONTEXTS[name]()
    for micro in context.micro_batches(BATCH, 2):
        here = sent(micro, DEVICE)
        assert here.doc_ids.device == DEVICE
        context.plan(here.doc_ids, *here.tokens.shape, window, DEVICE)
        with context.saving(here, torch.nn.Identity()):
            pass


@pytest.mark.parametrize("name", ["basp", "flashcp", "bytescale", "flexsp"])
def test_a_batch_on_the_device_cannot_be_planned_without_asking(name):
    """What the test above would find."""
    context = CONTEXTS[name]()
    with pytest.raises((NotImplementedError, RuntimeError)):
        for micro in context.micro_batches(BATCH.to(DEVICE), 2):
            context.plan(micro.doc_ids, *micro.tokens.shape, 0, DEVICE)


def test_offloading_asks_the_device_for_nothing():
    context = ByteScale(None, capacity=16, offload=lambda length: 0.5).as_rank(0, 8)
    asked = [sent(micro, DEVICE) for micro in context.micro_batches(BATCH, 4)]
    for micro in asked:
        with context.saving(micro, torch.nn.Identity()):
            pass
    assert context.ledger is not None


def everything(runs: Tensor | None, a: range, b: range, window: int, batch: int) -> Tensor:
    """What ``a`` sees of ``b``: bool [batch, Tq, Tk], token by token."""
    q, k = torch.tensor([*a])[:, None], torch.tensor([*b])
    seen = (q >= k) & ((q - k < window) if window else True)
    seen = seen.expand(batch, -1, -1)
    return seen if runs is None else seen & (runs[:, a.start : a.stop, None] == runs[:, None, b.start : b.stop])


@pytest.mark.parametrize("window", [0, 5, 12])
@pytest.mark.parametrize("seed", range(20))
def test_masks_are_kept_only_where_they_say_something(seed, window):
    g = torch.Generator().manual_seed(seed)
    runs = (torch.rand(2, 32, generator=g) < 0.08 * (seed % 3)).cumsum(1).int()
    pieces = [range(i * 8, i * 8 + 8) for i in range(4)]
    kinds = set()
    for i, a in enumerate(pieces):
        for b in pieces[: i + 1]:
            want = everything(runs, a, b, window, 2)
            found = _pair(0, a, 0, b, runs, window)
            on_device = _pair(0, a, 0, b, runs, window, DEVICE)
            if found is None:
                assert not want.any() and on_device is None
                kinds.add("none")
                continue
            assert want.any()
            causal = torch.ones(8, 8, dtype=torch.bool).tril()
            plain = causal if a == b else torch.ones(8, 8, dtype=torch.bool)
            assert (found.mask is None) == (on_device.mask is None) == bool((want == plain).all())
            assert found.causal == on_device.causal == (found.mask is None and a == b)
            if found.mask is not None:
                torch.testing.assert_close(found.mask.expand(2, 1, 8, 8), want.unsqueeze(1))
                assert on_device.mask.device == DEVICE and on_device.mask.shape == found.mask.shape
            kinds.add("mask" if found.mask is not None else "whole")
    if seed % 3 == 0 and not window:  # one document a row
        assert kinds == {"whole"}


def test_a_ring_gathers_no_document_numbers(monkeypatch):
    """Those of whole rows are known from shard; a caller's own are gathered."""

    def gather(*_: Any) -> None:
        raise AssertionError("gathered")

    monkeypatch.setattr(unified, "all_gather_single", gather)
    context = spread(0, 4, 1)
    part = context.shard(BATCH)
    context.group = None
    context.plan(part.doc_ids, *part.tokens.shape, 0, CPU)
    with pytest.raises(AssertionError, match="gathered"):
        context.plan(part.doc_ids.clone(), *part.tokens.shape, 0, CPU)


def test_rows_of_one_document_need_no_mask_under_ulysses(monkeypatch):
    asked: list[Tensor | None] = []
    monkeypatch.setattr(unified, "plan_attention", lambda runs, *_: asked.append(runs))
    context = spread(0, 4, 4)
    for batch in (rows([[64], [64]]), BATCH):
        part = sent(context.shard(batch), DEVICE)
        context.plan(part.doc_ids, *part.tokens.shape, 0, DEVICE)
    assert asked[0] is None and asked[1].device == DEVICE and asked[1].shape == (4, 64)


def test_what_is_kept_follows_rows_and_ends_with_its_tensor():
    micro = sent(spread(0, 4, 1).shard(BATCH), DEVICE)
    for i, part in enumerate(split(micro, 1)):
        assert torch.equal(kept(part.doc_ids), BATCH.doc_ids[i : i + 1])
    assert [kept(part).shape for part in chunked(micro.doc_ids, 2)] == [(2, 64), (2, 64)]
    assert kept(micro.doc_ids.clone()) is None
    assert on_host(sent(BATCH, DEVICE).doc_ids) is BATCH.doc_ids
    assert moved(BATCH.tokens, CPU) is BATCH.tokens
    before = len(host._kept)
    del micro, part
    assert len(host._kept) < before
