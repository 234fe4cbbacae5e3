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

Cost: an ordinary step gathers r rows, steps them by torch's fused Adam kernel (with the bias correction, which differs
by row, beside it) and adds them to the weights in place. Nothing of the size of the matrix is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.core.sliced_gradient import Slice, SlicedGradient, ask, is_offered
from trainwright.optim import low_rank_inner
from trainwright.optim.grass_rows import (
    Chosen,
    Selection,
    add_rows,
    as_rows,
    by_expert,
    carried,
    is_sharded_by_expert,
    reduce,
    select_rows,
    side_factors,
    side_norms,
    take,
    to_digits,
    update_of,
)
from trainwright.optim.low_rank import LowRankConfig, LowRankRule, _gradient, _laid_out
from trainwright.optim.low_rank_parts import Part, local_of, place


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

    adam = staticmethod(low_rank_inner.fused_adam)
    # The age of a row counts selections in gaps.
    shapes_state = (*LowRankRule.shapes_state, "gap", "selection", "carry")
    wide_state = (*LowRankRule.wide_state, "age")  # bfloat16 counts to 256

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
        if group.get("stochastic_rounding"):
            self.apply_scaled(params, *self.directions(params, grads, group), group)
            return
        parts, local, chosen = self._selected(params, grads, group)
        self._decay(params, group)
        gathered: dict[Tensor, dict[int, Tensor]] = {}
        for i, u in self._updates(parts, local, chosen, group, -group["lr"] * group["scale"]):
            if parts[i].way == "gathered":
                gathered.setdefault(parts[i].param, {})[i] = update_of(parts[i], u, chosen.rows[i])
            else:
                add_rows(parts[i], parts[i].of(local_of(parts[i].param)), u, chosen.rows[i])
        for p, pieces in gathered.items():
            p.add_(_laid_out(p, [parts[i] for i in pieces], list(pieces.values())))

    def directions(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[float]]:
        parts, local, chosen = self._selected(params, grads, group)
        pieces: dict[Tensor, list[Tensor]] = {p: [] for p in params}
        for i, u in self._updates(parts, local, chosen, group, 1.0):
            pieces[parts[i].param].append(update_of(parts[i], u, chosen.rows[i]))
        laid_out = [_laid_out(p, self.known_parts(p, group), pieces[p]) for p in params]
        return laid_out, [group["scale"]] * len(params)

    def _selected(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Part], list[Tensor], Chosen]:
        """Parts, this rank's shards of their gradients, and their rows: new ones where a selection is due. Counts."""
        parts: list[Part] = []
        local: list[Tensor] = []
        for p, g in zip(params, grads, strict=True):
            own = self.known_parts(p, group)
            parts += own
            local += [g] if isinstance(g, SlicedGradient) else [part.of(_gradient(p, g, own)) for part in own]
        due = [i for i, part in enumerate(parts) if self._due(part, group)]
        if any(isinstance(local[i], SlicedGradient) for i in due):
            raise ValueError("a selection needs whole gradients, and these are of rows selected before; clear them")
        norms = side_norms([parts[i] for i in due], [local[i] for i in due])
        for i, n in zip(due, norms, strict=True):
            self._select(parts[i], n, group)
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return parts, local, self._chosen(parts, group)

    def _updates(
        self, parts: list[Part], local: list[Tensor], chosen: Chosen, group: dict[str, Any], rate: float
    ) -> Iterator[tuple[int, Tensor]]:
        """This rank's shard of the update of each part's rows times ``rate``, by its place; moves the state.

        On a CPU as many at a time as the cache holds from one pass to the next.
        """
        if not parts:
            return
        rho = None if chosen.rho is None else chosen.beside(chosen.rho)
        factors = self._factors(parts, chosen, group)
        scales = None if factors is None else chosen.beside(factors * rate)
        share = max(part.shape[part.rank_dim] / part.rank for part in parts)  # of a gradient in its R
        for at in low_rank_inner.portions(local, low_rank_inner.CACHED * share):
            own = range(len(parts))[at]
            reduced = [reduce(parts[i], local[i], chosen.rows[i]) for i in own]
            if rho is not None:
                torch._foreach_mul_(reduced, rho[at])
            updates = self._inner(parts[at], reduced, group)
            torch._foreach_mul_(updates, rate if scales is None else scales[at])
            yield from zip(own, updates, strict=True)

    def _due(self, part: Part, group: dict[str, Any]) -> bool:
        return bool(self.state[part.param].get("step", 0) % group["gap"] == 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if is_offered(p) and not group["splits"]:
                ask(p, self.slice_of)

    @torch.no_grad()
    def slice_of(self, param: Tensor) -> Slice | None:
        """What the step at hand takes of the gradient of a matrix; None: the whole, for a selection."""
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        parts = self.known_parts(param, group)
        if not parts or param not in self.state or self._due(parts[0], group):
            return None
        return parts[0].rank_dim, self._chosen(parts, group).rows[0]

    def rows(self, parts: Sequence[Part]) -> list[Tensor]:
        """The selected rows (or columns) of each part, ``[..., r]``; of this rank's experts where these are sharded."""
        return as_rows(self._vectors(parts, "rows", torch.uint8))

    def coverage(self) -> Tensor:
        """Share of all rows (and columns) that were selected at least once: small when top_r starves the rest."""
        seen = [local_of(v).float() for s in self.state.values() for k, v in s.items() if k.startswith("seen")]
        return torch.cat([s.flatten() for s in seen]).mean() if seen else torch.zeros(())

    def metrics(self) -> dict[str, Tensor]:
        return {"grass_coverage": self.coverage()}

    # --- decay of selected rows alone ---

    def move(self, values: list[Tensor], updates: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> None:
        self._decay(params, group, values)
        super().move(values, updates, params, {**group, "weight_decay": 0.0})

    def apply_scaled(
        self, params: list[Tensor], updates: list[Tensor], factors: list[float], group: dict[str, Any]
    ) -> None:
        if group.get("stochastic_rounding"):
            super().apply_scaled(params, updates, factors, group)
            return
        self._decay(params, group)
        super().apply_scaled(params, updates, factors, {**group, "weight_decay": 0.0})

    def decayed(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor] | None:
        if not group["weight_decay"]:
            return None
        values = [p.clone() for p in params]
        self._multiply(params, group, 0.0, values)
        return list(torch._foreach_sub(params, values))

    def _decay(self, params: list[Tensor], group: dict[str, Any], values: list[Tensor] | None = None) -> None:
        """Of selected rows of ``values``, which lie as ``params`` do; None: these."""
        if group["weight_decay"]:
            self._multiply(params, group, 1 - group["lr"] * group["weight_decay"], values or params)

    def _multiply(self, params: list[Tensor], group: dict[str, Any], factor: float, values: list[Tensor]) -> None:
        """Selected rows of ``values`` by ``factor``."""
        for p, value in zip(params, values, strict=True):
            own = self.known_parts(p, group)
            rows = self.rows(own) if own else []
            factors = [side_factors(part, r, factor, value.dtype) for part, r in zip(own, rows, strict=True)]
            if own and own[0].way == "gathered":
                pieces = [f.expand(part.shape) for part, f in zip(own, factors, strict=True)]
                value.mul_(_laid_out(p, own, pieces))
            else:
                for part, f in zip(own, factors, strict=True):
                    part.of(local_of(value)).mul_(f)

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
        dtype, wide = part.param.dtype, self.state_dtype(part.param, "age")
        age = torch.zeros(rows.shape, dtype=wide, device=rows.device)
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
                change = stays.to(wide)
                if sampled:
                    (old_rho,) = self._vectors([part], "rho")
                    change = change * (rho / old_rho.gather(-1, at)).to(wide)
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
            state[key + part.key] = by_expert(part, value)

    def _vectors(self, parts: Sequence[Part], key: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """State with an entry per row, of this rank's experts where these are sharded."""
        found = []
        for part in parts:
            state, name = self.state[part.param], key + part.key
            placements = part.param.placements if is_sharded_by_expert(part) else None  # type: ignore[attr-defined]
            state[name] = place(state[name], part, placements, dtype or self.state_dtype(part.param, key))
            found.append(local_of(state[name]))
        return found

    def _chosen(self, parts: list[Part], group: dict[str, Any]) -> Chosen:
        """What the last selections say, read from the state where it is not what it was at the last call."""
        sampled = group["selection"] != "top_r"
        keys = ["rows", *(["age"] if group["carry"] else []), *(["rho"] if sampled else [])]
        held = {key: self._vectors(parts, key, torch.uint8 if key == "rows" else None) for key in keys}
        sources = [t for tensors in held.values() for t in tensors]
        known: dict[tuple[int, int], Chosen] = self.__dict__.setdefault("_known", {})
        at = id(parts[0].param) if parts else 0, len(parts)
        if at not in known or not known[at].is_of(sources):
            known[at] = Chosen.of(parts, sources, as_rows(held["rows"]), held.get("age"), held.get("rho"))
        return known[at]

    def _factors(self, parts: list[Part], chosen: Chosen, group: dict[str, Any]) -> Tensor | None:
        """Of the updates, for each row of all parts: Adam's bias correction and rho; None: 1."""
        if group["subspace"] != "adam":
            return chosen.rho
        since = [(self.state[part.param]["step"] - 1) % group["gap"] + 1 for part in parts]
        if len(set(since)) == 1:
            steps = chosen.ages + since[0]
        else:
            steps = torch.cat([age + n for age, n in zip(chosen.ages.split(chosen.sizes), since, strict=True)])
        factors = (1 - group["betas"][1] ** steps).sqrt_() / (1 - group["betas"][0] ** steps)
        return factors if chosen.rho is None else factors * chosen.rho


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
