"""A page that shows a person what the stages of a corpus did: figures, and samples of what was kept and thrown out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.data.build.composition import read_manifest
from trainwright.train.page import escape, page, places, write_page

PAGE = "samples.html"


def samples_page(found: dict[str, Any], title: str) -> str:
    """The page for the statistics of a pipeline."""
    stages = found["stages"]
    parts = [f"<h1>{escape(title)}</h1>", _head(found)]
    charts = [_chart(stages)] if any(s["dropped"] for s in stages) else []
    parts.append(places(charts))
    parts.append(_table(stages))
    if found.get("mixture"):
        parts.append(_mixture(found["mixture"]))
    if found.get("sources"):
        parts.append(_sources(found["sources"]))
    if found.get("composition"):
        parts.append(_composition(found["composition"]))
    for number, stage in enumerate(stages):
        parts.append(_stage(number, stage))
    return page(title, parts, charts)


def write_samples(found: dict[str, Any], folder: Path, title: str | None = None) -> Path:
    if "composition" not in found:
        for place in (folder, folder / "train"):
            manifest = read_manifest(place)
            if manifest is not None:
                found = {**found, "composition": manifest["total"]}
    return write_page(folder / PAGE, samples_page(found, title or f"Corpus {folder.name}"))


def _head(found: dict[str, Any]) -> str:
    figures = {
        "documents kept": f"{found['documents']:,}",
        "characters kept": f"{found['characters']:,}",
        "documents read": f"{found['stages'][0]['documents_in']:,}",
        "seconds": f"{found['seconds']:.1f}",
    }
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in figures.items())
    return f"<div class='final'>{cells}</div>"


def _chart(stages: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [(f"{s['stage']}: {reason}", n) for s in stages for reason, n in s["dropped"].items()]
    rows.sort(key=lambda r: r[1])
    return {
        "data": [{"type": "bar", "orientation": "h", "y": [r[0] for r in rows], "x": [r[1] for r in rows]}],
        "layout": {
            "title": {"text": "documents thrown out, by reason"},
            "margin": {"l": 230, "t": 40},
            "height": 140 + 24 * len(rows),
        },
    }


def _table(stages: list[dict[str, Any]]) -> str:
    heads = ("stage", "documents in", "out", "changed", "characters in", "out", "thrown out", "counted")
    rows = []
    for s in stages:
        dropped = ", ".join(f"{escape(k)} {v:,}" for k, v in s["dropped"].items())
        counted = ", ".join(f"{escape(k)} {v:,}" for k, v in s["counts"].items())
        numbers = "".join(
            f"<td>{s[k]:,}</td>"
            for k in ("documents_in", "documents_out", "changed", "characters_in", "characters_out")
        )
        rows.append(f"<tr><td>{escape(s['stage'])}</td>{numbers}<td>{dropped}</td><td>{counted}</td></tr>")
    return "<h2>Stages</h2>" + _rows(heads, rows)


def _sources(sources: dict[str, dict[str, int]]) -> str:
    total = sum(s["characters"] for s in sources.values()) or 1
    rows = [
        f"<tr><td>{escape(name or '(none)')}</td><td>{s['documents']:,}</td><td>{s['characters']:,}</td>"
        f"<td>{s['characters'] / total:.1%}</td></tr>"
        for name, s in sources.items()
    ]
    return "<h2>Sources of what was kept</h2>" + _rows(("source", "documents", "characters", "share"), rows)


def _mixture(mixture: dict[str, Any]) -> str:
    unit, total = mixture["unit"], mixture["total"] or 1
    rows = [
        f"<tr><td>{escape(name)}</td><td>{s['fraction']:.2%}</td><td>{s['given'] / total:.2%}</td>"
        f"<td>{s['given']:,}</td><td>{s['available']:,}</td><td>{s['epochs']:.2f}</td></tr>"
        for name, s in mixture["sources"].items()
    ]
    return "<h2>Mixture</h2>" + _rows(
        ("source", "share asked", "share", f"{unit} given", f"{unit} it has", "times gone through"), rows
    )


def _composition(total: dict[str, Any]) -> str:
    """Licences and languages of what was kept. The licences are what the documents say: a signal, not legal advice."""
    parts = []
    for kind, title in (("licence", "Licences of what was kept"), ("language", "Languages of what was kept")):
        rows = [
            f"<tr><td>{escape(name)}</td><td>{c['documents']:,}</td><td>{c['bytes']:,}</td></tr>"
            for name, c in sorted(total[kind].items(), key=lambda item: -item[1]["bytes"])
        ]
        parts.append(f"<h2>{title}</h2>" + _rows((kind, "documents", "bytes"), rows))
    return "".join(parts)


def _rows(heads: tuple[str, ...], rows: list[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{escape(h)}</th>' for h in heads)}</tr>{''.join(rows)}</table>"


_SHOWN_ELSEWHERE = {
    "stage", "documents_in", "documents_out", "characters_in", "characters_out", "changed", "dropped", "counts",
    "samples",
}  # fmt: skip


def _stage(number: int, stage: dict[str, Any]) -> str:
    parts = [f"<details{' open' if stage['dropped'] else ''}><summary>{number}. {escape(stage['stage'])}</summary>"]
    settings = {k: v for k, v in stage.items() if k not in _SHOWN_ELSEWHERE}
    if settings:
        parts.append("<p class='quiet'>" + "; ".join(f"{escape(k)}: {escape(v)}" for k, v in settings.items()) + "</p>")
    if not stage["samples"]:
        parts.append("<p class='quiet'>no samples</p>")
    # What was thrown out is what a person wants to judge; what was kept comes last.
    for outcome in sorted(stage["samples"], key=lambda o: (o == "kept", o == "changed", o)):
        parts.append(f"<h3>{escape(outcome)}</h3>")
        for sample in stage["samples"][outcome]:
            about = " · ".join(escape(sample[k]) for k in ("id", "source", "detail") if sample.get(k))
            parts.append(f"<p class='quiet'>{about}</p><pre>{escape(sample.get('text', ''))}</pre>")
            if sample.get("other"):
                label = "before" if outcome == "changed" else "kept instead"
                parts.append(f"<p class='quiet'>{label}:</p><pre>{escape(sample['other'])}</pre>")
    parts.append("</details>")
    return "".join(parts)
