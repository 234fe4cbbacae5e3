"""Preference data to batches of pairs: what a preference objective reads is what each answer alone would give."""

import json

import pytest
import torch

from trainwright.core import registry
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.chat import Masker, Preference, TextPair, parse_row
from trainwright.data.chat.pairs import PairDataset, PairLoader, collate_pairs, pair_sums, read_pairs
from trainwright.data.tokenizers.bytes import ByteTokenizer


def said(text):
    return {"role": "assistant", "content": text}


MESSAGES = [{"role": "user", "content": "hi"}]
ROWS = [
    {"prompt": f"question {i}: ", "chosen": "good" + "!" * i, "rejected": "bad" * (1 + i % 3)} for i in range(10)
] + [
    {"chosen": [*MESSAGES, said("hello")], "rejected": [*MESSAGES, said("go")]},
    {"prompt": MESSAGES, "chosen": [said("yes")], "rejected": [said("no")]},
]  # fmt: skip


@pytest.fixture
def masker(templates):
    return Masker(ByteTokenizer(templates.LETTERS))


@pytest.fixture
def dataset(masker):
    return PairDataset([parse_row(r)[1] for r in ROWS], masker, 64)


def test_rows_hold_what_the_masks_say(dataset, masker):
    batch = dataset.batch([3, 10], 64)
    assert batch.shape == (4, 64) and batch.extras["pair_ids"].tolist() == [3, 3, 10, 10]
    assert batch.extras["chosen"].tolist() == [True, False, True, False]
    sides = [side for i in (3, 10) for side in (parse_row(ROWS[i])[1].chosen, parse_row(ROWS[i])[1].rejected)]
    for r, side in enumerate(sides):
        want = masker(side)
        n = len(want.ids)
        assert (
            batch.tokens[r, :n].tolist() == want.ids.tolist()
            and batch.targets[r, : n - 1].tolist() == want.ids[1:].tolist()
        )
        assert batch.weights[r, : n - 1].tolist() == want.weights[1:].tolist() and not batch.weights[r, n - 1 :].any()
        assert batch.doc_ids[r].tolist() == [0] * n + [-1] * (64 - n)
        assert batch.positions[r].tolist() == [*range(n), *range(64 - n)]
    assert dataset.batch([0]).shape[1] == max(len(s.ids) for s in dataset[0])


def test_margins_are_those_of_each_answer_alone(dataset):
    """What DPO needs: log P(chosen) and log P(rejected), the prompt and the padding not counted."""
    torch.manual_seed(0)
    size = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 64}
    model = registry.build("model", {"name": "decoder", **size}).build(259, 64).double()

    def logprobs(batch):
        logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
        return logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]

    batch = dataset.batch(list(range(len(dataset))), 64)
    with torch.no_grad():
        chosen, rejected = pair_sums(logprobs(batch), batch)
        for i in range(len(dataset)):
            for total, side in zip((chosen[i], rejected[i]), dataset[i], strict=True):
                ids = torch.from_numpy(side.ids.astype("int64"))
                alone = model(ids[None])[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
                want = (alone * torch.from_numpy(side.weights[1:])).sum()
                assert total.item() == pytest.approx(want.item(), rel=1e-6)


def test_micro_batches_and_devices_keep_pairs_together(dataset):
    batch = dataset.batch([0, 1, 2, 3])
    for part in batch.to("cpu").split(2):
        assert pair_sums(torch.ones(part.shape), part)[0].shape == (1,)
    with pytest.raises(ValueError, match="a pair is torn apart"):
        pair_sums(torch.ones(3, batch.shape[1]), batch.rows(0, 3))
    with pytest.raises(ValueError, match="a pair is torn apart"):
        pair_sums(torch.ones(2, batch.shape[1]), batch.rows(1, 3))
    with pytest.raises(ValueError, match="fit the pairs first"):
        collate_pairs([dataset[9]], 0, seq_len=5)


def test_from_files_in_any_dataloader(rows_file, masker):
    source = registry.build("source", {"name": "chat", "path": rows_file(ROWS)})
    data = PairDataset(read_pairs(source), masker, 64)
    assert len(data) == len(ROWS) == data.report.pairs
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=data.collate)
    batches = list(loader)
    assert [b.shape[0] for b in batches] == [8, 8, 8] and batches[0].extras["pair_ids"].tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    mixed = registry.build(
        "source", {"name": "chat", "path": rows_file([{"prompt": "a", "completion": "b"}], "b.jsonl")}
    )
    with pytest.raises(DataError, match=r"b.jsonl:1: is of the format prompt_completion, not a preference pair"):
        list(read_pairs(mixed))


def test_what_is_left_out_is_counted(masker, caplog):
    long = Preference(TextPair("p" * 10, "c" * 40), TextPair("p" * 10, "r"))
    same = Preference(TextPair("p", "x"), TextPair("p", "x"))
    good = Preference(TextPair("p", "x"), TextPair("p", "y"))
    data = PairDataset([long, same, good], masker, 20)
    assert (data.report.too_long, data.report.same, data.report.pairs) == (1, 1, 1) and "too_long=1" in caplog.text
    # Cut, and both sides lose as much of the prompt.
    left = PairDataset(
        [Preference(TextPair("0123456789", "c" * 14), TextPair("0123456789", "r" * 5))], masker, 20, "truncate_left"
    )
    pair = left[0]
    text = [ByteTokenizer().decode(side.ids) for side in pair]
    assert text == ["56789" + "c" * 14, "56789" + "r" * 5] and left.report.cut == 1
    right = PairDataset([long], masker, 20, "truncate_right")
    assert len(right[0].chosen.ids) == 20 and right.report.cut == 1
    with pytest.raises(DataError, match="no pair is left"):
        PairDataset([same], masker, 20)
    with pytest.raises(DataError, match="pair 0: is a TextPair, not a chosen and a rejected answer"):
        PairDataset([TextPair("a", "b")], masker, 20)
    kept = PairDataset([TextPair("a", "b"), good], masker, 20, skip_bad_rows=True)
    assert kept.report.bad == 1 and "pair 0" in kept.report.bad_samples[0]
    with pytest.raises(ConfigError, match="max_length"):
        PairDataset([good], masker, 1)


def test_what_was_made_of_a_row_is_counted_by_pairs(masker, caplog):
    rows = [
        {"prompt": "Q:", "chosen": "Q: yes", "rejected": "Q: no"},
        {"chosen": "hi I am", "rejected": "hi I will"},
        {"prompt": MESSAGES, "chosen": [said("yes")], "rejected": [said("no"), *MESSAGES, said("")]},
    ]
    report = PairDataset([parse_row(r)[1] for r in rows], masker, 64).report
    assert (report.pairs, report.prompt_repeated, report.prompt_guessed, report.empty_answer) == (3, 1, 1, 1)
    assert "prompt_guessed=1" in caplog.text


def test_pairs_of_unequal_length_that_answer_no_one_prompt_are_bad_rows(rows_file, masker):
    longer = [*MESSAGES, said("x"), *MESSAGES, said("z")]
    path = rows_file(
        [{"chosen": longer, "rejected": longer[:2]}, {"chosen": longer, "rejected": [*MESSAGES, said("y")]}]
    )
    with pytest.raises(DataError, match=r"chats.jsonl:1: rejected is how chosen begins"):
        list(read_pairs(registry.build("source", {"name": "chat", "path": path})))
    source = registry.build("source", {"name": "chat", "path": path, "skip_bad_rows": True})
    (pair,) = PairDataset(read_pairs(source), masker, 64)
    heads = [side.ids[: int((side.weights > 0).argmax())].tolist() for side in pair]
    assert heads[0] == heads[1], "two prompts"


def test_the_loader_sees_every_pair_once_an_epoch_on_any_ranks_and_resumes(dataset):
    def ids(world, steps=6, state=None):
        loaders = [PairLoader(dataset, 4, seed=1, rank=r, world_size=world) for r in range(world)]
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        out = []
        for _ in range(steps):
            out += [i for loader in loaders for i in loader.next_batch().extras["pair_ids"][::2].tolist()]
        return out, loaders[0].state_dict()

    whole, _ = ids(1)
    assert sorted(whole[:12]) == list(range(12)) == sorted(whole[12:]) and whole[:12] != whole[12:]
    assert ids(2)[0] == whole == ids(4)[0]
    first, state = ids(2, steps=2)
    assert first + ids(4, steps=4, state=state)[0] == whole
    for bad in (
        {"global_pairs": 3, "world_size": 2},
        {"global_pairs": 0},
        {"global_pairs": 4, "rank": 2, "world_size": 2},
    ):
        with pytest.raises(ConfigError, match=r"global_pairs|rank"):
            PairLoader(dataset, **bad)
    with pytest.raises(DataError, match="go on with the data of before"):
        PairLoader(dataset, 4, seed=2).load_state_dict(state)


def test_the_chosen_side_alone_is_trained_on_by_sft(rows_file, masker, tmp_path):
    source = registry.build("source", {"name": "chat", "path": rows_file(ROWS)})
    data = source.tokenized(masker.tokenizer, "train", seq_len=64, validation_fraction=0.0, cache_dir=tmp_path / "c")
    assert [data.tokens(i).tolist() for i in range(12)] == [masker(parse_row(r)[1].chosen).ids.tolist() for r in ROWS]
