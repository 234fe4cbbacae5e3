"""Sliced gradients on two ranks: the weights of one process with the same batch, and of what is sent the slices alone.

The card's check (f) for gradients that are never whole; float64 on gloo.
"""

import json
import sys
from pathlib import Path

import pytest
import sliced_worker as worker
import torch

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from rank_processes import run_ranks

LAYOUTS = {"replicate": {}, "shard": {"dp_shard": 2}, "context": {"cp": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sliced")


@pytest.fixture
def ranks(folder, recipe):
    """What each rank found."""
    if not (folder / "0.pt").exists():
        for name, parallel in LAYOUTS.items():
            data = recipe(
                optimizer={"name": "grass", "lr": 0.01, "rank": 8, "gap": 3, "scale": 1.0}, clip={"name": "none"},
                parallel=parallel, **{"train.steps": 7, "log.every": 1, "train.micro_batch_size": 2},
            )  # fmt: skip
            if name != "context":
                data["checkpoint"] = {"every": 4, "asynchronous": False}
            (folder / f"{name}.json").write_text(json.dumps(data))
        run_ranks(str(Path(worker.__file__)), folder, world=2, timeout=300)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(2)]


@pytest.mark.parametrize("case", worker.CASES)
def test_training_is_that_of_one_process(ranks, case):
    """Eight steps of two micro-batches over two new selections: weights, state, selections, measured norms."""
    one = worker.train(case, None)
    for found in (rank[case] for rank in ranks):
        assert found["sliced"] == one["sliced"]
        assert ("dense" in case) == (sum(found["sliced"]) == 0)
        torch.testing.assert_close(found["norms"], one["norms"], rtol=1e-12, atol=0)
        for n, value in one["weights"].items():
            torch.testing.assert_close(found["weights"][n], value, rtol=1e-11, atol=1e-12, msg=n)
        assert found["state"].keys() == one["state"].keys()
        for n, value in one["state"].items():
            torch.testing.assert_close(found["state"][n], value, rtol=1e-10, atol=1e-13, msg=n)


def test_slices_alone_are_sent(ranks):
    """Bytes that go into the reductions of a step, by closed form; FSDP2 reduces what is whole in each micro-batch."""
    dim, ffn, vocab, rank, layers = 32, 44, 61, 6, 2
    shapes = layers * [(dim, dim), (16, dim), (16, dim), (dim, dim), (ffn, dim), (ffn, dim), (dim, ffn)]
    rest = vocab * dim + (2 * layers + 1) * dim
    whole, slices = sum(m * n for m, n in shapes), sum(rank * max(s) for s in shapes)
    for found in ranks:
        sent = [s["all_reduce"] / 8 for s in found["replicate"]["sent"]]
        usual, selection = rest + slices, rest + whole
        assert sent == [selection, usual, usual, selection, usual, usual, selection, usual]
        assert all(s.keys() == {"all_reduce"} for s in found["replicate"]["sent"])
        padding = 200  # FSDP2's, where a side is not even
        for case, times in (("shard", worker.MICRO), ("shard, whole", 1)):
            sent = [s["reduce_scatter"] / 8 for s in found[case]["sent"]]
            for i, numbers in enumerate(sent):
                wanted = times * (rest + whole) if i % 3 == 0 else times * rest + slices
                assert wanted <= numbers <= wanted + padding, (case, i)
        dense = [s["reduce_scatter"] / 8 for s in found["shard, dense"]["sent"]]
        assert min(dense) >= worker.MICRO * (rest + whole)


def test_slices_of_all_layouts_add_up(ranks):
    for found in ranks:
        assert len(found["layouts"]) == 50
        for case, (laid_out, difference, whole) in found["layouts"].items():
            assert laid_out and max(difference, whole) < 1e-15, case


def test_what_cannot_be_added_up_is_refused(ranks):
    for found in ranks:
        step, backward, layout = found["refusals"]
        assert "not added up: call add_up" in step
        assert "meets the whole, or one that was added up over ranks" in backward
        assert "cannot be added up; leave grass_linear out" in layout


@pytest.mark.parametrize("name", LAYOUTS)
def test_recipes(ranks, name):
    """A run with slices is the one without, and goes on exactly from a checkpoint in mid-gap."""
    first = ranks[0]["runs"][name]
    losses = [[loss for loss, _ in first[kind]["rows"]] for kind in ("sliced", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 7
    norms = [[norm for _, norm in first[kind]["rows"]] for kind in ("sliced", "whole")]
    assert [a / b > 1 - 1e-4 for a, b in zip(*norms, strict=True)] == [t % 3 == 0 for t in range(7)]
    for n, value in first["whole"]["weights"].items():
        torch.testing.assert_close(first["sliced"]["weights"][n], value, rtol=1e-3, atol=1e-5, msg=n)
    if "resumed" in first:
        assert first["resumed"]["rows"] == first["sliced"]["rows"]
        for n, value in first["sliced"]["weights"].items():
            assert torch.equal(first["resumed"]["weights"][n], value), n
    for n, value in ranks[1]["runs"][name]["sliced"]["weights"].items():
        assert torch.equal(value, first["sliced"]["weights"][n])
