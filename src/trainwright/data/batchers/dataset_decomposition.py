"""Dataset decomposition: documents cut into pieces of 2^k tokens, each step of pieces of one length, short ones first.

    k = min(floor(log2(n - 1)), kmax); while k >= kmin: the next 2^k + 1 tokens of the document are a piece of bucket k
        (input its first 2^k tokens, target its last 2^k), n -= 2^k + 1, k anew from n
    a step       b 2^(kmax-k) pieces of one bucket k: tokens a step are the same for every k
    next bucket  drawn with fixed odds w_k = quota_k c_k, seeded, the same on every rank; a bucket whose quota of the
                 cycle is used up leaves the draw
    c            short to long: uniform 1; grow_linear K..1; grow_p2 2^(K-1)..1; grow_p100 100^(K-1)..1
    attention    per token, against rows of 2^kmax without a document mask: sum_k n_k 2^2k / (2^kmax sum_k n_k 2^k)

Paper: Dataset Decomposition: Faster LLM Training with Variable Sequence Length Curriculum, arXiv:2405.13226.

Here a row of ``seq_len`` tokens holds seq_len / 2^k pieces of one bucket, each a document of its own to attention and
positions. That is the paper's batch of b 2^(kmax-k) sequences of 2^k tokens in another shape; attention skips what
lies between documents, so its cost is the same too. :class:`~trainwright.data.decomposed.DecomposedBatches` gives
the batches in the paper's shape.

Where it differs. The paper's code uses the global generator without a seed; here everything follows from one. It throws
away what does not fill a shard; here the pieces of a bucket that do not fill a step are halved and go to the next
shorter bucket (``leftovers``), so less than a step is lost. Tails below 2^kmin are dropped as there and their share is
told, or with ``tails: keep`` they fill rows of their own, the shortest bucket. Documents longer than 2^kmax give as
many pieces of 2^kmax as they hold, as in the paper; the code's default draws their lengths (``long_documents:
random``). Cycles may differ by one step in a quota, so that all data is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from trainwright.core.errors import ConfigError
from trainwright.core.registry import register
from trainwright.core.seeds import derive
from trainwright.data.batchers.base import BatcherConfig
from trainwright.data.batchers.best_fit import best_fit_decreasing
from trainwright.data.packing import NOTHING, RowPlan, Segments
from trainwright.data.permutation import Permutation

Curriculum = Literal["uniform", "grow_linear", "grow_p2", "grow_p100"]
Ints = NDArray[np.int64]


# -- one document, all documents --------------------------------------------------------------------------------------


def decompose(length: int, k_min: int = 8, k_max: int = 13, rng: np.random.Generator | None = None) -> list[int]:
    """The exponents k of a document's pieces, in order: each takes 2^k + 1 tokens of its ``length``.

    With ``rng`` a piece of a document longer than 2^(k_max + 1) has k drawn from k_min..k_max with odds 2^(k_max-k).
    Raises ConfigError for k_min > k_max or k_min < 0.
    """
    check_exponents(k_min, k_max)
    out = []
    while length > 1:
        k = (length - 1).bit_length() - 1
        if k < k_min:
            break
        if k > k_max:
            k = k_max if rng is None else int(_draw_k(rng, 1, k_min, k_max)[0])
        out.append(k)
        length -= (1 << k) + 1
    return out


def _draw_k(rng: np.random.Generator, count: int, k_min: int, k_max: int) -> Ints:
    odds = 2.0 ** np.arange(k_max - k_min, -1, -1)  # of k_min .. k_max
    bounds = np.cumsum(odds / odds.sum())[:-1]
    return k_min + np.searchsorted(bounds, rng.random(count), side="right")


class Pieces(NamedTuple):
    """``2^k`` tokens of document ``docs[i]`` from ``starts[i]`` on, and the token behind them as the last target."""

    docs: Ints
    starts: Ints
    ks: Ints


def decompose_all(lengths: np.ndarray, k_min: int, k_max: int, seed: int | None = None) -> tuple[Pieces, Ints]:
    """Pieces of all documents, and per document where its tail begins (``lengths`` where it has none).

    ``seed`` draws the lengths of pieces of documents longer than 2^(k_max + 1), see :func:`decompose`.
    """
    check_exponents(k_min, k_max)
    lengths = np.asarray(lengths, dtype=np.int64)
    at = np.zeros(len(lengths), np.int64)
    parts: list[Pieces] = []

    def take(docs: Ints, starts: Ints, ks: Ints) -> None:
        parts.append(Pieces(docs, starts, ks))

    if seed is not None:
        rng = np.random.Generator(np.random.PCG64(derive(seed, "piece lengths")))
        while len(long := np.flatnonzero(lengths - at - 1 >= 1 << (k_max + 1))):
            ks = _draw_k(rng, len(long), k_min, k_max)
            take(long, at[long], ks)
            at[long] += (1 << ks) + 1
    for k in range(k_max, k_min - 1, -1):
        each = (1 << k) + 1
        counts = (lengths - at) // each  # below k_max at most one: what is left has fewer than 2 * 2^k + 1 tokens
        docs = np.repeat(np.arange(len(lengths)), counts)
        nth = np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)
        take(docs, at[docs] + nth * each, np.full(len(docs), k, np.int64))
        at += counts * each
    return Pieces(*(np.concatenate(a) for a in zip(*parts, strict=True))), at


def check_exponents(k_min: int, k_max: int) -> None:
    if k_min < 0:
        raise ConfigError("should be at least 0", key="k_min", value=k_min)
    if k_min > k_max:
        raise ConfigError(f"is above k_max={k_max}; the shortest piece is 2^k_min tokens", key="k_min", value=k_min)


def attention_cost(ks: np.ndarray, k_max: int) -> float:
    """Attention per token of pieces of 2^ks tokens, relative to rows of 2^k_max: their token-weighted mean length."""
    sizes = 2.0 ** np.asarray(ks)
    return float((sizes * sizes).sum() / sizes.sum() / 2.0**k_max)


# -- the curriculum ---------------------------------------------------------------------------------------------------


def curriculum_odds(curriculum: Curriculum | Sequence[float], buckets: int) -> NDArray[np.float64]:
    """c of each bucket, shortest first. Raises ConfigError for odds that are not one positive number a bucket."""
    if not isinstance(curriculum, str):
        odds = np.asarray(curriculum, dtype=np.float64)
        if odds.shape != (buckets,) or not (np.isfinite(odds).all() and (odds > 0).all()):
            raise ConfigError(
                f"should be {buckets} numbers above 0, one for each bucket from the shortest on",
                key="curriculum",
                value=list(curriculum),
            )
        return odds
    falling = np.arange(buckets - 1, -1, -1, dtype=np.float64)
    known = {"uniform": 0 * falling + 1, "grow_linear": falling + 1, "grow_p2": 2**falling, "grow_p100": 100**falling}
    return known[curriculum]


def cycle_quotas(steps: Sequence[int], cycles: int) -> Ints:
    """Steps that each cycle takes of each bucket, ``[cycles, buckets]``; columns sum to ``steps``, rows differ by 1."""
    share = np.asarray(steps, np.int64) * np.arange(cycles + 1)[:, None] // cycles
    return np.diff(share, axis=0)


def draw_order(quotas: Sequence[int], odds: np.ndarray, rng: np.random.Generator) -> Ints:
    """One cycle's buckets, step by step: each drawn with fixed odds ``quota * odds`` until its quota is used up."""
    left = np.asarray(quotas, dtype=np.int64).copy()
    weights = left * np.asarray(odds, dtype=np.float64)
    out: list[Ints] = []
    while total := int(left.sum()):
        alive = np.flatnonzero(left)
        bounds = np.cumsum(weights[alive] / weights[alive].sum())[:-1]
        drawn = alive[np.searchsorted(bounds, rng.random(total), side="right")]
        # The odds hold until the first bucket is used up; what was drawn behind that is drawn anew without it.
        ends = [hits[left[b] - 1] for b in alive if len(hits := np.flatnonzero(drawn == b)) >= left[b]]
        drawn = drawn[: min(ends) + 1]
        left -= np.bincount(drawn, minlength=len(left))
        out.append(drawn)
    return np.concatenate(out) if out else np.zeros(0, np.int64)


# -- rows -------------------------------------------------------------------------------------------------------------


class DecompositionPlan:
    """Steps of ``step_rows`` rows, each of pieces of one bucket: 16 bytes a piece, 16 a step.

    ``buckets`` is the exponent of each step's bucket, or -1 for one of tails. Raises ConfigError for exponents that do
    not fit ``seq_len`` and for data that does not fill a single step.
    """

    def __init__(
        self, config: DatasetDecompositionConfig, lengths: np.ndarray, seq_len: int, seed: int | None, step_rows: int
    ):
        self.seq_len, self.step_rows = seq_len, step_rows
        self.lengths = lengths
        self.k_min, self.k_max = config.exponents(seq_len)
        base = 0 if seed is None else seed
        random = derive(base, "lengths") if config.long_documents == "random" else None
        pieces, at = decompose_all(lengths, self.k_min, self.k_max, random)
        self.tokens = int(np.asarray(lengths, np.int64).sum())
        self.seams = len(pieces.docs)  # tokens behind a piece, which are a target but no input
        self.tail_tokens = int((lengths - at).sum())
        self._fill(pieces, config.leftovers == "split", seed)
        tails = np.flatnonzero(lengths - at >= 2) if config.tails == "keep" else np.zeros(0, np.int64)
        self._add_tails(tails, at[tails], config.tails == "keep", seed)
        self._order(config, base)
        self.num_rows = len(self.buckets) * step_rows
        if not self.num_rows:
            raise ConfigError(
                f"takes {step_rows} rows of {seq_len} tokens a step, but the {self.tokens:,} tokens of the data give "
                f"no whole step of pieces of 2^{self.k_min} tokens or more; take smaller steps, a lower "
                "data.batcher.k_min, or data.batcher.tails=keep",
                key="train.global_batch_tokens",
                value=step_rows * seq_len,
            )

    def _fill(self, pieces: Pieces, split: bool, seed: int | None) -> None:
        """Shuffled pieces of each bucket in whole steps; of ``k_min`` what is over is left in ``_rest``."""
        self.docs: dict[int, np.ndarray] = {}
        self.starts: dict[int, np.ndarray] = {}
        self.steps: dict[int, int] = {}
        docs = starts = self._rest = np.zeros(0, np.int64)
        for k in range(self.k_max, self.k_min - 1, -1):
            own = pieces.ks == k
            order = Permutation(int(own.sum()) + len(docs), None if seed is None else derive(seed, "pieces", k)).all()
            docs = np.concatenate([pieces.docs[own], docs])[order]
            starts = np.concatenate([pieces.starts[own], starts])[order]
            each = self.step_rows * (self.seq_len >> k)
            self.steps[k] = len(docs) // each
            used = self.steps[k] * each
            self.docs[k], self.starts[k] = docs[:used], starts[:used]
            docs, starts = docs[used:], starts[used:]
            if k > self.k_min and split:
                half = 1 << (k - 1)
                docs, starts = np.repeat(docs, 2), np.stack([starts, starts + half], 1).ravel()
            elif k > self.k_min:
                docs = starts = np.zeros(0, np.int64)
        self._rest = np.stack([docs, starts])

    def _add_tails(self, docs: Ints, starts: Ints, keep: bool, seed: int | None) -> None:
        """Tails, and with them the last pieces of ``k_min``, whole in rows of their own."""
        self.tail_rows: list[Segments] = []
        if not keep:
            return
        stops = np.concatenate([self.lengths[docs], self._rest[1] + (1 << self.k_min)]).astype(np.int64)
        docs, starts = np.concatenate([docs, self._rest[0]]), np.concatenate([starts, self._rest[1]])
        if not len(docs):
            return
        bins = best_fit_decreasing(stops - starts, self.seq_len)
        by_bin = np.argsort(bins, kind="stable")
        cuts = np.flatnonzero(np.diff(bins[by_bin])) + 1
        rows = np.split(by_bin, cuts)
        order = Permutation(len(rows), None if seed is None else derive(seed, "tails")).all().tolist()
        self.tail_rows = [Segments(docs[rows[r]], starts[rows[r]], stops[rows[r]]) for r in order]

    def _order(self, config: DatasetDecompositionConfig, seed: int) -> None:
        steps = dict(self.steps)
        if self.tail_rows:
            steps[-1] = -(-len(self.tail_rows) // self.step_rows)  # the last one filled up with empty rows
        self.steps = {k: steps[k] for k in sorted(steps)}
        ks = np.array(list(self.steps))
        odds = curriculum_odds(config.curriculum, len(ks))
        self.quotas = cycle_quotas(list(self.steps.values()), config.cycles)
        order = [np.zeros(0, np.int64)]
        for cycle, quotas in enumerate(self.quotas):
            rng = np.random.Generator(np.random.PCG64(derive(seed, "buckets", cycle)))
            order.append(draw_order(quotas, odds, rng))
        drawn = np.concatenate(order)
        self.buckets = ks[drawn]
        self.nth = np.zeros(len(drawn), np.int64)  # which step of its bucket
        for b in range(len(ks)):
            own = np.flatnonzero(drawn == b)
            self.nth[own] = np.arange(len(own))

    def segments(self, row: int) -> Segments:
        step, r = divmod(row, self.step_rows)
        k, place = int(self.buckets[step]), int(self.nth[step]) * self.step_rows + r
        if k < 0:
            return self.tail_rows[place] if place < len(self.tail_rows) else NOTHING
        each = self.seq_len >> k
        here = slice(place * each, (place + 1) * each)
        starts = self.starts[k][here]
        return Segments(self.docs[k][here], starts, starts + (1 << k))

    @property
    def num_tokens(self) -> int:
        """Tokens that are an input once an epoch."""
        full = sum(n for k, n in self.steps.items() if k >= 0) * self.step_rows * self.seq_len
        return full + sum(int((s.stops - s.starts).sum()) for s in self.tail_rows)

    @property
    def note(self) -> str:
        """What became of the tokens, for the log."""
        parts = ", ".join(f"{'tails' if k < 0 else 1 << k}: {n}" for k, n in self.steps.items())
        share = 1 - (self.num_tokens + self.seams) / max(self.tokens, 1)
        below = 100 * self.tail_tokens / max(self.tokens, 1)
        few = [str(1 << k) for k, n in self.steps.items() if k >= 0 and 0 < n < len(self.quotas)]
        text = (
            f"dataset decomposition: steps by length of piece {{{parts}}}; attention "
            f"{100 * self.attention_cost():.0f} % of that of unmasked rows of {1 << self.k_max}; {100 * share:.1f} % "
            f"of the tokens left out (tails below 2^{self.k_min} are {below:.1f} %)"
        )
        if few:
            text += f"; fewer steps than the {len(self.quotas)} cycles at length {', '.join(few)}: some go without"
        return text

    def attention_cost(self) -> float:
        """Attention per token relative to unmasked rows of 2^k_max tokens."""
        pieces = sum(float(len(self.docs[k])) * 4.0**k for k in self.docs)
        tails = sum(float(((s.stops - s.starts).astype(np.float64) ** 2).sum()) for s in self.tail_rows)
        return (pieces + tails) / self.num_tokens / 2.0**self.k_max


@register("batcher", "dataset_decomposition", paper="arXiv:2405.13226", seed_id="B005")
class DatasetDecompositionConfig(BatcherConfig):
    """Pieces of 2^k tokens of single documents, each step of one length, short ones first (dataset decomposition)."""

    orders_steps: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = False

    k_min: int = Field(8, ge=0, description="Shortest piece is 2^k_min tokens.")
    k_max: int | None = Field(
        None, ge=0, description="Longest piece is 2^k_max tokens; null: a whole row, and train.seq_len is a power of 2."
    )
    curriculum: Curriculum | list[float] = Field(
        "grow_p2",
        description="How much rather short pieces come first in a cycle: uniform, grow_linear, grow_p2, grow_p100, or "
        "a number for each bucket from the shortest on.",
    )
    cycles: PositiveInt = Field(8, description="Times that the curriculum is gone through in an epoch.")
    long_documents: Literal["longest", "random"] = Field(
        "longest", description="Pieces of documents above 2^k_max: as long as may be, or drawn, short ones more often."
    )
    tails: Literal["drop", "keep"] = Field(
        "drop", description="Ends of documents below 2^k_min tokens: left out, or packed in rows of their own."
    )
    leftovers: Literal["split", "drop"] = Field(
        "split", description="Pieces that do not fill a step of their length: halved for the next shorter, or left out."
    )

    @model_validator(mode="after")
    def _ordered(self) -> DatasetDecompositionConfig:
        if self.k_max is not None:
            check_exponents(self.k_min, self.k_max)
        return self

    def exponents(self, seq_len: int) -> tuple[int, int]:
        """k_min and k_max for rows of ``seq_len`` tokens. Raises ConfigError where rows do not hold whole pieces."""
        k_max = seq_len.bit_length() - 1 if self.k_max is None else self.k_max
        if 1 << k_max > seq_len:
            raise ConfigError(
                f"gives pieces of {1 << k_max} tokens, longer than train.seq_len={seq_len}; lower it or set "
                f"train.seq_len={1 << k_max}",
                key="data.batcher.k_max",
                value=k_max,
            )
        if seq_len % (1 << k_max):
            raise ConfigError(
                f"is no multiple of 2^k_max={1 << k_max}, so rows do not hold whole pieces; use {1 << k_max} or "
                f"{2 << k_max}",
                key="train.seq_len",
                value=seq_len,
            )
        if self.k_min > k_max:
            raise ConfigError(
                f"gives pieces of at least {1 << self.k_min} tokens, but rows have {seq_len}; use {k_max} or less",
                key="data.batcher.k_min",
                value=self.k_min,
            )
        return self.k_min, k_max

    def plan(self, lengths: np.ndarray, seq_len: int, seed: int | None) -> RowPlan:
        return self.plan_steps(lengths, seq_len, seed, 1)

    def plan_steps(self, lengths: np.ndarray, seq_len: int, seed: int | None, step_rows: int) -> RowPlan:
        return DecompositionPlan(self, lengths, seq_len, seed, step_rows)
