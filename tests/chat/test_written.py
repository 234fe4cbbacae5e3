"""Nothing of a row is lost in silence: messages, thoughts, null, and all stretches of an answer."""

import json
import logging

import pytest

from trainwright.core import registry
from trainwright.core.errors import DataError
from trainwright.data.chat import Conversation, Masker, parse_row
from trainwright.data.chat.masks import UnstableTemplate
from trainwright.data.chat.pairs import PairDataset
from trainwright.data.tokenizers.bytes import ByteTokenizer

USER = {"role": "user", "content": "hi"}
OK = {"role": "assistant", "content": "ok"}
# Branches for user and assistant alone, as many templates have.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}|{% elif m.role == 'assistant' %}"
    "A:{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
CALLS = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def said(encoded):
    """The text of what is trained on."""
    return "".join(chr(i) for i, w in zip(encoded.ids, encoded.weights, strict=True) if w and i < 256)


# --- messages that the template does not write


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
@pytest.mark.parametrize("content", ["SECRET RULES", "hi", "ok"])  # what others say as well
def test_a_message_of_a_role_that_the_template_does_not_know(role, content):
    talk = [USER, OK, {"role": role, "content": content}, USER, OK]
    with pytest.raises(DataError, match=rf"leaves out messages \({role} at 2\).*knows their roles"):
        Masker(ByteTokenizer(TWO_ROLES))(Conversation(talk))
    assert Masker(ByteTokenizer(TWO_ROLES))(Conversation([*talk[:2], {"role": role, "content": " \n"}, *talk[3:]]))


def test_a_message_that_the_template_writes_somewhere_else():
    """Mistral's puts the system message before the last question; others write it in capitals, or trimmed."""
    late = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{{ messages[0].content + ' ' if loop.index0 == 1 }}"
        "{{ m.content | trim | upper }}|{% elif m.role == 'assistant' %}A:{{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": " q\n"}, OK]
    got = Masker(ByteTokenizer(late))(Conversation(talk))
    assert said(got) == "ok" and got.notes == ()


def test_an_earlier_question_that_is_dropped():
    template = (
        "{% for m in messages[-2:] %}{% if m.role == 'user' %}U:{{ m.content }}{% else %}A:{% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"leaves out messages \(user at 0\)"):
        Masker(ByteTokenizer(template))(Conversation([USER, OK, USER, OK]))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_that_are_left_out_are_counted(key):
    talk = [USER, {**OK, key: "LONG THOUGHT"}]
    got = Masker(ByteTokenizer(TWO_ROLES))(Conversation(talk))
    assert got.notes == ("left_out",) and said(got) == "ok"
    writes = TWO_ROLES.replace("A:{{ m.content", "A:{{ m." + key + " + m.content")
    got = Masker(ByteTokenizer(writes))(Conversation(talk))
    assert got.notes == () and said(got) == "LONG THOUGHTok"


def test_what_is_said_beside_a_call_and_left_out_is_counted(tmp_path, rows_file, caplog):
    """As Llama 3.1's: a message with calls is its calls."""
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    rows = [
        {"messages": [USER, {"role": "assistant", "content": text, "tool_calls": [call]}]}
        for text in ("let me see", "")
    ]
    tokenizer = ByteTokenizer(CALLS)
    notes = [Masker(tokenizer)(parse_row(row)[1]).notes for row in rows]
    assert notes == [("left_out",), ()]
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = registry.build("source", {"name": "chat", "path": rows_file(rows)}).tokenized(
            tokenizer, "train", seq_len=64, validation_fraction=0.0, cache_dir=tmp_path / "cache"
        )
    assert data.report["left_out"] == 1
    assert "1 of whose answers the chat template leaves out a part" in caplog.text
    pair = parse_row({"prompt": [USER], "chosen": rows[0]["messages"][1:], "rejected": [OK]})[1]
    assert PairDataset([pair], Masker(tokenizer), 64).report.left_out == 1


# --- null in arguments

CALLED = '{"city": "Rome", "unit": null, "deep": [{"a": null}, null]}'


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": json.loads(CALLED)}]}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": CALLED, "id": None}]}]},
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": f'{{"name": "f", "arguments": {CALLED}}}'},
            ]
        },
    ],
)
def test_null_in_arguments_is_a_value(row):
    talk = parse_row(row)[1]
    assert "id" not in talk.messages[1]["tool_calls"][0]
    assert said(Masker(ByteTokenizer(CALLS))(talk)) == "f" + CALLED


def test_null_in_a_schema_is_a_value():
    tool = {"type": "function", "strict": None, "function": {"name": "f", "parameters": {"x": {"default": None}}}}
    for tools in ([tool], json.dumps([tool])):
        talk = parse_row({"messages": [USER, OK], "tools": tools})[1]
        assert talk.tools == [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}]


def test_null_that_parquet_puts_in_for_absent_keys_is_none(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": a}}]}]}
        for n, a in (("f", {"x": 1}), ("g", {"y": "z"}))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = registry.build("source", {"name": "chat", "path": str(tmp_path / "rows.parquet")})
    masker = Masker(ByteTokenizer(CALLS))
    got = [said(masker(doc.meta["example"])) for doc in source.documents("train", 0.0)]
    assert got == ['f{"x": 1}', 'g{"y": "z"}']


# --- several stretches in an answer

THINKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}<{{ m.reasoning_content }}>"
    "{% endgeneration %};{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}U:{{ m.content }}|{% endif %}{% endfor %}"
)
THOUGHTS = [USER, {**OK, "content": "a1", "reasoning_content": "r1"}, USER, {**OK, "reasoning_content": "r2"}]


def test_all_stretches_of_the_last_answer_are_trained_on():
    tokenizer = ByteTokenizer(THINKS)
    assert said(Masker(tokenizer)(Conversation(THOUGHTS))) == "<r1>a1<r2>ok"
    assert said(Masker(tokenizer, "last")(Conversation(THOUGHTS))) == "<r2>ok"
    assert said(Masker(tokenizer, "last")(Conversation(THOUGHTS, weights=[1, 0, 1, 1]))) == "<r2>ok"
    assert Masker(tokenizer, "last")(Conversation(THOUGHTS, weights=[1, 1, 1, 0])).trained == 0


def test_the_last_answer_where_earlier_ones_have_another_count_of_stretches():
    """Thoughts of earlier turns are gone, and an empty answer has no stretch."""
    template = THINKS.replace("<{{ m.reasoning_content }}>", "{% if loop.last %}<{{ m.reasoning_content }}>{% endif %}")
    assert said(Masker(ByteTokenizer(template), "last")(Conversation(THOUGHTS))) == "<r2>ok"
    one = (
        "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    empty = [USER, OK, USER, {"role": "assistant", "content": ""}]
    assert Masker(ByteTokenizer(one), "last", train_end_of_turn=False)(Conversation(empty)).trained == 0


def test_stretches_that_cannot_be_told_apart():
    """The template rewrites the earlier answer when the last one is given, into other stretches."""
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ messages | length }}{% endgeneration %}{% generation %}.{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    )
    with pytest.raises(UnstableTemplate, match="4 stretches in a conversation of 2 answers"):
        Masker(ByteTokenizer(template), "last")(Conversation([USER, OK, USER, OK]))
