"""Rows of every format become the same messages; what fits none is refused by name."""

import json

import pytest

from trainwright.core.errors import DataError
from trainwright.data.chat import Conversation, Preference, TextPair, parse_row

SAID = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
]


def messages(row, format="auto"):
    return parse_row(row, format)[1].messages


SAME = {
    "messages": {"messages": SAID},
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"},
        ]
    },
    "sharegpt_system": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        "system": "be kind",
    },
    "sharegpt_messages": {"conversations": SAID},
    "alpaca": {"instruction": "hi", "input": "", "output": "hello", "system": "be kind", "text": "ignored"},
    "prompt_completion": {"prompt": SAID[:2], "completion": SAID[2:]},
    "preference": {"chosen": SAID, "rejected": [*SAID[:2], {"role": "assistant", "content": "go away"}]},
}


@pytest.mark.parametrize("row", SAME.values(), ids=SAME)
def test_every_format_gives_the_same_conversation(row):
    name, parsed = parse_row(row)
    talk = parsed.chosen if isinstance(parsed, Preference) else parsed
    assert talk.messages == SAID and name == parse_row(row, name)[0]
    assert [talk.weights[i] for i in talk.answers] == [1.0]


def test_columnar_files_spell_absent_keys_as_null():
    row = {"messages": [{**m, "tool_calls": None, "name": None} for m in SAID], "conversations": None, "tools": None}
    assert messages(row) == SAID and parse_row(row)[1].tools is None


def test_alpaca_input_and_history():
    row = {"instruction": "add", "input": "1 2", "output": "3", "history": [["a", "b"]]}
    assert [m["content"] for m in messages(row)] == ["a", "b", "add\n\n1 2", "3"]
    assert [m["content"] for m in messages({"instruction": "q", "context": "c", "response": "r"})] == ["q\n\nc", "r"]


def test_texts_of_prompt_and_completion_stay_texts():
    assert parse_row({"prompt": "2+2=", "completion": "4"}) == ("prompt_completion", TextPair("2+2=", "4"))


def test_an_answer_in_the_prompt_is_no_target():
    talk = parse_row({"prompt": [*SAID, {"role": "user", "content": "more"}], "completion": "sure"})[1]
    assert talk.weights == [0, 0, 0, 0, 1] and talk.messages[-1] == {"role": "assistant", "content": "sure"}


def test_preferences():
    row = {"prompt": "hi", "chosen": "hello", "rejected": "no"}
    assert parse_row(row)[1] == Preference(TextPair("hi", "hello"), TextPair("hi", "no"))
    implicit = parse_row({"chosen": "Q: hi A: hello you", "rejected": "Q: hi A: hell no"})[1]
    assert implicit == Preference(TextPair("Q: hi A:", " hello you"), TextPair("Q: hi A:", " hell no"))
    repeated = parse_row({"prompt": "hi", "chosen": SAID, "rejected": SAID}, "preference")[1]
    assert repeated.chosen.messages == SAID and repeated.chosen.weights == [0, 0, 1]


def test_tool_calls_in_both_spellings():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    openai = {
        "tools": tools,
        "messages": [
            {"role": "user", "content": "1+1"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": "2"},
            {"role": "assistant", "content": "2"},
        ],
    }
    talk = parse_row(openai)[1]
    assert talk.tools == tools
    assert talk.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": "x", **call}]}
    assert talk.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "x"}
    sharegpt = {
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "1+1"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2"},
        ],
    }
    other = parse_row(sharegpt)[1]
    assert other.tools == tools and other.messages[1]["tool_calls"] == [call]
    assert [m["role"] for m in other.messages] == [m["role"] for m in talk.messages]


def test_parts_of_text_are_joined_and_weights_are_read():
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "x", "weight": 0},
            {"role": "assistant", "content": "y", "weight": 1},
        ]
    }
    talk = parse_row(row)[1]
    assert talk.messages[0]["content"] == "ab" and talk.weights == [1.0, 0.0, 1.0]
    assert "weight" not in talk.messages[1]


BAD = {
    "keys foo are those of no format; known: messages: messages; sharegpt": {"foo": 1},
    "source jsonl": {"text": "plain"},
    "has the keys of messages and of preference; say which by format": {
        "messages": SAID,
        "chosen": SAID,
        "rejected": SAID,
    },
    "no assistant turn": {"messages": SAID[:2]},
    "has no message": {"messages": []},
    "only empty assistant turns": {"messages": [SAID[1], {"role": "assistant", "content": " "}]},
    "messages.0: unknown role 'usr'; did you mean 'user'": {"messages": [{"role": "usr", "content": "x"}]},
    "messages.0: has no role": {"messages": [{"content": "x"}]},
    "messages.0: has neither content nor tool_calls": {"messages": [{"role": "user"}]},
    "part of type 'image_url'": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "messages should be a list": {"messages": "hi"},
    "expected an object, got list": [1],
    "messages.1: weight should be": {"messages": [SAID[1], {**SAID[2], "weight": -1}]},
    "arguments of tool call 'f' are not JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
    "tools is not JSON": {"messages": SAID, "tools": "["},
    "empty completion": {"prompt": "x", "completion": ""},
    "output should be text, got int": {"instruction": "x", "output": 3},
    "history.0 should be a pair": {"instruction": "x", "output": "y", "history": ["z"]},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_rows_say_what_is_wrong(said):
    with pytest.raises(DataError, match=said):
        parse_row(BAD[said])


def test_a_format_that_the_row_is_not():
    with pytest.raises(DataError, match="format alpaca needs the key instruction; there are messages"):
        parse_row({"messages": SAID}, "alpaca")


def test_text_for_tokenizers_holds_what_was_said():
    assert Conversation(SAID).text == "be kind\nhi\nhello"
