"""Solutions run against tests: each pair in a process of its own, twice, each answer kept by a hash of the pair.

What a test compares with a literal is compared outside of that process, see outside.py.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainwright.core.errors import DataError
from trainwright.core.sandbox import Limits, Result, Sandbox
from trainwright.data.synthetic.mutants import mutants
from trainwright.data.synthetic.outside import passed, program
from trainwright.data.synthetic.verification import Bools, blame

FORMAT = 2  # changes when the same pair would be judged otherwise
LIMITS = Limits(wall_seconds=30.0, cpu_seconds=5.0)


@dataclass
class Problem:
    """Solutions of one problem and its tests, each test statements that stand alone."""

    id: str
    solutions: list[str]
    tests: list[str]
    prompt: str = ""


@dataclass
class Outcomes:
    """What running them showed. A pair passes only if both of its runs do.

    runs [S]: the solution alone runs to its end. passes [S, T]. unstable [S]: differs between two runs. flaky [T]:
    tests that do; sharing [T]: tests whose answer depends on the tests before them. Both are of no use.
    """

    runs: Bools
    passes: Bools
    unstable: Bools
    flaky: Bools
    sharing: Bools
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> Bools:
        return ~(self.flaky | self.sharing)


class Cache:
    """Answers of pairs by their hash, in memory and in a SQLite file where one is named. Threads may share it."""

    def __init__(self, path: str | Path | None = None):
        self._lock = threading.Lock()
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = sqlite3.connect(str(path or ":memory:"), timeout=60, check_same_thread=False)
            self._file.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, status TEXT, passed INTEGER)")
            self._file.commit()
        except sqlite3.Error as error:
            raise DataError(f"{path}: cannot be used as a cache ({error}); name another file") from None
        self.hits = 0

    def get(self, key: str) -> tuple[str, bool] | None:
        with self._lock:
            row = self._file.execute("SELECT status, passed FROM answers WHERE key = ?", (key,)).fetchone()
            self.hits += row is not None
        return None if row is None else (row[0], bool(row[1]))

    def put(self, key: str, status: str, passed: bool) -> None:
        with self._lock:
            self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, status, int(passed)))
            self._file.commit()

    def close(self) -> None:
        self._file.close()


class Verifier:
    """Runs problems through a sandbox.

    twice: each pair a second time, in a worker with other hashes, to find what is flaky. check_state: run the suite of
    each problem once in a row in one process, to find tests that share state.
    """

    def __init__(
        self, sandbox: Sandbox, cache: Cache | None = None, *, twice: bool = True, check_state: bool = True
    ):  # fmt: skip
        self.sandbox, self.cache, self.twice, self.check_state = sandbox, cache or Cache(), twice, check_state

    def key(self, code: str, test: str) -> str:
        """The hash that a pair's answer is kept by: of code, test and what else the answer depends on."""
        limits = self.sandbox.limits
        around = [
            FORMAT, sys.version_info[:2], limits.cpu_seconds, limits.wall_seconds, limits.memory_bytes,
            limits.output_bytes, self.sandbox.isolation, self.sandbox.hash_seed, self.twice, self.sandbox.paths,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps([around, code, test]).encode()).hexdigest()

    def run_pairs(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, bool]]:
        """(code, test) -> (status, passed); an empty test asks whether the code alone runs. Each pair is run once.

        The status is ``flaky`` where two runs differ. What timed out failed. What was stopped by the wall clock, which
        a busy machine may be to blame for, is not kept in the cache.
        """
        found: dict[tuple[str, str], tuple[str, bool]] = {}
        todo: list[tuple[str, str]] = []
        for pair in dict.fromkeys(pairs):
            known = self.cache.get(self.key(*pair))
            if known is None:
                todo.append(pair)
            else:
                found[pair] = known
        programs = (program(code, (test,) if test else ()) for code, test in todo)
        for pair, result in zip(todo, self.sandbox.map(programs, twice=self.twice), strict=True):
            both: tuple[Result, ...] = result if self.twice else (result,)
            right = [all(passed(r, pair[1:])) if pair[1] else r.ok for r in both]
            status: str = both[0].status if all(p == right[0] for p in right) else "flaky"
            if status == "ok" and not right[0]:
                status = "failed"
            found[pair] = (status, all(right))
            if not any(r.status in ("timeout", "lost") for r in both):
                self.cache.put(self.key(*pair), *found[pair])
        return found

    def outcomes(self, problems: Sequence[Problem]) -> list[Outcomes]:
        """One per problem. The pairs of all of them go through the workers together."""
        alone = self.run_pairs([(code, "") for p in problems for code in p.solutions])
        pairs = [
            (code, test) for p in problems for code in p.solutions if alone[code, ""][1] for test in p.tests
        ]  # fmt: skip
        answers = self.run_pairs(pairs)
        out = []
        for p in problems:
            runs = np.array([alone[c, ""][1] for c in p.solutions], bool)
            unstable = np.array([alone[c, ""][0] == "flaky" for c in p.solutions], bool)
            shape = (len(p.solutions), len(p.tests))
            passes, differs = np.zeros(shape, bool), np.zeros(shape, bool)
            statuses: Counter[str] = Counter()
            for s, code in enumerate(p.solutions):
                if not runs[s]:
                    statuses[f"does not run: {alone[code, ''][0]}"] += 1
                    continue
                for t, test in enumerate(p.tests):
                    status, passes[s, t] = answers[code, test]
                    differs[s, t] = status == "flaky"
                    statuses[status] += 1
            more, flaky = blame(differs)
            found = Outcomes(runs, passes, unstable | more, flaky, np.zeros(len(p.tests), bool), statuses)
            out.append(found)
        if self.check_state:
            self._find_sharing(problems, out)
        return out

    def _find_sharing(self, problems: Sequence[Problem], outcomes: Sequence[Outcomes]) -> None:
        """Run each suite in a row with its best solution: a test that answers otherwise than alone shares state."""
        chosen = [
            (p, o, int((o.passes & ~o.flaky).sum(1).argmax()))
            for p, o in zip(problems, outcomes, strict=True)
            if len(p.tests) > 1 and (o.runs & ~o.unstable).any()
        ]
        programs = [program(p.solutions[s], p.tests) for p, _, s in chosen]
        for (p, o, s), result in zip(chosen, self.sandbox.map(programs), strict=True):
            if result.ok and len(result.tests) == len(o.sharing):
                together = np.array(passed(result, p.tests), bool)
                o.sharing[:] = (together != o.passes[s]) & ~o.flaky

    def mutation_score(self, code: str, tests: Sequence[str], most: int | None = 30, seed: int = 0) -> float | None:
        """Share of the faults put into ``code`` that at least one test notices; None where there are no mutants.

        Raises DataError where the code itself fails a test: then nothing could be said of its mutants.
        """
        if not tests:
            raise DataError("the suite has no tests, and no test notices nothing")
        own = self.run_pairs([(code, t) for t in tests])
        if not all(passed for _, passed in own.values()):
            raise DataError("the program fails a test of the suite; give one that passes all")
        made = mutants(code, most, seed)
        answers = self.run_pairs([(m, t) for m in made for t in tests])
        killed = sum(any(not answers[m, t][1] for t in tests) for m in made)
        return killed / len(made) if made else None
