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


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_pairs_of_several_turns_have_one_prompt():
    """log P(z | a, x, c) against log P(x | a) would be no preference."""
    longer = [user("a"), said("x"), user("c"), said("z")]
    pair = parse_row({"chosen": longer, "rejected": [user("a"), said("bad")]})[1]
    assert pair.chosen.messages == longer and pair.chosen.weights == [0, 1, 1, 1]
    assert pair.rejected.messages == [user("a"), said("bad")] and pair.rejected.weights == [0, 1]
    late = parse_row({"chosen": longer, "rejected": [*longer[:3], said("w")]})[1]
    assert late.chosen.weights == late.rejected.weights == [0, 0, 0, 1]
    for prompt in ({}, {"prompt": [user("a")]}, {"prompt": "a"}):
        with pytest.raises(DataError, match="rejected is how chosen begins, so they are no two answers to one prompt"):
            parse_row({**prompt, "chosen": longer, "rejected": longer[:2]})
    with pytest.raises(DataError, match="part at message 0, which is not the assistant's: they answer different"):
        parse_row({"chosen": [user("a"), said("x")], "rejected": [user("b"), said("y")]})
    with pytest.raises(DataError, match="part at message 2"):
        parse_row({"chosen": longer, "rejected": [*longer[:2], user("d"), said("z")]})
    with pytest.raises(DataError, match="both be texts or both be lists"):
        parse_row({"prompt": "a", "chosen": [user("a"), said("x")], "rejected": "y"})
    same = parse_row({"chosen": longer, "rejected": longer})[1]
    assert same.chosen == same.rejected and same.chosen.weights == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "prompt, chosen, rejected, want",
    [
        ("Q: hi A:", "Q: hi A: yes", "Q: hi A: no", (" yes", " no")),
        ("hi", "hi there", "hi! you", (" there", "! you")),
        ("你好", "你好吗", "你好。", ("吗", "。")),
        ("Q: hi A:", "Q: hi A: yes", "no", None),  # one side alone begins with it: it may be what it says
        ("a", "apple", "ant", None),  # letters of a word
        ("", "yes", "no", None),
    ],
)
def test_a_prompt_that_both_texts_repeat_stands_once(prompt, chosen, rejected, want):
    pair = parse_row({"prompt": prompt, "chosen": chosen, "rejected": rejected})[1]
    assert (pair.chosen.prompt, pair.rejected.prompt) == (prompt, prompt)
    assert (pair.chosen.completion, pair.rejected.completion) == (want or (chosen, rejected))
    assert pair.notes == (("prompt_repeated",) if want else ())


@pytest.mark.parametrize(
    "prompt, chosen, rejected, guessed",
    [
        ("Human: hi Assistant:", " I am sorry, no", " I am happy", False),
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", " I am", " I will", False),
        ("### Instruction:\nadd\n\n### Response:\n", "It is 3", "It is 4", False),
        ("<|user|>\nhi\n<|assistant|>\n", "I am", "I will", False),
        ("[INST] hi [/INST]", " I am", " I will", False),
        ("Q: hi A:", " I am", " I will", False),
        ("Question: hi\nAnswer:", " I am", " I will", False),
        ("Human: hi\nAssistant:", " Answer: I am", " Answer: I will", False),  # the speaker, not the word
        ("Human: hi\nAssistant:", " yes", " yes sir", False),
        ("hi I", " am", " will", True),
        ("vitamin A: it", " helps", " heals", True),
        ("", "yes", "no", False),
    ],
)
def test_where_texts_without_a_prompt_are_cut(prompt, chosen, rejected, guessed):
    """Words that both answers begin with are theirs, where a mark says whose turn it is."""
    pair = parse_row({"chosen": prompt + chosen, "rejected": prompt + rejected})[1]
    assert pair.chosen == TextPair(prompt, chosen) and pair.rejected == TextPair(prompt, rejected)
    assert pair.notes == (("prompt_guessed",) if guessed else ())


def test_texts_that_part_in_a_question_are_no_pair():
    talk = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c"
    with pytest.raises(DataError, match="part within what the user says"):
        parse_row({"chosen": f"{talk}1\n\nAssistant: x", "rejected": f"{talk}2\n\nAssistant: x"})


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
