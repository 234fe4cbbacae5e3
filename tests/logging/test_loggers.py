"""Every logger whose package is installed takes the rows of a real run, also torn, resumed and rolled-back ones."""

import importlib.util
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from trainwright.core.errors import ConfigError
from trainwright.core.registry import build, methods
from trainwright.train.loggers.tensorboard import TensorBoardLogger

LOGGERS = [m.name for m in methods("logger")]
OFFLINE = {"wandb": {"mode": "offline"}}
CONFIG = SimpleNamespace(run=SimpleNamespace(name="t"), to_dict=lambda: {"optimizer": {"lr": 0.1}})


def rows(first=1, last=5):
    for step in range(first, last + 1):
        yield {
            "step": step,
            "loss": 3.0 / step,
            "lr": 1e-3,
            "tokens_per_s": 10,
            "flag": True,
            "note": "text",
            "memory_bytes": 2**34,
        }
    yield {"step": last, "val_loss": 2.5, "val_bits_per_byte": math.nan}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.mark.parametrize("name", LOGGERS)
def test_takes_a_run_and_a_resumed_one(name, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for first in (1, 4):
        logger = build("logger", {"name": name, **OFFLINE.get(name, {})}).build(CONFIG, tmp_path)
        for row in rows(first):
            before = dict(row)
            logger.log(row)
            assert row == before
        logger.close()
        logger.close()


@pytest.mark.parametrize("name", LOGGERS)
def test_missing_package_names_the_way_out(name, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else real(n, *a))
    with pytest.raises(ConfigError, match=f"{name}.*pip install"):
        build("logger", name).build(CONFIG, tmp_path)


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_the_figures(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for row in rows():
        logger.log(row)
    logger.close()
    back = read(tmp_path)
    assert set(back) == {
        "train/loss", "train/lr", "speed/tokens_per_s", "memory/memory_bytes",
        "validation/val_loss", "validation/val_bits_per_byte",
    }  # fmt: skip
    assert back["train/loss"] == [(s, pytest.approx(3.0 / s)) for s in range(1, 6)]
    assert back["memory/memory_bytes"][0] == (1, 2**34) and back["validation/val_loss"] == [(5, 2.5)]


def test_tensorboard_drops_steps_that_were_undone(tmp_path):
    logger = TensorBoardLogger(tmp_path, flush_seconds=0)
    for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)]:
        logger.log({"step": step, "loss": loss})
    logger.close()
    time.sleep(1.1)  # event files are named, and read in order, by the second
    logger = TensorBoardLogger(tmp_path)
    logger.log({"step": 2, "loss": 200.0})
    logger.close()
    assert read(tmp_path)["train/loss"] == [(1, 1.0), (2, 200.0)]


def test_failure_in_mid_run_is_said_once_and_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    logger = TensorBoardLogger(tmp_path / "file" / "tensorboard", flush_seconds=0)
    for row in rows():
        logger.log(row)
    logger.close()
    assert [r.message for r in caplog.records if "TensorBoard stops here" in r.message] == [caplog.records[0].message]
    assert len(caplog.records) == 1


def test_start_does_not_import_the_packages():
    code = (
        "import sys; from pathlib import Path; from trainwright.core.registry import build\n"
        "build('logger', 'tensorboard').build(None, Path('.')).log({'step': 1, 'loss': 1.0})\n"
        "assert not {'tensorboard', 'wandb', 'trackio'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
