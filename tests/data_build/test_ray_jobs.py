"""Builds on Ray: the shards and statistics of the pipeline in one process, whatever is lost on the way.

The jobs run on ``inline_ray``, which works off the same calls in this process, and (slow) on a Ray of this machine.
"""

import json
import os
import random

import inline_ray
import pytest
from made_corpus import near_copy, text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.bad_rows import BadRows
from trainwright.data.build.cleaning import Lengths
from trainwright.data.build.documents import Document
from trainwright.data.build.filters import UniqueIds
from trainwright.data.build.formats import Inputs
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stage import DocumentStage
from trainwright.data.build.stages import make_stages
from trainwright.data.build.statistics import Statistics
from trainwright.data.build.writers import Writer, write_documents

ON_RAY = [pytest.mark.slow, pytest.mark.timeout(1800)]

SPEC = [
    {"unique_ids": {"on_duplicate": "rename"}},
    {"normalize_unicode": {"mojibake": False}},
    "scrub_personal",
    {"lengths": {"least": 60}},
    {"repeated_lines": {"width": 4096}},
    "exact_dedup",
    "near_dedup",
    {"lengths": {"least": 70}},
]


@pytest.fixture(scope="module")
def local_ray():
    """A Ray of this machine alone, for all tests that want one."""
    ray = pytest.importorskip("ray")
    import sys

    from ray import cloudpickle

    from trainwright.data.build.ray_jobs import OWN_RAY

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks cannot import a test
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config=OWN_RAY,
    )
    yield
    ray.shutdown()


@pytest.fixture
def inline(monkeypatch):
    inline_ray.install(monkeypatch)


@pytest.fixture(params=["inline", pytest.param("local_ray", marks=ON_RAY)])
def either(request):
    request.getfixturevalue(request.param)


def run(*args, **kwargs):
    from trainwright.data.build.ray_jobs import run_on_ray

    return run_on_ray(*args, **kwargs)


def corpus(count=160):
    rng = random.Random(0)
    out = []
    for i in range(count):
        body = text(rng, 60)
        out.append(Document(body + (f" mail{i}@example.org\r\nend" if i % 3 == 0 else ""), f"{i % 150}", "ab"[i % 2]))
        if i % 5 == 0:
            out.append(Document(near_copy(body, rng, 1), f"near{i}", "b"))
        if i % 7 == 0:
            out.append(Document(body[:50], f"short{i}", "a"))
        if i % 9 == 0:
            out.append(Document(body, f"{i % 150}#2", "b"))
    # A bucket of more than ALL_PAIRS copies, which takes several rounds.
    body = text(rng, 100)
    out += [Document(near_copy(body, rng, 1), f"many{k}", "a") for k in range(60)]
    return out


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two inputs, three files in the first, bad and empty rows among them."""
    folder = tmp_path_factory.mktemp("raw")
    documents = corpus()
    third = len(documents) // 3
    for k in range(3):
        write_documents(documents[k * third : (k + 1) * third], folder / "many" / f"{k}")
    with (folder / "many" / "1" / "part-00000.jsonl").open("a") as file:
        file.write('{"text": "cut\n\n{"text": " ", "id": "empty"}\n[1]\n')
    write_documents(documents[3 * third :], folder / "few", "parquet")
    with (folder / "more.jsonl").open("w") as file:
        file.write('{"no text": 1}\n{"text": "' + "the last one " * 9 + '"}\n')
    return [f"named={folder / 'many'}", str(folder / "few"), str(folder / "more.jsonl")]


def reading(raw, limit=0.9):
    return Inputs(raw, bad_rows=BadRows("skip", limit))


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "statistics.json"}


def same(a, b):
    a, b = ({**json.loads((f / "statistics.json").read_text()), "seconds": 0} for f in (a, b))
    for one, other in zip(a["stages"], b["stages"], strict=True):
        assert one == other
    assert a == b


def test_shards_and_statistics_are_those_of_one_process(tmp_path, raw, either):
    for name, run_it in (("here", run_pipeline), ("ray", run)):
        told = []
        found = run_it(
            make_stages(SPEC), reading(raw), Writer(tmp_path / name, shard_bytes=20_000), watch=told.append,
            settings={"a": 1},
        )  # fmt: skip
        assert told[-1].written == found["documents"] > 100
    assert files(tmp_path / "here") == files(tmp_path / "ray")
    same(tmp_path / "here", tmp_path / "ray")
    stages = {s["stage"]: s for s in found["stages"]}
    assert stages["read"]["counts"]["bad rows"] == 3 and stages["read"]["counts"]["empty texts"] == 1
    assert stages["near_dedup"]["rounds"] > 1 and len(stages["near_dedup"]["samples"]["dropped: near copy"]) == 5
    assert stages["unique_ids"]["counts"]["duplicate ids"] > 10 and len(found["files"]) > 2


@pytest.mark.parametrize(
    "spec",
    [
        [{"near_dedup": {"scope": "local", "verify": "none", "max_steps": None, "priority": ["b"]}}],
        [{"near_dedup": {"verify": "signature", "keep": "first"}}, {"exact_dedup": {"keep": "longest"}}],
        [{"unique_ids": {"on_duplicate": "drop"}}, {"exact_dedup": {"scope": "local", "canonical": True}}],
    ],
    ids=["local", "signature", "drop"],
)
def test_other_rules(tmp_path, spec, inline):
    documents = corpus(60)
    for name, run_it in (("here", run_pipeline), ("ray", run)):
        run_it(make_stages(spec), iter(documents), Writer(tmp_path / name, "jsonl", "gz"))
    assert files(tmp_path / "here") == files(tmp_path / "ray")
    same(tmp_path / "here", tmp_path / "ray")


@pytest.mark.parametrize("ids", [["a", "a", "a#2", "a#2", "a"], ["a#2", "a", "a", "b#2#2", "b", "b", "b#2"]])
def test_new_names_are_those_of_one_process(tmp_path, ids, inline):
    documents = [Document(f"text {i}", d) for i, d in enumerate(ids)]
    for name, run_it in (("here", run_pipeline), ("ray", run)):
        run_it([UniqueIds("rename")], documents, Writer(tmp_path / name))
    assert files(tmp_path / "here") == files(tmp_path / "ray")


def test_nothing_left(tmp_path, inline):
    for name, documents in (("none", []), ("dropped", corpus(3))):
        found = run(make_stages([{"lengths": {"least": 10**6}}, "near_dedup", "exact_dedup"]), documents,
                    Writer(tmp_path / name))  # fmt: skip
        assert found["documents"] == 0 and found["files"] == []


class DiesOnce(DocumentStage):
    """Ends its process at document 40, the first time."""

    name = "dies_once"

    def __init__(self, mark):
        super().__init__()
        self.mark = str(mark)

    def apply(self, document):
        if document.id == "40" and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os._exit(1)
        return document


class Fails(DocumentStage):
    name = "fails"

    def apply(self, document):
        if document.id == "40":
            raise ValueError("document 40")
        return document


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_process_changes_nothing(tmp_path, raw, local_ray):
    found = run([DiesOnce(tmp_path / "mark")], reading(raw), Writer(tmp_path / "out"))
    assert (tmp_path / "mark").exists()
    again = run_pipeline([DiesOnce(tmp_path / "mark")], reading(raw), Writer(tmp_path / "here"))
    assert files(tmp_path / "out") == files(tmp_path / "here") and found["documents"] == again["documents"]


def test_errors_come_out_as_they_are(tmp_path, raw, inline):
    with pytest.raises(ValueError, match="document 40"):
        run([Fails()], reading(raw), Writer(tmp_path / "a"))
    with pytest.raises(DataError, match=r"(malformed JSON|expected an object).*--on-bad skip|no text|missing"):
        run([Lengths(1)], Inputs(raw), Writer(tmp_path / "b"))
    with pytest.raises(DataError, match="more than the limit max_bad=1"):
        run([Lengths(1)], reading(raw, 1), Writer(tmp_path / "c"))
    with pytest.raises(DataError, match="comes twice"):
        run([UniqueIds()], corpus(160), Writer(tmp_path / "d"))
    with pytest.raises(ConfigError, match="retries=-1"):
        run([], [], Writer(tmp_path / "e"), retries=-1)


def test_a_file_system_that_recovers(tmp_path, raw, monkeypatch):
    """Chunks that were given before the error are not given twice."""
    from trainwright.data.build import ray_jobs
    from trainwright.data.build.readers import JsonlReader
    from trainwright.data.build.stage import chunks

    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(1200)))
    monkeypatch.setattr("time.sleep", lambda _: None)
    fails = iter([700, 900, None])

    class Shaky(JsonlReader):
        def _read(self, file):
            last = next(fails)
            for i, item in enumerate(super()._read(file)):
                if i == last:
                    raise DataError("lost") from OSError(5, "Input/output error")
                yield item

    reader = Shaky(tmp_path / "a.jsonl")
    (file,) = reader.files()
    batch = {"part": [0], "file": [str(file.path)], "id": [file.id], "reader": [0]}
    rows = list(ray_jobs._read_rows(batch, [reader], retries=3))
    import pickle

    found = [d for row in rows for d in pickle.loads(row["documents"][0])]
    assert found == list(JsonlReader(tmp_path / "a.jsonl")) and len(found) == 1200
    report = pickle.loads(rows[-1]["notes"][0])[0]
    assert report.rows == 1200 and isinstance(report.statistics, Statistics)
    assert report.statistics.documents_out == 1200
    assert [r["chunk"][0] for r in rows] == list(range(len(rows))) and sum(map(len, chunks_of(rows))) == 1200
    assert len(list(chunks(found))) == 3


def chunks_of(rows):
    import pickle

    return [pickle.loads(row["documents"][0]) for row in rows]


def test_the_command(tmp_path, raw, capsys, inline):
    from trainwright.cli import run as command

    options = [
        "--on-bad",
        "skip",
        "--max-bad",
        "0.9",
        "--json",
        "--stage",
        "lengths:least=60",
        "--stage",
        "exact_dedup",
    ]
    found = {}
    for name, more in (("here", []), ("ray", ["--ray", "local"])):
        assert command(["data", "build", *raw, "--out", str(tmp_path / name), *options, *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)["documents"]
    assert found["here"] == found["ray"] > 0
    assert (tmp_path / "here" / "part-00000.jsonl").read_bytes() == (tmp_path / "ray" / "part-00000.jsonl").read_bytes()
