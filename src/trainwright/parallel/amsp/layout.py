"""Where the parameters of a unit lie in flat buffers.

Every parameter ``[R, ...]`` is cut along its first dimension into ``shards`` chunks of ``ceil(R / shards)`` rows, the
last ones short or empty, as torch's ``Shard(0)`` cuts it; buffers pad them to full length. Two arrangements:

    chunked  ``[shards, chunk]``: row i holds chunk i of every parameter. What is sent is made of whole rows.
    whole    each parameter with its chunks one behind the other: what the model computes with.

With nested shards, group member i of n holds the rows j with j mod n = i, so that the n-th part of a chunked buffer is
every n-th row, and a rank's optimizer shard (one row) is part of its gradient shard, and that of its parameter shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: kernels read that much at once


class Layout:
    """Offsets of parameters of ``shapes``. ``chunk``: numbers in a row of all of them; ``whole``: in a whole buffer."""

    def __init__(self, shapes: Sequence[torch.Size], shards: int, itemsize: int):
        self.shapes, self.shards = list(shapes), shards
        self.rows = [math.ceil(_length(s) / shards) for s in shapes]
        self.sizes = [r * math.prod(s[1:]) for r, s in zip(self.rows, shapes, strict=True)]
        self.chunk = sum(self.sizes)
        step = max(_ALIGNED // itemsize, 1)
        self.starts: list[int] = []
        self.whole = 0
        for size in self.sizes:
            self.starts.append(self.whole)
            self.whole += math.ceil(size * shards / step) * step

    def padded(self, whole: Tensor) -> list[Tensor]:
        """Views ``[shards, size]`` of each parameter in a whole buffer, padding included."""
        return [
            whole[start : start + size * self.shards].view(self.shards, size)
            for start, size in zip(self.starts, self.sizes, strict=True)
        ]

    def parameters(self, whole: Tensor) -> list[Tensor]:
        """Views of each parameter, in its own shape."""
        return [
            whole[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of each parameter's part along the last dimension of ``flat [..., chunk]``."""
        return list(flat.split(self.sizes, dim=-1)) if self.sizes else []

    def fill_whole(self, whole: Tensor, gathered: Tensor) -> None:
        """``whole`` from ``gathered [n, shards / n, chunk]``, the shards of n group members."""
        n, depth, _ = gathered.shape
        targets = [p.view(depth, n, -1) for p in self.padded(whole)]
        torch._foreach_copy_(targets, [p.transpose(0, 1) for p in self.pieces(gathered)])

    def send_form(self, values: Sequence[Tensor | None], n: int, out: Tensor) -> Tensor:
        """``out [n, shards / n, chunk]``, part i for group member i, from whole parameters (None: zeros)."""
        depth = self.shards // n
        for piece, value, size in zip(self.pieces(out), values, self.sizes, strict=True):
            if value is None:
                piece.zero_()
            else:
                piece.copy_(self._padded(value, size).view(depth, n, size).transpose(0, 1))
        return out

    def add_to(self, chunked: Tensor, values: Sequence[Tensor | None]) -> None:
        """Add whole parameters to ``chunked [shards, chunk]``."""
        for piece, value, size in zip(self.pieces(chunked), values, self.sizes, strict=True):
            if value is not None:
                piece.add_(self._padded(value, size))

    def local_shape(self, i: int, row: int) -> torch.Size:
        """Shape of parameter ``i``'s chunk ``row``, without padding."""
        shape = self.shapes[i]
        if self.shards == 1:
            return shape
        here = min(max(shape[0] - row * self.rows[i], 0), self.rows[i])
        return torch.Size((here, *shape[1:]))

    def _padded(self, value: Tensor, size: int) -> Tensor:
        flat = value.reshape(-1)
        missing = self.shards * size - flat.numel()
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        return flat.view(self.shards, size)


def _length(shape: torch.Size) -> int:
    return shape[0] if shape else 1
