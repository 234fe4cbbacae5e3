"""Numbers that the host reads late."""

import pytest
import torch

from trainwright.optim.gauge import Gauge


@pytest.mark.parametrize("largest, total", [(False, 6.0), (True, 3.0)])
def test_sums_or_the_largest(largest, total):
    gauge = Gauge(largest)
    assert gauge.value() == gauge.seen() == 0
    for x in (3, 1, 2):
        gauge.put(torch.tensor(x))
    assert gauge.value() == gauge.seen() == total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_number_from_a_gpu_arrives():
    gauge = Gauge()
    gauge.put(torch.tensor(2.0, device="cuda"))
    torch.cuda.synchronize()
    assert gauge.seen() == gauge.value() == 2
