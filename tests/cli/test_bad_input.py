"""Everything a user can get wrong gives exit code 2, one line that names it and the way out, and no work is done."""

import json

import pytest
import yaml

from trainwright import RunConfig, cli
from trainwright.train import Trainer


@pytest.fixture
def train(recipe, tmp_path, capsys):
    def call(*arguments, **changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(**changes)))
        code = cli.run(["train", str(path), *arguments])
        return code, capsys.readouterr().err

    return call


CASES = {
    "unknown key": ({"optimiser": {"name": "adamw"}}, "did you mean 'optimizer'"),
    "unknown method": ({"optimizer": "adamwx"}, "optimizer.name='adamwx': no such optimizer; did you mean 'adamw'"),
    "wrong type": ({"train.steps": "many"}, "train.steps='many'"),
    "negative size": ({"model.dim": -64}, "model.dim=-64"),
    "heads not dividing width": ({"model.n_heads": 5}, "model.n_heads=5: does not divide dim=64"),
    "seq_len beyond the model's limit": ({"model.max_seq_len": 16}, "model.max_seq_len=16: seq_len=32 is beyond it"),
    "missing data": ({"data.sources": [{"name": "text", "path": "/nowhere"}]}, "/nowhere"),
    "no data": ({"data.sources": []}, "data.sources=[]: is empty; name at least one source"),
    "device": ({"run.device": "cuda:7"}, "run.device='cuda:7': no CUDA device"),
    "fewer rows than ranks": ({"train.global_batch_tokens": 0}, "train.global_batch_tokens=0"),
    "batch and length": ({"train.global_batch_tokens": 250}, "use 224 or 256"),
    "degrees": ({"parallel.dp_shard": 3}, "parallel.dp_shard=3: does not divide the world size 1"),
    "degrees of layers": ({"parallel.tp": 2, "parallel.cp": 2}, "cp=2 x tp=2 = 4 does not divide the world size 1"),
    "tokenizer folder": ({"tokenizer": {"name": "hf", "path": "/nowhere"}}, "/nowhere"),
    "model folder": ({"model": {"name": "pretrained", "path": "/nowhere"}}, "/nowhere"),
    "vocabulary": ({"model.vocab_size": 100}, "model.vocab_size=100: is smaller than the tokenizer's"),
    "two lengths": ({"train.tokens": 1000}, "one of steps, tokens, epochs"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_recipe(train, tmp_path, case):
    changes, says = CASES[case]
    code, err = train(**changes)
    assert code == 2 and says in err, err
    assert "Traceback" not in err and len(err.strip().splitlines()) <= 3
    assert not list((tmp_path / "runs").glob("*/metrics.jsonl"))


def test_empty_and_binary_and_malformed_files(train, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"ab\x00\xff\xfe" * 100)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "fine"}) + '\n{"text": "cut\n')
    for path, name, says in [
        (tmp_path / "empty.txt", "text", "empty.txt"),
        (tmp_path / "binary.txt", "text", "binary.txt"),
        (rows, "jsonl", "rows.jsonl:2"),
    ]:
        code, err = train(**{"data.sources": [{"name": name, "path": str(path)}]})
        assert code == 2 and says in err.replace(", line ", ":"), err
    # A failed attempt leaves no run behind that would stand in the way of the mended recipe.
    assert train(**{"train.steps": 1})[0] == 0


def test_world_size(train):
    code, err = train("--nproc", "2", **{"parallel.dp_shard": 3})
    assert code == 2 and "dp_shard" in err and "world size 2" in err


def test_existing_run_and_export_target(train, recipe, tmp_path, capsys):
    data = recipe(**{"train.steps": 1})
    Trainer(RunConfig.load(data)).fit()
    code, err = train(**{"train.steps": 1})
    assert code == 2 and "--resume" in err and "run.overwrite=true" in err
    target = tmp_path / "out"
    target.mkdir()
    code = cli.run(["export", str(RunConfig.load(data).run_dir), str(target)])
    err = capsys.readouterr().err
    assert code == 2 and str(target) in err


def test_resume_with_another_model_or_tokenizer(train, recipe):
    data = recipe(**{"train.steps": 1})
    Trainer(RunConfig.load(data)).fit()
    run_dir = str(RunConfig.load(data).run_dir)
    code, err = train("--resume", run_dir, **{"model.n_layers": 3})
    assert code == 2 and "model.n_layers was 2, is 3" in err
    code, err = train("--resume", run_dir, **{"tokenizer": {"name": "bpe", "vocab_size": 300}})
    assert code == 2 and "tokenizer.name was 'bytes', is 'bpe'" in err


def test_resume_of_nothing(capsys, tmp_path):
    code = cli.run(["train", "--resume", str(tmp_path)])
    assert code == 2 and "is not a run" in capsys.readouterr().err


def test_tokenizer_larger_than_the_pretrained_model(train, recipe, tmp_path):
    data = recipe(**{"train.steps": 1})
    Trainer(RunConfig.load(data)).fit()
    out = tmp_path / "hf"
    assert cli.run(["export", str(RunConfig.load(data).run_dir), str(out)]) == 0
    code, err = train(
        **{
            "run.name": "more",
            "model": {"name": "pretrained", "path": str(out)},
            "tokenizer": {"name": "bpe", "vocab_size": 270},
        }
    )
    assert code == 2 and "259" in err and "tokenizer" in err, err


def test_full_disk_of_the_run_dir_is_named(train, tmp_path):
    (tmp_path / "blocked").write_text("a file")
    code, err = train(f"run.dir={tmp_path / 'blocked' / 'runs'}")
    assert code == 2 and "run.dir" in err and "writable" in err
