"""The best split by pipeline seconds alone, for tests."""

from __future__ import annotations

from meshwright.planner.bounds.layer_split import FitsRank, Split, SplitCosts, frontier


def best_split(costs: SplitCosts, fits: FitsRank | None = None) -> Split | None:
    """The split with the least pipeline seconds, or None where no split fits."""
    return min(frontier(costs, 0.0, fits), key=lambda split: split.time_s, default=None)
