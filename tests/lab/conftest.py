import math

import pytest

from trainwright.lab.pool import Pool
from trainwright.lab.trial import TrialResult


class FakePool(Pool):
    """Says what each trial finds by a formula in its learning rate instead of training it."""

    asked: list = []  # noqa: RUF012 - of all pools, cleared by the fixture

    def run(self, trials, on_trial=None):
        out = {}
        for trial in {t.key: t for t in trials}.values():
            FakePool.asked.append(trial)
            optimizer, tokens = trial.recipe["optimizer"], trial.recipe["train"]["tokens"]
            best, floor = {"adamw": (3e-3, 2.0), "muon": (2e-2, 1.8)}[optimizer["name"]]
            loss = floor + 0.1 * abs(math.log(optimizer["lr"] / best)) + 0.01 * (trial.seed % 3) + 1000 / tokens
            loss += 0.001 * (trial.seed % 2) * (optimizer["name"] == "muon")
            size = {"adamw": 8000, "muon": 5000}[optimizer["name"]]
            probes = {p if isinstance(p, str) else next(iter(p)): 10.0 + loss for p in trial.probes}
            out[trial.key] = TrialResult(
                "ok" if optimizer["lr"] < 0.5 else "diverged", val_loss=loss, initial_val_loss=5.5,
                curve=[[0, 0.0, 5.5], [tokens, 60.0, loss]], steps=10, tokens=tokens, seconds=60.0, tokens_per_s=1e3,
                peak_memory_bytes=2**28, optimizer_state_bytes=size, params=1000, weights_digest=f"w{trial.seed}",
                data_digest=f"d{trial.seed}", probes=probes,
                environment={"trainwright": "0", "code": "c0de", "torch": "2", "python": "3", "device": "cpu",
                             "threads": 2, "device_name": "a CPU", "compute_dtype": "float32"},
            )  # fmt: skip
            if on_trial is not None:
                on_trial(trial, out[trial.key], False)
        return out


@pytest.fixture
def fake_pool(monkeypatch):
    """Comparisons and claims use FakePool; gives the list of the trials that they ask for."""
    for module in ("comparison", "claim_run"):
        monkeypatch.setattr(f"trainwright.lab.{module}.Pool", FakePool)
    FakePool.asked.clear()
    return FakePool.asked
