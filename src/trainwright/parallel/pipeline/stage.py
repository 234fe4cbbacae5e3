"""Stages cut out of a whole decoder, and what a rank has of it: the parameters keep their names.

The first stage has the embedding, the last one norm and head, each its layers. Between them goes the residual stream
``[b, T, D]``; with experts also the sum of their balancing losses so far, through which the gradient comes back, and
their counts ``[layers, E]`` for the log. The last stage calls the objective, unchanged, with a stand-in for the model
that has the final states ready, so that the head is used inside ``forward``, where FSDP has gathered it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum
from trainwright.core.errors import ConfigError
from trainwright.core.params import Role
from trainwright.models.base import Head, Hidden, LanguageModel
from trainwright.models.decoder import Decoder, head_logits
from trainwright.models.early_exit import EarlyExits, Exit
from trainwright.models.moe import MoE, load_metrics, tokens_there
from trainwright.objectives.base import Loss, Objective
from trainwright.parallel.domino import Stream, join
from trainwright.parallel.domino_decoder import domino_of
from trainwright.parallel.pipeline.early_exit import exit_loss


@dataclass
class Work:
    """What the stages of a rank are at: micro-batches by number, and what the last stage made of them."""

    objective: Objective
    micro_batches: list[Batch]
    precision: Any
    losses: dict[int, Loss] = field(default_factory=dict)
    exit_losses: list[Loss] = field(default_factory=list)  # of the early exits here
    exit_scales: list[Tensor] = field(default_factory=list)  # by micro-batch, what multiplies those for the gradient
    shallow: frozenset[int] = frozenset()  # micro-batches that go no further than the last exit here


class Stage(nn.Module):
    """Some layers of a :class:`Decoder`, with what comes before or after them. Shares its modules.

    ``own_head``  the first stage lies on this rank too: the tied head is a copy of its embedding, see ``tied.py``
    """

    def __init__(self, model: Decoder, layers: range, *, first: bool, last: bool, own_head: bool = False):
        super().__init__()
        arch = model.arch
        self.arch, self.layers, self.first, self.last = arch, layers, first, last
        self.own_head = own_head
        self.moe_layers = [i for i in range(arch.n_layers) if arch.is_moe(i)]
        tied = last and model.head is None
        # An exit in front of a layer is the one behind the layer before.
        self.exits: EarlyExits | None = None
        if model.exits is not None:
            self.exits = model.exits.subset([*layers, *([arch.n_layers] if last else [])])
        shares = self.exits is not None and self.exits.settings.tied
        tied = tied or (shares and model.head is None)
        self.embed = model.embed if first or (tied and not own_head) else None
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in layers})
        self.norm = model.norm if last else None
        own = _HeadCopy(model.embed.weight) if own_head else None
        self.head: nn.Module | None = own or (model.head if last or shares else None)
        self.taken: dict[int, list[Exit]] = {}  # of micro-batches that are under way
        self.rope, self.plan_attention = model.rope, model.plan_attention
        self.dtype = model.embed.weight.dtype  # of the residual stream between stages
        self.wide = torch.promote_types(self.dtype, torch.float32)  # of the balancing losses
        self.work: Work | None = None

    def stream(self, rows: int, length: int, grad: bool) -> tuple[Tensor, ...]:
        """What one stage hands to the next of a micro-batch ``[rows, length]``, on the meta device."""
        tp = self._tensor_parallel()
        if tp is not None and tp.sequence:
            length = -(-length // tp.mesh.size())
        x = torch.empty(rows, length, self.arch.dim, dtype=self.dtype, device="meta", requires_grad=grad)
        if not self.moe_layers:
            return (x,)
        grad = grad and self.arch.balance == "aux_loss"
        balance = torch.empty(1, dtype=self.wide, device="meta", requires_grad=grad)
        counts = torch.empty(len(self.moe_layers), self.arch.n_experts, dtype=torch.int64, device="meta")
        return x, balance, counts

    def forward(self, *stream: Tensor, index: int) -> Any:
        """The stream behind this stage for micro-batch ``index``; of the last stage, the sum of its loss."""
        assert self.work is not None
        micro = self.work.micro_batches[index]
        with self.work.precision.autocast():
            x, balance, counts = self._layers(micro, *stream, index=index)
            if isinstance(x, Stream) and not self.last:  # the last norm waits for its chunks itself
                x = join(x)
            if index in self.taken and not torch.is_grad_enabled():
                self.work.exit_losses += [exit_loss(self.work.objective, e, micro)[1] for e in self.taken.pop(index)]
            if not self.last:
                x = x.to(self.dtype).contiguous()
                # The schedule detaches in place what it sends: of a stage without experts, not what it received.
                return (x, balance.clone(), counts.clone()) if self.moe_layers else x
            assert self.norm is not None
            hidden = Hidden(self.norm(x), self._head())
            if self.moe_layers:
                if self.arch.balance == "aux_loss":
                    hidden.aux_loss = balance[0] / len(self.moe_layers) * self.arch.aux_loss_coefficient
                hidden.metrics = load_metrics(list(counts))
            loss = self.work.objective(_Finished(self, micro, hidden), micro)  # type: ignore[arg-type]
        self.work.losses[index] = Loss(
            loss.sum.detach(), loss.weight, {name: value.detach() for name, value in loss.metrics.items()}
        )
        # The schedule detaches in place what it gets, and the objective may have kept its own.
        return loss.sum.clone()

    def _layers(
        self, micro: Batch, x: Any = None, balance: Any = None, counts: Any = None, *, index: int = 0
    ) -> tuple[Any, Tensor, Tensor]:
        batch, length = micro.tokens.shape
        device = micro.tokens.device
        tp = self._tensor_parallel()
        if tp is not None:
            tp.length = length
        if self.first:
            assert self.embed is not None
            x = self.embed(micro.tokens)
            balance = torch.zeros(1, dtype=self.wide, device=device)
            counts = torch.zeros(len(self.moe_layers), self.arch.n_experts, dtype=torch.int64, device=device)
        assert x is not None and self.work is not None
        domino = domino_of(self.blocks[str(self.layers[0])])
        if domino is not None and not self.first:
            x = domino.split(x)
        exits = self.exits
        if exits is not None:
            x = x.detach() if exits.settings.frozen else x
            self.taken[index] = []
        left = 0 if exits is None else len(exits)
        cos, sin = self.rope(micro.positions, length, device)
        windows = sorted({self.arch.window(i) for i in self.layers})
        plans = {w: self.plan_attention(micro.doc_ids, batch, length, w, device) for w in windows}
        there = tokens_there(micro.doc_ids) if self.moe_layers else None
        for i in self.layers:
            left -= self._take(index, i, x)
            if not left and index in self.work.shallow:
                return x, balance, counts
            block = self.blocks[str(i)]
            more = (there,) if self.arch.is_moe(i) else ()
            x = block(x, cos, sin, plans[self.arch.window(i)], None, *more)
            if not self.arch.is_moe(i):
                continue
            x, loss, count = x
            balance = balance + (loss if self.arch.balance == "aux_loss" else loss.detach())
            row = torch.tensor([self.moe_layers.index(i)], device=device)
            counts = counts.index_copy(0, row, count.unsqueeze(0).to(counts.dtype))
            if self.arch.balance == "bias" and block.training and torch.is_grad_enabled():
                _experts(block).count_load(count)
        if self.last:
            self._take(index, self.arch.n_layers, x)
        return x, balance, counts

    def _take(self, index: int, position: int, x: Tensor) -> int:
        """Keep the stream for the exit at ``position``; the number of exits there."""
        if self.exits is None or not self.exits.has(position):
            return 0
        head = self._head() if self.exits.settings.tied else None  # else this stage may have none
        self.taken[index].append(self.exits.at(position, x, head))
        return 1

    def _head(self) -> Head:
        module: Any = self.embed if self.head is None else self.head
        return Head(module.weight)

    def _tensor_parallel(self) -> Any:
        """How the ranks that share these layers pass tokens, see parallel/tensor.py; None: nobody does."""
        block: Any = self.blocks[str(self.layers[0])]
        return getattr(block.attn_norm, "_tp", None)


class _HeadCopy(nn.Module):
    """A tied head beside the embedding that it is tied to: FSDP can wrap a parameter in one stage only."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


class _Finished:
    """Stands in for the model of a micro-batch that has gone through all layers."""

    def __init__(self, stage: Stage, micro: Batch, hidden: Hidden):
        self.vocab_size, self.max_seq_len = stage.arch.vocab_size, stage.arch.max_seq_len
        self.training = next(iter(stage.blocks.values())).training
        self._micro, self._hidden = micro, hidden

    def __call__(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        doc_ids: Tensor | None = None,
        cache: Any = None,
        head_fn: Callable[[Hidden], Any] | None = None,
    ) -> Any:
        micro = self._micro
        if tokens is not micro.tokens or positions is not micro.positions or doc_ids is not micro.doc_ids or cache:
            raise ConfigError(
                "a pipeline passes each micro-batch through the model once, as it is, and this objective asks for "
                "something else; use dp_shard, or another objective",
                key="parallel.pp",
            )
        return head_logits(self._hidden) if head_fn is None else head_fn(self._hidden)

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"the objective looks at the model's {name}, and a pipeline has only some layers on each rank; use "
            "dp_shard, or another objective",
            key="parallel.pp",
        )


class StageModel(LanguageModel):
    """What this rank holds of a decoder, under the names of the whole. Not to be called: see :class:`Stage`.

    A tied weight comes as ``embed.weight`` on the first stage's and on the last stage's rank.
    """

    blocks: nn.ModuleDict  # type: ignore[assignment]

    def __init__(self, model: Decoder, stages: list[Stage]):
        super().__init__()
        self.arch, self.vocab_size, self.max_seq_len = model.arch, model.vocab_size, model.max_seq_len
        embed = next((s.embed for s in stages if s.embed is not None), None)
        if embed is not None:
            self.embed = embed
        self.blocks = nn.ModuleDict({key: block for s in stages for key, block in s.blocks.items()})
        self.exits: EarlyExits | None = None
        self.exit_settings = None if model.exits is None else model.exits.settings  # of all stages' exits
        for stage in stages:
            if stage.last:
                self.norm = stage.norm
            if stage.head is not None and not stage.own_head:
                self.head = stage.head
            if stage.exits is not None:
                self.exits = stage.exits
        mine = dict(self.named_parameters())
        self._roles = {name: role for name, role in model.param_roles().items() if name in mine}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a rank of a pipeline has some layers only: run its stages")

    def param_roles(self) -> dict[str, Role]:
        return dict(self._roles)

    def flops_per_token(self, seq_len: int) -> float:
        """Of the whole model, all of it trained."""
        return self.arch.flops_per_token(seq_len)

    @torch.no_grad()
    def update_balancing(self) -> None:
        """As that of the whole model. A collective over all ranks, which hold the loads of different layers."""
        if self.arch.balance != "bias" or not self.arch.n_experts:
            return
        device = next(self.parameters()).device
        loads = torch.zeros(self.arch.n_layers, self.arch.n_experts, dtype=torch.int64, device=device)
        mine = {int(key): _experts(block) for key, block in self.blocks.items() if self.arch.is_moe(int(key))}
        for i, moe in mine.items():
            if moe.load is not None:
                loads[i] = moe.load
        loads = all_reduce_sum(loads)
        for i, moe in mine.items():
            moe.update_bias(loads[i], self.arch.bias_update_rate)
            moe.load = None


def _experts(block: nn.Module) -> MoE:
    return next(m for m in block.modules() if isinstance(m, MoE))
