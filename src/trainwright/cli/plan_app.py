"""The commands of ``trainwright plan``: argument handling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

plan_app = typer.Typer(help="Predict before a run, and hold the prediction against it.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with the curve.")]


@plan_app.command("placement")
def placement(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE] [KEY=VALUE", help="A YAML file, then overrides like optimizer.weight_decay=1."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="The source to place; default: that of data.mixer.")] = None,
    json: Json = False,
) -> None:
    """Where in a run a source of data is remembered best (TREC)."""
    from trainwright.cli import plan as command
    from trainwright.cli.app import split_arguments

    command.placement(*split_arguments(arguments), source, json)


@plan_app.command("reevaluate")
def reevaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="A run on other data; its losses are taken off, as batches differ in difficulty."
        ),
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Steps to smooth over; default: a hundredth.")] = None,
    json: Json = False,
) -> None:
    """The loss of a run's final weights on each of its batches, beside the predicted curve, and the m that fits."""
    from trainwright.cli import plan as command

    command.reevaluate(run, against, window, json)


@plan_app.command("comm")
def comm(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE] [KEY=VALUE", help="A YAML file, then overrides like parallel.tp=8."),
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks; default: 8.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="YAML", help="Machines and links; default: H100 nodes.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Tokens of documents, numbers between blanks; default: a row is one document."
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Layouts to show besides the recipe's own.")] = 8,
    json: Json = False,
) -> None:
    """What each way of sharing the model over ranks sends per step, and the predicted time of a step."""
    from trainwright.cli import plan_comm as command
    from trainwright.cli.app import split_arguments

    command.comm(*split_arguments(arguments), world, cluster, lengths, most, json)


@plan_app.command("sppo")
def sppo(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE] [KEY=VALUE", help="A YAML file, then overrides like train.seq_len=8192."),
    ] = None,
) -> None:
    """Measure times, sizes and bandwidth that SPPO's chunks and offloading go by, as lines of the recipe."""
    from trainwright.cli import plan_sppo as command
    from trainwright.cli.app import split_arguments

    command.sppo(*split_arguments(arguments))
