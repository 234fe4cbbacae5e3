"""The pattern of S2-Attention: which blocks of keys each head sees.

Query block i of a document sees, in key-value head t, key block j <= i where

    i - j < local        or        (j + t * step + offset) % stride == 0         step = max(1, stride // heads)

and the last ``num_dense_heads`` key-value heads see all. Heads see different blocks, so that together they see the
whole context, if their residues cover 0 .. stride - 1: that is checked. A block that is no longer local is seen for
good or never again, so a cache of n blocks needs about local + (n - local) / stride of them per head.

S2-Attention, arXiv:2407.17678. Blocks are counted from the start of a document, not of the row: a packed document sees
what it would see alone, and a prompt padded on the left what it would see without padding. The released code counts
slots of the row, and trains on rows of one document only.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Of one layer, by key-value head; query heads that share keys share it. See :func:`make_pattern`.

    residues  of each head the block numbers modulo ``stride`` that it sees from afar; None: all (a dense head)
    """

    residues: tuple[int | None, ...]
    block_size: int = 64
    local_blocks: int = 16
    stride: int = 8

    def blocks(self, n: int, past: int = 0) -> Tensor:
        """bool ``[heads, n - past, n]``: what query blocks ``past .. n - 1`` see of ``n`` key blocks."""
        i, j = torch.arange(past, n)[:, None], torch.arange(n)
        heads = []
        for r in self.residues:
            far = torch.ones(n, dtype=torch.bool) if r is None else j % self.stride == r
            heads.append((j <= i) & ((i - j < self.local_blocks) | far))
        return torch.stack(heads)

    def pairs(self, length: int) -> list[int]:
        """Of each head the pairs of query and key tokens in a document of ``length`` tokens, exactly."""
        size, whole = self.block_size, length * (length + 1) // 2
        counts = []
        for r in self.residues:
            if r is None:
                counts.append(whole)
                continue
            n = -(-length // size)
            total = 0
            for i in range(n):
                queries = min(size, length - i * size)
                near = min(i, self.local_blocks - 1)
                far = len(range(r, i - self.local_blocks + 1, self.stride))
                total += queries * (near + far) * size + queries * (queries + 1) // 2
            counts.append(total)
        return counts

    def density(self, length: int) -> float:
        """Blocks seen, over those of causal attention, all heads together."""
        n = -(-length // self.block_size)
        return float(self.blocks(n).sum()) / (len(self.residues) * n * (n + 1) / 2)

    def cached_tokens(self, length: int) -> list[int]:
        """Of each head the tokens that a query after ``length`` tokens (whole blocks) can still see."""
        n = -(-length // self.block_size)
        far = range(max(0, n - self.local_blocks))
        near = n - len(far)
        return [
            self.block_size * (near + (len(far) if r is None else sum(j % self.stride == r for j in far)))
            for r in self.residues
        ]

    def uncovered(self) -> list[int]:
        """Residues modulo ``stride`` that no head sees from afar; [] where all heads together see the whole context."""
        if None in self.residues:
            return []
        return sorted(set(range(self.stride)) - set(self.residues))  # type: ignore[arg-type]

    def narrow(self, rank: int, ranks: int) -> Pattern:
        """That of the ``rank``-th of ``ranks`` equal shares of the heads (tensor parallelism)."""
        share = len(self.residues) // ranks
        return replace(self, residues=self.residues[rank * share : (rank + 1) * share])


def make_pattern(
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    block_size: int = 64,
    local_blocks: int = 16,
    stride: int = 8,
    num_dense_heads: int = 0,
    offset: int = 0,
    allow_uncovered: bool = False,
) -> Pattern:
    """The pattern of a layer of ``n_heads`` query heads over ``n_kv_heads``.

    stride           1: dense
    num_dense_heads  of the key-value heads
    allow_uncovered  take a pattern whose heads together do not see the whole context
    Raises ValueError for block sizes that are no power of two of at least 16, no local block, heads that do not divide,
    and, unless allowed, context that no head sees.
    """
    kv = n_kv_heads or n_heads
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} should be a power of two of at least 16")
    if stride < 1:
        raise ValueError(f"stride={stride} should be 1 (dense) or more")
    if local_blocks < 1 and stride > 1:
        raise ValueError(f"local_blocks={local_blocks} leaves a block that does not see itself; use 1 or more")
    if n_heads % kv:
        raise ValueError(f"n_kv_heads={kv} does not divide n_heads={n_heads}")
    if not 0 <= num_dense_heads <= kv:
        raise ValueError(f"num_dense_heads={num_dense_heads} should be 0 to {kv}, the key-value heads")
    step, sparse = max(1, stride // n_heads), kv - num_dense_heads
    residues = tuple(None if t >= sparse or stride == 1 else -(t * step + offset) % stride for t in range(kv))
    pattern = Pattern(residues, block_size, local_blocks, stride)
    unseen = pattern.uncovered()
    if unseen and not allow_uncovered:
        most = _covering(n_heads, kv)
        raise ValueError(
            f"stride={stride} over {sparse} sparse key-value heads ({n_heads} query heads, hence steps of {step}) "
            f"leaves blocks {', '.join(map(str, unseen))} modulo {stride} to no head; use stride={most} or "
            "less, num_dense_heads=1, or allow_uncovered"
        )
    return pattern


def _covering(n_heads: int, kv: int) -> int:
    """The largest stride whose residues all heads cover."""
    return max(s for s in range(1, kv + 1) if len({-t * max(1, s // n_heads) % s for t in range(kv)}) == s)


def check_blocks(blocks: Tensor) -> None:
    """A pattern of the user's own, bool ``[heads, n, n]``: ValueError where a block sees later ones or none, a warning
    where a block is seen again after it was not (a cache then has to keep all)."""
    if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2]:
        raise ValueError(f"blocks should be [heads, n, n], not {tuple(blocks.shape)}")
    if bool((blocks & ~torch.ones_like(blocks[0]).tril()).any()):
        raise ValueError("blocks let a query see a later block; keep to the lower triangle")
    empty = (~blocks.any(-1)).nonzero()
    if len(empty):
        head, row = empty[0].tolist()
        raise ValueError(f"query block {row} of head {head} sees no block; let it see at least itself")
    again = (blocks[:, 1:] & ~blocks[:, :-1]).tril(-1)[:, :, :-1]
    # Row i + 1 sees j < i + 1 although row i did not: j = i + 1 itself is new to all.
    again = again & torch.ones_like(again[0]).tril()
    if bool(again.any()):
        warnings.warn("blocks bring back keys that were out of sight; a key-value cache has to keep all", stacklevel=2)
