"""``trainwright claims``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from trainwright.cli.compare import report
from trainwright.core.errors import ConfigError, InputError


def show_list(folder: Path, json: bool) -> None:
    """Id, method, whether run, verdict."""
    from trainwright.cli.output import out, print_json
    from trainwright.lab.claim import load_claims
    from trainwright.lab.claim_table import records

    found = records(load_claims(folder).values(), folder / "results")
    if json:
        print_json(found)
        return
    from rich.table import Table
    from rich.text import Text

    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("id", "method", "paper", "verdict", "date"):
        view.add_column(heading, no_wrap=heading in ("id", "method"))
    for r in found:
        verdict = r["verdict"] + (" (the experiment changed since)" if r["changed_since"] else "")
        view.add_row(*map(Text, (r["id"], r["method"], r["paper"], verdict, r["date"] or "")))
    out().print(view)


def run(
    ids: list[str], everything: bool, folder: Path, trials: Path, jobs: int, stop_after: float | None, again: bool
) -> None:
    """Run claims one after the other; those that have a result already are passed over."""
    from trainwright import __version__
    from trainwright.lab.claim import load_claims, pick
    from trainwright.lab.claim_run import is_current, is_of_this_code, plan_claim, run_claim, stored_result
    from trainwright.lab.pool import TimeIsUp

    claims = load_claims(folder)
    if everything == bool(ids):
        raise ConfigError("give the ids of claims, or --all")
    chosen = list(claims.values()) if everything else pick(claims, ids)
    deadline = None if stop_after is None else time.monotonic() + 60 * stop_after
    todo = []
    for claim in chosen:
        old = stored_result(folder / "results", claim)
        if old is not None and is_current(old, claim) and not again and old["versions"]["trainwright"] == __version__:
            code = "" if is_of_this_code(old) else ", of other code"
            report(f"{claim.id}: {old['verdict']} ({old['date']}{code}; --again judges it anew)")
        else:
            todo.append(claim)
    wrong = []
    for claim in list(todo):  # what is wrong is said before hours of work, and does not hold up the others
        try:
            plan_claim(claim)
        except InputError as error:
            if not everything:
                raise
            wrong.append(str(error))
            report(f"passed over: {error}")
            todo.remove(claim)
    for i, claim in enumerate(todo):
        report(f"{claim.id} {claim.name}: {claim.experiment}")
        try:
            found = run_claim(
                claim, trials=trials, results=folder / "results", jobs=jobs, deadline=deadline, report=report,
                pages=trials.parent / "pages",
            )  # fmt: skip
        except TimeIsUp as up:
            left = ", ".join(c.id for c in todo[i:])
            print(f"{up}; without a result: {left}")
            break
        show(found)
    if wrong:
        raise InputError(f"{len(wrong)} claims could not be run: {'; '.join(wrong)}")


def show(result: dict[str, Any]) -> None:
    from trainwright.lab.claim_table import measured_words

    print(f"{result['id']}: {result['verdict']}")
    for check in result["checks"]:
        print(f"  {check['words']}: {check['outcome']}" + (f" ({check['reason']})" if check["reason"] else ""))
        if check["measured"] is not None:
            print(f"    {measured_words(check)}")


def table(folder: Path, out: Path) -> None:
    from trainwright.lab.claim import load_claims
    from trainwright.lab.claim_table import claims_table

    claims_table(load_claims(folder).values(), folder / "results", out)
    print(out)
