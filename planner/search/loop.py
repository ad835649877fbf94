"""The search: branch and bound over layouts and executions, closed by CP-SAT.

Every layout x has, under every execution, a step time T(x) (its best mapping, split and recomputed layers)
and lower bounds b1(x) <= b2(x) <= b3(x) <= T(x), each tighter and dearer than the one before. With the
incumbent T* (the best step time so far), x is dropped as soon as b(x) >= T*; the plan is optimal when nothing
is left.

1. Degrees with a micro-batch come in the order of b1, which is the least over all executions; of
   millions only those of small b1 are enumerated, and a part of the space is searched before.
   Those below the incumbent are expanded under each execution whose own b1 is below it; layouts
   that a rule forbids or whose b2 is no better drop out.
2. The rest wait in a pool. Those of the least b3 are candidates: a CP-SAT model chooses among them the
   kernel, the execution, the split and the recomputation (`kernel_model`; on irregular fabrics
   `model`). The choice is priced exactly, and the model learns the price. When it chooses what is
   priced, and the least b3 of all others is no less, that is the optimum.

With top_k > 1, the k-th best step time takes the place of T*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.memory import HbmCapacity, HostMemory
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.layout import LAYER_AXES, Layout
from meshwright.costmodel.measured_settings import GainCorrections
from meshwright.costmodel.workload import Execution, deduplicates
from meshwright.errors import InputError, OutOfTimeError
from meshwright.planner.bounds.combination_costs import ShapeTable, gpu_seconds, shape_table
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.layer_split import any_stages
from meshwright.planner.bounds.pricing import CostModelPricing
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.search.branches import (
    FEW_VARIANTS,
    Branch,
    Candidate,
    Chooser,
    DegreeScan,
    LayoutPool,
    LeastFirst,
    RoomOfBranches,
    plainest,
    representatives,
)
from meshwright.planner.search.choosers import KernelChooser, SlotChooser
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.pricing import (
    ALL_PLANS,
    Certificate,
    CorrectedPricing,
    Outcome,
    SearchParams,
    Sought,
)
from meshwright.planner.search.space import Space, space_of
from meshwright.planner.solvers.processes import side_by_side

if TYPE_CHECKING:
    from meshwright.planner.experts.training import JointRouting

BoolArray = NDArray[np.bool_]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SurveyedBranch:
    """Layouts of one execution, [n], with bounds of their steps, [n]."""

    execution: Execution
    space: Space
    layouts: Layout
    bound_s: FloatArray


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The layouts of a request that may take less than some seconds, none of them priced.

    Searches of parts of its space, or of slower machines, look at these alone as long as the best step is no
    longer.
    """

    below_s: float
    """What every other layout takes at the least, in seconds of a step."""
    branches: tuple[SurveyedBranch, ...]

    def of_branch(self, branch: Branch) -> SurveyedBranch | None:
        """What was surveyed of an execution; None where that is not all of its layouts.

        Models and what is asked of a step are those that were surveyed. Of clusters, `KnownSurvey.factor`
        answers for rates, and the survey was given no less memory.

        Parameters
        ----------
        branch
            Of the search that would read the survey.
        """
        for surveyed in self.branches:
            if surveyed.execution == branch.execution:
                is_covered = surveyed.space.covers(branch.space)
                is_alike = _same_work(surveyed.space, branch.space)
                return surveyed if is_covered and is_alike else None
        return None


def _same_work(surveyed: Space, asked: Space) -> bool:
    """Whether two spaces are of one workload but for rates, memory and its margin."""
    before, now = surveyed.workload, asked.workload
    return before == replace(now, cluster=before.cluster, memory_margin=before.memory_margin)


@dataclass(frozen=True, kw_only=True)
class KnownSurvey:
    """A survey, read by the search of another request."""

    survey: Survey
    factor: float = 1.0
    """No layout takes less than so many times what it takes there, at most 1."""


class AnyPlanFoundError(Exception):
    """Any plan was asked for, and here is one."""


class LayoutSearch:
    """One search over the layouts of a space under one or more executions."""

    def __init__(
        self,
        space: Space,
        branches: Sequence[Branch],
        *,
        top_k: int = 1,
        seed: int = 0,
        time_limit_s: float | None = None,
        any_plan: bool = False,
        most_priced: int | None = None,
        begin_with: Layout | None = None,
        run_as: Execution | None = None,
        counts: bool = False,
        sought: Sought = ALL_PLANS,
        known_survey: KnownSurvey | None = None,
        progress: Progress | None = None,
        on_first: Callable[[Priced], None] | None = None,
        routing: JointRouting | None = None,
        params: SearchParams | None = None,
    ) -> None:
        self._known_survey, self._is_survey = known_survey, False
        self._surveyed: frozenset[int] = frozenset()
        """Executions whose layouts are in the pool as far as they may beat the best price."""
        self._params = params or SearchParams()
        self._any_plan, self._most_priced, self._begin_with = any_plan, most_priced, begin_with
        self._run_as = run_as
        self._is_asked_about = self._params.worth_finding < 1 or not (begin_with is None or counts)
        """Whether the search is about another plan or for a first price: nobody reads what it counts."""
        self._first: Layout | None = None
        """What is priced before all others, about as fast as the plan."""
        self._early: tuple[Priced, ...] = ()
        """The best of a search of a part of the space: the plan where time ends before any other price."""
        self._sought = sought
        self._space = space
        self._branches = [branch for branch in branches if not branch.refused_outright()]
        self._top_k = top_k
        began = time.monotonic()
        self._deadline = None if time_limit_s is None else began + time_limit_s
        self._first_deadline = self._deadline
        """Holds before there is a price."""
        if self._deadline is not None and sought.until_priced_s is not None:
            self._first_deadline = max(self._deadline, began + sought.until_priced_s)
        if self._first_deadline is not None and sought.any_first:
            self._first_deadline = max(self._first_deadline, began + self._params.first_plan_s)
        self._stop_at(self._first_deadline)
        self._say, self._on_first = progress or (lambda _: None), on_first
        self._best: list[tuple[float, int, Priced]] = []
        self._on_all_gpus: Priced | None = None
        """The fastest price so far of a layout that leaves no GPU idle."""
        self._pool = LayoutPool()
        self._mapped: list[tuple[int, Layout, FloatArray]] = []
        """Layouts whose mappings were bounded, by execution, with the bounds that they had before."""
        self._undecided_s = inf
        """No mapping of a priced layout that stayed undecided is faster than this."""
        self._unexplored_s = 0.0
        """No layout that was not expanded yet is faster than this."""
        self._in_vain_s = inf
        """The bound from which on layouts were priced ahead of further degrees, and brought nothing."""
        self.certificate = Certificate(executions=len(branches))
        is_regular = all(branch.pricing.prices_matrices for branch in branches)
        chooser_type: type[Chooser] = KernelChooser if is_regular else SlotChooser
        self._new_chooser = partial(
            chooser_type,
            self._branches,
            self._params,
            routing,
            seed,
            self.certificate,
        )
        self.chooser = self._new_chooser()

    def _stop_at(self, deadline: float | None) -> None:
        """Ends what prices ask of solvers there."""
        for branch in self._branches:
            branch.pricing.stop_at(inf if deadline is None else deadline)

    def run(self) -> Outcome:
        """Searches to the end, or to the time limit."""
        if not self._branches:
            return self._outcome("infeasible", None)
        try:
            self._remaining_s()
            self._first = self._begin_with or self._likely()
            if self._first is not None:
                self._price_first(self._first)
            if self._on_first is not None and self._best:
                self._on_first(self._best[0][2])
            self._take_surveyed()
            if len(self._surveyed) < len(self._branches):
                self._scan_space()
            self._unexplored_s = inf
            self._close()
            self._price_stages_apart()
            self._look_beyond_the_lists()
        except (OutOfTimeError, AnyPlanFoundError):
            open_s = min(self._pool.least_s(), self.chooser.least_s())
            for priced in () if self._best else self._early:
                self._take(priced)
            bound_s = min(self._unexplored_s, open_s, self._least_known_s, self._unpriced_s)
            status = "feasible" if self._best else "unknown"
            return self._outcome(status, bound_s if bound_s > 0 else None)
        bound_s = min(self._least_known_s, self._unpriced_s)
        if not self._best:
            return self._outcome("infeasible" if bound_s == inf else "unknown", bound_s)
        is_proven = bound_s >= self._price_s * (1 - 1e-9)
        return self._outcome("optimal" if is_proven else "feasible", bound_s)

    def survey(self) -> Survey:
        """Lists the layouts that may take less than is sought; the search prices none of them.

        Raises
        ------
        OutOfTimeError
            Where the time limit comes first.
        """
        self._is_survey = True
        if self._branches:
            self._first = self._begin_with
            self._scan_space()
        pool = self._pool
        rows = [np.flatnonzero(pool.branch == index) for index in range(len(self._branches))]
        branches = [
            SurveyedBranch(
                execution=branch.execution,
                space=branch.space,
                layouts=pool.take(rows_there)
                if len(rows_there)
                else Layout().flat().take(rows_there),
                bound_s=pool.bound_s[rows_there],
            )
            for branch, rows_there in zip(self._branches, rows, strict=True)
        ]
        return Survey(below_s=self._sought.below_s, branches=tuple(branches))

    def _take_surveyed(self) -> None:
        """Puts what was surveyed into the pool, where no other layout of its executions beats the best price.

        Layouts of the survey are priced first where the best price so far is too long for that; nothing is
        kept of them where they are as slow.
        """
        known_survey = self._known_survey
        if known_survey is None or self._space.workload.inside_domain:
            return
        rest_s = known_survey.survey.below_s * known_survey.factor
        every = (known_survey.survey.of_branch(branch) for branch in self._branches)
        surveyed = {index: branch for index, branch in enumerate(every) if branch is not None}
        is_close = self._cutoff_s <= rest_s
        # What is priced in vain counts where few prices are allowed.
        if not surveyed or not (is_close or self._most_priced is None):
            return
        for index, branch in surveyed.items():
            self._remaining_s()
            self._add_surveyed(index, branch, known_survey.factor, min(self._cutoff_s, rest_s))
        if is_close and len(surveyed) == len(self._branches):
            self._unexplored_s = rest_s
        together = self._together if is_close else self._params.first_together
        for _ in range(1 if is_close else self._params.most_in_vain):
            if not self._improve(together) or self._cutoff_s <= rest_s:
                break
        if self._cutoff_s <= rest_s:
            self._surveyed = frozenset(surveyed)
        else:
            self._pool, self.chooser = LayoutPool(), self._new_chooser()

    def _add_surveyed(
        self, index: int, surveyed: SurveyedBranch, factor: float, cutoff_s: float
    ) -> None:
        """Puts the surveyed layouts of one execution that may beat the cutoff into the pool."""
        layouts = surveyed.layouts.take(surveyed.bound_s * factor < cutoff_s)
        branch = self._branches[index]
        if layouts.broadcast_shape()[0]:
            layouts = layouts.take(branch.space.among(layouts))
        layouts, _, bound_s = branch.promising_layouts(layouts, cutoff_s, self.certificate)
        self._pool.add(index, layouts, bound_s)

    @property
    def _unpriced_s(self) -> float:
        """No mapping that was neither priced nor bounded away is faster than this."""
        unlisted_s = min(branch.pricing.unlisted_s for branch in self._branches)
        return min(self._undecided_s, unlisted_s)

    def _outcome(self, status: str, bound_s: float | None) -> Outcome:
        return Outcome(
            status=status,
            best=tuple(self._best_prices()),
            lower_bound_s=None if bound_s is None or not np.isfinite(bound_s) else bound_s,
            certificate=self.certificate,
            on_all_gpus=None if self._on_all_gpus is None else self._on_all_gpus.layout,
        )

    def _best_prices(self) -> list[Priced]:
        return [priced for _, _, priced in self._best]

    @property
    def _price_s(self) -> float:
        """The best price so far; infinite before the first."""
        return self._best[0][0] if self._best else inf

    @property
    def _least_known_s(self) -> float:
        """The best price so far, or what all plans sought are faster than."""
        return min(self._price_s, self._sought.below_s)

    @property
    def _cutoff_s(self) -> float:
        """What a layout must beat to matter: the price of the k-th best."""
        if len(self._best) < self._top_k:
            return self._sought.below_s
        return min(
            self._best[self._top_k - 1][0] * self._params.worth_finding, self._sought.below_s
        )

    @property
    def _together(self) -> int:
        """Layouts whose mappings are bounded in one go, while nothing is stuck."""
        if self._best:
            return self._params.bounded_together
        first = self._params.first_together
        return self._params.first_listed if self._sought.any_first else first

    def _remaining_s(self) -> float | None:
        """Seconds until the time limit. Raises OutOfTimeError behind it, or when the work is done."""
        if self._most_priced is not None and self.certificate.priced >= self._most_priced:
            raise OutOfTimeError
        deadline = self._deadline if self._best or self._early else self._first_deadline
        if deadline is None:
            return None
        remaining_s = deadline - time.monotonic()
        if remaining_s < 0:
            raise OutOfTimeError
        return remaining_s

    # 1. From degrees to the pool.

    @cached_property
    def _unlike(self) -> int:
        """Executions that expand layouts of their own: with tensor-parallel overlap or without, about the
        same ones are promising.
        """
        return len({replace(branch.execution, tp_overlap=True) for branch in self._branches})

    @cached_property
    def _table(self) -> ShapeTable:
        """Layer costs of every shape of the space under each execution."""
        workloads = [branch.pricing.workload for branch in self._branches]
        return shape_table(workloads, self._space.shapes())

    @cached_property
    def _room(self) -> RoomOfBranches:
        """What fits of degrees."""
        return RoomOfBranches(self._branches)

    def _likely(self) -> Layout | None:
        """A fast layout of a large space, whose price spares the search most of it; None for others, but for
        any layout where that is asked for.

        From a search of the part that has most of what layouts and executions choose among, and leaves out
        what is hardly faster than what it has. Where it is known how plans are likely run, they are run so.
        """
        one = self._top_k == 1 and not self._any_plan and self._most_priced is None
        gpus, space = self._space.workload.gpus, self._space
        if one and self._sought.any_first:
            return self._plain_layout(self._any_layout())
        if not one or not isinstance(self.chooser, KernelChooser):
            return None
        degrees = int(space.degrees_by_shape(gpus, gpus // 2).sum())
        if degrees * len(self._branches) <= self._params.looked_over_first:
            return None
        likely = [branch for branch in self._branches if self._run_as in branch.executions]
        sought = replace(self._sought, until_priced_s=self._remaining_s())
        return self._best_of_part(likely or representatives(self._branches), sought)

    def _any_layout(self) -> Layout | None:
        """Any layout that fits, run in the plainest way; None where none does."""
        search = LayoutSearch(
            self._space,
            self._branches[:1],
            time_limit_s=self._remaining_s(),
            any_plan=True,
            sought=self._sought,
            params=self._params,
        )
        return self._best_found(search)

    def _best_of_part(self, branches: Sequence[Branch], sought: Sought) -> Layout | None:
        """About the best of the plainest part of the space under some executions, in half of the time."""
        remaining_s, params = self._remaining_s(), self._params
        search = LayoutSearch(
            plainest(self._space),
            [replace(branch, space=plainest(branch.space)) for branch in branches],
            time_limit_s=None if remaining_s is None else remaining_s / 2,
            sought=sought,
            params=replace(params, looked_over_first=inf, worth_finding=params.promising),
        )
        return self._best_found(search)

    def _best_found(self, search: LayoutSearch) -> Layout | None:
        """What another search ends with, the plan where time ends before any other price; None for none."""
        outcome = search.run()
        self._stop_at(self._first_deadline)
        self._early = outcome.best or self._early
        return outcome.best[0].layout if outcome.best else None

    def _plain_layout(self, known: Layout | None) -> Layout | None:
        """The fastest layout of the plainest part of the space run in the plainest way; one that is `known`
        where there is none, or there are few other ways to run.
        """
        if known is None or len(self._branches) < self._params.many_executions:
            return known
        sought = replace(
            self._sought,
            below_s=self._early[0].step_time_s,
            until_priced_s=None,
            listed_only=True,
            any_first=False,
        )
        return self._best_of_part(self._branches[:1], sought) or known

    def _price_first(self, layouts: Layout) -> None:
        """Prices a layout, or each of some, under each execution, as long as that may be faster than those
        before.

        Least bounds first. Where it is known how they are likely run, that is asked first, and the others
        only if none fits so. A layout that is not of the space is left out: its price would not be of a plan.
        """
        degrees = layouts.flat()
        of_space = [self._space.has(degrees.scalar(row)) for row in range(np.size(degrees.tp))]
        degrees = degrees.take(np.flatnonzero(of_space))
        degrees = degrees.take(self._are_sought(degrees))
        count = np.size(degrees.tp)
        if not count:
            return
        likely = self._likely_branch(degrees.scalar(0), degrees)
        if likely is not None:
            self._price_under(likely, degrees)
        if self._best:
            return
        scan = DegreeScan(self._space, self._branches, self._table, degrees, self._remaining_s)
        for index, own, _, _ in scan.by_branch(np.arange(count), lambda: self._cutoff_s):
            if index != likely:
                self._price_under(index, own)

    def _likely_branch(self, layout: Layout, degrees: Layout) -> int | None:
        """The execution that differs least from how the layout is likely run; None where that is unknown."""
        run_as = self._run_as
        if run_as is None:
            return None
        wanted = vars(run_as).items()
        unlike = {
            index: sum(
                getattr(branch.execution_of(layout).of_layout(layout), name) != own
                for name, own in wanted
            )
            for index, branch in enumerate(self._branches)
            if branch.has(degrees).all()
        }
        return min(unlike, key=lambda index: unlike[index], default=None)

    def _price_under(self, index: int, layouts: Layout) -> None:
        """Prices layouts, [n], under one execution where they may beat the cutoff, least bounds first."""
        self._remaining_s()
        branch = self._branches[index]
        layouts, _, bound_s = branch.promising_layouts(layouts, self._cutoff_s, self.certificate)
        mappings: list[MappingBounds] = []
        if len(bound_s):
            mappings = branch.mapping_bounds(layouts, self._top_k, below_s=self._cutoff_s)
        candidates = [
            self.chooser.add(index, layouts.scalar(row), bounds)
            for row, bounds in enumerate(mappings)
        ]
        for candidate in sorted(candidates, key=lambda each: each.bound_s):
            if candidate.bound_s < self._cutoff_s:
                self._price(candidate)

    @cached_property
    def _gpu_seconds(self) -> FloatArray:
        """What a step costs at the least in each shape of the space, GPUs times seconds, [shapes]."""
        cost = gpu_seconds(self._space.workload, self._table) * (1 - 1e-9)
        corrections = self._branches[0].corrections
        return cost * (1.0 if corrections is None else corrections.least)

    def _scan_space(self) -> None:
        """Layouts on more than half of the GPUs come first: they are likely fast, and bound the rest."""
        gpus, cost = self._space.workload.gpus, float(np.min(self._gpu_seconds, initial=inf))
        half = gpus // 2
        upper = self._scan(gpus, half, cost / half if half else inf)
        self._add_outside_domain(upper)
        if not half:
            return
        if np.isfinite(self._cutoff_s) and np.isfinite(cost):
            self.certificate.fewest_gpus = max(1, int(cost / self._cutoff_s))
        if self.certificate.fewest_gpus <= half:
            self._scan(half, self.certificate.fewest_gpus - 1, inf)

    def _are_sought(self, layouts: Layout) -> BoolArray:
        """Which of some layouts take as many GPUs as is asked for, [n]."""
        gpus = np.asarray(layouts.gpus)
        per_node = self._space.workload.cluster.gpus_per_node
        return gpus % per_node > 0 if self._sought.parts_only else gpus > 0

    def _degrees(self, most_gpus: int, more_than: int, below_s: float) -> DegreeScan:
        """All degrees on so many GPUs whose bounds are below some seconds, perhaps with others."""
        cost = self._gpu_seconds if below_s < inf else None
        degrees = self._space.degrees(most_gpus, more_than, self._remaining_s, cost, below_s)
        degrees = degrees.take(self._are_sought(degrees))
        return DegreeScan(self._space, self._branches, self._table, degrees, self._remaining_s)

    def _scan(self, most_gpus: int, more_than: int, later_s: float) -> DegreeScan:
        """Expands degrees on so many GPUs in the order of their bounds until the bound reaches the cutoff.

        `later_s` bounds the degrees that are looked at after these. Of very many degrees those of the least
        bounds are enumerated, and more of them when they are asked for.
        """
        first_s = reach_s = self._cutoff_s
        count = int(self._space.degrees_by_shape(most_gpus, more_than).sum())
        if reach_s == inf and count > self._params.enumerated_whole:
            reach_s = 2.0 * float(np.min(self._gpu_seconds)) / most_gpus
        scan = self._degrees(most_gpus, more_than, reach_s)
        every_layout = scan.every_layout(most_gpus, more_than)
        order = LeastFirst(scan.bound_s, reach_s)
        self.certificate.layouts += every_layout
        together, kernels = self._together, isinstance(self.chooser, KernelChooser)
        position, size = 0, self._params.first_batch
        if self._is_survey:
            size = self._params.largest_batch
        elif not self._best:
            size = max(size // self._unlike, 8)
        elif self._first is not None and not self._sought.any_first:
            # The price is about the best, not that of a part of the nodes: nearly all must be expanded.
            size = self._params.largest_batch
        while True:
            while len(order) < position + size and reach_s < min(first_s, self._cutoff_s):
                is_whole = len(scan.bound_s) == count
                reach_s = first_s if is_whole else min(4.0 * reach_s, first_s)
                scan = scan if is_whole else self._degrees(most_gpus, more_than, reach_s)
                order = LeastFirst(scan.bound_s, reach_s)
            if position >= len(order):
                break
            batch, bound_s = order.take(position, position + size), scan.bound_s
            if bound_s[batch[0]] >= self._cutoff_s:
                break
            self._remaining_s()
            self._unexplored_s = min(float(bound_s[batch[0]]), later_s)
            taken = batch = batch[bound_s[batch] < self._cutoff_s]
            has_room = self._room_for_states(scan.degrees.take(batch))
            if has_room is not None and not has_room.any() and not self._is_promising():
                batch, has_room = batch[:0], has_room[:0]
            branches = scan.by_branch(
                batch, lambda: self._cutoff_s, self._room, has_room, self._surveyed
            )
            for index, degrees, fits, left_out in branches:
                self.certificate.bounded_out += left_out
                # Without kernels all executions are expanded before one of a small batch is priced.
                at_once = together if kernels or size > self._params.first_batch else 0
                for rows in self._parts(fits, len(np.asarray(degrees.pp))):
                    part = None if fits is None else fits[rows]
                    self._expand(index, degrees.take(rows), part, at_once)
            is_stuck = not self._improve(together)
            position += len(taken)
            if self._best or is_stuck:
                size = min(4 * size, self._params.largest_batch)
            together = min(2 * together, self._params.largest_batch) if is_stuck else self._together
        self.certificate.bounded_out += every_layout - scan.layouts(order.take(0, position))
        self._unexplored_s = later_s
        return scan

    def _is_promising(self) -> bool:
        """Whether the pool has a layout that is likely so much faster that it is priced at once."""
        return self._pool.least_s() < self._params.promising * self._price_s

    def _room_for_states(self, degrees: Layout) -> BoolArray | None:
        """Of which degrees the states may fit, [n]; None where layouts are counted by the rule they break.

        Degrees without room for their states have no layout under any execution, whatever the cutoff: leaving
        them out adds and takes nothing from the pool.
        """
        return self._room.for_states(degrees) if self._is_asked_about else None

    def _add_outside_domain(self, scan: DegreeScan) -> None:
        """Puts the fastest layouts that leave a domain where they may not into the model, which decides.

        They are run as the best plan so far is.
        """
        if not self._best or not self._space.workload.inside_domain:
            return
        best = self._best[0][2]
        runs = [branch.execution_of(best.layout) for branch in self._branches]
        index = runs.index(best.execution)
        branch, most = self._branches[index], self._params.most_outside
        layouts = branch.outside_domain(scan.promising(self._cutoff_s), most, self._cutoff_s)
        for row, bounds in enumerate(branch.mapping_bounds(layouts, self._top_k)):
            self.chooser.add(index, layouts.scalar(row), bounds)

    def _parts(self, fits: BoolArray | None, count: int) -> list[IntArray]:
        """Rows of `count` degrees of one execution that are expanded together.

        A search about another plan expands few that fit before many, which a price of theirs leaves out.
        """
        every, first = np.arange(count), self._params.first_expanded
        roomy = every if fits is None else np.flatnonzero(fits.any(axis=1))
        if not self._is_asked_about or len(roomy) < 2 * first:
            return [every]
        return np.split(every, [roomy[first]])

    def _expand(self, index: int, degrees: Layout, fits: BoolArray | None, together: int) -> None:
        """Puts the layouts of some degrees under one execution, of which `fits`, into the pool, and prices
        promising ones, if `together` is above 0: a price leaves what comes after them little to expand.

        Bounding few variants drops next to none of them where the cutoff is a likely price from the start.
        """
        self._remaining_s()
        few = 1 if self._first is None else FEW_VARIANTS
        if len(np.asarray(degrees.pp)):
            layouts, _, bound_s = self._branches[index].expanded(
                degrees, self._cutoff_s, self.certificate, fits, few
            )
            self._pool.add(index, layouts, bound_s)
        least_s, before_s = self._pool.least_s(), self._price_s
        if together and self._is_promising() and least_s < self._in_vain_s:
            self._improve(together)
            if self._price_s == before_s < inf:
                self._in_vain_s = least_s

    # 2. From the pool to the optimum.

    def _improve(self, together: int) -> bool:
        """Prices promising candidates, so that the cutoff falls early; False where there was none.

        Mappings of so many layouts are bounded `together`.
        """
        if self._is_survey:
            return False
        in_vain, is_any = 0, False
        for _ in range(self._params.priced_per_round):
            # What a price leaves of the candidates is priced before more are bounded for it.
            is_open = is_any and self.chooser.least_s() < self._cutoff_s
            self._admit(self._params.first_candidates, 0 if is_open else together, in_order=False)
            remaining_s = self._remaining_s()
            before_s = self._price_s
            chosen = self.chooser.likely(
                self._cutoff_s, self._best_prices(), self._top_k, remaining_s
            )
            if chosen is None:
                break
            self._price(chosen)
            is_any = True
            brings_little = self._price_s > before_s * self._params.worthwhile
            in_vain = in_vain + 1 if np.isfinite(before_s) and brings_little else 0
            if in_vain >= self._params.most_in_vain:
                break
        return is_any

    def _close(self) -> None:
        """Prices what the model chooses until nothing is left that may beat the cutoff.

        A price costs less than a model: each choice that brings nothing doubles how many of the least bounds
        are priced with the next one.
        """
        together = self._params.bounded_together
        fewest = beside = self.chooser.prices_beside
        while True:
            remaining_s = self._remaining_s()
            before_s = self._cutoff_s
            self._admit(self._params.candidates_per_round, together, in_order=True)
            chosen = self._chosen(remaining_s)
            if chosen is not None:
                self._price(chosen)
                for candidate in self.chooser.opened[:beside]:
                    self._remaining_s()
                    if candidate.is_open and candidate.bound_s < self._cutoff_s:
                        self._price(candidate)
            elif self._is_settled() and self._pool.least_s() >= self._cutoff_s:
                return
            if self._cutoff_s == before_s:
                together = min(2 * together, self._params.largest_batch)
                beside = min(2 * beside + 1, self._params.most_priced_beside)
            else:
                beside = fewest

    def _price_stages_apart(self) -> None:
        """Prices layouts with each pipeline stage by its own place, where that may beat the best price.

        Whatever was left out before its mappings were bounded is no faster so: those bounds hold wherever
        stages lie. Where time ends, what is not priced stays in the bound.
        """
        waiting: list[tuple[float, int, Layout]] = []
        for index, layouts, bound_s in () if self._sought.listed_only else self._mapped:
            near = layouts.take(bound_s < self._cutoff_s)
            apart_s = self._branches[index].pricing.apart_bounds_s(near)
            for row in np.flatnonzero(apart_s < self._cutoff_s).tolist():
                waiting.append((float(apart_s[row]), index, near.scalar(row)))
        best = {_undecided(priced.layout) for priced in self._best_prices()}
        waiting.sort(key=lambda each: (_undecided(each[2]) not in best, each[0]))
        for at, (least_s, index, layout) in enumerate(waiting):
            if least_s >= self._cutoff_s:
                continue
            if self._deadline is not None and time.monotonic() > self._deadline:
                rest_s = min(each_s for each_s, _, _ in waiting[at:])
                self._undecided_s = min(self._undecided_s, rest_s)
                return
            branch = self._branches[index]
            priced = branch.pricing.exact_apart(layout, least_s, self._cutoff_s)
            self._undecided_s = min(self._undecided_s, branch.pricing.undecided_s)
            if priced is not None:
                self._take_mapping(branch, priced)

    def _look_beyond_the_lists(self) -> None:
        """Closes the mappings that no list has, as far as it goes: their bound decides on the proof."""
        for branch in () if self._sought.listed_only else self._branches:
            for priced in branch.pricing.beyond_the_list(self._least_known_s):
                self._take_mapping(branch, priced)

    def _take_mapping(self, branch: Branch, priced: Priced) -> None:
        """Takes a layout under a further mapping; of several prices of one layout the best alone is kept."""
        run = replace(priced, execution=branch.execution_of(priced.layout))
        same_s = [seconds for seconds, _, each in self._best if _is_same_run(each, run)]
        if min(same_s, default=inf) > run.step_time_s:
            self._best = [each for each in self._best if not _is_same_run(each[2], run)]
            self._take(run)

    def _is_settled(self) -> bool:
        """Whether no candidate beats the cutoff. A search about another plan leaves out the model where
        bounds alone say so.
        """
        bounded_out = self._is_asked_about and self.chooser.least_s() >= self._cutoff_s
        return self.chooser.is_settled or bounded_out

    def _chosen(self, remaining_s: float | None) -> Candidate | None:
        """The candidate to be priced next. A search about another plan prices few ones in the order of their
        bounds: each takes a twentieth of a model.
        """
        if self._is_settled():
            return None
        waiting = sum(each.bound_s < self._cutoff_s for each in self.chooser.opened)
        spare = inf if self._most_priced is None else self._most_priced - self.certificate.priced
        is_few = self._is_asked_about and waiting <= min(self._params.priced_unmodelled, spare)
        choose = self.chooser.likely if is_few else self.chooser.choose
        return choose(self._cutoff_s, self._best_prices(), self._top_k, remaining_s)

    def _admit(self, most: int, together: int, *, in_order: bool) -> None:
        """Makes the layouts of the least bounds candidates, as far as they may beat the cutoff.

        Mappings of so many layouts are bounded `together`, if any. `in_order` says whether one whose mappings
        were not bounded yet holds up those behind it.
        """
        self.certificate.bounded_out += self._pool.drop(self._cutoff_s)
        opened = sum(each.bound_s < self._cutoff_s for each in self.chooser.opened)
        for _ in range(2 if together else 0):  # bounds of families and of mappings change the order
            self._bound_families(self._pool.by_bound(together))
            self._bound_mappings(self._pool.by_bound(together))
        while self._admit_first(max(most - opened, 0), in_order=in_order):
            pass  # bounds rose: others come first

    def _admit_first(self, most: int, *, in_order: bool) -> bool:
        """Makes the first bounded layouts of the pool candidates; whether an old bound of one rose."""
        rows, is_risen = self._pool.by_bound(most, bounded=not in_order), False
        for row in rows[np.logical_and.accumulate(self._pool.is_bounded[rows])].tolist():
            before = self._pool.mappings[row]
            assert before is not None
            index, layout = int(self._pool.branch[row]), self._pool.scalar(row)
            bounds = self._branches[index].pricing.tightened(layout, before)
            if bounds.least_s >= self._cutoff_s:
                self.certificate.bounded_out += 1
            elif bounds.least_s > before.least_s:
                self._pool.set_mappings(row, bounds)
                is_risen = True
                continue
            else:
                self.chooser.add(index, layout, bounds)
            self._pool.close(row)
        return is_risen

    def _bound_families(self, rows: IntArray) -> None:
        """Bounds what only differs in what makes room at once, under true mappings."""
        every, rows = len(rows), self._pool.one_of_each_family(rows)
        if self._first is not None and 2 * len(rows) > every:
            return  # most would be bounded twice: families are of one or two there
        bound_s = np.zeros(len(rows))
        for index in np.unique(self._pool.branch[rows]):
            own = np.flatnonzero(self._pool.branch[rows] == index)
            bound_s[own] = self._branches[index].relief_bound_s(self._pool.take(rows[own]))
        if len(rows):
            self._pool.bound_families(rows, bound_s)

    def _bound_mappings(self, rows: IntArray) -> None:
        """Tightens the bounds of layouts in the pool to those of their true mappings."""
        rows = rows[~self._pool.is_bounded[rows] & (self._pool.bound_s[rows] < self._cutoff_s)]
        for index in np.unique(self._pool.branch[rows]):
            own = rows[self._pool.branch[rows] == index]
            bounded = self._branches[index].mapping_bounds(
                self._pool.take(own), self._top_k, below_s=self._cutoff_s
            )
            self._mapped.append((int(index), self._pool.take(own), self._pool.bound_s[own].copy()))
            for row, bounds in zip(own, bounded, strict=True):
                self._pool.set_mappings(int(row), bounds)

    def _price(self, candidate: Candidate) -> None:
        """Prices a candidate exactly."""
        branch = self._branches[candidate.branch]
        priced = branch.pricing.exact(candidate.layout, candidate.mappings, self._cutoff_s)
        self._undecided_s = min(self._undecided_s, branch.pricing.undecided_s)
        self.certificate.priced += 1
        if priced is not None:
            priced = replace(priced, execution=branch.execution_of(priced.layout))
        for each in branch.pricing.overfull:
            self.certificate.overfull(each.cut_uses)
        self.chooser.learn(candidate, priced, branch.pricing.overfull)
        if priced is not None:
            self._take(priced)

    def _take(self, priced: Priced) -> None:
        """Takes a price among the best."""
        known = self._on_all_gpus
        if int(priced.layout.gpus) == self._space.workload.gpus and (
            known is None or priced.step_time_s < known.step_time_s
        ):
            self._on_all_gpus = priced
        if not self._best:
            self._stop_at(self._deadline)
        self._best.append((priced.step_time_s, self.certificate.priced, priced))
        self._best.sort(key=lambda entry: entry[:2])
        del self._best[self._top_k :]
        if self._any_plan:
            raise AnyPlanFoundError
        if priced is self._best[0][2]:
            self._say(f"{priced.step_time_s:.4g} s a step, {len(self._pool)} layouts left")


def _undecided(layout: Layout) -> Layout:
    """A layout as it was before the number of recomputed layers was decided."""
    return replace(layout, recompute_layers=0)


def _is_same_run(one: Priced, other: Priced) -> bool:
    """Whether two prices are of one layout under one execution."""
    same_layout = _undecided(one.layout) == _undecided(other.layout)
    return same_layout and one.execution == other.execution


# Every layout of a small space that can fit, priced: no bounds on time, no pruning, no solver.
#
# Only the split of the layers is not enumerated (there are millions of splits of 32 layers over 8 stages): it
# comes from `meshwright.planner.bounds.layer_split`, whose exactness has tests of its own. Layouts are priced
# many at a time, on all processes that the command may use; their prices are those of one at a time.


LARGEST_SPACE = 200_000
_FIRST_TOGETHER, _MOST_TOGETHER = 64, 1024
"""Layouts priced at a time, at first, so that a short time limit has some, and at most."""


@dataclass(kw_only=True)
class _PartPriced:
    """The best of some layouts, and what became of the others."""

    best: list[tuple[float, int, Priced]] = field(default_factory=list)
    """Seconds, number and price, in their order."""
    certificate: Certificate = field(default_factory=Certificate)
    undecided_s: float = inf
    unlisted_s: float = inf
    is_whole: bool = True
    """Whether all of them were priced in time."""

    def add(self, other: _PartPriced, top_k: int) -> None:
        """Takes what came of further layouts.

        Parameters
        ----------
        other
            Of layouts that this one has none of.
        top_k
            Prices that are kept.
        """
        self.best = sorted([*self.best, *other.best], key=lambda entry: entry[:2])[:top_k]
        self.certificate.priced += other.certificate.priced
        for name, count in other.certificate.ruled_out.items():
            self.certificate.rule_out(name, count)
        self.undecided_s = min(self.undecided_s, other.undecided_s)
        self.unlisted_s = min(self.unlisted_s, other.unlisted_s)
        self.is_whole = self.is_whole and other.is_whole


def search_exhaustively(
    branches: Sequence[Branch],
    *,
    top_k: int = 1,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Prices every legal layout. Raises InputError if the space has more than `LARGEST_SPACE` layouts.

    `progress` is called with one line as layouts are priced.

    Parameters
    ----------
    branches
        Executions with their spaces; one with more than `LARGEST_SPACE` layouts is refused.
    top_k
        Plans that are kept, at least 1.
    time_limit_s
        Seconds of the clock; None without a limit. Behind it the best so far is the answer, without a bound.
    progress
        Takes one line at a time.
    """
    deadline = inf if time_limit_s is None else time.monotonic() + time_limit_s
    every, sizes = [], []
    for branch in branches:
        every.append(branch.space.degrees(branch.space.workload.gpus))
        sizes.append(int(branch.space.layouts_per_degrees(every[-1]).sum()))
        if sizes[-1] > LARGEST_SPACE:
            raise InputError(
                f"method: exhaustive prices every layout one by one, and there are {sizes[-1]}; at most "
                f"{LARGEST_SPACE} are allowed. Pin some choices (--pin tp=8,pp=4), or use --method cp-sat"
            )
        branch.pricing.stop_at(deadline)
    found = _PartPriced(certificate=Certificate(layouts=sum(sizes), executions=len(branches)))
    tasks: list[Callable[[], _PartPriced]] = []
    fitting = []
    for branch, own_degrees in zip(branches, every, strict=True):
        layouts = branch.space.layouts(own_degrees)
        fitting.append(_that_may_fit(layouts, branch.pricing, found.certificate))
    count, before = sum(layouts.broadcast_shape()[0] for layouts in fitting), 0
    together = _FIRST_TOGETHER

    def say(number: int) -> None:
        if progress is not None:
            progress(f"{number} of {count} layouts priced")

    for branch, layouts in zip(branches, fitting, strict=True):
        start, size = 0, layouts.broadcast_shape()[0]
        while start < size:
            # What is known of slots grows with every price: one process has all layouts of an execution then.
            end = min(start + together, size) if branch.pricing.prices_matrices else size
            part = layouts.take(slice(start, end))
            of_part = partial(_priced_in_parts, branch, part, before + start, top_k, say)
            tasks.append(partial(of_part, deadline=deadline))
            start, together = end, min(2 * together, _MOST_TOGETHER)
        before += size
    for part_priced in side_by_side(tasks):
        found.add(part_priced, top_k)
    best = found.best
    unpriced_s = min(found.undecided_s, found.unlisted_s) if found.is_whole else 0.0
    bound_s = min(best[0][0] if best else inf, unpriced_s)
    status = "infeasible" if bound_s == inf else "unknown"
    if best:
        status = "optimal" if bound_s == best[0][0] else "feasible"
    return Outcome(
        status=status,
        best=tuple(priced for _, _, priced in best),
        lower_bound_s=bound_s if 0 < bound_s < inf else None,
        certificate=found.certificate,
    )


def _priced_in_parts(
    branch: Branch,
    layouts: Layout,
    first: int,
    top_k: int,
    say: Callable[[int], None],
    *,
    deadline: float,
) -> _PartPriced:
    """The prices of some layouts [n], the first of which has a number; `say` is told how far they are.

    Behind the deadline no rule is asked either: of the many layouts left that alone takes minutes.
    """
    every, start, size = _PartPriced(), 0, layouts.broadcast_shape()[0]
    while start < size:
        if time.monotonic() > deadline:
            every.is_whole = False
            break
        end = size if branch.pricing.prices_matrices else min(start + _FIRST_TOGETHER, size)
        every.add(_part_priced(branch, layouts.take(slice(start, end)), first + start), top_k)
        say(first + end)
        start = end
    return every


def _part_priced(branch: Branch, layouts: Layout, first: int) -> _PartPriced:
    """The same of layouts that are priced together."""
    part, pricing, legal = _PartPriced(), branch.pricing, []
    for row in range(layouts.broadcast_shape()[0]):
        broken = _first_broken(layouts.scalar(row), branch)
        if broken is None:
            legal.append(row)
        else:
            part.certificate.rule_out(broken, 1)
    priced_in_time = 0
    for row, priced in pricing.exact_each(layouts.take(np.array(legal, dtype=np.int64))):
        priced_in_time += 1
        part.undecided_s = min(part.undecided_s, pricing.undecided_s)
        if priced is None:
            part.certificate.rule_out(HbmCapacity.name, 1)
            continue
        part.certificate.priced += 1
        alone = layouts.scalar(legal[row])
        best = pricing.exact_apart(alone, 0.0, priced.step_time_s) or priced
        part.undecided_s = min(part.undecided_s, pricing.undecided_s)
        as_run = replace(best, execution=branch.execution_of(best.layout))
        part.best.append((best.step_time_s, first + legal[row], as_run))
    part.unlisted_s, part.is_whole = pricing.unlisted_s, priced_in_time == len(legal)
    return part


def _that_may_fit(layouts: Layout, pricing: CostModelPricing, certificate: Certificate) -> Layout:
    """The layouts of which some split may fit; the others would need more memory under any."""
    memory_gib, _ = pricing.least_memory_gib(layouts)
    table = Candidates(workload=pricing.workload, layouts=layouts, memory_gib=memory_gib)
    fits = HbmCapacity().excess(table) <= 0
    certificate.rule_out(HbmCapacity.name, int(np.sum(~fits)))
    return layouts.take(fits)


def _first_broken(layout: Layout, branch: Branch) -> str | None:
    """The first rule, memory aside, that the even split of a layout breaks by the rule's own check."""
    workload = branch.run_as(layout)
    stages = any_stages(workload, layout)
    if stages is None:
        return "layers-by-stages"
    longest_stage = max(max(rank) for rank in stages)
    recomputed = Layout(
        **{
            **vars(layout),
            "recompute_layers": longest_stage if layout.recomputes_layers else 0,
        }
    )
    plan = FinishedPlan(
        workload=workload, layout=recomputed, stages=stages, memory_gib=(0.0,), spans={}
    )
    for rule in branch.rules:
        if not isinstance(rule, HbmCapacity | HostMemory) and rule.check(plan) is not None:
            return rule.name
    return None


# The search over execution choices and layouts together.


PricingOf = Callable[..., CostModelPricing]


def search_executions(
    request: PlanRequest,
    pricing_of: PricingOf,
    progress: Progress | None = None,
    *,
    on_first: Callable[[Priced], None] | None = None,
    begin_with: Layout | None = None,
    run_as: Execution | None = None,
    counts: bool = False,
    most_priced: int | None = None,
    params: SearchParams | None = None,
    own_buckets: bool = False,
    corrections: GainCorrections | None = None,
    sought: Sought = ALL_PLANS,
    known_survey: KnownSurvey | None = None,
) -> Outcome:
    """The best layouts of a request under any execution that it may choose.

    Parameters
    ----------
    request
        What to plan.
    pricing_of
        Makes the prices of a workload.
    progress
        Called with one line whenever a better plan is found.
    on_first
        Called with the price of the layout that the search begins with, where there is one.
    begin_with
        A layout that is likely good, or an array of some, priced first.
    run_as
        How that layout, or the best one where none is given, is likely run; under other executions it is then
        no more than one of all.
    counts
        Whether what the search counts is read, where it begins with a layout.
    most_priced
        Layouts that the search may price.
    params
        How far the search goes at a time.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    corrections
        What prices are multiplied by, all that is answered among them.
    sought
        Which plans are asked for.
    known_survey
        What was surveyed of this request, or of one with a larger space.
    """
    branches = branches_of(request, pricing_of, own_buckets=own_buckets, corrections=corrections)
    if not branches:
        return Outcome(status="infeasible", best=(), lower_bound_s=None, certificate=Certificate())
    if request.method == "exhaustive":
        return search_exhaustively(
            branches, top_k=request.top_k, time_limit_s=request.time_limit_s, progress=progress
        )
    return LayoutSearch(
        space_of(request),
        branches,
        top_k=request.top_k,
        seed=request.seed,
        time_limit_s=request.time_limit_s,
        begin_with=begin_with,
        run_as=run_as,
        counts=counts,
        sought=sought,
        known_survey=None if corrections is not None else known_survey,
        most_priced=most_priced,
        progress=progress,
        on_first=on_first,
        params=params,
        routing=_routing(request),
    ).run()


def survey_part(
    request: PlanRequest,
    pricing_of: PricingOf,
    likely: Layout,
    below_s: float,
    *,
    part: int = 0,
    parts: int = 1,
) -> Survey | None:
    """The layouts of a request that may take less than some seconds, under one part of its executions.

    Parameters
    ----------
    request
        What is surveyed.
    pricing_of
        Makes the prices of a workload.
    likely
        A layout that is likely fast.
    below_s
        Seconds of a step.
    part, parts
        Which part of the executions, of how many.

    Returns
    -------
    Survey or None
        None where the time limit came first.
    """
    every = branches_of(request, pricing_of)
    branches = every[len(every) * part // parts : len(every) * (part + 1) // parts]
    search = LayoutSearch(
        space_of(request),
        branches,
        time_limit_s=request.time_limit_s,
        begin_with=likely,
        sought=Sought(below_s=below_s),
    )
    try:
        return search.survey()
    except OutOfTimeError:
        return None


def _routing(request: PlanRequest) -> JointRouting | None:
    """Loads whose placement the model may choose; None where experts stay in their own order."""
    loads = request.expert_loads
    return None if loads is None or not request.places_experts else loads.routing()


def branches_of(
    request: PlanRequest,
    pricing_of: PricingOf,
    *,
    own_buckets: bool = False,
    corrections: GainCorrections | None = None,
) -> list[Branch]:
    """A branch for each execution that goes with some layout, the plainest first.

    Under a limited cut gradient buckets keep the framework's own size: another one shortens the phase in
    which the cut is used, so that it may be used too much.

    Parameters
    ----------
    request
        Its execution choices and its space.
    pricing_of
        Makes the prices of a workload.
    own_buckets
        Whether gradient buckets keep the framework's own size.
    corrections
        What prices are multiplied by; None for nothing.
    """
    is_open = not own_buckets and request.max_cut_use >= 1
    alike: dict[Execution, list[tuple[Execution, Space]]] = {}
    for execution in request.execution_options.executions():
        space = space_of(request, execution)
        axes = (*LAYER_AXES, "recompute", "offloads")
        if all(getattr(space, axis) for axis in axes):
            joint = deduplicates(space.workload) and space.workload.model.moe is not None
            run = replace(execution, moe_dispatch="deduplicated") if joint else execution
            alike.setdefault(run, []).append((execution, space))
    branches = []
    for (execution, space), *twins in alike.values():
        names = tuple(twin.moe_dispatch for twin, _ in twins)
        workload = replace(space.workload, other_dispatchers=names)
        pricing = pricing_of(replace(workload, chooses_buckets=is_open))
        branches.append(
            branch_of(replace(space, workload=workload), pricing, execution, corrections)
        )
    return branches


def branch_of(
    space: Space,
    pricing: CostModelPricing,
    execution: Execution | None = None,
    corrections: GainCorrections | None = None,
) -> Branch:
    """A branch with the rules of its workload.

    Parameters
    ----------
    space
        Of the execution.
    pricing
        Of the space's workload, uncorrected.
    execution
        How layouts are run; the plainest way where none is named.
    corrections
        What prices are multiplied by; None for nothing.
    """
    if corrections is not None:
        pricing = CorrectedPricing(pricing, corrections)
    return Branch(
        execution=execution or Execution(),
        space=space,
        pricing=pricing,
        rules=tuple(rules_for(space.workload)),
        corrections=corrections,
    )
