"""What data is made of, carried to the run, and refused where its licence is not allowed."""

import json

import pytest

from trainwright import RunConfig, Trainer
from trainwright.cli import run
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.composition import (
    Composition,
    read_manifest,
    rows_composition,
    shard_compositions,
    verify_shards,
)
from trainwright.data.build.documents import Document
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import Writer, write_documents
from trainwright.data.licence_gate import data_card


@pytest.fixture
def built(open_documents, tmp_path):
    out = tmp_path / "built"
    run_pipeline(make_stages(["licence_policy"]), iter(open_documents), Writer(out, shard_bytes=500))
    return out


def test_manifest_and_rows_say_the_same(built):
    manifest = read_manifest(built)
    assert len(manifest["shards"]) >= 3 and verify_shards(built) == []
    files = sorted(built.glob("part-*"))
    by_rows = rows_composition(files)
    assert by_rows.to_json() == manifest["total"]
    by_shards, rest = shard_compositions(files[:2])
    assert rest == [] and by_shards.to_json() == rows_composition(files[:2]).to_json()
    assert manifest["total"]["licence"]["MIT"]["documents"] == 2
    assert manifest["total"]["step"] == {
        "licence_policy": {k: manifest["total"][k] for k in ("documents", "bytes", "characters")}
    }
    for kind in ("source", "licence", "language"):
        for unit in ("documents", "bytes", "characters"):
            assert sum(c[unit] for c in manifest["total"][kind].values()) == manifest["total"][unit]
            assert sum(s[unit] for s in manifest["shards"]) == manifest["total"][unit]
    with files[0].open("a") as file:
        file.write("\n")
    assert verify_shards(built) == [f"{files[0].name}: changed since it was written"]
    assert shard_compositions(files)[1] == [files[0]]
    files[1].unlink()
    assert f"{files[1].name}: missing" in verify_shards(built)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_every_format_is_found(open_documents, tmp_path, format):
    out = tmp_path / "out"
    run_pipeline(make_stages(["licence_policy"]), iter(open_documents), Writer(out, format))
    files = [p for p in out.rglob("*") if p.suffix in (".jsonl", ".parquet")]
    found, rest = shard_compositions(files)
    assert rest == [] and found.total["documents"] == 12
    assert rows_composition(files).to_json() == found.to_json()


def test_merging_is_adding():
    parts = [Composition(), Composition()]
    whole = Composition()
    for i in range(20):
        document = Document(f"text ü {i}", f"{i}", "ab"[i % 2], None, "MIT" if i % 3 else None)
        parts[i % 2].add(document)
        whole.add(document)
    merged = Composition()
    for part in parts:
        merged.merge(Composition.from_json(json.loads(json.dumps(part.to_json()))))
    assert merged == whole and whole.groups["licence"]["none given"]["documents"] == 7


def test_card_of_a_corpus(built, tmp_path, capsys):
    assert run(["data", "card", str(built)]) == 0
    printed = capsys.readouterr().out
    for part in ("12 documents", "CC-BY-SA-4.0", "science", "licence_policy", "not legal advice"):
        assert part in printed
    every = "CC0,CC-BY,CC-BY-SA,MIT,PD,Apache-2.0"
    assert run(["data", "card", str(built), "--allow", every, "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["documents"] == 12
    assert run(["data", "card", str(built), "--allow", "CC0,MIT"]) == 2
    error = capsys.readouterr().err
    assert "2 documents: CC-BY-4.0, licence not allowed" in error and "allowed are CC0, MIT" in error
    ledger = tmp_path / "ledger.jsonl"
    assert run(["data", "card", str(built), "--attribution", str(ledger)]) == 0
    assert len(ledger.read_text().splitlines()) == 4
    assert run(["data", "card", str(built), "--allow", "nonsense"]) == 2
    with (built / "part-00000.jsonl").open("a") as file:
        file.write("\n")
    assert run(["data", "card", str(built)]) == 2
    assert "changed since the manifest was written" in capsys.readouterr().err


def test_card_of_plain_files(open_documents, tmp_path, capsys):
    write_documents([*open_documents, Document("no licence", "x", "s")], tmp_path / "raw")
    assert run(["data", "card", str(tmp_path / "raw")]) == 0
    assert "none given" in capsys.readouterr().out
    assert run(["data", "card", str(tmp_path / "raw"), "--allow", "CC0,CC-BY,CC-BY-SA,MIT,PD,Apache-2.0"]) == 2
    assert "1 documents: none given" in capsys.readouterr().err
    assert run(["data", "card", str(tmp_path / "raw"), "--verify"]) == 2


def with_source(recipe, source, **more):
    return recipe(**{"data.sources": [source], "data.validation_fraction": 0.3, **more})


def test_a_run_carries_the_card(recipe, built, tmp_path):
    config = RunConfig.load(
        with_source(
            recipe,
            {"name": "jsonl", "path": str(built)},
            **{"data.licences": ["CC0", "CC-BY", "CC-BY-SA", "MIT", "PD", "Apache-2.0"]},
        )
    )
    Trainer(config).fit()
    card = json.loads((config.run_dir / "data_card.json").read_text())
    assert card["total"] == read_manifest(built)["total"]
    assert card["sources"][0]["known_by"] == "manifest" and card["allowed_licences"][0] == "CC0"
    assert sum(s["documents"] for s in card["trained_on"].values()) < 12
    assert "not legal advice" in card["note"]


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_a_run_is_refused_before_any_work(recipe, open_documents, tmp_path, name):
    write_documents(open_documents, tmp_path / "raw", name)
    source = {"name": name, "path": str(tmp_path / "raw")}
    config = RunConfig.load(with_source(recipe, source, **{"data.licences": ["CC0", "MIT"]}))
    with pytest.raises(
        ConfigError, match=r"data\.sources\.0: .*2 documents: cc-by-4\.0, licence not allowed.*allowed are CC0, MIT"
    ):
        Trainer(config)
    assert not (config.run_dir / "config.yaml").exists()
    cache = tmp_path / "cache"
    assert [p.name for p in cache.iterdir()] == ["cards"]  # nothing was tokenized, but what was read is kept
    (held,) = (cache / "cards").iterdir()
    held.write_text(held.read_text().replace("MIT", "CC0"))
    with pytest.raises(ConfigError):
        Trainer(config)


def test_what_says_nothing_is_refused_where_a_list_is_given(recipe, tmp_path):
    plain = RunConfig.load(recipe(**{"data.licences": ["MIT"]}))
    with pytest.raises(ConfigError, match="nothing is known of its licences"):
        Trainer(plain)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two", "license": "mit"}\n')
    config = RunConfig.load(
        with_source(recipe, {"name": "jsonl", "path": str(tmp_path / "a.jsonl")}, **{"data.licences": ["MIT"]})
    )
    with pytest.raises(ConfigError, match="1 documents: none given"):
        Trainer(config)
    with pytest.raises(ConfigError, match=r"data\.licences='MITT': is no licence known here"):
        Trainer(RunConfig.load(recipe(**{"data.licences": ["MITT"]})))


def test_a_recipe_states_the_licence_of_a_source(recipe, tmp_path):
    """For plain text, and for rows that name none; it changes nothing else about the source."""
    (tmp_path / "a.jsonl").write_text('{"text": "one of two"}\n{"text": "two of two", "license": "MIT"}\n' * 9)
    (tmp_path / "b.txt").write_text("plain text, twenty times\n" * 20)
    rows = {"name": "jsonl", "path": str(tmp_path / "a.jsonl"), "licence": "cc0 1.0"}
    text = {"name": "text", "path": str(tmp_path / "b.txt"), "separator": "\n"}

    def card(*sources, allow):
        config = RunConfig.load(recipe(**{"data.sources": list(sources), "data.licences": allow}))
        return data_card(config.data.sources, config.data.licences)

    found = card(rows, {**text, "licence": "CC-BY-4.0"}, allow=["CC0", "MIT", "CC-BY"])
    counts = {k: v["documents"] for k, v in found["total"]["licence"].items()}
    assert counts == {"CC0-1.0": 9, "MIT": 9, "CC-BY-4.0": 20}
    assert [s["known_by"] for s in found["sources"]] == ["its rows and the recipe", "the recipe"]
    with pytest.raises(ConfigError, match=r"data\.sources\.1: source text.*say it by data\.sources\.1\.licence"):
        card(rows, text, allow=["CC0", "MIT"])
    with pytest.raises(ConfigError, match=r"20 documents: CC-BY-4\.0, licence not allowed"):
        card({**text, "licence": "CC-BY-4.0"}, allow=["CC0", "MIT"])
    with pytest.raises(ConfigError, match=r"data\.sources\.0\.licence='mine': is no licence known here"):
        card({**text, "licence": "mine"}, allow=["CC0"])
    config = RunConfig.load(recipe(**{"data.sources": [rows, {**rows, "licence": None}]}))
    assert len({s.fingerprint() for s in config.data.sources}) == 1


def test_without_a_list_nothing_is_read(recipe, tmp_path, monkeypatch):
    from trainwright.data import licence_gate

    monkeypatch.setattr(licence_gate, "rows_composition", None)
    trainer = Trainer(RunConfig.load(recipe()))
    assert trainer.data_card["sources"][0] | {"source": ""} == {
        "source": "",
        "known_by": "not read",
        "composition": None,
    }


def test_card_of_a_recipe(recipe, built, tmp_path, capsys):
    import yaml

    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(with_source(recipe, {"name": "jsonl", "path": str(built)})))
    assert run(["data", "card", str(path)]) == 0
    assert "12 documents" in capsys.readouterr().out
    assert run(["data", "card", str(path), "data.licences=[CC0]"]) == 2
    assert run(["data", "card", str(path), "--allow", "CC0,MIT"]) == 2
    assert "licence not allowed" in capsys.readouterr().err
    assert run(["data", "card", str(built), "a=b"]) == 2


def test_a_licence_for_what_names_none(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one of many"}\n{"text": "two of many", "license": "CC0"}\n')
    arguments = ["data", "build", str(tmp_path / "a.jsonl"), "--stage", "licence_policy", "--licence", "MIT", "--out"]
    assert run([*arguments, str(tmp_path / "out")]) == 0
    assert set(read_manifest(tmp_path / "out")["total"]["licence"]) == {"MIT", "CC0-1.0"}
    capsys.readouterr()
    assert run([*arguments, str(tmp_path / "out")]) == 0
    assert "nothing was done" in capsys.readouterr().out
    assert (
        run(
            [
                "data",
                "filter",
                str(tmp_path / "out"),
                "--licence",
                "cc-zero",
                "--licence",
                "CC0",
                "--out",
                str(tmp_path / "f"),
            ]
        )
        == 0
    )
    assert set(read_manifest(tmp_path / "f")["total"]["licence"]) == {"CC0-1.0"}


def test_damaged_manifests_are_told(built):
    (built / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        read_manifest(built)
    (built / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="of format 99"):
        read_manifest(built)
