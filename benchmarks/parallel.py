"""Figures of training on several processes: one run, one table a part.

    python benchmarks/parallel.py [--quick] [--only PART ...] [--json FILE]

A part is a module of this folder with ``run(quick) -> dict`` (plain JSON values) and ``table(result) -> str``
(Markdown); its docstring's first line says what it measures. New parts are entered in PARTS. Bytes and balance are
exact; times are ratios within one run, or simulated.
"""

from parts import main

PARTS = {
    "amsp": "parallel_amsp",
    "bytescale": "parallel_bytescale",
    "domino": "parallel_domino",
    "early_exit": "early_exit",
    "flashcp": "parallel_flashcp",
    "basp": "parallel_basp",
    "flexsp": "parallel_flexsp",
    "long": "parallel_long",
    "memory": "parallel_memory",
    "s2": "parallel_s2",
    "sppo": "parallel_sppo",
}

if __name__ == "__main__":
    main(__doc__, PARTS)
