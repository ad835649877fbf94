"""Numbers that tune the search: they decide how long it takes, never what it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchParams:
    """Sizes of the search's steps, all at least 1."""

    first_batch: int = 128
    """Degrees expanded at once, at first; small, so that an incumbent is there early."""
    largest_batch: int = 4096
    """Degrees expanded at once, at most; batches double up to it."""
    priced_per_round: int = 8
    """Layouts priced exactly after a batch, or after a CP-SAT model."""
    bounded_together: int = 128
    """Layouts of the pool whose mappings are bounded in one array operation."""
    worthwhile: float = 0.995
    """Share of the last step time, 0 to 1: below it, pricing one more layout at once is worth while."""
    largest_master: int = 3000
    """(Layout, mapping) pairs in one CP-SAT model; those with larger bounds wait for a later round."""
    largest_cells: int = 2000
    """Counts of slots (leaf, stage) in one CP-SAT model; further mappings stand in it by their bounds."""
