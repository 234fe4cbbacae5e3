import pytest

from trainwright.core.errors import ConfigError
from trainwright.lab import Arm, Budget, vary
from trainwright.lab.arms import check_arms, parse_arm, parse_vary, resolve, split_list, value_at
from trainwright.lab.tuning import parse_grid, parse_tune


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("adamw,muon", ["adamw", "muon"]),
        ("[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("{name: mgup, inner: adamw},adamw", ["{name: mgup, inner: adamw}", "adamw"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("1", ["1"]),
    ],
)
def test_commas_inside_brackets_and_quotes_do_not_split(text, parts):
    assert split_list(text) == parts


def test_vary_reads_yaml_values_and_makes_the_product_in_order():
    key, values = parse_vary("optimizer.betas=[0.9,0.95],[0.8,0.9]")
    assert key == "optimizer.betas" and [v for _, v in values] == [[0.9, 0.95], [0.8, 0.9]]
    arms = vary(dict([parse_vary("optimizer={name: muon},adamw"), parse_vary("model.n_layers=2,3")]))
    assert [a.name for a in arms] == [
        "optimizer={name: muon} model.n_layers=2", "optimizer={name: muon} model.n_layers=3",
        "optimizer=adamw model.n_layers=2", "optimizer=adamw model.n_layers=3",
    ]  # fmt: skip
    assert arms[0].set == {"optimizer": {"name": "muon"}, "model.n_layers": 2}
    assert [a.name for a in vary({"optimizer.lr": [1e-3, 2]})] == ["optimizer.lr=0.001", "optimizer.lr=2"]


@pytest.mark.parametrize("text", ["optimizer", "=a,b", "optimizer=a,,b", "optimizer="])
def test_wrong_vary_is_refused(text):
    with pytest.raises(ConfigError, match="should look like optimizer=adamw,muon"):
        parse_vary(text)


def test_an_arm_of_joint_settings():
    arm = parse_arm("fast:optimizer=muon,optimizer.lr=0.02,optimizer.betas=[0.9,0.95]")
    assert arm == Arm("fast", {"optimizer": "muon", "optimizer.lr": 0.02, "optimizer.betas": [0.9, 0.95]})
    for text in ("optimizer=muon", "fast", "fast:optimizer", ":optimizer=muon"):
        with pytest.raises(ConfigError, match="should look like NAME"):
            parse_arm(text)


def test_settings_apply_in_order_and_leave_the_base_alone():
    base = {"optimizer": {"name": "adamw", "lr": 1.0, "eps": 1e-6}}
    assert resolve(base, {"optimizer": "muon", "optimizer.lr": 2e-05})["optimizer"] == {"name": "muon", "lr": 2e-05}
    assert resolve(base, {"optimizer.lr": 3})["optimizer"] == {"name": "adamw", "lr": 3, "eps": 1e-6}
    assert base["optimizer"]["lr"] == 1.0


def test_references_are_told_apart_from_methods_and_checked():
    arm = Arm("control", {"optimizer.lr": {"of": "base", "times": 1.25}, "optimizer": {"name": "adamw"}})
    assert set(arm.references()) == {"optimizer.lr"} and arm.fixed == {"optimizer": {"name": "adamw"}}
    check_arms([Arm("base"), arm])
    with pytest.raises(ConfigError, match="no arm; did you mean 'base'"):
        check_arms([Arm("base"), Arm("x", {"optimizer.lr": {"of": "bse"}})])
    circle = [Arm("a", {"optimizer.lr": {"of": "b"}}), Arm("b", {"optimizer.lr": {"of": "a"}})]
    with pytest.raises(ConfigError, match="in a circle"):
        check_arms(circle)
    with pytest.raises(ConfigError, match="two arms are named 'a'"):
        check_arms([Arm("a"), Arm("a")])
    with pytest.raises(ConfigError, match="times"):
        Arm("x", {"optimizer.lr": {"of": "base", "times": -1}}).references()
    with pytest.raises(ConfigError, match="no such setting"):
        value_at({"optimizer": {"lr": 1}}, "optimizer.rank", "x")


def test_budgets():
    assert Budget.parse("tokens=2M") == Budget("tokens", 2_000_000) == Budget.parse({"tokens": "2M"})
    assert Budget.parse("seconds=60").share(0.25).length() == {"seconds": 15.0}
    # 1e13 FLOPs at 12 MFLOPs a token: 833,333.33 tokens
    assert Budget.parse("flops=1e13").length(flops_per_token=12e6) == {"tokens": 833_333}
    shown = {"tokens=2M": "2M tokens", "seconds=90": "90 s", "flops=1e13": "10T FLOPs"}
    assert {text: str(Budget.parse(text)) for text in shown} == shown
    for bad in ("2M", "tokens=", "tokens=-5", "steps=100", "seconds=soon", "tokens=0", {"tokens": 1, "seconds": 2}):
        with pytest.raises(ConfigError, match="budget"):
            Budget.parse(bad)


def test_grids():
    assert parse_tune("optimizer.lr=log:1e-4:1e-1:4") == ("optimizer.lr", [1e-4, 1e-3, 1e-2, 1e-1])
    assert parse_grid("lin:1:2:3", "k") == [1.0, 1.5, 2.0]
    assert parse_grid("[1e-3,3e-3]", "k") == parse_grid("1e-3,3e-3", "k") == [1e-3, 3e-3]
    for bad in ("log:0:1:3", "log:1:0.1:3", "log:1e-4:1e-1", "lin:a:b:3", "[]", "[1,1]", "log:1:2:3:4"):
        with pytest.raises(ConfigError, match="tune k"):
            parse_grid(bad, "k")
