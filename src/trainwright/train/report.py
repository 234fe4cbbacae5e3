"""report.html: a run on one page that opens anywhere, also without a network.

Everything stands in the file: plotly.js once, the curves as JSON, the recipe, the environment, what happened, the last
figures and the sample. Works on a run that is still going and on one that was killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.train.metrics import effective, read_metrics
from trainwright.train.page import MAX_POINTS, escape, page, places, thin, write_page
from trainwright.train.progress import clock, memory, quantity

# Title, unit of the axis, logarithmic, {label: key of the row}.
CHARTS: list[tuple[str, str, bool, dict[str, str]]] = [
    ("Loss", "nats per token", False, {"training": "loss", "validation": "val_loss"}),
    ("Bits per byte", "bits per byte of text", False, {"validation": "val_bits_per_byte"}),
    ("Learning rate", "", False, {"learning rate": "lr"}),
    ("Gradient norm", "before clipping", True, {"gradient norm": "grad_norm"}),
    ("Speed", "tokens per second", False, {"speed": "tokens_per_s"}),
    ("Utilisation", "share of the measured matrix-product peak", False, {"utilisation": "flops_utilization"}),
    ("Memory", "GiB, peak so far", False, {"memory": "memory_bytes"}),
]
SCALE = {"memory_bytes": 2.0**-30}
EVENT_COLOURS = {"skip": "#d98e04", "rollback": "#b3261e", "stop": "#b3261e", "checkpoint": "#7a869a"}


def write_report(run_dir: Path | str) -> Path:
    """Write ``run_dir/report.html`` and return its path. Raises ConfigError when ``run_dir`` is no run."""
    run_dir = Path(run_dir)
    if not (run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{run_dir} is not a run: it has no metrics.jsonl")
    return write_page(run_dir / "report.html", render(run_dir))


def render(run_dir: Path) -> str:
    everything = read_metrics(run_dir / "metrics.jsonl", strict=False)
    rows = effective(everything)
    events = [r for r in everything if "event" in r]
    charts = [c for spec in CHARTS if (c := chart(rows, events, *spec)) is not None]
    parts = [
        f"<h1>{escape(run_dir.resolve().name)}</h1>",
        f"<p class='quiet'>written {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC</p>",
        _final(rows),
        places(charts) or "<p>No step is logged yet.</p>",
        _events(events),
        _file("Sample", run_dir / "sample.txt", opened=True),
        _file("Recipe", run_dir / "config.yaml"),
        _file("Environment", run_dir / "environment.json"),
    ]
    return page(f"{run_dir.resolve().name} - Trainwright", parts, charts)


def chart(
    rows: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    title: str,
    unit: str,
    log: bool,
    keys: dict[str, str],
) -> dict[str, Any] | None:
    """A plotly figure as plain JSON values, or None where no row has any of the ``keys``."""
    traces = []
    for label, key in keys.items():
        points = [
            (r["step"], r[key]) for r in rows if _number(r.get(key)) and _number(r.get("step")) and "event" not in r
        ]
        if points:
            points = thin(points, MAX_POINTS)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(points) < 40 else "lines",
                    "name": label,
                    "x": [x for x, _ in points],
                    "y": [y * SCALE.get(key, 1.0) if math.isfinite(y) else None for _, y in points],
                }
            )
    if not traces:
        return None
    lines = [
        {
            "type": "line", "xref": "x", "yref": "paper", "x0": e["step"], "x1": e["step"], "y0": 0, "y1": 1,
            "line": {"color": EVENT_COLOURS[e["event"]], "width": 1, "dash": "dot"},
        }
        for e in events
        if e["event"] in ("skip", "rollback", "stop") and _number(e.get("step"))
    ][-200:]  # fmt: skip
    layout = {
        "title": {"text": title},
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, "type": "log" if log else "linear"},
        "shapes": lines,
        "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
        "height": 340,
        "showlegend": len(traces) > 1,
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _final(rows: Iterable[dict[str, Any]]) -> str:
    last: dict[str, Any] = {}
    for row in rows:
        if "event" not in row:
            last |= row
    if not last:
        return ""
    shown: list[tuple[str, str]] = []
    for label, key, form in (
        ("steps", "step", str),
        ("tokens", "tokens", quantity),
        ("training time", "seconds", clock),
        ("training loss", "loss", lambda v: f"{v:.4f}"),
        ("validation loss", "val_loss", lambda v: f"{v:.4f}"),
        ("validation perplexity", "val_perplexity", lambda v: f"{v:.2f}"),
        ("validation bits per byte", "val_bits_per_byte", lambda v: f"{v:.4f}"),
        ("tokens per second", "tokens_per_s", quantity),
        ("utilisation of the peak", "flops_utilization", lambda v: f"{100 * v:.1f} %"),
        ("peak memory", "memory_bytes", memory),
    ):
        if _number(last.get(key)):
            shown.append((label, form(last[key])))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in shown)
    return f"<div class='final'>{cells}</div>"


def _events(events: Sequence[dict[str, Any]]) -> str:
    if not events:
        return ""
    rows = []
    for e in events[-500:]:
        detail = ", ".join(f"{k}: {v}" for k, v in e.items() if k not in ("event", "step", "reason"))
        reason = e.get("reason", "")
        text = f"{reason} ({detail})" if reason and detail else reason or detail
        colour = EVENT_COLOURS.get(str(e["event"]), "inherit")
        rows.append(
            f"<tr><td>{escape(e.get('step', ''))}</td><td style='color:{colour}'>{escape(e['event'])}</td>"
            f"<td>{escape(text)}</td></tr>"
        )
    more = f"<p class='quiet'>the last 500 of {len(events)}</p>" if len(events) > 500 else ""
    head = "<tr><th>step</th><th>event</th><th>what</th></tr>"
    return f"<h2>Events</h2>{more}<table>{head}{''.join(rows)}</table>"


def _file(title: str, path: Path, opened: bool = False) -> str:
    if not path.is_file():
        return ""
    text = path.read_text("utf-8", errors="replace")
    return f"<details{' open' if opened else ''}><summary>{title}</summary><pre>{escape(text)}</pre></details>"
