"""``trainwright data scorer``, ``filter --scorer``, and the stages by name."""

import json

import pytest
from real_text import documents, two_sources

from trainwright.cli import run
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import write_documents


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    texts, _, test, _ = two_sources(200)
    write_documents(documents(texts[:100], "prose"), folder / "good")
    write_documents(documents(texts[100:], "code"), folder / "bad")
    mixed = documents(test[:40], "prose", 500) + documents(test[-40:], "code", 500)
    write_documents([d.with_metadata(edu_score=i % 6) for i, d in enumerate(mixed)], folder / "mixed")
    return folder


def test_scorer_and_filter(corpora, tmp_path, capsys):
    out = tmp_path / "model"
    sides = ["--positive", str(corpora / "good"), "--negative", str(corpora / "bad")]
    assert run(["data", "scorer", *sides, "--out", str(out), "--dim", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"]["positive"]["documents"] == 100 and found["auc"] > 0.9
    mixed, kept = str(corpora / "mixed"), tmp_path / "kept"
    assert run(["data", "filter", mixed, "--out", str(kept), "--scorer", str(out), "--threshold", "0.6"]) == 0
    statistics = json.loads((kept / "statistics.json").read_text())
    quality = statistics["stages"][-1]
    assert quality["sources"]["prose"]["kept_share"] > 0.8 > 0.2 > quality["sources"]["code"]["kept_share"]
    capsys.readouterr()
    for bad in (["--threshold", "0.5"], ["--scorer", str(out), "--threshold", "1.0"], ["--scorer", "nothing"]):
        assert run(["data", "filter", mixed, "--out", str(tmp_path / "no"), *bad]) == 2
        assert "threshold" in (said := capsys.readouterr().err) or "model" in said


def test_regressor(corpora, tmp_path, capsys):
    out = ["--out", str(tmp_path / "r"), "--dim", "4", "--json"]
    assert run(["data", "scorer", str(corpora / "mixed"), *out]) == 0
    assert json.loads(capsys.readouterr().out)["trained_on"] > 60
    assert run(["data", "scorer", str(corpora / "mixed"), *out]) == 2 and "not empty" in capsys.readouterr().err
    for bad in ([], [str(corpora / "mixed"), "--positive", "x"], ["--positive", "x"]):
        assert run(["data", "scorer", *bad, "--out", str(tmp_path / "n")]) == 2
        assert "positive" in capsys.readouterr().err


def test_stages_by_name(tmp_path):
    names = [
        {"normalize_chinese": {"width": True}},
        {"quality": {"model": "judges:length", "threshold": 10}},
        "diversity",
    ]
    assert [s.name for s in make_stages(names)] == ["normalize_chinese", "quality", "diversity"]
