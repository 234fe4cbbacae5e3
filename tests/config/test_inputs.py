"""What a recipe reads is looked for before any work: sources, model, tokenizer."""

import json

import pytest
import yaml

from trainwright import RunConfig, Trainer, cli
from trainwright.config.inputs import check_inputs, look
from trainwright.core.errors import ConfigError, DataError, InputError


@pytest.fixture
def check(recipe, tmp_path, capsys):
    def call(*arguments, **changes):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(recipe(**changes)))
        code = cli.run(["config", "check", str(path), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_says_what_it_found(check, corpus, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "x" * 100}) + "\n")
    made = {"name": "tint", "samples": 10}
    code, out, err = check(
        **{"data.sources": [{"name": "text", "path": corpus}, {"name": "jsonl", "path": str(rows)}, made]}
    )
    lines = out.splitlines()
    assert code == 0, err
    assert "valid; it would write to" in lines[0]
    assert f"data.sources.0 (text:{corpus}): 40 files, " in lines[1] and "first document doc000.txt" in lines[1]
    assert "1 file, 113 bytes; first document rows.jsonl:1" in lines[2]
    assert "data.sources.2 (tint" in lines[3] and "not looked at" in lines[3]


MISSING = {
    "source": ({"data.sources.0.path": "nothere"}, "data.sources.0.path: nothere does not exist"),
    "glob": ({"data.sources.0.path": "no/*.txt"}, "data.sources.0.path: no file matches the glob"),
    "model": ({"model": {"name": "pretrained", "path": "models/x"}}, "model.path='models/x': does not exist"),
    "model of transformers": ({"model": {"name": "hf", "path": "/x"}}, "model.path='/x': does not exist"),
    "hub id": (
        {"model": {"name": "pretrained", "path": "Qwen/Qwen3-0.6B"}},
        "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`",
    ),
    "home": ({"model": {"name": "pretrained", "path": "~/x"}}, "write the folder in full"),
    "tokenizer": ({"tokenizer": {"name": "hf", "path": "/x"}}, "tokenizer.path='/x': is not a folder"),
}


@pytest.mark.parametrize("case", MISSING)
def test_missing_inputs_are_named_by_key(recipe, check, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    changes, says = MISSING[case]
    data = recipe(**{k: v for k, v in changes.items() if "." not in k})
    if "data.sources.0.path" in changes:
        data["data"]["sources"][0]["path"] = changes["data.sources.0.path"]
    for work in (look, check_inputs, Trainer):
        with pytest.raises(InputError) as error:
            work(RunConfig.load(data))
        assert says in str(error.value)
    code, out, err = check(*[f"{k}={json.dumps(v)}" for k, v in changes.items()])
    assert code == 2 and says in err.replace("\n", " ") and "valid" not in out
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def test_the_second_of_two_sources_is_the_one_named(recipe, corpus):
    data = recipe(**{"data.sources": [{"name": "text", "path": corpus}, {"name": "text", "path": corpus + "x"}]})
    with pytest.raises(DataError, match=r"data\.sources\.1\.path: .*; did you mean '"):
        check_inputs(RunConfig.load(data))


def test_a_model_folder_without_config_or_tokenizer(recipe, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    config = RunConfig.load({**recipe(), "tokenizer": None, "model": {"name": "pretrained", "path": str(folder)}})
    with pytest.raises(ConfigError, match=r"model\.path=.*is not a Hugging Face model folder: it has no config\.json"):
        check_inputs(config)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer: .* holds no tokenizer"):
        check_inputs(config)
    other = RunConfig.load({**recipe(), "model": {"name": "pretrained", "path": str(folder / "config.json")}})
    with pytest.raises(ConfigError, match="is a file"):
        check_inputs(other)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"name": "jsonl", "text_key": "txt"}, "data.sources.0: {path}:1: no field 'txt'; available fields: text"),
        ({"name": "chat"}, "data.sources.0: {path}:1: "),
    ],
)
def test_the_first_row_is_read(recipe, tmp_path, source, says):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x"}\n')
    config = RunConfig.load(recipe(**{"data.sources": [{**source, "path": str(path)}]}))
    check_inputs(config)  # which looks at no row
    with pytest.raises(DataError) as error:
        look(config)
    assert says.format(path=path) in str(error.value)


def test_two_columns_and_a_saved_dataset(recipe, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))
    config = RunConfig.load(recipe(**{"data.sources": [{"name": "hf", "path": str(tmp_path / "saved")}]}))
    (line,) = look(config)
    assert "files" in line and "first document train:0" in line


# -- the run's name -----------------------------------------------------------------------------------------------


def test_a_recipe_without_a_name_gives_its_own(tmp_path):
    path = tmp_path / "my sft.v2.yaml"
    path.write_text("train: {steps: 3}\n")
    assert str(RunConfig.load(path).run_dir) == "runs/my sft.v2"
    assert str(RunConfig.load(str(path), ["run.dir=/x"]).run_dir) == "/x/my sft.v2"
    assert str(RunConfig.load(path, ["run.name=other"]).run_dir) == "runs/other"
    path.write_text("run: {seed: 3}\n")
    config = RunConfig.load(path)
    assert str(config.run_dir) == "runs/my sft.v2" and config.run.seed == 3
    path.write_text("run:\n")
    assert str(RunConfig.load(path).run_dir) == "runs/my sft.v2"
    path.write_text("run: {name: own}\n")
    assert str(RunConfig.load(path).run_dir) == "runs/own"
    assert str(RunConfig.load().run_dir) == "runs/quickstart" and RunConfig.load({}).run.name == "quickstart"
    path.write_text("run: 3\n")
    with pytest.raises(ConfigError, match="run=3"):
        RunConfig.load(path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.lr=fast", "optimizer.lr='fast': should be a number; the default is 0."),
        ("train.steps=many", "train.steps='many': should be a whole number"),
        ("train.steps=0", "train.steps=0: should be greater than 0"),
        ("train.seq_len=1.5", "train.seq_len=1.5: should be a whole number; the default is 512"),
        ("data.shuffle=perhaps", "data.shuffle='perhaps': should be true or false; the default is true"),
        ("model.size=3m", "model.size='3m': no such size; sizes are 1m, 2m, 5m, 10m"),
    ],
)
def test_wrong_values_in_the_words_of_a_recipe(override, says):
    with pytest.raises(ConfigError) as error:
        RunConfig.load(None, [override])
    assert says in str(error.value)
