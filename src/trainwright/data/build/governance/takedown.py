"""Documents taken out of a dataset that was released: version n + 1, with a tombstone for each and the difference.

Named by id, by hash of the content, or by site, so that an opt-out that comes later is honoured too. The rest stays as
it is, to the hash, and the same list on the same version gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigError
from trainwright.data.build.documents import Document
from trainwright.data.build.governance.manifest import Manifest, content_hash
from trainwright.data.build.governance.signals import site
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.statistics import Drop


class TakenDown(NamedTuple):
    manifest: Manifest
    diff: dict[str, Any]


def take_down(
    manifest: Manifest,
    ids: Iterable[str] = (),
    *,
    hashes: Iterable[str] = (),
    sites: Iterable[str] = (),
    reason: str = "",
) -> TakenDown:
    """Remove documents. Raises ConfigError for an id or hash that is not there (and was not taken down before)."""
    names, marks = list(dict.fromkeys(ids)), list(dict.fromkeys(hashes))
    hosts = {s.lower().removeprefix("www.") for s in sites}
    if not (names or marks or hosts):
        raise ConfigError("names nothing; give ids, hashes or sites", key="take_down")
    gone = {t["id"] for t in manifest.tombstones} | {t["content_hash"] for t in manifest.tombstones}
    known = {e.content_hash for e in manifest.entries.values()}
    missing = [n for n in names if n not in manifest.entries and n not in gone]
    missing += [h for h in marks if h not in known and h not in gone]
    if missing:
        raise ConfigError(f"not in version {manifest.version}: {', '.join(missing[:5])}", key="take_down")

    def named(entry: Any) -> bool:
        host = site(entry.source_url)
        of_site = any(host == h or host.endswith(f".{h}") for h in hosts)
        return entry.id in wanted or entry.content_hash in wanted or of_site

    wanted = {*names, *marks}
    removed = [e for e in manifest.entries.values() if named(e)]
    kept = {k: e for k, e in manifest.entries.items() if not named(e)}
    version = manifest.version + 1
    tombstones = [
        {"id": e.id, "content_hash": e.content_hash, "version": version, **({"reason": reason} if reason else {})}
        for e in removed
    ]
    head = {**manifest.head, "version": version, "before": manifest.corpus_hash}
    found = Manifest(kept, head, [*manifest.tombstones, *tombstones])
    diff = {
        "from": manifest.version,
        "to": version,
        "removed": [e.id for e in removed],
        "documents": len(kept),
        "corpus": found.corpus_hash,
    }
    return TakenDown(found, diff)


def replay(manifest: Manifest, diffs: Sequence[dict[str, Any]]) -> Manifest:
    """The version that a row of differences leads to. Raises ConfigError where they do not fit."""
    for diff in diffs:
        if diff["from"] != manifest.version:
            raise ConfigError(f"is for version {diff['from']}, not {manifest.version}", key="diff")
        manifest = take_down(manifest, diff["removed"]).manifest if diff["removed"] else manifest
        if manifest.corpus_hash != diff["corpus"]:
            raise ConfigError(f"does not lead to {diff['corpus']}", key="diff")
    return manifest


class TakenOut(DocumentStage):
    """Leave out what a manifest says was taken down, by id and by hash of the text: for building a corpus anew."""

    name = "taken_out"

    def __init__(self, manifest: str | Path | Manifest):
        super().__init__()
        found = manifest if isinstance(manifest, Manifest) else Manifest.load(Path(manifest))
        self.ids = {t["id"] for t in found.tombstones}
        self.hashes = {t["content_hash"] for t in found.tombstones}

    def apply(self, document: Document) -> Document | Drop:
        gone = document.id in self.ids or content_hash(document.text) in self.hashes
        return Drop("taken down") if gone else document
