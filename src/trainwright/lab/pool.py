"""Runs trials in processes of their own, some at a time, and gives back what each left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import Interrupted, TrainwrightError
from trainwright.core.hardware import cores
from trainwright.lab.trial import Trial, TrialResult, TrialStore

POLL = 0.05  # seconds
GRACE = 60.0  # seconds that an interrupted trial gets to save


class TimeIsUp(TrainwrightError):
    """The time given to the lab is over; what is finished is kept, and the same command goes on."""

    exit_code = 0


OnTrial = Callable[[Trial, TrialResult, bool], None]  # the last: it was there before


@dataclass
class Pool:
    """Runs lists of trials through a store.

    jobs      trials at the same time; cores are divided among them unless OMP_NUM_THREADS is set.
    keep      leave the last checkpoint of each trial in its folder.
    deadline  time.monotonic() after which no trial is started any more.
    """

    store: TrialStore
    jobs: int = 1
    keep: bool = False
    deadline: float | None = None

    def run(self, trials: Sequence[Trial], on_trial: OnTrial | None = None) -> dict[str, TrialResult]:
        """Results by the trials' keys. Equal trials run once, finished ones not at all.

        Raises Interrupted after Ctrl-C, when the running trials have saved, and TimeIsUp behind the deadline.
        """
        results: dict[str, TrialResult] = {}
        waiting: list[Trial] = []
        for trial in {t.key: t for t in trials}.values():
            found = self.store.finished(trial)
            if found is not None:
                results[trial.key] = found
                if on_trial is not None:
                    on_trial(trial, found, True)
            else:
                waiting.append(trial)
        waiting.reverse()
        running: dict[int, tuple[Trial, subprocess.Popen[Any]]] = {}
        try:
            while waiting or running:
                late = self.deadline is not None and time.monotonic() >= self.deadline
                while waiting and not late and len(running) < self.jobs:
                    slot = next(i for i in range(self.jobs) if i not in running)
                    trial = waiting.pop()
                    running[slot] = (trial, self._start(trial, slot))
                if late and not running:
                    raise TimeIsUp(f"the time is up, {len(waiting)} trials are left; the same command goes on")
                time.sleep(POLL)
                for slot, (trial, process) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[slot]
                    results[trial.key] = self._collect(trial, process)
                    if on_trial is not None:
                        on_trial(trial, results[trial.key], False)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; finished trials are kept, and the same command goes on") from None
        finally:
            _end([process for _, process in running.values()])
        return results

    def _start(self, trial: Trial, slot: int) -> subprocess.Popen[Any]:
        from trainwright.train.run_dir import write_json

        folder = self.store.folder(trial)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "spec.json", trial.spec(self.keep, self.jobs))
        if self.store.finished(trial) is None:
            (folder / "result.json").unlink(missing_ok=True)
        with (folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trainwright.lab.worker", str(folder / "spec.json"), "--with-parent"],
                stdin=subprocess.PIPE,  # its end tells the worker that this process is gone
                stdout=log,
                stderr=log,
                env=self._environment(slot),
                process_group=0,  # Ctrl-C comes to this process alone, which lets the workers save
            )

    def _environment(self, slot: int) -> dict[str, str]:
        env = dict(os.environ)
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.jobs)))
        if self.jobs > 1:
            import torch

            count = torch.cuda.device_count()
            visible = [d for d in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or [str(i) for i in range(count)]
            if count > 1:
                env["CUDA_VISIBLE_DEVICES"] = visible[slot % count]
        return env

    def _collect(self, trial: Trial, process: subprocess.Popen[Any]) -> TrialResult:
        if process.stdin is not None:
            process.stdin.close()
        found = self.store.result(trial)
        if found is not None:
            return found
        code = process.returncode
        if code == 130:
            raise KeyboardInterrupt
        if code < 0:
            said = f"killed by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        else:
            said = f"the process ended with code {code} and left no result; see {self.store.folder(trial) / 'log.txt'}"
        return TrialResult(status="failed", error=said)


def _end(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Let them save and end; a trial that does not is killed."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
