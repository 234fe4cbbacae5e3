"""The Triton kernels of S2-Attention, forward and backward; on the CPU through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
CASES = Path(__file__).with_name("s2_triton_cases.py")


def run(device, **env):
    done = subprocess.run(
        [sys.executable, str(CASES), device], env={**os.environ, **env}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 4 cases equal" in done.stdout


def test_kernels_equal_the_mask_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    run("cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the interpreter test is its CPU twin")
def test_kernels_equal_the_mask_on_the_gpu():
    run("cuda")
