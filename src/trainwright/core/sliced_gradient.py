"""Gradients of some rows or columns of a matrix, where the rest is not computed; and who asks for which.

A layer that can compute such gradients calls :func:`offer` on its weight, an optimizer that wants them answers by
:func:`ask`, and neither knows the other. At each forward pass the layer asks :func:`wanted` what the backward pass is
to compute; nothing is agreed on in between, so that a resumed, skipped or rolled-back step needs no word of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
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

    kept     [r, in] or [out, r]
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
