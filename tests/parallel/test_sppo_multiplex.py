"""Multiplexed partitioning of SPPO (B009), which is planned only: what idle devices could share, and what it costs."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import yaml

from trainwright.cli import run
from trainwright.parallel.sppo.multiplex import best, groups, multiplex
from trainwright.parallel.sppo.simulator import simulate
from trainwright.parallel.sppo.sppo import Measured

SHAPES = [(1, 1), (1, 4), (3, 4), (4, 4), (16, 4), (5, 8), (32, 8), (7, 3)]


@pytest.mark.parametrize("chunks, stages", SHAPES)
def test_every_task_is_done_once_in_order(chunks, stages):
    draw = random.Random(chunks * stages)
    times = [draw.uniform(1, 3) for _ in range(chunks)]
    for depth in range(stages):
        found = multiplex(times, stages, [2 * t for t in times], depth, weights=0.4, exchange=0.2)
        everything = set(itertools.product(range(chunks), range(stages)))
        assert set(found.forward) == set(found.backward) == everything
        for i, s in everything:
            group, start, end = found.forward[i, s]
            again, back, _ = found.backward[i, s]
            assert group == again and group[0] == s and len(set(group)) == len(group)  # what it has saved is there
            g = len(group)
            assert end - start == pytest.approx(times[i] / g + 0.2 * (g - 1) / g)
            for before in ((i - 1, s), (i, s - 1)):
                assert before not in everything or found.forward[before][2] <= start
            for before in ((i + 1, s), (i, s + 1)):
                assert before not in everything or found.backward[before][2] <= back
            assert back >= end
        for way in (found.forward, found.backward):  # a device does one thing at a time
            for device in range(stages):
                spans = sorted((a, b) for group, a, b in way.values() if device in group)
                assert all(b <= c + 1e-12 for (_, b), (c, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("chunks, stages", SHAPES)
def test_depth_0_is_the_simulated_pipeline(chunks, stages):
    draw = random.Random(chunks + stages)
    times = [draw.uniform(1, 3) for _ in range(chunks)]
    plain = simulate(times, stages, [2 * t for t in times])
    found = multiplex(times, stages, [2 * t for t in times], 0, weights=9.0, exchange=9.0)
    assert found.seconds == pytest.approx(plain.seconds) and found.held == 1
    assert found.bubble == pytest.approx(plain.bubble)


@pytest.mark.parametrize("chunks, stages", [(4, 4), (16, 4), (8, 8), (32, 8), (9, 3)])
def test_closed_form_in_unit_time(chunks, stages):
    found = multiplex([1.0] * chunks, stages, [2.0] * chunks, stages - 1)
    ramp = sum(1 / (stages // w) for w in range(1, stages))
    assert found.seconds == pytest.approx(3 * (chunks - stages + 1 + 2 * ramp))
    assert 3 * chunks <= found.seconds <= 3 * (chunks + stages - 1)
    if (chunks, stages) == (16, 4):  # 16.5 in place of 19 units; without any bubble it would be 16
        assert found.seconds / simulate([1.0] * 16, 4, [2.0] * 16).seconds == pytest.approx(16.5 / 19)


def test_whole_rows_are_plain_sequence_parallelism():
    """One chunk: all devices share each stage, and nothing is idle."""
    found = multiplex([4.0], 4, [8.0], 1)
    assert found.seconds == pytest.approx(12.0) and found.bubble == pytest.approx(0.0) and found.held == 4


def test_groups_by_hand():
    assert groups(0, 16, 4, 3) == {(0, 0): (0, 1, 2, 3)}
    assert groups(1, 16, 4, 3) == {(1, 0): (0, 2), (0, 1): (1, 3)}
    assert groups(2, 16, 4, 3) == {(2, 0): (0,), (1, 1): (1,), (0, 2): (2,)}  # one for three is none for each
    assert groups(18, 16, 4, 3) == {(15, 3): (3, 0, 1, 2)}
    assert groups(1, 16, 4, 1) == {(1, 0): (0,), (0, 1): (1,)}


def test_what_it_costs_decides_how_much_is_shared():
    times = [1.0] * 8
    back = [2.0] * 8
    free = best(times, 4, back)
    assert free.depth == 2 and free.held == 3  # device 0: its own, 3 for the last chunk, 2 for the one before
    dear = best(times, 4, back, weights=5.0)
    assert dear.depth == 0 and dear.seconds == simulate(times, 4, back).seconds
    seconds = [best(times, 4, back, exchange=e).seconds for e in (0.0, 0.2, 0.5, 1.0, 4.0)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1] == pytest.approx(33.0)


def test_a_helper_waits_for_weights_and_sends_gradients():
    """Two stages: device 1 needs those of stage 0 before the first chunk, and sends their gradient last."""
    free, paid = (multiplex([1.0] * 4, 2, [2.0] * 4, 1, weights=w) for w in (0.0, 0.25))
    assert free.seconds == pytest.approx(12.0)
    assert paid.seconds == pytest.approx(12.0 + 2 * 0.25) and paid.held == 2
    assert paid.forward[0, 0][1] == pytest.approx(0.25)


def test_plan_sppo_says_what_it_would_save(tmp_path, capsys, monkeypatch):
    """Tokens cost, pairs do not: 16 equal chunks on 4 stages, whose figures are those of the closed form."""
    figures = {"bandwidth": 1e9, "token_seconds": 1e-5, "pair_seconds": 0.0, "token_bytes": 1024.0, "kv_bytes": 64.0}
    monkeypatch.setattr(
        "trainwright.parallel.sppo.measure.measure", lambda *_args, **_more: Measured.model_validate(figures)
    )
    recipe = {
        "model": {"name": "decoder", "dim": 32, "n_layers": 4, "n_heads": 2},
        "tokenizer": {"name": "bytes"},
        "precision": {"name": "fp32"},
        "train": {"seq_len": 128, "global_batch_tokens": 128, "micro_batch_size": 1},
        "parallel": {"pp": 4, "context": {"name": "sppo", "chunks": 16, "min_chunk": 1, "cut": "equal"}},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert run(["plan", "sppo", str(tmp_path / "r.yaml"), "run.device=cpu"]) == 0
    out = capsys.readouterr().out
    measured = yaml.safe_load(out)["parallel"]["context"][
        "measured"
    ]  # the line is a comment of what goes into a recipe
    assert measured == {**figures, "chunk_bytes": 0.0}
    found = re.search(r"# 16 chunks on 4 stages: idle for (\d+)% .* by idle stages, (\d+)%, .* (0\.\d+) as long", out)
    assert found is not None
    assert int(found[1]) == round(100 * 3 / 19) and int(found[2]) == round(100 * 0.5 / 16.5)
    assert float(found[3]) == pytest.approx(16.5 / 19, abs=5e-4)
    assert run(["plan", "sppo", str(tmp_path / "r.yaml"), "run.device=cpu", "parallel.pp=1"]) == 0
    assert "#" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [([], 2, [], 0), ([1.0], 2, [], 0), ([1.0], 2, [1.0], 2), ([1.0], 0, [1.0], 0)])
def test_refuses_what_has_no_meaning(given):
    with pytest.raises(ValueError):
        multiplex(*given)
