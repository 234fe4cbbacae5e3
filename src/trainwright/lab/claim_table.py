"""docs/claims.md: what each paper claims, what was measured here, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.lab.claim import Claim
from trainwright.lab.claim_run import is_current, stored_result
from trainwright.lab.render import markdown_table
from trainwright.train.progress import quantity
from trainwright.train.run_dir import write_atomic

NOT_RUN = "not run"
HEAD = """# Claims

What the papers claim, held against a small experiment that anyone can repeat. The verdict is computed from the
measured values: *shown* when every check of the experiment holds (for losses the whole 95 % interval over the seeds),
*contradicted* when an interval lies wholly on the other side, else *not shown at this scale*, which says as much about
the scale as about the method. Results name the digest of the package's source that they were made with (code); the same
arm need not come to the same figures in results of different code. Written by `trainwright claims table`.
"""


def records(claims: Iterable[Claim], results: Path) -> list[dict[str, Any]]:
    """One record a claim: id, method, run, verdict, date."""
    out = []
    for claim in claims:
        result = stored_result(results, claim)
        changed = result is not None and not is_current(result, claim)
        out.append(
            {
                "id": claim.id,
                "name": claim.name,
                "method": claim.method,
                "paper": claim.paper,
                "run": result is not None,
                "changed_since": changed,
                "verdict": NOT_RUN if result is None else result["verdict"],
                "date": None if result is None else result.get("date"),
            }
        )
    return out


def claims_table(claims: Iterable[Claim], results: Path | str, out: Path | str | None = "docs/claims.md") -> str:
    """The page as Markdown, written to ``out``. Raises ConfigError when that cannot be written."""
    text = render(list(claims), Path(results))
    if out is not None:
        path = Path(out)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    return text


def render(claims: list[Claim], results: Path) -> str:
    found = [(claim, stored_result(results, claim)) for claim in claims]
    rows = []
    for claim, result in found:
        if result is None:
            rows.append([claim.id, f"`{claim.method}`", claim.claim, "", NOT_RUN, ""])
            continue
        verdict = f"**{result['verdict']}**" + ("" if is_current(result, claim) else " (the experiment changed since)")
        measured = "<br>".join(measured_words(c) for c in result["checks"])
        rows.append([claim.id, f"`{claim.method}`", claim.claim, measured, verdict, str(result["date"])])
    lines = [HEAD]
    lines += markdown_table(["id", "method", "claimed", "measured here", "verdict", "date"], rows)
    for claim, result in found:
        lines += ["", *section(claim, result)]
    return "\n".join(lines) + "\n"


def measured_words(check: dict[str, Any]) -> str:
    """``val_loss: spam 2.104, adam 2.137; difference -0.033 [-0.041, -0.025]``."""
    if check["measured"] is None:
        return f"{check['quantity']}: {check['reason']}"
    ratio = "ratio_at_most" in check or "ratio_at_least" in check
    form = _figure(check["quantity"])
    text = f"{check['quantity']}: {check['arm']} {form(check['arm_value'])}, "
    text += f"{check['versus']} {form(check['versus_value'])}; "
    change = (lambda v: f"{v:.4g}") if ratio else (lambda v: f"{'+' if v > 0 else ''}{form(v)}")
    text += f"{'ratio' if ratio else 'difference'} {change(check['measured'])}"
    if check["measured_ci95"] is not None:
        low, high = check["measured_ci95"]
        text += f" [{change(low)}, {change(high)}]"
    return text


def _figure(name: str) -> Any:
    return (lambda v: f"{v:.4f}") if "loss" in name and not name.endswith("_to_loss") else quantity


def section(claim: Claim, result: dict[str, Any] | None) -> list[str]:
    lines = [f"## {claim.id}: {claim.name}", "", f"Claimed ({claim.paper}): {claim.claim}", ""]
    lines += [f"Experiment: {claim.experiment}", "", f"What this scale cannot show: {claim.cannot_show}", ""]
    if result is None:
        return [*lines, "Not run."]
    lines += [f"- {c['words']}: {c['outcome']}. {measured_words(c)}" for c in result["checks"]]
    rows = [arm_row(a) for a in result["arms"]]
    lines += [
        "",
        *markdown_table(["arm", "role", "setting", "val loss", "optimizer state", "tokens/s", "status"], rows),
    ]
    made_with = {"code": "not recorded", **{k: v for k, v in result["versions"].items() if v}}
    versions = ", ".join(f"{k} {made_with[k]}" for k in ("torch", "python", "trainwright", "code") if k in made_with)
    seeds = len(result["seeds"])
    lines += [
        "",
        f"{result['date']}; {versions}; {result['machine']}; {seeds} seed{'s' if seeds > 1 else ''}; "
        f"`{result['command']}`",
    ]
    return [*lines, *([""] + [f"- {note}" for note in result["notes"]] if result["notes"] else [])]


def arm_row(a: dict[str, Any]) -> list[str]:
    from trainwright.lab.render import with_interval
    from trainwright.train.progress import memory

    setting = ", ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in a["chosen"].items())
    interval = a["val_loss_ci95"]
    return [
        a["name"],
        a["role"],
        setting,
        with_interval(a["val_loss_mean"], None if interval is None else (interval[0], interval[1])),
        "-" if a["optimizer_state_bytes"] is None else memory(a["optimizer_state_bytes"]),
        "-" if a["tokens_per_s"] is None else quantity(a["tokens_per_s"]),
        a["status"] if a["status"] == "ok" else f"{a['status']}: {a['error']}",
    ]
