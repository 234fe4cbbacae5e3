"""Domino: a micro-batch in slices, so that tensor parallelism adds one slice up while it computes the next.

A layer is two halves, attention and feed-forward, each ``x += allreduce(core(norm(x) A) B) + bias``, with A cut by its
outputs and B by its inputs over the ranks. ``row`` = n cuts the micro-batch into n chunks of rows, independent through
all layers; ``column`` = k cuts the outputs of B into k pieces, each added up during the product of the next.

    forward, n = 2, attention a and feed-forward m, norm and A and core (1), B (2):
        a1(0)  wait m(1) of the layer before  a2(0) start   a1(1)  wait a(0)  a2(1) start
        m1(0)  wait a(1)                      m2(0) start   m1(1)             m2(1) start
        A slot prepares the next one before its own B: it waits for what that needs, adds bias and residual, and norms.
        A sum is under way during the n - 2 slots behind it, and (1) of one more.
    backward: the engine runs ready nodes newest first, so that the order above fixes this one. In (1) of each slot
        dz = dy A'  [b / n, T, D]   start the sum of dz over the ranks   dA = dy' z
        and the identity after the norm waits for it. That was made before B of the slot before, whose backward pass,
        two products, thus goes before the wait as well.

Per step and layer 2 n (k + 1) all-reduces (4 n for k = 1), of as many bytes in all as plain tensor parallelism sends.

Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping, arXiv:2409.15241, and its
code in DeepSpeed (deepspeed/runtime/domino: n = 2, k = 1, GELU and LayerNorm), whose order this is. What differs:

- The residual stream is whole on every rank: ``sequence_parallel`` is false, and set so where a recipe is silent. The
  method is about all-reduces; half of one before a half and half after it would hide as well, but norms would then see
  a part of the tokens, and need sums of their own. Embedding, last norm and loss stay as tensor.py has them.
- Handles belong to one forward call (:class:`Call`); there they lie in one dictionary of the module. Several models,
  micro-batches and a recomputation may be under way at once, and a backward pass over a part of a graph leaves none.
  What is made again for the backward pass leaves out a block's last product and its sum, whose values nobody needs.
- A chunk's dropout is its rows of the noise that the whole micro-batch would draw, so that n changes nothing.
- Between blocks, the first chunk's next norm waits until the next block begins: its weights may not be here before
  (FSDP2). Backward, its sum then hides behind dA alone, one sum in 2 n. :func:`run_halves` over the halves of all
  layers at once does not need that.
- A stage of a pipeline receives the whole stream and hands it on whole: there, the last chunk's last sum has nothing to
  hide behind, forward, and the first chunk's first sum of a gradient, backward. Torch's schedules send what a stage
  returns when it returns, so that slices handed on one by one would leave together all the same.
- q, k, v (gate, up) are matrices of their own, with one sum for their common input.
- A feed-forward that ``tp * column`` does not divide is refused, as told of the method; what is needed is that
  ``column`` divides the width of the stream, which is asked for too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.parallel.config import Degrees, ParallelConfig, TensorConfig, context_method


class Handle(Protocol):
    def wait(self) -> Any: ...


Reduce = Callable[[Tensor], Handle]  # starts to add a contiguous tensor up over the ranks, in place


class Call:
    """One forward call and its backward pass."""

    def __init__(self, reduce: Reduce):
        self.reduce = reduce
        self._seen: set[int] = set()

    def again(self, block: int) -> bool:
        """Whether ``block`` computes for the second time: its activations were dropped and are made again."""
        seen = block in self._seen
        self._seen.add(block)
        return seen


class Sum:
    """A sum over ranks that may be under way, whole or in pieces. Waiting a second time is free."""

    def __init__(self, call: Call):
        self._reduce = call.reduce
        self._handles: list[Handle] = []
        self._pieces: tuple[Tensor, list[Tensor]] | None = None

    def start(self, x: Tensor) -> None:
        self._handles.append(self._reduce(x))

    def start_in_backward(self, x: Tensor) -> None:
        """As ``start``, within a backward pass, which waits at its end at the latest: over a part of a graph it does
        not come by the node that would."""
        self.start(x)
        torch.autograd.Variable._execution_engine.queue_callback(self.wait)  # type: ignore[attr-defined]

    def put_together(self, out: Tensor, pieces: list[Tensor]) -> None:
        """Once they are there, ``pieces [R, D / k]`` go side by side into ``out [R, D]``."""
        self._pieces = out, pieces

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        if self._pieces is not None:
            out, pieces = self._pieces
            torch.cat(pieces, 1, out=out)
            self._pieces = None


class _Arrival(torch.autograd.Function):
    """Identity behind a norm; backward, the gradient that is being added up has to be there."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, total: Sum) -> Tensor:
        ctx.total = total
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.total.wait()
        return grad, None


class _Columns(torch.autograd.Function):
    """``z [b, T, D]`` times several matrices ``[E_i, D]`` that are cut by their outputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, total: Sum, count: int, *params: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = cast(tuple[Tensor, ...], params[:count]), params[count:]
        ctx.total = total
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        ctx.save_for_backward(z, *weights)
        return tuple(
            F.linear(z, w.to(z.dtype), None if b is None else b.to(z.dtype))
            for w, b in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        z, *weights = ctx.saved_tensors
        rows = [g.flatten(0, -2) for g in grads]  # [b T, E_i]
        dz = None
        if ctx.needs_input_grad[0]:
            flat = rows[0] @ weights[0].to(z.dtype)
            for g, w in zip(rows[1:], weights[1:], strict=True):
                flat.addmm_(g, w.to(z.dtype))
            dz = flat.view(z.shape)
            ctx.total.start_in_backward(flat)
        wanted = ctx.needs_input_grad[3:]
        inputs = z.flatten(0, -2)
        dws = [(g.t() @ inputs).to(w.dtype) if ask else None for g, w, ask in zip(rows, weights, wanted, strict=False)]
        dbs = [
            g.sum(0).to(dtype) if ask else None
            for g, dtype, ask in zip(rows, ctx.bias_dtypes, wanted[len(rows) :], strict=True)
        ]
        return dz, None, None, *dws, *dbs


class _Rows(torch.autograd.Function):
    """``h [b, T, E]`` times a matrix ``[D, E]`` that is cut by its inputs; ``[b, T, D]`` is whole when ``total`` is.

    total  None: nobody needs the values, only the node
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, total: Sum | None, pieces: int) -> Tensor:
        ctx.save_for_backward(h, weight)
        width = weight.shape[0]
        out = h.new_empty(*h.shape[:-1], width)
        if total is None:
            return out
        flat = h.flatten(0, -2)
        values = out.data.view(-1, width)  # autograd need not know that they come later: nobody reads or saves them yet
        parts = [flat.new_empty(len(flat), width // pieces) for _ in range(pieces)] if pieces > 1 else [values]
        # Into memory of its own: what selective checkpointing keeps of a product must not be added up in place.
        for part, w in zip(parts, weight.to(h.dtype).chunk(pieces), strict=True):
            torch.mm(flat, w.t(), out=part)
            total.start(part)
        if pieces > 1:
            total.put_together(values, parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        h, weight = ctx.saved_tensors
        g = grad.flatten(0, -2)
        dh = (g @ weight.to(g.dtype)).view(h.shape) if ctx.needs_input_grad[0] else None
        dw = (g.t() @ h.flatten(0, -2)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dh, dw, None, None


class Projections:
    """A chunk's normed input ``[b, T, D]``, to be multiplied by cut matrices, once."""

    def __init__(self, z: Tensor, call: Call):
        self._total = Sum(call)
        self._z: Tensor | None = cast(Tensor, _Arrival.apply(z, self._total))

    def __call__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
        """``z w' + b`` for each of ``weights [E_i, D]`` with ``biases [E_i]``. Raises ValueError the second time: the
        gradient of ``z`` would then be a sum of two, one of which is still being added up."""
        if self._z is None:
            raise ValueError("the input of a half is multiplied once; give all its matrices together")
        z, self._z = self._z, None
        out = _Columns.apply(z, self._total, len(weights), *weights, *(biases or [None] * len(weights)))
        return cast(tuple[Tensor, ...], out)


@dataclass
class Half:
    """Half a layer: ``x += dropout(allreduce(inner(norm(x)) weight') + bias)``.

    norm     of ``[b, T, D]``
    inner    (projections, chunk) -> this rank's ``[b, T, E]``; gives its cut matrices to the projections
    weight   ``[D, E]``, this rank's columns
    bias     ``[D]``, whole on every rank
    dropout  probability; 0 outside training
    """

    norm: Callable[[Tensor], Tensor]
    inner: Callable[[Projections, int], Tensor]
    weight: Tensor
    bias: Tensor | None = None
    dropout: float = 0.0


class Stream(NamedTuple):
    """The residual stream between halves, in chunks of rows. A pytree, so that FSDP2 finds its tensors."""

    call: Call
    chunks: tuple[Tensor, ...]  # [b / n, T, D]
    added: tuple[Tensor, ...] = ()  # what the last half adds to each; whole when its sum is
    sums: tuple[Sum | None, ...] = ()
    bias: Tensor | None = None
    dropout: float = 0.0


class _Boundary:
    """The stream between two halves, made chunk by chunk: what the first adds, and onto what."""

    def __init__(self, sizes: list[int], bias: Tensor | None, dropout: float):
        self.sizes, self.bias, self.dropout = sizes, bias, dropout
        self.chunks: list[Tensor] = []
        self.added: list[Tensor] = []
        self.sums: list[Sum | None] = []
        self._noise: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, stream: Stream) -> _Boundary:
        made = cls([len(c) for c in stream.chunks], stream.bias, stream.dropout)
        made.chunks, made.added, made.sums = list(stream.chunks), list(stream.added), list(stream.sums)
        return made

    def stream(self, call: Call) -> Stream:
        return Stream(call, tuple(self.chunks), tuple(self.added), tuple(self.sums), self.bias, self.dropout)

    def whole(self, c: int) -> Tensor:
        """Chunk ``c`` with what was added, which is waited for. The first chunk draws the noise of all."""
        if not self.added:
            return self.chunks[c]
        total, y = self.sums[c], self.added[c]
        if total is not None:
            total.wait()
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if self.dropout:
            if not self._noise:
                ones = torch.ones(sum(self.sizes), *y.shape[1:], dtype=y.dtype, device=y.device)
                self._noise = F.dropout(ones, self.dropout).split(self.sizes)
            y = y * self._noise[c]
        return self.chunks[c] + y


def split(x: Tensor, chunks: int, reduce: Reduce) -> Stream:
    """A new forward call over ``x [b, T, D]``."""
    return Stream(Call(reduce), x.chunk(chunks) if chunks > 1 else (x,))


def join(stream: Stream) -> Tensor:
    """The whole stream ``[b, T, D]``, once everything has been added to it."""
    boundary = _Boundary.of(stream)
    chunks = [boundary.whole(c) for c in range(len(stream.chunks))]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def run_halves(stream: Stream, halves: Sequence[Half], pieces: int = 1, again: bool = False) -> Stream:
    """``halves`` one after the other on all chunks, in Domino's order; what the last one adds may still be under way.

    pieces  k: of the outputs of each half's ``weight``
    again   a recomputation for the backward pass: the values of the last half are not made
    """
    call, n = stream.call, len(stream.chunks)
    boundaries = [_Boundary.of(stream)]
    boundaries += [_Boundary(boundaries[0].sizes, half.bias, half.dropout) for half in halves]
    slots = [(j, c) for j in range(len(halves)) for c in range(n)]

    def prepare(j: int, c: int) -> Projections:
        x = boundaries[j].whole(c)
        boundaries[j + 1].chunks.append(x)
        return Projections(_in_compute_dtype(halves[j].norm(x)), call)

    ready: Projections | None = None
    for t, (j, c) in enumerate(slots):
        h = halves[j].inner(ready or prepare(j, c), c)
        # One chunk alone needs its own product first.
        ready = prepare(*slots[t + 1]) if n > 1 and t + 1 < len(slots) else None
        total = None if again and j == len(halves) - 1 else Sum(call)
        after = boundaries[j + 1]
        after.added.append(cast(Tensor, _Rows.apply(_in_compute_dtype(h), halves[j].weight, total, pieces)))
        after.sums.append(total)
    return boundaries[-1].stream(call)


def _in_compute_dtype(x: Tensor) -> Tensor:
    """As autocast would have it: it does not look into our products."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@register("tensor", "domino", paper="arXiv:2409.15241", seed_id="B028")
class DominoConfig(TensorConfig):
    """Slices of a micro-batch: one is added up over the tensor-parallel ranks while the next is computed."""

    row: PositiveInt = Field(2, description="Chunks of a micro-batch's rows, which it has to be a multiple of.")
    column: PositiveInt = Field(
        1, description="Pieces of the outputs of attention's o and the feed-forward's down, each added up by itself."
    )

    def check(self, degrees: Degrees, config: ParallelConfig, arch: Any) -> None:
        if degrees.tp == 1:
            raise ConfigError(
                "hides what tensor parallelism communicates, and tp=1; set tp, or leave it out",
                key="parallel.tensor",
                value="domino",
            )
        if config.sequence_parallel:
            raise ConfigError(
                "norms of a part of each row's tokens do not go with parallel.tensor=domino, which adds up whole rows; "
                "set false, or leave it out",
                key="parallel.sequence_parallel",
                value=True,
            )
        schedule = config.pipeline.schedule
        if degrees.pp > 1 and schedule == "zero_bubble":
            raise ConfigError(
                "computes the weights' gradients later, and parallel.tensor=domino hides sums behind them; use 1f1b, "
                "interleaved or gpipe",
                key="parallel.pipeline.schedule",
                value=schedule,
            )
        if degrees.cp > 1 and not context_method(config).by_rows:
            raise ConfigError(
                "deals out the tokens of a whole micro-batch, and parallel.tensor=domino takes its rows chunk by "
                "chunk; use ring, ulysses or usp, or set cp=1",
                key="parallel.context",
                value=context_method(config).name,
            )
        if arch.n_experts:
            raise ConfigError(
                f"cuts a dense feed-forward, and the model has {arch.n_experts} experts; leave it out",
                key="parallel.tensor",
                value="domino",
            )
        for what, size, by in (
            ("the width of the stream", arch.dim, self.column),
            (f"the feed-forward width of a rank (tp={degrees.tp})", arch.ffn_dim // degrees.tp, self.column),
        ):
            if size % by:
                legal = [d for d in range(1, 17) if math.gcd(arch.dim, arch.ffn_dim // degrees.tp) % d == 0]
                raise ConfigError(
                    f"does not divide {what}, {size}; use one of {', '.join(map(str, legal))}",
                    key="parallel.tensor.column",
                    value=self.column,
                )

    def check_recipe(self, config: Any, rows: int, micro_batch_size: int) -> None:
        if config.train.compile:
            raise ConfigError(
                "does not go with parallel.tensor=domino, whose sums start and end outside of a block; set false",
                key="train.compile",
                value=True,
            )
        if config.data.batcher.regroups:
            raise ConfigError(
                "makes micro-batches of any number of rows, and parallel.tensor=domino cuts them; use another batcher",
                key="data.batcher",
                value=config.data.batcher.name,
            )
        sizes = {min(micro_batch_size, rows - i) for i in range(0, rows, micro_batch_size)}
        if config.parallel.pp > 1:
            sizes = {-(-rows // -(-rows // micro_batch_size))}  # a pipeline's are all of one size
        bad = next((b for b in sorted(sizes) if b % self.row), None)
        if bad is not None:
            raise ConfigError(
                f"does not divide a micro-batch of {bad} rows (a rank has {rows} rows a step, in micro-batches of "
                f"{micro_batch_size}); use one of {_divisors(math.gcd(*sizes))}, or change train.micro_batch_size",
                key="parallel.tensor.row",
                value=self.row,
            )

    def apply(self, model: nn.Module, mesh: Any) -> None:
        from trainwright.parallel.domino_decoder import Domino, over, slice_blocks

        slice_blocks(model, Domino(self.row, self.column, over(mesh)))


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
