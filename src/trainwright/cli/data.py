"""``trainwright data``: build, filter and deduplicate corpora, and look into them."""

from __future__ import annotations

import json as jsonlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError


def build(
    inputs: Sequence[str],
    out: Path,
    stages: Path | None = None,
    *,
    stage: Sequence[str] = (),
    workers: int = 0,
    reading: dict[str, Any] | None = None,
    writing: dict[str, Any] | None = None,
    work_dir: Path | None = None,
    ray: str | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Inputs through the stages of a YAML file, those of ``stage`` (``name:key=value,...``), or the usual ones."""
    from trainwright.data.build.stages import DEFAULT_STAGES

    if stages is not None and stage:
        raise ConfigError("give the stages in a file or one by one, not both", key="--stage", value=list(stage))
    spec: Sequence[Any] = read_stages(stages) if stages else [parse_stage(s) for s in stage] or DEFAULT_STAGES
    return run(inputs, out, spec, workers, reading or {}, writing or {}, work_dir, json, ray)


def filter(
    inputs: Sequence[str],
    out: Path,
    *,
    language: Sequence[str] = (),
    least_score: float = 0.0,
    min_chars: int | None = None,
    max_chars: int | None = None,
    licence: Sequence[str] = (),
    where: Sequence[str] = (),
    stage: Sequence[str] = (),
    scorer: str | None = None,
    threshold: float | None = None,
    workers: int = 0,
    reading: dict[str, Any] | None = None,
    writing: dict[str, Any] | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Keep the documents that meet all conditions given. Raises ConfigError where none is."""
    spec: list[Any] = [{"where": {"condition": w}} for w in where]
    if licence:
        spec.append({"licences": {"allowed": list(licence)}})
    if min_chars is not None or max_chars is not None:
        spec.append({"lengths": {"least": min_chars or 0, "most": max_chars}})
    if language:
        spec.append({"language": {"keep": list(language), "least_score": least_score}})
    if scorer is not None:
        spec.append({"quality": {"model": scorer, "threshold": threshold}})
    elif threshold is not None:
        raise ConfigError("is of a scorer's scores; give --scorer too", key="--threshold", value=threshold)
    spec += [parse_stage(s) for s in stage]
    if not spec:
        raise ConfigError(
            "nothing to filter by; give --where, --licence, --language, --min-chars, --max-chars, --scorer or --stage"
        )
    return run(inputs, out, spec, workers, reading or {}, writing or {}, None, json)


def dedup(
    inputs: Sequence[str],
    out: Path,
    settings: dict[str, Any],
    *,
    exact_only: bool = False,
    workers: int = 0,
    reading: dict[str, Any] | None = None,
    writing: dict[str, Any] | None = None,
    work_dir: Path | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """Remove exact and near copies; ``settings`` are those of NearDedup (of ExactDedup with ``exact_only``)."""
    if exact_only:
        known = ("scope", "priority", "keep", "max_source_loss")
        spec = [{"exact_dedup": {k: v for k, v in settings.items() if k in known}}]
    else:
        spec = [{"near_dedup": settings}]  # an exact copy is a near copy, and one index decides which one stays
    return run(inputs, out, spec, workers, reading or {}, writing or {}, work_dir, json)


def run(
    inputs: Sequence[str],
    out: Path,
    spec: Sequence[Any],
    workers: int,
    reading: dict[str, Any],
    writing: dict[str, Any],
    work_dir: Path | None,
    json: bool,
    ray: str | None = None,
) -> dict[str, Any]:
    """A pipeline by names, with progress; prints its table and writes statistics and page beside the shards."""
    from trainwright.cli.data_page import write_samples
    from trainwright.cli.output import print_json
    from trainwright.data.build.pipeline import run_pipeline
    from trainwright.data.build.stages import make_stages
    from trainwright.data.build.writers import Writer

    stages = make_stages(spec, work_dir)
    documents = open_inputs(inputs, reading)
    settings = {"inputs": list(inputs), "stages": list(spec)}
    writer = Writer(out, **writing)
    with _Bar() as bar:
        if ray is None:
            found = run_pipeline(
                stages, documents, writer, workers=workers, settings=settings, watch=bar, resume=True, refuse_empty=True
            )
        else:
            from trainwright.data.build.ray_jobs import run_on_ray

            address = None if ray == "local" else ray
            found = run_on_ray(
                stages, documents, writer, address=address, work_dir=work_dir, settings=settings, watch=bar,
                refuse_empty=True,
            )  # fmt: skip
    idle = found.pop("operators_run", None) == 0
    page = write_samples(found, out)
    if json:
        print_json({k: v for k, v in found.items() if k != "stages"} | {"stages": [_brief(s) for s in found["stages"]]})
    else:
        show(found)
        print(f"{out}: {found['documents']:,} documents in {len(found['files'])} files\n{page}")
        if idle:
            print("inputs, stages and settings are those of the corpus that is there: nothing was done")
    return found


def open_inputs(inputs: Sequence[str], reading: dict[str, Any]) -> Any:
    """Readers by the options of the command: format, text_key, encodings, on_bad, max_bad, split, lines, licence."""
    from trainwright.data.build.bad_rows import BadRows
    from trainwright.data.build.formats import Inputs

    options = {k: v for k, v in reading.items() if v is not None}
    policy = BadRows(options.pop("on_bad", "refuse"), options.pop("max_bad", 0.01))
    return Inputs(list(inputs), options.pop("format", None), bad_rows=policy, **options)


def inspect(
    inputs: Sequence[str],
    out: Path | None = None,
    *,
    limit: int | None = None,
    reading: dict[str, Any] | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """What a corpus holds: sources, licences, lengths, empty and malformed rows, copies. ``out``: a page of samples.

    The folder of a finished build tells what its stages did as well.
    """
    from trainwright.cli.data_page import write_samples
    from trainwright.cli.output import figures, print_json

    found = _nothing() if _is_empty_corpus(inputs) else survey(inputs, limit, reading or {})
    past = Path(inputs[0]) / "statistics.json" if len(inputs) == 1 else None
    built = None
    if past is not None and past.is_file():
        try:
            built = jsonlib.loads(past.read_text("utf-8"))
        except ValueError:
            raise DataError(f"{past}: damaged; remove it to look at the documents alone") from None
    if json:
        print_json({"corpus": found["figures"], "build": built})
    else:
        figures(found["figures"])
        if built:
            print()
            show(built)
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
        pages = found["page"] if not built else {**built, "stages": [*built["stages"], *found["page"]["stages"]]}
        page = write_samples(pages, out, f"Corpus {', '.join(inputs)}")
        if not json:
            print(page)
    return found


def _nothing() -> dict[str, Any]:
    """What ``survey`` would give for no document."""
    from trainwright.data.build.statistics import Statistics

    figures = {"documents": 0, "characters": 0}
    return {
        "figures": figures,
        "page": {**figures, "seconds": 0.0, "sources": {}, "stages": [Statistics("inspect").to_json()]},
    }


def _is_empty_corpus(inputs: Sequence[str]) -> bool:
    """Whether this is one built corpus whose stages left no document."""
    from trainwright.data.build.composition import read_manifest

    manifest = read_manifest(Path(inputs[0])) if len(inputs) == 1 and Path(inputs[0]).is_dir() else None
    return manifest is not None and not manifest["total"]["documents"]


def survey(inputs: Sequence[str], limit: int | None, reading: dict[str, Any]) -> dict[str, Any]:
    """Figures of the first ``limit`` documents, and samples of them."""
    import itertools
    import time

    import numpy as np

    from trainwright.data.build.seen import SeenHashes
    from trainwright.data.build.statistics import Statistics

    started = time.monotonic()
    documents = open_inputs(inputs, {"on_bad": "skip", "max_bad": float("inf"), **reading})
    seen, ids = SeenHashes(), SeenHashes()
    sources: dict[str, dict[str, int]] = {}
    licences: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    statistics = Statistics("inspect", samples_each=20)
    rng = np.random.Generator(np.random.PCG64(0))
    lengths: list[int] = []  # a uniform sample of at most 100,000
    copies = same_ids = total = characters = 0
    for document in itertools.islice(documents, limit):
        total += 1
        characters += len(document.text)
        statistics.see(document.text)
        statistics.keep(document)
        row = sources.setdefault(document.source, {"documents": 0, "characters": 0})
        row["documents"] += 1
        row["characters"] += len(document.text)
        licences[document.licence or "none"] += 1
        steps.update({str(p.get("step")) for p in document.provenance})
        copies += not seen.add(document.text)
        same_ids += not ids.add(document.id)
        if len(lengths) < 100_000:
            lengths.append(len(document.text))
        elif (place := int(rng.integers(total))) < 100_000:
            lengths[place] = len(document.text)
    read = documents.statistics
    numbers: dict[str, Any] = {"documents": total, "characters": characters}
    if lengths:
        numbers |= {f"length p{q}": int(np.percentile(lengths, q)) for q in (5, 50, 95)} | {
            "longest seen": max(lengths)
        }
    numbers |= {
        "exact copies": copies,
        "duplicate ids": same_ids,
        "empty texts": read.counts["empty texts"],
        "bad rows": read.counts["bad rows"],
        "sources": {k: v["documents"] for k, v in sorted(sources.items())},
        "licences": dict(licences.most_common()),
        "steps": dict(steps.most_common()),
    }
    page = {
        "documents": total,
        "characters": characters,
        "seconds": time.monotonic() - started,
        "sources": sources,
        "stages": [read.to_json(), statistics.to_json()],
    }
    return {"figures": numbers, "page": page}


def show(found: dict[str, Any]) -> None:
    """The stages as a table."""
    from rich.table import Table

    from trainwright.cli.output import out

    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stage", "in", "out", "changed", "thrown out"):
        view.add_column(heading, justify="left" if heading in ("stage", "thrown out") else "right")
    for s in found["stages"]:
        why = ", ".join(f"{k} {v:,}" for k, v in s["dropped"].items())
        if s["stage"] == "read":
            # What was in the files and is no document; not each reason for a bad row, and not what was no text at all.
            said = ("bad rows", "empty texts", "pages with", "rows of the split")
            counts = {k: v for k, v in s["counts"].items() if k.startswith(said) and not k.startswith("bad rows:")}
            why = ", ".join(f"{k} {v:,}" for k, v in counts.items())
        numbers = (f"{s[k]:,}" for k in ("documents_in", "documents_out", "changed"))
        view.add_row(s["stage"], *numbers, why)
    out().print(view)


def _brief(stage: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in stage.items() if k != "samples"}


def read_stages(path: Path) -> list[Any]:
    """The list of stages of a YAML file: a list, or a mapping with ``stages``. Raises ConfigError."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: malformed YAML: {' '.join(str(error).split())}") from None
    if isinstance(found, dict) and set(found) == {"stages"}:
        found = found["stages"]
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path}: should be a list of stages, such as [lengths, {{language: {{keep: [en]}}}}]")
    return found


def parse_stage(text: str) -> Any:
    """``name`` or ``name:key=value,key=[a,b]`` as a stage's entry."""
    import yaml

    name, colon, rest = text.partition(":")
    if not colon:
        return name
    settings: dict[str, Any] = {}
    depth, start, parts = 0, 0, []
    for i, c in enumerate(rest):  # commas inside brackets belong to a value
        depth += (c in "[{") - (c in "]}")
        if c == "," and depth == 0:
            parts.append(rest[start:i])
            start = i + 1
    for part in (*parts, rest[start:]):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError("should look like name:key=value,key=value", key="--stage", value=text)
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"{value!r} is no YAML value", key="--stage", value=text) from None
    return {name: settings}


class _Bar:
    """How many documents were read and written, on a terminal."""

    def __enter__(self) -> _Bar:
        from trainwright.train.progress import terminal

        self._status = terminal().status("reading") if terminal().is_terminal else None
        if self._status is not None:
            self._status.start()
        return self

    def __call__(self, progress: Any) -> None:
        if self._status is not None:
            pace = progress.read / max(progress.seconds, 1e-9)
            self._status.update(f"{progress.read:,} read ({pace:,.0f}/s), {progress.written:,} written")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
