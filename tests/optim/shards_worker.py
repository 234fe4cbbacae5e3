"""One rank of the two-rank job of test_optimizer_shards: measures, and writes the figures as JSON."""

import copy
import json
import os

import torch
import torch.distributed as dist
from optimizer_zoo import ROLES, Zoo, backward, batch, named
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainwright.core.params import NamedParam
from trainwright.core.registry import build, get, methods
from trainwright.optim import muon
from trainwright.optim.state import allocate_named_state, load_named_state, named_state, optimizer_state_bytes


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # float32 iteration on every machine, so that the tolerances hold on CPUs with AMX too
    muon.iteration_dtype = lambda device: torch.float32
    mesh = init_device_mesh("cpu", (2,))
    out = {"optimizer": {m.name: optimizer_figures(m.name, mesh) for m in methods("optimizer")}}
    out["muon"] = muon_figures(mesh)
    out["clip"] = {m.name: clip_figures(m.name, mesh) for m in methods("clip")}
    out["average"] = {m.name: average_figures(m.name, mesh) for m in methods("average")}
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(out, f)
    dist.barrier()
    dist.destroy_process_group()


def sharded_zoo(mesh):
    model = Zoo(scalar=False)
    fully_shard(model, mesh=mesh)
    return model


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def difference(a, b):
    return max(
        float((whole(p.detach()) - whole(q.detach())).abs().max())
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def steps(model, optimizer, first, last):
    for i in range(first, last):
        backward(model, batch(i))
        optimizer.step()
        optimizer.zero_grad()


def fill(target, source):
    """Copy whatever the layouts are: what a checkpoint's reshard does."""
    full = whole(source)
    target.copy_(
        distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        if isinstance(target, DTensor)
        else full
    )


def moved(optimizer, model, other_model, other):
    """``other`` for ``other_model`` with the weights and state of ``optimizer``, in another layout."""
    with torch.no_grad():
        for p, q in zip(other_model.parameters(), model.parameters(), strict=True):
            fill(p, q.detach())
    state = named_state(optimizer, named(model))
    scalars = json.loads(json.dumps(state["scalars"]))
    tensors = allocate_named_state(named(other_model), scalars)
    for name, entries in tensors.items():
        for key, tensor in entries.items():
            fill(tensor, state["tensors"][name][key])
    load_named_state(other, named(other_model), {"tensors": tensors, "scalars": scalars})
    return other


def optimizer_figures(name, mesh):
    config = build("optimizer", name)
    one, two = Zoo(scalar=False), sharded_zoo(mesh)
    a, b = config.build(named(one)), config.build(named(two))
    start = copy.deepcopy(one)
    steps(one, a, 0, 5), steps(two, b, 0, 5)
    figures = {"difference": difference(one, two), "way": difference(one, start)}
    figures["empty_shards"] = sum(p.to_local().numel() == 0 for p in two.parameters())
    figures["bytes"], figures["whole_bytes"] = optimizer_state_bytes(b), optimizer_state_bytes(a)

    # sharded -> whole and whole -> sharded, then two more steps each
    three, four = Zoo(scalar=False), sharded_zoo(mesh)
    c = moved(b, two, three, config.build(named(three)))
    d = moved(a, one, four, config.build(named(four)))
    for model, optimizer in ((one, a), (two, b), (three, c), (four, d)):
        steps(model, optimizer, 5, 7)
    figures["sharded_to_whole"], figures["whole_to_sharded"] = difference(two, three), difference(one, four)

    # float16: an overflow that one rank alone sees is skipped by both
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    backward(two, batch(9), 256.0)
    if dist.get_rank() == 1:
        two.up.grad.to_local()[0, 0] = float("inf")
    before = [p.detach().to_local().clone() for p in two.parameters()]
    scaler.unscale_(b), scaler.step(b), scaler.update()
    figures["skipped"] = all(torch.equal(p.to_local(), q) for p, q in zip(two.parameters(), before, strict=True))
    figures["scale"] = scaler.get_scale()
    return figures


def muon_figures(mesh):
    """Cosine of one step's update with that of the whole matrix in float64."""
    figures = {}
    for shape in [(64, 64), (64, 16), (16, 64), (63, 16), (1, 16), (3, 16, 8)]:
        for placement in (Shard(0), Shard(1), Replicate()):
            for dtype in (torch.float32, torch.bfloat16):
                g = torch.Generator().manual_seed(0)
                weight, grad = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
                p = nn.Parameter(distribute_tensor(weight.clone(), mesh, [placement]))
                p.grad = distribute_tensor(grad.clone(), mesh, [placement])
                optimizer = muon.Muon([p], lr=1.0, weight_decay=0.0, adjust="original", dtype=dtype)
                optimizer.step()
                update = weight - p.detach().full_tensor()
                wanted = muon.newton_schulz(grad.double()) * muon.update_scale(shape, "original")
                cosine = torch.cosine_similarity(update.flatten().double(), wanted.flatten(), dim=0)
                key = f"{shape} {placement} {dtype}"
                figures[key] = {"cosine": float(cosine), "size": float(update.norm() / wanted.norm())}
                state = named_state(optimizer, [NamedParam("p", p, "matrix")])["tensors"]["p"]["momentum"]
                figures[key]["sharded_state"] = list(state.to_local().shape) == list(p.to_local().shape)
    return figures


def clip_figures(name, mesh):
    one, two = Zoo(scalar=False), sharded_zoo(mesh)
    backward(one, batch(0), 30.0), backward(two, batch(0), 30.0)
    clip = build("clip", name).build()
    norms = [clip(list(m.parameters())) for m in (one, two)]
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.full((3,), 100.0)
    mixed = clip([*two.parameters(), plain])  # sharded and plain together
    half = nn.Parameter(distribute_tensor(torch.zeros(37, 5, dtype=torch.bfloat16), mesh, [Shard(0)]))
    grad = torch.randn(37, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    half.grad = distribute_tensor(grad, mesh, [Shard(0)])
    half_norm = float(clip([half]))
    gradients = [torch.cat([whole(p.grad).flatten() for p in m.parameters()]) for m in (one, two)]
    return {
        "norms": [float(n) for n in norms],
        "plain_norm": not isinstance(norms[1], DTensor),
        "mixed": float(mixed),
        "half": half_norm / float(grad.double().norm()),
        "direction": float(torch.cosine_similarity(*gradients, dim=0)),
    }


def average_config(name):
    """An average that acts on every step: defaults of methods over snapshots wait longer than these tests run."""
    every = {"every": 1} if "every" in get("average", name).config.model_fields else {}
    return build("average", {"name": name, **every})


def average_figures(name, mesh):
    one, two = Zoo(scalar=False), sharded_zoo(mesh)
    config = average_config(name)
    sgd = build("optimizer", "sgd")
    averages = [config.build(named(m)) for m in (one, two)]
    optimizers = [sgd.build(named(m)) for m in (one, two)]
    for i in range(5):
        for model, average, optimizer in zip((one, two), averages, optimizers, strict=True):
            steps(model, optimizer, i, i + 1)
            average.update(i + 1)
    live = difference(one, two)
    with averages[0].swapped(), averages[1].swapped():
        inside = difference(one, two)
        still_sharded = all(isinstance(p, DTensor) for p in two.parameters())
    return {"live": live, "inside": inside, "after": difference(one, two), "still_sharded": still_sharded}


assert set(ROLES) == {n for n, _ in Zoo().named_parameters()}
