"""The one policy: takes the verdicts of all monitors on a step and decides what the loop does.

Pure logic: no model, no files. The loop inspects, asks :meth:`Policy.decide`, and acts on the :class:`Decision`;
rollbacks are bounded, and each lowers the learning rate for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.resilience.base import SEVERITY, Verdict


@dataclass(frozen=True)
class Decision(Verdict):
    """What the loop does with a step.

    ok        apply the update.
    skip      drop this step's gradient; weights and optimizer state stay as they are.
    rollback  load a checkpoint made before step ``since`` (the newest whole one where none is older), go on with
              data behind the failed step and ``skip_steps`` steps of data further, at ``lr_multiplier``.
    stop      end the run with ``reason``.
    """

    lr_multiplier: float = 1.0  # on every learning rate from now on
    skip_steps: int = 0  # steps of data to pass over beyond the failed one
    events: tuple[dict[str, Any], ...] = ()  # one JSON-ready record for each verdict that was not ok


class Policy:
    """Takes the most severe verdict; after ``max_rollbacks`` rollbacks the next one becomes a stop."""

    def __init__(self, max_rollbacks: int = 3, lr_factor: float = 0.5, skip_steps: int = 1):
        if max_rollbacks < 0 or skip_steps < 0 or not 0 < lr_factor <= 1:
            raise ValueError(
                f"max_rollbacks={max_rollbacks} and skip_steps={skip_steps} should be >= 0, "
                f"lr_factor={lr_factor} in (0, 1]"
            )
        self.max_rollbacks, self.lr_factor, self.skip_steps = max_rollbacks, lr_factor, skip_steps
        self.rollbacks = 0
        self.lr_multiplier = 1.0

    def decide(self, step: int, verdicts: Sequence[tuple[str, Verdict]]) -> Decision:
        """The decision on ``step`` from ``(monitor, verdict)`` pairs; the first of the most severe gives the reason."""
        raised = [(name, v) for name, v in verdicts if v.action != "ok"]
        if not raised:
            return Decision(lr_multiplier=self.lr_multiplier)
        name, worst = max(raised, key=lambda pair: SEVERITY[pair[1].action])  # max keeps the first of equals
        since = min([v.since for _, v in raised if v.since is not None and v.action == worst.action], default=step)
        events = [_event(v.action, step, n, v.reason) for n, v in raised]
        action, reason = worst.action, worst.reason
        if action == "rollback":
            if self.rollbacks >= self.max_rollbacks:
                action = "stop"
                reason = (
                    f"{reason}; {self.rollbacks} rollbacks did not help (recovery.max_rollbacks={self.max_rollbacks})"
                )
                events.append(_event("stop", step, name, reason))
            else:
                self.rollbacks += 1
                self.lr_multiplier *= self.lr_factor
        return Decision(
            action=action,
            reason=reason,
            monitor=name,
            since=since,
            lr_multiplier=self.lr_multiplier,
            skip_steps=self.skip_steps if action == "rollback" else 0,
            events=tuple(events),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "lr_multiplier": self.lr_multiplier}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollbacks = int(state["rollbacks"])
        self.lr_multiplier = float(state["lr_multiplier"])


def _event(action: str, step: int, monitor: str, reason: str) -> dict[str, Any]:
    return {"event": action, "step": step, "monitor": monitor, "reason": reason}
