"""Matrices and their projections on low-rank subspaces, whatever the layout of the parameter.

A matrix G [m, n] is projected along its shorter side: m >= n from the right, R = G P [m, r] with P [n, r]; else from
the left, R = P^T G [r, n] with P [m, r]. The other side is kept. P is always ``[projected, r]`` with orthonormal
columns (where the method has such), R has the kept side and the rank in the order of G.

Layouts. Of a matrix sharded over the kept side each rank projects its shard, and nothing is sent. Of one sharded over
the projected side each rank adds its share of R (a reduce-scatter along the kept side), steps its slice of the
subspace, and gathers what it needs to go back (an all-gather): 2 r n numbers. Stacks sharded by expert are local. In
all other layouts (fused matrices of which a shard holds pieces, meshes that shard twice) the gradient is gathered.
What belongs to the subspace is sharded along the kept side in each case.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as sharded_zeros

OVERSAMPLING, POWER_STEPS = 8, 2  # of the randomised SVD: spare directions; rounds of products with G G^T
Way = Literal["local", "kept", "projected", "gathered"]


@dataclass(frozen=True)
class Part:
    """One matrix of a parameter, or the stack of equal matrices in it.

    param      the parameter [..., out, in], of which this is a fused part or the whole
    key        appended to the names of the part's state; empty where the parameter has one part
    cut        (dimension, start, length) of a fused part
    shape      of the whole part, [..., m, n]
    rank       of the subspace
    left       whether it is projected from the left
    way        "local": this rank has whole matrices; "kept", "projected": the side that is sharded over the ranks;
               "gathered": the gradient has to be gathered
    mesh_dim   dimension of the mesh over which the subspace is shared out
    """

    param: Tensor
    key: str
    cut: tuple[int, int, int] | None
    shape: torch.Size
    rank: int
    left: bool
    way: Way
    mesh_dim: int = 0

    @functools.cached_property
    def kept(self) -> int:
        """Negative dimension that is not projected; the other one of R has the rank."""
        return -1 if self.left else -2

    @functools.cached_property
    def rank_dim(self) -> int:
        return -2 if self.left else -1

    @functools.cached_property
    def projection_shape(self) -> torch.Size:
        return torch.Size([*self.shape[:-2], self.shape[self.rank_dim], self.rank])

    @functools.cached_property
    def reduced_shape(self) -> torch.Size:
        """Of R."""
        shape = list(self.shape)
        shape[self.rank_dim] = self.rank
        return torch.Size(shape)

    @functools.cached_property
    def projection_placements(self) -> tuple[Placement, ...] | None:
        """None: P is a plain tensor, the same on every rank."""
        if not isinstance(self.param, DTensor) or self.way in ("kept", "gathered"):
            return None
        return self.param.placements if self.way == "local" else self._sharded(len(self.shape) - 2)

    @functools.cached_property
    def reduced_placements(self) -> tuple[Placement, ...] | None:
        if not isinstance(self.param, DTensor):
            return None
        return self.param.placements if self.way == "local" else self._sharded(len(self.shape) + self.kept)

    def _sharded(self, dim: int) -> tuple[Placement, ...]:
        assert isinstance(self.param, DTensor)
        return tuple(Shard(dim) if j == self.mesh_dim else Replicate() for j in range(self.param.device_mesh.ndim))

    def of(self, local: Tensor) -> Tensor:
        """The part in the local tensor of its parameter (the gathered one where it is gathered)."""
        return local.narrow(*self.cut) if self.cut else local

    def project(self, g: Tensor, p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """R of this rank's shard of the gradient and of the projection; the product in ``dtype``, None: theirs."""
        r = product(p.mT, g, dtype) if self.left else product(g, p, dtype)
        if self.way == "projected":
            return self._shard_of(r, Partial())
        return self._shard_of(r, Replicate()) if self.way == "gathered" else r

    def back(self, r: Tensor, p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's shard of the update (the whole where it is gathered) of its shard of the subspace's."""
        if self.way in ("projected", "gathered"):
            r = self.whole_reduced(r)
        return product(p, r, dtype) if self.left else product(r, p.mT, dtype)

    def whole_reduced(self, r: Tensor) -> Tensor:
        """The whole R on every rank, of each rank's shard."""
        if not isinstance(self.param, DTensor) or self.way == "local":
            return r
        shape = self.reduced_shape
        stride = torch.empty(shape, device="meta").stride()
        placements = self.reduced_placements
        mesh = self.param.device_mesh
        return DTensor.from_local(r, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()

    def _shard_of(self, r: Tensor, held: Placement) -> Tensor:
        assert isinstance(self.param, DTensor)
        mesh = self.param.device_mesh
        placements = [held if j == self.mesh_dim else Replicate() for j in range(mesh.ndim)]
        whole = DTensor.from_local(r, mesh, placements, run_check=False)
        return whole.redistribute(placements=self.reduced_placements).to_local()


def product(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``a @ b``, computed in ``dtype`` if given, in the dtype of ``a``."""
    return a @ b if dtype is None or dtype == a.dtype else (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def sum_over_ranks(parts: Sequence[Part], tensors: Sequence[Tensor], ways: Sequence[Way]) -> list[Tensor]:
    """Each of ``tensors`` summed over the ranks that its part is sharded over, if the part's way is one of ``ways``.

    One all-reduce for all of them.
    """
    found = list(tensors)
    groups: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = {}
    for i, part in enumerate(parts):
        if part.way in ways and isinstance(part.param, DTensor):
            groups.setdefault((part.param.device_mesh, part.mesh_dim, tensors[i].dtype), []).append(i)
    for (mesh, dim, _), members in groups.items():
        flat = torch.cat([tensors[i].reshape(-1) for i in members])
        dist.all_reduce(flat, group=mesh.get_group(dim))
        for i, t in zip(members, flat.split([tensors[i].numel() for i in members]), strict=True):
            found[i] = t.view(tensors[i].shape)
    return found


def parts_of(param: Tensor, rank: int | float, splits: Sequence[int] = ()) -> list[Part]:
    """The parts of ``param``; none where it is empty. ValueError for a rank above the shorter side of one."""
    if param.numel() == 0:
        return []
    dim = -1 if splits and splits[0] < 0 else -2
    found = []
    start = 0
    for i, length in enumerate(map(abs, splits or (param.shape[dim],))):
        shape = list(param.shape)
        shape[dim] = length
        left = shape[-2] < shape[-1]
        way, mesh_dim = _way(param, left, bool(splits))
        key, cut = (f"_{i}", (dim, start, length)) if splits else ("", None)
        found.append(Part(param, key, cut, torch.Size(shape), rank_of(rank, shape), left, way, mesh_dim))
        start += length
    return found


def rank_of(rank: int | float, shape: Sequence[int]) -> int:
    """An int as it is; a float in (0, 1] as the share of the shorter side, at least 1.

    Raises ValueError for a rank above that side or below 1.
    """
    side = min(shape[-2:])
    if isinstance(rank, float):
        if not 0 < rank <= 1:
            raise ValueError(f"rank={rank} should be a whole number, or a share of the shorter side in (0, 1]")
        return max(1, round(rank * side))
    if rank < 1:
        raise ValueError(f"rank={rank} should be 1 or more")
    if rank > side:
        raise ValueError(f"rank={rank} is larger than the shorter side ({side}) of a matrix of shape {tuple(shape)}")
    return rank


def _way(param: Tensor, left: bool, fused: bool) -> tuple[Way, int]:
    if not isinstance(param, DTensor):
        return "local", 0
    cut = [j for j, p in enumerate(param.placements) if type(p) is not Replicate]
    shards = [p for p in param.placements if type(p) is Shard]
    if len(shards) == len(cut) and all(p.dim % param.ndim < param.ndim - 2 for p in shards):
        return "local", 0
    if len(cut) > 1 or len(shards) != len(cut) or fused:
        return "gathered", max(cut, key=param.device_mesh.size)
    sharded = shards[0].dim % param.ndim - param.ndim
    return ("projected" if sharded == (-2 if left else -1) else "kept"), cut[0]


def place(value: Tensor, part: Part, placements: Sequence[Placement] | None, dtype: torch.dtype) -> Tensor:
    """``value``, as a checkpoint of any layout may have left it, in the layout and dtype of the part's state."""
    if value.dtype != dtype:
        value = value.to(dtype)
    if placements is None:
        return value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        return share_out(value, part, placements)
    return value if value.placements == tuple(placements) else value.redistribute(placements=placements)


def share_out(whole: Tensor, part: Part, placements: Sequence[Placement] | None) -> Tensor:
    """``whole``, the same on every rank, in ``placements``; nothing is sent."""
    if placements is None:
        return whole
    assert isinstance(part.param, DTensor)
    return distribute_tensor(whole, part.param.device_mesh, placements, src_data_rank=None)


def state_zeros(part: Part, shape: Sequence[int], placements: Sequence[Placement] | None, dtype: torch.dtype) -> Tensor:
    """Zeros of the whole ``shape`` in ``placements``, where the parameter is."""
    if placements is None:
        return torch.zeros(shape, dtype=dtype, device=part.param.device)
    assert isinstance(part.param, DTensor)
    return sharded_zeros(*shape, dtype=dtype, device_mesh=part.param.device_mesh, placements=placements)


def local_of(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def leading_directions(g: Tensor, rank: int, left: bool) -> Tensor:
    """The ``rank`` leading singular vectors of whole matrices ``g [..., m, n]`` on the projected side, [..., k, rank].

    In float32 at least; in the dtype of ``g``. Numbers that are not finite count as 0 here: the update shows them, and
    a step must not end half-way.
    """
    u, _, vh = torch.linalg.svd(_workable(g), full_matrices=False)
    found = u[..., :rank] if left else vh[..., :rank, :].mT
    return found.contiguous().to(g.dtype)


def sketched_directions(g: Tensor, rank: int, left: bool, generator: torch.Generator) -> Tensor:
    """The same, nearly, by a randomised SVD (Halko, Martinsson and Tropp, arXiv:0909.4061): O(m n rank).

    One sketch serves all matrices of a stack, so that a rank which holds some of them draws what another would.
    """
    a = _workable(g)
    a = a if left else a.mT  # [..., k, o], k <= o: its left singular vectors
    width = min(rank + OVERSAMPLING, a.shape[-2])
    sketch = torch.randn(a.shape[-1], width, generator=generator, dtype=a.dtype).to(a.device)
    q, _ = torch.linalg.qr(a @ sketch)
    for _ in range(POWER_STEPS):
        q, _ = torch.linalg.qr(a.mT @ q)
        q, _ = torch.linalg.qr(a @ q)
    u, _, _ = torch.linalg.svd(q.mT @ a, full_matrices=False)
    return (q @ u[..., :rank]).contiguous().to(g.dtype)


def random_directions(g: Tensor, rank: int, left: bool, generator: torch.Generator) -> Tensor:
    """Orthonormal columns that know nothing of the gradient: the control. One draw for all matrices of a stack."""
    side = g.shape[-2] if left else g.shape[-1]
    dtype = torch.promote_types(g.dtype, torch.float32)
    q, _ = torch.linalg.qr(torch.randn(side, rank, generator=generator, dtype=dtype))
    return q.to(g).expand(*g.shape[:-2], side, rank).contiguous()


def _workable(g: Tensor) -> Tensor:
    return torch.nan_to_num(g.to(torch.promote_types(g.dtype, torch.float32)), nan=0.0, posinf=0.0, neginf=0.0)
