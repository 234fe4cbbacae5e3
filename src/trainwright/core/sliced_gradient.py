"""Gradients of some rows or columns of a matrix, where the rest is not computed; and who asks for which.

A layer that can compute such gradients calls :func:`offer` on its weight, an optimizer that wants them answers by
:func:`ask`, and neither knows the other. At each forward pass the layer asks :func:`wanted` what the backward pass is
to compute; nothing is agreed on in between, so that a resumed, skipped or rolled-back step needs no word of it.

Several ranks. FSDP2's gather-compute-scatter (``fully_shard`` and ``replicate``) passes over a parameter whose backward
pass gives no gradient. So of a sharded weight, a DTensor, the layer gives none and puts its slice beside
(:func:`accumulate`) until the micro-batches of the step are done; :func:`add_up` then adds the slices of all ranks up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

Slice = tuple[int, Tensor]  # dimension (-2: rows, -1: columns) and indexes [r]
# Keyed by the parameter itself: a copy, or the DTensor that takes its place, is another and gets whole gradients.
_offers: Any = WeakIdKeyDictionary()  # parameter -> what was asked for (None: nothing yet)


def offer(param: Tensor) -> None:
    """Say that sliced gradients of ``param`` [out, in] can be computed."""
    _offers.setdefault(param, None)


def is_offered(param: Tensor) -> bool:
    return param in _offers


def ask(param: Tensor, method: Callable[[Tensor], Slice | None]) -> None:
    """Let ``method(param)``, a bound method, say before each forward pass what is wanted of ``param``; None: all.

    The object that it belongs to is not kept alive; with it the wish ends. The last one to ask is heard.
    """
    if param not in _offers:
        raise ValueError("no layer offers sliced gradients of this parameter")
    _offers[param] = weakref.WeakMethod(method)


def wanted(param: Tensor) -> Slice | None:
    """What the next backward pass has to compute of the gradient of ``param``; None: all of it."""
    reference = _offers.get(param)
    method = None if reference is None else reference()
    return None if method is None else cast("Slice | None", method(param))


class SlicedGradient(Tensor):
    """The gradient of some rows or columns of a matrix: as ``param.grad`` it has the shape of the whole.

    kept     [r, in] or [out, r]; a DTensor once it is that of all ranks (:func:`add_up`)
    indexes  of the rows or columns, [r]; one that comes twice is there twice
    side     -2: rows, -1: columns
    It can be added to its like, scaled, measured (the norm is that of ``kept``, so of a part) and cast. Whatever
    else is tried fails with TypeError: it would need the rest of the gradient.
    """

    kept: Tensor
    indexes: Tensor
    side: int
    # Results are plain tensors, but where said below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, indexes: Tensor, side: int, shape: torch.Size) -> SlicedGradient:
        whole = Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)  # type: ignore[attr-defined]
        whole.kept, whole.indexes, whole.side = values, indexes, side
        return cast(SlicedGradient, whole)

    def like(self, values: Tensor) -> SlicedGradient:
        return SlicedGradient(values, self.indexes, self.side, self.shape)

    def dense(self) -> Tensor:
        """The whole, with zeros elsewhere."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        place = [slice(None), slice(None)]
        place[self.side] = self.indexes  # type: ignore[call-overload]
        whole[tuple(place)] = self.kept
        return whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SlicedGradient({self._part()} of {tuple(self.shape)}, dtype={self.dtype})"

    def _part(self) -> str:
        return f"{len(self.indexes)} {'rows' if self.side == -2 else 'columns'}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _SUMS:
            return _sum(func, *args, **kwargs)
        if func not in _BY_VALUES:
            sliced = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SlicedGradient)]
            raise TypeError(f"{func} needs the whole gradient, and of a parameter there are {sliced[0]._part()} alone")
        inner_args, inner_kwargs = tree_map(_values, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if func in _IN_PLACE:
            return args[0]
        return args[0].like(out) if func in _SAME_KIND else out


def _values(x: Any) -> Any:
    return x.kept if isinstance(x, SlicedGradient) else x


def _sum(func: Any, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """Of two slices alike, or of one and a whole gradient: where the parameter is used in another way too, the result
    is sliced if it was to begin with."""
    if isinstance(a, SlicedGradient):
        other = b.kept if isinstance(b, SlicedGradient) else b.index_select(a.side, a.indexes)
        if func is _ADD_:
            a.kept.add_(other, alpha=alpha)
            return a
        return a.like(torch.add(a.kept, other, alpha=alpha))
    assert isinstance(b, SlicedGradient)
    if func is _ADD_:
        return a.add_(b.dense(), alpha=alpha)
    return b.like(torch.add(a.index_select(b.side, b.indexes), b.kept, alpha=alpha))


def measured(grad: Tensor) -> Tensor:
    """What there is of a gradient, for its norm."""
    return grad.kept if isinstance(grad, SlicedGradient) else grad


def accumulate(param: Tensor, values: Tensor, indexes: Tensor, side: int) -> None:
    """Add a slice of this rank's gradient to ``param.grad``, for a sharded ``param`` (a DTensor)."""
    values = values.to(param.dtype)
    if param.grad is None:
        param.grad = SlicedGradient(values, indexes, side, param.shape)
    elif isinstance(param.grad, SlicedGradient) and not isinstance(param.grad.kept, DTensor):
        param.grad.kept.add_(values)
    else:
        raise RuntimeError("a slice of a gradient meets the whole, or one that was added up over ranks: clear it first")


@torch.no_grad()
def add_up(params: Iterable[Tensor]) -> None:
    """Make the slices of the ranks' gradients of sharded ``params`` that of their mean.

    R [r, in] or [out, r] then lies over the ranks by its other side, as the weight is sharded over these. Per mesh and
    dtype one reduction of all slices together (a reduce-scatter, or an all-reduce of what is replicated): r / m of the
    numbers of whole gradients. Collective: every rank calls it with the same parameters, once a step, after the last
    backward pass and before the gradients are used.
    """
    buckets: dict[Any, list[DTensor]] = {}
    for p in params:
        grad = p.grad
        if isinstance(p, DTensor) and isinstance(grad, SlicedGradient) and not isinstance(grad.kept, DTensor):
            over = _sharded_over(p)
            buckets.setdefault((p.device_mesh, grad.dtype, over), []).append(p)
    for (mesh, _, over), members in buckets.items():
        ranks = 1 if over is None else mesh.size(over)
        grads = [cast(SlicedGradient, p.grad) for p in members]
        pieces = [_by_rank(g.kept, g.side, ranks) for g in grads]
        flat = torch.cat(pieces, dim=1).div_(mesh.size())  # FSDP2 and DDP take the mean too
        summed = DTensor.from_local(flat, mesh, [Partial()] * mesh.ndim, run_check=False)
        wanted: list[Placement] = [Shard(0) if j == over else Replicate() for j in range(mesh.ndim)]
        mine = summed.redistribute(placements=wanted).to_local()[0]
        for p, g, values in zip(members, grads, mine.split([piece.shape[1] for piece in pieces]), strict=True):
            p.grad = g.like(_laid_out(values, g, mesh, over))


def _sharded_over(param: DTensor) -> int | None:
    """The dimension of the mesh that ``param`` is sharded over; None: none."""
    found = [j for j, placement in enumerate(param.placements) if type(placement) is not Replicate]
    if len(found) > 1 or any(type(param.placements[j]) is not Shard for j in found):
        raise ValueError(
            f"slices of a gradient laid out as {param.placements} cannot be added up; leave grass_linear out"
        )
    return found[0] if found else None


def _by_rank(values: Tensor, side: int, ranks: int) -> Tensor:
    """``values``, [r, n] or [m, r], cut along n or m for the ranks: [ranks, numbers], the last padded with zeros."""
    rows = values.mT if side == -2 else values  # what is cut first
    each = -(-rows.shape[0] // ranks)
    if each * ranks > rows.shape[0]:
        rows = torch.cat([rows, rows.new_zeros(each * ranks - rows.shape[0], rows.shape[1])])
    return rows.reshape(ranks, each * rows.shape[1])


def _laid_out(values: Tensor, grad: SlicedGradient, mesh: Any, over: int | None) -> DTensor:
    """This rank's piece of :func:`_by_rank` as a shard of the whole slice."""
    shape = grad.kept.shape
    cut = 1 if grad.side == -2 else 0
    length = shape[cut]
    if over is not None:
        length, _ = Shard.local_shard_size_and_offset(length, mesh.size(over), mesh.get_local_rank(over))
    rows = values.view(-1, shape[1 - cut])[:length]
    local = rows.mT.contiguous() if cut else rows
    placements = [Shard(cut) if j == over else Replicate() for j in range(mesh.ndim)]
    stride = (shape[1], 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


_aten = torch.ops.aten
_ADD_ = _aten.add_.Tensor
_SUMS = {_aten.add.Tensor, _ADD_}
_IN_PLACE = {
    _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.zero_.default,
}  # fmt: skip
_SAME_KIND = {
    _aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.mul.Tensor, _aten.mul.Scalar,
    _aten.div.Tensor, _aten.div.Scalar,
}  # fmt: skip
_BY_VALUES = {
    *_IN_PLACE, *_SAME_KIND, _aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar,
    _aten._foreach_mul_.Scalar, _aten._foreach_mul_.Tensor, _aten._foreach_div_.Scalar, _aten._foreach_div_.Tensor,
    _aten._amp_foreach_non_finite_check_and_unscale_.default,
}  # fmt: skip
