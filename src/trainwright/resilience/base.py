"""Monitors look at a step and give a verdict; they never act. One policy in the loop acts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainwright.core.registry import MethodConfig

Action = Literal["ok", "skip", "rollback", "stop"]
SEVERITY: dict[str, int] = {"ok": 0, "skip": 1, "rollback": 2, "stop": 3}


@dataclass(frozen=True)
class StepInfo:
    """What is known of a step before its update is applied. The same on every rank."""

    step: int  # 1-based number of the step being made
    loss: float  # global mean loss, nats
    grad_norm: float | None  # global norm before clipping; None when it is not computed, NaN when it is NaN


@dataclass(frozen=True)
class Verdict:
    action: Action = "ok"
    reason: str = ""
    monitor: str = ""
    since: int | None = None  # first step that is under suspicion, where that is earlier than the one inspected


class Monitor(Protocol):
    def inspect(self, step: StepInfo) -> Verdict: ...
    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MonitorConfig(MethodConfig):
    """Base of monitor configs."""

    @abstractmethod
    def build(self) -> Monitor: ...
