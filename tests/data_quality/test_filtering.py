"""Filters by score, scorers of all kinds, seeds and the loop around them."""

import sys
import types

import numpy as np
import pytest
from real_text import code, documents, prose, two_sources

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.documents import Document
from trainwright.data.build.quality.filtering import QualityFilter
from trainwright.data.build.quality.hashed import HashedClassifier, HashedRegressor, HashedSettings
from trainwright.data.build.quality.refinement import refine
from trainwright.data.build.quality.scorers import load_scorer
from trainwright.data.build.quality.seeds import refresh, select, shift

SMALL = HashedSettings(dim=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    texts, labels, *_ = two_sources(200)
    return HashedClassifier.fit(texts, labels, SMALL).save(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def crawl():
    _, _, test, _ = two_sources(200)
    return documents(test[:100], "prose") + documents(test[100:], "code")


def ids(stage, rows, workers=0):
    return [d.id for d in stage.run(rows, workers)]


def test_c_it_is_idempotent_and_monotone_in_the_threshold(model, crawl):
    before = None
    for threshold in (0.05, 0.3, 0.5, 0.7, 0.95):
        kept = list(QualityFilter(model, threshold).run(crawl))
        assert ids(QualityFilter(model, threshold), kept) == [d.id for d in kept]
        assert before is None or {d.id for d in kept} <= before
        before = {d.id for d in kept}
    assert 0 < len(before) < len(crawl)


def test_kept_shares_by_source_are_reported(model, crawl):
    stage = QualityFilter(model)
    kept = list(stage.run(crawl))
    rows = stage.statistics.figures["sources"]
    for source in ("prose", "code"):
        mine = [d for d in kept if d.source == source]
        assert rows[source]["documents"] == 100 and rows[source]["kept"] == len(mine)
        assert rows[source]["kept_share"] == pytest.approx(len(mine) / 100)
    assert rows["prose"]["kept_share"] > 0.8 > 0.2 > rows["code"]["kept_share"]
    assert stage.statistics.dropped["low quality"] == len(crawl) - len(kept)
    assert all(0.5 < d.metadata["quality"] <= 1 for d in kept)
    assert rows["prose"]["mean_length_kept"] > 0


def test_workers_change_nothing(model, crawl):
    assert ids(QualityFilter(model), crawl, workers=1) == ids(QualityFilter(model), crawl)


def test_scales_and_bounds():
    rows = documents(["a" * n for n in (1, 3, 3, 5)], "s")

    def length(texts):
        return [len(t) for t in texts]

    assert ids(QualityFilter(length), rows) == ["s1", "s2", "s3"], "at 3 it passes"
    assert ids(QualityFilter(length, 3, strict=True), rows) == ["s3"]
    length.low, length.high = 0.0, 5.0
    for bad in (-1, 5.5, float("nan")):
        with pytest.raises(ConfigError, match="threshold"):
            QualityFilter(length, bad)


def test_bad_thresholds_of_a_probability(model):
    for bad in (0.0, 1.0, -0.2, 1.5):
        with pytest.raises(ConfigError, match="threshold"):
            QualityFilter(model, bad)


def test_any_scorer(model, tmp_path):
    assert load_scorer("judges:length")(["abc"]) == [3.0]
    assert load_scorer(len) is len
    regressor = HashedRegressor.fit(["a b c"] * 5 + ["d e f"] * 5, [1] * 5 + [4] * 5, SMALL)
    assert load_scorer(regressor.save(tmp_path / "r"))(["d e f"]) == regressor(["d e f"])
    with pytest.raises(DataError, match="1 scores for 2 texts"):
        list(QualityFilter("judges:broken").run(documents(["a", "b"], "s")))
    with pytest.raises(DataError, match="not finite"):
        list(QualityFilter(lambda texts: [float("nan")] * len(texts)).run(documents(["a"], "s")))
    for bad in ("nothing", "json:nothing", "judges:HERE"):
        with pytest.raises(ConfigError, match="model"):
            load_scorer(bad)
    with pytest.raises(DataError, match="holds no model"):
        load_scorer(tmp_path)


def test_a_sequence_classifier_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    for labels in (1, 2):
        config = transformers.BertConfig(
            vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
            num_labels=labels, max_position_embeddings=16,
        )  # fmt: skip
        network = transformers.BertForSequenceClassification(config).eval()
        network.save_pretrained(tmp_path / str(labels))
        tokenizer.save_pretrained(tmp_path / str(labels))
        scorer = load_scorer(f"hf:{tmp_path / str(labels)}")
        batch = tokenizer("a b b", return_tensors="pt")
        logits = network(**batch).logits[0].detach()
        expected = logits[0] if labels == 1 else logits.softmax(-1)[1]
        assert scorer(["a b b", "a"])[0] == pytest.approx(float(expected), abs=1e-5)
        assert (scorer.low, scorer.high) == ((0.0, 5.0) if labels == 1 else (0.0, 1.0))
    assert load_scorer(tmp_path / "2")(["a"]) == pytest.approx(scorer(["a"]))
    with pytest.raises(ConfigError, match="label"):
        load_scorer(f"hf:{tmp_path / '2'}#good")


def test_a_fasttext_model_by_its_package(tmp_path, monkeypatch):
    """The package's interface, stood in for: labels, and the inner predict that works with every NumPy."""
    seen = []

    class Inner:
        def predict(self, text, k, threshold, errors):
            seen.append(text)
            return [(0.8, "__label__pos"), (0.2, "__label__neg")]

    loaded = types.SimpleNamespace(f=Inner())
    fake = types.SimpleNamespace(FastText=types.SimpleNamespace(), load_model=lambda path: loaded)
    monkeypatch.setitem(sys.modules, "fasttext", fake)
    (tmp_path / "m.bin").touch()
    assert load_scorer(tmp_path / "m.bin")(["Héllo\nWorld"]) == [0.8]
    assert seen[-1] == "hello \\n world\n"
    assert load_scorer(f"{tmp_path / 'm.bin'}#neg")(["x"]) == [0.2]
    with pytest.raises(ConfigError, match="label"):
        load_scorer(f"fasttext:{tmp_path / 'm.bin'}#other")
    with pytest.raises(DataError, match="no such"):
        load_scorer(tmp_path / "none.bin")


def test_seeds_are_balanced_and_mixed():
    good = documents([f"good {i}" for i in range(300)], "books") + documents([f"g {i}" for i in range(20)], "wiki")
    bad = documents([f"bad {i}" for i in range(500)], "crawl")
    seeds = select(good, bad, 100)
    assert len(seeds.positives) == len(seeds.negatives) == 100
    assert seeds.figures()["positive"]["sources"] == {"books": 80, "wiki": 20}, "evenly as far as a domain reaches"
    assert seeds.labels.count("positive") == 100 and len(set(seeds.labels[:20])) == 2, "mixed"
    rng = np.random.default_rng(0)
    shuffled = select([good[i] for i in rng.permutation(len(good))], bad, 100)
    assert sorted(d.id for d in shuffled.positives) == sorted(d.id for d in seeds.positives), "whatever the order"
    assert {d.id for d in select(good, bad, 100, seed=1).negatives} != {d.id for d in seeds.negatives}
    few = select(good[:7], bad, 100)
    assert len(few.positives) == len(few.negatives) == 7
    capped = select(good, bad + documents([f"f {i}" for i in range(90)], "forum"), 100, max_domain_share=0.6)
    assert len(capped.positives) == len(capped.negatives) <= 100
    assert max(capped.figures()["positive"]["sources"].values()) <= 0.6 * 100


def test_seeds_by_site_and_without_what_both_have():
    good = [Document(f"g{i}", f"g{i}", "w", url=f"https://site{i % 2}.org/{i}") for i in range(20)]
    bad = [*documents([f"b{i}" for i in range(20)], "crawl"), Document("g0", "copy", "crawl")]
    seeds = select(good, bad, 6, by="site")
    assert len({d.url.split("/")[2] for d in seeds.positives}) == 2
    everything = select(good, bad, 100)
    assert "g0" not in {d.text for d in everything.positives + everything.negatives}


def test_bad_seeds_of_one_class():
    some = documents(["a", "b"], "s")
    for sides in (([], some), (some, []), (some, some)):
        with pytest.raises(ConfigError, match="both classes"):
            select(*sides)
    with pytest.raises(ConfigError, match="per_class"):
        select(some, some, 0)
    with pytest.raises(ConfigError, match="by"):
        select(some, some, by="topic")


def test_refreshing_takes_the_surest():
    seeds = select(documents(list("abcdefgh"), "p"), documents(list("ijklmnop"), "n"), 8)
    pool = documents([f"t{i}" for i in range(10)], "c")
    scores = [i / 10 for i in range(10)]
    found = refresh(seeds, pool, scores, share=0.25)
    assert {d.id for d in found.positives} >= {"c9", "c8"} and {d.id for d in found.negatives} >= {"c0", "c1"}
    assert len(found.positives) == len(found.negatives) == 8
    nothing = refresh(seeds, pool, [0.9] * 10)
    assert nothing.positives == seeds.positives, "no rejected document, so the classes would lose their balance"
    for bad in ({"threshold": 1.0}, {"share": 2.0}):
        with pytest.raises(ConfigError):
            refresh(seeds, pool, scores, **bad)


def test_the_loop_ends_where_nothing_is_gained():
    good, bad = documents(prose()[:120], "prose"), documents(code()[:120], "code")
    seeds = select(good[:40], bad[:40], 40)
    slices = [good[40 + 20 * i : 60 + 20 * i] + bad[40 + 20 * i : 60 + 20 * i] for i in range(4)]
    asked = []

    def verify(values):
        def value(accepted):
            asked.append(sum(d.source == "prose" for d in accepted) / len(accepted))
            return values[len(asked) - 1]

        return value

    found = refine(seeds, slices, verify([-0.1, -0.2, -0.2, -9.0]), settings=SMALL, max_rounds=4)
    assert [r.number for r in found.rounds] == [0, 1, 2] and found.best == 1 and len(asked) == 3
    assert all(a > 0.7 for a in asked)
    assert found.rounds[1].seeds["positive"]["documents"] == 40 and "mean_length" in found.rounds[0].shift["accepted"]
    asked.clear()
    once = refine(seeds, slices, verify([-0.1, -0.12]), settings=SMALL, min_gain=0.05)
    assert once.best == 0 and len(once.rounds) == 2
    with pytest.raises(ConfigError, match="slices"):
        refine(seeds, [], verify([0.0]), settings=SMALL)
    with pytest.raises(ConfigError, match="threshold"):
        refine(seeds, slices, verify([0.0]), threshold=0.0)


def test_a_shift_of_length_and_source_is_seen():
    rows = documents(["a" * 10] * 5, "short") + documents(["a" * 100] * 5, "long", 5)
    found = shift(rows, rows[5:])
    assert found["all"]["mean_length"] == 55 and found["accepted"]["mean_length"] == 100
    assert found["accepted"]["source_shares"] == {"long": 1.0}
