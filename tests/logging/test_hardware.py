import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from trainwright.core import hardware
from trainwright.train.environment import environment, redact


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    hardware._known_peaks.cache_clear()
    yield
    hardware._known_peaks.cache_clear()


def forget_process():
    hardware._known_peaks.cache_clear()


def test_peak_is_measured_once_and_kept_on_disk(monkeypatch):
    rate = hardware.matmul_peak("cpu", torch.float32, seconds=0.1)
    assert 1e8 < rate < 1e15
    (key,) = json.loads((hardware.cache_dir() / "matmul_peaks.json").read_text())
    assert torch.__version__ in key and "float32" in key and f"{torch.get_num_threads()} threads" in key

    def fail(*args):
        raise AssertionError("measured again")

    monkeypatch.setattr(hardware, "_measure_matmul", fail)
    forget_process()
    assert hardware.matmul_peak("cpu", torch.float32) == rate


def test_fresh_measurement_keeps_the_better_figure(monkeypatch):
    rates = iter([5.0, 3.0, 9.0])
    monkeypatch.setattr(hardware, "_measure_matmul", lambda *a: next(rates))
    assert [hardware.matmul_peak(fresh=True) for _ in range(3)] == [5.0, 5.0, 9.0]
    forget_process()
    assert hardware.matmul_peak() == 9.0


@pytest.mark.parametrize("content", ["", "{broken", "[]", '{"x": 3}', '{"x": {"flops": "?", "at": 0}}'])
def test_a_damaged_cache_is_measured_over(monkeypatch, content):
    hardware.cache_dir().mkdir(parents=True)
    (hardware.cache_dir() / "matmul_peaks.json").write_text(content)
    monkeypatch.setattr(hardware, "_measure_matmul", lambda *a: 7.0)
    assert hardware.matmul_peak() == 7.0


def test_an_unwritable_cache_costs_nothing_but_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(hardware, "_measure_matmul", lambda *a: 7.0)
    assert hardware.matmul_peak() == 7.0


def test_a_type_without_matrix_products_has_peak_zero():
    assert hardware.matmul_peak("cpu", torch.uint16, seconds=0.05) == 0.0


def test_measuring_leaves_random_state_and_gradients_alone():
    state = torch.get_rng_state()
    hardware.matmul_peak(seconds=0.05)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_on_a_gpu_is_above_the_cpu():
    assert hardware.matmul_peak("cuda", torch.bfloat16) > hardware.matmul_peak("cpu")
    block = torch.ones(2**20, device="cuda")
    assert hardware.memory_bytes("cuda") >= block.nbytes


def test_memory_of_the_process_now_and_at_its_peak():
    """64 MiB taken and given back: the peak keeps them. In a fresh process, whose peak is not its parent's."""
    code = (
        "import numpy as np; from trainwright.core.hardware import process_memory, memory_bytes\n"
        "a = process_memory(); x = np.ones(8 * 2**20); b = process_memory(); del x; c = process_memory()\n"
        "print(*a, *b, *c, memory_bytes('cpu'))"
    )
    ballast = np.ones(40 * 2**20)  # 320 MiB in the parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    now0, peak0, now1, peak1, now2, peak2, reported = map(int, out.split())
    size = 64 * 2**20
    assert now1 - now0 > 0.9 * size and now1 - now2 > 0.9 * size
    slack = 2**20  # the kernel counts pages per core and adds them up now and then
    assert peak1 - now0 > 0.9 * size and peak2 > peak1 - slack and peak1 > peak0 and reported > peak2 - slack
    assert ballast.nbytes > 0


def test_description_is_plain_json():
    described = json.loads(json.dumps(hardware.describe()))
    assert 1 <= described["cores"] <= os.cpu_count() and described["memory_bytes"] > 2**28 and described["cpu"]


def test_environment_has_versions_and_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-too")
    monkeypatch.setattr(
        sys,
        "argv",
        ["trainwright", "train", "log.loggers.0.api_key=s3cr3t", "https://me:s3cr3t@host/x", "optimizer.lr=0.1"],
    )
    text = json.dumps(environment())
    assert "s3cr3t" not in text
    found = json.loads(text)
    assert found["packages"]["torch"] == torch.__version__ and found["command"][-1] == "optimizer.lr=0.1"
    assert found["hardware"]["cores"] >= 1 and found["torch"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    "argument, kept",
    [
        ("tokenizer=bytes", True), ("tokenizer.path=my/secretary", True), ("train.tokens=5M", True),
        ("train.global_batch_tokens=4096", True), ("data.key=text", True),
        ("hub.token=abc", False), ("--hf-token=abc", False), ("x.password=abc", False), ("x.api-key: abc", False),
    ],
)  # fmt: skip
def test_redaction(argument, kept):
    assert (redact(argument) == argument) == kept and (kept or "abc" not in redact(argument))
