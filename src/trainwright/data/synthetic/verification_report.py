"""What verification found, as a page for people and as JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:.5em 0 1.5em}td,th{padding:.2em .9em;text-align:right;"
    "border-bottom:1px solid #ccc}td:first-child,th:first-child{text-align:left}.chosen{font-weight:600}p{color:#555}"
)
_NAMES = {
    "tau": "tau", "documents_in": "solutions", "documents_out": "kept", "mean_discrimination": "mean discrimination of "
    "a test", "mutation_score": "mutation score", "gold_labelled": "solutions with a gold label", "test_error":
    "rate at which a test fails right code", "false_reject": "right code rejected, by that rate",
    "tests_per_solution": "tests a solution", "cache_hits": "answers from the cache",
}  # fmt: skip


def write_report(figures: Mapping[str, Any], folder: Path) -> Path:
    """``verification.json`` and ``verification.html`` in ``folder``; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, ensure_ascii=False, indent=1, default=str)
    (folder / "verification.json").write_text(text + "\n", "utf-8")
    page = folder / "verification.html"
    page.write_text(report_html(figures), "utf-8")
    return page


def report_html(figures: Mapping[str, Any]) -> str:
    parts = ["<h1>Code kept by its tests</h1>"]
    parts.append(_table(("", ""), [(label, figures.get(key)) for key, label in _NAMES.items()]))
    rows = figures.get("sweep") or []
    if rows:
        parts.append("<h2>If tau were</h2>")
        parts.append(_sweep(rows, figures.get("tau")))
        if "precision" not in rows[0]:
            parts.append("<p>No solution has a gold label, so precision and recall are not known.</p>")
    for title, key in (("Thrown out", "dropped"), ("Counted", "counts"), ("How runs ended", "statuses")):
        if figures.get(key):
            parts.append(f"<h2>{title}</h2>")
            parts.append(_table(("", "number"), list(figures[key].items())))
    if figures.get("sandbox"):
        parts.append("<h2>What the sandbox held</h2>")
        parts.append(_table(("", ""), list(figures["sandbox"].items())))
    body = "\n".join(parts)
    return f"<!doctype html><meta charset=utf-8><title>Verification</title><style>{_STYLE}</style>\n{body}\n"


def _sweep(rows: Sequence[Mapping[str, Any]], tau: Any) -> str:
    heads = [k for k in ("tau", "kept", "precision", "recall", "f1", "labelled") if k in rows[0]]
    out = ["<tr>" + "".join(f"<th>{h}</th>" for h in heads) + "</tr>"]
    for row in rows:
        mark = " class=chosen" if row["tau"] == tau else ""
        out.append(f"<tr{mark}>" + "".join(f"<td>{_cell(row[h])}</td>" for h in heads) + "</tr>")
    return f"<table>{''.join(out)}</table>"


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Any]]) -> str:
    head = "<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in heads) + "</tr>" if any(heads) else ""
    body = "".join(f"<tr><td>{html.escape(str(k))}</td><td>{_cell(v)}</td></tr>" for k, v in rows)
    return f"<table>{head}{body}</table>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else html.escape(str(value))
