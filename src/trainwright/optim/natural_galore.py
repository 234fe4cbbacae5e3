"""Natural GaLore: GaLore whose projected gradient is preconditioned by the Fisher matrix of the last few of them.

Of a matrix, R the projected gradient of GaLore (galore.py) with k numbers, g_t = vec(R_t)
    H = [g_(t-s+1), ..., g_t]  [k, s], since the projection is renewed;  F = lam I + H H^T
    g~ = F^-1 g_t = H (lam I + H^T H)^-1 e_t;  then Adam on g~ in the subspace, and back as GaLore
Natural GaLore: Accelerating GaLore for memory-efficient LLM Training and Fine-tuning, arXiv:2410.16029.

State of m x n with m <= n: that of GaLore, and s r n numbers of history: with the paper's s = 20 that is ten times
the moments, so the method saves no memory over Adam once s r > 2 m. And s s numbers of H^T H, of which a step computes
the new row alone: the whole would cost as much as GaLore's products, where s is 20 and r n 40 000.

Where we differ:
- The paper solves by Woodbury's identity, g / lam - H z / lam^2, which loses about four digits in float32 for
  lam = 1e-3. Since g_t is a column of H, the form above is the same number without the cancellation.
- The history is dropped when the projection is renewed; the paper's code goes on with gradients of several bases.
- Projection of one side, as in the paper; its code projects both (a core r x r).
- The Gram matrix is factored in float64. Where rounding makes it indefinite, lam is raised tenfold up to three times,
  the last time to at least 1e-5 of the trace; that is counted on the device and a warning given at the next renewal.
- History in float32 for 16-bit parameters: differences between its gradients are below bfloat16's last bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from trainwright.core.errors import ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import register
from trainwright.optim import low_rank_inner
from trainwright.optim.low_rank import Inner, LowRankRule, Products, Projection, RefreshedConfig
from trainwright.optim.low_rank_parts import Part, Way, parts_of, sum_over_ranks
from trainwright.optim.settings import Positive

log = logging.getLogger("trainwright")
HISTORY = 20  # the paper's
SHARED_OUT: tuple[Way, ...] = ("kept", "projected", "gathered")  # of these a rank has a part of R


def weights_of_history(gram: Tensor, newest: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """``c`` with ``g~ = H c`` for stacks of Gram matrices H^T H ``[n, s, s]`` and columns ``newest [n]`` (int64).

    Returns c [n, s] in float64 and whether damping had to be raised [n].
    """
    gram = gram.double()
    size = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    steps = [torch.full_like(trace, damping * 10**i) for i in range(3)]
    dampings = torch.stack([*steps, (1e-5 * trace).clamp(min=1000 * damping)])  # [4, n]
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    factors, info = torch.linalg.cholesky_ex(gram + dampings[..., None, None] * identity)  # [4, n, s, s]
    first = (info == 0).int().argmax(0)  # the smallest damping that worked; 0 where none did: not finite
    factor = factors[first, torch.arange(gram.shape[0], device=gram.device)]
    unit = (newest[:, None] == torch.arange(size, device=gram.device)).to(gram.dtype).unsqueeze(-1)
    return torch.cholesky_solve(unit, factor).squeeze(-1), first > 0


class NaturalGaLore(LowRankRule):
    """GaLore with natural gradients in the subspace.

    history  gradients in the Fisher matrix; None: 20, or as many as a projected gradient has numbers if that is less
    damping  lam
    State beside that of LowRankRule: ``history`` [history, ...shape of R] and ``gram`` [..., history, history], float32
    at least.
    Raises ValueError for a history longer than a projected gradient, and as LowRankRule.
    """

    shapes_state = (*LowRankRule.shapes_state, "history")
    adam = staticmethod(low_rank_inner.fused_adam)
    wide_state = (*LowRankRule.wide_state, "history", "gram")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        weight_decay: float = 0.01,
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
        history: int | None = None,
        damping: Positive = 1e-3,
    ):
        self._raised: Tensor | None = None
        super().__init__(
            params, lr, weight_decay, rank=rank, scale=scale, subspace=subspace, betas=betas, eps=eps, gap=gap,
            projection=projection, stagger=stagger, seed=seed, products=products,
            more={"history": history, "damping": damping},
        )  # fmt: skip

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        for p in group["params"]:
            for part in parts_of(p, group["rank"], group["splits"]):
                history_of(part, group["history"])

    def reduce(self, parts: list[Part], reduced: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        lengths = [history_of(part, group["history"]) for part in parts]
        held: list[Tensor] = []  # [matrices of this rank, s, numbers of its shard], views of the state
        for part, r, s in zip(parts, reduced, lengths, strict=True):
            history = self._history(part, s)
            history[self._newest(part, s)].copy_(r)
            matrices = math.prod(r.shape[:-2])
            held.append(history.view(s, matrices, r.shape[-2] * r.shape[-1]).transpose(0, 1))
        grams = self._grams(parts, held)

        preconditioned = list(reduced)
        for s in dict.fromkeys(lengths):
            members = [i for i, length in enumerate(lengths) if length == s]
            counts = [held[i].shape[0] for i in members]
            newest = torch.cat(
                [
                    torch.full((n,), self._newest(parts[i], s), device=held[i].device)
                    for i, n in zip(members, counts, strict=True)
                ]
            )
            weights, raised = weights_of_history(torch.cat([grams[i] for i in members]), newest, group["damping"])
            for i, c in zip(members, weights.split(counts), strict=True):
                new = torch.bmm(c.to(held[i].dtype).unsqueeze(1), held[i])  # [matrices, 1, numbers]
                preconditioned[i] = new.view(reduced[i].shape).to(reduced[i].dtype)
            count = raised.sum()
            self._raised = count if self._raised is None else self._raised + count.to(self._raised.device)
        return preconditioned

    def _grams(self, parts: list[Part], held: list[Tensor]) -> list[Tensor]:
        """H^T H ``[matrices, s, s]`` of whole matrices, in the state; but for the newest row it is there already."""
        unknown = [i for i, part in enumerate(parts) if "gram" + part.key not in self.state[part.param]]
        grams = [self._gram(part, h.shape[1]) for part, h in zip(parts, held, strict=True)]
        whole = [torch.bmm(held[i], held[i].mT) for i in unknown]  # in a first step, and of checkpoints that lack it
        for i, new in zip(unknown, sum_over_ranks([parts[i] for i in unknown], whole, SHARED_OUT), strict=True):
            grams[i].copy_(new)
        newest = [self._newest(part, h.shape[1]) for part, h in zip(parts, held, strict=True)]
        rows = [torch.bmm(h, h[:, n].unsqueeze(-1)).squeeze(-1) for h, n in zip(held, newest, strict=True)]
        for gram, n, row in zip(grams, newest, sum_over_ranks(parts, rows, SHARED_OUT), strict=True):
            gram[:, n] = row
            gram[:, :, n] = row
        return grams

    def renewed(self, part: Part, group: dict[str, Any]) -> None:
        if "history" + part.key in self.state[part.param]:
            length = history_of(part, group["history"])
            self._history(part, length).zero_()
            self._gram(part, length).zero_()
        raised, self._raised = self._raised, None
        if raised is not None and (count := int(raised)):  # no step of its own waits: a renewal does anyhow
            log.warning(
                "natural_galore: %d times since the last renewal the Fisher matrix was indefinite in float32 and got "
                "more damping; set damping higher than %g",
                count,
                group["damping"],
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_raised": self._raised}

    def _history(self, part: Part, length: int) -> Tensor:
        placements = part.reduced_placements
        if placements is not None:
            placements = tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements)
        dtype = torch.promote_types(part.param.dtype, torch.float32)
        return self.part_state(part, "history", [length, *part.reduced_shape], placements, dtype)

    def _gram(self, part: Part, length: int) -> Tensor:
        placements = part.param.placements if isinstance(part.param, DTensor) and part.way == "local" else None
        dtype = torch.promote_types(part.param.dtype, torch.float32)
        gram = self.part_state(part, "gram", [*part.shape[:-2], length, length], placements, dtype)
        return gram.view(-1, length, length)

    def _newest(self, part: Part, length: int) -> int:
        """The slot of the gradient at hand; the slots are a ring."""
        return int((self.state[part.param]["step"] - 1) % length)


def history_of(part: Part, history: int | None) -> int:
    """Length of the history of a part. ValueError for one longer than its projected gradient has numbers."""
    numbers = math.prod(part.reduced_shape[-2:])
    if history is None:
        return min(HISTORY, numbers)
    if history < 1:
        raise ValueError(f"{history=} should be 1 or more")
    if history > numbers:
        raise ValueError(
            f"{history=} is longer than the {numbers} numbers of a projected gradient {tuple(part.reduced_shape[-2:])}"
        )
    return history


@register("optimizer", "natural_galore", paper="arXiv:2410.16029", seed_id="B030")
class NaturalGaLoreConfig(RefreshedConfig):
    """GaLore with natural gradients: the empirical Fisher matrix of recent projected gradients as preconditioner."""

    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay of the matrices.")
    history: PositiveInt | None = Field(
        None, description="Gradients in the Fisher matrix; null: 20, or fewer for matrices too small for that."
    )
    damping: PositiveFloat = Field(1e-3, description="Added to the diagonal of the Fisher matrix.")

    def build_matrices(self, params: Sequence[NamedParam], groups: list[dict[str, Any]]) -> NaturalGaLore:
        self.check_ranks(params)
        for n in params:
            for part in parts_of(n.param, self.rank, n.splits):
                try:
                    history_of(part, self.history)
                except ValueError as error:
                    raise ConfigError(
                        f"{str(error).partition(' ')[2]} of {n.name}; set it lower, or null",
                        key="history",
                        value=self.history,
                    ) from None
        return NaturalGaLore(groups, **self.shared_settings(), history=self.history, damping=self.damping)
