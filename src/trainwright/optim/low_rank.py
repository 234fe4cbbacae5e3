"""What methods share that step matrices in a low-rank subspace of the gradient: GaLore and its relatives.

Each step, of a matrix with gradient G [m, n] and projection P (low_rank_parts.py has sides and layouts)
    every ``gap`` steps of the matrix:  P = a new one, of the gradient at hand
    R = P^T G [r, n] or G P [m, r];  N = the inner rule (low_rank_inner.py) on R;  u = scale P N or scale N P^T
    w = w (1 - lr weight_decay) - lr u

A method overrides what differs: :meth:`LowRankRule.new_projection` (where P comes from), :meth:`LowRankRule.reduce`
(R before the inner rule), :meth:`LowRankRule.learn` (what is done with P and G after the update).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.optim import low_rank_inner, muon
from trainwright.optim.low_rank_parts import (
    Part,
    leading_directions,
    local_of,
    parts_of,
    place,
    random_directions,
    share_out,
    sketched_directions,
    state_zeros,
)
from trainwright.optim.matrix import MatrixRule, OneRateConfig
from trainwright.optim.whole import like, owners

Inner = Literal["adam", "adam_8bit", "lion", "sgd"]
Projection = Literal["svd", "randomized_svd", "random"]
Products = Literal["full", "fast"]
PRODUCTS = (
    "Products with the projection: full, in the weights' precision, or fast, in bfloat16 where the hardware has it."
)


class LowRankRule(MatrixRule):
    """Steps matrices ``[..., out, in]`` in a subspace of rank r, renewed every ``gap`` steps.

    params       matrices or stacks of them, plain or DTensor
    rank         an int, or a float in (0, 1]: the share of each matrix's shorter side
    scale        factor on the update
    subspace     rule in the subspace: adam, adam_8bit, lion (``betas`` as in each paper) or sgd
    gap          steps of a matrix between new projections; None: it keeps the first
    projection   "svd" (of the gradient), "randomized_svd" (the same, nearly, and faster) or "random" (a control)
    stagger      renew the matrices at different steps, so that no step pays for all
    seed         of what is random; a projection depends on it, the step and the place of the matrix
    products     "full": products with the projection in the precision of the weights; "fast": those of float32
                 weights in bfloat16 where the hardware multiplies it (muon.iteration_dtype), which costs an update
                 its digits beyond the third. New projections are computed in float32 in any case
    more         further entries of the groups, for subclasses
    State: ``projection``, the moments of the rule in the subspace, ``step`` (int) and, where the place matters,
    ``index`` (int); names end in _0, _1, ... for fused matrices. Second moments in float32 at least, the others in the
    dtype of the parameter.
    Raises ValueError for a rank above the shorter side of a matrix and for settings out of range.
    """

    shapes_state: ClassVar[tuple[str, ...]] = ("rank", "subspace", "splits")
    wide_state: ClassVar[tuple[str, ...]] = ("exp_avg_sq", "exp_avg_scale")
    # GaLore's is its package's to the last bit; a method that is not held to that, and does not look at R after the
    # step, takes the fused one.
    adam = staticmethod(low_rank_inner.adam)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        rank: int | float = 0.25,
        scale: float = 0.25,
        subspace: Inner = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        gap: int | None = 200,
        projection: Projection = "svd",
        stagger: bool = False,
        seed: int = 0,
        products: Products = "full",
        more: dict[str, Any] | None = None,
    ):
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "rank": rank, "scale": scale, "subspace": subspace,
            "betas": betas, "eps": eps, "gap": gap, "projection": projection, "stagger": stagger, "seed": seed,
            "products": products,
        }  # fmt: skip
        super().__init__(params, {**defaults, **(more or {})})

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for p in group["params"]:
            parts_of(p, group["rank"], group["splits"])

    def known_parts(self, param: Tensor, group: dict[str, Any]) -> list[Part]:
        """The parts of ``param``, made once."""
        known: dict[Any, list[Part]] = self.__dict__.setdefault("_known_parts", {})
        layout = param.placements if isinstance(param, DTensor) else None
        key = id(param), param.shape, layout, group["rank"], tuple(group["splits"])
        if key not in known:
            known[key] = parts_of(param, group["rank"], group["splits"])
        return known[key]

    # --- what methods change ---

    def new_projection(self, g: Tensor, part: Part, group: dict[str, Any], generator: torch.Generator) -> Tensor:
        """P ``[..., projected, r]`` of whole matrices ``g [..., m, n]``. It may draw from ``generator``."""
        if group["projection"] == "svd":
            return leading_directions(g, part.rank, part.left)
        draw = sketched_directions if group["projection"] == "randomized_svd" else random_directions
        return draw(g, part.rank, part.left, generator)

    def renewed(self, part: Part, group: dict[str, Any]) -> None:
        """Called after the part got a new projection: the place to drop state that lives in the old subspace."""

    def reduce(self, parts: list[Part], reduced: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """What the inner rule gets, of this rank's shards of R."""
        return reduced

    def learn(
        self,
        parts: list[Part],
        grads: list[Tensor],
        projections: list[Tensor],
        reduced: list[Tensor],
        group: dict[str, Any],
    ) -> None:
        """Called after the update was computed, with this rank's shards; may write to the projections."""

    # --- the step ---

    def directions(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> tuple[list[Tensor], list[float]]:
        """Updates without their scale, laid out as ``params``, and the factor on each; moves the state."""
        found: list[Tensor] = []
        factors = self._each_portion(params, grads, group, lambda at, updates: found.extend(updates), math.inf)
        return found, factors

    def _each_portion(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        group: dict[str, Any],
        use: Callable[[slice, list[Tensor]], None],
        numbers: float,
    ) -> list[float]:
        """Hands the updates of :meth:`directions` to ``use``, with their place, about so many ``numbers`` at a time.

        Returns the factors, as :meth:`factors` does.
        """
        of_param = [self.known_parts(p, group) for p in params]
        local: list[Tensor] = []
        for p, g, own in zip(params, grads, of_param, strict=True):
            local += [part.of(_gradient(p, g, own)) for part in own]
        parts = [part for own in of_param for part in own]
        due = [i for i, part in enumerate(parts) if self._due(part, group)]
        self._renew([parts[i] for i in due], [local[i] for i in due], group)
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1

        projections = [local_of(self.projection(part)) for part in parts]
        dtype = product_dtype(params, group)
        reduced = [part.project(g, p, dtype) for part, g, p in zip(parts, local, projections, strict=True)]
        inner = self._inner(parts, self.reduce(parts, reduced, group), group) if parts else []
        ways = zip(parts, inner, projections, strict=True)
        for at in low_rank_inner.portions(params, numbers):
            updates = []
            for p, own in zip(params[at], of_param[at], strict=True):
                backs = [part.back(n, q, dtype) for part, n, q in itertools.islice(ways, len(own))]
                updates.append(_laid_out(p, own, backs))
            use(at, updates)
        if parts:
            self.learn(parts, local, projections, reduced, group)
        return self.factors(params, group)

    def factors(self, params: list[Tensor], group: dict[str, Any]) -> list[float]:
        """What the update of each of ``params`` is multiplied with, once its step is counted."""
        return [group["scale"] * self.correction(group["subspace"], p, group) for p in params]

    def correction(self, rule: Inner, param: Tensor, group: dict[str, Any]) -> float:
        """Adam's bias correction, 1 for the other rules."""
        adam = rule in ("adam", "adam_8bit")
        return low_rank_inner.bias_correction(self.state[param]["step"], group["betas"]) if adam else 1.0

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        updates, factors = self.directions(params, grads, group)
        torch._foreach_mul_(updates, factors)
        return updates

    def step_part(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """As in UpdateRule, with the factors in the rate, and on a CPU matrix by matrix: an update that was just made
        is still in the cache when it is added, and never all of them are held."""

        def use(at: slice, updates: list[Tensor]) -> None:
            self.apply_scaled(params[at], updates, self.factors(params[at], group), group)

        if group.get("stochastic_rounding"):  # one draw for all
            updates, factors = self.directions(params, grads, group)
            self.apply_scaled(params, updates, factors, group)
        else:
            self._each_portion(params, grads, group, use, low_rank_inner.CACHED)

    def apply_scaled(
        self, params: list[Tensor], updates: list[Tensor], factors: list[float], group: dict[str, Any]
    ) -> None:
        """Decay, and the step of ``updates`` times ``factors``."""
        if group.get("stochastic_rounding"):
            torch._foreach_mul_(updates, factors)
            self.apply(params, updates, group)
            return
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        for factor in dict.fromkeys(factors):
            some = [i for i, f in enumerate(factors) if f == factor]
            torch._foreach_add_([params[i] for i in some], [updates[i] for i in some], alpha=-group["lr"] * factor)

    # --- state ---

    def projection(self, part: Part) -> Tensor:
        """P of the part."""
        key = "projection" + part.key
        state = self.state[part.param]
        state[key] = place(state[key], part, part.projection_placements, part.param.dtype)
        return cast(Tensor, state[key])

    def part_state(
        self,
        part: Part,
        key: str,
        shape: Sequence[int],
        placements: Sequence[Placement] | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """This rank's shard of the state ``key``, whose whole has ``shape``; zeros at first.

        dtype  None: as :meth:`state_dtype` says
        """
        state, name = self.state[part.param], key + part.key
        wanted = dtype or self.state_dtype(part.param, key)
        if name in state:
            state[name] = place(state[name], part, placements, wanted)
        else:
            state[name] = state_zeros(part, shape, placements, wanted)
        return local_of(state[name])

    def inner_update(
        self,
        rule: Inner,
        grads: list[Tensor],
        states: Callable[[str, bool, torch.dtype | None], list[Tensor]],
        rank_dims: list[int],
        group: dict[str, Any],
    ) -> list[Tensor]:
        """The update of ``rule``, without its bias correction.

        states   the state tensors of a key, shaped as the gradients or (True) as their 8-bit scales, and of a dtype
        """
        betas, eps = group["betas"], group["eps"]
        if rule == "sgd":
            return grads
        if rule == "lion":
            return low_rank_inner.lion(grads, states("exp_avg", False, None), betas)
        keys = ("exp_avg", "exp_avg_sq")
        if rule == "adam":
            first, second = (states(key, False, None) for key in keys)
            return self.adam(grads, first, second, betas, eps)
        coded = [(states(key, False, torch.uint8), states(key + "_scale", True, torch.float32)) for key in keys]
        return low_rank_inner.adam_8bit(grads, coded[0], coded[1], rank_dims, betas, eps)

    def _inner(self, parts: list[Part], reduced: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        dims = [part.rank_dim for part in parts]

        def states(key: str, scales: bool, dtype: torch.dtype | None) -> list[Tensor]:
            shapes: list[Sequence[int]] = [part.reduced_shape for part in parts]
            if scales:
                shapes = [low_rank_inner.scales_shape(s, d) for s, d in zip(shapes, dims, strict=True)]
            return [
                self.part_state(part, key, shape, part.reduced_placements, dtype)
                for part, shape in zip(parts, shapes, strict=True)
            ]

        return self.inner_update(group["subspace"], reduced, states, dims, group)

    # --- new projections ---

    def _due(self, part: Part, group: dict[str, Any]) -> bool:
        state = self.state[part.param]
        if (group["stagger"] or group["projection"] != "svd") and "index" not in state:
            everything = [id(p) for g in self.param_groups for p in g["params"]]
            state["index"] = everything.index(id(part.param))
        if "projection" + part.key not in state:
            return True
        if group["gap"] is None:
            return False
        count = sum(len(g["params"]) for g in self.param_groups)
        offset = state["index"] * group["gap"] // count if group["stagger"] else 0
        return bool((state.get("step", 0) + offset) % group["gap"] == 0)

    def _renew(self, parts: list[Part], grads: list[Tensor], group: dict[str, Any]) -> None:
        """New projections. Those of sharded matrices are shared out over the ranks by cost, and sent to all."""
        shared: dict[tuple[Any, int], list[int]] = {}
        for i, part in enumerate(parts):
            if part.way == "local":
                # A stack sharded by expert: the projections are sharded like it.
                new = self.new_projection(grads[i], part, group, self._generator(part, group))
                self._set_projection(part, _like_param(new, part), group)
            else:
                mesh = cast(DTensor, part.param).device_mesh
                shared.setdefault((mesh, part.mesh_dim), []).append(i)
        for (mesh, dim), members in shared.items():
            ranks, rank, process_group = mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim)
            owner = owners([parts[i].shape for i in members], ranks)
            mine: dict[int, Tensor] = {}
            for i, o in zip(members, owner, strict=True):
                whole = grads[i]
                if parts[i].way != "gathered":
                    p = cast(DTensor, parts[i].param)
                    whole = DTensor.from_local(
                        grads[i], p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                    ).full_tensor()
                if o == rank:
                    mine[i] = whole
            found = {
                i: self.new_projection(g, parts[i], group, self._generator(parts[i], group)) for i, g in mine.items()
            }
            for i, o in zip(members, owner, strict=True):
                new = found[i] if i in found else grads[i].new_empty(parts[i].projection_shape)
                dist.broadcast(new, group=process_group, group_src=o)
                self._set_projection(parts[i], share_out(new, parts[i], parts[i].projection_placements), group)

    def _set_projection(self, part: Part, new: Tensor, group: dict[str, Any]) -> None:
        self.state[part.param]["projection" + part.key] = new
        self.renewed(part, group)

    def _generator(self, part: Part, group: dict[str, Any]) -> torch.Generator:
        """By seed, step and place alone, so that every rank and a resumed run draw the same."""
        state = self.state[part.param]
        seed = group["seed"]
        for number in (state.get("step", 0), state.get("index", 0), int(part.key[1:] or 0)):
            seed = (seed * 1_000_003 + number + 1) % 2**62
        return torch.Generator().manual_seed(seed)


def product_dtype(params: Sequence[Tensor], group: dict[str, Any]) -> torch.dtype | None:
    """What products with the projections are computed in; None: as the parameters are."""
    fast = group.get("products") == "fast" and bool(params) and params[0].dtype == torch.float32
    return muon.iteration_dtype(params[0].device) if fast else None


def _gradient(param: Tensor, grad: Tensor, parts: list[Part]) -> Tensor:
    """What the parts are cut out of: this rank's shard, or the whole where a part needs it."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        if parts and parts[0].way == "gathered":
            return grad.full_tensor()
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def _laid_out(param: Tensor, parts: list[Part], pieces: list[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    whole = torch.cat(pieces, dim=parts[0].cut[0]) if parts[0].cut else pieces[0]
    if not isinstance(param, DTensor):
        return whole
    return like(whole, param) if parts[0].way == "gathered" else _like_param(whole, parts[0], param.shape)


def _like_param(local: Tensor, part: Part, shape: torch.Size | None = None) -> Tensor:
    """This rank's shard of a tensor that is laid out as the parameter is; of P where no ``shape`` is given."""
    if not isinstance(part.param, DTensor):
        return local
    shape = shape or part.projection_shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, part.param.device_mesh, part.param.placements, run_check=False, shape=shape, stride=stride
    )


class LowRankConfig(OneRateConfig):
    """Base of configs of methods in a low-rank subspace."""

    lr: float = Field(1e-2, gt=0, description="Peak learning rate of the matrices; the schedule multiplies it.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of the matrices.")
    rank: int | float = Field(
        0.25, description="Rank of the subspace: a whole number, or a share of each matrix's shorter side, at most 1.0."
    )
    scale: PositiveFloat = Field(0.25, description="Factor on the update of the matrices.")
    subspace: Inner = Field("adam", description="Update rule in the subspace.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of its moments, each in [0, 1).")
    eps: PositiveFloat = Field(1e-6, description="Added to the root of the second moment.")

    @field_validator("rank", mode="before")
    @classmethod
    def _rank_or_share(cls, rank: Any) -> Any:
        number = isinstance(rank, int | float) and not isinstance(rank, bool)
        if not number or rank <= 0 or (isinstance(rank, float) and rank > 1):
            raise ValueError("should be a whole number of 1 or more, or a share of the shorter side in (0, 1.0]")
        return rank

    @field_validator("betas")
    @classmethod
    def _in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in betas):
            raise ValueError("each should be in [0, 1)")
        return betas

    def check_ranks(self, params: Sequence[NamedParam]) -> None:
        """ConfigError naming the first parameter that the rank is too large for."""
        for n in params:
            try:
                parts_of(n.param, self.rank, n.splits)
            except ValueError:
                largest = min(
                    min(m.param.shape[-2:]) if not m.splits else _shortest(m) for m in params if m.param.numel()
                )
                raise ConfigError(
                    f"is larger than the shorter side ({_shortest(n)}) of {n.name}; set rank <= {largest}, or a share "
                    "of each matrix's shorter side, such as 0.25",
                    key="rank",
                    value=self.rank,
                ) from None

    def shared_settings(self) -> dict[str, Any]:
        """What every class of the family takes."""
        return {key: getattr(self, key) for key in ("lr", "weight_decay", "rank", "scale", "subspace", "betas", "eps")}


def _shortest(n: NamedParam) -> int:
    """The shortest side of the matrices in a parameter."""
    if n.splits:
        kept = n.param.shape[-2] if n.splits[0] < 0 else n.param.shape[-1]
        return min(kept, *map(abs, n.splits))
    return min(n.param.shape[-2:])


class RefreshedConfig(LowRankConfig):
    """Base of configs of methods that renew the projection from time to time."""

    gap: PositiveInt = Field(200, description="Steps between new projections.")
    projection: Projection = Field(
        "svd",
        description="Source of the projection: SVD of the gradient, a randomised SVD (faster), or chance (a control).",
    )
    stagger: bool = Field(False, description="Renew the matrices at different steps, so that no step pays for all.")
    seed: int = Field(0, ge=0, description="Seed of random projections.")
    products: Products = Field("full", description=PRODUCTS)

    def shared_settings(self) -> dict[str, Any]:
        more = {key: getattr(self, key) for key in ("gap", "projection", "stagger", "seed", "products")}
        return super().shared_settings() | more
