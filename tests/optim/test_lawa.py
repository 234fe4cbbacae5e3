"""LAWA and the ring of snapshots that it shares with the kernel averages."""

import pytest
import side_worker
import torch
from optimizer_zoo import Zoo, named
from side_worker import SPECS, walk
from torch import nn

from trainwright import RunConfig, Trainer
from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import NamedParam, named_params
from trainwright.core.registry import build
from trainwright.optim.averaging._ring import Ring
from trainwright.optim.averaging.lawa import LAWA

both = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s["name"])


def one(value, name="p"):
    p = value if isinstance(value, nn.Parameter) else nn.Parameter(torch.as_tensor(value))
    return p, [NamedParam(name, p, "matrix")]


def inside(average, p):
    with average.swapped():
        return p.detach().clone()


# -- (a) limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_snapshot_is_the_checkpoint(dtype):
    p, params = one(torch.zeros(50, 7, dtype=dtype))
    average = LAWA(params, k=1, every=3)
    g = torch.Generator().manual_seed(0)
    for step in range(1, 12):
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=g))
        if step % 3 == 0:
            held = p.detach().clone()
        average.update(step)
        if step >= 3:
            assert torch.equal(inside(average, p), held), step


@both
def test_training_is_the_same_with_and_without(recipe, spec):
    def losses(**settings):
        rows = []
        trainer = Trainer(RunConfig.load(recipe(**{"train.steps": 8, "evaluate.every": 4, **settings})))
        summary = trainer.fit(on_step=rows.append)
        return trainer, [r["loss"] for r in rows], summary

    plain, a, before = losses(**{"run.name": "plain"})
    averaged, b, after = losses(**{"run.name": "averaged", "average": spec})
    assert a == b
    assert all(torch.equal(x, y) for x, y in zip(plain._tensors, averaged._tensors, strict=True))
    assert after["val_loss_live"] == before["val_loss"] and after["val_loss"] != before["val_loss"]


# -- (b) the mean ---------------------------------------------------------------------------------------------------


def test_mean_of_a_sliding_window_after_200_pushes():
    g = torch.Generator().manual_seed(0)
    p, params = one(torch.zeros(40, 9))
    average, values = LAWA(params, k=5, every=1), []
    for step in range(1, 201):
        with torch.no_grad():
            p.copy_(100 + torch.randn(p.shape, generator=g))
        values.append(p.detach().double())
        average.update(step)
        expected = torch.stack(values[-5:]).mean(0)  # of those that are there while there are fewer
        torch.testing.assert_close(inside(average, p).double(), expected, rtol=1e-6, atol=0)
    assert average.ring.steps == [196, 197, 198, 199, 200]


def test_snapshots_are_taken_every_so_many_steps_from_start():
    p, params = one(torch.zeros(1))
    average = LAWA(params, k=3, every=4, start=7)
    for step in range(1, 22):
        with torch.no_grad():
            p.fill_(float(step))
        average.update(step)
        taken = list(range(8, step + 1, 4))[-3:]
        assert average.ring.steps == taken
        assert float(inside(average, p)) == pytest.approx(sum(taken) / len(taken) if taken else step)


def test_weights_that_do_not_move_are_their_own_mean():
    p, params = one(torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e3)
    average = LAWA(params, k=3, every=1)
    for step in range(1, 8):
        average.update(step)
    assert torch.equal(inside(average, p), p.detach())


def test_16_bit_weights_are_averaged_in_float32():
    p, params = one(torch.zeros(1, dtype=torch.bfloat16))
    average = LAWA(params, k=4, every=1)
    for step, value in enumerate([256.0, 258.0, 256.0, 256.0], start=1):  # 257 and 256.5 are not in bfloat16
        with torch.no_grad():
            p.fill_(value)
        average.update(step)
    (mean,) = average.ring.average(average.weights(4))
    assert mean.dtype == torch.float32 and float(mean) == 256.5


# -- (c) variance ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_variance_that_is_left(r):
    """Weights that follow an AR(1) process with correlation r from snapshot to snapshot; 200,000 of them at once."""
    k, g = 5, torch.Generator().manual_seed(0)
    p, params = one(torch.randn(200_000, generator=g))
    average = LAWA(params, k=k, every=1)
    for step in range(1, k + 1):
        average.update(step)
        with torch.no_grad():
            p.copy_(r * p + (1 - r * r) ** 0.5 * torch.randn(p.shape, generator=g))
    expected = (1 + 2 * sum((1 - j / k) * r**j for j in range(1, k))) / k
    assert float(inside(average, p).var()) == pytest.approx(expected, rel=0.05)
    if r == 0:
        assert expected == 1 / k


# -- (d) memory and resume ------------------------------------------------------------------------------------------


def test_memory_is_k_float32_copies_on_the_host():
    for dtype in (torch.float32, torch.bfloat16):
        model = Zoo(dtype=dtype)
        average = LAWA(named(model), k=5)
        assert average.ring.nbytes == 5 * 4 * sum(p.numel() for p in model.parameters())
        tensors = [t for entry in average.state_dict()["tensors"].values() for t in entry.values()]
        assert len(tensors) == 5 * len(named(model))
        assert {(t.device.type, t.dtype) for t in tensors} == {("cpu", torch.float32)}


@both
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_killed_run_goes_on_bit_for_bit(recipe, spec, at):
    """Saved with no snapshot, with one of three slots filled, and with the ring gone round."""
    common = {"average": spec, "train.steps": 9, "checkpoint.every": at, "evaluate.every": 3}
    whole_run = Trainer(RunConfig.load(recipe(**common, **{"run.name": "whole"})))
    expected = whole_run.fit()
    data = recipe(**common, **{"run.name": "halves", "checkpoint.keep": 20})

    class Kill(Exception):
        pass

    def die(row):
        if row["step"] == at + 1:
            raise Kill

    with pytest.raises(Kill):
        Trainer(RunConfig.load(data)).fit(on_step=die)
    resumed = Trainer(RunConfig.load(data), resume=True)
    assert resumed.progress.step == at and resumed.average.ring.steps == [2, 4, 6][: at // 2]
    found = resumed.fit()
    assert found["val_loss"] == expected["val_loss"] and found["val_loss_live"] == expected["val_loss_live"]
    a, b = whole_run.average.state_dict(), resumed.average.state_dict()
    assert a["scalars"] == b["scalars"] and a["scalars"]["steps"] == [4, 6, 8]
    for name, entry in a["tensors"].items():
        assert all(torch.equal(t, b["tensors"][name][key]) for key, t in entry.items()), name


def test_another_number_of_slots_is_refused(recipe):
    data = recipe(average={"name": "lawa", "k": 3, "every": 1})
    Trainer(RunConfig.load(data)).fit()
    with pytest.raises(CheckpointError, match=r"average\.k is 4 now and was 3 .*; set average\.k back to 3"):
        Trainer(RunConfig.load({**data, "average": {"name": "lawa", "k": 4, "every": 1}}), resume=True)
    model = Zoo()
    state = LAWA(named(model), k=3).state_dict()
    other = LAWA(named(model), k=4)
    with pytest.raises(CheckpointError, match="3 snapshots"):
        other.load_state_dict(state)


def test_a_refused_state_changes_nothing():
    model = Zoo()
    average = LAWA(named(model), k=2, every=1)
    average.update(1)
    before = {n: {k: t.clone() for k, t in e.items()} for n, e in average.state_dict()["tensors"].items()}
    walk(model, 1)
    other = LAWA(named(model), k=2, every=1)
    other.update(1)
    state = other.state_dict()
    last = list(state["tensors"])[-1]
    state["tensors"][last] = {k: torch.zeros(2, 2, 2) for k in state["tensors"][last]}
    with pytest.raises(CheckpointError, match=last):
        average.load_state_dict(state)
    after = average.state_dict()["tensors"]
    assert all(torch.equal(after[n][k], t) for n, e in before.items() for k, t in e.items())


# -- (e) shards -----------------------------------------------------------------------------------------------------


def test_averages_of_shards_are_shards_of_the_average(tmp_path):
    ranks = side_worker.run(tmp_path, 2, "averages")
    for spec in SPECS:
        for figures in (r[spec["name"]] for r in ranks):
            assert figures["layout"] and figures["sharded"] and figures["gathered"] and figures["cut"]
            one_rank, two_ranks = figures["distance"]
            assert two_ranks == pytest.approx(one_rank, rel=1e-12) and one_rank > 0
        assert sum(r[spec["name"]]["bytes"] for r in ranks) == pytest.approx(1.0)


# -- what is averaged -----------------------------------------------------------------------------------------------


def test_a_tied_weight_is_held_once():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    model.head.weight = model.embed.weight
    assert LAWA(named_params(model), k=2).ring.nbytes == 2 * 4 * 24
    p = model.embed.weight
    params = [NamedParam("embed.weight", p, "embedding"), NamedParam("head.weight", p, "head")]
    average = LAWA(params, k=2, every=1)
    assert average.ring.nbytes == 2 * 4 * 24 and list(average.state_dict()["tensors"]) == ["embed.weight"]
    before = p.detach().clone()
    average.update(1)
    with torch.no_grad():
        p.add_(1.0)
    average.update(2)
    torch.testing.assert_close(inside(average, p), before + 0.5)
    assert torch.equal(p.detach(), before + 1.0) and model.head.weight is p


def test_buffers_stay_those_of_the_model():
    model = nn.Linear(3, 3)
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.register_buffer("table", torch.zeros(4))
    average = LAWA(named_params(model), k=3, every=1)
    for step in range(1, 4):
        model.count += 1
        model.table += 1.0
        average.update(step)
    with average.swapped():
        assert int(model.count) == 3 and float(model.table.sum()) == 12.0


def test_flush_forgets():
    p, params = one(torch.zeros(2))
    average = LAWA(params, k=4, every=1)
    for step in range(1, 7):
        with torch.no_grad():
            p.fill_(float(step))
        if step == 5:
            average.flush()
            assert torch.equal(inside(average, p), p.detach())  # nothing held: the weights stay
        average.update(step)
    assert average.ring.steps == [5, 6] and float(inside(average, p)[0]) == 5.5


def test_a_changed_shape_is_refused_by_name():
    p, params = one(torch.zeros(1, 3), "layers.0.up")
    average = LAWA(params, k=2, every=1)
    average.update(1)
    p.data = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"layers\.0\.up"):
        average.update(2)
    assert average.ring.steps == [1]


@pytest.mark.parametrize("settings", [{"k": 0}, {"every": 0}, {"start": -1}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        build("average", {"name": "lawa", **settings})
    with pytest.raises(ValueError, match=r"at least|negative"):
        LAWA(one(torch.zeros(1))[1], **settings)


def test_the_ring_names_what_it_lacks():
    ring = Ring(one(torch.zeros(3))[1], 3)
    ring.push(1)
    with pytest.raises(IndexError, match="there are 1"):
        ring.snapshot(1)
    with pytest.raises(ValueError, match="need 2"):
        ring.square_distance(1)
