"""Figures of the data room, on real text: one run, one table a part.

    python benchmarks/data.py [--quick] [--only PART ...] [--json FILE]

A part is a module of this folder with ``run(quick) -> dict`` (plain JSON values) and ``table(result) -> str``
(Markdown); its docstring's first line says what it measures. New parts are entered in PARTS.
"""

from parts import main

PARTS = {
    "batching": "data_batching",
    "dedup": "data_dedup",
    "loader": "data_loader",
    "tokenizing": "data_tokenizing",
}

if __name__ == "__main__":
    main(__doc__, PARTS)
