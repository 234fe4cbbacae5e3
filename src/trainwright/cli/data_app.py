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
GivenLicence = Annotated[
    str | None, typer.Option("--licence", help="Licence of documents that name none, such as MIT.")
]
WorkDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where indices lie meanwhile; default: the system's.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run as Ray Data jobs, with the same result: local, auto (the cluster that this machine is in) or its "
        "address; needs the extra cluster.",
    ),
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
    licence: GivenLicence = None,
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
    ray: Ray = None,
    json: Json = False,
) -> None:
    """Send documents through stages of cleaning; without any: unique ids, Unicode, lengths, exact and near copies.

    A build that was killed goes on by the same command; one whose inputs and stages have not changed does nothing.
    """
    from trainwright.cli import data as command

    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad, licence=licence)
    command.build(
        inputs, out, stages, stage=stage or [], workers=workers, reading=reading,
        writing=_writing(format, compression, shard_size), work_dir=work_dir, ray=ray, json=json,
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
    stage: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:KEY=VALUE,...]", help="A stage that judges, such as verify_code:tau=0.8; last."),
    ] = None,
    scorer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Quality model: a folder, a fastText file or module:function.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Score to pass; default: above 0.5 for probabilities, 3 on other scales.")
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
    json: Json = False,
) -> None:
    """Keep the documents that meet all the conditions given."""
    from trainwright.cli import data as command

    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad)
    command.filter(
        inputs, out, language=language or [], least_score=least_score, min_chars=min_chars, max_chars=max_chars,
        licence=licence or [], where=where or [], stage=stage or [], scorer=scorer, threshold=threshold,
        workers=workers, reading=reading,
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


@data_app.command("mix")
def mix(
    inputs: Annotated[
        list[str], typer.Argument(metavar="NAME=INPUT", help="Files, globs or folders; NAME is used by --weight.")
    ],
    out: Out,
    weight: Annotated[
        list[str] | None, typer.Option(metavar="NAME=W", help="Share of a source, relative to the others'.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Shares by size^(1/T): 1 natural, large equal. Default 1.")
    ] = None,
    total: Annotated[
        str | None, typer.Option(metavar="N", help="Budget, such as 20M; default: all that fits without a repeat.")
    ] = None,
    unit: Annotated[str, typer.Option(help="What shares and budget count: bytes, characters, documents, tokens.")] = (
        "bytes"
    ),
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR", help="Tokenizer, for --unit tokens.")] = None,
    repeat: Annotated[float, typer.Option(help="How often a source may be gone through.")] = 1.0,
    holdout: Annotated[
        float, typer.Option(help="Share of the documents to write into DIR/validation; DIR/train holds the rest.")
    ] = 0.0,
    decontaminate: Annotated[
        list[str] | None, typer.Option(metavar="INPUT", help="Texts that no document may share words with.")
    ] = None,
    ngram: Annotated[int, typer.Option(min=1, help="How many words in a row count as shared.")] = 13,
    shuffle: Annotated[bool, typer.Option(help="Shuffle the documents.")] = True,
    seed: Annotated[int, typer.Option(help="Of the order and of what is held out.")] = 0,
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
    """Mix corpora by weight or temperature into one, within a budget, shuffled, with a part held out."""
    from trainwright.cli import data_mix as command

    reading = _reading(input_format, text_key, split, lines, encodings, on_bad=on_bad, max_bad=max_bad)
    command.mix(
        inputs, out, weights=weight or [], temperature=temperature, total=total, unit=unit, tokenizer=tokenizer,
        repeat=repeat, holdout=holdout, contaminants=decontaminate or [], ngram=ngram, shuffle=shuffle, seed=seed,
        work_dir=work_dir, reading=reading, writing=_writing(format, compression, shard_size), json=json,
    )  # fmt: skip


@data_app.command("card")
def card(
    target: Annotated[
        list[str], typer.Argument(metavar="RECIPE|CORPUS", help="A recipe (.yaml) with overrides, or a folder or file.")
    ],
    allow: Annotated[
        str | None, typer.Option(metavar="A,B", help="Licences that may be in it; others are refused (exit code 2).")
    ] = None,
    attribution: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write who wants to be named, a line a document.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file against its hash.")] = False,
    json: Json = False,
) -> None:
    """What a corpus or a recipe's data is made of: sources, licences, languages, what was done to it."""
    from trainwright.cli import data_card as command

    names = None if allow is None else _split(allow)
    command.card(target[0], names, overrides=target[1:], attribution=attribution, verify=verify, json=json)


@data_app.command("score")
def score(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="Recipe whose data is scored.")
    ] = None,
    teacher: Annotated[
        str, typer.Option(metavar="RUN", help="Run or Hugging Face folder of an early, small model.")
    ] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of scores, for data.first_stage.scores.")] = ...,  # type: ignore[assignment]
    checkpoint: Annotated[str, typer.Option(help="Of a run: latest, best or a step.")] = "latest",
    top_k: Annotated[int, typer.Option(min=1, help="A token is learnable that is among this many likeliest.")] = 10,
    json: Json = False,
) -> None:
    """Score documents by what a small model finds hard and yet learnable (SALT-DS), for the first stage of a run."""
    from trainwright.cli import data_score as command

    command.score(arguments or [], teacher, checkpoint, out, top_k=top_k, json=json)
