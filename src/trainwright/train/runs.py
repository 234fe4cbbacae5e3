"""Opening a finished or running run: its model and tokenizer, evaluation, samples, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from trainwright.config.run_config import RunConfig
from trainwright.core.distributed import chosen_device
from trainwright.core.errors import CheckpointError, ConfigError
from trainwright.core.params import named_params
from trainwright.core.seeds import derive, seed_everything
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.base import LanguageModel
from trainwright.optim.base import swapped_for_evaluation
from trainwright.optim.state import allocate_named_state, load_named_state
from trainwright.train import run_dir as run_folder


def open_config(run_dir: Path, overrides: list[str] | None = None) -> RunConfig:
    """The resolved recipe of a run, with its folder as it lies now (a run may have been moved)."""
    run_dir = Path(run_dir)
    data = run_folder.saved_config(run_dir)
    data["run"] = {**data["run"], "dir": str(run_dir.resolve().parent), "name": run_dir.resolve().name}
    return RunConfig.load(data, overrides or [])


def load_run(
    run_dir: Path | str,
    checkpoint: str | int | Path = "latest",
    device: str | torch.device | None = None,
    live: bool = False,
) -> tuple[LanguageModel, Tokenizer, RunConfig]:
    """Model (in eval mode), tokenizer and recipe of a run.

    checkpoint  "latest" (newest whole one), "best" (lowest validation loss), a step, or a checkpoint's folder
    live        the weights as trained, also where the run was validated with averaged ones
    Raises ConfigError when the folder is no run, CheckpointError when it has no such checkpoint.
    """
    from trainwright.data.tokenizers import load_tokenizer
    from trainwright.train.checkpoint import Checkpointer

    config = open_config(Path(run_dir))
    tokenizer = load_tokenizer(config.run_dir / "tokenizer")
    target = torch.device(device) if device is not None else chosen_device(config.run.device)
    seed_everything(derive(config.run.seed, "weights"))
    model = config.model.build(tokenizer.vocab_size, config.train.seq_len)
    for transform in config.transforms:
        model = transform.apply(model)  # type: ignore[attr-defined]
    checkpointer = Checkpointer(config.checkpoint_dir, best_metric="val_loss")
    path = find_checkpoint(checkpointer, checkpoint)
    checkpointer.load(path, weights=model_weights(model))
    if not live:
        _load_evaluated_weights(model, config, checkpointer, path)
    return model.to(target).eval(), tokenizer, config


@torch.no_grad()
def _load_evaluated_weights(model: LanguageModel, config: RunConfig, checkpointer: Any, path: Path) -> None:
    """Give ``model``, which holds the live weights, those that the run's validation used."""
    from trainwright.train.checkpoint import inspect

    params = named_params(model)
    average = config.average.build(params) if config.average else None
    optimizer = config.optimizer.for_run(sys.maxsize).build(params)  # it makes no step, and fits any run
    meta = inspect(path).meta
    if average is not None:
        tree = {"average": average.state_dict()["tensors"]}
        checkpointer.load(path, tensors=tree, strict=False)
        average.load_state_dict({"tensors": tree["average"], "scalars": meta["average"]})
    elif swapped_for_evaluation(None, optimizer) is not None:
        tree = {"optimizer": allocate_named_state(params, meta["optimizer"])}
        checkpointer.load(path, tensors=tree, strict=False)
        state = {"tensors": tree["optimizer"], "scalars": meta["optimizer"]}
        load_named_state(optimizer, params, state, copy=False)
    swapped = swapped_for_evaluation(average, optimizer)
    if swapped is None:
        return
    with swapped:
        evaluated = [n.param.clone() for n in params]
    for n, weight in zip(params, evaluated, strict=True):
        n.param.copy_(weight)


def find_checkpoint(checkpointer: Any, which: str | int | Path = "latest") -> Path:
    """The folder of "latest", "best", a step's number, or a checkpoint given by its path."""
    directory = checkpointer.directory
    if which == "latest":
        path = checkpointer.latest()
    elif which == "best":
        path = checkpointer.best()
    elif str(which).isdigit():
        path = directory / f"step-{int(str(which)):08d}"
    else:
        path = Path(str(which))
    if path is None and which == "best" and any(directory.glob("step-*")):
        raise CheckpointError(
            f"no checkpoint in {directory} has a validation loss, so none is the best (data.validation_fraction=0, or "
            "checkpoint.keep_best=false); use latest, or a step"
        )
    if path is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint yet")
    if not path.is_dir():
        there = ", ".join(sorted(p.name for p in directory.glob("step-*"))) or "none"
        raise CheckpointError(f"no checkpoint {which!r}; {directory} holds: {there}")
    return path


def model_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from trainwright.parallel.apply import model_state

    return model_state(model)


def open_model(
    path: Path | str, checkpoint: str | int | Path = "latest", device: str | None = None, live: bool = False
) -> tuple[LanguageModel, Tokenizer]:
    """Model and tokenizer from a run's folder (see :func:`load_run`) or from a Hugging Face folder."""
    path = Path(path)
    if (path / run_folder.CONFIG).is_file():
        model, tokenizer, _ = load_run(path, checkpoint, device, live)
        return model, tokenizer
    if (path / "config.json").is_file():
        from trainwright.data.tokenizers import load_tokenizer
        from trainwright.models import from_pretrained

        # The CPU computes in float32: few have fast half-precision products.
        dtype = "float32" if torch.device(device or "cpu").type == "cpu" else None
        return from_pretrained(path, dtype=dtype).to(device or "cpu").eval(), load_tokenizer(path)
    raise ConfigError(f"{path} is neither a run (config.yaml) nor a Hugging Face model folder (config.json)")


def evaluate_run(
    run_dir: Path | str,
    checkpoint: str | int | Path = "latest",
    overrides: list[str] | None = None,
    tokens: int | None = None,
    live: bool = False,
) -> dict[str, Any]:
    """Validation figures of a run's checkpoint on its own data, or on the data of ``overrides``; see load_run."""
    from trainwright.data.module import build_data
    from trainwright.train.evaluate import evaluate

    model, tokenizer, config = load_run(run_dir, checkpoint, live=live)
    if overrides:
        config = open_config(Path(run_dir), overrides)
    device = next(model.parameters()).device
    data = build_data(
        config.data, tokenizer, seq_len=config.train.seq_len, seed=derive(config.run.seed, "data"), rank=0, world_size=1
    )
    if not data.validation_tokens:
        raise ConfigError(
            "the run holds nothing out; name documents to validate on by overrides, e.g. data.validation_fraction=0.02 "
            "(of what it was trained on) or data.sources=[{name: text, path: FOLDER}] data.validation_fraction=0.4",
            key="data.validation_fraction",
            value=config.data.validation_fraction,
        )
    rows = max(1, 8192 // config.train.seq_len)
    batches = data.validation_batches(
        batch_rows=rows, max_tokens=tokens if tokens is not None else config.evaluate.tokens
    )
    return evaluate(model, config.objective.build(), batches, device, config.precision.build(device))


def sample_text(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, *, seed: int = 0, max_new_tokens: int = 200
) -> str:
    from trainwright.models.generate import generate

    texts = generate(model, tokenizer, [prompt], max_new_tokens=max_new_tokens, temperature=0.7, top_p=0.95, seed=seed)
    return prompt + texts[0] + "\n"


def export_run(
    run_dir: Path | str,
    out: Path | str,
    checkpoint: str | int | Path = "latest",
    live: bool = False,
    adapter: bool = False,
) -> Path:
    """Write a run's model (see :func:`load_run`) as a Hugging Face folder.

    Adapters are merged, and ``merge_proof.json`` says how well the logits agree; with ``adapter`` they are written
    alone, in PEFT's format. Raises ConfigError when ``out`` exists, ModelError when merging changes the logits.
    """
    from trainwright.models import save_pretrained
    from trainwright.models.adapter_export import export_merged, has_adapters, save_adapter
    from trainwright.models.transforms.lora import LoraConfig

    model, tokenizer, config = load_run(run_dir, checkpoint, device="cpu", live=live)
    lora = next((t for t in config.transforms if isinstance(t, LoraConfig)), None)
    if adapter and lora is None:
        raise ConfigError("the run trained no adapter; leave it out", key="--adapter")
    if adapter and lora is not None:
        return save_adapter(model, Path(out), lora, config.model.tokenizer_path(), tokenizer)
    if has_adapters(model):
        export_merged(model, Path(out), tokenizer)
    else:
        save_pretrained(model, Path(out), tokenizer=tokenizer)
    return Path(out)
