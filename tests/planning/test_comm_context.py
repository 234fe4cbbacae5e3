"""``trainwright plan comm`` for strategies that follow the documents. tests/parallel holds its bytes against recorded
ones."""

import json

import pytest

from trainwright.cli import run
from trainwright.core.errors import ConfigError
from trainwright.planning.comm_context import rows_of

RECIPE = [
    "model.dim=64", "model.n_heads=8", "model.n_kv_heads=8", "model.n_layers=2", "tokenizer.name=bytes",
    "train.seq_len=64", "train.global_batch_tokens=512", "train.micro_batch_size=2", "parallel.cp=4",
]  # fmt: skip


def test_documents_fill_rows_and_come_again():
    assert rows_of([5, 3, 9], 8, 4) == ((5, 3), (8,), (1, 5, 2), (1, 7))
    assert all(sum(row) == 8 for row in rows_of([1, 30], 8, 9))
    for wrong in ([], [3, 0]):
        with pytest.raises(ConfigError, match="--lengths"):
            rows_of(wrong, 8, 1)


def sent(capsys, context, *more):
    assert run(["plan", "comm", *RECIPE, f"parallel.context={context}", "--world", "4", "--json", *more]) == 0
    own = json.loads(capsys.readouterr().out)["own"]
    return sum(t["bytes"] for t in own["transfers"] if t["kind"] in ("send", "all_to_all"))


def test_short_documents_send_less(capsys, tmp_path):
    """Of whole rows FlashCP sends 3/4 of a ring's keys, once, and their gradients. Equal short documents stay whole."""
    ring, ulysses = sent(capsys, "ring"), sent(capsys, "ulysses")
    whole = {c: sent(capsys, c) for c in ("basp", "flashcp", "bytescale")}
    # 8 rows in pairs: groups of 2 and not of 4, which send 1/2 of a rank's tokens and not 3/4.
    assert whole["basp"] * 3 == ulysses * 2
    # A ring of 4: 3 chunks forward, 3 back, and 4 gradients in float32, twice a chunk's bytes in bf16; ours: 3/4 of 3
    # forward, and as many gradients back.
    assert whole["flashcp"] * 14 == ring * 4.5
    (tmp_path / "lengths.txt").write_text("8 8\n8")
    options = ("--lengths", str(tmp_path / "lengths.txt"))
    assert sent(capsys, "ring", *options) == ring
    assert sent(capsys, "flashcp", *options) == sent(capsys, "bytescale", *options) == 0


def test_lengths_that_cannot_be_read(capsys, tmp_path):
    (tmp_path / "wrong").write_text("12 and more")
    for path in (tmp_path / "wrong", tmp_path / "missing"):
        assert run(["plan", "comm", *RECIPE, "--world", "4", "--lengths", str(path)]) == 2
        assert "--lengths" in capsys.readouterr().err
