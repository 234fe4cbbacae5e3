"""A matrix of one column that two ranks share out along its columns, as a layout for several would have it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainwright.optim.adapm import AdaPM
from trainwright.optim.gradnormlorp import GradNormLoRP

METHODS = {
    "gradnormlorp": lambda p: GradNormLoRP([p], rank=1),
    "adapm": lambda p: AdaPM([p], second_moment="blockwise"),
}


def job(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, make in METHODS.items():
        start = torch.randn(9, 1, generator=torch.Generator().manual_seed(0))
        p, q = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(1)]))
        a, b = make(p), make(q)
        for seed in range(3):
            p.grad = torch.randn(9, 1, generator=torch.Generator().manual_seed(10 + seed))
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(1)])
            a.step(), b.step()
        whole = q.full_tensor()
        assert not torch.equal(p, start), name
        torch.testing.assert_close(whole, p, msg=name)
    dist.destroy_process_group()
