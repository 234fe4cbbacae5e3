"""Optimizers, each usable alone: ``from trainwright.optim import Muon``. Imported on first use."""

from __future__ import annotations

from typing import Any

_CLASSES = {
    "Adafactor": "adafactor",
    "AdamH": "adamh",
    "AdamW": "adamw",
    "AdamW8bit": "adamw8bit",
    "AdaPM": "adapm",
    "CompositeOptimizer": "composite",
    "GaLore": "galore",
    "GradNormLoRP": "gradnormlorp",
    "Grass": "grass",
    "KernelAverage": "averaging.ptq_kernel",
    "LAWA": "averaging.lawa",
    "LLR": "llr",
    "Lion": "lion",
    "MGUP": "mgup",
    "Mano": "mano",
    "Muon": "muon",
    "MuonH": "adamh",
    "NaturalGaLore": "natural_galore",
    "NuMuon": "numuon",
    "OnlineSubspaceDescent": "online_subspace_descent",
    "ProbedAdaPM": "adapm_probe",
    "SOAP": "soap",
    "SPAM": "spam",
    "ScheduleFreeAdamW": "schedule_free",
    "Signum": "signum",
    "SinkGD": "sinkgd",
    "SpectralSphere": "spectral_sphere",
    "Spectra": "spectra",
    "Swan": "swan",
    "ZClip": "clipping.zclip",
}
__all__ = sorted(_CLASSES)


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
