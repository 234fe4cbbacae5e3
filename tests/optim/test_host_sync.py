"""Steps that never read a number back from the device, which on a GPU would wait for it."""

import pytest
from optimizer_zoo import Zoo, backward, batch, named
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.core.registry import build

READS = ("_local_scalar_dense", "aten.nonzero.", "masked_select", "aten.equal", "_unique")
SPECS = [
    {"name": "lion"},
    {"name": "signum"},
    {"name": "spam", "clip_after": 0, "reset_every": 2, "reset_warmup": 1},
    {"name": "spam", "density": 0.5},
    {"name": "mgup"},
    {"name": "mgup", "cautious": True},
    {"name": "mgup", "inner": "muon"},
    {"name": "llr", "min_size": 4},
    {"name": "adafactor"},
    {"name": "soap", "frequency": 2},
    {"name": "schedule_free"},
    {"name": "adamw8bit", "min_size": 0},
]


class Reads(TorchDispatchMode):
    """Notes what is called that gives the host something of a tensor's content."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in READS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_step_reads_from_the_device(spec):
    model = Zoo()
    optimizer = build("optimizer", spec).build(named(model))
    for i in range(4):  # the first may: LLR looks at the weights
        backward(model, batch(i))
        with Reads() as reads:
            optimizer.step()
        optimizer.zero_grad()
        assert i == 0 or reads.found == []


def test_reads_are_seen():
    model = Zoo()
    with Reads() as reads:
        float(model.gain.detach())
    assert reads.found
