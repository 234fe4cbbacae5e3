"""Which stage holds which layers, and which rank holds which stages."""

from __future__ import annotations

from trainwright.parallel.config import PipelineSection


def stage_layers(n_layers: int, stages: int, given: list[int] | None = None) -> list[range]:
    """Layers of each stage in order: as ``given``, else as even as they go.

    What is left over goes to the stages in the middle first, then to the first, which has the embedding too, and
    never to the last, which has the head.
    """
    if given is None:
        each, more = divmod(n_layers, stages)
        wanting = [*range(1, stages - 1), 0][:more]
        given = [each + (i in wanting) for i in range(stages)]
    starts = [sum(given[:i]) for i in range(stages)]
    return [range(start, start + n) for start, n in zip(starts, given, strict=True)]


def stage_ranks(pp: int, section: PipelineSection) -> list[int]:
    """The rank of each stage: round and round, and for zero_bubble there and back (a V)."""
    if section.schedule == "zero_bubble":
        return [*range(pp), *reversed(range(pp))]
    return [i % pp for i in range(pp * section.stages_per_rank)]
