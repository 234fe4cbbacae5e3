"""What methods of the data room do to a model: small trainings beside their baselines, on real text.

    python benchmarks/effects.py [--quick] [--only PART ...] [--json FILE] [--record FILE]

Each part takes minutes to an hour of one core; results are kept in results/effects.md. A part is a module of this
folder with ``run(quick) -> dict`` (plain JSON values) and ``table(result) -> str`` (Markdown); its docstring's first
line says what it measures.
"""

from parts import main

PARTS = {
    "decomposition": "effect_decomposition",
    "metadata": "effect_metadata",
    "noise": "effect_noise",
    "ocr": "effect_ocr",
    "panda": "effect_panda",
    "panda_study": "effect_panda_study",
    "pyx": "effect_pyx",
    "quality": "effect_quality",
    "salt": "effect_salt",
    "splice": "effect_splice",
    "tint": "effect_tint",
    "trec": "effect_trec",
}

if __name__ == "__main__":
    main(__doc__, PARTS)
