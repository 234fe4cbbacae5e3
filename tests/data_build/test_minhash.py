"""MinHash against its definition and its theory (card B068: a, b)."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigError
from trainwright.data.build.minhash import (
    BLOCK,
    MinHasher,
    Shingles,
    band_keys,
    check_bands,
    choose_bands,
    hit_rate,
    jaccard,
    words,
)


def planted(similarity, pairs, rng, union=1000):
    """Pairs of random sets with exactly this Jaccard similarity, as Shingles: first and second of each pair in turn."""
    common = round(similarity * union)
    rest = union - common
    values, sizes = [], []
    for _ in range(pairs):
        items = rng.choice(2**32, union, replace=False) if union > 2000 else rng.integers(0, 2**32, union)
        items = items.astype(np.uint32)
        first = items[: common + rest // 2]
        second = np.concatenate((items[:common], items[common + rest // 2 :]))
        values += [first, second]
        sizes += [len(first), len(second)]
    return Shingles(np.concatenate(values), np.concatenate(([0], np.cumsum(sizes))), 0)


@pytest.mark.parametrize(
    ("bands", "rows", "expected"),
    [(9, 13, {0.7: 0.084, 0.8: 0.399, 0.9: 0.929}), (14, 8, {0.7: 0.565, 0.8: 0.924, 0.9: 0.9996})],
)
def test_a_hit_rate(bands, rows, expected):
    rng = np.random.default_rng(1)
    for similarity, rate in expected.items():
        assert hit_rate(similarity, bands, rows) == pytest.approx(rate, abs=1e-3)
        pairs = 1500
        keys = band_keys(MinHasher(seed=5).signatures(planted(similarity, pairs, rng)), bands, rows)
        measured = np.any(keys[0::2] == keys[1::2], axis=1).mean()
        exact = hit_rate(similarity, bands, rows)
        assert abs(measured - exact) <= 3 * math.sqrt(exact * (1 - exact) / pairs) + 1 / pairs


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.8, 0.95])
def test_b_error_of_the_estimate(similarity):
    signatures = MinHasher(seed=2).signatures(planted(similarity, 1500, np.random.default_rng(3)))
    estimate = (signatures[0::2] == signatures[1::2]).mean(axis=1)
    theory = math.sqrt(similarity * (1 - similarity) / 128)
    assert estimate.std() <= 1.2 * theory
    assert abs(estimate.mean() - similarity) <= 4 * theory / math.sqrt(1500)
    assert estimate.std() >= 0.8 * theory  # else the test pairs would be too much alike


def test_signatures_are_minima_in_exact_arithmetic():
    hasher = MinHasher(permutations=7, ngram=3, seed=4)
    texts = ["", "one", "one two three four", "x " * 50, " ".join(map(str, range(40))), "..."]
    shingles = hasher.shingles(texts)
    signatures = hasher.signatures(shingles)
    for i in range(len(texts)):
        values = [int(v) for v in shingles.of(i)]
        for p in range(7):
            a, b = int(hasher._a[p]), int(hasher._b[p])
            assert signatures[i, p] == min(((a * v + b) % 2**32 for v in values), default=2**32 - 1)
    assert shingles.short == 1
    assert [len(shingles.of(i)) for i in range(6)] == [0, 1, 2, 48, 38, 0]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.text(alphabet="ab .é漢", max_size=30), max_size=8), st.integers(1, 4), st.sampled_from(["word", "char"])
)
def test_a_text_has_the_same_shingles_in_any_company(texts, ngram, unit):
    hasher = MinHasher(16, ngram, unit)
    together = hasher.shingles(texts)
    for i, text in enumerate(texts):
        alone = hasher.shingles([text])
        assert np.array_equal(alone.values, together.of(i))
        assert np.array_equal(hasher.signatures(alone)[0], hasher.signatures(together)[i])


def test_shingles_are_the_sets_of_ngrams():
    """Equal shingles exactly where the n-grams of words are equal, so the Jaccard similarity is that of the n-grams."""
    one = "The quick, brown fox -- jumps over the lazy dog! Then the quick brown fox sleeps."
    two = "the QUICK brown fox jumps over the lazy cat. Then   the quick brown fox sleeps"
    shingles = MinHasher(ngram=3).shingles([one, two])

    def grams(text):
        found = words(text)
        return {tuple(found[i : i + 3]) for i in range(len(found) - 2)}

    exact = len(grams(one) & grams(two)) / len(grams(one) | grams(two))
    assert jaccard(np.unique(shingles.of(0)), np.unique(shingles.of(1))) == pytest.approx(exact)


def test_words():
    assert words("Don't STOP,\tme\nnow!") == ["don", "t", "stop", "me", "now"]
    assert words("Cafe\u0301") == words("Café")
    assert words("我喜欢GPU编程") == ["我", "喜", "欢", "gpu", "编", "程"]
    assert words("?! …") == []


def test_long_texts_go_through_in_one_block():
    hasher = MinHasher(8)
    text = " ".join(str(i * 7919) for i in range(BLOCK + 5000))
    signatures = hasher.signatures(hasher.shingles(["a b c d e f", text, "g h i j k l"]))
    assert np.array_equal(signatures[1], hasher.signatures(hasher.shingles([text]))[0])


def test_another_process_hashes_alike():
    hasher = MinHasher(16, 4, "word", 9)
    again = pickle.loads(pickle.dumps(hasher))
    for h in (hasher, again):
        assert np.array_equal(h.shingles(["a b c d e f g"]).values, hasher.shingles(["a b c d e f g"]).values)
    assert np.array_equal(hasher._a, again._a)
    other = MinHasher(16, 4, "word", 10)
    assert not np.array_equal(other.shingles(["a b c d"]).values, hasher.shingles(["a b c d"]).values)


def test_known_value():
    """What an index on disk relies on: the hash of today is that of tomorrow."""
    hasher = MinHasher(4, 2, "word", 0)
    shingles = hasher.shingles(["hello world again"])
    assert shingles.values.tolist() == KNOWN_SHINGLES
    assert hasher.signatures(shingles)[0].tolist() == KNOWN_SIGNATURE


KNOWN_SHINGLES = [3713093675, 135630340]
KNOWN_SIGNATURE = [1140040756, 998555365, 2712902305, 3209379226]


def test_choice_of_bands():
    bands, rows = choose_bands(0.8, 128)
    assert (bands, rows) == (16, 8)
    assert hit_rate(0.8, bands, rows) >= 0.9 > hit_rate(0.8, 128 // 9, 9)
    assert choose_bands(1.0, 128) == (1, 128)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"permutations": 0}, "permutations=0"),
        ({"ngram": 0}, "ngram=0"),
        ({"unit": "line"}, "unit='line'"),
    ],
)
def test_refused(wrong, names):
    with pytest.raises(ConfigError, match=names):
        MinHasher(**wrong)


def test_more_rows_than_permutations():
    with pytest.raises(ConfigError, match="need 130 permutations; there are 128"):
        check_bands(10, 13, 128)
    with pytest.raises(ConfigError, match="at least 1"):
        check_bands(0, 13, 128)
