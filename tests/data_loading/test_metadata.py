"""Documents with their URL before them: what is trained on, what is not, and that text cannot forge the marks."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.registry import build
from trainwright.data.context_tokens import ContextTokens, context_tokens, with_context_tokens
from trainwright.data.metadata import MetadataConfig, clean_url, context_text, domain, with_context
from trainwright.data.module import DataConfig, build_data, build_tokenizer
from trainwright.data.sources.base import Document
from trainwright.data.tokenizers import load_tokenizer
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.objectives import NextToken

MARKS = ContextTokens(259, 260)
EOS = 256


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A JSON Lines file of 400 documents; every 20th has no URL. Texts of some sites are alike."""
    folder = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(0)
    with (folder / "docs.jsonl").open("w") as file:
        for i in range(400):
            row = {"text": "".join(rng.choice(list("abcdef "), int(rng.integers(5, 30)))) + f" {i}."}
            if i % 20:
                row["url"] = f"https://user:pw@site{i % 4}.org:8080/page/{i}?token=SECRET#top"
            row["score"], row["metadata"] = i / 400, {"topic": "art" if i % 2 else "law", "format": None}
            file.write(json.dumps(row) + "\n")
    return folder / "docs.jsonl"


def config(rows, tmp_path, metadata=None, **changes):
    return DataConfig.model_validate(
        {
            "sources": [{"name": "jsonl", "path": str(rows)}], "cache_dir": str(tmp_path / "cache"),
            "validation_fraction": 0.1, "metadata": metadata, **changes,
        }
    )  # fmt: skip


def module(rows, tmp_path, metadata=None, seq_len=128, seed=0, **changes):
    data = config(rows, tmp_path, metadata, **changes)
    return build_data(data, build_tokenizer(data, build("tokenizer", "bytes")), seq_len=seq_len, seed=seed)


def report_of(data):
    return next(iter(data.summary()["contexts"].values()))


# -- (a) rate 0 -----------------------------------------------------------------------------------------------------


def test_a_rate_0_gives_the_plain_stream_byte_for_byte(rows, tmp_path):
    plain, off = module(rows, tmp_path), module(rows, tmp_path, {"rate": 0.0})
    assert off.config.batcher == plain.config.batcher
    assert isinstance(off.tokenizer, ByteTokenizer) and off.fingerprint == plain.fingerprint
    one, two = plain.train_loader(4), off.train_loader(4)
    for _ in range(10):
        a, b = one.next_batch(), two.next_batch()
        for name in ("tokens", "targets", "weights", "positions", "doc_ids"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    for loader in (one, two):
        loader.close()


def test_a_rate_0_trains_to_the_same_weights(recipe, rows):
    source = [{"name": "jsonl", "path": str(rows)}]
    runs = []
    for name, metadata in (("plain", None), ("off", {"rate": 0.0})):
        trainer = Trainer(
            RunConfig.load(recipe(**{"run.name": name, "data.sources": source, "data.metadata": metadata}))
        )
        trainer.fit()
        runs.append(trainer.parallel.state())
    assert all(torch.equal(a, b) for a, b in zip(*(r.values() for r in runs), strict=True))


# -- (b) what is trained on -----------------------------------------------------------------------------------------


def test_b_context_tokens_have_weight_0_and_document_tokens_1(rows, tmp_path):
    data = module(rows, tmp_path)
    mixed = module(rows, tmp_path, {"rate": 1.0})
    loader = mixed.train_loader(4)
    inside_seen = 0
    for _ in range(20):
        batch = loader.next_batch()
        for tokens, targets, weights, docs in zip(
            batch.tokens, batch.targets, batch.weights, batch.doc_ids, strict=True
        ):
            for doc in docs.unique():
                at = (docs == doc).nonzero().flatten()
                ids = tokens[at].tolist()
                if MARKS.boc not in ids:
                    assert not weights[at].any()  # padding
                    continue
                close = ids.index(MARKS.eoc)
                assert ids[0] == MARKS.boc, "a document always begins with its context"
                w, t = weights[at].tolist(), targets[at].tolist()
                assert not any(w[:close]) and t[close - 1] == MARKS.eoc, "up to <eoc> as a target: weight 0"
                assert all(x == 1 for x in w[close : ids.index(EOS)]) and ids.index(EOS) == len(ids) - 1
                inside_seen += close
    loader.close()
    assert inside_seen > 500
    assert {MARKS.boc, MARKS.eoc}.isdisjoint(set(batch.targets[batch.weights > 0].tolist()))
    report = report_of(mixed)
    assert report["document_tokens"] == data.train_tokens, "document tokens are counted apart from the context's"
    assert mixed.train_tokens == report["document_tokens"] + report["context_tokens"] + report["repeated_tokens"]


def batch_of(pieces, length=64):
    from trainwright.data.dataset import ArrayDataset
    from trainwright.data.packing import Segments, assemble

    data = ArrayDataset([p.ids for p in pieces], [p.weights for p in pieces])
    n = np.arange(len(pieces))
    return assemble([(data, Segments(n, 0 * n, data.lengths.astype(np.int64)))], length, 258)


def test_b_masked_tokens_add_nothing_to_loss_and_count_but_are_attended_to():
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64}
    model = build("model", {"name": "decoder", **shape}).build(261, 64)
    settings = MetadataConfig()
    body = np.frombuffer(b"some text", dtype=np.uint8)

    def loss(context, other=b"second"):
        two = np.frombuffer(other, dtype=np.uint8)
        batch = batch_of(
            [
                *with_context(body, context, MARKS, EOS, 64, settings),
                *with_context(two, None, MARKS, EOS, 64, settings),
            ]
        )
        found = NextToken()(model, batch)
        return found, batch

    one, batch = loss(np.frombuffer(b"a.org", dtype=np.uint8))
    two, _ = loss(np.frombuffer(b"b.com", dtype=np.uint8))
    assert one.weight.item() == two.weight.item() == len(body) + 1 + len(b"second") + 1
    assert abs(one.sum.item() - two.sum.item()) > 1e-4, "the document must see its context"
    # The loss is that of the document's tokens alone, by hand.
    with torch.no_grad():
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        nll = torch.nn.functional.cross_entropy(logits[0], batch.targets[0], reduction="none")
    spans = [(6, 6 + len(body) + 1), (17 + 1, 17 + 1 + len(b"second") + 1)]  # from <eoc> on
    assert one.sum.item() == pytest.approx(sum(nll[a:b].sum().item() for a, b in spans), rel=1e-5)
    one.sum.backward()


def test_b_training_on_the_context_is_asked_for_by_name():
    body, context = np.arange(5), np.arange(50, 53)
    (piece,) = with_context(body, context, MARKS, EOS, 64, MetadataConfig(loss_on_metadata=True))
    assert piece.ids.tolist() == [259, 50, 51, 52, 260, 0, 1, 2, 3, 4, EOS] and piece.weights[1:].all()
    (piece,) = with_context(body, context, MARKS, EOS, 64, MetadataConfig(position="append", loss_on_metadata=True))
    assert piece.ids.tolist() == [0, 1, 2, 3, 4, 259, 50, 51, 52, 260, EOS] and piece.weights.all()


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 200), c=st.one_of(st.none(), st.integers(1, 12)), seq_len=st.integers(13, 40),
    position=st.sampled_from(["prepend", "append"]), empty=st.sampled_from(["markers", "none"]),
)  # fmt: skip
def test_b_pieces_of_a_long_document_train_each_token_once_after_its_own_past(n, c, seq_len, position, empty):
    append = position == "append"
    settings = MetadataConfig(max_tokens=8, position=position, loss_on_metadata=append, empty=empty)
    body = np.arange(n) % 200
    context = None if c is None else np.full(c, 222)
    pieces = with_context(body, context, MARKS, EOS, seq_len, settings)
    bare = context is None and empty == "none"
    inner = [] if context is None else [222] * min(c, 8)
    seen = []
    for i, piece in enumerate(pieces):
        assert len(piece.ids) == len(piece.weights) and (bare or len(piece.ids) <= seq_len)
        ids, w = piece.ids.tolist(), piece.weights.tolist()
        if not bare:
            block = [259, *inner, 260]
            at = 0 if not append else len(ids) - len(block) - (i == len(pieces) - 1)
            assert ids[at : at + len(block)] == block
            assert w[at : at + len(block)] == [float(append)] * len(block)
            ids, w = ids[:at] + ids[at + len(block) :], w[:at] + w[at + len(block) :]
        if i:
            assert w[0] == 0 and ids[0] == seen[-1], "a cut shows the token before it, untrained"
            ids, w = ids[1:], w[1:]
        assert all(w)
        seen += ids
    assert seen == [*body.tolist(), EOS]


# -- (d) rates and marks --------------------------------------------------------------------------------------------


def test_d_the_realized_rate_is_the_one_asked_for(rows, tmp_path):
    data = module(rows, tmp_path, {"rate": 0.9})
    report = report_of(data)
    known = report["with_context"] + report["free"]
    assert report["documents"] == known + report["missing"]
    assert report["with_context"] / known == pytest.approx(0.9, abs=3 * (0.09 / known) ** 0.5)
    assert report["missing"] > 0
    other = module(rows, tmp_path, {"rate": 0.9, "seed": 1})
    assert other.fingerprint != data.fingerprint, "the seed chooses others"
    assert module(rows, tmp_path, {"rate": 0.9}, seed=5).fingerprint == data.fingerprint


def test_d_documents_without_a_url_are_free_of_context_and_counted(rows, tmp_path):
    data = module(rows, tmp_path, {"rate": 1.0}, validation_fraction=0.0)
    report = report_of(data)
    assert (report["documents"], report["missing"], report["with_context"], report["free"]) == (400, 20, 380, 0)
    (dataset,) = data.train.values()
    bare = [i for i in range(400) if dataset.tokens(i)[:2].tolist() == [259, 260]]
    assert bare == list(range(0, 400, 20))
    none = module(rows, tmp_path, {"rate": 1.0, "empty": "none"}, validation_fraction=0.0)
    (dataset,) = none.train.values()
    assert [i for i in range(400) if 259 not in dataset.tokens(i)] == bare


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["<boc>", "<eoc>", "<", "boc", ">", "<eos>", " ", "a"]), max_size=12))
def test_d_text_never_produces_a_mark(pieces):
    text = "".join(pieces)
    tokenizer = with_context_tokens(ByteTokenizer())
    ids = tokenizer.encode(text)
    assert {259, 260}.isdisjoint(ids) and ids == list(text.encode())
    assert {259, 260}.isdisjoint(tokenizer.encode_batch([text])[0].tolist())


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_d_marks_are_special_in_trained_tokenizers_too_and_survive_saving(tmp_path, name):
    texts = ["the <boc> cat <eoc> sat on the mat. " * 5, "a dog and a <boc>"] * 20
    plain = build("tokenizer", {"name": name, "vocab_size": 300}).build(lambda: iter(texts), tmp_path)
    marked = with_context_tokens(plain)
    ids = context_tokens(marked)
    assert marked.vocab_size == plain.vocab_size + 2 and {ids.boc, ids.eoc}.isdisjoint(range(plain.vocab_size))
    for text in texts[:2]:
        assert marked.encode(text) == plain.encode(text) and {ids.boc, ids.eoc}.isdisjoint(marked.encode(text))
    marked.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert context_tokens(again) == ids and again.encode(texts[0]) == plain.encode(texts[0])
    assert again.token_byte_lengths()[[ids.boc, ids.eoc]].tolist() == [0, 0]
    assert with_context_tokens(again) is again
    assert again.vocab_size == marked.vocab_size


def test_a_loaded_tokenizer_saves_the_marks_it_was_given(tmp_path):
    ByteTokenizer().save(tmp_path / "plain")
    (tmp_path / "plain" / "vocab.json").write_text("{}")
    config = {"name": "hf", "path": str(tmp_path / "plain")}
    folder_tokenizer = build("tokenizer", config).build(lambda: iter(()), tmp_path)
    marked = with_context_tokens(folder_tokenizer)
    marked.save(tmp_path / "marked")
    assert context_tokens(load_tokenizer(tmp_path / "marked")) == MARKS


# -- texts of contexts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "cleaned", "host"),
    [
        ("https://en.wikipedia.org/wiki/Cat?x=1#y", "https://en.wikipedia.org/wiki/Cat", "en.wikipedia.org"),
        ("http://me:secret@Www.A.org:80/b", "http://www.a.org/b", "a.org"),
        ("example.com/path?id=7", "example.com/path", "example.com"),
        ("  //cdn.a.net/x ", "cdn.a.net/x", "cdn.a.net"),
        ("nothing at all", None, None),
        ("", None, None),
        ("http://[broken", None, None),
        ("http:///no-host", None, None),
        ("plainword", None, None),
    ],
)
def test_urls_lose_what_is_personal(url, cleaned, host):
    assert clean_url(url) == cleaned and domain(url) == host


def test_kinds_and_columns():
    doc = Document("t", "id7", {"url": "https://a.org/x?q=1", "score": 0.123456, "metadata": '{"topic": "art\\n"}'})
    columns = {"quality": "score", "topic": "metadata.topic"}

    def text(*kinds):
        return context_text(MetadataConfig(kinds=list(kinds), columns=columns), doc)

    assert text("url") == "https://a.org/x" and text("domain") == "a.org" and text("quality") == "0.12"
    assert text("topic") == "art" and text("id") == "id7" and text("format") is None
    assert text("url", "topic", "format") == "url: https://a.org/x\ntopic: art"
    nan = Document("t", "i", {"score": float("nan"), "metadata": "no json", "url": 3})
    assert context_text(MetadataConfig(kinds=["quality", "topic", "url"], columns=columns), nan) is None


def test_columns_of_objects_reach_the_context_and_long_ones_are_cut(rows, tmp_path):
    setting = {"kinds": ["topic", "url"], "columns": {"topic": "metadata.topic"}, "rate": 1.0, "max_tokens": 12}
    data = module(rows, tmp_path, setting, validation_fraction=0.0)
    (dataset,) = data.train.values()
    ids = dataset.tokens(1).tolist()
    assert bytes(ids[1 : ids.index(260)]) == b"topic: art\nu"
    assert report_of(data)["shortened"] == 380 and report_of(data)["missing"] == 0


def test_parquet_and_built_corpora_give_their_columns(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["one", "two"], "url": ["http://a.org/1?x", None], "metadata": ['{"topic": "art"}'] * 2})
    pq.write_table(table, tmp_path / "part.parquet")
    setting = {"kinds": ["url", "topic"], "columns": {"topic": "metadata.topic"}, "rate": 1.0}
    data = config(tmp_path / "part.parquet", tmp_path, setting, validation_fraction=0.0)
    data = data.model_copy(update={"sources": [build("source", {"name": "parquet", "path": str(tmp_path)})]})
    found = build_data(data, build_tokenizer(data, build("tokenizer", "bytes")), seq_len=128, seed=0)
    (dataset,) = found.train.values()
    texts = [bytes(i for i in dataset.tokens(d).tolist() if i < 256) for d in range(2)]
    assert texts == [b"url: http://a.org/1\ntopic: artone", b"topic: arttwo"]


def test_validation_is_free_of_context_unless_asked(rows, tmp_path):
    def marks(validation):
        data = module(rows, tmp_path, {"rate": 0.5, "validation": validation})
        (dataset,) = data.validation.values()
        return [dataset.tokens(d).tolist().index(260) for d in range(dataset.num_docs)]

    assert set(marks("free")) == {1}
    assert sum(m > 1 for m in marks("context")) > 0.9 * len(marks("context"))


def test_a_run_with_contexts_trains_resumes_and_keeps_its_marks(recipe, rows):
    from trainwright.train.runs import evaluate_run, load_run

    data = recipe(
        **{
            "data.sources": [{"name": "jsonl", "path": str(rows)}], "data.metadata": {"max_tokens": 16},
            "train.seq_len": 64, "checkpoint.every": 2,
        }
    )  # fmt: skip
    trainer = Trainer(RunConfig.load(data))
    summary = trainer.fit()
    assert trainer.config.data.batcher.name == "best_fit" and trainer.model.vocab_size == 261
    model, tokenizer, saved = load_run(trainer.config.run_dir)
    assert context_tokens(tokenizer) == MARKS and model.vocab_size == 261
    assert saved.data.metadata == trainer.config.data.metadata
    assert evaluate_run(trainer.config.run_dir)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)


# -- bad input ------------------------------------------------------------------------------------------------------


def test_a_context_as_long_as_a_row_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"data.metadata.max_tokens=64: leaves no room .* row of 64 tokens"):
        module(rows, tmp_path, {}, seq_len=64)
    with pytest.raises(ConfigError, match=r"max_tokens"):
        module(rows, tmp_path, {"max_tokens": 60}, seq_len=64)
    module(rows, tmp_path, {"max_tokens": 59}, seq_len=64)


def test_a_tokenizer_without_the_marks_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"data.metadata.tokens: the tokenizer has no special token '<boc>'"):
        build_data(config(rows, tmp_path, {"max_tokens": 8}), ByteTokenizer(), seq_len=64, seed=0)


def test_an_ordinary_token_as_mark_is_refused():
    with pytest.raises(ConfigError, match="'a' is an ordinary token of the vocabulary, so text produces it"):
        with_context_tokens(ByteTokenizer(), ("a", "<eoc>"))


def test_a_pretrained_model_without_room_for_the_marks_says_so(recipe, rows, tmp_path):
    from trainwright.models import save_pretrained

    model = build("model", {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "ffn_dim": 64}).build(259, 64)
    save_pretrained(model, tmp_path / "model", tokenizer=ByteTokenizer())
    data = recipe(
        **{
            "data.sources": [{"name": "jsonl", "path": str(rows)}], "data.metadata": {"max_tokens": 8},
            "tokenizer": None, "model": {"name": "pretrained", "path": str(tmp_path / "model")},
        }
    )  # fmt: skip
    with pytest.raises(ModelError, match="knows 259 ids and the tokenizer has 261"):
        Trainer(RunConfig.load(data))
    # reserved tokens of its own do
    data["data"]["metadata"]["tokens"] = ["<bos>", "<pad>"]
    trainer = Trainer(RunConfig.load(data))
    assert context_tokens(trainer.tokenizer, ("<bos>", "<pad>")) == ContextTokens(257, 258)


def test_data_without_any_of_the_columns_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"no training document has quality \(column 'quality'\)"):
        module(rows, tmp_path, {"kinds": ["quality"], "max_tokens": 8})


def test_a_batcher_that_cuts_documents_is_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"data.batcher='packed': cuts documents"):
        module(rows, tmp_path, {"max_tokens": 8}, batcher="packed")
    for name in ("best_fit", "padded", "multipack"):
        module(rows, tmp_path, {"max_tokens": 8}, batcher=name)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rate": 1.1}, "metadata.rate=1.1"),
        ({"rate": -0.1}, "metadata.rate=-0.1"),
        ({"kinds": []}, "metadata.kinds"),
        ({"kinds": ["url", "url"]}, "names a kind twice"),
        ({"kinds": ["colour"]}, "metadata.kinds"),
        ({"max_tokens": 0}, "metadata.max_tokens=0"),
        ({"cooldown": 1.0}, "metadata.cooldown=1.0"),
        ({"position": "append"}, "changes nothing"),
        ({"tokens": ["<a>", "<a>"]}, "one and the same"),
        ({"ratte": 0.5}, "did you mean 'rate'"),
    ],
)
def test_settings_out_of_range_are_refused(recipe, setting, message):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(recipe(**{"data.metadata": setting}))
    assert message in str(caught.value)
