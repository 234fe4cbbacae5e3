"""BM25 against the formula word by word, and against a package (card B023: c)."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.data.build.bm25 import BM25

WORDS = [f"w{i}" for i in range(30)]


def brute_force(texts, query, k1=1.2, b=0.75):
    docs = [Counter(t.split()) for t in texts]
    n, mean = len(docs), sum(sum(d.values()) for d in docs) / len(docs)
    holding = {word: sum(word in d for d in docs) for word in query.split()}
    out = []
    for d in docs:
        score = 0.0
        for word in query.split():
            if word not in d:
                continue
            n_w = holding[word]
            idf = math.log(1 + (n - n_w + 0.5) / (n_w + 0.5))
            score += idf * d[word] * (k1 + 1) / (d[word] + k1 * (1 - b + b * sum(d.values()) / mean))
        out.append(score)
    return out


def made(seed, count=25, longest=60):
    rng = random.Random(seed)
    weights = [1 / (i + 1) for i in range(len(WORDS))]
    return [" ".join(rng.choices(WORDS, weights, k=rng.randint(1, longest))) for _ in range(count)]


def full(texts, **kwargs):
    index = BM25(first_words=None, query_words=None, max_share=1.0, **kwargs)
    index.add(texts)
    return index


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from([(1.2, 0.75), (0.0, 0.5), (2.0, 0.0), (0.9, 1.0)]))
def test_c_equals_the_formula(seed, constants):
    texts = made(seed)
    index = full(texts, k1=constants[0], b=constants[1])
    for query in (*texts[:3], "w1 w2 w2 unknown", "nothing here"):
        found = index.scores(query)
        assert found == pytest.approx(brute_force(texts, query, *constants), abs=1e-9, rel=1e-9)
        order = index.top(query, 5).tolist()
        best = sorted((i for i in range(len(texts)) if found[i] > 0), key=lambda i: (-found[i], i))[:5]
        assert order == best


def test_few_matches_take_the_other_way_to_the_same_scores():
    texts = [*made(1, 500), "rare word here", "rare thing"]
    index = full(texts)
    assert index.scores("rare") == pytest.approx(brute_force(texts, "rare"), abs=1e-9)
    assert index.top("rare", 9).tolist() == [501, 500]


def test_used_documents_are_left_out_and_can_be_removed():
    texts = made(2, 60)
    index = full(texts)
    before = index.scores(texts[0])
    gone = np.zeros(60, bool)
    gone[::2] = True
    expected = [i for i in np.lexsort((np.arange(60), -before)).tolist() if i % 2 and before[i] > 0][:10]
    assert index.top(texts[0], 10, gone).tolist() == expected
    index.remove(gone)
    after = index.scores(texts[0])
    assert not after[::2].any() and after[1::2] == pytest.approx(before[1::2])  # statistics stay the corpus's
    assert index.top(texts[0], 10).tolist() == expected


def test_limits_of_queries():
    texts = ["common a", "common b", "common c d e g f", "common d e"]
    index = BM25(max_share=0.5, query_words=2, first_words=5)
    index.add(texts)
    terms, _ = index.query("common a d e f")
    asked = {w for w, i in index.vocabulary.items() if i in set(terms.tolist())}
    assert asked <= {"a", "d", "e"} and "a" in asked and len(asked) == 2  # f is the sixth word: not indexed
    assert "f" not in index.vocabulary


def test_texts_added_in_parts_are_one_index():
    texts = made(3, 1300, 10)
    parts = BM25(first_words=None, query_words=None, max_share=1.0)
    for i in range(0, 1300, 700):
        parts.add(iter(texts[i : i + 700]))
    assert (parts.scores(texts[0]) == full(texts).scores(texts[0])).all()
    with pytest.raises(ValueError, match="make a new one"):
        parts.add(["more"])


def test_empty_texts_and_an_empty_index():
    assert full([]).scores("x").shape == (0,)
    index = full(["", "a", "!?"])
    assert index.top("a", 3).tolist() == [1] and index.top("", 3).tolist() == []


def test_agrees_with_bm25s():
    bm25s = pytest.importorskip("bm25s")
    texts = made(4, 200)
    other = bm25s.BM25(k1=1.2, b=0.75, method="lucene", dtype="float64")
    other.index([t.split() for t in texts], show_progress=False)
    index = full(texts)
    for query in texts[:10]:
        theirs = other.get_scores(query.split())
        assert index.scores(query) / (1.2 + 1) == pytest.approx(theirs, rel=1e-6)  # which leaves k1 + 1 out


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"k1": -1}, "k1=-1"),
        ({"b": 1.5}, "b=1.5"),
        ({"first_words": 0}, "first_words=0"),
        ({"query_words": 0}, "query_words=0"),
        ({"max_share": 0}, "max_share=0"),
    ],
)
def test_refused(settings, names):
    with pytest.raises(ConfigError, match=names):
        BM25(**settings)
