"""One rank of test_lora.py: FSDP2 over models with adapters; writes losses and gradients to FOLDER/RANK.pt."""

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(folder):
    spec = importlib.util.spec_from_file_location("lora_cases", Path(__file__).with_name("test_lora.py"))
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = []
    for settings, more in cases.SHARDED:
        model = cases.learned(cases.lora(cases.decoder(**more), **settings)).train()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(cases.TOKENS[rank : rank + 1]).square().mean()
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
        out.append((loss.item(), grads, [n for n, p in model.named_parameters() if p.grad is not None]))
    torch.save(out, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
