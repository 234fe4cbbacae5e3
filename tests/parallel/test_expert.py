"""Expert parallelism on two ranks: against one process, and with ranks that get no token. (More in
test_data_parallel.py: trainings of 20 steps in many layouts.)"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright.core.errors import ConfigError
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.parallel.config import Degrees, ParallelConfig
from trainwright.parallel.expert import shard_dim
from trainwright.parallel.legal import check_cut
from trainwright.train.checkpoint import Checkpointer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import expert_worker as worker  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where one process has saved a checkpoint."""
    path = tmp_path_factory.mktemp("experts")
    with Checkpointer(path / "one", asynchronous=False) as writer:
        writer.save(1, {}, {}, weights=worker.model_state(worker.numbered()))
    return path


@pytest.fixture(scope="module")
def ranks(folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "expert_worker.py"), str(folder)]
    processes = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        logs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert all(p.returncode == 0 for p in processes), "\n".join(logs)[-6000:]
    return [torch.load(folder / f"result.{r}") for r in range(2)]


@pytest.mark.parametrize("name, favoured", [("even", ()), ("first", (0, 1)), ("second", (2, 3))])
def test_gradients_also_where_a_rank_gets_no_token(ranks, name, favoured):
    model = worker.model(favoured)
    batch = worker.global_batch(0)
    # The executor divides by the weight in float32, which 1e-10 would see.
    worker.AutogradExecutor(8, worker.precision()).run(
        worker.parallelize_alone(model), worker.NextTokenConfig().build(), batch
    )
    for result in ranks:
        got = result[name]
        assert got["held"] == [2, 2]
        for key, param in model.named_parameters():
            torch.testing.assert_close(got["gradients"][key], param.grad, rtol=1e-10, atol=1e-14, msg=key)
    load = ranks[0][name]["load"] + ranks[1][name]["load"]
    assert load.sum(1).tolist() == [batch.tokens.numel() * 2] * 2
    if favoured:
        assert load[:, list(favoured)].sum() == load.sum()
        idle = [e for e in range(4) if e not in favoured]
        assert ranks[0][name]["gradients"]["blocks.0.mlp.gate"][idle].abs().max() == 0


def test_both_ranks_make_the_same_collectives(ranks):
    """In order and kind; only the number of rows differs."""
    for name in ("even", "first", "second"):
        assert ranks[0][name]["kinds"] == ranks[1][name]["kinds"]
    # Per micro-batch and layer: counts, rows and results; gradients of results and rows.
    assert max(k.count("all_to_all") for k in ranks[0]["even"]["kinds"].values()) == 2 * 2 * 5


def test_an_optimizer_that_takes_whole_matrices(ranks):
    want = worker.optimized("muon", worker.parallelize_alone(worker.model()), worker.global_batch(0))
    for result in ranks:
        for key, weight in want.items():
            torch.testing.assert_close(result["muon"][key], weight, rtol=1e-9, atol=1e-9, msg=key)


def test_checkpoints_to_and_from_one_process(ranks, folder):
    want = worker.model_state(worker.numbered())
    for result in ranks:
        assert all(torch.equal(result["checkpoint"][n], want[n]) for n in want)
    weights = worker.model_state(worker.model())
    with Checkpointer(folder / "spread") as reader:
        reader.load(reader.latest(), weights=weights)
    trained = {n for n, _ in worker.model().named_parameters()}
    assert all(torch.equal(weights[n], want[n] + 0.5 if n in trained else want[n]) for n in want)


def test_what_fsdp_shards():
    gate = torch.empty(8, 6, 4)
    assert shard_dim(gate, ep=2, ranks=4) == 0  # a whole expert each
    assert shard_dim(gate, ep=4, ranks=3) == 1  # two experts for three ranks: a third of each
    assert shard_dim(gate, ep=4, ranks=5) == 0


def test_experts_that_ranks_cannot_share_evenly():
    arch = DecoderModelConfig(
        family="mixtral", dim=32, n_layers=1, n_heads=4, n_kv_heads=2, n_experts=6, moe_ffn_dim=32
    ).architecture(61)
    config = ParallelConfig(dp_shard=10, ep=2)
    with pytest.raises(ConfigError, match=r"parallel.ep=2: leaves 3 experts of widths 32 and 32 to 5 ranks"):
        check_cut(config.resolve(10), config, arch, 32)
    check_cut(Degrees(dp_shard=8, ep=2), config, arch, 32)
    with pytest.raises(ConfigError, match=r"parallel.ep=3: does not divide dp_shard x cp = 4.* use 1, 2, 4"):
        ParallelConfig(dp_shard=4, ep=3).resolve(4)
