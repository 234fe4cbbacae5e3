import pytest

from trainwright.cli.chat import converse, encode, end_of_turn, render, special_tokens
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

    def answer(ids):
        seen.append(tokenizer.decode(ids))
        yield from (" ans", f"wer {len(seen)}\n")

    messages = converse(tokenizer, answer, lambda: next(said), written.append, system="sys")
    assert [m["content"] for m in messages] == ["sys", "one", "answer 1", "two", "answer 2"]
    assert written == [" ans", "wer 1\n", "\n", " ans", "wer 2\n", "\n"] and "answer 1" in seen[1] and "sys" in seen[0]


def test_generate_chat_from_a_model_folder(tokenizer, tmp_path, capsys):
    """A random model with a saved chat template, through the command: it answers and ends."""
    import torch

    from trainwright import cli
    from trainwright.core.registry import build
    from trainwright.models import save_pretrained

    torch.manual_seed(0)
    model = build(
        "model", {"name": "decoder", "dim": 32, "n_layers": 1, "n_heads": 2, "ffn_dim": 64, "max_seq_len": 256}
    )
    save_pretrained(model.build(tokenizer.vocab_size, 128), tmp_path / "hf", tokenizer=tokenizer)
    arguments = ["generate", str(tmp_path / "hf"), "--max-new-tokens", "5", "--seed", "1"]
    assert cli.run([*arguments, "--chat", "--prompt", "hello"]) == 0
    first = capsys.readouterr().out
    assert first.endswith("\n") and len(first) > 1
    assert cli.run([*arguments, "--chat", "--prompt", "hello"]) == 0
    assert capsys.readouterr().out == first
    assert cli.run([*arguments, "--prompt", "hello"]) == 0
    assert capsys.readouterr().out.startswith("hello")
