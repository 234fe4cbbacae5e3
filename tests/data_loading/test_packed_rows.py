"""Packed rows before a model, where documents must not see each other, and rows that do not fit together."""

import pytest
import torch
from documents import documents

from trainwright.core.errors import DataError
from trainwright.core.registry import build, methods
from trainwright.data.dataset import ArrayDataset
from trainwright.data.packing import Pool, assemble, unique_names
from trainwright.data.rows import RowStream


def test_a_plan_that_overfills_a_row_is_an_error():
    import numpy as np

    from trainwright.data.packing import Segments

    too_much = Segments(np.array([0]), np.array([0]), np.array([5]))
    with pytest.raises(ValueError, match="puts 5 tokens into a row of 4"):
        assemble([(documents([5]), too_much)], 4, 0)


def test_a_dataset_shorter_than_its_index_is_an_error():
    data = documents([5, 5])
    data.lengths[1] = 9
    rows = RowStream(data, build("batcher", "padded"), 16, shuffle=False)
    with pytest.raises(DataError, match="source docs: document 1 has fewer tokens than its index says"):
        assemble([(data, s) for s in rows.segments(0, [0, 1])], 16, 0)


def test_pool_numbers_documents_on():
    a, b = documents([2, 3], "a"), documents([4], "a", first=2)
    pool = Pool(unique_names([a, b]))
    assert list(pool.parts) == ["a", "a#2"] and pool.lengths.tolist() == [2, 3, 4]
    assert pool.num_docs == 3 and pool.num_tokens == 9
    assert [pool.tokens(d).tolist() for d in range(3)] == [
        a.tokens(0).tolist(),
        a.tokens(1).tolist(),
        b.tokens(0).tolist(),
    ]
    assert pool.tokens(2, 1, 3).tolist() == b.tokens(0)[1:3].tolist()
    assert Pool({"x": a, "y": b}).fingerprint != Pool({"x": b, "y": a}).fingerprint
    # Masks of one part do not hide that another has none.
    masked = ArrayDataset([[1, 2]], [[0.0, 0.5]])
    both = Pool({"a": a, "m": masked})
    assert both.loss_weights(0) is None and both.loss_weights(2).tolist() == [0.0, 0.5]


# -- before a model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = {"name": "decoder", "dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 128}
    return build("model", config).build(vocab_size=256, seq_len=64).eval()


def nll(model, batch):
    logits = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return logits, losses.view_as(batch.weights) * batch.weights


@pytest.mark.parametrize("name", [m.name for m in methods("batcher") if m.config.keeps_all])
def test_packed_documents_do_not_see_each_other(model, name):
    """Documents of 6 and 8 tokens: logits, loss sums and independence as if each stood alone."""
    torch.manual_seed(1)
    docs = [torch.randint(1, 256, (n,)).numpy() for n in (6, 8)]
    config = build("batcher", name)

    def rows(docs, seq_len):
        data = ArrayDataset(docs)
        plan = RowStream(data, config, seq_len, shuffle=False)
        return assemble([(data, s) for s in plan.segments(0, range(plan.num_rows(0)))], seq_len, 0)

    together = rows(docs, 16)
    logits, losses = nll(model, together)
    alone = [nll(model, rows([d], len(d))) for d in docs]
    by_length = {}
    for r in range(together.shape[0]):
        for i in together.doc_ids[r].unique().tolist():
            here = together.doc_ids[r] == i
            by_length[int(here.sum()), bool(together.weights[r][here].any())] = (logits[r][here], losses[r][here])
    for doc, (own_logits, own_losses) in zip(docs, alone, strict=True):
        packed_logits, packed_losses = by_length[len(doc), True]
        torch.testing.assert_close(packed_logits, own_logits[0], atol=1e-4, rtol=1e-4)
        assert packed_losses[-1] == 0  # the seam
        torch.testing.assert_close(packed_losses.sum(), own_losses.sum(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(losses.sum(), sum(x.sum() for _, x in alone), atol=1e-4, rtol=1e-5)
    assert together.weight() == 6 - 1 + 8 - 1
    # An edit of the first document leaves the second as it is.
    edited = [docs[0].copy(), docs[1]]
    edited[0][2] = edited[0][2] % 255 + 1
    other_logits, _ = nll(model, rows(edited, 16))
    second = (together.tokens[..., None] == torch.as_tensor(docs[1])[0]).any(-1)
    r, c = second.nonzero()[0].tolist()
    ids = together.doc_ids[r] == together.doc_ids[r, c]
    torch.testing.assert_close(other_logits[r][ids], logits[r][ids], atol=1e-6, rtol=1e-6)
