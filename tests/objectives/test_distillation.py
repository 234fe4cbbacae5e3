"""The soft-label loss against its equation over full logits in float64, and its memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.objectives import linear_cross_entropy
from trainwright.objectives.distillation import PROB_UNIT, TeacherHead, TopKLabels, distillation_loss, soften


def inputs(n=19, d=7, v=23, dt=5, vt=None, *, seed=0, dtype=torch.float64, masked=0.3):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    hidden, weight, bias = (x.requires_grad_() for x in (draw(n, d), draw(v, d), draw(v)))
    targets = torch.randint(0, v, (n,), generator=g)
    weights = torch.rand(n, generator=g) * (torch.rand(n, generator=g) >= masked)
    teacher = TeacherHead(draw(n, dt), draw(vt or v, dt), draw(vt or v), softcap=4.0, scale=1.7)
    return hidden, weight, bias, targets, weights, teacher


def soft_labels(teacher, rho, vocab):
    """q^(rho) ``[N, vocab]`` in float64: probabilities to the power 1 / rho, normalised."""
    h, w, b = (x.double() for x in (teacher.hidden, teacher.weight[:vocab], teacher.bias[:vocab]))
    z = teacher.softcap * torch.tanh((teacher.scale * h @ w.T + b) / teacher.softcap)
    power = z.softmax(-1) ** (1 / rho)
    q = power / power.sum(-1, keepdim=True)
    return F.pad(q, (0, vocab - q.shape[1]))


def mixed_target(q, targets, share, smoothing):
    vocab = q.shape[1]
    hard = (1 - smoothing) * F.one_hot(targets, vocab).double() + smoothing / vocab
    return (1 - share) * hard + share * q


def closed_form(leaves, targets, weights, q, share, *, softcap=None, scale=1.0, z_loss=0.0, label_smoothing=0.0):
    hidden, weight, bias = leaves
    y = scale * hidden @ weight.T + bias
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    m = mixed_target(q, targets, share, label_smoothing)
    lse = y.logsumexp(-1)
    w = weights.double()
    loss = (w * (-(m * y.log_softmax(-1)).sum(-1) + z_loss * lse**2)).sum()
    return loss, {
        "nll": (w * F.cross_entropy(y, targets, reduction="none")).sum(),
        "soft_nll": (w * -(q * y.log_softmax(-1)).sum(-1)).sum(),
        "z_loss": (w * z_loss * lse**2).sum(),
        "correct": (w * (y.argmax(-1) == targets)).sum(),
    }


def compare(
    share, rho, *, seed=0, dtype=torch.float64, rtol=1e-10, chunk=5, n=19, v=23, vt=None, masked=0.3, **options
):
    hidden, weight, bias, targets, weights, teacher = inputs(n, v=v, vt=vt, seed=seed, dtype=dtype, masked=masked)
    leaves = [hidden, weight, bias]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    loss, metrics = distillation_loss(
        hidden, weight, targets, weights, teacher, share=share, rho=rho, bias=bias, chunk_tokens=chunk, **options
    )
    q = soft_labels(teacher, rho, v)
    want, want_metrics = closed_form(exact, targets, weights, q, share, **options)
    atol = rtol * (1 + n)
    torch.testing.assert_close(loss.double(), want, rtol=rtol, atol=atol)
    for name, value in want_metrics.items():
        torch.testing.assert_close(metrics[name].double(), value, rtol=rtol, atol=atol, msg=name)
    for mine, ref in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, exact), strict=True):
        torch.testing.assert_close(mine.double(), ref, rtol=rtol, atol=atol)


@settings(max_examples=25, deadline=None)
@given(
    share=st.sampled_from([0.1, 0.667, 1.0]),
    rho=st.sampled_from([0.25, 1.0, 3.0]),
    chunk=st.sampled_from([1, 5, 64, None]),
    n=st.integers(1, 30),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    softcap=st.sampled_from([None, 6.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    smoothing=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 99),
)
def test_b_loss_and_gradient_are_those_of_the_mixed_target(
    share, rho, chunk, n, masked, softcap, z_loss, smoothing, seed
):
    compare(
        share, rho, chunk=chunk, n=n, masked=masked, seed=seed, softcap=softcap, scale=0.8, z_loss=z_loss,
        label_smoothing=smoothing,
    )  # fmt: skip


def test_b_in_float32():
    compare(0.667, 0.25, dtype=torch.float32, rtol=2e-5)


@pytest.mark.parametrize("teacher_vocab", [20, 27])
def test_a_teacher_with_spare_or_missing_rows_of_its_vocabulary(teacher_vocab):
    compare(0.5, 0.7, vt=teacher_vocab)


def logit_gradient(y, teacher, targets, share, rho=1.0):
    """Gradient with respect to logits ``[N, V]``: an identity head makes the hidden states the logits."""
    y = y.clone().requires_grad_()
    eye = torch.eye(y.shape[1], dtype=y.dtype)
    loss, _ = distillation_loss(y, eye, targets, torch.ones(len(y)), teacher, share=share, rho=rho)
    return torch.autograd.grad(loss, y)[0]


def test_b_the_gradient_at_the_logits_is_p_minus_the_target():
    g = torch.Generator().manual_seed(3)
    y, z = torch.randn(2, 11, 17, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 17, (11,), generator=g)
    teacher = TeacherHead(z, torch.eye(17, dtype=torch.float64))
    q = z.softmax(-1) ** 4
    q = q / q.sum(-1, keepdim=True)
    want = y.softmax(-1) - (0.333 * F.one_hot(targets, 17).double() + 0.667 * q)
    torch.testing.assert_close(logit_gradient(y, teacher, targets, 0.667, 0.25), want, rtol=0, atol=1e-12)
    single = logit_gradient(y.float(), TeacherHead(z.float(), torch.eye(17)), targets, 0.667, 0.25)
    torch.testing.assert_close(single.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rho", [1e-3, 1e-8, 1e-30])
def test_b_a_small_rho_gives_the_argmax_as_label(rho):
    g = torch.Generator().manual_seed(4)
    y, z = torch.randn(2, 9, 13, generator=g)
    targets = torch.randint(0, 13, (9,), generator=g)
    grad = logit_gradient(y, TeacherHead(z, torch.eye(13)), targets, 1.0, rho)
    torch.testing.assert_close(grad, y.softmax(-1) - F.one_hot(z.argmax(-1), 13), rtol=0, atol=1e-6)


def test_b_a_one_hot_teacher_gives_the_plain_cross_entropy():
    hidden, weight, bias, targets, weights, _ = inputs()
    sure = TeacherHead(1e4 * F.one_hot(targets, 23).double(), torch.eye(23, dtype=torch.float64))
    loss, _ = distillation_loss(hidden, weight, targets, weights, sure, share=0.7, bias=bias)
    plain, _ = linear_cross_entropy(hidden, weight, targets, weights, bias=bias)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=0)


def test_a_without_soft_labels_it_is_the_plain_loss_to_the_bit():
    hidden, weight, bias, targets, weights, teacher = inputs(dtype=torch.float32)
    mine, metrics = distillation_loss(hidden, weight, targets, weights, teacher, share=0.0, bias=bias, z_loss=1e-3)
    plain, want = linear_cross_entropy(hidden, weight, targets, weights, bias=bias, z_loss=1e-3)
    assert torch.equal(mine, plain) and metrics.keys() == want.keys()
    for a, b in zip(*(torch.autograd.grad(x, [hidden, weight, bias]) for x in (mine, plain)), strict=True):
        assert torch.equal(a, b)


# -- kept labels ----------------------------------------------------------------------------------------------------


def kept(q, k, units=False):
    probs, ids = q.topk(k, -1)
    if units:
        probs = (probs * PROB_UNIT).floor().to(torch.int32).to(torch.uint16)
    return TopKLabels(ids, probs)


@settings(max_examples=40, deadline=None)
@given(k=st.integers(1, 17), seed=st.integers(0, 999), share=st.sampled_from([0.3, 1.0]), peak=st.sampled_from([1, 8]))
def test_kept_labels_err_by_at_most_twice_the_missing_mass(k, seed, share, peak):
    g = torch.Generator().manual_seed(seed)
    y, z = torch.randn(2, 11, 17, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 17, (11,), generator=g)
    q = (peak * z).softmax(-1)
    exact = logit_gradient(y, TeacherHead(peak * z, torch.eye(17, dtype=torch.float64)), targets, share)
    for units in (False, True):
        labels = kept(q, k, units)
        held = labels.probs.to(torch.int64).double() / PROB_UNIT if units else labels.probs
        missing = 1 - held.sum(-1)
        error = (logit_gradient(y, labels, targets, share) - exact).abs().sum(-1)
        assert (error <= share * 2 * missing + 1e-12).all()
    if k == 17:
        torch.testing.assert_close(logit_gradient(y, kept(q, k), targets, share), exact, rtol=0, atol=1e-12)


def test_kept_labels_loss_is_the_cross_entropy_of_k_ids_and_a_bucket():
    hidden, weight, bias, targets, weights, teacher = inputs()
    q = soft_labels(teacher, 0.5, 23)
    labels = kept(q, 4)
    options = {"share": 0.6, "bias": bias, "softcap": 5.0, "z_loss": 0.02, "label_smoothing": 0.1}
    loss, metrics = distillation_loss(hidden, weight, targets, weights, labels, chunk_tokens=6, **options)
    y = 5.0 * torch.tanh((hidden @ weight.T + bias) / 5.0)
    p = y.softmax(-1)
    own = p.gather(1, labels.ids)
    rest = 1 - labels.probs.sum(-1)
    soft = -(labels.probs * own.log()).sum(-1) - rest * (1 - own.sum(-1)).log()
    hard = -(mixed_target(torch.zeros_like(q), targets, 0.0, 0.1) * y.log_softmax(-1)).sum(-1)
    want = (weights.double() * (0.4 * hard + 0.6 * soft + 0.02 * y.logsumexp(-1) ** 2)).sum()
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["soft_nll"], (weights.double() * soft).sum().detach(), rtol=1e-9, atol=0)
    leaves = [hidden, weight, bias]
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_kept_labels_that_hold_all_of_it_lose_nothing_to_rounding():
    """p_rest as 1 - sum would be all cancellation here: the student and the teacher agree on one id."""
    y = torch.tensor([[40.0, 0.0, -1.0, 1.0]])
    labels = TopKLabels(torch.tensor([[0]]), torch.tensor([[1.0 - 1e-6]]))
    grad = logit_gradient(y, labels, torch.tensor([0]), 1.0)
    p = y.double().softmax(-1)
    rest = float(1 - labels.probs.double())
    want = p.clone()
    want[0, 0] -= 1 - rest
    want[0, 1:] -= rest * p[0, 1:] / p[0, 1:].sum()
    torch.testing.assert_close(grad.double(), want, rtol=1e-3, atol=1e-9)


def test_soften_is_safe_at_the_ends():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    assert soften(logits.clone(), 1e-38).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(soften(logits.clone(), 1e30), torch.full((1, 3), 1 / 3))


# -- memory and input -----------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("top_k", [None, 3])
def test_logits_of_neither_model_exist_beyond_a_chunk(top_k):
    n, v, chunk = 64, 501, 8
    hidden, weight, bias, targets, weights, teacher = inputs(n, v=v, dtype=torch.float32)
    labels = kept(soft_labels(teacher, 1.0, v).float(), top_k) if top_k else teacher
    with Largest() as seen:
        loss, _ = distillation_loss(
            hidden, weight, targets, weights, labels, share=0.5, bias=bias, softcap=9.0, chunk_tokens=chunk
        )
        loss.backward()
    assert chunk * v <= seen.numel <= max(chunk * v, weight.numel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.1}, "share must be in"),
        ({"share": -0.1}, "share must be in"),
        ({"share": float("nan")}, "share must be in"),
        ({"share": 0.5, "rho": 0.0}, "rho must be positive"),
        ({"share": 0.5, "rho": -1.0}, "rho must be positive"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    hidden, weight, _, targets, weights, teacher = inputs()
    with pytest.raises(ValueError, match=message):
        distillation_loss(hidden, weight, targets, weights, teacher, **options)


def test_labels_that_do_not_fit_are_refused():
    hidden, weight, _, targets, weights, _ = inputs()
    short = TeacherHead(torch.zeros(3, 5), torch.zeros(23, 5))
    with pytest.raises(ValueError, match="the teacher has 3 rows, the student 19"):
        distillation_loss(hidden, weight, targets, weights, short, share=0.5)
    odd = TopKLabels(torch.zeros(19, 2, dtype=torch.int64), torch.zeros(19, 3))
    with pytest.raises(ValueError, match="differ"):
        distillation_loss(hidden, weight, targets, weights, odd, share=0.5)
