"""Mixers: which share of the rows each source gives, by step or by what was measured. A file a method."""
