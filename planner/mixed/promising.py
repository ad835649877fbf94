"""Layouts on a mixed cluster that may beat a price: enumerated, asked of the rules of every part, bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import Rule
from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.footprint import (
    layer_bytes,
    main_layer_rooms,
    peak_memory_gib,
    usable_hbm_gib,
)
from meshwright.costmodel.layout import Layout, Recompute
from meshwright.costmodel.mixed import PlacedPart, Segment
from meshwright.costmodel.schedules import in_flight
from meshwright.costmodel.stacks import memory_profile
from meshwright.costmodel.workload import Execution, Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.planner.bounds.layer_split import ALL_LAYERS
from meshwright.planner.mixed.kernel import Composition, MixedKernel, PartCosts, gains_by_grouping
from meshwright.planner.mixed.request import MixedRequest
from meshwright.planner.mixed.row_bounds import RowBounds
from meshwright.planner.request.choices import DEGREES
from meshwright.planner.search.model import Candidates
from meshwright.planner.search.space import Space, space_of

# Which layouts on a mixed cluster may gain by offloading more of the optimizer: those that memory may limit.
#
# Offloading more makes no step shorter: the host updates its share far slower than a GPU its own. So nothing
# is offloaded where every rank, on any part, has room for all the layers that a step worth having gives it.


_MEMORY_ROUNDING = 1e-6
"""Of a rank's memory, in favour of looking."""


def with_more_offloaded(
    space: Space,
    workloads: Sequence[Workload],
    layouts: Layout,
    most_layers: NDArray[np.float64],
) -> Layout:
    """Every layout that offloads more than one of those given, which may therefore be faster.

    Parameters
    ----------
    space
        Its shares; the least of several is none.
    workloads
        On each part.
    layouts
        With nothing offloaded where there is a choice, [n].
    most_layers
        On a rank of each part, in a step worth having, [parts, n].

    Returns
    -------
    Layout
        Arrays of shape [k], k 0 or more.
    """
    if not space.offloads_several:
        return layouts.take(np.zeros(0, dtype=np.int64))
    limited = np.zeros(layouts.broadcast_shape(), dtype=np.bool_)
    for workload, most in zip(workloads, most_layers, strict=True):
        limited |= _lacks_room(workload, layouts, most)
    every = space.offloaded(layouts.take(limited))
    return every.take(np.asarray(every.optimizer_offload) > 0)


def _lacks_room(
    workload: Workload, layouts: Layout, most: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether some rank, were it on this part, may not hold so many layers, the fewest recomputed."""
    if memory_profile(workload.framework).keeps_stage_outputs:
        return np.ones(layouts.broadcast_shape(), dtype=np.bool_)  # these are beside the rooms
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    one = 1 if framework_of_stack(workload.framework).recompute_amount is not None else ALL_LAYERS
    sized = replace(layouts, recompute_layers=np.where(full, one, 0))
    rooms = main_layer_rooms(workload, sized, usable_hbm_gib(workload) * (1 - _MEMORY_ROUNDING))
    place = np.arange(rooms.shape[1])
    leading = workload.model.dense_layers if workload.model.moe_layers else 0
    if leading:
        taken = leading * _more_in_layers(workload, sized)
        rooms = np.where(place < leading, rooms - np.ceil(taken)[:, None], rooms)
    is_rank = place < np.asarray(layouts.pp)[:, None]
    return np.asarray(np.any(is_rank & (rooms < most[:, None]), axis=1))


def _more_in_layers(workload: Workload, layouts: Layout) -> NDArray[np.float64]:
    """How many main layers' room a leading layer takes beyond that of a main one, at the most; [n].

    On the first rank, where most micro-batches are in flight, or with none: between, each kind of layer takes
    a linear amount, whose ratio is largest at one of the ends.
    """
    layer = layer_bytes(workload, layouts, saved_activations(workload, layouts))
    largest = np.zeros(layouts.broadcast_shape())
    least = np.minimum(layer.saved, layer.dropped)
    for flying in (0.0, np.asarray(in_flight(layouts, 0), dtype=np.float64)):
        main = layer.states + least * flying
        for saved, of_leading in (
            (layer.saved, layer.leading_saved),
            (least, layer.leading_dropped),
        ):
            more = layer.leading_states - layer.states + (of_leading - saved) * flying
            largest = np.maximum(largest, more / main)
    return largest


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_ELSEWHERE = ("gpu-budget", HbmCapacity.name)
"""Rules on what the parts have together, which this search asks of the parts itself."""
_TOGETHER = 1 << 16
"""Layouts bounded in one array operation."""
_BETWEEN_LOOKS = 1024
"""Rows made between two looks at the clock."""
_TIME_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PromisingRow:
    """A layout under one execution, with ranks on each part, and no price below the bound."""

    bound_s: float
    execution: Execution
    layout: Layout
    composition: Composition
    rest_s: float
    scale: float
    """As `MixedKernel` has them."""


def promising_rows(
    request: MixedRequest, cutoff_s: float, on_block: Callable[[], object]
) -> list[PromisingRow]:
    """Every layout that may beat a price, least bounds first.

    Parameters
    ----------
    request
        What to plan.
    cutoff_s
        The price to beat; infinite where there is none.
    on_block
        Called again and again meanwhile; what it raises ends the enumeration.
    """
    rows: list[PromisingRow] = []
    for execution in _executions(request):
        space = _space(request, execution)
        if space is None:
            continue
        workloads = [part.workload(execution) for part in request.parts]
        degrees = space.degrees(request.gpus, on_block=on_block)
        degrees = _worth_expanding(request, workloads, degrees, cutoff_s, on_block)
        for block in _blocks(space, degrees):
            on_block()
            kept, offloaded = _that_may_beat(request, space, workloads, block, cutoff_s)
            for layouts in (kept, offloaded):
                for row in _rows_below(request, workloads, execution, layouts, cutoff_s):
                    rows.append(row)
                    if not len(rows) % _BETWEEN_LOOKS:
                        on_block()
    rows.sort(key=lambda row: row.bound_s)
    return rows


def _executions(request: MixedRequest) -> list[Execution]:
    """What every part can run."""
    first, *others = (part.execution_options.executions() for part in request.parts)
    return [each for each in first if all(each in own for own in others)]


def _space(request: MixedRequest, execution: Execution) -> Space | None:
    """The layouts that every part can run a stage of; None without any.

    One virtual stage each under 1F1B: where pins ask for others there is no pipeline through parts. Every
    part shards in as many groups, as a launch names one number.
    """
    spaces = [space_of(part, execution) for part in request.parts]
    first = spaces[0]
    degrees = (name for name in DEGREES if name != "pp")
    names = (*degrees, "zero", "recompute", "shard_groups")
    common: dict[str, Any] = {
        name: tuple(v for v in getattr(first, name) if all(v in getattr(o, name) for o in spaces))
        for name in names
    }
    model = request.first.model
    vpp = first.vpp is None or 1 in first.vpp
    offloads = tuple(each for each in first.offloads if all(each in own.offloads for own in spaces))
    is_plain = vpp and "1f1b" in first.schedules and bool(offloads)
    if not is_plain or not all(common.values()) or "pp" in request.first.forbids:
        return None
    pinned, largest = request.first.pins.get("pp"), min(model.layers, request.gpus)
    depths = [int(pinned)] if pinned is not None else range(2, largest + 1)
    return replace(
        first,
        **common,
        pp=tuple(pp for pp in depths if 2 <= pp <= largest),
        vpp=None,
        interleaving=False,
        offloads=offloads,
        schedules=("1f1b",),
        fewest_gpus=1,
    )


def _most_ranks(request: MixedRequest, layouts: Layout) -> IntArray:
    """Pipeline ranks that each part has room for, [parts, n]."""
    stage = np.asarray(layouts.gpus) // np.asarray(layouts.pp)
    return np.asarray(np.array([part.gpus for part in request.parts])[:, None] // stage)


def _has_room(most_ranks: IntArray, layouts: Layout) -> NDArray[np.bool_]:
    """Whether each part has room for a rank, and all together for as many as there are; [n]."""
    has_room = np.all(most_ranks >= 1, axis=0)
    return np.asarray(has_room & (most_ranks.sum(axis=0) >= np.asarray(layouts.pp)))


def _worth_expanding(
    request: MixedRequest,
    workloads: Sequence[Workload],
    degrees: Layout,
    cutoff_s: float,
    on_block: Callable[[], object],
) -> Layout:
    """Degrees of which some layout may beat a price.

    Recomputing modules makes no layer shorter, and neither a ZeRO stage nor what is offloaded changes its
    time: the pipeline takes as long as without any of these, or longer.
    """
    degrees = degrees.take(np.flatnonzero(_has_room(_most_ranks(request, degrees), degrees)))
    kept = []
    for start in range(0, degrees.broadcast_shape()[0], _TOGETHER):
        on_block()
        rows = np.arange(start, min(start + _TOGETHER, degrees.broadcast_shape()[0]))
        own = degrees.take(rows)
        bounds = RowBounds(workloads, own, cutoff_s, is_pipeline_alone=True)
        least_s = bounds.seconds_at_best(_most_ranks(request, own).astype(np.float64))
        kept.append(rows[least_s < cutoff_s])
    return degrees.take(np.concatenate([np.zeros(0, dtype=np.int64), *kept]))


def _blocks(space: Space, degrees: Layout) -> Iterator[Layout]:
    """All layouts of the degrees, with the least that each may offload, some at a time."""
    count = degrees.broadcast_shape()[0]
    variants = len(space.zero) * len(space.recompute) * len(space.shard_groups)
    each = max(1, _TOGETHER // max(1, variants))
    for start in range(0, count, each):
        own = degrees.take(np.arange(start, min(start + each, count)))
        layouts = space.grouped(space.scheduled(space.variants(own)))
        if layouts.broadcast_shape()[0]:
            yield layouts


def _that_may_beat(
    request: MixedRequest,
    space: Space,
    workloads: Sequence[Workload],
    layouts: Layout,
    cutoff_s: float,
) -> tuple[Layout, Layout]:
    """Layouts that may beat a price with the ranks that suit them best, and those that offload more of the
    optimizer, where that may help.
    """
    layouts = _legal(workloads, layouts, request.gpus)
    if not layouts.broadcast_shape()[0]:
        return layouts, layouts
    most_ranks = _most_ranks(request, layouts)
    bounds = RowBounds(workloads, layouts, cutoff_s)
    may_beat = bounds.seconds_at_best(most_ranks.astype(np.float64)) < cutoff_s
    good = np.flatnonzero(_has_room(most_ranks, layouts) & may_beat)
    kept = layouts.take(good)
    more = with_more_offloaded(space, workloads, kept, bounds.most_layers[:, good])
    return kept, _legal(workloads, more, request.gpus) if more.broadcast_shape()[0] else more


def _rows_below(
    request: MixedRequest,
    workloads: Sequence[Workload],
    execution: Execution,
    layouts: Layout,
    cutoff_s: float,
) -> Iterator[PromisingRow]:
    if not layouts.broadcast_shape()[0]:
        return
    layouts = _that_may_fit(workloads, layouts)
    if not layouts.broadcast_shape()[0]:
        return
    bounds = RowBounds(workloads, layouts, cutoff_s)
    which, ranks = _with_ranks(request, layouts)
    if not len(which):
        return
    bound_s = bounds.seconds(which, ranks)
    good = np.flatnonzero(bound_s < cutoff_s)
    which, ranks, bound_s = which[good], ranks[good], bound_s[good]
    for order in permutations(range(len(workloads))):
        if not len(which):
            return
        tighter_s = np.maximum(bound_s, bounds.seconds_in_memory(which, ranks, order))
        for row in np.flatnonzero(tighter_s < cutoff_s):
            index = int(which[row])
            yield PromisingRow(
                bound_s=float(tighter_s[row]),
                execution=execution,
                layout=layouts.scalar(index),
                composition=tuple((part, int(ranks[row, part])) for part in order),
                rest_s=float(bounds.rest_s[index]),
                scale=float(bounds.scale[index]),
            )


def _legal(workloads: Sequence[Workload], layouts: Layout, gpus: int) -> Layout:
    """Layouts that no rule of any part forbids, with as many layers recomputed as can be."""
    full = (np.asarray(layouts.recompute) & int(Recompute.FULL)) != 0
    layouts = replace(layouts, recompute_layers=np.where(full, ALL_LAYERS, 0))
    for workload in workloads:
        together = replace(workload, gpus=gpus)
        for rule in _rules(together):
            nothing_gib = np.zeros(layouts.broadcast_shape())
            table = Candidates(workload=together, layouts=layouts, memory_gib=nothing_gib)
            layouts = layouts.take(rule.excess(table) <= 0)
    return layouts


def _that_may_fit(workloads: Sequence[Workload], layouts: Layout) -> Layout:
    """Layouts of which some split may fit on the part with the most memory."""
    peaks = [np.asarray(peak_memory_gib(each, layouts)) for each in workloads]
    least_gib = np.min(peaks, axis=0)
    most_gib = max(usable_hbm_gib(each) for each in workloads)
    return layouts.take(least_gib <= most_gib)


def _rules(workload: Workload) -> list[Rule]:
    return [rule for rule in rules_for(workload) if rule.name not in _ELSEWHERE]


def _with_ranks(request: MixedRequest, layouts: Layout) -> tuple[IntArray, IntArray]:
    """(row of the layouts, ranks on each part) of every way to give the parts ranks on whole nodes."""
    capacities = tuple(part.gpus for part in request.parts)
    per_node = request.first.cluster.gpus_per_node
    stage = np.asarray(layouts.gpus) // np.asarray(layouts.pp)
    keys, back = np.unique(
        np.stack([np.asarray(layouts.pp), stage], axis=1), axis=0, return_inverse=True
    )
    which, ranks = [], []
    back = back.reshape(-1)
    for index, (pp, gpus) in enumerate(keys.tolist()):
        ways = _ways(pp, tuple(capacity // gpus for capacity in capacities))
        ways = ways[np.all(ways * gpus % per_node == 0, axis=1)]
        rows = np.flatnonzero(back == index)
        which.append(np.repeat(rows, len(ways)))
        ranks.append(np.tile(ways, (len(rows), 1)))
    return np.concatenate(which), np.concatenate(ranks)


@cache
def _ways(ranks: int, most: tuple[int, ...]) -> IntArray:
    """Every way to write a number of ranks as a sum with 1 to so many in each place."""
    if len(most) == 1:
        rows = [[ranks]] if 1 <= ranks <= most[0] else []
        return np.array(rows, dtype=np.int64).reshape(-1, 1)
    found = [np.zeros((0, len(most)), dtype=np.int64)]
    for first in range(1, min(most[0], ranks - 1) + 1):
        rest = _ways(ranks - first, most[1:])
        found.append(np.column_stack([np.full(len(rest), first), rest]))
    return np.concatenate(found)


@dataclass(eq=False)
class KernelMaker:
    """Makes kernels, which share what they have in common."""

    request: MixedRequest
    _parts: dict[tuple[int, int, Execution, Layout], PartCosts] = field(default_factory=dict)

    def kernel(self, row: PromisingRow) -> MixedKernel:
        """The kernel of a row."""
        segments, parts, first = [], [], 0
        for part, ranks in row.composition:
            own = self._part(part, ranks, row)
            parts.append(own)
            segments.append(Segment(part=own.placed, first=first))
            first += ranks
        return MixedKernel(
            layout=row.layout,
            execution=row.execution,
            composition=row.composition,
            segments=tuple(segments),
            parts=tuple(parts),
            bound_s=row.bound_s,
            rest_s=row.rest_s,
            scale=row.scale,
        )

    def gains_by_offloading(self, row: PromisingRow | MixedKernel, limit_s: float) -> bool:
        """Whether memory may keep a row from a price below a limit while it offloads nothing.

        Where it may not, the row with nothing offloaded is as fast or faster, and is looked at by itself.
        """
        if not int(row.layout.optimizer_offload) or "optimizer_offload" in self.request.first.pins:
            return True
        plain = self.kernel(
            PromisingRow(
                bound_s=row.bound_s,
                execution=row.execution,
                layout=replace(row.layout, optimizer_offload=0),
                composition=row.composition,
                rest_s=row.rest_s,
                scale=row.scale,
            )
        )
        amount = next(plain.amounts())
        micro_batches, most = (
            int(plain.layout.num_micro_batches),
            plain.layers + 1 - int(plain.layout.pp),
        )
        for segment, part in zip(plain.segments, plain.parts, strict=True):
            own = part.costs(0)
            saved_s = own.leading * max(own.layer_s - own.leading_s, 0.0)
            by_time = (limit_s / micro_batches + saved_s) / own.layer_s * (1 + _TIME_ROUNDING)
            rooms = part.least_rooms(amount)[segment.own]
            if min(rooms) < int(min(by_time, most)):
                return True
        return False

    def gains_by_grouping(self, row: PromisingRow) -> bool:
        """Whether a row may be faster than with fewer shard groups, which are looked at by themselves."""
        if int(row.layout.shard_groups) == 1 or "shard_groups" in self.request.first.pins:
            return True
        parts = (self._part(part, ranks, row).placed for part, ranks in row.composition)
        return gains_by_grouping(part.context for part in parts)

    def _part(self, part: int, ranks: int, row: PromisingRow) -> PartCosts:
        key = part, ranks, row.execution, row.layout
        if key not in self._parts:
            stage = int(row.layout.gpus) // int(row.layout.pp)
            workload = self.request.parts[part].workload(row.execution).on(ranks * stage)
            self._parts[key] = PartCosts(
                PlacedPart(
                    workload=workload,
                    layout=row.layout,
                    ranks=ranks,
                    part_gpus=self.request.parts[part].gpus,
                    between_gbps_per_gpu=self.request.cluster.between_gbps_per_gpu,
                )
            )
        return self._parts[key]
