"""What memory methods offer: they change how a model's activations live, in place."""

from __future__ import annotations

from abc import abstractmethod

from trainwright.core.registry import MethodConfig
from trainwright.models.base import LanguageModel


class MemoryConfig(MethodConfig):
    """Base of memory configs."""

    @abstractmethod
    def apply(self, model: LanguageModel) -> None:
        """Change ``model`` in place. Names of parameters stay as they are."""
