"""The loop's side of dynamic data: mixers, selectors and weighters are told what they ask for, and heeded.

Updates come at ``warmup_step + i * update_step`` steps done, and count from the next row on, on every rank alike. What
they decided is in the checkpoint, so that a resumed run takes the same rows. A recipe that names none of them has no
:class:`Interaction`, and its training is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum, broadcast_object
from trainwright.core.errors import ConfigError, InputError
from trainwright.data.mixers.base import MixContext, Mixer, MixStats, UpdatingMixerConfig, short_names
from trainwright.data.mixers.doremi import DoReMiConfig, DoReMiMixer
from trainwright.data.selectors.base import PoolSelectorConfig
from trainwright.data.weighters.base import row_scales
from trainwright.data.weighters.loss import LossWeighterConfig
from trainwright.objectives.token_losses import row_losses, token_losses
from trainwright.train.selection import Selection

if TYPE_CHECKING:
    from trainwright.data.module import DataModule
    from trainwright.train.trainer import Trainer

log = logging.getLogger("trainwright")


def build_interaction(trainer: Trainer) -> Interaction | None:
    """None where the recipe leaves mixer, selector and weighter as they are."""
    data = trainer.config.data
    if data.mixer.changes or data.selector.selects or data.weighter.weighs:
        return Interaction(trainer)
    return None


class Interaction:
    """Raises ConfigError where a method does not fit the run."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.loader, self.device = trainer, trainer.loader, trainer.device
        self.rank, self.ranks = trainer.mesh.dp_rank, trainer.mesh.dp_size
        data = trainer.config.data
        looks = isinstance(data.mixer, UpdatingMixerConfig) or data.selector.selects or data.weighter.weighs
        degrees = trainer.mesh.degrees
        if looks and degrees.world_size > self.ranks:
            raise ConfigError(
                "methods that choose data by the losses work with data parallelism alone; set parallel.tp, pp and cp "
                "to 1",
                key="data",
            )
        self.mixing = _Mixing(self) if data.mixer.changes else None
        self.selection = Selection(self, data.selector) if isinstance(data.selector, PoolSelectorConfig) else None
        self.weighter = data.weighter.build() if data.weighter.weighs else None
        self._weigh_from = data.weighter.warmup_step if isinstance(data.weighter, LossWeighterConfig) else 0

    # -- the step -----------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> None:
        """``step`` steps are done, and the rows of the next one are about to be asked for."""
        if self.selection is not None:
            self.selection.before_step(step)

    def prepare(self, step: int, batch: Batch) -> Batch:
        """The batch as it is trained on."""
        if self.mixing is not None:
            self.mixing.look(step, batch)
        if self.weighter is None or step < self._weigh_from:
            return batch
        losses = self.losses(self.trainer.parallel.module, batch)
        mine = torch.stack([row_losses(losses, batch.weights), batch.weights.double().sum(1)])  # [2, B]
        everyone = torch.zeros(self.ranks, *mine.shape, dtype=torch.float64, device=self.device)
        everyone[self.rank] = mine
        loss, tokens = all_reduce_sum(everyone).transpose(0, 1).reshape(2, -1)
        scales = row_scales(self.weighter.weights(loss), tokens).view(self.ranks, -1)[self.rank]
        batch.weights = batch.weights * scales.to(batch.weights)[:, None]
        return batch

    def after_step(self, step: int, row: dict[str, Any]) -> dict[str, Any]:
        """``step`` steps are done; ``row`` are the figures of the last, which come back as they are to be logged."""
        return row if self.mixing is None else self.mixing.after_step(step, row)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "mixing": None if self.mixing is None else self.mixing.state_dict(),
            "selection": None if self.selection is None else self.selection.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """To be called before the loader's own. None: the run had no such method so far."""
        if self.mixing is not None and state and state["mixing"]:
            self.mixing.load_state_dict(state["mixing"])
        if self.selection is not None and state and state["selection"]:
            self.selection.load_state_dict(state["selection"])

    # -- what the model says ------------------------------------------------------------------------------------

    def losses(self, module: nn.Module, batch: Batch) -> Tensor:
        """Nats of each target of this rank's rows ``[B, T]``, without dropout."""
        was_training = module.training
        module.eval()
        try:
            with self.trainer.precision.autocast():
                micro_batches = batch.split(self.trainer.executor.micro_batch_size)
                parts = [token_losses(module, m.to(self.device)) for m in micro_batches]
        finally:
            module.train(was_training)
        return torch.cat(parts).to(batch.weights.device)


def mix_context(
    config: Any, data: DataModule, rows: int, steps: int | None, max_rows: int | None, num_params: int
) -> MixContext:
    """What a mixer is told of a run of ``steps`` (None: not known) with ``rows`` rows a step."""
    weights = data.weights or dict.fromkeys(data.streams, 1.0)
    names = sorted(data.streams)
    total = sum(weights[n] for n in names)
    total_rows = 0 if steps is None else min(steps * rows, max_rows or steps * rows)
    lr = None
    if steps is not None:
        schedule = config.schedule.build(steps)
        lr = config.optimizer.lr * np.array([schedule(t) for t in range(steps)])
    return MixContext(
        proportions={n: weights[n] / total for n in names},
        total_rows=total_rows,
        step_rows=rows,
        batch_tokens=rows * config.train.seq_len,
        epoch_rows={n: data.streams[n].num_rows(0) for n in names},
        lr=lr,
        optimizer=config.optimizer.name,
        weight_decay=config.optimizer.weight_decay,
        tokens_per_parameter=total_rows * config.train.seq_len / max(num_params, 1),
    )


class _Mixing:
    """A mixer and what it is fed with."""

    def __init__(self, owner: Interaction):
        self.owner, trainer = owner, owner.trainer
        self.config = trainer.config.data.mixer
        steps = None if trainer.by_clock or trainer.config.train.seconds is not None else trainer.total_steps
        params = sum(p.numel() for p in trainer.model.parameters())
        context = mix_context(trainer.config, trainer.data, trainer.rows, steps, trainer._max_rows, params)
        try:
            self.mixer: Mixer = self.config.build(context)
        except ConfigError as error:
            raise (error if error.key.startswith("optimizer") else error.under("data.mixer")) from None
        self.names = list(context.proportions)
        self.shown = short_names(self.names)
        self.proportions = dict(context.proportions)
        self.reference: nn.Module | None = None
        self._excess: dict[str, float] = {}
        self._sums = np.zeros((2, len(self.names)))  # nats and tokens since the last update, a step counting 1
        self._plan: list[dict[str, int]] | None = None
        if self.mixer.plan is not None:
            plan = self.mixer.plan
            self._plan = [dict(s.rows) for s in plan]
            owner.loader.change(lambda mixture: mixture.follow(plan))
            return
        if not getattr(trainer.objective, "by_source", False):
            raise ConfigError(
                f"looks at the loss of each source, which objective={trainer.config.objective.name} does not report; "
                "use next_token or sft",
                key="data.mixer",
                value=self.config.name,
            )
        if isinstance(self.config, DoReMiConfig) and self.config.reference is not None:
            self.reference = self._open_reference(self.config)

    def _open_reference(self, config: DoReMiConfig) -> nn.Module:
        from trainwright.train.runs import load_run

        try:
            model, tokenizer, _ = load_run(config.reference or "", device=self.owner.device)
        except InputError as error:
            raise ConfigError(
                f"holds no finished run to compare with: {error}",
                key="data.mixer.reference",
                value=str(config.reference),
            ) from None
        ours = self.owner.trainer.tokenizer
        if tokenizer.fingerprint() != ours.fingerprint():
            raise ConfigError(
                "was trained with another tokenizer, so its losses are of other tokens; use the one in its folder",
                key="data.mixer.reference",
                value=str(config.reference),
            )
        return model.requires_grad_(False)

    def _due(self, step: int) -> bool:
        config = self.config
        if not isinstance(config, UpdatingMixerConfig):
            return False
        since = step - config.warmup_step
        return since > 0 and since % config.update_step == 0

    def look(self, step: int, batch: Batch) -> None:
        """Before the step: the excess over the reference, where the step's end is an update."""
        if self.reference is None or not self._due(step + 1):
            return
        own = self.owner.losses(self.owner.trainer.parallel.module, batch)
        excess = (own - self.owner.losses(self.reference, batch)).clamp(min=0)  # clipped token by token
        rows = torch.stack([(excess * batch.weights).sum(1), batch.weights.sum(1)]).double()
        sums = all_reduce_sum((rows @ batch.extras["source"].flatten(1)).to(self.owner.device)).tolist()
        self._excess = {n: e / w for n, e, w in zip(self.names, *sums, strict=True) if w > 0}

    def after_step(self, step: int, row: dict[str, Any]) -> dict[str, Any]:
        if self.mixer.plan is not None:
            return {**row, **self._shown(self.mixer.mix(MixStats(step - 1)))}
        nll = np.array([row.pop(f"source_nll_{k}") for k in range(len(self.names))])
        weight = np.array([row.pop(f"source_weight_{k}") for k in range(len(self.names))])
        row |= {f"loss/{self.shown[n]}": float(a / w) for n, a, w in zip(self.names, nll, weight, strict=True) if w > 0}
        row |= self._shown(self.proportions)
        if step > getattr(self.config, "warmup_step", 0) and np.isfinite(nll).all():
            self._sums += [nll, weight]
        if self._due(step):
            losses = {n: float(a / w) for n, a, w in zip(self.names, *self._sums, strict=True) if w > 0}
            # One rank's figures for all: a sum may differ in its last digit between ranks, and the rows must not.
            stats = broadcast_object(MixStats(step, losses, self._excess))
            self.proportions = self.mixer.mix(stats)
            self._sums[:] = 0
            self._apply()
        if isinstance(self.mixer, DoReMiMixer):
            row |= {f"share_average/{self.shown[n]}": a for n, a in self.mixer.average.items()}
        return row

    def _shown(self, proportions: Mapping[str, float]) -> dict[str, float]:
        return {f"share/{self.shown[n]}": p for n, p in proportions.items()}

    def _apply(self) -> None:
        self.owner.loader.change(lambda mixture: mixture.set_weights(self.proportions))

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.config.name, "mixer": self.mixer.state_dict(), "proportions": self.proportions,
            "sums": self._sums.tolist(), "plan": self._plan,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["name"] != self.config.name:
            log.warning("data.mixer was %s so far; %s begins anew", state["name"], self.config.name)
            return
        if state["plan"] != self._plan:
            log.warning(
                "the schedule of the sources is another one than when this run began (its length or its data changed), "
                "so their totals over the whole run are not kept exactly"
            )
        self.mixer.load_state_dict(state["mixer"])
        if self.mixer.plan is None:
            self.proportions = dict(state["proportions"])
            self._sums = np.array(state["sums"], float)
            self._apply()
