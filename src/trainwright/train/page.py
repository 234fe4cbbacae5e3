"""A page that opens anywhere, also without a network: plotly.js once, the figures as JSON, everything in one file."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError

MAX_POINTS = 3000  # of one curve; more cannot be seen and would make the file slow


def escape(value: object) -> str:
    return html.escape(str(value))


def places(charts: Sequence[dict[str, Any]], start: int = 0) -> str:
    """Where ``charts`` stand in the body; ``start`` is the number of the first among all charts of the page."""
    return "".join(f"<div class='chart' id='chart{start + i}'></div>" for i in range(len(charts)))


def page(title: str, parts: Sequence[str], charts: Sequence[dict[str, Any]]) -> str:
    """The whole page: ``parts`` are the body's HTML, in order; ``charts`` plotly figures as plain JSON values."""
    from plotly.offline import get_plotlyjs

    # "</" would end the script element from inside a string.
    figures = json.dumps(charts, allow_nan=False).replace("</", "<\\/")
    script = get_plotlyjs() if charts else ""
    return _PAGE.format(
        title=escape(title),
        plotly=script.replace("</script", "<\\/script"),
        body="\n".join(parts),
        figures=figures,
    )


def write_page(out: Path, text: str) -> Path:
    """Write ``text`` so that a reader finds the old page or the new one whole. Raises ConfigError."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    return out


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
