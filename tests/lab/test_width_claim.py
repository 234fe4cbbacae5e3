"""The claim on AdamH's rate over widths: its arms can be built, and what it compares is measured."""

from itertools import pairwise
from pathlib import Path

import pytest

from trainwright import RunConfig, Trainer
from trainwright.lab import load_claim
from trainwright.lab.arms import is_reference, resolve
from trainwright.lab.probes import measure

CLAIM = Path(__file__).parents[2] / "claims" / "B090W_adamh_widths.yaml"


def test_arms_differ_in_width_and_share_their_grids():
    claim = load_claim(CLAIM)
    base = str(claim.source())
    widths, grids = {}, {}
    for arm in (a.arm() for a in claim.arms):
        config = RunConfig.from_dict(resolve(base, arm.fixed))
        model = config.model.build(257, 32)
        widths[arm.name] = model.embed.weight.shape[1]
        assert len(model.blocks) == 5
        if arm.tune:
            (grids[arm.name],) = arm.tune.values()
        else:
            assert {k: v for k, v in arm.set.items() if is_reference(v)} == {
                "optimizer.lr": {"of": arm.name.split()[0] + " 64"}
            }
    assert widths == {name: int(name.split()[1]) for name in widths}
    assert len(grids) == 6 and {len(g) for g in grids.values()} == {5}
    for grid in grids.values():
        assert [b / a for a, b in pairwise(grid)] == pytest.approx([2.0] * 4)


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adamw", "lr": 0.003}, {"name": "adamh", "lr": 0.02, "inner": {"name": "adamw", "lr": 0.003}}],
)
def test_the_rate_of_the_matrices_is_measured(recipe, optimizer):
    trainer = Trainer(RunConfig.load(recipe(optimizer=optimizer, **{"train.steps": 3})))
    trainer.fit()
    assert measure(trainer, ["peak_lr"]) == {"peak_lr": optimizer["lr"]}
    assert trainer.optimizer.param_groups[0]["lr"] != optimizer["lr"]  # the schedule's end
