"""Parts of context parallelism that need no second process."""

import pytest
import torch

from trainwright.core.batch import Batch
from trainwright.parallel.context import ring_attention
from trainwright.parallel.context.ring_attention import Pair, block_backward, block_forward
from trainwright.parallel.context.unified import UnifiedContext, _pair


def qkv(tq=6, tk=6, heads=4, kv=2, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, t, 8, generator=g, dtype=dtype) for h, t in ((heads, tq), (kv, tk), (kv, tk))]


def masks():
    g = torch.Generator().manual_seed(1)
    some = torch.rand(2, 1, 6, 6, generator=g) < 0.5
    some[0, 0, 2] = False  # a query that sees nothing
    whole = slice(0, 6)
    return [Pair(whole, whole), Pair(whole, whole, causal=True), Pair(whole, whole, mask=some)]


@pytest.mark.parametrize("pair", masks(), ids=["all", "causal", "mask"])
def test_the_plain_products_are_the_fused_kernel(pair, monkeypatch):
    q, k, v = qkv()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(2), dtype=q.dtype)
    fused = block_forward(q, k, v, pair, 0.3)
    finite = fused[1].masked_fill(fused[1] == float("-inf"), 0.0)
    fused_grads = block_backward(grad, q, k, v, fused[0], finite, pair, 0.3)
    monkeypatch.setattr(ring_attention, "PLAIN", True)
    plain = block_forward(q, k, v, pair, 0.3)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-12, rtol=1e-10)
    for a, b in zip(fused_grads, block_backward(grad, q, k, v, *plain[:1], finite, pair, 0.3), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("pair", masks(), ids=["all", "causal", "mask"])
def test_a_block_is_attention(pair):
    """Against softmax in plain torch, with autograd's gradients."""
    q, k, v = (x.requires_grad_() for x in qkv())
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.3
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if pair.causal else pair.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    want = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
    out, lse = block_forward(q.detach(), k.detach(), v.detach(), pair, 0.3)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-10)
    seen = torch.ones_like(lse, dtype=torch.bool) if pair.mask is None else pair.mask.any(-1).expand_as(lse)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=want.dtype) * seen.unsqueeze(-1)
    (want * grad).nansum().backward()
    finite = lse.masked_fill(~seen, 0.0)
    for got, x in zip(block_backward(grad, q, k, v, out, finite, pair, 0.3), (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad.nan_to_num(0.0), atol=1e-12, rtol=1e-10)


def strategy(rank, size, ulysses):
    found = UnifiedContext.__new__(UnifiedContext)
    found.size, found.ulysses, found.places = size, ulysses, size // ulysses
    found.rank, found.place = rank, rank // ulysses
    return found


@pytest.mark.parametrize("size, ulysses", [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2)])
def test_every_slot_is_on_one_rank(size, ulysses):
    length = 32
    rows = Batch(
        torch.arange(64).view(2, 32), torch.zeros(2, 32), torch.ones(2, 32), torch.arange(32).expand(2, 32),
        torch.zeros(2, 32), extras={"advantage": torch.ones(2), "bytes": torch.arange(64).view(2, 32)},
    )  # fmt: skip
    parts = [strategy(r, size, ulysses).shard(rows) for r in range(size)]
    assert all(p.shape == (2, length // size) and p.extras["advantage"].shape == (2,) for p in parts)
    slots = torch.cat([p.positions[0] for p in parts])
    assert sorted(slots.tolist()) == list(range(length))
    assert all(torch.equal(p.extras["bytes"], p.tokens) for p in parts)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zig_zag_gives_all_ranks_the_same_pairs(size):
    """Causal pairs of tokens by rank: exactly equal."""
    length = 16 * size
    work = []
    for rank in range(size):
        own = strategy(rank, size, 1)
        slots = own.slots(rank, length)
        work.append(int((slots + 1).sum()))
    assert len(set(work)) == 1


def test_pairs_without_a_visible_pair_of_tokens_are_left_out():
    a, b = range(8, 16), range(0, 8)
    assert _pair(0, b, 1, a, None, 0) is None  # the keys come later
    assert _pair(0, a, 0, b, None, 0).mask is None
    assert _pair(0, a, 0, a, None, 0).causal
    apart = torch.tensor([[0] * 8 + [1] * 8])
    assert _pair(0, a, 0, b, apart, 0) is None  # no document in both
    assert _pair(0, a, 0, a, apart, 0).causal
    shared = torch.tensor([[0] * 4 + [1] * 12])
    mask = _pair(0, a, 0, b, shared, 0).mask
    assert mask.shape == (1, 1, 8, 8) and mask[..., :4].sum() == 0 and bool(mask[..., 4:].all())
    assert _pair(0, range(24, 32), 0, b, None, 5) is None  # out of the window
    assert _pair(0, a, 0, b, None, 5).mask.sum() == 4 + 3 + 2 + 1
