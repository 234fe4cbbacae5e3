"""Weighters: how much each row of a step counts, by its loss. A file a method."""
