"""The arguments of ``trainwright data verify`` and ``trainwright data scorer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.data_app import Encodings, InputFormat, Json, MaxBad, OnBad, TextKey, _reading, data_app


@data_app.command("verify")
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that is nearly trained.")],
    candidate: Annotated[
        list[str], typer.Option(metavar="SOURCE", help="Files, folder, or {name: jsonl, path: ...}; may be repeated.")
    ],
    default: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="The default mix; without it the run's own sources.")
    ] = None,
    share: Annotated[float, typer.Option(help="Part of the rows that the candidate fills.")] = 0.3,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of one anneal, such as 10M; default: 1 % of the run's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Orders of the data to try; two anneals each.")] = 3,
    checkpoint: Annotated[str, typer.Option(help="latest, best, a step, or a checkpoint's folder.")] = "latest",
    evaluate: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SOURCE", help="A further held-out set; may be repeated.")
    ] = None,
    start_factor: Annotated[
        float | None, typer.Option(help="Learning rate at the start, of the peak; default: as the checkpoint stands.")
    ] = None,
    on_overlap: Annotated[
        str, typer.Option(help="Candidate with documents of an evaluation set: refuse or warn.")
    ] = "refuse",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Report and anneals; default: RUN/verification.")
    ] = None,
    json: Json = False,
) -> None:
    """Anneal a run with and without candidate data; exit 0 either way, the verdict is printed and written."""
    from trainwright.cli import data_quality as command

    command.verify(
        run, candidate, default or None, share=share, tokens=tokens, seeds=seeds, checkpoint=checkpoint,
        groups=evaluate or [], start_factor=start_factor, on_overlap=on_overlap, out=out, json=json,
    )  # fmt: skip


@data_app.command("scorer")
def scorer(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the scorer.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[NAME=]INPUT]", help="Documents with a rating in their metadata, for a regressor."),
    ] = None,
    label: Annotated[str, typer.Option(help="Metadata that holds the rating.")] = "edu_score",
    positive: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]INPUT", help="Good documents, for a classifier; may be repeated."),
    ] = None,
    negative: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]INPUT", help="Documents of a raw crawl; may be repeated.")
    ] = None,
    per_class: Annotated[int, typer.Option(min=1, help="Most documents of each class.")] = 300_000,
    held_out: Annotated[float, typer.Option(help="Share of the documents that judge the scorer.")] = 0.1,
    low: Annotated[float, typer.Option(help="Lowest rating.")] = 0.0,
    high: Annotated[float, typer.Option(help="Highest rating.")] = 5.0,
    dim: Annotated[
        int | None, typer.Option(help="Size of an n-gram's embedding; default: 256, of a regressor 64.")
    ] = None,
    ngrams: Annotated[int, typer.Option(help="n-grams of 1..N units; 5 suits characters.")] = 3,
    unit: Annotated[str, typer.Option(help="auto, word or char.")] = "auto",
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the documents; default: 3, of a regressor 10.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; default: 0.1, of a regressor 0.5.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and choice.")] = 0,
    input_format: InputFormat = None,
    text_key: TextKey = "text",
    encodings: Encodings = "utf-8",
    on_bad: OnBad = "refuse",
    max_bad: MaxBad = 0.01,
    json: Json = False,
) -> None:
    """Train a scorer of quality: a classifier of good and bad documents, or a regressor on ratings."""
    from trainwright.cli import data_quality as command

    reading = _reading(input_format, text_key, None, False, encodings, on_bad=on_bad, max_bad=max_bad)
    settings = {"dim": dim, "ngrams": ngrams, "unit": unit, "epochs": epochs, "lr": lr, "seed": seed}
    command.scorer(
        inputs or [], positive or [], negative or [], out, label=label, per_class=per_class, held_out=held_out,
        scale=(low, high), settings=settings, reading=reading, json=json,
    )  # fmt: skip
