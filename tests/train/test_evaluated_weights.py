"""What eval, generate and export use is what the validation of the run has measured."""

import pytest
import torch

from trainwright import RunConfig, Trainer
from trainwright.core.registry import methods
from trainwright.models import from_pretrained
from trainwright.train.runs import evaluate_run, export_run, load_run

AVERAGES = [m.name for m in methods("average")]
EVALUATED_ELSEWHERE = [m.name for m in methods("optimizer") if m.name == "schedule_free"]


@pytest.mark.parametrize(
    "key, name", [("average", a) for a in AVERAGES] + [("optimizer", o) for o in EVALUATED_ELSEWHERE]
)
def test_the_weights_that_were_validated(recipe, tmp_path, key, name):
    settings = {"every": 2} if key == "average" else {}
    data = recipe(
        **{key: {"name": name, **settings}, "train.steps": 12, "checkpoint.every": 12, "schedule": "constant"}
    )
    trainer = Trainer(RunConfig.load(data))
    summary = trainer.fit()
    run = summary["run_dir"]
    assert summary["val_loss"] != summary["val_loss_live"]
    assert evaluate_run(run)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert evaluate_run(run, live=True)["val_loss"] == pytest.approx(summary["val_loss_live"], rel=1e-6)

    model, _, _ = load_run(run)
    exported = from_pretrained(export_run(run, tmp_path / "out"))
    live, _, _ = load_run(run, live=True)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens), model(tokens))
        assert not torch.allclose(live(tokens), model(tokens))
    for p, q in zip(live.parameters(), trainer.parallel.model.parameters(), strict=True):
        assert torch.equal(p, q)
