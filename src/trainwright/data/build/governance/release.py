"""What goes out with a dataset: a datasheet for people, and metadata in the manner of Croissant for machines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from trainwright.data.build.governance.checks import Report
from trainwright.data.build.governance.manifest import Manifest


def datasheet(manifest: Manifest, report: Report | None = None, removed: dict[str, Any] | None = None) -> str:
    """Markdown. ``removed``: what filtering took away, by language and source (``statistics.json`` of a build)."""
    head = manifest.head
    entries = manifest.entries.values()
    parts = [f"# {head.get('name', 'Dataset')}, version {manifest.version}", ""]
    parts += [f"- {key}: {head[key]}" for key in ("licence", "contact", "deprecation", "tokens") if head.get(key)]
    parts += [f"- documents: {len(manifest.entries):,}", f"- corpus hash: {manifest.corpus_hash}",
              f"- taken down so far: {len(manifest.tombstones):,}"]  # fmt: skip
    for title, counted in (
        ("Licences", Counter(e.licence or "none" for e in entries)),
        ("Evidence", Counter(f"grade {e.grade}" for e in entries)),
        ("Languages", Counter(e.language or "not known" for e in entries)),
        ("Processing", Counter(str(p.get("step") or p.get("operator")) for e in entries for p in e.processing)),
    ):
        parts += ["", f"## {title}", ""] + [f"- {k}: {n:,}" for k, n in counted.most_common()]
    if removed:
        parts += ["", "## What filtering removed", ""]
        for stage in removed.get("stages", []):
            parts += [f"- {stage['stage']}: {reason}: {n:,}" for reason, n in stage.get("dropped", {}).items()]
    if report is not None:
        parts += ["", "## Checks", "", *(f"- {line}" for line in str(report).splitlines())]
    return "\n".join(parts) + "\n"


def croissant(manifest: Manifest, files: list[dict[str, Any]], url: str = "") -> dict[str, Any]:
    """JSON-LD in the vocabulary of Croissant 1.0. ``files``: the shards of ``manifest.json`` (file, sha256, size)."""
    head = manifest.head
    kinds = {".jsonl": "application/jsonlines", ".parquet": "application/vnd.apache.parquet", ".txt": "text/plain"}
    name = str(head.get("name", "dataset"))
    distribution = [
        {
            "@type": "cr:FileObject",
            "@id": f["file"],
            "name": f["file"],
            "contentUrl": f["file"],
            "contentSize": f"{f['size']} B",
            "encodingFormat": kinds.get(Path(f["file"]).suffix, "application/octet-stream"),
            "sha256": str(f["sha256"]).removeprefix("sha256:"),
        }
        for f in files
    ]
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"documents/{column}",
            "name": column,
            "dataType": "sc:Text",
            "source": {
                "fileObject": {"@id": files[0]["file"]} if files else {},
                "extract": {"jsonPath": f"$.{column}"},
            },
        }
        for column in ("id", "text", "source", "url", "licence")
    ]
    return {
        "@context": {
            "@vocab": "https://schema.org/",
            "sc": "https://schema.org/",
            "cr": "http://mlcommons.org/croissant/",
            "conformsTo": "dct:conformsTo",
            "dct": "http://purl.org/dc/terms/",
        },
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": str(head.get("description", f"{len(manifest.entries):,} documents")),
        "license": str(head.get("licence", "")),
        "version": f"{manifest.version}.0.0",
        **({"url": url} if url else {}),
        "distribution": distribution,
        "recordSet": [{"@type": "cr:RecordSet", "@id": "documents", "name": "documents", "field": fields}],
    }
