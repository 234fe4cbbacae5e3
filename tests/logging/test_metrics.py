import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.errors import DataError
from trainwright.train.metrics import MetricsWriter, effective, encode, read_metrics

scalar = st.one_of(
    st.floats(),
    st.integers(-(2**60), 2**60),
    st.booleans(),
    st.text().filter(lambda s: s not in ("NaN", "Infinity", "-Infinity")),
)


@given(st.dictionaries(st.text(min_size=1), scalar, max_size=6))
def test_any_row_comes_back_to_the_last_bit(tmp_path_factory, row):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(row)
    (back,) = read_metrics(path)
    assert back.keys() == row.keys()
    for key, value in row.items():
        same_nan = isinstance(value, float) and math.isnan(value) and math.isnan(back[key])
        assert same_nan or (back[key] == value and type(back[key]) is type(value)), key


def test_lines_are_strict_json_and_losses_exact():
    loss = 0.1 + 0.2
    line = encode(
        {"loss": loss, "bad": [math.nan, -math.inf], "t": torch.tensor(1.5), "n": np.float64(loss), "i": np.int64(3)}
    )

    def refuse(x):
        raise AssertionError(x)

    value = json.loads(line, parse_constant=refuse)
    assert value == {"loss": loss, "bad": ["NaN", "-Infinity"], "t": 1.5, "n": loss, "i": 3}
    assert json.loads(encode({"t": torch.tensor(1.5), "n": np.float64(loss)})) == {"t": 1.5, "n": loss}


def write(path, *rows):
    with MetricsWriter(path) as writer:
        for row in rows:
            writer.write(row)


def test_torn_last_line_is_tolerated_and_cut_before_more_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2, "text": "x" * 100_000})
    path.write_bytes(path.read_bytes()[:-10])
    assert read_metrics(path) == [{"step": 1}]
    write(path, {"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("cut", range(1, 24))
def test_every_cut_of_the_file_reads(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2})
    path.write_bytes(path.read_bytes()[:cut])
    assert read_metrics(path) in ([], [{"step": 1}], [{"step": 1}, {"step": 2}])
    write(path, {"step": 9})
    assert read_metrics(path)[-1] == {"step": 9}


def test_damage_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1}, {"step": 2}, {"step": 3})
    lines = path.read_text().splitlines()
    lines[1] = lines[1][:4]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)
    assert read_metrics(path, strict=False) == [{"step": 1}, {"step": 3}]
    with pytest.raises(DataError, match="cannot read"):
        read_metrics(tmp_path / "none.jsonl")


def test_truncate_keeps_what_belongs_to_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        *({"step": s, "loss": 1.0 / s} for s in range(1, 7)),
        {"step": 6, "val_loss": 2.0},
        {"step": 7},
        {"event": "x"},
    )
    with MetricsWriter(path) as writer:
        writer.truncate(6)
        writer.write({"step": 7, "again": True})
    rows = read_metrics(path)
    assert (
        [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6, 6, 7]
        and rows[-2] == {"step": 6, "val_loss": 2.0}
        and rows[-1]["again"]
    )


def test_truncate_after_a_rollback_goes_by_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rollback = {"event": "rollback", "step": 4, "from_step": 10}
    rows = [{"step": s} for s in range(1, 11)] + [rollback] + [{"step": s, "second": True} for s in range(5, 10)]
    write(path, *rows)
    with MetricsWriter(path) as writer:
        writer.truncate(6)
    assert read_metrics(path) == rows[:13]
    assert [r["step"] for r in effective(read_metrics(path)) if "event" not in r] == [1, 2, 3, 4, 5, 6]
    assert all(r.get("second") for r in effective(rows) if r["step"] > 4 and "event" not in r)


def test_truncate_to_zero_empties(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 0, "val_loss": 5.0}, {"step": 1})
    with MetricsWriter(path) as writer:
        writer.truncate(0)
        writer.write({"step": 1})
    assert read_metrics(path) == [{"step": 1}]


def test_unwritable_place_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match="cannot write"):
        MetricsWriter(tmp_path / "missing" / "metrics.jsonl")
    if Path("/dev/full").exists():
        (tmp_path / "full").symlink_to("/dev/full")
        with pytest.raises(DataError, match="No space left"):
            MetricsWriter(tmp_path / "full").write({"step": 1})


def test_sigkill_loses_no_line_that_was_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from trainwright.train.metrics import MetricsWriter\n"
        "w = MetricsWriter(sys.argv[1]); i = 0\n"
        "while True:\n    i += 1; w.write({'step': i}); print(i, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    seen = 0
    deadline = time.monotonic() + 60
    while seen < 500 and time.monotonic() < deadline:
        seen = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    rest = [int(x) for x in process.stdout.read().split() if x]
    process.stdout.close()
    steps = [r["step"] for r in read_metrics(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= max([seen, *rest[:-1]])
