"""Worker scripts as the ranks of a job on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_ranks(script: str, *arguments: Path | str, world: int = 4, timeout: float, waited: int | None = None) -> None:
    """Run ``script`` of this folder in ``world`` processes; all of the first ``waited`` (None: all) have to end well.

    Raises AssertionError with what they printed, and TimeoutExpired after ``timeout`` seconds; none is left behind.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env["OMP_NUM_THREADS"] = "1"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        logs = [p.communicate(timeout=timeout)[0] for p in ranks[:waited]]
    finally:
        for p in ranks:
            p.kill()
    assert all(p.returncode == 0 for p in ranks[:waited]), "\n".join(logs)[-6000:]
