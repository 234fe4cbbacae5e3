import json

import pytest
import yaml

from trainwright import RunConfig
from trainwright.config.run_config import apply_override, parse_yaml, read_recipe
from trainwright.core.errors import ConfigError


def test_quickstart_is_the_default():
    config = RunConfig.load()
    assert str(config.run_dir) == "runs/quickstart" and config.data.sources[0].name == "python_stdlib"


def test_resolved_recipe_round_trips(recipe):
    config = RunConfig.load(recipe())
    again = RunConfig.from_dict(yaml.safe_load(config.to_yaml()))
    assert again.to_dict() == config.to_dict()


def test_numbers_as_people_write_them():
    data = parse_yaml("a: 1e-3\nb: 5\nc: 1.5\nd: 2M\ne: .5\nf: '1e-3'\ng: 1_000\nh: 1.2.3", "x")
    assert data == {"a": 1e-3, "b": 5, "c": 1.5, "d": "2M", "e": 0.5, "f": "1e-3", "g": 1000, "h": "1.2.3"}
    assert (
        RunConfig.load({"train": {"tokens": "2M", "seq_len": 128, "global_batch_tokens": 1024}}).train.tokens
        == 2_000_000
    )


def test_overrides_reach_into_methods_and_lists(recipe):
    config = RunConfig.load(recipe(), ["optimizer.lr=0.5", "optimizer.betas=[0.8, 0.9]", "data.sources.0.weight=2"])
    assert config.optimizer.lr == 0.5 and config.optimizer.betas == (0.8, 0.9) and config.data.sources[0].weight == 2


def test_choosing_another_method_drops_the_old_settings(recipe):
    config = RunConfig.load(recipe(), ["optimizer=sgd"])
    assert config.optimizer.name == "sgd"
    data = {"optimizer": {"name": "adamw", "betas": [0.9, 0.95]}}
    apply_override(data, "optimizer.name=sgd")
    assert data == {"optimizer": {"name": "sgd"}}


@pytest.mark.parametrize(
    "override, says",
    [
        ("optimiser.lr=1", "did you mean 'optimizer'"),
        ("optimizer.learning_rate=1", "unknown key.*'lr'|unknown key"),
        ("lr=1", "did you mean optimizer.lr"),
        ("seq_len=4", "did you mean train.seq_len"),
        ("optimizer=adamv", "did you mean 'adamw'"),
        ("optimizer.lr=-1", r"optimizer\.lr=-1: should be greater than 0"),
        ("optimizer.lr=fast", r"optimizer\.lr='fast'"),
        ("train.steps=0", r"train\.steps=0"),
        ("train.steps=many", r"train\.steps='many'"),
        ("train.tokens=1000", "one of steps, tokens, epochs"),
        ("train.global_batch_tokens=100", "not a multiple of seq_len=32; use 96 or 128"),
        ("run.name=a/b", "plain folder name"),
        ("run.device=tpu", "should be auto, cpu"),
        (
            "log.loggers=[{name: tensorbord}]",
            r"log\.loggers\.0\.name='tensorbord': no such logger; did you mean 'tensorboard'",
        ),
        ("data.sources.3.weight=1", "is a list of 1"),
        ("data.sources.0.paht=x", r"data\.sources\.0\.paht: unknown key; did you mean 'path'"),
        ("model.n_layers=-2", r"model\.n_layers=-2"),
        ("monitors=[{name: loss_spike, windo: 3}]", r"monitors\.0\.windo: unknown key; did you mean 'window'"),
        ("clip.max_norm=[1", "not valid YAML"),
        ("train", "should look like key=value"),
        ("train=5", "should be a mapping"),
    ],
)
def test_wrong_input_is_one_clear_line(recipe, override, says):
    with pytest.raises(ConfigError, match=says) as error:
        RunConfig.load(recipe(), [override])
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_duplicate_key_in_a_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("run: {name: a}\ntrain: {steps: 3}\nrun: {name: b}\n")
    with pytest.raises(ConfigError, match="run: is given twice"):
        RunConfig.load(path)


def test_missing_recipe_file(tmp_path):
    with pytest.raises(ConfigError, match="no recipe at"):
        RunConfig.load(tmp_path / "none.yaml")


def test_schema_lists_every_method_and_accepts_the_quickstart():
    jsonschema = pytest.importorskip("jsonschema")
    schema = RunConfig.json_schema()
    text = json.dumps(schema)
    assert '"optimizer_muon"' in text and '"slot_source"' in text
    quick = read_recipe(None)
    jsonschema.validate(quick, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"optimizer": {"name": "adamw", "lr": "x"}}, schema)


def test_declared_conflicts_and_requirements_are_refused(recipe, monkeypatch):
    from trainwright.core.registry import get

    info = get("optimizer", "adamw")
    monkeypatch.setitem(info.conflicts, "clip.global_norm", "it needs raw gradients; use clip=none")
    with pytest.raises(
        ConfigError, match="optimizer=adamw cannot be combined with clip=global_norm: it needs raw gradients"
    ):
        RunConfig.load(recipe())
    monkeypatch.delitem(info.conflicts, "clip.global_norm")
    monkeypatch.setitem(info.requires, "average", "it reads the averaged weights")
    with pytest.raises(ConfigError, match="optimizer=adamw needs average: it reads"):
        RunConfig.load(recipe())
