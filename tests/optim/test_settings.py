"""Settings out of range are refused by every class and group, and so is a state that was made for others."""

import copy
import inspect
import json
import math
import typing

import pytest
import torch
from optimizer_zoo import Zoo, named, train
from torch import nn

import trainwright.optim
from trainwright import RunConfig, Trainer
from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.registry import build, methods
from trainwright.optim.matrix import MatrixRule
from trainwright.optim.settings import CheckedOptimizer, checks
from trainwright.optim.state import joined_scalars, load_named_state, named_state, scalars_of
from trainwright.optim.wrapper import WrappedRule

EXPORTED = [getattr(trainwright.optim, name) for name in trainwright.optim.__all__]
CLASSES = [c for c in EXPORTED if issubclass(c, CheckedOptimizer)]
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
METHODS = [m.name for m in methods("optimizer")]
every = pytest.mark.parametrize("name", METHODS)


def matrix(*shape):
    return nn.Parameter(torch.randn(*(shape or (8, 6)), generator=torch.Generator().manual_seed(0)))


def made(cls, **settings):
    first = trainwright.optim.AdamW([matrix()]) if issubclass(cls, WrappedRule) else [matrix()]
    return cls(first, **settings)


def own_settings(cls):
    """Constructor arguments, of the bases too, that are numbers, words of a list, or tuples of them."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("trainwright") and "__init__" in vars(base):
            found |= inspect.signature(base.__init__).parameters
    kinds = ("float", "int", "Literal", "Decay", "Share", "Count", "Positive", "Inner", "Momentum", "Projection")
    kinds += ("Selection", "Whitening", "ZeroInit", "Map")
    return [
        n for n, p in found.items() if any(k in str(p.annotation) for k in kinds) and "Tensor" not in str(p.annotation)
    ]


def test_the_classes_are_the_registered_ones():
    assert {c.__name__ for c in EXPORTED if issubclass(c, torch.optim.Optimizer)} - {c.__name__ for c in CLASSES} == {
        "CompositeOptimizer"
    }
    assert len(CLASSES) >= 25


@every_class
def test_every_setting_of_a_class_is_checked(cls):
    names = own_settings(cls)
    assert names and set(names) <= set(checks(cls))
    taken = inspect.signature(cls).parameters
    for name in names:
        if name not in taken and "settings" not in taken:
            continue  # of a base, and not to be given here
        bads = [math.nan] if name == "beta2_decay" else [math.nan, -3]  # negative by nature
        if name == "betas":
            bads = [(0.9, math.nan), (1.0, 0.9), (0.9, -3)]
        if name == "pieces":
            bads = [[(0.5, math.nan)], [(-3, 0.5)]]
        for bad in bads:
            with pytest.raises(ValueError, match=name.removesuffix("s")):
                made(cls, **{name: bad})
        with pytest.raises((ValueError, TypeError)):
            made(cls, **{name: "nonsense"})
    made(cls)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("GaLore", {"projection": "sdv"}),
        ("GaLore", {"subspace": "adamw"}),
        ("Grass", {"selection": "topr"}),
        ("Muon", {"adjust": "foo"}),
        ("OnlineSubspaceDescent", {"projection_rule": "foo"}),
        ("Spectra", {"adjust": "match_rms_adamw"}),  # the inner rule's word
        *((name, {"momentum": m}) for name in ("Muon", "NuMuon", "Mano", "SinkGD", "MuonH") for m in (1.0, 1.5)),
        *((name, {"betas": (0.9, 1.5)}) for name in ("AdamW", "AdamH", "Lion", "SOAP", "ScheduleFreeAdamW")),
        ("Muon", {"ns_steps": 0}),
        ("Swan", {"steps": 0}),
        ("Swan", {"beta": 5.0}),
        ("SPAM", {"density": 0.0}),
        ("Adafactor", {"beta2_decay": 0.5}),
        ("SpectralSphere", {"retract_alpha": 2.0}),
        ("GaLore", {"rank": 0}),
        ("GaLore", {"rank": 1.5}),
        ("AdamW", {"eps": math.inf}),
    ],
)
def test_what_was_taken_silently(name, settings):
    cls = getattr(trainwright.optim, name)
    (key,) = settings
    with pytest.raises(ValueError, match=key):
        made(cls, **settings)
    if not issubclass(cls, WrappedRule):
        optimizer = made(cls)
        if key in optimizer.param_groups[0]:
            with pytest.raises(ValueError, match=key):
                optimizer.add_param_group({"params": [matrix(4, 4)], **settings})
            assert len(optimizer.param_groups) == 1


@every_class
def test_a_group_that_is_added_is_held_to_the_same(cls):
    optimizer = made(cls)
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [matrix(4, 4)], "lr": -1.0})
    if issubclass(cls, MatrixRule):
        with pytest.raises(ValueError, match="takes matrices"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        with pytest.raises(ValueError, match="do not add up"):
            optimizer.add_param_group({"params": [matrix(4, 4)], "splits": (3, 2)})
    assert len(optimizer.param_groups) == 1
    added = matrix(6, 6)
    optimizer.add_param_group({"params": [added]})
    for _ in range(2):
        for p in (p for g in optimizer.param_groups for p in g["params"]):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()
    assert added.isfinite().all() and not torch.equal(added, matrix(6, 6))


# --- a state goes on with the settings that it is made for ---

SMALL = {"galore": {"gap": 2}, "grass": {"gap": 2}, "natural_galore": {"gap": 2, "history": 3}}
SHAPES = [
    ("galore", {"rank": 4}, {"rank": 2}),
    ("galore", {"rank": 0.5}, {"rank": 0.25}),
    ("galore", {"subspace": "adam_8bit"}, {"subspace": "adam"}),
    ("galore", {"subspace": "adam"}, {"subspace": "adam_8bit"}),
    ("natural_galore", {"history": 5}, {"history": 3}),
    ("online_subspace_descent", {"projection_rule": "adam"}, {"projection_rule": "adam_8bit"}),
    ("gradnormlorp", {"learn_magnitude": False}, {"learn_magnitude": True}),
    ("grass", {"gap": 2}, {"gap": 3}),
    ("grass", {"selection": "top_r"}, {"selection": "multinomial"}),
    ("grass", {"carry": False}, {"carry": True}),
    ("spam", {"density": 0.5}, {"density": 0.25}),
    ("spam", {"density": 1.0}, {"density": 0.5}),
    ("soap", {"max_side": 100}, {"max_side": 8}),
    ("adapm", {"rank": 1}, {"rank": 2}),
    ("adapm", {"second_moment": "full"}, {"second_moment": "blockwise"}),
    ("adapm", {"policy": {"default": "full"}}, {"policy": {"default": "low_rank"}}),
    ("adamw8bit", {"min_size": 1}, {"min_size": 4096}),
    ("sinkgd", {"momentum": 0.9}, {"momentum": 0.9, "momentum_at": "after"}),
    ("schedule_free", {}, {"betas": (0.8, 0.999)}),
]


def resumed(name, before, after, around=None):
    """An optimizer with the settings ``after``, and the state of one with ``before``."""

    def config(settings):
        return build("optimizer", {"name": around, "inner": settings} if around else settings)

    first = Zoo()
    optimizer = config({"name": name, **before}).build(named(first))
    train(first, optimizer, 3)
    other = copy.deepcopy(first)
    for p in other.parameters():
        p.grad = None
    return first, optimizer, other, config({"name": name, **after}).build(named(other))


@pytest.mark.parametrize("name, before, after", SHAPES)
def test_a_setting_that_shapes_the_state_cannot_change(name, before, after):
    key = next(k for k in reversed(after))
    shown = "momentum" if key == "policy" else key
    first, optimizer, other, wrong = resumed(name, before, after)
    state = named_state(optimizer, named(first))
    state["scalars"] = json.loads(json.dumps(state["scalars"]))
    with pytest.raises(
        CheckpointError, match=rf"{shown}.* is .* now and was .*set {shown}.* back to .*start a new run"
    ):
        load_named_state(wrong, named(other), state)
    assert not wrong.state
    with pytest.raises(ValueError, match=f"{shown}|parameter group"):
        wrong.load_state_dict(optimizer.state_dict())
    assert not wrong.state

    (_, _, same_model, same) = resumed(name, before, before)
    load_named_state(same, named(same_model), state)
    same.load_state_dict(optimizer.state_dict())


def test_both_values_are_named_also_inside_of_a_wrapper():
    first, optimizer, other, wrong = resumed("galore", {"rank": 4}, {"rank": 2}, around="llr")
    with pytest.raises(CheckpointError, match=r"rank is 2 now and was 4 when .* set rank back to 4"):
        load_named_state(wrong, named(other), named_state(optimizer, named(first)))
    with pytest.raises(ValueError, match="rank=2, and the state was made with rank=4"):
        wrong.load_state_dict(optimizer.state_dict())


def test_older_checkpoints_are_taken():
    first, optimizer, other, same = resumed("galore", {"rank": 2}, {"rank": 2})
    state = named_state(optimizer, named(first))
    for group in state["scalars"]["groups"]:
        del group["settings"]
    load_named_state(same, named(other), state)
    found = named_state(same, named(other))["tensors"]
    assert found and found.keys() == state["tensors"].keys()
    torch.testing.assert_close(found, state["tensors"], rtol=0, atol=0)


def alternatives(field, value):
    """Other values of a config's field."""
    hint = field.annotation
    literals = [h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is typing.Literal]
    choices = [c for h in literals for c in typing.get_args(h)]
    if choices:
        return [c for c in choices if c != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 1, max(value // 2, 1)]
    if isinstance(value, float):
        return [value / 2]
    return [(0.8, 0.9)] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], float) else []


@every
def test_any_other_setting_may_change_or_is_refused(name):
    """Whatever is changed: the state is refused in words, or training goes on."""
    base = SMALL.get(name, {})
    config = build("optimizer", {"name": name, **base})
    accepted = []
    for key, field in type(config).model_fields.items():
        for other in alternatives(field, getattr(config, key)):
            for before, after in ((base, {**base, key: other}), ({**base, key: other}, base)):
                try:
                    first, optimizer, model, changed = resumed(name, before, after)
                    load_named_state(changed, named(model), named_state(optimizer, named(first)))
                except (CheckpointError, ConfigError):
                    continue
                train(model, changed, 3, first=3)
                assert all(p.isfinite().all() for p in model.parameters()), (key, other)
                accepted.append(key)
    assert set(accepted) >= {"lr", "weight_decay", "eps"} & {
        k for k in type(config).model_fields if isinstance(getattr(config, k), float) and getattr(config, k)
    }


def test_settings_that_go_by_the_length_of_the_run():
    cosine = build("optimizer", {"name": "numuon", "schedule": "cosine"})
    assert cosine.for_run(40).total_steps == 40
    with pytest.raises(ConfigError, match=r"total_steps.*train.steps"):
        cosine.build(named(Zoo()))
    with pytest.raises(ConfigError, match=r"total_steps.*train.steps"):
        cosine.for_run(None).build(named(Zoo()))
    given = build("optimizer", {"name": "numuon", "schedule": "cosine", "total_steps": 30})
    assert given.for_run(40).total_steps == 30 and given.for_run(None).total_steps == 30
    with pytest.raises(ConfigError, match=r"total_steps=30.*longer than the run of 20 steps"):
        given.for_run(20)
    around = build("optimizer", {"name": "mgup", "inner": {"name": "numuon", "schedule": "cosine", "total_steps": 30}})
    with pytest.raises(ConfigError, match=r"inner\.total_steps=30"):
        around.for_run(20)
    fixed = build("optimizer", "numuon")
    assert fixed.for_run(20).total_steps is None


def test_llr_stops_after_a_fifth_of_the_run(caplog):
    config = build("optimizer", "llr")
    assert config.for_run(500).until == 100 and config.for_run(3).until == 1
    assert config.for_run(500).build(named(Zoo())).until == 100
    assert build("optimizer", {"name": "llr", "until": 70}).for_run(500).until == 70
    assert not caplog.records
    assert config.for_run(None).until == 1000
    assert "not known" in caplog.text


def test_a_probe_after_the_end_is_refused():
    config = build("optimizer", {"name": "adapm", "roles": "probe", "probe_steps": 20})
    assert config.for_run(21) == config and config.for_run(None) == config
    with pytest.raises(ConfigError, match=r"probe_steps=20.*20 steps"):
        config.for_run(20)


def test_a_resumed_run_says_what_was_changed(recipe):
    """Before any step; the rate, the decay and what else shapes no state may change."""
    data = recipe(optimizer={"name": "galore", "rank": 4, "gap": 2})
    Trainer(RunConfig.load(data)).fit()
    steps = data["train"]["steps"]
    longer = {**data, "train": {**data["train"], "steps": steps + 2}}
    with pytest.raises(CheckpointError, match="rank is 2 now and was 4"):
        Trainer(RunConfig.load({**longer, "optimizer": {"name": "galore", "rank": 2, "gap": 2}}), resume=True)
    other = {"name": "galore", "rank": 4, "gap": 3, "lr": 0.003, "weight_decay": 0.01, "scale": 0.5}
    assert Trainer(RunConfig.load({**longer, "optimizer": other}), resume=True).fit()["step"] == steps + 2


def test_the_length_of_the_run_reaches_the_method(recipe):
    data = recipe(optimizer={"name": "numuon", "schedule": "cosine"})
    assert Trainer(RunConfig.load(data)).optimizer.parts[0].total_steps == data["train"]["steps"]
    late = {"name": "llr", "inner": {"name": "numuon", "schedule": "cosine", "total_steps": 1000}}
    with pytest.raises(ConfigError, match=r"optimizer\.inner\.total_steps=1000"):
        Trainer(RunConfig.load({**data, "optimizer": late}))


def test_an_average_of_another_kind_is_named(recipe):
    data = recipe(average={"name": "lawa", "k": 2, "every": 1})
    Trainer(RunConfig.load(data)).fit()
    for average, says in (({"name": "ema"}, "is ema now and was lawa"), (None, "is none now and was lawa")):
        with pytest.raises(CheckpointError, match=f"average {says} .*set average back to lawa"):
            Trainer(RunConfig.load({**data, "average": average}), resume=True)


def test_an_average_forgets_what_lies_before_a_higher_rate(recipe, caplog):
    data = recipe(average={"name": "lawa", "k": 3, "every": 1}, schedule={"name": "cosine"})
    Trainer(RunConfig.load(data)).fit()
    same = Trainer(RunConfig.load(data), resume=True)
    assert len(same.average.ring) == 3 and "goes up again" not in caplog.text
    data["train"]["steps"] *= 2
    longer = Trainer(RunConfig.load(data), resume=True)
    assert len(longer.average.ring) == 0 and "goes up again" in caplog.text


def test_a_run_may_go_on_with_another_clipper(recipe):
    data = recipe()
    Trainer(RunConfig.load(data)).fit()
    data["train"]["steps"] += 1
    resumed_run = Trainer(RunConfig.load({**data, "clip": "zclip"}), resume=True)
    before = resumed_run.progress.step
    resumed_run.fit()
    assert before == data["train"]["steps"] - 1 and resumed_run.progress.step == before + 1


def test_settings_stay_with_their_parameters_through_stages():
    """Two stages' states as one, taken apart for one optimizer over all parameters."""
    model = Zoo()
    half = [n for n in named(model) if n.name in ("up", "down", "norm")]
    rest = [n for n in named(model) if n.name not in ("up", "down", "norm")]
    config = build("optimizer", {"name": "galore", "rank": 4})
    joined = joined_scalars(
        [(i, named_state(config.build(part), part)["scalars"]) for i, part in enumerate((half, rest))]
    )
    whole = config.build(named(model))
    kept = scalars_of(joined, whole, named(model))
    assert kept["groups"] == named_state(whole, named(model))["scalars"]["groups"]
    wrong = build("optimizer", {"name": "galore", "rank": 2}).build(named(model))
    with pytest.raises(CheckpointError, match=r"rank is 2 now and was 4"):
        load_named_state(wrong, named(model), {"scalars": scalars_of(joined, wrong, named(model)), "tensors": {}})
