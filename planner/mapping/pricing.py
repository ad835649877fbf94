"""Prices of layouts on an irregular allocation, each under the mapping that is fastest for it.

A layout's mappings have few prices (`profiles`). The cheapest profile that some mapping keeps is the layout's
price; which ones can be kept is asked of `Packing`, and every answer holds for all layouts with the same
slots. Where there are too many profiles, or a question stays open, a mapping is tried and the bound stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels, full_levels, is_irregular
from meshwright.constraints.fabric import keeps_inside
from meshwright.costmodel.collectives import best_beyond
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import (
    GROUPS,
    LAYER_AXES,
    PLACED_AXES,
    ROUNDING,
    Layout,
    Placement,
    StagedPlacement,
)
from meshwright.costmodel.placement import placement_on
from meshwright.costmodel.rates import calibrated_constants, links_of
from meshwright.costmodel.schedules import prices_stages_apart
from meshwright.costmodel.step_time import make_context
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, OutOfTimeError
from meshwright.planner.bounds.exact_cost import MappingBounds, Priced
from meshwright.planner.bounds.layer_split import balanced_stages
from meshwright.planner.bounds.mappings import Matrices, ranks_on, rows_under, shared_times
from meshwright.planner.bounds.pricing import DEFAULT_PRICING, CostModelPricing, PricingParams
from meshwright.planner.mapping.counted import (
    CountedMappings,
    Degrees,
    KindsReach,
    Row,
    counted_mappings,
    cover_of,
    degrees_of,
    groups_lie_as_priced,
    has_unlisted,
    most_members,
    takes_parts_of_nodes,
)
from meshwright.planner.mapping.cuts import mapping_use
from meshwright.planner.mapping.effective import PROFILE, Peaks, PlacedAs, placement_of
from meshwright.planner.mapping.joint import (
    PATIENT_WORK,
    Cells,
    Grid,
    Need,
    Packing,
    choice_instance,
    least_traffic_within,
    slots_of_a_group,
    smallest_parts,
    with_whole_groups,
)
from meshwright.planner.mapping.least_traffic import least_traffic
from meshwright.planner.mapping.problem import FloatArray, IntArray, MappingProblem, loads_of
from meshwright.planner.mapping.profiles import Placements, Profiles, profile_bounds, profiles_of
from meshwright.planner.mapping.slots import Instance, assignment_of_ranks, ranks_of
from meshwright.planner.solvers.clock import current_end_s

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

# Prices of layouts whose mappings onto parts of nodes are listed and counted; bounds of all others.


@dataclass(kw_only=True)
class _Unlisted:
    """What is known of a layout's mappings that are not listed."""

    bound_s: float
    """None is faster than this."""
    least_s: float
    """Nor than this, whatever the mapping."""
    groups: tuple[int, ...]
    """Numbers of shard groups that the layout could have instead."""


_ANY_BOUND = MappingBounds(
    matrices={PROFILE: np.zeros((1, 1), dtype=np.int64)}, bound_s=np.full(1, -inf)
)
"""Of one mapping, not to be left out for its bound."""
MOST_WAYS_WITHIN = 20_000
"""To reach no further than a row, of one layout."""
MOST_ROWS = 400
"""Rows that what no mapping of some degrees beats may fall into."""


class PartsOfNodes:
    """The mappings of layouts that `takes_parts_of_nodes`, under one execution."""

    def __init__(self, workload: Workload, limit_gib: float) -> None:
        self._workload, self._limit_gib = workload, limit_gib
        self._unlisted: dict[Layout, _Unlisted] = {}
        """Layouts bounded so far that have mappings which are not listed."""
        self._is_monotone: dict[tuple[int, bool], bool] = {}
        """By GPUs, and whether groups of several ranks exchange all with all."""
        self.deadline = inf
        """On the clock of `time.monotonic`; behind it no mappings are counted for bounds."""

    @property
    def unlisted_s(self) -> float:
        """Of the layouts bounded so far: no mapping that is not listed is faster than this."""
        return min((one.bound_s for one in self._unlisted.values()), default=inf)

    def has(self, layout: Layout, slots_of: Callable[[Layout], Instance | None]) -> bool:
        """Whether a layout's mappings are counted; `slots_of` has its slots, asked where they matter.

        Parameters
        ----------
        layout
            One layout.
        slots_of
            Slots of a layout; None where none hold it.
        """
        return takes_parts_of_nodes(self._workload.cluster, layout, slots_of)

    def counted(self, layout: Layout) -> CountedMappings | None:
        """None where no mapping keeps tensor groups inside nodes.

        Parameters
        ----------
        layout
            One layout.
        """
        experts = self._workload.model.moe is not None
        return counted_mappings(self._workload.cluster, layout, experts=experts)

    def least_s(self, layouts: Layout, each: Sequence[Layout], below_s: float) -> FloatArray:
        """Never above the price of any mapping of some layouts, [n]; 0 where all mappings are listed.

        Parameters
        ----------
        layouts
            Shape [n].
        each
            The same one by one.
        below_s
            Seconds above which bounds need not be tight; where they are infinite, none is looked for.
        """
        cluster, seconds = self._workload.cluster, np.zeros(len(each))
        is_open = [below_s < inf and has_unlisted(cluster, layout) for layout in each]
        rows = np.flatnonzero(is_open)
        if len(rows):
            most = (most_members(cluster, each[row]).take(None) for row in rows.tolist())
            bounds = profile_bounds(
                self._workload,
                layouts.take(rows),
                [Placements(placement=placement) for placement in most],
                self._limit_gib,
                below_s=below_s,
                or_less=True,
            )
            seconds[rows] = np.concatenate(bounds)
        return seconds

    def bounds(
        self,
        layouts: Layout,
        each: Sequence[Layout],
        least_s: FloatArray,
        packed_s: FloatArray,
        numbers_of_groups: Sequence[int],
        *,
        below_s: float,
    ) -> list[MappingBounds]:
        """Bounds of every listed mapping of some layouts, [n]; the others lower `unlisted_s`.

        Raises OutOfTimeError behind the deadline.

        Parameters
        ----------
        layouts
            Shape [n].
        each
            The same one by one.
        least_s
            As `least_s` has it, for the same seconds.
        packed_s
            Seconds that each takes at the least, however its groups lie; shape [n].
        numbers_of_groups
            Of shard groups that the layouts could have instead.
        below_s
            Seconds above which bounds need not be tight.
        """
        found = {}
        for row, layout in enumerate(each):
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            found[row] = self.counted(layout)
        counted = {row: one for row, one in found.items() if one is not None}
        own = layouts.take(np.array(list(counted), dtype=np.int64))
        listed = [Placements(placement=one.placement) for one in counted.values()]
        seconds = profile_bounds(
            self._workload, own, listed, self._limit_gib, numbers_of_groups, below_s=below_s
        )
        every = [np.zeros(0)] * len(each)
        for (row, one), bound_s in zip(counted.items(), seconds, strict=True):
            inside = keeps_inside(self._workload, each[row], one.placement)
            every[row] = np.where(inside, np.maximum(bound_s, packed_s[row]), inf)
        open_rows = [row for row, one in counted.items() if not self._is_all(each[row], one)]
        unknown = {row: counted[row] for row in open_rows if not least_s[row]}
        others = self._others_s(layouts, unknown, numbers_of_groups)
        others_s = least_s.copy()
        others_s[list(unknown)] = others
        for row in open_rows:
            packed = float(packed_s[row])
            self._unlisted[each[row]] = _Unlisted(
                bound_s=max(float(others_s[row]), packed),
                least_s=packed,
                groups=tuple(numbers_of_groups),
            )
        return [
            MappingBounds(matrices={PROFILE: np.arange(len(bound_s))[:, None]}, bound_s=bound_s)
            for bound_s in every
        ]

    def _others_s(
        self,
        layouts: Layout,
        counted: dict[int, CountedMappings],
        numbers_of_groups: Sequence[int],
    ) -> list[float]:
        """Never above the price of any mapping at all, of some of the layouts."""
        own = layouts.take(np.array(list(counted), dtype=np.int64))
        most = [Placements(placement=one.most) for one in counted.values()]
        bounds = profile_bounds(
            self._workload, own, most, self._limit_gib, numbers_of_groups, or_less=True
        )
        return [float(bound_s.min()) for bound_s in bounds]

    def _is_all(self, layout: Layout, counted: CountedMappings) -> bool:
        """Whether no mapping that is not listed is faster than all that are.

        One of these reaches as far as any, and nothing is faster for reaching less far; or none keeps the
        groups inside a domain that the workload names.
        """
        if not np.any(keeps_inside(self._workload, layout, counted.most)):
            return True
        return counted.most_is_reached and self._is_ordered(layout)

    def _is_ordered(self, layout: Layout) -> bool:
        """Whether nothing is faster for reaching less far: no level is faster than one inside it."""
        key = (int(layout.gpus), int(layout.ep) * int(layout.cp) > 1)
        if key not in self._is_monotone:
            gpus, exchanges = key
            levels = fabric_levels(self._workload.cluster, gpus)
            links = links_of(levels, calibrated_constants(self._workload))
            best = best_beyond(links)
            names = ["bytes_per_s", "latency_s", "half_bytes", "fill_s"]
            if exchanges:
                names += ["all_to_all_bytes_per_s", "exchange_half_bytes", "dispatched_bytes_per_s"]
            names += ["moving_bytes_per_s"] if links.moving_bytes_per_s is not None else []
            self._is_monotone[key] = links.rails is None and all(
                np.array_equal(getattr(links, name), getattr(best, name)) for name in names
            )
        return self._is_monotone[key]

    def exact(
        self, layout: Layout, mappings: MappingBounds, cutoff_s: float
    ) -> tuple[Priced | None, float]:
        """The fastest listed mapping, None where it does not beat the cutoff; and a bound of all others where
        `unlisted_s` has none.

        Parameters
        ----------
        layout
            One layout.
        mappings
            What `bounds` gave for it.
        cutoff_s
            Seconds that a mapping must beat.
        """
        counted = self.counted(layout)
        if counted is None:
            return None, inf
        others_s = inf
        if layout not in self._unlisted and not self._is_all(layout, counted):
            others_s = self._others_s(layout.flat(), {0: counted}, ())[0]
        inside = keeps_inside(self._workload, layout, counted.placement)
        bound_s = np.where(inside, mappings.bound_s, inf)
        pricing = PlacedAs(self._workload, counted.placement)
        priced = pricing.exact(layout, replace(mappings, bound_s=bound_s), cutoff_s)
        others_s = min(others_s, pricing.undecided_s)
        if priced is None:
            return None, others_s
        ranks = counted.ranks(priced.matrix[PROFILE][0])
        return replace(priced, matrix={}, ranks=ranks), others_s

    def beyond_the_list(self, cutoff_s: float) -> Iterator[Priced]:
        """Mappings beyond those listed, each faster than the cutoff and those before; raises `unlisted_s`.

        Layouts are taken by degrees, the least bounds first. A row that no mapping is known to reach is asked
        about (`reach`). One that is impossible falls into smaller ones; one that is reached stands for all
        that reach less far, which are no faster where links do not get faster outwards.

        Parameters
        ----------
        cutoff_s
            Seconds that a mapping must beat; infinite where there is no price.
        """
        groups: dict[Degrees, list[Layout]] = {}
        for layout, one in sorted(self._unlisted.items(), key=lambda item: item[1].bound_s):
            if one.bound_s < cutoff_s:
                groups.setdefault(degrees_of(layout), []).append(layout)
        for layouts in groups.values():
            if min(self._unlisted[layout].bound_s for layout in layouts) >= cutoff_s:
                continue
            for priced in self._closed(layouts, cutoff_s):
                cutoff_s = priced.step_time_s
                yield priced
            # Nothing is gained above what stays open.
            cutoff_s = min(cutoff_s, *(self._unlisted[layout].bound_s for layout in layouts))

    def _closed(self, layouts: Sequence[Layout], cutoff_s: float) -> Iterator[Priced]:
        """Closes layouts of the same degrees, as far as it goes."""
        cover = cover_of(self._workload.cluster, layouts[0])
        reach = cover.reach
        reach.deadline = self.deadline
        alike = self._of_any_mapping(layouts, reach)
        if not alike:
            return
        bounds: dict[Row, FloatArray] = {}
        stuck: set[int] = set()
        while time.monotonic() < self.deadline:
            fresh = [row for row in cover.rows if row not in bounds]
            bounds |= self._bounds_of_rows(alike, reach.placement(fresh), fresh)
            table = np.stack([bounds[row] for row in cover.rows])
            for number, layout in enumerate(alike):
                unlisted = self._unlisted[layout]
                unlisted.bound_s = max(float(table[:, number].min()), unlisted.least_s)
            seconds = [self._unlisted[layout].bound_s for layout in alike]
            open_ = [
                number for number, s in enumerate(seconds) if number not in stuck and s < cutoff_s
            ]
            if not open_ or len(cover.rows) > MOST_ROWS:
                return
            row = list(cover.rows)[int(np.argmin(table[:, open_].min(axis=1)))]
            if self._are_priced(alike, open_, reach.placement([row]), bounds[row], cutoff_s):
                continue
            gpus = reach.find(row)
            if gpus is None and not reach.is_impossible(row):
                gpus = reach.find(row, patiently=True)
            if gpus is None and not reach.is_impossible(row):
                return
            if gpus is None:
                cover.split(row)
                continue
            for number in [number for number in open_ if bounds[row][number] < cutoff_s]:
                priced, closes = self._priced_at(alike[number], reach, gpus, cutoff_s)
                least_s = inf if closes else 0.0
                if not closes and not self._is_ordered(alike[number]):
                    within_s = cutoff_s if priced is None else priced.step_time_s
                    better, least_s = self._by_ways(alike[number], reach, row, within_s)
                    priced = better or priced
                if priced is not None:
                    cutoff_s = priced.step_time_s
                    yield priced
                bounds[row][number] = max(bounds[row][number], least_s)
                if least_s < cutoff_s:
                    stuck.add(number)

    def _by_ways(
        self, layout: Layout, reach: KindsReach, row: Row, cutoff_s: float
    ) -> tuple[Priced | None, float]:
        """The fastest mapping that reaches no further than a row, where less far may be faster: each way to
        reach has its own price. None where none beats the cutoff; and what no way in doubt is faster than.
        """
        if self._workload.lengths is not None:
            return None, 0.0  # packed samples send between replicas, which are not asked about
        ways = reach.ways_within(row, MOST_WAYS_WITHIN)
        if ways is None:
            return None, 0.0
        if not len(ways):
            return None, inf
        best: Priced | None = None
        doubt_s = inf
        placement = reach.placement(ways)
        (bound_s,) = profile_bounds(
            self._workload,
            layout.flat(),
            [Placements(placement=placement)],
            self._limit_gib,
            below_s=cutoff_s,
        )
        bound_s = np.where(keeps_inside(self._workload, layout, placement), bound_s, inf)
        pricing = PlacedAs(self._workload, placement)
        while time.monotonic() < self.deadline:
            priced, undecided_s = _fastest(pricing, layout, bound_s, cutoff_s)
            doubt_s = min(doubt_s, undecided_s)
            if priced is None:
                return best, doubt_s
            way = ways[priced.matrix[PROFILE][0]]
            wanted = tuple(way.tolist())
            gpus = reach.find(wanted)
            if gpus is None and reach.is_impossible(wanted):
                bound_s[np.all(ways >= way, axis=1)] = inf
                continue
            is_known = gpus is not None and reach.is_reached(way, gpus)
            if gpus is None or not is_known or int(layout.shard_groups) > 1:
                return best, min(doubt_s, priced.step_time_s)
            best = replace(priced, matrix={}, ranks=reach.ranks(gpus))
            cutoff_s = priced.step_time_s
        return best, min(doubt_s, float(bound_s.min()))

    def _are_priced(
        self,
        layouts: Sequence[Layout],
        numbers: Sequence[int],
        placement: Placement,
        bound_s: FloatArray,
        cutoff_s: float,
    ) -> bool:
        """Raises bounds of some layouts in a row, [layouts], to their prices there; whether one rose.

        Where nothing is faster for reaching less far, no mapping beats the price of a row that holds it.
        """
        is_raised = False
        for number in numbers:
            if bound_s[number] >= cutoff_s or not self._is_ordered(layouts[number]):
                continue
            pricing = PlacedAs(self._workload, placement)
            priced = pricing.exact(layouts[number], _ANY_BOUND, cutoff_s)
            least_s = inf if priced is None else priced.step_time_s
            least_s = min(least_s, pricing.undecided_s)
            is_raised |= least_s > bound_s[number] * SAME
            bound_s[number] = max(bound_s[number], least_s)
        return is_raised

    def _of_any_mapping(self, layouts: Sequence[Layout], reach: KindsReach) -> list[Layout]:
        """Those of some layouts whose mappings are unknown but for a list, which `reach` is told."""
        alike: list[Layout] = []
        most = reach.row(reach.most)
        for layout in layouts:
            counted = self.counted(layout)
            if counted is None or len(counted.most.tp) != 1:
                continue
            if reach.row(counted.most.take(0)) != most:
                continue
            if not alike:
                for gpus in counted.gpus:
                    reach.add(gpus)
            alike.append(layout)
        return alike

    def _bounds_of_rows(
        self, layouts: Sequence[Layout], placement: Placement, rows: Sequence[Row]
    ) -> dict[Row, FloatArray]:
        """Seconds by row, [layouts], of all mappings that reach no further."""
        if not rows:
            return {}
        columns = {
            name: np.array([getattr(layout, name) for layout in layouts])
            for name in vars(layouts[0])
        }
        groups = self._unlisted[layouts[0]].groups
        each = [Placements(placement=placement)] * len(layouts)
        seconds = np.stack(
            profile_bounds(
                self._workload, Layout(**columns), each, self._limit_gib, groups, or_less=True
            )
        )
        for number, layout in enumerate(layouts):
            seconds[number][~keeps_inside(self._workload, layout, placement)] = inf
        return {row: seconds[:, number].copy() for number, row in enumerate(rows)}

    def _priced_at(
        self, layout: Layout, reach: KindsReach, gpus: IntArray, cutoff_s: float
    ) -> tuple[Priced | None, bool]:
        """Under one mapping, None where that does not beat the cutoff; and whether mappings that reach less
        far everywhere do not either.
        """
        placement = Placement(**reach.members(gpus)).take(None)
        blocks = reach.blocks[:, gpus]
        if int(layout.shard_groups) > 1 and not groups_lie_as_priced(placement, 0, blocks, layout):
            return None, False
        closes = self._is_ordered(layout)
        if not keeps_inside(self._workload, layout, placement)[0]:
            return None, closes
        pricing = PlacedAs(self._workload, placement)
        priced = pricing.exact(layout, _ANY_BOUND, cutoff_s)
        best_s = cutoff_s if priced is None else min(cutoff_s, priced.step_time_s)
        closes = closes and pricing.undecided_s >= best_s
        if priced is None or priced.step_time_s >= cutoff_s:
            return None, closes
        return replace(priced, matrix={}, ranks=reach.ranks(gpus)), closes


SAME = 1.0 + 1e-12


# How much is tried for one layout.


PROMISING = 1.05
"""Of the best price: within this an unproven layout gets the mapping with the least traffic."""
WORTH_APART = 1.01
"""Where experts' traffic slows a layer by less than this on the worst of places, that prices all stages."""
FEW_NEEDS = 8
"""Ways in which stages can lie that are priced without bounds of their own."""
MOST_WAYS_PRICED = 64
"""Ways in which a layout can lie that are priced to be stated; further ones stand by their bounds."""
TRIES = 3
"""Mappings priced where profiles stand for others too, so that none meets its profile's price."""
MAPPING_LIMIT_S = 2.0
"""Processor seconds for the mapping with the least traffic."""


@dataclass(kw_only=True, eq=False)
class _MappingSpace:
    """Where layouts of the same degrees can lie."""

    instance: Instance
    profiles: Profiles
    excluded: NDArray[np.bool_]
    """Profiles that no mapping keeps, as far as it is known; [k]."""
    probed: bool = False
    """Whether its mappings have been looked into."""
    apart: _MappingSpace | None = None
    """The same with stages priced apart, as near as counting slots allows, once it was needed."""
    by_stage: _MappingSpace | None = None
    """Of that, every way in which stages can lie, once it was needed."""


class Way(NamedTuple):
    """How far the groups of a layout reach under some of its mappings."""

    placement: Placement
    """Arrays [levels]."""
    need: Need | None
    """What that asks of the slots; None where nothing is asked of them."""
    bound_s: float
    priced: Priced | None
    """None where no price was worked out."""


class MappedPricing(CostModelPricing):
    """Prices by `costmodel` under the best mapping of each layout."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._packing = Packing()
        self._plain: dict[tuple[int, ...], Instance | None] = {}
        """Of one shard group, by degrees."""
        self._spaces: dict[tuple[int, ...], _MappingSpace | None] = {}
        self._parts = PartsOfNodes(workload, self._limit_gib)
        self._undecided_s = inf
        self._waiting: dict[Layout, tuple[float, MappingBounds]] = {}
        """Layouts with a question open: what no mapping in doubt is faster than, and their bounds."""
        self._stages_apart: dict[Layout, bool] = {}
        """Of layouts looked at: whether stages are priced by where their own expert groups lie."""

    def stop_at(self, deadline: float) -> None:
        """Whether a mapping exists is not asked behind this time, and bounds stay where they are.

        Parameters
        ----------
        deadline
            On the clock of `time.monotonic`.
        """
        super().stop_at(deadline)
        self._packing.deadline = self._parts.deadline = deadline

    @property
    def undecided_s(self) -> float:
        """Of the layout priced last: no mapping that was neither priced nor excluded is faster than this."""
        return self._undecided_s

    @property
    def unlisted_s(self) -> float:
        """Of all layouts whose mappings were bounded: no mapping that is not listed, or waits for an answer,
        is faster than this.
        """
        return min([self._parts.unlisted_s, *(seconds for seconds, _ in self._waiting.values())])

    def beyond_the_list(self, cutoff_s: float) -> Iterator[Priced]:
        """Mappings onto parts of nodes that are not listed, and those that questions left open, each faster
        than the cutoff and those before.

        Parameters
        ----------
        cutoff_s
            Seconds that a mapping must beat; infinite where there is no price.
        """
        for priced in self._parts.beyond_the_list(cutoff_s):
            cutoff_s = priced.step_time_s
            yield priced
        self._packing.question_work = PATIENT_WORK
        for layout in sorted(self._waiting, key=lambda layout: self._waiting[layout][0]):
            least_s, mappings = self._waiting[layout]
            if least_s >= cutoff_s:
                return
            space = self._space(layout)
            assert space is not None
            space.probed = False
            better = self.exact(layout, self.tightened(layout, mappings), cutoff_s)
            if better is not None:
                cutoff_s = better.step_time_s
                yield better
            if layout in self._waiting and self._waiting[layout][0] < cutoff_s:
                return  # nothing is gained above what stays open

    @property
    def prices_matrices(self) -> bool:
        """Mappings are assignments of slots to leaves."""
        return False

    def instance(self, layout: Layout) -> Instance | None:
        """The mapping problem of a layout; None where its groups do not fit the free slots.

        Parameters
        ----------
        layout
            One layout.
        """
        return self._on_slots(layout, None)

    def _on_slots(self, layout: Layout, plain: Instance | None) -> Instance | None:
        """`plain` is the problem of its degrees, where it is known."""
        workload, model = self._workload.on(int(layout.gpus)), self._workload.model
        stages = balanced_stages(model.layers, int(layout.pp), 1, model.stage_begins)
        if stages is None:
            return None
        try:
            if plain is None:
                return choice_instance(workload, layout, stages)
            return with_whole_groups(workload, layout, stages, plain)
        except InfeasibleError:
            return None

    def _space(self, layout: Layout) -> _MappingSpace | None:
        """None where no slots hold the layout. Shard groups that lie in the same slots share one."""
        if self._is_counted(layout):
            return None
        plain = self._plain_slots(layout)
        joined = None if plain is None else slots_of_a_group(self._workload, layout, plain)
        if plain is None or joined is None:
            return None
        key = (*_degrees(layout), joined)
        if key not in self._spaces:
            instance = self._on_slots(layout, plain)
            self._spaces[key] = None if instance is None else self._new_space(layout, instance)
        return self._spaces[key]

    def _tell_stages_apart(self, layouts: Layout) -> None:
        """Finds which of some layouts [n] have experts whose traffic is worth a price of each stage."""
        each = [layouts.scalar(row) for row in range(layouts.broadcast_shape()[0])]
        rows = [row for row, layout in enumerate(each) if layout not in self._stages_apart]
        self._stages_apart |= {each[row]: False for row in rows}
        for gpus in {int(each[row].gpus) for row in rows}:
            staged = [
                row
                for row in rows
                if int(each[row].gpus) == gpus and prices_stages_apart(each[row])
            ]
            if not staged or self._workload.model.moe is None:
                continue
            workload, layouts_there = self._workload.on(gpus), layouts.take(np.array(staged))
            sides = []
            for share in (workload.cluster.gpus_per_node, gpus):
                placement = _with_experts_in(workload, layouts_there, share)
                times = shared_times(make_context(workload, layouts_there, placement), LAYER_AXES)
                assert times is not None
                assert times.moe is not None
                sides.append(np.broadcast_to(np.asarray(times.moe.seconds), (len(staged),)))
            for row, cut_s, whole_s in zip(staged, *sides, strict=True):
                self._stages_apart[each[row]] = bool(cut_s > WORTH_APART * whole_s)

    def _is_counted(self, layout: Layout) -> bool:
        """Whether its mappings are listed and counted, for they take parts of nodes."""
        return self._parts.has(layout, self._plain_slots)

    def _plain_slots(self, layout: Layout) -> Instance | None:
        """The slots of a layout with one shard group; None where no slots hold it."""
        degrees = _degrees(layout)
        if degrees not in self._plain:
            self._plain[degrees] = self.instance(replace(layout, shard_groups=1))
        return self._plain[degrees]

    def _new_space(
        self, layout: Layout, instance: Instance, *, by_stage: bool = False
    ) -> _MappingSpace:
        workload = self._workload.on(int(layout.gpus))
        profiles = profiles_of(workload, instance, by_stage=by_stage)
        impossible = ~keeps_inside(self._workload, layout, profiles.placement)
        return _MappingSpace(instance=instance, profiles=profiles, excluded=impossible)

    def _space_apart(self, layout: Layout) -> _MappingSpace | None:
        """Where it can lie with stages priced apart; None where the worst block prices all of them anyway."""
        space = self._space(layout)
        if space is None or not self._stages_apart[layout]:
            return None
        if space.apart is None and _may_be_apart(space.instance):
            space.apart = self._new_space(layout, replace(space.instance, stages_apart=True))
        apart = space.apart
        is_staged = apart is not None and isinstance(apart.profiles.placement, StagedPlacement)
        return apart if is_staged else None

    def _by_stage(self, space: _MappingSpace, layout: Layout) -> _MappingSpace:
        """With the profiles of all ways in which stages can lie."""
        if space.by_stage is None:
            space.by_stage = self._new_space(layout, space.instance, by_stage=True)
        return space.by_stage

    def apart_bounds_s(self, layouts: Layout) -> FloatArray:
        """Never above `exact_apart` of layouts [n]; infinite where that is no less than `exact`.

        Parameters
        ----------
        layouts
            Shape [n].

        Returns
        -------
        array of float, shape [n]
            Seconds.
        """
        each = [layouts.scalar(row) for row in range(layouts.broadcast_shape()[0])]
        rows = [row for row, layout in enumerate(each) if not self._is_counted(layout)]
        self._tell_stages_apart(layouts.take(np.array(rows, dtype=np.int64)))
        near = ((row, self._space_apart(each[row])) for row in rows)
        spaces = {row: space for row, space in near if space is not None}
        bound_s = np.full(len(each), inf)
        if spaces:
            apart = layouts.take(np.array(list(spaces)))
            profiles = [space.profiles for space in spaces.values()]
            bounds = profile_bounds(self._workload, apart, profiles, self._limit_gib)
            for (row, space), seconds in zip(spaces.items(), bounds, strict=True):
                bound_s[row] = np.where(space.excluded, inf, seconds).min(initial=inf)
        return bound_s

    def exact_apart(self, layout: Layout, least_s: float, cutoff_s: float) -> Priced | None:
        """The fastest mapping with stages priced by their own places; None where none beats the cutoff.

        Parameters
        ----------
        layout
            One layout, its number of recomputed layers open.
        least_s
            Seconds that no mapping of it is faster than.
        cutoff_s
            Seconds that a mapping must beat.
        """
        self._undecided_s = inf
        self._tell_stages_apart(layout.flat())
        space = self._space_apart(layout)
        if space is None:
            return None
        return self._exact_by_stage(self._by_stage(space, layout), layout, least_s, cutoff_s)

    def _bounded_by_stage(self, space: _MappingSpace, layout: Layout) -> FloatArray:
        """Bounds of these profiles, with several virtual stages no matter which stage is which."""
        profiles, bound_s = space.profiles, np.full(len(space.excluded), inf)
        if int(layout.vpp) == 1:
            possible = np.flatnonzero(~space.excluded)
            own = [Placements(placement=profiles.placement.take(possible), apart=profiles.apart)]
            (bound_s[possible],) = profile_bounds(
                self._workload, layout.flat(), own, self._limit_gib, in_order=True
            )
            return bound_s
        of_need: dict[Need, list[int]] = {}
        for row in np.flatnonzero(~space.excluded).tolist():
            of_need.setdefault(profiles.needs[row], []).append(row)
        if len(of_need) <= FEW_NEEDS:
            bound_s[~space.excluded] = 0.0
        else:
            first = np.array([rows[0] for rows in of_need.values()])
            few = [Placements(placement=profiles.placement.take(first), apart=profiles.apart)]
            (each_s,) = profile_bounds(self._workload, layout.flat(), few, self._limit_gib)
            for rows, least_s in zip(of_need.values(), each_s.tolist(), strict=True):
                bound_s[rows] = least_s
        return bound_s

    def mappings(self, layout: Layout) -> Matrices:
        """The profiles of a layout, or its listed mappings, by number; none where no slots hold it."""
        space = self._space(layout)
        count = 0 if space is None else len(space.profiles.needs)
        if self._is_counted(layout):
            counted = self._parts.counted(layout)
            count = 0 if counted is None else len(counted.gpus)
        return {PROFILE: np.arange(count)[:, None]}

    def profiles(self, layout: Layout) -> Profiles | None:
        """None where no slots hold the layout."""
        space = self._space(layout)
        return None if space is None else space.profiles

    def tightened(self, layout: Layout, mappings: MappingBounds) -> MappingBounds:
        """Without the profiles that no mapping is known to keep by now.

        Parameters
        ----------
        layout
            One layout.
        mappings
            Its bounds, as `mapping_bounds` gave them before.
        """
        space = self._space(layout)
        if space is None or not np.any(np.isfinite(mappings.bound_s) & space.excluded):
            return mappings
        return replace(mappings, bound_s=np.where(space.excluded, inf, mappings.bound_s))

    def needs(self, layout: Layout) -> Sequence[Need | None]:
        """What each of `mappings` asks for."""
        space = self._space(layout)
        return () if space is None else space.profiles.needs

    def use_assignment(self, layout: Layout, cells: Cells, value: Callable[[Any], int]) -> None:
        """Takes the mapping that a model of layouts and mappings together has found.

        Parameters
        ----------
        layout
            The layout that was chosen.
        cells
            The counts of its grid in that model.
        value
            The value of an expression in the solution.
        """
        space = self._space(layout)
        if space is not None:
            self._packing.add(space.instance, cells.assignment(space.instance.problem, value))

    def degrees_bound_s(self, degrees: Layout, smallest_bubble: FloatArray) -> FloatArray:
        """Nothing is known of mappings before they are looked for."""
        del smallest_bubble
        return np.zeros(degrees.broadcast_shape())

    def relief_bound_s(self, layouts: Layout, numbers_of_groups: Sequence[int]) -> FloatArray:
        """Nothing is known of mappings before they are looked for."""
        del numbers_of_groups
        return np.zeros(layouts.broadcast_shape())

    def mapping_bounds(
        self, layouts: Layout, numbers_of_groups: Sequence[int] = (), *, below_s: float = inf
    ) -> list[MappingBounds]:
        """The bound under each profile; infinite where no mapping is known to keep it, or one shard group is
        no slower.

        Parameters
        ----------
        layouts
            Shape [n].
        numbers_of_groups
            Of shard groups that the layouts could have instead.
        below_s
            Seconds above which bounds need not be tight.

        Returns
        -------
        list of MappingBounds
            One for each layout, [profiles] or [listed mappings] each; a single one that holds for all of them
            where that is no less than `below_s`.
        """
        rows = [layouts.scalar(row) for row in range(layouts.broadcast_shape()[0])]
        is_counted = np.array([self._is_counted(layout) for layout in rows], dtype=bool)
        counted, least_s = np.flatnonzero(is_counted), np.zeros(len(rows))
        each = [rows[row] for row in counted]
        least_s[counted] = self._parts.least_s(layouts.take(counted), each, below_s)
        near = np.flatnonzero(least_s < below_s)
        packed_s = np.zeros(len(rows))
        packed_s[near] = self.lower_bound_s(layouts.take(near))
        counted = near[is_counted[near]]
        of_parts = self._parts.bounds(
            layouts.take(counted),
            [rows[row] for row in counted],
            least_s[counted],
            packed_s[counted],
            numbers_of_groups,
            below_s=below_s,
        )
        spaces = [self._space(layout) for layout in rows]
        held = [(row, space) for row, space in enumerate(spaces) if space is not None]
        profiles = [space.profiles for _, space in held]
        own = layouts.take(np.array([row for row, _ in held], dtype=np.int64))
        bounds = profile_bounds(
            self._workload, own, profiles, self._limit_gib, numbers_of_groups, below_s=below_s
        )
        all_bounds = [
            least_s[[row]] if least_s[row] >= below_s else np.zeros(0) for row in range(len(rows))
        ]
        for (row, space), bound_s in zip(held, bounds, strict=True):
            all_bounds[row] = np.where(space.excluded, inf, np.maximum(bound_s, packed_s[row]))
        for row, bounds_of_parts in zip(counted, of_parts, strict=True):
            all_bounds[row] = bounds_of_parts.bound_s
        return [
            MappingBounds(matrices={PROFILE: np.arange(len(bound_s))[:, None]}, bound_s=bound_s)
            for bound_s in all_bounds
        ]

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """The fastest profile that a mapping keeps: the fastest of all is priced, then asked for.

        Parameters
        ----------
        layout
            One layout, its number of recomputed layers open.
        mappings
            Its bounds, as `mapping_bounds` or `tightened` gave them.
        cutoff_s
            Seconds that a mapping must beat.

        Returns
        -------
        Priced or None
            None where nothing that was found beats the cutoff; `undecided_s` says what stays open.
        """
        self._undecided_s = inf
        space = self._space(layout)
        if self._is_counted(layout):
            listed, self._undecided_s = self._parts.exact(layout, mappings, cutoff_s)
            return listed
        if space is None:
            return None
        if not Grid.of(space.instance.problem).askable:
            return self._tried(space, layout, cutoff_s)
        best = self._at_once(space, layout, cutoff_s)
        if mappings.least_s < self._limit(best, cutoff_s):
            self._probe(space)
        pricing = PlacedAs(self._workload, space.profiles.placement)
        bound_s = np.where(space.excluded, inf, mappings.bound_s)
        best = self._asked_in_turn(space, pricing, layout, bound_s, best=best, cutoff_s=cutoff_s)
        self._waiting.pop(layout, None)
        if self._undecided_s < self._limit(best, cutoff_s):
            self._waiting[layout] = (self._undecided_s, mappings)
            self._undecided_s = inf
        return best

    def _exact_by_stage(
        self, space: _MappingSpace, layout: Layout, least_s: float, cutoff_s: float
    ) -> Priced | None:
        """The fastest mapping where stages are priced apart: what is asked least bounds first, then priced.

        Each mapping is priced with its stages in every order that prices tell apart. Profiles that ask for
        the same differ in that order alone; where one would be faster than the mapping, it stays undecided.
        """
        pricing = PlacedAs(self._workload, space.profiles.placement, Peaks())
        bound_s = self._bounded_by_stage(space, layout)
        if bound_s.min(initial=inf) < cutoff_s:
            self._probe(space)
        bound_s = np.where(space.excluded, inf, np.maximum(bound_s, least_s))
        return self._asked_in_turn(space, pricing, layout, bound_s, best=None, cutoff_s=cutoff_s)

    def _asked_in_turn(
        self,
        space: _MappingSpace,
        pricing: PlacedAs,
        layout: Layout,
        bound_s: FloatArray,
        *,
        best: Priced | None,
        cutoff_s: float,
    ) -> Priced | None:
        """The fastest profile that a mapping keeps, or the `best` that is known, if that is faster.

        The profile with the least price is asked for; one that no mapping keeps is left out, and all that ask
        for more.
        """
        tries = 0
        while True:
            limit = self._limit(best, cutoff_s)
            bound_s = self._possible_first(space, bound_s, limit)
            priced, undecided_s = _fastest(pricing, layout, bound_s, limit)
            self._undecided_s = min(self._undecided_s, undecided_s)
            if priced is None:
                return best
            row = priced.matrix[PROFILE][0]
            assignment = self._packing.find(space.instance, space.profiles.needs[row])
            if assignment is None:
                bound_s = self._without(space, bound_s, row, priced.step_time_s)
                continue
            real = self._best_of(space, [assignment], layout, limit)
            best, tries = real or best, tries + 1
            if real is not None and real.step_time_s <= priced.step_time_s * SAME:
                return best
            self._undecided_s = min(self._undecided_s, priced.step_time_s)
            if tries >= TRIES:
                return best
            bound_s[row] = inf

    def exact_each(self, layouts: Layout) -> Iterator[tuple[int, Priced | None]]:
        """One by one: what is known of slots grows with every price.

        Parameters
        ----------
        layouts
            Shape [n].
        """
        return self._each_alone(layouts)

    def _limit(self, best: Priced | None, cutoff_s: float) -> float:
        return cutoff_s if best is None else min(cutoff_s, best.step_time_s)

    def _at_once(self, space: _MappingSpace, layout: Layout, cutoff_s: float) -> Priced | None:
        """Under the mappings that are known: few questions are worth asking below a good price."""
        return self._best_of(space, self._packing.mappings(space.instance), layout, cutoff_s)

    def _tried(self, space: _MappingSpace, layout: Layout, cutoff_s: float) -> Priced | None:
        """Under the known mappings and, where these come close, the one with the least traffic."""
        self._undecided_s = self.mapping_bounds(layout.flat())[0].least_s
        best = self._at_once(space, layout, cutoff_s * PROMISING)
        if best is not None and np.isfinite(cutoff_s) and not space.probed:
            space.probed = True
            self._packing.add(space.instance, _solved(space.instance.problem, current_end_s()))
            best = self._at_once(space, layout, cutoff_s)
        return best if best is not None and best.step_time_s < cutoff_s else None

    def _probe(self, space: _MappingSpace) -> None:
        """Asks how far each axis can reach on its own: one answer rules out many profiles."""
        if space.probed:
            return
        space.probed = True
        strength, needs = space.profiles.strength, space.profiles.needs
        for axis in range(strength.shape[1]):
            other_axes = np.delete(strength, axis, axis=1)
            other_axes = other_axes - other_axes.min(axis=0)
            alone = [
                int(rows[np.argmin(other_axes[rows].sum(axis=1))])
                for value in np.unique(strength[:, axis])[1:]
                for rows in [np.flatnonzero(strength[:, axis] == value)]
            ]
            # A mapping keeps those before `low`, none those from `high` on.
            low, high = 0, len(alone)
            while low < high:
                middle = (low + high) // 2
                if self._packing.find(space.instance, needs[alone[middle]]) is not None:
                    low = middle + 1
                    continue
                if self._packing.impossible(needs[alone[middle]]):
                    space.excluded[space.profiles.implying(alone[middle])] = True
                high = middle

    def _possible_first(
        self, space: _MappingSpace, bound_s: FloatArray, limit_s: float
    ) -> FloatArray:
        """Asks for profiles in the order of their bounds until one is kept; the others cost no pricing."""
        while True:
            row = int(np.argmin(bound_s))
            if not bound_s[row] < limit_s:
                return bound_s
            if self._packing.find(space.instance, space.profiles.needs[row]) is not None:
                return bound_s
            bound_s = self._without(space, bound_s, row, float(bound_s[row]))

    def _without(
        self, space: _MappingSpace, bound_s: FloatArray, row: int, price_s: float
    ) -> FloatArray:
        """Leaves out a profile that no mapping was found for, and those known to be impossible with it."""
        if not self._packing.impossible(space.profiles.needs[row]):
            self._undecided_s = min(self._undecided_s, price_s)
            bound_s[row] = inf
            return bound_s
        space.excluded[space.profiles.implying(row)] = True
        return np.where(space.excluded, inf, bound_s)

    def ways_below(self, plan: Priced, placement: Placement, limit_s: float) -> list[Way]:
        """How a plan's layout can lie: as it does, and in each way that by its limits alone may beat a step.

        Parameters
        ----------
        plan
            A layout under a mapping, as it was priced.
        placement
            Of that mapping, arrays [levels].
        limit_s
            Seconds of that step, no more than the plan's.

        Returns
        -------
        list of Way
            The plan's own first; alone where its mappings take parts of nodes, which have no needs.
        """
        layout = replace(plan.layout, recompute_layers=0)
        space = self._space(layout)
        if space is None or plan.ranks is None:
            return [Way(placement, None, plan.step_time_s, plan)]
        apart = self._apart_of(plan)
        space = space if apart is None else self._by_stage(apart, layout)
        profiles = space.profiles
        instance, assignment = self._assigned(plan, stages_apart=apart is not None)
        need = profiles.need_of(
            placement_of(self._workload.on(int(layout.gpus)), instance, assignment)
        )
        ways = [Way(placement, need, plan.step_time_s, plan)]
        (bound_s,) = profile_bounds(self._workload, layout.flat(), [profiles], self._limit_gib)
        pricing = PlacedAs(self._workload, profiles.placement, Peaks())
        rows = np.argsort(bound_s, kind="stable")
        for row in rows[(bound_s < limit_s)[rows] & ~space.excluded[rows]].tolist():
            priced = None
            if len(ways) <= MOST_WAYS_PRICED:
                one = MappingBounds(matrices={PROFILE: np.array([[row]])}, bound_s=bound_s[[row]])
                priced = pricing.exact(layout, one, limit_s)
                if priced is None and pricing.undecided_s >= limit_s:
                    continue
            own = profiles.placement.take(row)
            if priced is not None:
                priced = replace(priced, matrix={}, stage_ep=_of_stages(own))
            ways.append(Way(own, profiles.needs[row], float(bound_s[row]), priced))
        return ways

    def leaf_names(self, layout: Layout) -> tuple[str, ...]:
        """Names of the leaves on which slots of a layout can be, with their pods where there are several.

        Parameters
        ----------
        layout
            One layout.
        """
        space = self._space(layout)
        if space is None:
            return ()
        slots = space.instance.slots
        if len(slots.pod_names) == 1:
            return slots.leaf_names
        pods = [slots.pod_names[pod] for pod in slots.leaf_pod]
        return tuple(f"{pod}_{leaf}" for pod, leaf in zip(pods, slots.leaf_names, strict=True))

    def state_places(self, model: cp_model.CpModel, plan: Priced, placement: Placement) -> None:
        """Adds to a model where a plan's tensor groups lie, if its mappings take parts of nodes.

        Parameters
        ----------
        model
            Where variables and rows go.
        plan
            A layout under a mapping.
        placement
            Of that mapping, arrays [levels], which others reach as far as.
        """
        if self._is_counted(replace(plan.layout, recompute_layers=0)):
            reach = cover_of(self._workload.cluster, plan.layout).reach
            reach.state_places(model, reach.row(placement))

    def with_least_traffic(self, priced: Priced) -> Priced:
        """Under the mapping with the least traffic, of those with the lowest price that are known.

        Parameters
        ----------
        priced
            A layout under a mapping; returned as it is where slots do not say where that lies.
        """
        workload = self._workload.on(int(priced.layout.gpus))
        space = self._space(priced.layout)
        if space is None or priced.ranks is None:
            return priced
        apart = self._apart_of(priced)
        instance, now = self._assigned(priced, stages_apart=apart is not None)
        placement = placement_of(workload, instance, now)
        assignments = [
            now,
            _solved(instance.problem, current_end_s()),
            *self._packing.mappings(instance),
        ]
        profiles = space.profiles
        if apart is not None:
            profiles = self._by_stage(apart, priced.layout).profiles
        need = profiles.need_of(placement)
        if need is not None:
            found = least_traffic_within(instance, need)
            assignments += [order for each in found for order in _orders_of(instance, each)]
        placements = [placement_of(workload, instance, assignment) for assignment in assignments]
        kept = [bool(keeps_inside(workload, priced.layout, each)) for each in placements]
        assignments, placements = (
            list(compress(assignments, kept)),
            list(compress(placements, kept)),
        )
        seconds = [self._seconds(priced, placement) for placement in placements]
        least_s = min(seconds)
        alike = [
            assignment
            for assignment, price_s in zip(assignments, seconds, strict=True)
            if price_s <= least_s * SAME
        ]
        best = min(alike, key=lambda assignment: loads_of(instance.problem, assignment).total_s)
        placement = placement_of(workload, instance, best)
        return replace(
            priced,
            ranks=tuple(ranks_of(instance, best)),
            stage_ep=_of_stages(placement),
            step_time_s=self._seconds(priced, placement),
        )

    def _apart_of(self, priced: Priced) -> _MappingSpace | None:
        """Where the layout of a price can lie with stages priced apart; None where that one does not."""
        if priced.stage_ep is None:
            return None
        layout = replace(priced.layout, recompute_layers=0)
        self._tell_stages_apart(layout.flat())
        return self._space_apart(layout)

    def _assigned(self, priced: Priced, *, stages_apart: bool) -> tuple[Instance, IntArray]:
        """The mapping problem of a price, and the leaf of every slot under its ranks."""
        workload = self._workload.on(int(priced.layout.gpus))
        instance = choice_instance(workload, priced.layout, priced.stages)
        assert priced.ranks is not None
        assignment = assignment_of_ranks(instance, priced.ranks)
        return replace(instance, stages_apart=stages_apart), assignment

    def _seconds(self, priced: Priced, placement: Placement) -> float:
        workload = self._workload.on(int(priced.layout.gpus))
        estimate = estimate_layout(workload, priced.layout, placement, priced.stages)
        return float(np.asarray(estimate.step_time_s))

    def _best_of(
        self,
        space: _MappingSpace,
        assignments: Sequence[IntArray],
        layout: Layout,
        cutoff_s: float,
    ) -> Priced | None:
        """Priced under the best of some mappings; None where none is better than the cutoff."""
        workload = self._workload.on(int(layout.gpus))
        orders = [order for each in assignments for order in _orders_of(space.instance, each)]
        pairs = [(each, placement_of(workload, space.instance, each)) for each in orders]
        pairs = [pair for pair in pairs if keeps_inside(workload, layout, pair[1])]
        if not pairs:
            return None
        placed = [placement for _, placement in pairs]
        every = _stacked(placed)
        bound_s = np.full(len(placed), -inf)
        if isinstance(every, StagedPlacement):
            (bound_s,) = profile_bounds(
                self._workload, layout.flat(), [Placements(placement=every)], self._limit_gib
            )
        pricing = PlacedAs(self._workload, every)
        priced, _ = _fastest(pricing, layout, bound_s, cutoff_s)
        if priced is None:
            return None
        best, placement = pairs[priced.matrix[PROFILE][0]]
        ranks = tuple(ranks_of(space.instance, best))
        return replace(priced, matrix={}, ranks=ranks, stage_ep=_of_stages(placement))


STAGED_TOGETHER = 8
"""Placements that are priced together where stages lie unlike each other: each has splits of its own."""


def _fastest(
    pricing: PlacedAs, layout: Layout, bound_s: FloatArray, cutoff_s: float
) -> tuple[Priced | None, float]:
    """The fastest of a pricing's placements that beats the cutoff, least bounds first; None without one.

    And what no split that was not looked at is faster than.
    """
    order = np.argsort(bound_s, kind="stable")
    step = STAGED_TOGETHER if pricing.is_staged else max(len(order), 1)
    best: Priced | None = None
    undecided_s = inf
    for first in range(0, len(order), step):
        rows = order[first : first + step]
        rows = rows[bound_s[rows] < cutoff_s]
        if not len(rows):
            break
        table = MappingBounds(matrices={PROFILE: rows[:, None]}, bound_s=bound_s[rows])
        priced = pricing.exact(layout, table, cutoff_s)
        undecided_s = min(undecided_s, pricing.undecided_s)
        if priced is not None:
            best, cutoff_s = priced, priced.step_time_s
    return best, undecided_s


def _with_experts_in(workload: Workload, layouts: Layout, gpus: int) -> Placement:
    """Layouts [n] of whose expert groups no block but the last holds more members than so many."""
    full = full_levels(workload.cluster)
    sizes = dict(zip(full.names, full.blocks.tolist(), strict=True))
    inner = [
        min(gpus, sizes[name]) for name in fabric_levels(workload.cluster, workload.gpus).names[:-1]
    ]
    columns = {}
    for name in GROUPS:
        size = layouts.dp * layouts.cp if name == "dp_cp" else getattr(layouts, name)
        members = np.repeat(np.asarray(size)[:, None], len(inner) + 1, axis=1)
        if name == "ep":
            members[:, :-1] = np.minimum(members[:, :-1], inner)
        columns[name] = members
    return Placement(**columns)


def _orders_of(instance: Instance, assignment: IntArray) -> list[IntArray]:
    """An assignment with its stages in every order that prices tell apart, as `profiles` has them."""
    problem = instance.problem
    if not instance.stages_apart:
        return [assignment]
    sides = ((assignment, len(problem.leaf_slots)), (problem.pod_of[assignment], problem.pods))
    parts = [smallest_parts(problem, *side).tolist() for side in sides]
    pairs = list(zip(*parts, strict=True))
    if len(set(pairs)) == 1:
        return [assignment]
    in_order = sorted(range(problem.stages), key=lambda stage: pairs[stage])
    of_class = {pair: [s for s in in_order if pairs[s] == pair] for pair in sorted(set(pairs))}
    orders = []
    for first, last in product(of_class, repeat=2):
        begin = of_class[first][0]
        end = next((s for s in of_class[last] if s != begin), None)
        if end is not None:
            between = [s for s in in_order if s not in (begin, end)]
            orders.append(assignment[[begin, *between, end]])
    return [assignment, *orders]


def _stacked(placements: Sequence[Placement]) -> Placement:
    """Placements of one layout, arrays [levels], as one with a row for each."""
    columns = {
        name: np.stack([getattr(placement, name) for placement in placements]) for name in GROUPS
    }
    staged = [each for each in placements if isinstance(each, StagedPlacement)]
    if not staged:
        return Placement(**columns)
    of_stages = [
        each.stage_ep
        if isinstance(each, StagedPlacement)
        else np.broadcast_to(each.ep, staged[0].stage_ep.shape)
        for each in placements
    ]
    return StagedPlacement(**columns, stage_ep=np.stack(of_stages))


def _of_stages(placement: Placement) -> tuple[tuple[int, ...], ...] | None:
    """`Priced.stage_ep` of a placement, arrays [levels]."""
    if not isinstance(placement, StagedPlacement):
        return None
    return tuple(map(tuple, placement.stage_ep.tolist()))


def _may_be_apart(instance: Instance) -> bool:
    """Whether a leaf may cut expert groups of some stages alone, and mappings are asked for."""
    problem = instance.problem
    return problem.traffic.expert_slots > 1 and Grid.of(problem).askable


def _degrees(layout: Layout) -> tuple[int, ...]:
    return tuple(int(getattr(layout, name)) for name in PLACED_AXES)


@lru_cache(maxsize=256)
def _solved(problem: MappingProblem, end_s: float) -> IntArray:
    """Kept for the same `end_s` of the command's time only: what was cut short is no one else's answer."""
    del end_s
    return least_traffic(problem, time_limit_s=MAPPING_LIMIT_S).assignment


# Prices under `--max-cut-use`: a mapping that fills a cut beyond it is ruled out, the next best is taken.
#
# A mapping is judged at its fastest split: a step is not slowed down on purpose so that its cuts look
# emptier.


def pricing_of(workload: Workload) -> CostModelPricing:
    """Prices by every mapping of a regular fabric, or by a mapping of each layout on an irregular one.

    Parameters
    ----------
    workload
        On any number of GPUs.
    """
    if is_irregular(workload.cluster):
        return MappedPricing(workload)
    return CutLimitedPricing(workload) if workload.max_cut_use < 1 else CostModelPricing(workload)


class CutLimitedPricing(CostModelPricing):
    """Prices by the best mapping of a regular fabric that keeps to the workload's `max_cut_use`."""

    def __init__(self, workload: Workload, params: PricingParams = DEFAULT_PRICING) -> None:
        super().__init__(workload, params)
        self._overfull: list[Priced] = []

    @property
    def overfull(self) -> Sequence[Priced]:
        """Mappings of the layout priced last that would be faster, but fill a cut beyond the limit."""
        return self._overfull

    def exact(self, layout: Layout, mappings: MappingBounds, cutoff_s: float) -> Priced | None:
        """As without the limit, but of the mappings that keep to it; bounds stay bounds of what is left.

        Parameters
        ----------
        layout
            One layout, its number of recomputed layers open.
        mappings
            Its mappings with their bounds.
        cutoff_s
            Seconds that a mapping must beat.
        """
        limit, bound_s = self._workload.max_cut_use * (1 + ROUNDING), np.array(mappings.bound_s)
        self._overfull = []
        while True:
            left = replace(mappings, bound_s=bound_s)
            priced = super().exact(layout, left, cutoff_s)
            if priced is None:
                return None
            priced = replace(priced, cut_uses=tuple(cut_uses(self._workload, priced).items()))
            if max((use for _, use in priced.cut_uses), default=0.0) <= limit:
                return priced
            self._overfull.append(priced)
            bound_s[rows_under(mappings.matrices, priced.matrix)] = inf

    def exact_each(self, layouts: Layout) -> Iterator[tuple[int, Priced | None]]:
        """One by one: cuts are looked at mapping by mapping.

        Parameters
        ----------
        layouts
            Shape [n].
        """
        return self._each_alone(layouts)


def cut_uses(
    workload: Workload, priced: Priced, placement: Placement | None = None
) -> dict[str, float]:
    """The share of each cut's capacity that the job and what levels state of others use in each phase.

    Parameters
    ----------
    workload
        Run as the price assumes, on any number of GPUs.
    priced
        A layout under a mapping.
    placement
        Of that mapping, arrays [levels]; worked out from the matrix without it, as regular fabrics have one.

    Returns
    -------
    dict[str, float]
        By level, kind of cut and phase: 'leaf_uplink_gradients'.
    """
    workload = workload.on(int(priced.layout.gpus))
    if placement is None:
        rows = {axis: np.asarray(row, dtype=np.int64) for axis, row in priced.matrix.items()}
        placement = placement_on(workload.cluster, priced.layout, rows)
    use = mapping_use(
        workload,
        priced.layout,
        priced.stages,
        placement=placement,
        priced=estimate_layout(workload, priced.layout, placement, priced.stages),
        places=priced.ranks or ranks_on(workload.cluster, priced.matrix),
    )
    return {f"{cut.level}_{cut.cut}_{cut.phase}": cut.total_use for cut in use.cuts}
