"""Our models in EleutherAI's lm-evaluation-harness (extra ``eval``), so that a user's own task files run on them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigError
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.base import LanguageModel


def make_harness_model(model: LanguageModel, tokenizer: Tokenizer, batch_size: int = 8) -> Any:
    """A harness ``LM`` over ``model``. Raises ConfigError when the ``eval`` extra is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("harness tasks need lm-eval; install it with `pip install 'trainwright[eval]'`", key="tasks")
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from trainwright.models.generate import generate
    from trainwright.models.scoring import continuation_logprobs

    class HarnessModel(TemplateLM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._device = next(model.parameters()).device

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id

        @property
        def max_length(self) -> int:
            return model.max_seq_len

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return list(tokenizer.encode(string))

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
        ) -> list[tuple[float, bool]]:
            pairs = [(request[1], request[2]) for request in requests]
            return [
                (score.logprob, score.greedy)
                for score in continuation_logprobs(model, pairs, tokenizer.pad_id, batch_size, self.max_length)
            ]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                (text,) = request.args
                windows = map(
                    make_disjoint_window,
                    get_rolling_token_windows(
                        token_list=self.tok_encode(text),
                        prefix_token=self.prefix_token_id,
                        max_seq_len=self.max_length,
                        context_len=1,
                    ),
                )
                scores = self._loglikelihood_tokens([((("", ""), *window)) for window in windows])
                totals.append(sum(score for score, _ in scores))
            return totals

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            out = []
            for request in requests:
                context, options = request.args
                until = options.get("until") or []
                out.append(
                    generate(
                        model,
                        tokenizer,
                        [context],
                        max_new_tokens=int(options.get("max_gen_toks", 256)),
                        temperature=float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0,
                        stop=[until] if isinstance(until, str) else list(until),
                    )[0]
                )
            return out

    return HarnessModel()


def evaluate_tasks(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    include_path: Path | str | None = None,
    batch_size: int = 8,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Run harness ``tasks`` (names, with ``include_path`` a folder of the user's task files); metrics by task."""
    harness = make_harness_model(model, tokenizer, batch_size)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [t for t in tasks if t not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"unknown task {unknown[0]!r}; give the folder of your task files, or see `lm_eval --tasks list`",
            key="tasks",
        )
    results = simple_evaluate(harness, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0)
    return dict(results["results"])
