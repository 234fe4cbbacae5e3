"""PyX: Python code with a record of what running it does, and rows for training on both.

Paper: SemCoder, arXiv:2406.01006. seeds: functions from parsed sources; programs: small made ones; inputs: literal
arguments and their mutations; tracer: states line by line; monologues: what is said of them; rows: the kinds of rows;
builder: all of it in a row, with a filter by execution.
"""
