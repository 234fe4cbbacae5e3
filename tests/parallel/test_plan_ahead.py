"""FlexSP's plans of the next step while this one runs: the same training, the same checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainwright.core.batch import Batch
from trainwright.core.errors import DataError
from trainwright.parallel.context.flexsp import FlexSPConfig, FlexSPContext, documents
from trainwright.train.plan_ahead import LookingAhead, looking_ahead

HERE = Path(__file__).parent


def batch(number: int) -> Batch:
    slots = torch.full((2, 8), number)
    return Batch(slots, slots, torch.ones(2, 8), slots, (torch.arange(8) // (1 + number % 4)).expand(2, 8).int())


class Numbers:
    """A loader of five batches; ``broken`` names one that cannot be read the first time."""

    def __init__(self, broken=None):
        self.at, self.broken, self.closed = 0, broken, False

    def next_batch(self):
        if self.at == self.broken:
            self.broken = None
            raise DataError("cannot be read")
        if self.at == 5:
            raise StopIteration
        self.at += 1
        return batch(self.at - 1)

    @property
    def epoch(self):
        return self.at / 5

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def close(self):
        self.closed = True


def number(found: Batch) -> int:
    return int(found.tokens[0, 0])


def test_looking_ahead_shows_the_loader_as_without():
    begun = []
    loader = LookingAhead(Numbers(), lambda b: begun.append(number(b)))
    plain = Numbers()
    for i in range(5):
        assert number(loader.next_batch()) == number(plain.next_batch()) == i
        assert begun == list(range(1, min(i + 2, 5)))  # the next is begun before this one is trained on
        assert loader.state_dict() == plain.state_dict() and loader.epoch == plain.epoch
    with pytest.raises(StopIteration):
        loader.next_batch()
    loader.close()
    assert loader.loader.closed


def test_a_restored_loader_forgets_what_it_held():
    loader = LookingAhead(Numbers(), lambda b: None)
    loader.next_batch()
    state = loader.state_dict()
    loader.next_batch()
    loader.load_state_dict(state)
    assert state == {"at": 1} == loader.state_dict()
    assert number(loader.next_batch()) == 1


def test_an_error_comes_with_the_batch_that_it_is_of():
    loader = LookingAhead(Numbers(), lambda b: None)
    loader.loader.broken = 1
    assert number(loader.next_batch()) == 0  # the second was tried, and is tried again
    assert number(loader.next_batch()) == 1
    again = LookingAhead(Numbers(broken=0), lambda b: None)
    with pytest.raises(DataError, match="cannot be read"):
        again.next_batch()


@pytest.mark.parametrize(
    "settings, rank, interaction, wanted",
    [
        ({"plan_ahead": True}, 0, None, True),
        ({"method": "milp"}, 0, None, True),
        ({}, 0, None, False),  # layouts take milliseconds
        ({"method": "milp", "plan_ahead": False}, 0, None, False),
        ({"plan_ahead": True}, 1, None, True),  # all ranks read as much, whichever plans
        ({"plan_ahead": True}, 0, object(), False),  # data chosen step by step
    ],
)
def test_when_plans_are_made_ahead(settings, rank, interaction, wanted):
    context = FlexSPContext({}, rank, 4, FlexSPConfig(**settings), 4)
    loader = Numbers()
    trainer = SimpleNamespace(
        parallel=SimpleNamespace(context=context),
        interaction=interaction,
        loader=loader,
        executor=SimpleNamespace(micro_batch_size=2),
    )
    found = looking_ahead(trainer)
    assert isinstance(found, LookingAhead) == wanted and (wanted or found is loader)
    if rank:
        found.next_batch()
        assert context.ahead is None
    trainer.parallel.context = None
    assert looking_ahead(trainer) is loader


def test_a_plan_made_ahead_is_the_one_that_is_used():
    context = FlexSPContext({}, 0, 1, FlexSPConfig(plan_ahead=True), 4)
    plain = FlexSPContext({}, 0, 1, FlexSPConfig(), 4)
    loader = LookingAhead(Numbers(), lambda b: context.plan_ahead(b, 2))
    try:
        for step in range(4):
            found = loader.next_batch()
            under_way = set(context.ahead._pending)
            assert step == 0 or tuple(s.stop - s.start for s in documents(found)) in under_way
            mine, want = context.micro_batches(found, 2), plain.micro_batches(found, 2)
            assert context.last == plain.last
            assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(mine, want, strict=True))
            assert context.figures()["plan_wait"] >= 0
        assert len(context.ahead._pending) == 2
    finally:
        context.close()
    assert context.ahead is None


def test_training_with_plans_made_ahead_is_the_same(recipe, tmp_path):
    """Two ranks, bit for bit; a checkpoint says the same of the data; and the seconds waited are logged."""
    recipes = {}
    for name, settings in {"here": {"plan_ahead": False}, "ahead": {"plan_ahead": True}}.items():
        context = {"name": "flexsp", "overhead": 0, "bandwidth": {2: 1.0}, **settings}
        recipes[name] = recipe(
            **{
                "run.name": name,
                "parallel.cp": 2,
                "parallel.context": context,
                "train.micro_batch_size": 4,
                "train.steps": 4,
                "checkpoint.every": 2,
            }
        )
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    command = [sys.executable, str(HERE / "dynamic_worker.py"), str(tmp_path / "recipes.json"), str(tmp_path / "out")]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    ranks = [torch.load(tmp_path / f"out.{r}") for r in range(2)]
    for found in ranks:
        here, ahead = found["here"], found["ahead"]
        assert len(here["rows"]) == 4
        for a, b in zip(here["rows"], ahead["rows"], strict=True):
            assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] and a["epoch"] == b["epoch"]
            assert a["plan_wait"] >= 0 and b["plan_wait"] >= 0
        assert all(torch.equal(here["weights"][n], w) for n, w in ahead["weights"].items())
    runs = tmp_path / "runs"
    first = [sorted((runs / name / "checkpoints").glob("step-*"))[0] / "meta.json" for name in recipes]
    here, ahead = (json.loads(path.read_text())["loader"] for path in first)
    assert here == ahead
