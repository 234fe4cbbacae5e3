"""report.html: a run on one page that opens anywhere, also without a network.

Everything stands in the file: plotly.js once, the curves as JSON, the recipe, the environment, what happened, the last
figures and the sample. Works on a run that is still going and on one that was killed.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.train.metrics import effective, read_metrics
from trainwright.train.progress import clock, memory, quantity

MAX_POINTS = 3000  # of one curve; more cannot be seen and would make the file slow

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
    page = render(run_dir)
    out = run_dir / "report.html"
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(page, "utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def render(run_dir: Path) -> str:
    from plotly.offline import get_plotlyjs

    everything = read_metrics(run_dir / "metrics.jsonl", strict=False)
    rows = effective(everything)
    events = [r for r in everything if "event" in r]
    charts = [c for spec in CHARTS if (c := chart(rows, events, *spec)) is not None]
    parts = [
        f"<h1>{_text(run_dir.resolve().name)}</h1>",
        f"<p class='quiet'>written {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC</p>",
        _final(rows),
        "".join(f"<div class='chart' id='chart{i}'></div>" for i in range(len(charts)))
        or "<p>No step is logged yet.</p>",
        _events(events),
        _file("Sample", run_dir / "sample.txt", opened=True),
        _file("Recipe", run_dir / "config.yaml"),
        _file("Environment", run_dir / "environment.json"),
    ]
    # "</" would end the script element from inside a string.
    figures = json.dumps(charts, allow_nan=False).replace("</", "<\\/")
    script = get_plotlyjs() if charts else ""
    return _PAGE.format(
        title=_text(f"{run_dir.resolve().name} - Trainwright"),
        plotly=script.replace("</script", "<\\/script"),
        body="\n".join(parts),
        figures=figures,
    )


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


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most ``limit`` of the points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    out: list[tuple[float, float]] = []
    stretches = limit // 2 - 1
    inner = points[1:-1]
    for i in range(stretches):
        part = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        indices = [j for j, p in enumerate(part) if math.isfinite(p[1])] or [0]
        low = min(indices, key=lambda j: part[j][1])
        high = max(indices, key=lambda j: part[j][1])
        out += [part[j] for j in sorted({low, high})]
    return [points[0], *out, points[-1]]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return html.escape(str(value))


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
    cells = "".join(f"<div><b>{_text(value)}</b><span>{_text(label)}</span></div>" for label, value in shown)
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
            f"<tr><td>{_text(e.get('step', ''))}</td><td style='color:{colour}'>{_text(e['event'])}</td>"
            f"<td>{_text(text)}</td></tr>"
        )
    more = f"<p class='quiet'>the last 500 of {len(events)}</p>" if len(events) > 500 else ""
    head = "<tr><th>step</th><th>event</th><th>what</th></tr>"
    return f"<h2>Events</h2>{more}<table>{head}{''.join(rows)}</table>"


def _file(title: str, path: Path, opened: bool = False) -> str:
    if not path.is_file():
        return ""
    text = path.read_text("utf-8", errors="replace")
    return f"<details{' open' if opened else ''}><summary>{title}</summary><pre>{_text(text)}</pre></details>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1d2430; }}
h1 {{ margin-bottom: 0; }} h2, summary {{ font-size: 1.15rem; font-weight: 600; margin-top: 1.5rem; }}
summary {{ cursor: pointer; }} .quiet {{ color: #6b7280; }}
.final {{ display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: 1rem 0; }}
.final b {{ display: block; font-size: 1.25rem; }} .final span {{ color: #6b7280; }}
.chart {{ display: inline-block; width: 49%; min-width: 420px; vertical-align: top; }}
table {{ border-collapse: collapse; }} td, th {{ text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; }}
pre {{ background: #f4f5f7; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }}
</style>
<script>{plotly}</script></head>
<body>
{body}
<script>
const figures = {figures};
figures.forEach((f, i) => Plotly.newPlot("chart" + i, f.data, f.layout, {{responsive: true, displaylogo: false}}));
</script>
</body></html>
"""
