"""Prices that measured pairs correct, and what searches are asked and say: sizes, plans sought, outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.measured_settings import OPEN, GainCorrections
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.mappings import Matrices
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.joint import Cells, Need
from meshwright.planner.mapping.problem import FloatArray


class CorrectedPricing(CostModelPricing):
    """Prices times what measured pairs correct of their settings, a constant of each layout.

    Bounds are multiplied by the factor of their layouts, or by the least one of what is still open. Memory
    is uncorrected, cuts may be used in full, and what no list has is bounded (`unlisted_s`), not sought.
    """

    def __init__(self, pricing: CostModelPricing, corrections: GainCorrections) -> None:
        super().__init__(pricing.workload)
        self._pricing, self._corrections = pricing, corrections
        self._factor = 1.0

    def stop_at(self, deadline: float) -> None:
        """As the prices that are corrected."""
        self._pricing.stop_at(deadline)

    @property
    def undecided_s(self) -> float:
        """Of the layout priced last, corrected."""
        return self._pricing.undecided_s * self._factor

    @property
    def unlisted_s(self) -> float:
        """Of all layouts, by the least factor of any."""
        return self._pricing.unlisted_s * self._corrections.least

    @property
    def prices_matrices(self) -> bool:
        """As the prices that are corrected."""
        return self._pricing.prices_matrices

    def _times(self, bound_s: FloatArray, layouts: Layout, *undecided: str) -> FloatArray:
        return bound_s * self._corrections.factor(self.workload, layouts, undecided)

    def lower_bound_s(
        self,
        layouts: Layout,
        numbers_of_groups: Sequence[int] = (),
        *,
        any_schedule: bool = False,
    ) -> FloatArray:
        """Corrected by the layouts' own settings.

        Parameters
        ----------
        layouts
            Shape [n].
        numbers_of_groups
            Of shard groups that the layouts could have instead.
        any_schedule
            Whether the bound is to hold for every schedule.
        """
        bound_s = self._pricing.lower_bound_s(layouts, numbers_of_groups, any_schedule=any_schedule)
        return self._times(bound_s, layouts)

    def degrees_bound_s(self, degrees: Layout, smallest_bubble: FloatArray) -> FloatArray:
        """Corrected by the least factor of any layout of the degrees.

        Parameters
        ----------
        degrees
            Shape [n].
        smallest_bubble
            By pp, what `Space.smallest_bubble` has; shape [largest pp + 1].
        """
        return self._times(self._pricing.degrees_bound_s(degrees, smallest_bubble), degrees, *OPEN)

    def mappings(self, layout: Layout) -> Matrices:
        """As the prices that are corrected."""
        return self._pricing.mappings(layout)

    def relief_bound_s(self, layouts: Layout, numbers_of_groups: Sequence[int]) -> FloatArray:
        """Corrected by the least factor of whatever is recomputed."""
        bound_s = self._pricing.relief_bound_s(layouts, numbers_of_groups)
        return self._times(bound_s, layouts, "recompute")

    def mapping_bounds(
        self, layouts: Layout, numbers_of_groups: Sequence[int] = (), *, below_s: float = inf
    ) -> list[MappingBounds]:
        """Corrected by the layouts' own settings.

        Parameters
        ----------
        layouts
            Shape [n].
        numbers_of_groups
            Of shard groups that the layouts could have instead.
        below_s
            Corrected seconds above which bounds need not be tight.
        """
        factors = self._corrections.factor(self.workload, layouts).tolist()
        below_s /= min(factors, default=1.0)
        bounds = self._pricing.mapping_bounds(layouts, numbers_of_groups, below_s=below_s)
        return [_scaled(each, factor) for each, factor in zip(bounds, factors, strict=True)]

    def tightened(self, layout: Layout, mappings: MappingBounds) -> MappingBounds:
        """As the prices that are corrected."""
        return self._pricing.tightened(layout, mappings)

    def needs(self, layout: Layout) -> Sequence[Need | None]:
        """As the prices that are corrected."""
        return self._pricing.needs(layout)

    def use_assignment(self, layout: Layout, cells: Cells, value: Callable[[Any], int]) -> None:
        """As the prices that are corrected."""
        self._pricing.use_assignment(layout, cells, value)

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """The best that one layout can do: its settings are its own, so that the factor changes no order.

        Parameters
        ----------
        layout
            One layout.
        mappings
            Corrected bounds, as `mapping_bounds` gave them.
        cutoff_s
            Corrected seconds that a mapping must beat.

        Returns
        -------
        Priced or None
            With the corrected step.
        """
        self._factor = float(self._corrections.factor(self.workload, layout))
        uncorrected = _scaled(mappings, 1.0 / self._factor)
        priced = self._pricing.exact(layout, uncorrected, cutoff_s / self._factor)
        if priced is None:
            return None
        return replace(priced, step_time_s=priced.step_time_s * self._factor)

    def apart_bounds_s(self, layouts: Layout) -> FloatArray:
        """Corrected by the layouts' own settings."""
        return self._times(self._pricing.apart_bounds_s(layouts), layouts)

    def exact_apart(self, layout: Layout, least_s: float, cutoff_s: float) -> Priced | None:
        """As `exact`, with stages priced by their own places.

        Parameters
        ----------
        layout
            One layout.
        least_s
            Corrected seconds that no mapping of it is faster than.
        cutoff_s
            Corrected seconds that a mapping must beat.
        """
        self._factor = float(self._corrections.factor(self.workload, layout))
        least_s, cutoff_s = least_s / self._factor, cutoff_s / self._factor
        priced = self._pricing.exact_apart(layout, least_s, cutoff_s)
        return priced and replace(priced, step_time_s=priced.step_time_s * self._factor)

    def exact_each(self, layouts: Layout) -> Iterator[tuple[int, Priced | None]]:
        """As the prices that are corrected, each by the factor of its own settings."""
        factors = self._corrections.factor(self.workload, layouts).tolist()
        for row, priced in self._pricing.exact_each(layouts):
            self._factor = factors[row]
            yield row, priced and replace(priced, step_time_s=priced.step_time_s * self._factor)


def _scaled(mappings: MappingBounds, factor: float) -> MappingBounds:
    outside_s = mappings.outside_s
    return replace(
        mappings,
        bound_s=mappings.bound_s * factor,
        outside_s=None if outside_s is None else outside_s * factor,
    )


# Numbers that tune the search: they decide how long it takes, never what it answers.


@dataclass(frozen=True, kw_only=True)
class SearchParams:
    """Sizes of the search's steps, at least 1 but for shares and switches."""

    first_batch: int = 128
    """Degrees of an execution expanded at once, at first; small, so that an incumbent is there early."""
    largest_batch: int = 1 << 14
    """Degrees expanded at once, at most; batches grow fourfold up to it."""
    first_expanded: int = 1024
    """Degrees with room of an execution that are expanded before twice as many, or more, in a search about
    another plan."""
    enumerated_whole: int = 1 << 18
    """Degrees up to which all are enumerated before there is a price; of more those of the least bounds."""
    looked_over_first: float = 1 << 18
    """Degrees on more than half of the GPUs times executions, from which a part of the space is searched for
    a first price."""
    worth_finding: float = 1.0
    """Share of the last step time, 0 to 1, that a layout must beat; a proof of the optimum needs 1."""
    priced_per_round: int = 8
    """Layouts priced exactly after a batch, or after a CP-SAT model."""
    most_priced_beside: int = 63
    """Layouts priced beside the one that a CP-SAT model chose, where its choices bring nothing for long."""
    priced_unmodelled: int = 32
    """Candidates that are all priced, without a model, where a search is about another plan."""
    most_in_vain: int = 4
    """Prices in a row that bring nothing before more degrees are expanded."""
    bounded_together: int = 2048
    """Layouts of the pool whose mappings are bounded in one go, over all executions."""
    first_together: int = 128
    """The same before there is a price, which then leaves out most of the others."""
    first_plan_s: float = 10.0
    """Seconds that are taken for any layout at all where the time limit is shorter."""
    many_executions: int = 4
    """Executions from which the plainest is searched alone before all of them."""
    first_listed: int = 8
    """The same where any layout is priced first."""
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


@dataclass(frozen=True, kw_only=True)
class Sought:
    """Which plans are asked of a search."""

    below_s: float = inf
    """Only those faster than this, in seconds of a step; an exhaustive search finds all. Without one the
    outcome is unknown, and its bound says that there is none."""
    until_priced_s: float | None = None
    """Seconds that take the place of a shorter time limit as long as there is no plan."""
    listed_only: bool = False
    """Whether mappings that no list has are not looked for; bounds hold for them all the same."""
    any_first: bool = False
    """Whether any layout is priced first: behind its price degrees are expanded together, and fewer mappings
    are listed."""
    parts_only: bool = False
    """Only those whose GPUs are no number of whole nodes; not of an exhaustive search."""


ALL_PLANS = Sought()

# What a search looked at, and how it ended.


@dataclass
class Certificate:
    """What was looked at, what was left out and why."""

    layouts: int = 0
    """Layouts in the degrees that were considered, of every execution."""
    ruled_out: dict[str, int] = field(default_factory=dict)
    """Layouts that a rule forbids, by the first rule that does."""
    bounded_out: int = 0
    """Layouts whose bound is no better than the plan's price."""
    priced: int = 0
    """Layouts priced exactly."""
    rounds: int = 0
    """CP-SAT models solved."""
    executions: int = 1
    """Combinations of execution choices, each with layouts of its own."""
    fewest_gpus: int = 1
    """Layouts on fewer GPUs than this cannot beat the plan; they were not enumerated."""
    combinations: int = 0
    """Of kernel, execution, recomputed modules and ZeRO stage in the last CP-SAT model."""
    kernels: int = 0
    """In the last CP-SAT model."""
    least_cut_use: float | None = None
    """Of mappings that fill a cut beyond what is allowed, the least share of its fullest cut."""
    model_bound_s: float | None = None
    """What the last CP-SAT model proved of its combinations."""
    model: object | None = field(default=None, repr=False, compare=False)
    """The last CP-SAT model, a `KernelModel`; None where none was built, and on irregular fabrics."""

    def overfull(self, cut_uses: Iterable[tuple[str, float]]) -> None:
        """Takes note of a mapping that fills a cut beyond what is allowed.

        Parameters
        ----------
        cut_uses
            Names of cuts with the share of each that is used; at least one.
        """
        fullest = max(use for _, use in cut_uses)
        self.least_cut_use = min(fullest, self.least_cut_use or fullest)

    def rule_out(self, name: str, count: int) -> None:
        """Counts layouts under a rule.

        Parameters
        ----------
        name
            Of the rule.
        count
            Layouts, at least 0; of none no note is taken.
        """
        if count:
            self.ruled_out[name] = self.ruled_out.get(name, 0) + count


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a search ended. `best` is sorted by price; `lower_bound_s` is None where nothing is known."""

    status: str
    best: tuple[Priced, ...]
    lower_bound_s: float | None
    certificate: Certificate
    on_all_gpus: Layout | None = None
    """The fastest that was priced of those that leave no GPU idle."""
