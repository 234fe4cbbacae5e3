"""Blockwise attention against softmax over the whole masked score matrix in float64."""

import importlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.models.ops import causal_attention, causal_attention_reference, first_visible

module = importlib.import_module("trainwright.models.ops.causal_attention")


def starts_of(lengths):
    """Document lengths per row -> starts in the rows laid end to end."""
    total, starts = 0, []
    for row in lengths:
        for n in row:
            starts.append(total)
            total += n
    return torch.tensor(starts)


def mask_of(lengths, window):
    """bool [B, T, T], made from document numbers and not from first_visible."""
    masks = []
    for row in lengths:
        doc = torch.cat([torch.full((n,), i) for i, n in enumerate(row)])
        i = torch.arange(len(doc))
        seen = (doc[:, None] == doc) & (i[:, None] >= i)
        masks.append(seen & (i[:, None] - i < window) if window else seen)
    return torch.stack(masks)


def exact(q, k, v, mask):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask[:, None], -math.inf).softmax(-1), v)


def check(lengths, heads, kv_heads, width, window=0, seed=0):
    batch, length = len(lengths), sum(lengths[0])
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads)]
    wide = [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
    q, k, v = (x.detach().float().requires_grad_() for x in wide)
    bounds = torch.cat([starts_of(lengths), torch.tensor([batch * length])])
    got = causal_attention(q, k, v, first_visible(bounds, batch, length, window))
    want = exact(*wide, mask_of(lengths, window))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    grad = torch.randn(want.shape, generator=g, dtype=torch.float64)
    for a, e in zip(
        torch.autograd.grad(got, (q, k, v), grad.float()), torch.autograd.grad(want, wide, grad), strict=True
    ):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


@st.composite
def packed_rows(draw):
    length = draw(st.sampled_from([1, 2, 15, 16, 33, 64, 65, 130, 200]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=5)) if length > 1 else set()
        edges = [0, *sorted(cuts), length]
        rows.append([b - a for a, b in itertools.pairwise(edges)])
    return rows


@settings(max_examples=50, deadline=None)
@given(
    lengths=packed_rows(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    width=st.sampled_from([4, 32]),
    window=st.sampled_from([0, 0, 1, 7, 64, 500]),
    seed=st.integers(0, 99),
)
def test_equals_the_masked_softmax(lengths, heads, width, window, seed):
    check(lengths, *heads, width, window, seed)


def test_rows_in_groups(monkeypatch):
    """More rows than fit the buffer at once, the last group smaller."""
    monkeypatch.setattr(module, "SCORES_BYTES", 2 * 2 * 64 * 96 * 4)
    check([[96], [10, 86], [50, 46], [96], [95, 1]], 2, 2, 8)


def test_without_documents_is_plain_causal():
    assert first_visible(None, 2, 8) is None
    q, k, v = (torch.randn(2, 100, 3, 16) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(causal_attention(q, k, v), want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_documents_do_not_see_each_other_to_the_last_bit():
    first = first_visible(starts_of([[37, 63]]), 1, 100)
    q, k, v = (torch.randn(1, 100, 2, 16) for _ in range(3))
    before = causal_attention(q, k, v, first)
    for x in (q, k, v):
        x[:, :37] += 5
    after = causal_attention(q, k, v, first)
    assert torch.equal(before[:, 37:], after[:, 37:]) and not torch.equal(before[:, :37], after[:, :37])


def test_large_scores_and_nan():
    q, k, v = (torch.randn(1, 70, 1, 8) for _ in range(3))
    check_q = q * 1e3
    got = causal_attention(check_q, k * 1e3, v)
    torch.testing.assert_close(got, causal_attention_reference(check_q, k * 1e3, v), rtol=1e-4, atol=1e-4)
    q[0, 3] = math.nan
    out = causal_attention(q, k, v)
    assert out[0, 3].isnan().all() and out[0, 4:].isfinite().all()


def test_first_visible():
    bounds = torch.tensor([0, 3, 5, 8, 10])  # two rows of five: 3 + 2, 3 + 2
    assert first_visible(bounds, 2, 5).tolist() == [[0, 0, 0, 3, 3], [0, 0, 0, 3, 3]]
    assert first_visible(bounds, 2, 5, window=2).tolist() == [[0, 0, 1, 3, 3], [0, 0, 1, 3, 3]]
    assert first_visible(None, 1, 4, window=3).tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_take_the_reference(dtype):
    first = first_visible(starts_of([[4, 8]]), 1, 12)
    q, k, v = (torch.randn(1, 12, n, 8).to(dtype) for n in (4, 2, 2))
    got = causal_attention(q, k, v, first)
    assert got.dtype == dtype
    want = exact(q.double(), k.double(), v.double(), mask_of([[4, 8]], 0))
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-12)


def test_keeps_no_scores():
    saved = []

    def pack(x):
        saved.append(x.numel())
        return x

    q, k, v = (torch.randn(2, 128, 2, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        causal_attention(q, k, v)
    assert sum(saved) == 3 * q.numel() + 2 * 2 * 128
