"""Stages in a row: the same with any number of workers, bounded, counted, shown."""

import json
import random
import tracemalloc

import pytest
from made_corpus import Dying, Failing, ids, near_copy, text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.cleaning import Lengths, NormalizeUnicode
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import Inputs, open_reader
from trainwright.data.build.governance.manifest import Manifest
from trainwright.data.build.pipeline import chain, run_pipeline
from trainwright.data.build.scrubbing import ScrubPersonal
from trainwright.data.build.stage import CHUNK_DOCUMENTS, DocumentStage, Stage, parallel_map
from trainwright.data.build.stages import DEFAULT_STAGES, STAGES, make_stages
from trainwright.data.build.statistics import Drop, Statistics
from trainwright.data.build.writers import Writer, write_documents

SPEC = [
    {"unique_ids": {"on_duplicate": "rename"}},
    {"normalize_unicode": {"mojibake": False}},
    "scrub_personal",
    {"lengths": {"least": 100}},
    "exact_dedup",
    "near_dedup",
]


def corpus(count=300):
    rng = random.Random(0)
    out = []
    for i in range(count):
        body = text(rng, 80)
        out.append(Document(body + (f" mail{i}@example.org\r\nend" if i % 3 == 0 else ""), f"{i % 290}", "ab"[i % 2]))
        if i % 5 == 0:
            out.append(Document(near_copy(body, rng, 1), f"near{i}", "b"))
        if i % 7 == 0:
            out.append(Document(body[:50], f"short{i}", "a"))
    return out


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "statistics.json"}


def test_workers_change_nothing(tmp_path):
    write_documents(corpus(), tmp_path / "in")
    results = []
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        found = run_pipeline(
            make_stages(SPEC), open_reader(tmp_path / "in"), Writer(out, shard_bytes=50_000), workers=workers
        )
        found.pop("seconds")
        assert {**json.loads((out / "statistics.json").read_text()), "seconds": 0} == {**found, "seconds": 0}
        results.append((found, files(out)))
    assert results[0] == results[1]
    found = results[0][0]
    stages = {s["stage"]: s for s in found["stages"]}
    assert stages["unique_ids"]["counts"] == {"duplicate ids": 10}
    assert stages["scrub_personal"]["counts"] == {"email": 100}
    assert stages["lengths"]["dropped"] == {"too short": 43}
    assert stages["near_dedup"]["dropped"] == {"near copy": 60}
    assert found["documents"] == 300 == sum(s["documents"] for s in found["sources"].values())
    assert len(found["files"]) > 2 and sum(f["documents"] for f in found["files"]) == 300
    for before, after in zip(found["stages"], found["stages"][1:], strict=False):
        assert before["documents_out"] == after["documents_in"]
        assert before["documents_in"] == before["documents_out"] + sum(before["dropped"].values())
    back = list(open_reader(tmp_path / "out0"))
    assert {"step": "scrub_personal", "email": 1} in back[0].provenance


def test_samples_do_not_depend_on_the_order():
    documents = [Document(f"{'x' * (i % 50)} {i}", f"{i}", "a") for i in range(500)]
    seen = []
    for _ in range(2):
        random.shuffle(documents)
        stage = Lengths(20)
        list(stage.run(documents))
        seen.append(stage.statistics.to_json()["samples"])
    assert seen[0] == seen[1]
    assert {k: len(v) for k, v in seen[0].items()} == {"dropped: too short": 5, "kept": 5}


def test_samples_of_changes_show_the_place():
    stage = ScrubPersonal()
    list(stage.run([Document("long text " * 200 + "a@example.org" + " and more" * 200, "0")]))
    (sample,) = stage.statistics.samples["changed"]
    assert "<EMAIL>" in sample.text and "a@example.org" in sample.other and len(sample.text) < 700


def test_statistics_merge_as_if_counted_once():
    whole, parts = Statistics("s"), [Statistics("s"), Statistics("s")]
    for i in range(200):
        document = Document(f"text {i}", f"{i}")
        for statistics in (whole, parts[i % 2]):
            statistics.see(document.text)
            if i % 3:
                statistics.keep(document)
            else:
                statistics.drop(document, Drop("third"))
    merged = Statistics("s")
    for part in parts:
        merged.merge(part)
    assert merged.to_json() == whole.to_json()


class Noting:
    """A source that knows how many documents were asked of it."""

    def __init__(self, documents):
        self.documents, self.asked = documents, 0

    def __iter__(self):
        for document in self.documents:
            self.asked += 1
            yield document


@pytest.mark.parametrize("workers", [0, 1])
def test_documents_are_read_as_they_are_wanted(workers):
    source = Noting([Document(f"text number {i}", f"{i}") for i in range(20 * CHUNK_DOCUMENTS)])
    stream = iter(chain([Lengths(1), NormalizeUnicode(mojibake=False)], source, workers))
    next(stream)
    assert source.asked <= (4 * CHUNK_DOCUMENTS if workers else 1)
    stream.close()


def test_memory_is_bounded(tmp_path):
    def stream(count):
        rng = random.Random(0)
        for i in range(count):
            yield Document(text(rng, 100), f"{i}", "a")

    def peak(count):
        tracemalloc.start()
        spec = [{"repeated_lines": {"width": 4096}}, {"lengths": {"least": 1}}, "unique_ids", "exact_dedup"]
        run_pipeline(make_stages(spec), stream(count), Writer(tmp_path / f"{count}"))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(50)
    assert peak(4000) - peak(1000) < 3000 * 500 / 2  # the texts are some 500 bytes each


def test_a_fault_in_a_worker_is_seen(tmp_path):
    documents = [Document("text", f"{i}") for i in range(2000)]
    for workers in (0, 2):
        with pytest.raises(ValueError, match="document 700"):
            run_pipeline([Failing()], documents, Writer(tmp_path / f"{workers}"), workers=workers)
    with pytest.raises(DataError, match="worker process of the data pipeline died"):
        list(Dying().run(documents, workers=1))


def test_parallel_map_keeps_the_order():
    assert list(parallel_map(str, range(50), 0)) == list(parallel_map(str, range(50), 2)) == [str(i) for i in range(50)]


def test_progress_is_told(tmp_path):
    told = []
    run_pipeline([Lengths(1)], corpus(20), Writer(tmp_path / "out"), watch=lambda p: told.append((p.read, p.written)))
    assert told[-1][0] == len(corpus(20))


def test_a_stage_runs_once(tmp_path):
    stage = Lengths(1)
    run_pipeline([stage], corpus(5), Writer(tmp_path / "a"))
    with pytest.raises(ConfigError, match="stage lengths has run before"):
        run_pipeline([stage], corpus(5), Writer(tmp_path / "b"))


def test_a_generator_is_read_once(tmp_path):
    documents = corpus(60)
    for name, given in (("list", documents), ("generator", (d for d in documents))):
        run_pipeline(make_stages([{"near_dedup": {}}]), given, Writer(tmp_path / name))
    assert files(tmp_path / "list") == files(tmp_path / "generator")


def test_inputs_are_counted_at_the_second_reading_too(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i} of the file"}) + "\n" for i in range(9)) + "\n"
    )
    found = run_pipeline(make_stages(["near_dedup"]), Inputs([str(tmp_path / "a.jsonl")]), Writer(tmp_path / "out"))
    assert found["stages"][0]["documents_in"] == found["documents"] == 9


def test_every_stage_has_a_name_and_fits_the_protocol():
    pytest.importorskip("ftfy")
    pytest.importorskip("py3langid")
    needs = {"licences": {"allowed": ["cc0"]}, "where": {"condition": "n > 1"}, "repeated_lines": {"width": 16}}
    needs |= {"ocr_correct": {"corrector": "textwrap:dedent"}, "taken_out": {"manifest": Manifest.of([])}}
    needs |= {"quality": {"model": "builtins:len"}}
    for name in STAGES:
        (stage,) = make_stages([{name: needs.get(name, {})}])
        assert isinstance(stage, Stage) and stage.name == name == stage.statistics.name
        if isinstance(stage, DocumentStage):
            import pickle

            pickle.loads(pickle.dumps(stage))
        assert ids(stage.run([])) == []
    assert len(make_stages(DEFAULT_STAGES)) == 5


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (["near_dedop"], "did you mean 'near_dedup'"),
        ([{"lengths": {"lest": 3}}], r"stages.lengths.lest: unknown setting; did you mean 'least'"),
        ([{"lengths": {"least": -1}}], "stages.lengths.least=-1"),
        ([{"lengths": [1]}], "stages.lengths=.*settings with their names"),
        ([{"a": {}, "b": {}}], "one name with its settings"),
        (["licences"], "stages.licences: .*allowed"),
        ([3], "one name with its settings"),
    ],
)
def test_specs_refused(spec, names):
    with pytest.raises(ConfigError, match=names):
        make_stages(spec)


def test_workers_refused(tmp_path):
    with pytest.raises(ConfigError, match="workers=-1"):
        run_pipeline([], [], Writer(tmp_path / "out"), workers=-1)
