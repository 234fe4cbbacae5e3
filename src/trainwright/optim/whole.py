"""Functions of whole matrices on parameters that may be sharded, stacked (experts) or fused (q, k and v in one).

Orthogonalising, whitening or normalising a shard gives another update than doing it to the matrix. Here each sharded
matrix is sent to one rank, which owns it for this step; the ranks share the matrices out by cost, work at the same
time, and send the results back in shards: two all-to-alls of the matrices' size, and no work done twice. This is the
balanced form of distributed Muon (Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.3, gathers on every
rank that holds a part).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

BATCH_BYTES = 256 * 2**20  # of whole matrices on one rank at a time
CPU_BATCH_BYTES = 2**20  # of a stack on a CPU: a larger product fills the cores by itself, and stacking only copies
Function = Callable[..., Tensor]  # stacks [n, out, in], one per column -> a stack of the same shape


def map_whole(
    fn: Function,
    *columns: Sequence[Tensor],
    splits: Sequence[int] = (),
    divide: bool = True,
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """``fn`` of whole matrices, for parameters of any layout.

    columns  one or more equally long lists of tensors ``[..., out, in]``, of one mesh, entry i of all laid out alike
    fn       gets one stack ``[n, out, in]`` per column, of equal-shaped matrices in one dtype, and gives one such
             stack; it treats each matrix alone and writes to none
    splits   rows of each matrix that was fused into one parameter (negative: columns); each is treated alone
    divide   share sharded matrices out over the ranks; False: every rank computes all of them
    wire     dtype of what is sent (bfloat16 halves the traffic); None: that of the tensors
    Returns tensors laid out and of the dtype as those of the first column.
    """
    count = len(columns[0])
    out: list[Tensor | None] = [None] * count
    local = [i for i in range(count) if _holds_whole_matrices(columns[0][i])]
    shared = [i for i in range(count) if i not in set(local) and divide and _shard_dim(columns[0][i]) is not None]
    rest = sorted(set(range(count)) - set(local) - set(shared))
    if local:
        parts = [[_local(c[i]) for i in local] for c in columns]
        for i, t in zip(local, on_stacks(fn, *parts, splits=splits), strict=True):
            out[i] = _like_local(t, columns[0][i])
    for some in _rounds(columns[0], shared):
        for i, t in zip(some, _divided(fn, [[c[i] for i in some] for c in columns], splits, wire), strict=True):
            out[i] = t
    for some in _rounds(columns[0], rest, ranks=1):
        parts = [[c[i].full_tensor() for i in some] for c in columns]  # type: ignore[attr-defined]
        for i, t in zip(some, on_stacks(fn, *parts, splits=splits), strict=True):
            out[i] = like(t.to(columns[0][i].dtype), columns[0][i])
    return [t for t in out if t is not None]


def on_stacks(fn: Function, *columns: Sequence[Tensor], splits: Sequence[int] = ()) -> list[Tensor]:
    """``fn`` over plain tensors ``[..., out, in]``, with equal-shaped matrices stacked; see :func:`map_whole`."""
    pieces: list[list[Tensor]] = [[] for _ in columns]
    for column, into in zip(columns, pieces, strict=True):
        for t in column:
            into += matrices(t, splits)
    done: list[Tensor] = [torch.empty(0)] * len(pieces[0])
    for members in batches(pieces[0]):
        shape = pieces[0][members[0]].shape
        if shape.numel() == 0:
            for j in members:
                done[j] = torch.zeros_like(pieces[0][j])
            continue
        one = len(members) == 1
        stacks = [c[members[0]] if one else torch.cat([c[j] for j in members]) for c in pieces]
        result = fn(*stacks)
        for j, t in zip(members, result.split([pieces[0][j].shape[0] for j in members]), strict=True):
            done[j] = t
    parts = max(len(splits), 1)
    found = []
    for i, t in enumerate(columns[0]):
        mine = done[i * parts : (i + 1) * parts]
        whole = mine[0] if parts == 1 else torch.cat(mine, dim=split_dim(splits))
        found.append(whole.reshape(t.shape).to(t.dtype))
    return found


def matrices(t: Tensor, splits: Sequence[int] = ()) -> list[Tensor]:
    """The matrices in ``t [..., out, in]`` as stacks ``[n, out, in]``, one for each fused part."""
    flat = t.reshape(-1, *t.shape[-2:]) if t.numel() else t.new_zeros((0, *t.shape[-2:]))
    return list(flat.split([abs(n) for n in splits], dim=split_dim(splits))) if splits else [flat]


def split_dim(splits: Sequence[int]) -> int:
    """The dimension along which matrices are fused."""
    return -1 if splits and splits[0] < 0 else -2


def batches(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indexes of tensors ``[n, out, in]`` of matrices of one shape, dtype and device, in stacks of bounded size."""
    open_: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    size: dict[tuple[torch.Size, torch.dtype, torch.device], int] = {}
    found = []
    for i, t in enumerate(tensors):
        key = (t.shape[-2:], t.dtype, t.device)
        held = t.numel() * t.element_size()
        if key in open_ and size[key] + held > (CPU_BATCH_BYTES if t.device.type == "cpu" else BATCH_BYTES):
            found.append(open_.pop(key))
        if key not in open_:
            open_[key], size[key] = [], 0
        open_[key].append(i)
        size[key] += held
    return found + list(open_.values())


def beside(rows: Tensor, t: Tensor) -> Tensor:
    """Numbers of the rows of ``t`` as factors on it. Of one column, which may be sharded, they take on its layout."""
    if isinstance(rows, DTensor) and isinstance(t, DTensor) and rows.shape == t.shape:
        return rows.redistribute(placements=t.placements)
    return rows


def gather(t: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def like(full: Tensor, target: Tensor) -> Tensor:
    """``full``, the same on every rank, laid out as ``target`` is; nothing is sent."""
    if not isinstance(target, DTensor):
        return full
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _like_local(local: Tensor, target: Tensor) -> Tensor:
    if not isinstance(target, DTensor):
        return local
    return DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def _holds_whole_matrices(t: Tensor) -> bool:
    """Plain tensors, replicated ones, and stacks sharded by expert, over one dimension of the mesh or several."""
    if not isinstance(t, DTensor):
        return True
    return all(
        type(p) is Replicate or (type(p) in (Shard, _StridedShard) and p.dim % t.ndim < t.ndim - 2)  # type: ignore[attr-defined]
        for p in t.placements
    )


def _shard_dim(t: Tensor) -> int | None:
    """The mesh dimension that a matrix is sharded over, if it is the only one; None: the layout is a mixed one."""
    if not isinstance(t, DTensor):
        return None
    sharded = [j for j, p in enumerate(t.placements) if type(p) is not Replicate]
    if len(sharded) != 1 or type(t.placements[sharded[0]]) is not Shard:
        return None
    return sharded[0]


def _rounds(tensors: Sequence[Tensor], members: list[int], ranks: int | None = None) -> list[list[int]]:
    """``members`` in portions of which a rank holds about BATCH_BYTES."""
    found: list[list[int]] = []
    held = 0
    for i in members:
        t = tensors[i]
        size = t.numel() * t.element_size() // (ranks or t.device_mesh.size())  # type: ignore[attr-defined]
        if not found or held + size > BATCH_BYTES:
            found.append([])
            held = 0
        found[-1].append(i)
        held += size
    return found


def owners(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Which rank computes which matrix: the costliest first, each to the rank with the least to do.

    Cost of ``[..., out, in]`` is that of a product with its Gram matrix: out in min(out, in).
    """
    cost = [s.numel() * min(s[-2:]) for s in shapes]
    load = [0] * ranks
    owner = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owner[i] = min(range(ranks), key=lambda r: load[r])
        load[owner[i]] += cost[i]
    return owner


def _divided(
    fn: Function, columns: list[list[Tensor]], splits: Sequence[int], wire: torch.dtype | None
) -> list[Tensor]:
    first = columns[0]
    t0 = first[0]
    assert isinstance(t0, DTensor)
    dim = _shard_dim(t0)
    assert dim is not None
    mesh = t0.device_mesh
    group, ranks, rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
    # Parameters of one mesh may differ in what they are sharded over; go through them by mesh dimension.
    other = [i for i, t in enumerate(first) if _shard_dim(t) != dim]
    if other:
        same = [i for i in range(len(first)) if i not in set(other)]
        found: dict[int, Tensor] = {}
        for some in (same, other):
            done = _divided(fn, [[c[i] for i in some] for c in columns], splits, wire)
            found.update(zip(some, done, strict=True))
        return [found[i] for i in range(len(first))]

    owner = owners([t.shape for t in first], ranks)
    sent_dtype = wire or t0.dtype
    locals_ = [[_local(t) for t in c] for c in columns]
    shard_dims = [t.placements[dim].dim for t in first]  # type: ignore[attr-defined]

    def sizes(i: int) -> list[int]:
        """Length of the shard of each rank of tensor i."""
        length = first[i].shape[shard_dims[i]]
        return [Shard.local_shard_size_and_offset(length, ranks, r)[0] for r in range(ranks)]

    def shard_shape(i: int, r: int) -> list[int]:
        shape = list(first[i].shape)
        shape[shard_dims[i]] = sizes(i)[r]
        return shape

    of = [[i for i in range(len(first)) if owner[i] == r] for r in range(ranks)]
    outgoing = [
        [locals_[c][i].to(sent_dtype).flatten() for i in of[r] for c in range(len(columns))] for r in range(ranks)
    ]
    mine = of[rank]
    lengths = [[torch.Size(shard_shape(i, r)).numel() for i in mine] for r in range(ranks)]
    received = _all_to_all(outgoing, [len(columns) * sum(x) for x in lengths], group, locals_[0][0].device, sent_dtype)

    whole: list[list[list[Tensor]]] = [[[] for _ in mine] for _ in columns]  # column, matrix, shards by rank
    for r, flat in enumerate(received):
        parts = iter(flat.split([n for n in lengths[r] for _ in columns]))
        for k, i in enumerate(mine):
            for c in range(len(columns)):
                whole[c][k].append(next(parts).view(shard_shape(i, r)))
    stacks = [
        [torch.cat(shards, dim=shard_dims[i]).to(c[i].dtype) for i, shards in zip(mine, by_matrix, strict=True)]
        for c, by_matrix in zip(columns, whole, strict=True)
    ]
    done = on_stacks(fn, *stacks, splits=splits) if mine else []
    returning: list[list[Tensor]] = [[] for _ in range(ranks)]
    for i, t in zip(mine, done, strict=True):
        for r, shard in enumerate(t.to(sent_dtype).split(sizes(i), dim=shard_dims[i])):
            returning[r].append(shard.reshape(-1))
    back = [[torch.Size(shard_shape(i, rank)).numel() for i in of[r]] for r in range(ranks)]
    received = _all_to_all(returning, [sum(x) for x in back], group, locals_[0][0].device, sent_dtype)
    results: dict[int, Tensor] = {}
    for r, flat in enumerate(received):
        for i, part in zip(of[r], flat.split(back[r]), strict=True):
            local = part.view(shard_shape(i, rank)).to(first[i].dtype)
            results[i] = _like_local(local, first[i])
    return [results[i] for i in range(len(first))]


def _all_to_all(
    outgoing: list[list[Tensor]],
    incoming: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """What every rank sent to this one, flat."""
    sends = [t for per_rank in outgoing for t in per_rank]
    flat = torch.cat(sends) if sends else torch.empty(0, dtype=dtype, device=device)
    received = torch.empty(sum(incoming), dtype=dtype, device=device)
    dist.all_to_all_single(received, flat, incoming, [sum(t.numel() for t in per) for per in outgoing], group=group)
    return list(received.split(incoming))
