import json
import math
import re

import pytest

from trainwright.core.errors import ConfigError
from trainwright.train.metrics import MetricsWriter
from trainwright.train.report import chart, thin, write_report

KEYS = ("lr", "grad_norm", "tokens_per_s", "flops_utilization", "memory_bytes")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, 51):
            writer.write(
                {
                    "step": step,
                    "tokens": 100 * step,
                    "loss": 3.0 / step,
                    "seconds": step / 2.0,
                    **dict.fromkeys(KEYS, 1.0),
                }
            )
        writer.write(
            {"event": "rollback", "step": 40, "from_step": 50, "reason": "loss </script><b>x", "monitor": "loss_spike"}
        )
        writer.write({"step": 41, "loss": math.nan})
        writer.write({"step": 42, "loss": 0.5, "val_loss": 0.6, "val_bits_per_byte": 0.25})
    (folder / "config.yaml").write_text("model: {name: <decoder>}\n")
    (folder / "environment.json").write_text('{"python": "3.11"}')
    (folder / "sample.txt").write_text("def f(x): return x < 3 and 'é'\n")
    return folder


def figures(page):
    return json.loads(re.search(r"const figures = (.*);\n", page).group(1))


def test_report_holds_everything_and_fetches_nothing(run):
    page = write_report(run).read_text("utf-8")
    found = {f["layout"]["title"]["text"]: f for f in figures(page)}
    assert list(found) == ["Loss", "Bits per byte", "Learning rate", "Gradient norm", "Speed", "Utilisation", "Memory"]
    loss, validation = found["Loss"]["data"]
    assert loss["x"] == [*range(1, 41), 41, 42] and loss["y"][-2:] == [None, 0.5], (
        "undone steps are left out, NaN is a gap"
    )
    assert validation["x"] == [42] and [s["x0"] for s in found["Loss"]["layout"]["shapes"]] == [40]
    for text in (
        "&lt;decoder&gt;",
        "def f(x): return x &lt; 3 and &#x27;é&#x27;",
        "&quot;python&quot;",
        "loss &lt;/script&gt;",
        "0.2500",
    ):
        assert text in page, text
    assert page.count("<script>") == page.count("</script>") == 2
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", outside)
    assert len(page) < 6_000_000


def test_a_run_in_progress_and_a_torn_or_empty_file(run, tmp_path):
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    assert figures(write_report(run).read_text())[0]["data"][0]["x"][-1] == 41
    lines = path.read_text().splitlines()
    lines[3] = "{broken"
    path.write_text("\n".join(lines))
    assert 4 not in figures(write_report(run).read_text())[0]["data"][0]["x"]
    path.write_text("")
    for name in ("config.yaml", "environment.json", "sample.txt"):
        (run / name).unlink()
    assert "No step is logged yet" in write_report(run).read_text()


def test_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        write_report(tmp_path)


def test_thinning_keeps_the_ends_and_every_spike():
    points = [(i, 1.0) for i in range(100_000)]
    points[70_001] = (70_001, 9.0)
    points[123] = (123, -9.0)
    thinned = thin(points, 1000)
    assert len(thinned) <= 1000 and {points[0], points[-1], points[70_001], points[123]} <= set(thinned)
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert thin(points[:10], 1000) == points[:10]
    assert len(thin([(i, math.nan) for i in range(5000)], 100)) <= 100


def test_chart_without_figures_is_none():
    assert (
        chart([{"step": 1, "loss": "text"}, {"step": 2, "loss": None}], [], "Loss", "", False, {"training": "loss"})
        is None
    )
