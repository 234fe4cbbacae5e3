"""How often a step goes through the layers of a model: forward, again where activations are recomputed, and backward as
far down as something is trained. For planning/comm_plan.py and what it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.planning.comm_plan import Work


@dataclass(frozen=True)
class Passes:
    """Of one layer and micro-batch."""

    forward: int  # more than 1 where activations are recomputed
    backward: bool  # a gradient goes into it: it or a layer below is trained
    queries: bool  # get a gradient in its attention, as keys and values do
    keys: bool
    values: bool

    @property
    def again(self) -> int:
        """Forward passes within the backward pass."""
        return self.forward - 1

    @property
    def attention(self) -> bool:
        """A gradient goes through its attention."""
        return self.queries or self.keys or self.values

    @property
    def heads_moved(self) -> tuple[int, int]:
        """Times that as many heads as there are of queries, and of keys, are traded for tokens: q, k, v there and the
        output back, and their gradients."""
        return 2 * self.forward + self.queries + self.attention, 2 * self.forward + self.keys + self.values


def recomputed_layers(memory: Sequence[Any], n_layers: int) -> frozenset[int]:
    """Layers whose activations a recipe's memory methods make again."""
    found: set[int] = set()
    for method in memory:
        if method.name == "activation_checkpointing" and method.mode != "none":
            found |= set(range(0, n_layers, method.n if method.mode == "every_n" else 1))
    return frozenset(found)


def layers(work: Work) -> list[Passes]:
    """Of each layer, in order."""
    found = []
    trained = [name for name in work.shapes if name not in work.frozen]
    below = "embed.weight" in trained
    for i in range(work.arch.n_layers):
        own = [name.removeprefix(f"blocks.{i}.") for name in trained if name.startswith(f"blocks.{i}.")]
        reached = below or any(name.startswith("attn_norm.") for name in own)
        q, k, v = (reached or any(n.startswith((f"attn.{x}.", f"attn.{x}_norm.")) for n in own) for x in "qkv")
        below = below or bool(own)
        found.append(Passes(1 + (below and i in work.recomputed), below, q, k, v))
    return found


def gathered_again(work: Work) -> list[bool]:
    """Of each layer, whether FSDP2 gathers it for the backward pass: where a gradient goes into it, and that below the
    last of these (or the last of all, below the root), which is prefetched."""
    backward = [one.backward for one in layers(work)]
    return [here or above for here, above in zip(backward, [*backward[1:], True], strict=True)]
