"""Conformance of every registered tokenizer, against transformers where it reads the saved folder."""

import argparse
import inspect
import json
import os
import pickle
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.tokenizers import load_tokenizer
from trainwright.data.tokenizers._trained import sample_texts

SOURCE = inspect.getsource(argparse)
CORPUS = [SOURCE[i : i + 500] + "# année 漢字\n" for i in range(0, 40_000, 500)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEXTS = [
    "hello world 1234567 don't stop",
    "  leading and trailing  ",
    "\n\n\ttabs\r\nand\x00control\x1b characters\x7f",
    "é漢字🎉 café ﬁ Å",
    "a" * 300 + " " * 100,
    "",
    " ",
]


class Corpus:
    def __init__(self, texts=CORPUS):
        self.texts, self.reads = texts, 0

    def __call__(self):
        self.reads += 1
        return iter(self.texts)


def llama2_style(folder):
    """A SentencePiece-style BPE: space marks, byte fallback, a dummy space in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "▁h", "el", "▁hel", "lo", "▁hello", "▁▁", "▁w"]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o"), ("▁hel", "lo"), ("▁", "▁"), ("▁", "w")]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def qwen_style(folder):
    """A byte-level BPE with special and plain added tokens, and a template in a file of its own."""
    tokenizer = registry.build("tokenizer", {"name": "bpe", "vocab_size": 400}).build(Corpus(), folder.parent / "cache")
    tokenizer.save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["<think>", "漢字"])
    backend.enable_truncation(4)  # as saved by some trainers; must not cut documents
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


BUILDERS = {
    "bytes": lambda tmp: {"name": "bytes", "chat_template": TEMPLATE},
    "bpe": lambda tmp: {
        "name": "bpe",
        "vocab_size": 500,
        "special_tokens": ["<|im_start|>"],
        "chat_template": TEMPLATE,
    },
    "morph_bpe": lambda tmp: {"name": "morph_bpe", "vocab_size": 500, "chat_template": TEMPLATE},
    "unigram": lambda tmp: {"name": "unigram", "vocab_size": 500, "special_tokens": ["<|im_start|>"]},
    "sentencepiece": lambda tmp: {"name": "sentencepiece", "vocab_size": 600},
    "hf": lambda tmp: {"name": "hf", "path": str(llama2_style(tmp / "llama2"))},
    "hf-qwen": lambda tmp: {"name": "hf", "path": str(qwen_style(tmp / "qwen"))},
}
NAMES = sorted({m.name for m in registry.methods("tokenizer")} | set(BUILDERS))
BYTE_EXACT = ["bytes", "bpe", "morph_bpe", "unigram", "hf-qwen"]
_built = {}


def build(name, tmp_path_factory):
    if name == "sentencepiece":
        pytest.importorskip("sentencepiece")
    if name not in _built:
        tmp = tmp_path_factory.mktemp("tokenizer")
        config = registry.build("tokenizer", BUILDERS[name](tmp) if name in BUILDERS else {"name": name})
        _built[name] = config.build(Corpus(), tmp / "cache")
    return _built[name]


@pytest.fixture(params=NAMES, scope="module")
def tokenizer(request, tmp_path_factory):
    return build(request.param, tmp_path_factory)


@pytest.fixture(params=BYTE_EXACT, scope="module")
def byte_exact(request, tmp_path_factory):
    return build(request.param, tmp_path_factory)


def test_ids_are_in_range_and_special_ids_exist(tokenizer):
    assert isinstance(tokenizer.vocab_size, int)
    for special in (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id):
        assert special is None or 0 <= special < tokenizer.vocab_size
    for text in TEXTS:
        assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))


def test_batch_equals_single(tokenizer):
    batch = tokenizer.encode_batch(TEXTS)
    assert [a.dtype for a in batch] == [np.int32] * len(TEXTS)
    assert [a.tolist() for a in batch] == [tokenizer.encode(t) for t in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_nothing_is_added_or_cut(tokenizer):
    assert tokenizer.encode("") == []
    long = "hello world " * 2000
    assert len(tokenizer.decode(tokenizer.encode(long)).strip()) == len(long.strip())


def test_special_tokens_in_text_are_text(tokenizer):
    names = [tokenizer.decode([i], skip_special=False) for i in {tokenizer.eos_id, tokenizer.pad_id}]
    names += ["<|im_start|>", "<|im_end|>", "</s>", "<eos>"]
    for name in names:
        text = f"a{name}b {name}"
        specials = {tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id}
        for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0].tolist()):
            assert not specials & set(ids)
            assert name in tokenizer.decode(ids)


def test_decode_can_show_or_hide_specials(tokenizer):
    ids = [*tokenizer.encode("hello"), tokenizer.eos_id]
    assert tokenizer.decode(ids) == tokenizer.decode(ids[:-1])
    shown = tokenizer.decode(ids, skip_special=False)
    assert shown.startswith(tokenizer.decode(ids[:-1])) and len(shown) > len(tokenizer.decode(ids))
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_byte_exact_round_trip(text, byte_exact):
    ids = byte_exact.encode(text)
    assert byte_exact.decode(ids) == text
    assert byte_exact.token_byte_lengths()[ids].sum() == len(text.encode())


def test_token_byte_lengths(tokenizer):
    lengths = tokenizer.token_byte_lengths()
    assert lengths.dtype == np.int32 and lengths.shape == (tokenizer.vocab_size,)
    assert lengths[[tokenizer.eos_id, tokenizer.pad_id]].tolist() == [0, 0]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert lengths[ids].sum() >= len(text.encode())


def test_fingerprint_is_stable_and_changes_with_the_template(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint() == tokenizer.fingerprint()
    copy.chat_template = "another"
    assert copy.fingerprint() != tokenizer.fingerprint()


def test_pickle_keeps_behaviour(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    texts = [*TEXTS, tokenizer.decode([tokenizer.eos_id], skip_special=False)]
    assert [copy.encode(t) for t in texts] == [tokenizer.encode(t) for t in texts]
    assert copy.encode_batch(texts)[3].tolist() == tokenizer.encode(texts[3])


def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    for field in ("vocab_size", "eos_id", "bos_id", "pad_id", "chat_template"):
        assert getattr(loaded, field) == getattr(tokenizer, field)
    assert [loaded.encode(t) for t in TEXTS] == [tokenizer.encode(t) for t in TEXTS]


@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_transformers_reads_the_saved_folder(tokenizer, model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "saved")
    texts = TEXTS
    if model_type is not None:
        (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": model_type}))
    if model_type == "qwen2":
        # transformers 5 rebuilds every tokenizer of such a model in Qwen2's way: byte level, with NFC in front.
        if any(mark in repr(getattr(tokenizer, "backend", "")) for mark in ("Prepend", "Unigram")):
            pytest.skip("not a tokenizer of Qwen2's kind")
        texts = [t for t in TEXTS if unicodedata.is_normalized("NFC", t)]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in texts:
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.pad_token_id in (
        {None, tokenizer.pad_id} if tokenizer.pad_id == tokenizer.eos_id else {tokenizer.pad_id}
    )
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.chat_template == tokenizer.chat_template
    if tokenizer.chat_template:
        assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


# --- bytes


def test_bytes_ids(tmp_path_factory):
    tokenizer = build("bytes", tmp_path_factory)
    assert tokenizer.encode("aé\x00") == [97, 0xC3, 0xA9, 0]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (259, 256, 257, 258)
    assert tokenizer.decode([0xC3]) == "�"
    assert tokenizer.decode([97, 256, 258], skip_special=False) == "a<eos><pad>"


def test_changed_bytes_folder_is_not_taken_for_bytes(tmp_path, tmp_path_factory):
    build("bytes", tmp_path_factory).save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 260


# --- bpe


def bpe(**settings):
    return registry.build("tokenizer", {"name": "bpe", "vocab_size": 400, **settings})


def test_bpe_is_cached_and_follows_corpus_and_settings(tmp_path):
    corpus = Corpus()
    corpus.fingerprint = "one"
    first = bpe().build(corpus, tmp_path)
    (folder,) = tmp_path.glob("tokenizer-bpe-*")
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    again = bpe().build(corpus, tmp_path)
    assert again.fingerprint() == first.fingerprint() and corpus.reads == 1
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    corpus.fingerprint = "two"
    bpe().build(corpus, tmp_path)
    bpe(vocab_size=300).build(corpus, tmp_path)
    assert corpus.reads == 3 and len(list(tmp_path.glob("tokenizer-bpe-*"))) == 3


def test_bpe_without_a_fingerprint_reads_the_corpus(tmp_path):
    bpe().build(Corpus(), tmp_path)
    bpe().build(Corpus(), tmp_path)
    bpe().build(Corpus(CORPUS[1:]), tmp_path)
    assert len(list(tmp_path.glob("tokenizer-bpe-*"))) == 2


def test_damaged_bpe_is_trained_again(tmp_path):
    want = bpe().build(Corpus(), tmp_path).fingerprint()
    (folder,) = tmp_path.glob("tokenizer-bpe-*")
    data = (folder / "tokenizer.json").read_bytes()
    for damaged in (data[: len(data) // 2], data.replace(b"Split", b"Splat")):
        (folder / "tokenizer.json").write_bytes(damaged)
        with pytest.warns(UserWarning, match="is damaged"):
            assert bpe().build(Corpus(), tmp_path).fingerprint() == want


def test_bpe_does_not_depend_on_the_process(tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom trainwright.core import registry\n"
        "texts = [f'some text number {i} with words {i % 7} and {chr(97 + i % 26)}' for i in range(500)]\n"
        "config = registry.build('tokenizer', {'name': 'bpe', 'vocab_size': 420})\n"
        "print(config.build(lambda: iter(texts), Path(sys.argv[1])).fingerprint())"
    )
    outs = set()
    for seed in range(3):
        command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / str(seed))]
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(1 + seed)}
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        outs.add(done.stdout)
    assert len(outs) == 1 and len(outs.pop().strip()) == 32


def test_small_corpus_gives_a_small_vocabulary_and_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"tokenizer\.vocab_size=5000"):
        tokenizer = bpe(vocab_size=5000).build(Corpus(), tmp_path)
    assert 259 < tokenizer.vocab_size < 5000


def test_empty_corpus(tmp_path):
    with pytest.raises(DataError, match="no text to train on"):
        bpe().build(Corpus([]), tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 100}, "vocab_size=100.*greater than or equal to 260"),
        ({"vocab_size": 260, "special_tokens": ["<a>", "<b>"]}, "does not hold 256 bytes and 5 special tokens"),
        ({"special_tokens": ["<a>", "<a>"]}, "should be distinct"),
        ({"special_tokens": ["<|pad|>"]}, "should be distinct"),
        ({"pattern": "(unclosed"}, "pattern.*is not a regular expression"),
        ({"vocabsize": 300}, "did you mean 'vocab_size'"),
    ],
)
def test_bad_bpe_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        bpe(**settings)


@given(st.lists(st.text(max_size=20), max_size=60), st.integers(1, 200))
def test_sample(texts, size):
    texts = [t.encode(errors="ignore").decode() for t in texts]
    sample = sample_texts(texts, size)
    assert sample == sample_texts(iter(texts), size)
    assert sum(len(t.encode()) for t in sample) <= size
    total = sum(len(t.encode()) for t in texts)
    if total <= size:
        assert sample == texts


def test_sample_is_spread_over_the_corpus():
    texts = [f"{i:06d}" for i in range(3000)]
    picked = [int(t) for t in sample_texts(texts, 1800)]
    assert picked == sorted(picked) and 290 <= len(picked) <= 300
    assert 1200 < np.mean(picked) < 1800


# --- hf folders


def test_pad_falls_back_to_eos(tmp_path):
    tokenizer = load_tokenizer(llama2_style(tmp_path / "t"))
    assert tokenizer.pad_id == tokenizer.eos_id == 2 and tokenizer.bos_id == 1


def test_overrides(tmp_path):
    folder = llama2_style(tmp_path / "t")
    spec = {"name": "hf", "path": str(folder), "eos_token": "<unk>", "pad_token": "<s>", "chat_template": "x"}
    tokenizer = registry.build("tokenizer", spec).build(Corpus(), tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.chat_template) == (0, 1, "x")
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.eos_id, again.pad_id, again.chat_template) == (0, 1, "x")
    with pytest.raises(DataError, match=r"eos_token '<end>' is not in its vocabulary"):
        load_tokenizer(folder, eos_token="<end>")


def test_sentencepiece_byte_lengths(tmp_path):
    tokenizer = load_tokenizer(llama2_style(tmp_path / "t"))
    lengths = tokenizer.token_byte_lengths()
    names = {tokenizer.backend.id_to_token(i): int(n) for i, n in enumerate(lengths)}
    assert [names[t] for t in ("<unk>", "</s>", "<0x0A>", "▁", "▁▁", "▁hello", "é")] == [0, 0, 1, 1, 2, 6, 2]
    for text in ("hello  wörld\n漢字", "é", "hello"):
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode()) + 1  # the space put in front


def test_metaspace_unigram_byte_lengths(tmp_path):
    pieces = [("<unk>", 0.0), ("▁hello", -1.0), ("▁", -2.0), ("é", -3.0), ("o", -4.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.token_byte_lengths().tolist() == [5, 6, 1, 2, 1, 0]
    assert tokenizer.token_byte_lengths()[tokenizer.encode("é hello oé")].sum() == len("é hello oé".encode())


def test_wordpiece_byte_lengths(tmp_path):
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "[SEP]": 3}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, eos_token="[SEP]").token_byte_lengths().tolist() == [0, 5, 3, 0]


def test_special_tokens_map_of_older_folders(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = llama2_style(tmp_path / "t")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    tokenizer = load_tokenizer(folder)
    tokenizer.save(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == tokenizer.eos_id == 2


def test_tokens_named_by_the_config_only(tmp_path):
    folder = llama2_style(tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    new = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config["added_tokens_decoder"] = {str(new): {"content": "<|end|>", "special": True}}
    config["eos_token"] = "<|end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).eos_id == new
    config["added_tokens_decoder"] = {str(new + 5): {"content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"gives '<\|end\|>' the id {new + 5}"):
        load_tokenizer(folder)


def test_named_chat_templates(tmp_path):
    folder = llama2_style(tmp_path / "t")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_template == "b"
    (folder / "chat_template.jinja").write_text("c")
    assert load_tokenizer(folder).chat_template == "c"


def test_slow_files_go_through_transformers(tmp_path, tmp_path_factory):
    pytest.importorskip("transformers")
    tokenizer = build("hf-qwen", tmp_path_factory)
    spec = json.loads(tokenizer.backend.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in spec["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode(TEXTS[3])) == TEXTS[3]
    loaded.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode(TEXTS[0]) == loaded.encode(TEXTS[0])


def test_tokenizer_that_is_python_code_only(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, None)
    lengths = tokenizer.token_byte_lengths()
    for text in ("hello </s> é漢", "a\tb"):
        ids = tokenizer.encode(text)
        assert ids == [b + 3 for b in text.encode()]
        assert lengths[ids].sum() == len(ids) and tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(["hi"])[0].tolist() == tokenizer.encode("hi")
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint() == tokenizer.fingerprint()
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("hé") == tokenizer.encode("hé")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "does not exist"),
        ({}, r"holds no tokenizer\.json"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json is damaged"),
        ({"tokenizer.json": '{"version": "1.0"}'}, r"tokenizer\.json cannot be read"),
        ({"tokenizer.json": "ok", "tokenizer_config.json": "{}"}, "has no eos_token.*tokenizer.eos_token"),
        ({"tokenizer.json": "ok", "tokenizer_config.json": "[]"}, r"tokenizer_config\.json should hold a JSON object"),
        (
            {"tokenizer.json": "ok", "tokenizer_config.json": '{"eos_token": "<nope>"}'},
            "'<nope>' is not in its vocabulary",
        ),
    ],
)
def test_bad_folders(files, message, tmp_path):
    folder = tmp_path / "t"
    if files is not None:
        good = llama2_style(tmp_path / "good") / "tokenizer.json"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(good.read_text() if content == "ok" else content)
    with pytest.raises(DataError, match=message):
        registry.build("tokenizer", {"name": "hf", "path": str(folder)}).build(Corpus(), tmp_path)


def test_hub_id_without_network(tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(DataError, match="nobody/nothing is no folder here and could not be loaded"):
        registry.build("tokenizer", {"name": "hf", "path": "nobody/nothing"}).build(Corpus(), tmp_path)
