"""B116 in training: the source ``pyx`` and rows in the prompt/completion format."""

import json
import logging

import numpy as np
import pytest

from trainwright import RunConfig, Trainer
from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.core.sandbox import _seccomp
from trainwright.data.synthetic.pyx.rows import Row, answer_of, code_of_question
from trainwright.data.tokenizers.bytes import ByteTokenizer

pytestmark = pytest.mark.skipif(not _seccomp.supported(), reason="needs seccomp")


def source(**settings):
    return registry.build("source", {"name": "pyx", **settings})


def tokenized(config, cache, seq_len=2048, split="train", **options):
    tokenizer = ByteTokenizer()
    settings = {"validation_fraction": 0.1, **options}
    return tokenizer, config.tokenized(tokenizer, split, seq_len=seq_len, cache_dir=cache, **settings)


def test_made_rows_are_right_and_repeatable():
    rows = source(samples=60, seed=3).rows()
    assert rows == source(samples=60, seed=3).rows() != source(samples=60, seed=4).rows()
    assert [r.kind for r in rows[:4]] == ["forward", "backward"] * 2 and len(rows) > 55
    for row in rows:
        space = {}
        exec(code_of_question(row.question), space)
        line = next(x for x in row.question.split("\n") if "??" in x)
        asserted = line.replace("f(??)" if row.kind == "backward" else "??", answer_of(row.response))
        exec(asserted, space)


def test_splits_are_apart_and_whole():
    config = source(samples=80)
    parts = {s: {d.id for d in config.documents(s, 0.2)} for s in ("train", "validation")}
    assert not parts["train"] & parts["validation"] and all(parts.values())
    assert len(parts["train"] | parts["validation"]) == len(config.rows())


def test_c_no_loss_on_prompts(tmp_path):
    """Weights are 0 over the prompt's bytes, 1 over the response's and EOS: read back from the dataset."""
    config = source(samples=20)
    tokenizer, data = tokenized(config, tmp_path)
    documents = list(config.documents("train", 0.1))
    assert data.num_docs == len(documents) > 10
    for i, document in enumerate(documents):
        pair = document.meta["example"]
        bos = tokenizer.bos_id is not None
        prompt, response = len(pair.prompt.encode()) + bos, len(pair.completion.encode())
        weights = np.asarray(data.loss_weights(i))
        assert len(weights) == prompt + response + 1
        assert not weights[:prompt].any() and (weights[prompt:] == 1).all()


def test_too_long_rows_are_dropped_and_counted(tmp_path, caplog):
    config = source(samples=40)
    ends = 1 + (ByteTokenizer().bos_id is not None)
    lengths = [len(d.text.encode()) + ends for d in config.documents("train", 0.1)]
    limit = sorted(lengths)[len(lengths) // 2]
    with caplog.at_level(logging.WARNING, "trainwright"):
        _, data = tokenized(source(samples=40, max_length=limit), tmp_path)
    assert data.report["dropped"] == sum(n > limit for n in lengths) > 0 and data.report["cut"] == 0
    assert "dropped" in caplog.text
    with pytest.raises(ConfigError, match="max_length"):
        tokenized(source(samples=5, max_length=4096), tmp_path)


def test_files_of_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [Row("nl", "Add one.", "def f(x): return x + 1"), Row("debug", "q", "r"), Row("forward", "a", "b")]
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in rows))
    found = list(source(path=str(path), kinds=["nl", "debug"]).documents("train", 0.0))
    assert [d.meta["kind"] for d in found] == ["nl", "debug"]
    with path.open("a") as file:
        file.write(json.dumps({"nl": "a", "bwd_mnl": "b", "response": "r"}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:4: has 2 kinds"):
        list(source(path=str(path)).documents("train", 0.0))
    lenient = source(path=str(path), skip_bad_rows=True)
    assert len(list(lenient.documents("train", 0.0))) == 1 and lenient.bad_rows == 1
    before = lenient.fingerprint()
    path.write_text(path.read_text() + "\n")
    assert lenient.fingerprint() != before
    assert source(samples=5).fingerprint() != source(samples=6).fingerprint()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kinds": []}, "kinds"), ({"kinds": ["nl"]}, "path"), ({"kinds": ["forward", "forward"]}, "once"),
        ({"reasoning": "none"}, "reasoning"), ({"isolation": "none"}, "isolation"), ({"samples": 0}, "samples"),
        ({"too_long": "truncate_right"}, "too_long"), ({"path": []}, "path"), ({"path": ""}, "path"),
    ],
)  # fmt: skip
def test_bad_settings(settings, words):
    with pytest.raises(ConfigError, match=words):
        source(**settings)


def test_a_run_learns_from_it(recipe):
    settings = {"data.sources": [{"name": "pyx", "samples": 120, "style": "brief"}], "objective": "sft"}
    rows = []
    config = recipe(**settings, **{"train.steps": 30, "train.seq_len": 640, "train.global_batch_tokens": 2560})
    Trainer(RunConfig.load(config)).fit(on_step=rows.append)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
