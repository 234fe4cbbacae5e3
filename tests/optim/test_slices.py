"""Methods over rows and columns on sharded matrices: four processes against one, and what they send."""

import json
import time

import pytest
import torch.multiprocessing as mp
from slices_worker import CASES, METHODS, main


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    job = mp.spawn(main, args=(str(folder),), nprocs=4, join=False)
    deadline = time.monotonic() + 150
    while not (finished := job.join(timeout=1)) and time.monotonic() < deadline:
        pass
    if not finished:
        for process in job.processes:
            process.kill()
        pytest.fail("the four-rank job did not end within 150 s")
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(4)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_shards_equal_the_whole(ranks, method, case):
    for figures in (r["steps"][method] for r in ranks):
        assert figures["difference"][case] < 1e-11
        assert figures["way"] > 1e-4


@pytest.mark.parametrize(
    "method, wanted",
    [
        ("mano v2", [[12, 12], []]),  # columns: <Q, W> and |T|; rows: nothing
        ("mano v1", [[24, 12], []]),  # |W| as well
        ("mano both", [[12, 12], [12, 12]]),
        ("sinkgd", [[12] * 5, [12] * 5]),  # a pass, an all-reduce
        ("adamh", [[1, 1, 1], [1, 1]]),  # |W| once, |u|, |V|
    ],
)
def test_only_sums_are_sent(ranks, method, wanted):
    for steps in (r["sent"][method] for r in ranks):
        assert [s["reduced"] for s in steps] == wanted
        assert [s["collectives"] for s in steps] == [len(sizes) for sizes in wanted]  # no other ones


def test_the_count_of_collectives_sees_gathers(ranks):
    assert all(s["collectives"] > len(s["reduced"]) for r in ranks for s in r["sent"]["swan"])


def test_sums_and_norms(ranks):
    assert all(r["sums"] < 1e-12 for r in ranks)


def test_norms_of_a_whole_stack_are_shared_out(ranks):
    for figures in (r["norms"] for r in ranks):
        assert figures["ratio"] == pytest.approx([2.0] * 6, rel=1e-9)
        assert figures["sharded"]
