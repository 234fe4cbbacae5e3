"""SALT: a small language model teaches a larger one through the first part of its training, and then lets go.

Steps 1 .. n_KD minimise the mix of next token and soft label, the rest of the run the plain next-token loss::

    L_i = (1 - w) CE(y_i, p_i) + w CE(q_i^(rho), p_i)       q^(rho) proportional to q^(1 / rho)

with student p and teacher q ``[V]`` at every position (:mod:`trainwright.objectives.distillation`). Behind n_KD the
teacher is let go, and no figure of the optimizer or the schedule notices. Early on soft labels have less variance than
the one token that came; later their bias, what the teacher gets wrong, would hold the student back.

A Little Help Goes a Long Way: Efficient LLM Training by Leveraging Small LMs, arXiv:2410.18779. The defaults (w 2/3,
rho 1/4, n_KD 36k of 208k steps) are recalled from its 2.8B student and 1.5B teacher. Beyond the paper: a linear decay
of w at the end of the first stage, and kept top-K labels (``top_k``), for which the teacher passes over the training
tokens once, before the run, and each later run with the same teacher and data reads them. Those are of each document by
itself from its beginning, while a live teacher sees a row as the student does, so a document's rest in another row
without what came before. They stay attached to the data in the second stage. The data selection of SALT-DS is
``data.selection``.

The teacher is whole on every rank, also where the student is sharded (dp_shard): a small model by design. Tensor,
context and pipeline parallelism are refused. It computes in the run's precision and takes no part in checkpoints. Its
cost, a forward pass over the first n_KD steps, is logged as ``teacher_flops``, and as its share of all FLOPs so far as
``teacher_flops_share``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.models.base import Hidden, LanguageModel
from trainwright.objectives.base import Loss, ObjectiveConfig, RunContext
from trainwright.objectives.distillation import TeacherHead, TopKLabels, distillation_loss
from trainwright.objectives.next_token import NextToken
from trainwright.objectives.teacher import check_same_vocabulary

log = logging.getLogger("trainwright")


class Salt:
    """``objective(model, batch) -> Loss``, as :class:`~trainwright.objectives.next_token.NextToken`, with soft labels
    in the first ``steps`` steps; :meth:`at_step` says which step it is.

    teacher      a language model in eval mode, on the model's device; or None where batches hold its labels
                 (``extras["teacher_ids"]``, ``extras["teacher_probs"]``, ``[B, T, K]``) or :meth:`prepare` opens it
    weight, rho  w in [0, 1] and rho > 0 of the module's equation
    decay_steps  of the first ``steps``, the last so many over which w falls to 0 linearly

    Extra metrics, as sums: ``soft_nll``, the CE against the soft labels. A model in eval mode is scored without the
    teacher. Raises ValueError for settings out of range and a teacher in train mode.
    """

    watched: ClassVar[str] = "nll"  # the loss itself jumps where the soft labels end

    def __init__(
        self,
        teacher: LanguageModel | None = None,
        *,
        steps: int = 0,
        weight: float = 0.667,
        rho: float = 0.25,
        decay_steps: int = 0,
        plain: NextToken | None = None,
        config: SaltConfig | None = None,
    ):
        if not 0 <= weight <= 1:
            raise ValueError(f"weight must be in [0, 1], got {weight}")
        if not rho > 0:
            raise ValueError(f"rho must be positive, got {rho}")
        if not 0 <= decay_steps <= steps:
            raise ValueError(f"decay_steps={decay_steps} must be in 0..steps={steps}")
        self.teacher, self.steps, self.weight, self.rho, self.decay_steps = teacher, steps, weight, rho, decay_steps
        self.plain = plain or NextToken()
        self.share = self._share_at(0)
        self._config = config
        self._context: RunContext | None = None
        self._step = 0
        self._teacher_flops = 0.0  # of a step
        self._labels: Callable[[], None] | None = None
        self._check_teacher()

    # -- which stage it is --------------------------------------------------------------------------------------

    def _share_at(self, step: int) -> float:
        left = self.steps - step
        if left <= 0:
            return 0.0
        return self.weight * min(1.0, left / (self.decay_steps + 1))

    def at_step(self, step: int) -> None:
        """Called before a step with the number of those done. Lets the teacher go behind the first stage, and opens it
        again where a run is resumed or rolled back into that."""
        self._step, self.share = step, self._share_at(step)
        if self.share > 0 and self.teacher is None and self._context is not None:
            self._open()
        elif self.share == 0 and self.teacher is not None:
            self.teacher = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def metrics(self) -> dict[str, float]:
        """Figures for the log: w, and FLOPs of the teacher so far, alone and as a share of all."""
        if self._context is None:
            return {"soft_weight": self.share}
        done = self._step + 1  # logged behind the step
        spent = self._teacher_flops * min(done, self.steps)
        student = self._context.flops_per_token * self._context.tokens_per_step * done
        return {
            "soft_weight": self.share,
            "teacher_flops": spent,
            "teacher_flops_share": spent / (spent + student) if spent else 0.0,
        }

    # -- the teacher --------------------------------------------------------------------------------------------

    def prepare(self, context: RunContext) -> None:
        """Settle the length of the first stage, and open the teacher. Raises ConfigError for what does not fit."""
        config = self._config
        if config is None:
            return
        self.steps = config.stage_steps(context.total_steps)
        self.decay_steps = round(config.decay * self.steps)
        if self.weight == 0 or self.steps == 0:
            self.steps = 0
            return
        if context.split:
            raise ConfigError(
                f"takes a whole row and the whole head on each rank, and parallel.{context.split} divides them; train "
                "with dp_replicate or dp_shard, or with objective=next_token",
                key="name",
                value="salt",
            )
        if not config.teacher:
            raise ConfigError("is required; name the folder of a run or of a Hugging Face model", key="teacher")
        self._context = context
        if not context.resumed:  # else when it is known whether the run is past the need of it
            self._open()

    def _open(self) -> None:
        config, context = self._config, self._context
        if config is None or context is None or self._labels is not None:
            return
        teacher, tokenizer = context.open_model(str(config.teacher), config.checkpoint)
        check_same_vocabulary(context.tokenizer, tokenizer)
        if teacher.max_seq_len < context.seq_len:
            raise ConfigError(
                f"sees {teacher.max_seq_len} tokens, rows have {context.seq_len}; use another teacher, or "
                f"train.seq_len <= {teacher.max_seq_len}",
                key="teacher",
                value=config.teacher,
            )
        # The forward pass is a third of forward and backward where all weights are trained.
        for weight in teacher.parameters():
            weight.requires_grad_(weight.is_floating_point())
        passes = context.tokens_per_step * teacher.flops_per_token(context.seq_len) / 3
        teacher.requires_grad_(False).eval()
        if config.top_k is None:
            self.teacher, self._teacher_flops = teacher, passes
            log.info("teacher %s: %d parameters, for %d steps", config.teacher, teacher.num_params(), self.steps)
            return
        from trainwright.objectives.teacher_cache import attach_labels

        self._labels = attach_labels(
            teacher, context.training_sets, config.top_k, self.rho, context.seq_len, context.tokenizer.pad_id,
            context.cache_dir,
        )  # fmt: skip

    def _check_teacher(self) -> None:
        if self.teacher is not None and self.teacher.training:
            raise ValueError("the teacher is in train mode, so its dropout would blur the labels; call teacher.eval()")

    # -- the loss -----------------------------------------------------------------------------------------------

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss:
        if self.share == 0 or not model.training:
            return self.plain(model, batch)
        self._check_teacher()
        weight, teacher, plain = batch.weight(), self._soft_labels(batch), self.plain

        def head(hidden: Hidden) -> tuple[Tensor, dict[str, Tensor]]:
            head = hidden.head
            total, metrics = distillation_loss(
                hidden.states.flatten(0, 1),
                head.weight,
                batch.targets.flatten(),
                batch.weights.flatten(),
                teacher,
                share=self.share,
                rho=self.rho,
                bias=head.bias,
                softcap=head.softcap,
                scale=head.scale,
                z_loss=plain.z_loss,
                label_smoothing=plain.label_smoothing,
                chunk_tokens=plain.chunk_tokens,
            )
            scale = weight.to(total.dtype)
            if hidden.aux_loss is not None:
                aux = hidden.aux_loss * scale
                total = total + aux
                metrics["aux_loss"] = aux.detach()
            metrics.update({name: value.detach() * scale for name, value in hidden.metrics.items()})
            return total, metrics

        total, metrics = model(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, head_fn=head)
        return Loss(total, weight, metrics)

    def _soft_labels(self, batch: Batch) -> TeacherHead | TopKLabels:
        if self.teacher is not None:
            return teacher_head(self.teacher, batch)
        if "teacher_probs" not in batch.extras:
            raise ConfigError(
                "has neither a teacher nor kept labels in the batch; give Salt a teacher", key="objective"
            )
        ids, probs = batch.extras["teacher_ids"], batch.extras["teacher_probs"]
        return TopKLabels(ids.flatten(0, 1), probs.flatten(0, 1))


@torch.no_grad()
def teacher_head(teacher: LanguageModel, batch: Batch) -> TeacherHead:
    """The teacher's view of a batch: hidden states ``[B * T, D']``; its logits are made chunk by chunk later."""
    hidden: Hidden = teacher(batch.tokens, positions=batch.positions, doc_ids=batch.doc_ids, head_fn=lambda h: h)
    head = hidden.head
    return TeacherHead(
        hidden.states.flatten(0, 1), head.weight.detach(), None if head.bias is None else head.bias.detach(),
        head.softcap, head.scale,
    )  # fmt: skip


@register("objective", "salt", paper="arXiv:2410.18779", seed_id="B086")
class SaltConfig(ObjectiveConfig):
    """Soft labels of a small teacher for the first steps, then plain next-token prediction."""

    teacher: str | None = Field(None, description="Folder of a run or of a Hugging Face model; of the same vocabulary.")
    checkpoint: str = Field("latest", description="Of a run: latest, best or a step.")
    steps: NonNegativeInt | None = Field(None, description="Steps with the teacher (n_KD); null: by share.")
    share: float = Field(
        0.173, ge=0, le=1, description="Share of the run's steps with the teacher; the paper has 36k of 208k."
    )
    weight: float = Field(0.667, ge=0, le=1, description="Share of the soft labels in the target (w).")
    rho: PositiveFloat = Field(
        0.25, description="Softness of the labels: probabilities to the power 1 / rho. Below 1 they are sharpened."
    )
    decay: float = Field(
        0.0, ge=0, le=1, description="Share of these steps, the last ones, over which weight falls to 0 linearly."
    )
    top_k: PositiveInt | None = Field(
        None,
        description="Keep the teacher's K likeliest ids of every training token in the cache, and train from these; "
        "null: run the teacher beside the student.",
    )

    z_loss: NonNegativeFloat = Field(0.0, description="As of next_token.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="As of next_token; of the hard part of the target.")
    chunk_tokens: PositiveInt | None = Field(None, description="As of next_token.")

    @model_validator(mode="after")
    def _one_length(self) -> SaltConfig:
        if self.steps is not None and "share" in self.model_fields_set:
            raise ValueError("steps and share both say how long the teacher stays; give one")
        return self

    def stage_steps(self, total: int) -> int:
        """Steps with the teacher in a run of ``total``. Raises ConfigError for more than those."""
        if self.steps is None:
            return round(self.share * total)
        if self.steps > total:
            raise ConfigError(f"is more than the run's {total} steps; lower it", key="steps", value=self.steps)
        return self.steps

    def build(self) -> Salt:
        return Salt(
            weight=self.weight, rho=self.rho, plain=NextToken(self.z_loss, self.label_smoothing, self.chunk_tokens),
            config=self,
        )  # fmt: skip
