"""The Triton kernels of S2-Attention against the mask over all pairs: python s2_triton_cases.py cpu|cuda"""

import sys

import torch

from trainwright.models.ops._s2_attention_triton import block_table, s2_attention_triton
from trainwright.models.ops.s2_attention import s2_attention_reference, segments_of
from trainwright.models.ops.s2_pattern import make_pattern

device = torch.device(sys.argv[1])
patterns = [
    make_pattern(4, block_size=16, local_blocks=1, stride=2),
    make_pattern(4, 2, block_size=16, local_blocks=1, stride=3, allow_uncovered=True),
    make_pattern(3, block_size=16, local_blocks=1, stride=2, num_dense_heads=1, offset=1),
]
cases = [  # pattern, bounds of documents in two rows of 56, head width
    (0, [0, 56, 112], 16),
    (0, [0, 37, 56, 57, 112], 24),
    (1, [0, 56, 112], 16),
    (2, [0, 37, 56, 57, 112], 16),
]
length = 56
for n, (which, bounds, width) in enumerate(cases):
    pattern = patterns[which]
    heads, kv = (4, 4, 3)[which], len(pattern.residues)
    g = torch.Generator().manual_seed(n)
    x = [torch.randn(2, length, h, width, generator=g).to(device).requires_grad_() for h in (heads, kv, kv)]
    y = [t.detach().clone().requires_grad_() for t in x]
    segments = segments_of(bounds, length)
    first = torch.zeros(2, length, dtype=torch.int64, device=device)
    for s in segments:
        first[s.row : s.row + s.rows, s.start : s.stop] = s.start
    out, lse = s2_attention_triton(*x, block_table(pattern, segments, length, device))
    want, sums = s2_attention_reference(*y, pattern, first)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse, sums, atol=2e-5, rtol=1e-4)
    grad = torch.randn(out.shape, generator=g).to(device)
    out.backward(grad)
    want.backward(grad)
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=5e-5, rtol=1e-3)
print(f"all {len(cases)} cases equal")
