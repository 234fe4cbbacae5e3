"""Saving and loading in one process: values, formats, names, background writing."""

import json
import math
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.seeds import rng_state, set_rng_state
from trainwright.train.checkpoint import Checkpointer, codec, inspect, read_tensors, read_weights
from trainwright.train.checkpoint.files import DTYPES, write_safetensors


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tree(seed=0):
    g = torch.Generator().manual_seed(seed)
    weights = {"layers.0.w": torch.randn(5, 3, generator=g), "norm": torch.randn(3, generator=g).bfloat16()}
    state = {
        "optimizer": {
            "state": {
                name: {"m": torch.randn(w.shape, generator=g), "step": torch.tensor(7.0)} for name, w in weights.items()
            },
            "groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "fused": None}],
        },
        "average": {"layers.0.w": {"ema": torch.randn(5, 3, generator=g)}},
    }
    return weights, state


def zeros(node):
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {k: zeros(v) for k, v in node.items()}
    if isinstance(node, list):
        return [zeros(v) for v in node]
    return "unset"


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b and type(a) is type(b)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_round_trip_is_bit_exact(tmp_path, asynchronous):
    weights, state = tree()
    meta = {"step": 3, "loss": 0.1 + 0.2, "nan": float("nan"), "inf": [-math.inf], "ids": (1, 2), "config": {"a": None}}
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(3, state, meta, weights)
        found = checkpointer.latest()
        assert found == tmp_path / "step-00000003"
        new_weights, new_state = zeros(weights), zeros(state)
        new_state["optimizer"]["groups"] = [{}]
        loaded = checkpointer.load(found, new_state, weights=new_weights)
    assert math.isnan(loaded.pop("nan")) and math.isnan(meta.pop("nan"))
    assert loaded == meta and loaded["loss"].hex() == meta["loss"].hex() and isinstance(loaded["ids"], tuple)
    assert same(new_weights, weights) and same(new_state, state)
    assert same(read_weights(found), weights)
    assert same(read_tensors(found), state)


def test_weights_are_read_by_safetensors_alone(tmp_path):
    weights, state = tree()
    Checkpointer(tmp_path, asynchronous=False).save(1, state, {}, weights)
    assert same(load_file(tmp_path / "step-00000001" / "weights" / "model.safetensors"), weights)
    assert not list(tmp_path.rglob("*.metadata")) and not list(tmp_path.rglob("*.distcp"))


@pytest.mark.parametrize("dtype", list(DTYPES), ids=DTYPES.get)
def test_every_dtype_is_stored_as_safetensors_reads_it(tmp_path, dtype):
    raw = torch.arange(64, dtype=torch.uint8) % (2 if dtype == torch.bool else 63)
    tensor = raw.view(dtype).reshape(-1, 2)
    shapes = {"matrix": tensor, "scalar": tensor[0, 0], "empty": tensor[:0], "transposed": tensor.t()}
    write_safetensors(tmp_path / "a.safetensors", list(shapes.items()))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        for name, expected in shapes.items():
            got = file.get_tensor(name)
            assert got.dtype == dtype and got.shape == expected.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, shapes, {})
    into = {name: torch.zeros(t.shape, dtype=torch.uint8).to(dtype) for name, t in shapes.items()}
    checkpointer.load(tmp_path / "c" / "step-00000001", into)
    for name, expected in shapes.items():
        want, got = (t.contiguous().reshape(-1).view(torch.uint8) for t in (expected, into[name]))
        assert torch.equal(want, got), name


def test_changes_after_save_returns_are_not_written(tmp_path, monkeypatch):
    from trainwright.train.checkpoint import planning

    gate, real = threading.Event(), planning.write_safetensors

    def held(*args):
        gate.wait(30)
        return real(*args)

    monkeypatch.setattr(planning, "write_safetensors", held)
    weights, state = tree()
    expected = {k: v.clone() for k, v in weights.items()}
    own = {"counter": [1], "noise": torch.ones(3)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, meta := {"list": [1]}, weights, own)
    for w in weights.values():
        w.add_(1)
    meta["list"].append(2)
    own["counter"].append(2)
    own["noise"].zero_()
    assert not (tmp_path / "step-00000001").exists()  # nothing is visible before it is whole
    gate.set()
    checkpointer.wait()
    path = tmp_path / "step-00000001"
    assert same(read_weights(path), expected)
    assert inspect(path).meta == {"list": [1]}
    assert checkpointer.per_rank(path)["counter"] == [1] and checkpointer.per_rank(path)["noise"].sum() == 3


def test_host_buffers_are_reused(tmp_path):
    weights, state = tree()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {}, weights)
    checkpointer.wait()
    first = {k: v.data_ptr() for k, v in checkpointer._buffers._buffers.items()}
    checkpointer.save(2, state, {}, {k: v.clone() + 1 for k, v in weights.items()})
    checkpointer.wait()
    assert {k: v.data_ptr() for k, v in checkpointer._buffers._buffers.items()} == first
    assert same(read_weights(tmp_path / "step-00000002"), {k: v + 1 for k, v in weights.items()})
    # another set of tensors is planned anew
    checkpointer.save(3, {}, {}, {"other": torch.ones(2)})
    checkpointer.wait()
    assert list(read_weights(tmp_path / "step-00000003")) == ["other"]
    assert len(checkpointer._buffers._buffers) == 1


def test_random_state_round_trips(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {}, {}, per_rank=rng_state())
    expected = torch.rand(4)
    state = checkpointer.per_rank(checkpointer.latest())
    torch.rand(9)
    set_rng_state(state)
    assert torch.equal(torch.rand(4), expected)
    checkpointer.save(2, {}, {})
    assert checkpointer.per_rank(checkpointer.latest()) is None


def test_model_and_optimizer_resume_bitwise(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def steps(model, optimizer, n):
        for _ in range(n):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()

    def named(model, optimizer):
        return {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}

    model, optimizer = build()
    steps(model, optimizer, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(2, named(model, optimizer), {}, dict(model.named_parameters()), rng_state())
    steps(model, optimizer, 2)

    again, optimizer2 = build()
    steps(again, optimizer2, 1)
    path = checkpointer.latest()
    checkpointer.load(path, named(again, optimizer2), weights=dict(again.named_parameters()))
    set_rng_state(checkpointer.per_rank(path))
    steps(again, optimizer2, 2)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mismatches_are_named_and_nothing_is_touched(tmp_path):
    weights, state = tree()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, {}, weights)
    path = checkpointer.latest()

    def refused(new_state, new_weights, *words):
        before = [t.clone() for t in new_weights.values()]
        with pytest.raises(CheckpointError) as error:
            checkpointer.load(path, new_state, weights=new_weights)
        assert all(word in str(error.value) for word in words), error.value
        assert all(torch.equal(a, b) for a, b in zip(before, new_weights.values(), strict=True))

    good = zeros(state)
    refused(good, {"norm": torch.zeros(3).bfloat16()}, "only in the checkpoint", "weights/layers.0.w")  # frozen now
    refused(good, zeros(weights) | {"new": torch.zeros(1)}, "missing in the checkpoint", "weights/new")
    refused(good, zeros(weights) | {"norm": torch.zeros(4).bfloat16()}, "another shape", "weights/norm", "[3]", "[4]")
    refused(good, zeros(weights) | {"norm": torch.zeros(3)}, "another dtype", "weights/norm", "bfloat16")
    renamed = zeros(state)
    renamed["average"]["layers.1.w"] = renamed["average"].pop("layers.0.w")
    refused(renamed, zeros(weights), "state/average/layers.1.w/ema", "state/average/layers.0.w/ema")
    fewer = zeros(state)
    del fewer["optimizer"]["groups"]
    refused(fewer, zeros(weights), "only in the checkpoint", "state/optimizer/groups")

    # strict=False: what fits is loaded, dtypes are converted, shapes must still agree
    into = {"norm": torch.zeros(3), "new": torch.full((1,), 5.0)}
    checkpointer.load(path, None, weights=into, strict=False)
    assert torch.equal(into["norm"], weights["norm"].float()) and into["new"] == 5
    with pytest.raises(CheckpointError, match="another shape"):
        checkpointer.load(path, None, weights={"norm": torch.zeros(4)}, strict=False)


def test_unstorable_values_are_refused_by_name(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for tensors, meta, word in [
        ({"a": {"b": object()}}, {}, "a/b"),
        ({}, {"m": {"x": {1, 2}}}, "meta/m/x"),
        ({}, {"t": torch.ones(1)}, "meta/t"),
        ({"a": {3: torch.ones(1)}}, {}, "below a"),
        ({"s": torch.eye(2).to_sparse()}, {}, "state/s"),
        ({"s": torch.empty(2, device="meta")}, {}, "state/s"),
        ({"s": torch.zeros(2, dtype=torch.complex128)}, {}, "state/s"),
        ({"s": (torch.ones(1),)}, {}, "s is a tuple"),
    ]:
        with pytest.raises(CheckpointError, match=word):
            checkpointer.save(1, tensors, meta)
    with pytest.raises(CheckpointError, match="per_rank/z"):
        checkpointer.save(1, {}, {}, per_rank={"z": torch.zeros(2, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=0"):
        Checkpointer(tmp_path, keep=0)


def test_quantized_optimizer_state_is_stored_as_plain_tensors(tmp_path):
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")

    def state(fill):
        values = torchao.OptimState8bit.zeros((16, 256), signed=True)
        return {"w": {"exp_avg": values.copy_(torch.full((16, 256), fill)) if fill else values}}

    saved = state(0.5)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, saved, {})
    new = state(0)
    checkpointer.load(checkpointer.latest(), new)
    assert torch.equal(new["w"]["exp_avg"].dequantize(), saved["w"]["exp_avg"].dequantize())
    assert new["w"]["exp_avg"].dequantize().mean() > 0.4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_inspect_and_readable_by_dcp(tmp_path):
    from trainwright.train.checkpoint.reading import CheckpointReader

    weights, state = tree()
    checkpointer = Checkpointer(tmp_path, best_metric="val_loss", run_id="r1")
    checkpointer.save(123456789, state, {"config": {"lr": 1}}, weights, metric=1.5)
    path = checkpointer.latest()
    assert path.name == "step-123456789"
    info = inspect(path)
    assert (info.step, info.world_size, info.run_id, info.metric) == (123456789, 1, "r1", ("val_loss", 1.5))
    assert info.config == {"lr": 1} and info.size == sum((path / f).stat().st_size for f in info.files)
    assert info.weights["norm"].shape == (3,) and info.weights["norm"].dtype == torch.bfloat16
    assert info.tensors["optimizer"]["state"]["norm"]["m"].shape == (3,)
    assert info.tensors["optimizer"]["groups"] == state["optimizer"]["groups"]
    into = {"weights/layers.0.w": torch.zeros(5, 3)}
    dcp.load(into, storage_reader=CheckpointReader(path), no_dist=True)
    assert torch.equal(into["weights/layers.0.w"], weights["layers.0.w"])
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        inspect(tmp_path)


def test_exit_waits_for_the_save(tmp_path):
    script = """
import sys, time, pathlib, torch
from trainwright.train.checkpoint import Checkpointer, files
import trainwright.train.checkpoint.planning as planning
real = planning.write_safetensors
planning.write_safetensors = lambda *a: (time.sleep(1), real(*a))[1]
Checkpointer(pathlib.Path(sys.argv[1])).save(1, {"a": torch.ones(3)}, {})
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    assert torch.equal(read_tensors(tmp_path / "step-00000001")["a"], torch.ones(3))


def test_closed_checkpointer_refuses(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save(1, {}, {})
    assert Checkpointer(tmp_path / "absent").latest() is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers() | st.sampled_from(["$float", "$x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def identical(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


@settings(max_examples=150, deadline=None)
@given(json_values)
def test_codec_round_trips_exactly(value):
    raw = codec.dumps(codec.encode(value))
    json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert identical(codec.decode(codec.loads(raw, "x")), value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3), max_size=4))
def test_paths_are_unambiguous(paths):
    flat = {}
    for keys in paths:
        path = ""
        for key in keys:
            path = codec.join(path, key)
        assert codec.split(path) == keys
        assert flat.setdefault(path, keys) == keys


@pytest.mark.parametrize(
    "hostile",
    [
        {"$float": "1"},
        {"$x": 1},
        {"$tensor": "a"},
        {"$dict": [[[], 1]]},
        {"$dict": [3]},
        {"$bytes": "%"},
        {"$tuple": 3},
    ],
)
def test_codec_refuses_what_it_never_writes(hostile):
    with pytest.raises(CheckpointError):
        codec.decode([hostile])
