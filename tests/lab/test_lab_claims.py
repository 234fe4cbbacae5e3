"""Claims: their files, what is run for them, results, table. Trials are made up, see conftest."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from trainwright.cli import run as cli
from trainwright.core.errors import ConfigError
from trainwright.lab import compare, load_claim, load_claims, run_claim
from trainwright.lab.arms import Arm
from trainwright.lab.budget import Budget
from trainwright.lab.claim_run import plan_claim

SAMPLE = Path(__file__).parent / "claims" / "T001_muon.yaml"
CLAIMS = Path(__file__).parents[2] / "claims"


@pytest.fixture
def folder(tmp_path, recipe):
    """A folder with the sample claim and its base recipe."""
    claims = tmp_path / "claims"
    claims.mkdir()
    (claims / SAMPLE.name).write_text(SAMPLE.read_text())
    write(claims / "recipe.yml", recipe())
    edit(claims / SAMPLE.name, recipe="recipe.yml")
    return claims


def write(path, data):
    path.write_text(yaml.safe_dump(data, sort_keys=False))


def edit(path, **changes):
    data = yaml.safe_load(path.read_text())
    write(path, {**data, **changes})


def test_tuning_and_references_of_a_claim(folder, fake_pool, tmp_path):
    claim = load_claim(folder / SAMPLE.name)
    result = run_claim(claim, trials=tmp_path / "trials", results=tmp_path / "results")
    chosen = {a["name"]: a["chosen"]["optimizer.lr"] for a in result["arms"]}
    assert chosen == {"adamw": 3e-3, "muon": 2e-2, "adamw faster": 3.75e-3, "adamw again": 3e-3}
    tuning = [t for t in fake_pool if t.recipe["train"]["tokens"] == 1280]
    full = [t for t in fake_pool if t.recipe["train"]["tokens"] == 5120]
    # three points an arm, then the better two for half of it
    # two seeds of adamw (once for both arms that are equal), muon and the faster adamw
    assert len(tuning) == 6 and len(full) == 6 and len(fake_pool) == 16
    assert all(t.probes == () for t in tuning) and all(t.probes == ("stable_rank",) for t in full)
    by_name = {a["name"]: a for a in result["arms"]}
    assert by_name["adamw"]["edge"] == "" and "widen" in by_name["muon"]["edge"]
    assert any(note.startswith("muon: best rate at the edge") for note in result["notes"])
    assert len(by_name["adamw"]["tuning"]) == len(by_name["muon"]["tuning"]) == 5
    assert by_name["adamw again"]["seeds"] == by_name["adamw"]["seeds"]
    assert by_name["adamw again"]["difference_to_baseline"] == 0


def test_result_and_verdict(folder, fake_pool, tmp_path):
    claim = load_claim(folder / SAMPLE.name)
    result = run_claim(claim, trials=tmp_path / "trials", results=tmp_path / "results")
    assert json.loads((tmp_path / "results/T001.json").read_text()) == result
    outcomes = [c["outcome"] for c in result["checks"]]
    # muon's stable rank is made to be the smaller one, so the last check is contradicted
    assert outcomes == ["shown", "shown", "contradicted"] and result["verdict"] == "contradicted"
    assert result["checks"][0]["measured"] == pytest.approx(-0.1995) and result["checks"][1]["measured"] == 0.625
    low, high = result["checks"][0]["measured_ci95"]
    assert low < -0.1995 < high < 0
    assert result["machine"] == "2 CPU cores (a CPU), fp32" and result["versions"]["torch"] == "2"
    assert result["versions"]["code"] == "c0de", "that of the trials"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["command"].startswith("trainwright claims run T001")
    edit(folder / SAMPLE.name, checks=yaml.safe_load(SAMPLE.read_text())["checks"][:2])
    assert run_claim(load_claim(folder / SAMPLE.name), trials=tmp_path / "t", results=None)["verdict"] == "shown"
    edit(folder / SAMPLE.name, seeds=1)
    one = run_claim(load_claim(folder / SAMPLE.name), trials=tmp_path / "t", results=None)
    assert one["verdict"] == "shown (one seed)" and one["checks"][0]["measured_ci95"] is None


def test_an_arm_of_a_share_of_the_budget(folder, fake_pool, tmp_path):
    data = yaml.safe_load((folder / SAMPLE.name).read_text())
    whole = load_claim(folder / SAMPLE.name).digest
    data["arms"][3] |= {"share": 0.5}
    edit(folder / SAMPLE.name, arms=data["arms"])
    claim = load_claim(folder / SAMPLE.name)
    assert claim.digest != whole
    result = run_claim(claim, trials=tmp_path / "trials", results=None)
    assert "adamw again: trained for 0.5 of the budget" in result["notes"]
    by_name = {a["name"]: {s["tokens"] for s in a["seeds"]} for a in result["arms"]}
    assert by_name["adamw"] == {5120} and by_name["adamw again"] == {2560}
    for wrong in (0, 1.5):
        data["arms"][3]["share"] = wrong
        edit(folder / SAMPLE.name, arms=data["arms"])
        with pytest.raises(ConfigError, match="share"):
            load_claim(folder / SAMPLE.name)
    data["arms"][3]["share"] = 1.0
    edit(folder / SAMPLE.name, arms=data["arms"])
    assert load_claim(folder / SAMPLE.name).digest == whole, "what is the default need not be said"


def test_the_spikes_of_spams_claim_fall_where_it_can_clip():
    """At every length that tuning trains for; but for one, on purpose, in the arm that waits longer after a reset."""
    claim = load_claim(Path(__file__).parents[2] / "claims" / "B075_spam.yaml")
    recipe = yaml.safe_load(claim.source().read_text())
    blind = {}
    for arm in claim.arms:
        settings = arm.set["optimizer"]
        if settings["name"] != "spam":
            continue
        every, after = settings["reset_every"], settings.get("clip_after", 20)
        for share in (0.25, 0.5, 1.0):
            tokens = Budget.parse(claim.budget).share(share).length()["tokens"]
            steps = claim.inject.spikes.at(math.ceil(tokens / recipe["train"]["global_batch_tokens"]))
            blind[arm.name, share] = sum(t < after or t % every < after for t in steps)
            assert len(steps) == 4
    assert [blind["spam", share] for share in (0.25, 0.5, 1.0)] == [0, 0, 0]
    assert blind["spam blind to one spike", 1.0] == 1, "it is not tuned, so only the whole run counts"


def test_a_reference_that_leads_nowhere_is_found_before_anything_runs(folder, fake_pool, tmp_path):
    arms = yaml.safe_load(SAMPLE.read_text())["arms"]
    arms[2]["set"]["optimizer.lr"]["key"] = "optimizer.rank"
    edit(folder / SAMPLE.name, arms=arms)
    with pytest.raises(ConfigError, match=r"claim T001: optimizer.rank: arm 'adamw' has no such setting"):
        run_claim(load_claim(folder / SAMPLE.name), trials=tmp_path / "t", results=None)
    arms[2]["set"]["optimizer.lr"]["key"] = "optimizer.name"
    edit(folder / SAMPLE.name, arms=arms)
    with pytest.raises(ConfigError, match="which is no number"):
        run_claim(load_claim(folder / SAMPLE.name), trials=tmp_path / "t", results=None)
    assert not fake_pool


def test_injected_spikes_go_to_all_arms_and_the_spike_monitor_stays_out(folder):
    edit(folder / SAMPLE.name, inject={"spikes": {"factor": 100, "steps": [0.5]}})
    plan = plan_claim(load_claim(folder / SAMPLE.name))
    trials = [plan.trial(a, {"optimizer.lr": 1e-3}, 0.25, 7) for a in plan.arms]
    assert all(t.inject == {"spikes": {"factor": 100.0, "steps": [0.5]}} for t in trials)
    assert all([m["name"] for m in t.recipe["monitors"]] == ["non_finite"] for t in trials)


def test_commands(folder, fake_pool, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trials, page = ["--trials", "trials/all"], tmp_path / "docs/claims.md"
    assert cli(["claims", "list", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["id"] == "T001" and record["method"] == "optimizer.muon"
    assert record["run"] is False and record["verdict"] == "not run"
    assert cli(["claims", "table"]) == 0 and "| not run |" in page.read_text() and "Not run." in page.read_text()
    capsys.readouterr()
    assert cli(["claims", "run", "T001", *trials]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("T001: contradicted") and "difference -0.199" in said.out
    assert "[18/18]" in said.err and (tmp_path / "trials/pages/T001/compare.html").is_file()
    count = len(fake_pool)
    assert cli(["claims", "run", "--all", *trials]) == 0 and len(fake_pool) == count, "what has a result is passed over"
    assert ", of other code; --again judges it anew" in capsys.readouterr().err
    assert cli(["claims", "run", "muon", "--again", *trials]) == 0 and len(fake_pool) > count
    assert cli(["claims", "list"]) == 0 and "contradicted" in capsys.readouterr().out
    assert cli(["claims", "table"]) == 0
    text = page.read_text()
    assert "**contradicted**" in text and "ratio 0.625" in text and "`trainwright claims run T001`" in text
    assert "Anything about models and runs that are not tiny." in text
    assert "| muon | method | optimizer.lr=0.02 |" in text and "trainwright 0.1.0, code c0de; " in text
    path = folder / "results" / "T001.json"
    old = json.loads(path.read_text())
    del old["versions"]["code"]  # as results were before
    path.write_text(json.dumps(old))
    assert cli(["claims", "table"]) == 0 and "trainwright 0.1.0, code not recorded; " in page.read_text()
    edit(folder / SAMPLE.name, seeds=3)
    assert cli(["claims", "list"]) == 0 and "changed since" in capsys.readouterr().out
    bad = yaml.safe_load((folder / SAMPLE.name).read_text())
    bad["arms"][1]["set"]["optimizer"] = "muno"
    write(folder / "T000_bad.yaml", {**bad, "id": "T000"})
    capsys.readouterr()
    assert cli(["claims", "run", "--all", *trials]) == 2, "one wrong claim does not hold up the others"
    said = capsys.readouterr()
    assert "T001: contradicted" in said.out and "claim T000: arm 'muon': optimizer.name='muno'" in said.err
    for wrong in ("run", "run B999", "run T001 --all", "list --dir no"):
        assert cli(["claims", *wrong.split()]) == 2


def with_check(**changes):
    return {"checks": [{"quantity": "val_loss", "arm": "muon", "versus": "adamw", **changes}]}


def with_arms(first, second):
    return {"arms": [{"name": "a", "role": "base", **first}, {"name": "b", "role": "method", **second}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": "steps=5"}, "budget"),
        ({"checks": []}, "checks"),
        (with_check(less_by=0, versus="adam"), "did you mean 'adamw'"),
        (with_check(less_by=0, quantity="val_los"), "did you mean 'val_loss'"),
        (with_check(less_by=0, quantity="rtn_loss"), "rtn_loss"),
        (with_check(less_by=0, quantity="tokens_to_loss - val_loss"), "cannot be subtracted"),
        (with_check(), "exactly one of"),
        (with_check(less_by=0, greater_by=0), "exactly one of"),
        ({"probes": ["rank"]}, "no such probe"),
        ({"verdict": "shown"}, "verdict: unknown key"),
        ({"id": "T002"}, "begin with the id"),
        (with_arms({}, {"set": {"optimizer.lr": {"of": "c"}}}), "no arm"),
        (with_arms({"role": "method"}, {}), "role base"),
        (with_arms({"tune": {"optimizer.lr": [1, 2]}}, {"tune": {"optimizer.lr": [1, 2, 3]}}), "same number of points"),
    ],
)
def test_wrong_files_are_refused_with_the_reason(folder, changes, said):
    edit(folder / SAMPLE.name, **changes)
    with pytest.raises(ConfigError, match=said) as caught:
        load_claims(folder)
    assert "T001_muon.yaml" in str(caught.value)


def test_a_tuned_comparison(fake_pool, tmp_path, recipe):
    write(tmp_path / "r.yaml", recipe())
    found = compare(
        tmp_path / "r.yaml",
        vary={"optimizer": ["adamw", "muon"]},
        arms=[Arm("control", {"optimizer": "adamw", "optimizer.lr": {"of": "optimizer=muon"}})],
        tune={"optimizer.lr": "log:1e-4:1e-1:7"},
        seeds=3,
        budget="tokens=100k",
        out=tmp_path / "out",
    )
    adamw, muon, control = found.arms
    assert adamw.chosen == {"optimizer.lr": 0.00316228} and muon.chosen == {"optimizer.lr": 0.0316228}
    assert control.chosen == muon.chosen and not control.tuning and not muon.edge
    assert "control: not tuned, since it names the setting itself" in found.notes
    assert [len([t for t in a.tuning if t["share_of_budget"] == 0.25]) for a in (adamw, muon)] == [7, 7]
    assert muon.verdict == "lower loss" and control.verdict == "higher loss"
    assert "| optimizer=muon | optimizer.lr=0.0316228 |" in (tmp_path / "out/compare.md").read_text()
    assert '"Tuning"' in (tmp_path / "out/compare.html").read_text("utf-8")


def test_a_result_is_of_what_is_run_and_judged_not_of_the_prose(folder):
    file = folder / SAMPLE.name
    whole = load_claim(file).digest
    edit(file, claim="Other words.", experiment="Other words.", cannot_show="Other words.", paper="arXiv:1")
    assert load_claim(file).digest == whole
    data = yaml.safe_load(file.read_text())
    for key, value in {
        "seeds": 3,
        "budget": "tokens=2k",
        "probes": [*data["probes"], "weight_rms"],
        "checks": data["checks"][:1],
        "arms": [*data["arms"], {"name": "more", "role": "control", "set": {"optimizer": "adamw"}}],
        "inject": {"spikes": {"factor": 10, "steps": [0.5]}},
    }.items():
        edit(file, **{key: value})
        assert load_claim(file).digest != whole, key
        edit(file, **{key: data.get(key)})
        assert load_claim(file).digest == whole, key


@pytest.mark.parametrize("claim", load_claims(CLAIMS).values(), ids=lambda claim: claim.id)
def test_no_headline_speaks_of_a_saving_that_no_arm_measures(claim):
    shorter = any(arm.share < 1 for arm in claim.arms)
    if re.search(r"of the tokens|of its tokens|fewer tokens|of its FLOPs|throughput", claim.claim):
        measured = shorter or any(set(check.parts) & {"tokens_per_s", "tokens_to_loss"} for check in claim.checks)
        assert measured, claim.claim


@pytest.mark.parametrize("id", ["A14", "A18", "B013"])
def test_wrappers_that_change_the_length_of_steps_have_both_controls(id):
    """The base at the rate that makes its steps as long, and the method at the base's best rate."""
    claim = load_claims(CLAIMS)[id]
    method = next(arm for arm in claim.arms if arm.role == "method").name
    taken = {arm.name: arm.arm().references().get("optimizer.lr") for arm in claim.arms if arm.role == "control"}
    matched = [name for name, r in taken.items() if r and r.times != 1 and name.startswith(claim.baseline)]
    at_best = [n for n, r in taken.items() if r and (r.of, r.times) == (claim.baseline, 1) and n.startswith(method)]
    assert matched and at_best
    assert any(check.versus in matched for check in claim.checks)
