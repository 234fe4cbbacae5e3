"""Word of how far the data is before the first step, and an end on request meanwhile."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from rich.console import Console

from trainwright import RunConfig, Trainer
from trainwright.core.registry import build
from trainwright.data.module import DataConfig, build_data, build_tokenizer
from trainwright.train import preparation
from trainwright.train.preparation import Preparing
from trainwright.train.signals import EndedByTerm


class Heard:
    def __init__(self):
        self.pieces, self.done = [], {}

    def begin(self, what, size=None):
        self.pieces.append(what)
        self.size = size

    def advance(self, done):
        self.done.setdefault(self.pieces[-1], []).append(done)


def test_each_piece_of_work_is_told(corpus, tmp_path):
    config = DataConfig.model_validate(
        {"sources": [{"name": "text", "path": corpus}], "cache_dir": tmp_path, "validation_fraction": 0.1}
    )
    heard = Heard()
    spec = build("tokenizer", {"name": "bpe", "vocab_size": 300})
    data = build_data(config, build_tokenizer(config, spec, heard), seq_len=16, seed=0, watch=heard)
    label = f"text:{corpus}"
    reading, train, held = (
        "reading text for the tokenizer",
        f"tokenizing {label} (train)",
        f"tokenizing {label} (validation)",
    )
    assert heard.pieces == [reading, "training the tokenizer", train, held, "laying out rows"]
    sizes = [sum(d.num_bytes for d in part.values()) for part in (data.train, data.validation)]
    assert (
        heard.done[train][-1] == sizes[0] and heard.done[held][-1] == sizes[1] and heard.done[reading][-1] == sizes[0]
    )
    assert heard.done[reading] == sorted(heard.done[reading])
    again = Heard()
    build_data(config, build_tokenizer(config, spec, again), seq_len=16, seed=0, watch=again)
    assert again.pieces == [train, held, "laying out rows"] and not again.done  # all of it from the cache


def test_lines_come_while_a_long_call_is_made():
    out = io.StringIO()
    with Preparing("lines", interval=0.05, out=out) as watch:
        watch.begin("tokenizing x (train)", 15_000_000)
        watch.advance(5_000_000)
        time.sleep(0.2)
        watch.begin("training the tokenizer")
        time.sleep(0.2)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("tokenizing x (train)  5MB of text (files: 15MB)  ") and lines[0].endswith("/s  0:00")
    assert "tokenizing x (train): done in 0:00" in lines and "training the tokenizer  0:00" in lines
    assert lines[-1] == "training the tokenizer: done in 0:00" and watch.worked == ["tokenizing x (train)"]


def test_short_work_writes_nothing():
    out = io.StringIO()
    for mode in ("lines", "none"):
        with Preparing(mode, interval=30, out=out) as watch:
            watch.begin("x")
            watch.advance(1)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_living_line_that_goes_again(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(preparation, "terminal", lambda: Console(file=out, force_terminal=True, width=100))
    with Preparing("auto") as watch:
        watch.begin("training the tokenizer")
        time.sleep(0.6)
    assert "training the tokenizer  0:00" in out.getvalue() and out.getvalue().endswith("\x1b[2K")


def test_a_failure_is_not_said_to_be_done():
    out = io.StringIO()
    with pytest.raises(ValueError), Preparing("lines", interval=0.02, out=out) as watch:
        watch.begin("x")
        time.sleep(0.1)
        raise ValueError
    assert "done" not in out.getvalue() and "x  0:00" in out.getvalue()


def test_the_recipe_turns_it_off(recipe, capsys, monkeypatch):
    monkeypatch.setattr(Preparing, "__init__", _eager(Preparing.__init__))
    Trainer(RunConfig.load(recipe(tokenizer="bpe"))).close()
    assert capsys.readouterr().out == ""


def _eager(init):
    def made(self, mode, interval=0.001, out=None):
        init(self, mode, 0.001, out)

    return made


# -- SIGTERM ------------------------------------------------------------------------------------------------------


def test_term_interrupts_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), EndedByTerm(leave=pytest.fail):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [t.name for t in threading.enumerate()]


def test_term_within_a_long_call_is_heard_at_once():
    left = []
    turns = 4_000_000
    with pytest.raises(KeyboardInterrupt), EndedByTerm(lambda: left.append(time.monotonic()), grace=0.05):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True:
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", turns)  # lets go of the interpreter, and is not interrupted
            back = time.monotonic()
    assert left and left[0] < time.monotonic()
    assert "back" not in locals() or left[0] < back + 0.5


def test_other_threads_keep_their_signals():
    seen = []
    thread = threading.Thread(target=lambda: EndedByTerm(leave=seen.append).__enter__().__exit__())
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert not seen and signal.getsignal(signal.SIGTERM) == before


def test_term_while_data_is_made_ends_with_a_message(recipe, tmp_path):
    fifo = tmp_path / "never.txt"
    os.mkfifo(fifo)  # a source that never comes
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe(**{"data.sources": [{"name": "text", "path": str(fifo)}]})))
    process = subprocess.Popen(
        [sys.executable, "-m", "trainwright", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = None
    while end is None and process.poll() is None:
        try:
            end = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the run has not opened it for reading yet
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    if end is not None:
        os.close(end)
    assert process.returncode == 130, (out, err)
    assert err == "interrupted before the first step: nothing was trained; data that is ready stays in the cache\n"
    assert not list((tmp_path / "runs").iterdir())
