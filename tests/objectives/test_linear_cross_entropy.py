"""The fused linear cross-entropy against the closed form over full logits in float64."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainwright.objectives import linear_cross_entropy

module = importlib.import_module("trainwright.objectives.linear_cross_entropy")


def closed_form(
    hidden, weight, targets, weights, *, bias=None, softcap=None, scale=1.0, z_loss=0.0, label_smoothing=0.0
):
    """The equations of the module's docstring, over the full logits."""
    y = scale * hidden @ weight.T
    if bias is not None:
        y = y + bias
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    lse = y.logsumexp(-1)
    own = y.gather(1, targets[:, None])[:, 0]
    ce = (1 - label_smoothing) * (lse - own) + label_smoothing * (lse - y.mean(-1))
    w = weights.to(y.dtype)
    return (w * (ce + z_loss * lse**2)).sum(), {
        "nll": (w * (lse - own)).sum(),
        "z_loss": (w * z_loss * lse**2).sum(),
        "correct": (w * (y.argmax(-1) == targets)).sum(),
    }


def inputs(n=19, d=7, v=23, *, seed=0, dtype=torch.float64, bias=True, masked=0.3):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    b = torch.randn(v, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, v, (n,), generator=g)
    weights = torch.rand(n, generator=g) * (torch.rand(n, generator=g) >= masked)
    return hidden, weight, b, targets, weights


def assert_equal_to_closed_form(n, d, v, *, seed, bias, masked, chunk, dtype, rtol, unit=False, **options):
    hidden, weight, b, targets, weights = inputs(n, d, v, seed=seed, dtype=dtype, bias=bias, masked=masked)
    if unit:
        weights = (weights > 0).float()
    leaves = [x for x in (hidden, weight, b) if x is not None]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    loss, metrics = linear_cross_entropy(hidden, weight, targets, weights, bias=b, chunk_tokens=chunk, **options)
    want, want_metrics = closed_form(exact[0], exact[1], targets, weights, bias=exact[2] if bias else None, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), want, rtol=rtol, atol=rtol * (1 + n))
    for name, value in want_metrics.items():
        torch.testing.assert_close(metrics[name].double(), value, rtol=rtol, atol=rtol * (1 + n), msg=name)
        assert not metrics[name].requires_grad
    got = torch.autograd.grad(loss * 1.7, leaves)
    for a, e, leaf in zip(got, torch.autograd.grad(want * 1.7, exact), leaves, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a.double(), e, rtol=rtol, atol=rtol * float(e.norm() + 1e-3))


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(0, 40),
    d=st.integers(1, 9),
    v=st.integers(2, 70),
    seed=st.integers(0, 2**16),
    bias=st.booleans(),
    masked=st.sampled_from([0.0, 0.4, 1.1]),
    chunk=st.sampled_from([None, 1, 2, 7, 64]),
    unit=st.booleans(),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([1.0, 0.3]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
)
def test_loss_metrics_and_gradients_equal_the_closed_form(**case):
    assert_equal_to_closed_form(dtype=torch.float64, rtol=1e-10, **case)


@pytest.mark.parametrize("dtype,rtol", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_inputs_accumulate_in_float32(dtype, rtol):
    assert_equal_to_closed_form(
        300, 16, 64, seed=1, bias=True, masked=0.2, chunk=11, dtype=dtype, rtol=rtol, z_loss=1e-3, softcap=20.0
    )


def test_rows_wider_than_a_cache_block(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * 50 * 8)  # three rows a block, the last one shorter
    assert_equal_to_closed_form(
        40, 5, 50, seed=3, bias=True, masked=0.1, chunk=13, dtype=torch.float64, rtol=1e-10, label_smoothing=0.2
    )


def test_equals_torch_cross_entropy():
    hidden, weight, _, targets, _ = inputs(50, 8, 40, dtype=torch.float32, bias=False)
    ones = torch.ones(50)
    loss, metrics = linear_cross_entropy(hidden, weight, targets, ones, label_smoothing=0.1)
    want = F.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(metrics["nll"], F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))
    for a, e in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 3.0, "scale": 0.5}])
def test_gradcheck(options):
    hidden, weight, bias, targets, weights = inputs(6, 3, 7)

    def f(h, w, b):
        return linear_cross_entropy(h, w, targets, weights, bias=b, chunk_tokens=4, **options)[0]

    torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_extreme_logits_stay_finite_and_exact():
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([1, 0, 2]), torch.ones(3))
    assert loss.item() == pytest.approx(2e4 + 2e4 + math.log(3), rel=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_of_equal_logits_the_first_is_the_argmax():
    """At a zero-initialised head all logits tie: the share of correct rows is that of target 0, not 1."""
    targets = torch.tensor([0, 3, 0, 4, 1])
    hidden, weight = torch.randn(5, 4), torch.zeros(6, 4)
    _, metrics = linear_cross_entropy(hidden, weight, targets, torch.ones(5))
    assert metrics["correct"].item() == 2
    _, metrics = linear_cross_entropy(
        torch.ones(2, 1), torch.tensor([[0.0], [9.0], [9.0]]), targets[:2] * 0 + 2, torch.ones(2)
    )
    assert metrics["correct"].item() == 0  # two entries share nearly all probability, the target is the second


@pytest.mark.parametrize("n", [0, 5])
def test_all_masked_gives_zero_and_no_nan(n):
    hidden, weight, bias, targets, weights = inputs(n, dtype=torch.float32)
    loss, metrics = linear_cross_entropy(hidden, weight, targets, weights * 0, bias=bias, z_loss=0.1)
    assert loss.item() == 0 and all(v.item() == 0 for v in metrics.values())
    for g, x in zip(torch.autograd.grad(loss, (hidden, weight, bias)), (hidden, weight, bias), strict=True):
        assert g.shape == x.shape and not g.any()


def test_masked_rows_do_not_matter_at_all():
    hidden, weight, _, targets, weights = inputs(bias=False)
    spoilt = torch.where(weights[:, None] > 0, hidden.detach(), math.nan).requires_grad_()
    losses = [linear_cross_entropy(h, weight, targets, weights)[0] for h in (hidden, spoilt)]
    assert torch.equal(*losses)
    grads = [torch.autograd.grad(loss, (h, weight)) for loss, h in zip(losses, (hidden, spoilt), strict=True)]
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, _, targets, weights = inputs(bias=False)
    want = torch.autograd.grad(closed_form(hidden, weight, targets, weights)[0], (hidden, weight))
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss, _ = linear_cross_entropy(hidden, weight, targets, weights)
    assert loss.requires_grad == (frozen != "both")
    if loss.requires_grad:
        loss.backward()
    assert (hidden.grad is None) == (frozen != "weight") and (weight.grad is None) == (frozen != "hidden")
    for leaf, grad in zip((hidden, weight), want, strict=True):
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, grad)


def test_tied_weight_collects_both_gradients():
    table = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, 30, (2, 17))
    weights = torch.rand(17)
    (got,) = torch.autograd.grad(linear_cross_entropy(F.embedding(ids, table), table, targets, weights)[0], table)
    (want,) = torch.autograd.grad(closed_form(F.embedding(ids, table), table, targets, weights)[0], table)
    torch.testing.assert_close(got, want)


def test_gradients_accumulate_over_micro_batches():
    hidden, weight, _, targets, weights = inputs(bias=False)
    (want,) = torch.autograd.grad(closed_form(hidden, weight, targets, weights)[0] / 3, weight)
    for part in (slice(0, 4), slice(4, 19)):
        (linear_cross_entropy(hidden[part], weight, targets[part], weights[part])[0] / 3).backward()
    torch.testing.assert_close(weight.grad, want)


def test_backward_twice_on_a_kept_graph():
    hidden, weight, _, targets, weights = inputs(bias=False)
    loss, _ = linear_cross_entropy(hidden, weight, targets, weights)
    first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
    copy = [g.clone() for g in first]
    second = torch.autograd.grad(loss * 6, (hidden, weight))
    for a, b, c in zip(first, second, copy, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(b, 3 * a)


def test_no_gradient_work_without_grad(monkeypatch):
    hidden, weight, _, targets, weights = inputs(bias=False)
    want = linear_cross_entropy(hidden, weight, targets, weights)[0]

    def forbidden(*_):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(module._Products, "hidden_grad", forbidden)
    monkeypatch.setattr(module._Products, "add_weight_grad", forbidden)
    with torch.no_grad():
        got = linear_cross_entropy(hidden, weight, targets, weights)[0]
    assert torch.equal(got, want) and not got.requires_grad
    with pytest.raises(AssertionError, match="a gradient was computed"):
        linear_cross_entropy(hidden, weight, targets, weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    hidden, weight, _, targets, weights = inputs(bias=False)
    want = torch.autograd.grad(closed_form(hidden.tanh(), weight, targets, weights)[0], (hidden, weight))

    def f(h):
        return linear_cross_entropy(h.tanh(), weight, targets, weights)[0]

    checkpoint(f, hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close(hidden.grad, want[0])
    torch.testing.assert_close(weight.grad, want[1])


def test_under_autocast():
    hidden, weight, _, targets, weights = inputs(64, 16, 32, dtype=torch.float32, bias=False)
    layer = torch.eye(16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = hidden @ layer
        assert states.dtype == torch.bfloat16
        loss, _ = linear_cross_entropy(states, weight, targets, weights)
    loss.backward()
    want, _ = closed_form(hidden.bfloat16().double(), weight.double(), targets, weights)
    assert loss.dtype == torch.float32 and weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert layer.grad.dtype == torch.float32 and layer.grad.any()


def test_inside_a_compiled_function():
    hidden, weight, _, targets, weights = inputs(dtype=torch.float32, bias=False)

    def f(h):
        return linear_cross_entropy(h.sin(), weight, targets, weights)[0] * 2

    compiled = torch.compile(f, backend="eager")
    torch.testing.assert_close(compiled(hidden), f(hidden))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(hidden), hidden)[0], torch.autograd.grad(f(hidden), hidden)[0]
    )


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_never_holds_the_full_logits():
    n, d, v, chunk = 512, 8, 300, 32
    hidden, weight, bias, targets, weights = inputs(n, d, v, dtype=torch.float32)
    with LargestTensor() as largest:
        linear_cross_entropy(
            hidden, weight, targets, weights, bias=bias, z_loss=0.1, label_smoothing=0.1, chunk_tokens=chunk
        )[0].backward()
    assert largest.numel == chunk * v
    with LargestTensor() as largest:
        closed_form(hidden, weight, targets, weights)
    assert largest.numel == n * v  # what the measure reads for a loss over full logits


@pytest.mark.parametrize(
    "rows,vocab,most", [(2048, 32000, 524), (100, 32000, 100), (5000, 4096, 2048), (4096, 151936, 256)]
)
def test_chunks_fill_the_buffer_evenly(rows, vocab, most):
    chunk = module.chunk_rows(rows, vocab)
    assert chunk <= most
    chunks = math.ceil(rows / chunk)
    assert chunks == math.ceil(rows / most) and chunks * chunk - rows < chunks


@pytest.mark.parametrize(
    "change,message",
    [
        ({"softcap": 0.0}, "softcap"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"bias": torch.zeros(3)}, "bias"),
    ],
)
def test_wrong_options_are_refused(change, message):
    hidden, weight, _, targets, weights = inputs(bias=False)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, targets, weights, **change)


def test_wrong_shapes_are_refused():
    hidden, weight, _, targets, weights = inputs(bias=False)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden[:, 1:], weight, targets, weights)
    with pytest.raises(ValueError, match="targets and weights"):
        linear_cross_entropy(hidden, weight, targets[1:], weights)
