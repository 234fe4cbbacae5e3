"""SPLiCe (card B023: a, b, d, bad input, near copies, caps)."""

import itertools
import json
import logging
import random
from collections import Counter

import numpy as np
import pytest
from made_corpus import WORDS, near_copy, text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.pipeline import run_pipeline
from trainwright.data.build.retrievers import (
    BM25Retriever,
    EmbeddingRetriever,
    RandomRetriever,
    SameRepository,
    fingerprint,
)
from trainwright.data.build.splice import Characters, Examples, Tokens, build_examples
from trainwright.data.build.splice_stage import Splice, StoredDocuments
from trainwright.data.build.stages import make_stages
from trainwright.data.build.writers import Writer

ONE = Characters(1.0)


def topics(count=30, names="abcd", seed=0, words=40):
    """Documents of several topics, each with words of its own, shuffled."""
    rng = random.Random(seed)
    out = []
    for t, name in enumerate(names):
        own = WORDS[t * 40 : t * 40 + 40]
        out += [Document(" ".join(rng.choices(own, k=words)), f"{name}{i}", name) for i in range(count)]
    rng.shuffle(out)
    return out


class Successor:
    """A retriever that knows the book: the page behind this one."""

    def __init__(self, documents):
        self.fingerprint, self.order = fingerprint(documents), [d.metadata["page"] for d in documents]
        self.place = {p: i for i, p in enumerate(self.order)}

    def neighbours(self, doc, k, used):
        following = [self.place.get(self.order[doc] + 1 + j) for j in range(k)]
        return [i for i in following if i is not None and not used[i]]

    def retire(self, used):
        pass


def pages(count=12, seed=0):
    rng = random.Random(seed)
    out = [Document(text(rng, 20), f"p{i}", "book", metadata={"page": i}) for i in range(count)]
    rng.shuffle(out)
    return out


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("trim", ["cut", "return", None])
@pytest.mark.parametrize("order", ["identity", "shuffle", "reverse"])
def test_a_no_document_twice_and_examples_are_full(k, trim, order):
    documents = topics()
    length = 5 * max(len(d.text) for d in documents)
    examples = list(
        build_examples(documents, BM25Retriever(documents), length, k=k, trim=trim, order=order, measure=ONE)
    )
    seen = Counter(itertools.chain.from_iterable(e.documents for e in examples))
    assert set(seen) == set(range(len(documents))) and set(seen.values()) == {1}
    assert [e.length >= length for e in examples[:-1]] == [True] * (len(examples) - 1)
    for e in examples:
        whole = "\n\n".join(documents[d].text for d in e.documents)
        assert whole.startswith(e.text) and len(whole) - len(e.text) == e.cut
        if trim == "return":
            assert e.cut == 0 and len(e.text) <= length
        elif trim == "cut" and e.length >= length:
            assert len(e.text) == length
        elif trim is None:
            assert e.cut == 0


@pytest.mark.parametrize("order", ["identity", "reverse"])
def test_b_a_chain_follows_the_true_successors(order):
    documents = pages()
    examples = list(build_examples(documents, Successor(documents), 10**6, k=1, order=order, measure=ONE))
    assert len(examples) == 1
    found = [documents[d].metadata["page"] for d in examples[0].documents]
    found = found[::-1] if order == "reverse" else found
    first = found[0]
    assert found[: 12 - first] == list(range(first, 12))  # from the root to the end of the book
    assert examples[0].roots > 1 or first == 0


def test_b_a_tree_grows_breadth_first():
    documents = [Document(f"text {i}", str(i), metadata={"page": i}) for i in range(15)]

    class Tree(Successor):
        def neighbours(self, doc, k, used):
            return [i for i in (2 * doc + 1, 2 * doc + 2) if i < 15 and not used[i]][:k]

    examples = Examples(documents, Tree(documents), 10**6, k=2, measure=ONE, max_similarity=None)
    examples._draw = lambda filled: 0 if not examples._used[0] else None
    assert next(iter(examples)).documents == list(range(15))


def test_b_random_neighbours_are_random_packing():
    """All orders of three documents equally often: chi-square of 6 cells, p = 0.0001 at 25.7."""
    documents = [Document(f"word{i}", str(i)) for i in range(3)]
    counts = Counter()
    for seed in range(600):
        e = next(iter(Examples(documents, RandomRetriever(documents, seed), 10**6, seed=seed, max_similarity=None)))
        counts[tuple(e.documents)] += 1
    assert len(counts) == 6
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 25.7


def test_d_same_seed_same_examples():
    documents = topics()

    def run(seed):
        return [
            (e.text, e.documents)
            for e in build_examples(documents, BM25Retriever(documents), 900, k=2, order="shuffle", seed=seed)
        ]

    assert run(1) == run(1) != run(2)


def adjacent_similarity(documents, examples):
    counts = [Counter(d.text.split()) for d in documents]
    holding = Counter(w for c in counts for w in c)
    vectors = [{w: n * (1 + np.log(len(counts) / holding[w])) for w, n in c.items()} for c in counts]
    norms = [np.sqrt(sum(x * x for x in v.values())) for v in vectors]
    pairs = [p for e in examples for p in itertools.pairwise(e.documents)]
    return np.mean(
        [sum(x * vectors[b].get(w, 0) for w, x in vectors[a].items()) / norms[a] / norms[b] for a, b in pairs]
    )


def test_effect_neighbours_are_of_one_topic():
    """Mean TF-IDF cosine of adjacent documents, four topics shuffled: at least twice that of random packing."""
    documents = topics(60)
    length = 8 * len(documents[0].text)
    spliced = list(build_examples(documents, BM25Retriever(documents), length, measure=ONE))
    packed = list(build_examples(documents, RandomRetriever(documents), length, measure=ONE))
    assert adjacent_similarity(documents, spliced) > 2 * adjacent_similarity(documents, packed)
    same = [documents[a].source == documents[b].source for e in spliced for a, b in itertools.pairwise(e.documents)]
    assert np.mean(same) > 0.9


# -- near copies and caps ---------------------------------------------------------------------------------------------


def test_near_copies_are_passed_over_and_told(caplog):
    rng = random.Random(0)
    documents = []
    for i, d in enumerate(topics(8, "abcdef", words=80)):
        documents += [Document(d.text, f"o{i}", "a"), Document(near_copy(d.text, rng, 1), f"c{i}", "a")]
    length = 4 * len(documents[0].text)
    kinds = {d.id: d.id[1:] for d in documents}
    with caplog.at_level(logging.WARNING, "trainwright"):
        examples = Examples(documents, BM25Retriever(documents), length, measure=ONE)
        found = list(examples)
    beside = [[kinds[documents[d].id] for d in e.documents] for e in found]
    assert sum(len(x) - len(set(x)) for x in beside) <= 1  # a root may be one
    assert examples.report.near_copies > 10
    assert "run near_dedup before" in caplog.text
    taking = list(build_examples(documents, BM25Retriever(documents), length, measure=ONE, max_similarity=None))
    assert sum(len(e.documents) - len({kinds[documents[d].id] for d in e.documents}) for e in taking) > 20


def test_caps_hold_for_neighbours():
    documents = topics(40)
    for d in documents:
        d.source = "code" if d.source in "ab" else "web"
    length = 10 * len(documents[0].text)
    examples = Examples(documents, BM25Retriever(documents), length, caps={"code": 0.3, "*": 0.8}, measure=ONE)
    found = list(examples)
    total = Counter()
    for e in found[:-8]:  # before one source is used up
        filled = Counter()
        for d in e.documents:
            filled[documents[d].source] += len(documents[d].text)
        total += filled
        assert filled["code"] <= 0.3 * length or examples.report.over_cap
    assert total["code"] / total.total() < 0.35 and examples.report.capped > 0


def test_returned_documents_come_again():
    documents = [Document("x" * n, str(i), "s") for i, n in enumerate([60, 60, 60, 250])]
    retriever = RandomRetriever(documents)
    examples = Examples(documents, retriever, 100, trim="return", measure=ONE, separator="", max_similarity=None)
    found = list(examples)
    assert sorted(d for e in found for d in e.documents) == [0, 1, 2, 3]
    assert examples.report.returned >= 2
    assert sum(e.cut for e in found) == 150  # of the one that is longer than L by itself


# -- retrievers -------------------------------------------------------------------------------------------------------


def letters(texts):
    return [[t.count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts]


def test_embeddings():
    documents = topics(20)
    retriever = EmbeddingRetriever(documents, letters, batch=7)
    vectors = np.array(letters([d.text for d in documents]), float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    used = np.zeros(len(documents), bool)
    used[::3] = True
    expected = [i for i in np.argsort(-(vectors @ vectors[1]), kind="stable") if i != 1 and not used[i]]
    assert retriever.neighbours(1, 4, used) == expected[:4]
    used[np.arange(len(documents)) % 4 != 1] = True
    expected = [i for i in expected if not used[i]]
    retriever.retire(used)
    assert len(retriever.vectors) < 0.4 * len(documents)
    assert retriever.neighbours(1, 100, used) == expected
    with pytest.raises(DataError, match="one row a text"):
        EmbeddingRetriever(documents, lambda texts: [[1.0]])


def test_same_repository():
    paths = ["x/core/a.py", "x/core/b.py", "x/tools/c.py", "y/core/a.py", "x/core/deep/d.py"]
    documents = [
        Document(f"file {i}", p, "code", metadata={"repository": p[0], "path": p[2:]}) for i, p in enumerate(paths)
    ]
    documents.append(Document("a text", "t", "web"))
    retriever = SameRepository(documents)
    free = np.zeros(6, bool)
    assert retriever.neighbours(0, 9, free) == [4, 1, 2] or retriever.neighbours(0, 9, free) == [1, 4, 2]
    assert retriever.neighbours(3, 9, free) == [] == retriever.neighbours(5, 9, free)
    free[1] = True
    assert 1 not in retriever.neighbours(0, 9, free)
    examples = list(build_examples(documents, retriever, 30, k=2, measure=ONE))
    of_x = [e for e in examples if 0 in e.documents]
    assert len(of_x) == 1
    with pytest.raises(DataError, match="no document has 'repo' in its metadata"):
        SameRepository(documents, repository="repo")


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"length": 100, "trim": None}, r"length=100: is below the longest document \(\d+\).*trim=cut or trim=return"),
        ({"k": 0}, "k=0"),
        ({"length": 0}, "length=0"),
        ({"order": "sorted"}, "order='sorted'"),
        ({"trim": "drop"}, "trim='drop'"),
        ({"max_similarity": 1.5}, "max_similarity=1.5"),
        ({"caps": {"a": 0}}, "caps.a=0"),
        ({"document_mask": True}, "document_mask=True: hides the documents of an example from each other"),
    ],
)
def test_refused(settings, names):
    documents = topics(3)
    with pytest.raises(ConfigError, match=names):
        build_examples(documents, BM25Retriever(documents), **{"length": 900, "measure": ONE} | settings)


def test_an_index_of_another_corpus_is_refused():
    documents = topics(3)
    retriever = BM25Retriever(documents)
    for other in (documents[::-1], documents[1:], [*documents[:-1], Document("new", "n")]):
        with pytest.raises(DataError, match="built on other documents"):
            build_examples(other, retriever, 900)
    with pytest.raises(ConfigError, match="should be a new index"):
        BM25Retriever(documents, retriever.index)


def test_a_retriever_that_breaks_its_word_is_refused():
    documents = topics(3)

    class Liar(Successor):
        def __init__(self, documents):
            self.fingerprint = fingerprint(documents)

        def neighbours(self, doc, k, used):
            return [doc]

    with pytest.raises(DataError, match="told not to"):
        list(build_examples(documents, Liar(documents), 10**5))


# -- the stage --------------------------------------------------------------------------------------------------------


def test_documents_on_disk(tmp_path):
    documents = topics(4)
    stored = StoredDocuments(tmp_path / "documents")
    for d in documents:
        stored.append(d)
    assert len(stored) == 16 and stored[3] == documents[3] and stored[2:5] == documents[2:5]
    assert list(stored) == documents and fingerprint(stored) == fingerprint(documents)
    stored.append(documents[0])
    assert stored[16] == documents[0]
    with pytest.raises(IndexError):
        stored[17]
    stored.close()


@pytest.mark.parametrize("retriever", ["bm25", "random", "embedding", "same_repository"])
def test_the_stage_gives_what_the_function_gives(retriever, tmp_path):
    documents = topics()
    for d in documents:
        d.licence = "MIT" if d.source == "a" else "CC0-1.0"
        d.metadata["repository"] = d.source
    embed = {"embed": letters} if retriever == "embedding" else {}
    settings = {"length": 400, "k": 2, "characters_per_token": 1.0, "retriever": retriever, "work_dir": tmp_path}
    stage = Splice(**settings, **embed)
    out = list(stage.run(iter(documents)))
    made = {"bm25": BM25Retriever, "random": RandomRetriever, "same_repository": SameRepository}
    own = EmbeddingRetriever(documents, letters) if embed else made[retriever](documents)
    expected = list(build_examples(documents, own, 400, k=2, measure=ONE))
    assert [d.text for d in out] == [e.text for e in expected]
    assert [d.metadata["documents"] for d in out] == [[documents[i].id for i in e.documents] for e in expected]
    assert len({d.id for d in out}) == len(out) and out[0].provenance[-1]["step"] == "splice"
    assert {d.licence for d in out} <= {"MIT", "CC0-1.0", "CC0-1.0 AND MIT"}
    assert stage.statistics.documents_in == len(documents) and stage.statistics.documents_out == len(out)
    assert stage.statistics.figures["examples"] == len(out)
    assert not list(tmp_path.iterdir())


def test_as_a_stage_of_a_build(tmp_path):
    (stage,) = make_stages([{"splice": {"length": 200, "k": 2, "caps": {"a": 0.9}, "bm25": {"b": 0.5}}}])
    found = run_pipeline([stage], topics(), Writer(tmp_path / "out"))
    json.dumps(found)
    rows = [json.loads(line) for p in sorted((tmp_path / "out").glob("*.jsonl")) for line in p.open()]
    assert len(rows) == found["documents"] > 3
    ids = Counter(i for r in rows for i in r["metadata"]["documents"])
    assert set(ids.values()) == {1} and len(ids) == 120
    assert list(make_stages(["splice"])[0].run([])) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"retriever": "tfidf"}, "stages.splice.retriever='tfidf'"),
        ({"retriever": "embedding"}, "embed"),
        ({"embed": "a:b"}, "go together"),
        ({"retriever": "embedding", "embed": "nothing_there:f"}, "embed='nothing_there:f': cannot be loaded"),
        ({"retriever": "embedding", "embed": "math"}, "module:function"),
        ({"bm25": {"k": 1}}, "stages.splice.bm25=.*settings of the index"),
        ({"bm25": {"b": 2}}, "stages.splice.bm25.b=2"),
        ({"tokenizer": "nowhere"}, "tokenizer='nowhere'"),
        ({"k": 0}, "stages.splice.k=0"),
        ({"document_mask": True}, "stages.splice.document_mask"),
        ({"characters_per_token": 0}, "characters_per_token=0"),
    ],
)
def test_settings_of_the_stage_are_refused(settings, names):
    with pytest.raises(ConfigError, match=names):
        make_stages([{"splice": settings}])


def test_lengths_in_tokens():
    measure = Tokens(lambda t: [ord(c) for c in t], lambda ids: "".join(map(chr, ids)))
    assert measure.count("four") == 4 and measure.cut("four", 2) == "fo"
    documents = topics(5)
    for e in build_examples(documents, BM25Retriever(documents), 700, measure=measure):
        assert len(e.text) <= 700
