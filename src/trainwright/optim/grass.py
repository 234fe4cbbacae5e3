"""Grass: Adam on r selected rows (or columns) of each hidden matrix; which ones changes every ``gap`` steps.

Of a matrix with gradient G [m, n] the shorter side is selected from: rows where m < n, else columns (so that a square
matrix sharded by rows needs no communication). With rows, i_1 ... i_r the selection and rho_1 ... rho_r its factors
    every ``gap`` steps:  i, rho = a selection by the norms of the rows of G
    R_k = rho_k G[i_k]  [r, n];  M, V = Adam's moments of R;  N = c M / (sqrt(V) + eps)
    w[i_k] = w[i_k] (1 - lr wd) - lr scale rho_k N_k;  the other rows stay as they are, bit for bit
c = sqrt(1 - b2^a) / (1 - b1^a), a the number of steps that row k has been selected for.
Selections: "top_r", the r rows of largest norm, rho = 1; "multinomial", r draws with probabilities q ~ norm or norm^2,
and "uniform", q = 1 / m: rho = 1 / sqrt(r q), so that the mean of P P^T G is G. Without replacement multinomial draws
are the r smallest of e_j / q_j with e_j ~ Exp(1), and rho = 1 / sqrt(1 - exp(-q t)), t the next smallest, which keeps
the mean (rank conditioning: Cohen and Kaplan, PODC 2007); uniform ones have rho = sqrt(m / r).
Grass: Compute Efficient Low-Memory LLM Training with Structured Sparse Gradients, arXiv:2406.17660.

Where we differ from the paper, whose repository has no code:
- Moments of rows that stay selected are kept (scaled by the change of rho), those of new rows start at zero, each with
  its own bias correction. ``carry=False`` is the paper's reset of all of them.
- Decay acts on selected rows alone: the others are to cost nothing, and a row that is not learned should not fade.
- The gradient that the optimizer gets is a full one, from the usual backward pass, so that clipping by the global norm
  and sums over ranks mean what they always do. With ``transforms: [grass_linear]``, or ``slice_gradients(model)`` in
  your own loop (models/transforms/grass_linear.py), backward passes compute the selected rows alone, but for the first
  step and each new selection; the weights are the same to rounding.

Sharded gradients: the norms are one all-reduced vector of m numbers per matrix and selection, from which all ranks
select the same; R takes a reduce-scatter and the update an all-gather of r n numbers where the shards are of the
selected side, and nothing where they are of the other (low_rank_parts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.core.sliced_gradient import Slice, SlicedGradient, ask, is_offered
from trainwright.optim.low_rank import LowRankConfig, LowRankRule, _gradient, _laid_out
from trainwright.optim.low_rank_parts import Part, local_of, parts_of, place, share_out, sum_over_ranks

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


class Grass(LowRankRule):
    """Grass as a plain optimizer, for matrices ``[..., out, in]``, plain or DTensor.

    rank         rows to select: an int, or a float in (0, 1]: the share of each matrix's shorter side
    subspace     rule of the selected rows: adam, lion or sgd
    gap          steps between selections
    selection    "top_r", "multinomial" or "uniform"; with ``power`` of the norm and ``replacement`` for the draws
    carry        keep the moments of rows that stay selected
    Gradients may be SlicedGradients of the selected rows, see :meth:`slice_of`.
    See LowRankRule for the others. State: moments [..., r, n] (sharded as the matrix), ``rows`` (indexes, see
    to_digits), ``rho`` where it is not 1, ``age`` with carry: steps that each row had at the last selection,
    ``seen`` [..., m]: whether a row was ever selected, ``step`` and ``index`` (int).
    Raises ValueError for a rank above the shorter side of a matrix and for settings out of range.
    """

    # The age of a row counts selections in gaps.
    shapes_state = (*LowRankRule.shapes_state, "gap", "selection", "carry")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        rank: int | float = 0.25,
        scale: float = 0.25,
        subspace: Literal["adam", "lion", "sgd"] = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        gap: int = 200,
        selection: Selection = "top_r",
        power: float = 1.0,
        replacement: bool = True,
        carry: bool = True,
        seed: int = 0,
    ):
        more = {"selection": selection, "power": power, "replacement": replacement, "carry": carry}
        super().__init__(
            params, lr, weight_decay, rank=rank, scale=scale, subspace=subspace, betas=betas, eps=eps, gap=gap,
            seed=seed, more=more,
        )  # fmt: skip

    def step_part(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """As in UpdateRule, but writes to the selected rows alone."""
        parts, rows, inner = self._selected(params, grads, group)
        self._decay(params, group)
        rate = -group["lr"] * group["scale"]
        gathered: dict[Tensor, dict[int, Tensor]] = {}
        for i, (part, r, n) in enumerate(zip(parts, rows, inner, strict=True)):
            if part.way == "gathered":
                gathered.setdefault(part.param, {})[i] = _update(part, n, r)
            else:
                _add_rows(part, part.of(local_of(part.param)), n, r, rate)
        for p, pieces in gathered.items():
            p.add_(_laid_out(p, [parts[i] for i in pieces], list(pieces.values())), alpha=rate)

    def directions(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[float]]:
        parts, rows, inner = self._selected(params, grads, group)
        pieces: dict[Tensor, list[Tensor]] = {p: [] for p in params}
        for part, r, n in zip(parts, rows, inner, strict=True):
            pieces[part.param].append(_update(part, n, r))
        own = {p: [part for part in parts if part.param is p] for p in params}
        return [_laid_out(p, own[p], pieces[p]) for p in params], [group["scale"]] * len(params)

    def _selected(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Part], list[Tensor], list[Tensor]]:
        """Parts, their selected rows and this rank's shards of the rows' updates; moves the state."""
        parts: list[Part] = []
        local: list[Tensor] = []
        for p, g in zip(params, grads, strict=True):
            own = parts_of(p, group["rank"], group["splits"])
            parts += own
            local += [g] if isinstance(g, SlicedGradient) else [part.of(_gradient(p, g, own)) for part in own]
        due = [i for i, part in enumerate(parts) if self._due(part, group)]
        if any(isinstance(local[i], SlicedGradient) for i in due):
            raise ValueError("a selection needs whole gradients, and these are of rows selected before; clear them")
        norms = _side_norms([parts[i] for i in due], [local[i] for i in due])
        for i, n in zip(due, norms, strict=True):
            self._select(parts[i], n, group)
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
        if not parts:
            return [], [], []
        rows = self.rows(parts)
        rho = self._vectors(parts, "rho") if group["selection"] != "top_r" else None
        reduced = [_reduce(part, g, i) for part, g, i in zip(parts, local, rows, strict=True)]
        if rho is not None:
            reduced = list(torch._foreach_mul(reduced, _beside(parts, rho)))
        inner = self._inner(parts, reduced, group)
        if rho is not None:
            inner = list(torch._foreach_mul(inner, _beside(parts, rho)))
        if group["subspace"] == "adam":
            inner = list(torch._foreach_mul(inner, _beside(parts, self._corrections(parts, group))))
        return parts, rows, inner

    def _due(self, part: Part, group: dict[str, Any]) -> bool:
        return bool(self.state[part.param].get("step", 0) % group["gap"] == 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if is_offered(p) and not group["splits"]:
                ask(p, self.slice_of)

    def slice_of(self, param: Tensor) -> Slice | None:
        """What the step at hand takes of the gradient of a matrix; None: the whole, for a selection."""
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        parts = parts_of(param, group["rank"])
        if not parts or param not in self.state or self._due(parts[0], group):
            return None
        return parts[0].rank_dim, self.rows(parts)[0]

    def rows(self, parts: Sequence[Part]) -> list[Tensor]:
        """The selected rows (or columns) of each part, ``[..., r]``; of this rank's experts where these are sharded."""
        digits = self._vectors(parts, "rows", torch.uint8)
        flat = from_digits(torch.cat([d.reshape(-1, DIGITS) for d in digits]))
        found = flat.split([d.numel() // DIGITS for d in digits])
        return [f.view(d.shape[:-1]) for f, d in zip(found, digits, strict=True)]

    def coverage(self) -> Tensor:
        """Share of all rows (and columns) that were selected at least once: small when top_r starves the rest."""
        seen = [local_of(v).float() for s in self.state.values() for k, v in s.items() if k.startswith("seen")]
        return torch.cat([s.flatten() for s in seen]).mean() if seen else torch.zeros(())

    def metrics(self) -> dict[str, Tensor]:
        return {"grass_coverage": self.coverage()}

    # --- decay of selected rows alone ---

    def apply(self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> None:
        self.apply_scaled(params, updates, [1.0] * len(params), group)

    def apply_scaled(
        self, params: list[Tensor], updates: list[Tensor], factors: list[float], group: dict[str, Any]
    ) -> None:
        self._decay(params, group)
        super().apply_scaled(params, updates, factors, {**group, "weight_decay": 0.0})

    def _decay(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            torch._foreach_mul_(params, [self._kept(p, group) for p in params])

    def _kept(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Factors of the decay, laid out as the parameter: 1 for rows that are not selected."""
        own = parts_of(p, group["rank"], group["splits"])
        pieces = []
        for part, rows in zip(own, self.rows(own) if own else [], strict=True):
            piece = torch.ones(_local_shape(part), dtype=p.dtype, device=rows.device)
            value = torch.full_like(rows, 1 - group["lr"] * group["weight_decay"], dtype=p.dtype)
            side = torch.ones((*rows.shape[:-1], part.shape[part.rank_dim]), dtype=p.dtype, device=rows.device)
            side.scatter_(-1, rows, value)
            size, offset = projected_range(part)
            pieces.append(piece.mul_(side.narrow(-1, offset, size).unsqueeze(part.kept)))
        return _laid_out(p, own, pieces)

    # --- selections ---

    def _select(self, part: Part, norms: Tensor, group: dict[str, Any]) -> None:
        """New rows of a part, by the ``norms [..., m]`` of all of them."""
        state = self.state[part.param]
        if "index" not in state:
            everything = [id(p) for q in self.param_groups for p in q["params"]]
            state["index"] = everything.index(id(part.param))
        rows, rho = select_rows(
            norms, part.rank, group["selection"], group["power"], group["replacement"], self._generator(part, group)
        )
        sampled = group["selection"] != "top_r"
        dtype = part.param.dtype
        age = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        if "rows" + part.key not in state:
            seen = torch.zeros_like(norms, dtype=torch.uint8)
        else:
            (seen,) = self._vectors([part], "seen", torch.uint8)
            moments = [k for k in ("exp_avg", "exp_avg_sq") if k + part.key in state]
            if group["carry"]:
                (old,) = self.rows([part])
                at, stays = carried(old, rows, norms.shape[-1])
                (old_age,) = self._vectors([part], "age")
                age = torch.where(stays, old_age.gather(-1, at) + group["gap"], 0)
                change = stays.to(dtype)
                if sampled:
                    (old_rho,) = self._vectors([part], "rho")
                    change = change * (rho / old_rho.gather(-1, at)).to(dtype)
                for key in moments:
                    moment = self.part_state(part, key, part.reduced_shape, part.reduced_placements)
                    factor = change.square() if key == "exp_avg_sq" else change
                    moment.copy_(take(moment, at, part.rank_dim) * factor.unsqueeze(part.kept))
            else:
                for key in moments:
                    self.part_state(part, key, part.reduced_shape, part.reduced_placements).zero_()
        found = {"rows": to_digits(rows), "seen": seen.scatter(-1, rows, 1)}
        found |= {"rho": rho.to(dtype)} if sampled else {}
        found |= {"age": age} if group["carry"] else {}
        for key, value in found.items():
            state[key + part.key] = _by_expert(part, value)

    def _vectors(self, parts: Sequence[Part], key: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """State with an entry per row, of this rank's experts where these are sharded."""
        found = []
        for part in parts:
            state, name = self.state[part.param], key + part.key
            placements = part.param.placements if _sharded_by_expert(part) else None  # type: ignore[attr-defined]
            state[name] = place(state[name], part, placements, dtype or part.param.dtype)
            found.append(local_of(state[name]))
        return found

    def _corrections(self, parts: list[Part], group: dict[str, Any]) -> list[Tensor]:
        """Adam's bias correction by row, ``[..., r]``."""
        since = [(self.state[part.param]["step"] - 1) % group["gap"] + 1 for part in parts]
        if group["carry"]:
            ages = [age.double() for age in self._vectors(parts, "age")]
        else:
            ages = [r.new_zeros(r.shape, dtype=torch.float64) for r in self.rows(parts)]
        flat = torch.cat([(age + n).flatten() for age, n in zip(ages, since, strict=True)])
        factors = (1 - group["betas"][1] ** flat).sqrt_() / (1 - group["betas"][0] ** flat)
        split = factors.split([age.numel() for age in ages])
        return [f.view(age.shape).to(p.param.dtype) for f, age, p in zip(split, ages, parts, strict=True)]


def _sharded_by_expert(part: Part) -> bool:
    return isinstance(part.param, DTensor) and part.way == "local"


def _by_expert(part: Part, local: Tensor) -> Tensor:
    """A vector of this rank's experts as part of that of all of them."""
    if not _sharded_by_expert(part):
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


def _side_norms(parts: list[Part], grads: list[Tensor]) -> list[Tensor]:
    """Norms ``[..., m]`` of the whole rows (or columns), of this rank's shards of the gradients; one all-reduce."""
    squares = []
    for part, g in zip(parts, grads, strict=True):
        mine = g.to(torch.promote_types(g.dtype, torch.float32)).square().sum(part.kept)
        size, offset = projected_range(part)
        if size < part.shape[part.rank_dim]:
            whole = mine.new_zeros((*mine.shape[:-1], part.shape[part.rank_dim]))
            whole.narrow(-1, offset, size).copy_(mine)
            mine = whole
        squares.append(mine)
    return [s.sqrt() for s in sum_over_ranks(parts, squares, ("kept", "projected"))]


def _reduce(part: Part, g: Tensor, rows: Tensor) -> Tensor:
    """This rank's shard of R, without rho."""
    if isinstance(g, SlicedGradient):
        return g.kept
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


def _update(part: Part, reduced: Tensor, rows: Tensor) -> Tensor:
    """The update of this rank's shard (of the whole where it is gathered): zero but for the selected rows."""
    found = torch.zeros(_local_shape(part), dtype=reduced.dtype, device=reduced.device)
    _add_rows(part, found, reduced, rows, 1.0)
    return found


def _add_rows(part: Part, target: Tensor, reduced: Tensor, rows: Tensor, factor: float) -> None:
    """``target``, this rank's shard, plus ``factor`` times ``reduced`` in the selected rows."""
    if part.way in ("projected", "gathered"):
        reduced = part.whole_reduced(reduced)
    size, offset = projected_range(part)
    if size == 0:
        return
    here = rows - offset
    if part.way == "projected":
        inside = (here >= 0) & (here < size)
        reduced = reduced * inside.unsqueeze(part.kept)
        here = here.clamp(0, size - 1)
    if target.ndim == 2:
        target.index_add_(part.rank_dim, here, reduced, alpha=factor)
    else:
        target.scatter_add_(part.rank_dim, here.unsqueeze(part.kept).expand(reduced.shape), reduced * factor)


def _beside(parts: Sequence[Part], vectors: Sequence[Tensor]) -> list[Tensor]:
    """``[..., r]`` as factors of R."""
    return [v.unsqueeze(part.kept) for part, v in zip(parts, vectors, strict=True)]


@register("optimizer", "grass", paper="arXiv:2406.17660", seed_id="B025")
class GrassConfig(LowRankConfig):
    """Adam on some rows or columns of each hidden matrix, chosen anew from time to time; saves optimizer memory."""

    subspace: Literal["adam", "lion", "sgd"] = Field("adam", description="Update rule of the selected rows.")
    gap: PositiveInt = Field(200, description="Steps between selections.")
    selection: Selection = Field(
        "top_r", description="Rows of the largest norm, or draws by norm (multinomial) or with equal odds (uniform)."
    )
    proportional_to: Literal["norm", "squared_norm"] = Field(
        "norm", description="What the odds of multinomial draws are proportional to."
    )
    replacement: bool = Field(True, description="Whether a row may be drawn more than once.")
    carry: bool = Field(True, description="Keep the moments of rows that stay selected; false: start all from zero.")
    seed: int = Field(0, ge=0, description="Seed of the draws.")

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> Grass:
        self.check_ranks(params)
        power = 2.0 if self.proportional_to == "squared_norm" else 1.0
        own = {key: getattr(self, key) for key in ("gap", "selection", "replacement", "carry", "seed")}
        return Grass(groups, **self.shared_settings(), power=power, **own)
