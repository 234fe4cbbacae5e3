"""The rate of what a matrix method hands to its inner optimizer: the one rate of the method, or one of its own."""

import pytest
import torch
from optimizer_zoo import Zoo

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.core.params import named_params
from trainwright.core.registry import build, methods
from trainwright.optim.matrix import MATRICES, MatrixConfig

ONE_RATE = {
    "galore", "gradnormlorp", "grass", "mano", "muon", "natural_galore", "numuon", "online_subspace_descent", "soap",
    "swan",
}  # fmt: skip
GIVEN = {"name": "adamw", "lr": 2e-3}
OWN_RATE = {"adamh", "sinkgd", "spectral_sphere"}
MATRIX_METHODS = sorted(m.name for m in methods("optimizer") if issubclass(m.config, MatrixConfig))


def rates(spec):
    """Name and rate of an optimizer and of those inside it."""
    found, method = [], build("optimizer", spec)
    while method is not None:
        found.append((method.name, method.lr))
        method = getattr(method, "inner", None)
    return found


def test_every_matrix_method_is_known_here():
    assert set(MATRIX_METHODS) == ONE_RATE | OWN_RATE, "a new one has to say whether it has one rate for all"


@pytest.mark.parametrize("name", MATRIX_METHODS)
def test_an_inner_rate_that_was_not_given(name):
    inner = 0.0123 if name in ONE_RATE else 1e-3
    assert rates({"name": name, "lr": 0.0123}) == [(name, 0.0123), ("adamw", inner)]
    default = build("optimizer", name)
    assert default.inner.lr == (default.lr if name in ONE_RATE else 1e-3)


@pytest.mark.parametrize("name", MATRIX_METHODS)
def test_an_inner_rate_that_was_given_stays(name):
    assert rates({"name": name, "lr": 0.0123, "inner": {"name": "adamw", "lr": 1e-3}}) == [
        (name, 0.0123),
        ("adamw", 1e-3),
    ]


@pytest.mark.parametrize("name", MATRIX_METHODS)
def test_the_help_of_inner_says_which(name):
    said = type(build("optimizer", name)).model_fields["inner"].description
    assert ("without an lr it has this one" in said) == (name in ONE_RATE)
    assert ("at a rate of its own" in said) == (name in OWN_RATE)


@pytest.mark.parametrize("name", ["muon", "numuon"])
def test_the_original_scale_of_muon_is_not_matched_to_adamw(name):
    assert rates({"name": name, "lr": 0.0123, "adjust": "original"}) == [(name, 0.0123), ("adamw", 1e-3)]


@pytest.mark.parametrize(
    "spec, found",
    [
        ({"name": "mgup", "lr": 0.01, "inner": "muon"}, [0.01, 0.01, 0.01]),
        ({"name": "mgup", "lr": 0.01, "inner": {"name": "muon", "lr": 0.5}}, [0.01, 0.01, 0.01]),
        ({"name": "mgup", "inner": {"name": "muon", "lr": 0.05}}, [None, 0.05, 0.05]),
        ({"name": "llr", "weight_decay": 0.2, "inner": {"name": "muon", "lr": 0.05}}, [None, 0.05, 0.05]),
        ({"name": "llr", "lr": 0.01, "inner": {"name": "spectra", "inner": "mano"}}, [0.01, 0.01, 0.01, 0.01]),
        ({"name": "mgup", "lr": 0.01, "inner": {"name": "muon", "inner": GIVEN}}, [0.01, 0.01, 2e-3]),
        ({"name": "mgup", "lr": 0.01, "inner": "adamh"}, [0.01, 0.01, 1e-3]),
        ({"name": "muon", "lr": 0.01, "inner": {"name": "mgup", "inner": "adamw"}}, [0.01, None, 0.01]),
        ({"name": "muon", "lr": 0.01, "inner": {"name": "mgup", "lr": 2e-3}}, [0.01, 2e-3, 2e-3]),
        ({"name": "muon", "lr": 0.01, "inner": {"name": "mgup", "inner": GIVEN}}, [0.01, None, 2e-3]),
    ],
)  # fmt: skip
def test_wrappers_on_both_sides(spec, found):
    assert [rate for _, rate in rates(spec)] == found


def test_all_other_settings_of_the_inner_optimizer_stay():
    config = build(
        "optimizer", {"name": "muon", "lr": 0.01, "inner": {"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6}}
    )
    assert (config.inner.betas, config.inner.eps, config.inner.weight_decay) == ((0.8, 0.9), 1e-6, 0.1)
    given = build("optimizer", "adamw")
    taken = build("optimizer", {"name": "muon", "lr": 0.01, "inner": given})
    assert taken.inner.lr == 0.01 and given.lr == 1e-3, "the caller's own config is left as it is"


def test_a_rate_that_the_inner_decay_cannot_take_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.inner: lr \* weight_decay = 20 \* 0\.1"):
        RunConfig.from_dict({"optimizer": {"name": "swan", "lr": 20}})
    RunConfig.from_dict({"optimizer": {"name": "swan", "lr": 20, "inner": {"name": "adamw", "weight_decay": 0}}})


def test_a_resolved_recipe_shows_and_keeps_the_number():
    config = RunConfig.from_dict({"optimizer": {"name": "mano", "lr": 4e-3}})
    assert config.to_dict()["optimizer"]["inner"]["lr"] == 4e-3 and "lr: 0.004" in config.to_yaml()
    assert RunConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    # an override comes before the configuration is validated
    assert RunConfig.load({"optimizer": "mano"}, ["optimizer.lr=0.01"]).optimizer.inner.lr == 0.01


@pytest.mark.parametrize("name", sorted(ONE_RATE))
def test_groups_carry_the_rate(name):
    optimizer = build("optimizer", {"name": name, "lr": 0.0123}).build(named_params(Zoo()))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0123}


def test_muon_steps_embeddings_as_adamw_does_at_that_rate():
    """One step from equal weights and gradients: all but the hidden matrices end where AdamW puts them."""
    weights = {}
    for spec in ({"name": "muon", "lr": 1e-2}, {"name": "adamw", "lr": 1e-2}, {"name": "adamw", "lr": 1e-3}):
        torch.manual_seed(0)
        model = Zoo()
        params = named_params(model)
        generator = torch.Generator().manual_seed(1)
        for n in params:
            n.param.grad = torch.randn(n.param.shape, generator=generator, dtype=n.param.dtype)
        build("optimizer", spec).build(params).step()
        weights[spec["name"], spec["lr"]] = {n.name: n.param.detach().clone() for n in params if n.role not in MATRICES}
    muon, same, slow = weights.values()
    assert any("emb" in name for name in muon)
    for name, weight in muon.items():
        assert torch.equal(weight, same[name]), name
        assert not torch.equal(weight, slow[name]), name


def test_a_run_trains_embeddings_at_the_rate_and_says_so(recipe):
    """Through the loop: without warm-up AdamW's first step is the rate times the gradient's sign."""
    data = recipe(**{"optimizer": {"name": "muon", "lr": 1e-2, "inner": {"name": "adamw", "weight_decay": 0}}})
    data |= {"schedule": {"name": "constant", "warmup": 0}, "train": {**data["train"], "steps": 1}, "clip": "none"}
    trainer = Trainer(RunConfig.load(data))
    before = {n.name: n.param.detach().clone() for n in trainer.params}
    trainer.fit()
    moved = {n.name: (n.param.detach() - before[n.name]).abs().max() for n in trainer.params if n.role not in MATRICES}
    assert len(moved) > 2
    for name, change in moved.items():
        assert change == pytest.approx(1e-2, rel=1e-3), name
    assert "lr: 0.01" in (trainer.config.run_dir / "config.yaml").read_text().partition("inner:")[2]
