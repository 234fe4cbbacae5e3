import functools
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp

from trainwright.core.errors import ConfigError
from trainwright.parallel.config import Degrees, ParallelConfig


@pytest.mark.parametrize(
    "settings, world, expected",
    [
        ({}, 1, (1, 1)),
        ({}, 4, (4, 1)),
        ({"dp_shard": 4}, 4, (1, 4)),
        ({"dp_shard": 2}, 8, (4, 2)),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, (2, 2)),
    ],
)
def test_degrees_fill_the_world(settings, world, expected):
    assert ParallelConfig(**settings).resolve(world) == Degrees(*expected)


@pytest.mark.parametrize(
    "settings, world, says",
    [
        ({"dp_shard": 3}, 4, "does not divide the world size 4; use one of 1, 2, 4"),
        ({"dp_replicate": 2}, 4, "dp_replicate=2 x dp_shard=1 = 2 processes, but there are 4"),
        ({"dp_replicate": 1, "pp": 2}, 4, "dp_replicate=1 x dp_shard=1 x pp=2 = 2 processes, but there are 4"),
        ({"dp_shard": 2, "ep": 4}, 2, "parallel.ep=4: does not divide dp_shard x cp = 2"),
    ],
)
def test_degrees_that_do_not_fit(settings, world, says):
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(**settings).resolve(world)


def test_replicate_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        ParallelConfig(dp_replicate=0)


def _model(tied):
    from trainwright.models.decoder_config import DecoderModelConfig

    torch.manual_seed(0)
    return DecoderModelConfig(dim=64, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=96, tie_embeddings=tied).build(
        131, 16
    )


def _batch(rows=4, length=16):
    from trainwright.core.batch import Batch

    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 131, (rows, length + 1), generator=g)
    weights = torch.ones(rows, length)
    weights[0, 3:] = 0  # ragged: a mean of means over ranks would be wrong
    weights[3] = 0  # the last rank's second row trains nothing
    positions = torch.arange(length).expand(rows, length)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, torch.zeros(rows, length, dtype=torch.int32))


def _gradients(parallel, batch, micro):
    from trainwright.objectives.next_token import NextTokenConfig
    from trainwright.precision.autocast import FP32Config
    from trainwright.train.executor import AutogradExecutor

    executor = AutogradExecutor(micro, FP32Config().build(torch.device("cpu")))
    executor.run(parallel, NextTokenConfig().build(), batch)
    from trainwright.core.distributed import full_tensor

    return {n: full_tensor(p.grad).clone() for n, p in parallel.model.named_parameters()}


def _name(cell, message):
    return f"{cell}: {message}"


def _worker(rank, world, port, out):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0"
    )
    torch.set_num_threads(1)
    from trainwright.core.distributed import local_tensor
    from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig
    from trainwright.parallel.apply import model_state, parallelize
    from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown
    from trainwright.precision.autocast import FP32Config

    device = torch.device("cpu")
    init_distributed(device)
    results = {}
    for ways in ({"dp_replicate": 2}, {"dp_shard": 2}):
        for tied in (True, False):
            for recompute in (False, True):
                for micro in (1, 2):
                    config = ParallelConfig(**ways)
                    mesh = build_mesh(config.resolve(world), device)
                    model = _model(tied)
                    if recompute:
                        ActivationCheckpointingConfig().apply(model)
                    names = set(model_state(model))
                    parallel = parallelize(model, mesh, config, FP32Config().build(device), device)
                    assert set(model_state(parallel.model)) == names
                    held = sum(local_tensor(p).numel() for p in parallel.model.parameters())
                    grads = _gradients(parallel, _batch().rows(2 * rank, 2 * rank + 2), micro)
                    results[(*ways, tied, recompute, micro)] = (held, model.num_params(), grads)
    if rank == 0:
        torch.save(results, out)
    shutdown()


def test_gradients_of_two_ranks_equal_one_process(tmp_path):
    """DDP and FSDP2, tied and untied heads, recomputation, one and two micro-batches, ragged weights, an idle row."""
    from trainwright.parallel.apply import parallelize
    from trainwright.parallel.mesh import build_mesh
    from trainwright.precision.autocast import FP32Config

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_worker, args=(2, port, tmp_path / "r.pt"), nprocs=2)
    results = torch.load(tmp_path / "r.pt")
    device = torch.device("cpu")
    expected = {}
    for tied in (True, False):
        config = ParallelConfig()
        parallel = parallelize(
            _model(tied), build_mesh(config.resolve(1), device), config, FP32Config().build(device), device
        )
        expected[tied] = _gradients(parallel, _batch(), 4)
    assert len(results) == 16
    for (way, tied, recompute, micro), (held, total, grads) in results.items():
        assert grads.keys() == expected[tied].keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad,
                expected[tied][name],
                rtol=1e-5,
                atol=1e-7,
                msg=functools.partial(_name, (way, tied, recompute, micro, name)),
            )
        if way == "dp_shard":
            assert held <= 0.51 * total
