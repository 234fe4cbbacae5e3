"""Mixtures, shuffles and held-out parts (card B068: d, bad input)."""

import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_corpus import text

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build import mixing as module
from trainwright.data.build.documents import Document, sha256
from trainwright.data.build.filters import Decontaminate
from trainwright.data.build.mixing import is_held_out, mix, plan_mixture, shuffle


def made(name, lengths):
    return [Document("x" * n, f"{name}{i}", name) for i, n in enumerate(lengths)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 40), min_size=1, max_size=60)), min_size=1, max_size=4
    )
)
def test_d_counts_within_one_document_of_the_target(spec):
    weights = [w for w, _ in spec]
    fractions = {f"s{i}": w / sum(weights) for i, w in enumerate(weights)}
    sources = {f"s{i}": made(f"s{i}", lengths) for i, (_, lengths) in enumerate(spec)}
    available = {n: sum(len(d.text) for d in ds) for n, ds in sources.items()}
    total = min(int(available[n] / f) for n, f in fractions.items())
    if total < 1:
        return
    shares = plan_mixture(fractions, available, total)
    out = list(mix(sources, shares))
    for name, share in shares.items():
        given = [d for d in out if d.source == name]
        tokens = sum(len(d.text) for d in given)
        assert tokens == share.given and len(given) == share.documents
        assert share.target <= tokens < share.target + len(given[-1].text)
        assert len({d.id for d in given}) == len(given)
        assert share.epochs <= 1


def test_shares_hold_all_the_way():
    sources = {"a": made("a", [7] * 500), "b": made("b", [11] * 500), "c": made("c", [3] * 500)}
    fractions = {"a": 0.5, "b": 0.3, "c": 0.2}
    given = Counter()
    shares = plan_mixture(fractions, {n: sum(len(d.text) for d in ds) for n, ds in sources.items()}, 4000)
    for document in mix(sources, shares):
        given[document.source] += len(document.text)
        for name, fraction in fractions.items():
            assert abs(given[name] - fraction * given.total()) <= 12


def test_repeats_where_they_are_allowed():
    sources = {"a": made("a", [10] * 5), "b": made("b", [10] * 100)}
    shares = plan_mixture({"a": 0.5, "b": 0.5}, {"a": 50, "b": 1000}, 400, allow_repeat=True)
    out = list(mix(sources, shares))
    assert shares["a"].epochs == 4.0 and shares["b"].epochs == 0.2
    assert Counter(d.id for d in out if d.source == "a") == dict.fromkeys((f"a{i}" for i in range(5)), 4)


@pytest.mark.parametrize(
    ("fractions", "total", "names"),
    [
        ({"a": 0.5, "b": 0.4}, 10, "sum to 0.9"),
        ({"a": 1.5, "b": -0.5}, 10, "fractions.b=-0.5"),
        ({"a": 0.0, "b": 0.0}, 10, "sum to 0"),
        ({"a": 0.5, "d": 0.5}, 10, "no such source; there are a, b, empty"),
        ({"a": 0.5, "b": 0.5}, 1000, "asks for 500 of a source that has 100; lower total to 200"),
        ({"empty": 1.0}, 10, "is empty"),
        ({"a": 1.0}, 0, "total=0"),
    ],
)
def test_refused(fractions, total, names):
    with pytest.raises(ConfigError, match=names):
        plan_mixture(fractions, {"a": 100, "b": 300, "empty": 0}, total)


def test_a_source_that_holds_less_than_was_said():
    with pytest.raises(DataError, match="ended at 20 of 50; it holds less"):
        list(mix({"a": made("a", [10, 10])}, plan_mixture({"a": 1.0}, {"a": 100}, 50)))


def test_shuffle(tmp_path):
    documents = made("a", range(1, 300))
    first = list(shuffle(documents, 1, tmp_path))
    assert sorted(d.id for d in first) == sorted(d.id for d in documents)
    assert [d.id for d in first] != [d.id for d in documents]
    assert first == list(shuffle(iter(documents), 1, tmp_path))
    assert first != list(shuffle(documents, 2, tmp_path))
    # No trace of the order: a document's old and new places are uncorrelated.
    places = {d.id: i for i, d in enumerate(documents)}
    pairs = [(places[d.id] - 149, i - 149) for i, d in enumerate(first)]
    correlation = sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs)
    assert abs(correlation) < 0.25
    assert list(tmp_path.iterdir()) == []


def test_the_order_is_the_same_however_many_buckets(tmp_path, monkeypatch):
    """Few or many, of the right size or split once more, and with one document that is larger than a bucket."""
    documents = [*made("a", range(1, 400)), Document("y" * 50_000, "large", "a")]
    expected = list(shuffle(documents, 3, tmp_path))
    files = []
    kept = module._into_buckets
    monkeypatch.setattr(module, "_into_buckets", lambda *a: files.append(a[-1]) or kept(*a))
    for size, most in ((2000, 1000), (2000, 3), (500, 2)):
        monkeypatch.setattr(module, "BUCKET_BYTES", size)
        monkeypatch.setattr(module, "MOST_BUCKETS", most)
        for expected_bytes in (0, 1000, 150_000):
            files.clear()
            assert list(shuffle(documents, 3, tmp_path, expected_bytes)) == expected
            assert max(files) <= most
            assert len(files) > 1 or expected_bytes == 150_000
    assert list(tmp_path.iterdir()) == []


def test_a_second_gathering_gives_the_same(tmp_path):
    documents = made("a", range(1, 50))
    module.scatter(documents, tmp_path, 0, 3 * module.BUCKET_BYTES)
    half = module.gather(tmp_path)
    first = [next(half) for _ in range(20)]
    assert list(module.gather(tmp_path))[:20] == first
    assert sorted(d.id for d in module.gather(tmp_path)) == sorted(d.id for d in documents)


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 1 << 18)

    def peak(count):
        documents = (Document(f"{i} " * 500, f"{i}", "a") for i in range(count))
        tracemalloc.start()
        for _ in shuffle(documents, 0, tmp_path, 2500 * count):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(4000) < 1.5 * peak(1000) < 3 << 20


def test_contaminants_are_taken_one_by_one():
    from trainwright.data.build.blend import Blend

    alive = []

    class Text(str):
        def __del__(self):
            alive.remove(1)

    def exam():
        rng = random.Random(0)
        for _ in range(50):
            alive.append(1)
            assert len(alive) < 4
            yield Text(text(rng, 30))

    blend = Blend({"a": made("a", [10])}, contaminants=exam())
    rng = random.Random(0)
    assert blend.clean is not None and blend.clean.apply(Document(text(rng, 30), "0")) != Document(text(rng, 30), "0")


def test_d_held_out_and_training_texts_share_no_hash():
    rng = random.Random(0)
    texts = [text(rng, 20) for _ in range(400)]
    documents = [Document(t, f"{i}", "a") for i, t in enumerate(texts + texts[:100])]  # with exact copies
    held = [d for d in documents if is_held_out(d, 0.1)]
    train = [d for d in documents if not is_held_out(d, 0.1)]
    assert 20 < len(held) < 80
    assert not {sha256(d.text) for d in held} & {sha256(d.text) for d in train}
    # A set that was held out by someone else may be in the corpus; then it has to go.
    foreign = [texts[3], texts[50], "not in the corpus"]
    stage = Decontaminate(foreign)
    clean = list(stage.run(train))
    assert not {sha256(t) for t in foreign} & {sha256(d.text) for d in clean}
    assert len(train) - len(clean) == stage.statistics.dropped["in the held-out set"] > 0
