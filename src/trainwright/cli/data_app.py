"""The arguments of ``trainwright data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

data_app = typer.Typer(help="Build, filter, deduplicate and look into corpora.", no_args_is_help=True)

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="[NAME=]INPUT", help="Files, globs or folders; NAME becomes the source of their documents."),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must be empty.")]
Workers = Annotated[int, typer.Option(min=0, help="Worker processes; 0: none beside this one. The result is the same.")]
InputFormat = Annotated[
    str | None, typer.Option("--input-format", help="text, jsonl, parquet, warc or hf; default: by the file names.")
]
TextKey = Annotated[str, typer.Option(help="Field or column that holds the text.")]
Split = Annotated[str | None, typer.Option(help="Split of a datasets folder.")]
Lines = Annotated[bool, typer.Option("--lines", help="Text files: a document a line, not a file.")]
Encodings = Annotated[
    str, typer.Option(help="Encodings to try for each row, by comma, such as utf-8,cp1252.", metavar="A,B")
]
OnBad = Annotated[str, typer.Option(help="Malformed rows: refuse, or skip and count them.")]
MaxBad = Annotated[
    float, typer.Option(min=0.0, help="Most rows to skip in an input: a number, or a share below 1 of all rows.")
]
Format = Annotated[str, typer.Option("--format", help="jsonl, parquet, hf, warc or text.")]
Compression = Annotated[str, typer.Option(help="none, gz or zst.")]
ShardSize = Annotated[int, typer.Option(min=1, metavar="MIB", help="Text in one file, in MiB.")]
WorkDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where indices lie meanwhile; default: the system's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _split(names: str) -> list[str]:
    return [n.strip() for n in names.split(",") if n.strip()]


def _reading(
    input_format: str | None, text_key: str, split: str | None, lines: bool, encodings: str, **policy: Any
) -> dict[str, Any]:
    return {
        "format": input_format,
        "text_key": text_key,
        "split": split,
        "lines": lines or None,
        "encodings": _split(encodings),
        **policy,
    }


def _writing(format: str, compression: str, shard_size: int) -> dict[str, Any]:
    return {"format": format, "compression": compression, "shard_bytes": shard_size << 20}


@data_app.command("build")
def build(
    inputs: Inputs,
    out: Out,
    stages: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML list of stages, in their order, with settings.")
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:KEY=VALUE,...]", help="One stage; may be given several times.")
    ] = None,
    workers: Workers = 0,
    input_format: InputFormat = None,
    text_key: TextKey = "text",
    split: Split = None,
    lines: Lines = False,
    encodings: Encodings = "utf-8",
    on_bad: OnBad = "refuse",
    max_bad: MaxBad = 0.01,
    format: Format = "jsonl",
    compression: Compression = "none",
    shard_size: ShardSize = 512,
    work_dir: WorkDir = None,
    json: Json = False,
) -> None:
    """Send documents through stages of cleaning; without any: unique ids, Unicode, lengths, exact and near copies."""
    from trainwright.cli import data as command

    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad)
    command.build(
        inputs, out, stages, stage=stage or [], workers=workers, reading=reading,
        writing=_writing(format, compression, shard_size), work_dir=work_dir, json=json,
    )  # fmt: skip


@data_app.command("dedup")
def dedup(
    inputs: Inputs,
    out: Out,
    threshold: Annotated[float, typer.Option(help="Least Jaccard similarity of a near copy.")] = 0.8,
    ngram: Annotated[int, typer.Option(help="Words in a row that make one item of comparison.")] = 5,
    unit: Annotated[str, typer.Option(help="word or char.")] = "word",
    permutations: Annotated[int, typer.Option(help="Numbers in a signature.")] = 128,
    bands: Annotated[int | None, typer.Option(help="Bands of a signature; default: by the threshold.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of a band.")] = None,
    verify: Annotated[str, typer.Option(help="How a candidate pair is checked: exact, signature or none.")] = "exact",
    max_steps: Annotated[
        int, typer.Option(min=0, help="Most pairs between a removed document and the kept one; 0: no limit.")
    ] = 2,
    scope: Annotated[str, typer.Option(help="global, or local: within each source.")] = "global",
    priority: Annotated[str, typer.Option(metavar="A,B", help="Sources whose copy is rather kept, by comma.")] = "",
    keep: Annotated[str, typer.Option(help="Of equal sources: longest or first.")] = "longest",
    max_source_loss: Annotated[float, typer.Option(help="Stop where a source would lose a greater share.")] = 0.9,
    exact: Annotated[bool, typer.Option("--exact", help="Remove copies only that are equal to the character.")] = False,
    workers: Workers = 0,
    input_format: InputFormat = None,
    text_key: TextKey = "text",
    split: Split = None,
    lines: Lines = False,
    encodings: Encodings = "utf-8",
    on_bad: OnBad = "refuse",
    max_bad: MaxBad = 0.01,
    format: Format = "jsonl",
    compression: Compression = "none",
    shard_size: ShardSize = 512,
    work_dir: WorkDir = None,
    json: Json = False,
) -> None:
    """Remove near and exact copies (MinHash-LSH, each pair checked)."""
    from trainwright.cli import data as command

    settings = {
        "threshold": threshold, "ngram": ngram, "unit": unit, "permutations": permutations, "bands": bands,
        "rows": rows, "verify": verify, "max_steps": max_steps or None, "scope": scope, "priority": _split(priority),
        "keep": keep, "max_source_loss": max_source_loss,
    }  # fmt: skip
    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad)
    command.dedup(
        inputs, out, settings, exact_only=exact, workers=workers, reading=reading,
        writing=_writing(format, compression, shard_size), work_dir=work_dir, json=json,
    )  # fmt: skip


@data_app.command("filter")
def filter(
    inputs: Inputs,
    out: Out,
    where: Annotated[
        list[str] | None, typer.Option(metavar="CONDITION", help="Such as 'score >= 3'; may be given several times.")
    ] = None,
    licence: Annotated[list[str] | None, typer.Option(help="Licence to keep; may be given several times.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Language to keep, such as en; may be given several times.")
    ] = None,
    least_score: Annotated[float, typer.Option(help="Least probability of the language.")] = 0.0,
    min_chars: Annotated[
        int | None, typer.Option(help="Least characters, white space and punctuation not counted.")
    ] = None,
    max_chars: Annotated[int | None, typer.Option(help="Most characters.")] = None,
    workers: Workers = 0,
    input_format: InputFormat = None,
    text_key: TextKey = "text",
    split: Split = None,
    lines: Lines = False,
    encodings: Encodings = "utf-8",
    on_bad: OnBad = "refuse",
    max_bad: MaxBad = 0.01,
    format: Format = "jsonl",
    compression: Compression = "none",
    shard_size: ShardSize = 512,
    json: Json = False,
) -> None:
    """Keep the documents that meet all the conditions given."""
    from trainwright.cli import data as command

    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad)
    command.filter(
        inputs, out, language=language or [], least_score=least_score, min_chars=min_chars, max_chars=max_chars,
        licence=licence or [], where=where or [], workers=workers, reading=reading,
        writing=_writing(format, compression, shard_size), json=json,
    )  # fmt: skip


@data_app.command("inspect")
def inspect(
    inputs: Inputs,
    page: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page of samples into this folder.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first documents only.")] = None,
    input_format: InputFormat = None,
    text_key: TextKey = "text",
    split: Split = None,
    lines: Lines = False,
    encodings: Encodings = "utf-8",
    json: Json = False,
) -> None:
    """Count sources, licences, lengths, copies and bad rows; of a built corpus, show what its stages did."""
    from trainwright.cli import data as command

    reading = _reading(input_format, text_key, split, lines, encodings)
    command.inspect(inputs, page, limit=limit, reading=reading, json=json)
