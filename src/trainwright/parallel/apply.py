"""A built model made parallel: every dimension in turn, data parallelism (DDP, FSDP2, HSDP) last. It does not know.

The loop divides the loss by the weight of the global batch, so the gradients of the ranks have to be added up. DDP and
FSDP2 take their mean (gloo has no scaled sum), hence ``loss_scale``, the number of ranks that see different tokens.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from trainwright.core.batch import Batch
from trainwright.core.divided import Division
from trainwright.core.errors import ConfigError
from trainwright.core.sliced_gradient import add_up, is_offered
from trainwright.models.base import LanguageModel
from trainwright.models.moe import MoE
from trainwright.models.transforms.grass_linear import follow_sharding
from trainwright.parallel.comm.sums import total_of_each
from trainwright.parallel.config import ParallelConfig, context_method
from trainwright.parallel.context.base import ContextParallel, Stages
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.weights import check_same_build, fill_from_first_rank, model_state


@dataclass
class Parallelized:
    """A model made parallel: call ``module``; ``model`` is the same without a wrapper."""

    model: LanguageModel
    module: nn.Module
    loss_scale: float = 1.0  # multiplies the loss, where the reduction is a mean over ranks
    accumulate: str = "sharded"
    copies: int = 1  # ranks that compute the same loss (tp): a sum over all ranks counts it that often
    weight_copies: int = 1  # ranks that hold the same loss weights (tp x pp)
    context: ContextParallel | None = None  # spreads the tokens of a micro-batch over ranks
    context_size: int = 1  # ranks of that group
    pipeline: Any = None  # this rank's stages; None: the whole model is here
    sharding: Any = None  # what shards it, where that is neither DDP nor FSDP2 (parallel/amsp)
    chunks: Any = None  # rows go chunk by chunk (parallel/sppo/rows.py); None: whole
    sliced: Sequence[Tensor] = ()  # parameters of which slices of gradients are added up (core/sliced_gradient.py)

    @contextmanager
    def no_sync(self, *, last_micro_batch: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: the step's gradient is complete after the last one.

        All ranks must make the same number of micro-batches. Until the last one, DDP communicates nothing; FSDP2 does
        what ``accumulate`` says, and HSDP with "sharded" leaves out the reduction between replicas.
        """
        if self.sharding is not None:
            with self.sharding.micro_step(last=last_micro_batch):
                yield
            return
        if isinstance(self.module, DistributedDataParallel):
            with contextlib.nullcontext() if last_micro_batch else self.module.no_sync():
                yield
            return
        if hasattr(self.module, "set_requires_gradient_sync"):
            sharded = cast(Any, self.module)
            sharded.set_requires_gradient_sync(last_micro_batch or self.accumulate == "sharded")
            sharded.set_requires_all_reduce(last_micro_batch)
        yield
        if last_micro_batch and self.sliced:
            add_up(self.sliced)

    @contextmanager
    def one_gradient(self) -> Iterator[None]:
        """Around all micro-batches of a step; what is summed over tensor-parallel ranks once a step is so at its end.

        Collective."""
        if self.copies == 1:
            yield
            return
        from trainwright.parallel.tensor import summed_once

        with summed_once(self.model):
            yield

    def state(self) -> dict[str, Tensor]:
        return model_state(self.model)

    @property
    def division(self) -> Division | None:
        """The ranks that hold other parameters, for figures of all of them together."""
        return None if self.pipeline is None else self.pipeline.division

    def shard(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch that the ranks of its context group hold."""
        return batch if self.context is None else self.context.shard(batch)


class _Replica(DistributedDataParallel):
    """DDP that names the parameters where torch only counts them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            listed = re.search(r"did not receive grad for rank (\d+): ([\d ]+)", str(error))
            if "find_unused_parameters" not in str(error) or listed is None:
                raise
            trained = [n for n, p in self.module.named_parameters() if p.requires_grad]
            names = [trained[int(i)] for i in listed[2].split()]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ConfigError(
                f"the last micro-batch gave no gradient to {', '.join(names[:4])}{more}; set true, or freeze them",
                key="parallel.find_unused_parameters",
                value=False,
            ) from error


def parallelize(
    model: LanguageModel, mesh: Mesh, config: ParallelConfig, precision: Any, device: torch.device
) -> Parallelized:
    """Move ``model`` to ``device`` and make it parallel over ``mesh``.

    Every rank passes the model built from the same seed; that they are the same is checked (ModelError). This takes
    one whole model of host memory per rank. Where that is too much, ranks other than the first pass it on the meta
    device: they get their part of the first rank's weights, one tensor at a time.

    FSDP2 shards on ``device`` block by block, so a GPU holds its shards and at most one whole block.
    """
    chunks = _cut_rows(model, mesh, config, device)
    if mesh.mesh is None:
        model = model.to(device)
        return Parallelized(model, model, chunks=chunks)
    from_first = check_same_build(model, device)
    degrees = mesh.degrees
    spread: dict[str, Any] = {
        "loss_scale": float(mesh.dp_size * degrees.cp),
        "copies": degrees.tp,
        "weight_copies": degrees.tp * degrees.pp,
        "context_size": degrees.cp,
        "context": _spread_context(model, mesh, config) if degrees.cp > 1 else None,
        "chunks": chunks,
    }
    if degrees.pp > 1:
        return _stages(model, mesh, config, precision, device, spread, from_first)
    if config.sharding is not None:
        with fill_from_first_rank(model, device) if from_first else contextlib.nullcontext():
            sharding = config.sharding.apply(model, config, precision, device)
        return Parallelized(model, model, sharding=sharding, **spread)
    sharded = degrees.dp_shard > 1 or degrees.ep > 1
    trained = any(p.requires_grad for p in model.parameters())
    reduced = mesh.dp_size * degrees.cp > 1 and trained  # else no gradient has to be added up
    # DDP takes plain parameters with a gradient each, and one backward pass a forward pass; else FSDP2's machinery
    # replicates.
    unlike_ddp = degrees.tp > 1 or chunks is not None or any(is_offered(p) for p in model.parameters())
    with fill_from_first_rank(model, device) if from_first else contextlib.nullcontext():
        _cut_layers(model, mesh, config)
        experts_over = _spread_experts(model, mesh)
        if sharded or (reduced and unlike_ddp):
            _fully_shard(model, mesh, config, precision, experts_over)
        model = model.to_empty(device=device) if _on_meta(model) else model.to(device)
    if sharded or not reduced or unlike_ddp:
        return Parallelized(model, model, accumulate=config.accumulate, sliced=follow_sharding(model), **spread)
    wrapped = _Replica(
        model,
        process_group=mesh.group("dp_replicate", "cp"),
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
    )
    # Buffers change the same way on every rank. Broadcasting them at each forward costs a collective, and would
    # overwrite what a rank has counted since the last step.
    wrapped.broadcast_buffers = False
    return Parallelized(model, wrapped, **spread)


def _stages(
    model: LanguageModel,
    mesh: Mesh,
    config: ParallelConfig,
    precision: Any,
    device: torch.device,
    spread: dict[str, Any],
    from_first: bool,
) -> Parallelized:
    """This rank's stages of a pipeline. All of ``model`` is filled before it is cut."""
    from trainwright.parallel.pipeline.apply import apply_pipeline

    if from_first:
        with fill_from_first_rank(model, device):
            model = model.to_empty(device="cpu") if _on_meta(model) else model
    _cut_layers(model, mesh, config)
    pipeline = apply_pipeline(model, mesh, config, precision, device, _spread_experts(model, mesh), spread["chunks"])
    return Parallelized(pipeline.model, pipeline.model, pipeline=pipeline, **spread)


def _cut_layers(model: LanguageModel, mesh: Mesh, config: ParallelConfig) -> None:
    """Tensor parallelism, where there is some."""
    over = mesh.submesh("tp")
    if over is None:
        return
    from trainwright.parallel.tensor import apply_tensor_parallel

    apply_tensor_parallel(model, over, config.sequence_parallel)
    _narrow_attention(model, mesh.rank_in("tp"), mesh.degrees.tp)
    if config.tensor is not None:
        config.tensor.apply(model, over)


def _spread_context(model: LanguageModel, mesh: Mesh, config: ParallelConfig) -> ContextParallel:
    """Swap the attention of ``model`` for one over the ranks of the context group."""
    method = context_method(config)
    decoder = cast(Any, model)
    if any(hasattr(block.attn.attend, "narrow") for block in decoder.blocks):
        raise ConfigError(
            "spreads the tokens of dense attention, and a transform (s2_attention) has swapped it; set 1, or leave the "
            "transform out",
            key="parallel.cp",
            value=mesh.degrees.cp,
        )
    context = method.build(mesh, decoder.arch.n_heads // mesh.degrees.tp)
    if mesh.degrees.pp > 1:
        from trainwright.parallel.pipeline.legal import legal_micro_batches

        legal = functools.partial(legal_micro_batches, config.pipeline, mesh.degrees.pp)
        context.stages = Stages(mesh.group("pp"), mesh.degrees.pp, legal)
    decoder.plan_attention = context.plan
    for block in decoder.blocks:
        block.attn.attend = context.attend
    group = mesh.group("cp")
    for moe in (m for m in model.modules() if isinstance(m, MoE)):
        context.experts = True
        moe.summed_also(lambda x: total_of_each(x, group))
    return context


def _cut_rows(model: LanguageModel, mesh: Mesh, config: ParallelConfig, device: torch.device) -> Any:
    """Swap the attention of ``model`` for one that takes rows chunk by chunk, where the recipe says so."""
    from trainwright.parallel.sppo.sppo import sppo_of

    method = sppo_of(config)
    if method is None:
        return None
    from trainwright.parallel.sppo.rows import ChunkedRows

    rows = ChunkedRows(method, cast(Any, model).arch, mesh.degrees.pp, device)
    rows.attention.install(model)
    return rows


def _spread_experts(model: LanguageModel, mesh: Mesh) -> DeviceMesh | None:
    """Expert parallelism, where there is some; the ranks that hold the same experts then."""
    if mesh.degrees.ep == 1:
        return None
    from trainwright.parallel.expert import apply_expert_parallel

    same, spread_over = mesh.expert_meshes()
    apply_expert_parallel(model, spread_over)
    return same


def _narrow_attention(model: LanguageModel, rank: int, ranks: int) -> None:
    """Attention that differs by head (models/transforms/s2_attention.py) is told which heads are here."""
    decoder = cast(Any, model)
    for owner, name in ((decoder, "plan_attention"), *((block.attn, "attend") for block in decoder.blocks)):
        part = getattr(owner, name)
        if hasattr(part, "narrow"):
            setattr(owner, name, part.narrow(rank, ranks))


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def _fully_shard(
    model: LanguageModel, mesh: Mesh, config: ParallelConfig, precision: Any, experts_over: DeviceMesh | None = None
) -> None:
    """experts_over  the ranks that hold the same experts, where these are spread"""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    over = cast(DeviceMesh, mesh.data_mesh())
    reduce_dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    policy = MixedPrecisionPolicy(param_dtype=precision.fsdp_param_dtype, reduce_dtype=reduce_dtype)
    if mesh.degrees.dp_shard == 1 and experts_over is None:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for block in model.blocks:
            replicate(block, mesh=over, mp_policy=policy)
        replicate(model, mesh=over, mp_policy=policy)
        return
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
    for block in model.blocks:
        if experts_over is not None:
            from trainwright.parallel.expert import fully_shard_experts

            fully_shard_experts(block, experts_over, over, mesh.degrees.ep, **settings)
        fully_shard(block, mesh=over, **settings)
    # The root holds embedding, last norm and head (tied or not): used at both ends of the forward pass, so they stay.
    root: Any = fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=False)
    if config.find_unused_parameters:
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"with dp_shard > 1 needs torch 2.13 or newer, this is {torch.__version__}; use dp_shard=1",
                key="parallel.find_unused_parameters",
                value=True,
            )
        root.set_reduce_scatter_unused_params(True)
