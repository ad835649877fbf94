"""Numbers that tune the search: they decide how long it takes, never what it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchParams:
    """Sizes of the search's steps, all at least 1."""

    first_batch: int = 128
    """Degrees of an execution expanded at once, at first; small, so that an incumbent is there early."""
    largest_batch: int = 4096
    """Degrees expanded at once, at most; batches grow fourfold up to it."""
    priced_per_round: int = 8
    """Layouts priced exactly after a batch, or after a CP-SAT model."""
    most_priced_beside: int = 63
    """Layouts priced beside the one that a CP-SAT model chose, where its choices bring nothing for long."""
    most_in_vain: int = 4
    """Prices in a row that bring nothing before more degrees are expanded."""
    bounded_together: int = 2048
    """Layouts of the pool whose mappings are bounded in one go, over all executions."""
    first_together: int = 256
    """The same on irregular allocations before there is a price: counting their mappings takes longer."""
    promising: float = 0.97
    """Share of the last step time, 0 to 1: with a bound below it, prices come before more degrees."""
    worthwhile: float = 0.995
    """Share of the last step time, 0 to 1: below it, pricing one more layout at once is worth while."""
    largest_master: int = 3000
    """Combinations in one CP-SAT model; those with larger bounds wait for a later round."""
    first_candidates: int = 16
    """Layouts that enter the CP-SAT model at once while better plans are still found."""
    candidates_per_round: int = 128
    """The same once all layouts are known."""
    work: float = 4.0
    """Of one attempt at a CP-SAT model, in the solver's units, about a second each."""
    most_conflicts: int = 2000
    """Of one attempt. Where every conflict raises the bound by a nanosecond, hardly any work is counted."""
    most_unsolved: int = 2
    """CP-SAT models given up before candidates are priced in the order of their bounds alone."""
    most_outside: int = 16
    """Layouts in CP-SAT models that leave a domain in which groups are to stay, whatever their mapping."""
    largest_cells: int = 2000
    """Counts of slots (leaf, stage) in one CP-SAT model; further mappings stand in it by their bounds."""
