"""Probes: pure functions that read figures off weights, runs and checkpoints."""
