"""Judges and scorers for other processes, which must be able to import them."""

import os
import sys
from pathlib import Path

from trainwright.data.build.documents import Document
from trainwright.data.build.quality.judge import Judge, Judged


def length(texts):
    return [float(len(t)) for t in texts]


def broken(texts):
    return [0.0]


def main(cache, log, stop_after):
    """Rates 30 documents; every call leaves a line in ``log``, and after ``stop_after`` calls the process dies."""
    calls = 0

    def ask(prompt):
        nonlocal calls
        calls += 1
        if calls > stop_after:
            os._exit(9)
        with open(log, "a") as file:
            file.write(prompt.split("|")[1] + "\n")
        number = int(prompt.split("|")[1])
        return "I cannot tell." if number % 7 == 3 else f"Because. Score: {number % 6}"

    judge = Judge(ask, cache, "test", rubric="rate |{text}| please", retries=1)
    stage = Judged(judge)
    kept = list(stage.run([Document(str(i), str(i), "web") for i in range(30)]))
    Path(log + ".kept").write_text(repr([(d.id, d.metadata["edu_score"]) for d in kept]))
    print(stage.statistics.dropped, calls)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
