"""A disk that is full or broken: a clear message, no rubbish, older checkpoints whole."""

import errno
import os
import subprocess
import sys
import textwrap
from collections import namedtuple

import pytest
import torch

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint import Checkpointer, files, verify


def save(checkpointer, step, size=1000):
    checkpointer.save(step, {"x": torch.full((size,), float(step))}, {}, {"w": torch.ones(size)}, {"r": 1})


def intact(directory, step):
    assert [p.name for p in directory.iterdir()] == [f"step-{step:08d}"]
    verify(directory / f"step-{step:08d}")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_full_disk_at_every_call(tmp_path, monkeypatch, asynchronous, call):
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=asynchronous)
    save(checkpointer, 1)
    checkpointer.wait()
    real, failed = getattr(os, call), 0
    for number in range(1, 100):
        count = 0

        def failing(*args, number=number, **kwargs):
            nonlocal count
            count += 1
            if count >= number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                save(checkpointer, 2)
                checkpointer.wait()
            except CheckpointError as error:
                failed += 1
                text = str(error)
            else:
                break
        if (tmp_path / "step-00000002").exists():  # only the parent's fsync came too late to undo it
            assert call == "fsync" and {p.name for p in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}
            verify(tmp_path / "step-00000002")
            continue
        assert "disk is full" in text and str(tmp_path) in text and "8000 bytes" in text and "free" in text
        intact(tmp_path, 1)
    assert failed >= 4
    intact(tmp_path, 2)


def test_error_surfaces_at_the_next_save_once(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 1)
    checkpointer.wait()

    def broken(fd, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", broken)
        save(checkpointer, 2)  # returns: it fails in the background
        checkpointer._thread.join()
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint.*Input/output error"):
        save(checkpointer, 3)
    intact(tmp_path, 1)
    save(checkpointer, 4)
    checkpointer.close()
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "step-00000004"}


def test_space_is_checked_before_writing(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(1 << 40, 0, 3 << 20))
    save(checkpointer, 1)
    monkeypatch.setattr(os, "write", lambda *a: pytest.fail("written all the same"))
    with pytest.raises(CheckpointError, match=r"no space.*7\.1 MiB needed \(7448576 bytes\), 3\.0 MiB free"):
        save(checkpointer, 2, size=800_000)
    intact(tmp_path, 1)


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*file"):
        save(Checkpointer(tmp_path / "file" / "c", asynchronous=False), 1)


def test_real_full_file_system(tmp_path):
    """A tmpfs of 2 MiB in a mount namespace of its own; the check of free space is switched off to reach the end."""
    script = textwrap.dedent("""
        import sys, pathlib, torch
        from trainwright.core.errors import CheckpointError
        from trainwright.train.checkpoint import Checkpointer, engine, verify
        where = pathlib.Path(sys.argv[1])
        checkpointer = Checkpointer(where, asynchronous=False)
        checkpointer.save(1, {"x": torch.ones(200_000)}, {})
        checks = [engine.check_space, lambda *a: None]
        for check, words in zip(checks, ["no space", "disk is full"]):
            engine.check_space = check
            try:
                checkpointer.save(2, {"x": torch.ones(100_000), "y": torch.ones(300_000)}, {})
                sys.exit(3)
            except CheckpointError as error:
                assert words in str(error) and "1600000 bytes" in str(error) or "no space" == words, error
            assert [p.name for p in where.iterdir()] == ["step-00000001"]
            verify(where / "step-00000001")
        checkpointer.save(2, {"x": torch.ones(100_000)}, {})  # there is room again
        verify(where / "step-00000002")
    """)
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting in a namespace is not permitted here")
    command = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
