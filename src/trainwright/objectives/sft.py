"""Supervised fine-tuning: next-token cross-entropy on the answers, which the weights of the batch single out.

The function is that of next_token. What this name adds is that a recipe without data that says what the answers are
is refused: it would train on the questions too.
"""

from __future__ import annotations

from trainwright.core.registry import register
from trainwright.objectives.next_token import NextTokenConfig


@register(
    "objective",
    "sft",
    requires={
        "source.chat|source.panda_llm|source.tint|source.pyx": "fine-tuning needs data that tells answers from "
        "questions; add a source of name chat, or set objective=next_token to train on every token"
    },
)
class SftConfig(NextTokenConfig):
    """Next-token cross-entropy on the answers of chat or instruction data; refuses data without a loss mask."""
