"""Early exits under pipeline parallelism: exact gradients without further messages, and micro-batches in the bubbles.

Stage k holds the exits in front of its layers (one behind the last layer of the stage before is in front of its first:
same stream, and the earlier stages have the longer wait) and gets g_k, the gradient of what it has sent. It goes
backward from

    L_k = sum_{exits p in k} w_p CE(y_p) + <g_k, x_k>          g_k constant

which by the chain rule is the gradient of the whole loss; what it hands back is that of all behind it, its own exits
included. The logits of an exit are made when its micro-batch goes backward: one ``[b T, V]`` (here: one chunk of it) is
alive, not one for each micro-batch under way. The exit goes backward first, down to the stream, and its gradient there
joins g_k, so that layers are gone through once. Exits that share the unembedding (tied) hold it on each of their ranks,
which add their gradients up with that of the last stage, and of the first where it is the embedding. Tensor parallelism
cuts exits as it cuts the rest (parallel/tensor.py); its ranks go through them, and add up, in the same order.

**Bubble filling.** While stage r waits for the first gradient, beta (P - r - 1) - r units of a forward pass are idle:
it takes further micro-batches through the first stages alone (forward, and backward from their exits). At the end
beta r are idle, and the last micro-batches go backward through the last stages alone. beta = backward / forward:

    warm-up    c_r = max(0, min(K1, int((beta (P - r - 1) - r) / (1 + beta))))
    cool-down  d_r = max(0, min(K2, int(beta r / (1 + beta))))

Of a step's M micro-batches F go through everything. With W_F, W_k, W_r the loss weights of these, of the partial ones
that reach the exits of stage k in warm-up, and of those that stage r takes backward in cool-down, the gradient is

    grad_r = W_F / (W_F + W_r) [ sum_{F, warm-up} dL_k / (W_F + W_k) + sum_{cool-down} dL_k / W_F ]     over k >= r

whose expectation is that of the exact one, each loss in each stage being normalised by the tokens that it has seen
there; ordinary losses have W_k = W_r = 0, and micro-batches that are all alike give the exact gradient.

EE-LLM, arXiv:2312.04916. Where this differs from the released code: counts are clamped at 0; one count does not scale
all gradients; a stage first receives the whole micro-batch that the stage before has sent ahead of the partial ones
(there, messages are paired by order, and the stage before is one forward pass ahead); partial micro-batches that would
reach no exit are whole ones; micro-batches that no bubble has room for are, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainwright.core.batch import Batch
from trainwright.core.distributed import local_tensor
from trainwright.models.early_exit import Exit
from trainwright.objectives.base import Loss
from trainwright.parallel.pipeline.fill import FillPlan

# -- a stage's exits --------------------------------------------------------------------------------------------------


def exit_loss(objective: Any, early: Exit, micro: Batch) -> tuple[Tensor, Loss]:
    """The weighted loss of an exit, and the same for the log."""
    total, figures = objective.exit_loss(early, micro)
    total = early.weight * total
    logged = {name: value.detach() for name, value in figures.items()}
    return total, Loss(total.detach(), micro.weight(), logged)


class ExitStage(PipelineStage):
    """A stage whose module may have early exits: their losses go backward with its micro-batch."""

    _chunk = 0

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **named: Any) -> Any:
        """Tells the module which micro-batch it is at."""
        return super().forward_one_chunk(fwd_chunk_id, args, {"index": fwd_chunk_id}, *more, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._chunk = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False) -> Any:
        module: Any = self.submod
        if module.exits is None:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        out, grads = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
        out = out if isinstance(out, tuple) else (out,)
        grads = (None,) * len(out) if grads is None else tuple(grads)
        early = self._exits(self._chunk)
        roots, given = (*out, *(x for x, _ in early)), (*grads, *(g for _, g in early))
        if not any(t.requires_grad for t in roots):  # of a frozen model
            return tuple(None for _ in bwd_kwargs["input_values"]), None
        more = {**bwd_kwargs, "stage_output": roots, "output_grads": given}
        return super().backward_maybe_with_nosync(backward_type, more, last_backward)

    def backward_from_exits(self, chunk: int) -> None:
        """In place of ``backward_one_chunk`` for a micro-batch that goes no further than this stage."""
        _, inputs = self.fwd_cache.pop(chunk)
        self._chunk = chunk
        kwargs = {"stage_output": (), "output_grads": (), "input_values": inputs}
        grads, _ = self.backward_maybe_with_nosync("full", kwargs)
        count = 0 if self.is_first else len(self.args_recv_info[chunk])
        self.bwd_cache[chunk] = grads[:count]

    def _exits(self, chunk: int) -> list[tuple[Tensor, Tensor]]:
        """The exits of micro-batch ``chunk``, gone backward down to the stream: it, and the gradient there."""
        module: Any = self.submod
        work = module.work
        found = []
        for early in module.taken.pop(chunk):
            x = early.x.detach().requires_grad_(early.x.requires_grad)
            with torch.enable_grad(), work.precision.autocast():
                total, logged = exit_loss(work.objective, replace(early, x=x), work.micro_batches[chunk])
            if total.requires_grad:
                (total * work.exit_scales[chunk].to(total.dtype)).backward()
            work.exit_losses.append(logged)
            if x.grad is not None:
                found.append((early.x, x.grad))
        return found


# -- bubbles ----------------------------------------------------------------------------------------------------------


class FilledSchedule(Schedule1F1B):
    """1F1B with partial micro-batches in its bubbles. ``plan`` is set before a step; see the module."""

    plan: FillPlan

    def _step_microbatches(  # type: ignore[override]
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first = target_mbs[0] if target_mbs is not None else None
        self._initialize_stage(args[0], kwargs[0], first, loss_kwargs)
        stage: Any = self._stage
        plan, rank = self.plan, stage.stage_index
        stream, stages = plan.stream, self._num_stages
        back = plan.backward(rank)
        warmup, ahead = min(stream, stages - rank), min(stream, stages - rank + 1)
        sent: list[tuple[Any, Any]] = []  # messages on their way, with what they hold
        received: set[int] = set()

        def send(ops: list[Any]) -> None:
            if ops:
                sent.append((dist.batch_isend_irecv(ops), ops))

        def wait(ops: list[Any]) -> None:
            for message in dist.batch_isend_irecv(ops) if ops else ():
                message.wait()

        def forward(index: int) -> None:
            out = stage.forward_one_chunk(index, args[index], kwargs[index], save_forward_output=False)
            if index < stream:
                self._maybe_compute_loss(stage, out, target_mbs, index, loss_kwargs)

        def passing_on(index: int) -> list[Any]:
            found: list[Any] = stage.get_fwd_send_ops(index)
            if index >= back:  # it never goes backward here
                del stage.fwd_cache[index]
                stage.submod.taken.pop(index, None)
            return found

        def receive(index: int) -> list[Any]:
            found: list[Any] = [] if index in received else stage.get_fwd_recv_ops(index)
            received.add(index)
            return found

        partial = plan.warmup(rank)
        outgoing: list[Any] = []  # goes out together with what is waited for, else two stages would wait on each other
        for index in range(warmup):
            wait(receive(index))
            forward(index)
            outgoing = passing_on(index)
            if partial or index < warmup - 1:
                send(outgoing)
                outgoing = []
        if partial:
            for index in range(warmup, ahead) if rank else ():
                wait(receive(index))  # the stage before has sent it first
            for i in range(partial):
                wait(receive(stream + i))
                forward(stream + i)
                if plan.deepest[i] > rank:
                    send(stage.get_fwd_send_ops(stream + i))
            for i in reversed(range(partial)):
                if plan.deepest[i] > rank:
                    wait(stage.get_bwd_recv_ops(stream + i))
                    stage.backward_one_chunk(stream + i)
                else:
                    stage.backward_from_exits(stream + i)
                send(stage.get_bwd_send_ops(stream + i))

        done = 0
        passed_on = plan.backward(rank - 1) if rank else 0  # gradients that the stage before waits for
        index = warmup
        while index < stream or done < back:
            returning: list[Any] = []  # a gradient for the stage before
            if done < back:
                wait(outgoing + stage.get_bwd_recv_ops(done))
                outgoing = []
                loss = self._maybe_get_loss(stage, done)
                stage.backward_one_chunk(done, loss=loss, last_backward=done == back - 1)
                returning = stage.get_bwd_send_ops(done)
                returning = returning if done < passed_on else []
                done += 1
            if index < stream:
                send(outgoing)
                wait(returning + receive(index))
                forward(index)
                outgoing = passing_on(index)
                index += 1
            else:
                send(returning)
        send(outgoing)
        for messages, _ in sent:
            for message in messages:
                message.wait()
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(1)


# -- what several stages hold -----------------------------------------------------------------------------------------


class TiedStages:
    """The unembedding on the ranks ``holders`` of ``group``, ``module`` on this one: equal gradients keep it equal."""

    def __init__(self, module: Any, holders: list[int], group: Any):
        self.module, self.holders, self.group = module, holders, group

    def refresh(self) -> None:
        """Nothing: each rank trains its own."""

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Once a step, on all ranks. The first holder adds the gradients of the others to its own, and sends them the
        sum: 2 (holders - 1) messages of the weight's size."""
        rank = dist.get_rank(self.group)
        if rank not in self.holders or not self.module.weight.requires_grad:
            return
        param = self.module.weight
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        mine = local_tensor(param.grad)
        peers = [dist.get_global_rank(self.group, r) for r in self.holders]
        if rank == self.holders[0]:
            got = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in peers[1:]]
            self._exchange([dist.P2POp(dist.irecv, g, p, self.group) for g, p in zip(got, peers[1:], strict=True)])
            for g in got:
                mine.add_(g)
            held = mine.contiguous()
            self._exchange([dist.P2POp(dist.isend, held, p, self.group) for p in peers[1:]])
            return
        held = mine.contiguous()
        self._exchange([dist.P2POp(dist.isend, held, peers[0], self.group)])
        total = torch.empty_like(held)
        self._exchange([dist.P2POp(dist.irecv, total, peers[0], self.group)])
        mine.copy_(total)

    def _exchange(self, ops: list[Any]) -> None:
        for message in dist.batch_isend_irecv(ops):
            message.wait()
