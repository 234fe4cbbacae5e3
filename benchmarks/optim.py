"""What a step of each optimizer costs, beside torch's own, on the parameters of a real model.

    python benchmarks/optim.py        # all optimizers on the 10m decoder; writes benchmarks/results/optim.md
    python benchmarks/optim.py --only muon galore --json FILE

All contestants hold the same parameters and gradients and work in turns in one process; a ratio is the median over the
turns of the quotient within one turn. References are torch.optim.AdamW(fused=True) over all parameters, and
torch.optim.Muon over the hidden matrices with torch's fused AdamW over the rest.
A method that refreshes something every N steps is charged its share: mean of an ordinary step and of a step with a
refresh, weighted (N - 1) to 1. State is what the method holds for all parameters, in bytes per parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import machine
from torch import nn

from trainwright.core.allocator import keep_freed_memory
from trainwright.core.params import NamedParam, named_params
from trainwright.core.registry import build, methods
from trainwright.optim.matrix import MATRICES
from trainwright.optim.state import optimizer_state_bytes

RESULTS = Path(__file__).parent / "results" / "optim.md"
REFERENCES = ("torch AdamW", "torch Muon")
PERIODS = ("gap", "update_every", "refresh_every", "every", "reset_every", "precondition_every", "frequency")


class TorchMuon:
    """torch.optim.Muon and torch's fused AdamW, as a user would pair them."""

    def __init__(self, params: list[NamedParam]):
        matrices = [n.param for n in params if n.role in MATRICES]
        rest = [n.param for n in params if n.role not in MATRICES]
        self.parts = [
            torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-4, fused=True),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Contestant:
    """An optimizer over its own copy of the parameters; gradients are shared by all."""

    def __init__(self, name: str, params: list[NamedParam], grads: list[torch.Tensor]):
        self.name = name
        copies = [NamedParam(n.name, nn.Parameter(n.param.detach().clone()), n.role, n.splits) for n in params]
        for n, g in zip(copies, grads, strict=True):
            n.param.grad = g
        self.period, self.steps = 1, 0
        if name == "torch AdamW":
            self.optimizer: Any = torch.optim.AdamW([n.param for n in copies], lr=1e-4, fused=True)
        elif name == "torch Muon":
            self.optimizer = TorchMuon(copies)
        else:
            config = build("optimizer", {"name": name, "lr": 1e-4})
            self.period = next((int(getattr(config, key)) for key in PERIODS if getattr(config, key, None)), 1)
            self.optimizer = config.build(copies)
        parts = getattr(self.optimizer, "parts", [self.optimizer]) if name in REFERENCES else [self.optimizer]
        self.step()
        self.state_bytes = sum(optimizer_state_bytes(part) for part in parts)

    def step(self) -> float:
        start = time.perf_counter()
        self.optimizer.step()
        self.steps += 1
        return time.perf_counter() - start


def measure(
    contestants: list[Contestant], turns: int, per_turn: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Per contestant the mean seconds of a step in every turn, refreshes charged by their share."""
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
    for turn in range(turns):
        for c in contestants:
            c.step()  # warms the caches that the one before has emptied
            seconds[c.name].append(statistics.fmean(c.step() for _ in range(per_turn)))
        say(f"turn {turn + 1} of {turns}")
    for c in contestants:
        if c.period > 1:
            # Up to the end of a period, to catch the step that refreshes: the slowest of one whole period.
            whole = [c.step() for _ in range(c.period)]
            plain = statistics.median(whole)
            extra = (sum(whole) - plain * len(whole)) / len(whole)
            seconds[c.name] = [s + max(extra, 0.0) for s in seconds[c.name]]
            say(f"{c.name}: a period of {c.period} steps, refreshing adds {extra * 1e3:.2f} ms a step")
    return seconds


def table(rows: list[dict[str, Any]], params: int, where: str) -> str:
    lines = [
        "# What a step of each optimizer costs",
        "",
        f"{params / 1e6:.1f}M parameters, float32. {where}.",
        "`python benchmarks/optim.py`; ratios are medians over turns, in one process.",
        "",
        "| optimizer | ms a step | x torch AdamW (fused) | x torch Muon | state, bytes a parameter |",
        "|---|---|---|---|---|",
    ]
    lines += [
        "| {name} | {ms:.1f} | {over_adamw:.2f} | {over_muon:.2f} | {bytes_per_parameter:.2f} |".format(**r)
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", help="optimizers to measure; default: all")
    parser.add_argument("--size", default="10m")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    keep_freed_memory()  # as every training run does
    torch.manual_seed(0)
    model = build("model", {"name": "decoder", "size": args.size}).build(args.vocab, 512)  # type: ignore[attr-defined]
    params = named_params(model)
    grads = [torch.randn_like(n.param) * 1e-3 for n in params]
    count = sum(n.param.numel() for n in params)
    names = args.only or [m.name for m in methods("optimizer")]
    contestants = []
    for name in (*REFERENCES, *names):
        try:
            contestants.append(Contestant(name, params, grads))
        except Exception as error:
            print(f"{name} left out: {error}")
    seconds = measure(contestants, args.turns, args.steps, lambda text: print(text, flush=True))
    rows = [
        {
            "name": c.name,
            "ms": statistics.median(seconds[c.name]) * 1e3,
            "over_adamw": ratio(seconds, c.name, "torch AdamW"),
            "over_muon": ratio(seconds, c.name, "torch Muon"),
            "bytes_per_parameter": c.state_bytes / count,
        }
        for c in contestants
    ]
    text = table(rows, count, machine(torch.get_num_threads()))
    print(text)
    if args.json:
        args.json.write_text(json.dumps({"parameters": count, "optimizers": rows}, indent=1))
    if not args.only:
        RESULTS.write_text(text)


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


if __name__ == "__main__":
    main()
