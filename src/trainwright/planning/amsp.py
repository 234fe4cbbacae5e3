"""AMSP's planner: of all chains of sharding factors that fit into memory, the one whose transfers delay a step least.

With F parameters on N ranks and the chain s_p | s_g | s_o | N, a rank holds

    2 F / s_p + 2 F / s_g + 12 F / s_o      bytes of parameters, gradients and states (16-bit, master and two moments)

and sends, by ring algorithms over neighbouring ranks,

    each micro-step  2 F (s_p - 1) / s_p    parameters, in the forward pass and once more in the backward pass
                     2 F (s_g - 1) / s_g    gradients, reduce_scatter
    each step        2 F / s_g (b - 1) / b  the gradient shard, reduce_scatter over b = s_o / s_g ranks
                     4 F / s_o (n - 1) / n  and all_reduce over n = N / s_o ranks
                     2 F / s_p (q - 1) / q  updated values, all_gather over q = s_o / s_p ranks

Each takes its bytes over the bandwidth of the slowest link that its group spans, and the latency of that link for each
of its group's other members and each layer. What a pass computes hides as much of it: updated values and parameters in
the forward pass, the rest in the backward pass (two thirds of a micro-step). What is left is exposed. Of chains that
are exposed alike the one that holds less is taken.

After AMSP (arXiv:2311.00257); the public code has no search, this one is reconstructed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainwright.parallel.amsp.chain import Chain, chains


@dataclass(frozen=True)
class Hop:
    """A link as one rank sees it."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What is trained where. Sizes are bytes of a parameter; ``compute_s`` seconds of a micro-step's computing."""

    parameters: float
    ranks: int
    ranks_per_node: int = 8
    inside: Hop = field(default_factory=lambda: Hop(150e9))
    between: Hop = field(default_factory=lambda: Hop(25e9))
    micro_steps: int = 1
    layers: int = 1  # that are sent one by one
    compute_s: float = 0.0
    memory: float = float("inf")  # bytes for parameters, gradients and states
    parameter_size: float = 2
    gradient_size: float = 2
    state_size: float = 12


@dataclass(frozen=True)
class Term:
    """One kind of transfer: bytes that a rank sends each time, over groups of ``ranks`` in blocks of ``block``."""

    what: str
    bytes: float
    ranks: int
    block: int  # neighbours within which the groups lie
    stride: int  # between members of a group
    times: int
    forward: bool  # in that pass, else in the backward pass


@dataclass(frozen=True)
class Plan:
    """A chain with what it costs: bytes held, seconds exposed and under way a step, bytes that leave a node a step."""

    chain: Chain
    bytes: float
    exposed_s: float
    seconds: float
    leaving: float

    @property
    def rank(self) -> tuple[float, float, Chain]:
        # Sums of the same times in another order differ in the last digits, and are a tie.
        return (float(f"{self.exposed_s:.9g}"), self.bytes, self.chain)


class NothingFits(ValueError):
    """No chain fits: ``closest`` is the one that holds least, ``shortfall`` the bytes that it lacks."""

    def __init__(self, problem: Problem, closest: Plan):
        self.closest, self.shortfall = closest, closest.bytes - problem.memory
        super().__init__(
            f"no chain of sharding factors fits: of {problem.memory / 2**30:,.2f} GiB the closest one, "
            f"{closest.chain}, needs {closest.bytes / 2**30:,.2f} GiB a rank, {self.shortfall / 2**30:,.2f} GiB too "
            "many; use more ranks, a smaller model or more memory"
        )


def state_bytes(problem: Problem, chain: Chain) -> float:
    """Bytes of parameters, gradients and states on a rank."""
    return problem.parameters * (
        problem.parameter_size / chain.parameters
        + problem.gradient_size / chain.gradients
        + problem.state_size / chain.states
    )


def terms(problem: Problem, chain: Chain) -> Iterator[Term]:
    """The transfers of a step."""
    p, g, o, n = chain.parameters, chain.gradients, chain.states, problem.ranks
    weights, grads = problem.parameters * problem.parameter_size, problem.parameters * problem.gradient_size
    m = problem.micro_steps
    yield Term("parameters", _part(weights, p), p, p, 1, m, True)
    yield Term("parameters again", _part(weights, p), p, p, 1, m, False)
    yield Term("gradients", _part(grads, g), g, g, 1, m, False)
    yield Term("gradient shards", _part(grads / g, o // g), o // g, o, g, 1, False)
    yield Term("replicas", 2 * _part(grads / o, n // o), n // o, n, o, 1, False)
    yield Term("updated values", _part(weights / p, o // p), o // p, o, p, 1, True)


def cost(problem: Problem, chain: Chain) -> Plan:
    """What ``chain`` costs. Raises ValueError where it is not legal on so many ranks."""
    chain.check(problem.ranks)
    every = {True: 0.0, False: 0.0}  # seconds in each micro-step, by pass
    once = {True: 0.0, False: 0.0}
    leaving = 0.0
    for term in terms(problem, chain):
        if term.ranks == 1:
            continue
        within = _within_node(term.block, problem)
        hop = problem.inside if within else problem.between
        messages = (2 if term.what == "replicas" else 1) * (term.ranks - 1) * problem.layers
        seconds = term.bytes / hop.bytes_per_s + messages * hop.latency_s
        if term.times == problem.micro_steps and term.what in ("parameters", "parameters again", "gradients"):
            every[term.forward] += seconds
        else:
            once[term.forward] += seconds
        if not within:
            leaving += term.times * term.bytes * _rings(term, problem)
    exposed = 0.0
    for forward, share in ((True, 1 / 3), (False, 2 / 3)):
        hidden = problem.compute_s * share
        exposed += max(0.0, every[forward] - hidden) * (problem.micro_steps - 1)
        exposed += max(0.0, every[forward] + once[forward] - hidden)
    seconds = sum(every.values()) * problem.micro_steps + sum(once.values())
    return Plan(chain, state_bytes(problem, chain), exposed, seconds, leaving)


def plan(problem: Problem) -> Plan:
    """The chain that fits and is exposed least; of equal ones that which holds less. Raises NothingFits."""
    every = [cost(problem, chain) for chain in chains(problem.ranks)]
    fitting = [found for found in every if found.bytes <= problem.memory]
    if not fitting:
        raise NothingFits(problem, min(every, key=lambda found: (found.bytes, found.rank)))
    return min(fitting, key=lambda found: found.rank)


def _part(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def _within_node(block: int, problem: Problem) -> bool:
    """Whether blocks of so many neighbours, one behind the other, never cross the border of a node."""
    return problem.ranks <= problem.ranks_per_node or problem.ranks_per_node % block == 0


def _rings(term: Term, problem: Problem) -> float:
    """Rings that leave a node through one of its ranks each."""
    here = max(1.0, min(term.block, problem.ranks_per_node) / term.stride)  # members of a group in a node
    return problem.ranks_per_node / here
