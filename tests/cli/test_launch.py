"""The launcher with real processes: what workers end with is what the command ends with, said once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
CODE = (
    "import sys; from trainwright.parallel.launch import launch\n"
    "o = launch(2, sys.argv[1:], module='launch_worker')\n"
    "print('OUTCOME', o.code, *o.messages, sep='|'); sys.exit(o.code)"
)


def start(how):
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def outcome(process, timeout=90):
    out, _ = process.communicate(timeout=timeout)
    lines = [x for x in out.splitlines() if x.startswith("OUTCOME")]
    assert len(lines) == 1, out
    return process.returncode, lines[0].split("|")[2:], out


@pytest.mark.parametrize(
    "how, code, message",
    [
        ("fine", 0, []),
        ("wrong", 2, ["optimizer.lr=-1: is wrong"]),
        ("wrong-on-one", 2, ["data='x': only here"]),
        ("stop", 3, ["stopped at step 3 by non_finite"]),
        ("crash", 1, ["rank 1 ended with exit code 1; the first failure above is the cause"]),
        ("kill", 1, ["rank 1 was ended by SIGKILL (out of memory?); the first failure above is the cause"]),
    ],
)
def test_exit_codes(how, code, message):
    got, said, out = outcome(start(how))
    assert (got, said) == (code, message), out
    assert ("Traceback" in out) == (how == "crash") and ("a fault of ours" in out) == (how == "crash"), out
    if how == "fine":
        from trainwright.core.hardware import cores

        assert {f"rank {r} of 2 threads {max(1, cores() // 2)}" in out for r in (0, 1)} == {True}


def wait_ready(process):
    lines, deadline = [], time.monotonic() + 60
    while sum("ready" in x for x in lines) < 2 and time.monotonic() < deadline:
        lines.append(process.stdout.readline())
    assert sum("ready" in x for x in lines) == 2, lines
    return [int(x.split("pid ")[1]) for x in lines if "pid " in x]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_lets_every_worker_finish(number):
    process = start("interrupt")
    wait_ready(process)
    process.send_signal(number)
    code, said, out = outcome(process)
    assert code == 130 and said == ["interrupted; saved step 9"] and "saved\n" in out


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_workers_do_not_outlive_a_killed_launcher():
    process = start("interrupt")
    pids = wait_ready(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.stdout.close()
