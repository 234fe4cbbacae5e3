"""Ranks that hold other tokens or layers draw other dropout, ranks that hold the same stream draw the same."""

import itertools
import json

import pytest
import torch
from rank_processes import run_ranks

# A layout of four ranks, and the dimensions of the mesh along which the stream is another one.
LAYOUTS = {
    "tp": ({"tp": 2, "dp_shard": 2}, {"tp", "dp_shard"}),
    "tp_stream_whole": ({"tp": 2, "dp_shard": 2, "sequence_parallel": False}, {"dp_shard"}),
    "domino": ({"tp": 2, "cp": 2, "tensor": {"name": "domino", "row": 2}}, {"cp"}),
    "cp_tp": ({"cp": 2, "tp": 2}, {"cp", "tp"}),
    "pp_cp": ({"pp": 2, "cp": 2}, {"pp", "cp"}),
    "pp_tp": ({"pp": 2, "tp": 2, "sequence_parallel": False}, {"pp"}),
    "replicate_shard": ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate", "dp_shard"}),
}


@pytest.mark.timeout(900)
def test_masks_differ_where_the_stream_does(recipe, tmp_path):
    recipes = {
        name: recipe(
            **{
                "run.name": name,
                "model.dropout": 0.3,
                "model.n_kv_heads": 2,
                "model.n_layers": 4,
                "train.micro_batch_size": 2,
            },
            parallel=parallel,
        )
        for name, (parallel, _) in LAYOUTS.items()
    }
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    run_ranks("dropout_worker.py", tmp_path / "recipes.json", tmp_path / "out", timeout=600)
    found = torch.load(tmp_path / "out")
    for name, (_, apart) in LAYOUTS.items():
        pairs = list(itertools.combinations(found[name], 2))
        assert len(pairs) == 6
        for (a, masks), (b, others) in pairs:
            differ = {dim for dim in a if a[dim] != b[dim]}
            assert len(masks) > 1 and [m.shape for m in masks] == [m.shape for m in others]
            for mask, other in zip(masks, others, strict=True):
                if differ & apart:
                    # Chance: both leave out or keep with 0.3^2 + 0.7^2.
                    assert (mask == other).float().mean() == pytest.approx(0.58, abs=0.08), (name, differ)
                else:
                    assert torch.equal(mask, other), (name, differ)
