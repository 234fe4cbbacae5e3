"""Whole comparisons, with trials in processes of their own."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import psutil
import pytest
import yaml

from trainwright.core.errors import ConfigError
from trainwright.lab import Arm, TrialStore, compare, identity
from trainwright.lab.comparison import default_out, make_plan
from trainwright.lab.pool import Pool, TimeIsUp
from trainwright.lab.render import markdown
from trainwright.lab.worker import main

NUMBER = {"type": ["number", "null"]}
INTERVAL = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}]}
CONTRACT = {
    "type": "object",
    "required": ["arms"],
    "properties": {
        "arms": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "val_loss_mean", "val_loss_ci95", "difference_to_baseline_ci95", "tokens_per_s",
                             "peak_memory_bytes", "optimizer_state_bytes", "status"],
                "properties": {
                    "name": {"type": "string"}, "val_loss_mean": NUMBER, "val_loss_ci95": INTERVAL,
                    "difference_to_baseline_ci95": INTERVAL, "tokens_per_s": NUMBER,
                    "peak_memory_bytes": {"type": ["integer", "null"]},
                    "optimizer_state_bytes": {"type": ["integer", "null"]},
                    "status": {"enum": ["ok", "diverged", "failed"]},
                },
            },
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def still_source(tmp_path_factory):
    """Trials are known by the source: all processes of these tests use one copy, which nobody edits meanwhile."""
    copy = tmp_path_factory.mktemp("source")
    package = Path(identity.__file__).parents[1]
    shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(copy))
        patch.setattr(identity, "__file__", str(copy / package.name / "lab" / "identity.py"))
        identity.code_digest.cache_clear()
        yield
    identity.code_digest.cache_clear()


@pytest.fixture(scope="module")
def found(still_source, tmp_path_factory, corpus):
    """Two comparisons over one store that several tests look at: one with bad arms, then one with two seeds."""
    folder = tmp_path_factory.mktemp("comparison")
    data = {
        "run": {"seed": 7, "device": "cpu"},
        "model": {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128},
        "tokenizer": "bytes",
        "data": {
            "sources": [{"name": "text", "path": corpus}],
            "cache_dir": str(folder / "cache"),
            "validation_fraction": 0.1,
        },
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "precision": "fp32",
        "train": {"seq_len": 32, "global_batch_tokens": 256},
        "evaluate": {"tokens": 1024},
    }
    base, slower = Arm("base"), Arm("slower", {"optimizer.lr": 3e-4})
    wild = Arm("wild", {"optimizer": {"name": "sgd", "lr": 1e20, "weight_decay": 0}, "clip": "none"})
    broken = Arm("broken", {"data.sources.0.path": "/no/such/folder"})
    store = folder / "trials"
    bad = compare(data, arms=[base, wild, broken, slower], seeds=1, budget="tokens=5120", trials=store)
    lines = []
    same = Arm("the same", {"optimizer.lr": 3e-3})
    good = compare(
        data, arms=[base, same, slower], seeds=2, budget="tokens=5120", trials=store, out=folder / "out",
        report=lines.append,
    )  # fmt: skip
    return SimpleNamespace(bad=bad, good=good, out=folder / "out", store=store, lines=lines, data=data)


def test_a_failing_and_a_diverging_arm_are_reported_and_the_others_go_on(found):
    figures = found.bad.to_dict()
    jsonschema.validate(figures, CONTRACT)
    by_name = {a["name"]: a for a in figures["arms"]}
    assert {n: a["status"] for n, a in by_name.items()} == {
        "base": "ok", "wild": "diverged", "broken": "failed", "slower": "ok"
    }  # fmt: skip
    assert "non_finite" in by_name["wild"]["error"] and by_name["wild"]["val_loss_mean"] is None
    assert "/no/such/folder" in by_name["broken"]["error"] and "\n" not in by_name["broken"]["error"]
    assert by_name["slower"]["verdict"] == "one seed: no interval" and by_name["slower"]["val_loss_ci95"] is None
    assert by_name["wild"]["verdict"] == "diverged" and by_name["broken"]["verdict"] == "failed"
    text = markdown(found.bad)
    assert "| wild (diverged) |" in text and "| broken (failed) |" in text and "One seed: no interval" in text
    reason = by_name["broken"]["error"]
    assert f"- broken failed: {reason}\n" in text and reason not in text.partition("Baseline:")[0]
    (alike,) = [n for n in found.bad.notes if n.startswith("same initial weights")]
    assert alike.endswith(": wild, slower") and "first 2 batches" in alike
    assert "initial weights and data order not checked for every seed: broken" in found.bad.notes


def test_figures_of_every_arm(found):
    figures = json.loads((found.out / "compare.json").read_text())
    jsonschema.validate(figures, CONTRACT)
    assert figures == json.loads(json.dumps(found.good.to_dict()))
    by_name = {a["name"]: a for a in figures["arms"]}
    base, slower = by_name["base"], by_name["slower"]
    assert base["status"] == "ok" and base["verdict"] == "baseline" and base["difference_to_baseline_ci95"] is None
    low, high = slower["difference_to_baseline_ci95"]
    assert 0 < low < slower["difference_to_baseline"] < high and slower["verdict"] == "higher loss"
    assert slower["tokens_to_baseline_loss"] is None and base["tokens_to_baseline_loss"] <= 5120
    assert base["optimizer_state_bytes"] > 0 and base["tokens_per_s"] > 0 and base["peak_memory_bytes"] > 2**20
    assert "same initial weights and same data order in all arms, seed by seed (checked by digests" in " ".join(
        found.good.notes
    )
    assert not any("shared hardware" in note for note in found.good.notes)
    results = found.good["base"].results
    assert results[7].weights_digest != results[8].weights_digest and results[7].data_digest != results[8].data_digest


def test_equal_trials_run_once_over_arms_and_comparisons(found):
    good = found.good
    assert good["base"].trials == good["the same"].trials
    assert good["the same"].difference == 0 and good["the same"].verdict == "no difference shown"
    assert good["base"].trials[7] == found.bad["base"].trials[7]
    # seed 7: base, wild, broken, slower; seed 8: base, slower
    assert len(list(found.store.iterdir())) == 6 and len(found.lines) == 4
    assert sum("kept from before" in line for line in found.lines) == 2
    assert found.lines[-1].startswith("[6/6]") and any("(the same as the same seed 7)" in line for line in found.lines)


def test_a_finished_trial_is_never_run_again(found):
    stamps = {p: p.stat().st_mtime_ns for p in found.store.glob("*/result.json")}
    lines = []
    arms = [Arm("base"), Arm("slower", {"optimizer.lr": 3e-4})]
    again = compare(found.data, arms=arms, baseline="slower", seeds=2, budget="tokens=5120", trials=found.store,
                    report=lines.append)  # fmt: skip
    assert len(lines) == 4 and all("kept from before" in line for line in lines)
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    difference = found.good["slower"].difference
    assert again.arms[0].name == "slower" and again["base"].difference == pytest.approx(-difference)


def test_other_text_in_the_same_file_is_another_trial(recipe, tmp_path, monkeypatch):
    def start(pool, trial, slot):
        """In place of a training."""
        folder = pool.store.folder(trial)
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(trial.spec(keep=False)))
        (folder / "result.json").write_text('{"status": "ok", "val_loss": 1.5}')
        return subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)

    monkeypatch.setattr(Pool, "_start", start)
    text = tmp_path / "d.txt"
    text.write_text("alpha = beta + 1\n\n" * 300)
    data = recipe(**{"data.sources": [{"name": "text", "path": str(text), "separator": "blank_line"}]})

    def lines():
        said = []
        arms = [Arm("base"), Arm("slower", {"optimizer.lr": 3e-4})]
        compare(data, arms=arms, seeds=1, budget="tokens=512", trials=tmp_path / "trials", report=said.append)
        return said

    assert len(lines()) == 2 and sum("kept from before" in line for line in lines()) == 2
    text.write_text("gamma = delta + 2\n\n" * 310)
    again = lines()
    assert again[0] == f"{tmp_path / 'trials'} holds 2 trials of the same recipes but of other data; they run anew"
    assert len(again) == 3 and not any("kept from before" in line for line in again)
    identity.code_digest.cache_clear()
    monkeypatch.setattr(identity.importlib.metadata, "entry_points", lambda group: [Plugin])  # as if installed since
    again = lines()
    assert again[0].endswith("of other code; they run anew") and len(again) == 3
    identity.code_digest.cache_clear()


class Plugin:
    value, dist = "a.plugin", None


def test_pages(found):
    text = markdown(found.good)
    assert (found.out / "compare.md").read_text() == text
    assert "| the same |" in text and "no difference shown" in text
    page = (found.out / "compare.html").read_text("utf-8")
    charts = json.loads(re.search(r"const figures = (.*);\n", page).group(1))
    titles = [c["layout"]["title"]["text"] for c in charts]
    assert titles[1:] == ["Validation loss over tokens", "Validation loss over seconds of training"]
    over_tokens = charts[1]["data"]
    assert over_tokens[0]["x"][0] == 0 and over_tokens[0]["x"][-1] == 5120 and len(over_tokens[0]["x"]) == 11
    assert {t["name"] for t in over_tokens} >= {"base", "slower"} and len({t["line"]["color"] for t in over_tokens}) > 2
    assert charts[0]["data"][0]["error_x"]["array"][0] > 0, "the interval is drawn"
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"(src|href)\s*=|@import|url\(", outside), "the page fetches nothing"


def test_one_wrong_arm_is_one_clear_error_before_anything_runs(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"arm 'optimizer=adamv': optimizer.name='adamv': no such optimizer; did you"):
        compare(recipe(), vary={"optimizer": ["adamw", "adamv"]}, out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"arm 'x': optimizer.lr.*wipe the weights out|arm 'x': .*wipe"):
        compare(recipe(), arms=[Arm("x", tune={"optimizer.lr": [1e-3, 100.0]})], out=tmp_path / "out")
    for settings, said in (
        ({"vary": {"optimizer": ["adamw"]}}, "nothing to compare"),
        ({"vary": {"optimizer": ["adamw", "sgd"]}, "baseline": "adamw"}, "no such arm"),
        ({"vary": {"optimizer": ["adamw", "sgd"]}, "budget": "steps=3"}, "budget"),
        ({"vary": {"optimizer": ["adamw", "sgd"]}, "seeds": 0}, "at least 1"),
        ({"vary": {"optimizer": ["adamw", "sgd"]}, "probes": ["rank"]}, "no such probe"),
        ({"arms": [Arm("a", tune={"optimizer.lr": [1, 2]}), Arm("b", tune={"optimizer.lr": [1]})]}, "wipe|same number"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare(recipe(), out=tmp_path / "out", **settings)
    with pytest.raises(ConfigError, match="no validation documents"):
        compare(recipe(**{"data.validation_fraction": 0}), vary={"optimizer": ["adamw", "sgd"]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flops_become_tokens_by_the_models_own_count(recipe):
    plan = make_plan(recipe(), varied={"model.n_layers": [2, 4]}, budget="flops=1e9")
    small, large = (plan.trial(arm, {}, 1.0, 7).recipe["train"]["tokens"] for arm in plan.arms)
    per_token = plan.flops["model.n_layers=2"]
    assert small == round(1e9 / per_token) > large
    # 6 FLOPs a weight that multiplies, and attention over (T + 1) / 2 positions on average
    matrices = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 64 * plan_vocab(plan)
    attention = 2 * 6 * 2 * 64 * (32 + 1) / 2
    assert per_token == pytest.approx(6 * matrices + attention, rel=0.02)


def plan_vocab(plan):
    from trainwright.config import RunConfig
    from trainwright.data.module import build_tokenizer

    config = RunConfig.from_dict(plan.base)
    return build_tokenizer(config.data, config.tokenizer).vocab_size


def command(tmp_path, data, *more, out="out"):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return [sys.executable, "-m", "trainwright", "compare", str(path), *more, "--out", str(tmp_path / out)]


def test_killed_at_any_moment_the_same_command_goes_on(recipe, tmp_path):
    """SIGKILL in the middle of the second trial: the first is kept, the second ends as if never killed."""
    data = recipe(**{"model.dropout": 0.1, "evaluate.tokens": 512})
    more = ["--vary", "optimizer.lr=1e-3,3e-3", "--seeds", "1", "--budget", "tokens=64k"]
    more += ["--json", str(tmp_path / "f.json")]
    process = subprocess.Popen(command(tmp_path, data, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trials = tmp_path / "out" / "trials"
    second, deadline = None, time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        saved = [p.parents[3] for p in trials.glob("*/run/checkpoints/step-*/manifest.json")]
        unfinished = [folder for folder in saved if not (folder / "result.json").exists()]
        if list(trials.glob("*/result.json")) and unfinished:
            second = unfinished[0]
            break
        time.sleep(0.005)
    assert second is not None, "the second trial never saved"
    (worker,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while time.monotonic() < deadline and worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert time.monotonic() < deadline, "the worker outlived the comparison"
    assert not (second / "result.json").exists()
    (first,) = trials.glob("*/result.json")
    stamp = first.stat().st_mtime_ns
    done = subprocess.run(command(tmp_path, data, *more), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kept from before") == 1 and first.stat().st_mtime_ns == stamp
    assert "one seed: no interval" in done.stdout and "optimizer.lr=3e-3" in done.stdout
    resumed = json.loads((second / "result.json").read_text())
    steps = [json.loads(line)["step"] for line in (second / "run/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 250 and resumed["status"] == "ok" and resumed["weights_digest"]
    jsonschema.validate(json.loads((tmp_path / "f.json").read_text()), CONTRACT)
    # the same trial in one go, elsewhere
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "spec.json").write_bytes((second / "spec.json").read_bytes())
    assert main([str(elsewhere / "spec.json")]) == 0
    whole = json.loads((elsewhere / "result.json").read_text())
    assert [p[2] for p in whole["curve"]] == [p[2] for p in resumed["curve"]] and len(whole["curve"]) == 11


def test_no_trial_is_started_when_the_time_is_up(recipe, tmp_path):
    plan = make_plan(recipe(), varied={"optimizer": ["adamw", "sgd"]}, budget="tokens=1k", seeds=1)
    pool = Pool(TrialStore(tmp_path / "trials"), deadline=time.monotonic() - 1)
    with pytest.raises(TimeIsUp, match="2 trials are left"):
        pool.run([plan.trial(a, {}, 1.0, 7) for a in plan.arms])
    assert not (tmp_path / "trials").exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (out of memory?)"),
        ("raise SystemExit(3)", "the process ended with code 3 and left no result"),
    ],
)
def test_a_worker_that_dies_is_a_failed_trial_and_the_others_go_on(recipe, tmp_path, monkeypatch, code, said):
    plan = make_plan(recipe(), varied={"optimizer": ["adamw", "sgd"]}, budget="tokens=1k", seeds=1)
    first, second = (plan.trial(a, {}, 1.0, 7) for a in plan.arms)
    pool = Pool(TrialStore(tmp_path / "trials"), jobs=2)

    def start(trial, slot):
        folder = pool.store.folder(trial)
        folder.mkdir(parents=True)
        good = f'open({str(folder / "result.json")!r}, \'w\').write(\'{{"status": "ok", "val_loss": 1.5}}\')'
        return subprocess.Popen([sys.executable, "-c", code if trial is first else good], stdin=subprocess.PIPE)

    monkeypatch.setattr(pool, "_start", start)
    found = pool.run([first, second])
    assert found[first.key].status == "failed" and found[first.key].error.startswith(said)
    assert found[second.key].val_loss == 1.5
    assert pool.store.result(first) is None, "it is tried again by the next command"


def test_more_seeds_go_into_the_same_folder(recipe):
    plans = [make_plan(recipe(), varied={"optimizer": ["adamw", "sgd"]}, budget=b, seeds=s)
             for b, s in (("tokens=1k", 2), ("tokens=1k", 3), ("tokens=2k", 2))]  # fmt: skip
    folders = [default_out(None, plan) for plan in plans]
    assert folders[0] == folders[1] != folders[2] and folders[0].parent.as_posix() == "runs/compare"
    assert folders[0].name.startswith("quickstart-")
