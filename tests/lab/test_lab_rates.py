"""Settings of the lab reach the inner optimizer's rate, and where one was not tuned the comparison says so."""

import json
from pathlib import Path

import pytest
import yaml

from trainwright import RunConfig
from trainwright.cli.compare import show
from trainwright.config.run_config import read_recipe
from trainwright.lab import Arm, compare
from trainwright.lab.arms import resolve, validated
from trainwright.lab.claim import load_claims
from trainwright.lab.comparison import make_plan
from trainwright.lab.rates import kept_rates
from trainwright.lab.tuning import points
from trainwright.optim.matrix import MatrixConfig

CLAIMS = Path(__file__).parents[2] / "claims"
BEST = {"name": "adamw", "lr": 3e-3}


def rates(trial):
    found, method = [], trial.recipe["optimizer"]
    while method is not None:
        found.append(method["lr"])
        method = method.get("inner")
    return found


@pytest.mark.parametrize("name", ["muon", "mano", "swan", "galore"])
def test_tuning_moves_the_inner_rate(recipe, name):
    plan = make_plan(
        recipe(), varied={"optimizer": ["adamw", name]}, tune={"optimizer.lr": [1e-3, 1e-2]}, budget="tokens=10k"
    )
    found = [rates(plan.trial(plan.arms[1], point, 0.25, 7)) for point in points(plan.grids[f"optimizer={name}"])]
    assert found == [[1e-3, 1e-3], [1e-2, 1e-2]] and not plan.kept_rates


@pytest.mark.parametrize("base", [{"name": "adamw"}, {"name": "muon"}, {"name": "muon", "lr": 0.5}])
def test_arms_overrides_and_references_move_it_too(recipe, base):
    """Whatever stands in the recipe: a value of lr alone is for the whole optimizer."""
    plan = make_plan(
        recipe(optimizer=base),
        ["optimizer.lr=0.004"],
        arms=[
            Arm("muon", {"optimizer.name": "muon", "optimizer.lr": 0.02}),
            Arm("taken", {"optimizer": "muon", "optimizer.lr": {"of": "muon", "times": 2}}),
            Arm("inner", {"optimizer": "adamw", "optimizer.lr": {"of": "muon", "key": "optimizer.inner.lr"}}),
        ],
        budget="tokens=10k",
    )
    muon, taken, inner = plan.arms
    assert rates(plan.trial(muon, {}, 1.0, 7)) == [0.02, 0.02]
    assert rates(plan.trial(taken, {"optimizer.lr": 0.04}, 1.0, 7)) == [0.04, 0.04]
    assert rates(plan.trial(inner, {"optimizer.lr": 0.02}, 1.0, 7)) == [0.02]
    plan = make_plan(
        recipe(optimizer=base), ["optimizer=muon"], arms=[Arm("a", {"optimizer.lr": 3e-3})], budget="tokens=10k"
    )
    assert rates(plan.trial(plan.arms[1], {}, 1.0, 7)) == [3e-3, 3e-3]


def test_a_rate_given_inside_stays_and_the_comparison_says_so(fake_pool, tmp_path, recipe, capsys):
    fixed = {"name": "muon", "inner": BEST}
    found = compare(
        recipe(),
        vary={"optimizer": ["adamw", "muon"]},
        arms=[Arm("fixed", {"optimizer": fixed}), Arm("at 0.02", {"optimizer": {**fixed, "lr": 0.02}}, tune={})],
        tune={"optimizer.lr": [1e-3, 1e-2]},
        seeds=2,
        budget="tokens=100k",
        out=tmp_path / "out",
    )
    assert {tuple(rates(t)) for t in fake_pool} == {
        (1e-3,), (1e-2,), (1e-3, 1e-3), (1e-2, 1e-2), (1e-3, 3e-3), (1e-2, 3e-3), (0.02, 3e-3)
    }  # fmt: skip
    said = [note for note in found.notes if "stayed at" in note]
    assert len(said) == 1 and said[0].startswith("fixed: optimizer.inner.lr stayed at 0.003 while the rate outside")
    show(found)
    folder = tmp_path / "out"
    assert said[0] in json.loads((folder / "compare.json").read_text())["notes"]
    assert f"- {said[0]}" in (folder / "compare.md").read_text()
    assert f"<li>{said[0]}</li>" in (folder / "compare.html").read_text("utf-8")
    assert said[0] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "optimizer, kept",
    [
        ("adamh", {"optimizer.inner.lr": 1e-3}),
        ({"name": "muon", "adjust": "original"}, {"optimizer.inner.lr": 1e-3}),
        ({"name": "mgup", "inner": {"name": "muon", "inner": BEST}}, {"optimizer.inner.inner.lr": 3e-3}),
        ({"name": "mgup", "inner": "muon"}, {}),
        ({"name": "mgup", "inner": BEST}, {}),
        ("muon", {}),
        ("adamw", {}),
    ],
)
def test_which_rates_tuning_leaves_alone(recipe, optimizer, kept):
    tune = {"optimizer.lr": [1e-3, 1e-2]}
    plan = make_plan(recipe(), arms=[Arm("a", {"optimizer": optimizer}, tune)], budget="tokens=10k")
    assert plan.kept_rates == ({"a": kept} if kept else {})


def test_a_rate_is_kept_only_inside_one_that_moved():
    def at(*pairs):
        return [{"optimizer.lr": a, "optimizer.inner.lr": b} for a, b in pairs]

    assert kept_rates(at((1, 5), (2, 5))) == {"optimizer.inner.lr": 5}
    assert kept_rates(at((1, 5), (2, 6))) == {} == kept_rates(at((1, 5), (1, 6))) == kept_rates(at((1, 5)))
    assert kept_rates(at((1, 5), (1, 5))) == {} == kept_rates([])
    assert kept_rates([{"optimizer.lr": 1}, {"optimizer.lr": 2, "optimizer.inner.lr": 5}]) == {}


def test_a_resolved_recipe_keeps_the_number_and_the_comparison_says_so(recipe):
    """A saved configuration names every rate: it cannot be told from one that was written so."""
    saved = yaml.safe_load(RunConfig.load(recipe(optimizer={"name": "muon", "lr": 0.02})).to_yaml())
    plan = make_plan(saved, arms=[Arm("a", {}, {"optimizer.lr": [1e-3, 1e-2]})], budget="tokens=10k")
    assert plan.kept_rates == {"a": {"optimizer.inner.lr": 0.02}}


def test_claims_name_the_inner_rate_themselves():
    """So what they measured does not hang on where an inner rate comes from by default."""
    given = {}
    for claim in load_claims(CLAIMS).values():
        for arm in claim.arms:
            config = validated(arm.name, resolve(read_recipe(claim.source()), arm.arm().fixed)).optimizer
            if isinstance(config, MatrixConfig):
                given[claim.id, arm.name] = arm.set["optimizer"].get("inner")
    assert len(given) > 15
    assert {key: inner for key, inner in given.items() if inner != BEST} == {}


def test_both_rates_can_be_tuned(recipe):
    """As docs/compare.md has it."""
    tune = {"optimizer.lr": [1e-2, 3e-2], "optimizer.inner.lr": [1e-3, 3e-3]}
    plan = make_plan(recipe(), arms=[Arm("adamh", {"optimizer": "adamh"}, tune)], budget="tokens=10k")
    found = [rates(plan.trial(plan.arms[1], point, 0.25, 7)) for point in points(plan.grids["adamh"])]
    assert found == [[1e-2, 1e-3], [1e-2, 3e-3], [3e-2, 1e-3], [3e-2, 3e-3]] and not plan.kept_rates
