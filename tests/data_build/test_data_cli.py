"""``trainwright data`` from its arguments to its files."""

import json
import random

import pytest
from made_corpus import near_copy, text

from trainwright.cli import run
from trainwright.cli.data import parse_stage, read_stages
from trainwright.core.errors import ConfigError
from trainwright.data.build.cleaning import Language
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import open_reader
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import Writer, write_documents


@pytest.fixture
def raw(tmp_path):
    rng = random.Random(0)
    documents = []
    for i in range(40):
        body = text(rng, 80)
        documents.append(Document(body, f"{i}", "web", licence="cc0" if i % 2 else "gpl", metadata={"score": i}))
        if i % 4 == 0:
            documents.append(Document(near_copy(body, rng, 1), f"near{i}", "web", licence="cc0", metadata={"score": 1}))
        if i % 10 == 0:
            documents.append(Document(body, f"exact{i}", "web", licence="cc0", metadata={"score": 0}))
    documents.append(Document("<script>alert('too short')</script>", "short", "web", licence="cc0"))
    write_documents(documents, tmp_path / "raw")
    return tmp_path / "raw"


def test_build(raw, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["data", "build", str(raw), "--out", str(out), "--format", "parquet"]) == 0
    assert "near copy 10" in capsys.readouterr().out
    found = json.loads((out / "statistics.json").read_text())
    assert found["documents"] == 40 == len(list(open_reader(out)))
    page = (out / "samples.html").read_text()
    assert "near copy" in page and "too short" in page and "kept instead" in page
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page  # a text is shown, never run
    # Without its page and figures a corpus is a source of a recipe like any other.
    assert run(["data", "build", str(raw), "--out", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_build_by_a_file_and_by_options(raw, tmp_path, capsys):
    stages = tmp_path / "stages.yaml"
    stages.write_text("stages:\n  - lengths: {least: 100}\n  - exact_dedup\n")
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(["data", "build", str(raw), "--out", str(one), "--stages", str(stages), "--workers", "1"]) == 0
    options = ["--stage", "lengths:least=100", "--stage", "exact_dedup", "--json"]
    capsys.readouterr()
    assert run(["data", "build", f"named={raw}", "--out", str(two), *options]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 50
    parts = [(folder / "part-00000.jsonl").read_text() for folder in (one, two)]
    assert parts[0] == parts[1]


def test_dedup(raw, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["data", "dedup", str(raw), "--out", str(out), "--exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 51
    assert run(["data", "dedup", str(raw), "--out", str(tmp_path / "near"), "--compression", "zst"]) == 0
    assert len(list(open_reader(tmp_path / "near"))) == 41
    assert run(["data", "dedup", str(raw), "--out", str(tmp_path / "no"), "--bands", "10", "--rows", "13"]) == 2
    assert "need 130 permutations" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_filter(raw, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--licence", "cc0", "--where", "score >= 20", "--min-chars", "100"]
    assert run(["data", "filter", str(raw), "--out", str(out), *options]) == 0
    assert len(list(open_reader(out))) == 10
    assert run(["data", "filter", str(raw), "--out", str(tmp_path / "no")]) == 2
    assert "nothing to filter by" in capsys.readouterr().err


def test_nothing_is_left(raw, tmp_path, capsys):
    """A condition that nothing meets, such as on a field that is not there, is no success; a better one goes on."""
    out = tmp_path / "out"
    assert run(["data", "filter", str(raw), "--out", str(out), "--where", "nosuch > 3"]) == 2
    error = capsys.readouterr().err
    assert "no document is left of 55" in error and "where: no field nosuch 55" in error
    assert [p.name for p in out.iterdir()] == [".build"]
    assert run(["data", "filter", str(raw), "--out", str(out), "--where", "score > 3"]) == 0
    assert run(["data", "build", str(raw), "--out", str(tmp_path / "b"), "--stage", "lengths:least=9999"]) == 2
    assert "lengths: too short 55" in capsys.readouterr().err


def test_json_arrays_and_tables(tmp_path, capsys):
    array = tmp_path / "arr.json"
    array.write_text('[\n{"text": "one"},\n{"text": "two"}\n]\n')
    command = ["data", "build", "--out", str(tmp_path / "out"), "--stage", "unique_ids"]
    assert run([*command, str(array)]) == 2
    assert "one object a line" in capsys.readouterr().err
    assert run([*command, str(array), "--input-format", "jsonl"]) == 2
    assert "a JSON array is not read: write one object a line" in capsys.readouterr().err
    array.write_text('[{"text": "one"}]')
    assert run([*command, str(array), "--input-format", "jsonl"]) == 2
    assert "a JSON array is not read: write one object a line" in capsys.readouterr().err
    (tmp_path / "a.csv").write_text("text\none\n")
    assert run([*command, str(tmp_path / "a.csv")]) == 2
    assert "write one JSON object a line" in capsys.readouterr().err


def test_one_name_stands_for_a_list(tmp_path):
    pytest.importorskip("py3langid")
    assert make_stages([parse_stage("language:keep=en")])[0].keep == {"en"}
    assert make_stages([parse_stage("near_dedup:priority=wiki")])[0].priority == ["wiki"]
    assert make_stages([{"scrub_personal": {"kinds": "email"}}])[0].kinds == ["email"]
    assert Language(keep="de", languages="de").languages == ("de",)


def test_inspect_of_an_empty_corpus(tmp_path, capsys):
    run_pipeline(make_stages(["lengths"]), [Document("short", "0", "a")], Writer(tmp_path / "none"))
    assert run(["data", "inspect", str(tmp_path / "none"), "--page", str(tmp_path / "page")]) == 0
    assert "too short 1" in capsys.readouterr().out
    assert run(["data", "inspect", str(tmp_path / "none"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["documents"] == 0
    assert run(["data", "dedup", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "a built corpus without a document" in capsys.readouterr().err


def test_ids_of_a_mix_are_each_their_own(raw, tmp_path, capsys):
    """Also where the same file comes twice, where a source repeats, and in the part that is held out."""
    out = tmp_path / "out"
    more = ["--repeat", "2", "--total", "160", "--unit", "documents", "--holdout", "0.2"]
    assert run(["data", "mix", f"a={raw}", f"b={raw}", "--out", str(out), *more]) == 0
    assert "ids came twice" in capsys.readouterr().out
    found = json.loads((out / "statistics.json").read_text())
    for part in ("train", "validation"):
        documents = list(open_reader(out / part))
        assert len({d.id for d in documents}) == len(documents)
        renamed = [d for d in documents if d.provenance and "was" in d.provenance[-1]]
        assert renamed and all(
            d.id in (f"a:{d.provenance[-1]['was']}", f"b:{d.provenance[-1]['was']}") for d in renamed
        )
    assert found["mixture"]["renamed_ids"] > 40
    assert run(["data", "mix", f"a={raw}", "--out", str(tmp_path / "one"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mixture"]["renamed_ids"] == 0


@pytest.mark.parametrize("holdout", [[], ["--holdout", "0.2"]])
def test_a_mix_that_is_there_already(raw, tmp_path, capsys, holdout):
    out = tmp_path / "out"
    command = ["data", "mix", f"a={raw}", "--out", str(out), *holdout]
    assert run(command) == 0
    shard = next(out.rglob("part-00000.jsonl"))
    before = shard.stat().st_mtime_ns
    capsys.readouterr()
    assert run(command) == 0
    assert "nothing was done" in capsys.readouterr().out
    assert shard.stat().st_mtime_ns == before
    assert sorted(p.name for p in out.iterdir() if p.name.startswith(".")) == [".build"]
    assert run([*command, "--seed", "7"]) == 2  # another mix
    assert "is not empty" in capsys.readouterr().err
    shard.write_text("{}\n")
    assert run(command) == 2
    assert "changed or removed" in capsys.readouterr().err
    assert sorted(p.name for p in out.iterdir() if p.name.startswith(".")) == [".build"]


def test_a_mix_that_fails_leaves_nothing(raw, tmp_path):
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "out", tmp_path / "mine"):
        assert run(["data", "mix", str(raw), "--out", str(out), "--holdout", "0.99999"]) == 2
        assert run(["data", "mix", str(raw), "--out", str(out), "--total", "1T"]) == 2
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "mine").iterdir()) == []


def test_filter_by_language(tmp_path):
    pytest.importorskip("py3langid")
    sentences = [
        "The rules come into force next year, says the committee.",
        "Die Regeln treten nächstes Jahr in Kraft.",
    ]
    write_documents([Document(s, f"{i}") for i, s in enumerate(sentences)], tmp_path / "in")
    assert run(["data", "filter", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--language", "de"]) == 0
    assert [d.id for d in open_reader(tmp_path / "out")] == ["1"]


def test_inspect(raw, tmp_path, capsys):
    (raw / "more.jsonl").write_text('{"text": "x", "id": "0"}\n{"text": ""}\n{broken\n')
    assert run(["data", "inspect", str(raw), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["corpus"]
    assert found["documents"] == 56 and found["exact copies"] == 4 and found["duplicate ids"] == 1
    assert found["empty texts"] == 1 and found["bad rows"] == 1
    assert found["licences"] == {"cc0": 35, "gpl": 20, "none": 1}
    assert run(["data", "inspect", str(raw), "--limit", "3", "--page", str(tmp_path / "look")]) == 0
    assert "documents" in capsys.readouterr().out
    assert "Corpus" in (tmp_path / "look" / "samples.html").read_text()


def test_inspect_what_was_built(raw, tmp_path, capsys):
    run(["data", "dedup", str(raw), "--out", str(tmp_path / "out")])
    capsys.readouterr()
    assert run(["data", "inspect", str(tmp_path / "out")]) == 0
    assert "near_dedup" in capsys.readouterr().out


def test_bad_rows_by_choice(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text"\n{"text": "two"}\n')
    arguments = ["data", "build", str(tmp_path / "a.jsonl"), "--stage", "unique_ids", "--out"]
    assert run([*arguments, str(tmp_path / "a")]) == 2
    assert "a.jsonl:2: malformed JSON" in capsys.readouterr().err
    assert run([*arguments, str(tmp_path / "b"), "--on-bad", "skip"]) == 2
    assert "1 of 3 rows are bad" in capsys.readouterr().err
    assert run([*arguments, str(tmp_path / "c"), "--on-bad", "skip", "--max-bad", "1"]) == 0
    assert "malformed JSON" in (tmp_path / "c" / "samples.html").read_text()


def test_stages_as_options():
    assert parse_stage("exact_dedup") == "exact_dedup"
    assert parse_stage("language:keep=[en, de],least_score=0.5") == {
        "language": {"keep": ["en", "de"], "least_score": 0.5}
    }
    with pytest.raises(ConfigError, match="name:key=value"):
        parse_stage("lengths:least")


def test_stage_files_refused(tmp_path):
    path = tmp_path / "s.yaml"
    for content, names in (("a: [", "malformed YAML"), ("3", "should be a list"), ("[]", "should be a list")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=names):
            read_stages(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_stages(tmp_path / "none.yaml")
