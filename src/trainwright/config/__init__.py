"""The recipe: what a run is made of."""

from trainwright.config.run_config import RunConfig

__all__ = ["RunConfig"]
