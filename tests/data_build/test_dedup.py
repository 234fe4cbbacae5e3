"""Deduplication as a stage: what it removes, keeps, refuses and promises (card B068)."""

import random
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from made_corpus import ids, near_copy, shared_sources, text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build import index
from trainwright.data.build.dedup import ExactDedup, NearDedup
from trainwright.data.build.documents import Document
from trainwright.data.build.minhash import words


def kept(stage, documents, workers=0):
    return list(stage.run(documents, workers))


def removed(stage, documents):
    return {d.id for d in documents} - set(ids(kept(stage, documents)))


@cache
def grams(text, n=5):
    found = words(text)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


def similarity(a, b):
    return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


def test_effect_recall_and_false_removals():
    """3 sources, 30% near copies across them: recall at least 0.9, at most 1% of the others removed."""
    documents, copies = shared_sources(200)
    by_id = {d.id: d.text for d in documents}
    assert min(similarity(by_id[c], by_id[o]) for c, o in copies.items()) > 0.8
    gone = removed(NearDedup(), documents)
    pairs_broken = sum(c in gone or o in gone for c, o in copies.items())
    assert pairs_broken / len(copies) >= 0.9
    others = [d.id for d in documents if d.id not in copies and d.id not in copies.values()]
    assert len(gone & set(others)) / len(others) <= 0.01
    assert len(gone) <= len(copies)


def test_every_removed_document_has_a_copy_that_stays():
    documents, _ = shared_sources(30)
    stage = NearDedup(max_steps=1)
    stay = kept(stage, documents)
    gone = [d for d in documents if d.id not in set(ids(stay))]
    assert gone
    for document in gone:
        assert any(similarity(document.text, s.text) >= 0.8 for s in stay)


@pytest.mark.parametrize("max_steps", [2, None])
def test_c_local_removes_no_more_than_global(max_steps):
    documents, _ = shared_sources(60, changes=1)
    rng = random.Random(5)
    for i in range(20):  # and copies inside a source
        documents.append(Document(near_copy(documents[i].text, rng, 1), f"inside{i}", documents[i].source))
    local = removed(NearDedup(scope="local", max_steps=max_steps), documents)
    everywhere = removed(NearDedup(scope="global", max_steps=max_steps), documents)
    assert 0 < len(local) < len(everywhere)


def test_c_equal_where_no_copy_crosses_sources():
    rng = random.Random(1)
    documents = [Document(text(rng), f"{i}", "ab"[i % 2]) for i in range(80)]
    documents += [Document(near_copy(d.text, rng, 1), f"copy{d.id}", d.source) for d in documents[:30]]
    local, everywhere = (removed(NearDedup(scope=s), documents) for s in ("local", "global"))
    assert local == everywhere and local


@pytest.mark.parametrize(
    "settings", [{}, {"scope": "local"}, {"verify": "none", "max_steps": None}, {"unit": "char", "ngram": 13}]
)
def test_c_idempotent(settings):
    documents, _ = shared_sources(60)
    once = kept(NearDedup(**settings), documents)
    assert len(once) < len(documents) or settings.get("scope") == "local"
    assert ids(kept(NearDedup(**settings), once)) == ids(once)


@pytest.mark.parametrize("priority", [(), ("b", "a")])
@pytest.mark.parametrize("make", [NearDedup, lambda **k: ExactDedup(keep="longest", **k)])
def test_c_the_order_of_the_input_does_not_matter(make, priority):
    documents, _ = shared_sources(60)
    documents += [Document(d.text, f"exact{d.id}", "c") for d in documents[:40]]
    first = set(ids(kept(make(priority=priority), documents)))
    random.Random(7).shuffle(documents)
    again = kept(make(priority=priority), documents)
    assert set(ids(again)) == first
    assert len(first) < len(documents)
    assert ids(again) == [d.id for d in documents if d.id in first]  # and the order of the stream stays


def test_priority_says_which_copy_stays():
    documents, copies = shared_sources(60)
    source = {d.id: d.source for d in documents}
    order = {"c": 0, "a": 1, "b": 2}
    gone = removed(NearDedup(priority=["c", "a", "b"]), documents)
    broken = [(c, o) for c, o in copies.items() if c in gone or o in gone]
    assert len(broken) > 40
    for copy, original in broken:
        stays, goes = (copy, original) if original in gone else (original, copy)
        assert order[source[stays]] < order[source[goes]]


def test_keep_longest_and_first():
    rng = random.Random(3)
    short = text(rng)
    documents = [Document(short, "short", "a"), Document(short + " " + "and some more", "long", "a")]
    assert ids(kept(NearDedup(), documents)) == ["long"]
    assert ids(kept(NearDedup(keep="first"), documents)) == ["short"]


def test_size_of_the_cluster_is_kept_as_metadata():
    rng = random.Random(4)
    original = text(rng)
    documents = [Document(original + " end", "best", "a"), *(Document(original, f"c{i}", "a") for i in range(3))]
    documents.append(Document(text(rng), "alone", "a"))
    found = {d.id: d.metadata for d in kept(NearDedup(), documents)}
    assert found == {"best": {"near_dedup_cluster_size": 4}, "alone": {}}


def test_chains_do_not_wipe_out_a_source():
    """Each document shares most with the next one and nothing with those far off: components make one of them all."""
    rng = random.Random(6)
    stream = rng.choices([f"w{i}" for i in range(9000)], k=4000)
    documents = [Document(" ".join(stream[i * 8 : i * 8 + 200]), f"{i:03d}", "chain") for i in range(150)]
    with pytest.raises(DataError, match=r"'chain' would lose 1\d\d of 150 documents \(9\d%\).*largest cluster has 1"):
        kept(NearDedup(max_steps=None), documents)
    left = kept(NearDedup(max_steps=1), documents)
    assert len(left) >= 30  # each takes two on either side of it at most
    everything = NearDedup(max_steps=None, max_source_loss=1.0)
    assert len(kept(everything, documents)) < 10
    assert everything.statistics.figures["sources"]["chain"]["documents"] == 150


def test_boilerplate_is_verified_away():
    """Texts that share a third of their words meet in a bucket with few rows a band; verified, they stay."""
    rng = random.Random(8)
    boilerplate = text(rng, 40)
    documents = [Document(boilerplate + " " + text(rng, 60), f"{i}", "a") for i in range(60)]
    settings = {"bands": 64, "rows": 2, "max_source_loss": 1.0}
    assert len(kept(NearDedup(**settings), documents)) == 60
    assert len(kept(NearDedup(verify="signature", **settings), documents)) == 60
    assert len(kept(NearDedup(verify="none", max_steps=None, **settings), documents)) < 10


def test_texts_shorter_than_the_ngram_and_without_words():
    """A rule and a count: they are copies of equal ones only; what has no word is no copy of anything."""
    texts = ["two words", "Two, words!", "two words more", "...", "...", "", "word"]
    documents = [Document(t, f"{i}", "a") for i, t in enumerate(texts)]
    stage = NearDedup(keep="first")
    assert ids(kept(stage, documents)) == ["0", "2", "3", "4", "5", "6"]
    assert stage.statistics.figures["shorter_than_an_ngram"] == 4
    assert stage.statistics.figures["without_words"] == 3


def test_statistics_and_samples():
    documents, _ = shared_sources(60)
    stage = NearDedup(priority=["a", "b", "c"])
    stay = kept(stage, documents)
    found = stage.statistics.to_json()
    assert found["documents_in"] == len(documents) and found["documents_out"] == len(stay)
    assert found["dropped"] == {"near copy": len(documents) - len(stay)}
    assert sum(s["removed"] for s in found["sources"].values()) == len(documents) - len(stay)
    samples = found["samples"]["dropped: near copy"]
    assert len(samples) == 5
    gone = {d.id for d in documents} - set(ids(stay))
    for sample in samples:
        assert sample["id"] in gone
        assert "similarity 0." in sample["detail"] and "kept: " in sample["detail"]
        assert len(set(sample["text"].split()) & set(sample["other"].split())) > 40


@pytest.mark.parametrize("make", [NearDedup, lambda: ExactDedup(keep="longest")])
def test_streams_are_spooled_and_workers_agree(make, tmp_path):
    documents, _ = shared_sources(60)
    expected = ids(kept(make(), documents))
    assert ids(kept(make(), iter(documents))) == expected
    assert ids(kept(make(), iter(documents), workers=2)) == expected
    stage = make()
    stage.work_dir = tmp_path / "work"
    assert ids(kept(stage, iter(documents))) == expected
    assert list((tmp_path / "work").iterdir()) == []


class Changing:
    """Documents that are not the same at the second reading."""

    def __init__(self, first, second):
        self.readings = [second, first]

    def __iter__(self):
        return iter(self.readings.pop())


def test_documents_that_change_between_the_readings():
    documents, _ = shared_sources(20)
    for second in (
        documents[:-1],
        [*documents, Document("x", "new", "a")],
        [Document("x", "new", "a"), *documents[1:]],
    ):
        with pytest.raises(DataError, match=r"changed between|at the second reading"):
            kept(NearDedup(), Changing(documents, second))


def test_memory_does_not_grow_with_the_texts(monkeypatch):
    """Beyond a hundred bytes a document, all that grows is on disk; half of the documents are copies."""
    monkeypatch.setattr(index, "SHINGLES_HELD", 1 << 14)

    def stream(count):
        rng = random.Random(0)
        for i in range(count // 2):
            own = text(rng, 250)
            yield Document(own, f"{i}", "a")
            yield Document(own[:-20], f"{i} again", "a")

    def peak(count):
        tracemalloc.start()
        for _ in NearDedup().run(stream(count)):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(100)
    few, many = peak(1000), peak(3000)
    assert many - few < 2000 * 150


def test_samples_of_documents_with_equal_ids():
    """Each shows its own similarity: they are told apart by where they stand."""
    rng = random.Random(0)
    own, other = text(rng, 300), text(rng, 300)
    documents = [
        Document(own, "kept", "a"),
        Document(near_copy(own, rng, 6), "x", "b"),
        Document(other + " and so on", "also kept", "a"),
        Document(other, "x", "c"),
    ]
    stage = NearDedup(keep="first")
    assert ids(kept(stage, documents)) == ["kept", "also kept"]
    found = {s.source: float(s.detail.split()[1].rstrip(";")) for s in stage.statistics.samples["dropped: near copy"]}
    assert found["b"] < 0.92 < 0.98 < found["c"]


def test_exact():
    documents = [
        Document("A text.", "0", "a"),
        Document("a  TEXT", "1", "b"),
        Document("A text.", "2", "b"),
        Document("", "3"),
    ]
    documents.append(Document("", "4"))
    assert ids(kept(ExactDedup(), documents)) == ["0", "1", "3", "4"]
    assert ids(kept(ExactDedup(canonical=True), documents)) == ["0", "3", "4"]
    assert ids(kept(ExactDedup(scope="local"), documents)) == ["0", "1", "2", "3", "4"]
    assert ids(kept(ExactDedup(priority=["b"]), documents)) == ["1", "2", "3", "4"]
    assert ids(kept(ExactDedup(priority=["b"], canonical=True), documents)) == ["1", "3", "4"]
    stage = ExactDedup()
    assert ids(kept(stage, iter(documents))) == ["0", "1", "3", "4"]
    assert stage.statistics.dropped == {"exact copy": 1}


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"threshold": 0}, "threshold=0"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"bands": 10, "rows": 13}, "need 130 permutations"),
        ({"bands": 10}, "go together"),
        ({"verify": "maybe"}, "verify='maybe'"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"scope": "galactic"}, "scope='galactic'"),
        ({"keep": "best"}, "keep='best'"),
        ({"max_source_loss": 0}, "max_source_loss=0"),
        ({"priority": ["a", "a"]}, "twice"),
        ({"ngram": 0}, "ngram=0"),
    ],
)
def test_refused(wrong, names):
    with pytest.raises(ConfigError, match=names):
        NearDedup(**wrong)


def test_nothing_in_nothing_out():
    assert kept(NearDedup(), []) == []
    assert kept(ExactDedup(keep="longest"), iter([])) == []


def test_against_datasketch():
    """The same corpus by datasketch's MinHash LSH, where it is installed: it finds no more of the planted pairs."""
    datasketch = pytest.importorskip("datasketch")
    documents, copies = shared_sources(60)
    lsh = datasketch.MinHashLSH(num_perm=128, params=(16, 8))
    theirs = set()
    for document in documents:
        found = words(document.text)
        sketch = datasketch.MinHash(128)
        sketch.update_batch([" ".join(found[i : i + 5]).encode() for i in range(len(found) - 4)])
        theirs |= {frozenset((document.id, other)) for other in lsh.query(sketch)}
        lsh.insert(document.id, sketch)
    gone = removed(NearDedup(), documents)
    planted = [frozenset(pair) for pair in copies.items()]
    ours = sum(bool(pair & gone) for pair in planted)
    assert ours >= sum(pair in theirs for pair in planted) - 0.1 * len(planted)
    assert Path(datasketch.__file__)
