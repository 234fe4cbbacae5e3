"""One rank of the jobs of test_lawa and test_zclip: averages over a ring, their state, and ZClip, on shards."""

import json
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from optimizer_zoo import Zoo, backward, batch, named
from shards_worker import fill, sharded_zoo, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainwright.core.registry import build
from trainwright.optim.clipping.zclip import ZClip

# The state of both averages over a ring goes through the same checkpoints.
SPECS = [{"name": "lawa", "k": 3, "every": 2}, {"name": "ptq_kernel", "size": 3, "tau": 3.0, "every": 2}]


def walk(model, step):
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.1)


def main(rank, folder, world, part):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    figures = {"averages": averages, "zclip": zclip}[part](init_device_mesh("cpu", (world,)))
    with open(f"{folder}/rank{rank}.json", "w") as f:
        json.dump(figures, f)
    dist.barrier()
    dist.destroy_process_group()


def run(folder, world, part):
    """What each of ``world`` processes has measured of ``part``."""
    job = mp.spawn(main, args=(str(folder), world, part), nprocs=world, join=False)
    deadline = time.monotonic() + 120
    while not (finished := job.join(timeout=1)) and time.monotonic() < deadline:
        pass  # join returns at each process that ends
    if not finished:
        for process in job.processes:
            process.kill()
        raise TimeoutError(f"the job of {world} ranks did not end within 120 s")
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(world)]


def averages(mesh):
    out = {}
    for spec in SPECS:
        config = build("average", {**spec, "every": 1})
        plain, sharded = Zoo(scalar=False), sharded_zoo(mesh)
        built = {m: config.build(named(m)) for m in (plain, sharded)}
        for step in range(1, 6):
            walk(plain, step)
            with torch.no_grad():
                for q, p in zip(sharded.parameters(), plain.parameters(), strict=True):
                    fill(q, p)
            for average in built.values():
                average.update(step)
        figures = {"layout": True}
        for name, entry in built[sharded].state_dict()["tensors"].items():
            p = dict(sharded.named_parameters())[name]
            for t in entry.values():
                figures["layout"] &= isinstance(t, DTensor) and t.placements == p.placements
        # to the other layout, both ways
        for key, source, target in (("gathered", sharded, Zoo(scalar=False)), ("cut", plain, sharded_zoo(mesh))):
            state, new = built[source].state_dict(), config.build(named(target))
            with torch.no_grad():
                for q, p in zip(target.parameters(), source.parameters(), strict=True):
                    fill(q, p)
                tensors = new.state_dict()["tensors"]
                for name, entry in tensors.items():
                    for slot, t in entry.items():
                        fill(t, state["tensors"][name][slot])
            new.load_state_dict({"tensors": tensors, "scalars": json.loads(json.dumps(state["scalars"]))})
            figures[key] = same(built[source], source, new, target)
        figures["sharded"] = same(built[plain], plain, built[sharded], sharded)
        figures["distance"] = [a.ring.square_distance(1) for a in built.values()]
        figures["bytes"] = built[sharded].ring.nbytes / built[plain].ring.nbytes
        out[spec["name"]] = figures
    return out


def zclip(mesh):
    """Gradients and statistics after steps past the warm-up, one of them a spike, on shards and on the whole."""
    plain, sharded = Zoo(scalar=False), sharded_zoo(mesh)
    clips = [ZClip(warmup_steps=3, max_norm=None) for _ in range(2)]
    figures = {"differences": [], "cut": []}
    for step, scale in enumerate([1.0, 1.1, 1.0, 1.05, 20.0, 1.0]):
        for model, clip in zip((plain, sharded), clips, strict=True):
            model.zero_grad()
            backward(model, batch(0), scale)
            before = whole(next(model.parameters()).grad).clone()
            clip(list(model.parameters()))
        pairs = [(p.grad, whole(q.grad)) for p, q in zip(plain.parameters(), sharded.parameters(), strict=True)]
        figures["differences"].append(max(float((a - b).norm() / a.norm()) for a, b in pairs))
        if not torch.equal(before, whole(next(sharded.parameters()).grad)):
            figures["cut"].append(step)
    figures["states"] = [clip.state_dict() for clip in clips]
    return figures


def same(a, model_a, b, model_b):
    with a.swapped(), b.swapped():
        pairs = zip(model_a.parameters(), model_b.parameters(), strict=True)
        return all(torch.equal(whole(p.detach()), whole(q.detach())) for p, q in pairs)
