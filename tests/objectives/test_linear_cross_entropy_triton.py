"""The Triton kernel against its plain torch reference; on the CPU through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_cases.py")


def test_kernel_equals_the_reference_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    done = subprocess.run(
        [sys.executable, str(CASES), "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 24 cases equal" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter test is its CPU twin")
def test_kernel_equals_the_reference_on_the_gpu():
    done = subprocess.run(
        [sys.executable, str(CASES), "cuda"], env=os.environ.copy(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
