"""Prompt and target tokenized as one: the boundary is exact with every kind of tokenizer."""

import numpy as np
import pytest

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from trainwright.core.errors import DataError
from trainwright.data.chat.conversation import TextPair
from trainwright.data.chat.joint import IGNORE, JointMasker, encode_joint, labels_of
from trainwright.data.chat.masks import fit
from trainwright.data.tokenizers._fast import FastTokenizer
from trainwright.data.tokenizers.bytes import ByteTokenizer

TEXT = (
    "what is the capital of France ? Paris . 北京 是 中国 的 首都 。 what's 12 plus 7? it is 19! unhappy under undo "
    * 20
)
SPECIAL = ["<eos>", "<bos>", "[UNK]"]


def trained(kind):
    if kind == "wordpiece":
        model, trainer = models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer
    elif kind in ("unigram",):
        model, trainer = models.Unigram(), trainers.UnigramTrainer
    else:
        model, trainer = models.BPE(unk_token=None if "byte" in kind else "[UNK]"), trainers.BpeTrainer
    t = tokenizers.Tokenizer(model)
    settings = {"vocab_size": 400, "special_tokens": SPECIAL, "show_progress": False}
    if kind.startswith("byte"):
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="prefix" in kind)
        t.decoder = decoders.ByteLevel()
        t.post_processor = processors.ByteLevel(trim_offsets="trim" in kind)
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        if "nfkc" in kind:
            t.normalizer = normalizers.NFKC()
    elif kind == "wordpiece":
        t.normalizer = normalizers.BertNormalizer(lowercase=True)
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece()
    else:
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        t.decoder = decoders.Metaspace()
    if kind == "unigram":
        settings["unk_token"] = "[UNK]"
    t.train_from_iterator([TEXT], trainer(**settings))
    return FastTokenizer(t, {"eos_token": "<eos>", **({"bos_token": "<bos>"} if "bos" in kind else {})})


KINDS = ["bytes", "byte_trim", "byte_trim_prefix", "byte_nfkc_trim", "byte_bos", "wordpiece", "unigram", "bpe"]
PAIRS = [
    ("what is the capital of France ?", " Paris ."),
    ("北京 是 中国 的 首都", " 。 Paris"),
    ("what's 12 plus 7?", " it is 19!"),
    ("what is ", "the capital"),  # the prompt ends with the space
    ("un", "happy"),  # tokens may reach over the joint
    ("12 plus", "\n7"),
    ("Paris é", "ü 19 🎉!"),
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else trained(request.param)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_boundary_is_where_the_text_says(tokenizer, pair):
    """(a) ids of prompt + target as one; weight 0 on exactly the tokens that begin in the prompt."""
    prompt, target = pair
    ids, inside, crossing = encode_joint(tokenizer, prompt, target)
    assert ids == tokenizer.encode(prompt + target)
    backend = getattr(tokenizer, "backend", None)
    kind = "bytes" if backend is None else type(backend.model).__name__
    if kind in ("bytes", "BPE") and (backend is None or type(backend.decoder).__name__ == "ByteLevel"):
        sizes = tokenizer.token_byte_lengths()[ids]
        starts = np.cumsum(sizes) - sizes
        added = int(sizes.sum()) - len((prompt + target).encode())
        bound = len(prompt.encode())
        assert inside == int(((starts - added).clip(0) < bound).sum())
        assert crossing == bool((((starts - added) < bound) & (starts + sizes - added > bound)).any())
    else:
        offsets = backend.encode(prompt + target, add_special_tokens=False).offsets
        assert inside == sum(start < len(prompt) for start, _ in offsets)
    if not crossing:
        # What the prompt's tokens say is the prompt, and what is trained on is the target.
        said = "".join(tokenizer.decode(ids[:inside]).split()).lower()
        assert said == "".join(prompt.split()).lower() or "[unk]" in said or tokenizer.decode(ids).count("[UNK]") == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_labels_are_minus_100_on_the_prompt_and_eos_is_trained(tokenizer, pair):
    encoded = JointMasker(tokenizer)(TextPair(*pair))
    begin = 0 if tokenizer.bos_id is None else 1
    _, inside, crossing = encode_joint(tokenizer, *pair)
    labels = labels_of(encoded)
    assert (labels[: begin + inside] == IGNORE).all()
    assert labels[begin + inside :].tolist() == encoded.ids[begin + inside :].tolist()
    assert encoded.ids[-1] == tokenizer.eos_id == labels[-1] and encoded.crossing == crossing


def test_counting_the_prompt_apart_can_be_off_by_one():
    """Users report: the reference's way. Here the joint is one token, which counts as the prompt's and is reported."""
    tokenizer = trained("byte_trim")
    prompt, target = "what is ", "the capital"
    ids, inside, crossing = encode_joint(tokenizer, prompt, target)
    apart = len(tokenizer.encode(prompt))
    assert crossing and ids[:apart] != tokenizer.encode(prompt)
    assert tokenizer.decode(ids[inside:]).strip() == "capital"


def test_a_space_that_offsets_leave_out():
    """ByteLevel trims offsets: the token ` the` would look as if it began behind the prompt's own space."""
    tokenizer = trained("byte_nfkc_trim")
    found = tokenizer.backend.encode("ﬁ is the", add_special_tokens=False)  # normalised to another length
    assert "Ġthe" in found.tokens
    _, inside, crossing = encode_joint(tokenizer, "ﬁ is ", "the")
    assert inside == len(found.tokens) and crossing
    _, inside, crossing = encode_joint(tokenizer, "ﬁ is", " the")
    assert inside == len(found.tokens) - 1 and not crossing


def test_a_prompt_that_fills_the_window_is_dropped():
    """Never half-masked: nothing of the prompt is trained on, at any length."""
    masker = JointMasker(ByteTokenizer())
    for size in range(1, 40):
        encoded = masker(TextPair("p" * size, " target"))
        for rule in ("truncate_right", "truncate_left", "drop"):
            short, fate = fit(encoded, 20, rule)
            if short is None:
                assert fate in ("cut_before_answer", "dropped")
                continue
            trained = [i for i, w in zip(short.ids, short.weights, strict=True) if w]
            assert ord("p") not in trained
        short, fate = fit(encoded, 20, "truncate_right")
        # A BOS, the prompt and one token of the target have to fit.
        assert (short is None) == (size >= 19) and (size < 19 or fate == "cut_before_answer")


def test_a_tokenizer_that_does_not_say_where(monkeypatch):
    class Mute(ByteTokenizer):
        def token_byte_lengths(self):
            return np.full(259, 2, np.int32)

    with pytest.raises(DataError, match="does not say where its tokens lie"):
        encode_joint(Mute(), "a", "b")
    with pytest.raises(DataError, match="is not a prompt and its target"):
        from trainwright.data.chat.conversation import Conversation

        JointMasker(ByteTokenizer())(Conversation([{"role": "user", "content": "x"}]))
    assert labels_of(JointMasker(ByteTokenizer())(TextPair("", "a"))).tolist() == [IGNORE, 97, 256]
