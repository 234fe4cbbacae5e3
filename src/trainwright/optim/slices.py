"""Sums over whole rows or columns of matrices of which a rank may hold a part, without gathering the matrices.

Methods that normalise rows and columns need of the other ranks only such sums: one float per column of a matrix
sharded by rows, and nothing at all for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.optim.whole import BATCH_BYTES, batches, like

STACKED = 2**18  # numbers in a piece up to which one kernel for many is worth the copy


def local_sums(dim: int, *columns: Sequence[Tensor]) -> list[list[Tensor]]:
    """:meth:`Slices.sums` of stacks ``[n, rows, columns]`` of whole matrices."""
    return [[x.sum(_over(dim), keepdim=True) for x in stacks] for stacks in columns]


def local_norms(dim: int, stacks: Sequence[Tensor]) -> list[Tensor]:
    """:meth:`Slices.norms` of stacks ``[n, rows, columns]`` of whole matrices."""
    if dim == -2:  # torch's norm over a dimension that is not the last one is ten times slower on CPUs
        return [x.square().sum(-2, keepdim=True).sqrt() for x in stacks]
    return [torch.linalg.vector_norm(x, dim=_over(dim), keepdim=True) for x in stacks]


def _over(dim: int) -> tuple[int, ...]:
    return (dim,) if dim else (-2, -1)


@dataclass(frozen=True)
class _Piece:
    """What this rank holds of the matrices ``[n, rows, columns]`` of one fused part of one parameter."""

    dim: int  # along which it is a part: -2 rows, -1 columns
    start: int  # of them in the local tensor
    stop: int
    rows: int  # of the whole matrix
    columns: int


class Slices:
    """The matrices ``[..., out, in]`` of some parameters of one mesh, as stacks of what this rank holds of them.

    splits  rows of each matrix that was fused into one parameter (negative: columns); each is a matrix of its own
    A matrix sharded over more than one mesh dimension, or otherwise than by Shard, is gathered on every rank.
    """

    def __init__(self, params: Sequence[Tensor], splits: Sequence[int] = ()):
        self.params = list(params)
        self._cut = [_cut_by(p) for p in self.params]
        self._pieces = [_pieces(p, cut, splits) for p, cut in zip(self.params, self._cut, strict=True)]
        locals_ = [self._local(p, i) for i, p in enumerate(self.params)]
        flat = [(i, piece) for i, pieces in enumerate(self._pieces) for piece in pieces]
        tensors = [_take(locals_[i], piece) for i, piece in flat]
        self._count = len(tensors)
        self._sizes = [t.shape[0] for t in tensors]
        # Stacks hold pieces of one local shape, one whole shape and one way of being cut; large ones are not copied.
        alike: dict[object, list[int]] = {}
        for k, (i, piece) in enumerate(flat):
            alone = k if tensors[k].numel() > STACKED else None
            alike.setdefault((piece.rows, piece.columns, self._cut[i], alone), []).append(k)
        self._members = [
            [some[j] for j in batch] for some in alike.values() for batch in batches([tensors[k] for k in some])
        ]
        self._cuts = [self._cut[flat[members[0]][0]] for members in self._members]
        #: (rows, columns) of the whole matrices in each stack
        self.shapes = [(flat[m[0]][1].rows, flat[m[0]][1].columns) for m in self._members]

    def _local(self, t: Tensor, i: int) -> Tensor:
        if not isinstance(t, DTensor):
            return t
        return t.full_tensor() if self._cut[i] == "gathered" else t.to_local()

    def stacks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors``, laid out as the parameters, as stacks ``[n, rows here, columns here]`` in at least float32."""
        pieces = [_take(self._local(t, i), piece) for i, t in enumerate(tensors) for piece in self._pieces[i]]
        found = []
        for members in self._members:
            stack = pieces[members[0]] if len(members) == 1 else torch.cat([pieces[k] for k in members])
            found.append(stack.float() if stack.element_size() < 4 else stack)
        return found

    def sums(self, dim: int, *columns: Sequence[Tensor]) -> list[list[Tensor]]:
        """Sums of each of ``columns``, lists of stacks, over whole columns or rows of the matrices, or all of them.

        dim  -2: ``[n, 1, columns]``; -1: ``[n, rows, 1]``; 0: over the whole matrix, ``[n, 1, 1]``
        One all-reduce for all of them, where matrices are cut across ``dim``; nothing is sent where they are not.
        """
        return self._over_ranks(dim, local_sums(dim, *columns))

    def norms(self, dim: int, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Euclidean norms of whole columns, rows or matrices, as in :meth:`sums`."""
        norms = local_norms(dim, stacks)
        if not any(isinstance(cut, _Cut) and cut.dim in _over(dim) for cut in self._cuts):
            return norms
        (squares,) = self._over_ranks(dim, [list(torch._foreach_mul(norms, norms))])
        return list(torch._foreach_sqrt(squares))

    def _over_ranks(self, dim: int, totals: list[list[Tensor]]) -> list[list[Tensor]]:
        by_group: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = {}
        for s, cut in enumerate(self._cuts):
            if isinstance(cut, _Cut) and cut.dim in _over(dim):
                by_group.setdefault((cut.mesh, cut.mesh_dim, totals[0][s].dtype), []).append(s)
        for (mesh, mesh_dim, _), some in by_group.items():
            # By piece, since what stacks together here need not on another rank.
            where = sorted((k, s, at) for s in some for k, at in self._places(s))
            parts = [column[s][at] for _, s, at in where for column in totals]
            flat = torch.cat([x.flatten() for x in parts])
            dist.all_reduce(flat, group=mesh.get_group(mesh_dim))
            for x, total in zip(parts, flat.split([x.numel() for x in parts]), strict=True):
                x.copy_(total.view(x.shape))
        return totals

    def _places(self, s: int) -> list[tuple[int, slice]]:
        found, at = [], 0
        for k in self._members[s]:
            found.append((k, slice(at, at + self._sizes[k])))
            at += self._sizes[k]
        return found

    def stack_values(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Per parameter one number for each matrix here, ``[n, parts]``, as one ``[n, 1, 1]`` per stack."""
        columns = [v[:, j] for v in values for j in range(v.shape[1])]
        return [torch.cat([columns[k] for k in members])[:, None, None] for members in self._members]

    def join_values(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`stack_values`."""
        columns: list[Tensor] = [torch.empty(0)] * self._count
        for members, stack in zip(self._members, stacks, strict=True):
            for k, t in zip(members, stack.flatten().split([self._sizes[k] for k in members]), strict=True):
                columns[k] = t
        left = iter(columns)
        return [torch.stack([next(left) for _ in pieces], dim=1) for pieces in self._pieces]

    def join(self, stacks: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The inverse of :meth:`stacks`: tensors laid out as the parameters, of their dtype or of ``dtype``."""
        pieces: list[Tensor] = [torch.empty(0)] * self._count
        for members, stack in zip(self._members, stacks, strict=True):
            for k, t in zip(members, stack.split([self._sizes[k] for k in members]), strict=True):
                pieces[k] = t
        found, k = [], 0
        for i, p in enumerate(self.params):
            count = len(self._pieces[i])
            mine = pieces[k : k + count]
            k += count
            whole = mine[0] if count == 1 else torch.cat(mine, dim=self._pieces[i][0].dim)
            if not isinstance(p, DTensor):
                found.append(whole.reshape(p.shape).to(dtype or p.dtype))
            elif self._cut[i] == "gathered":
                found.append(like(whole.reshape(p.shape).to(dtype or p.dtype), p))
            else:
                local = whole.reshape(p.to_local().shape).to(dtype or p.dtype)
                found.append(
                    DTensor.from_local(
                        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                    )
                )
        return found


@dataclass(frozen=True)
class _Cut:
    """Matrices cut across ``dim`` (-2: by rows, -1: by columns) over one dimension of a mesh."""

    dim: int
    mesh: DeviceMesh
    mesh_dim: int


def _cut_by(t: Tensor) -> _Cut | str | None:
    """None: this rank holds whole matrices; "gathered": the layout is a mixed one."""
    if not isinstance(t, DTensor):
        return None
    cuts = []
    for j, p in enumerate(t.placements):
        if type(p) is Replicate or (type(p) is Shard and p.dim % t.ndim < t.ndim - 2):
            continue
        if type(p) is not Shard:
            return "gathered"
        cuts.append(_Cut(p.dim % t.ndim - t.ndim, t.device_mesh, j))
    return None if not cuts else cuts[0] if len(cuts) == 1 else "gathered"


def _pieces(t: Tensor, cut: _Cut | str | None, splits: Sequence[int]) -> list[_Piece]:
    dim = -1 if splits and splits[0] < 0 else -2
    whole = list(t.shape[-2:])
    size, offset = whole[dim], 0
    if isinstance(cut, _Cut) and cut.dim == dim:
        ranks, rank = cut.mesh.size(cut.mesh_dim), cut.mesh.get_local_rank(cut.mesh_dim)
        size, offset = cast(tuple[int, int], Shard.local_shard_size_and_offset(whole[dim], ranks, rank))
    found, at = [], 0
    for part in [abs(n) for n in splits] or [whole[dim]]:
        start = min(max(at - offset, 0), size)
        stop = min(max(at + part - offset, 0), size)
        whole[dim] = part
        found.append(_Piece(dim, start, stop, *whole))
        at += part
    return found


def _take(local: Tensor, piece: _Piece) -> Tensor:
    part = local.narrow(piece.dim, piece.start, piece.stop - piece.start)
    return part.reshape(part.shape[:-2].numel(), *part.shape[-2:])


def rounds(params: Sequence[Tensor]) -> list[list[int]]:
    """Indexes of ``params`` in portions of about BATCH_BYTES per rank, the same on every rank."""
    found: list[list[int]] = []
    held = 0
    for i, p in enumerate(params):
        size = p.numel() * p.element_size() // (p.device_mesh.size() if isinstance(p, DTensor) else 1)
        if not found or held + size > BATCH_BYTES:
            found.append([])
            held = 0
        found[-1].append(i)
        held += size
    return found
