"""ByteScale's hybrid data parallelism: the ranks are one pool, and each sequence gets just as many as it needs.

The documents of all rows of a step are the sequences (planning/bytescale.py makes the plan). A document of s tokens
lies on ceil(s / C) neighbouring ranks, which exchange its keys (pieces.py); shorter ones are packed up to C tokens on
one rank and send nothing. Ranks compute other micro-batches at the same time and wait only for those that they share a
document with, until the gradients are added up. The loss is divided by the weight of the global batch, so no share
counts more.

A document that is shared is the same micro-batch, by number, of all its ranks; that orders them, and what FSDP2 gathers
in each micro-batch finds all ranks in the same one. Every rank gets as many micro-batches as the longest list has; what
fills up is one token of weight 0. Where experts are kept even by a loss, it is of the micro-batches by that number of
all ranks together, which meet for it in every layer.

In a pipeline every rank of the group is a column of stages. Which document is whose is planned alike in all stages, so
that micro-batches of a column cost alike (PP-balance: each column draws from a bucket), and all are filled up to one
length. Why the exchanges of columns meet under every schedule is said in base.py (``Stages``).

With ``offload`` a document longer than C has a share of its activations in host memory between its forward and its
backward pass (sppo/offload.py), as much as is copied while its layers are computed, and lies on fewer ranks. It comes
back layer by layer, each while the one behind it goes backward. The last layer, whose backward pass begins at once,
stays: with the one before it, it is the two layers that are on the device whole at any time of the backward pass.

Where we differ from the paper (arXiv:2502.21231): keys go straight to the ranks that need them, 3/4 of what a ring
sends, in place of a ring; every rank of the pool reads all rows of a step and keeps its documents.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.batch import Batch
from trainwright.core.distributed import max_over_ranks
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.base import LanguageModel
from trainwright.parallel.context.base import ContextConfig, ContextParallel
from trainwright.parallel.context.flashcp import check_limits
from trainwright.parallel.context.host import on_host
from trainwright.parallel.context.pieces import (
    PADDING,
    Document,
    PieceContext,
    decode,
    document_lengths,
    documents_of_padding,
    encode,
    taken,
)
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.sppo.offload import Ledger, Offload
from trainwright.planning.bytescale import Cost, MicroBatch, Plan, make_plan, offload_ratio, ranks_needed


class ByteScale(PieceContext):
    """``capacity``: tokens of a micro-batch on a rank; None: what each of the ranks would have of the rows of a
    micro-batch. ``offload``: the share of the activations of a document of so many tokens that goes to host memory,
    where it is longer than ``capacity``; None: nothing does. ``group``, ``keep``: see :class:`PieceContext`."""

    together: ClassVar[bool] = False

    def __init__(
        self,
        group: object,
        capacity: int | None = None,
        cost: Cost | None = None,
        keep: bool = True,
        offload: Callable[[int], float] | None = None,
    ):
        super().__init__(group, keep)
        if offload is not None and capacity is None:
            raise ValueError("offload goes by a capacity; give one")
        self.capacity, self.cost, self.offload = capacity, cost or Cost(), offload
        self.ledger: Ledger | None = None  # of the newest micro-batch that was offloaded
        self._stream: Any = None

    def plan_step(self, lengths: Sequence[int], capacity: int) -> Plan:
        """Of all documents of a step; in a pipeline with micro-batches of a rank that cost alike (PP-balance)."""
        ratio = None if self.offload is None else functools.partial(self._ratio, capacity)
        if self.stages is None:
            return make_plan(lengths, self.size, capacity, cost=self.cost, ratio=ratio)
        stages = self.stages.ranks
        return make_plan(lengths, self.size, capacity, cost=self.cost, balance="pp", stages=stages, one_shape=True)

    def _ratio(self, capacity: int, length: int) -> float:
        return 0.0 if self.offload is None or length <= capacity else self.offload(length)

    def saving(self, micro: Batch, module: nn.Module) -> AbstractContextManager[None]:
        """Offloads a share of what the layers of a document longer than ``capacity`` save, and has them fetched again
        ahead of their backward passes. Of compiled layers, and of a ``module`` without layers, all that is saved is one
        chunk, and each tensor is fetched when it is asked for."""
        if self.offload is None or self.capacity is None or not torch.is_grad_enabled():
            return nullcontext()
        codes = [c for c in torch.unique(on_host(micro.doc_ids)).tolist() if c != PADDING]
        ratio = max((self._ratio(self.capacity, decode(c).length) for c in codes), default=0.0)
        if not ratio:
            return nullcontext()
        device = micro.tokens.device
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        layers = _layers(module)
        ratios = [ratio] * (len(layers) - 1) + [0.0] if layers else [ratio]
        moved = Offload(ratios, device, self._stream, ahead=True)
        moved.leave(module.buffers())
        self.ledger = moved.ledger
        return moved.saving_layers(layers) if layers else moved.saving(0)

    def micro_batches(self, batch: Batch, rows: int) -> list[Batch]:
        """One ``[1, T']`` of this rank for each step of the plan, and as many on all ranks of the run; longer ones than
        a row lie in several rows. In a pipeline T' is the largest share that a rank has of any of them. Raises
        ConfigError where a document does not fit, or ``extras`` are of whole rows."""
        length = batch.tokens.shape[1]
        capacity = self.capacity or math.ceil(min(rows, batch.tokens.shape[0]) * length / self.size)
        lengths, plan = self._planned(batch, capacity)
        mine = {m.step: m for m in plan.of(self.rank)}
        steps = max_over_ranks(plan.steps, batch.tokens.device)
        least = 0
        if self.stages is not None:
            steps, least = self.stages.legal(steps), largest_share(plan)
        return [self._taken(batch, lengths, [mine[s]] if s in mine else [], least) for s in range(steps)]

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
        longest = max(lengths, default=0)
        if ranks_needed(longest, capacity, self._ratio(capacity, longest)) > self.size:
            raise ConfigError(
                f"holds {capacity * self.size} tokens on the {self.size} ranks together, and a document has "
                f"{max(lengths)}; use at least {math.ceil(max(lengths) / self.size)}",
                key="parallel.context.capacity",
                value=capacity,
            )
        plan = self.plan_step(lengths, capacity)
        self.same_on_all(plan.digest(), batch.tokens.device)
        return lengths, plan

    def _taken(self, batch: Batch, lengths: Sequence[int], micro: Sequence[MicroBatch], least: int = 0) -> Batch:
        """This rank's tokens of ``micro``, filled up to ``least``, in rows no longer than those of ``batch``."""
        starts = [0, *itertools.accumulate(lengths)]  # in the rows laid end to end
        padding = list(itertools.chain.from_iterable(documents_of_padding(batch.doc_ids)))
        held = {k: Document(k, lengths[k], m.first, m.ranks, padding[k]) for m in micro for k in m.sequences}
        slots, codes = [], []
        for k in sorted(held):
            for span in held[k].chunks(self.rank):
                slots.append(torch.arange(starts[k] + span.start, starts[k] + span.stop))
                codes.append(torch.full((len(span),), encode(held[k])))
        slots.append(torch.tensor([], dtype=torch.int64))
        codes.append(torch.tensor([], dtype=torch.int64))
        tokens = sum(map(len, slots))
        size = max(tokens, least)
        rows = max(1, math.ceil(size / batch.tokens.shape[1]))
        shape = rows, max(1, math.ceil(size / rows))
        filled = []
        for parts, nothing in ((slots, -1), (codes, PADDING)):
            flat = torch.full((math.prod(shape),), nothing)
            flat[:tokens] = torch.cat(parts)
            filled.append(flat.view(shape))
        return taken(batch, *filled)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the model in ``module``; none where it has none, or where they are compiled without our hooks."""
    model = next((m for m in module.modules() if isinstance(m, LanguageModel)), None)
    layers = [] if model is None else list(model.blocks)
    return [] if any(getattr(layer, "_compiled_call_impl", None) is not None for layer in layers) else layers


def largest_share(plan: Plan) -> int:
    """Tokens of the fullest micro-batch on any rank."""
    most = 0
    for m in plan.micro_batches:
        for rank in m.span:
            held = (Document(k, plan.lengths[k], m.first, m.ranks) for k in m.sequences)
            most = max(most, sum(len(c) for document in held for c in document.chunks(rank)))
    return most


class OffloadSection(BaseModel):
    """What decides which share of a long document's activations goes to host memory: as much as is copied while its
    layer is computed, r = min(1, seconds of a layer x bandwidth / bytes)."""

    model_config = ConfigDict(extra="forbid")

    gb_per_s: PositiveFloat = Field(description="10^9 bytes a second from a rank to its host's memory, as measured.")
    bytes_per_token: PositiveFloat = Field(description="Bytes that one layer saves of a token for the backward pass.")
    layers: PositiveInt = Field(description="Layers that pair and token are the seconds of.")


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
    offload: OffloadSection | None = Field(
        None,
        description="Offload activations of documents longer than capacity, which then need fewer ranks; null: none.",
    )
    keep_keys: bool = Field(
        True,
        description="Keep received keys and values for the backward pass; false sends them again: less memory, half as "
        "many bytes more.",
    )

    @model_validator(mode="after")
    def _has_capacity(self) -> Self:
        if self.offload is not None and self.capacity is None:
            raise ConfigError("goes by a capacity; give one", key="offload")
        return self

    def ratio(self, length: int) -> float:
        """Of a document of ``length`` tokens; see :class:`OffloadSection`."""
        given = self.offload
        if given is None or (self.capacity or 0) >= length:
            return 0.0
        return offload_ratio(
            length,
            given.bytes_per_token,
            given.gb_per_s * 1e9,
            lambda s: (self.pair * s * s + self.token * s) / given.layers,
        )

    def check(self, cp: int, n_heads: int, n_kv_heads: int, seq_len: int) -> None:
        check_limits(cp, seq_len)
        if self.capacity is not None and ranks_needed(seq_len, self.capacity, self.ratio(seq_len)) > cp:
            raise ConfigError(
                f"holds {self.capacity * cp} tokens on {cp} ranks, and a document may have train.seq_len={seq_len}; "
                f"use at least {math.ceil(seq_len / cp)}",
                key="parallel.context.capacity",
                value=self.capacity,
            )

    def over(self, group: object) -> ByteScale:
        """Over the ranks of ``group``; None: one process."""
        cost = Cost(self.pair, self.token, self.micro_batch)
        offload = None if self.offload is None else self.ratio
        return ByteScale(group, self.capacity, cost, keep=self.keep_keys, offload=offload)

    def check_pipeline(self) -> None:
        if self.offload is not None:
            raise ConfigError(
                "does not go with pipelines, which hold micro-batches for as long as their schedule says; leave it "
                "out, set parallel.pp=1, or use context: sppo",
                key="parallel.context.offload",
            )

    def build(self, mesh: Mesh, n_heads: int) -> ContextParallel:
        return self.over(cast(DeviceMesh, mesh.submesh("cp")).get_group())
