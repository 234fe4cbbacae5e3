"""Checks of an open dataset before it is released, and what a release carries: B060.

"Towards Best Practices for Open Datasets for LLM Training", arXiv:2501.08365: seven principles, no code; the rules here
are our construction of them. Every verdict is a signal for a person to look at, not legal advice.
"""

from trainwright.data.build.governance.checks import Report, check_manifest, gate
from trainwright.data.build.governance.manifest import Entry, Manifest, entry_of
from trainwright.data.build.governance.public_domain import public_domain
from trainwright.data.build.governance.release import croissant, datasheet
from trainwright.data.build.governance.signals import opt_out_signals
from trainwright.data.build.governance.takedown import replay, take_down

__all__ = [
    "Entry", "Manifest", "Report", "check_manifest", "croissant", "datasheet", "entry_of", "gate", "opt_out_signals",
    "public_domain", "replay", "take_down",
]  # fmt: skip
