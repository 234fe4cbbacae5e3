"""Runs one save in a child process that is killed before its N-th change of the disk, for N = 1, 2, ... to the end.

After each kill a fresh start must find a whole checkpoint with the right content, and clean up. Children are forked
from here, so that a kill costs milliseconds; each is a process of its own and dies by SIGKILL.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

import trainwright.train.checkpoint.planning
import trainwright.train.checkpoint.reading  # noqa: F401  imported once, here
from trainwright.train.checkpoint import Checkpointer

torch.set_num_threads(1)


def tensors(value):
    return {"m": {"a": torch.full((300, 7), float(value)), "b": torch.full((5,), float(value))}, "n": value}


def save(checkpointer, step, value):
    checkpointer.save(step, tensors(value), {"value": value}, {"w": torch.full((50, 9), float(value))}, {"v": value})


def kill_at(number):
    """SIGKILL to ourselves before the ``number``-th system call that changes the disk; a write is cut in half."""
    count = 0

    def wrap(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in ("write", "fsync", "rename", "mkdir", "rmdir", "unlink"):
        wrap(name)


def main():
    root, case = Path(sys.argv[1]), sys.argv[2]
    start = root / "start"
    before = Checkpointer(start, keep=5, run_id="r", asynchronous=False)
    save(before, 1, 1)
    save(before, 2, 2)
    step = 2 if case == "replace" else 3
    keep = 1 if case == "retention" else 5
    outcomes = {"old": 0, "new": 0}
    for number in range(1, 500):
        directory = root / "run"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(start, directory)
        child = os.fork()
        if child == 0:
            kill_at(number)
            checkpointer = Checkpointer(directory, keep=keep, run_id="r", asynchronous=number % 2 == 0)
            save(checkpointer, step, 3)
            checkpointer.close()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        fresh = Checkpointer(directory)
        found = fresh.latest()
        target, weights = tensors(0), {"w": torch.zeros(50, 9)}
        meta = fresh.load(found, target, weights=weights)
        value = meta["value"]
        assert value in (2, 3), (number, value)
        assert found.name == f"step-{step if value == 3 else 2:08d}", (number, found)
        assert target["n"] == value and all((t == value).all() for t in target["m"].values()), number
        assert (weights["w"] == value).all() and fresh.per_rank(found) == {"v": value}
        hidden = [p.name for p in directory.iterdir() if p.name.startswith(".")]
        assert not hidden, (number, hidden)
        outcomes["new" if value == 3 else "old"] += 1
    else:
        raise AssertionError("the save never ended by itself")
    print(json.dumps({"kills": number - 1, **outcomes}))


if __name__ == "__main__":
    main()
