"""Mixture of experts: top-k routing, stacked experts computed in groups, and two ways to keep their load even.

Token t with scores s_t (softmax of the router's logits, or their sigmoid) goes to the k experts with the largest
``s_t + b``; the outputs are summed with weights s_t of the chosen ones, divided by their sum where the family does so.

- auxiliary loss (arXiv:2101.03961, as Mixtral and Qwen use it): ``E * sum_e f_e * P_e`` per layer, with f_e the
  assignments to expert e over the number of tokens (they sum to k) and P_e the mean score; averaged over layers. Where
  ranks have a micro-batch's tokens together, f and P are those of all of them (``summed``).
- bias (arXiv:2408.15664): after each step ``b_e += rate * sign(mean load - load_e)``; no gradient is disturbed.

Padding goes through experts as tokens do, for shapes that are known beforehand, but no figure counts it: f and P are of
the tokens that are there, as transformers has it with an attention mask, and so is the load that the bias goes by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.models.ops import swiglu


def tokens_there(doc_ids: Tensor | None) -> Tensor | None:
    """bool like ``doc_ids [B, T]``: False where it is below 0, which is padding; None: nowhere."""
    if doc_ids is None:
        return None
    there = doc_ids >= 0
    return None if there.device.type == "cpu" and bool(there.all()) else there  # elsewhere looking would wait for it


class MoE(nn.Module):
    """``x [B, T, D]`` -> output ``[B, T, D]``, balancing loss (scalar, unscaled), expert counts ``[E]``. The last two
    are of the tokens ``there`` (bool ``[B, T]``; None: all slots).

    Scores are float32, of a float64 model float64."""

    expert_bias: Tensor | None

    def __init__(
        self, dim: int, ffn_dim: int, n_experts: int, top_k: int, *, score: str, normalise: bool, bias_balanced: bool
    ):
        super().__init__()
        self.top_k, self.score, self.normalise = top_k, score, normalise
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.gate = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(n_experts, dim, ffn_dim))
        bias = torch.zeros(n_experts, dtype=torch.float32) if bias_balanced else None
        self.register_buffer("expert_bias", bias)
        # Sums a tensor over the ranks that have the tokens of this micro-batch together; None: they are all here.
        self.summed: Callable[[Tensor], Tensor] | None = None
        # Assignments since the last update_bias(). No buffer: DDP broadcasts those from rank 0 at every forward.
        self.load: Tensor | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            # Steps of 0.001 vanish in bfloat16: the bias stays float32 whatever the model is cast to.
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, x: Tensor, there: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])  # [N, D]
        logits = self.router(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [N, E]
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        experts = choice.topk(self.top_k, dim=-1).indices  # [N, k]
        weights = scores.gather(1, experts)  # [N, k]
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if self.score == "sigmoid" else 0.0))

        flat = experts.flatten()  # [N * k]
        counts = F.one_hot(flat, self.router.weight.shape[0]).sum(0)  # [E]; bincount would sync on CUDA
        order = flat.argsort(stable=True)  # assignments, expert by expert
        rows = x.index_select(0, order // self.top_k)  # [N * k, D]
        out = self._experts(rows, counts)  # [N * k, D]
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        out = out.index_select(0, place).view(-1, self.top_k, shape[-1])  # [N, k, D]
        y = (out * weights.to(out.dtype).unsqueeze(-1)).sum(dim=1)

        return y.view(shape), *self._balance(scores, experts, counts, self._there(there, shape, scores.device))

    def _balance(self, scores: Tensor, experts: Tensor, counts: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        """The balancing loss of ``scores [N, E]``, choices ``experts [N, k]`` and ``counts [E]``; and the counts of
        all tokens of the micro-batch. ``there``: bool ``[N]``."""
        # Sigmoid scores do not sum to one; the loss compares shares.
        share = scores / scores.sum(dim=-1, keepdim=True) if self.score == "sigmoid" else scores
        tokens: Any = scores.shape[0]
        if there is not None:
            share, tokens = share * there.unsqueeze(1).to(share.dtype), there.sum()
            counts = (F.one_hot(experts, scores.shape[1]) * there.view(-1, 1, 1)).sum((0, 1))
        total = share.sum(0)
        if self.summed is not None and self.expert_bias is None:  # else nobody uses the loss
            number = torch.as_tensor(tokens, dtype=total.dtype, device=total.device).view(1)
            figures = self.summed(torch.cat([total, counts.to(total.dtype), number]))
            total, whole, number = figures.split([len(counts), len(counts), 1])
            counts, tokens = whole.detach().to(counts.dtype), number.detach()
        if isinstance(tokens, Tensor):
            tokens = tokens.clamp(min=1)  # a micro-batch may be all padding
        shares = counts.to(total.dtype) / tokens  # f
        return counts.numel() * (shares * (total / tokens)).sum(), counts.detach()

    def _there(self, there: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
        """bool ``[N]``: which slots of ``x [B, T, D]``, what this rank has of the micro-batch, hold one of the tokens
        ``there``; None: all do."""
        return None if there is None else there.flatten()

    def summed_also(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Have ``summed`` called besides what is called already."""
        inner = self.summed
        self.summed = summed if inner is None else lambda x: summed(inner(x))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """``gate, up [E, F, D]`` and ``down [E, D, F]`` as they are multiplied with."""
        return self.gate, self.up, self.down

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate, up, down = self._weights()
        device = rows.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            rows, gate, up, down = (t.to(dtype) for t in (rows, gate, up, down))
        if device == "cuda" and rows.dtype == torch.bfloat16:
            ends = counts.cumsum(0, dtype=torch.int32)

            def grouped(x: Tensor, w: Tensor) -> Tensor:
                return F.grouped_mm(x, w.transpose(1, 2), offs=ends)

            return grouped(swiglu(grouped(rows, gate), grouped(rows, up)), down)
        hidden = swiglu(grouped_linear(rows, gate, counts), grouped_linear(rows, up, counts))
        return grouped_linear(hidden, down, counts)

    @torch.no_grad()
    def count_load(self, counts: Tensor) -> None:
        """Add assignments ``counts [E]`` of a forward pass to the load of the current step."""
        self.load = counts if self.load is None else self.load + counts

    @torch.no_grad()
    def update_bias(self, load: Tensor, rate: float) -> None:
        """Lower the bias of experts above the mean ``load [E]`` and raise the others', by ``rate``."""
        if self.expert_bias is not None:
            load = load.to(self.expert_bias)
            self.expert_bias += rate * torch.sign(load.mean() - load)


@torch.library.custom_op("trainwright::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """``x_e @ w[e].T`` -> ``[M, N]`` for ``w [E, N, K]`` and rows ``x [M, K]`` expert by expert, ``counts[e]`` of each.

    A matrix product per expert; reads ``counts`` on the host. Its own operator because autograd through ``w[e]`` would
    make a whole ``[E, N, K]`` gradient for each expert, and because the compiler cannot look into ``counts``.
    """
    sizes = counts.tolist()
    out = x.new_empty(x.shape[0], w.shape[1])
    for xe, we, oe in zip(x.split(sizes), w, out.split(sizes), strict=True):
        torch.mm(xe, we.t(), out=oe)
    return out


@torch.library.custom_op("trainwright::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(grad: Tensor, x: Tensor, w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    sizes = counts.tolist()
    grad = grad.contiguous()
    dx, dw = x.new_empty(x.shape), w.new_empty(w.shape)
    for xe, ge, dxe, we, dwe in zip(x.split(sizes), grad.split(sizes), dx.split(sizes), w, dw, strict=True):
        torch.mm(ge, we, out=dxe)
        torch.mm(ge.t(), xe, out=dwe)
    return dx, dw


@grouped_linear.register_fake
def _(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@_grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), w.new_empty(w.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_grouped_linear_backward(grad, *ctx.saved_tensors), None


grouped_linear.register_autograd(_gradients, setup_context=_save)


@torch.no_grad()
def load_metrics(counts: list[Tensor]) -> dict[str, Tensor]:
    """Means over layers of the load's entropy (1 = even) and of the busiest expert's share of assignments."""
    load = torch.stack(counts).float()  # [layers, E]
    share = load / load.sum(dim=1, keepdim=True).clamp(min=1)  # a micro-batch may be all padding
    entropy = torch.special.entr(share).sum(dim=1) / torch.log(torch.tensor(float(load.shape[1])))
    return {"moe/load_entropy": entropy.mean(), "moe/max_load_fraction": share.amax(dim=1).mean()}
