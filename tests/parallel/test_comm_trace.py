"""What log.comm_trace leaves in a run's folder."""

import json

import pytest

from trainwright.config.run_config import RunConfig
from trainwright.parallel.mesh import Mesh
from trainwright.train.trainer import Trainer


@pytest.mark.parametrize("asked, steps", [(2, 4), (3, 3), (9, 3)])
def test_the_trace_is_written_though_the_run_is_shorter(recipe, monkeypatch, asked, steps):
    """The first step is not recorded, so a trace of as many steps as are trained is never full."""
    trainer = Trainer(RunConfig.from_dict(recipe(**{"train.steps": steps, "log.comm_trace": asked})))
    monkeypatch.setattr(Mesh, "world_size", 2)  # alone there is nothing to record
    trainer.fit()
    assert isinstance(json.loads((trainer.config.run_dir / "comm" / "rank-0.json").read_text())["traceEvents"], list)
