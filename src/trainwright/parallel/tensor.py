"""Tensor parallelism: each rank holds some heads, some columns of the feed-forward and some of the vocabulary.

Megatron-LM (arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198), over torch's DTensor:

- q, k, v, gate, up and the head are cut by rows of their weights (a rank's heads, its part of the hidden layer, its
  part of the vocabulary), o and down by columns, so that a block needs one collective before and one after each half.
- With ``sequence_parallel`` the residual stream between them holds 1 / tp of each row's tokens: an all-gather before,
  a reduce-scatter after. Norms work on what is here; their gradients are summed over the ranks, in training once a
  step (:func:`summed_once`). Without it the stream is whole on every rank, and each half ends with an all-reduce.
- Under autocast the stream is cast before it is gathered: what it goes into computes in that type anyway.
- The embedding is cut by vocabulary. The loss is made of the logits as they lie (objectives/vocab_shard.py).
- An early exit is a small model's end: its norm is whole, its feed-forward and an unembedding of its own are cut as the
  others are.
- Experts stay whole and get the tokens that are here (``sequence_parallel`` only); parallel.ep spreads them.

Weights are DTensors, so optimizers, clipping and checkpoints treat them as any sharded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.core.distributed import all_gather_single, local_tensor, reduce_scatter_single
from trainwright.core.errors import ConfigError
from trainwright.models.decoder import Decoder, RMSNorm
from trainwright.models.moe import MoE
from trainwright.parallel.comm import sums

_TOGETHER = 2**20  # numbers of a gradient that is summed together with others


class _Gathered(torch.autograd.Function):
    """``[B, T / n, D]`` of each rank -> ``[B, T, D]``. Each rank has a summand of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_tokens(grad, ctx.group), None


class _Scattered(torch.autograd.Function):
    """The sum over ranks of ``[B, T, D]``, of which each keeps ``[B, T / n, D]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return scatter_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_tokens(grad, ctx.group), None


def gather_tokens(x: Tensor, group: Any) -> Tensor:
    """``[B, T / n, ...]`` of each rank, in rank order -> ``[B, T, ...]``."""
    n = dist.get_world_size(group)
    out = x.new_empty(n * x.shape[0], *x.shape[1:])
    all_gather_single(out, x.contiguous(), group)
    return out.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)


def scatter_tokens(x: Tensor, group: Any) -> Tensor:
    """This rank's ``[B, T / n, ...]`` of the sum over ranks of ``x [B, T, ...]``."""
    n = dist.get_world_size(group)
    pieces = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()  # [n, B, T / n, ...]
    out = torch.empty_like(pieces[0])
    reduce_scatter_single(out, pieces.flatten(0, 1), group)
    return out


class TensorParallel:
    """How the ranks of one tensor-parallel group pass a row's tokens to and fro."""

    def __init__(self, mesh: DeviceMesh, sequence: bool):
        self.mesh, self.sequence = mesh, sequence
        self.group = mesh.get_group()
        self.length = 0  # of the rows of this forward pass; the stream is padded up to a multiple of the ranks
        self.later = False  # gradients of what is held whole are summed by summed_once, not in the backward pass

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream -> whole rows, the input of cut layers."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        if not self.sequence:
            return sums.shared(x, self.group)
        return cast(Tensor, _Gathered.apply(x, self.group))[:, : self.length]

    def leave(self, x: Tensor) -> Tensor:
        """Summands of whole rows -> the residual stream."""
        if not self.sequence:
            return sums.total(x, self.group)
        missing = -self.length % self.mesh.size()
        return cast(Tensor, _Scattered.apply(nn.functional.pad(x, (0, 0, 0, missing)) if missing else x, self.group))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of what each made of its own tokens."""
        return sums.total(x, self.group)

    def whole(self, weight: Tensor) -> Tensor:
        """A weight that the ranks hold whole and use on their part of the tokens, or of the heads."""
        local = _local(weight)
        return local if self.later else sums.shared(local, self.group)


@contextmanager
def summed_once(model: nn.Module) -> Iterator[None]:
    """Around the forward and backward passes of one gradient: what the ranks hold whole is summed over them at the end,
    in one all-reduce, and not in each backward pass. Collective; nothing where ``model`` is not cut.

    Gradients that are there before are sums already: then each backward pass sums its own.
    """
    modules = [m for m in model.modules() if isinstance(getattr(m, "_tp", None), TensorParallel)]
    if not modules or any(p.grad is not None for p in _held_whole(modules)):
        yield
        return
    tp: TensorParallel = cast(Any, modules[0])._tp
    tp.later = True
    try:
        yield
    finally:
        tp.later = False
    with torch.no_grad():
        _sum([local_tensor(p.grad) for p in _held_whole(modules) if p.grad is not None], tp.group)


def _sum(grads: list[Tensor], group: Any) -> None:
    """In place. Small ones go together; experts are not copied for it."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for g in grads:
        if g.numel() > _TOGETHER and g.is_contiguous():
            dist.all_reduce(g, group=group)
        else:
            small.setdefault(g.dtype, []).append(g)
    for some in small.values():
        flat = torch.cat([g.flatten() for g in some])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([g.numel() for g in some])
        torch._foreach_copy_(some, [piece.view_as(g) for piece, g in zip(pieces, some, strict=True)])


def _held_whole(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters that pass through :meth:`TensorParallel.whole`, in an order that is the same on all ranks."""
    for module in modules:
        names: tuple[str, ...] = getattr(module, "_whole", ())
        for name in names:
            param = getattr(module, name)
            if param is not None and param.requires_grad:
                yield param


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Linear(nn.Linear):
    """A linear layer that multiplies with this rank's part of its weight."""

    _tp: TensorParallel

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _local(self.bias)
        return nn.functional.linear(x, _local(self.weight), bias)


class _RowLinear(nn.Linear):
    """Cut by columns: its output is a summand; the bias is added once, after the sum."""

    _tp: TensorParallel

    @property
    def _whole(self) -> tuple[str, ...]:
        return ("bias",) if self._tp.sequence else ()

    def forward(self, x: Tensor) -> Tensor:
        out = self._tp.leave(nn.functional.linear(x, _local(self.weight)))
        if self.bias is None:
            return out
        return out + (self._tp.whole(self.bias) if self._tp.sequence else _local(self.bias))


class _Norm(RMSNorm):
    """On this rank's tokens or heads."""

    _tp: TensorParallel
    _whole: ClassVar[tuple[str, ...]] = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        from trainwright.models.ops import rms_norm

        return rms_norm(x, self._tp.whole(self.weight), self.eps)


class _WholeNorm(RMSNorm):
    """On whole rows that every rank has."""

    def forward(self, x: Tensor) -> Tensor:
        from trainwright.models.ops import rms_norm

        return rms_norm(x, _local(self.weight), self.eps)


class _Embedding(nn.Embedding):
    """Rows of other ranks give zeros; the sum over ranks has each token's row once."""

    _tp: TensorParallel
    _start: int

    def forward(self, tokens: Tensor) -> Tensor:
        self._tp.length = tokens.shape[1]
        weight = _local(self.weight)
        here = (tokens >= self._start) & (tokens < self._start + weight.shape[0])
        if weight.shape[0] == 0:
            rows = weight.new_zeros(*tokens.shape, weight.shape[1]) + weight.sum()
        else:
            rows = nn.functional.embedding((tokens - self._start).clamp(0, weight.shape[0] - 1), weight)
        return self._tp.leave(rows * here.unsqueeze(-1).to(rows.dtype))


class _WholeLinear(nn.Linear):
    """A small layer that every rank holds whole, on this rank's tokens: the router."""

    _tp: TensorParallel
    _whole: ClassVar[tuple[str, ...]] = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._tp.whole(self.weight))


class _WholeExperts(MoE):
    """Experts that every rank holds whole, on this rank's tokens."""

    _tp: TensorParallel
    _whole: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._tp.whole(self.gate), self._tp.whole(self.up), self._tp.whole(self.down)

    def _there(self, there: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
        """The stream is filled up to a multiple of the ranks, behind the last token."""
        tp = self._tp
        batch, here, _ = shape
        missing = here * tp.mesh.size() - tp.length
        if there is None and not missing:
            return None
        if there is None:
            there = torch.ones(batch, tp.length, dtype=torch.bool, device=device)
        return nn.functional.pad(there, (0, missing)).narrow(1, tp.mesh.get_local_rank() * here, here).flatten()


def _swap(module: nn.Module, cls: type, tp: TensorParallel) -> None:
    module.__class__ = cls
    module._tp = tp  # type: ignore[assignment]


def _cut(module: nn.Module, mesh: DeviceMesh, name: str, placement: Any) -> None:
    param = getattr(module, name)
    if param is None:
        return
    cut = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=param.requires_grad))


def _linear(module: nn.Module, name: str, mesh: DeviceMesh, tp: TensorParallel, columns: bool) -> None:
    layer = getattr(module, name)
    if type(layer) is not nn.Linear:
        raise ConfigError(
            f"cuts plain linear layers, and {name} is a {type(layer).__name__}; leave out the transform that put it "
            "there, or use dp_shard",
            key="parallel.tp",
        )
    _cut(layer, mesh, "weight", Shard(1) if columns else Shard(0))
    _cut(layer, mesh, "bias", Replicate() if columns else Shard(0))
    _swap(layer, _RowLinear if columns else _Linear, tp)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool = True) -> None:
    """Cut a :class:`Decoder` in place over the ranks of ``mesh`` (one dimension).

    Every rank passes the same weights. Raises ConfigError for other models and for layers that are not plain.
    """
    if not isinstance(model, Decoder):
        raise ConfigError("cuts our own decoder alone; use dp_shard for other models", key="parallel.tp")
    tp = TensorParallel(mesh, sequence_parallel)
    arch = model.arch
    if arch.n_experts and not sequence_parallel:
        raise ConfigError(
            "experts take the tokens that a rank has, which needs sequence_parallel=true",
            key="parallel.sequence_parallel",
            value=False,
        )
    tied = model.head is None
    _cut(model.embed, mesh, "weight", Shard(0))
    embed = cast(Any, model.embed)
    embed.__class__ = _Embedding
    embed._tp, embed._start = tp, _offset(embed.weight)
    for block in model.blocks:
        attn: Any = block.attn
        for name in ("q", "k", "v"):
            _linear(attn, name, mesh, tp, columns=False)
        _linear(attn, "o", mesh, tp, columns=True)
        for name in ("q_norm", "k_norm"):
            if getattr(attn, name) is not None:
                _cut(getattr(attn, name), mesh, "weight", Replicate())
                _swap(getattr(attn, name), _Norm, tp)
        for norm in (block.attn_norm, block.mlp_norm):
            _norm(norm, mesh, tp)
        _enter_before(attn, tp)
        mlp: Any = block.mlp
        if isinstance(mlp, MoE):
            _whole_experts(mlp, mesh, tp)
        else:
            _feed_forward(mlp, mesh, tp)
    _norm(model.norm, mesh, tp)
    _enter_behind(model.norm, tp)
    for early in () if model.exits is None else model.exits.values():
        for norm in (early.mlp_norm, early.norm):
            if norm is not None:
                _norm(norm, mesh, tp)
        if early.mlp is not None:
            _feed_forward(early.mlp, mesh, tp)
        if early.head is not None:
            _cut(early.head, mesh, "weight", Shard(0))
        _enter_behind(early, tp)
    if not tied:
        assert model.head is not None
        _cut(model.head, mesh, "weight", Shard(0))


def _enter_before(module: nn.Module, tp: TensorParallel) -> None:
    module.register_forward_pre_hook(lambda m, args: (tp.enter(args[0]), *args[1:]))


def _enter_behind(module: nn.Module, tp: TensorParallel) -> None:
    """Of what goes to a head, which is cut."""
    module.register_forward_hook(lambda m, args, out: tp.enter(out))


def _norm(module: Any, mesh: DeviceMesh, tp: TensorParallel) -> None:
    """Of the stream."""
    _cut(module, mesh, "weight", Replicate())
    _swap(module, _Norm if tp.sequence else _WholeNorm, tp)


def _feed_forward(mlp: nn.Module, mesh: DeviceMesh, tp: TensorParallel) -> None:
    for name in ("gate", "up"):
        _linear(mlp, name, mesh, tp, columns=False)
    _linear(mlp, "down", mesh, tp, columns=True)
    _enter_before(mlp, tp)


def _whole_experts(moe: MoE, mesh: DeviceMesh, tp: TensorParallel) -> None:
    for name in ("gate", "up", "down"):
        _cut(moe, mesh, name, Replicate())
    _cut(moe.router, mesh, "weight", Replicate())
    moe.summed_also(tp.sum)
    _swap(moe.router, _WholeLinear, tp)
    _swap(moe, _WholeExperts, tp)


def _offset(weight: Any) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)[1][0])
