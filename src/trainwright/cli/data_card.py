"""``trainwright data card``: what a corpus, or the data of a recipe, is made of, and whether a list of licences
permits it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import Composition, read_manifest, shard_compositions, verify_shards
from trainwright.data.licence_gate import SIGNAL, data_card, judge

HEADINGS = {"source": "source", "licence": "licence", "language": "language", "step": "what was done"}


def card(
    target: str,
    allow: Sequence[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    attribution: Path | None = None,
    verify: bool = False,
    json: bool = False,
) -> dict[str, Any]:
    """Print the card of a recipe (.yaml), or of a corpus: a folder, file or glob. Raises ConfigError for documents
    under a licence that is not allowed."""
    from trainwright.cli.output import print_json

    recipe = target.lower().endswith((".yaml", ".yml"))
    if overrides and not recipe:
        raise ConfigError("only a recipe takes overrides; name one corpus at a time", key="card", value=list(overrides))
    found = _of_recipe(Path(target), list(overrides), allow) if recipe else _of_corpus(target, verify)
    if attribution is not None:
        if recipe:
            raise ConfigError("wants a corpus; a recipe's sources have theirs each", key="--attribution")
        found["attributions"] = write_attributions(target, attribution)
    if json:
        print_json(found)
    else:
        show(found)
    if allow is not None and not recipe:
        _refuse(found, allow)
    return found


def _of_recipe(path: Path, overrides: list[str], allow: Sequence[str] | None) -> dict[str, Any]:
    from trainwright.config import RunConfig

    config = RunConfig.load(path, overrides)
    licences = list(allow) if allow is not None else config.data.licences
    return {"of": str(path), **data_card(config.data.sources, licences, config.data.cache(), read=True)}


def _of_corpus(target: str, verify: bool) -> dict[str, Any]:
    from trainwright.cli.data import open_inputs

    folder = Path(target)
    found: Composition | None = None
    known_by = "its rows"
    if folder.is_dir() and (manifest := read_manifest(folder)) is not None:
        if verify and (wrong := verify_shards(folder)):
            raise DataError(f"{folder}: {'; '.join(wrong)}")
        found, rest = shard_compositions([folder / s["file"] for s in manifest["shards"]])
        known_by = "manifest"
        if rest:
            raise DataError(f"{rest[0]}: missing, or changed since the manifest was written; build the corpus anew, or "
                            f"remove {folder / 'manifest.json'} to have the documents read")  # fmt: skip
    elif verify:
        raise DataError(f"{folder}: no manifest to verify it by; it is no corpus built here")
    if found is None:
        found = Composition()
        for document in open_inputs([target], {}):
            found.add(document)
    if not found.total["documents"]:
        raise DataError(f"{target}: holds no document")
    return {"of": target, "known_by": known_by, "note": SIGNAL, "total": found.to_json()}


def _refuse(found: dict[str, Any], allow: Sequence[str]) -> None:
    from trainwright.data.build.licences import Policy

    policy = Policy(allow, commercial=False)
    total = Composition.from_json(found["total"])
    wrong = judge(policy, total)
    if wrong:
        parts = [f"{total.groups['licence'][n]['documents']:,} documents: {n}, {why}" for n, why in wrong.items()]
        raise ConfigError(
            f"{found['of']}: {'; '.join(parts)}; allowed are {', '.join(policy.allow)} ({SIGNAL})", key="--allow"
        )


def write_attributions(target: str, path: Path) -> int:
    """A line for each document that wants to be named; how many there are."""
    from trainwright.cli.data import open_inputs
    from trainwright.data.build.licences import attributions

    count = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in attributions(open_inputs([target], {})):
                file.write(jsonlib.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key="--attribution", value=str(path)) from None
    return count


def show(found: dict[str, Any]) -> None:
    """A table for each kind of group."""
    from rich.table import Table

    from trainwright.cli.output import out

    console = out()
    total = found["total"]
    console.print(f"{found['of']}: {total['documents']:,} documents, {total['bytes']:,} bytes of text")
    for kind, heading in HEADINGS.items():
        if not total[kind]:
            continue
        view = Table(box=None, pad_edge=False, header_style="bold")
        view.add_column(heading)
        for name in ("documents", "bytes", "share"):
            view.add_column(name, justify="right")
        rows = sorted(total[kind].items(), key=lambda item: -item[1]["bytes"])
        for name, counts in rows:
            share = counts["bytes"] / total["bytes"] if total["bytes"] else 0.0
            view.add_row(name, f"{counts['documents']:,}", f"{counts['bytes']:,}", f"{share:.1%}")
        console.print()
        console.print(view)
    for source in found.get("sources", []):
        if source["composition"] is None:
            console.print(f"{source['source']}: not counted ({source['known_by']})")
    if "attributions" in found:
        console.print(f"\n{found['attributions']:,} documents want to be named")
    console.print(f"\nlicences: {SIGNAL}")
