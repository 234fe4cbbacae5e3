"""The data section of a recipe, from files to batches and figures."""

import json
from collections import Counter

import numpy as np
import pytest

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build, config_error
from trainwright.data.dataset import ArrayDataset
from trainwright.data.module import DataConfig, DataModule, build_data, build_tokenizer
from trainwright.data.tokenizers.bytes import ByteTokenizer

BYTES = ByteTokenizer()


def config(tmp_path, n=1, **settings):
    sources = [{"name": "text", "path": str(tmp_path / f"s{k}")} for k in range(n)]
    return DataConfig.model_validate({"sources": sources, "cache_dir": str(tmp_path / "cache")} | settings)


def module(tmp_path, train, validation=(), weights=None, seq_len=8, **settings):
    """A DataModule over datasets in memory."""
    sources = [{"name": "text", "path": str(tmp_path)} for _ in train]
    for source, weight in zip(sources, weights or [], strict=False):
        source["weight"] = weight
    data = DataConfig.model_validate({"sources": sources, "prefetch": 0} | settings)
    validation = list(validation) or [ArrayDataset([], name=d.name) for d in train]
    return DataModule(data, BYTES, list(train), validation, seq_len=seq_len, seed=1)


def documents(n, length, name="array", first=0, weights=None):
    return ArrayDataset([[(first + d) % 256] * (length - 1) + [256] for d in range(n)], weights, name)


def write(folder, texts):
    folder.mkdir()
    for k, text in enumerate(texts):
        (folder / f"{k:03d}.txt").write_text(text, encoding="utf-8")


def test_two_sources_with_one_name_are_both_there(tmp_path):
    one, other, third = documents(4, 8, "same"), documents(6, 8, "same", 50), documents(2, 8, "same#2", 90)
    data = module(tmp_path, [one, other, third], weights=[2.0, 1.0, 1.0])
    assert list(data.train) == ["same", "same#2", "same#2#2"]
    assert [d.num_docs for d in data.train.values()] == [4, 6, 2]
    assert sum(data.weights.values()) == 4 and list(data.weights.values()) == [2.0, 1.0, 1.0]
    loader = data.train_loader(8)
    counts = Counter(int(t) // 50 if t < 90 else 2 for _ in range(6) for t in loader.next_batch().tokens[:, 0])
    assert counts == {0: 24, 1: 12, 2: 12}


def test_without_weights_all_documents_are_one_pool(tmp_path):
    data = module(tmp_path, [documents(4, 8, "same"), documents(12, 8, "same", 50)])
    assert data.weights is None and data.rows_per_epoch == 16
    loader = data.train_loader(4)
    first = [int(t) for _ in range(4) for t in loader.next_batch().tokens[:, 0]]
    assert sorted(first) == [*range(4), *range(50, 62)]


def test_the_order_of_sources_in_the_recipe_does_not_matter(tmp_path):
    a, b = documents(4, 8, "a"), documents(12, 8, "b", 50)
    one, other = (module(tmp_path, d).train_loader(4) for d in ([a, b], [b, a]))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (one.next_batch().tokens == other.next_batch().tokens).all()


def test_weights_for_some_sources_only_are_refused(tmp_path):
    from pydantic import ValidationError

    sources = [{"name": "text", "path": "x", "weight": 2.0}, {"name": "text", "path": "y"}]
    with pytest.raises(ValidationError) as raised:
        DataConfig.model_validate({"sources": sources})
    error = config_error(raised.value, DataConfig)
    assert isinstance(error, ConfigError)
    assert "sources.1 has no weight but others have; give one to every source or to none" in str(error)


def test_no_source_is_refused():
    with pytest.raises(ValueError, match="name at least one source"):
        DataConfig.model_validate({"sources": []})


def test_from_text_files_to_batches(tmp_path):
    texts = [f"document {k}: äöü " * (k % 5 + 1) for k in range(40)]
    write(tmp_path / "s0", texts)
    settings = config(tmp_path, validation_fraction=0.25)
    tokenizer = build_tokenizer(settings, build("tokenizer", "bytes"))
    data = build_data(settings, tokenizer, seq_len=16, seed=1)
    summary = data.summary()
    assert summary["documents"] + summary["validation_documents"] == 40
    assert summary["validation_documents"] > 2
    total = sum(len(t.encode()) + 1 for t in texts)
    assert summary["train_tokens"] + summary["validation_tokens"] == total
    assert summary["train_bytes"] == summary["train_tokens"] - summary["documents"]  # a byte a token, but EOS
    assert summary["rows_per_epoch"] == -(-summary["train_tokens"] // 16)
    with data.train_loader(4) as loader:
        rows = [row for _ in range(-(-summary["rows_per_epoch"] // 4)) for row in loader.next_batch().tokens]
        text = [tokenizer.decode(row.tolist()) for row in rows]
    assert any("document" in t for t in text)
    batches = list(data.validation_batches(4))
    scored = sum(int(b.extras["target_bytes"].sum()) for b in batches)
    assert scored == summary["validation_tokens"] - 2 * summary["validation_documents"]
    json.dumps(summary)


def test_validation_may_be_one_source_or_empty(tmp_path):
    train = [documents(4, 8, "a"), documents(4, 8, "b", 50)]
    data = module(tmp_path, train, [documents(2, 8, "a", 100), documents(3, 8, "b", 150)])
    count = {source: sum(b.shape[0] for b in data.validation_batches(8, source=source)) for source in (None, "a", "b")}
    assert count == {None: 5, "a": 2, "b": 3}
    with pytest.raises(ConfigError, match=r"source='c'"):
        list(data.validation_batches(8, source="c"))
    empty = module(tmp_path, train)
    assert list(empty.validation_batches(8)) == [] and empty.validation_tokens == 0


def test_nothing_to_train_on_is_refused(tmp_path):
    with pytest.raises(DataError, match="training split holds no document"):
        module(tmp_path, [documents(0, 8)])


def test_masks_of_zero_everywhere_are_refused(tmp_path):
    masked = documents(5, 8, weights=[np.zeros(8)] * 5)
    with pytest.raises(DataError, match="no token of the training data is trained on"):
        module(tmp_path, [masked])


def counted_share(data, steps):
    """Share of trained tokens and of padding in what the loader gives."""
    loader = data.train_loader(8)
    trained = real = total = 0
    for _ in range(steps):
        batch = loader.next_batch()
        pad = batch.tokens == BYTES.pad_id
        trained += int((batch.weights > 0).sum())
        real += int((~pad).sum())
        total += batch.tokens.numel()
    return trained / real, 1 - real / total


def test_the_trained_share_is_exact_for_data_without_masks(tmp_path):
    data = module(tmp_path, [documents(24, 7, "a"), documents(8, 3, "b")], seq_len=8)
    assert data.trained_share == (24 * 6 + 8 * 2) / (24 * 7 + 8 * 3)
    assert counted_share(data, data.rows_per_epoch // 8)[0] == pytest.approx(data.trained_share, abs=0.01)


def test_the_trained_share_reads_masks(tmp_path):
    rng = np.random.default_rng(0)
    weights = [rng.choice([0.0, 0.5, 1.0], 16) for _ in range(60)]
    data = module(tmp_path, [documents(60, 16, weights=weights)], seq_len=16)
    exact = sum(np.count_nonzero(w[1:]) for w in weights) / (60 * 16)
    assert data.trained_share == pytest.approx(exact, abs=1e-12)
    assert data.summary()["trained_share"] == data.trained_share
    assert data.summary()["trained_share_sampled"] is False


def test_the_trained_share_of_much_masked_data_is_sampled(tmp_path):
    n = 20_000
    weights = [np.full(4, float(k % 4 == 0)) for k in range(n)]
    data = module(tmp_path, [documents(n, 4, weights=weights)])
    assert data.trained_share == pytest.approx(0.75 / 4, rel=0.1)
    assert data.summary()["trained_share_sampled"] is True


def test_in_a_mixture_shares_are_of_what_is_drawn(tmp_path):
    masked = documents(30, 8, "masked", weights=[[1, 0, 0, 0, 1, 1, 1, 1]] * 30)
    plain = documents(200, 5, "plain", 50)
    data = module(tmp_path, [masked, plain], weights=[3.0, 1.0], batcher="padded")
    share, padding = counted_share(data, 40)
    assert data.trained_share == pytest.approx(share, abs=1e-9)
    assert data.summary()["padding_share"] == pytest.approx(padding, abs=1e-9)
