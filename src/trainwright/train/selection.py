"""The loop's side of a selector: its pool of rows, what the model says of them, and the rows chosen last."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainwright.core.batch import Batch
from trainwright.core.distributed import all_reduce_sum, broadcast_object, gather_objects
from trainwright.core.errors import ConfigError
from trainwright.core.seeds import derive
from trainwright.data.mixture import Mixture, RowRef
from trainwright.data.selectors.base import PoolSelectorConfig
from trainwright.data.selectors.less import LessConfig, Sketch, adam_direction
from trainwright.objectives.token_losses import row_losses

if TYPE_CHECKING:
    from trainwright.train.interaction import Interaction

log = logging.getLogger("trainwright")
TARGET_ROWS = 64  # validation rows over all ranks that less compares with


class Selection:
    """A selector, its pool and the rows that it has chosen last."""

    def __init__(self, owner: Interaction, config: PoolSelectorConfig):
        self.owner, self.config, trainer = owner, config, owner.trainer
        mixture = owner.loader.mixture
        epoch = sum(s.num_rows(0) for s in mixture.streams.values())
        self.size = epoch if config.pool_rows is None else config.pool_rows
        wanted = config.update_step * trainer.rows
        if self.size > epoch:
            raise self._error(f"is more than the {epoch} rows of the data", "pool_rows", self.size)
        if wanted > self.size:
            raise self._error(
                f"takes {wanted} rows at a time ({trainer.rows} a step), more than the pool of {self.size} to choose "
                "from; use a smaller update_step or a larger pool_rows",
                "update_step", config.update_step,
            )  # fmt: skip
        if config.renew and (config.fixed_pool or config.pool_rows is None):
            why = "names rows of one pool, which stays" if config.fixed_pool else "needs pool_rows to know how many"
            raise self._error(f"{config.name} {why}; set renew=false or use another selector", "renew", True)
        if trainer.config.data.batcher.orders_steps:
            raise self._error(
                f"cannot choose rows of batcher={trainer.config.data.batcher.name}, whose rows belong to whole steps; "
                "use another batcher",
                "name", config.name,
            )  # fmt: skip
        if isinstance(config, LessConfig):
            self._check_less(config)
        self.selector = config.build(derive(trainer.config.run.seed, "selector"))
        self.updates = max(1, math.ceil((trainer.total_steps - config.warmup_step) / config.update_step))
        self.pool_at = mixture.position()  # where the pool begins in the order of rows
        self.pool: list[RowRef] | None = None
        self.ids: list[int] = []
        self.step = -1  # at which ids were chosen

    def _error(self, message: str, key: str, value: object) -> ConfigError:
        return ConfigError(message, key=f"data.selector.{key}", value=value)

    def _check_less(self, config: LessConfig) -> None:
        trainer = self.owner.trainer
        if trainer.mesh.degrees.dp_shard > 1 or trainer.config.parallel.sharding is not None:
            raise self._error(
                "less needs the whole gradient of single rows on one rank; use parallel.dp_replicate", "name", "less"
            )
        if trainer.data.validation_tokens == 0:
            raise self._error("compares with validation rows; set data.validation_fraction above 0", "name", "less")
        if config.gradient == "adam" and trainer.config.optimizer.name != "adamw":
            raise self._error(
                f"needs Adam's moments, and {trainer.config.optimizer.name} keeps none; use sgd, or optimizer=adamw",
                "gradient", "adam",
            )  # fmt: skip

    def before_step(self, step: int) -> None:
        since = step - self.config.warmup_step
        if since < 0 or since % self.config.update_step:
            return
        trainer = self.owner.trainer
        if self.pool is None or (self.config.renew and self.step >= 0):
            self._draw_pool()
        steps = self.config.update_step
        if not trainer.by_clock:
            steps = min(steps, trainer.total_steps - step)
        try:
            ids = self.selector.select(_Pool(self), step, steps * trainer.rows)
        except ValueError as error:
            raise ConfigError(str(error), key="data.selector", value=self.config.name) from None
        # The losses are the same on all ranks but for their last digits; the ids must be.
        self.ids, self.step = broadcast_object([int(i) for i in ids]), step
        self._apply()

    def _draw_pool(self) -> None:
        def draw(mixture: Mixture) -> None:
            if self.config.renew:
                self.pool_at = mixture.position()
                self.pool = mixture.draw(self.size)
            else:
                self.pool = self._rows_from(self.pool_at)

        self.owner.loader.change(draw)

    def _rows_from(self, position: Mapping[str, Any]) -> list[RowRef]:
        ours = self.owner.loader.mixture
        other = Mixture(ours.streams, {name: float(share) for name, share in ours.shares.items()})
        other.set_position(position)
        return other.draw(self.size)

    def _apply(self) -> None:
        pool = self.pool or []
        chosen = [pool[i] for i in self.ids]
        self.owner.loader.change(lambda mixture: mixture.choose(chosen))

    def state_dict(self) -> dict[str, Any]:
        return {
            "name": self.config.name, "selector": self.selector.state_dict(), "pool_at": self.pool_at,
            "size": self.size, "ids": self.ids, "step": self.step,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["name"] != self.config.name or state["size"] != self.size:
            log.warning("data.selector is another one than so far, or its pool is; it begins anew")
            return
        self.selector.load_state_dict(state["selector"])
        self.pool_at, self.ids, self.step = state["pool_at"], list(state["ids"]), int(state["step"])
        if self.ids:
            self.pool = self._rows_from(self.pool_at)
            self._apply()


class _Pool:
    """The pool as the model of the moment sees it; every rank looks at its share of the rows."""

    def __init__(self, selection: Selection):
        self._selection, self._owner = selection, selection.owner
        self.size, self.updates = selection.size, selection.updates

    def _share(self, chunk: int) -> Iterator[tuple[list[int], Batch]]:
        """This rank's rows ``rank::ranks``, ``chunk`` at a time; as many batches on every rank."""
        owner, pool = self._owner, self._selection.pool or []
        mine = list(range(owner.rank, self.size, owner.ranks))
        most = -(-self.size // owner.ranks)
        for start in range(0, most, chunk):
            ids = mine[start : start + chunk]
            yield ids, owner.loader.batch_of([pool[i] for i in ids], chunk)

    def losses(self) -> np.ndarray:
        owner = self._owner
        found = torch.zeros(self.size, dtype=torch.float64)
        for ids, batch in self._share(owner.trainer.executor.micro_batch_size):
            losses = owner.losses(owner.trainer.parallel.module, batch)
            found[ids] = row_losses(losses, batch.weights)[: len(ids)].cpu()
        return all_reduce_sum(found.to(owner.device)).cpu().numpy()

    def gradients(self, dim: int, kind: Literal["adam", "sgd"]) -> tuple[np.ndarray, np.ndarray]:
        owner, trainer = self._owner, self._owner.trainer
        params = [p for p in trainer.model.parameters() if p.requires_grad]
        sketch = Sketch(sum(p.numel() for p in params), dim, derive(trainer.config.run.seed, "less"), owner.device)
        moments = self._moments(params) if kind == "adam" else None

        def project(batch: Batch, like_adam: bool) -> np.ndarray:
            flat = self._gradient(params, batch.to(owner.device))
            if like_adam and moments is not None:
                flat = adam_direction(flat, *moments)
            found: np.ndarray = sketch(flat).cpu().numpy()
            return found

        was_training = trainer.model.training
        trainer.model.eval()
        try:
            pool = {ids[0]: project(batch, True) for ids, batch in self._share(1) if ids}
            tokens = TARGET_ROWS * trainer.config.train.seq_len
            target = [project(b, False) for b in trainer.data.validation_batches(1, tokens) if float(b.weight()) > 0]
        finally:
            trainer.model.train(was_training)
        pool = {k: v for part in gather_objects(pool) for k, v in part.items()}
        target = [v for part in gather_objects(target) for v in part]
        return np.stack([pool[i] for i in range(self.size)]), np.stack(target)

    def _gradient(self, params: list[nn.Parameter], batch: Batch) -> Tensor:
        trainer = self._owner.trainer
        with trainer.precision.autocast():
            loss = trainer.objective(trainer.model, batch)
        found = torch.autograd.grad(loss.sum / loss.weight.clamp(min=1), params, allow_unused=True)
        pairs = zip(params, found, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).flatten().float() for p, g in pairs])

    def _moments(self, params: list[nn.Parameter]) -> tuple[Tensor, Tensor, tuple[float, float], float]:
        optimizer = self._owner.trainer.optimizer

        def moment(key: str) -> Tensor:  # zeros before the first step
            states = [optimizer.state.get(p, {}).get(key) for p in params]
            pairs = zip(params, states, strict=True)
            return torch.cat([(torch.zeros_like(p) if s is None else s).flatten().float() for p, s in pairs])

        group = optimizer.param_groups[0]
        return moment("exp_avg"), moment("exp_avg_sq"), tuple(group["betas"]), float(group["eps"])
