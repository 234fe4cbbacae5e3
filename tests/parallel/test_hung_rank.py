"""A rank that stands still: the others notice within parallel.timeout, and the right one is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

from trainwright.parallel import elastic
from trainwright.parallel.config import Degrees
from trainwright.parallel.mesh import build_mesh

HERE = Path(__file__).parent
KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


@pytest.mark.timeout(180)
def test_every_group_gives_up_in_time(tmp_path):
    """Ranks 0 to 2 wait for a stopped one: in a ring, in subgroups, in dimensions of meshes and in several together."""
    run_ranks("hung_worker.py", tmp_path / "out", timeout=150, waited=3)
    found = [torch.load(tmp_path / f"out.{r}") for r in range(3)]
    assert set().union(*found) == {
        "usp heads", "usp ring", "ring", "basp", "flexsp", "dimension", "other dimension", "amsp", "world",
    }  # fmt: skip
    late = {(r, n): s for r, seconds in enumerate(found) for n, s in seconds.items() if s is None or s > 15}
    assert late == {}


def test_groups_of_several_dimensions_have_the_timeout(monkeypatch):
    """Made when first asked for, on a mesh of eight ranks that are not there."""
    from torch.distributed import device_mesh, distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = []
    new_group = device_mesh.new_group

    def noted(*args, **kwargs):
        made.append(distributed_c10d._get_default_timeout("gloo").total_seconds())
        return new_group(*args, **kwargs)

    monkeypatch.setattr(device_mesh, "new_group", noted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        spread = build_mesh(Degrees(pp=2, dp_replicate=2, cp=2), torch.device("cpu"), 7.0)
        sharded = build_mesh(Degrees(pp=2, dp_shard=4, ep=2), torch.device("cpu"), 7.0)
        for ask in (
            lambda: spread.group("pp", "cp"),
            lambda: spread.data_mesh(),
            lambda: sharded.expert_meshes(),
        ):
            before = len(made)
            ask()
            assert len(made) > before
    finally:
        dist.destroy_process_group()
    assert set(made) == {7.0}
    assert distributed_c10d._get_default_timeout("gloo").total_seconds() == 1800  # others' groups keep theirs


@pytest.mark.parametrize(
    "failures, lost, here, named",
    [
        ({0: (ABORT, 1)}, set(), [0, 1], {1: "did not answer"}),
        ({0: (ABORT, 1), 1: (KILL, 31)}, set(), [0, 1], {1: "did not answer"}),
        ({0: (ABORT, 1), 2: (ABORT, 1), 1: (TERM, 1)}, set(), [0, 1, 2], {1: "did not answer"}),
        ({0: (ABORT, 1), 2: (1, 1), 1: (KILL, 31)}, {2}, [0, 1, 2], {1: "did not answer"}),
        ({0: (ABORT, 1), 1: (ABORT, 1)}, set(), [0, 1], {}),  # both have waited
        ({0: (ABORT, 1), 1: (KILL, 31), 2: (KILL, 31)}, set(), [0, 1, 2], {}),  # who waits ends so too, in time
    ],
)
def test_who_waited_is_not_to_blame(failures, lost, here, named):
    assert elastic.causes(failures, lost, here) == named


@pytest.mark.parametrize(
    "exit_codes, cause, workers, left_out",
    [
        ({0: ABORT}, "rank 1 did not answer", 1, [[1]]),
        ({0: ABORT, 1: ABORT}, "ranks 0, 1 ended by SIGABRT, and which rank is the cause is not known", 2, []),
    ],
)
def test_no_device_goes_for_a_guess(tmp_path, monkeypatch, exit_codes, cause, workers, left_out):
    """--nproc 1:2 after a collective that did not end."""
    from types import SimpleNamespace

    gone = []
    monkeypatch.setattr(elastic, "_leave_out_devices", gone.append)
    agent = elastic.Agent.__new__(elastic.Agent)
    agent._folder, agent._min_workers, agent._legal, agent._remaining_restarts = tmp_path, 1, lambda n: True, 2
    agent._interrupted, agent._say, agent.cause = lambda: False, lambda line: None, ""
    group = SimpleNamespace(
        workers=[SimpleNamespace(global_rank=r) for r in range(2)],
        spec=SimpleNamespace(local_world_size=2),
        group_world_size=1,
    )
    failures = {r: SimpleNamespace(exitcode=code, timestamp=1) for r, code in exit_codes.items()}
    agent._judge(group, failures)
    assert (agent.cause, group.spec.local_world_size, gone) == (cause, workers, left_out)


STUBBORN = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close()\n"
    "time.sleep(100)\n"
)
LAUNCH = (
    "import sys; from trainwright.parallel.launch import launch\n"
    "o = launch(2, [sys.argv[1]], module='stubborn', patience=float(sys.argv[2]))\n"
    "print('OUTCOME', o.code, *o.messages, sep='|')"
)


@pytest.mark.timeout(120)
def test_sigterm_ends_the_job_though_a_worker_does_not(tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path), "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / r).exists() for r in "01"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert time.monotonic() - asked > 1.5  # not before its patience ends
    assert out.splitlines()[-1] == (
        "OUTCOME|130|interrupted, and workers did not end and were killed; "
        "what came after the last checkpoint is not saved"
    )
