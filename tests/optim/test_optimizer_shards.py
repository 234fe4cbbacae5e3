"""Optimizers, clipping and averages on FSDP2-sharded parameters of two processes, against one process.

Shapes of the small network are odd: 13 and 3 rows over two ranks, and a bias whose shard on rank 1 is empty.
"""

import json
import time

import pytest
import torch.multiprocessing as mp
from shards_worker import main

from trainwright.core.registry import methods

OPTIMIZERS = [m.name for m in methods("optimizer")]
# After 5 steps in float32 whose gradients differ in the order of summation alone. Muon's iteration blows such
# differences up where singular values are small.
TOLERANCE = 5e-5
# Bytes of state that every rank has to hold: projections from the right [6, 2], of up and square; their moments.
# Of adafactor: one number per column, of matrices that are sharded by rows.
REPLICATED = {
    "adafactor": 4 * 43,
    "soap": 4 * 2 * (2 * (13**2 + 6**2) + 4 * 2 * 6**2),  # preconditioners and bases of both sides of each matrix
    "galore": 2 * 48,
    "natural_galore": 2 * 48 + 4 * (400 + 400 + 144),  # and Gram matrices of the history
    "online_subspace_descent": 2 * 3 * 48,
    "adapm": 4 * 6,
    "grass": 3 * 20,
    "gradnormlorp": 2 * 48,
    "spectral_sphere": 100,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    job = mp.spawn(main, args=(str(folder),), nprocs=2, join=False)
    deadline = time.monotonic() + 150
    while not (finished := job.join(timeout=1)) and time.monotonic() < deadline:
        pass  # join returns at each process that ends
    if not finished:
        for process in job.processes:
            process.kill()
        pytest.fail("the two-rank job did not end within 150 s")
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_equal_the_whole(ranks, name):
    for figures in (r["optimizer"][name] for r in ranks):
        assert figures["way"] > 100 * TOLERANCE
        assert figures["difference"] < TOLERANCE
    assert ranks[0]["optimizer"][name]["empty_shards"] == 0
    assert ranks[1]["optimizer"][name]["empty_shards"] > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_reshards(ranks, name):
    for figures in (r["optimizer"][name] for r in ranks):
        assert figures["sharded_to_whole"] < TOLERANCE
        assert figures["whole_to_sharded"] < TOLERANCE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_shared_out(ranks, name):
    parts = [r["optimizer"][name]["bytes"] for r in ranks]
    total = ranks[0]["optimizer"][name]["whole_bytes"]
    # a count of steps per parameter is on both
    assert total <= sum(parts) <= total + 4 * 9 + REPLICATED.get(name, 0)
    assert parts[0] - REPLICATED.get(name, 0) < 0.7 * total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, name):
    for figures in (r["optimizer"][name] for r in ranks):
        assert figures["skipped"]
        assert figures["scale"] == 128.0


def test_muon_on_shards_is_muon_on_the_matrix(ranks):
    for r in ranks:
        assert len(r["muon"]) == 36
        for key, figures in r["muon"].items():
            assert figures["cosine"] > 0.998, key
            assert figures["size"] == pytest.approx(1.0, abs=0.02), key
            assert figures["sharded_state"], key


@pytest.mark.parametrize("name", [m.name for m in methods("clip")])
def test_clipping_sees_all_shards(ranks, name):
    for figures in (r["clip"][name] for r in ranks):
        one, two = figures["norms"]
        assert two == pytest.approx(one, rel=1e-5) and one > 1
        assert figures["plain_norm"]
        assert figures["mixed"] >= 100 * 3**0.5
        assert figures["half"] == pytest.approx(1.0, rel=1e-5)
        assert figures["direction"] > 0.999999


@pytest.mark.parametrize("name", [m.name for m in methods("average")])
def test_averages_of_shards(ranks, name):
    for figures in (r["average"][name] for r in ranks):
        assert figures["inside"] < TOLERANCE
        assert figures["after"] == figures["live"] < TOLERANCE
        assert figures["still_sharded"]
