"""Random state: seeding, and capturing all of it so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def derive(seed: int, *labels: object) -> int:
    """A 63-bit seed that depends on ``seed`` and the labels; stable over processes and Python versions."""
    text = "/".join(str(x) for x in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of Python's, NumPy's and torch's generators as tensors and plain JSON-like values."""
    version, internal, gauss = random.getstate()
    name, keys, pos, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {"name": name, "keys": [int(k) for k in keys], "pos": pos, "has_gauss": has_gauss, "cached": cached},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    p, n = state["python"], state["numpy"]
    random.setstate((p["version"], tuple(p["internal"]), p["gauss"]))
    np.random.set_state((n["name"], np.array(n["keys"], dtype=np.uint32), n["pos"], n["has_gauss"], n["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
