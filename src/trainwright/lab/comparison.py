"""``compare``: the same training with different settings, under equal conditions, and what the difference is worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.config.run_config import RunConfig, apply_override, read_recipe
from trainwright.core.distributed import default_device
from trainwright.core.errors import ConfigError, nearest
from trainwright.lab.arms import Arm, Grid, check_arms, resolve, validated, value_at
from trainwright.lab.arms import vary as product
from trainwright.lab.budget import Budget
from trainwright.lab.identity import Inputs, inputs_of, paths_in
from trainwright.lab.pool import Pool
from trainwright.lab.prepare import prepare
from trainwright.lab.rates import kept_rates, note, rates_of
from trainwright.lab.summary import ArmResult, summarise
from trainwright.lab.trial import Trial, TrialResult, TrialStore, make_trial
from trainwright.lab.tuning import Request, Tuned, halve, parse_grid, points, trials_per_arm

Report = Callable[[str], None]


@dataclass
class Comparison:
    """What a comparison found. ``to_dict()`` is the JSON; ``write(folder)`` the Markdown, JSON and HTML pages."""

    arms: list[ArmResult]
    baseline: str
    recipe: str
    budget: Budget
    seeds: list[int]
    jobs: int
    trials: Path | None = None  # the store
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> ArmResult:
        return next(a for a in self.arms if a.name == name)

    @property
    def environment(self) -> dict[str, Any]:
        return next((r.environment for a in self.arms for r in a.results.values() if r.environment), {})

    def to_dict(self) -> dict[str, Any]:
        return {
            "arms": [a.to_dict() for a in self.arms],
            "baseline": self.baseline,
            "recipe": self.recipe,
            "budget": {self.budget.kind: self.budget.amount},
            "seeds": self.seeds,
            "jobs": self.jobs,
            "notes": self.notes,
            "environment": self.environment,
            "trials": None if self.trials is None else str(self.trials),
        }

    def markdown(self) -> str:
        from trainwright.lab.render import markdown

        return markdown(self)

    def write(self, folder: Path | str) -> Path:
        """Write compare.md, compare.json and compare.html; returns the folder."""
        from trainwright.lab.render import write

        return write(self, Path(folder))


@dataclass
class Plan:
    """A comparison that is valid and ready to run."""

    base: dict[str, Any]
    arms: list[Arm]
    grids: dict[str, Grid]  # of the tuned arms
    baseline: str
    seeds: list[int]
    budget: Budget
    device: str
    inject: dict[str, Any] | None = None
    probes: tuple[Any, ...] = ()
    flops: dict[str, float] = field(default_factory=dict)  # per token, by arm
    untuned: list[str] = field(default_factory=list)  # arms that name a tuned setting themselves
    kept_rates: dict[str, dict[str, float]] = field(default_factory=dict)  # by arm: those that its tuning leaves alone
    known_inputs: dict[str, Inputs] = field(default_factory=dict, repr=False)  # by what of a recipe names files

    def trial(self, arm: Arm, settings: Mapping[str, Any], fraction: float, seed: int) -> Trial:
        """``settings``: what tuning or references add to the arm."""
        whole = fraction == 1.0
        return make_trial(
            resolve(self.base, {**arm.fixed, **settings}),
            self.budget.share(fraction * arm.share),
            seed,
            device=self.device,
            flops_per_token=self.flops.get(arm.name),
            inject=self.inject,
            probes=self.probes if whole else (),
            inputs=self._inputs,
        )

    def _inputs(self, config: RunConfig) -> Inputs:
        """Looked at once for all trials that name the same files: a source may be of thousands."""
        key = json.dumps([[s.model_dump(mode="json") for s in config.data.sources], paths_in(config)])
        if key not in self.known_inputs:
            self.known_inputs[key] = inputs_of(config)
        return self.known_inputs[key]

    @property
    def units(self) -> int:
        """Trainings that the plan asks for, equal ones counted each time."""
        tuning = sum(trials_per_arm(len(points(g))) for g in self.grids.values())
        return tuning + len(self.arms) * len(self.seeds)


def compare(
    recipe: str | Path | dict[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    arms: Sequence[Arm] = (),
    baseline: str | None = None,
    seeds: int = 3,
    budget: Budget | str | dict[str, Any] | None = None,
    tune: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    trials: Path | str | None = None,
    jobs: int = 1,
    keep: bool = False,
    inject: dict[str, Any] | None = None,
    probes: Sequence[Any] = (),
    report: Report | None = None,
    deadline: float | None = None,
) -> Comparison:
    """Train every arm with every seed under the same budget, and compare.

    recipe     YAML file, mapping, or None for the quickstart; ``overrides`` are ``key=value`` texts on top of it.
    vary       ``{"optimizer": ["adamw", "muon"]}``: the arms are all combinations, the first one the baseline.
    arms       further arms. Without ``vary`` and with one arm only, the recipe as it is stands first as ``recipe``.
    seeds      how many: the recipe's ``run.seed`` and those after it.
    budget     ``"tokens=2M"``, ``"seconds=60"`` or ``"flops=1e13"``; None: the recipe's own length.
    tune       ``{"optimizer.lr": "log:1e-4:1e-1:7"}``: each arm is tuned by successive halving, see ``lab.tuning``;
               an arm that sets the key itself, or takes it from another arm, is not.
    out        folder for compare.md, compare.json and compare.html; None: nothing is written.
    trials     folder of the trial store; None: ``out/trials``. Finished trials found there are not run again.
    jobs       trials at the same time. Speeds are honest with one.
    keep       leave the last checkpoint of each trial.
    inject     faults, e.g. ``{"spikes": {"factor": 1000, "steps": [0.25, 0.5]}}``; see ``lab.injection``.
    probes     what to measure on the final weights; see ``lab.probes``.
    report     gets one line for each finished trial.
    deadline   ``time.monotonic()`` after which no trial is started; then TimeIsUp is raised.

    Raises ConfigError naming the arm before anything runs. An arm that fails or diverges is reported as such, and the
    others go on. Killed at any moment, the same call goes on where it was.
    """
    plan = make_plan(
        recipe, overrides, varied=vary, arms=arms, baseline=baseline, seeds=seeds, budget=budget, tune=tune,
        inject=inject, probes=probes,
    )  # fmt: skip
    if trials is None and out is None:
        raise ConfigError("give out= or trials=, where the trials are kept")
    store = TrialStore(trials if trials is not None else Path(str(out)) / "trials")
    name = "quickstart" if recipe is None else Path(recipe).stem if not isinstance(recipe, dict) else "recipe"
    found = run_plan(plan, Pool(store, jobs, keep, deadline), name, report or (lambda line: None))
    if out is not None:
        found.write(out)
    return found


def make_plan(
    recipe: str | Path | dict[str, Any] | None,
    overrides: Sequence[str] = (),
    *,
    varied: Mapping[str, Sequence[Any]] | None = None,
    arms: Sequence[Arm] = (),
    baseline: str | None = None,
    seeds: int = 3,
    budget: Budget | str | dict[str, Any] | None = None,
    tune: Mapping[str, Any] | None = None,
    inject: dict[str, Any] | None = None,
    probes: Sequence[Any] = (),
) -> Plan:
    """Everything that can be wrong is found here. Raises ConfigError."""
    from trainwright.lab.injection import parse_inject
    from trainwright.lab.probes import parse_probe

    base = read_recipe(recipe)
    for text in overrides:
        apply_override(base, text)
    chosen = [*product(varied or {}), *arms]
    if not varied and len(chosen) == 1:
        chosen.insert(0, Arm("recipe"))
    if len(chosen) < 2:
        raise ConfigError("nothing to compare: give two values or more to vary (--vary KEY=A,B), or an arm (--arm)")
    check_arms(chosen)
    names = [a.name for a in chosen]
    if baseline is not None and baseline not in names:
        raise ConfigError(f"no such arm; {nearest(baseline, names)}", key="baseline", value=baseline)
    if seeds < 1:
        raise ConfigError("should be at least 1", key="seeds", value=seeds)
    common = {k: parse_grid(v, k) for k, v in (tune or {}).items()}
    grids: dict[str, Grid] = {}
    untuned = []
    configs = {}
    kept = {}
    for arm in chosen:
        grid = {k: parse_grid(v, k) for k, v in arm.tune.items()} if arm.tune is not None else common
        if arm.tune is None and set(grid) & set(arm.set):
            untuned.append(arm.name)  # it says itself what tuning would choose
        elif grid:
            grids[arm.name] = grid
        rates = []
        for point in points(grids.get(arm.name, {})):  # without a grid one point: nothing added
            configs[arm.name] = validated(arm.name, resolve(base, {**arm.fixed, **point}))
            rates.append(rates_of(configs[arm.name]))
        if left := kept_rates(rates):
            kept[arm.name] = left
    sizes = {name: len(points(grid)) for name, grid in grids.items()}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{n}: {size}" for n, size in sizes.items())
        raise ConfigError(f"tuned arms need the same number of points, so that none is favoured; got {each}")
    if inject:
        inject = parse_inject(inject)
    for probe in probes:
        parse_probe(probe)
    first = RunConfig.from_dict(read_recipe(base)) if _valid_alone(base) else next(iter(configs.values()))
    length = Budget.parse(budget) if budget is not None else Budget.of_recipe(first.train)
    plan = Plan(
        base=base,
        arms=chosen,
        grids=grids,
        baseline=baseline or names[0],
        seeds=[first.run.seed + i for i in range(seeds)],
        budget=length,
        device=default_device().type,
        inject=inject or None,
        probes=tuple(probes),
        untuned=untuned,
        kept_rates=kept,
    )
    for end in (0, -1):  # what arms take from others is found out before anything runs
        settle(plan, {name: Tuned(list(points(grid)), best=end) for name, grid in grids.items()})
    plan.flops = prepare(configs, flops=length.kind == "flops")
    return plan


def _valid_alone(base: dict[str, Any]) -> bool:
    try:
        RunConfig.from_dict(read_recipe(base))
    except ConfigError:
        return False  # only the arms complete it
    return True


def default_out(recipe: Path | None, plan: Plan) -> Path:
    """``runs/compare/<recipe>-<hash>``; seeds do not count, so that more of them go into the same folder."""
    whole = {
        "base": plan.base, "budget": str(plan.budget), "baseline": plan.baseline,
        "arms": [[a.name, a.set, *([a.share] if a.share != 1 else [])] for a in plan.arms],
        "grids": {k: dict(v) for k, v in plan.grids.items()},
    }  # fmt: skip
    digest = hashlib.blake2b(json.dumps(whole, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
    return Path("runs/compare") / f"{recipe.stem if recipe else 'quickstart'}-{digest}"


def run_plan(plan: Plan, pool: Pool, recipe: str, report: Report) -> Comparison:
    """Tune, train, summarise."""
    lines = Lines(plan, report, pool.store)
    by_name = {a.name: a for a in plan.arms}
    reasons: dict[str, str] = {}  # the first bad end of each arm's tuning

    def losses(requests: Sequence[Request]) -> list[float]:
        trials = [plan.trial(by_name[r.arm], tuned_points[r.arm][r.point], r.fraction, plan.seeds[0]) for r in requests]
        names = [f"{r.arm} {_words(tuned_points[r.arm][r.point])}, {r.fraction:g} of the budget" for r in requests]
        lines.expect(list(zip(trials, names, strict=True)))
        found = pool.run(trials, lines.finished)
        for request, trial in zip(requests, trials, strict=True):
            if (result := found[trial.key]).status != "ok":
                reasons.setdefault(request.arm, f"{result.status}: {result.error}")
        return [_score(found[t.key]) for t in trials]

    tuned_points = {name: points(grid) for name, grid in plan.grids.items()}
    tuned = halve(plan.grids, losses) if plan.grids else {}
    settings = settle(plan, tuned)
    trials = {
        arm.name: {seed: plan.trial(arm, extra, 1.0, seed) for seed in plan.seeds}
        for arm in plan.arms
        if (extra := settings[arm.name]) is not None
    }
    # Seed by seed, so that a comparison that is stopped early has whole seeds.
    order = [(each[seed], f"{name} seed {seed}") for seed in plan.seeds for name, each in trials.items()]
    lines.expect(order)
    found = pool.run([t for t, _ in order], lines.finished)
    results = {name: {seed: found[t.key] for seed, t in each.items()} for name, each in trials.items()}
    keys = {name: {seed: t.key for seed, t in each.items()} for name, each in trials.items()}
    arms, notes = summarise(plan, settings, tuned, reasons, results, keys)
    notes += [f"{name}: not tuned, since it names the setting itself" for name in plan.untuned]
    notes += [note(name, kept) for name, kept in plan.kept_rates.items()]
    notes += [f"{a.name}: trained for {a.share:g} of the budget" for a in plan.arms if a.share != 1]
    return Comparison(arms, plan.baseline, recipe, plan.budget, plan.seeds, pool.jobs, pool.store.root, notes)


def settle(plan: Plan, tuned: Mapping[str, Tuned]) -> dict[str, dict[str, Any] | None]:
    """What each arm trains with beyond its fixed settings; None where its tuning, or that of one it follows, failed."""
    out: dict[str, dict[str, Any] | None] = {}
    by_name = {a.name: a for a in plan.arms}

    def one(name: str) -> dict[str, Any] | None:
        if name in out:
            return out[name]
        arm, result = by_name[name], dict[str, Any]()
        out[name] = None
        if name in tuned:
            if tuned[name].best is None:
                return None
            result |= tuned[name].chosen
        for key, reference in arm.references().items():
            other = one(reference.of)
            if other is None:
                return None
            data = validated(reference.of, resolve(plan.base, {**by_name[reference.of].fixed, **other})).to_dict()
            value = value_at(data, reference.key, reference.of)
            if reference.times != 1.0:
                if not isinstance(value, int | float) or isinstance(value, bool):
                    raise ConfigError(f"arm {name!r}: {reference.of} has {value!r} there, which is no number", key=key)
                value = float(f"{value * reference.times:.6g}")
            result[key] = value
        validated(name, resolve(plan.base, {**arm.fixed, **result}))
        out[name] = result
        return result

    for arm in plan.arms:
        one(arm.name)
    return out


def _score(result: TrialResult) -> float:
    return result.val_loss if result.status == "ok" and result.val_loss is not None else float("inf")


def _words(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


class Lines:
    """One line for each finished trial, and which of how many."""

    def __init__(self, plan: Plan, report: Report, store: TrialStore):
        self.total, self.done, self.report, self.store = plan.units, 0, report, store
        self.users: dict[str, list[str]] = {}
        self.passed_over = False  # trials of other code or data were found, and it was said

    def expect(self, trials: Sequence[tuple[Trial, str]]) -> None:
        self.users = {}
        others: dict[str, list[str]] = {}
        for trial, name in trials:
            self.users.setdefault(trial.key, []).append(name)
            if not self.passed_over and trial.key not in others and self.store.finished(trial) is None:
                others[trial.key] = self.store.others(trial)
        found = [what for what in others.values() if what]
        if found:
            self.passed_over = True
            what = " and ".join(sorted({w for each in found for w in each}))
            count = f"{len(found)} trial" + ("s" if len(found) > 1 else "")
            self.report(f"{self.store.root} holds {count} of the same recipes but of other {what}; they run anew")

    def finished(self, trial: Trial, result: TrialResult, before: bool) -> None:
        from trainwright.train.progress import quantity

        users = self.users[trial.key]
        self.done += len(users)
        names = users[0] + (f" (the same as {', '.join(users[1:])})" if len(users) > 1 else "")
        parts = [f"val loss {result.val_loss:.4f}" if result.status == "ok" else f"{result.status}: {result.error}"]
        parts.append(f"{quantity(result.tokens)} tokens")
        if result.tokens_per_s:
            parts.append(f"{quantity(result.tokens_per_s)} tokens/s")
        parts.append("kept from before" if before else f"{result.wall_seconds:.0f} s")
        self.report(f"[{self.done}/{self.total}] {names}: {', '.join(parts)}")
