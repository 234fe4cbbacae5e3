"""Checkpoints: asynchronous, atomic, verified, resharding. See :mod:`.engine` for how a save goes."""

from trainwright.train.checkpoint.engine import Checkpointer, SaveStats
from trainwright.train.checkpoint.inspection import CheckpointInfo, inspect, read_tensors, read_weights, verify

__all__ = ["CheckpointInfo", "Checkpointer", "SaveStats", "inspect", "read_tensors", "read_weights", "verify"]
