"""A worker without a model, run by test_launch.py: ends in the way that its argument names."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from trainwright.core.errors import ConfigError, Interrupted, StoppedByMonitor
from trainwright.parallel import launch

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
how = sys.argv[1]


def say(line):
    os.write(1, f"{line}\n".encode())  # in one piece, whatever the other rank writes


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leave(error):
    sys.exit(launch.report_exit(error.exit_code, str(error)))


launch.follow_launcher()
say(f"rank {rank} of {world} threads {os.environ['OMP_NUM_THREADS']} pid {os.getpid()}")
if how == "wrong":
    leave(ConfigError("is wrong", key="optimizer.lr", value=-1))
elif how == "wrong-on-one":
    if rank == 1:
        leave(ConfigError("only here", key="data", value="x"))
    time.sleep(60)
elif how == "stop":
    leave(StoppedByMonitor("stopped at step 3 by non_finite"))
elif how == "crash" and rank == 1:
    raise RuntimeError("a fault of ours")
elif how == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif how in ("kill-once", "kill-lost") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    own = Path(tempfile.gettempdir()) / f"killed-{os.getppid()}"
    if rank == 1:
        own.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    while not own.exists() or not own.read_text() or alive(int(own.read_text())):  # a loss comes after the death
        time.sleep(0.02)
    own.unlink()
    launch.leave_after_loss("Connection closed by peer")
elif how == "hang":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    launch.leave_after_loss("Timed out waiting 1ms")
elif how == "interrupt":
    stop = []
    signal.signal(signal.SIGINT, lambda *a: stop.append(1))
    signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
    say("ready")
    while not stop:
        time.sleep(0.01)
    if rank == 0:
        time.sleep(1.0)  # the slow end of a save: nobody may kill it meanwhile
        say("saved")
    leave(Interrupted("interrupted; saved step 9"))
