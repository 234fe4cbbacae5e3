"""Domino (domino.py) in a :class:`Decoder`: its blocks pass the stream on in chunks, with sums still under way."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainwright.core.errors import ConfigError
from trainwright.models.decoder import MLP, Attention, Block, Decoder
from trainwright.models.ops import apply_rope, rms_norm, swiglu
from trainwright.parallel.context.host import chunked
from trainwright.parallel.domino import Half, Projections, Reduce, Stream, join, run_halves, split
from trainwright.parallel.tensor import apply_tensor_parallel


class Domino:
    """How the blocks of one model are sliced: ``row`` chunks of a micro-batch, ``column`` pieces of a product."""

    def __init__(self, row: int, column: int, reduce: Reduce):
        self.row, self.column, self.reduce = row, column, reduce

    def chunks(self, rows: int) -> int:
        """Chunks of ``rows`` rows. A validation may have any number; a training that does not divide is an error."""
        if torch.is_grad_enabled() and rows % self.row:
            raise ConfigError(
                f"cuts a micro-batch into {self.row} chunks, and this one has {rows} rows; use a multiple of these",
                key="parallel.tensor.row",
                value=self.row,
            )
        return math.gcd(rows, self.row)

    def split(self, x: Tensor) -> Stream:
        """A new forward call over the stream ``[b, T, D]``."""
        return split(x, self.chunks(len(x)), self.reduce)


class DominoBlock(Block):
    """A :class:`Block` from one :class:`Stream` to the next. ``plan`` is a list with one attention plan a chunk."""

    _domino: Domino

    def forward(self, x: Any, cos: Tensor, sin: Tensor, plan: Any, cache: Any = None) -> Any:
        if cache is not None:  # generation: keys and values of all rows go into it together
            x, plan = Stream(x.call, (join(x),)), [plan]
        dropout = self.dropout if self.training else 0.0
        attn: Any = self.attn
        halves = [
            Half(
                self.attn_norm,
                _attention(attn, _rows(cos, x), _rows(sin, x), plan, cache),
                _local(attn.o.weight),
                None if attn.o.bias is None else _local(attn.o.bias),
                dropout,
            ),
            Half(
                self.mlp_norm,
                _feed_forward(cast(MLP, self.mlp)),
                _local(cast(MLP, self.mlp).down.weight),
                None,
                dropout,
            ),
        ]
        return run_halves(x, halves, self._domino.column, again=x.call.again(attn.layer))


def _attention(attn: Attention, cos: list[Tensor], sin: list[Tensor], plans: list[Any], cache: Any) -> Any:
    """As :class:`Attention` between its input and its product with ``o``."""
    layers = (attn.q, attn.k, attn.v)
    weights = [_local(m.weight) for m in layers]
    biases = [None if m.bias is None else _local(m.bias) for m in layers]
    # Once for all chunks, so that the sum of their gradients over the ranks is one.
    norms = [None if norm is None else (_whole(norm), norm.eps) for norm in (attn.q_norm, attn.k_norm)]

    def inner(projections: Projections, c: int) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, attn.head_dim)) for y in projections(weights, biases))  # [b / n, T, H, hd]
        q, k = (y if norm is None else rms_norm(y, *norm) for y, norm in zip((q, k), norms, strict=True))
        q, k = apply_rope(q, cos[c], sin[c]), apply_rope(k, cos[c], sin[c])
        if cache is not None:
            k, v = cache.update(attn.layer, k, v, attn.window)
        return attn.attend(q, k, v, plans[c]).flatten(-2)

    return inner


def _feed_forward(mlp: MLP) -> Any:
    weights = [_local(mlp.gate.weight), _local(mlp.up.weight)]

    def inner(projections: Projections, c: int) -> Tensor:
        return swiglu(*projections(weights))

    return inner


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _whole(norm: Any) -> Tensor:
    """The weight of a norm over heads: each rank has some heads, and the gradient is summed over the ranks."""
    tp = getattr(norm, "_tp", None)
    return norm.weight if tp is None else tp.whole(norm.weight)


def _rows(table: Tensor, x: Stream) -> list[Tensor]:
    """``[b or 1, T, hd]`` of each chunk."""
    sizes = [len(c) for c in x.chunks]
    return [table] * len(sizes) if len(table) == 1 else list(table.split(sizes))


def _sliced(cls: type, made: dict[type, type]) -> type:
    """``cls`` with :class:`DominoBlock` in the place of :class:`Block`, below whatever stands over it (activation
    checkpointing)."""
    if cls is Block:
        return DominoBlock
    if cls not in made:
        bases = tuple(_sliced(base, made) if issubclass(base, Block) else base for base in cls.__bases__)
        kept = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
        made[cls] = type(cls.__name__, bases, {k: DominoBlock if v is Block else v for k, v in kept.items()})
    return made[cls]


def slice_blocks(model: Any, domino: Domino) -> None:
    """Make the blocks of a :class:`Decoder`, whose layers may be cut, work on ``domino.row`` chunks. In place.

    Raises ConfigError for experts and early exits, which look at the stream between blocks."""
    if model.arch.n_experts or model.exits is not None:
        what = "experts" if model.arch.n_experts else "early exits"
        raise ConfigError(f"does not go with {what}; leave one out", key="parallel.tensor", value="domino")
    made: dict[type, type] = {}
    for block in model.blocks:
        block.__class__ = _sliced(type(block), made)
        block._domino = domino  # type: ignore[assignment]
    plan = model.plan_attention

    # Also where ranks share out a row's tokens (parallel/context): its attention is that of some rows, n times.
    def plan_chunks(doc_ids: Tensor | None, batch: int, length: int, window: int, device: torch.device) -> list[Any]:
        n = domino.chunks(batch)
        parts = [None] * n if doc_ids is None else chunked(doc_ids, batch // n)
        return [plan(part, batch // n, length, window, device) for part in parts]

    model.plan_attention = plan_chunks
    model.embed.register_forward_hook(lambda module, args, x: domino.split(x))
    model.norm.register_forward_pre_hook(lambda module, args: (join(args[0]), *args[1:]))


def domino_of(block: Any) -> Domino | None:
    """How a block is sliced; None: not."""
    return getattr(block, "_domino", None)


def over(mesh: DeviceMesh) -> Reduce:
    """All-reduces over the ranks of ``mesh`` that do not wait."""
    group = mesh.get_group()

    def start(x: Tensor) -> Any:
        return dist.all_reduce(x, group=group, async_op=True)

    return start


def apply_domino(model: nn.Module, mesh: DeviceMesh, row: int = 2, column: int = 1) -> None:
    """Cut a :class:`Decoder` in place over the ranks of ``mesh`` (one dimension), and slice its micro-batches.

    Every rank passes the same weights. Raises ConfigError for what apply_tensor_parallel refuses, and for experts.
    """
    apply_tensor_parallel(model, mesh, sequence_parallel=False)
    slice_blocks(cast(Decoder, model), Domino(row, column, over(mesh)))
