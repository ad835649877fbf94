"""Every price that a mapping of a layout can have, and what each asks of the mapping.

A *profile* is a pair of reaches, in leaves and in pods. There are few of them: a block that uses U GPUs and
cuts c rings leaves U / c of them to each. Every mapping keeps the limits of a profile that reaches as far in
every axis, so none is faster than the fastest profile whose limits some mapping keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives import best_beyond
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import LAYER_AXES, Layout, Placement
from meshwright.costmodel.step_time import make_context, optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.mappings import (
    GROUPS_OF_TRAFFIC,
    rows_of_context,
    shared_times,
    shared_traffic,
    useful_groups,
)
from meshwright.planner.bounds.paces import busiest_in_rooms_s
from meshwright.planner.mapping.effective import (
    Reach,
    free_gpus,
    levels_seen,
    placement_with,
    rings_per_slot,
)
from meshwright.planner.mapping.joint import NO_CUT, Grid, Limits, Need, Ratio
from meshwright.planner.mapping.problem import IntArray
from meshwright.planner.mapping.slots import Instance

PRICED_AXES = ("cp", "pp", "dp_cp")
PRICED_EXPERT_AXES = ("ep", "edp")


# How many profiles are told apart.


MOST_PROFILES = 4_000
"""Of one layout, before those with equal prices are joined."""
FINENESS: tuple[int, ...] = (1_000, 8, 5, 4, 3, 2)
"""Values of an axis and level that are told apart, in turn until there are few enough profiles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Profiles:
    """Profiles of one layout: the placements that price them, arrays [k, levels], and their needs, [k]."""

    placement: Placement
    needs: tuple[Need, ...]
    strength: IntArray
    """How much each need asks for, [k, what]: a row nowhere below another one implies it."""
    apart: bool
    """Whether each stands for mappings that lie alike; else neighbouring values may be joined."""

    def implying(self, row: int) -> NDArray[np.bool_]:
        """The needs that ask for all that one of them does, itself among them; [k]."""
        return np.asarray(np.all(self.strength >= self.strength[row], axis=1))

    def rows(self, rows: IntArray) -> Placement:
        """Some of the placements."""
        return _rows(self.placement, rows)

    def need_of(self, placement: Placement) -> Need | None:
        """What the profile with the price of a placement, arrays [levels], asks for."""
        axes = (*PRICED_AXES, *PRICED_EXPERT_AXES)
        same = np.all(
            [
                np.all(getattr(self.placement, axis) == getattr(placement, axis), axis=1)
                for axis in axes
            ],
            axis=0,
        )
        rows = np.flatnonzero(same)
        return self.needs[int(rows[0])] if len(rows) else None


def _rows(placement: Placement, rows: IntArray) -> Placement:
    return Placement(**{name: np.asarray(m)[rows] for name, m in vars(placement).items()})


def profiles_of(workload: Workload, instance: Instance) -> Profiles:
    """All profiles, of those with equal prices the one that asks least.

    Where there are too many, neighbouring values of an axis are joined: what the least of them asks for, at
    the price of the best. Prices are bounds then. Where nobody will be asked which profiles can be kept,
    there is one: every group packed into the fullest blocks.
    """
    leaf_gpus, pod_gpus = free_gpus(instance)
    leaf_seen, pod_seen = levels_seen(workload)
    fineness = FINENESS if Grid.of(instance.problem).askable else ()
    apart = False
    leaves = [_packed(instance, leaf_gpus) if leaf_seen else _unseen(instance)]
    pods = [_packed(instance, pod_gpus) if pod_seen else _unseen(instance)]
    rows = np.zeros((1, 2), dtype=np.int64)
    most = MOST_PROFILES
    for values in fineness:
        leaves = _options(instance, leaf_gpus, values) if leaf_seen else [_unseen(instance)]
        pods = _options(instance, pod_gpus, values) if pod_seen else [_unseen(instance)]
        if max(len(leaves), len(pods)) > most:
            continue
        rows = _pairs(leaves, pods)
        apart = values == fineness[0] > max(len(leaves), len(pods))
        if len(rows) <= most:
            break
    reaches = (_taken(leaves, rows[:, 0]), _taken(pods, rows[:, 1]))
    placement = placement_with(workload, instance, *reaches)
    axes = PRICED_AXES if workload.model.moe is None else (*PRICED_AXES, *PRICED_EXPERT_AXES)
    key = np.concatenate([np.asarray(getattr(placement, axis)) for axis in axes], axis=1)
    first = np.sort(np.unique(key, axis=0, return_index=True)[1])
    grid = Grid.of(instance.problem)
    needs = tuple(
        Need(grid=grid, leaves=leaves[a].limits, pods=pods[b].limits)
        for a, b in rows[first].tolist()
    )
    strength = np.stack(
        [np.asarray(x, dtype=np.int64) for reach in reaches for x in vars(reach).values()], axis=1
    )
    return Profiles(
        placement=_rows(placement, first), needs=needs, strength=strength[first], apart=apart
    )


@dataclass(frozen=True, kw_only=True)
class _Option:
    """How far groups may reach in the blocks of a level, and what that asks."""

    reach: Reach
    limits: Limits


def _unseen(instance: Instance) -> _Option:
    """A level that the fabric has not: nothing is asked of it."""
    layout = instance.layout
    reach = Reach(
        dp_cp=int(layout.dp) * int(layout.cp), cp=int(layout.cp), ep=int(layout.ep), edp=int(layout.edp),
        together=True,
    )  # fmt: skip
    return _Option(reach=reach, limits=Limits())


def _packed(instance: Instance, free: IntArray) -> _Option:
    """No mapping reaches further: groups that fit the fullest block lie in it, others fill it alone."""
    problem, layout, fullest = instance.problem, instance.layout, int(free.max())
    slots = fullest // instance.slots.gpus
    dense, context, expert = rings_per_slot(instance)

    def members(group_slots: int, each: int, size: int) -> int:
        return size if group_slots <= slots else _members(fullest, each, size)

    traffic, ep = problem.traffic, int(layout.ep)
    fewest_parts = -(-traffic.expert_slots // slots)
    reach = Reach(
        dp_cp=members(problem.slots, dense, int(layout.dp) * int(layout.cp)),
        cp=members(traffic.context_slots, context, int(layout.cp)),
        ep=max(1, ep * (traffic.expert_slots // fewest_parts) // traffic.expert_slots),
        edp=members(problem.slots // traffic.expert_slots, expert, int(layout.edp)),
        together=problem.stages <= slots,
    )
    return _Option(reach=reach, limits=Limits())


def _columns(options: list[_Option]) -> dict[str, IntArray]:
    """The reaches, field by field; arrays [options]."""
    names = vars(options[0].reach)
    return {name: np.array([getattr(option.reach, name) for option in options]) for name in names}


def _taken(options: list[_Option], rows: IntArray) -> Reach:
    columns: dict[str, Any] = {name: column[rows] for name, column in _columns(options).items()}
    return Reach(**columns)


def _pairs(leaves: list[_Option], pods: list[_Option]) -> IntArray:
    """Pairs that differ in price, [n, 2]: what a leaf holds, its pod holds without being asked to."""
    differ = np.ones((len(leaves), len(pods)), dtype=bool)
    inner, outer = _columns(leaves), _columns(pods)
    for name, reach in outer.items():
        differ &= (reach == reach.min())[None, :] | (reach[None, :] > inner[name][:, None])
    return np.argwhere(differ)


def _options(instance: Instance, free: IntArray, fineness: int) -> list[_Option]:
    """Reaches of one level with their limits; those that ask less come before those that ask more."""
    stages, options = instance.problem.stages, []
    gradients = _gradients(instance, free, fineness)
    contexts = _thinned(_contexts(instance, free), fineness)
    experts = _thinned(_experts(instance, free), fineness)
    for together in (False, True) if stages > 1 else (True,):
        for ((dp_cp, edp), (rings, expert_rings)), (cp, context), (ep, part) in product(
            gradients, contexts, experts
        ):
            limits = Limits(
                rings=rings,
                context=context,
                expert_rings=expert_rings,
                expert_part=part,
                together=together and stages > 1,
            )
            reach = Reach(dp_cp=dp_cp, cp=cp, ep=ep, edp=edp, together=together)
            options.append(_Option(reach=reach, limits=limits))
    return options


Value = TypeVar("Value")
Asked = TypeVar("Asked")


def _thinned(values: list[tuple[Value, Asked]], limit: int) -> list[tuple[Value, Asked]]:
    """At most so many (value, what it asks), least first; each stands for those up to the next one."""
    if len(values) <= limit:
        return values
    rows = np.unique(np.linspace(0, len(values) - 1, limit).round().astype(int)).tolist()
    return [
        (values[after - 1][0], values[row][1])
        for row, after in zip(rows, [*rows[1:], len(values)], strict=True)
    ]


def _gradients(
    instance: Instance, free: IntArray, limit: int
) -> list[tuple[tuple[int, int], tuple[Ratio | None, Ratio | None]]]:
    """(dense and expert ring members, limits of both), least first.

    Where expert groups are single slots both kinds of ring are cut by the same blocks.
    """
    problem, layout = instance.problem, instance.layout
    dense, _, expert = rings_per_slot(instance)
    dense_size, expert_size = int(layout.dp) * int(layout.cp), int(layout.edp)
    if problem.traffic.expert_slots > 1:
        places = problem.stages * problem.traffic.expert_slots if expert_size > 1 else 0
        both = product(
            _thinned(_values(instance, free, dense, dense_size, problem.stages), limit),
            _thinned(_values(instance, free, expert, expert_size, places), limit),
        )
        return [((v, w), (rings, expert_rings)) for (v, rings), (w, expert_rings) in both]
    pairs = sorted(
        {
            (_members(f, c * dense, dense_size), _members(f, c * expert, expert_size))
            for f, c in _cuts(instance, free, problem.stages if problem.slots > 1 else 0)
        }
    )
    options: list[tuple[tuple[int, int], tuple[Ratio | None, Ratio | None]]] = []
    for v, w in pairs:
        strongest = max(dense * v * (v > 1), expert * w * (w > 1))
        asked = None if (v, w) == pairs[0] else _per_cut(instance, strongest)
        options.append(((v, w), (asked, None)))
    options.append(((dense_size, expert_size), (NO_CUT if pairs else None, None)))
    return _thinned(options, limit)


def _contexts(instance: Instance, free: IntArray) -> list[tuple[int, Ratio | None]]:
    problem, size = instance.problem, int(instance.layout.cp)
    groups = (
        problem.needed // problem.traffic.context_slots if problem.traffic.context_slots > 1 else 0
    )
    return _values(instance, free, rings_per_slot(instance)[1], size, groups)


def _values(
    instance: Instance, free: IntArray, each: int, size: int, most_cut: int
) -> list[tuple[int, Ratio | None]]:
    """(members of a ring, what that asks of a block) for up to `most_cut` cut rings of `each` groups."""
    values = sorted({_members(f, c * each, size) for f, c in _cuts(instance, free, most_cut)})
    options = [(v, None if v == values[0] else _per_cut(instance, each * v)) for v in values]
    return [*options, (size, NO_CUT if values else None)]


def _cuts(instance: Instance, free: IntArray, most_cut: int) -> set[tuple[int, int]]:
    """(GPUs in use, groups cut) that a block can have: each cut group has a slot in it."""
    each, problem = instance.slots.gpus, instance.problem
    idle = sum(problem.leaf_slots) - problem.needed
    return {
        (used * each, cuts)
        for slots in {gpus // each for gpus in free.tolist()}
        for used in range(max(1, slots - idle), slots + 1)
        for cuts in range(1, min(most_cut, used) + 1)
    }


def _experts(instance: Instance, free: IntArray) -> list[tuple[int, int | None]]:
    """(members, slots of a group that a block holds at least where it holds some)."""
    size, slots = int(instance.layout.ep), instance.problem.traffic.expert_slots
    if slots == 1:
        return [(size, None)]
    largest = max(free.tolist()) // instance.slots.gpus
    # The smaller part of a group in two parts is no larger than half of it.
    parts = [*range(1, min(largest, slots // 2) + 1), *([slots] if slots <= largest else [])]
    least_part: dict[int, int] = {}
    for part in parts:
        least_part.setdefault(max(1, size * part // slots), part)
    return [(members, None if part == 1 else part) for members, part in least_part.items()]


def _members(used: int, cut: int, size: int) -> int:
    """Of a cut ring in a block that uses so many GPUs."""
    return max(1, min(used // cut, size - 1))


def _per_cut(instance: Instance, gpus: int) -> Ratio:
    """Slots that a block uses for each group that it cuts, where that takes so many GPUs."""
    shared = gcd(gpus, instance.slots.gpus)
    return gpus // shared, instance.slots.gpus // shared


# Bounds of many layouts on an irregular allocation under each profile of their mappings, in one go.


FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

TOGETHER = 8192
"""Profiles that are bounded in one array operation."""


class Placements(Protocol):
    """Placements of one layout."""

    @property
    def placement(self) -> Placement:
        """Arrays [k, levels]."""
        ...

    @property
    def apart(self) -> bool:
        """Whether each stands for mappings that lie alike."""
        ...


def _count(placements: Placements) -> int:
    return len(placements.placement.tp)


def profile_bounds(
    workload: Workload,
    layouts: Layout,
    profiles: Sequence[Placements],
    limit_gib: float,
    numbers_of_groups: Sequence[int] = (),
    *,
    or_less: bool = False,
) -> list[FloatArray]:
    """`optimistic_step` of layouts under each of their profiles.

    Parameters
    ----------
    workload
        On any number of GPUs.
    layouts
        Shape [n].
    profiles
        Of each layout.
    limit_gib
        What the peak on one GPU may reach.
    numbers_of_groups
        Numbers of shard groups that the layouts could have instead.
    or_less
        Whether a placement also stands for all that reach less far in some group. Where an outer level is
        faster than an inner one, these may be the faster ones (`best_beyond`).

    Returns
    -------
    list[FloatArray]
        Seconds, [profiles] of each layout; infinite where no split fits, or where one shard group under the
        same mapping is no slower.
    """
    bounds: list[FloatArray] = [np.zeros(0)] * len(profiles)
    gpus = np.broadcast_to(np.asarray(layouts.gpus), layouts.broadcast_shape())
    order = np.argsort(gpus, kind="stable").tolist()
    for own_gpus, rows in groupby(order, key=lambda row: int(gpus[row])):
        for part in _parts(list(rows), profiles):
            counts = [_count(profiles[row]) for row in part]
            if not any(counts):
                continue  # no mapping is left of any of them, as where none keeps its shard groups
            context = _context(workload.on(own_gpus), layouts, profiles, part)
            if or_less:
                context = replace(context, links=best_beyond(context.links))
            seconds = _seconds(context, layouts.take(part), counts, limit_gib)
            if 1 in numbers_of_groups:
                apart = np.repeat([profiles[row].apart for row in part], counts)
                seconds[apart & _no_better_than_one(context)] = np.inf
            for row, own in zip(part, np.split(seconds, np.cumsum(counts)[:-1]), strict=True):
                bounds[row] = own
    return bounds


def _parts(rows: list[int], profiles: Sequence[Placements]) -> Iterator[list[int]]:
    """Layouts whose profiles are bounded together, one at least."""
    part: list[int] = []
    size = 0
    for row in rows:
        count = _count(profiles[row])
        if part and size + count > TOGETHER:
            yield part
            part, size = [], 0
        part.append(row)
        size += count
    if part:
        yield part


def _context(
    workload: Workload, layouts: Layout, profiles: Sequence[Placements], rows: list[int]
) -> Context:
    """Of all profiles of the first layout, then of the next."""
    placed = [vars(profiles[row].placement) for row in rows]
    placement = Placement(
        **{name: np.concatenate([one[name] for one in placed]) for name in placed[0]}
    )
    counts = [_count(profiles[row]) for row in rows]
    return make_context(workload, layouts.take(np.repeat(rows, counts)), placement)


def _seconds(context: Context, layouts: Layout, counts: list[int], limit_gib: float) -> FloatArray:
    times = shared_times(context, LAYER_AXES)
    if times is None:  # No layout has a mapping that keeps its groups where they have to lie.
        return np.zeros(0)
    busiest_s = busiest_in_rooms_s(context, times, layouts, counts, limit_gib)
    fits = np.isfinite(busiest_s)
    traffic = shared_traffic(context, GROUPS_OF_TRAFFIC)
    step = optimistic_step(context, times, np.where(fits, busiest_s, 0.0), traffic)
    return np.where(fits, np.asarray(step.seconds, dtype=np.float64), np.inf)


def _no_better_than_one(context: Context) -> BoolArray:
    """Where replicas that shard as a whole are no slower, as they lie; so they may lie wherever groups do.

    Of other divisors of a number this cannot be said: a leaf may hold its groups whole, but not larger ones.
    """
    numbers = np.broadcast_to(
        np.asarray(context.layout.shard_groups), context.placement.tp.shape[:1]
    )
    worse = np.zeros(len(numbers), dtype=bool)
    for number in np.unique(numbers[numbers > 1]).tolist():
        rows = np.flatnonzero(numbers == number)
        worse[rows] = ~useful_groups(rows_of_context(context, rows), (1, number))
    return worse
