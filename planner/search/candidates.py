"""Layouts with one execution each that may be the plan, and what is known of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.workload import Execution
from meshwright.planner.bounds.combination_costs import CombinationCosts
from meshwright.planner.bounds.exact_cost import MappingBounds, Matrix, Priced
from meshwright.planner.bounds.memory_fit import RankRow
from meshwright.planner.experts.training import AssumedImbalance, JointRouting
from meshwright.planner.request.choices import OF_LAYOUT
from meshwright.planner.search.branches import Branch
from meshwright.planner.search.pricing import Certificate, SearchParams

KERNEL = tuple(choice.name for choice in OF_LAYOUT if choice.decided in ("degrees", "pipeline"))
"""What of a layout is enumerated; the rest is decided for each."""


def kernel_degrees(layout: Layout) -> tuple[int, ...]:
    """The values of `KERNEL` of a layout of plain numbers."""
    return tuple(int(getattr(layout, name)) for name in KERNEL)


@dataclass(eq=False)
class Candidate:
    """A layout with one execution, and the bounds of its mappings."""

    branch: int
    layout: Layout
    """Plain numbers; the number of recomputed layers is open."""
    mappings: MappingBounds
    is_open: bool = True
    """Whether it is neither priced nor proven to be no better than the cutoff."""
    priced: Priced | None = None
    """Its exact price, where that matters."""
    overfull: Sequence[Priced] = ()
    """Mappings that would be faster, but fill a cut beyond what is allowed."""

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """What is enumerated of its layout."""
        return kernel_degrees(self.layout)

    @property
    def bound_s(self) -> float:
        """Of all its mappings."""
        return self.mappings.least_s


class Chooser(ABC):
    """Chooses among candidates which one is priced next, and proves the last one."""

    prices_beside: int = 0
    """Further candidates that are priced with each chosen one at the least, least bounds first."""

    def __init__(
        self,
        branches: Sequence[Branch],
        params: SearchParams,
        routing: JointRouting | None,
        seed: int,
        certificate: Certificate,
    ) -> None:
        self._branches, self._params, self._routing = branches, params, routing
        self._seed, self._certificate = seed, certificate
        self.candidates: list[Candidate] = []
        self.is_settled = False
        """Whether no candidate is left that may beat the cutoff, and nothing changed since."""

    def add(self, branch: int, layout: Layout, mappings: MappingBounds) -> Candidate:
        """Takes in a layout with the bounds of its mappings."""
        self.is_settled = False
        candidate = Candidate(branch=branch, layout=layout, mappings=mappings)
        self.candidates.append(candidate)
        return candidate

    @property
    def opened(self) -> list[Candidate]:
        """Those that may be the next choice, least bounds first."""
        waiting = [each for each in self.candidates if each.is_open]
        return sorted(waiting, key=lambda each: each.bound_s)

    def least_s(self) -> float:
        """The least bound of those that may be the next choice; infinite without any."""
        return min((each.bound_s for each in self.candidates if each.is_open), default=inf)

    def learn(
        self, candidate: Candidate, priced: Priced | None, overfull: Sequence[Priced] = ()
    ) -> None:
        """What an exact price says; None where no split fits or beats the cutoff.

        `overfull` are mappings that would be faster, but fill a cut beyond what is allowed.
        """
        candidate.is_open, candidate.priced, self.is_settled = False, priced, False
        candidate.overfull = overfull

    def settle(self, candidates: Iterable[Candidate], cutoff_s: float) -> None:
        """None of these beats the cutoff; others may still."""
        for each in candidates:
            each.is_open = False
        self.is_settled = self.least_s() >= cutoff_s

    def likely(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """A candidate that may beat the cutoff, as fast as can be; as `choose` otherwise."""
        return self.choose(cutoff_s, best, wanted, time_limit_s)

    @abstractmethod
    def choose(
        self, cutoff_s: float, best: Sequence[Priced], wanted: int, time_limit_s: float | None
    ) -> Candidate | None:
        """The candidate to be priced next; None where none of those looked at beats the cutoff.

        `is_settled` then says whether all were looked at.

        Parameters
        ----------
        cutoff_s
            Seconds that a candidate must beat.
        best
            The best prices so far, rising; the last of `wanted` is the cutoff.
        wanted
            How many best ones are asked for.
        time_limit_s
            Seconds that are left.

        Raises
        ------
        OutOfTimeError
            If that is too little.
        """


# What the model of the search chooses among: a kernel with every choice but the split of the layers.


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
