"""SPPO (B009): chunks of a row through a pipeline, and what of their activations is on the device.

Three parts. Unit time: steps of the event simulator, all chunks alike, against whole rows; the closed form is
(n + P - 1) / (n P). A 7B model with constants of an A100 node: what the solver takes for long rows, by memory. A small
decoder: bytes that one step recorded on this machine, against the formula, and the seconds of chunks and their balance.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

STAGES = (2, 4, 8)
CHUNKS = (1, 2, 4, 8, 16, 32)
# One stage of four of a 7B model (32 layers, 4096 wide, 32 heads) on 8 A100: 8 GPUs share each token's work. FLOPs at
# half of 312 TFLOP/s; 34 bytes a token, layer and number of width (arXiv:2205.05198, without the scores, which a fused
# kernel doesn't keep) over 8 GPUs; 24 GB/s to the host for each.
LAYERS, WIDTH, VOCABULARY, PARAMETERS, GPUS, FLOPS = 32, 4096, 32_000, 6.5e9, 8, 156e12
LENGTHS = (131_072, 524_288, 1_048_576, 2_097_152)
NETWORK = 25e9  # bytes a second of each GPU to another node
MEMORY_GIB = 60


def run(quick: bool) -> dict[str, Any]:
    return {
        "unit": _unit(),
        "solved": _solved(),
        "multiplexed": _multiplexed(),
        "recorded": _recorded(256 if quick else 1024),
    }


def _unit() -> dict[str, Any]:
    from trainwright.parallel.sppo.simulator import simulate

    found = {}
    for stages in STAGES:
        whole = simulate([1.0], stages, [2.0]).seconds
        for n in CHUNKS:
            line = simulate([1 / n] * n, stages, [2 / n] * n)
            found[f"{stages} {n}"] = {
                "time": line.seconds / whole,
                "closed_form": (n + stages - 1) / (n * stages),
                "bubble": line.bubble,
            }
    return found


def _stage_work(stages: int) -> Any:
    from trainwright.parallel.sppo.cut import Work

    return Work(2 * PARAMETERS / stages / GPUS / FLOPS, ((0, 4 * WIDTH * LAYERS / stages / GPUS / FLOPS),))


def _multiplexed() -> dict[str, Any]:
    """Idle stages share the first and last chunks (planned only): in unit time, and with a 7B model's constants.

    A stage that helps gets the weights and sends their gradient in bfloat16. Of a chunk that is shared, q, k, v and the
    output go to and fro in each layer, and the keys and values of all past chunks go to those that take their heads.
    """
    from trainwright.parallel.sppo.cut import bounds
    from trainwright.parallel.sppo.multiplex import best, multiplex
    from trainwright.parallel.sppo.simulator import simulate

    unit = {}
    for stages, n in itertools.product(STAGES, CHUNKS):
        plain = simulate([1 / n] * n, stages, [2 / n] * n)
        found = multiplex([1 / n] * n, stages, [2 / n] * n, stages - 1)
        unit[f"{stages} {n}"] = {
            "time": found.seconds / plain.seconds,
            "bubble": found.bubble,
            "before": plain.bubble,
            "held": found.held,
        }
    rows = {}
    stages = 4
    work = _stage_work(stages)
    for length, n in itertools.product(LENGTHS[:3], (8, 16)):
        cut = bounds(length, n, "balanced", work)
        times = work.of(cut)
        back = [2 * t for t in times]
        of_token = 2 * WIDTH * LAYERS / stages / GPUS  # bytes of one of q, k, v, output
        exchange = [(2 * start + 4 * (stop - start)) * of_token / NETWORK for start, stop in itertools.pairwise(cut)]
        weights = 2 * PARAMETERS / stages / GPUS / NETWORK
        plain = simulate(times, stages, back)
        free = best(times, stages, back)
        paid = best(times, stages, back, weights=weights, exchange=exchange)
        rows[f"{length} {n}"] = {
            "seconds": plain.seconds,
            "free": free.seconds / plain.seconds,
            "paid": paid.seconds / plain.seconds,
            "depth": paid.depth,
            "held": paid.held,
            "bubble": plain.bubble,
            "paid_bubble": paid.bubble,
        }
    return {"unit": unit, "7b": rows}


def _solved() -> dict[str, Any]:
    from trainwright.parallel.sppo.cut import bounds
    from trainwright.parallel.sppo.simulator import simulate
    from trainwright.parallel.sppo.solver import Machine, evaluate, solve

    stages = 4
    work = _stage_work(stages)
    kv = 2 * (2 + 4) * WIDTH * LAYERS / stages / GPUS  # bfloat16, and gradients in float32
    machine = Machine(work, 34 * WIDTH * LAYERS / stages / GPUS, 24e9, kv, 4 * VOCABULARY * WIDTH / GPUS)
    found = {}
    for length, how in itertools.product(LENGTHS, ("equal", "balanced")):
        whole = evaluate((0, length), stages, machine, offload=False)
        row: dict[str, Any] = {"whole_gib": whole.peak / 2**30}
        try:
            choice = solve(length, stages, machine, min_chunk=4096, memory=MEMORY_GIB * 2**30, how=how)
        except ValueError as error:
            row["refused"] = str(error)
        else:
            kept = evaluate(choice.bounds, stages, machine, offload=False)
            times = work.of(choice.bounds)
            sizes = machine.saved(choice.bounds)
            copies = [r * a / 24e9 for r, a in zip(choice.ratios, sizes, strict=True)]
            back = [2 * t for t in times]
            row |= {
                "chunks": choice.chunks,
                "gib": choice.peak / 2**30,
                "kept_gib": kept.peak / 2**30,
                "first_ratio": choice.ratios[0],
                "mean_ratio": sum(r * a for r, a in zip(choice.ratios, sizes, strict=True)) / sum(sizes),
                "time_of_whole": simulate(times, stages, back, copies).seconds / whole.seconds,
                "slowest_over_mean": max(times) / (sum(times) / len(times)),
            }
        found[f"{length} {how}"] = row
    # What balance is worth: the same number of chunks, cut both ways.
    length = LENGTHS[-2]
    steps = {how: evaluate(bounds(length, 16, how, work), stages, machine).seconds for how in ("equal", "balanced")}
    found["balanced_over_equal"] = steps["balanced"] / steps["equal"]
    return found


def _recorded(length: int) -> dict[str, Any]:
    import torch

    from trainwright.core.batch import Batch
    from trainwright.models.decoder_config import DecoderModelConfig
    from trainwright.objectives.next_token import NextTokenConfig
    from trainwright.parallel.apply import parallelize
    from trainwright.parallel.config import Degrees, ParallelConfig
    from trainwright.parallel.mesh import build_mesh
    from trainwright.parallel.sppo.solver import resident_peak, working_peak
    from trainwright.precision.base import Precision
    from trainwright.train.pipeline_executor import executor_kind

    device = torch.device("cpu")
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (1, length + 1), generator=g)
    slots = torch.arange(length)[None]
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(1, length), slots, (slots > length // 3).int())
    found: dict[str, Any] = {}
    reference: Any = None
    cases: dict[str, Any] = {"whole": None, **{f"{n} {r}": (n, r) for n in (1, 4, 8) for r in (0.0, 0.5, 1.0)}}
    del cases["1 0.5"], cases["1 1.0"]
    for name, case in cases.items():
        torch.manual_seed(0)
        spec = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256}
        model = DecoderModelConfig(**spec).build(512, length)
        settings: dict[str, Any] = {}
        if case is not None:
            n, ratio = case
            shares = [ratio] * (n - 1) + [0.0]
            settings = {"context": {"name": "sppo", "chunks": n, "offload": shares, "min_chunk": 1}}
        config = ParallelConfig.model_validate(settings)
        precision = Precision(torch.float32, "cpu")
        parallel = parallelize(model, build_mesh(Degrees(), device), config, precision, device)
        executor = executor_kind(parallel)(1, precision)
        started = time.perf_counter()
        result = executor.run(parallel, NextTokenConfig().build(), batch)
        seconds = time.perf_counter() - started
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        reference = gradient if reference is None else reference
        row: dict[str, Any] = {
            "seconds": seconds,
            "loss": float(result.loss_sum),
            "gradient_error": float((gradient - reference).norm() / reference.norm()),
        }
        if parallel.chunks is not None:
            ledger = parallel.chunks.ledger
            row |= {
                "saved": sum(ledger.saved),
                "sent": sum(ledger.sent),
                "forward_peak": ledger.forward_peak,
                "formula": resident_peak(ledger.saved, ledger.ratios),
                "peak": ledger.peak,
                "working": working_peak(ledger.saved, ledger.ratios),
            }
            row["equal"] = ledger.forward_peak == round(row["formula"]) and ledger.peak == round(row["working"])
        found[name] = row
    return {"length": length, "runs": found}


def table(result: dict[str, Any]) -> str:
    lines = [
        "Time of a step over that of whole rows, unit time, backward twice forward (closed form in brackets):",
        "",
        "| stages | " + " | ".join(f"n = {n}" for n in CHUNKS) + " |",
        "|---" * (len(CHUNKS) + 1) + "|",
    ]
    for stages in STAGES:
        cells = (result["unit"][f"{stages} {n}"] for n in CHUNKS)
        lines.append(f"| {stages} | " + " | ".join(f"{c['time']:.3f} ({c['closed_form']:.3f})" for c in cells) + " |")
    lines += [
        "",
        f"A 7B model, 4 stages of {GPUS} A100 each, {MEMORY_GIB} GiB for activations, keys and values, chunks of "
        "4,096 tokens or more; simulated with the copies:",
        "",
        "| tokens a row | cut | whole row GiB | chunks | GiB | nothing offloaded GiB | ratio, first chunk | "
        "of all bytes | slowest chunk / mean | time of whole rows' |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in result["solved"].items():
        if name == "balanced_over_equal":
            continue
        length, how = name.split()
        if "refused" in r:
            lines.append(f"| {int(length):,} | {how} | {r['whole_gib']:.0f} | refused: {r['refused']} |||||||")
            continue
        lines.append(
            f"| {int(length):,} | {how} | {r['whole_gib']:.0f} | {r['chunks']} | {r['gib']:.1f} | "
            f"{r['kept_gib']:.0f} | {r['first_ratio']:.2f} | {r['mean_ratio']:.2f} | "
            f"{r['slowest_over_mean']:.2f} | {r['time_of_whole']:.3f} |"
        )
    lines += [
        "",
        f"16 balanced chunks take {result['solved']['balanced_over_equal']:.3f} of the time of 16 equal ones at "
        f"{LENGTHS[-2]:,} tokens.",
    ]
    lines += [
        "",
        "Planned only: idle stages share the first and last chunks. Unit time, nothing to pay for; time of a step over "
        "that without (bubble before, and then):",
        "",
        "| stages | " + " | ".join(f"n = {n}" for n in CHUNKS) + " |",
        "|---" * (len(CHUNKS) + 1) + "|",
    ]
    for stages in STAGES:
        cells = (result["multiplexed"]["unit"][f"{stages} {n}"] for n in CHUNKS)
        shown = (f"{c['time']:.3f} ({c['before']:.2f}, {c['bubble']:.2f})" for c in cells)
        lines.append(f"| {stages} | " + " | ".join(shown) + " |")
    lines += [
        "",
        f"The 7B model's stages, balanced chunks, {NETWORK / 1e9:.0f} GB/s between nodes for each GPU:",
        "",
        "| tokens a row | chunks | seconds | nothing to pay for | weights and keys paid for | shared where so many or "
        "fewer work | stages' weights on a device | bubble before | then |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in result["multiplexed"]["7b"].items():
        length, n = name.split()
        lines.append(
            f"| {int(length):,} | {n} | {r['seconds']:.2f} | {r['free']:.3f} | {r['paid']:.3f} | {r['depth']} | "
            f"{r['held']} | {r['bubble']:.3f} | {r['paid_bubble']:.3f} |"
        )
    lines += [
        "",
        f"A decoder of 4 layers, one row of {result['recorded']['length']:,} tokens in two documents, float32, here:",
        "",
        "| chunks, ratio | saved MiB | sent MiB | peak, forward | formula | peak, all | formula | equal | "
        "gradient off by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in result["recorded"]["runs"].items():
        if name == "whole":
            continue
        mib = [r[k] / 2**20 for k in ("saved", "sent", "forward_peak", "formula", "peak", "working")]
        lines.append(
            f"| {name.replace(' ', ', ')} | " + " | ".join(f"{m:.2f}" for m in mib) + f" | {r['equal']} | "
            f"{r['gradient_error']:.1e} |"
        )
    return "\n".join(lines)
