import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # optimizer_zoo, also in spawned processes


@pytest.fixture(autouse=True)
def float32_iteration(monkeypatch):
    """Muon's iteration in float32 on every machine, so that the tolerances do not depend on the processor."""
    from trainwright.optim import muon

    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.float32)
