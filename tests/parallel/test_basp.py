"""Card A01, BASP: the numbers are those of its list of what must hold; four ranks, once for all checks."""

import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.context import basp
from trainwright.parallel.context.basp import Basp, bytes_sent, divisors, group_size, padded_rows
from trainwright.parallel.legal import check_cut

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import basp_worker as worker  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("basp") / "result"
    run_ranks("basp_worker.py", out, timeout=400)
    return [torch.load(f"{out}.{r}") for r in range(4)]


def test_1_one_row_is_bitwise_ulysses(ranks):
    for result in ranks:
        got, want = result["basp1"], result["ulysses1"]
        assert got["loss"] == want["loss"]
        assert all(torch.equal(got["gradients"][n], want["gradients"][n]) for n in want["gradients"])
        # Ulysses knows the documents of whole rows; here they are gathered.
        kept = {g: [c for c in calls if c[0] != "all_gather"] for g, calls in got["sequence"].items()}
        assert kept == want["sequence"]


def alone(spec, data):
    model = worker.model(**spec)
    loss = worker.NextTokenConfig().build()(model, data).sum / data.weight()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("rows", worker.SIZES)
def test_2_equals_one_process_in_float32(ranks, rows):
    loss, gradients = alone({}, worker.batch(rows, worker.TOKENS // rows, documents=False))
    for result in ranks:
        got = result[f"basp{rows}"]
        assert got["loss"] == pytest.approx(loss, rel=1e-5)
        for name, want in gradients.items():
            torch.testing.assert_close(got["gradients"][name], want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", worker.exact_cases())
def test_2_equals_one_process_in_float64(ranks, name):
    """With documents, windows, rows that have no divisor in common with the ranks, and short last micro-batches."""
    spec, data, _, _ = worker.exact_cases()[name]
    loss, gradients = alone(spec, data)
    for result in ranks:
        got = result[name]
        assert got["loss"] == pytest.approx(loss, rel=1e-10)
        for key, want in gradients.items():
            scale = want.abs().max().item()
            # norms compute in float32, whatever the model
            torch.testing.assert_close(got["gradients"][key], want, rtol=1e-7, atol=1e-7 * scale, msg=key)


@pytest.mark.parametrize("rows", worker.SIZES)
def test_3_bytes_are_the_closed_form(ranks, rows):
    size = worker.SIZES[rows]
    width = worker.HEADS * worker.HEAD_DIM
    # q, k, v and the output, in both passes of each layer: (b s h / P) 4 bytes (1 - 1 / G)
    each = worker.TOKENS * width // worker.RANKS * 4 * (size - 1) // size
    calls = 8 * worker.LAYERS if size > 1 else 0
    heads = (worker.HEADS, worker.KV_HEADS, worker.HEAD_DIM)
    assert bytes_sent(rows, worker.TOKENS // rows, *heads, worker.RANKS, 4) * worker.LAYERS == calls * each
    for r, result in enumerate(ranks):
        got = result[f"basp{rows}"]
        assert (got["calls"], got["bytes"]) == (calls, calls * each)
        start = r // size * size
        assert got["groups"] == ([tuple(range(start, start + size))] if size > 1 else [])


def test_3_repeated_key_heads_are_counted(ranks):
    want = bytes_sent(1, 32, 4, 2, worker.HEAD_DIM, 4, 8) * worker.LAYERS
    assert ranks[0]["few_keys"]["bytes"] == want == bytes_sent(1, 32, 4, 4, worker.HEAD_DIM, 4, 8) * worker.LAYERS


def test_4_activations_are_the_same_for_all_rows(ranks):
    for result in ranks:
        assert len({result[f"basp{rows}"]["positions"] for rows in worker.SIZES}) == 1
        assert len({result[f"basp{rows}"]["kept"] for rows in worker.SIZES}) == 1


def test_5_two_rows_send_two_thirds_of_ulysses(ranks):
    for result in ranks:
        assert result["basp2"]["bytes"] * 3 == result["ulysses2"]["bytes"] * 2


def test_the_ranks_of_a_group_make_the_same_collectives(ranks):
    for name in ranks[0]:
        for result in ranks:
            for group, made in result[name]["sequence"].items():
                assert all(ranks[r][name]["sequence"][group] == made for r in group)


def test_padding_gives_smaller_groups(ranks):
    assert ranks[0]["rows3_coprime"]["calls"] == 8 * worker.LAYERS
    assert ranks[0]["rows3_padded"]["calls"] == 0
    assert [group_size(padded_rows(b, 8, p), 8) for b, p in ((3, 0.0), (3, 0.34), (5, 0.25), (5, 0.6))] == [8, 2, 4, 1]
    assert [padded_rows(b, 8, 0.5) for b in (1, 2, 4, 8, 7)] == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("ranks_, rows, share", [(8, 1, 0.875), (8, 2, 0.75), (8, 4, 0.5), (8, 8, 0.0), (6, 4, 2 / 3)])
def test_bytes_of_the_card(ranks_, rows, share):
    one = bytes_sent(rows, 24, 24, 24, 1, ranks_, 2) / 8  # of its eight all-to-alls
    assert one == pytest.approx(rows * 24 * 24 / ranks_ * 2 * share, rel=1e-12)
    assert group_size(rows, ranks_) == ranks_ // math.gcd(rows, ranks_)


def strategy(rank, size, n_heads=8, padding=0.0, multiple_of=1):
    found = Basp.__new__(Basp)
    found.size, found.rank, found.n_heads, found.padding = size, rank, n_heads, padding
    found.multiple_of = multiple_of
    found.sizes, found._said = divisors(size), set()
    return found


@pytest.mark.parametrize("size, rows", [(4, 1), (4, 2), (4, 4), (4, 3), (6, 4), (8, 12), (2, 5)])
def test_every_position_is_on_one_rank(monkeypatch, size, rows):
    monkeypatch.setattr(basp.dist, "get_rank", lambda: 0)
    length, g = 24, math.gcd(rows, size)
    ids = torch.arange(rows * length).view(rows, length)
    data = Batch(
        ids, ids, torch.ones(rows, length), ids, torch.zeros(rows, length, dtype=torch.int32),
        extras={"advantage": torch.arange(rows), "bytes": ids},
    )  # fmt: skip
    parts = [strategy(r, size, n_heads=24).shard(data) for r in range(size)]
    assert all(p.shape == (rows // g, length * g // size) for p in parts)
    assert sorted(torch.cat([p.tokens.flatten() for p in parts]).tolist()) == ids.flatten().tolist()
    for part in parts:
        assert torch.equal(part.extras["advantage"], part.tokens[:, 0] // length)
        assert torch.equal(part.extras["bytes"], part.tokens)


def test_documents_that_come_back_stay_apart():
    ids = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 2]], dtype=torch.int32)
    data = Batch(ids.long(), ids.long(), torch.ones(1, 8), ids.long(), ids)
    parts = [strategy(r, 2).shard(data).doc_ids for r in range(2)]
    runs = torch.cat(parts, 1)
    assert (runs // 2).tolist() == [[0, 0, 1, 1, 2, 2, 2, 3]]
    assert set((runs % 2).flatten().tolist()) == {1}  # the group of two, by its place in [1, 2]


def test_no_gain_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(basp.dist, "get_rank", lambda: 0)
    ids = torch.zeros(3, 8, dtype=torch.int32)
    data = Batch(ids.long(), ids.long(), torch.ones(3, 8), ids.long(), ids)
    found = strategy(0, 4)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        found.shard(data)
        found.shard(data)
    assert [r.getMessage() for r in caplog.records] == [
        "basp: a micro-batch of 3 rows has no divisor in common with cp=4: no gain over ulysses; use another "
        "micro_batch_size, or parallel.context.padding"
    ]


def test_repeated_key_heads_are_said(caplog, monkeypatch):
    monkeypatch.setattr(basp.dist, "get_rank", lambda: 0)
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        assert strategy(0, 4)._enough_heads(torch.zeros(1, 2, 2, 4), 4).shape == (1, 2, 4, 4)
    assert "2 key-value heads are repeated for groups of 4 ranks" in caplog.text


@pytest.mark.parametrize(
    "dims, seq_len, settings, says",
    [
        ({"n_heads": 6, "n_kv_heads": 6}, 32, {}, r"groups of 4 of the 4 ranks.* the 6 heads .* multiple of 2"),
        ({"n_heads": 4, "n_kv_heads": 4}, 30, {}, r"groups of 4 of the 4 ranks.* the 30 tokens of a row.* of 2"),
        ({"n_heads": 6, "n_kv_heads": 6}, 32, {"multiple_of": 3}, "groups of 4"),
        ({"n_heads": 6, "n_kv_heads": 6}, 32, {"multiple_of": 2}, None),
        ({"n_heads": 3, "n_kv_heads": 3}, 31, {"multiple_of": 4}, None),
        ({"n_heads": 4, "n_kv_heads": 2}, 32, {}, None),
    ],
)
def test_refused_before_any_group(dims, seq_len, settings, says):
    arch = DecoderModelConfig(dim=48, n_layers=2, ffn_dim=96, head_dim=8, **dims).architecture(97)
    config = ParallelConfig(cp=4, context={"name": "basp", **settings})
    if says is None:
        check_cut(Degrees(cp=4), config, arch, seq_len)
        return
    with pytest.raises(ConfigError, match=says):
        check_cut(Degrees(cp=4), config, arch, seq_len)


def test_a_micro_batch_that_does_not_fit():
    ids = torch.zeros(1, 8, dtype=torch.int32)
    data = Batch(ids.long(), ids.long(), torch.ones(1, 8), ids.long(), ids)
    with pytest.raises(ConfigError, match=r"a micro-batch of 1 rows is shared by groups of 4.* the 6 heads.* of 2"):
        strategy(0, 4, n_heads=6).shard(data)
    with pytest.raises(ConfigError, match="does not divide the 8 tokens of a row"):
        strategy(0, 3, n_heads=6).shard(data)


def test_a_ragged_validation_batch_is_filled_up():
    """5 rows and 3 heads on 2 ranks go whole, as multiple_of promises; the sixth row counts for nothing."""
    ids = torch.arange(40).view(5, 8)
    data = Batch(ids, ids, torch.ones(5, 8), ids, torch.zeros(5, 8, dtype=torch.int32), {"target_bytes": ids + 1})
    parts = [strategy(r, 2, n_heads=3, multiple_of=2).shard(data) for r in range(2)]
    assert all(p.shape == (3, 8) for p in parts)
    assert sum(p.weight().item() for p in parts) == data.weight().item()
    assert sum(int(p.extras["target_bytes"].sum()) for p in parts) == int(data.extras["target_bytes"].sum())
    counted = torch.cat([p.tokens[p.weights > 0] for p in parts])
    assert sorted(counted.tolist()) == ids.flatten().tolist()


def test_rows_need_their_documents():
    with pytest.raises(ValueError, match="carry doc_ids"):
        strategy(0, 4).plan(None, 1, 8, 0, torch.device("cpu"))
