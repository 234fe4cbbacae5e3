"""ODB, online dynamic batching: micro-batches of a token budget, grouped by true length when the rows are at hand.

Rows hold one document each (a longer one goes on in rows of its own), so attention, positions and labels are those of
the document alone. The rows of a step are sorted by length and grouped so that rows times longest row stays within the
budget of a micro-batch (train.micro_batch_size rows of seq_len), and each group is trimmed to its longest row: a step
costs the tokens that it has and not rows times seq_len. Ranks agree on the number of groups, so they take the same
number of micro-steps; a rank with too few splits some, and the gradient is the same whatever the grouping, since it is
divided by the weight of the global batch.
Online Dynamic Batching, the method's card A13; OnlineDynamicBatches (data/odb.py) is the form for any DataLoader, with
the window, the alignment by rounds and both modes of termination.

Where it differs: the window is the step's own rows, which the loader has drawn already, so every sample comes once an
epoch, a step has the same rows as with ``padded``, and a run resumes as with any other batcher.
"""

from __future__ import annotations

from typing import ClassVar

from trainwright.core.registry import register
from trainwright.data.batchers.padded import PaddedConfig


@register("batcher", "odb", seed_id="A13")
class ODBConfig(PaddedConfig):
    """One document a row, grouped by true length into micro-batches of a token budget (online dynamic batching)."""

    regroups: ClassVar[bool] = True
