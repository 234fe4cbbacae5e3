"""Kills, cuts, flips, malice: what is not whole is never taken for whole, and nothing is executed."""

import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright.core.errors import CheckpointError
from trainwright.train.checkpoint import Checkpointer, inspect, read_tensors, read_weights, verify
from trainwright.train.checkpoint import manifest as manifest_module
from trainwright.train.checkpoint.files import FileRecord, checksum_file

DRIVER = Path(__file__).with_name("kill_driver.py")


def write(directory, steps=(1, 2, 3), keep=9):
    checkpointer = Checkpointer(directory, keep=keep, asynchronous=False)
    for step in steps:
        x = torch.full((4, 3), float(step))
        checkpointer.save(step, {"m": {"x": x}, "n": step}, {"step": step}, {"w": x + 0.5}, {"rank": 0, "t": x})
    return checkpointer


@pytest.mark.parametrize("case", ["new", "replace", "retention"])
def test_killed_at_every_instant(tmp_path, case):
    """A real process gets SIGKILL before each write, fsync, rename and delete of a save, one after another."""
    result = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), case], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["kills"] >= 20
    assert report["old"] > 5 and report["new"] >= 1  # kills before and after the new one counted


def test_each_file_cut_or_flipped_or_gone(tmp_path, caplog):
    original = tmp_path / "original"
    write(original)
    files = sorted(p.relative_to(original) for p in (original / "step-00000003").rglob("*") if p.is_file())
    assert len(files) >= 7
    rng = random.Random(0)
    for file in files:
        for damage in ("cut", "flip", "gone", "longer"):
            directory = tmp_path / "copy"
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(original, directory)
            raw = bytearray((directory / file).read_bytes())
            if damage == "cut":
                (directory / file).write_bytes(raw[:-1])
            elif damage == "longer":
                (directory / file).write_bytes(raw + b"\n")
            elif damage == "gone":
                (directory / file).unlink()
            else:
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                (directory / file).write_bytes(raw)
            caplog.clear()
            checkpointer = Checkpointer(directory)
            with caplog.at_level(logging.WARNING):
                assert checkpointer.latest() == directory / "step-00000002", (file, damage)
            assert "step-00000003" in caplog.text and file.name in caplog.text, caplog.text
            target = {"m": {"x": torch.zeros(4, 3)}, "n": 0}
            with pytest.raises(CheckpointError, match=r"step-00000003.*nothing was loaded"):
                checkpointer.load(directory / "step-00000003", target)
            assert target["n"] == 0 and target["m"]["x"].sum() == 0
            with pytest.raises(CheckpointError):
                verify(directory / "step-00000003")


def test_every_bit_of_the_manifest_counts(tmp_path):
    write(tmp_path, steps=(1,))
    file = tmp_path / "step-00000001" / "manifest.json"
    raw = file.read_bytes()
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << (position % 8)
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            manifest_module.read_manifest(file.parent)
    for length in range(0, len(raw), 7):
        file.write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            manifest_module.read_manifest(file.parent)


def test_none_whole_lists_them_all(tmp_path):
    checkpointer = write(tmp_path)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    (tmp_path / "step-00000002" / "meta.json").write_bytes(b"{}")
    (tmp_path / "step-00000003" / "weights" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        checkpointer.latest()
    for words in ["step-00000001: manifest.json is missing", "step-00000002: meta.json has 2 bytes"]:
        assert words in str(error.value)
    assert "model.safetensors is missing" in str(error.value)
    # the size check alone does not see a flip, the full one does
    other = write(tmp_path / "b", steps=(1,))
    file = tmp_path / "b" / "step-00000001" / "weights" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert Checkpointer(tmp_path / "b", verify="size").latest() is not None
    with pytest.raises(CheckpointError, match="checksum"):
        other.latest()


def test_damage_between_latest_and_load_is_seen(tmp_path):
    checkpointer = write(tmp_path, steps=(1,))
    path = checkpointer.latest()
    file = path / "state" / "shard-00001-of-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpointer.load(path, {"m": {"x": torch.zeros(4, 3)}, "n": 0})


def test_leftovers_are_cleaned_but_not_a_living_save(tmp_path):
    from trainwright.train.checkpoint import folders

    write(tmp_path, steps=(1,))
    live = folders.owned_path(tmp_path, "tmp", "step-00000002")
    host, pid = live.name.rsplit("-", 2)[0], os.getpid()
    dead = tmp_path / f"{host}-{pid}-5"  # our number in an earlier life of the machine
    gone = tmp_path / f"{host}-{2**22 - 3}-1700000000"
    elsewhere = tmp_path / ".trash-step-00000002-otherhost-1-5"
    for folder in (live, dead, gone, elsewhere):
        (folder / "weights").mkdir(parents=True)
    checkpointer = Checkpointer(tmp_path)
    assert live.exists() and elsewhere.exists() and not dead.exists() and not gone.exists()
    checkpointer.save(3, {}, {})
    checkpointer.wait()
    assert live.exists() and not elsewhere.exists()


def reseal(path):
    """What an attacker can do: write a manifest that fits the changed files."""
    old = manifest_module.read_manifest(path)
    files = {
        str(p.relative_to(path)): FileRecord(p.stat().st_size, checksum_file(p))
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "manifest.json"
    }
    new = manifest_module.Manifest(**{**old.__dict__, "files": files})
    (path / "manifest.json").write_bytes(new.render())
    return path


class Attack:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_pickles_are_never_run(tmp_path):
    checkpointer = write(tmp_path / "c", steps=(1,))
    path, harm = tmp_path / "c" / "step-00000001", tmp_path / "harm"
    attack = pickle.dumps(Attack(harm))

    def target():
        return {"m": {"x": torch.zeros(4, 3)}, "n": 0}

    # beside the real files, under the names DCP would unpickle: not read
    for name in (".metadata", "state/.metadata", "weights/.metadata", "__0_0.distcp", "ranks/rank-00000.pkl"):
        (path / name).write_bytes(attack)
    checkpointer.load(reseal(path), target())
    inspect(path)
    read_tensors(path)
    # in place of each file, with a manifest that vouches for it: refused
    for name in sorted(manifest_module.read_manifest(path).files):
        if name.endswith((".safetensors", ".json")):
            shutil.copytree(path, tmp_path / "bad" / path.name)
            bad = tmp_path / "bad" / path.name
            (bad / name).write_bytes(attack)
            reader = Checkpointer(tmp_path / "bad")
            reseal(bad)
            with pytest.raises(CheckpointError):
                reader.load(bad, target(), weights={"w": torch.zeros(4, 3)})
                reader.per_rank(bad)
            with pytest.raises(CheckpointError):
                inspect(bad)
                read_tensors(bad), read_weights(bad), reader.per_rank(bad)
            shutil.rmtree(tmp_path / "bad")
    assert not harm.exists()
    pickle.loads(attack)
    assert harm.exists()  # the attack itself works


def test_hostile_index_and_manifest_are_refused(tmp_path):
    write(tmp_path / "c", steps=(1,))
    path = tmp_path / "c" / "step-00000001"
    index = json.loads((path / "index.json").read_text())

    def refused(change, match):
        shutil.copytree(path, tmp_path / "d" / path.name)
        bad = tmp_path / "d" / path.name
        changed = json.loads(json.dumps(index))
        change(changed["weights"]["w"])
        (bad / "index.json").write_text(json.dumps(changed))
        weights = {"w": torch.zeros(4, 3)}
        with pytest.raises(CheckpointError, match=match):
            Checkpointer(tmp_path / "d").load(reseal(bad), weights=weights)
        assert weights["w"].sum() == 0
        shutil.rmtree(tmp_path / "d")

    refused(lambda w: w["shards"][0].update(file="../../secret.safetensors"), "not in the manifest")
    refused(lambda w: w["shards"][0].update(file="/etc/passwd"), "not in the manifest")
    refused(lambda w: w["shards"][0].update(offsets=[-1, 0]), "outside")
    refused(lambda w: w["shards"][0].update(offsets=[2, 0]), "outside")
    refused(lambda w: w.update(shards=[]), "do not cover")
    halves = [{**index["weights"]["w"]["shards"][0], "offsets": [at, 0], "shape": [2, 3]} for at in (0, 1)]
    refused(lambda w: w.update(shards=halves), "two shards of weights/w lie on each other")
    refused(lambda w: w.update(shape=[3, 4]) or w["shards"][0].update(shape=[3, 4]), r"\[3, 4\]")
    refused(lambda w: w.update(dtype="I32"), "I32")
    refused(lambda w: w.update(dtype="PICKLE"), "damaged")
    outside = manifest_module.read_manifest(path)
    for name in ("../x", "/x", "a/../x", "manifest.json"):
        files = {**outside.files, name: FileRecord(0, "")}
        (path / "manifest.json").write_bytes(manifest_module.Manifest(**{**outside.__dict__, "files": files}).render())
        with pytest.raises(CheckpointError, match="damaged"):
            manifest_module.read_manifest(path)


def test_a_newer_format_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "VERSION", 2)
    write(tmp_path, steps=(1,))
    monkeypatch.setattr(manifest_module, "VERSION", 1)
    with pytest.raises(CheckpointError, match="newer than this program"):
        Checkpointer(tmp_path).latest()
