"""Rows of matrices by the norms of their gradients: which ones Grass (grass.py) selects, how it keeps them, and how
they are read and written whatever the layout of the matrix (low_rank_parts.py). "Rows" are columns where these are the
shorter side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainwright.core.sliced_gradient import SlicedGradient
from trainwright.optim.low_rank_parts import Part, local_of, share_out, sum_over_ranks

Selection = Literal["top_r", "multinomial", "uniform"]
DIGITS = 3  # an index as this many bytes: torch's load_state_dict casts state to bfloat16, which keeps them


def select_rows(
    norms: Tensor,
    rank: int,
    selection: Selection = "top_r",
    power: float = 1.0,
    replacement: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Indexes (ascending) and factors rho, both ``[..., rank]``, of rows whose gradients have ``norms [..., m]``.

    power  of the norm that the probability of "multinomial" is proportional to
    One draw serves all matrices of a stack. Where all norms are zero, multinomial draws are uniform.
    """
    norms = torch.nan_to_num(norms, nan=0.0, posinf=0.0)
    if selection == "top_r":
        rows = norms.topk(rank).indices.sort(-1).values
        return rows, torch.ones_like(rows, dtype=norms.dtype)
    weights = norms**power if selection == "multinomial" else torch.ones_like(norms)
    total = weights.sum(-1, keepdim=True)
    q = torch.where(total > 0, weights / total, 1 / norms.shape[-1])
    if replacement:
        draws = torch.rand(rank, generator=generator, dtype=q.dtype).to(q.device).expand(*q.shape[:-1], rank)
        ends = q.cumsum(-1)
        rows = torch.searchsorted(ends, draws * ends[..., -1:], right=True).clamp(max=q.shape[-1] - 1).sort(-1).values
        return rows, (rank * q.gather(-1, rows)).rsqrt()
    clocks = -torch.log1p(-torch.rand(q.shape[-1], generator=generator, dtype=q.dtype)).to(q.device) / q
    found = clocks.topk(min(rank + 1, q.shape[-1]), largest=False)
    rows = found.indices[..., :rank].sort(-1).values
    if rank == q.shape[-1]:
        return rows, torch.ones_like(rows, dtype=q.dtype)
    if selection == "uniform":
        return rows, torch.full_like(rows, (q.shape[-1] / rank) ** 0.5, dtype=q.dtype)
    chosen = q.gather(-1, rows)
    odds = -torch.expm1(-chosen * found.values[..., rank:])
    # Rows of zeros are taken only when no others are left, and so always.
    return rows, torch.where(chosen > 0, odds, 1.0).rsqrt()


def carried(old_rows: Tensor, new_rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where each of ``new_rows [..., r]`` of ``count`` was among ``old_rows``: position (0 if nowhere), and whether."""
    places = torch.full((*old_rows.shape[:-1], count), -1, dtype=torch.long, device=old_rows.device)
    positions = torch.arange(old_rows.shape[-1], device=old_rows.device).expand_as(old_rows)
    found = places.scatter_(-1, old_rows, positions).gather(-1, new_rows)
    return found.clamp(min=0), found >= 0


def to_digits(rows: Tensor) -> Tensor:
    """Indexes ``[..., r]`` as bytes ``[..., r, DIGITS]``, the lowest first."""
    return torch.stack([(rows >> (8 * i)) & 255 for i in range(DIGITS)], dim=-1).to(torch.uint8)


def from_digits(digits: Tensor) -> Tensor:
    bytes_ = digits.long()
    return sum((bytes_[..., i] << (8 * i) for i in range(1, DIGITS)), start=bytes_[..., 0])


def take(t: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Rows (dim -2) or columns (-1) ``rows [..., r]`` of matrices ``t [..., m, n]``."""
    if t.ndim == 2:
        return t.index_select(dim, rows)
    index = rows.unsqueeze(-1 if dim == -2 else -2)
    shape = list(t.shape)
    shape[dim] = rows.shape[-1]
    return t.gather(dim, index.expand(shape))


def as_rows(digits: Sequence[Tensor]) -> list[Tensor]:
    """Indexes ``[..., r]`` of several parts, of their digits."""
    if not digits:
        return []
    flat = from_digits(torch.cat([d.reshape(-1, DIGITS) for d in digits]))
    found = flat.split([d.numel() // DIGITS for d in digits])
    return [f.view(d.shape[:-1]) for f, d in zip(found, digits, strict=True)]


@dataclass
class Chosen:
    """The last selections of some parts, as a step needs them.

    sources  the state that they were read from, with its versions
    rows     of each part [..., r]
    ages     of all rows, flat, float64: steps at the selection
    rho      likewise; None: 1
    sizes    rows of each part
    shapes   that a vector of each part has beside R
    dtypes   of each part
    """

    sources: list[tuple[Tensor, int]]
    rows: list[Tensor]
    ages: Tensor
    rho: Tensor | None
    sizes: list[int]
    shapes: list[list[int]]
    dtypes: list[torch.dtype]

    @classmethod
    def of(
        cls,
        parts: list[Part],
        sources: list[Tensor],
        rows: list[Tensor],
        ages: list[Tensor] | None,
        rho: list[Tensor] | None,
    ) -> Chosen:
        flat, flat_rho = (torch.cat([t.flatten().double() for t in v]) if v else None for v in (ages, rho))
        sizes = [r.numel() for r in rows]
        if flat is None:
            flat = torch.zeros(sum(sizes), dtype=torch.float64, device=rows[0].device if rows else None)
        shapes = [list(r.unsqueeze(part.kept).shape) for part, r in zip(parts, rows, strict=True)]
        versions = [(t, t._version) for t in sources]
        return cls(versions, rows, flat, flat_rho, sizes, shapes, [part.param.dtype for part in parts])

    def is_of(self, sources: list[Tensor]) -> bool:
        """Whether it was read from these tensors, and they have not been written to since."""
        return len(sources) == len(self.sources) and all(
            t is kept and t._version == version for t, (kept, version) in zip(sources, self.sources, strict=True)
        )

    def beside(self, flat: Tensor) -> list[Tensor]:
        """A number for each row, ``flat``, as factors of R of each part."""
        pieces: list[Tensor] = []
        cast = {dtype: flat.to(dtype).split(self.sizes) for dtype in dict.fromkeys(self.dtypes)}
        for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True)):
            pieces.append(cast[dtype][i].view(shape))
        return pieces


def is_sharded_by_expert(part: Part) -> bool:
    return isinstance(part.param, DTensor) and part.way == "local"


def by_expert(part: Part, local: Tensor) -> Tensor:
    """A vector of this rank's experts as part of that of all of them."""
    if not is_sharded_by_expert(part):
        return local
    assert isinstance(part.param, DTensor)
    shape = torch.Size([*part.shape[:-2], *local.shape[len(part.shape) - 2 :]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, part.param.device_mesh, part.param.placements, run_check=False, shape=shape, stride=stride
    )


def projected_range(part: Part) -> tuple[int, int]:
    """Size and offset of what this rank holds of the side that is selected from."""
    side = part.shape[part.rank_dim]
    if part.way != "projected" or not isinstance(part.param, DTensor):
        return side, 0
    mesh = part.param.device_mesh
    size, offset = Shard.local_shard_size_and_offset(side, mesh.size(part.mesh_dim), mesh.get_local_rank(part.mesh_dim))
    return int(size), int(offset)


def _local_shape(part: Part) -> list[int]:
    """Of what this rank holds of a part; of the whole where the gradient is gathered."""
    if not isinstance(part.param, DTensor) or part.way == "gathered":
        return list(part.shape)
    shape = list(part.param.to_local().shape)
    if part.cut:
        shape[part.cut[0]] = part.cut[2]
    return shape


def side_norms(parts: list[Part], grads: list[Tensor]) -> list[Tensor]:
    """Norms ``[..., m]`` of the whole rows (or columns), of this rank's shards of the gradients; one all-reduce."""
    squares = []
    for part, g in zip(parts, grads, strict=True):
        dtype = torch.promote_types(g.dtype, torch.float32)
        mine = torch.linalg.vector_norm(g, dim=part.kept, dtype=dtype).square_()
        size, offset = projected_range(part)
        if size < part.shape[part.rank_dim]:
            whole = mine.new_zeros((*mine.shape[:-1], part.shape[part.rank_dim]))
            whole.narrow(-1, offset, size).copy_(mine)
            mine = whole
        squares.append(mine)
    return [s.sqrt() for s in sum_over_ranks(parts, squares, ("kept", "projected"))]


def reduce(part: Part, g: Tensor, rows: Tensor) -> Tensor:
    """This rank's shard of R, without rho: a fresh tensor."""
    if isinstance(g, SlicedGradient):
        if isinstance(g.kept, DTensor):
            return g.kept.redistribute(placements=part.reduced_placements).to_local().clone()
        if isinstance(part.param, DTensor):
            raise ValueError("slices of the ranks' gradients are not added up: call add_up (sliced_gradient.py)")
        return g.kept.clone()
    if part.way == "gathered":
        return local_of(share_out(take(g, rows, part.rank_dim), part, part.reduced_placements))
    if part.way != "projected":
        return take(g, rows, part.rank_dim)
    assert isinstance(part.param, DTensor)
    size, offset = projected_range(part)
    shape = list(g.shape)
    shape[part.rank_dim] = part.rank
    mine = g.new_zeros(shape)
    if size:
        here = (rows >= offset) & (rows < offset + size)
        mine = take(g, (rows - offset).clamp(0, size - 1), part.rank_dim) * here.unsqueeze(part.kept)
    mesh = part.param.device_mesh
    held = [Partial() if j == part.mesh_dim else Replicate() for j in range(mesh.ndim)]
    whole = DTensor.from_local(mine, mesh, held, run_check=False)
    return whole.redistribute(placements=part.reduced_placements).to_local()


def update_of(part: Part, reduced: Tensor, rows: Tensor) -> Tensor:
    """The update of this rank's shard (of the whole where it is gathered): zero but for the selected rows."""
    found = torch.zeros(_local_shape(part), dtype=reduced.dtype, device=reduced.device)
    add_rows(part, found, reduced, rows)
    return found


def add_rows(part: Part, target: Tensor, reduced: Tensor, rows: Tensor) -> None:
    """``target``, this rank's shard, plus ``reduced`` in the selected rows."""
    if part.way in ("projected", "gathered"):
        reduced = part.whole_reduced(reduced)
    if part.way == "projected":
        size, offset = projected_range(part)
        if size == 0:
            return
        rows = rows - offset
        reduced = reduced * ((rows >= 0) & (rows < size)).unsqueeze(part.kept)
        rows = rows.clamp(0, size - 1)
    # On a CPU four times as fast as index_add_ along the columns, and as fast along the rows.
    target.scatter_add_(part.rank_dim, rows.unsqueeze(part.kept).expand(reduced.shape), reduced)


def side_factors(part: Part, rows: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """Factors ``[..., m, 1]`` or ``[..., 1, n]`` of this rank's shard: ``value`` for selected rows, else 1."""
    shape = (*rows.shape[:-1], part.shape[part.rank_dim])
    side = torch.ones(shape, dtype=dtype, device=rows.device)
    side.scatter_(-1, rows, value)
    size, offset = projected_range(part)
    return side.narrow(-1, offset, size).unsqueeze(part.kept)
