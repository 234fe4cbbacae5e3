"""A killed build goes on where it was, to the same bytes; an unchanged one does nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import resume_driver
from made_corpus import near_copy, text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build import resume
from trainwright.data.build.cleaning import Lengths, NormalizeUnicode
from trainwright.data.build.composition import read_manifest, verify_shards
from trainwright.data.build.documents import Document
from trainwright.data.build.formats import open_reader
from trainwright.data.build.operator_hashes import operator_hashes
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.stages import make_stages
from trainwright.data.build.statistics import Statistics
from trainwright.data.build.writers import Writer

DRIVER = Path(resume_driver.__file__)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    rng = random.Random(0)
    for name in "ab":
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(150):
                body = text(rng, 40)
                for copy in [body] + [near_copy(body, rng, 1)] * (i % 5 == 0) + [body[:40]] * (i % 7 == 0):
                    row = {"text": copy + f" mail{i}@example.org\r\n" * (i % 3 == 0), "id": f"{name}{i}"}
                    file.write(json.dumps({**row, "licence": "cc0"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    found = resume_driver.build(source, out, "", resume_it=False)
    assert found["documents"] > 200 and len(found["files"]) > 3
    return out


def bytes_of(folder):
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".build"):
            found[name] = path.read_bytes()
    statistics = json.loads(found.pop("statistics.json"))
    statistics.pop("seconds")
    return found, statistics


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(DRIVER.parent), *sys.path])}
    return subprocess.Popen(
        [sys.executable, str(DRIVER), *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_killed_at_every_write(source, whole, tmp_path):
    """Some forty processes, each killed at its second to fourth write to the disk."""
    log = tmp_path / "log"
    process = start(source, tmp_path / "out", log)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and int(printed) > 15
    assert bytes_of(tmp_path / "out") == bytes_of(whole)
    assert sorted(p.name for p in (tmp_path / "out" / ".build").iterdir()) == ["done.json", "lock"]
    seen = log.read_text().split()
    lost = len(seen) - len(set(seen))
    assert lost <= 10 * 2 * 16  # the chunks of a part, in each of the few processes that died in this stage


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_from_outside(source, whole, tmp_path, workers):
    out = tmp_path / "out"
    process = start(source, out, "", workers)
    end = time.monotonic() + 60
    while not list(out.glob(".build/*/part-000001.zst")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)  # its workers hold the pipe too: they end with it
    assert process.returncode == -signal.SIGKILL and not (out / "statistics.json").exists()
    found = resume_driver.build(source, out, "", workers)
    assert bytes_of(out) == bytes_of(whole)
    assert found["operators_run"] == 9


def counting(monkeypatch):
    seen = []
    monkeypatch.setattr(Statistics, "see", lambda self, text: seen.append(self.name), raising=True)
    return seen


def test_an_unchanged_build_runs_nothing(source, whole, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = resume_driver.build(source, out, "")
    before = bytes_of(out)
    seen = counting(monkeypatch)
    again = resume_driver.build(source, out, "")
    assert again["operators_run"] == 0 and seen == []
    assert {**again, "operators_run": 9} == first
    assert bytes_of(out) == before == bytes_of(whole)


def test_a_changed_stage_leaves_the_work_before_it(source, tmp_path):
    """Killed behind the first stages; with another setting further on only what is behind it runs."""
    log = tmp_path / "log"
    out = tmp_path / "out"

    def run(least, die):
        resume_driver.stage.CHUNK_DOCUMENTS = 16
        first = resume_driver.Noted(str(log))
        stages = [first, *make_stages(["near_dedup", {"lengths": {"least": least}}])]
        writer = Writer(out)
        if die:
            writer.write = lambda document: (_ for _ in ()).throw(KeyboardInterrupt)
        return run_pipeline(stages, open_reader(source, source="s"), writer, resume=True)

    with pytest.raises(KeyboardInterrupt):
        run(10, True)
    seen = len(log.read_text().split())
    found = run(60, False)
    assert len(log.read_text().split()) == seen
    stages = {s["stage"]: s for s in found["stages"]}
    assert stages["read"]["documents_in"] == stages["noted"]["documents_in"] == seen
    assert stages["lengths"]["dropped"]["too short"] > 10


def test_hashes_follow_inputs_stages_and_settings(source, tmp_path):
    stages = make_stages(["lengths", "scrub_personal", "near_dedup"])
    reader = open_reader(source, source="s")
    hashes = operator_hashes(reader, stages)
    assert hashes == operator_hashes(
        open_reader(source, source="s"), make_stages(["lengths", "scrub_personal", "near_dedup"])
    )
    other = operator_hashes(reader, [stages[0], *make_stages([{"scrub_personal": {"kinds": ["email"]}}]), stages[2]])
    assert [a == b for a, b in zip(hashes, other, strict=True)] == [True, True, False, False]
    assert operator_hashes(open_reader(source, source="t"), stages)[0] != hashes[0]
    os.utime(source / "a.jsonl", (1, 1))
    assert operator_hashes(reader, stages)[0] != hashes[0]
    with pytest.raises(ConfigError, match="fingerprint"):
        operator_hashes([], stages)
    assert operator_hashes([], stages, "v1") != operator_hashes([], stages, "v2")


def test_hashes_do_not_depend_on_the_process(source):
    code = (
        "import sys; from trainwright.data.build.operator_hashes import *; "
        "from trainwright.data.build.stages import *; "
        "from trainwright.data.build.formats import *; print(operator_hashes(open_reader(sys.argv[1]), "
        "make_stages([{'language': {'keep': ['en', 'de', 'fr']}}, {'licence_policy': {}}, 'scrub_secrets']))[-1])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(source)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(found) == 1


def test_a_folder_with_another_corpus_is_refused(source, tmp_path):
    out = tmp_path / "out"
    run_pipeline([Lengths(1)], open_reader(source), Writer(out), resume=True)
    with pytest.raises(DataError, match="is not empty"):
        run_pipeline([Lengths(2)], open_reader(source), Writer(out), resume=True)
    assert verify_shards(out) == []


def test_somebody_elses_folder_is_left_as_it_is(source, tmp_path):
    (tmp_path / "part-00000.jsonl").write_text("{}")
    with pytest.raises(DataError, match="is not empty"):
        run_pipeline([Lengths(1)], open_reader(source), Writer(tmp_path), resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["part-00000.jsonl"]


def test_a_corpus_that_was_touched_is_not_called_whole(source, tmp_path):
    out = tmp_path / "out"
    run_pipeline([Lengths(1)], open_reader(source), Writer(out), resume=True)
    with (out / "part-00000.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="changed or removed since"):
        run_pipeline([Lengths(1)], open_reader(source), Writer(out), resume=True)


def test_damaged_parts_and_other_documents_are_told(tmp_path):
    documents = [Document(f"text number {i}", f"{i}") for i in range(100)]
    out = tmp_path / "out"

    class Stopped(Writer):
        def write(self, document):
            raise KeyboardInterrupt

    def run(given, writer=Writer):
        return run_pipeline([NormalizeUnicode(mojibake=False)], given, writer(out), resume=True, fingerprint="the same")

    with pytest.raises(KeyboardInterrupt):
        run(documents, Stopped)
    with pytest.raises(DataError, match="others than when the build began"):
        run([Document("else", "else"), *documents[1:]])
    (part,) = out.glob(".build/*/part-*.zst")
    part.write_bytes(part.read_bytes()[:20])
    with pytest.raises(DataError, match="damaged"):
        run(documents)


def test_two_builds_do_not_write_into_one_folder(source, tmp_path):
    pytest.importorskip("fcntl")
    writer = Writer(tmp_path / "out")
    with (
        resume.Build(tmp_path / "out" / ".build", ["x"], writer),
        pytest.raises(DataError, match="another build writes here"),
        resume.Build(tmp_path / "out" / ".build", ["x"], writer),
    ):
        pass


def test_manifest_totals_are_the_sums_of_the_shards(whole):
    manifest = read_manifest(whole)
    back = list(open_reader(whole))
    assert manifest["total"]["documents"] == len(back) == sum(s["documents"] for s in manifest["shards"])
    assert manifest["total"]["bytes"] == sum(len(d.text.encode()) for d in back)
    for source in "ab":
        of_it = [d for d in back if d.source == source]
        assert manifest["total"]["source"][source]["documents"] == len(of_it)
        assert sum(s["source"].get(source, {"bytes": 0})["bytes"] for s in manifest["shards"]) == sum(
            len(d.text.encode()) for d in of_it
        )
