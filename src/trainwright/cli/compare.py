"""``trainwright compare``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError


def run(
    recipe: Path | None,
    overrides: list[str],
    *,
    varied: list[str],
    arms: list[str],
    baseline: str | None,
    seeds: int,
    budget: str | None,
    tune: list[str],
    out: Path | None,
    trials: Path | None,
    json: Path | None,
    jobs: int,
    keep: bool,
) -> None:
    """Parse, run, print."""
    from trainwright.lab.arms import parse_arm, parse_vary
    from trainwright.lab.comparison import default_out, make_plan, run_plan
    from trainwright.lab.pool import Pool
    from trainwright.lab.render import write_json_file
    from trainwright.lab.trial import TrialStore
    from trainwright.lab.tuning import parse_tune

    if not varied and not arms:
        raise ConfigError(
            "nothing to compare: give --vary KEY=A,B,... with two values or more, or --arm NAME:KEY=VALUE,..."
        )
    plan = make_plan(
        recipe,
        overrides,
        varied=_once(map(parse_vary, varied), "--vary"),
        arms=[parse_arm(a) for a in arms],
        baseline=baseline,
        seeds=seeds,
        budget=budget,
        tune=_once(map(parse_tune, tune), "--tune"),
    )
    folder = out or default_out(recipe, plan)
    report(f"{len(plan.arms)} arms, {plan.units} trials, into {folder}")
    pool = Pool(TrialStore(trials or folder / "trials"), jobs, keep)
    found = run_plan(plan, pool, recipe.stem if recipe else "quickstart", report)
    found.write(folder)
    if json is not None:
        write_json_file(json, found.to_dict())
    show(found)
    print(folder / "compare.html")


def show(c: Any) -> None:
    """Print the table to stdout."""
    from rich.table import Table
    from rich.text import Text

    from trainwright.cli.output import out
    from trainwright.lab.render import cells, has_tuning, headings, legend, reasons, title

    tuned = has_tuning(c)
    view = Table(title=title(c), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings(tuned)):
        view.add_column(heading, no_wrap=i == 0, overflow="fold")
    for a in c.arms:
        view.add_row(*map(Text, cells(a, tuned)))
    console = out()
    console.print(view)
    for line in [*reasons(c), *legend(c), *c.notes]:
        console.print(Text(line))


def report(line: str) -> None:
    """Progress goes to stderr, so that stdout is the result alone."""
    print(line, file=sys.stderr, flush=True)


def _once(pairs: Iterable[tuple[str, list[Any]]], option: str) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for key, values in pairs:
        if key in out:
            raise ConfigError(f"{key} is given twice; put all its values into one", key=option)
        out[key] = values
    return out
