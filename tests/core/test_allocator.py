import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from trainwright.core.allocator import keep_freed_memory
if sys.argv[1] == "tuned":
    assert keep_freed_memory()
torch.set_num_threads(1)
def work():
    for _ in range(20):
        torch.ones(64 << 20, dtype=torch.uint8)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_large_buffers_are_reused_without_page_faults():
    faults = {
        how: int(
            subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("plain", "tuned")
    }
    assert faults["tuned"] < 100 < 1000 < faults["plain"], faults
