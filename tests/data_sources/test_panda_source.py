"""Panda LLM's data: rows to prompts and targets, shares and up-sampling, what is refused and counted."""

import json
from collections import Counter

import pytest

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.dataset import ArrayDataset
from trainwright.data.module import DataConfig, build_data
from trainwright.data.sources.panda_llm import pairs_of
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.data.upsample import UpSampled, up_sampled

TOKENIZER = ByteTokenizer()


def write(path, rows):
    if isinstance(rows[0], list):  # COIG is one array of conversations, each an array
        path = path.with_suffix(".json")
        path.write_text(json.dumps(rows, ensure_ascii=False))
        return str(path)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def source(path, **settings):
    return registry.build("source", {"name": "panda_llm", "path": str(path), **settings})


def tokenized(path, tmp_path, seq_len=64, **settings):
    return source(path, **settings).tokenized(
        TOKENIZER, "train", seq_len=seq_len, validation_fraction=0.0, cache_dir=tmp_path / "cache"
    )


def shown(data, doc):
    """Text with what is trained on in brackets."""
    ids, weights = data.tokens(doc), data.loss_weights(doc)
    n = int((weights == 0).sum())
    assert (weights[:n] == 0).all() and (weights[n:] == 1).all()
    return TOKENIZER.decode(ids[:n]) + "[" + TOKENIZER.decode(ids[n:], skip_special=False) + "]"


ROWS = [
    ({"inputs": "capital of France?", "targets": "Paris"}, ["capital of France?[ Paris<eos>]"]),
    ({"instruction": "翻译", "input": "hello", "output": "你好"}, ["翻译\n\nhello[ 你好<eos>]"]),
    ({"prompt": "2+2=", "completion": "4"}, ["2+2=[ 4<eos>]"]),
    ({"question": "why?", "answer": "so"}, ["why?[ so<eos>]"]),
    ({"text": "a document."}, ["[a document.<eos>]"]),
    (
        [{"inputs": "hi", "targets": "hello"}, {"inputs": "how?", "targets": "fine"}],
        ["hi[ hello<eos>]", "hi\n\nhello\n\nhow?[ fine<eos>]"],
    ),
    (
        {"conversations": [
            {"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"},
            {"from": "human", "value": "bye"}, {"from": "gpt", "value": "ciao"},
        ]},
        ["be kind\n\nhi[ yo<eos>]", "be kind\n\nhi\n\nyo\n\nbye[ ciao<eos>]"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "want"), ROWS)
def test_rows_and_what_is_trained_on(row, want, tmp_path):
    data = tokenized(write(tmp_path / "a.jsonl", [row]), tmp_path)
    assert [shown(data, i) for i in range(data.num_docs)] == want


def test_templates_and_full_loss(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"en": "dog", "zh": "狗", "n": 3}])
    settings = {"prompt_template": "Translate into Chinese: {en}\n", "target_template": "{zh} ({n})", "separator": ""}
    assert shown(tokenized(path, tmp_path, **settings), 0) == "Translate into Chinese: dog\n[狗 (3)<eos>]"
    assert shown(tokenized(path, tmp_path, loss="full", **settings), 0).endswith(
        "[Translate into Chinese: dog\n狗 (3)<eos>]"
    )


def test_turns_of_a_dialogue_are_on_one_side(tmp_path):
    rows = [[{"inputs": f"q{i}.{t}", "targets": "a"} for t in range(4)] for i in range(200)]
    path = write(tmp_path / "a.jsonl", rows)
    sides = [{d.id.split("#")[0] for d in source(path).documents(s, 0.3)} for s in ("train", "validation")]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 200 and len(sides[1]) > 30


def test_a_prompt_that_fills_the_window_is_dropped_and_counted(tmp_path):
    """Users report: the reference halves the mask and trains on the prompt."""
    rows = [{"inputs": "p" * n, "targets": "target"} for n in (10, 25, 40, 70)]
    data = tokenized(write(tmp_path / "a.jsonl", rows), tmp_path, seq_len=32)
    assert data.report["cut_before_answer"] == 2 and data.report["cut"] == 1 and data.num_docs == 2
    for i in range(2):
        assert set(data.tokens(i)[data.loss_weights(i) > 0].tolist()) <= {*b" target", 256}
    dropped = tokenized(write(tmp_path / "a.jsonl", rows), tmp_path, seq_len=32, too_long="drop")
    assert dropped.num_docs == 1 and dropped.report["dropped"] == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"inputs": "q", "targets": " "}, r"a.jsonl:1: has an empty target"),
        ({"instruction": "q", "output": ""}, r"a.jsonl:1: has (an empty target|only empty assistant turns)"),
        ({"inputs": "", "targets": "x"}, r"has an empty prompt; a document without one belongs under the key text"),
        ({"foo": "q", "bar": "x"}, r"are those of no format"),
        ({"chosen": "a", "rejected": "b"}, r"is of the format preference"),
        ("text", r"expected an object, got str"),
        ({"messages": [{"role": "user", "content": "x"}]}, r"has no assistant turn"),
        (
            {"messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            ]},
            r"has tool calls",
        ),
    ],
)  # fmt: skip
def test_bad_rows(row, message, tmp_path):
    path = write(tmp_path / "a.jsonl", [row] + [{"inputs": "q", "targets": "x"}] * 20)
    with pytest.raises(DataError, match=message):
        list(source(path).documents("train", 0.0))
    data = tokenized(path, tmp_path, skip_bad_rows=True)
    assert data.num_docs == 20 and data.report["bad"] == 1 and "a.jsonl:1" in data.report["bad_samples"][0]
    with pytest.raises(DataError, match=r"more than max_bad_rows=0\.01"):
        tokenized(path, tmp_path, skip_bad_rows=True, max_bad_rows=0.01)


def test_bad_templates(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}])
    for settings, message in (
        ({"prompt_template": "no field", "target_template": "{a}"}, "names no field of a row"),
        ({"prompt_template": "{q", "target_template": "{a}"}, "is not a template"),
        ({"prompt_template": "{}", "target_template": "{a}"}, "names no field"),
        ({"prompt_template": "{q}"}, "target_template is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            source(path, **settings)
    with pytest.raises(
        DataError, match=r"prompt_template names the field 'question', which is missing or no text; .*q, a"
    ):
        list(source(path, prompt_template="{question}", target_template="{a}").documents("train", 0.0))
    with pytest.raises(ConfigError, match="no such source; did you mean 'panda_llm'"):
        registry.build("source", {"name": "pandallm", "path": path})
    with pytest.raises(DataError):
        pairs_of([{"inputs": "a", "targets": ""}])


# -- shares and up-sampling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2, 10, 2.5, 1.3, 0.25, 0.01])
def test_up_sampling_gives_exactly_so_many_uses(uses):
    """(b) u whole: exactly u; else floor or ceil, and N * u in all."""
    data = ArrayDataset([[i, 1, 2] for i in range(40)])
    up = up_sampled(data, uses)
    counts = Counter(int(up.tokens(d)[0]) for d in range(up.num_docs))
    assert {counts.get(i, 0) for i in range(40)} <= {int(uses), int(uses) + (uses != int(uses))}
    assert up.num_docs == max(round(40 * uses), 1) and up.num_tokens == 3 * up.num_docs
    assert (up is data) == (uses == 1) and (uses == 1 or up.fingerprint != data.fingerprint)
    assert [up.tokens(d).tolist() for d in range(up.num_docs)] == [
        up_sampled(data, uses).tokens(d).tolist() for d in range(up.num_docs)
    ]


def test_up_sampling_keeps_weights_and_refuses_nonsense(tmp_path):
    data = ArrayDataset([[1, 2, 3], [4, 5]], [[0, 1, 1], [0, 0.5]])
    up = UpSampled(data, 3)
    assert all(up.loss_weights(d).tolist() == data.loss_weights(d % 2).tolist() for d in range(6))
    assert up.lengths.tolist() == [3, 2] * 3
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="should be above 0"):
            UpSampled(data, bad)
    with pytest.raises(ConfigError, match="up_sample"):
        source(tmp_path, up_sample=0)


def module(tmp_path, first, second, n=(400, 40), **more):
    a = write(tmp_path / "docs.jsonl", [{"text": f"document {i:04d} " + "x" * 20} for i in range(n[0])])
    b = write(tmp_path / "pairs.jsonl", [{"inputs": f"pair {i:04d}?", "targets": "y" * 20} for i in range(n[1])])
    sources = [{"name": "panda_llm", "path": a, **first}, {"name": "panda_llm", "path": b, **second}]
    section = {"sources": sources, "cache_dir": str(tmp_path / "c"), "validation_fraction": 0.0, **more}
    return build_data(DataConfig.model_validate(section), TOKENIZER, seq_len=128, seed=0)


def seen(data, rows, batch=8):
    """How often each document was seen in ``rows`` rows, by its text."""
    counts, loader = Counter(), data.train_loader(batch, rows)
    while True:
        try:
            found = loader.next_batch()
        except StopIteration:
            return counts
        for tokens, docs in zip(found.tokens, found.doc_ids, strict=True):
            for d in docs.unique().tolist():
                inside = tokens[docs == d][:40]
                text = TOKENIZER.decode(inside.tolist())
                if text:
                    counts[text[:13]] += 1


@pytest.mark.parametrize("uses", [1, 3, 2.5])
def test_an_epoch_of_a_run_uses_each_item_so_often(tmp_path, uses):
    """(b) Counted in the batches that a trainer gets."""
    data = module(tmp_path, {}, {"up_sample": uses})
    counts = seen(data, data.rows_per_epoch)
    documents = [n for text, n in counts.items() if text.startswith("document")]
    pairs = [n for text, n in counts.items() if text.startswith("pair")]
    assert len(documents) == 400 and set(documents) == {1}
    assert len(pairs) == 40 and sum(pairs) == 40 * uses and set(pairs) <= {int(uses), -int(-uses // 1)}


def test_realized_shares_of_a_weighted_mixture(tmp_path):
    """(b) Within 0.5 %."""
    data = module(tmp_path, {"weight": 0.96}, {"weight": 0.04})
    loader = data.train_loader(10, 2000)
    rows = pairs = 0
    for _ in range(200):
        batch = loader.next_batch()
        rows += batch.shape[0]
        pairs += sum("pair" in TOKENIZER.decode(r[:8].tolist()) for r in batch.tokens)
    assert rows == 2000 and abs(pairs / rows - 0.04) < 0.005


def test_a_recipe_without_it_is_as_before(tmp_path):
    plain, ones = module(tmp_path, {}, {}), module(tmp_path, {"up_sample": 1}, {"up_sample": 1.0})
    assert plain.fingerprint == ones.fingerprint
    assert (plain.train_loader(4).next_batch().tokens == ones.train_loader(4).next_batch().tokens).all()
    a = source(tmp_path / "docs.jsonl")
    assert a.fingerprint() == source(tmp_path / "docs.jsonl", up_sample=5).fingerprint()  # nothing is tokenized anew
