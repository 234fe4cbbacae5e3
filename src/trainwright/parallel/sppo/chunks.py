"""Attention of a decoder that gets its rows chunk by chunk: keys and values of past chunks stay, gradients flow back.

Chunk i of a row attends ``K, V [.., 0:stop_i]``: its own and those of the chunks before it, which a :class:`KeyStore`
holds. Forward 1..n, backward n..1: the backward pass of chunk i adds to

    dK[0:stop_i], dV[0:stop_i] += (d loss_i / d K, d loss_i / d V)

and then hands ``dK, dV [start_i:stop_i]``, by now complete, on to its own projections. No graph of one chunk holds that
of another. Attention is the exact softmax, pair of chunks by pair of chunks, merged by log-sum-exp
(ring_attention.py); pairs without a visible pair of tokens (other documents, beyond the window) cost nothing.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.core.errors import ConfigError
from trainwright.models.attention import attention, plan_attention
from trainwright.parallel.context.ring_attention import Pair, _merge, block_backward, block_forward, wider
from trainwright.parallel.context.unified import _pair


class KeyStore:
    """Keys and values of the rows of one micro-batch, and their gradients, ``[B, Hkv, T, hd]`` per layer.

    bounds   slots at which chunks start, and the end: ``(0, ..., T)``
    doc_ids  of whole rows, ``[B, T]``; None: one document a row
    """

    def __init__(self, bounds: tuple[int, ...], doc_ids: Tensor | None):
        self.bounds = bounds
        self.runs: Tensor | None = None
        if doc_ids is not None:
            # A change of id ends a document even where the id comes back later in the row.
            self.runs = F.pad((doc_ids[:, 1:] != doc_ids[:, :-1]).cumsum(1, dtype=torch.int32), (1, 0))
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self._plans: dict[tuple[int, int], ChunkPlan] = {}
        self._next: dict[int, int] = {}  # layer -> the chunk whose backward pass is due

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    @property
    def bytes(self) -> int:
        """Of keys and values (not of their gradients)."""
        return sum(t.nbytes for both in self.held.values() for t in both)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients, when all layers have them."""
        held = (t for both in self.held.values() for t in both)
        return sum(t.numel() * torch.empty(0, dtype=wider(t.dtype)).element_size() for t in held)

    def stretch(self, chunk: int) -> slice:
        return slice(self.bounds[chunk], self.bounds[chunk + 1])

    def plan(self, chunk: int, window: int) -> ChunkPlan:
        window = 0 if window >= self.bounds[-1] else window
        if (chunk, window) not in self._plans:
            own = range(self.bounds[chunk], self.bounds[chunk + 1])
            found = []
            for start, stop in itertools.pairwise(self.bounds[: chunk + 2]):
                pair = _pair(0, own, 0, range(start, stop), self.runs, window)
                if pair is not None:
                    pair.q, pair.k = slice(0, len(own)), slice(start, stop)
                    found.append(pair)
            self._plans[chunk, window] = ChunkPlan(self, chunk, found)
        return self._plans[chunk, window]

    def write(self, layer: int, chunk: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take ``k, v [B, Hkv, l, hd]`` of a chunk; returns those of whole rows."""
        if layer not in self.held:
            shape = (*k.shape[:2], self.bounds[-1], k.shape[3])
            self.held[layer] = k.new_empty(shape), v.new_empty(shape)
        keys, values = self.held[layer]
        keys[:, :, self.stretch(chunk)] = k
        values[:, :, self.stretch(chunk)] = v
        return keys, values

    def gradient(self, layer: int, chunk: int) -> tuple[Tensor, Tensor]:
        """dK, dV of whole rows, in at least float32; chunks come last to first."""
        due = self._next.get(layer, self.chunks - 1)
        if chunk != due:
            raise RuntimeError(f"the backward pass of chunk {due} of layer {layer} is due, not that of chunk {chunk}")
        self._next[layer] = chunk - 1
        if layer not in self.gradients:
            keys, values = self.held[layer]
            dk, dv = (torch.zeros_like(t, dtype=wider(t.dtype)) for t in (keys, values))
            self.gradients[layer] = dk, dv
        return self.gradients[layer]

    def release(self, layer: int) -> None:
        self.held.pop(layer, None)
        self.gradients.pop(layer, None)


@dataclass
class ChunkPlan:
    """What the queries of ``chunk`` have to look at: pairs of it (``q``: within the chunk) and stretches of the row."""

    store: KeyStore
    chunk: int
    pairs: list[Pair]


class _ChunkAttention(torch.autograd.Function):
    """``q [B, l, H, hd]``, ``k, v [B, l, Hkv, hd]`` of a chunk -> ``[B, l, H, hd]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: ChunkPlan, layer: int) -> Tensor:
        keys, values = plan.store.write(layer, plan.chunk, k.transpose(1, 2), v.transpose(1, 2))
        q = q.transpose(1, 2).contiguous()
        scale = q.shape[-1] ** -0.5
        wide = wider(q.dtype)
        out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
        for pair in plan.pairs:
            part, sums = block_forward(q, keys[:, :, pair.k], values[:, :, pair.k], pair, scale)
            if len(plan.pairs) == 1:
                out, lse = part, sums
            else:
                _merge(out, lse, part, sums)
        out = out.to(q.dtype)
        ctx.plan, ctx.layer, ctx.scale, ctx.dtypes = plan, layer, scale, (k.dtype, v.dtype)
        # Not the keys and values: they are in the store, and stay there for the chunks to come.
        ctx.save_for_backward(q, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, out, lse = ctx.saved_tensors
        plan, layer = ctx.plan, ctx.layer
        store: KeyStore = plan.store
        dk, dv = store.gradient(layer, plan.chunk)
        keys, values = store.held[layer]
        grad, dq = grad.transpose(1, 2).contiguous(), torch.zeros_like(q, dtype=wider(q.dtype))
        for pair in plan.pairs:
            gq, gk, gv = block_backward(grad, q, keys[:, :, pair.k], values[:, :, pair.k], out, lse, pair, ctx.scale)
            dq += gq
            dk[:, :, pair.k] += gk
            dv[:, :, pair.k] += gv
        own = store.stretch(plan.chunk)
        own_k, own_v = (g[:, :, own].transpose(1, 2).to(t) for g, t in zip((dk, dv), ctx.dtypes, strict=True))
        if plan.chunk == 0:
            store.release(layer)
        return dq.to(q.dtype).transpose(1, 2), own_k, own_v, None, None


class ChunkedAttention:
    """In place of a decoder's attention. Outside of a chunk it is the plain one, so that validation sees whole rows.

    chunked = ChunkedAttention()
    chunked.install(decoder)
    chunked.start((0, 512, 1024), doc_ids)           # of whole rows
    for i in range(2):
        chunked.chunk = i
        losses[i] = loss(decoder(tokens[:, a:b], doc_ids=doc_ids[:, a:b]))
    chunked.chunk = None
    for loss in reversed(losses):
        loss.backward()
    """

    def __init__(self) -> None:
        self.store: KeyStore | None = None
        self.chunk: int | None = None  # that goes forward now

    def install(self, decoder: nn.Module) -> None:
        """Raises ConfigError for a model that is not our decoder, whose attention is not known to look back only, and
        where something else has swapped the attention."""
        found = cast(Any, decoder)
        if not hasattr(found, "plan_attention") or not hasattr(found, "rope"):
            raise ConfigError(
                "needs attention that looks back only, as our own decoder's does; load the weights with "
                "model: {name: pretrained}, or leave it out",
                key="parallel.context",
                value="sppo",
            )
        for block in found.blocks:
            if block.attn.attend is not attention:
                raise ConfigError(
                    "goes with dense causal attention, and something else (a transform) has swapped it; leave one out",
                    key="parallel.context",
                    value="sppo",
                )
        found.plan_attention = self.plan
        for block in found.blocks:
            block.attn.attend = functools.partial(self.attend, layer=block.attn.layer)
        found.rope = _WholeRows(found.rope, self)

    def start(self, bounds: tuple[int, ...], doc_ids: Tensor | None) -> KeyStore:
        """For the rows of another micro-batch; those of the last one live on in its graphs."""
        self.store = KeyStore(bounds, doc_ids)
        return self.store

    def plan(self, doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> Any:
        if self.chunk is None:
            return plan_attention(doc_ids, batch, length, window, device)
        store = self.store
        if store is None:
            raise RuntimeError("start() comes before a chunk")
        if doc_ids is None and store.runs is not None:
            raise ConfigError(
                "documents go on over chunks, and the model was not given their ids, so one would see another; pass "
                "doc_ids",
                key="parallel.context",
                value="sppo",
            )
        if doc_ids is not None and store.runs is None:
            raise ConfigError(
                "a chunk has document ids, and the rows were started without any; give start() those of whole rows",
                key="parallel.context",
                value="sppo",
            )
        own = store.stretch(self.chunk)
        if length != own.stop - own.start:
            raise ConfigError(
                f"a chunk of {own.stop - own.start} tokens came as {length}: an objective that changes rows does not "
                "go with it",
                key="parallel.context",
                value="sppo",
            )
        return store.plan(self.chunk, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, *, layer: int) -> Tensor:
        if not isinstance(plan, ChunkPlan):
            return attention(q, k, v, plan)
        return cast(Tensor, _ChunkAttention.apply(q.to(v.dtype), k.to(v.dtype), v, plan, layer))


class _WholeRows:
    """Rotary tables that take a chunk for what it is: a part of its row, also where a scaling depends on the length."""

    def __init__(self, tables: Any, chunked: ChunkedAttention):
        self._tables, self._chunked = tables, chunked

    def __call__(self, positions: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        chunk, store = self._chunked.chunk, self._chunked.store
        if chunk is None or store is None:
            found: tuple[Tensor, Tensor] = self._tables(positions, length, device)
            return found
        cos, sin = self._tables(positions, store.bounds[-1], device)
        if positions is None:
            own = store.stretch(chunk)
            cos, sin = cos[:, own], sin[:, own]
        return cos, sin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)
