"""Runs the experiment of a claim and writes what came of it to results/<id>.json."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright import __version__
from trainwright.config.run_config import read_recipe
from trainwright.core.errors import ConfigError
from trainwright.lab.claim import Claim
from trainwright.lab.comparison import Comparison, Plan, Report, make_plan, run_plan
from trainwright.lab.identity import code_digest
from trainwright.lab.pool import Pool
from trainwright.lab.render import write_json_file
from trainwright.lab.trial import TrialStore
from trainwright.lab.verdict import evaluate, judge


def plan_claim(claim: Claim) -> Plan:
    """Its experiment as a comparison. Raises ConfigError that names the claim."""
    base = read_recipe(claim.source())
    if claim.inject is not None and "monitors" not in base:
        # The loss-spike monitor would skip what is injected and so hide how a method takes it.
        base["monitors"] = [{"name": "non_finite"}]
    try:
        return make_plan(
            base,
            arms=[a.arm() for a in claim.arms],
            baseline=claim.baseline,
            seeds=claim.seeds,
            budget=claim.budget,
            inject=claim.inject.model_dump(mode="json", exclude_none=True) if claim.inject else None,
            probes=claim.probes,
        )
    except ConfigError as error:
        raise ConfigError(f"claim {claim.id}: {error}") from None


def run_claim(
    claim: Claim,
    *,
    trials: Path | str = "runs/claims/trials",
    results: Path | str | None = "claims/results",
    jobs: int = 1,
    deadline: float | None = None,
    report: Report | None = None,
    pages: Path | str | None = None,
) -> dict[str, Any]:
    """Train what is missing, judge, and return the result, which is written to ``results/<id>.json``.

    ``trials`` is shared by all claims, so arms that several have in common are trained once. ``pages``: folder for the
    comparison's Markdown and HTML. Raises ConfigError, Interrupted, and TimeIsUp behind ``deadline``.
    """
    plan = plan_claim(claim)
    pool = Pool(TrialStore(trials), jobs, deadline=deadline)
    found = run_plan(plan, pool, f"{claim.id} {claim.name}", report or (lambda line: None))
    out = result_of(claim, found)
    if pages is not None:
        found.write(Path(pages) / claim.id)
    if results is not None:
        write_json_file(Path(results) / f"{claim.id}.json", out)
    return out


def result_of(claim: Claim, found: Comparison) -> dict[str, Any]:
    """Figures, checks and verdict of a comparison that was run for ``claim``."""
    arms = {a.name: a for a in found.arms}
    checks = [evaluate(c, arms[c.arm], arms[c.versus]) for c in claim.checks]
    verdict, reason = judge(checks, arms)
    environment = found.environment
    return {
        "id": claim.id,
        "method": claim.method,
        "paper": claim.paper,
        "claim": claim.claim,
        "experiment": claim.experiment,
        "verdict": verdict,
        "reason": reason,
        "checks": [c.to_dict() for c in checks],
        "cannot_show": claim.cannot_show,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command(claim),
        "versions": {k: environment.get(k) for k in ("torch", "python")}
        | {"trainwright": __version__, "code": environment.get("code")},
        "machine": machine(environment),
        "seeds": found.seeds,
        "budget": claim.budget,
        "jobs": found.jobs,
        "notes": found.notes,
        "digest": claim.digest,
        "arms": [a.to_dict() for a in found.arms],
    }


def command(claim: Claim) -> str:
    where = claim._path.parent if claim._path is not None else Path("claims")
    extra = [] if str(where) == "claims" or where.is_absolute() else ["--dir", str(where)]
    return shlex.join(["trainwright", "claims", "run", claim.id, *extra])


def machine(environment: dict[str, Any]) -> str:
    """``2 CPU cores, fp32`` or ``NVIDIA H200, bf16``."""
    if not environment:
        return ""
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(
        environment.get("compute_dtype", ""), environment.get("compute_dtype", "")
    )
    if environment.get("device") != "cpu":
        return f"{environment.get('device_name')}, {dtype}"
    threads = environment.get("threads")
    return f"{threads} CPU core{'' if threads == 1 else 's'} ({environment.get('device_name')}), {dtype}"


def stored_result(results: Path, claim: Claim) -> dict[str, Any] | None:
    """The result of ``claim``, None where it was not run. Raises ConfigError for a damaged file."""
    path = results / f"{claim.id}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); delete it and run the claim again") from None
    if not isinstance(data, dict) or "verdict" not in data:
        raise ConfigError(f"{path} is no result of a claim; delete it and run the claim again")
    return data


def is_of_this_code(result: dict[str, Any]) -> bool:
    """Whether the package's source is still what the result was made with, as far as the result tells."""
    return result["versions"].get("code") in (None, code_digest())


def is_current(result: dict[str, Any], claim: Claim) -> bool:
    """Whether the result is of this experiment, and not of an earlier form of the file."""
    return result.get("digest") == claim.digest
