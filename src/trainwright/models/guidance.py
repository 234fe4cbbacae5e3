"""Guided sampling: from what a model says without a context towards what it says with one, and beyond.

    logits = l_empty + gamma * (l_context - l_empty)     [B, V]      gamma 0: free, 1: conditioned, above 1: stronger

that is p(x | empty) * (p(x | context) / p(x | empty))^gamma, normalised. Two passes a token, each with a key-value
cache of its own. For models trained with ``data.metadata`` on documents with and without a context.

URLs Help, Topics Guide, arXiv:2505.16570, after classifier-free guidance, arXiv:2207.12598.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from trainwright.core.errors import ConfigError
from trainwright.data.context_tokens import context_tokens
from trainwright.data.metadata import MetadataConfig, clean_url, domain
from trainwright.data.tokenizers.base import Tokenizer

GUIDANCE = 1.5


def guided_logits(free: Tensor, conditioned: Tensor, guidance: float) -> Tensor:
    """``free + guidance * (conditioned - free)``; at 0 and 1 the tensors themselves."""
    if guidance == 0:
        return free
    if guidance == 1:
        return conditioned
    return free + guidance * (conditioned - free)


def check_guidance(guidance: float) -> float:
    """Raises ConfigError for a guidance that is negative or not finite."""
    if not (math.isfinite(guidance) and guidance >= 0):
        raise ConfigError("should be 0 (free of context) or more", key="guidance", value=guidance)
    return guidance


@dataclass(frozen=True)
class Context:
    """A context for generation, as a model was trained on it.

    text      what stands between the marks: a URL, a domain, or with several kinds their lines (``url: ...``)
    guidance  gamma
    config    how the model was trained; its marks, ``empty`` form and ``max_tokens`` are read
    """

    text: str
    guidance: float = GUIDANCE
    config: MetadataConfig = field(default_factory=MetadataConfig)

    def prompts(self, tokenizer: Tokenizer, prompt: str) -> tuple[list[int], list[int]]:
        """Ids of ``prompt`` behind the context and free of it. Neither begins with BOS: no document does.

        Raises ConfigError for a tokenizer without the marks, a model that was trained to write contexts, and a text of
        which nothing is left.
        """
        check_guidance(self.guidance)
        if self.config.position == "append":
            raise ConfigError(
                "the model was trained with contexts behind documents, which cannot be given", key="context"
            )
        marks = context_tokens(tokenizer, self.config.tokens)
        inner = tokenizer.encode(self._clean())[: self.config.max_tokens]
        if not inner:
            raise ConfigError("holds no text; give one, or leave it out", key="context", value=self.text)
        ids = tokenizer.encode(prompt)
        bare = [marks.boc, marks.eoc] if self.config.empty == "markers" else []
        return [marks.boc, *inner, marks.eoc, *ids], [*bare, *ids] or [tokenizer.eos_id]

    def _clean(self) -> str:
        """URLs as the training saw them."""
        if self.config.kinds == ["url"]:
            return clean_url(self.text) or self.text.strip()
        if self.config.kinds == ["domain"]:
            return domain(self.text) or self.text.strip()
        return self.text.strip()
