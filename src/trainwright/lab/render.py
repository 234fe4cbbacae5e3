"""A comparison as a table on the terminal, as Markdown, and as one HTML page that opens anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import ConfigError
from trainwright.lab.statistics import Interval
from trainwright.lab.summary import ArmResult
from trainwright.train.page import escape, page, places, write_page
from trainwright.train.progress import clock, memory, quantity
from trainwright.train.run_dir import write_atomic

if TYPE_CHECKING:
    from trainwright.lab.comparison import Comparison

# Told apart also by eyes that see few colours (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#a0a000")
HEADINGS = (
    "arm", "val loss", "difference", "verdict", "tokens to base loss", "time to it",
    "tokens/s", "peak memory", "optimizer state",
)  # fmt: skip


def cells(a: ArmResult, tuned: bool) -> list[str]:
    """One row of the table, in the order of HEADINGS; with a column for the chosen setting behind the name."""
    name = a.name + ("" if a.status == "ok" else f" ({a.status})")
    row = [name, with_interval(a.val_loss_mean, a.val_loss_ci95)]
    row += [with_interval(a.difference, a.difference_ci95, sign=True), a.verdict]
    row += [_or_dash(a.tokens_to_baseline, quantity), _or_dash(a.seconds_to_baseline, clock)]
    row += [_or_dash(a.tokens_per_s, quantity), _or_dash(a.peak_memory_bytes, memory)]
    row.append(_or_dash(a.optimizer_state_bytes, memory))
    if tuned:
        row.insert(1, _setting(a.chosen))
    return row


def _setting(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def headings(tuned: bool) -> list[str]:
    out = list(HEADINGS)
    if tuned:
        out.insert(1, "chosen")
    return out


def with_interval(mean: float | None, interval: Interval | None, sign: bool = False) -> str:
    if mean is None:
        return "-"
    s = "+" if sign else ""
    text = f"{mean:{s}.4f}"
    return text if interval is None else f"{text} [{interval[0]:{s}.4f}, {interval[1]:{s}.4f}]"


def _or_dash(value: float | None, form: Any) -> str:
    return "-" if value is None else form(value)


def title(c: Comparison) -> str:
    seeds = f"{len(c.seeds)} seed" + ("s" if len(c.seeds) > 1 else "")
    return f"{c.recipe}: {len(c.arms)} arms, {seeds}, {c.budget} each"


def legend(c: Comparison) -> list[str]:
    lines = [f"Baseline: {c.baseline}. Loss: final validation loss in nats per token; difference: to the baseline."]
    if len(c.seeds) > 1:
        lines.append("Brackets: 95 % t interval over the seeds; of the difference, paired by seed.")
    else:
        lines.append("One seed: no interval, so no difference can be told from chance.")
    e = c.environment
    if e:
        code = f" (code {e['code']})" if e.get("code") else ""
        lines.append(
            f"{e.get('device_name')}, {e.get('threads')} threads, {e.get('compute_dtype')}; "
            f"trainwright {e.get('trainwright')}{code}, torch {e.get('torch')}, Python {e.get('python')}."
        )
    return lines


def reasons(c: Comparison) -> list[str]:
    """Why arms ended badly: too long for a cell of the table."""
    return [f"{a.name} {a.status}: {a.error}" for a in c.arms if a.status != "ok"]


def has_tuning(c: Comparison) -> bool:
    return any(a.chosen for a in c.arms)


def markdown(c: Comparison) -> str:
    tuned = has_tuning(c)
    lines = [f"# {title(c)}", ""]
    lines += markdown_table(headings(tuned), [cells(a, tuned) for a in c.arms])
    lines += ["", *(f"{line}  " for line in legend(c)), ""]
    lines += [f"- {note}" for note in [*reasons(c), *c.notes]]
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(str(v).replace("|", "\\|").replace("\n", " ") for v in row) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def write(c: Comparison, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "compare.md", markdown(c))
        write_json_file(folder / "compare.json", c.to_dict())
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}") from None
    write_page(folder / "compare.html", html_page(c))
    return folder


def write_json_file(path: Path, value: Any) -> None:
    """Strict JSON, written whole. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


# -- the page ---------------------------------------------------------------------------------------------------


def html_page(c: Comparison) -> str:
    tuned = has_tuning(c)
    charts = [f for f in (forest(c), curves(c, 0, "tokens"), curves(c, 1, "seconds of training"), rates(c)) if f]
    notes = [*reasons(c), *c.notes]
    head = "".join(f"<th>{escape(h)}</th>" for h in headings(tuned))
    rows = "".join("<tr>" + "".join(f"<td>{escape(v)}</td>" for v in cells(a, tuned)) + "</tr>" for a in c.arms)
    parts = [
        f"<h1>{escape(title(c))}</h1>",
        f"<p class='quiet'>written {datetime.now(UTC).strftime('%Y-%m-%d %H:%M')} UTC</p>",
        f"<table><tr>{head}</tr>{rows}</table>",
        "".join(f"<p class='quiet'>{escape(line)}</p>" for line in legend(c)),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else "",
        places(charts),
        f"<details><summary>Figures</summary><pre>{escape(json.dumps(c.to_dict(), indent=1))}</pre></details>",
    ]
    return page(f"{c.recipe} compared - Trainwright", parts, charts)


def _layout(name: str, x: str, y: str) -> dict[str, Any]:
    return {
        "title": {"text": name},
        "xaxis": {"title": {"text": x}, "automargin": True},
        "yaxis": {"title": {"text": y}, "automargin": True},
        "margin": {"l": 70, "r": 20, "t": 50, "b": 50},
        "height": 380,
        "legend": {"orientation": "h", "y": -0.25},
    }


def colour(c: Comparison, a: ArmResult) -> str:
    return COLOURS[c.arms.index(a) % len(COLOURS)]


def curves(c: Comparison, axis: int, unit: str) -> dict[str, Any] | None:
    """Validation loss over tokens (axis 0) or seconds (1): a line for each seed, a colour for each arm."""
    traces = []
    for a in c.arms:
        for i, r in enumerate(r for r in a.results.values() if len(r.curve) > 1):
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": a.name, "legendgroup": a.name,
                    "showlegend": i == 0, "opacity": 0.8, "line": {"color": colour(c, a), "width": 1.5},
                    "marker": {"size": 4}, "x": [p[axis] for p in r.curve], "y": [p[2] for p in r.curve],
                }
            )  # fmt: skip
    layout = _layout(f"Validation loss over {unit}", unit, "nats per token")
    return {"data": traces, "layout": layout} if traces else None


def forest(c: Comparison) -> dict[str, Any] | None:
    """The paired differences to the baseline with their intervals; arms that did not end well by their status."""
    shown = [a for a in c.arms if a.difference is not None][::-1]
    if not shown:
        return None
    trace: dict[str, Any] = {
        "type": "scatter", "mode": "markers", "x": [a.difference for a in shown], "y": [a.name for a in shown],
        "marker": {"size": 9, "color": [colour(c, a) for a in shown]}, "showlegend": False,
    }  # fmt: skip
    if all(a.difference_ci95 for a in shown):
        half = [(a.difference_ci95[1] - a.difference_ci95[0]) / 2 if a.difference_ci95 else 0 for a in shown]
        trace["error_x"] = {"type": "data", "array": half, "thickness": 1.5}
    traces = [trace]
    if bad := [a for a in c.arms if a.status != "ok"][::-1]:
        traces.append(
            {
                "type": "scatter", "mode": "text", "x": [0] * len(bad), "y": [a.name for a in bad],
                "text": [a.status for a in bad], "textposition": "middle right", "showlegend": False,
            }
        )  # fmt: skip
    layout = _layout(f"Final validation loss less that of {c.baseline}", "nats per token; left is better", "")
    zero = {"xref": "x", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1}}
    layout["shapes"] = [{"type": "line", **zero}]
    return {"data": traces, "layout": layout}


def rates(c: Comparison) -> dict[str, Any] | None:
    """What tuning saw: loss over the tuned setting, a line for each arm and share of the budget.

    One number an arm is an axis, logarithmic where it spans a factor of ten or more above 0; anything else stands in
    words, side by side.
    """
    settings = [t["setting"] for a in c.arms for t in a.tuning]
    numbers = [v for s in settings for v in s.values() if isinstance(v, int | float) and not isinstance(v, bool)]
    numeric = len(numbers) == len(settings) and all(len(s) == 1 for s in settings)

    def place(setting: dict[str, Any]) -> Any:
        return next(iter(setting.values())) if numeric else _setting(setting)

    traces = []
    for a in c.arms:
        for share in sorted({t["share_of_budget"] for t in a.tuning}):
            points = [
                (place(t["setting"]), t["val_loss"])
                for t in a.tuning
                if t["share_of_budget"] == share and t["val_loss"] is not None
            ]
            if numeric:
                points.sort()
            if points:
                traces.append(
                    {
                        "type": "scatter", "mode": "lines+markers" if numeric else "markers",
                        "name": f"{a.name}, {share:g} of the budget",
                        "line": {"color": colour(c, a), "dash": "dot" if share < 0.5 else "dash"},
                        "marker": {"color": colour(c, a), "symbol": "circle-open" if share < 0.5 else "circle"},
                        "x": [x for x, _ in points], "y": [y for _, y in points],
                    }
                )  # fmt: skip
    if not traces:
        return None
    layout = _layout("Tuning", "tuned setting", "nats per token")
    if not numeric:
        layout["xaxis"]["type"] = "category"  # else plotly takes words like 1e-3 or 2024-01 for numbers and dates
    elif min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
        layout["xaxis"]["type"] = "log"
    else:
        layout["xaxis"]["type"] = "linear"
    return {"data": traces, "layout": layout}
