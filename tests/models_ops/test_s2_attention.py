"""S2-Attention: the pattern's numbers, the CPU path against a mask over all pairs, and merging of parts."""

import itertools
import warnings

import pytest
import torch

from trainwright.models.ops.s2_attention import (
    Segment,
    block_attention,
    flex_block_mask,
    masked_attention,
    merge,
    s2_attention,
    s2_attention_reference,
    segments_of,
    token_mask,
)
from trainwright.models.ops.s2_pattern import Pattern, check_blocks, make_pattern


def qkv(batch, queries, keys, heads, kv, width=8, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, t, h, width, generator=g, dtype=dtype) for t, h in ((queries, heads), (keys, kv), (keys, kv))
    ]


def brute(pattern, length, head):
    """The definition, token by token."""
    r = pattern.residues[head]
    seen = torch.zeros(length, length, dtype=torch.bool)
    for a in range(length):
        for b in range(a + 1):
            i, j = a // pattern.block_size, b // pattern.block_size
            seen[a, b] = i - j < pattern.local_blocks or r is None or j % pattern.stride == r
    return seen


# -- pattern --


def test_density_and_cache_of_the_paper():
    pattern = make_pattern(32, block_size=64, local_blocks=16, stride=8)
    assert pattern.density(8192) == pytest.approx(0.3293, abs=5e-5)
    assert pattern.cached_tokens(8192) == [1920] * 32
    assert make_pattern(8, block_size=16, local_blocks=4, stride=8).density(1024) == pytest.approx(0.230, abs=5e-4)


def test_coverage():
    eight = make_pattern(8, stride=8)
    assert eight.uncovered() == [] and bool((eight.blocks(64).any(0) == torch.ones(64, 64).tril().bool()).all())
    four = make_pattern(4, stride=8, local_blocks=2, allow_uncovered=True)
    assert four.uncovered() == [1, 3, 5, 7]  # steps of 2 reach even residues alone
    assert not bool((four.blocks(64).any(0) == torch.ones(64, 64).tril().bool()).all())
    with pytest.raises(ValueError, match=r"leaves blocks 1, 3, 5, 7 modulo 8 to no head; use stride=4 or less"):
        make_pattern(4, stride=8)
    assert make_pattern(4, stride=8, num_dense_heads=1).uncovered() == []  # one that sees all


@pytest.mark.parametrize("heads, kv, stride", [(8, 8, 8), (32, 8, 8), (4, 4, 4), (4, 2, 2), (12, 4, 3), (6, 6, 5)])
@pytest.mark.parametrize("offset", [0, 3])
def test_covered_means_that_the_union_is_causal(heads, kv, stride, offset):
    pattern = make_pattern(heads, kv, stride=stride, local_blocks=1, offset=offset, allow_uncovered=True)
    union = bool((pattern.blocks(4 * stride).any(0) == torch.ones(4 * stride, 4 * stride).tril().bool()).all())
    assert union == (pattern.uncovered() == [])


def test_pairs_are_counted_exactly():
    for length in (5, 16, 100, 333):
        pattern = make_pattern(4, block_size=16, local_blocks=2, stride=4, num_dense_heads=1)
        assert pattern.pairs(length) == [int(brute(pattern, length, t).sum()) for t in range(4)]


def test_pattern_follows_the_released_code():
    """Head t sees key block j from afar where (j + t * step + offset) % stride == 0, the last heads all."""
    pattern = make_pattern(8, 4, stride=16, num_dense_heads=1, offset=1)
    for t, r in enumerate(pattern.residues):
        seen = {j % 16 for j in range(64) if t >= 3 or (j + t * 2 + 1) % 16 == 0}
        assert seen == (set(range(16)) if r is None else {r})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"block_size": 48}, "block_size=48 should be a power of two of at least 16"),
        ({"block_size": 8}, "block_size=8"),
        ({"local_blocks": 0}, "local_blocks=0 leaves a block that does not see itself"),
        ({"stride": 0}, "stride=0"),
        ({"num_dense_heads": 9}, "num_dense_heads=9 should be 0 to 8"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide n_heads=8"),
        ({"n_kv_heads": 2}, "to no head; use stride=2 or less"),
    ],
)
def test_bad_patterns(settings, message):
    with pytest.raises(ValueError, match=message):
        make_pattern(8, **settings)


def test_patterns_of_the_users_own():
    full = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_blocks(full)
        check_blocks(make_pattern(8, local_blocks=2).blocks(20))
    later = full.clone()
    later[1, 0, 2] = True
    with pytest.raises(ValueError, match="later block"):
        check_blocks(later)
    empty = full.clone()
    empty[1, 2] = False
    with pytest.raises(ValueError, match="query block 2 of head 1 sees no block"):
        check_blocks(empty)
    back = full.clone()
    back[0, 2, 0] = False
    with pytest.warns(UserWarning, match="out of sight"):
        check_blocks(back)
    with pytest.raises(ValueError, match=r"\[heads, n, n\]"):
        check_blocks(full[0])


# -- attention --

PATTERNS = {
    "plain": make_pattern(4, block_size=16, local_blocks=2, stride=4),
    "grouped": make_pattern(4, 2, block_size=16, local_blocks=1, stride=2),
    "dense_heads": make_pattern(4, block_size=16, local_blocks=3, stride=8, num_dense_heads=1),
    "shared_residues": make_pattern(4, block_size=16, local_blocks=1, stride=2),
    "local": Pattern((5, 5), 16, 1, 6),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_reference_is_the_definition(name):
    pattern = PATTERNS[name]
    mask = token_mask(pattern, torch.zeros(1, 150, dtype=torch.int64), 150)
    for t in range(len(pattern.residues)):
        assert torch.equal(mask[0, t], brute(pattern, 150, t))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("length", [1, 40, 150, 300])
def test_cpu_path_equals_the_mask(name, length):
    """Outputs, log-sum-exps and gradients, in float64."""
    pattern = PATTERNS[name]
    x = [t.requires_grad_() for t in qkv(2, length, length, 4, len(pattern.residues))]
    y = [t.detach().clone().requires_grad_() for t in x]
    out, lse = s2_attention(*x, pattern)
    want, want_lse = s2_attention_reference(*y, pattern)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-10)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    want.backward(grad)
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-12, rtol=1e-10)


def test_documents_see_what_they_would_see_alone():
    """Packed rows with gradients: equal to each document by itself, and to the mask from where documents start."""
    pattern = PATTERNS["dense_heads"]
    bounds = [0, 90, 200, 220, 400, 401, 600]
    x = [t.requires_grad_() for t in qkv(3, 200, 200, 4, 4)]
    segments = segments_of(bounds, 200)
    assert segments[-1] == Segment(2, 1, 1, 200, 1) and segments[1] == Segment(0, 1, 90, 200, 90)
    out, _ = s2_attention(*x, pattern, segments)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, x, grad)
    for a, b in itertools.pairwise(bounds):
        own = [t.detach().flatten(0, 1)[None, a:b].requires_grad_() for t in x]
        alone, _ = s2_attention(*own, pattern)
        torch.testing.assert_close(out.flatten(0, 1)[a:b], alone[0], atol=1e-12, rtol=1e-10)
        alone.backward(grad.flatten(0, 1)[None, a:b])
        for t, g in zip(own, grads, strict=True):
            torch.testing.assert_close(g.flatten(0, 1)[a:b], t.grad[0], atol=1e-12, rtol=1e-10)
    starts = torch.zeros(600, dtype=torch.int64)
    for a, b in itertools.pairwise(bounds):
        starts[a:b] = a % 200
    want, _ = s2_attention_reference(*(t.detach() for t in x), pattern, starts.view(3, 200))
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-10)


def test_equal_rows_go_in_one_segment():
    assert segments_of([0, 8, 16, 20, 24, 32], 8) == [
        Segment(0, 2, 0, 8, 0), Segment(2, 1, 0, 4, 0), Segment(2, 1, 4, 8, 4), Segment(3, 1, 0, 8, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("queries", [1, 7, 64, 130])
def test_the_last_queries_of_a_longer_row(queries):
    """As with a key-value cache."""
    for pattern in PATTERNS.values():
        q, k, v = qkv(2, 260, 260, 4, len(pattern.residues))
        whole, sums = s2_attention(q, k, v, pattern)
        out, lse = s2_attention(q[:, -queries:], k, v, pattern)
        torch.testing.assert_close(out, whole[:, -queries:], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(lse, sums[:, :, -queries:], atol=1e-12, rtol=1e-10)


def test_stride_1_is_dense_causal():
    q, k, v = qkv(2, 200, 200, 4, 2, dtype=torch.float32)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    pattern = make_pattern(4, 2, block_size=16, local_blocks=2, stride=1)
    for attend in (s2_attention, s2_attention_reference):
        torch.testing.assert_close(attend(q, k, v, pattern)[0], want, atol=1e-6, rtol=0)


def test_halves_of_the_keys_merge_to_the_whole():
    pattern = PATTERNS["plain"]
    q, k, v = qkv(2, 128, 128, 4, 4, dtype=torch.float32)
    want, sums = s2_attention(q, k, v, pattern)
    mask = token_mask(pattern, torch.zeros(2, 128, dtype=torch.int64), 128)
    parts = [masked_attention(q, k[:, h], v[:, h], mask[..., h]) for h in (slice(0, 64), slice(64, 128))]
    assert bool((parts[1][1][:, :, :64] == float("-inf")).all())  # the first half sees nothing of the second
    out, lse = merge(parts)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, sums, atol=1e-5, rtol=0)


def test_block_patterns_of_the_users_own():
    pattern = PATTERNS["plain"]
    x = qkv(1, 100, 100, 4, 4)
    got, _ = block_attention(*x, pattern.blocks(7), 16)
    torch.testing.assert_close(got, s2_attention_reference(*x, pattern)[0])


def test_bfloat16_is_near():
    pattern = PATTERNS["plain"]
    q, k, v = qkv(1, 200, 200, 4, 4, dtype=torch.float32)
    out, lse = s2_attention(q, k, v.bfloat16(), pattern)  # as under autocast
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), s2_attention_reference(q, k, v, pattern)[0], atol=3e-2, rtol=3e-2)


def test_the_flex_block_mask_is_the_pattern():
    """Its rule for a pair of tokens, evaluated for all; documents included."""
    pattern = make_pattern(4, 2, block_size=16, local_blocks=1, stride=2)
    ids = torch.zeros(2, 128, dtype=torch.int32)
    ids[0, 50:] = 1
    ids[1, 100:] = 7
    first = torch.tensor([[0] * 50 + [50] * 78, [0] * 100 + [100] * 28])
    for doc_ids, starts in ((ids, first), (None, torch.zeros(2, 128, dtype=torch.int64))):
        found = flex_block_mask(pattern, 4, doc_ids, 2, 128, torch.device("cpu"))
        want = token_mask(pattern, starts, 128).repeat_interleave(2, 1)
        b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 4, 128, 128)), indexing="ij")
        assert torch.equal(found.mask_mod(b, h, i, j), want)


def test_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="the pattern is of 4 key-value heads, k has 2"):
        s2_attention(*qkv(1, 8, 8, 4, 2), PATTERNS["plain"])
