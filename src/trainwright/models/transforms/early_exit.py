"""Early exits in a decoder: ``transforms: [{name: early_exit, after: [3], weights: [0.5]}]``.

Equations and heads are in models/early_exit.py, decoding that leaves at an exit in models/exit_decoding.py, exact
gradients over pipeline stages and the filling of their bubbles in parallel/pipeline/early_exit.py. A saved model knows
its exits by the recipe; a Hugging Face folder written from it has no place for them.

EE-LLM, arXiv:2312.04916; ``freeze`` is EE-Tuning, arXiv:2402.00518. Weight 1 and a warm-up from 0 are the paper's.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, field_validator

from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, register
from trainwright.models.base import LanguageModel
from trainwright.models.decoder import Decoder
from trainwright.models.early_exit import ExitSettings, add_exits, check_exits


@register(
    "transform",
    "early_exit",
    paper="arXiv:2312.04916",
    seed_id="B017",
    conflicts={
        "objective.salt": "its loss does not reach the early exits, which would stay untrained; use next_token or sft"
    },
)
class EarlyExitConfig(MethodConfig):
    """Heads behind some layers, trained with the model, so that generation can leave at the first confident one."""

    after: list[int] = Field(description="Layers, counted from 1, behind which there is an exit.")
    weights: list[NonNegativeFloat] | None = Field(None, description="Of the exits' losses; null: 1 each.")
    before: bool = Field(False, description="The exits stand before the layers that are named, not behind them.")
    warmup_steps: NonNegativeInt = Field(0, description="Steps in which the weights go from init_weight to theirs.")
    warmup: Literal["linear", "cosine"] = Field("linear", description="How the weights go there.")
    init_weight: NonNegativeFloat = Field(0.0, description="Weight of each exit's loss at the first step of a warm-up.")
    tied: bool = Field(True, description="Exits use the model's unembedding; false: each has its own.")
    norm: bool = Field(True, description="An exit has a norm of its own before the unembedding.")
    mlp: bool = Field(False, description="An exit has a feed-forward of its own before that.")
    init: Literal["normal", "copy"] = Field(
        "normal", description="Weights of an exit's norm and own unembedding: fresh, or those of the model's last."
    )
    freeze: bool = Field(False, description="Train nothing but the exits (EE-Tuning); norm, mlp or an own unembedding.")

    @field_validator("after")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        if not value or sorted(set(value)) != value:
            raise ValueError("should name layers in rising order, each once, and at least one")
        return value

    def settings(self, n_layers: int) -> ExitSettings:
        """Resolved for a model of ``n_layers``. Raises ConfigError where they do not fit."""
        weights = [1.0] * len(self.after) if self.weights is None else self.weights
        try:
            check_exits(self.after, weights, n_layers)
        except ConfigError as error:
            raise error.under("transforms.early_exit") from None
        return ExitSettings(
            tuple(n - self.before for n in self.after),
            tuple(weights),
            self.init_weight,
            self.warmup_steps,
            self.warmup,
            self.tied,
            self.freeze,
        )

    def apply(self, model: LanguageModel) -> LanguageModel:
        """Add the exits. Raises ConfigError for a model that is not our decoder, and layers that it does not have."""
        if not isinstance(model, Decoder):
            raise ConfigError(
                "transforms.early_exit is for our own decoder; load the weights with model: {name: pretrained}"
            )
        settings = self.settings(model.arch.n_layers)
        try:
            add_exits(model, settings, norm=self.norm, mlp=self.mlp, copy=self.init == "copy")
        except ConfigError as error:
            raise error.under("transforms.early_exit") from None
        return model
