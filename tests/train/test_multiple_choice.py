"""Multiple choice by log-likelihood: the plain sum, what lm-evaluation-harness gives, and right where that is known."""

import json

import pytest
import torch

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.registry import build
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.models.scoring import continuation_logprobs
from trainwright.train.multiple_choice import (
    Question,
    from_pairs,
    multiple_choice,
    option_scores,
    question_of,
    read_questions,
)

SIZE = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 64}
QUESTIONS = [
    Question("2 + 2 =", ("4", "five", "22"), 0),
    Question("首都?", ("北京", "Paris"), 1),
    Question("a longer prompt than the others, by far", ("yes", "no", "maybe", "so"), 2),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build("model", {"name": "decoder", **SIZE}).build(259, 64).double().eval()


def by_hand(model, tokenizer, prompt, option):
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt + " " + option)]
    n = len(tokenizer.encode(" " + option))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]))[0].log_softmax(-1)
    return sum(logprobs[i - 1, ids[i]].item() for i in range(len(ids) - n, len(ids)))


def test_scores_are_the_plain_sums(model):
    tokenizer = ByteTokenizer()
    got = option_scores(model, tokenizer, QUESTIONS, batch_size=3)
    for question, row in zip(QUESTIONS, got, strict=True):
        assert row == pytest.approx([by_hand(model, tokenizer, question.prompt, o) for o in question.options], rel=1e-5)
    byte = option_scores(model, tokenizer, QUESTIONS, normalise="bytes")
    token = option_scores(model, tokenizer, QUESTIONS, normalise="tokens")
    for question, a, b, c in zip(QUESTIONS, got, byte, token, strict=True):
        sizes = [len(o.encode()) for o in question.options]
        assert b == pytest.approx([x / n for x, n in zip(a, sizes, strict=True)])
        assert c == pytest.approx([x / (n + 1) for x, n in zip(a, sizes, strict=True)])  # the separator is a token too


def test_as_the_harness_scores_them(model):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from trainwright.train.lm_eval_adapter import make_harness_model

    class NoBos(ByteTokenizer):
        bos_id = None

    harness = make_harness_model(model, NoBos())
    requests = [
        Instance("loglikelihood", {}, (q.prompt, " " + o), i) for i, q in enumerate(QUESTIONS) for o in q.options
    ]
    want = [score for score, _ in harness.loglikelihood(requests, disable_tqdm=True)]
    got = [score for row in option_scores(model, NoBos(), QUESTIONS) for score in row]
    assert got == pytest.approx(want, rel=1e-6)


def test_accuracy_of_a_model_that_knows():
    class Knows(torch.nn.Module):
        """Always repeats the token before."""

        max_seq_len = 64

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            return torch.nn.functional.one_hot(tokens, 259).float() * 9

    asked = [Question(c * 3, tuple(o * 4 for o in "abcd"), "abcd".index(c)) for c in "abcd"]
    found = multiple_choice(Knows(), ByteTokenizer(), asked, separator="")
    assert found == {"accuracy": 1.0, "chance": 0.25, "questions": 4.0}
    wrong = [Question(q.prompt, q.options, (q.answer + 1) % 4) for q in asked]
    assert multiple_choice(Knows(), ByteTokenizer(), wrong, separator="")["accuracy"] == 0.0


def test_continuations_that_do_not_fit(model):
    long = continuation_logprobs(model, [(list(range(100)), [5, 6])], 0)
    assert long == continuation_logprobs(model, [(list(range(37, 100)), [5, 6])], 0)  # 65 ids, the last is no input
    with pytest.raises(ConfigError, match="a continuation of 70 tokens does not fit the model's 64"):
        continuation_logprobs(model, [([1], [2] * 70)], 0)
    assert continuation_logprobs(model, [([1, 2], [])], 0)[0].logprob == 0


def test_reading_questions(tmp_path):
    rows = [
        {"prompt": "a?", "options": ["x", "y"], "answer": 1},
        {"question": "b?", "choices": ["x", "y"], "label": "A"},
        {"prompt": "c?", "options": ["x", "y"], "answer": "y"},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    assert [(q.prompt, q.answer) for q in read_questions(path)] == [("a?", 1), ("b?", 0), ("c?", 1)]
    for row, message in (
        ({"prompt": "a?", "options": ["x"], "answer": 0}, "has 1 options; it needs at least 2"),
        ({"prompt": "a?", "options": ["x", " "], "answer": 0}, "an option is empty"),
        ({"prompt": "a?", "options": ["x", "y"], "answer": 2}, "answer=2 is none of the 2 options"),
        ({"prompt": "a?", "options": ["x", "y"], "answer": None}, "answer should be a number, a letter or an option"),
        ({"options": ["x", "y"], "answer": 0}, "needs a prompt"),
        (["a"], "expected an object"),
    ):
        with pytest.raises(DataError, match=message):
            question_of(row)
    path.write_text(json.dumps(rows[0]) + "\n{")
    with pytest.raises(DataError, match=r"q.jsonl:2"):
        read_questions(path)
    with pytest.raises(DataError, match="no question"):
        multiple_choice(None, ByteTokenizer(), [])


def test_questions_from_pairs():
    pairs = [(f"q{i}", f"a{i}") for i in range(10)]
    made = from_pairs(pairs, seed=1)
    assert made == from_pairs(pairs, seed=1) != from_pairs(pairs, seed=2)
    assert all(q.options[q.answer] == f"a{q.prompt[1:]}" and len(set(q.options)) == 4 for q in made)
    with pytest.raises(DataError, match="are too few for questions of 4 options"):
        from_pairs(pairs[:3])
