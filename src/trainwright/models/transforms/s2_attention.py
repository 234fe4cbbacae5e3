"""S2-Attention in a decoder: attention of most layers sees, head by head, other blocks of the context; some stay dense.

The pattern, its check and its numbers are in models/ops/s2_pattern.py. Weights, their names and the layers that stay
dense are as they were; what a saved model is loaded into has to be given the transform again. Documents stay apart:
blocks are counted from where a document starts, so it sees packed what it would see alone. Generation with a key-value
cache reads the visible blocks alone; the cache itself holds all of them.

CPU: the visible blocks, gathered (models/ops/s2_attention.py). CUDA: FlexAttention with the pattern as its block mask,
or our Triton kernels. Elsewhere: a mask.

S2-Attention, arXiv:2407.17678. Defaults are those of Phi-3-small (arXiv:2404.14219), whose every second layer is dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, register
from trainwright.models.attention import AttentionPlan, _flex_attention
from trainwright.models.base import LanguageModel
from trainwright.models.decoder import Decoder
from trainwright.models.ops.s2_attention import (
    Segment,
    flex_block_mask,
    masked_attention,
    s2_attention,
    segment_table,
    segments_of,
    token_mask,
    whole_rows,
)
from trainwright.models.ops.s2_pattern import Pattern, make_pattern

Kernel = Literal["flex", "triton"]
Planner = Callable[[Tensor | None, int, int, int, torch.device], AttentionPlan]


@dataclass
class S2Plan(AttentionPlan):
    """What the dense layers use, and beside it what the sparse ones do."""

    segments: Tensor | None = None  # CPU: a segment_table
    sparse: Any = None  # CUDA: a BlockMask, or a BlockTable of the Triton kernels


class SparsePlanner:
    """In place of plan_attention, which makes the dense part."""

    def __init__(self, inner: Planner, pattern: Pattern, n_heads: int, kernel: Kernel):
        self.inner, self.pattern, self.n_heads, self.kernel = inner, pattern, n_heads, kernel

    def __call__(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> S2Plan:
        dense = self.inner(doc_ids, batch, length, window, device)
        plan = S2Plan(**{f.name: getattr(dense, f.name) for f in fields(AttentionPlan)})
        if device.type == "cpu":
            plan.segments = segment_table(_segments(dense, batch, length, length))
        elif device.type == "cuda" and self.kernel == "flex":
            plan.sparse = flex_block_mask(self.pattern, self.n_heads, doc_ids, batch, length, device)
        elif device.type == "cuda":
            from trainwright.models.ops._s2_attention_triton import block_table

            found = whole_rows(batch, length, length)
            if doc_ids is not None:
                from trainwright.models.attention import document_starts

                found = segments_of([*document_starts(doc_ids).tolist(), batch * length], length)
            plan.sparse = block_table(self.pattern, found, length, device)
        return plan

    def narrow(self, rank: int, ranks: int) -> SparsePlanner:
        return SparsePlanner(self.inner, self.pattern.narrow(rank, ranks), self.n_heads // ranks, self.kernel)


class SparseAttend:
    """In place of models.attention.attention in a sparse layer; takes plans of SparsePlanner and of a cache."""

    transform = "s2_attention"

    def __init__(self, pattern: Pattern):
        self.pattern = pattern

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        sparse = getattr(plan, "sparse", None)
        if sparse is not None and hasattr(sparse, "mask_mod"):
            x = [t.to(v.dtype).transpose(1, 2) for t in (q, k, v)]
            grouped = q.shape[2] != k.shape[2]
            out = _flex_attention(q.device.type)(*x, block_mask=sparse, enable_gqa=grouped)
            return cast(Tensor, out.transpose(1, 2))
        if sparse is not None:
            from trainwright.models.ops._s2_attention_triton import s2_attention_triton

            return s2_attention_triton(q, k, v, sparse)[0]
        if q.device.type == "cpu":
            segments = getattr(plan, "segments", None)
            if segments is None:
                segments = segment_table(_segments(plan, q.shape[0], k.shape[1], q.shape[1]))
            return s2_attention(q, k, v, self.pattern, segments)[0]
        first = _first_slots(plan, q.shape[0], q.shape[1], q.device)
        return masked_attention(q, k, v, token_mask(self.pattern, first, k.shape[1]))[0]

    def narrow(self, rank: int, ranks: int) -> SparseAttend:
        """For the ``rank``-th of ``ranks`` shares of the heads (tensor parallelism)."""
        return SparseAttend(self.pattern.narrow(rank, ranks))


def _first_slots(plan: AttentionPlan, batch: int, queries: int, device: torch.device) -> Tensor:
    """Where the document of each query starts, ``[B, T]``: the first slot that it sees in a plan without a window."""
    if plan.mask is None:
        return torch.zeros(batch, queries, dtype=torch.int64, device=device)
    return plan.mask.to(torch.uint8).argmax(-1)[:, 0].expand(batch, -1)


def _segments(plan: AttentionPlan, batch: int, slots: int, queries: int) -> list[Segment]:
    """The documents that a plan on the CPU lets the last ``queries`` of ``slots`` slots see."""
    if plan.kind == "segments":
        return segments_of(cast(Tensor, plan.bounds).tolist(), slots)
    if plan.mask is None:
        return whole_rows(batch, slots, queries)
    out: list[Segment] = []
    past = slots - queries
    for row, starts in enumerate(_first_slots(plan, batch, queries, torch.device("cpu")).tolist()):
        first = 0
        for t in range(1, queries + 1):
            if t == queries or starts[t] != starts[first]:
                out.append(Segment(row, 1, starts[first], past + t, past + first))
                first = t
    same = {(s.start, s.stop, s.first) for s in out}
    return [Segment(0, batch, *same.pop())] if len(same) == 1 and len(out) == batch else out


def sparse_flops_per_token(model: Decoder, dense: Callable[[int], float], pattern: Pattern, layers: tuple[int, ...],
                           seq_len: int) -> float:  # fmt: skip
    """FLOPs per token with the pairs that the sparse ``layers`` leave out taken off, as they are counted for dense."""
    arch = model.arch
    pairs = sum(pattern.pairs(seq_len)) / len(pattern.residues) / seq_len
    left_out = sum(arch.attended(i, seq_len) - pairs for i in layers)
    return dense(seq_len) - 12.0 * arch.n_heads * arch.head_dim * left_out


@register(
    "transform",
    "s2_attention",
    paper="arXiv:2407.17678",
    seed_id="B006",
)
class S2AttentionConfig(MethodConfig):
    """Attention over local blocks and every stride-th one, other ones in each head, so that heads cover the context."""

    swaps_attention: ClassVar[bool] = True  # parallel.cp spreads dense attention alone

    block_size: PositiveInt = Field(64, description="Tokens of a block: a power of two, at least 16.")
    local_blocks: int = Field(16, description="Newest blocks that every head sees, its own included.")
    stride: PositiveInt = Field(8, description="A head sees every stride-th block from afar; 1: dense.")
    num_dense_heads: int = Field(0, ge=0, description="Key-value heads, the last ones, that see all.")
    offset: int = Field(0, description="Shifts which head sees which blocks.")
    dense_layers: list[int] | None = Field(
        None, description="Layers that stay dense; null: every second one (1, 3, ...)."
    )
    allow_uncovered: bool = Field(False, description="Take a pattern whose heads together miss part of the context.")
    kernel: Kernel = Field(
        "flex",
        description="On CUDA. flex: torch's, tiles of 128 tokens; triton: ours, tiles are the pattern's blocks, one "
        "host sync per forward pass.",
    )

    def pattern(self, n_heads: int, n_kv_heads: int) -> Pattern:
        """Raises ConfigError for what make_pattern refuses."""
        try:
            return make_pattern(
                n_heads,
                n_kv_heads,
                block_size=self.block_size,
                local_blocks=self.local_blocks,
                stride=self.stride,
                num_dense_heads=self.num_dense_heads,
                offset=self.offset,
                allow_uncovered=self.allow_uncovered,
            )
        except ValueError as error:
            key = next((k for k in ("block_size", "local_blocks", "num_dense_heads") if k in str(error)[:20]), "stride")
            raise ConfigError(f"transforms.s2_attention: {error}", key=key, value=getattr(self, key)) from None

    def sparse_layers(self, n_layers: int) -> tuple[int, ...]:
        dense = range(1, n_layers, 2) if self.dense_layers is None else self.dense_layers
        wrong = [i for i in dense if not 0 <= i < n_layers]
        if wrong:
            raise ConfigError(
                f"names layer {wrong[0]}; the model has layers 0 to {n_layers - 1}",
                key="dense_layers",
                value=self.dense_layers,
            )
        found = tuple(i for i in range(n_layers) if i not in dense)
        if not found:
            raise ConfigError("leaves no sparse layer; name fewer", key="dense_layers", value=self.dense_layers)
        return found

    def apply(self, model: LanguageModel) -> LanguageModel:
        """Swap the attention of the sparse layers of ``model``, a decoder of ours. Raises ConfigError for other models,
        layers with a sliding window, and patterns that are not covered or not legal."""
        if not isinstance(model, Decoder):
            raise ConfigError(
                "transforms.s2_attention is for our own decoder; load the weights with model: {name: pretrained}"
            )
        arch = model.arch
        layers = self.sparse_layers(arch.n_layers)
        windowed = [i for i in layers if arch.window(i)]
        if windowed:
            raise ConfigError(
                f"transforms.s2_attention: layer {windowed[0]} has a sliding window of {arch.window(windowed[0])} "
                f"tokens already; name it here, or set model.sliding_window=0",
                key="dense_layers",
                value=self.dense_layers,
            )
        pattern = self.pattern(arch.n_heads, arch.n_kv_heads)
        model.plan_attention = SparsePlanner(model.plan_attention, pattern, arch.n_heads, self.kernel)
        for i in layers:
            cast(Any, model.blocks[i]).attn.attend = SparseAttend(pattern)
        counted = functools.partial(sparse_flops_per_token, model, model.flops_per_token, pattern, layers)
        setattr(model, "flops_per_token", counted)  # noqa: B010 (mypy: a method)
        return model

    def cache_share(self, n_heads: int, n_kv_heads: int, length: int) -> float:
        """Of the tokens of a cache of ``length``, the share that a sparse layer can still see."""
        cached = self.pattern(n_heads, n_kv_heads).cached_tokens(length)
        return sum(cached) / (len(cached) * math.ceil(length / self.block_size) * self.block_size)
