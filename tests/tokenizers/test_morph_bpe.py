"""MorphBPE: training against brute force and the library's BPE, its metrics, its export. Letters: the card's list."""

import argparse
import inspect
import itertools
import json
import math
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers
from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizers import load_tokenizer
from trainwright.data.tokenizers._fast import FastTokenizer, hf_config
from trainwright.data.tokenizers._trained import BOS, EOS, PAD
from trainwright.data.tokenizers.bpe import train_bpe
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.data.tokenizers.morph_bpe import MAX_BYTES, byte_letters, count_words, learn_merges, train_morph_bpe
from trainwright.data.tokenizers.morph_metrics import (
    consistency,
    crossing_rate,
    edit_distance,
    morphological_consistency,
    morphological_edit_distance,
    word_tokens,
)
from trainwright.data.tokenizers.segmentation import Segmentation, load_segmentation, read_segmentation, shipped_names

LIBRARY = Path(inspect.getfile(argparse)).parent
SPECIAL = [EOS, BOS, PAD]


@pytest.fixture(scope="module")
def texts():
    """English prose and code: docstrings and comments of the standard library, 1 MB."""
    out, size = [], 0
    for path in sorted(LIBRARY.glob("*.py")):
        out.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(out[-1])
        if size > 1_000_000:
            break
    return out


def wrap(backend):
    return FastTokenizer(backend, hf_config(EOS, BOS, PAD, None))


def model(backend):
    return json.loads(backend.to_str())["model"]


def whole(words):
    return Segmentation({w: (w,) for w in words})


def brute_force(words, alphabet, vocab_size, min_frequency=2, alpha=None):
    """Merges by recounting every pair of every word each time. Words: tuples of morphemes -> count."""
    tokens = list(alphabet)
    state = []
    for morphemes, count in words.items():
        cuts = set(itertools.accumulate(map(len, morphemes)))
        state.append(([(c, i in cuts) for i, c in enumerate("".join(morphemes))], count))
    merges = []
    while len(tokens) < vocab_size:
        scores = Counter()
        for word, count in state:
            for (a, _), (b, cut) in itertools.pairwise(word):
                weight = count if not cut else 0 if alpha is None else count / alpha
                if weight:
                    scores[a, b] += weight
        if not scores:
            break
        best = min(scores, key=lambda p: (-round(scores[p], 9), tokens.index(p[0]), tokens.index(p[1])))
        if scores[best] < min_frequency:
            break
        joined = "".join(best)
        if joined not in tokens:
            tokens.append(joined)
        if best not in merges:
            merges.append(best)
        for word, _ in state:
            i = 0
            while i < len(word) - 1:
                if (word[i][0], word[i + 1][0]) == best and not (alpha is None and word[i + 1][1]):
                    word[i : i + 2] = [(joined, word[i][1])]
                i += 1
    return tokens, merges


# --- (a) no training merge spans a boundary


def test_a_every_learned_token_occurs_inside_a_morpheme(texts):
    segmentation = load_segmentation("en")
    backend = train_morph_bpe(texts, segmentation, 3000, special_tokens=SPECIAL)
    words = count_words(texts)
    # The pieces as the text has them, joined by a mark that no token may contain.
    inside = "\n".join(byte_letters(p) for w in words for p in segmentation.split_pretoken(w))
    learned = [t for t in backend.get_vocab() if len(t) > 1 and t not in SPECIAL]
    assert len(learned) > 2500
    assert [t for t in learned if t not in inside] == []
    # and the rule bites: plain BPE on the same text learns tokens that only occur across boundaries
    plain = train_bpe(texts, 3000, special_tokens=SPECIAL)
    assert [t for t in plain.get_vocab() if t not in SPECIAL and t not in inside]


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
                       st.integers(1, 9), min_size=1, max_size=8))  # fmt: skip
def test_a_no_merge_spans_a_boundary(words):
    tokens, _ = learn_merges(words, "abc", 40)
    morphemes = {m for word in words for m in word}
    assert all(any(t in m for m in morphemes) for t in tokens[3:])


# --- (b) one morpheme a word: plain BPE


def test_b_without_cuts_the_result_is_the_librarys_bpe(texts):
    ours = train_morph_bpe(texts, whole(["happiness"]), 3000, special_tokens=SPECIAL)
    theirs = train_bpe(texts, 3000, special_tokens=SPECIAL)
    assert model(ours)["merges"] == model(theirs)["merges"]
    assert json.loads(ours.to_str()) == json.loads(theirs.to_str())


def test_b_alpha_1_is_plain_bpe_and_a_large_alpha_comes_near_the_hard_form(texts):
    segmentation = load_segmentation("en")
    texts = texts[:12]
    plain = train_bpe(texts, 1500, special_tokens=SPECIAL)
    assert (
        model(train_morph_bpe(texts, segmentation, 1500, special_tokens=SPECIAL, alpha=1))["merges"]
        == (model(plain)["merges"])
    )
    hard = train_morph_bpe(texts, segmentation, 1500, special_tokens=SPECIAL)
    near = train_morph_bpe(texts, segmentation, 1500, special_tokens=SPECIAL, alpha=1e9)
    hard_set, near_set, plain_set = (set(b.get_vocab()) for b in (hard, near, plain))
    assert len(hard_set & near_set) > 0.97 * len(hard_set)
    assert hard_set != plain_set


# --- (c) the toy corpus


TOY = Segmentation({"happiness": ("happi", "ness"), "darkness": ("dark", "ness")})


def test_c_toy_corpus():
    texts = ["happiness darkness"] * 10
    vocab = set(train_morph_bpe(texts, TOY, 290).get_vocab())
    assert "ness" in vocab
    assert not [t for t in vocab if "in" in t or "kn" in t]
    assert [t for t in train_bpe(texts, 290).get_vocab() if "in" in t or "kn" in t]


def test_c_metrics_are_perfect_where_tokens_are_morphemes():
    tokenizer = wrap(train_morph_bpe(["happiness darkness"] * 10, TOY, 300, special_tokens=SPECIAL))
    assert word_tokens(tokenizer, ["happiness", "darkness"], "")[1][-1] == b"ness"
    tokenizer = wrap(train_morph_bpe([" happiness darkness"] * 10, TOY, 300, special_tokens=SPECIAL))
    assert word_tokens(tokenizer, list(TOY)) == [[b"happi", b"ness"], [b"dark", b"ness"]]
    assert morphological_edit_distance(tokenizer, TOY) == 0
    assert morphological_consistency(tokenizer, TOY) == (1, 1, 1, 1)
    assert crossing_rate(tokenizer, TOY) == 0
    plain = wrap(train_bpe([" happiness darkness"] * 10, 320, special_tokens=SPECIAL))  # words whole
    assert morphological_edit_distance(plain, TOY) == 2
    assert morphological_edit_distance(plain, TOY, normalize=True) == 1
    assert morphological_consistency(plain, TOY).f1 == 0
    assert crossing_rate(plain, TOY) == 1


# --- (d) exact round trip; pair counts


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_d_round_trip(text, english):
    assert english.decode(english.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(
    words=st.dictionaries(
        st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3).map(tuple),
        st.integers(1, 9),
        min_size=1,
        max_size=8,
    ),
    alpha=st.sampled_from([None, 1, 2, 5]),
    min_frequency=st.sampled_from([1, 2, 4]),
)
def test_d_incremental_counts_equal_brute_force(words, alpha, min_frequency):
    got = learn_merges(words, "abc", 30, min_frequency, alpha)
    assert got == brute_force(words, "abc", 30, min_frequency, alpha)


def test_d_brute_force_on_real_words(texts):
    segmentation = load_segmentation("en")
    counts = count_words(texts[:3])
    words = Counter()
    for word, count in counts.items():
        words[tuple(map(byte_letters, segmentation.split_pretoken(word)))] += count
    alphabet = sorted({c for w in words for m in w for c in m})
    for alpha in (None, 2.0):
        assert learn_merges(words, alphabet, 220, alpha=alpha) == brute_force(words, alphabet, 220, alpha=alpha)


# --- the effect: real English words, 4k vocabulary


@pytest.fixture(scope="module")
def english(texts):
    return wrap(train_morph_bpe(texts, load_segmentation("en"), 4096, special_tokens=SPECIAL))


def test_effect_on_english_words(texts, english):
    segmentation = load_segmentation("en")
    plain = wrap(train_bpe(texts, 4096, special_tokens=SPECIAL))
    # words of the list that the text has, so that both tokenizers saw them
    seen = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
    words = [w for w in segmentation if w in seen and len(segmentation[w]) > 1]
    assert len(words) > 300
    ours, theirs = (morphological_edit_distance(t, segmentation, words) for t in (english, plain))
    assert ours <= 0.9 * theirs
    ours, theirs = (morphological_consistency(t, segmentation, words).f1 for t in (english, plain))
    assert ours >= theirs + 0.05
    tokens = [sum(map(len, t.encode_batch(texts))) for t in (english, plain)]
    assert tokens[0] <= 1.15 * tokens[1]
    # what inference takes back is measured, and less than plain BPE crosses
    assert 0 < crossing_rate(english, segmentation, words) < crossing_rate(plain, segmentation, words)


def test_effect_on_turkish_words():
    segmentation = load_segmentation("tr")
    rng = random.Random(0)
    words = list(segmentation)
    rng.shuffle(words)
    # Zipf's law over two thirds of the list; the rest is never seen in training
    known, held_out = words[: 2 * len(words) // 3], words[2 * len(words) // 3 :]
    weights = [1 / (i + 10) for i in range(len(known))]
    texts = [" " + " ".join(rng.choices(known, weights, k=50)) for _ in range(400)]
    ours = wrap(train_morph_bpe(texts, segmentation, 700, special_tokens=SPECIAL))
    plain = wrap(train_bpe(texts, 700, special_tokens=SPECIAL))
    for chosen in (known, held_out):
        a, b = (morphological_edit_distance(t, segmentation, chosen) for t in (ours, plain))
        assert a <= 0.9 * b
        a, b = (morphological_consistency(t, segmentation, chosen).f1 for t in (ours, plain))
        assert a >= b + 0.05


# --- metrics


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_against_recursion(a, b):
    def slow(a, b):
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    assert edit_distance(a, b) == slow(a, b)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from([b"a", b"b", b"c"])), st.sets(st.sampled_from([b"x", b"y"]))),
                min_size=2, max_size=8))  # fmt: skip
def test_consistency_against_all_pairs(units):
    morphemes, tokens = [m for m, _ in units], [t for _, t in units]
    shares = [(bool(a & b), bool(s & t)) for (a, s), (b, t) in itertools.combinations(units, 2)]
    s, t, both = sum(x for x, _ in shares), sum(y for _, y in shares), sum(x and y for x, y in shares)
    got = consistency(morphemes, tokens)
    assert got.pairs == len(shares)
    if s and t:
        assert got.f1 == pytest.approx(2 * both / (s + t))
    else:
        assert math.isnan(got.f1) if not s and not t else got.f1 == 0


def test_consistency_may_ignore_single_characters():
    segmentation = Segmentation({"çab": ("ça", "b"), "çok": ("ç", "ok"), "ben": ("ben",)})
    tokenizer = ByteTokenizer()
    assert morphological_consistency(tokenizer, segmentation).precision == 0  # bytes are shared, morphemes are not
    assert math.isnan(morphological_consistency(tokenizer, segmentation, ignore_single=True).f1)
    with pytest.raises(ValueError, match="at least two words"):
        morphological_consistency(tokenizer, segmentation, ["ben"])
    with pytest.raises(ValueError, match="no words"):
        morphological_edit_distance(tokenizer, segmentation, [])


def test_drawn_pairs_come_near_all_pairs(english):
    segmentation = load_segmentation("en")
    everything = morphological_consistency(english, segmentation, max_words=10_000)
    some = morphological_consistency(english, segmentation, max_words=800, seed=1)
    assert everything.pairs > 1_500_000 and some.pairs == 800 * 799 // 2
    assert some.f1 == pytest.approx(everything.f1, abs=0.05)
    assert some == morphological_consistency(english, segmentation, max_words=800, seed=1)


def test_bytes_as_tokens():
    segmentation = Segmentation({"evler": ("ev", "ler")})
    assert word_tokens(ByteTokenizer(), ["ev"]) == [[b"", b"e", b"v"]]
    assert morphological_edit_distance(ByteTokenizer(), segmentation, prefix="") == 5
    assert crossing_rate(ByteTokenizer(), segmentation) == 0
    assert math.isnan(crossing_rate(ByteTokenizer(), segmentation, ["unknown"]))


def test_text_without_spaces_goes_in_parts():
    """So that it does not stall training; the parts are words of their own."""
    text = "".join(random.Random(0).choices("ACGT", k=20_000))
    parts = [text[i : i + MAX_BYTES] for i in range(0, len(text), MAX_BYTES)]
    assert model(train_morph_bpe([text], TOY, 356))["merges"] == model(train_bpe(parts, 356))["merges"]


# --- segmentations


@pytest.mark.parametrize("name", ["en", "tr"])
def test_shipped_segmentations(name):
    segmentation = load_segmentation(name)
    assert len(segmentation) > 1000 and sum(len(p) > 1 for p in segmentation.values()) > 800
    for word, pieces in segmentation.items():
        assert "".join(pieces) == word and unicodedata.is_normalized("NFC", word)
        assert word == word.lower() and word.isalpha()
    # affixes are shared: the most frequent ones occur in many words
    assert Counter(p for pieces in segmentation.values() for p in set(pieces)).most_common(5)[-1][1] > 50


def test_turkish_vowel_harmony():
    """Endings agree with the last vowel before them, whatever the word: a check on the list's making."""
    back = set("aıou")
    for pieces in load_segmentation("tr").values():
        for before, ending in itertools.pairwise(pieces):
            vowels = [c for c in ending if c in "aıoueiöü"]
            last = [c for c in "".join(before) if c in "aıoueiöü"]
            if vowels and last and not ending.endswith("yor"):
                assert (vowels[0] in back) == (last[-1] in back), pieces


def test_known_entries():
    english, turkish = load_segmentation("en"), load_segmentation("tr")
    assert english["happiness"] == ("happi", "ness") and english["unhappiness"] == ("un", "happi", "ness")
    assert english["renewed"] == ("re", "new", "ed") and english["making"] == ("mak", "ing")
    assert turkish["evlerimizde"] == ("ev", "ler", "imiz", "de") and turkish["evinde"] == ("ev", "i", "nde")
    assert shipped_names() == ["en", "tr"]


def test_all_forms_of_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(
        "# comment\n\nhappi|ness\ndarkness\tdark|ness\nkindness\tkind ness\n"
        "softness\tsoft @@ness\t100\n12 loud + ness\nplain\n",
        encoding="utf-8",
    )
    segmentation = read_segmentation(path)
    assert len(segmentation) == 6 and segmentation["plain"] == ("plain",)
    assert all(segmentation[w + "ness"] == (w, "ness") for w in ("happi", "dark", "kind", "soft", "loud"))


def test_casing_and_marks_stay_with_the_pieces():
    assert TOY.split("Happiness") == ["Happi", "ness"] and TOY.split("DARKNESS") == ["DARK", "NESS"]
    assert TOY.split_pretoken(" happiness") == [" happi", "ness"]
    assert TOY.split_pretoken("(darkness") == ["(dark", "ness"]
    assert TOY.split_pretoken(" unknown") == [" unknown"] and TOY.split_pretoken("\n ") == ["\n "]
    assert Segmentation({"i̇ler": ("i̇", "ler")}).split("İler") == ["İler"]


# --- bad input


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("happiness\thappy|ness", "line 2: .*do not join to 'happiness'; give the surface form"),
        ("happiness\thappi||ness", "line 2: .*empty piece"),
        ("darkness\tdarkn|ess", "line 2: 'darkness' has two segmentations, dark.ness and darkn.ess"),
    ],
)
def test_wrong_lines_are_refused_or_skipped(tmp_path, line, message):
    path = tmp_path / "words.txt"
    path.write_text(f"dark|ness\n{line}\nkind|ness\n")
    with pytest.raises(DataError, match=message):
        read_segmentation(path)
    with pytest.warns(UserWarning, match="1 of 3 lines skipped"):
        segmentation = read_segmentation(path, invalid="skip")
    assert set(segmentation) == {"darkness", "kindness"} and segmentation["darkness"] == ("dark", "ness")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("a\tb\nc\td\ngood|ness\n")
    with pytest.raises(DataError, match="2 of 3 lines are wrong"):
        read_segmentation(path, invalid="skip")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="cannot be read"):
        read_segmentation(path)
    path.write_text("# nothing\n")
    with pytest.raises(DataError, match="holds no word"):
        read_segmentation(path)
    with pytest.raises(DataError, match="do not join"):
        Segmentation({"happiness": ("happy", "ness")})
    with pytest.raises(ConfigError, match=r"segmentation='xx'.*\(en, tr\) nor a file"):
        load_segmentation("xx")


def test_vocabulary_below_the_alphabet_is_refused():
    with pytest.raises(ValueError, match="does not hold the alphabet of 256 symbols"):
        train_morph_bpe(["text"], TOY, 200)
    with pytest.raises(ConfigError, match="vocab_size=200"):
        registry.build("tokenizer", {"name": "morph_bpe", "vocab_size": 200})
    with pytest.raises(ValueError, match="'c' of the words is not in the alphabet"):
        learn_merges({("abc",): 1}, "ab", 10)
    for alpha in (0.5, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            learn_merges({("ab",): 1}, "ab", 10, alpha=alpha)
    with pytest.raises(ConfigError, match="alpha"):
        registry.build("tokenizer", {"name": "morph_bpe", "alpha": 0.5})


# --- as a recipe line


def test_recipe_line_follows_the_file(tmp_path, texts):
    path = tmp_path / "words.txt"
    path.write_text("self|ish\n")
    config = registry.build("tokenizer", {"name": "morph_bpe", "vocab_size": 400, "segmentation": str(path)})
    first = config.build(lambda: iter(texts[:3]), tmp_path / "cache")
    assert config.build(lambda: iter(texts[:3]), tmp_path / "cache").fingerprint() == first.fingerprint()
    path.write_text("sel|f\n")
    second = config.build(lambda: iter(texts[:3]), tmp_path / "cache")
    assert second.fingerprint() != first.fingerprint()
    assert len(list((tmp_path / "cache").glob("tokenizer-morph_bpe-*"))) == 2


@pytest.mark.parametrize("language", ["en", "tr"])
def test_transformers_and_tokenizers_load_the_export(tmp_path, language, texts):
    transformers = pytest.importorskip("transformers")
    segmentation = load_segmentation(language)
    corpus = texts[:5] if language == "en" else [" " + " ".join(segmentation)] * 2
    config = registry.build("tokenizer", {"name": "morph_bpe", "vocab_size": 550, "segmentation": language})
    tokenizer = config.build(lambda: iter(corpus), tmp_path / "cache")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    again = load_tokenizer(tmp_path / "saved")
    for text in [*segmentation, " ".join(segmentation), *corpus[:2], "Çağ 漢字 🎉\n\t x"]:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert library.encode(text, add_special_tokens=False).ids == ids == again.encode(text)
        assert theirs.decode(ids) == text
    assert len(theirs) == tokenizer.vocab_size == 550
