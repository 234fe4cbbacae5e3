"""One of four ranks of the checks of a hung rank: the last one stops itself, the others wait for it in many ways.

python hung_worker.py RESULT_FILE      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainwright.parallel.amsp.chain import Chain
from trainwright.parallel.amsp.groups import Groups
from trainwright.parallel.config import Degrees
from trainwright.parallel.context import basp, flexsp
from trainwright.parallel.context.ring_attention import Ring, _wait
from trainwright.parallel.context.unified import UnifiedContext
from trainwright.parallel.mesh import build_mesh, init_distributed

CPU = torch.device("cpu")
TIMEOUT = 3.0


def waits() -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """Name -> group, and what to do in it. Collective."""
    cp = build_mesh(Degrees(cp=4), CPU, TIMEOUT)
    usp = UnifiedContext(cp.submesh("cp"), 2)
    whole_ring = UnifiedContext(cp.submesh("cp"), 1)
    data = build_mesh(Degrees(dp_replicate=2, cp=2), CPU, TIMEOUT)
    amsp = Groups.build(Chain(2, 2, 2), "cpu", TIMEOUT)
    groups = {
        "usp heads": usp.heads_group,
        "usp ring": usp.ring.group,
        "ring": whole_ring.ring.group,
        "basp": basp.make_groups(cp.submesh("cp"), [1, 2, 4])[2],
        "flexsp": flexsp.make_groups(cp.submesh("cp"), [2, 4])[2],
        "dimension": data.group("cp"),
        "other dimension": data.group("dp_replicate"),
        "amsp": amsp.mesh.get_group("amsp_shard"),
        "world": dist.group.WORLD,
    }

    def reduce(group: Any) -> None:
        dist.all_reduce(torch.ones(8), group=group)

    def send_on(group: Any) -> None:
        _wait(Ring(group).start([torch.ones(8)])[1])

    ways = {"usp ring": send_on, "ring": send_on}
    for name, group in groups.items():  # connected, as after a step
        ways.get(name, reduce)(group)
    last = dist.get_world_size() - 1
    if last not in (whole_ring.ring.next, whole_ring.ring.previous):
        del groups["ring"]  # nothing of it is missed here
    return {
        name: (group, ways.get(name, reduce))
        for name, group in groups.items()
        if last in dist.get_process_group_ranks(group)
    }


def main(out: str) -> None:
    torch.set_num_threads(1)
    init_distributed(CPU, TIMEOUT)
    found = waits()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(1.0)  # the others still need what has been sent to them
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2.0)
    seconds: dict[str, float] = {}

    def measure(name: str, group: Any, way: Callable[[Any], None]) -> None:
        start = time.monotonic()
        try:
            way(group)
        except RuntimeError:
            seconds[name] = time.monotonic() - start

    threads = [threading.Thread(target=measure, args=(n, *w), daemon=True) for n, w in found.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10 * TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    torch.save({name: seconds.get(name) for name in found}, f"{out}.{dist.get_rank()}")
    os._exit(0)  # what still waits would wait on


if __name__ == "__main__":
    main(sys.argv[1])
