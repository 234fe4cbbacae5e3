"""One rank of the multi-process tests: runs cells by name and saves what came out. Also the one-process reference.

python parallel_worker.py RESULT_FILE CELL[,CELL...]      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.distributed import full_tensor, gather_objects, local_tensor, rank, world_size
from trainwright.core.errors import ConfigError, ModelError
from trainwright.models.base import Head, Hidden, LanguageModel
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.optim.clipping.global_norm import GlobalNormConfig
from trainwright.parallel.apply import Parallelized, parallelize
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.mesh import Mesh, build_mesh, init_distributed, shutdown
from trainwright.parallel.weights import load_model_state, model_state
from trainwright.precision.base import Precision
from trainwright.train.executor import AutogradExecutor, forward_only

CPU = torch.device("cpu")
VOCAB, LENGTH, ROWS, STEPS = 61, 12, 8, 20


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x.cumsum(1) / 4))))


class TinyLM(LanguageModel):
    """Modules that share a weight, buffers of both kinds, and a branch that may go unused."""

    def __init__(self, tied: bool = True, dim: int = 24):
        super().__init__()
        self.vocab_size, self.max_seq_len = VOCAB, LENGTH
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.branch = nn.Linear(dim, dim)
        self.use_branch = True
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", torch.full((dim,), 0.5), persistent=False)

    def forward(self, tokens, *, positions=None, doc_ids=None, cache=None, head_fn=None):
        if self.training:
            self.seen += tokens.sum()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.gain
        if self.use_branch:
            x = x + self.branch(x)
        hidden = Hidden(x, Head(self.head.weight))
        return hidden.states @ hidden.head.weight.T if head_fn is None else head_fn(hidden)

    def param_roles(self):
        from trainwright.core.params import guess_roles

        return guess_roles(self)

    def flops_per_token(self, seq_len):
        return 6.0 * self.num_params()


def tiny(tied: bool = True, seed: int = 0, device: str = "cpu") -> TinyLM:
    torch.manual_seed(seed)
    with torch.device(device):
        return TinyLM(tied)


def decoder(family: str = "llama", device: str = "cpu", **dims: Any) -> LanguageModel:
    from trainwright.models.decoder_config import DecoderModelConfig

    torch.manual_seed(0)
    with torch.device(device):
        spec = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, **dims}
        return DecoderModelConfig(family=family, **spec).build(VOCAB, LENGTH)


def global_batch(step: int) -> Batch:
    """Rows of very unequal weight; in every fourth step the last half of them trains nothing."""
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
    share = torch.linspace(1.0, 0.1, ROWS)[:, None]
    weights = (torch.rand(ROWS, LENGTH, generator=g) < share).float()
    if step % 4 == 3:
        weights[ROWS // 2 :] = 0
    # Every row has one to four documents, whose ids may come back.
    starts = torch.rand(ROWS, LENGTH, generator=g) < torch.linspace(0.0, 0.3, ROWS)[:, None]
    starts[:, 0] = True
    slots = torch.arange(LENGTH).expand(ROWS, LENGTH)
    positions = slots - torch.where(starts, slots, 0).cummax(1).values
    doc_ids = (starts.cumsum(1) % 3).int()
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, doc_ids)


def my_rows(batch: Batch, mesh: Mesh) -> Batch:
    n = ROWS // mesh.dp_size
    return batch.rows(mesh.dp_rank * n, (mesh.dp_rank + 1) * n)


def precision(dtype: torch.dtype = torch.float32) -> Precision:
    return Precision(dtype, "cpu")


@dataclass
class Cell:
    """A training of some AdamW steps with clipping: what is trained, and how it is spread."""

    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: {"tied": True})
    micro: int = 8
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    double: bool = False

    @property
    def steps(self) -> int:
        """Rounding grows with the steps; in float64 a fault shows in the first ones."""
        return 6 if self.double else STEPS

    def build(self, device: str = "cpu") -> LanguageModel:
        model = decoder(device=device, **self.model) if "family" in self.model else tiny(device=device, **self.model)
        return model.double() if self.double else model


def train(cell: Cell, mesh: Mesh, config: ParallelConfig) -> dict[str, Any]:
    model = cell.build()
    if cell.recompute:
        from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig

        ActivationCheckpointingConfig().apply(model)
    total = model.num_params()
    parallel = parallelize(model, mesh, config, precision(cell.dtype), CPU)
    params = [p for p in parallel.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)
    clip = GlobalNormConfig(max_norm=0.5).build()
    executor = AutogradExecutor(min(cell.micro, ROWS // mesh.dp_size), precision(cell.dtype))
    objective = NextTokenConfig().build()
    losses, norms, validation = [], [], []
    for step in range(cell.steps):
        result = executor.run(parallel, objective, my_rows(global_batch(step), mesh))
        loss = result.loss_sum.clone()
        if world_size() > 1:
            dist.all_reduce(loss)
            loss /= parallel.copies
        losses.append((loss / result.weight).item())
        norms.append(float(clip(params)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update = getattr(parallel.model, "update_balancing", None)
        if update is not None:
            update()
        if step % 10 == 4:  # a validation between steps must not disturb what follows
            parallel.module.eval()
            rows = parallel.shard(my_rows(global_batch(99), mesh))
            held_out = forward_only(parallel, objective, rows, precision(cell.dtype))
            parallel.module.train()
            nats = held_out.sum.double()
            if world_size() > 1:
                dist.all_reduce(nats)
                nats /= parallel.copies
            validation.append(nats.item())
    return {
        "losses": losses,
        "norms": norms,
        "validation": validation,
        "weights": {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items() if n != "seen"},
        "held": sum(local_tensor(p).numel() for p in params) / total,
        "optimizer_held": sum(local_tensor(s["exp_avg"]).numel() for s in optimizer.state.values()) / total,
    }


# Half of what a layer saves of 12 tokens, which then lie on 2 ranks and not on 3.
OFFLOADED = {
    "name": "bytescale", "capacity": 4, "pair": 0.0, "token": 1e-6,
    "offload": {"gb_per_s": 1.0, "bytes_per_token": 1000.0, "layers": 2},
}  # fmt: skip

TRAININGS = {
    "ddp2": Cell({"dp_replicate": 2}),
    "ddp2_accumulate": Cell({"dp_replicate": 2}, micro=2, recompute=True),
    "ddp2_double": Cell({"dp_replicate": 2}, micro=2, double=True),
    "fsdp2": Cell({"dp_shard": 2}),
    "fsdp2_accumulate": Cell({"dp_shard": 2}, micro=2),
    "fsdp2_whole": Cell({"dp_shard": 2, "accumulate": "whole"}, micro=2),
    "fsdp2_keep": Cell({"dp_shard": 2, "reshard_after_forward": False}, {"tied": False}, micro=1, recompute=True),
    "fsdp2_double": Cell({"dp_shard": 2}, micro=2, double=True),
    "fsdp2_decoder": Cell({"dp_shard": 2}, {"family": "qwen3", "tie_embeddings": True}, micro=2, recompute=True),
    "fsdp2_decoder_double": Cell(
        {"dp_shard": 2}, {"family": "qwen3", "tie_embeddings": True}, micro=2, recompute=True, double=True
    ),
    "ddp2_decoder": Cell({"dp_replicate": 2}, {"family": "llama", "tie_embeddings": False}, micro=4),
    "ddp4": Cell({}),
    "hsdp4": Cell({"dp_replicate": 2, "dp_shard": 2}),
    "hsdp4_accumulate": Cell({"dp_shard": 2}, micro=1, recompute=True),
    "hsdp4_whole": Cell({"dp_shard": 2, "accumulate": "whole"}, micro=1),
    "hsdp4_double": Cell({"dp_shard": 2}, micro=1, double=True),
    "fsdp4": Cell({"dp_shard": 4}, micro=1),
    "hsdp4_moe": Cell(
        {"dp_shard": 2}, {"family": "mixtral", "n_experts": 4, "balance": "bias", "moe_ffn_dim": 32}, double=True
    ),
    "ddp4_moe": Cell(
        {}, {"family": "mixtral", "n_experts": 4, "balance": "bias", "moe_ffn_dim": 32}, micro=1, double=True
    ),
    **{
        name: Cell(settings, {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2, **more}, micro=micro, double=True)
        for name, settings, more, micro in (
            ("tp2", {"tp": 2}, {"tie_embeddings": False}, 4),
            ("tp2_tied", {"tp": 2}, {"tie_embeddings": True}, 8),
            ("tp2_stream_whole", {"tp": 2, "sequence_parallel": False}, {"tie_embeddings": True}, 8),
            ("tp4_shard2", {"tp": 2, "dp_shard": 2}, {"tie_embeddings": True}, 2),
            ("tp4_replicate2", {"tp": 2, "dp_replicate": 2}, {"tie_embeddings": False}, 2),
        )
    },
    **{
        name: Cell(settings, {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2, **more}, micro=micro, double=True)
        for name, settings, more, micro in (
            ("shard2_plain", {"dp_shard": 2}, {"tie_embeddings": True}, 2),
            ("hsdp4_plain", {"dp_shard": 2, "accumulate": "whole"}, {}, 1),
            ("cp2", {"cp": 2}, {"tie_embeddings": True}, 4),
            ("cp2_window", {"cp": 2}, {"sliding_window": 5}, 4),
            ("cp2_ulysses", {"cp": 2, "context": "ulysses"}, {"tie_embeddings": True}, 4),
            ("cp2_shard", {"cp": 2, "dp_shard": 1}, {}, 8),
            ("cp4_usp", {"cp": 4, "context": {"name": "usp", "ulysses": 2}}, {}, 4),
            ("cp4_shard2", {"cp": 2, "dp_shard": 2}, {"tie_embeddings": True}, 2),
            ("cp4_replicate2", {"cp": 2}, {}, 2),
            ("cp4_tp2", {"cp": 2, "tp": 2}, {"tie_embeddings": True}, 4),
            ("cp2_flashcp", {"cp": 2, "context": {"name": "flashcp", "min_chunk": 1}}, {"sliding_window": 5}, 4),
            ("cp4_bytescale", {"cp": 4, "context": {"name": "bytescale", "capacity": 4}}, {"tie_embeddings": True}, 4),
            ("cp4_bytescale_offload", {"cp": 4, "context": OFFLOADED}, {}, 4),
            ("cp4_bytescale_shard2", {"cp": 2, "dp_shard": 2, "context": {"name": "bytescale", "capacity": 6}}, {}, 4),
            (
                "cp4_flexsp",
                {"cp": 4, "context": {"name": "flexsp", "method": "layouts", "tokens_per_rank": 8, "overhead": 0}},
                {"sliding_window": 5},
                4,
            ),
            ("cp4_basp", {"cp": 4, "context": "basp"}, {"sliding_window": 5}, 3),  # groups of 4, 4 and 2
            ("cp4_basp_shard2", {"cp": 2, "dp_shard": 2, "context": "basp"}, {"tie_embeddings": True}, 2),
        )
    },
    **{
        name: Cell(
            {"tp": 2, "tensor": {"name": "domino", "row": row, "column": column}, **settings},
            {"n_heads": 4, "n_kv_heads": 2, **model},
            micro=micro,
            recompute=recompute,
            double=True,
        )
        for name, row, column, settings, model, micro, recompute in (
            ("tp2_domino", 2, 1, {}, {"family": "llama", "tie_embeddings": False}, 4, False),
            ("tp2_domino_columns", 1, 2, {}, {"family": "qwen2.5"}, 4, False),
            ("tp2_domino_both", 8, 2, {}, {"family": "qwen3", "tie_embeddings": True, "sliding_window": 5}, 8, True),
            ("tp4_domino_shard2", 2, 2, {"dp_shard": 2}, {"family": "qwen3", "tie_embeddings": True}, 2, True),
            ("tp4_domino_cp2", 2, 2, {"cp": 2}, {"family": "qwen3", "tie_embeddings": True}, 4, True),
            (
                "tp4_domino_cp2_ulysses",
                4,
                1,
                {"cp": 2, "context": "ulysses"},
                {"family": "llama", "tie_embeddings": False, "sliding_window": 5},
                8,
                False,
            ),
            ("tp4_domino_replicate2", 2, 1, {}, {"family": "llama", "tie_embeddings": False}, 4, False),
        )
    },
    "tp2_bias": Cell({"tp": 2}, {"family": "qwen2.5", "n_heads": 4, "n_kv_heads": 2}, micro=4, double=True),
    "tp2_recompute": Cell(
        {"tp": 2}, {"family": "llama", "n_heads": 4, "n_kv_heads": 2}, micro=4, recompute=True, double=True
    ),
    "tp2_moe": Cell(
        {"tp": 2},
        {"family": "mixtral", "n_heads": 4, "n_kv_heads": 2, "n_experts": 4, "balance": "bias", "moe_ffn_dim": 32},
        double=True,
    ),
    **{
        name: Cell(
            settings,
            {"family": "mixtral", "n_heads": 4, "n_kv_heads": 2, "n_experts": 4, "moe_ffn_dim": 32, **more},
            micro=micro,
            double=True,
        )
        for name, settings, more, micro in (
            ("ep2_bias", {"dp_shard": 2, "ep": 2}, {"balance": "bias"}, 2),
            ("ep2_none", {"dp_shard": 2, "ep": 2}, {"balance": "none"}, 4),
            ("ep2_cp", {"cp": 2, "ep": 2}, {"balance": "bias"}, 4),
            ("ep2_shard4", {"dp_shard": 4, "ep": 2}, {"balance": "bias"}, 2),
            ("ep2_of_3_to_4", {"dp_shard": 4, "ep": 2}, {"balance": "bias", "n_experts": 6}, 2),
            ("ep2_replicate4", {"dp_shard": 2, "ep": 2}, {"balance": "bias"}, 1),
            ("ep2_tp4", {"dp_shard": 2, "tp": 2, "ep": 2}, {"balance": "bias"}, 4),
        )
    },
    "ep2_recompute": Cell(
        {"dp_shard": 2, "ep": 2},
        {"family": "mixtral", "n_experts": 4, "balance": "bias", "moe_ffn_dim": 32},
        micro=2,
        recompute=True,
        double=True,
    ),
    **{
        name: Cell(
            {"sharding": {"name": "amsp", "parameters": p, "gradients": g, "states": s}, **more},
            {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2, "tie_embeddings": tied},
            micro=2,
            recompute=recompute,
            double=True,
        )
        for name, (p, g, s), more, tied, recompute in (
            ("amsp2_zero1", (1, 1, 2), {}, True, False),
            ("amsp2_zero2", (1, 2, 2), {}, False, True),
            ("amsp4_of_1_2_4", (1, 2, 4), {}, True, False),
            ("amsp4_of_2_2_4", (2, 2, 4), {}, True, True),
            ("amsp4_of_1_1_2", (1, 1, 2), {}, False, False),
            ("amsp4_cp2", (2, 4, 4), {"cp": 2}, True, False),
        )
    },
    "tp2_bf16": Cell({"tp": 2}, {"family": "qwen3", "n_heads": 4, "n_kv_heads": 2}, micro=4, dtype=torch.bfloat16),
    "fsdp2_bf16": Cell({"dp_shard": 2}, dtype=torch.bfloat16),
    "amsp2_bf16": Cell(
        {"sharding": {"name": "amsp", "parameters": 1, "gradients": 2, "states": 2}}, micro=2, dtype=torch.bfloat16
    ),
    "ddp2_bf16": Cell({"dp_replicate": 2}, dtype=torch.bfloat16),
}


# Whose bytes are planned and recorded, besides those of trainings: pipelines, and 16-bit products.
TIED, UNTIED = {"tie_embeddings": True}, {"tie_embeddings": False}
MIXTURE = {"n_experts": 4, "moe_ffn_dim": 32}
BALANCED = {**MIXTURE, "balance": "aux_loss"}
FLEXED = {"name": "flexsp", "tokens_per_rank": 8, "overhead": 0}
INTERLEAVED, IN_A_V = (
    {"pp": 2, "pipeline": {"schedule": schedule, "stages_per_rank": 2}} for schedule in ("interleaved", "zero_bubble")
)
PLANNED = {
    name: Cell(
        settings,
        {"family": family, "n_heads": 4, "n_kv_heads": 2, **model},
        micro=micro,
        dtype=torch.bfloat16 if "16" in name else torch.float32,
    )
    for name, settings, family, model, micro in (
        ("tp2_16", {"tp": 2}, "qwen3", UNTIED, 4),
        ("tp2_16_stream_whole", {"tp": 2, "sequence_parallel": False}, "qwen3", {}, 4),
        ("tp2_16_domino", {"tp": 2, "tensor": {"name": "domino"}}, "llama", {}, 4),
        ("tp2_16_moe", {"tp": 2}, "mixtral", MIXTURE, 4),
        ("shard2_16", {"dp_shard": 2}, "qwen3", TIED, 2),
        ("ddp2_16", {}, "qwen3", {}, 2),
        ("cp2_16", {"cp": 2}, "qwen3", {}, 4),
        ("cp2_16_ulysses", {"cp": 2, "context": "ulysses"}, "qwen3", {}, 4),
        ("pp2", {"pp": 2}, "qwen3", TIED, 2),
        ("pp2_16", {"pp": 2}, "llama", TIED, 2),
        ("pp2_interleaved", INTERLEAVED, "llama", {"n_layers": 4, **TIED}, 2),
        ("pp2_v", IN_A_V, "llama", {"n_layers": 4, **TIED}, 2),
        ("pp2_moe", {"pp": 2}, "mixtral", BALANCED, 2),
        ("tp4_16_shard2", {"tp": 2, "dp_shard": 2}, "qwen3", TIED, 2),
        ("tp4_16_replicate2", {"tp": 2}, "qwen3", UNTIED, 2),
        ("pp4_16_shard2", {"pp": 2, "dp_shard": 2}, "llama", TIED, 1),
        ("pp4_shard2_untied", {"pp": 2, "dp_shard": 2}, "llama", UNTIED, 1),
        ("pp4_shard2_v", {**IN_A_V, "dp_shard": 2}, "llama", {"n_layers": 4, **TIED}, 1),
        ("pp4_16_replicate2", {"pp": 2}, "llama", TIED, 1),
        ("pp4_16_tp2", {"pp": 2, "tp": 2}, "qwen3", TIED, 2),
        ("pp4_tp2_stream_whole", {"pp": 2, "tp": 2, "sequence_parallel": False}, "llama", {}, 2),
        ("pp4_cp2", {"pp": 2, "cp": 2}, "qwen3", {"sliding_window": 5, **TIED}, 2),
        ("pp4_cp2_basp", {"pp": 2, "cp": 2, "context": "basp"}, "llama", {}, 2),
        ("pp4_ep2", {"pp": 2, "dp_shard": 2, "ep": 2}, "mixtral", MIXTURE, 2),
        ("cp2_bytescale_moe", {"cp": 2, "context": {"name": "bytescale", "capacity": 8}}, "mixtral", BALANCED, 4),
        ("cp2_flexsp_moe", {"cp": 2, "context": FLEXED}, "mixtral", BALANCED, 4),
        ("pp4_cp2_flexsp_moe", {"pp": 2, "cp": 2, "context": FLEXED}, "mixtral", BALANCED, 2),
    )
}


def reference(cell: Cell) -> dict[str, Any]:
    """The same training by one process with all rows at once."""
    whole = Cell({}, cell.model, dtype=cell.dtype, double=cell.double)
    return train(whole, build_mesh(Degrees(), CPU), ParallelConfig())


def _spread(model: LanguageModel, **settings: Any) -> Parallelized:
    config = ParallelConfig(**settings)
    return parallelize(model, build_mesh(config.resolve(world_size()), CPU), config, precision(), CPU)


def _message(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def meta_build() -> dict[str, Any]:
    """Ranks other than the first hold no weights before they are spread."""
    out: dict[str, Any] = {}
    here = "cpu" if rank() == 0 else "meta"
    for name, settings in {"ddp": {}, "fsdp": {"dp_shard": world_size()}, "hsdp": {"dp_shard": 2}}.items():
        parallel = _spread(tiny(tied=False, device=here), **settings)
        out[name] = {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()}
        out[name]["gain"] = dict(parallel.model.named_buffers())["gain"]
    dense = _spread(decoder("qwen3", here), dp_shard=world_size())
    out["decoder"] = {n: full_tensor(t).clone() for n, t in model_state(dense.model).items()}
    AutogradExecutor(2, precision()).run(dense, NextTokenConfig().build(), global_batch(0).rows(0, 2))
    out["tied"] = _message(ModelError, lambda: _spread(tiny(tied=True, device=here), dp_shard=2))
    out["none"] = _message(ModelError, lambda: _spread(tiny(tied=False, device="meta"), dp_shard=2))
    return out


def different_builds() -> dict[str, Any]:
    return {
        "seed": _message(ModelError, lambda: _spread(tiny(seed=rank()))),
        "tying": _message(ModelError, lambda: _spread(tiny(tied=rank() == 0), dp_shard=2)),
        "width": _message(ModelError, lambda: _spread(decoder(ffn_dim=48 + 16 * rank()))),
    }


def unused() -> dict[str, Any]:
    """A branch that nobody uses is an error under DDP; one that only the first rank uses is right when allowed."""
    batch = my_rows(global_batch(0), build_mesh(Degrees(dp_replicate=2), CPU))
    executor = AutogradExecutor(4, precision())
    objective = NextTokenConfig().build()

    def twice():
        model = tiny()
        model.use_branch = False
        parallel = _spread(model)
        for _ in range(2):
            executor.run(parallel, objective, batch)

    out: dict[str, Any] = {"refused": _message(ConfigError, twice)}
    for name, settings in {"ddp": {}, "fsdp": {"dp_shard": 2}}.items():
        model = tiny()
        model.use_branch = rank() == 0
        parallel = _spread(model, find_unused_parameters=True, **settings)
        for _ in range(2):
            parallel.model.zero_grad(set_to_none=True)
            executor.run(parallel, objective, batch)
        out[name] = {n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters()}
    return out


def states() -> dict[str, Any]:
    """Names without prefixes, loading whole and sharded values, buffers that stay a rank's own."""
    out: dict[str, Any] = {}
    wanted = {n: t.clone() for n, t in model_state(tiny(seed=5)).items()}
    for name, settings in {"ddp": {}, "fsdp": {"dp_shard": 2}}.items():
        parallel = _spread(tiny(), **settings)
        assert model_state(parallel.module).keys() == model_state(tiny()).keys() == parallel.state().keys()
        load_model_state(parallel.module, wanted)
        got = {n: full_tensor(t) for n, t in parallel.state().items()}
        assert all(torch.equal(got[n], wanted[n]) for n in wanted)
        saved = {n: t.clone() for n, t in parallel.state().items()}
        with torch.no_grad():
            for p in parallel.model.parameters():
                p.zero_()
        load_model_state(parallel.module, saved)
        assert all(torch.equal(full_tensor(t), wanted[n]) for n, t in parallel.state().items())
        executor = AutogradExecutor(2, precision())
        mine = my_rows(global_batch(0), build_mesh(Degrees(dp_replicate=2), CPU))
        for step in (1, 2):
            executor.run(parallel, NextTokenConfig().build(), mine)
            assert parallel.model.seen.item() == wanted["seen"].item() + step * mine.tokens.sum().item()
        frozen = tiny()
        frozen.requires_grad_(False)
        out[name] = forward_only(_spread(frozen, **settings).module, NextTokenConfig().build(), mine, precision()).sum
    out["missing"] = _message(ModelError, lambda: load_model_state(tiny(), {**wanted, "x": wanted["norm.bias"]}))
    out["shape"] = _message(
        ModelError, lambda: load_model_state(tiny(), {**wanted, "norm.bias": wanted["embed.weight"]})
    )
    return out


def gradients_between_micro_batches() -> dict[str, Any]:
    """What FSDP2 holds after the first of two micro-batches, as a share of the parameters."""
    out: dict[str, Any] = {}
    for accumulate in ("sharded", "whole"):
        parallel = _spread(decoder(), dp_shard=2, accumulate=accumulate)
        batch = global_batch(0)
        with parallel.no_sync(last_micro_batch=False):
            NextTokenConfig().build()(parallel.module, batch).sum.backward()
        out[accumulate] = sum(
            0 if p.grad is None else local_tensor(p.grad).numel() for p in parallel.model.parameters()
        ) / sum(p.numel() for p in parallel.model.parameters())
    return out


def meshes() -> dict[str, Any]:
    """Coordinates and groups with dimensions that data parallelism does not use."""
    out: dict[str, Any] = {}
    for name, degrees in {
        "shard_tp": Degrees(dp_shard=2, tp=2),
        "replicate_cp": Degrees(dp_replicate=2, cp=2),
        "pp_shard": Degrees(pp=2, dp_shard=2),
        "hsdp": Degrees(dp_replicate=2, dp_shard=2),
    }.items():
        mesh = build_mesh(degrees, CPU)
        members = []
        for dims in (("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard", "cp"), ("tp",)):
            group = mesh.group(*dims)
            members.append([rank()] if group is None else dist.get_process_group_ranks(group))
        out[name] = (mesh.dp_rank, mesh.dp_size, *members)
    return {"ranks": gather_objects(out), "unknown": _message(ValueError, lambda: mesh.submesh("xp"))}


def comm_trace() -> dict[str, Any]:
    """What a step of each way sends, as recorded."""
    from trainwright.parallel.comm.trace import CommTrace

    out: dict[str, Any] = {}
    for name in ("ddp2", "fsdp2", "tp2", "cp2", "cp2_ulysses"):
        cell = TRAININGS[name]
        config = ParallelConfig(**cell.parallel)
        mesh = build_mesh(config.resolve(world_size()), CPU)
        parallel = parallelize(cell.build(), mesh, config, precision(), CPU)
        executor, objective = AutogradExecutor(ROWS, precision()), NextTokenConfig().build()
        batch = my_rows(global_batch(0), mesh)
        executor.run(parallel, objective, batch)  # DDP rebuilds its buckets after the first step
        with CommTrace() as trace:
            executor.run(parallel, objective, batch)
        executor.run(parallel, objective, batch)  # no longer recorded
        out[name] = {
            "kinds": {k: (v.calls, v.bytes) for k, v in trace.summary().kinds.items()},
            "ended": all(r.end is not None and r.end >= r.start for r in trace.records),
            "waited": trace.summary().waited,
            "sequence": trace.sequence(),
            "events": trace.events(),
            "params": sum(p.numel() for p in parallel.model.parameters()),
        }
    return out


def summed_once() -> dict[str, Any]:
    """Gradients of what tensor-parallel ranks hold whole: of one step, of a second one on top of it, and of a backward
    pass outside of a step, which sums at once."""
    cell = TRAININGS["tp2"]
    config = ParallelConfig(**cell.parallel)
    mesh = build_mesh(config.resolve(world_size()), CPU)
    parallel = parallelize(cell.build(), mesh, config, precision(), CPU)
    executor, objective, batch = AutogradExecutor(2, precision()), NextTokenConfig().build(), global_batch(0)

    def gradients() -> dict[str, torch.Tensor]:
        return {n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters()}

    executor.run(parallel, objective, batch)
    out = {"once": gradients()}
    executor.run(parallel, objective, batch)
    out["twice"] = gradients()
    parallel.model.zero_grad()
    loss = objective(parallel.module, batch)  # type: ignore[arg-type]
    (loss.sum / batch.weight()).backward()
    out["outside"] = gradients()
    return out


def planned(names: tuple[str, ...]) -> dict[str, Any]:
    """Bytes per kind of collective, recorded and planned. Every token counts, as the plan takes it."""
    from trainwright.parallel.comm.trace import CommTrace
    from trainwright.parallel.context.pieces import document_lengths
    from trainwright.planning.comm_plan import Work, planned_transfers
    from trainwright.train.pipeline_executor import executor_kind

    out: dict[str, Any] = {}
    for name in names:
        cell = {**TRAININGS, **PLANNED}[name]
        model = cell.build()
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        arch, held = model.arch, next(model.parameters()).element_size()
        size = held if cell.double else cell.dtype.itemsize
        config = ParallelConfig(**cell.parallel)
        mesh = build_mesh(config.resolve(world_size()), CPU)
        parallel = parallelize(model, mesh, config, precision(cell.dtype), CPU)
        executor, objective = executor_kind(parallel)(cell.micro, precision(cell.dtype)), NextTokenConfig().build()
        batch = my_rows(global_batch(0), mesh)
        batch.weights = torch.ones_like(batch.weights)
        for _ in range(2):  # DDP tells its buckets once, after the first; a pipeline the names of its figures
            executor.run(parallel, objective, batch)
            parallel.model.zero_grad()
        with CommTrace() as trace:
            executor.run(parallel, objective, batch)
        work = Work(
            arch, shapes, LENGTH, ROWS, cell.micro, 1.0, activation_bytes=size, gathered_bytes=size,
            parameter_bytes=held, reduced_bytes=held, lengths=tuple(map(tuple, document_lengths(batch.doc_ids))),
        )  # fmt: skip
        expected: dict[str, int] = {}
        for t in planned_transfers(work, mesh.degrees, config):
            expected[t.kind] = expected.get(t.kind, 0) + t.bytes
        recorded = {k: v.bytes for k, v in trace.summary().kinds.items() if v.bytes}
        out[name] = (recorded, expected)
    return out


def validation_of_other_weights() -> dict[str, Any]:
    """A validation after a change of the weights, with no training step between: as of averages after the live ones."""
    from trainwright.train.evaluate import evaluate

    out: dict[str, Any] = {}
    kept = {"dp_shard": 2, "reshard_after_forward": False}
    for name, settings in {"ddp": {}, "fsdp": {"dp_shard": 2}, "fsdp_keep": kept, "tp": {"tp": 2}}.items():
        parallel = _spread(decoder("llama", n_heads=2, n_kv_heads=2, tie_embeddings=True), **settings)
        held = list(parallel.model.parameters())  # as optimizers and averages hold them; later it may be gathered ones
        mesh = build_mesh(ParallelConfig(**settings).resolve(world_size()), CPU)
        objective = NextTokenConfig().build()
        found = []
        for _ in range(2):
            batches = [my_rows(global_batch(0), mesh)]
            found.append(evaluate(parallel, objective, batches, CPU, precision())["val_loss"])
            with torch.no_grad():
                for p in held:
                    p.mul_(3.0)
        out[name] = found
    return out


def planned_2() -> dict[str, Any]:
    names = (
        "ddp2_decoder shard2_plain tp2 tp2_tied tp2_stream_whole tp2_bias tp2_moe tp2_domino cp2 "
        "cp2_window cp2_ulysses ep2_bias ep2_none ep2_cp cp2_flashcp amsp2_zero1 amsp2_zero2"
    )
    return planned((*names.split(), *(name for name in PLANNED if "4" not in name)))


def planned_4() -> dict[str, Any]:
    names = (
        "tp4_shard2 tp4_replicate2 cp4_usp cp4_shard2 cp4_replicate2 cp4_tp2 hsdp4_plain cp4_bytescale "
        "cp4_flexsp cp4_basp tp4_domino_cp2 tp4_domino_cp2_ulysses ep2_shard4 ep2_replicate4 ep2_tp4 amsp4_of_1_2_4 "
        "amsp4_of_1_1_2 amsp4_cp2"
    )
    return planned((*names.split(), *(name for name in PLANNED if "4" in name)))


def muon_experts(spread: bool = True) -> dict[str, Any]:
    """A step of Muon where experts are spread and each is sharded by expert again: weights, and bytes of the step."""
    from trainwright.core.params import named_params
    from trainwright.core.registry import build
    from trainwright.parallel.comm.trace import CommTrace

    config = ParallelConfig(**TRAININGS["ep2_shard4"].parallel) if spread else ParallelConfig()
    mesh = build_mesh(config.resolve(world_size()), CPU)
    parallel = parallelize(TRAININGS["ep2_shard4"].build(), mesh, config, precision(), CPU)
    optimizer = build("optimizer", "muon").build(named_params(parallel.model))  # type: ignore[attr-defined]
    AutogradExecutor(ROWS, precision()).run(parallel, NextTokenConfig().build(), my_rows(global_batch(0), mesh))
    with CommTrace() as trace:
        optimizer.step()
    sizes = [int(p.numel()) for n, p in parallel.model.named_parameters() if p.ndim == 2]
    return {
        "weights": {n: full_tensor(t).clone() for n, t in model_state(parallel.model).items()},
        "sent": trace.summary().bytes,
        "matrices": 8 * sum(sizes),
    }


CHECKS = {
    f.__name__: f
    for f in (
        comm_trace,
        planned_2,
        summed_once,
        validation_of_other_weights,
        planned_4,
        muon_experts,
        meta_build,
        different_builds,
        unused,
        states,
        gradients_between_micro_batches,
        meshes,
    )
}


def main(out: str, names: str) -> None:
    torch.set_num_threads(1)
    init_distributed(CPU, timeout_s=60)
    results: dict[str, Any] = {}
    for name in names.split(","):
        if name in CHECKS:
            results[name] = CHECKS[name]()
        else:
            cell = TRAININGS[name]
            config = ParallelConfig(**cell.parallel)
            results[name] = train(cell, build_mesh(config.resolve(world_size()), CPU), config)
    torch.save(results, f"{out}.{rank()}")
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
