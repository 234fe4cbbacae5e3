"""What every registered optimizer must do. A new method is tested the moment it registers."""

import copy
import json
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from optimizer_zoo import ROLES, Zoo, backward, batch, named, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import NamedParam
from trainwright.core.registry import build, methods
from trainwright.optim.adamw import DECAYED
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes

METHODS = [m.name for m in methods("optimizer")]
every = pytest.mark.parametrize("name", METHODS)


def make(name, model, **settings):
    return build("optimizer", {"name": name, **settings}).build(named(model))


REFUSE_DECAY = {"adamh"}  # its weights have fixed norms


def decay(name, value):
    """Settings that give every group of the method this weight decay."""
    settings = {"weight_decay": value}
    fields = type(build("optimizer", name)).model_fields
    return settings | ({"inner": {"name": "adamw", **settings}} if "inner" in fields else {})


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def through_checkpoint(optimizer, params, new_params):
    """The state as a checkpoint gives it back: scalars through JSON, tensors copied into what was allocated."""
    state = named_state(optimizer, params)
    scalars = json.loads(json.dumps(state["scalars"]))
    tensors = allocate_named_state(new_params, scalars)
    assert {n: set(v) for n, v in tensors.items()} == {n: set(v) for n, v in state["tensors"].items()}
    for n, entries in tensors.items():
        for key, tensor in entries.items():
            source = state["tensors"][n][key]
            assert (tensor.shape, tensor.dtype) == (source.shape, source.dtype)
            tensor.copy_(source)
    return {"tensors": tensors, "scalars": scalars}


def test_there_are_methods():
    assert {"adamw", "muon", "sgd"} <= set(METHODS)


@every
def test_descends(name):
    model = Zoo()
    losses = train(model, make(name, model), 120)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(p.isfinite().all() for p in model.parameters())


@every
def test_state_by_name_is_exact(name):
    straight = Zoo()
    train(straight, make(name, straight), 4)

    first = Zoo()
    optimizer = make(name, first)
    train(first, optimizer, 2)
    second = copy.deepcopy(first)
    for p in second.parameters():
        p.grad = None
    resumed = make(name, second)
    load_named_state(resumed, named(second), through_checkpoint(optimizer, named(first), named(second)))
    train(second, resumed, 2, first=2)
    for n, p in straight.named_parameters():
        assert torch.equal(p, dict(second.named_parameters())[n]), n


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU twin is the test above")
@every
def test_state_by_name_on_a_gpu(name):
    """Fused kernels read their step counts on the device, where a checkpoint's scalars do not start."""
    first = Zoo().cuda()
    optimizer = make(name, first)
    data = [t.cuda() for t in batch(0)]
    backward(first, data), optimizer.step(), optimizer.zero_grad()
    second = copy.deepcopy(first)
    resumed = make(name, second)
    load_named_state(resumed, named(second), through_checkpoint(optimizer, named(first), named(second)))
    for model, o in ((first, optimizer), (second, resumed)):
        backward(model, data), o.step(), o.zero_grad()
    for (n, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-5, msg=n)


def test_step_counts_go_to_the_device_of_fused_kernels():
    """The CPU twin of the test above: the meta device stands for the GPU."""
    p = nn.Parameter(torch.empty(3, device="meta"))
    params = [NamedParam("p", p, "norm")]
    for fused, device in ((False, "cpu"), (True, "meta")):
        optimizer = torch.optim.AdamW([p], foreach=False)
        optimizer.param_groups[0]["fused"] = fused
        specs = {"p": {"step": {"shape": [], "dtype": "float32", "placements": None}}}
        groups = [{"params": ["p"], "entries": {}}]
        scalars = {"names": ["p"], "specs": specs, "numbers": {}, "groups": groups, "extra": {}}
        tensors = allocate_named_state(params, scalars)
        load_named_state(optimizer, params, {"tensors": tensors, "scalars": scalars})
        assert optimizer.state[p]["step"].device.type == device


@every
def test_state_of_a_fresh_optimizer(name):
    model = Zoo()
    optimizer = make(name, model)
    state = through_checkpoint(optimizer, named(model), named(model))
    train(model, optimizer, 1)
    load_named_state(optimizer, named(model), state)
    assert optimizer_state_bytes(optimizer) == 0


@every
def test_reordered_modules_are_matched_by_name(name):
    first = Zoo()
    optimizer = make(name, first)
    train(first, optimizer, 2)
    second = copy.deepcopy(first)
    params = list(reversed(named(second)))
    resumed = build("optimizer", name).build(params)
    load_named_state(resumed, params, through_checkpoint(optimizer, named(first), params))
    train(first, optimizer, 2, first=2)
    train(second, resumed, 2, first=2)
    for (n, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-5, msg=n)


@every
def test_other_parameters_are_refused_by_name(name):
    first = Zoo()
    optimizer = make(name, first)
    train(first, optimizer, 1)
    state = named_state(optimizer, named(first))
    second = Zoo()
    second.up.requires_grad_(False)
    resumed = make(name, second)
    with pytest.raises(CheckpointError, match=r"no longer trained: up\b"):
        allocate_named_state(named(second), state["scalars"])
    with pytest.raises(CheckpointError, match=r"no longer trained: up\b"):
        load_named_state(resumed, named(second), state)
    with pytest.raises(CheckpointError, match=r"not stored: up\b"):
        load_named_state(optimizer, named(first), named_state(resumed, named(second)))


@every
def test_other_shapes_are_refused_by_name(name):
    first = Zoo()
    optimizer = make(name, first)
    train(first, optimizer, 1)
    state = named_state(optimizer, named(first))
    if not state["tensors"].get("up"):
        pytest.skip("keeps no state for matrices")
    second = Zoo()
    second.up = nn.Parameter(torch.zeros(14, 6))
    with pytest.raises(CheckpointError, match=r"up\b.*13.*14"):
        allocate_named_state(named(second), state["scalars"])


def test_state_of_another_optimizer_is_refused():
    model = Zoo()
    muon = make("muon", model)
    train(model, muon, 1)
    with pytest.raises(CheckpointError, match="resume with the same optimizer"):
        load_named_state(make("adamw", model), named(model), named_state(muon, named(model)))
    sgd = make("sgd", model)
    train(model, sgd, 1)
    with pytest.raises(CheckpointError, match="resume with the same optimizer"):
        load_named_state(make("adamw", model), named(model), named_state(sgd, named(model)))


@every
def test_torch_state_dict_round_trip(name):
    straight = Zoo()
    train(straight, make(name, straight), 4)
    first = Zoo()
    optimizer = make(name, first)
    train(first, optimizer, 2)
    stored = copy.deepcopy(optimizer.state_dict())
    second = copy.deepcopy(first)
    resumed = make(name, second)
    resumed.load_state_dict(stored)
    train(second, resumed, 2, first=2)
    for (n, p), q in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q), n
    before = weights(second)
    for group in resumed.param_groups:  # still the live ones
        group["lr"] = 0.0
    train(second, resumed, 1)
    assert all(torch.equal(p, before[n]) for n, p in second.named_parameters())


@every
def test_accumulated_gradients_equal_one_batch(name):
    one, two = Zoo(), Zoo()
    a, b = make(name, one), make(name, two)
    for i in range(3):
        tokens, wanted = batch(i)
        backward(one, (tokens, wanted))
        backward(two, (tokens[:4], wanted[:4]), 0.5)
        backward(two, (tokens[4:], wanted[4:]), 0.5)
        a.step(), b.step()
        a.zero_grad(), b.zero_grad()
    for (n, p), q in zip(one.named_parameters(), two.named_parameters(), strict=True):
        torch.testing.assert_close(q[1], p, atol=2e-5, rtol=1e-4, msg=n)


@every
def test_bf16_parameters_step_and_warn(name, caplog):
    model = Zoo(dtype=torch.bfloat16)
    before = weights(model)
    with caplog.at_level(logging.WARNING, "trainwright"):
        optimizer = make(name, model)
    warned = [r for r in caplog.records if "bfloat16" in r.getMessage()]
    assert len(warned) == 1 and f"{len(ROLES)} parameters" in warned[0].getMessage()
    for i in range(3):
        backward(model, batch(i, dtype=torch.bfloat16))
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())
    assert not torch.equal(model.up, before["up"])
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainwright"):
        make(name, Zoo())
    assert not caplog.records


@every
def test_zero_gradients(name):
    for weight_decay in (0.0, 0.1):
        model = Zoo()
        before = weights(model)
        if weight_decay and name in REFUSE_DECAY:
            with pytest.raises(ConfigError, match="weight_decay"):
                make(name, model, **decay(name, weight_decay))
            continue
        optimizer = make(name, model, **decay(name, weight_decay))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for n, p in model.named_parameters():
            assert p.isfinite().all(), n
            if weight_decay == 0 or ROLES[n] not in DECAYED:
                assert torch.equal(p, before[n]), n
        if weight_decay:
            assert model.up.norm() < before["up"].norm()


@every
def test_parameters_without_a_gradient_stay(name):
    model = Zoo()
    before = weights(model)
    optimizer = make(name, model)
    for _ in range(2):
        # No row is constant: centred methods take nothing from those.
        model.up.grad, model.norm.grad = torch.arange(78.0).view(13, 6).sin(), torch.ones_like(model.norm)
        optimizer.step()
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) == (n not in ("up", "norm")), n
    other = Zoo()
    load_named_state(make(name, other), named(other), through_checkpoint(optimizer, named(model), named(other)))


@every
def test_no_gradient_at_all(name):
    model = Zoo()
    before = weights(model)
    make(name, model).step()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@every
def test_empty_tensors(name):
    shapes = {"a": ((0, 8), "matrix"), "b": ((8, 0), "matrix"), "c": ((0,), "bias"), "d": ((0, 4, 4), "expert")}
    params = [NamedParam(n, nn.Parameter(torch.zeros(s)), r) for n, (s, r) in shapes.items()]
    params.append(NamedParam("w", nn.Parameter(torch.ones(8, 8)), "matrix"))
    optimizer = build("optimizer", name).build(params)
    for _ in range(2):
        for n in params:
            n.param.grad = torch.randn(n.param.shape, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    assert params[-1].param.isfinite().all() and not torch.equal(params[-1].param, torch.ones(8, 8))


@every
def test_a_tied_weight_is_stepped_once(name):
    from trainwright.core.params import named_params

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.mix = nn.Linear(4, 4)

    torch.manual_seed(0)
    model = Tied()
    params = named_params(model)
    assert [n.name for n in params] == ["embed.weight", "mix.weight", "mix.bias"]
    optimizer = build("optimizer", name).build(params)
    owners = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert len(owners) == len(set(owners)) == 3


@every
def test_a_parameter_given_twice_is_refused(name):
    model = Zoo()
    with pytest.raises(ConfigError, match=r"up.*twice"):
        build("optimizer", name).build([*named(model), NamedParam("other", model.up, "matrix")])


@every
def test_no_parameters_are_refused(name):
    with pytest.raises(ConfigError, match="no parameters"):
        build("optimizer", name).build([])


@every
def test_every_parameter_is_in_one_group(name):
    model = Zoo()
    optimizer = make(name, model)
    ids = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


@every
def test_rate_reaches_all_groups(name):
    model = Zoo()
    optimizer = make(name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    before = weights(model)
    train(model, optimizer, 1)  # rate 0, decay too
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [g["initial_lr"] for g in optimizer.param_groups]
    train(model, optimizer, 2)
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


# Bytes of state: {"elements": per number of a parameter, "each": per tensor}; by role where a method tells roles apart.
ADAM = (8, 4)  # two float32 moments; a float32 count of steps
STATE_BYTES = {
    # second moment; momentum of up, down (19 numbers each at rank 1) and square (36 and a count) on average; 3 experts
    "adapm": lambda role: {"matrix": (4, 100), "expert": (4, 144), "embedding": (4, 0), "head": (4, 0)}.get(role, ADAM),
    "adamh": lambda role: {"matrix": (8, 4), "expert": (8, 12)}.get(role, ADAM),  # a norm per matrix, 3 experts
    "mano": lambda role: (4, 0) if role in ("matrix", "expert") else ADAM,
    "sinkgd": lambda role: (0, 0) if role in ("matrix", "expert") else ADAM,
    "swan": lambda role: (0, 0) if role in ("matrix", "expert") else ADAM,
    # rank 2 of a shorter side of 6: projections of 6 x 2 numbers each; two moments of 2 / 6 of a matrix's numbers
    "galore": lambda role: {"matrix": (8 / 3, 48), "expert": (8 / 3, 3 * 48)}.get(role, ADAM),
    # and a history of 20 projected gradients of up and down (26 numbers), of 12 of the square ones (12 numbers), with
    # its Gram matrix: 400 numbers of up and down, 144 of square, 3 x 144 of the experts
    "natural_galore": lambda role: {
        "matrix": (82 / 3, 48 + 3776 / 3),
        "expert": (8 / 3, 3 * 48 + 1728 + 1728),
    }.get(role, ADAM),
    # and two moments of each projection
    "online_subspace_descent": lambda role: {"matrix": (8 / 3, 144), "expert": (8 / 3, 3 * 144)}.get(role, ADAM),
    # rank 2 of a side of 6: two moments of 2 / 6 of a matrix's numbers; two indexes of 3 bytes, two ages, 6 marks
    "grass": lambda role: {"matrix": (8 / 3, 20), "expert": (8 / 3, 3 * 20)}.get(role, ADAM),
    # that of galore, and two moments for each row
    "gradnormlorp": lambda role: {
        "matrix": (8 / 3, 48 + 8 * (13 + 6 + 6) / 3),
        "expert": (8 / 3, 3 * (48 + 8 * 6)),
    }.get(role, ADAM),
    # a number a row and one a column: 19 of up and down (78 numbers), 12 of square ones (36); 17, 9, 11 of the others
    "adafactor": lambda role: {
        "matrix": (2 / 3, 24),
        "expert": (0, 144),
        "embedding": (0, 68),
        "router": (0, 36),
        "head": (0, 44),
    }.get(role, (4, 0)),
    "adamw": lambda role: ADAM,
    # momentum; a singular vector of up, down, square (6 + 13 + 6 numbers) on average; 3 experts
    "spectral_sphere": lambda role: {"matrix": (4, 100 / 3), "expert": (4, 72)}.get(role, ADAM),
    "spectra": lambda role: ADAM,  # the inner one's alone
    "sgd": lambda role: (4, 0),
    "lion": lambda role: (4, 0),
    "spam": lambda role: (8, 0),
    "numuon": lambda role: (4, 0) if role in ("matrix", "expert") else ADAM,
    "mgup": lambda role: ADAM,  # the inner one's alone
    "llr": lambda role: ADAM,  # the inner one's alone
    # moments; two square matrices of each side: 410 numbers of up and down, 144 of the square one, 3 x 144 of experts
    "soap": lambda role: {"matrix": (100 / 3, -336), "expert": (8, 3 * 576)}.get(role, ADAM),
    "schedule_free": lambda role: (8, 0),
    "adamw8bit": lambda role: ADAM,  # of small tensors
    "signum": lambda role: (4, 0),
    "muon": lambda role: (4, 0) if role in ("matrix", "expert") else ADAM,
}


@every
def test_bytes_of_state(name):
    model = Zoo()
    optimizer = make(name, model)
    train(model, optimizer, 2)
    expected = 0
    for n in named(model):
        per_element, each = STATE_BYTES[name](n.role)
        expected += per_element * n.param.numel() + each
    assert optimizer_state_bytes(optimizer) == expected


@every
def test_closure_and_hooks(name):
    model = Zoo()
    optimizer = make(name, model)
    calls = []
    optimizer.register_step_post_hook(lambda *a: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *a: calls.append("pre"))

    def closure():
        optimizer.zero_grad()
        return backward(model, batch(0))

    before = weights(model)
    assert optimizer.step(closure) == pytest.approx(backward(Zoo(), batch(0)))
    assert calls == ["pre", "post"]
    assert not torch.equal(model.up, before["up"])
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert "lr" in repr(optimizer)


@every
def test_step_compiles(name):
    one, two = Zoo(), Zoo()
    a, b = make(name, one), make(name, two)
    compiled = torch.compile(b.step, backend="eager")
    for i in range(2):
        backward(one, batch(i)), backward(two, batch(i))
        a.step(), compiled()
        a.zero_grad(), b.zero_grad()
    for (n, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-5, msg=n)


@every
def test_loss_scaler(name):
    one, two = Zoo(), Zoo()
    a, b = make(name, one), make(name, two)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(one, batch(0)), backward(two, batch(0), float(scaler.scale(torch.ones(()))))
    a.step(), scaler.step(b), scaler.update()
    for (n, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-5, msg=n)
    before = weights(two)
    b.zero_grad()
    backward(two, batch(1))
    two.norm.grad[0] = float("inf")
    scaler.unscale_(b), scaler.step(b), scaler.update()
    assert all(torch.equal(p, before[n]) for n, p in two.named_parameters())
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"name": "adamw", "lr": 0}, "greater than 0"),
        ({"name": "adamw", "lr": 2.0, "weight_decay": 0.6}, "lr \\* weight_decay"),
        ({"name": "adamw", "betas": [0.9, 1.0]}, "in \\[0, 1\\)"),
        ({"name": "adamw", "eps": 0}, "greater than 0"),
        ({"name": "sgd", "momentum": 0, "nesterov": True}, "nesterov needs momentum"),
        ({"name": "muon", "momentum": 1.0}, "less than 1"),
        ({"name": "muon", "ns_steps": 0}, "greater than 0"),
        ({"name": "muon", "momentum": 0, "nesterov": True}, "nesterov needs momentum"),
        ({"name": "muon", "inner": {"name": "muon"}}, "inner.*adamw"),
        ({"name": "muon", "inner": {"name": "adamw", "lr": -1}}, "inner.lr"),
    ],
)
def test_settings_that_make_no_sense(settings, says):
    with pytest.raises(ConfigError, match=says):
        build("optimizer", settings)


def test_muon_without_matrices():
    params = [NamedParam("b", nn.Parameter(torch.zeros(3)), "bias")]
    with pytest.raises(ConfigError, match="use adamw"):
        build("optimizer", "muon").build(params)


def test_every_check_comes_before_the_first_assignment():
    """Nothing is half loaded: the state and the groups of the optimizer are as before."""

    def two_groups(model, split):
        members = [n.param for n in named(model)]
        return torch.optim.SGD([{"params": members[:split]}, {"params": members[split:]}], lr=0.1, momentum=0.9)

    first = Zoo()
    stored = two_groups(first, 3)
    train(first, stored, 1)
    state = named_state(stored, named(first))
    second = Zoo()
    one = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    incomplete = copy.deepcopy(state)
    del incomplete["tensors"]["up"]
    misshapen = copy.deepcopy(state)
    misshapen["tensors"]["up"]["momentum_buffer"] = torch.zeros(2)
    cases = [
        (one, state, "1 parameter groups, the checkpoint 2"),
        (
            two_groups(second, 4),
            state,
            r"only in the optimizer: \[down, experts, square, up\].*checkpoint: \[down, sq",
        ),
        (two_groups(second, 3), incomplete, r"state of up should hold \['momentum_buffer'\]"),
        (two_groups(second, 3), misshapen, r"momentum_buffer in the optimizer state of up .*\[13, 6\].*\[2\]"),
    ]
    for optimizer, bad, says in cases:
        with pytest.raises(CheckpointError, match=says):
            load_named_state(optimizer, named(second), bad)
        assert not optimizer.state


def test_a_live_state_is_copied_unless_told_otherwise():
    first, second, third = Zoo(), Zoo(), Zoo()
    optimizer = make("adamw", first)
    train(first, optimizer, 1)
    state = named_state(optimizer, named(first))
    kept = copy.deepcopy(state["tensors"])
    other, taker = make("adamw", second), make("adamw", third)
    load_named_state(other, named(second), state)
    train(second, other, 2)
    for n, entries in kept.items():
        for key, tensor in entries.items():
            assert torch.equal(state["tensors"][n][key], tensor), (n, key)
    load_named_state(taker, named(third), state, copy=False)
    assert taker.state[third.up]["exp_avg"].data_ptr() == state["tensors"]["up"]["exp_avg"].data_ptr()


def test_groups_are_matched_by_their_names():
    class Counted(torch.optim.SGD):
        group_state = ("count",)

    def counted(model, *groups):
        by_name = dict(model.named_parameters())
        return Counted([{"params": [by_name[n] for n in g], "count": 0} for g in groups], lr=0.1)

    first, second = Zoo(), Zoo()
    rest = [n for n in ROLES if n not in ("up", "down", "norm")]
    stored = counted(first, ["up", "down"], ["norm"], rest)
    for i, group in enumerate(stored.param_groups):
        group["count"] = 10 + i
    loaded = counted(second, rest[::-1], ["norm"], ["down", "up"])
    load_named_state(loaded, named(second), named_state(stored, named(first)))
    assert [g["count"] for g in loaded.param_groups] == [12, 11, 10]
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: \[down, up\]; \[norm\]"):
        load_named_state(
            counted(second, ["up"], ["down", "norm"], rest), named(second), named_state(stored, named(first))
        )


@every
def test_copies_and_pickles(name):
    model = Zoo()
    optimizer = make(name, model)
    train(model, optimizer, 2)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        straight, a = copied((model, optimizer))
        other, b = copied((model, optimizer))
        before = weights(model)
        train(straight, a, 2, first=2), train(other, b, 1, first=2), train(other, copied(b), 0)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        train(other, b, 1, first=3)
        for (n, p), q in zip(straight.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q) and not torch.equal(p, before[n]), n
        for group in b.param_groups:
            group["lr"] = 0.0
        before = weights(other)
        train(other, b, 1)
        assert all(torch.equal(p, before[n]) for n, p in other.named_parameters())
    expected = copy.deepcopy((model, optimizer))
    train(*expected, 1, first=2), train(model, optimizer, 1, first=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected[0].parameters(), strict=True))


@every
def test_torch_distributed_state_dict(name):
    """What other training loops store through: entries by name."""
    model = Zoo()
    optimizer = make(name, model)
    train(model, optimizer, 2)
    stored = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert set(stored["state"]) == set(ROLES)
    other = copy.deepcopy(model)
    resumed = make(name, other)
    set_optimizer_state_dict(other, resumed, stored)
    train(model, optimizer, 2, first=2), train(other, resumed, 2, first=2)
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), n


@every
def test_torch_load_refuses_other_groups(name):
    model = Zoo()
    optimizer = make(name, model)
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:-1]
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(state)
    train(model, optimizer, 1)


@every
def test_plain_and_sharded_parameters_together(name, tmp_path):
    """A few parameters left out of sharding (0-d gains, a frozen tower's adapter) step as they would alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, mixed = Zoo(), Zoo()
        a = make(name, whole)
        fully_shard(mixed, mesh=mesh, ignored_params={mixed.gain, mixed.down, mixed.bias, mixed.head})
        assert {isinstance(p, DTensor) for p in mixed.parameters()} == {True, False}
        b = make(name, mixed)
        train(whole, a, 2), train(mixed, b, 2)
        # A checkpoint of one layout goes on in the other.
        moved = copy.deepcopy(whole)
        c = make(name, moved)
        state = named_state(b, named(mixed))
        tensors = allocate_named_state(named(moved), state["scalars"])
        for n, entries in tensors.items():
            for key, tensor in entries.items():
                source = state["tensors"][n][key]
                tensor.copy_(source.full_tensor() if isinstance(source, DTensor) else source)
        load_named_state(c, named(moved), {"tensors": tensors, "scalars": state["scalars"]})
        train(whole, a, 1, first=2), train(mixed, b, 1, first=2), train(moved, c, 1, first=2)
        for (n, p), q, r in zip(whole.named_parameters(), mixed.parameters(), moved.parameters(), strict=True):
            q = q.full_tensor() if isinstance(q, DTensor) else q
            torch.testing.assert_close(q, p, atol=1e-6, rtol=1e-5, msg=n)
            torch.testing.assert_close(r, p, atol=1e-6, rtol=1e-5, msg=n)
    finally:
        dist.destroy_process_group()
