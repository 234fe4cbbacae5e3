"""TensorBoard event files, through the tensorboard package's own writer.

Rows wait in memory and are written every ``flush_seconds``; the package is imported at the first of these, not at the
start. Where a run goes back to an earlier step (resume, rollback), a session start is written, which makes TensorBoard
drop the points that no longer count. SIGKILL loses the rows still in memory; metrics.jsonl has them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat

from trainwright.core.registry import register
from trainwright.train.loggers.base import Logger, LoggerConfig, group, log, need, numbers


class TensorBoardLogger:
    """Writes scalars to ``folder``. When that fails in mid-run it says so once and lets the training go on."""

    def __init__(self, folder: Path, flush_seconds: float = 5.0):
        self.folder, self.flush_seconds = Path(folder), flush_seconds
        self._rows: list[tuple[float, dict[str, Any]]] = []
        self._writer: Any = None
        self._failed = False
        self._last_step = -1
        self._purge_next = self.folder.is_dir() and any(self.folder.glob("events.out.tfevents.*"))
        self._next_flush = time.monotonic() + flush_seconds

    def log(self, row: dict[str, Any]) -> None:
        if self._failed:
            return
        self._rows.append((time.time(), row))
        if time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        self._next_flush = time.monotonic() + self.flush_seconds
        if not rows or self._failed:
            return
        try:
            for at, row in rows:
                self._write(at, row)
            self._writer.flush()
        except OSError as error:
            self._failed = True
            log.warning("TensorBoard stops here: %s. metrics.jsonl goes on", error)

    def _write(self, at: float, row: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self.folder))
        step = int(row.get("step", max(self._last_step, 0)))
        if "loss" in row or self._last_step < 0:
            if self._purge_next or 0 <= step <= self._last_step:
                self._writer.add_event(Event(wall_time=at, step=step, session_log=SessionLog(status=SessionLog.START)))
            self._purge_next = False
            self._last_step = step
        values = [Summary.Value(tag=group(key), simple_value=value) for key, value in numbers(row)]
        if values:
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._failed = True  # nothing can be written any more
            try:
                writer.close()
            except OSError as error:
                log.warning("TensorBoard's last figures are lost: %s", error)


@register("logger", "tensorboard")
class TensorBoardConfig(LoggerConfig):
    """TensorBoard event files in the run's folder (`tensorboard --logdir runs`)."""

    dir: str = Field("tensorboard", description="Folder of the event files, in the run's folder unless absolute.")
    flush_seconds: NonNegativeFloat = Field(5.0, description="Seconds between writes.")

    def build(self, config: Any, folder: Path) -> Logger:
        need("tensorboard", "")
        return TensorBoardLogger(Path(folder) / self.dir, self.flush_seconds)
