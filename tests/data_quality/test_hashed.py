"""Hashed n-grams under a linear layer, held against torch, scikit-learn and fastText."""

import numpy as np
import pytest
import torch
from real_text import prose, two_sources

from trainwright.core.errors import ConfigError, DataError
from trainwright.data.build.quality.hashed import (
    HashedClassifier,
    HashedRegressor,
    HashedSettings,
    buckets_of,
    load_hashed,
)
from trainwright.data.build.quality.training import auc, precision_at, spearman, train_scorer

SMALL = HashedSettings(dim=16)
PLANTED = HashedSettings(dim=8, epochs=15, ngrams=1, lr=0.5)


@pytest.fixture(scope="module")
def classifier():
    texts, labels, *_ = two_sources()
    return HashedClassifier.fit(texts, labels, SMALL)


def averaged(model, text):
    rows = model.row_of[buckets_of(text, model.settings)]
    return model.embedding[rows[rows >= 0]].astype(np.float64).mean(axis=0)


def test_a_it_is_logistic_regression_on_averaged_embeddings(classifier):
    from sklearn.linear_model import LogisticRegression

    _, _, texts, _ = two_sources()
    h = np.stack([averaged(classifier, t) for t in texts])
    twin = LogisticRegression()
    twin.classes_ = np.array([0, 1])
    twin.coef_ = (classifier.output[1] - classifier.output[0]).astype(np.float64)[None]
    twin.intercept_ = np.array([float(classifier.bias[1]) - float(classifier.bias[0])])
    assert classifier.classes == ["negative", "positive"]
    assert np.allclose(twin.predict_proba(h)[:, 1], classifier(texts), atol=1e-5)


def test_a_a_step_of_training_is_that_of_torch():
    """One batch, one epoch: Adagrad on cross-entropy of an EmbeddingBag under a Linear, dense and by autograd."""
    texts, labels = ["a b c a", "b c d", "d d e f a"], ["x", "y", "y"]
    settings = HashedSettings(dim=4, min_count=1, epochs=1, buckets=64, ngrams=2, seed=3)
    model = HashedClassifier.fit(texts, labels, settings)
    generator = torch.Generator().manual_seed(3)
    rows = len(model.embedding)
    bag = torch.nn.EmbeddingBag(rows, 4, mode="mean")
    linear = torch.nn.Linear(4, 2)
    with torch.no_grad():
        bag.weight.copy_((torch.rand(rows, 4, generator=generator) * 2 - 1) / 4)
        linear.weight.zero_()
        linear.bias.zero_()
    optimizer = torch.optim.Adagrad([*bag.parameters(), *linear.parameters()], lr=0.1)
    ids = [torch.from_numpy(model.row_of[buckets_of(t, settings)].astype(np.int64)) for t in texts]
    h = torch.cat([bag(i[None]) for i in ids])
    torch.nn.functional.cross_entropy(linear(h), torch.tensor([0, 1, 1])).backward()
    optimizer.step()
    assert np.allclose(bag.weight.detach().numpy(), model.embedding, atol=1e-6)
    assert np.allclose(linear.weight.detach().numpy(), model.output, atol=1e-6)
    assert np.allclose(linear.bias.detach().numpy(), model.bias, atol=1e-6)


def test_a_one_seed_is_one_model(classifier):
    texts, labels, *_ = two_sources()
    again = HashedClassifier.fit(texts, labels, SMALL)
    assert np.array_equal(again.embedding, classifier.embedding) and np.array_equal(again.bias, classifier.bias)
    other = HashedClassifier.fit(texts, labels, HashedSettings(dim=16, seed=1))
    assert not np.array_equal(other.embedding, classifier.embedding)


def test_a_auc_on_two_real_sources(classifier):
    _, _, texts, truth = two_sources()
    scores = np.array(classifier(texts))
    found = auc(scores, np.array(truth))
    from sklearn.metrics import roc_auc_score

    assert found == pytest.approx(roc_auc_score(truth, scores)) and found >= 0.95
    shuffled = np.random.default_rng(0).permutation(truth)
    assert auc(scores, shuffled) < 0.65


def test_as_good_as_fasttext(classifier, tmp_path):
    fasttext = pytest.importorskip("fasttext")
    if not hasattr(fasttext, "train_supervised"):
        pytest.skip("the package fasttext here only predicts")
    from trainwright.data.build.quality.normalize import normalize_line
    from trainwright.data.build.quality.scorers import load_scorer

    texts, labels, test, truth = two_sources()
    lines = [f"__label__{label} {normalize_line(t)}" for t, label in zip(texts, labels, strict=True)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    settings = {"dim": 16, "epoch": 3, "wordNgrams": 3, "lr": 0.1, "minCount": 3, "thread": 1, "verbose": 0}
    fasttext.train_supervised(str(tmp_path / "train.txt"), **settings).save_model(str(tmp_path / "model.bin"))
    theirs = load_scorer(tmp_path / "model.bin")(test)
    truth = np.array(truth)
    assert 0.9 < auc(np.array(theirs), truth) <= auc(np.array(classifier(test)), truth) + 0.01


def test_saved_and_loaded_it_is_the_same(classifier, tmp_path):
    texts = two_sources()[2][:20]
    again = load_hashed(classifier.save(tmp_path / "m"))
    assert again(texts) == classifier(texts) and again.settings == classifier.settings
    assert classifier([""]) == [pytest.approx(1 / (1 + np.exp(float(classifier.bias[0] - classifier.bias[1]))))]
    with pytest.raises(DataError, match="no whole quality model"):
        load_hashed(tmp_path)
    (tmp_path / "m" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(DataError, match="no whole quality model"):
        load_hashed(tmp_path / "m")


def test_streaming_is_prediction_text_by_text(classifier):
    texts = two_sources()[2][:30]
    assert [classifier([t])[0] for t in texts] == classifier(texts)


MARKS = ("for example", "because", "therefore", "means")


def planted(count, seed):
    """Real prose in which sentences that explain were put; the rating is how many, 0 to 5, and a little noise."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(prose()), count)
    texts, ratings = [], []
    for i in chosen:
        wanted = int(rng.integers(0, 6))
        words = prose()[i].split(" ")
        for _ in range(wanted):
            words.insert(int(rng.integers(len(words))), MARKS[int(rng.integers(len(MARKS)))])
        texts.append(" ".join(words))
        ratings.append(float(np.clip(wanted + rng.normal(0, 0.3), 0, 5)))
    return texts, ratings


def test_a_regressor_finds_a_planted_rule_on_held_out_text():
    texts, ratings = planted(1000, 0)
    test, truth = planted(200, 1)
    model = HashedRegressor.fit(texts, ratings, PLANTED)
    scores = np.array(model(test))
    from scipy.stats import spearmanr

    found = spearman(scores, np.array(truth))
    assert found == pytest.approx(spearmanr(scores, truth).statistic) and found >= 0.8
    assert spearman(scores, np.random.default_rng(0).permutation(truth)) < 0.3
    base = np.mean(np.array(truth) >= 4)
    assert precision_at(scores, np.array(truth) >= 4) >= 2 * base


def test_training_from_documents_judges_on_what_it_has_not_seen():
    from real_text import documents

    texts, ratings = planted(600, 2)
    rows = [d.with_metadata(edu_score=r) for d, r in zip(documents(texts, "p"), ratings, strict=True)]
    found = train_scorer([*rows, *documents(["unlabelled"] * 3, "u")], settings=PLANTED)
    assert found.figures["without_label"] == 3 and found.figures["spearman"] > 0.5
    assert found.figures["trained_on"] + found.figures["held_out"] == 600 and 30 < found.figures["held_out"] < 100
    with pytest.raises(DataError, match="no document has the metadata"):
        train_scorer(rows, "quality")


def test_constant_rankings_have_no_correlation():
    assert spearman(np.ones(4), np.arange(4.0)) is None and auc(np.ones(3), np.ones(3, bool)) is None
    with pytest.raises(ConfigError, match="share"):
        precision_at(np.ones(3), np.ones(3, bool), 0.0)


CHINESE = ["电脑与网络的发展改变了世界人们的生活也因此不同" * 3, "今天天气很好我们一起去公园玩吧"] * 10


@pytest.mark.parametrize("labels", [[1] * 20, [2.0] * 20])
def test_bad_labels_of_one_class(labels):
    with pytest.raises(ConfigError, match="labels"):
        HashedClassifier.fit(CHINESE, labels, SMALL)
    with pytest.raises(ConfigError, match="labels"):
        HashedRegressor.fit(CHINESE, labels, SMALL)


def test_bad_words_for_chinese():
    with pytest.raises(ConfigError, match="unit=char"):
        HashedRegressor.fit(CHINESE, [1, 2] * 10, HashedSettings(dim=4, unit="word"))
    model = HashedRegressor.fit(CHINESE, [1, 4] * 10, HashedSettings(dim=4, ngrams=5, unit="char"))
    assert model(CHINESE[:1])[0] < model(CHINESE[1:2])[0]


@pytest.mark.parametrize(
    "settings", [{"dim": 0}, {"ngrams": 0}, {"ngrams": 17}, {"buckets": 1000}, {"lr": 0.0}, {"unit": "letter"}]
)
def test_bad_settings(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        HashedSettings(**settings)


def test_bad_labels():
    with pytest.raises(ConfigError, match="labels"):
        HashedClassifier.fit(["a", "b"], ["x"], SMALL)
    with pytest.raises(ConfigError, match=r"labels=7\.0"):
        HashedRegressor.fit(["a", "b"], [7, 2], SMALL)
    with pytest.raises(ConfigError, match="positive"):
        HashedClassifier.fit(["a", "b"], ["x", "y"], SMALL, positive="z")
    with pytest.raises(DataError, match="min_count=3"):
        HashedClassifier.fit(["a b", "c d"], ["x", "y"], SMALL)
