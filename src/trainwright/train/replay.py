"""The batches of a finished run once more, in the order in which it was trained on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError, DataError
from trainwright.data.loader import Loader
from trainwright.data.mixers.base import UpdatingMixerConfig
from trainwright.data.module import DataModule
from trainwright.train.interaction import mix_context


class Replay:
    """Batches and learning rates of a run, from its recipe, its data as they are now, and a checkpoint's ``meta``.

    Raises ConfigError or DataError where the batches cannot be had again: rows chosen by the losses of the run, data or
    order changed since, steps passed over after a rollback, or more than one pass over a source.
    """

    def __init__(self, config: Any, data: DataModule, meta: Mapping[str, Any], num_params: int = 1):
        self.config, self.data = config, data
        self.steps = int(meta["progress"]["step"])
        rows = config.train.global_batch_rows
        if isinstance(config.data.mixer, UpdatingMixerConfig) or config.data.selector.selects:
            raise ConfigError(
                "the rows of this run followed from its losses and were not recorded, so they cannot be had again; use "
                "a run with a static or scheduled mixture",
                key="data",
            )
        if config.data.weighter.weighs:
            raise ConfigError("rows counted by their losses in this run, which was not recorded", key="data.weighter")
        total = self._total_steps(meta)
        self._plan = None
        if config.data.mixer.changes:
            context = mix_context(config, data, rows, total, self._max_rows(), num_params)
            self._plan = config.data.mixer.build(context).plan
        rates = mix_context(config, data, rows, total, self._max_rows(), num_params).lr
        self.lr = np.zeros(0) if rates is None else rates[: self.steps]
        loader = self._loader()
        loader.load_state_dict(meta["loader"], on_change="refuse")
        expected = self.steps * rows if self._max_rows() is None else min(self.steps * rows, self._max_rows() or 0)
        if loader.rows != expected:
            raise DataError(
                f"it took {loader.rows} rows in {self.steps} steps of {rows}: it passed over data after a rollback, "
                "or its batch size changed, so which batch was whose is not known"
            )
        for name, place in loader.mixture.position()["sources"].items():
            if place["epoch"] > 1 or (place["epoch"] == 1 and place["row"]):
                raise DataError(
                    f"the run saw {name} more than once; a re-evaluation curve is of data seen once. Train for less "
                    "than one epoch"
                )

    def _total_steps(self, meta: Mapping[str, Any]) -> int:
        train = self.config.train
        if train.seconds is not None:
            raise ConfigError("the rates of a run by the clock were not recorded", key="train.seconds")
        if train.steps is not None:
            return int(train.steps)
        if train.tokens is not None:
            return -(-train.tokens // train.global_batch_tokens)
        return self.steps

    def _max_rows(self) -> int | None:
        epochs = self.config.train.epochs
        return None if epochs is None else max(1, math.ceil(epochs * self.data.rows_per_epoch))

    def _loader(self) -> Loader:
        loader = self.data.train_loader(self.config.train.global_batch_rows, self._max_rows())
        plan = self._plan
        if plan is not None:
            loader.change(lambda mixture: mixture.follow(plan))
        return loader

    def batches(self) -> Iterator[Batch]:
        """One whole batch a step, over all ranks' rows, on the CPU."""
        with self._loader() as loader:
            for _ in range(self.steps):
                yield loader.next_batch()
