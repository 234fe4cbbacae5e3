"""Selectors: which rows of a pool are trained on until the next selection. A file a method."""
