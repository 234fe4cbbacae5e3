import pytest

from trainwright.cli.chat import ChatTokenizer, converse, encode, end_of_turn, render, special_tokens
from trainwright.core.errors import ModelError
from trainwright.data.tokenizers.bytes import ByteTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<pad>{{ m.role }}\n{{ m.content }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<pad>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    return ByteTokenizer(TEMPLATE)


def test_special_tokens_are_found_through_the_public_interface(tokenizer):
    assert special_tokens(tokenizer) == {"<eos>": 256, "<bos>": 257, "<pad>": 258}


def test_template_tokens_become_ids_and_text_stays_text(tokenizer):
    text = render(tokenizer, [{"role": "user", "content": "hé"}])
    assert text == "<bos><pad>user\nhé<pad>\n<pad>assistant\n"
    ids = encode(tokenizer, text)
    assert ids == [257, 258, *b"user\n", *"hé".encode(), 258, *b"\n", 258, *b"assistant\n"]


def test_the_turn_ends_where_the_template_ends_it(tokenizer):
    assert end_of_turn(tokenizer) == 258
    assert end_of_turn(ByteTokenizer("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")) is None
    chat = ChatTokenizer(tokenizer)
    assert chat.eos_id == 258 and chat.bos_id is None and chat.encode("<eos>a") == [256, 97]


def test_render_agrees_with_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "1 < 2?"}]
    want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, messages) == want
    assert encode(tokenizer, want) == theirs(want, add_special_tokens=False)["input_ids"]


def test_no_template_and_a_refusing_one():
    with pytest.raises(ModelError, match="no chat template"):
        render(ByteTokenizer(), [{"role": "user", "content": "x"}])
    with pytest.raises(ModelError, match="no system message here"):
        render(ByteTokenizer("{{ raise_exception('no system message here') }}"), [])


def test_template_cannot_reach_python():
    with pytest.raises(ModelError, match="refuses"):
        render(ByteTokenizer("{{ messages.__class__.__mro__[1].__subclasses__() }}"), [])


def test_conversation_keeps_its_history(tokenizer):
    said = iter(["one", "two", " "])
    seen, written = [], []

    def answer(rendered):
        seen.append(rendered)
        return f" answer {len(seen)}\n"

    messages = converse(tokenizer, answer, lambda: next(said), written.append, system="sys")
    assert [m["content"] for m in messages] == ["sys", "one", "answer 1", "two", "answer 2"]
    assert written == ["answer 1", "answer 2"] and "answer 1" in seen[1] and "sys" in seen[0]
