"""Real processes: a decoder sharded with FSDP2 computes what the whole one does, and exports whole weights."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp

from trainwright.core.registry import build
from trainwright.models import from_pretrained, save_pretrained
from trainwright.models.decoder import head_logits
from trainwright.models.generate import generate_ids

SPEC = {"name": "decoder", "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64}
FAMILIES = [{"family": "qwen3"}, {"family": "mixtral", "balance": "bias", "tie_embeddings": False, "n_experts": 4}]


def _model(family):
    torch.manual_seed(0)
    return build("model", {**SPEC, **family}).build(50, 16).train()


def _data():
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (2, 16), generator=g)
    return tokens, torch.tensor([[0] * 5 + [1] * 11, [0] * 16], dtype=torch.int32)


def _loss(model, tokens, doc_ids):
    return model(tokens, doc_ids=doc_ids, head_fn=lambda h: head_logits(h).logsumexp(-1).mean())


def _worker(rank, world, port, folder, queue):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    out = []
    for i, family in enumerate(FAMILIES):
        model = _model(family)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        tokens, doc_ids = _data()
        loss = _loss(model, tokens[rank : rank + 1], doc_ids[rank : rank + 1])
        loss.backward()
        grads = {n: p.grad.full_tensor().tolist() for n, p in model.named_parameters()}
        ids = generate_ids(model, [[1, 2, 3], [4]], max_new_tokens=4, temperature=1.0, seed=2)
        save_pretrained(model, f"{folder}/{i}")
        out.append((loss.item(), grads, ids))
    queue.put((rank, out))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(180)
def test_fully_sharded_equals_whole(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = mp.get_context("spawn").Queue()
    context = mp.start_processes(
        _worker, args=(2, port, str(tmp_path), queue), nprocs=2, start_method="spawn", join=False
    )
    results = dict(queue.get(timeout=120) for _ in range(2))
    while not context.join():
        pass
    for i, family in enumerate(FAMILIES):
        model = _model(family)
        tokens, doc_ids = _data()
        loss = sum(_loss(model, tokens[r : r + 1], doc_ids[r : r + 1]) for r in range(2)) / 2
        loss.backward()
        assert sum(results[r][i][0] for r in range(2)) / 2 == pytest.approx(loss.item(), rel=1e-6)
        for name, param in model.named_parameters():
            got = torch.tensor(results[0][i][1][name])
            torch.testing.assert_close(got, param.grad, atol=1e-6, rtol=1e-4)
        want = generate_ids(model, [[1, 2, 3], [4]], max_new_tokens=4, temperature=1.0, seed=2)
        assert results[0][i][2] == results[1][i][2] == want
        back = from_pretrained(tmp_path / str(i)).state_dict()
        for name, tensor in model.state_dict().items():
            assert torch.equal(back[name], tensor)
