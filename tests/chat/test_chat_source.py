"""From files to batches: what reaches the trainer, what is counted, what is refused."""

import datetime
import gzip
import json
import logging

import numpy as np
import pytest

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.chat import Masker, parse_row
from trainwright.data.dataset import TokenizedSource
from trainwright.data.module import DataConfig, build_data
from trainwright.data.tokenizers.bytes import ByteTokenizer


def chat_row(i, more=""):
    return {
        "messages": [
            {"role": "user", "content": f"what is {i} plus {i}?"},
            {"role": "assistant", "content": f"it is {2 * i}{more}"},
        ]
    }


ROWS = [chat_row(i, "!" * (i % 5)) for i in range(24)]


@pytest.fixture
def tokenizer(templates):
    return ByteTokenizer(templates.LETTERS)


def source(path, **settings):
    return registry.build("source", {"name": "chat", "path": path, **settings})


def tokens(path, tokenizer, tmp_path, split="train", seq_len=64, fraction=0.0, **settings):
    return source(path, **settings).tokenized(
        tokenizer, split, seq_len=seq_len, validation_fraction=fraction, cache_dir=tmp_path / "cache"
    )


def test_the_dataset_holds_what_the_masks_say(rows_file, tokenizer, tmp_path):
    data = tokens(rows_file(ROWS), tokenizer, tmp_path)
    assert data.num_docs == len(ROWS)
    for i, row in enumerate(ROWS):
        want = Masker(tokenizer)(parse_row(row)[1])
        assert data.tokens(i).tolist() == want.ids.tolist()
        assert data.loss_weights(i).tolist() == want.weights.tolist()
        assert data.loss_weights(i, 3, 9).tolist() == want.weights[3:9].tolist()
        assert data.doc_id(i) == f"chats.jsonl:{i + 1}"
    assert isinstance(source(rows_file(ROWS)), TokenizedSource)


def config(path, tmp_path, **settings):
    batcher = settings.pop("batcher", None)
    section = {"sources": [{"name": "chat", "path": path, **settings}], "cache_dir": str(tmp_path / "cache")}
    return DataConfig.model_validate({**section, "batcher": batcher} if batcher else section)


@pytest.mark.parametrize("batcher", [None, "multipack", "padded", "packed"])
def test_rows_of_a_batch_carry_the_masks(rows_file, tokenizer, tmp_path, batcher):
    """Every target of weight 1 in a batch is a token of an answer, each once an epoch; seams and padding have none."""
    cfg = config(rows_file(ROWS), tmp_path, batcher=batcher)
    assert cfg.batcher.name == (batcher or "best_fit")
    data = build_data(cfg, tokenizer, seq_len=64, seed=1)
    loader = data.train_loader(4, max_rows=data.rows_per_epoch)
    answers, padding = [], 0
    for batch in loader:
        for row in range(4):
            ids, doc_ids = batch.tokens[row].tolist(), batch.doc_ids[row].tolist()
            trained = batch.weights[row].bool().tolist()
            for doc in sorted(set(doc_ids)):
                places = [i for i, d in enumerate(doc_ids) if d == doc]
                if all(ids[i] == tokenizer.pad_id for i in places):
                    padding += len(places)
                    assert not any(trained[i] for i in places)
                    continue
                if batcher != "packed":  # which cuts conversations
                    assert not trained[places[-1]], "the last token of a conversation has no target"
                    assert ids[places[0]] == tokenizer.bos_id
                    assert batch.positions[row, places[0]] == 0
                if batcher == "packed":
                    continue
                targets = [int(batch.targets[row, i]) for i in places if trained[i]]
                answers.append(tokenizer.decode(targets, skip_special=False))
    if batcher != "packed":
        want = [f"{m['content']}<eos>" for i in range(len(ROWS)) for m in ROWS[i]["messages"][1:]]
        held = next(iter(data.validation.values())).num_docs
        assert len(answers) == len(ROWS) - held and set(answers) <= set(want) and len(set(answers)) == len(answers)
    loader.close()


def test_pad_equal_to_eos_leaves_the_real_eos_its_label(rows_file, tokenizer, tmp_path):
    tokenizer.pad_id = tokenizer.eos_id
    data = build_data(config(rows_file(ROWS), tmp_path, batcher="padded"), tokenizer, seq_len=64, seed=1)
    loader = data.train_loader(4, max_rows=4)
    batch = loader.next_batch()
    loader.close()
    ends = (batch.targets == tokenizer.eos_id) & (batch.weights > 0)
    assert ends.sum(dim=1).tolist() == [1, 1, 1, 1]
    padding = batch.tokens == tokenizer.eos_id
    assert padding.any() and not batch.weights[padding].any()


def test_trained_share_is_exact_and_said(rows_file, tokenizer, tmp_path, caplog):
    cfg = config(rows_file(ROWS), tmp_path)
    with caplog.at_level(logging.INFO, "trainwright"):
        data = build_data(cfg, tokenizer, seq_len=64, seed=1)
    made = next(iter(data.train.values()))
    trained = sum(int(made.loss_weights(i).sum()) for i in range(made.num_docs))
    assert data.trained_share == pytest.approx(trained / made.num_tokens) and 0 < data.trained_share < 1
    assert made.report["trained"] == trained
    assert f"{100 * data.trained_share:.1f}% of the training tokens are trained on" in caplog.text
    assert f"{made.num_docs} of {made.num_docs} rows" in caplog.text


def test_an_all_zero_mask_is_an_error(rows_file, templates, tmp_path):
    """A template whose marks stand around nothing: in other trainers the run trains on nothing."""
    template = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"no conversation is left.*24 dropped without a token to train on"):
        tokens(rows_file(ROWS), ByteTokenizer(template), tmp_path)


# --- too long


@pytest.mark.parametrize(
    "rule, said",
    [("drop", "1 dropped as longer than 64"), ("truncate_right", "1 cut to 64"), ("truncate_left", "1 cut to 64")],
)
def test_what_is_too_long_is_counted_and_said(rows_file, tokenizer, tmp_path, caplog, rule, said):
    rows = [*ROWS, chat_row(99, " long" * 30)]
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = tokens(rows_file(rows), tokenizer, tmp_path, too_long=rule)
    assert said in caplog.text and data.lengths.max() <= 64
    assert data.num_docs == len(rows) - (rule == "drop")
    if rule == "truncate_left":
        assert data.tokens(24)[-1] == tokenizer.eos_id and data.loss_weights(24)[1:].all()


def test_a_row_cut_before_its_answer_is_dropped_and_counted(rows_file, tokenizer, tmp_path, caplog):
    row = {"messages": [{"role": "user", "content": "x" * 80}, {"role": "assistant", "content": "y"}]}
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = tokens(rows_file([*ROWS, row]), tokenizer, tmp_path, too_long="truncate_right")
    assert data.num_docs == len(ROWS) and data.report["cut_before_answer"] == 1
    assert "1 dropped because 64 tokens leave no answer" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trainwright"):  # also when it comes from the cache
        tokens(rows_file([*ROWS, row]), tokenizer, tmp_path, too_long="truncate_right")
    assert "1 dropped because 64 tokens leave no answer" in caplog.text


def test_max_length(rows_file, tokenizer, tmp_path):
    assert tokens(rows_file(ROWS), tokenizer, tmp_path, max_length=32).lengths.max() <= 32
    with pytest.raises(ConfigError, match=r"max_length=65: is more than a row holds"):
        tokens(rows_file(ROWS), tokenizer, tmp_path, max_length=65)
    with pytest.raises(DataError, match=r"no conversation is left.*24 dropped as longer than 5 tokens"):
        tokens(rows_file(ROWS), tokenizer, tmp_path, max_length=5)


# --- bad rows


def test_a_bad_row_stops_or_is_counted(rows_file, tokenizer, tmp_path, caplog):
    path = rows_file([*ROWS, {"messages": [{"role": "user", "content": "?"}]}])
    with pytest.raises(DataError, match=r"chats.jsonl:25: has no assistant turn.*skip_bad_rows"):
        tokens(path, tokenizer, tmp_path)
    with open(path, "a") as file:
        file.write("{broken\n")
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = tokens(path, tokenizer, tmp_path, skip_bad_rows=True)
    assert data.num_docs == len(ROWS) and data.report["bad"] == 2
    assert "2 unusable rows skipped, e.g. " in caplog.text and "chats.jsonl:25: has no assistant turn" in caplog.text
    assert "malformed JSON" in data.report["bad_samples"][1]
    with pytest.raises(DataError, match=r"2 of 26 rows cannot be used, more than max_bad_rows=0.05"):
        tokens(path, tokenizer, tmp_path, skip_bad_rows=True, max_bad_rows=0.05)


def test_a_row_that_the_template_refuses_is_a_bad_row(rows_file, tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m.role[0] + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    row = {"messages": [{"role": "system", "content": "s"}, *ROWS[0]["messages"]]}
    path = rows_file([*ROWS, row])
    with pytest.raises(DataError, match=r"chats.jsonl:25: the chat template refuses.*no system message"):
        tokens(path, ByteTokenizer(template), tmp_path)
    assert tokens(path, ByteTokenizer(template), tmp_path, skip_bad_rows=True).report["bad"] == 1


def test_an_unstable_template_stops_though_bad_rows_are_skipped(rows_file, templates, tmp_path):
    row = {"messages": [*ROWS[0]["messages"], *ROWS[1]["messages"]]}
    row["messages"][1] = {"role": "assistant", "content": "<think>t</think>x"}
    with pytest.raises(DataError, match=r"chats.jsonl:1: the chat template is not prefix-stable"):
        tokens(rows_file([row]), ByteTokenizer(templates.FORGETFUL), tmp_path, skip_bad_rows=True)


def test_a_file_that_changes_while_it_is_read(rows_file, tokenizer, tmp_path, monkeypatch):
    path = rows_file(ROWS)
    src = source(path)
    prints = iter(["before", "after"])
    monkeypatch.setattr(type(src), "fingerprint", lambda self: next(prints))
    with pytest.raises(DataError, match="changed while they were read"):
        src.tokenized(tokenizer, "train", seq_len=64, validation_fraction=0.0, cache_dir=tmp_path / "cache")


# --- what is said of usable rows


def test_empty_answers_are_counted_and_said(rows_file, tokenizer, tmp_path, caplog):
    rows = [*ROWS, {"messages": [*ROWS[0]["messages"], {"role": "user", "content": "?"}, said("")]}]
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = tokens(rows_file(rows), tokenizer, tmp_path)
    assert data.num_docs == len(rows) and data.report["empty_answer"] == 1
    assert "1 with an empty answer" in caplog.text


def said(text):
    return {"role": "assistant", "content": text}


def test_how_prompts_of_preferences_were_found_is_counted_and_said(rows_file, tokenizer, tmp_path, caplog):
    rows = [
        {"prompt": "Q:", "chosen": "Q: yes", "rejected": "Q: no"},
        {"chosen": "Assistant: I am sorry, no", "rejected": "Assistant: I am happy"},
        {"chosen": "hi I am", "rejected": "hi I will"},
    ]
    with caplog.at_level(logging.WARNING, "trainwright"):
        data = tokens(rows_file(rows), tokenizer, tmp_path)
    answers = [tokenizer.decode(data.tokens(i)[data.loss_weights(i) > 0].tolist()) for i in range(3)]
    assert answers == [" yes", " I am sorry, no", " am"]
    assert (data.report["prompt_repeated"], data.report["prompt_guessed"]) == (1, 1)
    assert "1 repeat the prompt in both answers" in caplog.text and "1 with no prompt and no mark" in caplog.text


def test_the_date_of_a_template_is_a_setting(rows_file, templates, tmp_path, caplog):
    """The same recipe gives the same tokens tomorrow; the cache knows the date."""
    tokenizer = ByteTokenizer("{{ strftime_now('%Y-%m-%d') }}|" + templates.LETTERS)
    path = rows_file(ROWS)
    with caplog.at_level(logging.INFO, "trainwright"):
        first = tokens(path, tokenizer, tmp_path)
        other = tokens(path, tokenizer, tmp_path, date="2030-01-02")
    assert first.folder != other.folder and first.fingerprint != other.fingerprint
    starts = [tokenizer.decode(d.tokens(0)[:11].tolist()) for d in (first, other)]
    assert starts == ["2024-07-26|", "2030-01-02|"]
    assert "to the chat template the date is 2024-07-26" in caplog.text
    assert tokens(path, tokenizer, tmp_path, date=datetime.date(2030, 1, 2)).folder == other.folder
    assert tokens(path, ByteTokenizer(templates.LETTERS), tmp_path).report["date"] is None
    with pytest.raises(ConfigError, match="date"):
        source(path, date="tomorrow")


# --- files


def test_arrays_parquet_and_packed_files_read_alike(rows_file, tokenizer, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    want = tokens(rows_file(ROWS), tokenizer, tmp_path).fingerprint
    (tmp_path / "rows.json").write_text("\ufeff \n" + json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps(r) for r in ROWS).encode()))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.jsonl.gz", "rows.parquet"):
        assert tokens(str(tmp_path / name), tokenizer, tmp_path).fingerprint == want, name


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_arrays_are_read_in_blocks(tmp_path, monkeypatch, block):
    from trainwright.data.chat import files
    from trainwright.data.sources._files import SourceFile

    monkeypatch.setattr(files, "BLOCK", block)
    values = [{"a": "äöü 漢字 ]}, [{" * 3, "b": [1, {"c": None}]}, {}, {"d": '\\" '}, *ROWS[:3]]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    assert list(files.read_rows(SourceFile(path, "x"))) == list(enumerate(values))
    path.write_text("[]")
    assert list(files.read_rows(SourceFile(path, "x"))) == []
    for text, said in (
        ('[{"a": 1} {"b": 2}]', "comma behind row 0"),
        ('[{"a": 1}, {"b"', "behind row 0"),
        ("[", "row -1"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            list(files.read_rows(SourceFile(path, "x")))


def test_a_small_set_holds_out_whole_conversations(rows_file, tokenizer, tmp_path):
    path = rows_file(ROWS[:3])
    train = tokens(path, tokenizer, tmp_path, fraction=0.01)
    held = tokens(path, tokenizer, tmp_path, "validation", fraction=0.01)
    ids = {train.doc_id(i) for i in range(train.num_docs)} | {held.doc_id(i) for i in range(held.num_docs)}
    assert (train.num_docs, held.num_docs) == (2, 1) and ids == {f"chats.jsonl:{i}" for i in (1, 2, 3)}
    assert sorted([*train.lengths, *held.lengths]) == sorted(tokens(path, tokenizer, tmp_path).lengths)


# --- the cache


def test_the_cache_follows_what_decides_the_masks(rows_file, tokenizer, templates, tmp_path):
    path = rows_file(ROWS)
    first = tokens(path, tokenizer, tmp_path)
    assert tokens(path, tokenizer, tmp_path).folder == first.folder
    others = [
        tokens(path, tokenizer, tmp_path, train_on="last"),
        tokens(path, tokenizer, tmp_path, max_length=60),
        tokens(path, ByteTokenizer(templates.LETTERS.replace("A:", "a:")), tmp_path),
    ]
    assert len({d.folder for d in [first, *others]}) == 4


def test_masks_are_part_of_the_fingerprint(rows_file, tokenizer, tmp_path):
    weighted = [{"messages": [ROWS[0]["messages"][0], {**ROWS[0]["messages"][1], "weight": w}]} for w in (1, 0.5)]
    one = tokens(rows_file([weighted[0]], "a.jsonl"), tokenizer, tmp_path)
    half = tokens(rows_file([weighted[1]], "b.jsonl"), tokenizer, tmp_path)
    assert one.tokens(0).tolist() == half.tokens(0).tolist() and one.fingerprint != half.fingerprint
    assert set(half.loss_weights(0).tolist()) == {0.0, 0.5} and half.loss_weights(0).dtype == np.float32


def test_damaged_weights_are_found_and_made_anew(rows_file, tokenizer, tmp_path):
    path = rows_file(ROWS)
    first = tokens(path, tokenizer, tmp_path)
    file = first.folder / "weights.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))
    with pytest.warns(UserWarning, match="weights.bin does not match its checksum"):
        again = tokens(path, tokenizer, tmp_path)
    assert again.loss_weights(0)[0] == 0


def test_worker_processes_get_the_weights(rows_file, tokenizer, tmp_path):
    import pickle

    data = tokens(rows_file(ROWS), tokenizer, tmp_path)
    there = pickle.loads(pickle.dumps(data))
    assert there.loss_weights(3).tolist() == data.loss_weights(3).tolist()


def test_several_processes_give_the_same(rows_file, tokenizer, tmp_path):
    path = rows_file(ROWS)
    one = tokens(path, tokenizer, tmp_path)
    two = source(path).tokenized(
        tokenizer, "train", seq_len=64, validation_fraction=0.0, cache_dir=tmp_path / "other", num_proc=2
    )
    assert one.fingerprint == two.fingerprint and one.folder != two.folder


def test_objective_sft_needs_data_with_a_mask(recipe, rows_file):
    from trainwright import RunConfig

    with pytest.raises(ConfigError, match=r"objective=sft needs source=chat or .*next_token to train on every token"):
        RunConfig.load(recipe(objective="sft"))
    cfg = RunConfig.load(
        recipe(objective="sft", **{"data.sources": [{"name": "chat", "path": rows_file(ROWS), "format": "auto"}]})
    )
    assert cfg.data.batcher.name == "best_fit"
    assert RunConfig.load(json.loads(json.dumps(cfg.to_dict()))).to_dict() == cfg.to_dict()
    assert RunConfig.load(cfg.to_dict(), ["data.batcher=packed"]).data.batcher.name == "packed"
