"""Static mixing: the sources' weights throughout. Training is that of a recipe without a mixer, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainwright.core.registry import register
from trainwright.data.mixers.base import MixContext, MixerConfig, MixStats, check_names, normalised
from trainwright.data.mixture import Segment


class StaticMixer:
    """The same ``proportions`` whatever the losses."""

    plan: Sequence[Segment] | None = None

    def __init__(self, proportions: Mapping[str, float]):
        self.names, self.proportions = check_names(list(proportions)), normalised(proportions)

    def mix(self, stats: MixStats) -> dict[str, float]:
        return dict(self.proportions)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@register("mixer", "static", seed_id="B046")
class StaticMixerConfig(MixerConfig):
    """The sources' weights throughout, or natural sizes where they have none."""

    changes: ClassVar[bool] = False

    def build(self, context: MixContext) -> StaticMixer:
        return StaticMixer(context.proportions)
