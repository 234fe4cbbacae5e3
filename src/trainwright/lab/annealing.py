"""One short training from a checkpoint of another run: its weights and optimizer state, other data, and a learning rate
that falls from where it stands to zero.

The rows come from two slots in exact shares. Each slot has an order of its own, a function of the seed, so that the
rows of one slot are the same whatever fills the other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError
from trainwright.core.seeds import derive
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.packed import PackedConfig
from trainwright.data.dataset import TokenDataset
from trainwright.data.loader import Loader
from trainwright.data.mixture import Mixture
from trainwright.data.module import DataModule
from trainwright.data.packing import Pool
from trainwright.data.rows import RowStream
from trainwright.train.saving import Progress
from trainwright.train.trainer import Trainer

log = logging.getLogger("trainwright")


@dataclass
class Slot:
    """What fills a share of the rows: datasets, each with its part of the share (or all as one pool)."""

    parts: dict[str, TokenDataset]
    weights: dict[str, float]

    @classmethod
    def of(cls, data: DataModule) -> Slot:
        """As the module itself mixes: by its weights, else as one pool."""
        sets = list(data.train.values())
        if data.weights is None:
            pool = Pool({str(i): d for i, d in enumerate(sorted(sets, key=lambda d: d.fingerprint))})
            return cls({"0": pool}, {"0": 1.0})
        total = sum(data.weights.values())
        names = {name: str(i) for i, name in enumerate(data.train)}
        return cls({names[n]: d for n, d in data.train.items()}, {names[n]: w / total for n, w in data.weights.items()})

    @property
    def tokens(self) -> int:
        return sum(d.num_tokens for d in self.parts.values())

    @property
    def fingerprint(self) -> str:
        return "+".join(f"{d.fingerprint}:{self.weights[n]:.12g}" for n, d in sorted(self.parts.items()))


@dataclass
class Mix:
    """The slots of an arm, as streams and weights."""

    streams: dict[str, RowStream]
    weights: dict[str, float]

    @classmethod
    def of(cls, slots: Mapping[str, tuple[Slot, float]], config: RunConfig, seed: int) -> Mix:
        streams, weights = {}, {}
        for name, (slot, share) in slots.items():
            for part, dataset in slot.parts.items():
                if share * slot.weights[part] > 0:
                    streams[f"{name}.{part}"] = RowStream(
                        dataset, batcher_for(config), config.train.seq_len, derive(seed, name), config.data.shuffle
                    )
                    weights[f"{name}.{part}"] = share * slot.weights[part]
        return cls(streams, weights)

    def realized(self, rows: int) -> dict[str, dict[str, float]]:
        """Tokens and passes of each slot in the first ``rows`` rows, counted in the plan of the rows."""
        mixture = Mixture(self.streams, self.weights)
        out: dict[str, dict[str, float]] = {}
        by_stream: dict[tuple[str, int], list[int]] = {}
        for ref in mixture.take(rows):
            by_stream.setdefault((ref.stream, ref.epoch), []).append(ref.row)
        for (name, epoch), numbers in by_stream.items():
            row = out.setdefault(name.partition(".")[0], {"rows": 0, "tokens": 0})
            row["rows"] += len(numbers)
            row["tokens"] += sum(int((s.stops - s.starts).sum()) for s in self.streams[name].segments(epoch, numbers))
        total = sum(r["tokens"] for r in out.values())
        for row in out.values():
            row["share"] = row["tokens"] / total
        return out


def batcher_for(config: RunConfig) -> BatcherConfig:
    """The run's, or plain packing where that gives whole steps, which cannot be shared between slots."""
    batcher = config.data.batcher
    return PackedConfig() if getattr(batcher, "orders_steps", False) else batcher


def anneal_config(config: RunConfig, folder: Path, steps: int, seed: int) -> RunConfig:
    """The run's recipe for a short quiet run in ``folder``; what is not finite stops it, nothing else interferes."""
    data = config.to_dict()
    length = ("steps", "tokens", "epochs", "seconds")
    data["run"] |= {"dir": str(folder.parent), "name": folder.name, "seed": seed, "overwrite": True}
    data["train"] = {**{k: v for k, v in data["train"].items() if k not in length}, "steps": steps}
    data["monitors"] = [{"name": "non_finite"}]
    data["checkpoint"] = {"keep": 1, "keep_best": False}
    data["evaluate"] = {"every": None, "tokens": data["evaluate"]["tokens"], "at_start": True}
    data["log"] = {"every": 1, "loggers": [], "progress": "none", "report": False}
    return RunConfig.from_dict(data)


class Anneal:
    """A Trainer at a checkpoint of another run, with its rows and its falling rate in place. ``fit`` trains it."""

    def __init__(self, config: RunConfig, checkpoint: Path, start_factor: float):
        self.trainer = trainer = Trainer(config)
        trainer.restore(checkpoint, loader=False)
        trainer.progress = Progress()
        total = trainer.total_steps
        # The last step stands at 1/total of the start, so that it still trains.
        trainer.schedule = lambda step: start_factor * (1 - step / total)
        self.start = {"weights": _digest(dict(trainer.model.named_parameters())), "optimizer": self._optimizer_digest()}
        self.rates: list[float] = []

    def _optimizer_digest(self) -> str:
        from trainwright.optim.state import named_state

        state = named_state(self.trainer.optimizer, self.trainer.params)["tensors"]
        return _digest({f"{n}/{k}": t for n, entries in state.items() for k, t in entries.items()})

    def use(self, mix: Mix) -> None:
        trainer = self.trainer
        trainer.loader.close()
        trainer.loader = Loader(
            mix.streams,
            mix.weights if len(mix.streams) > 1 else None,
            global_batch_rows=trainer.rows,
            rank=trainer.mesh.dp_rank,
            world_size=trainer.mesh.dp_size,
            pad_id=trainer.tokenizer.pad_id,
            prefetch=trainer.config.data.prefetch,
        )

    def fit(self, groups: Mapping[str, TokenDataset]) -> dict[str, float]:
        """Train; the loss on the run's validation split, and on each of ``groups``."""
        summary = self.trainer.fit(lambda row: self.rates.append(row["lr"]))
        losses = {"validation": float(summary["val_loss"])}
        losses |= {name: self._loss(dataset) for name, dataset in groups.items()}
        return losses

    def _loss(self, dataset: TokenDataset) -> float:
        from trainwright.data.validation import validation_batches
        from trainwright.optim.base import swapped_for_evaluation
        from trainwright.train.evaluate import evaluate

        trainer = self.trainer
        config = trainer.config
        batches = validation_batches(
            dataset,
            seq_len=config.train.seq_len,
            pad_id=trainer.tokenizer.pad_id,
            batch_rows=max(1, 8192 // config.train.seq_len),
            rank=trainer.mesh.dp_rank,
            world_size=trainer.mesh.dp_size,
            max_tokens=config.evaluate.tokens,
        )
        with swapped_for_evaluation(trainer.average, trainer.optimizer) or nullcontext():
            found = evaluate(trainer.parallel, trainer.objective, batches, trainer.device, trainer.precision)
        return float(found["val_loss"])


def _digest(tensors: Mapping[str, Any]) -> str:
    import xxhash

    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()


def check_tokenizer(trainer_tokenizer: Any, run_dir: Path) -> None:
    """The tokenizer that the recipe gives today must be the one that the run was trained with. ConfigError."""
    from trainwright.data.tokenizers import load_tokenizer

    saved = load_tokenizer(run_dir / "tokenizer")
    probe = "The quick brown fox, 3.14 == π; 你好"
    if saved.vocab_size != trainer_tokenizer.vocab_size or saved.encode(probe) != trainer_tokenizer.encode(probe):
        raise ConfigError(
            f"{run_dir} was trained with another tokenizer than its recipe gives today (its data changed?); set "
            f"tokenizer to the folder {run_dir / 'tokenizer'} in the run's config.yaml"
        )
