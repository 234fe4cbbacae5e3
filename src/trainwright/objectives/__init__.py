"""Losses: what a training step minimises. Each works on a model and a packed Batch; the fused loss is their brick."""

from trainwright.objectives.base import Loss, Objective, ObjectiveConfig
from trainwright.objectives.linear_cross_entropy import linear_cross_entropy
from trainwright.objectives.next_token import NextToken, NextTokenConfig

__all__ = ["Loss", "NextToken", "NextTokenConfig", "Objective", "ObjectiveConfig", "linear_cross_entropy"]
