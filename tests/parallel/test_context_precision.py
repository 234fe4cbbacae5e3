"""Attention over a ring and over pieces of documents in bfloat16: as near to float64 as in one piece, however many."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.parallel.context import ring_attention
from trainwright.parallel.context.pieces import Document, Exchange, PieceAttention, encode, piece_plan
from trainwright.parallel.context.ring_attention import Ring
from trainwright.parallel.context.unified import UnifiedContext
from trainwright.parallel.sppo.chunks import ChunkedAttention

LENGTH, HEADS, WIDTH = 256, 2, 16
CPU = torch.device("cpu")


class _Post:
    """Messages between threads in place of processes, by sender, receiver and number of the exchange."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], Queue[list[Tensor]]] = defaultdict(Queue)
        self.lock = threading.Lock()

    def box(self, *key: int) -> Queue[list[Tensor]]:
        with self.lock:
            return self.boxes[key]


class _Arrival:
    def __init__(self, box: Queue[list[Tensor]], into: list[Tensor]):
        self.box, self.into = box, into

    def wait(self) -> None:
        for target, found in zip(self.into, self.box.get(timeout=60), strict=True):
            assert target.dtype == found.dtype
            target.copy_(found)


class _Ring(Ring):
    def __init__(self, rank: int, size: int, post: _Post):
        self.rank, self.size, self.post, self.number = rank, size, post, 0

    def start(self, sent: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
        self.number += 1
        self.post.box(self.rank, (self.rank + 1) % self.size, self.number).put([t.clone() for t in sent])
        received = [torch.empty_like(t) for t in sent]
        return received, [_Arrival(self.post.box((self.rank - 1) % self.size, self.rank, self.number), received)]


class _Exchange(Exchange):
    def __init__(self, rank: int, size: int, post: _Post):
        self.rank, self.size, self.post, self.number = rank, size, post, 0

    def start(self, x: Tensor, send: Any, receive: Any) -> tuple[list[Tensor], list[Any]]:
        self.number += 1
        for other, index in send:
            self.post.box(self.rank, other, self.number).put([x.index_select(2, index)])
        received = [x.new_empty(*x.shape[:2], index.numel(), x.shape[3]) for _, index in receive]
        works = [
            _Arrival(self.post.box(other, self.rank, self.number), [into])
            for (other, _), into in zip(receive, received, strict=True)
        ]
        return received, works


def _drawn(dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, LENGTH, HEADS, WIDTH, generator=g).bfloat16().to(dtype) for _ in range(4)]  # q, k, v, grad


def _together(size: int, dtype: torch.dtype, of_rank: Callable[[int, _Post], Any]) -> list[Tensor]:
    """Output and gradients of whole rows. ``of_rank`` gives the slots of a rank and how it attends."""
    q, k, v, grad = _drawn(dtype)
    post, whole = _Post(), [torch.full_like(q, torch.nan) for _ in range(4)]

    def rank(i: int) -> None:
        slots, attend = of_rank(i, post)
        own = [x[:, slots].clone().requires_grad_() for x in (q, k, v)]
        out = attend(*own)
        out.backward(grad[:, slots])
        for into, part in zip(whole, [out.detach(), *(x.grad for x in own)], strict=True):
            assert part.dtype == dtype
            into[:, slots] = part

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not any(t.isnan().any() for t in whole)
    return whole


def _ring(size: int, dtype: torch.dtype) -> list[Tensor]:
    def of_rank(i: int, post: _Post) -> Any:
        context = UnifiedContext.__new__(UnifiedContext)
        context.size, context.ulysses, context.places, context.rank, context.place = size, 1, size, i, i
        context.ring = _Ring(i, size, post)
        plan = context.plan(None, 1, LENGTH // size, 0, CPU)
        return context.slots(i, LENGTH), lambda *x: context.attend(*x, plan)

    return _together(size, dtype, of_rank)


def _pieces(size: int, dtype: torch.dtype) -> list[Tensor]:
    """One document over all ranks."""
    document = Document(0, LENGTH, 0, size)

    def of_rank(i: int, post: _Post) -> Any:
        slots = torch.tensor([s for c in document.chunks(i) for s in c])
        plan = piece_plan([encode(document)], [len(slots)], i, 0, CPU)
        exchange = _Exchange(i, size, post)
        return slots, lambda *x: PieceAttention.apply(*x, plan, exchange, True)

    return _together(size, dtype, of_rank)


def _chunks(number: int, dtype: torch.dtype) -> list[Tensor]:
    """Chunk by chunk on one rank."""
    q, k, v, grad = _drawn(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    chunked, size = ChunkedAttention(), LENGTH // number
    chunked.start(tuple(range(0, LENGTH + 1, size)), None)
    outs = []
    for i in range(number):
        chunked.chunk = i
        part = slice(i * size, (i + 1) * size)
        plan = chunked.plan(None, 1, size, 0, CPU)
        outs.append(chunked.attend(q[:, part], k[:, part], v[:, part], plan, layer=0))
    for out, g in zip(reversed(outs), reversed(grad.split(size, 1)), strict=True):
        out.backward(g)
    return [torch.cat(outs, 1).detach(), *(x.grad for x in inputs)]


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    return _ring(1, torch.float64)


def test_one_rank_is_plain_attention(exact):
    q, k, v, grad = _drawn(torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    out.backward(grad)
    for a, b in zip(exact, [out.detach(), *(x.grad for x in inputs)], strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "products"])
@pytest.mark.parametrize("many", [4, 16])
@pytest.mark.parametrize("spread", [_ring, _pieces, _chunks])
def test_more_pieces_are_no_coarser(exact, spread, many, plain, monkeypatch):
    """In bfloat16, against float64: without sums in float32 the errors of a ring of 16 are several times those of one
    rank. Pieces round the gradients of keys once more, as they are sent."""
    monkeypatch.setattr(ring_attention, "PLAIN", plain)
    one, found = (_errors(made, exact) for made in (_ring(1, torch.bfloat16), spread(many, torch.bfloat16)))
    for a, b in zip(found, one, strict=True):
        assert a < (1.45 if spread is _pieces else 1.15) * b


@pytest.mark.parametrize("spread", [_ring, _pieces, _chunks])
def test_it_is_exact_in_float64(exact, spread):
    for a, b in zip(spread(4, torch.float64), exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
