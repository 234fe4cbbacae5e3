"""Linear projection and cross-entropy in one, chunk by chunk, so that the full logits never exist.

For hidden states ``h [N, D]``, head ``W [V, D]``, targets ``t [N]`` and loss weights ``w [N]``::

    y_i    = cap(scale * W h_i + b)                  [V]     cap(x) = softcap * tanh(x / softcap)
    lse_i  = log sum_v exp y_iv
    CE_i   = (1 - s) (lse_i - y_i,t_i) + s (lse_i - mean_v y_iv)             s = label_smoothing
    loss   = sum_i w_i (CE_i + z_loss * lse_i^2)                             nats, natural logarithm

The gradient with respect to the logits is known the moment the logits are, so the forward pass makes the gradients
of hidden, weight and bias at once, one chunk of rows after another in one ``[chunk, V]`` buffer, and the backward
pass only scales them (Liger Kernel, arXiv:2410.10989). The z-loss is that of PaLM (arXiv:2204.02311).

Where this differs from Liger: rows of weight 0 cost nothing on the CPU, the weight's gradient accumulates in float32
whatever the input dtype, nothing is computed for what needs no gradient, and the loss weights are real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainwright.core.distributed import local_tensor
from trainwright.objectives.vocab_shard import VocabShard, vocab_shard

# Packing the [V, D] weight is paid once a chunk, so matrix products lose speed below some 512 rows; above this size
# the buffer costs memory and buys nothing (measured with MKL on x86 at D = 192 and 320, V = 4k and 32k).
CHUNK_BYTES = 64 << 20
MIN_CHUNK, MAX_CHUNK = 256, 2048
# The passes over the logits go block by block, so that a block is still in the cache at its next pass.
BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class LossOptions:
    """What shapes the loss of one row; see the module's equations."""

    softcap: float | None = None
    scale: float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0


# imported on the first call: torch.compile's front end is called at a graph break, here, and never sees the inside
@torch._disable_dynamo
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk_tokens: int | None = None,
    token_losses: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of weighted token losses of a linear head, without ever holding ``[N, V]`` logits.

    hidden    ``[N, D]`` float32, float64, bfloat16 or float16
    weight    ``[V, D]``, and ``bias`` ``[V]``
    targets   ``[N]`` int64 in ``0..V-1`` (any valid id where the weight is 0)
    weights   ``[N]`` float32, loss weight per row, 0 = ignored; no gradient flows to them

    ``scale`` multiplies ``hidden @ weight.T``, ``softcap`` bounds the logits, ``z_loss`` is the coefficient of the
    squared log-partition, ``label_smoothing`` in [0, 1) moves that share of the target onto the uniform distribution.
    ``chunk_tokens`` sets the rows per chunk; by default a chunk of logits fills some 64 MiB.

    Returns ``(loss, metrics)``: the loss is a float32 scalar (float64 for float64 inputs) with gradients for hidden,
    weight and bias; ``metrics`` holds detached sums: ``nll`` (weighted cross-entropy alone, without smoothing or
    z-loss), ``z_loss`` (that term, coefficient included) and ``correct`` (weight of the rows whose argmax is the
    target; of equal logits the first counts). With ``token_losses`` it also holds ``token_nll [N]``, not weighted and 0
    where the weight is 0. Half precision inputs and autocast use half precision products with
    float32 results on GPUs; CPUs compute in float32, which is faster there. Only first derivatives exist.
    A ``weight`` (and ``bias``) that is a DTensor cut by rows over one mesh dimension is used as it lies: all ranks pass
    the same rows and get the same loss and metrics; the gradient of ``hidden`` is this rank's part of a sum over ranks.
    Raises ValueError for shapes or options that do not fit.
    """
    shard = vocab_shard(weight)
    if shard is not None:
        weight, bias = local_tensor(weight), None if bias is None else local_tensor(bias)
    _check(hidden, weight, targets, weights, bias)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    options = LossOptions(softcap, scale, z_loss, label_smoothing)
    # inside an autograd.Function grad mode is always off, so what needs a gradient is settled here
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias)]
    loss, parts, nll = _LinearCrossEntropy.apply(
        hidden, weight, bias, targets, weights, options, chunk_tokens, wanted, shard
    )
    metrics = dict(zip(("nll", "z_loss", "correct"), parts.unbind(), strict=True))
    return loss, {**metrics, "token_nll": nll} if token_losses else metrics


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, D] and weight [V, D] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    n, v = hidden.shape[0], weight.shape[0]
    if targets.shape != (n,) or weights.shape != (n,):
        got = f"{tuple(targets.shape)}, {tuple(weights.shape)}"
        raise ValueError(f"targets and weights must be [{n}] like hidden's rows, got {got}")
    if bias is not None and bias.shape != (v,):
        raise ValueError(f"bias must be [{v}] like weight's rows, got {tuple(bias.shape)}")


def chunk_rows(rows: int, vocab: int, itemsize: int = 4) -> int:
    """Rows per chunk: as many as fill ``CHUNK_BYTES``, within bounds, evened out over the chunks."""
    most = min(MAX_CHUNK, max(MIN_CHUNK, CHUNK_BYTES // (vocab * itemsize)))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


# (logits [C, V], targets [C], weights [C], options, out [C, V] or None) -> terms [4, C]
RowLoss = Callable[[Tensor, Tensor, Tensor, LossOptions, Tensor | None], Tensor]


def row_loss(logits: Tensor, targets: Tensor, weights: Tensor, options: LossOptions, out: Tensor | None) -> Tensor:
    """Loss terms of each row of ``logits [C, V]`` (before the softcap), and the gradient of the weighted loss.

    The logits are scratch: they are overwritten. ``out`` takes the gradient; it may be ``logits`` itself, and None
    asks for none. Returns ``terms [4, C]``, unweighted: nll, lse, lse - mean logit (0 without smoothing), and 1 where
    the argmax is the target. Plain torch; the reference for the Triton kernel of the same signature.
    """
    rows, vocab = logits.shape
    step = max(1, BLOCK_BYTES // (vocab * logits.element_size()))
    terms = logits.new_zeros(4, rows)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        _block_loss(
            logits[block], targets[block, None], weights[block, None], options, out is not None, terms[:, block]
        )
    if out is not None and out is not logits:
        out.copy_(logits)
    return terms


def _block_loss(y: Tensor, target: Tensor, weight: Tensor, o: LossOptions, want_grad: bool, terms: Tensor) -> None:
    """:func:`row_loss` of one block: ``y [R, V]`` becomes the gradient; target and weight are ``[R, 1]``."""
    nll, lse, smooth, hit = terms
    vocab, slope = y.shape[1], None
    if o.softcap is not None:
        y.div_(o.softcap).tanh_()
        slope = y.square().neg_().add_(1) if want_grad else None  # d cap / d x
        y.mul_(o.softcap)
    top, own = y.amax(-1), y.gather(1, target).squeeze(1)
    mean = y.mean(-1) if o.label_smoothing else None
    if y.device.type == "cpu":
        torch.softmax(y, -1, out=y)  # one fused kernel; far faster than exp_ on CPUs
    else:
        y.copy_(torch.softmax(y, -1))
    top_prob = y.amax(-1)  # = 1 / sum exp(y - top), so the partition needs no pass of its own
    torch.sub(top, top_prob.log(), out=lse)
    torch.sub(lse, own, out=nll)
    if mean is not None:
        torch.sub(lse, mean, out=smooth)
    hit.copy_(own == top)
    # A probability above one half has no equal; only below can another entry tie with the target (as all do at a
    # zero-initialised head), and only then is the slow argmax needed.
    unsure = ((hit > 0) & (top_prob < 0.501)).nonzero().squeeze(1)
    if unsure.numel():
        first = y.index_select(0, unsure).argmax(-1)
        hit[unsure] = (first == target[unsure, 0]).to(hit.dtype)
    if not want_grad:
        return
    s = o.label_smoothing
    if o.z_loss:
        y.mul_(weight * (1 + 2 * o.z_loss * lse[:, None]))
    elif y.device.type != "cpu" or not bool((weight == 1).all()):  # the pass is worth a look on the CPU
        y.mul_(weight)
    y.scatter_add_(1, target, (s - 1) * weight)
    if s:
        y.sub_(weight * (s / vocab))
    if slope is not None:
        y.mul_(slope)


def _row_loss_for(device: torch.device, dtype: torch.dtype) -> RowLoss:
    if device.type == "cuda" and dtype == torch.float32:
        from trainwright.objectives._linear_cross_entropy_triton import row_loss_triton

        return row_loss_triton
    return row_loss


def _product_dtypes(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Dtype of the matrix products' inputs, and of logits, loss and accumulated gradients."""
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64, torch.float64
    device = hidden.device.type
    if device != "cuda":
        return torch.float32, torch.float32
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device), torch.float32
    return hidden.dtype, torch.float32


class _Products:
    """The three matrix products of a chunk, with float32 (or float64) results also for half precision inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, product: torch.dtype, total: torch.dtype):
        self.weight = weight.to(product)  # [V, D]
        self.bias = None if bias is None else bias.to(total)
        self.scale, self.product, self.total = scale, product, total
        self.mixed = product != total

    def logits(self, h: Tensor, buffer: Tensor) -> Tensor:
        """``scale * h @ W.T + bias``, in ``buffer [>=C, V]`` where the products allow it."""
        if self.mixed:
            y = torch.mm(h, self.weight.t(), out_dtype=self.total)
            y = y.mul_(self.scale) if self.scale != 1 else y
            return y if self.bias is None else y.add_(self.bias)
        y = buffer[: h.shape[0]]
        if self.bias is not None:
            return torch.addmm(self.bias, h, self.weight.t(), alpha=self.scale, out=y)
        return torch.addmm(y, h, self.weight.t(), beta=0, alpha=self.scale, out=y)

    def hidden_grad(self, g: Tensor, into: Tensor) -> None:
        if into.dtype == self.product and not self.mixed:
            torch.addmm(into, g, self.weight, beta=0, alpha=self.scale, out=into)
        else:
            into.copy_(torch.mm(g, self.weight).mul_(self.scale))

    def add_weight_grad(self, g: Tensor, h: Tensor, into: Tensor, first: bool) -> None:
        if self.mixed:
            part = torch.mm(g.t(), h, out_dtype=self.total)
            torch.mul(part, self.scale, out=into) if first else into.add_(part, alpha=self.scale)
        else:  # beta = 0 at the first chunk: nothing has to be zeroed
            into.addmm_(g.t(), h, beta=0 if first else 1, alpha=self.scale)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        options: LossOptions,
        chunk_tokens: int | None,
        wanted: list[bool],
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtypes = _product_dtypes(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            sums, nll, grads = _forward(
                hidden, weight, bias, targets, weights, options, chunk_tokens, wanted, dtypes, shard
            )
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        loss, parts = sums[0].clone(), sums[1:].clone()
        ctx.mark_non_differentiable(parts, nll)
        return loss, parts, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The saved gradients times ``grad_loss``; in place unless the graph is kept for another backward."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        out: list[Tensor | None] = []
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if grad is not None:
                scaled = grad * grad_loss.to(grad.dtype) if keep else grad.mul_(grad_loss.to(grad.dtype))
                grad = scaled.to(dtype)
            out.append(grad)
        return (*out, None, None, None, None, None, None)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    options: LossOptions,
    chunk_tokens: int | None,
    wanted: list[bool],
    dtypes: tuple[torch.dtype, torch.dtype],
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """``[loss, nll, z, correct]`` as one tensor, each row's nll, and the gradients of hidden, weight and bias where
    wanted."""
    want_hidden, want_weight, want_bias = wanted
    product, total = dtypes
    want_grad = any(wanted)
    device, vocab = hidden.device, weight.shape[0]
    weights = weights.to(total)
    kept = None
    if device.type == "cpu" and not bool(weights.all()):  # elsewhere looking would stall the queue
        kept = weights.nonzero().squeeze(1)
        targets, weights = targets[kept], weights[kept]
    rows = targets.shape[0]
    columns = vocab if shard is None else shard.widest
    chunk = min(chunk_tokens, max(rows, 1)) if chunk_tokens else chunk_rows(rows, columns, total.itemsize)
    products = _Products(weight, bias, options.scale, product, total)
    loss_of_rows = _row_loss_for(device, total) if shard is None else shard.row_loss

    empty = rows == 0
    buffer = hidden.new_empty(0 if products.mixed or empty else chunk, vocab, dtype=total)
    grad_buffer = hidden.new_empty(chunk, vocab, dtype=product) if products.mixed and want_grad else None
    grad_hidden = hidden.new_empty(rows, hidden.shape[1]) if want_hidden else None
    grad_weight = weight.new_empty(weight.shape, dtype=total) if want_weight else None
    grad_bias = weight.new_zeros(vocab, dtype=total) if want_bias else None
    if grad_weight is not None and empty:
        grad_weight.zero_()
    terms = hidden.new_empty(4, rows, dtype=total)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        h = (hidden[part] if kept is None else hidden.index_select(0, kept[part])).to(product)
        y = products.logits(h, buffer)
        g = None if not want_grad else y if grad_buffer is None else grad_buffer[: y.shape[0]]
        terms[:, part] = loss_of_rows(y, targets[part], weights[part], options, g)
        if g is None:
            continue
        if grad_hidden is not None:
            products.hidden_grad(g, grad_hidden[part])
        if grad_weight is not None:
            products.add_weight_grad(g, h, grad_weight, first=start == 0)
        if grad_bias is not None:
            grad_bias.add_(g.sum(0, dtype=total))
    if grad_hidden is not None and kept is not None:
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, kept, grad_hidden)

    nll, lse, smooth, hit = terms
    s = options.label_smoothing
    z = options.z_loss * lse.square()
    ce = (1 - s) * nll + s * smooth if s else nll
    sums = torch.stack((ce + z, nll, z, hit)) @ weights
    if kept is not None:
        nll = nll.new_zeros(hidden.shape[0]).index_copy_(0, kept, nll)
    else:  # elsewhere than on the CPU, rows of weight 0 were computed too
        nll = nll.masked_fill(weights == 0, 0.0)
    return sums, nll, [grad_hidden, grad_weight, grad_bias]
