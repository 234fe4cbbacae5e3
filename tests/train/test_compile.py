import pytest

from trainwright import RunConfig, Trainer


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones(recipe):
    """torch.compile per block: the same losses as without, to rounding."""
    losses = {}
    for compiled in (False, True):
        rows = []
        data = recipe(**{"run.name": f"c{compiled}", "train.compile": compiled, "train.steps": 3})
        Trainer(RunConfig.load(data)).fit(on_step=rows.append)
        losses[compiled] = [r["loss"] for r in rows]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
