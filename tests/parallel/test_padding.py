"""What ranks fill up with is no token to the experts: losses, gradients and loads are those of one process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright.core.batch import Batch, as_padding
from trainwright.data.dataset import ArrayDataset
from trainwright.data.odb_rows import micro_batches
from trainwright.data.packing import NOTHING, assemble
from trainwright.models.moe import MoE, load_metrics, tokens_there
from trainwright.parallel.context.pieces import PADDING, Document, decode, encode

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
spec = importlib.util.spec_from_file_location("padding_worker", HERE / "padding_worker.py")
worker = importlib.util.module_from_spec(spec)
sys.modules["padding_worker"] = worker
try:
    spec.loader.exec_module(worker)
finally:
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("padding") / "result"
    command = [sys.executable, str(HERE / "padding_worker.py"), str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return lambda name: [torch.load(f"{out}.{name.replace(' ', '-')}.{r}") for r in range(worker.world_of(name))]


@pytest.mark.parametrize("name", worker.CELLS)
def test_loss_gradients_and_loads_are_those_of_one_process(results, name):
    """In float64, to 1e-10. Strategies that deal documents out have micro-batches of their own: one process gets the
    same, without padding. With one micro-batch a step it just takes the rows."""
    cell, ranks = worker.CELLS[name], results(name)
    slots = None
    if any(s in name for s in ("bytescale", "flexsp")) and not cell.one_step:
        every = ranks[0]["slots"]
        slots = [sorted(set().union(*(one[i] for one in every))) for i in range(len(every[0]))]
        slots = [s for s in slots if s]
        assert sum(map(len, slots)) == len(set().union(*slots))
    want = worker.alone(cell, slots)
    assert worker.batch().weight() == want["weight"]
    seen = set()
    for got in ranks:
        for figure in ("loss", "nll", *(["aux_loss"] if "aux_loss" in want["sums"] else [])):
            assert got["sums"][figure] == pytest.approx(want["sums"][figure], rel=1e-10), figure
        if "aux_loss" in want["sums"]:  # else each rank's are of its own tokens
            for figure in ("moe/load_entropy", "moe/max_load_fraction"):
                assert got["sums"][figure] == pytest.approx(want["sums"][figure], rel=1e-5), figure
        for key, gradient in got["gradients"].items():
            torch.testing.assert_close(gradient, want["gradients"][key], rtol=1e-10, atol=1e-12, msg=f"{name} {key}")
        assert got["nats"] == pytest.approx(want["nats"], rel=1e-10)
        assert {i: load.tolist() for i, load in got["load"].items()} == {
            i: load.tolist() for i, load in want["load"].items()
        }
        seen |= got["gradients"].keys()
    assert seen == want["gradients"].keys()
    if "bias" in name:  # two experts for each of the tokens that are there, in every layer
        assert {int(load.sum()) for load in ranks[0]["load"].values()} == {2 * int((worker.batch().doc_ids >= 0).sum())}


def test_they_did_fill_up(results):
    """Else the test above would say nothing: slots beside those of the batch's own tokens."""
    for strategy in ("flashcp", "bytescale", "flexsp"):
        for name in (n for n in worker.CELLS if strategy in n and "one" not in n and "recomputed" not in n):
            own = 0 if strategy == "flexsp" else int((worker.batch().doc_ids < 0).sum())
            copies = 2 if "pp4" in name else 1
            assert results(name)[0]["padding"] > own * copies, name
    assert results("cp2 basp")[0]["padding"] > int((worker.batch().doc_ids < 0).sum())


def moe(**settings):
    torch.manual_seed(0)
    given = {"score": "softmax", "normalise": True, "bias_balanced": False, **settings}
    found = MoE(8, 12, 5, 2, **given).double()
    for p in found.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return found


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_figures_are_of_the_tokens_that_are_there(score):
    """Equal to those of the tokens alone; outputs of tokens do not change."""
    experts = moe(score=score)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    there = torch.ones(2, 7, dtype=torch.bool)
    there[0, 4:], there[1, 0] = False, False
    y, loss, counts = experts(x, there)
    alone, want, load = experts(x[there].unsqueeze(0))
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    assert counts.tolist() == load.tolist() and counts.sum() == 2 * there.sum()
    torch.testing.assert_close(y[there], alone[0], rtol=1e-13, atol=1e-13)
    (got,) = torch.autograd.grad(loss, experts.router.weight)
    (gradient,) = torch.autograd.grad(want, experts.router.weight)
    torch.testing.assert_close(got, gradient, rtol=1e-12, atol=1e-14)


def test_the_loss_with_padding_equals_transformers():
    pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = moe()
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    there = torch.arange(11) < torch.tensor([[11], [4], [7]])
    logits = experts.router(x.view(-1, 8)).float()
    want = load_balancing_loss_func((logits,), 5, 2, there.long())
    torch.testing.assert_close(experts(x, there)[1].float(), want, atol=1e-6, rtol=1e-6)


def test_a_micro_batch_that_is_all_padding():
    experts = moe()
    y, loss, counts = experts(torch.randn(1, 4, 8, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.bool))
    assert loss == 0 and counts.tolist() == [0] * 5 and y.isfinite().all()
    (gradient,) = torch.autograd.grad(loss, experts.router.weight)
    assert gradient.abs().max() == 0
    assert all(value == 0 for value in load_metrics([counts]).values())


def test_batchers_mark_their_padding():
    data = ArrayDataset([[5, 6, 7, 8], [5, 6]])
    rows = [(data, type(NOTHING)(*(torch.tensor([v]).numpy() for v in (0, 0, 4)))), (data, NOTHING)]
    batch = assemble(rows, 6, pad_id=0)
    assert batch.doc_ids.tolist() == [[0] * 4 + [-1] * 2, [-1] * 6]
    assert tokens_there(batch.doc_ids).tolist() == [[True] * 4 + [False] * 2, [False] * 6]
    assert tokens_there(batch.doc_ids[:1, :4]) is None and tokens_there(None) is None
    again = as_padding(torch.tensor([[0, 0, 1, 0, -1]]))
    assert again.tolist() == [[-2, -2, -3, -2, -1]]  # the same bounds
    whole = assemble(rows[:1], 6, pad_id=0)
    found = micro_batches(Batch(**{**vars(whole)}), 6, count=3)
    assert [int((m.doc_ids >= 0).sum()) > 0 for m in found] == [True, False, False]


def test_numbers_of_documents_of_padding():
    for document in (Document(0, 1), Document(3, 500, 2, 5), Document(2**21 - 1, 2**22 - 1, 7, 8)):
        code = encode(document)
        assert code >= 0 and decode(code) == document
        padding = Document(document.index, document.length, document.first, document.ranks, padding=True)
        assert encode(padding) < PADDING and decode(encode(padding)) == padding
