"""The chunks of a row through the stages of a pipeline: each passes on what it has made as soon as it is there.

A stage does chunks 1..n forward, then n..1 backward, one micro-batch after the other. Sends don't block, and between
two stages they are received in the order in which they were sent, so that no stage waits for one that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from trainwright.core.batch import Batch
from trainwright.parallel.pipeline.pipeline import Pipeline
from trainwright.parallel.pipeline.stage import Stage
from trainwright.parallel.sppo.rows import ChunkedRows, tell_last

Kind = tuple[torch.Size, torch.dtype, bool]  # of a tensor that is sent; whether a gradient comes back for it


class SppoPipeline(Pipeline):
    """One stage a rank; its rows go chunk by chunk."""

    def __init__(self, *parts: Any):
        *rest, self.rows = parts
        super().__init__(*rest)

    def _build(self, micro_batches: list[Batch], inverse: Tensor) -> _Step:
        return _Step(self, micro_batches, inverse)


class _Step:
    """In place of a schedule of torch's."""

    def __init__(self, pipeline: SppoPipeline, micro_batches: list[Batch], inverse: Tensor):
        ((self.number, self.stage),) = pipeline.stages.items()
        self.pipeline, self.micro_batches, self.inverse = pipeline, micro_batches, inverse
        layout, group = pipeline.layout, pipeline.group

        def rank_of(number: int) -> int | None:
            return dist.get_global_rank(group, layout[number]) if 0 <= number < len(layout) else None

        self.before, self.after = rank_of(self.number - 1), rank_of(self.number + 1)
        self._sent: list[tuple[Any, Tensor]] = []  # kept until they are out

    def step(self, **_: Any) -> None:
        rows, stage = self.pipeline.rows, self.stage
        work: Any = stage.work
        wholes, parts = self.micro_batches, []
        for m, micro in enumerate(wholes):
            chunks = rows.begin(micro, [stage])
            parts += chunks
            work.micro_batches = parts
            first = len(parts) - len(chunks)
            with work.precision.autocast():  # weights are cast once, not once a chunk
                under_way = [self._forward(rows, first, c, chunk) for c, chunk in enumerate(chunks)]
            for c in reversed(range(len(chunks))):
                self._backward(rows, c, under_way.pop(), last=m == len(wholes) - 1 and c == 0)
        for message, _tensor in self._sent:
            message.wait()
        self._sent.clear()

    def _forward(self, rows: ChunkedRows, first: int, c: int, chunk: Batch) -> _UnderWay:
        kinds = _stream(self.stage, chunk)
        came = self._receive(kinds, self.before)
        with rows.forward(c):
            out = self.stage(*came, index=first + c)
        if self.after is None:
            return _UnderWay(came, [out * self.inverse], [])
        gone = out if isinstance(out, tuple) else (out,)
        self._send([t.detach() for t in gone], self.after)
        # Where the gradient goes in, but not the values: nothing here needs them any more.
        roots = [get_gradient_edge(t) if t.requires_grad else None for t in gone]
        wanted = [differentiable for *_, differentiable in kinds]
        return _UnderWay(
            came,
            [root for root, back in zip(roots, wanted, strict=True) if back],
            [(shape, dtype, False) for shape, dtype, back in kinds if back],
        )

    def _backward(self, rows: ChunkedRows, c: int, chunk: _UnderWay, last: bool) -> None:
        gradients: list[Any] = [None] if self.after is None else list(self._receive(chunk.gradients, self.after))
        found = [(root, grad) for root, grad in zip(chunk.roots, gradients, strict=True) if root is not None]
        rows.before_backward(c)
        self._sync(last)
        torch.autograd.backward([root for root, _ in found], [grad for _, grad in found])
        came = chunk.came
        if self.before is not None:
            self._send([_gradient(t) for t in came if t.requires_grad], self.before)

    def _sync(self, last: bool) -> None:
        """As in torch's schedules: gathered once, reduced once."""
        stage = self.stage
        if isinstance(stage, FSDPModule):
            tell_last(stage, last)
            stage.set_reshard_after_backward(last)
            stage.set_requires_gradient_sync(last)

    def _send(self, tensors: list[Tensor], peer: int) -> None:
        self._sent = [(message, t) for message, t in self._sent if not message.is_completed()]
        for t in tensors:
            t = t.contiguous()
            self._sent.append((dist.isend(t, peer, self.pipeline.group), t))

    def _receive(self, kinds: list[Kind], peer: int | None) -> tuple[Tensor, ...]:
        if peer is None:
            return ()
        found = []
        for shape, dtype, differentiable in kinds:
            t = torch.empty(shape, dtype=dtype, device=self.pipeline.device)
            dist.recv(t, peer, self.pipeline.group)
            found.append(t.requires_grad_(differentiable))
        return tuple(found)


@dataclass
class _UnderWay:
    """A chunk between its forward and backward pass: what came in, the outputs' places in the graph (None: without one)
    and the gradients that come for them."""

    came: tuple[Tensor, ...]
    roots: list[Any]
    gradients: list[Kind]


def _stream(stage: Stage, chunk: Batch) -> list[Kind]:
    """What goes from one stage to the next of a chunk."""
    rows, length = chunk.tokens.shape
    return [(t.shape, t.dtype, t.requires_grad) for t in stage.stream(rows, length, grad=True)]


def _gradient(t: Tensor) -> Tensor:
    return torch.zeros_like(t) if t.grad is None else t.grad
