"""``trainwright doctor``: what this machine has, how fast it is, what is missing for which feature."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch

from trainwright import __version__
from trainwright.core import hardware

# package to import, feature, how to get it
FEATURES = [
    ("transformers", "models of any AutoModelForCausalLM folder", "pip install 'trainwright[hf]'"),
    ("datasets", "data from datasets folders and the hub", "pip install 'trainwright[hf]'"),
    ("pyarrow", "parquet data", "pip install 'trainwright[parquet]'"),
    ("lm_eval", "harness tasks (trainwright eval --tasks)", "pip install 'trainwright[eval]'"),
    ("trackio", "logging to Trackio", "pip install 'trainwright[trackio]'"),
    ("wandb", "logging to Weights & Biases", "pip install 'trainwright[wandb]'"),
    ("triton", "our GPU kernels", "pip install 'trainwright[gpu]'"),
]
SLOW = 0.75  # a 16-bit type below this share of fp32's speed is not worth computing in


def diagnose() -> dict[str, Any]:
    """Everything as plain JSON values. Matrix products are measured anew."""
    devices = [
        "cpu",
        *(["cuda"] if torch.cuda.is_available() else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    speeds = {
        device: {
            name: hardware.matmul_peak(device, dtype, fresh=True)
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
        }
        for device in devices
    }
    disk = shutil.disk_usage(Path.cwd())
    features = [_feature(*entry) for entry in FEATURES]
    return {
        "trainwright": __version__,
        "torch": torch.__version__,
        **hardware.describe(),
        "disk_free_bytes": disk.free,
        "matmul_flops": speeds,
        "backends": backends(),
        "features": features,
        "advice": advice(speeds, features),
    }


def _feature(package: str, feature: str, remedy: str) -> dict[str, Any]:
    present = importlib.util.find_spec(package) is not None
    version = None
    if present:
        try:
            version = importlib.metadata.version(package.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            version = "installed"
    return {"package": package, "feature": feature, "version": version, "remedy": None if present else remedy}


def backends() -> dict[str, bool]:
    """Which ways of computing and of talking between processes work here."""
    import torch.distributed as dist

    distributed = dist.is_available()
    return {
        "gloo": distributed and dist.is_gloo_available(),
        "nccl": distributed and dist.is_nccl_available() and torch.cuda.is_available(),
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "compile": any(shutil.which(c) is not None for c in ("c++", "g++", "clang++")),
    }


def advice(speeds: dict[str, dict[str, float]], features: list[dict[str, Any]]) -> list[str]:
    """What follows from the figures."""
    out = []
    for device, found in speeds.items():
        slow = [name for name in ("bf16", "fp16") if found[name] < SLOW * found["fp32"]]
        fast = [name for name in ("bf16", "fp16") if found[name] > found["fp32"] / SLOW]
        if slow:
            shares = ", ".join(f"{n} runs at {100 * found[n] / found['fp32']:.2g} % of fp32" for n in slow)
            out.append(f"{device}: {shares}; do not compute in it")
        if fast:
            out.append(
                f"{device}: {fast[0]} is {found[fast[0]] / found['fp32']:.1f} times as fast as fp32; "
                f"use precision: {{name: {fast[0]}}}"
            )
    if "cuda" not in speeds:
        out.append("no CUDA device: models up to some 10M parameters train in minutes to hours here")
    if not backends()["compile"]:
        out.append("no C++ compiler: train.compile=true will fail on the CPU; install g++ or clang")
    out += [f"{f['feature']}: {f['remedy']}" for f in features if f["remedy"]]
    return out


def show(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from trainwright.cli.output import out
    from trainwright.train.progress import memory, quantity

    console = out()

    def heading(text: str) -> None:
        console.print(Text("\n" + text, style="bold"))

    heading("Machine")
    isa = f" ({', '.join(found['cpu_features'])})" if found["cpu_features"] else ""
    print(
        f"{found['cpu']}{isa}, {found['cores']} cores, {found['threads']} threads, "
        f"{memory(found['memory_bytes'])} memory"
    )
    for gpu in found["gpus"]:
        print(f"{gpu['name']}, {memory(gpu['memory_bytes'])}, compute capability {gpu['capability']}")
    print(
        f"{memory(found['disk_free_bytes'])} free on this disk; "
        f"trainwright {found['trainwright']}, torch {found['torch']}"
    )
    heading("Matrix products, measured")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("device", "fp32", "bf16", "fp16"):
        table.add_column(name)
    for device, speeds in found["matmul_flops"].items():
        table.add_row(device, *(f"{quantity(v)} FLOP/s" if v else "none" for v in speeds.values()))
    console.print(table)
    heading("Backends")
    print("  ".join(f"{name}: {'yes' if ok else 'no'}" for name, ok in found["backends"].items()))
    heading("Features")
    table = Table(box=None, pad_edge=False, show_header=False)
    for f in found["features"]:
        table.add_row(f["package"], f["version"] or "missing", f["feature"], Text(f["remedy"] or ""))
    console.print(table)
    heading("Advice")
    for line in found["advice"]:
        print(f"- {line}")
