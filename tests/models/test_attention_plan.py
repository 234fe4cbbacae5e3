"""Attention over packed rows against its definition in float64: every pair of positions looked at one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.models.attention import AttentionPlan, attention, document_mask, document_starts, plan_attention

torch.set_num_threads(1)
CPU = torch.device("cpu")


def reference(q, k, v, doc_ids, window):
    """By the definition, query by query."""
    b, t, h, hd = q.shape
    out = torch.zeros_like(q)
    for row in range(b):
        for head in range(h):
            kv = head // (h // k.shape[2])
            for i in range(t):
                first = i
                while first > 0 and doc_ids[row, first - 1] == doc_ids[row, i]:
                    first -= 1
                if window:
                    first = max(first, i - window + 1)
                scores = k[row, first : i + 1, kv] @ q[row, i, head] / math.sqrt(hd)
                out[row, i, head] = scores.softmax(0) @ v[row, first : i + 1, kv]
    return out


def inputs(b, t, h, kv, hd, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, t, h, hd), (b, t, kv, hd), (b, t, kv, hd))
    return [torch.randn(s, generator=g, dtype=dtype, requires_grad=True) for s in shapes]


def ids(rows):
    return torch.tensor([[d for d, n in enumerate(row) for _ in range(n)] for row in rows], dtype=torch.int32)


ROWS = {
    "one": [[12], [12]],
    "two": [[5, 7], [12]],
    "many": [[1, 1, 3, 7], [2, 10]],
    "whole rows between": [[12], [12], [6, 6], [12]],
}


@pytest.mark.parametrize("window", [0, 1, 3, 5, 12])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_values_and_gradients(rows, window):
    doc_ids = ids(rows)
    q, k, v = inputs(len(rows), 12, 4, 2, 8)
    plan = plan_attention(doc_ids, len(rows), 12, window, CPU)
    assert plan.kind == ("causal" if rows == ROWS["one"] and window in (0, 12) else "segments")
    out = attention(q, k, v, plan)
    want = reference(q, k, v, doc_ids, window)
    torch.testing.assert_close(out, want, atol=1e-9, rtol=0)
    g = torch.randn(out.shape, dtype=torch.float64)
    for got, ref in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g), strict=True):
        torch.testing.assert_close(got, ref, atol=1e-9, rtol=0)
    dense = AttentionPlan("mask", window, mask=document_mask(doc_ids, 12, window, CPU))
    torch.testing.assert_close(attention(q, k, v, dense), want, atol=1e-9, rtol=0)


def test_a_window_without_documents():
    q, k, v = inputs(2, 13, 2, 2, 8)
    out = attention(q, k, v, plan_attention(None, 2, 13, 4, CPU))
    torch.testing.assert_close(out, reference(q, k, v, torch.zeros(2, 13), 4), atol=1e-9, rtol=0)
    assert plan_attention(None, 2, 13, 13, CPU).kind == "causal"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=3),
    st.sampled_from([0, 1, 2, 4]),
    st.booleans(),
)
def test_any_layout_of_documents(rows, window, head_major):
    # Ids may come back later in a row: a change ends a document, so [0, 1, 0] is three of them.
    doc_ids = torch.tensor(rows, dtype=torch.int32)
    q, k, v = (x.detach() for x in inputs(len(rows), 9, 2, 1, 8))
    if head_major:  # the memory layout that rotary embedding leaves behind
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    out = attention(q, k, v, plan_attention(doc_ids, len(rows), 9, window, CPU))
    torch.testing.assert_close(out, reference(q, k, v, doc_ids, window), atol=1e-9, rtol=0)


def test_document_starts_are_changes_of_id_and_row_starts():
    assert document_starts(torch.tensor([[4, 4, 5], [5, 5, 5], [5, 4, 4]])).tolist() == [0, 2, 3, 6, 7]


def test_the_cuda_block_mask_sees_the_same_pairs():
    from torch.nn.attention.flex_attention import flex_attention

    from trainwright.models.attention import _block_mask

    doc_ids = ids([[5, 7, 1], [13]])
    q, k, v = (x.detach().float() for x in inputs(2, 13, 4, 2, 16))
    for window in (0, 4):
        block_mask = _block_mask(doc_ids, 2, 13, window, CPU)
        out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, enable_gqa=True)
        plan = plan_attention(doc_ids, 2, 13, window, CPU)
        torch.testing.assert_close(out.transpose(1, 2), attention(q, k, v, plan), atol=1e-5, rtol=0)


def test_the_operator_is_sound_for_the_compiler():
    from trainwright.models.attention import segment_attention

    q, k, v = inputs(2, 6, 2, 1, 8, torch.float32)
    args = (q, k, v, torch.tensor([0, 2, 6, 12]), 0)
    torch.library.opcheck(
        segment_attention, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
