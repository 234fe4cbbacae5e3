"""``trainwright data verify`` and ``trainwright data scorer``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from trainwright.core.errors import ConfigError


def verify(
    run: Path,
    candidate: Sequence[str],
    default: Sequence[str] | None,
    *,
    share: float,
    tokens: str | None,
    seeds: int,
    checkpoint: str,
    groups: Sequence[str],
    start_factor: float | None,
    on_overlap: str,
    out: Path | None,
    json: bool,
) -> Any:
    """Parse, verify, print."""
    from trainwright.cli.output import print_json
    from trainwright.config.sections import parse_count
    from trainwright.lab.verification import verify_candidate

    count = parse_count(tokens) if tokens is not None else None
    if count is not None and not isinstance(count, int):
        raise ConfigError("should be a whole number, such as 10M", key="--tokens", value=tokens)
    found = verify_candidate(
        run,
        [_source(s, "--candidate") for s in candidate],
        default=None if default is None else [_source(s, "--default") for s in default],
        share=share,
        tokens=count,
        seeds=seeds,
        checkpoint=checkpoint,
        groups=dict(_group(g) for g in groups),
        start_factor=start_factor,
        on_overlap=cast(Literal["refuse", "warn"], on_overlap),
        out=out,
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if json:
        print_json(found.to_dict())
        return found
    show(found, (out or run / "verification") / "verification.json")
    return found


def show(found: Any, path: Path) -> None:
    from rich.table import Table

    from trainwright.cli.output import out

    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("held-out loss", "default", "candidate", "difference", "95 % interval"):
        view.add_column(heading, justify="left" if heading == "held-out loss" else "right")
    rows = {**found.groups, "mean": {"difference": found.difference, "interval": found.interval}}
    for name, row in rows.items() if len(found.groups) > 1 else found.groups.items():
        interval = row["interval"]
        noise = "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
        sides = (f"{row[a]:.4f}" if a in row else "" for a in ("default", "candidate"))
        view.add_row(name, *sides, f"{row['difference']:+.4f}", noise)
    out().print(view)
    share = found.mixture["candidate"]["share"]
    print(
        f"{found.verdict}: {found.reason}\n{len(found.differences)} seeds, {found.tokens:,} tokens each, "
        f"{share:.2%} candidate, learning rate from {found.learning_rate['start_factor']:.3g} of the peak to 0\n{path}"
    )


def _source(text: str, key: str) -> Any:
    from trainwright.config.run_config import parse_yaml

    if not text.lstrip().startswith("{"):
        return text
    entry = parse_yaml(text, key)
    if not isinstance(entry, dict):
        raise ConfigError("should be a path or {name: ..., path: ...}", key=key, value=text)
    return entry


def _group(text: str) -> tuple[str, Any]:
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest or name == "validation":
        raise ConfigError("should look like NAME=SOURCE, the name not validation", key="--evaluate", value=text)
    return name, _source(rest, "--evaluate")


def scorer(
    inputs: Sequence[str],
    positive: Sequence[str],
    negative: Sequence[str],
    folder: Path,
    *,
    label: str,
    per_class: int,
    held_out: float,
    scale: tuple[float, float],
    settings: dict[str, Any],
    reading: dict[str, Any],
    json: bool,
) -> dict[str, Any]:
    """Train, save and print the figures."""
    from trainwright.cli.data import open_inputs
    from trainwright.cli.output import figures, print_json
    from trainwright.data.build.quality.hashed import HashedRegressor, HashedSettings
    from trainwright.data.build.quality.seeds import NEGATIVE, POSITIVE, select
    from trainwright.data.build.quality.training import train_scorer

    if bool(inputs) == bool(positive or negative):
        raise ConfigError("give documents with ratings, or --positive and --negative", key="inputs")
    if bool(positive) != bool(negative):
        raise ConfigError("a classifier needs both --positive and --negative", key="inputs")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("is not empty; name another folder", key="--out", value=str(folder))
    found: dict[str, Any] = {}
    chosen = {k: v for k, v in settings.items() if v is not None}
    hashed = replace(HashedRegressor.defaults if inputs else HashedSettings(), **chosen)
    if inputs:
        trained = train_scorer(
            open_inputs(inputs, reading), label, settings=hashed, held_out=held_out, low=scale[0], high=scale[1]
        )
    else:
        seeds = select(open_inputs(positive, reading), open_inputs(negative, reading), per_class, seed=settings["seed"])
        found["seeds"] = seeds.figures()
        sides = ((POSITIVE, seeds.positives), (NEGATIVE, seeds.negatives))
        documents = [d.with_metadata(label=name) for name, side in sides for d in side]
        trained = train_scorer(
            documents, "label", kind="classifier", settings=hashed, held_out=held_out, positive=POSITIVE
        )
    found |= trained.figures
    trained.scorer.save(folder)
    if json:
        print_json(found)
    else:
        figures(found)
        print(folder)
    return found
