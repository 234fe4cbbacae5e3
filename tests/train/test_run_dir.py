"""Whether a start goes on with the run in its folder: only the job that made it does so without being told."""

import pytest

from trainwright import RunConfig, Trainer
from trainwright.core.errors import ConfigError
from trainwright.train import run_dir


def test_only_the_same_job_goes_on(recipe, monkeypatch):
    config = RunConfig.load(recipe(**{"train.steps": 2, "checkpoint.every": 1}))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert not run_dir.goes_on(config, False)
    Trainer(config).fit()
    assert run_dir.goes_on(config, False) and run_dir.goes_on(config, True)
    again = Trainer(RunConfig.load(recipe(**{"train.steps": 3})))
    assert again.resume and again.progress.step == 2
    again.fit()
    for other in ("job-2", "none"):  # another job; torchrun's own launcher without a name, which is a new one each time
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        assert not run_dir.goes_on(config, False)
        with pytest.raises(ConfigError, match="already holds a run"):
            Trainer(config)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not run_dir.goes_on(config, False) and run_dir.goes_on(config, True)
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(config)


def test_a_run_without_a_launcher_carries_no_job(recipe, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    config = RunConfig.load(recipe(**{"train.steps": 1}))
    Trainer(config).fit()
    assert not (config.run_dir / run_dir.JOB).exists()


def test_replacing_a_run_takes_the_name_of_the_new_job(recipe, monkeypatch):
    config = RunConfig.load(recipe(**{"train.steps": 1, "run.overwrite": True}))
    for job in ("a", "b"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        Trainer(config).fit()
        assert (config.run_dir / run_dir.JOB).read_text() == job
