"""Verdicts: computed from the trials of a claim's arms, never written by hand.

A check compares ``arm`` with ``versus`` seed by seed: by the difference (arm less versus) or the ratio. It is

shown         the mean keeps the threshold, and for losses with two seeds or more the whole 95 % t interval does.
contradicted  the interval lies wholly on the opposite side of no difference (0, or a ratio of 1), and of the
              threshold where that is a tolerance.
not shown     otherwise; also where an arm failed or diverged, never reached the other's loss, or lost by its loss
              without a fair rate: with its best one at the edge of its grid, as a better one may lie beyond, or not
              tuned at all against an arm that was. Arms with the role control are meant to be as they are.

The claim is shown when every check is, contradicted when one is, and else "not shown at this scale".

``tokens_to_loss`` and ``seconds_to_loss`` are what an arm takes to reach the final loss of ``versus``, on the curve of
validations, beside what ``versus`` itself takes. ``diverged`` is 1 for a seed that diverged and 0 for one that did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.lab.claim import Check
from trainwright.lab.statistics import Interval, first_reach, mean_interval
from trainwright.lab.summary import ArmResult

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
EXACT = {"optimizer_state_bytes", "params"}  # the same in every run, so one seed says all


@dataclass
class CheckResult:
    """What came of one check."""

    check: Check
    outcome: str
    reason: str = ""
    arm: float | None = None  # mean of the quantity
    versus: float | None = None
    value: float | None = None  # mean difference or ratio
    interval: Interval | None = None
    seeds: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.check.model_dump(exclude_none=True),
            "words": self.check.words(),
            "outcome": self.outcome,
            "reason": self.reason,
            "arm_value": self.arm,
            "versus_value": self.versus,
            "measured": self.value,
            "measured_ci95": None if self.interval is None else list(self.interval),
            "seeds_compared": self.seeds,
        }


def is_loss(quantity: str) -> bool:
    """Quantities that hang on chance, for which a mean is not enough."""
    return "loss" in quantity or quantity in ("stable_rank", "weight_rms")


def evaluate(check: Check, arm: ArmResult, versus: ArmResult) -> CheckResult:
    """The outcome of ``check``."""
    for a in (arm, versus):
        if a.status != "ok" and check.quantity != "diverged":
            return CheckResult(check, NOT_SHOWN, f"{a.name} {a.status}: {a.error}")
        if a.status == "failed":
            return CheckResult(check, NOT_SHOWN, f"{a.name} failed: {a.error}")
    if check.quantity != "diverged" and set(arm.results) != set(versus.results):
        return CheckResult(check, NOT_SHOWN, "the arms do not have the same seeds")
    seeds = set(arm.results) & set(versus.results)
    if check.quantity == "diverged":  # an arm whose whole grid diverged has no trials
        seeds = set(arm.results) | set(versus.results) or {0}
    pairs = [values(check, arm, versus, seed) for seed in sorted(seeds)]
    if not pairs:
        return CheckResult(check, NOT_SHOWN, "no seed in common")
    if any(x is None for x, _ in pairs) and check.quantity.endswith("_to_loss"):
        missed = sum(x is None for x, _ in pairs)
        return CheckResult(
            check, NOT_SHOWN, f"{arm.name} never reached the loss of {versus.name} in {missed} of {len(pairs)} seeds"
        )
    whole = [(x, y) for x, y in pairs if x is not None and y is not None]
    if len(whole) < len(pairs):
        return CheckResult(check, NOT_SHOWN, f"{check.quantity} was not measured")
    result = decide(check, whole)
    if not is_loss(check.quantity):
        return result
    said = []
    edges = [a.name for a in (arm, versus) if a.edge]
    if edges:
        said.append(f"{' and '.join(edges)} tuned to the edge of the grid")
    loser, winner = {SHOWN: (versus, arm), CONTRADICTED: (arm, versus)}.get(result.outcome, (None, None))
    if loser is not None and winner is not None and "loss" in check.quantity:
        untuned = bool(winner.tuning) and not loser.tuning and loser.role != "control"
        if untuned:
            said.append(f"{loser.name} lost without being tuned, unlike {winner.name}")
        if untuned or loser.edge:
            result.outcome = NOT_SHOWN
    result.reason = "; ".join([*([result.reason] if result.reason else []), *said])
    return result


def values(check: Check, arm: ArmResult, versus: ArmResult, seed: int) -> tuple[float | None, float | None]:
    """The quantity of both arms for one seed."""
    if check.quantity == "diverged":
        each = [a.results[seed].status if seed in a.results else a.status for a in (arm, versus)]
        return float(each[0] == "diverged"), float(each[1] == "diverged")
    a, b = arm.results[seed], versus.results[seed]
    if check.quantity in ("tokens_to_loss", "seconds_to_loss"):
        axis = 0 if check.quantity == "tokens_to_loss" else 1
        target = b.val_loss if b.val_loss is not None else -math.inf

        def reach(r: Any) -> float | None:
            return first_reach([p[axis] for p in r.curve], [p[2] for p in r.curve], target)

        return reach(a), reach(b)
    first, second = check.parts
    out = []
    for r in (a, b):
        x, y = r.quantity(first), 0.0 if second is None else r.quantity(second)
        out.append(None if x is None or y is None else x - y)
    return out[0], out[1]


def decide(check: Check, pairs: list[tuple[float, float]]) -> CheckResult:
    """Pure arithmetic: the outcome for ``(arm, versus)`` values of each seed."""
    ratio = check.kind.startswith("ratio")
    if ratio and any(y == 0 for _, y in pairs):
        return CheckResult(check, NOT_SHOWN, f"{check.quantity} of {check.versus} is 0, so there is no ratio")
    measured = [x / y if ratio else x - y for x, y in pairs]
    mean, interval = mean_interval(measured)
    assert mean is not None  # for mypy: pairs is not empty
    # "smaller is shown" for all four: turn the other two around.
    sign = 1.0 if check.kind in ("less_by", "ratio_at_most") else -1.0
    limit = sign * check.threshold if ratio else -check.threshold
    no_difference = sign * (1.0 if ratio else 0.0)
    centre = sign * mean
    low = high = centre
    uncertain = is_loss(check.quantity) and len(measured) < 2
    if interval is not None:
        low, high = sorted((sign * interval[0], sign * interval[1]))
    holds = _keeps(centre, limit, check.strict)
    if is_loss(check.quantity) and interval is not None:
        holds = holds and _keeps(high, limit, check.strict)
    known = not uncertain and (interval is not None or check.quantity in EXACT)
    if holds:
        outcome = SHOWN
    elif known and low > max(no_difference, limit):
        outcome = CONTRADICTED
    else:
        outcome = NOT_SHOWN
    result = CheckResult(check, outcome, value=mean, interval=interval, seeds=len(measured))
    result.arm = math.fsum(x for x, _ in pairs) / len(pairs)
    result.versus = math.fsum(y for _, y in pairs) / len(pairs)
    if uncertain:
        result.reason = "one seed: no interval"
    elif outcome == NOT_SHOWN and _keeps(centre, limit, check.strict):
        result.reason = "the mean keeps the threshold, its interval does not"
    return result


def _keeps(value: float, limit: float, strict: bool) -> bool:
    # Figures like 3 / 8 bytes are exact in the claim and one rounding off in the ratio.
    if math.isclose(value, limit, rel_tol=1e-9, abs_tol=1e-12):
        return not strict
    return value < limit


def judge(checks: list[CheckResult], arms: Mapping[str, ArmResult]) -> tuple[str, str]:
    """Verdict of the claim and, in words, why."""
    reasons = [f"{r.check.words()}: {r.outcome}" + (f" ({r.reason})" if r.reason else "") for r in checks]
    bad = [f"{a.role} arm {a.name} {a.status}" for a in arms.values() if a.status != "ok"]
    one_seed = any(r.reason.startswith("one seed") for r in checks)
    if all(r.outcome == SHOWN for r in checks):
        verdict = "shown"
    elif any(r.outcome == CONTRADICTED for r in checks):
        verdict = "contradicted"
    else:
        verdict = "not shown at this scale"
    if one_seed:
        verdict += " (one seed)"
    return verdict, "; ".join([*reasons, *bad])
