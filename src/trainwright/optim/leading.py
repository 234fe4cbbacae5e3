"""The largest singular value of matrices and its vectors, also where ranks hold parts of the matrices.

By a Krylov space, which needs products with vectors alone: of a sharded matrix nothing but vectors is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.core.distributed import local_tensor
from trainwright.optim.slices import Slices, local_sums
from trainwright.optim.whole import gather, matrices

Sums = Callable[..., list[list[Tensor]]]  # of Slices.sums


def leading_triplets(
    w: Sequence[Tensor], start: Sequence[Tensor], steps: int = 20, sums: Sums = local_sums
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Largest singular value ``[n, 1, 1]`` and vectors ``u [n, out, 1]``, ``v [n, 1, in]`` of stacks ``[n, out, in]``.

    start  where the Krylov space begins, ``[n, 1, in]`` per stack; zeros: at random
    sums   that of a Slices where ranks hold parts of the matrices, of u and of v
    The space has ``steps`` dimensions, or those of the matrix. A matrix of zeros gives zeros.
    """
    fresh = _unit([_gaussian(x) for x in start], sums)  # goes on where the space ends early, too
    (squares,) = sums(-1, [x.square() for x in start])
    q = [torch.where(n > 0, x, f) for n, x, f in zip(squares, _unit(start, sums), fresh, strict=True)]
    return _rayleigh(w, *_krylov(w, q, fresh, steps, sums), sums)


def _krylov(
    w: Sequence[Tensor], q: list[Tensor], fresh: Sequence[Tensor], steps: int, sums: Sums
) -> tuple[list[Tensor], list[Tensor]]:
    """Orthonormal bases ``[n, k, in]`` of span{q, W^T W q, ...} and W times them, ``[n, out, k]``."""
    bases: list[Tensor] = []
    images: list[Tensor] = []
    for j in range(steps):
        bases = list(q) if not bases else [torch.cat(pair, dim=-2) for pair in zip(bases, q, strict=True)]
        (y,) = sums(-1, [x @ v.mT for x, v in zip(w, q, strict=True)])
        images = y if not images else [torch.cat(pair, dim=-1) for pair in zip(images, y, strict=True)]
        if j == steps - 1:
            break
        (z,) = sums(-2, [v.mT @ x for x, v in zip(w, y, strict=True)])
        z = _unit(z, sums)
        r = _without(z, bases, sums)
        (left,) = sums(-1, [x.square() for x in r])
        r = [torch.where(n > 1e-10, x, f) for n, x, f in zip(left, r, fresh, strict=True)]
        r = _without(_unit(r, sums), bases, sums)
        (left,) = sums(-1, [x.square() for x in r])
        q = [torch.where(n > 1e-8, x, 0) for n, x in zip(left, _unit(r, sums), strict=True)]
    return bases, images


def _rayleigh(
    w: Sequence[Tensor], bases: list[Tensor], images: list[Tensor], sums: Sums
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The best of the space: c with the largest |W B^T c|, found by squaring the small Gram matrix, without an SVD."""
    (grams,) = sums(-2, [(y.mT @ y).flatten(1)[:, None] for y in images])
    values, left, right = [], [], []
    for gram, basis, image in zip(grams, bases, images, strict=True):
        k = basis.shape[-2]
        g = gram.reshape(-1, k, k)
        for _ in range(24):  # from 1e-6 apart in the squares on, the larger one alone is left
            g = g / g.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=torch.finfo(g.dtype).tiny)[:, None, None]
            g = g @ g
        column = g.diagonal(dim1=-2, dim2=-1).argmax(-1)[:, None, None].expand(-1, k, 1)
        c = torch.nn.functional.normalize(g.gather(-1, column), dim=-2)
        left.append(image @ c)
        right.append(c.mT @ basis)
    (squares,) = sums(-2, [x.square() for x in left])
    values = [x.sqrt() for x in squares]
    return values, [x / s.clamp(min=torch.finfo(s.dtype).tiny) for x, s in zip(left, values, strict=True)], right


def _without(z: Sequence[Tensor], bases: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    """``z`` without its parts in the bases, taken out twice for rounding."""
    for _ in range(2):
        (parts,) = sums(-1, [b * x for b, x in zip(bases, z, strict=True)])  # [n, k, 1]
        z = [x - c.mT @ b for x, c, b in zip(z, parts, bases, strict=True)]
    return list(z)


def _unit(vectors: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    (squares,) = sums(-1, [v.square() for v in vectors])
    return [v * s.clamp(min=torch.finfo(s.dtype).tiny).rsqrt() for v, s in zip(vectors, squares, strict=True)]


def _gaussian(like: Tensor) -> Tensor:
    """The same for all vectors of a length, so for all ranks that hold parts of one matrix."""
    g = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(0))
    return g.to(like, non_blocking=True).expand_as(like)


@torch.no_grad()
def zero_matrices(params: Sequence[Tensor], splits: Sequence[int] = ()) -> list[int]:
    """Indexes of parameters ``[..., out, in]`` that hold a matrix of zeros. Gathers them and waits for the device."""
    found = []
    for i, p in enumerate(params):
        if p.numel() and not p.is_meta:
            parts = matrices(gather(p.detach()), splits)
            if any(bool((part == 0).flatten(1).all(-1).any()) for part in parts if part.numel()):
                found.append(i)
    return found


class Matrices:
    """The matrices in parameters ``[..., out, in]`` of one mesh, and one vector ``[in]`` of each, to be kept as state.

    splits  sizes of the matrices that were fused into one parameter: rows, or negative for columns
    The vectors of a parameter are ``[..., parts, in]``, those of matrices fused by columns one after the other
    ``[..., 1, in]``; shared out over the ranks as the parameter is.
    """

    def __init__(self, params: Sequence[Tensor], splits: Sequence[int] = ()):
        self.params = list(params)
        self._widths = [-n for n in splits] if splits and splits[0] < 0 else []
        self._parts = 1 if self._widths else max(len(splits), 1)  # to which rows belong
        self._slices = _Slices(self._apart(params), () if self._widths else splits)
        self.sums, self.norms, self.shapes = self._slices.sums, self._slices.norms, self._slices.shapes

    def _apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._widths:
            return list(tensors)
        return [part for t in tensors for part in t.detach().split(self._widths, dim=-1)]

    def stacks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors``, laid out as the parameters, as stacks ``[n, rows here, columns here]`` in at least float32."""
        return self._slices.stacks(self._apart(tensors))

    def join(self, stacks: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The inverse of :meth:`stacks`, of the parameters' dtype or of ``dtype``."""
        parts = self._slices.join(stacks, dtype)
        if not self._widths:
            return parts
        count = len(self._widths)
        found = []
        for i, p in enumerate(self.params):
            whole = torch.cat(parts[i * count : (i + 1) * count], dim=-1)
            if isinstance(p, DTensor) and isinstance(whole, DTensor):  # parts of columns may have been gathered
                whole = whole.redistribute(p.device_mesh, p.placements)
            found.append(whole)
        return found

    def starts(self, held: Sequence[Tensor | None]) -> list[Tensor]:
        """Vectors from :meth:`vectors`, None: zeros, as stacks ``[n, 1, columns here]``."""
        local = [self._local_vectors(p, v) for p, v in zip(self.params, held, strict=True)]
        if self._widths:
            local = [part for v in local for part in v.split(self._widths, dim=-1)]
        return [v if v.element_size() >= 4 else v.float() for v in self._slices.stack_vectors(local)]

    def vectors(self, right: Sequence[Tensor]) -> list[Tensor]:
        """Stacks of ``v`` as state of each parameter, in its dtype."""
        local = self._slices.join_vectors(right)
        if self._widths:
            count = len(self._widths)
            local = [torch.cat(local[i : i + count], dim=-1) for i in range(0, len(local), count)]
        return [self._as_state(v.to(p.dtype), p) for v, p in zip(local, self.params, strict=True)]

    def _gathered(self, p: Tensor) -> bool:
        """Every rank holds the matrices of ``p`` whole, though they are sharded: see Slices."""
        if not isinstance(p, DTensor):
            return False
        stays = (type(x) is Replicate or (type(x) is Shard and x.dim % p.ndim < p.ndim - 2) for x in p.placements)
        cut = [x for x, s in zip(p.placements, stays, strict=True) if not s]
        if any(type(x) is not Shard for x in cut):
            return True
        return len(cut) > 1 or any(self._widths and x.dim % p.ndim == p.ndim - 1 for x in cut)  # type: ignore[attr-defined]

    def _placements(self, p: Tensor) -> list[Shard | Replicate] | None:
        """How the vectors of ``p`` are shared out over the ranks; None: they are not."""
        if not isinstance(p, DTensor) or self._gathered(p):
            return None
        dims = [x.dim % p.ndim if isinstance(x, Shard) else p.ndim - 2 for x in p.placements]
        return None if set(dims) == {p.ndim - 2} else [Replicate() if d == p.ndim - 2 else Shard(d) for d in dims]

    def _local_vectors(self, p: Tensor, held: Tensor | None) -> Tensor:
        """``[n, parts, in]`` of the matrices here."""
        here = p if self._gathered(p) else local_tensor(p)
        shape = (here.shape[:-2].numel(), self._parts, here.shape[-1])
        if held is None:
            return torch.zeros(shape, dtype=p.dtype, device=local_tensor(p).device)
        placements = self._placements(p)
        if placements is None:
            held = gather(held)
        elif not isinstance(held, DTensor) or list(held.placements) != placements:
            # From a checkpoint of another layout.
            mesh = p.device_mesh  # type: ignore[attr-defined]
            held = distribute_tensor(gather(held), mesh, placements, src_data_rank=None)
        return local_tensor(held).reshape(shape)

    def _as_state(self, vectors: Tensor, p: Tensor) -> Tensor:
        lead = (p if self._gathered(p) else local_tensor(p)).shape[:-2]
        local = vectors.reshape(*lead, *vectors.shape[1:])
        if not isinstance(p, DTensor) or (placements := self._placements(p)) is None:
            return local
        shape = torch.Size((*p.shape[:-2], vectors.shape[1], p.shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, p.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class _Slices(Slices):
    """Slices that also know vectors of the length of their matrices' rows."""

    def stack_vectors(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Per parameter ``[n, parts, columns]`` as one ``[n, 1, columns]`` per stack."""
        columns = [v[:, j] for v in values for j in range(v.shape[1])]
        return [torch.cat([columns[k] for k in members])[:, None] for members in self._members]

    def join_vectors(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`stack_vectors`."""
        columns: list[Tensor] = [torch.empty(0)] * self._count
        for members, stack in zip(self._members, stacks, strict=True):
            for k, t in zip(members, stack[:, 0].split([self._sizes[k] for k in members]), strict=True):
                columns[k] = t
        left = iter(columns)
        return [torch.stack([next(left) for _ in pieces], dim=1) for pieces in self._pieces]
