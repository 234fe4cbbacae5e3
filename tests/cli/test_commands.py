"""Commands in this process; one subprocess where the start itself is the matter."""

import json
import math
import signal
import subprocess
import sys
from typing import ClassVar

import pytest

from trainwright import __version__, cli
from trainwright.cli.app import split_arguments
from trainwright.core.errors import CheckpointError, ConfigError, Interrupted, StoppedByMonitor
from trainwright.core.registry import SLOTS, methods


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


# -- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, recipe, overrides",
    [
        ([], None, []),
        (["a.yaml"], "a.yaml", []),
        (["run.dir=/x"], None, ["run.dir=/x"]),
        (["a.yaml", "x=1", "y.z="], "a.yaml", ["x=1", "y.z="]),
    ],
)
def test_recipe_and_overrides_are_told_apart(arguments, recipe, overrides):
    found, rest = split_arguments(arguments)
    assert (str(found) if found else None, rest) == (recipe, overrides)


def test_a_recipe_whose_name_has_an_equals_sign(tmp_path):
    path = tmp_path / "lr=1.yaml"
    path.write_text("{}")
    assert split_arguments([str(path)]) == (path, [])


@pytest.mark.parametrize(
    "arguments", [["train", "a.yaml", "foo"], ["config", "check", "a.yaml", "b.yaml"], ["eval", "runs/x", "foo"]]
)
def test_an_override_without_equals_sign_says_the_way_out(run, arguments):
    code, _out, err = run(*arguments)
    assert code == 2 and err.startswith("error: override") and "key=value" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["tain"], "train"),
        (["train", "--nproc", "many"], "--nproc"),
        (["train", "--nproc", "0"], "--nproc"),
        (["train", "--resume"], "--resume"),
        (["methods", "no-such-thing"], "valid names"),
        (["methods", "tensorbord"], "did you mean 'tensorboard'"),
        (["report", "/nonexistent"], "not a run"),
        (["export", "/nonexistent", "/tmp/x"], "not a run"),
        (["eval", "/nonexistent"], "not a run"),
        (["generate", "/nonexistent", "--prompt", "x"], "neither a run"),
        (["generate", "/nonexistent", "--prompt", "x", "--system", "y"], "--chat"),
        (["train", "/nonexistent.yaml"], "trainwright init"),
        (["train", "--resume", "/nonexistent"], "not a run"),
        (["train", "modle.size=1m"], "did you mean 'model'"),
        (["config", "check", "train.steps=-3"], "train.steps=-3"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(run, arguments, said):
    code, _out, err = run(*arguments)
    assert code == 2 and said in err and "Traceback" not in err and err.lower().count("error: ") == 1, err


# -- how training ends ------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(monkeypatch):
    """A Trainer that ends as it is told, with what it was given."""
    import trainwright.train

    class Fake:
        end: ClassVar = {"step": 3, "loss": 1.25, "val_loss": 1.5, "run_dir": "runs/x"}
        seen = None

        def __init__(self, config, resume=False):
            Fake.seen = (config, resume)

        def fit(self):
            if isinstance(Fake.end, BaseException):
                raise Fake.end
            return Fake.end

    monkeypatch.setitem(vars(trainwright.train), "Trainer", Fake)
    return Fake


@pytest.mark.parametrize(
    "error, code, text",
    [
        (ConfigError("is negative", key="optimizer.lr", value=-1), 2, "error: optimizer.lr=-1: is negative\n"),
        (
            CheckpointError(
                "step-00000010 is damaged [x]; resume from step-00000005 instead, which is whole " + "x" * 200
            ),
            2,
            None,
        ),
        (
            StoppedByMonitor("stopped at step 7 by loss_spike: loss 9"),
            3,
            "stopped: stopped at step 7 by loss_spike: loss 9\n",
        ),
        (Interrupted("interrupted; saved step 7"), 130, "interrupted; saved step 7\n"),
        (KeyboardInterrupt(), 130, "interrupted; what came after the last checkpoint is not saved\n"),
    ],
)
def test_exit_codes(run, trainer, error, code, text):
    trainer.end = error
    got, out, err = run("train")
    assert got == code and out == "" and err == (text if text is not None else f"error: {error}\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_process_alone_says_what_ended_its_set_up(run, trainer, monkeypatch, ranks):
    """A rank that its launcher ends dies of the signal, by which it is told from one that failed."""
    before, seen = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(trainer, "__init__", lambda *a, **k: seen.append(signal.getsignal(signal.SIGTERM)))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert run("train")[0] == 0
    assert (seen[0] == before) == (ranks > 1) and signal.getsignal(signal.SIGTERM) == before


def test_a_fault_of_ours_keeps_its_traceback(run, trainer):
    trainer.end = RuntimeError("bug")
    with pytest.raises(RuntimeError, match="bug"):
        run("train")


def test_train_gives_the_recipe_and_says_how_it_went(run, trainer):
    code, out, _err = run("train", "train.steps=3", "run.name=x", "optimizer.lr=0.25")
    config, resume = trainer.seen
    assert (code, resume) == (0, False) and config.train.steps == 3 and config.optimizer.lr == 0.25
    assert out == "done: step 3  loss 1.2500  validation loss 1.5000\nruns/x\n"


def test_resume_stays_in_the_runs_folder(run, trainer, tmp_path):
    from trainwright.config import RunConfig

    folder = tmp_path / "moved here"
    folder.mkdir()
    (folder / "config.yaml").write_text(RunConfig.load(None, ["run.name=old", "train.steps=5"]).to_yaml())
    assert run("train", "--resume", folder, "train.steps=9", "run.dir=/elsewhere")[0] == 0
    config, resume = trainer.seen
    assert resume and config.run_dir.resolve() == folder.resolve() and config.train.steps == 9
    recipe = tmp_path / "r.yaml"
    recipe.write_text("run: {name: other}\ntrain: {steps: 77}\n")
    assert run("train", recipe, "--resume", folder)[0] == 0
    config, resume = trainer.seen
    assert resume and config.run_dir.resolve() == folder.resolve() and config.train.steps == 77


def test_nproc_checks_before_it_starts_and_passes_arguments_on(run, monkeypatch, tmp_path):
    from trainwright.parallel import launch

    calls = []

    def fake(nproc, arguments, *, min_nproc, machines, restarts, legal, patience, say):
        assert (min_nproc, machines, restarts) == (2, None, 0) and legal(2) and not legal(17)
        assert patience > 600  # the others have that long to notice a rank that hangs
        calls.append((nproc, arguments))
        return launch.Outcome(3, ("stopped at step 1",))

    monkeypatch.setattr(launch, "launch", fake)
    assert run("train", "--nproc", "2", "optimizer.lr=-1")[0] == 2 and not calls
    code, _, err = run("train", "--nproc", "2", "parallel.dp_shard=3")
    assert code == 2 and "dp_shard" in err and not calls
    recipe = tmp_path / "r.yaml"
    recipe.write_text("run: {name: x}\n")
    code, _, err = run("train", recipe, "--nproc", "2", "train.steps=3")
    assert code == 3 and err == "stopped: stopped at step 1\n"
    assert calls == [(2, ["train", str(recipe), "train.steps=3"])]
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _out, err = run("train", recipe, "--nproc", "2")
    assert code == 2 and "torchrun" in err and len(calls) == 1


# -- the other commands -----------------------------------------------------------------------------------------


def test_methods_json_is_the_contract(run):
    code, out, _err = run("methods", "--json")
    found = json.loads(out)
    assert code == 0 and len(found) == len(methods())
    assert all(list(m) == ["slot", "name", "paper", "seed_id", "summary"] for m in found)
    assert {m["slot"] for m in found} <= set(SLOTS) and all(m["summary"] for m in found)


def test_methods_of_a_slot_and_search(run):
    found = json.loads(run("methods", "monitor", "--json")[1])
    assert {m["name"] for m in found} >= {"non_finite", "loss_spike"} and {m["slot"] for m in found} == {"monitor"}
    assert json.loads(run("methods", "monitors", "--json")[1]) == found
    assert "loss_spike" in run("methods", "spike")[1]


@pytest.mark.parametrize("method", methods(), ids=lambda m: f"{m.slot}.{m.name}")
def test_every_method_explains_itself(run, method):
    code, out, _err = run("methods", f"{method.slot}.{method.name}")
    assert code == 0 and method.summary.split()[0] in out and method.paper in out
    for name, field in method.config.model_fields.items():
        if name != "name":
            assert (field.alias or name) in out
            assert field.description, f"{method.slot}.{method.name}.{name} has no description"


def test_config_show_is_whole_and_loads_again(run, tmp_path):
    from trainwright.config import RunConfig

    code, out, _err = run("config", "show", "optimizer.lr=0.125")
    path = tmp_path / "shown.yaml"
    path.write_text(out)
    assert code == 0 and RunConfig.load(path) == RunConfig.load(None, ["optimizer.lr=0.125"])


def test_config_schema_is_json(run):
    code, out, _err = run("config", "schema")
    assert code == 0 and "optimizer" in json.loads(out)["properties"]


def test_init_writes_a_recipe_that_checks_and_refuses_to_replace(run, tmp_path):
    from trainwright.config import RunConfig

    path = tmp_path / "new" / "mine.yaml"
    code, out, err = run("init", path)
    assert code == 0 and "trainwright train" in out
    code, out, err = run("config", "check", path)
    assert code == 0 and "runs/mine" in out, err
    assert RunConfig.load(path).run.name == "mine"
    code, out, err = run("init", path)
    assert code == 2 and "--force" in err
    assert run("init", path, "--force")[0] == 0


def test_init_for_a_task_that_it_does_not_know(run, tmp_path):
    code, _, err = run("init", tmp_path / "x.yaml", "--for", "dpo")
    assert code == 2 and "'dpo'" in err and "pretrain, continue, sft, lora" in err
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("task", ["pretrain", "continue", "sft", "lora"])
def test_every_commented_default_is_one(run, tmp_path, task):
    """Taking the mark off any one commented line gives a recipe that still checks."""
    import yaml

    from trainwright.cli.template import text
    from trainwright.config import RunConfig

    lines = text("mine", task).splitlines()
    assert RunConfig.from_dict(yaml.safe_load("\n".join(lines))).objective.name == (
        "sft" if task in ("sft", "lora") else "next_token"
    )
    tried = 0
    for i, line in enumerate(lines):
        bare = line.replace("# ", "", 1)
        key = bare.split(":")[0].strip()
        if not line.lstrip().startswith("# ") or not key.isidentifier():
            continue
        if not line.startswith("  ") and key not in RunConfig.model_fields:
            continue
        path = tmp_path / "t.yaml"
        path.write_text("\n".join([*lines[:i], bare, *lines[i + 1 :]]))
        RunConfig.load(path)
        tried += 1
    assert tried > 20


def test_doctor_measures_and_advises(run, monkeypatch, tmp_path):
    from trainwright.core import hardware

    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    hardware._known_peaks.cache_clear()
    monkeypatch.setattr(hardware, "_measure_matmul", lambda device, dtype, seconds: 1e9 if "32" in str(dtype) else 1e7)
    found = json.loads(run("doctor", "--json")[1])
    assert found["matmul_flops"]["cpu"] == {"fp32": 1e9, "bf16": 1e7, "fp16": 1e7}
    assert found["backends"]["gloo"] and {f["package"] for f in found["features"]} >= {"wandb", "trackio", "lm_eval"}
    assert any("bf16 runs at 1 % of fp32" in line for line in found["advice"])
    code, out, _err = run("doctor")
    assert code == 0 and "1G FLOP/s" in out and f"trainwright {__version__}" in out
    hardware._known_peaks.cache_clear()


def test_version(run):
    assert run("--version")[:2] == (0, f"trainwright {__version__}\n")


def test_a_run_through_every_command(run, recipe, tmp_path):
    import yaml

    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe(**{"train.steps": 3})))
    code, out, err = run("train", path)
    assert code == 0 and "done: step 3" in out, err
    folder = tmp_path / "runs" / "t"
    code, out, err = run("train", path)
    assert code == 2 and "--resume" in err and "overwrite" in err
    code, out, err = run("train", "--resume", folder, "train.steps=5")
    assert code == 0 and "done: step 5" in out, err
    code, out, err = run("eval", folder, "--json")
    assert code == 0 and math.isfinite(json.loads(out)["val_bits_per_byte"])
    code, out, err = run("eval", folder, "--checkpoint", "3", "--tokens", "64")
    assert code == 0 and "val_loss" in out
    code, out, err = run("generate", folder, "--prompt", "alpha", "--max-new-tokens", "8", "--seed", "1")
    assert code == 0 and out.startswith("alpha") and out.endswith("\n")
    assert run("generate", folder, "--prompt", "alpha", "--max-new-tokens", "8", "--seed", "1")[1] == out
    code, out, err = run("generate", folder, "--chat", "--prompt", "hi")
    assert code == 2 and "no chat template" in err
    code, out, err = run("export", folder, tmp_path / "hf")
    assert code == 0 and (tmp_path / "hf" / "config.json").exists()
    code, out, err = run("export", folder, tmp_path / "hf")
    assert code == 2 and "hf" in err
    code, out, err = run("report", folder)
    assert code == 0 and (folder / "report.html").exists()


def test_help_imports_nothing_heavy():
    """So that it is instant: benchmarks/overhead.py."""
    code = (
        "import sys; from trainwright.cli import run; run(['--help'])\n"
        "heavy = {'torch', 'numpy', 'plotly', 'yaml', 'trainwright.config', 'trainwright.train'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


# -- what is said of missing options ------------------------------------------------------------------------------


def test_compare_names_the_options_that_it_lacks(run, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train: {steps: 2}\n")
    code, _out, err = run("compare", recipe)
    assert code == 2 and "--vary KEY=A,B" in err and "--arm NAME:KEY=VALUE" in err


@pytest.mark.parametrize("given", [(), ("--world", 16)])
def test_plan_comm_names_the_number_of_ranks(run, tmp_path, given):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("train: {steps: 2, seq_len: 64, global_batch_tokens: 128}\n")
    code, _out, err = run("plan", "comm", recipe, *given)
    err = err.replace("\n", " ")
    assert code == 2 and (f"for {given[1]} ranks; --world" if given else "for 8 ranks, the default; --world") in err, (
        err
    )
    assert run("plan", "comm", recipe, "--world", 2)[0] == 0


def test_warnings_of_ours_are_messages(capsys, monkeypatch):
    import logging
    import warnings

    from trainwright.cli.output import log_to_terminal
    from trainwright.train.progress import terminal

    others: list[str] = []
    logger = logging.getLogger("trainwright")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *where: others.append(str(message)))
        terminal.cache_clear()
        log_to_terminal()
        log_to_terminal()  # once is enough
        warnings.warn_explicit("few ids", UserWarning, "/x/trainwright/data/module.py", 142)
        warnings.warn_explicit("not ours", UserWarning, "/x/torch/nn.py", 7)
        warnings.warn_explicit("old", DeprecationWarning, "/x/trainwright/a.py", 7)
    terminal.cache_clear()
    err = capsys.readouterr().err
    assert "WARNING  few ids" in err and err.count("few ids") == 1 and "module.py" not in err
    assert others == ["not ours", "old"]
