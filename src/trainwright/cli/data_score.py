"""``trainwright data score``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainwright.core.errors import ConfigError


def score(arguments: list[str], teacher: str, checkpoint: str, out: Path, *, top_k: int, json: bool) -> None:
    """Write the scores of a recipe's training documents to ``out``."""
    from trainwright.cli.app import split_arguments
    from trainwright.cli.output import print_json
    from trainwright.config import RunConfig
    from trainwright.core.registry import build
    from trainwright.core.seeds import derive
    from trainwright.data.module import build_data, build_tokenizer
    from trainwright.data.scoring import score_documents
    from trainwright.data.stages import save_scores
    from trainwright.objectives.teacher import check_same_vocabulary
    from trainwright.train.runs import open_model

    if out.exists():
        raise ConfigError("exists; name another file, or remove it", key="--out", value=str(out))
    if not out.parent.is_dir():
        raise ConfigError("lies in a folder that does not exist; make it first", key="--out", value=str(out))
    recipe, overrides = split_arguments(arguments)
    config = RunConfig.load(recipe, overrides)
    # The scores are of all documents; a recipe may name the file that is to be made now.
    settings = config.data.model_copy(update={"first_stage": None})
    model, their_tokenizer = open_model(teacher, checkpoint)
    path = config.model.tokenizer_path()
    spec = config.tokenizer or build("tokenizer", {"name": "hf", "path": path} if path else "bpe")
    tokenizer = build_tokenizer(config.data, spec)
    try:
        check_same_vocabulary(tokenizer, their_tokenizer)
    except ConfigError as error:
        raise ConfigError(error.message, key="--teacher", value=teacher) from None
    seq_len = config.train.seq_len
    if model.max_seq_len < seq_len:
        raise ConfigError(
            f"sees {model.max_seq_len} tokens, rows have {seq_len}; score with train.seq_len={model.max_seq_len}",
            key="--teacher",
            value=teacher,
        )
    data = build_data(settings, tokenizer, seq_len=seq_len, seed=derive(config.run.seed, "data"))
    scores = {}
    rows: list[dict[str, Any]] = []
    for name, dataset in data.train.items():
        scores[name] = score_documents(model, dataset, seq_len=seq_len, pad_id=tokenizer.pad_id, k=top_k)
        quantiles = np.quantile(scores[name], [0.1, 0.5, 0.9]).tolist() if dataset.num_docs else [0.0] * 3
        zero = float((scores[name] == 0).mean()) if dataset.num_docs else 0.0
        rows.append({"source": name, "documents": dataset.num_docs, "zero": zero, "quantiles": quantiles})
    save_scores(out, scores, data.train)
    if json:
        print_json({"scores": str(out), "sources": rows})
        return
    for row in rows:
        low, middle, high = row["quantiles"]
        print(
            f"{row['source']}: {row['documents']} documents, {row['zero']:.1%} score 0; "
            f"10% below {low:.3f}, half below {middle:.3f}, 90% below {high:.3f} nats"
        )
    print(f"{out} written. Use it: data.first_stage.scores={out} data.first_stage.fraction=0.25")
