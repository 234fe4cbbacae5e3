"""Generation with a key-value cache: greedy or sampled, batched over prompts of any lengths, whole or streamed.

Rows of different lengths are padded on the left; padding is a document of its own, which no real token sees, so a row's
result does not depend on its neighbours (with greedy decoding, to the last token).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import ConfigError
from trainwright.data.tokenizers.base import Tokenizer
from trainwright.models.base import Hidden
from trainwright.models.cache import PAD_DOCUMENT
from trainwright.models.decoder import head_logits
from trainwright.models.exit_decoding import ExitDecoding, check_exit_decoding, exit_lane
from trainwright.models.guidance import Context, check_guidance, guided_logits


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """``logits [B, V]`` with all but the k largest of each row at -inf."""
    if k >= logits.shape[-1]:
        return logits
    values, ids = logits.topk(k, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, ids, values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """``logits [B, V]`` with -inf outside the smallest set of most likely ids that holds at least ``p`` of the
    probability (nucleus sampling, arXiv:1904.09751). The likeliest id always stays."""
    if p >= 1.0:
        return logits
    values, ids = logits.sort(dim=-1, descending=True)
    probs = values.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of all likelier ids
    values = values.masked_fill(
        (before >= p) & (torch.arange(values.shape[-1], device=values.device) > 0), float("-inf")
    )
    return torch.empty_like(logits).scatter(-1, ids, values)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw an id per row of ``logits [B, V]`` -> int64 ``[B]``; temperature 0 takes the likeliest."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits and multiply the negative ones of ids already in a row (``seen [B, V]`` bool) by
    ``penalty`` (CTRL, arXiv:1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _last_logits(hidden: Hidden) -> Tensor:
    """``[B, V]`` of the last position alone: the head is not applied to the prompt."""
    return head_logits(Hidden(hidden.states[:, -1:], hidden.head)).squeeze(1)


def _check(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    max_new_tokens: int,
    repetition_penalty: float,
    stop: Sequence[str],
) -> None:
    for ok, key, value, rule in (
        (temperature >= 0.0, "temperature", temperature, "0 (greedy) or more"),
        (top_k is None or top_k >= 1, "top_k", top_k, "1 or more"),
        (top_p is None or 0.0 < top_p <= 1.0, "top_p", top_p, "above 0 and at most 1"),
        (max_new_tokens >= 0, "max_new_tokens", max_new_tokens, "0 or more"),
        (repetition_penalty > 0.0, "repetition_penalty", repetition_penalty, "above 0"),
        (not isinstance(stop, str) and all(stop), "stop", stop, "a list of strings that are not empty"),
    ):
        if not ok:
            raise ConfigError(f"should be {rule}", key=key, value=value)


class _Lane:
    """Prompts of any lengths in one batch, and the logits behind them as they grow."""

    def __init__(self, model: nn.Module, prompts: Sequence[Sequence[int]], steps: int, use_cache: bool, pad_id: int):
        inner: Any = getattr(model, "module", model)  # DistributedDataParallel hides the model's attributes
        device = next(inner.parameters()).device
        longest = max(len(p) for p in prompts)
        self.model, self.length = model, longest
        self.ragged = any(len(p) != longest for p in prompts)
        rows = [[pad_id] * (longest - len(p)) + list(p) for p in prompts]
        self.new = torch.tensor(rows, dtype=torch.int64, device=device)  # [B, T], what the model has not seen yet
        pads = torch.tensor([longest - len(p) for p in prompts], device=device)[:, None]
        slots = torch.arange(longest + max(steps, 0), device=device)
        self.positions = (slots - pads).clamp(min=0)  # [B, T + steps]
        self.doc_ids = torch.where(slots < pads, PAD_DOCUMENT, 0).to(torch.int32)
        self.cache = inner.new_cache(longest + steps) if use_cache and steps > 0 else None
        self.first = True

    def logits(self) -> Tensor:
        """``[B, V]`` of the next token."""
        start = self.length - self.new.shape[1]
        out: Tensor = self.model(
            self.new,
            positions=self.positions[:, start : self.length] if self.ragged else None,
            doc_ids=self.doc_ids[:, start : self.length]
            if self.ragged and (self.cache is None or self.first)
            else None,
            cache=self.cache,
            head_fn=_last_logits,
        )
        self.first = False
        return out

    def add(self, ids: Tensor) -> None:
        """The next token ``[B]`` of each row."""
        self.new = ids[:, None] if self.cache is not None else torch.cat((self.new, ids[:, None]), dim=1)
        self.length += 1

    def close(self) -> None:
        pass


def _steps(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    use_cache: bool,
    repetition_penalty: float,
    done: Tensor,
    pad_id: int,
    free: Sequence[Sequence[int]] | None = None,
    guidance: float = 1.0,
    early_exit: ExitDecoding | None = None,
) -> Generator[Tensor, None, None]:
    """New ids ``[B]`` step after step; rows that are ``done`` (set by the caller between steps) get ``pad_id``."""
    inner: Any = getattr(model, "module", model)
    device = next(inner.parameters()).device
    given = [prompts] if free is None or guidance == 1 else [free] if guidance == 0 else [free, prompts]
    longest = max(len(p) for one in given for p in one)
    steps = min(max_new_tokens, inner.max_seq_len - longest)
    seen = None
    if repetition_penalty != 1.0:
        seen = torch.zeros(len(prompts), inner.vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            seen[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True
    if steps <= 0:
        return
    lanes: list[Any]
    if early_exit is None:
        lanes = [_Lane(model, one, steps, use_cache, pad_id) for one in given]
    else:
        lanes = [exit_lane(inner, list(given[0][0]), steps, early_exit)]
    try:
        for _ in range(steps):
            found = [lane.logits() for lane in lanes]
            logits = found[0] if len(found) == 1 else guided_logits(found[0], found[1], guidance)
            if seen is not None:
                logits = penalise(logits[:, : inner.vocab_size], seen, repetition_penalty)
            ids = choose(logits)
            ids = torch.where(done, pad_id, ids)
            if seen is not None:
                seen.scatter_(1, ids[:, None], True)
            yield ids
            if bool(done.all()):
                return
            for lane in lanes:
                lane.add(ids)
    finally:
        for lane in lanes:
            lane.close()


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stopped: Callable[[int, list[int]], bool] | None = None,
    free_prompts: Sequence[Sequence[int]] | None = None,
    guidance: float = 1.0,
    early_exit: ExitDecoding | None = None,
) -> list[list[int]]:
    """New ids after each prompt of ids: up to ``max_new_tokens``, the model's ``max_seq_len``, or ``eos_id`` (not
    returned). ``stopped(row, ids)`` may end a row earlier.

    With ``free_prompts``, the same without their context, tokens are drawn from ``guidance`` times the difference
    between the two (:mod:`trainwright.models.guidance`); 0 is free of context, 1 is ``prompts`` alone.
    With ``early_exit``, tokens leave the layers of a model that has exits (:mod:`trainwright.models.exit_decoding`).
    ``temperature=0`` is greedy. With ``seed`` the draw is repeatable; else ``generator`` or torch's global one is used.
    ``model`` may be wrapped (DDP, FSDP: every rank calls with the same arguments). Raises ConfigError for an empty
    prompt, one that fills ``max_seq_len``, or a setting out of range.
    """
    _check(temperature, top_k, top_p, max_new_tokens, repetition_penalty, ())
    out: list[list[int]] = [[] for _ in prompts]
    for ids in stream_ids(
        model, prompts, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        repetition_penalty=repetition_penalty, eos_id=eos_id, seed=seed, generator=generator, use_cache=use_cache,
        stopped=stopped, free_prompts=free_prompts, guidance=guidance, early_exit=early_exit,
    ):  # fmt: skip
        for row, new in enumerate(ids):
            if new is not None:
                out[row].append(new)
    return out


def stream_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_id: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    stopped: Callable[[int, list[int]], bool] | None = None,
    free_prompts: Sequence[Sequence[int]] | None = None,
    guidance: float = 1.0,
    early_exit: ExitDecoding | None = None,
) -> Iterator[list[int | None]]:
    """As :func:`generate_ids`, step by step: for each row its new id, or None once it has ended."""
    if not prompts:
        return
    check_guidance(guidance)
    if early_exit is not None:
        check_exit_decoding(
            early_exit, model, len(prompts), use_cache=use_cache, guided=free_prompts is not None and guidance != 1
        )
    if free_prompts is not None and len(free_prompts) != len(prompts):
        raise ConfigError(f"are {len(free_prompts)} and the prompts {len(prompts)}", key="free_prompts")
    inner: Any = getattr(model, "module", model)
    for prompt in [*prompts, *(free_prompts or [])]:
        if not len(prompt):
            raise ConfigError(
                "is empty; give at least one token (the bos or eos id to start from nothing)", key="prompt"
            )
        if len(prompt) >= inner.max_seq_len:
            raise ConfigError(
                f"has {len(prompt)} tokens and leaves no room in the model's {inner.max_seq_len}; shorten it",
                key="prompt",
            )
    device = next(inner.parameters()).device
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)

    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    histories: list[list[int]] = [[] for _ in prompts]
    training = model.training
    model.eval()
    try:
        pad_id = eos_id if eos_id is not None else 0
        with (
            torch.no_grad(),
            closing(
                _steps(
                    model,
                    prompts,
                    max_new_tokens,
                    choose,
                    use_cache,
                    repetition_penalty,
                    done,
                    pad_id,
                    free_prompts,
                    guidance,
                    early_exit,
                )
            ) as steps,
        ):
            while True:
                ids = next(steps, None)
                if ids is None:
                    return
                ended = done.tolist()
                news: list[int | None] = []
                for row, new in enumerate(ids.tolist()):
                    if ended[row] or new == eos_id:
                        ended[row] = True
                        news.append(None)
                        continue
                    histories[row].append(new)
                    ended[row] = stopped is not None and stopped(row, histories[row])
                    news.append(new)
                done.copy_(torch.tensor(ended))
                yield news
    finally:
        model.train(training)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = list(tokenizer.encode(text))
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]  # from nothing: as after the end of a document


def _prompts(
    tokenizer: Tokenizer, prompts: Sequence[str], context: Context | None
) -> tuple[list[list[int]], list[list[int]] | None, float]:
    """Ids of the prompts, of the same free of the context, and the guidance."""
    if context is None:
        return [_encode(tokenizer, p) for p in prompts], None, 1.0
    pairs = [context.prompts(tokenizer, p) for p in prompts]
    return [p for p, _ in pairs], [f for _, f in pairs], context.guidance


def _stop_check(tokenizer: Tokenizer, stop: Sequence[str]) -> Callable[[int, list[int]], bool] | None:
    if not stop:
        return None
    # A stop string of n bytes lies within the last n tokens that stand for text.
    window = max(len(s.encode()) for s in stop) + 8

    def stopped(row: int, ids: list[int]) -> bool:
        text = tokenizer.decode(ids[-window:])
        return any(s in text for s in stop)

    return stopped


def _cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """``text`` before the first stop string, and whether there was one."""
    ends = [i for i in (text.find(s) for s in stop) if i >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    eos_id: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    context: Context | None = None,
    early_exit: ExitDecoding | None = None,
) -> list[str]:
    """The continuation of each prompt as text, without the prompt, ended by the tokenizer's eos (or ``eos_id``), the
    first of the ``stop`` strings (cut off), ``max_new_tokens`` or the model's length. ``context`` is metadata to write
    by, for models trained with that. See :func:`generate_ids`."""
    _check(temperature, top_k, top_p, max_new_tokens, repetition_penalty, stop)
    given, free, guidance = _prompts(tokenizer, prompts, context)
    ids = generate_ids(
        model, given, free_prompts=free, guidance=guidance, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty, seed=seed, generator=generator,
        eos_id=tokenizer.eos_id if eos_id is None else eos_id, stopped=_stop_check(tokenizer, stop),
        use_cache=use_cache, early_exit=early_exit,
    )  # fmt: skip
    return [_cut(tokenizer.decode(row), stop)[0] for row in ids]


def stream(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    eos_id: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    context: Context | None = None,
    early_exit: ExitDecoding | None = None,
) -> Iterator[str]:
    """Pieces of the continuation of ``prompt`` (text, or ids as of a chat template) as they come.

    A piece is held back while it may be the start of a stop string or an unfinished character; the pieces joined are
    what :func:`generate` returns.
    """
    _check(temperature, top_k, top_p, max_new_tokens, repetition_penalty, stop)
    free, guidance = None, 1.0
    if isinstance(prompt, str):
        given, free, guidance = _prompts(tokenizer, [prompt], context)
    elif context is not None:
        raise ConfigError("belongs to a prompt that is text", key="context")
    else:
        given = [list(prompt)]
    history: list[int] = []
    sent = 0
    for (new,) in stream_ids(
        model, given, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        free_prompts=free, guidance=guidance, early_exit=early_exit,
        repetition_penalty=repetition_penalty, seed=seed, generator=generator,
        eos_id=tokenizer.eos_id if eos_id is None else eos_id, stopped=_stop_check(tokenizer, stop),
    ):  # fmt: skip
        if new is None:
            continue
        history.append(new)
        text, ended = _cut(tokenizer.decode(history), stop)
        safe = len(text) if ended else _safe_length(text, stop)
        if safe > sent:
            yield text[sent:safe]
            sent = safe
    text, _ = _cut(tokenizer.decode(history), stop)
    if len(text) > sent:
        yield text[sent:]


def _safe_length(text: str, stop: Sequence[str]) -> int:
    """How much of ``text`` cannot change any more: not a trailing part of a character or of a stop string."""
    end = len(text.rstrip("\ufffd"))
    for s in stop:
        for n in range(min(len(s) - 1, end), 0, -1):
            if text[:end].endswith(s[:n]):
                end -= n
                break
    return end
