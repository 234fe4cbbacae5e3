"""Real processes over gloo: FSDP2 weights, optimizer state and DTensors of several layouts on 4, 2 and 1 ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from trainwright.train.checkpoint import inspect, read_tensors, read_weights

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    logs = [(folder / f"log-{r}").open("w") for r in range(4)]
    workers = [
        subprocess.Popen([sys.executable, str(WORKER), str(folder), str(r)], stdout=log, stderr=log)
        for r, log in enumerate(logs)
    ]
    try:
        codes = [w.wait(timeout=200) for w in workers]
    finally:
        for w in workers:
            w.kill()
        for log in logs:
            log.close()
    assert codes == [0] * 4, "\n".join((folder / f"log-{r}").read_text()[-3000:] for r in range(4))
    return folder


def test_saved_and_loaded_on_4_2_1_2_ranks(root):
    names = sorted(p.name for p in (root / "checkpoints").iterdir())
    assert names == [f"step-{n:08d}" for n in (4, 5, 6, 7, 8)]
    reference = torch.load(root / "reference.pt")
    for number, world in [(4, 4), (5, 2), (7, 1)]:
        path = root / "checkpoints" / f"step-{number:08d}"
        info = inspect(path)
        assert info.world_size == world
        assert {f"ranks/rank-{r:05d}.json" for r in range(world)} <= info.files.keys()
        assert {n: s.shape for n, s in info.weights.items()} == {n: t.shape for n, t in reference["weights"].items()}
        weights, state = read_weights(path), read_tensors(path)
        assert all(torch.equal(weights[n], t) for n, t in reference["weights"].items())
        for name, moments in reference["state"]["optimizer"].items():
            assert all(torch.equal(state["optimizer"][name][k], v) for k, v in moments.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_read_by_safetensors_and_by_torch(root):
    reference = torch.load(root / "reference.pt")["weights"]
    folder = root / "checkpoints" / "step-00000004" / "weights"
    files = sorted(p.name for p in folder.iterdir())
    assert files == [f"shard-{r:05d}-of-00004.safetensors" for r in range(1, 5)]
    rows = []
    for file in files:  # by name, with safetensors alone: the shards of one tensor, in order of rank
        with safe_open(folder / file, "pt") as shard:
            rows += [shard.get_tensor("0.weight")]
    assert torch.equal(torch.cat(rows), reference["0.weight"])
    into = {name: torch.zeros_like(tensor) for name, tensor in reference.items()}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(into[name], tensor) for name, tensor in reference.items())


def test_replicas_are_written_once_and_spread(root):
    """Replicated tensors are in one rank's file only, and the ranks share the work."""
    info = inspect(root / "checkpoints" / "step-00000004")
    stored = sum(s for n, s in info.files.items() if n.startswith(("weights/", "state/")) and n.endswith("tensors"))
    reference = torch.load(root / "reference.pt")

    def nbytes(tree):
        return sum(nbytes(v) if isinstance(v, dict) else v.nbytes for v in tree.values())

    exact = nbytes(reference)
    assert exact < stored < exact + 8 * 4096  # 8 files, each with a header

    # unsharded weights make a folder as Hugging Face loaders read it
    folder = root / "checkpoints" / "step-00000008" / "weights"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    weights = reference["state"]["extra"]
    assert index["metadata"]["total_size"] == nbytes(weights)
    for name, tensor in weights.items():
        with safe_open(folder / index["weight_map"][name], "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
