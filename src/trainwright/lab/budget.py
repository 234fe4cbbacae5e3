"""How long each arm may train: by tokens, by the clock or by FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.config.sections import parse_count
from trainwright.core.errors import ConfigError
from trainwright.train.progress import quantity

KINDS = ("tokens", "seconds", "flops")


@dataclass(frozen=True)
class Budget:
    """``Budget("tokens", 2_000_000)``; tokens are counted with padding, seconds are of training alone."""

    kind: str
    amount: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"a budget is of {', '.join(KINDS)}", key="budget", value=self.kind)
        if not self.amount > 0 or self.amount == float("inf"):
            raise ConfigError("should be a number above 0", key=f"budget {self.kind}", value=self.amount)

    @classmethod
    def parse(cls, value: Budget | str | dict[str, Any]) -> Budget:
        """From ``"tokens=2M"``, ``{"seconds": 60}`` or a Budget. Raises ConfigError."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            kind, sep, amount = value.partition("=")
            if not sep:
                raise ConfigError("should look like tokens=2M, seconds=60 or flops=1e13", key="budget", value=value)
            value = {kind.strip(): amount.strip()}
        if not isinstance(value, dict) or len(value) != 1:
            raise ConfigError("should be one of tokens, seconds, flops", key="budget", value=value)
        ((kind, amount),) = value.items()
        try:
            number = float(parse_count(amount))
        except (TypeError, ValueError):
            raise ConfigError("should be a number like 2M, 60 or 1e13", key=f"budget {kind}", value=amount) from None
        return cls(str(kind), number)

    @classmethod
    def of_recipe(cls, train: Any) -> Budget:
        """The recipe's own length (``train`` is a TrainSection); steps count as the tokens that they see."""
        if train.tokens is not None:
            return cls("tokens", train.tokens)
        if train.steps is not None:
            return cls("tokens", train.steps * train.global_batch_tokens)
        if train.seconds is not None:
            return cls("seconds", train.seconds)
        raise ConfigError("the recipe counts epochs; give a budget, e.g. tokens=2M", key="budget")

    def share(self, fraction: float) -> Budget:
        return Budget(self.kind, self.amount * fraction)

    def length(self, flops_per_token: float | None = None) -> dict[str, Any]:
        """The length as the recipe's ``train`` section has it."""
        if self.kind == "seconds":
            return {"seconds": self.amount}
        tokens = self.amount
        if self.kind == "flops":
            if not flops_per_token:
                raise ValueError("a budget of FLOPs needs the model's flops_per_token")
            tokens /= flops_per_token
        return {"tokens": max(1, round(tokens))}

    def __str__(self) -> str:
        if self.kind == "seconds":
            return f"{self.amount:g} s"
        return f"{quantity(self.amount)} {self.kind if self.kind == 'tokens' else 'FLOPs'}"
