"""Synthetic data: code that is verified by running it, and records of what running it does."""
