"""The launcher with real processes: what workers end with is what the command ends with, said once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainwright.parallel import elastic, launch

HERE = Path(__file__).parent
CODE = (
    "import sys; from trainwright.parallel.launch import launch\n"
    "options = eval(f'dict({sys.argv[1]})')\n"
    "again = lambda line: print('AGAIN', line, flush=True)\n"
    "o = launch(2, sys.argv[2:], module='launch_worker', say=again, **options)\n"
    "print('OUTCOME', o.code, *o.messages, sep='|'); sys.exit(o.code)"
)


def start(how, options=""):
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, options, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
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


DEATH = "rank 1 was ended by SIGKILL (out of memory?); "
AGAIN = DEATH + "starting again from the last checkpoint with "


@pytest.mark.parametrize(
    "how, options, code, said, lines",
    [
        ("kill-lost", "restarts=1", 0, [], [AGAIN + "2 processes here (0 restarts left)"]),
        ("kill-once", "restarts=2, min_nproc=1", 0, [], [AGAIN + "1 process here (1 restart left)"]),
        (
            "kill",
            "restarts=1",
            1,
            [DEATH + "started again 1 time, and no restart is left (--restarts)"],
            [AGAIN + "2 processes here (0 restarts left)"],
        ),
        ("wrong-on-one", "restarts=2", 2, ["data='x': only here"], []),
        pytest.param(
            "hang",
            "",
            1,
            ["rank 1 did not answer; the first failure above is the cause"],
            [],
            marks=pytest.mark.slow,  # the agent of torch waits for half a minute
        ),
    ],
)
def test_restarts(how, options, code, said, lines):
    """One line names the rank that died, not those that lost it; what another start would not mend ends at once."""
    got, messages, out = outcome(start(how, options))
    assert (got, messages) == (code, said), out
    assert [x.removeprefix("AGAIN ") for x in out.splitlines() if x.startswith("AGAIN")] == lines
    assert "Traceback" not in out


KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


@pytest.mark.parametrize(
    "failures, lost, here, named",
    [
        ({0: (1, 5), 1: (KILL, 5)}, {0}, [0, 1], {1: "was ended by SIGKILL (out of memory?)"}),
        ({0: (1, 5), 1: (KILL, 5)}, set(), [0, 1], {1: "was ended by SIGKILL (out of memory?)"}),
        ({0: (1, 5), 1: (1, 5)}, {0}, [0, 1], {1: "ended with exit code 1"}),
        ({0: (TERM, 5), 1: (-11, 5)}, set(), [0, 1], {1: "was ended by SIGSEGV"}),
        ({0: (ABORT, 5), 1: (KILL, 5)}, set(), [0, 1], {1: "was ended by SIGKILL (out of memory?)"}),
        # Rank 0 waited for the others long enough; the launcher had to end rank 1 half a minute later.
        ({0: (1, 5), 1: (KILL, 35)}, {0}, [0, 1], {1: "did not answer"}),
        ({2: (1, 5), 3: (1, 6)}, {2, 3}, [2, 3], {}),  # the rank that died is on another machine
        ({0: (TERM, 5)}, set(), [0], {0: "was ended by SIGTERM"}),
    ],
)
def test_who_is_to_blame(failures, lost, here, named):
    assert elastic.causes(failures, lost, here) == named


def test_devices_of_failed_workers_are_left_out():
    assert elastic.remaining(["4", "5", "6", "7"], [1, 3]) == ["4", "6"]


def test_what_a_lost_rank_looks_like():
    from trainwright.core.errors import CheckpointError

    gone = RuntimeError("[../pair.cc:537] Connection closed by peer [127.0.0.1]:4242")
    assert launch.lost_another(gone) and launch.lost_another(CheckpointError(f"rank 0: {gone}"))
    try:
        try:
            raise gone
        finally:
            raise ValueError("while closing")
    except ValueError as error:
        assert "Connection closed by peer" in launch.lost_another(error)
    assert launch.lost_another(RuntimeError("shapes do not fit")) == ""
    assert launch.lost_another(OSError("Connection reset by peer")) == ""  # a download, not a rank


@pytest.mark.parametrize(
    "options, problem",
    [
        (["--nproc", "4:2"], "--nproc='4:2'"),
        (["--nproc", "0"], "--nproc='0'"),
        (["--nproc", "two"], "--nproc='two'"),
        (["--nnodes", "2"], "--nnodes='2': needs --rdzv"),
        (["--nnodes", "2", "--rdzv", "here"], "--rdzv='here': should be HOST:PORT"),
        (["--nnodes", "2", "--rdzv", "here:99999", "--rdzv-id", "a"], "--rdzv='here:99999'"),
        (["--nnodes", "2", "--rdzv", "here:29400"], "--rdzv-id: is needed"),
    ],
)
def test_wrong_options(options, problem, capsys, monkeypatch):
    from trainwright.cli import run

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert run(["train", *options]) == 2
    assert problem in capsys.readouterr().err


def test_options():
    from trainwright.cli.train import Processes

    assert Processes.parse("1", "1", None, None, 0).alone
    assert not Processes.parse("1", "1", None, None, 1).alone
    several = Processes.parse("2:4", "1:3", "[::1]:29400", "job", 2)
    assert several == Processes((2, 4), 2, launch.Machines(1, 3, "[::1]:29400", "job"))
