"""Stages of Common Corpus (B098): text from scanners, pages, harm, corrections, code.

"Common Corpus: The Largest Collection of Ethical Data for LLM Pre-Training", arXiv:2506.01732. It publishes neither
code nor thresholds of its pipeline; what is a number here is ours and a setting.
"""
