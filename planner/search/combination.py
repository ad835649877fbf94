"""What the model of the search chooses among: a kernel with every choice but the split of the layers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.costmodel.execution import Execution
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.planner.bounds.combination_costs import CombinationCosts
from meshwright.planner.bounds.exact_cost import Matrix, Priced
from meshwright.planner.bounds.memory_fit import RankRow
from meshwright.planner.experts.joint import AssumedImbalance
from meshwright.planner.search.candidates import kernel_degrees


@dataclass(eq=False)
class Combination:
    """A kernel with every choice but the split of the layers."""

    layout: Layout
    """Plain numbers; `recompute_layers` open."""
    execution: Execution
    matrix: Matrix
    bound_s: float
    """Of any split."""
    costs: CombinationCosts
    memory: Sequence[RankRow]
    limit_gib: float
    imbalance: AssumedImbalance | None = None
    is_open: bool = True
    """Whether it was not priced yet."""
    is_settled: bool = False
    """Whether a model proved that it does not beat the cutoff."""
    priced: Priced | None = None
    """Its exact price; None where it is not known, or where the combination is out."""
    inside: Mapping[str, int] = field(default_factory=dict)
    """By axis that is to stay inside: members of a group that share a domain."""
    is_barred: bool = False
    """Whether a group leaves its domain or a cut is too full: then a row of the model keeps it out."""

    @property
    def is_waiting(self) -> bool:
        """Whether it may still be the choice, for all that was proven."""
        return self.is_open and not self.is_settled and not self.is_barred

    @cached_property
    def kernel(self) -> Hashable:
        """What is enumerated."""
        return kernel_degrees(self.layout), tuple(self.matrix.items())

    @cached_property
    def full(self) -> bool:
        """Whether it recomputes whole layers."""
        return bool(int(self.layout.recompute) & Recompute.FULL)
