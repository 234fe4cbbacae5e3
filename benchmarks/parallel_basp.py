"""BASP (A01): the ranks that share a row, and the bytes that they trade, by rows of a micro-batch.

Four processes run the attention of one layer, forward and backward, on as many tokens a rank whatever the rows; bytes
are those recorded, beside the closed form. Larger groups are the closed form alone. Wall time is the median over
turns of the quotient with Ulysses in the same turn; it depends on the machine.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwright.parallel.context.basp import bytes_sent, divisors, group_size

RANKS, HEADS, KV_HEADS, HEAD_DIM, ELEMENT = 4, 8, 4, 16, 4
ROWS = (1, 2, 3, 4, 6, 8)


def run(quick: bool) -> dict[str, Any]:
    tokens, turns = (384, 2) if quick else (6144, 9)  # of a micro-batch: divisible by all rows, and by the groups
    measured = _start(tokens, turns)
    rows = {}
    for b in ROWS:
        want = bytes_sent(b, tokens // b, HEADS, KV_HEADS, HEAD_DIM, RANKS, ELEMENT)
        sent = [rank[f"basp {b}"]["bytes"] for rank in measured]
        basp, ulysses = measured[0][f"basp {b}"], measured[0][f"ulysses {b}"]
        rows[str(b)] = {
            "group": group_size(b, RANKS),
            "bytes": sent[0],
            "closed_form": want,
            "equal": all(s == want for s in sent),
            "of_ulysses": sent[0] / ulysses["bytes"],
            "wall_over_ulysses": statistics.median(
                a / u for a, u in zip(basp["seconds"], ulysses["seconds"], strict=True)
            ),
        }
    larger = {
        str(ranks): {str(b): [group_size(b, ranks), 1 - 1 / group_size(b, ranks)] for b in divisors(ranks)}
        for ranks in (8, 16, 64)
    }
    return {"ranks": RANKS, "tokens": tokens, "rows": rows, "larger": larger}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['ranks']} ranks, {result['tokens']} tokens a micro-batch, {HEADS} heads ({KV_HEADS} of keys) of "
        f"{HEAD_DIM}, float32; bytes that a rank sends in one layer, forward and backward.",
        "",
        "| rows | ranks of a group | bytes | closed form | of Ulysses' bytes | wall time of Ulysses' |",
        "|---|---|---|---|---|---|",
    ]
    for b, r in result["rows"].items():
        lines.append(
            f"| {b} | {r['group']} | {r['bytes']} | {r['closed_form']} | {r['of_ulysses']:.3f} | "
            f"{r['wall_over_ulysses']:.2f} |"
        )
    lines += ["", "Closed form: the share of its tokens that a rank sends in one all-to-all.", ""]
    for ranks, by_rows in result["larger"].items():
        shares = ", ".join(f"{b} rows: {share:.3f} (groups of {size})" for b, (size, share) in by_rows.items())
        lines.append(f"- {ranks} ranks: {shares}")
    return "\n".join(lines)


def _start(tokens: int, turns: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        env = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, folder, str(tokens), str(turns)],
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
            )
            for r in range(RANKS)
        ]
        codes = [p.wait() for p in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return [json.loads((Path(folder) / str(r)).read_text()) for r in range(RANKS)]


def _rank(folder: str, tokens: int, turns: int) -> None:
    import torch
    import torch.distributed as dist

    from trainwright.core.batch import Batch
    from trainwright.core.distributed import rank
    from trainwright.parallel.comm.trace import CommTrace
    from trainwright.parallel.config import Degrees, ParallelConfig, context_method
    from trainwright.parallel.mesh import build_mesh, init_distributed, shutdown

    torch.set_num_threads(1)
    device = torch.device("cpu")
    init_distributed(device)
    mesh = build_mesh(Degrees(cp=RANKS), device)
    names = ("basp", "ulysses")
    ways = {
        name: context_method(ParallelConfig.model_validate({"cp": RANKS, "context": name})).build(mesh, HEADS)
        for name in names
    }

    def attend(way: Any, rows: int) -> Any:
        ids = torch.zeros(rows, tokens // rows, dtype=torch.int64)
        whole = Batch(ids, ids, torch.ones(ids.shape), ids, ids.int())
        mine = way.shard(whole)
        plan = way.plan(mine.doc_ids, *mine.shape, 0, device)
        g = torch.Generator().manual_seed(rank())
        q, k, v = (torch.randn(*mine.shape, h, HEAD_DIM, generator=g) for h in (HEADS, KV_HEADS, KV_HEADS))
        for x in (q, k, v):
            x.requires_grad_()
        dist.barrier()
        started = time.perf_counter()
        with CommTrace() as trace:
            way.attend(q, k, v, plan).sum().backward()
        dist.barrier()
        seconds = time.perf_counter() - started
        return sum(r.bytes for r in trace.records if r.kind == "all_to_all"), seconds

    cases = {f"{way} {b}": (way, b) for b in ROWS for way in names}
    found: dict[str, Any] = {name: {"seconds": []} for name in cases}
    for turn in range(turns + 1):
        for name, (way, rows) in cases.items():
            found[name]["bytes"], seconds = attend(ways[way], rows)
            if turn:  # the first warms up
                found[name]["seconds"].append(seconds)
    (Path(folder) / str(rank())).write_text(json.dumps(found))
    shutdown()


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
