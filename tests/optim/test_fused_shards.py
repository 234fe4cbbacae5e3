"""Fused matrices and stacks sharded by rows, by columns and by expert over two processes, against one process."""

import json

import pytest
import torch.multiprocessing as mp
from fused_worker import METHODS, main


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    mp.spawn(main, args=(str(folder),), nprocs=2)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("layout", ["rows", "columns", "first", "whole"])
@pytest.mark.parametrize("method", range(len(METHODS)))
def test_shards_of_fused_matrices_equal_the_whole(figures, method, layout):
    found = figures[f"{method} {layout}"]
    assert found["way"] > 1e-3
    assert max(found["differences"]) < 1e-5
