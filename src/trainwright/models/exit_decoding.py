"""Generation that leaves at the first confident early exit, with a key-value cache that has no holes.

A token leaves at exit p when ``max softmax(y_p) >= threshold``; then the layers behind p have no key and value of it.
Two ways to come by them, which both give what a run through all layers would have put there:

recompute  tokens that have left ride along in the next forward pass, ``[1, pending + 1]`` wide, until one pass goes
           through all layers; after ``cap`` of them in a row one has to. Fewest layers one after another; some work is
           done twice, which costs little where a pass is bound by reading the weights.
pipelined  layers lie in stages, which work at the same time. A token that leaves in stage k is handed to stage 0 as the
           next input, while the stages from k on still fill in their keys and values of it. No work is done twice.

Keys, values and logits are the same in both, so their tokens are too, up to rounding and the passes that ``cap`` takes
through all layers, which choose by the last one. With a threshold above 1 they are those of generation without exits.
The prompt goes through all layers. One row: rows would leave at different exits.

EE-LLM, arXiv:2312.04916. Where this differs from the released code: stop tokens end both, pipelined too; the
probability is compared as it is and not its logarithm, so that any threshold above 1 turns exits off.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.core.errors import ConfigError
from trainwright.models.base import Hidden, LanguageModel
from trainwright.models.cache import KVCache
from trainwright.models.decoder import Decoder, head_logits


@dataclass
class ExitStats:
    """What was spent. ``layers`` counts a layer run for a token once, also where it is run again (recompute)."""

    tokens: int = 0  # generated
    passes: int = 0  # forward passes behind the prompt's
    left_at: dict[int, int] = field(default_factory=dict)  # tokens by the layers they were chosen after
    depth: int = 0  # layers between a token's input and its choice, added up: what its latency is made of
    layers: int = 0


@dataclass
class ExitDecoding:
    """How to leave early.

    threshold  probability of the likeliest token from which on an exit is taken; above 1: never
    method     "recompute" or "pipelined"
    cap        recompute: passes in a row that may end early
    stages     pipelined: parts that the layers are cut into, at exits where that goes; None: one more than exits
    stats      is filled
    """

    threshold: float
    method: Literal["recompute", "pipelined"] = "recompute"
    cap: int = 8
    stages: int | None = None
    stats: ExitStats = field(default_factory=ExitStats)


def check_exit_decoding(
    spec: ExitDecoding, model: Any, rows: int, *, use_cache: bool = True, guided: bool = False
) -> Decoder:
    """The model. Raises ConfigError where exits cannot be taken."""
    if not isinstance(model, Decoder) or model.exits is None:
        raise ConfigError(
            "needs a model with early exits, whole and not wrapped; train one with transforms: [{name: early_exit, "
            "after: [...]}], or leave it out",
            key="exit_threshold",
            value=spec.threshold,
        )
    for ok, key, value, rule in (
        (spec.threshold > 0, "exit_threshold", spec.threshold, "above 0; above 1 no exit is taken"),
        (spec.method in ("recompute", "pipelined"), "exit_method", spec.method, "recompute or pipelined"),
        (spec.cap >= 1, "exit_cap", spec.cap, "1 or more"),
        (
            spec.stages is None or 1 <= spec.stages <= model.arch.n_layers,
            "exit_stages",
            spec.stages,
            f"between 1 and the {model.arch.n_layers} layers",
        ),
        (rows == 1, "prompts", rows, "1 where exits are taken: rows would leave at different layers"),
        (use_cache, "use_cache", use_cache, "true where exits are taken"),
        (not guided, "guidance", guided, "left out where exits are taken: two passes would leave at different layers"),
    ):
        if not ok:
            raise ConfigError(f"should be {rule}", key=key, value=value)
    return model


class _Run:
    """Layers of a decoder over the newest ``T`` tokens of one row, from the stream ``[1, T, D]`` before them."""

    def __init__(self, model: Decoder, layers: range, capacity: int):
        self.model, self.layers = model, layers
        self.cache = KVCache(model.arch.n_layers, capacity)  # of these layers; no memory for others

    def begin(self, tokens: Tensor) -> None:
        """The next slots; ``forward`` of each layer follows."""
        cache, arch = self.cache, self.model.arch
        start, length = cache.length, tokens.shape[1]
        cache.extend(tokens, None)
        positions = torch.arange(start, start + length, device=tokens.device).unsqueeze(0) if start else None
        cos, sin = self.model.rope(positions, cache.capacity, tokens.device)
        self._rope = (cos, sin) if positions is not None else (cos[:, :length], sin[:, :length])
        self._plans = {w: cache.plan(length, w) for w in {arch.window(i) for i in self.layers}}

    def forward(self, x: Tensor, choose: Callable[[int, Tensor], bool] | None) -> tuple[Tensor, int]:
        """The stream behind the layers, or at the exit where ``choose(layers done, logits [1, V])`` is true, and the
        number of layers done."""
        model = self.model
        for i in self.layers:
            if choose is not None and model.exits.has(i) and choose(i, exit_logits(model, i, x)):
                return x, i
            x = model.blocks[i](x, *self._rope, self._plans[model.arch.window(i)], self.cache)
            if isinstance(x, tuple):  # of experts
                x = x[0]
        return x, self.layers.stop


def exit_logits(model: Decoder, position: int, x: Tensor) -> Tensor:
    """``[1, V]`` of the last token at an exit."""
    return head_logits(model.exits.at(position, x[:, -1:], model._head()).hidden()).squeeze(1)


def _final_logits(model: Decoder, x: Tensor) -> Tensor:
    return head_logits(Hidden(model.norm(x)[:, -1:], model._head())).squeeze(1)


def confident(logits: Tensor, threshold: float) -> bool:
    return bool(logits.float().softmax(-1).amax() >= threshold)


class RecomputeLane:
    """``logits()`` of the next token and ``add(ids)``, in turns; see the module."""

    def __init__(self, model: Decoder, prompt: list[int], steps: int, spec: ExitDecoding):
        device = model.embed.weight.device
        self.model, self.spec = model, spec
        self.pending = torch.tensor([prompt], dtype=torch.int64, device=device)  # not yet through all layers
        self._run = _Run(model, range(model.arch.n_layers), len(prompt) + steps)
        self._prompt, self._early = True, 0

    def logits(self) -> Tensor:
        cache, stats = self._run.cache, self.spec.stats
        full = cache.length
        found: list[Tensor] = []

        def choose(position: int, logits: Tensor) -> bool:
            taken = confident(logits, self.spec.threshold)
            if taken:
                found.append(logits)
            return taken

        allowed = not self._prompt and self._early < self.spec.cap
        self._run.begin(self.pending)
        x, done = self._run.forward(self.model.embed(self.pending), choose if allowed else None)
        stats.tokens += 1
        if not self._prompt:
            stats.passes += 1
            stats.depth += done
            stats.layers += done * self.pending.shape[1]
        stats.left_at[done] = stats.left_at.get(done, 0) + 1
        self._prompt = False
        if found:
            cache.length = full  # what the first layers have put there is put there again
            self._early += 1
            return found[0]
        self.pending, self._early = self.pending[:, :0], 0
        return _final_logits(self.model, x)

    def add(self, ids: Tensor) -> None:
        self.pending = torch.cat([self.pending, ids[:, None]], dim=1)

    def close(self) -> None:
        pass


@dataclass
class _Item:
    tokens: Tensor  # [1, T]
    x: Tensor  # [1, T, D]
    answered: bool  # has left already: fill the caches, ask no exit
    prompt: bool


class PipelinedLane:
    """As :class:`RecomputeLane`. A thread for each stage, which takes tokens in their order; torch's operations let the
    others go on."""

    def __init__(self, model: Decoder, prompt: list[int], steps: int, spec: ExitDecoding):
        self.model, self.spec = model, spec
        self._device = model.embed.weight.device
        self._next: list[int] = prompt
        self._prompt = True
        self._answers: queue.Queue[tuple[int, Tensor] | BaseException] = queue.Queue()
        cuts = stage_cuts(model, spec.stages)
        capacity = len(prompt) + steps
        self._runs = [_Run(model, range(a, b), capacity) for a, b in itertools.pairwise(cuts)]
        self._inbox: list[queue.Queue[_Item | None]] = [queue.Queue() for _ in self._runs]
        self._threads = [threading.Thread(target=self._work, args=(k,), daemon=True) for k in range(len(self._runs))]
        for thread in self._threads:
            thread.start()

    def logits(self) -> Tensor:
        tokens = torch.tensor([self._next], dtype=torch.int64, device=self._device)
        self._inbox[0].put(_Item(tokens, self.model.embed(tokens), False, self._prompt))
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        done, logits = answer
        stats = self.spec.stats
        stats.tokens += 1
        stats.left_at[done] = stats.left_at.get(done, 0) + 1
        if not self._prompt:
            stats.passes += 1
            stats.depth += done
            stats.layers += self.model.arch.n_layers
        self._prompt = False
        return logits

    def add(self, ids: Tensor) -> None:
        self._next = ids.tolist()

    def close(self) -> None:
        """Let the stages finish what they are at. Raises what a stage has raised since the last answer."""
        self._inbox[0].put(None)
        for thread in self._threads:
            thread.join()
        while not self._answers.empty():
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer

    @torch.no_grad()  # a thread's own
    def _work(self, k: int) -> None:
        run, last = self._runs[k], k == len(self._runs) - 1
        while (item := self._inbox[k].get()) is not None:
            try:
                self._one(run, item, last)
            except BaseException as error:
                self._answers.put(error)
                break
            if not last:
                self._inbox[k + 1].put(item)
        if not last:
            self._inbox[k + 1].put(None)

    def _one(self, run: _Run, item: _Item, last: bool) -> None:
        def choose(position: int, logits: Tensor) -> bool:
            if not item.answered and confident(logits, self.spec.threshold):
                item.answered = True
                self._answers.put((position, logits))  # stage 0 may go on; this layer and those behind it do too
            return False

        run.begin(item.tokens)
        item.x, done = run.forward(item.x, None if item.prompt else choose)
        if last and not item.answered:
            self._answers.put((done, _final_logits(self.model, item.x)))


def stage_cuts(model: Decoder, stages: int | None = None) -> list[int]:
    """Layers at which ``stages`` parts begin, and the end: at the exits, where there are as many, else evenly."""
    n = model.arch.n_layers
    exits = [p for p in sorted(map(int, model.exits)) if 0 < p < n]
    if stages is None or stages == len(exits) + 1:
        return [0, *exits, n]
    return [round(i * n / stages) for i in range(stages + 1)]


def exit_lane(model: Decoder, prompt: list[int], steps: int, spec: ExitDecoding) -> RecomputeLane | PipelinedLane:
    kind = RecomputeLane if spec.method == "recompute" else PipelinedLane
    return kind(model, prompt, steps, spec)


@dataclass(frozen=True)
class Agreement:
    """Of tokens that were given: how many leave early, what that saves, and whether the last layer says the same."""

    tokens: int
    left: int
    agree: int  # of those that leave, chosen as the last layer would have
    skipped: float  # share of the layers' work that is not done for them


@torch.no_grad()
def teacher_forced(model: LanguageModel, tokens: Tensor, threshold: float) -> Agreement:
    """What exits at ``threshold`` would do with each position of ``tokens [B, T]``, all of them known."""
    if not isinstance(model, Decoder) or model.exits is None:
        raise ConfigError("needs a model with early exits", key="model")
    found: dict[str, Any] = {}

    def head(hidden: Hidden) -> Tensor:
        final = head_logits(hidden).argmax(-1)
        left = torch.zeros_like(final, dtype=torch.bool)
        agree, skipped = 0, 0.0
        for early in sorted(hidden.exits, key=lambda e: e.position):
            top, ids = head_logits(early.hidden()).float().softmax(-1).max(-1)
            leaves = (top >= threshold) & ~left
            left |= leaves
            agree += int((leaves & (ids == final)).sum())
            skipped += float(leaves.sum()) * (1.0 - early.position / model.arch.n_layers)
        found.update(left=int(left.sum()), agree=agree, skipped=skipped / final.numel())
        return final

    model(tokens, head_fn=head)
    return Agreement(tokens.numel(), **found)
