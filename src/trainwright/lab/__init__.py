"""The lab: runs many small trainings under equal conditions and says what each method is worth.

``compare`` holds arms against a baseline; ``run_claim`` tests a published claim. Both rest on trials: one training in
a process of its own, stored under a hash of what it is, so that it never runs twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "Arm", "Budget", "Claim", "Comparison", "Trial", "TrialResult", "TrialStore", "Verification", "claims_table",
    "compare", "load_claim", "load_claims", "run_claim", "vary", "verify_candidate",
]  # fmt: skip

if TYPE_CHECKING:
    from trainwright.lab.arms import Arm, vary
    from trainwright.lab.budget import Budget
    from trainwright.lab.claim import Claim, load_claim, load_claims
    from trainwright.lab.claim_run import run_claim
    from trainwright.lab.claim_table import claims_table
    from trainwright.lab.comparison import Comparison, compare
    from trainwright.lab.trial import Trial, TrialResult, TrialStore
    from trainwright.lab.verification import Verification, verify_candidate

_LAZY = {
    "Arm": "arms", "vary": "arms", "Budget": "budget", "Claim": "claim", "load_claim": "claim", "load_claims": "claim",
    "run_claim": "claim_run", "claims_table": "claim_table", "Comparison": "comparison", "compare": "comparison",
    "Trial": "trial", "TrialResult": "trial", "TrialStore": "trial",
    "Verification": "verification", "verify_candidate": "verification",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"trainwright.lab.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
