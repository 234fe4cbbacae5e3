"""``trainwright tokenizer``: train, study, compare, as a person calls them."""

import argparse
import inspect
import json
from pathlib import Path

import pytest
import yaml

from trainwright.cli import run as main
from trainwright.data.tokenizers import load_tokenizer

LIBRARY = Path(inspect.getfile(argparse)).parent


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two "languages": a folder of files, and one file."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "code").mkdir()
    for path in sorted(LIBRARY.glob("*.py"))[:25]:
        (folder / "code" / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    (folder / "upper.txt").write_text((LIBRARY / "argparse.py").read_text().upper()[:60_000])
    return folder


def test_train(run, recipe, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe()))
    out = tmp_path / "tokenizer"
    code, printed, err = run(
        "tokenizer", "train", path, "tokenizer=morph_bpe", "tokenizer.vocab_size=270", "--out", out
    )
    assert code == 0, err
    assert "vocab_size" in printed and "270" in printed and "held-out bytes per token" in printed
    assert load_tokenizer(out).vocab_size == 270
    code, _, err = run("tokenizer", "train", path, "--out", out)
    assert code == 2 and "exists already" in err


def test_study_and_compare(run, texts, tmp_path):
    (tmp_path / "a.txt").write_text("def one\nreturn two\n")
    (tmp_path / "b.txt").write_text("DEF ONE\nRETURN TWO\n")
    arguments = ["--text", f"code={texts / 'code'}", "--text", f"upper={texts / 'upper.txt'}"]
    arguments += ["--parallel", f"code={tmp_path / 'a.txt'}", "--parallel", f"upper={tmp_path / 'b.txt'}"]
    arguments += ["--segmentation", "en", "--hidden", "256", "--layers", "4"]
    grid = ["--algorithm", "bpe", "--algorithm", "morph_bpe", "--vocab-size", "400", "--vocab-size", "600"]
    out = tmp_path / "study"
    code, printed, err = run("tokenizer", "study", *arguments, *grid, "--mono", "--out", out, "--json")
    assert code == 0, err
    found = json.loads(printed)
    names = [r["name"] for r in found["rows"]]
    assert names == [f"{m}-{a}-{v}" for m in ("code", "upper", "all") for a in ("bpe", "morph_bpe") for v in (400, 600)]
    assert found["best"] is None and found["dims"]["hidden"] == 256
    by = {r["name"]: r for r in found["rows"]}
    cost = {m: by[f"{m}-bpe-600"]["languages"]["upper"]["fertility"] for m in ("code", "all", "upper")}
    assert cost["upper"] < cost["all"] < cost["code"]
    assert by["code-bpe-400"]["parity"]["code"] == 1 and by["code-bpe-400"]["parity"]["upper"] > 1
    assert load_tokenizer(out / "all-bpe-600").vocab_size == 600

    code, printed, err = run("tokenizer", "compare", out / "all-bpe-600", out / "upper-bpe-400", *arguments)
    assert code == 0, err
    assert "upper-bpe-400" in printed and "1.000" in printed
    assert "Fertility and parity do not tell which model will be better" in printed


def test_study_with_a_proxy(run, texts, recipe, tmp_path):
    path = tmp_path / "proxy.yaml"
    path.write_text(yaml.safe_dump(recipe(**{"train.steps": 2, "train.seq_len": 64})))
    code, printed, err = run(
        "tokenizer", "study", "--text", f"upper={texts / 'upper.txt'}", "--algorithm", "bpe", "--vocab-size", 300,
        "--vocab-size", 600, "--proxy", path, "--proxy-bytes", 6000, "--out", tmp_path / "study", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(printed[printed.index("{") :])
    small, large = found["rows"]
    assert 0 < small["bits_per_byte"] != large["bits_per_byte"]
    assert found["best"] == min(found["rows"], key=lambda r: r["bits_per_byte"])["name"]
    # equal text, not equal tokens
    steps = [_last_step(tmp_path / "study" / "proxy" / r["name"]) for r in found["rows"]]
    assert steps[0] / steps[1] == pytest.approx(large["bytes_per_token"] / small["bytes_per_token"], rel=0.15)


def _last_step(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "--text", "nothing"], "--text='nothing': should look like en=PATH"),
        (["study", "--text", "en=a", "--text", "en=b"], "en is given twice"),
        (["study", "--text", "en={texts}/code", "--algorithm", "bpee"], "did you mean 'bpe'"),
        (["study", "--text", "en={texts}/code", "--segmentation", "xx"], "neither a shipped segmentation"),
        (["study", "--text", "en={texts}/none"], "none"),
        (["compare", "{texts}/none", "--text", "en={texts}/code"], "is not a folder"),
        (["study", "--text", "en={texts}/code", "--parallel", "en={texts}/none"], "cannot be read"),
        (["study", "--text", "en={texts}/code", "--vocab-size", "300", "--algorithm", "bpe",
          "--parallel", "en={texts}/upper.txt", "--parallel", "de={texts}/code/abc.txt"], "parity is of the same"),
    ],
)  # fmt: skip
def test_bad_input(run, texts, tmp_path, arguments, message):
    code, _, err = run("tokenizer", *(a.format(texts=texts) for a in arguments), *(
        ["--out", tmp_path / "study"] if arguments[0] == "study" else []
    ))  # fmt: skip
    assert code == 2 and message in err, err
