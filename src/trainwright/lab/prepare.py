"""What several trials share and need before the first: tokenizers and tokenized data in the cache, model sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from trainwright.config.run_config import RunConfig
from trainwright.core.errors import ConfigError, TrainwrightError
from trainwright.core.registry import build as build_method


def prepare(configs: Mapping[str, RunConfig], flops: bool) -> dict[str, float]:
    """Fill the cache for every arm; with ``flops`` also their FLOPs per token, by the arm's name.

    An arm whose data cannot be made is left to its trials, which fail with the reason, as long as another arm can.
    Raises what is wrong when no arm can be prepared, and ConfigError without validation data.
    """
    from trainwright.data.module import build_data, build_tokenizer

    vocabularies: dict[str, int | TrainwrightError] = {}
    out: dict[str, float] = {}
    for name, config in configs.items():
        spec = config.tokenizer
        if spec is None:
            path = config.model.tokenizer_path()
            spec = build_method("tokenizer", {"name": "hf", "path": path} if path else {"name": "bpe"})
        key = json.dumps([config.data.model_dump(mode="json"), spec.model_dump(mode="json")], sort_keys=True)
        if key not in vocabularies:
            try:
                tokenizer = build_tokenizer(config.data, spec)
                data = build_data(config.data, tokenizer, seq_len=config.train.seq_len, seed=config.run.seed)
                if data.validation_tokens == 0:
                    raise ConfigError(
                        "there are no validation documents to compare on; raise it",
                        key="data.validation_fraction",
                        value=config.data.validation_fraction,
                    )
                vocabularies[key] = tokenizer.vocab_size
            except TrainwrightError as error:
                vocabularies[key] = error
        vocabulary = vocabularies[key]
        if flops and isinstance(vocabulary, int):
            try:
                out[name] = flops_per_token(config, vocabulary)
            except ConfigError as error:
                raise ConfigError(f"arm {name!r}: {error}") from None
    errors = [v for v in vocabularies.values() if not isinstance(v, int)]
    if errors and len(errors) == len(vocabularies):
        raise errors[0]
    return out


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Of forward and backward, as the model itself counts them."""
    model: Any
    try:
        with torch.device("meta"):
            model = config.model.build(vocab_size, config.train.seq_len)
    except (NotImplementedError, RuntimeError):  # a model that cannot be built without memory
        model = config.model.build(vocab_size, config.train.seq_len)
    for transform in config.transforms:
        model = transform.apply(model)  # type: ignore[attr-defined]
    return float(model.flops_per_token(config.train.seq_len))
