"""The decoder: pre-norm transformer with RMSNorm (arXiv:1910.07467), RoPE (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245) and SwiGLU (arXiv:2002.05202), dense or with experts: the Llama, Mistral and Qwen families.

``x += o(attention(rope(q(n(x))), rope(k(n(x))), v(n(x))))`` then ``x += down(silu(gate(n(x))) * up(n(x)))`` per block.

q, k, v and gate, up are separate matrices, as in the released weights: an optimizer that orthogonalises (Muon) must not
mix them, tensor parallelism cuts each by heads, adapters and quantizers name them one by one. Names of parameters:

- ``embed.weight``, ``norm.weight``, and ``head.weight`` unless the head is tied to ``embed.weight``
- ``blocks.N.attn_norm.weight``, ``blocks.N.mlp_norm.weight``
- ``blocks.N.attn.{q,k,v,o}.{weight,bias}``, ``blocks.N.attn.{q,k}_norm.weight``
- ``blocks.N.mlp.{gate,up,down}.weight``, or ``blocks.N.mlp.router.weight`` and stacked ``blocks.N.mlp.{gate,up,down}``
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.core.distributed import all_reduce_sum
from trainwright.core.errors import ModelError
from trainwright.core.params import Role, guess_roles
from trainwright.models.architecture import Architecture
from trainwright.models.attention import AttentionPlan, attention, plan_attention
from trainwright.models.base import Head, Hidden, LanguageModel
from trainwright.models.cache import KVCache
from trainwright.models.flops import frozen_correction
from trainwright.models.moe import MoE, load_metrics, tokens_there
from trainwright.models.ops import apply_rope, rms_norm, swiglu
from trainwright.models.rope import RotaryTables

INIT_STD = 0.02


def head_logits(hidden: Hidden) -> Tensor:
    """Logits ``[B, T, V]`` of a :class:`Hidden`: its states through its head."""
    head = hidden.head
    if hasattr(head.weight, "device_mesh"):
        logits = _gathered_logits(hidden.states, head.weight)
    else:
        logits = F.linear(hidden.states, head.weight)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.bias is not None:
        logits = logits + head.bias
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def _gathered_logits(states: Tensor, weight: Any) -> Tensor:
    """Of a head that ranks hold by vocabulary; without gradients, the loss needs none of it."""
    from torch.distributed.tensor import DTensor, Shard

    local = F.linear(states, weight.to_local())
    shape = torch.Size([*local.shape[:-1], weight.shape[0]])
    stride = torch.empty(shape, device="meta").stride()
    cut = DTensor.from_local(
        local, weight.device_mesh, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
    return cut.full_tensor()


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention. The number of heads is read from the projections, so a shard of them works too."""

    def __init__(self, arch: Architecture, layer: int):
        super().__init__()
        self.head_dim, self.layer, self.window = arch.head_dim, layer, arch.window(layer)
        self.q = nn.Linear(arch.dim, arch.n_heads * arch.head_dim, bias=arch.qkv_bias)
        self.k = nn.Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.qkv_bias)
        self.v = nn.Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.qkv_bias)
        self.o = nn.Linear(arch.n_heads * arch.head_dim, arch.dim, bias=arch.out_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.attend: Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor] = attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: KVCache | None = None) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)  # [B, T, H, hd]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if cache is not None:
            k, v = cache.update(self.layer, k, v, self.window)
        return self.o(self.attend(q, k, v, plan).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    """One layer, ``[B, T, D] -> [B, T, D]``. ``cos, sin [B or 1, T, hd]``; ``plan`` says who sees whom."""

    def __init__(self, arch: Architecture, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.attn = Attention(arch, layer)
        self.mlp_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.mlp: nn.Module = self._make_mlp(arch)
        self.dropout = arch.dropout

    def _make_mlp(self, arch: Architecture) -> nn.Module:
        return MLP(arch.dim, arch.ffn_dim)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: KVCache | None) -> Tensor:
        return x + self._drop(self.attn(self.attn_norm(x), cos, sin, plan, cache))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, cache: KVCache | None = None) -> Any:
        x = self._attend(x, cos, sin, plan, cache)
        return x + self._drop(self.mlp(self.mlp_norm(x)))


class MoEBlock(Block):
    """As :class:`Block`, with experts; returns ``x``, the balancing loss (scalar) and the expert counts ``[E]``, the
    last two of the tokens ``there`` (bool ``[B, T]``; None: all).

    They are results, not side effects, so that recomputation in activation checkpointing does not count a token twice.
    """

    def _make_mlp(self, arch: Architecture) -> nn.Module:
        return MoE(
            arch.dim,
            arch.moe_ffn_dim,
            arch.n_experts,
            arch.n_experts_per_token,
            score=arch.router_score,
            normalise=arch.router_normalise,
            bias_balanced=arch.balance == "bias",
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: AttentionPlan,
        cache: KVCache | None = None,
        there: Tensor | None = None,
    ) -> Any:
        x = self._attend(x, cos, sin, plan, cache)
        y, balance, counts = self.mlp(self.mlp_norm(x), there)
        return x + self._drop(y), balance, counts


class Decoder(LanguageModel):
    """A decoder of ``arch``. Weights are uninitialised until :meth:`init_weights` or a checkpoint fills them.

    Can be made on the meta device, sharded, moved with ``to_empty`` and initialised there.
    """

    def __init__(self, arch: Architecture):
        super().__init__()
        self.arch = arch
        self.vocab_size, self.max_seq_len = arch.vocab_size, arch.max_seq_len
        self.embed = nn.Embedding(arch.vocab_size, arch.dim)
        layers = range(arch.n_layers)
        self.blocks = nn.ModuleList(MoEBlock(arch, i) if arch.is_moe(i) else Block(arch, i) for i in layers)
        self.norm = RMSNorm(arch.dim, arch.norm_eps)
        self.head = None if arch.tie_embeddings else nn.Linear(arch.dim, arch.vocab_size, bias=False)
        self.rope = RotaryTables(arch.head_dim, arch.rope_theta, arch.rope_scaling, arch.max_seq_len)
        self.exits: Any = None  # early ones, an EarlyExits: models/early_exit.py
        # With ``attend`` of the attention modules, what context parallelism puts its own in place of.
        self.plan_attention: Callable[[Tensor | None, int, int, int, torch.device], Any] = plan_attention
        # What came with a Hugging Face folder and goes out with it again: file name -> text.
        self.hf_files: dict[str, str] = {}

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights from torch's global generator: normal with std 0.02, and 0.02 / sqrt(2 * n_layers) for the
        two projections of a block that write to the residual stream, so that its variance does not grow with depth
        (GPT-2). Norms are 1, biases 0."""
        residual = INIT_STD / math.sqrt(2 * self.arch.n_layers)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, MoE):
                for weight, std in ((module.gate, INIT_STD), (module.up, INIT_STD), (module.down, residual)):
                    nn.init.normal_(weight, std=std)
                if module.expert_bias is not None:
                    module.expert_bias.zero_()
        for block in self.blocks:
            nn.init.normal_(block.attn.o.weight, std=residual)  # type: ignore[union-attr, arg-type]
            if isinstance(block.mlp, MLP):
                nn.init.normal_(block.mlp.down.weight, std=residual)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty key-value cache for ``capacity`` tokens a row, to be passed as ``cache``."""
        if capacity > self.max_seq_len:
            raise ModelError(f"a cache of {capacity} tokens exceeds the model's max_seq_len={self.max_seq_len}")
        return KVCache(self.arch.n_layers, capacity)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cache: Any = None,
        head_fn: Callable[[Hidden], Any] | None = None,
    ) -> Any:
        """See :class:`LanguageModel`. With a cache, ``tokens`` follow those that it holds, ``positions`` default to the
        slots, and ``doc_ids=None`` continues each row's last document. Raises ModelError beyond ``max_seq_len``."""
        batch, length = tokens.shape
        total = length if cache is None else cache.length + length
        if total > self.max_seq_len:
            raise ModelError(f"{total} tokens exceed the model's max_seq_len={self.max_seq_len}")
        windows = set(self.arch.windows) or {0}
        if cache is None:
            cos, sin = self.rope(positions, length, tokens.device)
            plans = {w: self.plan_attention(doc_ids, batch, length, w, tokens.device) for w in windows}
        else:
            if positions is None and cache.length:
                positions = torch.arange(cache.length, total, device=tokens.device).unsqueeze(0)
            cache.extend(tokens, doc_ids)
            # One table for the whole of a generation, also where it depends on the length.
            cos, sin = self.rope(positions, cache.capacity, tokens.device)
            if positions is None:
                cos, sin = cos[:, :length], sin[:, :length]
            plans = {w: cache.plan(length, w) for w in windows}

        x = self.embed(tokens)  # [B, T, D]
        there = tokens_there(doc_ids) if self.arch.n_experts and cache is None else None
        losses: list[Tensor] = []
        counts: list[Tensor] = []
        taken: dict[int, Tensor] = {}  # the stream at early exits
        for i, block in enumerate(self.blocks):
            if self.exits is not None and self.exits.has(i):
                taken[i] = x
            more = (there,) if self.arch.is_moe(i) else ()
            x = block(x, cos, sin, plans[self.arch.window(i)], cache, *more)
            if self.arch.is_moe(i):
                x, loss, count = x
                losses.append(loss)
                counts.append(count)
                if self.arch.balance == "bias" and self.training and torch.is_grad_enabled():
                    self._moe(block).count_load(count)
        hidden = Hidden(self.norm(x), self._head())
        if self.exits is not None and head_fn is not None:
            taken[len(self.blocks)] = x
            hidden.exits = [self.exits.at(p, taken[p], hidden.head) for p in map(int, self.exits)]
        if losses and self.arch.balance == "aux_loss":
            hidden.aux_loss = torch.stack(losses).mean() * self.arch.aux_loss_coefficient
        if counts and head_fn is not None:
            hidden.metrics = load_metrics(counts)
        return head_logits(hidden) if head_fn is None else head_fn(hidden)

    def _head(self) -> Head:
        return Head(self.embed.weight if self.head is None else self.head.weight)

    @staticmethod
    def _moe(block: nn.Module) -> MoE:
        """The experts of a block that may be wrapped (activation checkpointing)."""
        return next(m for m in block.modules() if isinstance(m, MoE))

    @torch.no_grad()
    def update_balancing(self) -> None:
        """After the optimizer's step: move the expert biases by the load of the step, over micro-batches and ranks.

        A collective in a distributed run. Nothing to do unless ``balance`` is "bias"."""
        if self.arch.balance != "bias":
            return
        experts = [m for m in self.modules() if isinstance(m, MoE)]
        none = torch.zeros(self.arch.n_experts, dtype=torch.int64, device=self.embed.weight.device)
        loads = all_reduce_sum(torch.stack([none if m.load is None else m.load for m in experts]))
        for moe, load in zip(experts, loads, strict=True):
            moe.update_bias(load, self.arch.bias_update_rate)
            moe.load = None

    def param_roles(self) -> dict[str, Role]:
        roles = guess_roles(self)
        routers = {id(m.router.weight) for m in self.modules() if isinstance(m, MoE)}
        heads = [] if self.head is None else [self.head.weight]
        heads += [] if self.exits is None else self.exits.own_heads()
        for name, param in self.named_parameters():
            if id(param) in routers:
                roles[name] = "router"
            elif any(param is head for head in heads):
                roles[name] = "head"
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        arch = self.arch
        pairs = [12.0 * arch.n_heads * arch.head_dim * arch.attended(i, seq_len) for i in range(arch.n_layers)]
        head = self.embed.weight if self.head is None else self.head.weight
        exits = 0.0 if self.exits is None else self.exits.flops_per_token(arch)
        return arch.flops_per_token(seq_len) + frozen_correction(self, head, arch.n_experts_per_token, pairs) + exits
