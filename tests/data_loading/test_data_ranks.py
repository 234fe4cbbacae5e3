"""The data of a run on several real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "ranks_worker.py"


def run_ranks(folder, texts, world):
    folder.mkdir()
    processes = [
        subprocess.Popen([sys.executable, WORKER, folder, texts, str(r), str(world)], stderr=subprocess.PIPE, text=True)
        for r in range(world)
    ]
    try:
        errors = [p.communicate(timeout=120)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * world, errors
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world)]


@pytest.mark.timeout(180)
def test_two_processes_share_the_rows_of_one(tmp_path, corpus):
    (one,) = run_ranks(tmp_path / "one", corpus, 1)
    two = run_ranks(tmp_path / "two", corpus, 2)
    assert [r["error"] for r in (one, *two)] == [None] * 3
    assert one["state"] == two[0]["state"] == two[1]["state"]
    assert one["fingerprint"] == two[0]["fingerprint"]
    for step, whole in enumerate(one["rows"]):
        assert two[0]["rows"][step] + two[1]["rows"][step] == whole
    assert [len(b) for b in two[0]["validation"]] == [len(b) for b in two[1]["validation"]]
    rows = [{tuple(r) for b in part["validation"] for r in b} for part in (one, *two)]
    filler = {r for r in rows[1] | rows[2] if len(set(r)) == 1}
    assert rows[1] | rows[2] == rows[0] | filler
    assert len(list((tmp_path / "two" / "cache").glob("text-*"))) == 2  # a split each, made once


@pytest.mark.timeout(120)
def test_what_stops_the_first_rank_stops_all_with_its_message(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "image.txt").write_bytes(b"\x89PNG\x00\x00\xff" * 50)
    results = run_ranks(tmp_path / "out", str(tmp_path / "texts"), 2)
    assert results[0]["error"].startswith("DataError") and "image.txt" in results[0]["error"]
    assert results[1]["error"] == results[0]["error"]
