"""One of four processes. Saves on 4 ranks, loads on 2, saves there, loads on 1, saves, loads on 2.

Between the stages process groups are made anew, so that one launch covers all sizes.
"""

import errno
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from trainwright.core.distributed import full_tensor
from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint import Checkpointer, inspect

torch.set_num_threads(1)
ROOT, RANK = Path(sys.argv[1]), int(sys.argv[2])
HERE = ROOT / "checkpoints"


def start(world, stage):
    store = f"file://{ROOT}/store-{stage}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=world, timeout=timedelta(seconds=60))


def model(world):
    """63 and 3 rows do not divide by 4 ranks: uneven and empty shards."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 63), torch.nn.Linear(63, 16, bias=False), torch.nn.Linear(16, 3))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.linspace(-1, 1, 64).reshape(4, 16)).square().sum().backward()
    optimizer.step()


def named_state(net, optimizer):
    return {name: dict(optimizer.state[p]) for name, p in net.named_parameters()}


def layouts(world, fill=None):
    """The same numbers in several layouts; another one for each world size."""
    numbers = {n: torch.arange(7 * 10.0).reshape(7, 10) + i for i, n in enumerate("abcd")}
    numbers["whole"] = torch.arange(5)
    numbers["hybrid"] = torch.arange(9.0)
    numbers["tp"] = torch.arange(9 * 8.0).reshape(9, 8)
    if fill is not None:
        numbers = {n: torch.full_like(t, fill) for n, t in numbers.items()}
    if world == 1:
        return numbers
    line = init_device_mesh("cpu", (world,))
    placed = {
        "a": distribute_tensor(numbers["a"], line, [Shard(0 if world == 4 else 1)]),
        "b": distribute_tensor(numbers["b"], line, [Shard(1 if world == 4 else 0)]),
        "c": distribute_tensor(numbers["c"], line, [Replicate()]),
    }
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        placed["d"] = distribute_tensor(numbers["d"], square, [Shard(1), Shard(0)])
        placed["hybrid"] = distribute_tensor(numbers["hybrid"], square, [Replicate(), Shard(0)])  # as HSDP has it
        placed["tp"] = fsdp_over_tp(numbers["tp"])
    return {**numbers, **placed}


def fsdp_over_tp(weight):
    """9 rows over tensor parallel 2 and, within that, FSDP 2: strided and uneven shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Sequential(torch.nn.Linear(8, 9, bias=False))
    net[0].weight.data.copy_(weight)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net[0].weight.detach()


def wholes(tree):
    return {k: wholes(v) if isinstance(v, dict) else full_tensor(v.detach()).clone() for k, v in tree.items()}


def equal(a, b):
    return (
        all(equal(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) for k in a)
        and a.keys() == b.keys()
    )


def expect(condition, what):
    if not condition:
        raise AssertionError(f"rank {RANK}: {what}")


def load_and_check(world, path, reference):
    net, optimizer = model(world)
    step(net, optimizer)
    step(net, optimizer)  # state exists, with other values
    tensors = {"optimizer": named_state(net, optimizer), "extra": layouts(world, -1), "scalars": {"lr": None}}
    checkpointer = Checkpointer(HERE, keep=9)
    expect(checkpointer.latest() == path, f"latest is {checkpointer.latest()}")
    meta = checkpointer.load(path, tensors, weights=dict(net.named_parameters()))
    expect(meta == {"from": inspect(path).world_size}, meta)
    expect(tensors["scalars"] == {"lr": 0.1}, tensors["scalars"])
    got = {
        "weights": wholes(dict(net.named_parameters())),
        "state": wholes({k: tensors[k] for k in ("optimizer", "extra")}),
    }
    expect(equal(got, reference), f"values differ on {world} ranks")
    return checkpointer, net, optimizer, tensors


def save(checkpointer, number, world, net, tensors):
    own = {"rank": RANK, "noise": torch.full((2,), float(RANK))}
    checkpointer.save(number, tensors, {"from": world}, dict(net.named_parameters()), own)
    with torch.no_grad():  # the caller goes on training while it is written
        for p in net.parameters():
            p.add_(1)
    checkpointer.wait()


def refused(work, *words):
    try:
        work()
    except CheckpointError as error:
        expect(all(w in str(error) for w in words), f"message: {error}")
    else:
        raise AssertionError(f"rank {RANK}: nothing was raised for {words}")


def failures(checkpointer, tensors, net):
    """Errors of one rank reach all, and leave nothing behind."""
    before = sorted(p.name for p in HERE.iterdir())
    weights = dict(net.named_parameters())
    refused(lambda: checkpointer.save(9, {"t": torch.ones(2 + RANK)}, {}), "state/t", "rank 1", "per_rank")
    bad = {"t": object() if RANK == 1 else 1}
    refused(lambda: checkpointer.save(9, bad, {}), "cannot store t")

    def differing():
        checkpointer.save(9, {"t": RANK}, {})
        checkpointer.wait()

    refused(differing, "per_rank")

    def without_memory():
        checkpointer.save(9, tensors, {}, weights)
        checkpointer.wait()

    snapshot = checkpointer._buffers.snapshot

    def no_memory(*args):
        raise RuntimeError("out of host memory")

    if RANK == 1:
        checkpointer._buffers.snapshot = no_memory
    refused(without_memory, "cannot copy the tensors of step 9: out of host memory")
    checkpointer._buffers.snapshot = snapshot
    real = os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_full_disk():
        checkpointer.save(9, tensors, {}, weights)
        checkpointer.wait()

    if RANK == 1:
        os.write = full
    refused(on_full_disk, "disk is full")
    os.write = real
    dist.barrier()  # rank 0 removes what was written
    expect(sorted(p.name for p in HERE.iterdir()) == before, "something was left")
    # one rank has fewer parameters: named on all ranks, nothing loaded
    path = checkpointer.latest()
    fewer = {n: p for n, p in weights.items() if RANK == 0 or n != "0.bias"} | ({"new": torch.ones(1)} if RANK else {})
    refused(lambda: checkpointer.load(path, None, weights=fewer), "weights/new")


def main():
    logging.basicConfig(level="ERROR")
    start(4, "a")
    net, optimizer = model(4)
    step(net, optimizer)
    tensors = {"optimizer": named_state(net, optimizer), "extra": layouts(4), "scalars": {"lr": 0.1}}
    reference = {
        "weights": wholes(dict(net.named_parameters())),
        "state": wholes({k: tensors[k] for k in ("optimizer", "extra")}),
    }
    if RANK == 0:
        torch.save(reference, ROOT / "reference.pt")
    with Checkpointer(HERE, keep=9) as checkpointer:
        save(checkpointer, 4, 4, net, tensors)
    dist.barrier()
    dist.destroy_process_group()
    if RANK > 1:
        return

    start(2, "b")
    checkpointer, net, optimizer, tensors = load_and_check(2, HERE / "step-00000004", reference)
    expect(checkpointer.per_rank(HERE / "step-00000004")["rank"] == RANK, "per_rank")
    save(checkpointer, 5, 2, net, tensors)
    failures(checkpointer, tensors, net)
    # the newest damaged: all ranks agree on the one before
    save(checkpointer, 6, 2, net, tensors)
    if RANK == 0:
        victim = next((HERE / "step-00000006" / "state").glob("*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1] + b"\x55")
    dist.barrier()
    expect(checkpointer.latest() == HERE / "step-00000005", "latest after damage")
    checkpointer.close()
    dist.destroy_process_group()

    if RANK == 0:
        checkpointer, net, optimizer, tensors = load_and_check(1, HERE / "step-00000005", reference)
        save(checkpointer, 7, 1, net, tensors)
        checkpointer.close()
    start(2, "c")
    dist.barrier()
    checkpointer, *_ = load_and_check(2, HERE / "step-00000007", reference)
    own = checkpointer.per_rank(HERE / "step-00000007")
    expect((own is None) == (RANK == 1), "per_rank of a rank that was not there")
    checkpointer.save(8, {}, {}, dict(reference["state"]["extra"]))  # replicated, as under DDP
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
