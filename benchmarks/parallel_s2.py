"""S2-Attention: blocks and FLOPs that are left (exact), and CPU time over that of dense attention (ratio, one run)."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainwright.models.attention import AttentionPlan, attention
from trainwright.models.ops.s2_attention import s2_attention
from trainwright.models.ops.s2_pattern import make_pattern

HEADS, WIDTH = 8, 64


def _seconds(call: Any, repeats: int) -> float:
    """CPU time of this process, the least of ``repeats``: others that compute meanwhile don't count."""
    call()  # warm
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best


def _both(attend: Any, tensors: list[torch.Tensor]) -> Any:
    def call() -> None:
        out = attend(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    return call


def run(quick: bool) -> dict[str, Any]:
    paper = make_pattern(32)
    out: dict[str, Any] = {
        "paper": {"density": paper.density(8192), "cached_tokens": paper.cached_tokens(8192)[0]},
        "lengths": {},
    }
    for length in (1024,) if quick else (2048, 4096, 8192):
        pattern = make_pattern(HEADS, block_size=64, local_blocks=4, stride=8)
        g = torch.Generator().manual_seed(0)
        x = [torch.randn(1, length, HEADS, WIDTH, generator=g).requires_grad_() for _ in range(3)]
        dense = _seconds(_both(lambda q, k, v: attention(q, k, v, AttentionPlan("causal")), x), 1 if quick else 2)
        sparse = _seconds(_both(lambda q, k, v, p=pattern: s2_attention(q, k, v, p)[0], x), 1 if quick else 2)
        out["lengths"][str(length)] = {
            "density": pattern.density(length),
            "flops": sum(pattern.pairs(length)) / (HEADS * length * (length + 1) / 2),
            "time": sparse / dense,
        }
    return out


def table(result: dict[str, Any]) -> str:
    lines = [
        f"Paper's pattern (32 heads, blocks of 64, 16 local, stride 8) at 8,192 tokens: density "
        f"{result['paper']['density']:.4f}, {result['paper']['cached_tokens']} cached tokens a head.",
        "",
        "| tokens (blocks of 64, 4 local, stride 8) | blocks | FLOPs | CPU time, forward and backward |",
        "|--:|--:|--:|--:|",
    ]
    for length, r in result["lengths"].items():
        lines.append(f"| {length} | {r['density']:.3f} | {r['flops']:.3f} | {r['time']:.2f} |")
    return "\n".join(lines)
