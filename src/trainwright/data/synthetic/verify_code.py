"""``verify_code``, a stage of corpora: solutions of programming problems, kept by how many tests they pass.

A document's text is one solution (a program, or a model's answer with fenced blocks); its metadata names the problem
and holds the tests: ``{"text": "def f...", "problem": "p1", "tests": ["assert f(1) == 2", ...], "gold": true}``.
Solutions of one problem stand together in the input. See verification.py for the rules and the paper.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainwright.core.errors import ConfigError, DataError
from trainwright.core.sandbox import Limits, Sandbox
from trainwright.data.build.documents import Document
from trainwright.data.build.seen import SeenHashes
from trainwright.data.build.statistics import Drop, Statistics
from trainwright.data.synthetic import verification
from trainwright.data.synthetic.diversity import Kind, choose_diverse
from trainwright.data.synthetic.suites import code_of, split_tests
from trainwright.data.synthetic.verification_report import write_report
from trainwright.data.synthetic.verifier import Cache, Outcomes, Problem, Verifier

log = logging.getLogger("trainwright")
Judge = Callable[[str, str], float]  # (the problem's text, a solution) to a score in [0, 1]
TOGETHER = 16  # problems whose pairs go through the workers at once
MOST_SOLUTIONS = 2000  # of one problem


class VerifyCode:
    """Keep solutions that run and pass at least the share ``tau`` of their problem's tests.

    tau_low, judge, least_judge: soft verification; ``judge`` is a callable or ``module:function``, asked only about
    solutions between tau_low and tau. judge_key: metadata that holds its score already. max_tests: tests used of each
    problem. drop_useless: leave out tests that every solution passes, or none. keep_each: most solutions of a problem,
    the least alike by ``diversity``. twice: run each pair twice and leave out what differs. mutation: mutants a problem
    for its mutation score (0: none). cache: a file. report: a folder for verification.html and verification.json.
    test_error: rate at which tests are wrong, for the estimate of what is rejected falsely; None: that of gold rows.
    ``workers`` of ``run`` programs are run at once. Serial in its documents; holds 16 problems.
    """

    name = "verify_code"

    def __init__(
        self,
        tau: float = 1.0,
        *,
        tau_low: float | None = None,
        judge: Judge | str | None = None,
        judge_key: str | None = None,
        least_judge: float = 0.5,
        max_tests: int | None = None,
        drop_useless: bool = False,
        keep_each: int | None = None,
        diversity: Kind = "ast",
        twice: bool = True,
        check_state: bool = True,
        mutation: int = 0,
        test_error: float | None = None,
        seed: int = 0,
        problem_key: str = "problem",
        tests_key: str = "tests",
        prompt_key: str = "prompt",
        entry_key: str = "entry_point",
        gold_key: str = "gold",
        cpu_seconds: float = 5.0,
        wall_seconds: float = 30.0,
        memory_mib: int = 512,
        isolation: Literal["kernel", "audit", "none"] = "kernel",
        allow_unsandboxed: bool = False,
        cache: str | Path | None = None,
        report: str | Path | None = None,
    ):
        self.tau = verification.check_share(tau, "tau")
        if tau_low is not None and verification.check_share(tau_low, "tau_low") > tau:
            raise ConfigError(f"should be at most tau={tau:g}", key="tau_low", value=tau_low)
        if tau_low is not None and judge is None and judge_key is None:
            raise ConfigError("needs judge or judge_key: a judge speaks for what lies below tau", key="tau_low")
        if tau_low is None and (judge is not None or judge_key is not None):
            raise ConfigError("is asked only about solutions above tau_low; give tau_low", key="judge")
        for key, value in (("max_tests", max_tests), ("keep_each", keep_each)):
            if value is not None and value < 1:
                raise ConfigError("should be at least 1", key=key, value=value)
        if diversity not in ("ast", "token"):
            raise ConfigError("should be ast or token", key="diversity", value=diversity)
        if mutation < 0:
            raise ConfigError("should be at least 0", key="mutation", value=mutation)
        if test_error is not None:
            verification.check_share(test_error, "test_error")
        self.limits = Limits(wall_seconds, cpu_seconds, memory_mib << 20)
        Sandbox(limits=self.limits, isolation=isolation, allow_unsandboxed=allow_unsandboxed).close()  # refuses early
        self.tau_low, self.least_judge = tau_low, least_judge
        self.judge = _named(judge) if isinstance(judge, str) else judge
        self.judge_key, self.max_tests, self.drop_useless = judge_key, max_tests, drop_useless
        self.keep_each, self.diversity, self.twice, self.check_state = keep_each, diversity, twice, check_state
        self.mutation, self.test_error, self.seed = mutation, test_error, seed
        self.problem_key, self.tests_key, self.prompt_key = problem_key, tests_key, prompt_key
        self.entry_key, self.gold_key = entry_key, gold_key
        self.isolation, self.allow_unsandboxed, self.cache, self.report = isolation, allow_unsandboxed, cache, report
        self.statistics = Statistics(self.name)
        self._seen: dict[str, list[Any]] = {"rate": [], "tests": [], "gold": []}
        self._spread: list[float] = []
        self._mutation: list[float] = []
        self._statuses: Counter[str] = Counter()
        self._gold_runs = self._gold_fails = 0

    # -- the stage ----------------------------------------------------------------------------------------------

    def run(self, documents: Iterable[Document], workers: int = 0) -> Iterator[Document]:
        workers = workers or min(os.cpu_count() or 1, 8)
        cache = Cache(self.cache)
        try:
            with Sandbox(
                workers, self.limits, isolation=self.isolation, allow_unsandboxed=self.allow_unsandboxed
            ) as sandbox:
                self.statistics.figures["sandbox"] = sandbox.guarantees()
                verifier = Verifier(sandbox, cache, twice=self.twice, check_state=self.check_state)
                groups = self._groups(documents)
                while batch := list(itertools.islice(groups, TOGETHER)):
                    yield from self._batch(batch, verifier)
        finally:
            cache.close()
        self._finish(cache)

    def _groups(self, documents: Iterable[Document]) -> Iterator[list[Document]]:
        past = SeenHashes()
        for problem, group in itertools.groupby(documents, self._problem):
            found = list(itertools.islice(group, MOST_SOLUTIONS + 1))
            if not past.add(problem):
                raise DataError(
                    f"verify_code: solutions of the problem {problem!r} stand apart in the input (again at document "
                    f"{found[0].id}); sort it by {self.problem_key}, for its solutions are judged together"
                )
            if len(found) > MOST_SOLUTIONS:
                raise DataError(f"verify_code: the problem {problem!r} has more than {MOST_SOLUTIONS} solutions")
            yield found

    def _problem(self, document: Document) -> str:
        value = document.metadata.get(self.problem_key)
        return f"document {document.id}" if value is None else str(value)

    def _batch(self, groups: list[list[Document]], verifier: Verifier) -> Iterator[Document]:
        problems: list[Problem | Drop] = [self._read(g) for g in groups]
        whole = [p for p in problems if isinstance(p, Problem)]
        outcomes = iter(verifier.outcomes(whole))
        for group, problem in zip(groups, problems, strict=True):
            answers: list[Document | Drop]
            if isinstance(problem, Drop):
                answers = [problem] * len(group)
                self.statistics.counts[f"problems: {problem.reason}"] += 1
            else:
                answers = self._judge(group, problem, next(outcomes), verifier)
            for document, answer in zip(group, answers, strict=True):
                self.statistics.see(document.text)
                if isinstance(answer, Drop):
                    self.statistics.drop(document, answer)
                else:
                    self.statistics.keep(answer)
                    yield answer

    def _read(self, group: list[Document]) -> Problem | Drop:
        first = group[0].metadata
        suite = first.get(self.tests_key)
        if any(d.metadata.get(self.tests_key) != suite for d in group):
            raise DataError(
                f"verify_code: documents of the problem {self._problem(group[0])!r} come with different "
                f"{self.tests_key}; give all of them the same"
            )
        if not suite:
            return Drop("no tests")
        if not isinstance(suite, str | list) or not all(isinstance(t, str) for t in suite):
            raise DataError(f"verify_code: {group[0].id}: {self.tests_key} should be a text or a list of texts")
        try:
            tests = list(dict.fromkeys(split_tests(suite, first.get(self.entry_key))))
        except DataError as error:
            return Drop("tests cannot be used", str(error))
        if not tests:
            return Drop("no tests")
        tests = [tests[i] for i in verification.subsample(tests, self.max_tests, self.seed)]
        prompt = str(first.get(self.prompt_key, ""))
        return Problem(self._problem(group[0]), [code_of(d.text) for d in group], tests, prompt)

    def _judge(
        self, group: list[Document], problem: Problem, found: Outcomes, verifier: Verifier
    ) -> list[Document | Drop]:
        counts = self.statistics.counts
        self._statuses.update(found.statuses)
        counts["problems"] += 1
        counts["tests"] += len(problem.tests)
        counts["flaky tests"] += int(found.flaky.sum())
        counts["tests that share state"] += int(found.sharing.sum())
        candidates = found.runs & ~found.unstable
        use = found.usable
        if self.drop_useless:
            # By the solutions that run: what cannot run says nothing of a test.
            idle = np.zeros(len(use), bool)
            if candidates.any():
                idle = verification.useless(found.passes[candidates]) & use
            counts["useless tests"] += int(idle.sum())
            use = use & ~idle
        answers: list[Document | Drop] = [
            Drop("does not run") if not runs else Drop("answers differ between runs") if odd else Drop("below tau")
            for runs, odd in zip(found.runs, found.unstable, strict=True)
        ]
        if not use.any():
            counts["problems: no usable test"] += 1
            return [Drop("no usable test") if a == Drop("below tau") else a for a in answers]
        passes = found.passes[:, use]
        rates = verification.pass_rates(passes)
        self._spread += verification.discrimination(passes[candidates]).tolist()
        judged = self._judged(group, problem, rates, candidates)
        low = self.tau if self.tau_low is None else self.tau_low
        stay = verification.soft_kept(
            passes, judged, tau=self.tau, tau_low=low, least=self.least_judge, runs=candidates
        )  # fmt: skip
        self._remember(group, rates, passes, candidates)
        self._mutants(problem, passes, use, candidates, verifier)
        chosen = np.flatnonzero(stay).tolist()
        if self.keep_each is not None:
            chosen = [
                chosen[i]
                for i in choose_diverse([problem.solutions[i] for i in chosen], self.keep_each, self.diversity)
            ]
        for s, document in enumerate(group):
            if s in chosen:
                note = {"pass_rate": float(rates[s]), "tests": int(use.sum())}
                if not math.isnan(judged[s]):
                    note["judge"] = float(judged[s])
                answers[s] = document.with_metadata(verification=note)
            elif stay[s]:
                answers[s] = Drop("more alike than others")
            elif candidates[s]:
                answers[s] = Drop("below tau", f"passes {int(passes[s].sum())} of {passes.shape[1]} tests")
        return answers

    def _judged(self, group: list[Document], problem: Problem, rates: Any, candidates: Any) -> Any:
        """Scores of those that lie between tau_low and tau; NaN of others."""
        scores = np.full(len(group), math.nan)
        if self.tau_low is None:
            return scores
        for s, document in enumerate(group):
            if not candidates[s] or rates[s] >= self.tau or rates[s] < self.tau_low:
                continue
            value: Any = document.metadata.get(self.judge_key) if self.judge_key else None
            if self.judge is not None:
                value = self.judge(problem.prompt, problem.solutions[s])
            try:
                scores[s] = math.nan if value is None else float(value)
            except (TypeError, ValueError):
                raise DataError(f"verify_code: {document.id}: the judge's score {value!r} is no number") from None
            self.statistics.counts["judged"] += 1
        return scores

    def _remember(self, group: list[Document], rates: Any, passes: Any, candidates: Any) -> None:
        for s, document in enumerate(group):
            label = document.metadata.get(self.gold_key)
            gold = None if label is None else bool(label)
            if gold and candidates[s]:
                self._gold_runs += passes.shape[1]
                self._gold_fails += int((~passes[s]).sum())
            # What is right but does not run counts against the recall: at no tau is it kept.
            self._seen["rate"].append(float(rates[s]) if candidates[s] else -1.0)
            self._seen["tests"].append(passes.shape[1])
            self._seen["gold"].append(gold)

    def _mutants(self, problem: Problem, passes: Any, use: Any, candidates: Any, verifier: Verifier) -> None:
        whole = np.flatnonzero(candidates & passes.all(1))
        if not self.mutation or not len(whole):
            return
        tests = [t for t, used in zip(problem.tests, use, strict=True) if used]
        score = verifier.mutation_score(problem.solutions[int(whole[0])], tests, self.mutation, self.seed)
        if score is not None:
            self._mutation.append(score)

    def _finish(self, cache: Cache) -> None:
        seen = self._seen
        rows = verification.sweep(seen["rate"], seen["tests"], seen["gold"]) if seen["rate"] else []
        labelled = sum(g is not None for g in seen["gold"])
        error = self.test_error
        if error is None and self._gold_runs:
            error = self._gold_fails / self._gold_runs
        usual = round(float(np.mean(seen["tests"]))) if seen["tests"] else 0
        figures = self.statistics.figures
        figures |= {
            "tau": self.tau,
            "sweep": rows,
            "statuses": dict(sorted(self._statuses.items())),
            "mean_discrimination": float(np.mean(self._spread)) if self._spread else None,
            "mutation_score": float(np.mean(self._mutation)) if self._mutation else None,
            "gold_labelled": labelled,
            "test_error": error,
            "false_reject": None if error is None or not usual else verification.false_reject(error, usual, self.tau),
            "tests_per_solution": usual,
            "cache_hits": cache.hits,
        }
        relaxed = self.tau < 1.0 or self.tau_low is not None
        if relaxed and not labelled:
            log.warning(
                "verify_code: tau is below 1 and no document has a gold label (%s), so nothing tells how much wrong "
                "code comes in with it; label some and look at the precision in the report",
                self.gold_key,
            )
        if relaxed and usual < 5:
            log.warning("verify_code: %d tests a solution are few for a tau below 1", usual)
        if self.report is not None:
            write_report({**self.statistics.to_json(), "samples": {}}, Path(self.report))


def _named(name: str) -> Judge:
    """The function that ``module:function`` names."""
    module, colon, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function) if colon and function else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot be imported ({error})", key="judge", value=name) from None
    if not callable(found):
        raise ConfigError("should be a callable, or module:function", key="judge", value=name)
    return found  # type: ignore[no-any-return]
