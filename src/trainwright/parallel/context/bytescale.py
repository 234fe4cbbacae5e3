"""ByteScale's hybrid data parallelism: the ranks are one pool, and each sequence gets just as many as it needs.

The documents of all rows of a step are the sequences (planning/bytescale.py makes the plan). A document of s tokens
lies on ceil(s / C) neighbouring ranks, which exchange its keys (pieces.py); shorter ones are packed up to C tokens on
one rank and send nothing. Ranks compute other micro-batches at the same time and wait only for those that they share a
document with, until the gradients are added up. The loss is divided by the weight of the global batch, so no share
counts more.

A document that is shared is the same micro-batch, by number, of all its ranks; that orders them, and what FSDP2 gathers
in each micro-batch finds all ranks in the same one. Every rank gets as many micro-batches as the longest list has; what
fills up is one token of weight 0.

Where we differ from the paper (arXiv:2502.21231): keys go straight to the ranks that need them, 3/4 of what a ring
sends, in place of a ring; every rank of the pool reads all rows of a step and keeps its documents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.batch import Batch
from trainwright.core.distributed import max_over_ranks
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.flashcp import check_limits, one_shape
from trainwright.parallel.context.pieces import PADDING, Document, PieceContext, document_lengths, encode, taken
from trainwright.parallel.mesh import Mesh
from trainwright.planning.bytescale import Cost, MicroBatch, Plan, make_plan


class ByteScale(PieceContext):
    """``capacity``: tokens of a micro-batch on a rank; None: what each of the ranks would have of the rows of a
    micro-batch. ``group``, ``keep``: see :class:`PieceContext`."""

    def __init__(
        self,
        group: object,
        capacity: int | None = None,
        cost: Cost | None = None,
        keep: bool = True,
    ):
        super().__init__(group, keep)
        self.capacity, self.cost = capacity, cost or Cost()

    def plan_step(self, lengths: Sequence[int], capacity: int) -> Plan:
        """Of all documents of a step."""
        return make_plan(lengths, self.size, capacity, cost=self.cost)

    def micro_batches(self, batch: Batch, rows: int) -> list[Batch]:
        """One ``[1, T']`` of this rank for each step of the plan, and as many on all ranks of the run; longer ones than
        a row lie in several rows. Raises ConfigError where a document does not fit, or ``extras`` are of whole rows."""
        length = batch.tokens.shape[1]
        capacity = self.capacity or math.ceil(min(rows, batch.tokens.shape[0]) * length / self.size)
        lengths, plan = self._planned(batch, capacity)
        mine = {m.step: m for m in plan.of(self.rank)}
        steps = max_over_ranks(plan.steps, batch.tokens.device)
        return [self._taken(batch, lengths, [mine[s]] if s in mine else []) for s in range(steps)]

    def shard(self, batch: Batch) -> Batch:
        """All micro-batches of this rank as one."""
        capacity = self.capacity or math.ceil(batch.tokens.numel() / self.size)
        lengths, plan = self._planned(batch, capacity)
        return self._taken(batch, lengths, plan.of(self.rank))

    def _planned(self, batch: Batch, capacity: int) -> tuple[list[int], Plan]:
        length = batch.tokens.shape[1]
        for name, extra in batch.extras.items():
            if extra.ndim < 2 or extra.shape[1] != length:
                raise ConfigError(
                    f"spreads documents and not rows, and {name!r} has one value a row; use ring, ulysses or flashcp",
                    key="parallel.context",
                    value="bytescale",
                )
        lengths = list(itertools.chain.from_iterable(document_lengths(batch.doc_ids)))
        if max(lengths, default=0) > capacity * self.size:
            raise ConfigError(
                f"holds {capacity * self.size} tokens on the {self.size} ranks together, and a document has "
                f"{max(lengths)}; use at least {math.ceil(max(lengths) / self.size)}",
                key="parallel.context.capacity",
                value=capacity,
            )
        plan = self.plan_step(lengths, capacity)
        self.same_on_all(plan.digest(), batch.tokens.device)
        return lengths, plan

    def _taken(self, batch: Batch, lengths: Sequence[int], micro: Sequence[MicroBatch]) -> Batch:
        """This rank's tokens of ``micro``, in rows no longer than those of ``batch``."""
        starts = [0, *itertools.accumulate(lengths)]  # in the rows laid end to end
        held = {k: Document(k, lengths[k], m.first, m.ranks) for m in micro for k in m.sequences}
        slots, codes = [], []
        for k in sorted(held):
            for span in held[k].chunks(self.rank):
                slots.append(torch.arange(starts[k] + span.start, starts[k] + span.stop))
                codes.append(torch.full((len(span),), encode(held[k])))
        slots.append(torch.tensor([], dtype=torch.int64))
        codes.append(torch.tensor([], dtype=torch.int64))
        tokens = sum(map(len, slots))
        rows = max(1, math.ceil(tokens / batch.tokens.shape[1]))
        shape = rows, max(1, math.ceil(tokens / rows))
        filled = []
        for parts, nothing in ((slots, -1), (codes, PADDING)):
            flat = torch.full((math.prod(shape),), nothing)
            flat[:tokens] = torch.cat(parts)
            filled.append(flat.view(shape))
        return taken(batch, *filled)


@register("context", "bytescale", paper="arXiv:2502.21231", seed_id="B008")
class ByteScaleConfig(ContextConfig):
    """Each document gets just the ranks that it needs; ranks do micro-batches of their own until the step ends."""

    capacity: PositiveInt | None = Field(
        None,
        description="Tokens of a micro-batch on a rank; null: micro_batch_size rows spread over the cp ranks.",
    )
    pair: NonNegativeFloat = Field(
        5.128e-9,
        description="Seconds of a token squared; with the next two for balance, so only their ratio counts. The "
        "defaults are a 7B model's on an A100.",
    )
    token: NonNegativeFloat = Field(1.8396e-4, description="Seconds of a token.")
    micro_batch: NonNegativeFloat = Field(0.0, description="Seconds of a micro-batch, whatever is in it.")
    keep_keys: bool = Field(
        True,
        description="Keep received keys and values for the backward pass; false sends them again: less memory, half as "
        "many bytes more.",
    )

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        check_limits(cp, seq_len)
        if self.capacity is not None and self.capacity * cp < seq_len:
            raise ConfigError(
                f"holds {self.capacity * cp} tokens on {cp} ranks, and a document may have train.seq_len={seq_len}; "
                f"use at least {math.ceil(seq_len / cp)}",
                key="parallel.context.capacity",
                value=self.capacity,
            )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        one_shape(mesh)
        over = cast(DeviceMesh, mesh.submesh("cp"))
        cost = Cost(self.pair, self.token, self.micro_batch)
        return ByteScale(over.get_group(), self.capacity, cost, keep=self.keep_keys)
