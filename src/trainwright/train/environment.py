"""environment.json: what a run ran on, enough to tell two runs' circumstances apart and to set one up again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trainwright import __version__
from trainwright.core import hardware
from trainwright.core.distributed import world_size

PACKAGES = (
    "torch", "numpy", "pydantic", "tokenizers", "safetensors", "transformers", "datasets", "pyarrow", "torchao",
    "triton", "liger-kernel", "tensorboard", "trackio", "wandb", "lm-eval",
)  # fmt: skip
# Only these variables are recorded, so that no token or password ever lands in a run's folder.
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "SLURM_JOB_ID", "SLURM_NNODES",
)  # fmt: skip
_SECRET = re.compile(
    r"^(.*?)((?:api[_-]?key|auth[_-]?token|access[_-]?token|token|secret|password|passwd|credentials?))(\s*[=:]\s*).+$",
    re.I | re.S,
)
_URL_LOGIN = re.compile(r"(\w+://)[^/@\s]+@")


def environment() -> dict[str, Any]:
    """Plain JSON values: versions, git commit, command line, hardware, torch's settings."""
    return {
        "trainwright": __version__,
        "python": platform.python_version(),
        "packages": _versions(),
        "git": _git(Path.cwd()),
        "command": [redact(a) for a in sys.argv],
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size(),
        "variables": {k: os.environ[k] for k in VARIABLES if k in os.environ},
        "hardware": hardware.describe(),
        "torch": _torch(),
    }


def redact(argument: str) -> str:
    """A command-line argument without the value of a ``...key=``, ``...token=`` or the login of a URL."""
    argument = _URL_LOGIN.sub(r"\1***@", argument)
    match = _SECRET.match(argument)
    if match is None or argument[: match.end(2)].lower().endswith("tokenizer"):
        return argument
    return f"{match[1]}{match[2]}{match[3]}***"


def _versions() -> dict[str, str]:
    out = {}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a repository or without git."""

    def ask(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes)}


def _torch() -> dict[str, Any]:
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "blas": "mkl" if torch.backends.mkl.is_available() else "openblas or other",
        "onednn": torch.backends.mkldnn.is_available(),
    }
