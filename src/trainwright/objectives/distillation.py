"""Cross-entropy of a linear head against a mix of the next token and a teacher's soft label, chunk by chunk.

For hidden states ``h [N, D]``, head ``W [V, D]``, targets ``t [N]``, loss weights ``a [N]``, a share ``w`` and the
teacher's probabilities ``q``, sharpened or flattened by ``rho``::

    y_i      = cap(scale * W h_i + b)      p_i = softmax(y_i)                                   [V]
    q^(rho)  proportional to q^(1 / rho)   rho -> 0: one-hot at the argmax, 1: the teacher as it is
    m_i      = (1 - w) ((1 - s) onehot(t_i) + s / V) + w q_i^(rho)           s = label_smoothing
    loss     = sum_i a_i (CE(m_i, p_i) + z_loss * lse_i^2)                   nats
    d loss / d y_i = a_i (p_i (1 + 2 z_loss lse_i) - m_i)

The teacher is given by its hidden states and head, so that its logits exist for one chunk of rows at a time, as the
student's do: two buffers ``[chunk, V]`` in all. Or it is given by its K most likely ids and their probabilities, kept
from an earlier pass (:mod:`trainwright.objectives.teacher_cache`). What these leave over is then one event, "another
id", of probability ``r = 1 - sum_k q_k``, against the student's ``1 - sum_k p_k``: within the rest the student keeps
its own proportions, and the gradient differs from the exact one by at most ``2 w r`` in L1.

Hinton et al., arXiv:1503.02531. They scale the loss by the square of the temperature and soften the student too; here
the student is not softened, as in SALT (arXiv:2410.18779), so that the loss is a likelihood and keeps its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.objectives.linear_cross_entropy import (
    LossOptions,
    _check,
    _product_dtypes,
    _Products,
    chunk_rows,
    linear_cross_entropy,
)

PROB_UNIT = 65535  # kept probabilities are whole multiples of 1 / PROB_UNIT, rounded down: their sum stays below 1


def soften(logits: Tensor, rho: float) -> Tensor:
    """``softmax(logits / rho)`` over the last axis, in place; safe for any ``rho > 0``."""
    logits.sub_(logits.amax(-1, keepdim=True)).div_(rho)
    if logits.device.type == "cpu":
        return torch.softmax(logits, -1, out=logits)
    return logits.copy_(torch.softmax(logits, -1))


@dataclass(frozen=True)
class TeacherHead:
    """A teacher by its final hidden states and output projection; no gradient flows to it.

    hidden ``[N, D']`` like the student's rows; weight ``[V', D']``, bias ``[V']``. Ids beyond the student's vocabulary
    are left out, those beyond the teacher's get probability 0.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class TopKLabels:
    """A teacher by its likeliest ids ``[N, K]`` (each once a row) and their probabilities ``[N, K]``, already softened.

    Probabilities are real numbers, or uint16 in units of ``1 / PROB_UNIT``.
    """

    ids: Tensor
    probs: Tensor


@torch._disable_dynamo
def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: TeacherHead | TopKLabels,
    *,
    share: float,
    rho: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of weighted token losses against the mixed target; see the module's equations.

    Arguments and result are those of :func:`~trainwright.objectives.linear_cross_entropy.linear_cross_entropy`, and
    ``teacher``, the soft labels' ``share`` in [0, 1] and ``rho`` > 0 (not read with :class:`TopKLabels`). ``metrics``
    has ``soft_nll`` too, the weighted sum of CE(q, p). With share 0 it is that function, to the bit.
    Raises ValueError for shapes or options that do not fit.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    if not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}")
    if share == 0:
        return linear_cross_entropy(
            hidden, weight, targets, weights, bias=bias, softcap=softcap, scale=scale, z_loss=z_loss,
            label_smoothing=label_smoothing, chunk_tokens=chunk_tokens,
        )  # fmt: skip
    _check(hidden, weight, targets, weights, bias)
    rows = (teacher.hidden if isinstance(teacher, TeacherHead) else teacher.ids).shape[0]
    if rows != hidden.shape[0]:
        raise ValueError(f"the teacher has {rows} rows, the student {hidden.shape[0]}")
    if isinstance(teacher, TopKLabels) and teacher.ids.shape != teacher.probs.shape:
        raise ValueError(f"ids {tuple(teacher.ids.shape)} and probs {tuple(teacher.probs.shape)} differ")
    options = LossOptions(softcap, scale, z_loss, label_smoothing)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, parts = _SoftCrossEntropy.apply(
        hidden, weight, bias, targets, weights, teacher, (share, rho), options, chunk_tokens, wanted
    )
    return loss, dict(zip(("nll", "z_loss", "correct", "soft_nll"), parts.unbind(), strict=True))


def dense_row_loss(
    y: Tensor, q: Tensor, targets: Tensor, weights: Tensor, share: float, options: LossOptions, want_grad: bool
) -> Tensor:
    """Loss terms ``[5, C]`` of logits ``y [C, V]`` against soft labels ``q [C, V' <= V]``; y becomes the gradient.

    The terms, unweighted: nll, lse, lse - mean logit (0 without smoothing), 1 where the argmax is the target, and
    CE(q, p). Both y (before the softcap) and q are scratch.
    """
    target, weight = targets[:, None], weights[:, None]
    slope, terms, lse = _cap(y, target, options, want_grad)
    # A pass of its own per row: [C, 1, V] @ [C, V, 1] holds no product in between.
    terms[4] = lse - torch.bmm(q.unsqueeze(1), y[:, : q.shape[1]].unsqueeze(2)).reshape(-1)
    if not want_grad:
        return terms
    _softmax(y)
    if options.z_loss:
        y.mul_(1 + 2 * options.z_loss * lse[:, None])
    y[:, : q.shape[1]].sub_(q.mul_(share))
    _finish(y, target, weight, share, options, slope)
    return terms


def top_k_row_loss(
    y: Tensor,
    ids: Tensor,
    probs: Tensor,
    targets: Tensor,
    weights: Tensor,
    share: float,
    options: LossOptions,
    want_grad: bool,
) -> Tensor:
    """As :func:`dense_row_loss` against ``probs [C, K]`` at ``ids [C, K]`` and one bucket for all other ids."""
    target, weight = targets[:, None], weights[:, None]
    slope, terms, lse = _cap(y, target, options, want_grad)
    if ids.shape[1] >= y.shape[1]:  # no other id is left: what is missing was rounded off
        probs = probs / probs.sum(-1, keepdim=True).clamp_(min=torch.finfo(y.dtype).tiny)
    rest = (1 - probs.sum(-1, keepdim=True)).clamp_(min=0)  # [C, 1]
    log_top = y.gather(1, ids) - lse[:, None]
    _softmax(y)
    top = y.gather(1, ids)
    # The student's own rest as a sum of what is left, which loses nothing where the K hold nearly all.
    y.scatter_(1, ids, 0.0)
    own_rest = y.sum(-1, keepdim=True).clamp_(min=torch.finfo(y.dtype).tiny)
    terms[4] = -((probs * log_top).sum(-1) + (rest * own_rest.log()).squeeze(1))
    if not want_grad:
        return terms
    grow = 1 + 2 * options.z_loss * lse[:, None] if options.z_loss else torch.ones_like(rest)
    y.mul_(grow - share * rest / own_rest)
    y.scatter_(1, ids, top * grow - share * probs)
    _finish(y, target, weight, share, options, slope)
    return terms


def _cap(y: Tensor, target: Tensor, o: LossOptions, want_grad: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Bound the logits in place; the slope of that, the terms of the hard label, and the log-partition."""
    slope = None
    if o.softcap is not None:
        y.div_(o.softcap).tanh_()
        slope = y.square().neg_().add_(1) if want_grad else None
        y.mul_(o.softcap)
    terms = y.new_zeros(5, y.shape[0])
    lse = torch.logsumexp(y, -1)
    own = y.gather(1, target).squeeze(1)
    terms[0], terms[1] = lse - own, lse
    if o.label_smoothing:
        terms[2] = lse - y.mean(-1)
    terms[3] = (y.argmax(-1) == target.squeeze(1)).to(y.dtype)
    return slope, terms, lse


def _softmax(y: Tensor) -> None:
    if y.device.type == "cpu":
        torch.softmax(y, -1, out=y)
    else:
        y.copy_(torch.softmax(y, -1))


def _finish(y: Tensor, target: Tensor, weight: Tensor, share: float, o: LossOptions, slope: Tensor | None) -> None:
    """Take the hard label's part off, and weigh the rows."""
    s = o.label_smoothing
    y.scatter_add_(1, target, torch.full_like(target, -(1 - share) * (1 - s), dtype=y.dtype))
    if s:
        y.sub_((1 - share) * s / y.shape[1])
    y.mul_(weight)
    if slope is not None:
        y.mul_(slope)


class _Labels:
    """Soft labels of a chunk of rows, made in a buffer that all chunks share."""

    def __init__(self, teacher: TeacherHead | TopKLabels, rho: float, vocab: int, chunk: int, total: torch.dtype):
        self.teacher, self.rho, self.total = teacher, rho, total
        if isinstance(teacher, TeacherHead):
            product, own_total = _product_dtypes(teacher.hidden, teacher.weight)
            bias = None if teacher.bias is None else teacher.bias[:vocab]
            self.products = _Products(teacher.weight[:vocab], bias, teacher.scale, product, own_total)
            size = 0 if self.products.mixed else chunk
            self.buffer = teacher.hidden.new_empty(size, self.products.weight.shape[0], dtype=own_total)

    def dense(self, rows: Tensor | slice) -> Tensor:
        teacher: Any = self.teacher
        q = self.products.logits(teacher.hidden[rows].to(self.products.product), self.buffer)
        if teacher.softcap is not None:
            q.div_(teacher.softcap).tanh_().mul_(teacher.softcap)
        return soften(q, self.rho).to(self.total)

    def loss(
        self,
        y: Tensor,
        rows: Tensor | slice,
        targets: Tensor,
        weights: Tensor,
        share: float,
        o: LossOptions,
        grad: bool,
    ) -> Tensor:
        if isinstance(self.teacher, TeacherHead):
            return dense_row_loss(y, self.dense(rows), targets, weights, share, o, grad)
        probs = self.teacher.probs[rows]
        if not probs.is_floating_point():
            probs = probs.to(torch.int32).to(self.total) / PROB_UNIT
        ids = self.teacher.ids[rows].long()
        return top_k_row_loss(y, ids, probs.to(self.total), targets, weights, share, o, grad)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        teacher: TeacherHead | TopKLabels,
        mix: tuple[float, float],
        options: LossOptions,
        chunk_tokens: int | None,
        wanted: list[bool],
    ) -> tuple[Tensor, Tensor]:
        dtypes = _product_dtypes(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            sums, grads = _forward(
                hidden, weight, bias, targets, weights, teacher, mix, options, chunk_tokens, wanted, dtypes
            )
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        loss, parts = sums[0].clone(), sums[1:].clone()
        ctx.mark_non_differentiable(parts)
        return loss, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = []
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            out.append(None if grad is None else (grad * grad_loss.to(grad.dtype)).to(dtype))
        return (*out, *[None] * 7)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    teacher: TeacherHead | TopKLabels,
    mix: tuple[float, float],
    options: LossOptions,
    chunk_tokens: int | None,
    wanted: list[bool],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, list[Tensor | None]]:
    """``[loss, nll, z, correct, soft]`` as one tensor, and the gradients of hidden, weight and bias where wanted."""
    want_hidden, want_weight, want_bias = wanted
    want_grad = any(wanted)
    product, total = dtypes
    share, rho = mix
    vocab = weight.shape[0]
    weights = weights.to(total)
    kept = None
    if hidden.device.type == "cpu" and not bool(weights.all()):
        kept = weights.nonzero().squeeze(1)
        targets, weights = targets[kept], weights[kept]
    rows = targets.shape[0]
    chunk = min(chunk_tokens, max(rows, 1)) if chunk_tokens else chunk_rows(rows, vocab, total.itemsize)
    products = _Products(weight, bias, options.scale, product, total)
    labels = _Labels(teacher, rho, vocab, chunk, total)

    buffer = hidden.new_empty(0 if products.mixed or not rows else chunk, vocab, dtype=total)
    grad_hidden = hidden.new_empty(rows, hidden.shape[1]) if want_hidden else None
    grad_weight = weight.new_zeros(weight.shape, dtype=total) if want_weight else None
    grad_bias = weight.new_zeros(vocab, dtype=total) if want_bias else None
    terms = hidden.new_empty(5, rows, dtype=total)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        where = part if kept is None else kept[part]
        h = hidden[where].to(product)
        y = products.logits(h, buffer)
        terms[:, part] = labels.loss(y, where, targets[part], weights[part], share, options, want_grad)
        if not want_grad:
            continue
        g = y.to(product)
        if grad_hidden is not None:
            products.hidden_grad(g, grad_hidden[part])
        if grad_weight is not None:
            products.add_weight_grad(g, h, grad_weight, first=start == 0)
        if grad_bias is not None:
            grad_bias.add_(y.sum(0))
    if grad_hidden is not None and kept is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, kept, grad_hidden)

    nll, lse, smooth, hit, soft = terms
    s = options.label_smoothing
    hard = (1 - s) * nll + s * smooth if s else nll
    z = options.z_loss * lse.square()
    sums = torch.stack(((1 - share) * hard + share * soft + z, nll, z, hit, soft)) @ weights
    return sums, [grad_hidden, grad_weight, grad_bias]
