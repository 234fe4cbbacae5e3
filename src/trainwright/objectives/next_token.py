"""Next-token prediction: cross-entropy of every position's target, through the fused linear cross-entropy.

Pretraining, continued pretraining and supervised fine-tuning all are this objective; they differ by the weights of
the batch. The loss is a sum, to be divided by the weight of the global batch, so that micro-batches, ranks and ragged
rows count each token alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.registry import register
from trainwright.models.base import Hidden, LanguageModel
from trainwright.models.early_exit import FIGURES, Exit
from trainwright.objectives.base import Loss, ObjectiveConfig
from trainwright.objectives.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class NextToken:
    """``objective(model, batch) -> Loss``: sum of ``w * (CE + z_loss * lse^2)``, the same of each early exit times its
    weight, and the model's auxiliary loss times the batch's weight. Metrics, as sums: ``nll``, ``z_loss``, ``correct``,
    and with a model that has them ``exit_N_nll``, ``aux_loss`` and its own metrics. Of a batch that names its rows'
    sources (``extras["source"]``, one-hot ``[B, 1, K]``) also ``source_nll_k`` and ``source_weight_k`` of each source
    k."""

    by_source: ClassVar[bool] = True

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss:
        weight = batch.weight()
        source = batch.extras.get("source")

        def head(hidden: Hidden) -> tuple[Tensor, dict[str, Tensor]]:
            # All of the loss is made here, inside forward: FSDP has the head gathered, and finds in what forward
            # returns every tensor that backward starts from.
            head = hidden.head
            total, metrics = linear_cross_entropy(
                hidden.states.flatten(0, 1),
                head.weight,
                batch.targets.flatten(),
                batch.weights.flatten(),
                bias=head.bias,
                softcap=head.softcap,
                scale=head.scale,
                z_loss=self.z_loss,
                label_smoothing=self.label_smoothing,
                chunk_tokens=self.chunk_tokens,
                token_losses=source is not None,
            )
            if source is not None:
                metrics |= _by_source(source, metrics.pop("token_nll"), batch.weights)
            scale = weight.to(total.dtype)
            if hidden.aux_loss is not None:
                aux = hidden.aux_loss * scale
                total = total + aux
                metrics["aux_loss"] = aux.detach()
            metrics.update({name: value.detach() * scale for name, value in hidden.metrics.items()})
            for early in hidden.exits:
                loss, figures = self.exit_loss(early, batch)
                total = total + early.weight * loss
                metrics |= figures
            return total, metrics

        total, metrics = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, head_fn=head)
        return Loss(total, weight, metrics)

    def exit_loss(self, early: Exit, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of an early exit, a sum not yet times its weight, and ``exit_N_nll`` and ``exit_N_correct``. Its
        logits are made here, chunk by chunk, so that those of one exit exist at a time."""
        hidden = early.hidden()
        total, metrics = linear_cross_entropy(
            hidden.states.flatten(0, 1), hidden.head.weight, batch.targets.flatten(), batch.weights.flatten(),
            bias=hidden.head.bias, softcap=hidden.head.softcap, scale=hidden.head.scale, z_loss=self.z_loss,
            label_smoothing=self.label_smoothing, chunk_tokens=self.chunk_tokens,
        )  # fmt: skip
        return total, {f"{early.name}_{figure}": metrics[figure] for figure in FIGURES}


def _by_source(source: Tensor, token_nll: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Sums over the rows of each source: a product with the one-hot matrix, which adds in a fixed order on GPUs too."""
    rows = torch.stack([(token_nll.view_as(weights) * weights).sum(1), weights.sum(1)]).double()  # [2, B]
    nll, weight = rows @ source.flatten(1).to(rows.dtype)  # [K] each
    named = {f"source_nll_{k}": x for k, x in enumerate(nll.unbind())}
    return named | {f"source_weight_{k}": x for k, x in enumerate(weight.unbind())}


@register("objective", "next_token")
class NextTokenConfig(ObjectiveConfig):
    """Next-token cross-entropy over the weighted positions, with optional z-loss and label smoothing."""

    z_loss: NonNegativeFloat = Field(
        0.0, description="Coefficient of the squared log-partition, which keeps logits from drifting; PaLM uses 1e-4."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of the target probability spread evenly over the vocabulary."
    )
    chunk_tokens: PositiveInt | None = Field(
        None, description="Rows of logits held at a time; by default as many as fill some 64 MiB."
    )

    def build(self) -> NextToken:
        return NextToken(self.z_loss, self.label_smoothing, self.chunk_tokens)
