"""One rank of test_odb_ranks.py: a scenario on a real gloo group; what happened is written as JSON."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from odb_samples import Samples, ids, keep

from trainwright.core.errors import TrainwrightError
from trainwright.data.odb import OnlineDynamicBatches

TIMEOUT = 30.0


def shard(lengths, rank, world, counts=None):
    """This rank's samples: every ``world``-th, or ``counts[rank]`` of its own."""
    if counts is None:
        return Samples(lengths[rank::world], first=1000 * rank)
    return Samples(lengths[: counts[rank]], first=1000 * rank)


def lognormal(n):
    return np.clip(np.random.default_rng(7).lognormal(4, 1, n), 4, 512).astype(int).tolist()


def dynamic(data, budget=1024, context=None, timeout=TIMEOUT, **settings):
    workers = {"num_workers": 1, "multiprocessing_context": context} if context else {}
    loader = DataLoader(data, batch_size=1, shuffle=True, collate_fn=keep, **workers)
    return OnlineDynamicBatches(loader, budget, window=16, timeout=timeout, **settings)


def coverage(data, **settings):
    steps = list(dynamic(data, **settings))
    return {"steps": len(steps), "ids": ids(steps), "expected": [data.first + i for i in range(len(data))]}


def gradients(data):
    """Largest difference between DDP's gradient of a step and that of the mean over all ranks' tokens, float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    parallel = DistributedDataParallel(model)

    def features(samples):
        tokens = torch.tensor([t for s in samples for t in s["input_ids"]], dtype=torch.float64)
        return torch.stack([torch.sin(tokens), torch.cos(tokens), tokens % 5], dim=1)

    worst, idle = 0.0, 0
    for step in dynamic(data, budget=256):
        parallel.zero_grad()
        (parallel(features(step.batch)).square().mean() * step.loss_scale).backward()
        got = [p.grad.clone() for p in model.parameters()]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [] if step.idle else step.batch)
        loss = model(features([s for samples in everyone for s in samples])).square().mean()
        expected = torch.autograd.grad(loss, list(model.parameters()))
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)))
        idle += step.idle
    return {"worst": worst, "idle": idle}


def stalls(data, victim):
    for i, _ in enumerate(dynamic(data, budget=256, timeout=3.0)):
        if i == 6 and dist.get_rank() == victim:
            time.sleep(8)
    return {"end": True}


def killed(data, victim):
    batches = dynamic(data, budget=256)
    for i, _ in enumerate(batches):
        if i == 6 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"end": True}


def run(scenario, rank, world):
    if scenario == "coverage":
        return {
            "even": coverage(shard(lognormal(201), rank, world)),
            "unequal": coverage(shard(lognormal(60), rank, world, [60, 37, 5, 1])),
            "first ends": coverage(shard(lognormal(60), rank, world, [1, 50, 60, 60])),
            "last ends": coverage(shard(lognormal(60), rank, world, [60, 60, 60, 1])),
            # Workers by another start method than the ranks: in others that turned the exchange off.
            "workers": coverage(
                shard(lognormal(30), rank, world, [30, 17, 5, 1]), context="spawn" if world == 2 else "fork"
            ),
            "gradients": gradients(shard(lognormal(60), rank, world, [60, 37, 5, 1])),
        }
    if scenario == "fails":
        data = shard(lognormal(90), rank, world)
        if rank == 1:
            data.lengths[40] = 0
        return coverage(data)
    if scenario == "stalls":
        return stalls(shard(lognormal(400), rank, world), 1)
    return killed(shard(lognormal(400), rank, world), int(scenario.removeprefix("kill")))


def main():
    out, init, scenario = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, world = int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=2 * TIMEOUT)
    )
    started = time.monotonic()
    try:
        result = {"error": None, **run(scenario, rank, world)}
    except TrainwrightError as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    result["seconds"] = time.monotonic() - started
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # ending the process group waits for ranks that are no more


if __name__ == "__main__":
    main()
