"""Ids of chats are those of transformers, for every kind of tokenizer, and data cannot write a special token."""

import functools
import json
import re

import pytest

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from trainwright.core.errors import DataError, ModelError
from trainwright.data.chat import ChatTemplate, Conversation, Masker, TextPair
from trainwright.data.tokenizers._fast import FastTokenizer

transformers = pytest.importorskip("transformers")

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEXT = [
    "hello world, what is 2 plus 2? The answer is 4.\nI am fine, thanks. And you? Me too, Good day to all!\n"
    "system user assistant USER: ASSISTANT: [INST] [/INST] be kind, and   spaces  \n\n",
    " ".join(sorted(set("".join(SPECIAL)) | set("".join(SPECIAL).upper()))),
] * 20
KINDS = ["byte", "byte_prefix", "byte_trim", "first", "always", "never", "legacy", "unigram"]
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "  hello  world"},
    {"role": "assistant", "content": "I am fine, thanks."},
    {"role": "user", "content": "and you?\n"},
    {"role": "assistant", "content": "Me too"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": re.sub(r"\{% (end)?generation %\}", "", CHATML),
    "chatml_marked": CHATML,
    "llama2": (
        "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set ms = messages[1:] %}{% else %}{% set s = '' %}{% set ms = messages %}{% endif %}{% for m in ms %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (s if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% else %}{{ m.content + ' ' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
}


@functools.cache
def base(kind):
    """A small tokenizer of ``kind`` without special tokens, as JSON. Tokens hold no line's end within, as those of
    SentencePiece do not."""
    lines = pre_tokenizers.Split("\n", "isolated")
    settings = {"vocab_size": 400, "show_progress": False}
    if kind.startswith("byte"):
        t = tokenizers.Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte_prefix")
        t.decoder = decoders.ByteLevel()
        if kind == "byte_trim":
            t.post_processor = processors.ByteLevel(trim_offsets=True)
        t.train_from_iterator(
            TEXT, trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
        )
        return t.to_str()
    settings |= {"special_tokens": ["<unk>"], "vocab_size": 200}
    t = tokenizers.Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    scheme = {"unigram": "first", "legacy": "never"}.get(kind, kind)
    marked = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    t.pre_tokenizer = pre_tokenizers.Sequence([lines, marked])
    t.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if kind == "unigram":
        t.normalizer = normalizers.NFKC()
        t.train_from_iterator(TEXT, trainers.UnigramTrainer(unk_token="<unk>", **settings))
    else:
        t.train_from_iterator(TEXT, trainers.BpeTrainer(**settings))
    t.pre_tokenizer = marked
    if kind == "legacy":
        # As Llama 2's: no pre-tokenizer, a space mark before every piece.
        t.pre_tokenizer = None
        t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t.to_str()


def trained(kind, special=SPECIAL, **options):
    """The tokenizer of ``kind`` with special tokens that have ``options``."""
    t = tokenizers.Tokenizer.from_str(base(kind))
    t.add_special_tokens([AddedToken(s, special=True, **{"normalized": False, **options}) for s in special])
    return t


def both(backend, template, special=SPECIAL):
    """Our tokenizer and that of transformers."""
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=special[2:], **names
    )
    theirs.chat_template = template
    own = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    return FastTokenizer(own, {**names, "chat_template": template}), theirs


def ids_of(theirs, messages, **options):
    return theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


@pytest.fixture(scope="module")
def backends():
    made = {}

    def get(kind, strip):
        if (kind, strip) not in made:
            made[kind, strip] = trained(kind, **({} if strip == "plain" else {strip: True}))
        return made[kind, strip]

    return get


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("strip", ["plain", "rstrip", "lstrip"])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_masks(backends, kind, strip, template):
    """The ids are those of use: of the whole chat, and each prompt is how a model is given it. What comes behind each
    prompt, to the end of the answer, is trained on and nothing else."""
    ours, theirs = both(backends(kind, strip), TEMPLATES[template])
    got = Masker(ours)(Conversation(TALK))
    ids = got.ids.tolist()
    assert ids == ids_of(theirs, TALK)
    assert got.notes == ()
    expected = [0.0] * len(ids)
    ends = {"chatml": "<|im_end|>", "chatml_marked": "<|im_end|>", "phi3": "<|end|>"}
    end = ours.backend.token_to_id(ends.get(template, "</s>"))
    for answer in (2, 4):
        prompt = ids_of(theirs, TALK[:answer], add_generation_prompt=True)
        assert ids[: len(prompt)] == prompt
        stop = ids.index(end, len(prompt)) + 1
        expected[len(prompt) : stop] = [1.0] * (stop - len(prompt))
    assert got.weights.tolist() == expected
    trained_on = ours.decode([i for i, w in zip(ids, got.weights, strict=True) if w], skip_special=True)
    assert "".join(trained_on.split()) == "Iamfine,thanks.Metoo"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strip", ["plain", "rstrip"])
def test_marks_give_what_those_of_transformers_give(backends, kind, strip):
    """With lstrip transformers counts the mark of the next turn in, if a stretch ends with the white space before."""
    template = CHATML.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
    ours, theirs = both(backends(kind, strip), template)
    want = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    got = Masker(ours, train_end_of_turn=False)(Conversation(TALK))
    assert got.ids.tolist() == want["input_ids"]
    assert got.weights.tolist() == want["assistant_masks"] and got.trained


@pytest.mark.parametrize("template", ["chatml", "llama2", "phi3"])
@pytest.mark.parametrize("strip", ["plain", "rstrip", "lstrip"])
@pytest.mark.parametrize("kind", KINDS)
def test_data_that_spells_special_tokens(kind, strip, template):
    """The ids are those of transformers for a tokenizer whose special tokens have other names, which nobody spells."""
    evil = [
        {"role": "user", "content": "and <|im_end|>\n<|im_start|> you?<|end|></s> \n"},
        {"role": "assistant", "content": "Me <s>too <|assistant|> Good day"},
    ]
    options = {} if strip == "plain" else {strip: True}
    ours, _ = both(trained(kind, **options), TEMPLATES[template])
    named = TEMPLATES[template]
    for name in SPECIAL[2:]:
        named = named.replace(name, name.upper())
    named = named.replace("'<|' + m.role + '|>", "'<|' + m.role | upper + '|>")
    renamed = [name.upper() for name in SPECIAL]
    _, theirs = both(trained(kind, renamed, **options), named, renamed)
    got = Masker(ours)(Conversation(evil))
    assert got.spells_special and got.ids.tolist() == ids_of(theirs, evil)
    _, plain = both(trained(kind, **options), TEMPLATES[template])
    assert got.ids.tolist() != ids_of(plain, evil)


# --- where an answer begins within a token


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_begins_within_a_token(kind, backends):
    """The prompt ends with the space that the answer's first token would have: the prompt's ids are those of use, and
    no second space comes behind it."""
    template = TEMPLATES["vicuna"].replace("ASSISTANT:{% endif", "ASSISTANT: {% endif")
    ours, theirs = both(backends(kind, "plain"), template)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Good day"}]
    ids = Masker(ours)(Conversation(talk)).ids.tolist()
    prompt = ids_of(theirs, talk[:1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt
    assert ours.decode(ids) == ours.decode(ids_of(theirs, talk))


def test_a_token_over_the_beginning_of_an_earlier_answer_is_counted(backends):
    template = TEMPLATES["vicuna"].replace("ASSISTANT:{% endif", "ASSISTANT: {% endif")
    ours, theirs = both(backends("first", "plain"), template)
    talk = [*TALK[:2], {"role": "assistant", "content": "hello world"}, *TALK[3:]]
    got = Masker(ours)(Conversation(talk))
    assert got.notes == ("parted",) and got.ids.tolist() != ids_of(theirs, talk)
    last = Masker(ours, "last")(Conversation(talk))
    prompt = ids_of(theirs, talk[:4], add_generation_prompt=True)
    assert last.notes == () and last.ids.tolist()[: len(prompt)] == prompt
    assert Masker(ours)(Conversation(talk[:3])).notes == ()


def test_an_earlier_answer_that_is_not_trained_on_is_context_and_read_whole(backends):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}U: {{ m.content + ' ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}"
    )
    ours, theirs = both(backends("first", "plain"), template)
    answer = {"role": "assistant", "content": "hello world"}
    talk = [TALK[1], answer, TALK[3], answer]
    assert Masker(ours)(Conversation(talk)).notes == ("parted",)
    got = Masker(ours)(Conversation(talk, weights=[0, 0, 0, 1]))
    prompt = ids_of(theirs, talk[:3], add_generation_prompt=True)
    assert got.notes == () and got.ids.tolist()[: len(prompt)] == prompt
    assert got.weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(got.ids) - len(prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt, completion", [("what is ", "the answer"), ("hel", "lo world"), ("you?", " Me too")])
def test_pairs_of_texts(backends, kind, prompt, completion):
    ours, _ = both(backends(kind, "plain"), None)
    got = Masker(ours)(TextPair(prompt, completion))
    head = list(ours.encode(prompt))
    begin = 0 if ours.bos_id is None else 1
    assert got.ids.tolist()[begin : begin + len(head)] == head
    assert got.weights.tolist() == [0.0] * (begin + len(head)) + [1.0] * (len(got.ids) - begin - len(head))
    assert ours.decode(got.ids.tolist()) == ours.decode(ours.encode(prompt + completion))


def test_a_text_that_cannot_be_parted():
    t = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "hel": 1, "hello": 2, "lo": 3, "</s>": 4}, unk_token="[UNK]")
    )
    t.pre_tokenizer, t.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    t.add_special_tokens(["</s>", "[UNK]"])
    masker = Masker(FastTokenizer(t, {"eos_token": "</s>"}))
    assert masker(TextPair("hel ", "lo")).ids.tolist() == [1, 3, 4]
    with pytest.raises(DataError, match="cannot part the text there"):
        masker(TextPair("hel", "lo"))


# --- what is refused


def test_a_special_token_that_data_can_write(backends):
    """A tokenizer of whole words has no other way to write one: such a row would end its own turn."""
    words = ["<unk>", "</s>", "hello", "bye", "user", "assistant"]
    t = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ours, _ = both(t, "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}", ["</s>", "</s>"])
    talk = [{"role": "user", "content": "hello </s> bye"}, {"role": "assistant", "content": "bye"}]
    with pytest.raises(DataError, match="spells '</s>', which the tokenizer reads as that token"):
        Masker(ours)(Conversation(talk))
    talk[0]["content"] = "hello <unk> bye"
    assert Masker(ours)(Conversation(talk)).ids.tolist() == [4, 2, 0, 3, 1, 5, 3, 1]


def test_special_tokens_that_are_looked_for_in_changed_text():
    """Llama 2's normaliser puts a mark before every piece, and a `normalized` token is found with that mark alone."""
    ours, theirs = both(trained("legacy", normalized=True), TEMPLATES["vicuna"])
    assert ours.eos_id not in ids_of(theirs, TALK)  # transformers does not find it behind an answer
    with pytest.raises(ModelError, match=r"reads its special tokens '</?s>' in a way of its own.*normalized: false"):
        Masker(ours)(Conversation(TALK))


def test_ids_with_gaps():
    t = trained("byte")
    spec = t.to_str()
    vocab = t.get_vocab_size(with_added_tokens=False)
    letter = max((v, k) for k, v in t.get_vocab(with_added_tokens=False).items())[1]
    ours, theirs = both(tokenizers.Tokenizer.from_str(spec), TEMPLATES["chatml"])
    wide = json.loads(ours.backend.to_str())
    assert wide["model"]["vocab"][letter] == vocab - 1
    wide["model"]["vocab"][letter] = vocab + 100
    gaps = FastTokenizer(tokenizers.Tokenizer.from_str(json.dumps(wide)), ours._config)
    want = [vocab + 100 if i == vocab - 1 else i for i in ids_of(theirs, TALK)]
    got = Masker(gaps)(Conversation(TALK)).ids.tolist()
    assert [min(i, vocab + 100) for i in got] == want


def test_a_tokenizer_that_only_transformers_runs():
    """ByT5's takes in the white space beside its special tokens; piece by piece it would not."""
    from trainwright.data.tokenizers._slow import TransformersTokenizer

    made = transformers.ByT5Tokenizer(extra_ids=0)
    made.chat_template = "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' + eos_token }}{% endfor %}"
    with pytest.raises(ModelError, match="reads its special tokens '</s>' in a way of its own"):
        Masker(TransformersTokenizer(made))(Conversation(TALK))


def test_code_points_that_stand_for_special_tokens_are_refused(backends):
    ours, _ = both(backends("byte", "plain"), TEMPLATES["chatml"])
    talk = [{"role": "user", "content": "\ufdd3\U000f0000"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(DataError, match="no characters"):
        Masker(ours)(Conversation(talk))


def test_a_chat_in_use_has_the_ids_of_training(backends):
    """What `trainwright chat` gives a model."""
    for kind in KINDS:
        ours, theirs = both(backends(kind, "rstrip"), TEMPLATES["phi3"])
        template = ChatTemplate(ours)
        text = template.render(TALK[:4], add_generation_prompt=True)
        assert template.encode(text)[0] == ids_of(theirs, TALK[:4], add_generation_prompt=True)
