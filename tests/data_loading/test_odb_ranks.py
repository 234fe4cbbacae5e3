"""ODB on real processes: the same steps and each sample once, and ranks that fail or die."""

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "odb_worker.py"


def run_ranks(folder, scenario, world, init=None):
    """What each rank wrote; None of one that was killed."""
    init = init or f"file://{folder}/rendezvous"
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, folder, init, scenario, str(r), str(world)], stderr=subprocess.PIPE, text=True
        )
        for r in range(world)
    ]
    try:
        errors = [p.communicate(timeout=100)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    results = []
    for rank, process in enumerate(processes):
        assert process.returncode in (0, -9), errors[rank]
        path = folder / f"rank{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else None)
    return results


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world", [2, 4])
def test_real_ranks_make_the_same_steps_and_see_each_sample_once(tmp_path, world):
    """Must hold (b), (c) and, with DDP, (d)."""
    ranks = run_ranks(tmp_path, "coverage", world)
    assert [r["error"] for r in ranks] == [None] * world
    for case in ("even", "unequal", "first ends", "last ends", "workers"):
        assert len({r[case]["steps"] for r in ranks}) == 1, case
        for r in ranks:
            assert Counter(r[case]["ids"]) == Counter(r[case]["expected"]), case
    assert sum(len(r["even"]["ids"]) for r in ranks) == 201
    assert max(r["gradients"]["worst"] for r in ranks) < 1e-12
    assert max(r["gradients"]["idle"] for r in ranks) > 0  # steps were among them in which a rank had nothing


@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_all_at_once(tmp_path):
    one, other = run_ranks(tmp_path, "fails", 2)
    assert other["error"].startswith("DataError: sample") and "of rank 1 has length 0" in other["error"]
    assert one["error"].startswith("RankLost: rank 1 failed")
    assert one["seconds"] < 20


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path):
    one, other, third = run_ranks(tmp_path, "stalls", 3)
    for rank in (one, third):
        assert rank["error"].startswith("RankLost: rank 1 did not come to exchange"), rank["error"]
        assert "busy for longer than 3 s" in rank["error"] and rank["seconds"] < 30
    assert other["error"].startswith("RankLost")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "tcp"), [(1, False), (0, True)])
def test_a_killed_rank_is_named_and_ends_all(tmp_path, victim, tcp):
    init = f"tcp://127.0.0.1:{free_port()}" if tcp else None
    ranks = run_ranks(tmp_path, f"kill{victim}", 3, init)
    assert ranks[victim] is None
    for rank in (r for i, r in enumerate(ranks) if i != victim):
        assert rank["error"].startswith(f"RankLost: rank {victim}"), rank["error"]
        assert rank["seconds"] < 60
