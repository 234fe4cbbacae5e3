"""The provenance of a run's data: what its sources are made of, and whether a recipe's allow-list permits it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import (
    NONE,
    Composition,
    rows_composition,
    shard_compositions,
)
from trainwright.data.sources.base import SourceConfig

log = logging.getLogger("trainwright")
SIGNAL = "a signal from what the data says of itself, not legal advice"


def data_card(
    sources: Sequence[SourceConfig], licences: Sequence[str] | None, cache_dir: Path | None = None, read: bool = False
) -> dict[str, Any]:
    """What each source is made of, and all of them together.

    Built corpora tell by their manifests; other files are read through only where ``licences`` or ``read`` asks for
    it. With ``licences``, raises ConfigError where a document is under another one or says nothing of its own.
    """
    from trainwright.data.build.licences import Policy

    policy = None
    if licences is not None:
        try:
            policy = Policy(licences, commercial=False)
        except ConfigError as error:
            raise error.under("data") from None
    whole = Composition()
    rows: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        label = str(getattr(source, "label", source.name))
        found, how = _of_source(source, policy is not None or read, cache_dir)
        if source.licence is not None:
            found, how = _stated(source, f"data.sources.{number}.licence", found, how, policy is not None or read)
        if policy is not None:
            _refuse(policy, found, label, f"data.sources.{number}", how)
        if found is not None:
            whole.merge(found)
        rows.append({"source": label, "known_by": how, "composition": found.to_json() if found else None})
    return {
        "allowed_licences": list(policy.allow) if policy else None,
        "note": SIGNAL,
        "total": whole.to_json(),
        "sources": rows,
    }


def _of_source(source: SourceConfig, read: bool, cache_dir: Path | None) -> tuple[Composition | None, str]:
    listed = getattr(source, "files", None) or getattr(source, "_files", None)
    if source.name == "python_stdlib" and listed is not None:  # the library comes under Python's own licence
        found = Composition()
        if read:
            for file in listed():
                found.count(file.path.read_text("utf-8", "replace"), "python_stdlib", "PSF-2.0", "code")
        return (found, "the library's licence") if read else (None, "not read")
    if listed is None or (hasattr(source, "_is_hub_id") and source._is_hub_id()):
        return None, "not known"
    files = {f.path: None for f in listed()}
    if getattr(source, "validation_path", None) is not None:
        files |= {f.path: None for f in listed("validation")}
    try:
        found, rest = shard_compositions(files)
    except DataError as error:
        log.warning("%s", error)
        found, rest = Composition(), list(files)
    if not rest:
        return found, "manifest"
    if not read:
        return None, "not read"
    try:
        found.merge(_cached(source, rest, cache_dir))
    except DataError as error:
        if "says nothing" not in str(error) and "say nothing" not in str(error):
            raise
        return None, str(error)
    return found, "its rows"


def _stated(
    source: SourceConfig, key: str, found: Composition | None, how: str, read: bool
) -> tuple[Composition | None, str]:
    """With ``source.licence`` for the documents that name none themselves."""
    from trainwright.data.build.licences import normalise

    licence = normalise(source.licence)
    if licence is None:
        raise ConfigError(
            "is no licence known here; use an SPDX identifier, or LicenseRef-NAME for one of your own",
            key=key,
            value=source.licence,
        )
    if found is None and read:
        found = Composition()
        for document in source.documents("train", 0.0):
            found.count(document.text, str(getattr(source, "label", source.name)))
        how = "the recipe"
    if found is None:
        return None, how
    stated = Composition.from_json(found.to_json())
    silent = stated.groups["licence"].pop(NONE, None)
    if silent is not None:
        named = stated.groups["licence"].setdefault(licence, dict.fromkeys(silent, 0))
        for unit, number in silent.items():
            named[unit] += number
        how = how if how == "the recipe" else f"{how} and the recipe"
    return stated, how


def _cached(source: SourceConfig, files: list[Path], cache_dir: Path | None) -> Composition:
    """Rows read once a state of the files."""
    text_key = str(getattr(source, "text_key", "text"))
    key = json.dumps([text_key, [(str(f), (s := f.stat()).st_size, s.st_mtime_ns) for f in files]])
    held = None
    if cache_dir is not None:
        held = cache_dir / "cards" / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"
        try:
            return Composition.from_json(json.loads(held.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            pass
    found = rows_composition(files, text_key)
    if held is not None:
        try:
            held.parent.mkdir(parents=True, exist_ok=True)
            partial = held.with_name(f".{held.name}.partial")
            partial.write_text(json.dumps(found.to_json()), "utf-8")
            partial.replace(held)
        except OSError as error:
            log.warning("cannot keep what was read of the licences (%s)", error.strerror or error)
    return found


def judge(policy: Any, found: Composition) -> dict[str, str]:
    """Licences of a composition that the policy does not permit, each with the reason."""
    wrong = {}
    for name, counts in found.groups["licence"].items():
        verdict = policy.judge(None if name == NONE else name)
        if counts["documents"] and not verdict.allowed:
            wrong[name] = verdict.reason
    return wrong


def _refuse(policy: Any, found: Composition | None, label: str, key: str, how: str) -> None:
    if found is None or not found.total["documents"]:
        raise ConfigError(
            f"source {label}: nothing is known of its licences ({how}), and data.licences names those allowed; say it "
            f"by {key}.licence, build a corpus with them (trainwright data build --licence NAME), or leave "
            "data.licences out",
            key=key,
        )
    wrong = judge(policy, found)
    if wrong:
        parts = [
            f"{found.groups['licence'][n]['documents']:,} documents: {n if n == NONE else f'{n}, {why}'}"
            for n, why in wrong.items()
        ]
        raise ConfigError(
            f"source {label}: {'; '.join(parts)}; allowed are {', '.join(policy.allow)}. Filter the corpus ("
            f"trainwright data filter --licence NAME), or add to data.licences what you may use ({SIGNAL})",
            key=key,
        )
