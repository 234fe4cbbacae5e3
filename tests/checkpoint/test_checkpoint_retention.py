"""Which checkpoints live: by order of writing and by metric, never by names or clocks."""

import os

import pytest
import torch

from trainwright.train.checkpoint import Checkpointer, inspect, read_tensors
from trainwright.train.checkpoint import folders as folders_module


def save(checkpointer, step, metric=None):
    checkpointer.save(step, {"x": torch.tensor(float(step))}, {"step": step}, metric=metric)
    checkpointer.wait()


def names(directory):
    return sorted(int(p.name.removeprefix("step-")) for p in directory.iterdir())


def test_numbers_are_ordered_as_numbers(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=10)
    for step in range(9000, 10001, 100):
        save(checkpointer, step)
    assert names(tmp_path) == list(range(9100, 10001, 100))
    assert checkpointer.latest().name == "step-00010000"
    save(checkpointer, 123_456_789)  # more than eight digits
    assert names(tmp_path)[-2:] == [10000, 123_456_789] and len(names(tmp_path)) == 10


def test_best_lives_beside_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1, best_metric="val_loss")
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, None)]:
        save(checkpointer, step, loss)
        assert step in names(tmp_path)
    assert names(tmp_path) == [2, 5]
    assert checkpointer.best().name == "step-00000002"
    save(checkpointer, 6, 1.0)  # as good and later: the earlier one goes
    assert names(tmp_path) == [6]
    # a resumed run goes on comparing
    again = Checkpointer(tmp_path, keep=1, best_metric="val_loss")
    assert again.best().name == "step-00000006"
    again.load(again.latest(), {"x": torch.zeros(())})
    save(again, 7, 2.0)
    assert names(tmp_path) == [6, 7]
    highest = Checkpointer(tmp_path / "max", keep=1, best_metric="accuracy", best_mode="max")
    for step, value in [(1, 0.1), (2, 0.9), (3, 0.5)]:
        save(highest, step, value)
    assert names(tmp_path / "max") == [2, 3]


def test_stale_higher_step_of_an_older_run(tmp_path):
    old = Checkpointer(tmp_path, keep=1, best_metric="val_loss")
    save(old, 5000, 0.001)
    new = Checkpointer(tmp_path, keep=1, best_metric="val_loss")
    for step in (100, 200, 300):
        save(new, step, 3.0 + step)
        assert step in names(tmp_path)
        assert new.latest().name == f"step-{step:08d}"  # content says it is newer
    assert names(tmp_path) == [100, 300, 5000]  # best and newest of this run; the other run's is not ours to delete
    assert inspect(tmp_path / "step-00005000").run_id == old.run_id != new.run_id


def test_going_back_makes_the_later_written_ones_newest(tmp_path):
    first = Checkpointer(tmp_path, keep=2)
    for step in (10, 20, 30):
        save(first, step)
    again = Checkpointer(tmp_path, keep=2)
    again.load(tmp_path / "step-00000020", {"x": torch.zeros(())})
    assert again.run_id == first.run_id
    save(again, 25)
    assert again.latest().name == "step-00000025"
    assert names(tmp_path) == [25, 30]
    save(again, 30)  # the stale one of that number is replaced
    assert again.latest().name == "step-00000030" and names(tmp_path) == [25, 30]
    assert inspect(tmp_path / "step-00000030").sequence == 5


def test_latest_before_a_step(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=9)
    for step in (10, 20, 30):
        save(checkpointer, step)
    assert checkpointer.latest(before=30).name == "step-00000020"
    assert checkpointer.latest(before=31).name == "step-00000030"
    assert checkpointer.latest(before=10) is None
    (tmp_path / "step-00000010" / "meta.json").unlink()
    assert checkpointer.latest(before=20) is None and checkpointer.latest().name == "step-00000030"


def test_equal_and_reversed_file_times_change_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(checkpointer, step)
    for age, step in enumerate((1, 2, 3)):
        os.utime(tmp_path / f"step-{step:08d}", (1e9 - age, 1e9 - age))
    assert checkpointer.latest().name == "step-00000003"
    for step in (1, 2, 3):
        os.utime(tmp_path / f"step-{step:08d}", (1e9, 1e9))
    save(checkpointer, 4)
    assert names(tmp_path) == [2, 3, 4]


def test_a_renamed_copy_is_known_by_its_content(tmp_path):
    import shutil

    checkpointer = Checkpointer(tmp_path)
    save(checkpointer, 100)
    shutil.copytree(tmp_path / "step-00000100", tmp_path / "step-99999999")
    save(checkpointer, 200)
    assert checkpointer.latest().name == "step-00000200"


def test_nothing_is_deleted_before_the_new_one_is_whole(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, 1)
    seen, real = [], folders_module.discard

    def discard(path):
        seen.append((path.name, float(read_tensors(tmp_path / "step-00000002")["x"])))
        real(path)

    monkeypatch.setattr(folders_module, "discard", discard)
    save(checkpointer, 2)
    assert seen == [("step-00000001", 2.0)] and names(tmp_path) == [2]


def test_damaged_ones_do_not_count_and_are_left(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        save(checkpointer, step)
    (tmp_path / "step-00000002" / "meta.json").write_bytes(b"")
    save(checkpointer, 3)
    assert names(tmp_path) == [1, 2, 3]  # two whole ones: 1 and 3


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_choice_always_keeps_newest_and_best(keep):
    import random

    from trainwright.train.checkpoint.manifest import Manifest

    rng = random.Random(keep)
    for _ in range(200):
        count = rng.randint(1, 8)
        entries = [
            folders_module.Entry(
                path=folders_module.Path(f"/c/step-{rng.randint(1, 20000):08d}"),
                manifest=Manifest(i, rng.choice("ab"), i + 1, 1, "", "", ("loss", rng.random()), {}),
            )
            for i in range(count)
        ]
        newest = entries[-1]
        own = [e for e in entries if e.manifest.run_id == newest.manifest.run_id]
        gone = folders_module.to_delete(entries, newest.path, newest.manifest.run_id, keep, "loss")
        assert newest.path not in gone
        assert min(own, key=lambda e: e.manifest.metric[1]).path not in gone
        assert all(e.manifest.run_id == newest.manifest.run_id for e in entries if e.path in gone)
        assert len(own) - len(gone) <= keep + 1
