"""Checkpoints move between layouts: weights and optimizer state to the bit, by a table of who writes and who reads."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "reshard_worker.py"
spec = importlib.util.spec_from_file_location("reshard_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
sys.modules["reshard_worker"] = worker
spec.loader.exec_module(worker)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TABLE = [
    f"{optimizer}: {source} -> {target}" for cells in worker.pairs().values() for optimizer, source, target in cells
]
BY_ONE = [
    (optimizer, source)
    for optimizer in worker.OPTIMIZERS
    for source in worker.layouts(optimizer, {**worker.TWO, **worker.FOUR} if optimizer == "adamw" else worker.TWO)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder after the launch, and by name what was wrong, over all ranks."""
    root = tmp_path_factory.mktemp("reshard")
    (root / "text").mkdir()
    for i in range(30):
        (root / f"text/{i:02d}.txt").write_text("\n".join(f"{i} plus {j} is {i + j}" for j in range(30)))
    for optimizer in worker.OPTIMIZERS:
        worker.save(root, optimizer, "one", {})
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(root), str(r)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(4)
    ]
    try:
        logs = [p.communicate(timeout=800)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    assert all(p.returncode == 0 for p in ranks), "\n".join(logs)[-6000:]
    found = {}
    for r in range(4):
        for cell, wrong in json.loads((root / f"found-{r}.json").read_text()).items():
            found.setdefault(cell, []).extend(wrong)
    return root, found


@pytest.mark.parametrize("cell", TABLE)
def test_between_several(written, cell):
    assert written[1][cell] == []


@pytest.mark.parametrize("optimizer, source", BY_ONE)
def test_by_one(written, optimizer, source):
    assert worker.load(written[0], optimizer, source, {}) == []
