"""The four ranks of the tests of attention over pieces of documents: FlashCP and ByteScale.

python pieces_worker.py RESULT_FILE      with MASTER_ADDR, MASTER_PORT set; imports once and forks the ranks
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.distributed import gather_objects
from trainwright.core.errors import ConfigError, ModelError
from trainwright.models.attention import document_mask
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.comm.trace import CommTrace
from trainwright.parallel.context.bytescale import ByteScale
from trainwright.parallel.context.flashcp import FlashCP
from trainwright.parallel.mesh import init_distributed, shutdown
from trainwright.planning.flashcp import CUT, Plan, make_plan, per_document

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, VOCAB = 4, 2, 8, 31


def rows(lengths: list[list[int]], seed: int = 0) -> Batch:
    """Rows of documents of these lengths; ids come back, weights are ragged, extras name each slot."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths[0])
    tokens = torch.randint(VOCAB, (len(lengths), total + 1), generator=g)
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)) % 3, torch.tensor(n)) for n in lengths])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    weights = (torch.rand(len(lengths), total, generator=g) < 0.7).float()
    slots = torch.arange(len(lengths) * total).view(len(lengths), total)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, ids.int(), {"slot": slots})


def whole(batch: Batch, window: int = 0, heads: int = HEADS) -> dict[str, Tensor]:
    """Attention in one process with plain torch in float64: q, k, v, a gradient, the output and the gradients."""
    g = torch.Generator().manual_seed(1)
    b, t = batch.tokens.shape
    q, k, v = (
        torch.randn(b, t, h, WIDTH, generator=g, dtype=torch.float64).requires_grad_()
        for h in (heads, KV_HEADS, KV_HEADS)
    )
    grad = torch.randn(b, t, heads, WIDTH, generator=g, dtype=torch.float64)
    mask = document_mask(batch.doc_ids, t, window, CPU)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return {"q": q, "k": k, "v": v, "grad": grad, "out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def mine(t: Tensor, shard: Batch) -> Tensor:
    """This rank's slots of ``t [B, T, ...]``; padding gets slot 0, and is not looked at."""
    return t.detach().flatten(0, 1)[shard.extras["slot"]]


def off(context: Any, batch: Batch, window: int = 0) -> dict[str, Any]:
    """Largest difference to one process over this rank's slots, the slots, and what was sent."""
    want = whole(batch, window)
    shard = context.shard(batch)
    b, t = shard.tokens.shape
    q, k, v = (mine(want[n], shard).requires_grad_() for n in "qkv")
    used = shard.doc_ids >= 0
    grad = mine(want["grad"], shard).masked_fill(~used[..., None, None], 0.0)
    with CommTrace() as trace:
        plan = context.plan(shard.doc_ids, b, t, window, CPU)
        out = context.attend(q, k, v, plan)
        forward = sum(r.bytes for r in trace.records if r.kind == "send")
        grads = torch.autograd.grad(out, (q, k, v), grad)
    worst = 0.0
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        worst = max(worst, _largest((got.detach() - mine(want[name], shard))[used]))
        worst = max(worst, _largest(got.detach()[~used]))  # padding gives and gets nothing
    total = sum(r.bytes for r in trace.records if r.kind == "send")
    return {
        "worst": worst,
        "slots": shard.extras["slot"][used].tolist(),
        "weights": float(shard.weights.sum()),
        "padded": float(shard.weights[~used].sum()),
        "shape": (b, t),
        "forward": forward,
        "bytes": total,
        "kinds": {r.kind for r in trace.records},
    }


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


GROUPS: dict[int, Any] = {}


def group(size: int) -> Any:
    """This rank's group of 2 neighbours, or all 4."""
    if not GROUPS:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        GROUPS.update({2: halves[dist.get_rank() // 2], 4: dist.group.WORLD})
    return GROUPS[size]


LENGTHS = [[1, 20, 3, 17, 23], [40, 2, 2, 2, 18]]


def any_plan(lengths: Any, ranks: int) -> Plan:
    """Some documents cut, also such as have a token for some chunks only, the others anywhere."""
    g = torch.Generator().manual_seed(sum(lengths) + len(lengths) + lengths[0])
    homes = torch.randint(-1, ranks, (len(lengths),), generator=g).tolist()
    homes[lengths.index(max(lengths))] = CUT
    homes[lengths.index(min(lengths))] = CUT
    return Plan(tuple(lengths), ranks, tuple(homes))


def flashcp() -> dict[str, Any]:
    out: dict[str, Any] = {}
    batch = rows(LENGTHS)
    for size in (2, 4):
        for window in (0, 7):
            for keep in (True, False):
                context = FlashCP(group(size), any_plan, keep=keep)
                out[f"any-{size}-{window}-{keep}"] = off(context, batch, window)
        searched = FlashCP(group(size), lambda lengths, ranks: make_plan(lengths, ranks, min_chunk=1))
        out[f"search-{size}"] = off(searched, batch)
        even = rows([[32, 16, 16], [48, 8, 8]])
        out[f"cut-{size}"] = off(FlashCP(group(size), per_document), even)
        out[f"again-{size}"] = off(FlashCP(group(size), per_document, keep=False), even)
        nowhere = FlashCP(group(size), lambda n, r: Plan(tuple(n), r, tuple(k % r for k in range(len(n)))))
        out[f"whole-{size}"] = off(nowhere, even)
        keys = torch.zeros(2, 2, KV_HEADS, 64 // size, WIDTH, dtype=torch.float64)  # of two rows of 64 tokens
        with CommTrace() as trace:
            gathered = [torch.empty_like(keys) for _ in range(size)]
            dist.all_gather(gathered, keys, group=group(size))
        out[f"all-gather-{size}"] = trace.summary().bytes
    return out


def different_plans() -> str:
    def planner(lengths: Any, ranks: int) -> Plan:
        return Plan(tuple(lengths), ranks, (dist.get_rank() // 3,) * len(lengths))

    try:
        FlashCP(group(4), planner).shard(rows(LENGTHS))
    except ModelError as error:
        return str(error)
    return "no error"


# -- ByteScale --------------------------------------------------------------------------------------------------------


def model() -> Any:
    torch.manual_seed(0)
    dims = {"dim": 16, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "ffn_dim": 24}
    return DecoderModelConfig(family="llama", **dims).build(VOCAB, 64).double()


def spread(context: Any) -> Any:
    found = model()
    found.plan_attention = context.plan
    for block in found.blocks:
        block.attn.attend = context.attend
    return found


def gradients(net: Any, micro_batches: list[Batch], weight: float) -> tuple[float, dict[str, Tensor]]:
    objective = NextTokenConfig().build()
    total = 0.0
    for micro in micro_batches:
        loss = objective(net, micro).sum / weight
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in net.named_parameters()}


def hybrid(lengths: list[list[int]], capacity: int, seed: int = 0, keep: bool = True) -> dict[str, Any]:
    """Loss and gradients of a decoder by ranks with micro-batches of their own, against one process."""
    batch = rows(lengths, seed)
    weight = float(batch.weight())
    loss, want = gradients(model(), [batch], weight)
    context = ByteScale(group(4), capacity, keep=keep)
    micro_batches = context.micro_batches(batch, 1)
    with CommTrace() as trace:
        part, got = gradients(spread(context), micro_batches, weight)
    total = torch.tensor(part, dtype=torch.float64)
    dist.all_reduce(total)
    worst = abs(float(total) - loss)
    for name, grad in got.items():
        dist.all_reduce(grad)
        worst = max(worst, _largest(grad - want[name]) / max(_largest(want[name]), 1e-9))
    talk = [(r.kind, r.peer, r.size) for r in trace.records]
    whole_plan = context.plan_step([n for row in lengths for n in row], capacity)
    slots = [m.extras["slot"][m.doc_ids >= 0].tolist() for m in micro_batches]
    return {
        "worst": worst,
        "count": len(micro_batches),
        "slots": gather_objects([s for one in slots for s in one]),
        "talk": gather_objects(talk),
        "ranks": {m.ranks for m in whole_plan.micro_batches},
        "busy": gather_objects(sum(bool(s) for s in slots)),
        "weights": sum(gather_objects(sum(float(m.weight()) for m in micro_batches))) - weight,
    }


def ragged(seed: int) -> list[list[int]]:
    """Three rows of 48 tokens of random documents."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(3):
        row: list[int] = []
        while sum(row) < 48:
            most = int(torch.randint(1, 49, (), generator=g))
            row.append(min(most, 48 - sum(row)))
        out.append(row)
    return out


def bytescale() -> dict[str, Any]:
    out: dict[str, Any] = {
        "mixed": hybrid([[32, 16], [16, 32], [16, 16, 16]], 16),  # D = 2, 1, 1
        "again": hybrid([[32, 16], [16, 32], [16, 16, 16]], 16, keep=False),
        "short": hybrid([[8, 12, 16, 12], [16, 16, 16], [1, 2, 3, 10, 16, 16]], 16),
        "all": hybrid([[48], [48]], 12),
        **{f"ragged-{seed}": hybrid(ragged(seed), 14, seed) for seed in range(4)},
    }
    for name, lengths, capacity, window in (
        ("mixed", [[32, 16], [16, 32]], 16, 0),
        ("window", [[32, 16], [16, 32]], 16, 9),
        ("static", [[48]], 12, 0),
    ):
        out[f"shard-{name}"] = off(ByteScale(group(4), capacity), rows(lengths), window)
    out["static-flashcp"] = off(FlashCP(group(4), per_document), rows([[48]]))
    batch = rows([[48]])
    try:
        ByteScale(group(4), 10).micro_batches(batch, 1)
    except ConfigError as error:
        out["too small"] = str(error)
    batch.extras["reward"] = torch.zeros(1)
    try:
        ByteScale(group(4), 12).micro_batches(batch, 1)
    except ConfigError as error:
        out["of rows"] = str(error)
    return out


def main(out: str) -> None:
    init_distributed(CPU, timeout_s=200)
    group(4)
    results = {"flashcp": flashcp(), "different": different_plans(), "bytescale": bytescale()}
    torch.save(results, f"{out}.{dist.get_rank()}")
    shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "4"}
            main(sys.argv[1])
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children))
