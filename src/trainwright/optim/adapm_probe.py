"""AdaPM (adapm.py) that measures which momentum each matrix needs, for models whose names do not tell their blocks.

All probed matrices have full momentum at first. After step N, with M = exp_avg / (1 - b1^N) [m, n], s_1 >= s_2 >= ...
its singular values and v = exp_avg_sq / (1 - b2^N):
    agreement  |M|^2 / sum v            near 1 where the gradients of successive steps say the same,
                                        (1 - b1) / (1 + b1) where they have nothing in common
    energy     sum_{i<=r} s_i^2 / |M|^2   share of the momentum that rank r holds
    none       where agreement >= ``agreement``: the gradient of a step already is what momentum would make of it
    low_rank   else where energy >= ``energy``; L = the r leading singular vectors of exp_avg, R = exp_avg^T L
    full       else
Then it is AdaPM with these momenta, for good. Fused matrices and stacks of experts are measured part by part and
decided as one. A matrix that had no gradient by then stays with full momentum.

The paper (arXiv:2510.09103) assigns momenta to the blocks of a Transformer by hand; the measurement and its thresholds
are ours. Until step N memory is AdamW's. The singular values come from the Gram matrix of the shorter side in float64,
where the device has it: once, on every rank, of the gathered momentum. All ranks take the figures of the first one that
holds the parameter, and so decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from trainwright.core.distributed import full_tensor, gather_objects
from trainwright.core.params import NamedParam
from trainwright.optim.adapm import AdaPM
from trainwright.optim.adapm_blocks import Momentum, held_numel, momentum_parts
from trainwright.optim.low_rank_parts import Part, share_out
from trainwright.optim.settings import Count, Positive, check

log = logging.getLogger("trainwright")
KINDS: tuple[Momentum, ...] = ("full", "low_rank", "none")  # state holds numbers: torch takes strings apart


def spectrum(momentum: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of whole matrices ``momentum [..., m, n]``: sum of the ``rank`` largest squared singular values and of all (0-d,
    over the stack), and the leading vectors [..., k, rank] of the shorter side k."""
    wide = momentum if momentum.shape[-2] < momentum.shape[-1] else momentum.mT
    wide = _precise(wide)
    values, vectors = torch.linalg.eigh(torch.nan_to_num(wide @ wide.mT))  # ascending
    return values[..., -rank:].sum(), values.sum(), vectors[..., -rank:].flip(-1)


def decide(agreement: float, energy: float, agreement_from: float, energy_from: float) -> Momentum:
    """The cheapest momentum that loses little."""
    if agreement >= agreement_from:
        return "none"
    return "low_rank" if energy >= energy_from else "full"


class ProbedAdaPM(AdaPM):
    """AdaPM as a plain optimizer whose groups may have the momentum "probe": decided after ``probe_steps`` steps.

    agreement, energy  thresholds of the decision, each above 0
    names              of the parameters, which ranks with different parameters find common ones by; None: by place
    State: that of AdaPM and for each probed parameter, once decided, ``momentum`` (its place in KINDS), ``agreement``
    and ``energy``.
    Groups count their steps in ``probed``. The step of the decision waits for the device.
    """

    group_state = ("probed",)
    allowed: ClassVar[dict[str, Any]] = {"momentum": Momentum | Literal["probe"], "probe_steps": Count}
    shapes_state: ClassVar[tuple[str, ...]] = (*AdaPM.shapes_state, "probe_steps")  # the decision comes once

    def __init__(
        self,
        params: Any,
        *,
        probe_steps: int = 200,
        agreement: Positive = 0.5,
        energy: Positive = 0.8,
        names: Sequence[NamedParam] = (),
        **settings: Any,
    ):
        self._probe = {"probed": 0, "probe_steps": probe_steps, "agreement": agreement, "energy": energy}
        check(type(self), self._probe)
        self._names = {id(n.param): n.name for n in names}
        super().__init__(params, **settings)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_probe": self._probe}

    def check_group(self, group: dict[str, Any]) -> None:
        if group["momentum"] == "probe":
            for key, value in self._probe.items():
                group.setdefault(key, value)
        super().check_group(group)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        probed = [group for group in self.param_groups if group["momentum"] == "probe"]
        for group in probed:
            group["probed"] += 1
        if probed and probed[0]["probed"] == probed[0]["probe_steps"]:
            self.settle()
        return loss

    def updates(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if group["momentum"] != "probe":
            return super().updates(params, grads, group)
        found: dict[int, Tensor] = {}
        kinds: dict[str, list[int]] = {}
        for i, p in enumerate(params):
            kinds.setdefault(self.momentum_of(p), []).append(i)
        for kind, some in kinds.items():
            as_if = {**group, "momentum": kind}
            made = super().updates([params[i] for i in some], [grads[i] for i in some], as_if)
            found |= dict(zip(some, made, strict=True))
        return [found[i] for i in range(len(params))]

    def momentum_of(self, param: Tensor) -> Momentum:
        """What a probed parameter has now; full until it is decided."""
        return KINDS[self.state[param].get("momentum", 0)] if param in self.state else "full"

    # --- the decision ---

    @torch.no_grad()
    def settle(self) -> None:
        """Measure, decide and convert the state, now. On every rank: what is sharded is gathered."""
        probed = [(p, g) for g in self.param_groups if g["momentum"] == "probe" for p in g["params"]]
        names = {id(p): i for i, (p, _) in enumerate(probed)} | getattr(self, "_names", {})  # copies have none
        measured: dict[Any, tuple[float, float]] = {}
        leading: dict[Any, list[Tensor]] = {}
        for p, group in probed:
            if "exp_avg" in self.state.get(p, {}) and p.numel():
                key = names[id(p)]
                measured[key], leading[key] = self._measure(p, group)
        agreed: dict[Any, tuple[float, float]] = {}
        for ranks_figures in gather_objects(measured):
            agreed = ranks_figures | agreed
        for p, group in probed:
            key = names[id(p)]
            kind: Momentum = "full"
            if key in leading:
                agreement, energy = agreed[key]
                kind = decide(agreement, energy, group["agreement"], group["energy"])
                self.state[p] |= {"agreement": agreement, "energy": energy}
                self._convert(p, group, kind, leading[key])
                log.info("adapm: %s: %s momentum (agreement %.3f, energy %.3f)", key, kind, agreement, energy)
            self.state[p]["momentum"] = KINDS.index(kind)

    def _measure(self, p: Tensor, group: dict[str, Any]) -> tuple[tuple[float, float], list[Tensor]]:
        """Agreement and energy, and the leading vectors of each part."""
        state = self.state[p]
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        whole = full_tensor(state["exp_avg"])
        squares = _precise(full_tensor(state["exp_avg_sq"])).sum()
        if group["second_moment"] == "blockwise":
            squares = squares * p.shape[-1]  # one number a row, the mean
        square = _precise(whole).square().sum() / (1 - beta1**step) ** 2
        agreement = square * (1 - beta2**step) / squares
        parts = momentum_parts(p, group["rank"], group["splits"])
        found = [spectrum(part.of(whole), part.rank) for part in parts]
        energy = sum(top for top, _, _ in found) / sum(total for _, total, _ in found)
        figures = torch.nan_to_num(torch.stack([agreement.to("cpu"), cast(Tensor, energy).to("cpu")]))
        return (float(figures[0]), float(figures[1])), [vectors for _, _, vectors in found]

    def _convert(self, p: Tensor, group: dict[str, Any], kind: Momentum, leading: list[Tensor]) -> None:
        """The state of ``kind``, made of the full momentum."""
        state = self.state[p]
        if kind == "full":
            return
        state["step"] = int(state["step"])
        momentum = state.pop("exp_avg")
        if kind == "none":
            return
        whole = full_tensor(momentum)
        for part, vectors in zip(momentum_parts(p, group["rank"], group["splits"]), leading, strict=True):
            basis = vectors.to(p.dtype)
            own = part.of(whole)
            factor = basis.mT @ own if part.left else own @ basis  # as R of low_rank_parts.py lies
            state["basis" + part.key] = _laid_out(basis, part, part.projection_placements)
            state["factor" + part.key] = _laid_out(factor, part, part.reduced_placements)

    def metrics(self) -> dict[str, float]:
        """Share of AdamW's momentum that the probed matrices keep, by numbers of this rank's parameters."""
        kept = full = 0
        for group in self.param_groups:
            for p in group["params"] if group["momentum"] == "probe" else []:
                full += p.numel()
                kept += held_numel(p, self.momentum_of(p), group["rank"], group["splits"])
        return {"adapm_momentum_share": kept / full} if full else {}


def _laid_out(whole: Tensor, part: Part, placements: Any) -> Tensor:
    return share_out(whole.contiguous(), part, placements)


def _precise(t: Tensor) -> Tensor:
    return t.to(torch.float32 if t.device.type == "mps" else torch.float64)
