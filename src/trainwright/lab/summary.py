"""From trials to what is said of each arm: means, intervals, the difference to the baseline, how soon it got there."""

from __future__ import annotations

import statistics as plain
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.lab.statistics import Interval, covers, first_reach, mean_interval, paired
from trainwright.lab.trial import BATCHES, TrialResult
from trainwright.lab.tuning import Tuned

if TYPE_CHECKING:
    from trainwright.lab.comparison import Plan


@dataclass
class ArmResult:
    """One arm of a comparison. Figures are over the seeds that ended well; None where there is none."""

    name: str
    role: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # as given, tuned and taken from other arms
    chosen: dict[str, Any] = field(default_factory=dict)  # by tuning or reference
    edge: str = ""
    status: str = "ok"
    error: str = ""
    results: dict[int, TrialResult] = field(default_factory=dict)  # by seed
    trials: dict[int, str] = field(default_factory=dict)  # seed -> folder in the store
    tuning: list[dict[str, Any]] = field(default_factory=list)
    val_loss_mean: float | None = None
    val_loss_ci95: Interval | None = None
    difference: float | None = None  # to the baseline, mean over common seeds
    difference_ci95: Interval | None = None
    verdict: str = ""
    tokens_to_baseline: float | None = None
    seconds_to_baseline: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    optimizer_state_bytes: int | None = None

    @property
    def good(self) -> dict[int, TrialResult]:
        return {seed: r for seed, r in self.results.items() if r.status == "ok"}

    def losses(self) -> dict[int, float]:
        return {seed: r.val_loss for seed, r in self.good.items() if r.val_loss is not None}

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "val_loss_mean": self.val_loss_mean,
            "val_loss_ci95": _list(self.val_loss_ci95),
            "difference_to_baseline_ci95": _list(self.difference_ci95),
            "tokens_per_s": self.tokens_per_s,
            "peak_memory_bytes": self.peak_memory_bytes,
            "optimizer_state_bytes": self.optimizer_state_bytes,
            "status": self.status,
            "error": self.error,
            "difference_to_baseline": self.difference,
            "verdict": self.verdict,
            "tokens_to_baseline_loss": self.tokens_to_baseline,
            "seconds_to_baseline_loss": self.seconds_to_baseline,
            "role": self.role,
            "settings": self.settings,
            "chosen": self.chosen,
            "edge": self.edge,
            "tuning": self.tuning,
            "seeds": [
                {
                    "seed": seed,
                    "trial": self.trials.get(seed),
                    "status": r.status,
                    "error": r.error,
                    "val_loss": r.val_loss,
                    "train_loss": r.train_loss,
                    "tokens": r.tokens,
                    "seconds": r.seconds,
                    "tokens_per_s": r.tokens_per_s,
                    "peak_memory_bytes": r.peak_memory_bytes,
                    "optimizer_state_bytes": r.optimizer_state_bytes,
                    "events": r.events,
                    "probes": r.probes,
                    "curve": r.curve,
                }
                for seed, r in self.results.items()
            ],
        }


def _list(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [float(x) for x in interval]


def summarise(
    plan: Plan,
    settings: Mapping[str, dict[str, Any] | None],
    tuned: Mapping[str, Tuned],
    reasons: Mapping[str, str],
    results: Mapping[str, dict[int, TrialResult]],
    keys: Mapping[str, dict[int, str]],
) -> tuple[list[ArmResult], list[str]]:
    """An ArmResult for each arm, the baseline's first, and notes on what a reader should know."""
    arms = []
    for arm in plan.arms:
        extra = settings[arm.name]
        a = ArmResult(arm.name, arm.role, {**arm.fixed, **(extra or {})}, dict(extra or {}))
        if (t := tuned.get(arm.name)) is not None:
            a.edge = t.edge
            a.tuning = [
                {"setting": t.points[i], "share_of_budget": share, "val_loss": loss if loss < float("inf") else None}
                for i, share, loss in t.losses
            ]
        a.results, a.trials = dict(results.get(arm.name, {})), dict(keys.get(arm.name, {}))
        _status(a, extra is None, reasons.get(arm.name, ""))
        a.val_loss_mean, a.val_loss_ci95 = mean_interval(list(a.losses().values()))
        good = list(a.good.values())
        a.tokens_per_s = _mean([r.tokens_per_s for r in good])
        a.peak_memory_bytes = max((r.peak_memory_bytes for r in good if r.peak_memory_bytes), default=None)
        sizes = [r.optimizer_state_bytes for r in good if r.optimizer_state_bytes is not None]
        a.optimizer_state_bytes = max(sizes, default=None)
        arms.append(a)
    base = next(a for a in arms if a.name == plan.baseline)
    for a in arms:
        _against(a, base, len(plan.seeds))
    arms.sort(key=lambda a: a is not base)  # stable: the others stay in their order
    return arms, _notes(arms, base)


def _status(a: ArmResult, no_setting: bool, reason: str) -> None:
    """The worst of the seeds, with how many of them and the first reason."""
    if no_setting:
        a.status = reason.partition(":")[0] or "failed"
        a.error = f"no point of its grid ended well; the first {reason}" if reason else "the arm that it follows did so"
        return
    for status in ("failed", "diverged"):
        bad = [r for r in a.results.values() if r.status == status]
        if bad:
            few = f"{len(bad)} of {len(a.results)} seeds: " if len(a.results) > 1 else ""
            a.status, a.error = status, f"{few}{bad[0].error}"
            return


def _against(a: ArmResult, base: ArmResult, seeds: int) -> None:
    own, theirs = a.losses(), base.losses()
    if a is base:
        a.verdict = "baseline"
    for bad in (a, base):
        if bad.status != "ok":  # the seeds that are left would be a choice of the lucky ones
            a.verdict = bad.status if bad is a else f"none: the baseline {bad.status}"
            return
    differences = paired(own, theirs)
    if a is not base and not differences:
        a.verdict = "no seed in common with the baseline that ended well"
    if differences and a is not base:
        a.difference, a.difference_ci95 = mean_interval(differences)
        if a.difference_ci95 is None:
            a.verdict = "one seed: no interval"
        elif covers(a.difference_ci95, 0.0):
            a.verdict = "no difference shown"
        else:
            a.verdict = "lower loss" if a.difference_ci95[1] < 0 else "higher loss"
    tokens, seconds = [], []
    for seed in sorted(set(own) & set(theirs)):
        curve = a.results[seed].curve
        losses = [p[2] for p in curve]
        tokens.append(first_reach([float(p[0] or 0) for p in curve], losses, theirs[seed]))
        seconds.append(first_reach([float(p[1] or 0) for p in curve], losses, theirs[seed]))
    a.tokens_to_baseline, a.seconds_to_baseline = _mean(tokens), _mean(seconds)


def _mean(values: list[float | None]) -> float | None:
    """Mean; None when there is none, or where one of them is (a seed that never got there)."""
    return None if not values or None in values else plain.fmean(v for v in values if v is not None)


def _notes(arms: list[ArmResult], base: ArmResult) -> list[str]:
    notes = _starts(arms, base)
    for a in arms:
        if a.edge:
            notes.append(f"{a.name}: {a.edge}")
        skipped = sum(r.events.get("skip", 0) for r in a.results.values())
        back = sum(r.events.get("rollback", 0) for r in a.results.values())
        if a.status == "ok" and (skipped or back):
            notes.append(f"{a.name}: monitors skipped {skipped} steps and rolled back {back} times over all seeds")
    trials = {id(r): r for a in arms for r in a.good.values()}.values()  # arms that are equal share theirs
    if len({(r.environment.get("device_name"), r.environment.get("threads")) for r in trials}) > 1:
        notes.append("trials ran on different machines or numbers of threads: compare speeds with care")
    shared = [r.jobs for r in trials if r.jobs > 1]
    if shared:
        many = "all trials" if len(shared) == len(trials) else f"{len(shared)} of {len(trials)} trials"
        notes.append(f"{many} ran up to {max(shared)} at the same time, so speeds are those of shared hardware")
    codes = Counter(r.environment["code"] for r in trials if r.environment.get("code"))
    if len(codes) > 1:
        each = ", ".join(f"{code} ({n})" for code, n in sorted(codes.items()))
        notes.append(f"the package's source changed while the trials ran: code {each}")
    return notes


def _starts(arms: list[ArmResult], base: ArmResult) -> list[str]:
    """What the digests say of the arms' starts, seed by seed against the baseline's."""
    differ: dict[str, list[str]] = {"weights": [], "data": []}
    alike, unknown = [], []
    for a in arms:
        if a is base:
            continue
        pairs = {
            what: [
                (getattr(r, f"{what}_digest"), getattr(base.results.get(seed), f"{what}_digest", ""))
                for seed, r in a.results.items()
            ]
            for what in differ
        }
        other = [what for what, each in pairs.items() if any(x and y and x != y for x, y in each)]
        for what in other:
            differ[what].append(a.name)
        if not all(each and all(x and y for x, y in each) for each in pairs.values()):
            unknown.append(a.name)
        elif not other:
            alike.append(a.name)
    notes = []
    checked = f"seed by seed (checked by digests of all weights and of the first {BATCHES} batches)"
    if alike and not unknown and not any(differ.values()):
        notes.append(f"same initial weights and same data order in all arms, {checked}")
    elif alike:
        notes.append(f"same initial weights and same data order as the baseline, {checked}: {', '.join(alike)}")
    if differ["weights"]:
        notes.append(f"different initial weights than the baseline: {', '.join(differ['weights'])}")
    if differ["data"]:
        notes.append(f"different data order than the baseline: {', '.join(differ['data'])}")
    if unknown:
        notes.append(f"initial weights and data order not checked for every seed: {', '.join(unknown)}")
    return notes
