"""Each operation against its formula in float64, both passes, in the layouts that a decoder gives it."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.models import ops
from trainwright.models.ops import native

WITH_KERNELS = native.compiler() is not None and sys.platform == "linux"
needs_kernels = pytest.mark.skipif(
    not WITH_KERNELS, reason="needs a C compiler on Linux; plain torch is tested besides"
)


def exact_rms_norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def exact_swiglu(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def exact_swiglu_fused(gate_up):
    f = gate_up.shape[-1] // 2
    return exact_swiglu(gate_up[..., :f], gate_up[..., f:])


def exact_rope(x, cos, sin):
    """Pair by pair, as complex numbers would turn, with the two halves' tables kept apart."""
    half = x.shape[-1] // 2
    c, s = cos[:, :, None], sin[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c[..., :half] - b * s[..., :half], b * c[..., half:] + a * s[..., half:]), -1)


def rms_norm(x, weight):
    return ops.rms_norm(x, weight, 1e-5)


def assert_both_passes(op, exact, tensors, constants=(), rtol=1e-5):
    """Result and gradients of ``op`` equal those of ``exact`` in float64, up to rounding of the inputs' dtype."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    y, want = op(*tensors, *constants), exact(*wide, *(c.double() for c in constants))
    assert y.dtype == tensors[0].dtype and y.shape == want.shape
    torch.testing.assert_close(y.double(), want, rtol=rtol, atol=rtol)
    go = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = torch.autograd.grad(y, tensors, go.to(y.dtype))
    for a, e in zip(got, torch.autograd.grad(want, wide, go.to(y.dtype).double()), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=rtol, atol=rtol * float(1 + e.norm() / e.numel() ** 0.5))


def randn(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)]


@pytest.mark.parametrize("dtype,rtol", DTYPES)
def test_dtypes(dtype, rtol):
    x, w = randn(3, 7, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    assert_both_passes(rms_norm, exact_rms_norm, (x, w), rtol=rtol)
    assert_both_passes(ops.swiglu, exact_swiglu, (x, randn(3, 7, 24, dtype=dtype, seed=2)), rtol=rtol)
    assert_both_passes(ops.swiglu_fused, exact_swiglu_fused, (x,), rtol=rtol)
    q = randn(3, 7, 2, 12, dtype=dtype)
    tables = [randn(1, 7, 12, dtype=dtype, seed=s).detach() for s in (3, 4)]
    assert_both_passes(ops.apply_rope, exact_rope, (q,), tables, rtol=rtol)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 33), d=st.integers(1, 70), seed=st.integers(0, 999))
def test_any_shape(n, d, seed):
    assert_both_passes(rms_norm, exact_rms_norm, (randn(n, d, seed=seed), randn(d, seed=seed + 1)))
    assert_both_passes(ops.swiglu, exact_swiglu, (randn(n, d, seed=seed), randn(n, d, seed=seed + 1)))
    assert_both_passes(ops.swiglu_fused, exact_swiglu_fused, (randn(n, 2 * d, seed=seed),))
    tables = [randn(1, n, 2 * d, seed=seed + i).detach() for i in (1, 2)]
    assert_both_passes(ops.apply_rope, exact_rope, (randn(2, n, 3, 2 * d, seed=seed),), tables)


def test_strided_inputs():
    """Views of one fused projection, transposed gradients, tables that differ from row to row."""
    qkv = randn(2, 5, 4 * 8)
    tables = [randn(2, 5, 8, seed=i).detach() for i in (1, 2)]

    def rope(x, c, s):
        return ops.apply_rope(x[..., 8:24].view(2, 5, 2, 8), c, s).transpose(1, 2).contiguous()

    def exact(x, c, s):
        return exact_rope(x[..., 8:24].reshape(2, 5, 2, 8), c, s).transpose(1, 2)

    assert_both_passes(rope, exact, (qkv,), tables)
    assert_both_passes(lambda x: ops.swiglu(x[..., :16], x[..., 16:]), exact_swiglu_fused, (qkv,))
    assert_both_passes(
        lambda x: ops.swiglu_fused(x.transpose(0, 1)), lambda x: exact_swiglu_fused(x.transpose(0, 1)), (qkv,)
    )
    assert_both_passes(
        lambda x, w: rms_norm(x.transpose(0, 1), w).transpose(1, 2),
        lambda x, w: exact_rms_norm(x.transpose(0, 1), w).transpose(1, 2),
        (qkv, randn(32, seed=9)),
    )
    assert_both_passes(lambda x: ops.swiglu_fused(x[:, ::2, ::2]), lambda x: exact_swiglu_fused(x[:, ::2, ::2]), (qkv,))


@pytest.mark.parametrize(
    "op,shapes",
    [(rms_norm, [(3, 6), (6,)]), (ops.swiglu, [(3, 6), (3, 6)]), (ops.swiglu_fused, [(3, 6)])],
)
def test_gradcheck(op, shapes):
    torch.autograd.gradcheck(op, tuple(randn(*s, dtype=torch.float64, seed=i) for i, s in enumerate(shapes)))


def test_gradcheck_rope():
    tables = [randn(1, 4, 6, dtype=torch.float64, seed=i).detach() for i in (1, 2)]
    torch.autograd.gradcheck(lambda x: ops.apply_rope(x, *tables), (randn(2, 4, 3, 6, dtype=torch.float64),))


def test_rope_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = randn(2, 9, 4, 16), randn(2, 9, 2, 16, seed=1)
    angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[None] for f in (torch.cos, torch.sin))
    want_q, want_k = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    torch.testing.assert_close(ops.apply_rope(q, cos, sin).transpose(1, 2), want_q)
    torch.testing.assert_close(ops.apply_rope(k, cos, sin).transpose(1, 2), want_k)


def test_rms_norm_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(24, eps=1e-5)
    nn.init.normal_(norm.weight)
    x = randn(5, 24)
    torch.testing.assert_close(ops.rms_norm(x, norm.weight, 1e-5), norm(x))
    half = x.detach().bfloat16()
    torch.testing.assert_close(ops.rms_norm(half, norm.weight.bfloat16(), 1e-5), norm.bfloat16()(half))


@needs_kernels
def test_kernels_serve_plain_float32_and_nothing_else():
    x = torch.zeros(2, 4)
    assert native.usable(x, nn.Parameter(x))
    assert not native.usable(x, x.double()) and not native.usable(x.bfloat16())

    class Tagged(torch.Tensor):
        pass

    assert not native.usable(x.as_subclass(Tagged))


@needs_kernels
def test_saves_no_more_than_the_inputs():
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    gate_up = randn(64, 32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ops.swiglu_fused(gate_up)
    assert sizes == [64 * 32]
    sizes.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ops.rms_norm(gate_up, torch.ones(32))
    assert sum(sizes) == 64 * 32 + 32 + 64


def test_extreme_values_and_nan():
    gate = torch.tensor([-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 1e4, float("inf"), float("nan")] * 3)
    up = torch.ones_like(gate)
    torch.testing.assert_close(ops.swiglu(gate, up), nn.functional.silu(gate), equal_nan=True, rtol=1e-6, atol=1e-6)
    gate = gate[:8].clone().requires_grad_()
    (got,) = torch.autograd.grad(ops.swiglu(gate, up[:8]).sum(), gate)
    (want,) = torch.autograd.grad(nn.functional.silu(gate).sum(), gate)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    x = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    y = ops.rms_norm(x, torch.ones(2))
    assert y[0].isnan().all() and y[1].isfinite().all()


def test_sigmoid_is_accurate_to_float32():
    x = torch.linspace(-80, 80, 40001)
    got = ops.swiglu(x, torch.ones_like(x)).double()
    want = nn.functional.silu(x.double())
    assert ((got - want).abs() / want.abs().clamp(min=1e-30)).max() < 2e-6


def test_empty():
    x = torch.zeros(0, 8, requires_grad=True)
    ops.rms_norm(x, torch.ones(8)).sum().backward()
    assert ops.swiglu(x, x).shape == (0, 8) and ops.swiglu_fused(x).shape == (0, 4)
    assert ops.apply_rope(torch.zeros(0, 3, 2, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4)).shape == (0, 3, 2, 4)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_both_passes(rms_norm, exact_rms_norm, (randn(5, 33), randn(33, seed=1)))
        assert_both_passes(rms_norm, exact_rms_norm, (randn(1, 33), randn(33, seed=1)))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_bitwise_repeatable():
    x, w = randn(257, 48), randn(48, seed=1)

    def once():
        y = ops.rms_norm(x, w)
        return [y, *torch.autograd.grad(ops.swiglu_fused(y).sum(), (x, w))]

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


def test_inside_torch_compile_and_functorch():
    x, w = randn(4, 8), randn(8, seed=1)

    def f(x, w):
        return ops.swiglu_fused(ops.rms_norm(x, w)).sum()

    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(x, w), f(x, w))
    torch.testing.assert_close(torch.func.grad(f)(x.detach(), w.detach()), torch.autograd.grad(f(x, w), x)[0])


FALLBACK = """
import torch, warnings
from trainwright.models import ops
from trainwright.models.ops import native
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    x = torch.randn(3, 8, requires_grad=True)
    y = ops.swiglu_fused(ops.rms_norm(x, torch.ones(8)))
    y.sum().backward()
assert native.library() is None
assert torch.equal(y, ops.swiglu_reference(*ops.rms_norm_reference(x, torch.ones(8), 1e-6).chunk(2, -1)))
print(len([w for w in seen if "CPU kernels" in str(w.message)]))
"""


@pytest.mark.parametrize("case,warned", [("no compiler", 0), ("broken compiler", 1)])
def test_without_a_working_compiler_plain_torch_takes_over(tmp_path, case, warned):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CC": ""}
    if case == "broken compiler":
        cc = tmp_path / "cc"
        cc.write_text("#!/bin/sh\necho 'no such target' >&2\nexit 1\n")
        cc.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", FALLBACK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(warned)


@needs_kernels
def test_two_processes_may_compile_at_once(tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    code = "from trainwright.models.ops import native; assert native.library() is not None"
    both = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [p.wait(timeout=120) for p in both] == [0, 0]
    assert len(list((tmp_path / "trainwright" / "kernels").iterdir())) == 1
