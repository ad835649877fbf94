"""Every price that a mapping of a layout can have, and what each asks of the mapping.

A *profile* is a pair of reaches, in leaves and in pods. There are few of them: a block that uses U GPUs and
cuts c rings leaves U / c of them to each. Every mapping keeps the limits of a profile that reaches as far in
every axis, so none is faster than the fastest profile whose limits some mapping keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby, product
from math import comb, gcd, inf
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.collectives import best_beyond
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layer_kinds import KindTimes
from meshwright.costmodel.layout import GROUPS, LAYER_AXES, Layout, Placement, StagedPlacement
from meshwright.costmodel.rank_load import last_rank_s, least_work_s
from meshwright.costmodel.step_time import make_context, optimistic_step
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.mappings import (
    GROUPS_OF_TRAFFIC,
    rows_of_context,
    shared_times,
    shared_traffic,
    times_under_mappings,
    useful_groups,
)
from meshwright.planner.bounds.paces import busiest_by_place_s, busiest_in_rooms_s
from meshwright.planner.mapping.effective import (
    Reach,
    free_gpus,
    levels_seen,
    placement_with,
    rings_per_slot,
)
from meshwright.planner.mapping.joint import NO_CUT, Grid, Limits, Need, Ratio
from meshwright.planner.mapping.problem import FloatArray, IntArray
from meshwright.planner.mapping.slots import Instance

PRICED_AXES = ("cp", "pp", "dp_cp")
PRICED_EXPERT_AXES = ("ep", "edp")


# How many profiles are told apart.


MOST_PROFILES = 4_000
"""Of one layout, before those with equal prices are joined."""
FINENESS: tuple[int, ...] = (1_000, 8, 5, 4, 3, 2)
"""Values of an axis and level that are told apart, in turn until there are few enough profiles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Placements:
    """Placements of one layout."""

    placement: Placement
    """Arrays [k, levels]."""
    apart: bool = True
    """Whether each stands for mappings that lie alike; else neighbouring values may be joined."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Profiles(Placements):
    """Profiles of one layout: the placements that price them, and their needs, [k]."""

    needs: tuple[Need, ...]
    strength: IntArray
    """How much each need asks for, [k, what]: a row nowhere below another one implies it."""

    def implying(self, row: int) -> NDArray[np.bool_]:
        """The needs that ask for all that one of them does, itself among them; [k].

        Parameters
        ----------
        row
            Which need.
        """
        return np.asarray(np.all(self.strength >= self.strength[row], axis=1))

    def need_of(self, placement: Placement) -> Need | None:
        """What the profile with the price of a placement, arrays [levels], asks for.

        Parameters
        ----------
        placement
            Of one mapping; None is returned where no profile has its price.
        """
        axes = [*PRICED_AXES, *PRICED_EXPERT_AXES]
        columns = [
            np.all(getattr(self.placement, axis) == getattr(placement, axis), axis=1)
            for axis in axes
        ]
        if isinstance(self.placement, StagedPlacement):
            of_stages = placement.ep
            if isinstance(placement, StagedPlacement):
                of_stages = placement.stage_ep
            columns.append(np.all(self.placement.stage_ep == of_stages, axis=(1, 2)))
        rows = np.flatnonzero(np.all(columns, axis=0))
        return self.needs[int(rows[0])] if len(rows) else None


def profiles_of(workload: Workload, instance: Instance, *, by_stage: bool = False) -> Profiles:
    """All profiles, of those with equal prices the one that asks least.

    Where there are too many, neighbouring values of an axis are joined: what the least of them asks for, at
    the price of the best. Prices are bounds then. Where nobody will be asked which profiles can be kept,
    there is one: every group packed into the fullest blocks.

    Where stages are priced apart, the expert groups of all of them are as near as counting slots allows: a
    bound for every way in which they can lie, of which there are many. `by_stage` lists those.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    instance
        Whose slots they are; it says whether stages are priced apart.
    by_stage
        Whether every way in which stages can lie is a profile of its own, where they are priced apart.
    """
    leaf_gpus, pod_gpus = free_gpus(instance)
    leaf_seen, pod_seen = levels_seen(workload)
    # Where one block has all free GPUs, nothing leaves it, and nothing is asked.
    leaf_seen, pod_seen = leaf_seen and len(leaf_gpus) > 1, pod_seen and len(pod_gpus) > 1
    is_askable = Grid.of(instance.problem).askable
    apart = False
    leaves = [_packed(instance, leaf_gpus) if leaf_seen else _unseen(instance)]
    pods = [_packed(instance, pod_gpus) if pod_seen else _unseen(instance)]
    rows = np.zeros((1, 2), dtype=np.int64)
    classes = [_StageClass(leaves[0].ep, None, pods[0].ep, None)]
    orders = _orders_of_alike(instance, 1)
    nearest = _nearest(instance, leaf_gpus if leaf_seen else None, pod_gpus if pod_seen else None)
    for values in FINENESS if is_askable else ():
        leaves = _options(instance, leaf_gpus, values) if leaf_seen else [_unseen(instance)]
        pods = _options(instance, pod_gpus, values) if pod_seen else [_unseen(instance)]
        if max(len(leaves), len(pods)) > MOST_PROFILES:
            continue
        rows = _pairs(leaves, pods) if leaf_seen else np.argwhere(np.ones((1, len(pods))))
        unseen: list[tuple[int, int | None]] = [(int(instance.layout.ep), None)]
        experts = [
            _thinned(_experts(instance, free), values) if seen else unseen
            for free, seen in ((leaf_gpus, leaf_seen), (pod_gpus, pod_seen))
        ]
        classes, is_joined = _stage_classes(experts[0], experts[1], leaf_seen=leaf_seen), False
        if not instance.stages_apart or len(classes) == 1:
            orders = _orders_of_alike(instance, len(classes))
        elif not by_stage:
            classes, orders = nearest, np.arange(len(nearest))[None]
        elif number_of_orders(instance, len(classes)) > MOST_PROFILES:
            classes = _best_and_others(classes)
            orders, is_joined = _orders(instance, classes, nearest), True
        else:
            orders = _orders(instance, classes, nearest)
        most_values = max(len(leaves), len(pods), *map(len, experts))
        apart = values == FINENESS[0] > most_values and not is_joined
        if len(rows) * len(orders) <= MOST_PROFILES:
            break
    pairs, ordered = (x.ravel() for x in np.mgrid[: len(rows), : len(orders)])
    chosen = _Chosen(leaves, pods, rows[pairs], classes, orders[ordered])
    return _profiles_of(workload, instance, chosen, by_stage=by_stage, apart=apart)


class _Chosen(NamedTuple):
    """Options of both levels, and classes of stages, with those that each profile has."""

    leaves: list[_Option]
    pods: list[_Option]
    rows: IntArray
    """Pairs of options, [n, 2]."""
    classes: list[_StageClass]
    orders: IntArray
    """The class of every stage, [n, stages]."""


def _profiles_of(
    workload: Workload, instance: Instance, chosen: _Chosen, *, by_stage: bool, apart: bool
) -> Profiles:
    """The profiles of what was chosen, without those that ask for more at the price of others."""
    leaves, pods, rows, classes, orders = chosen
    columns = list(zip(*classes, strict=True))
    of_stages = [np.array(columns[at], dtype=np.int64)[orders] for at in (0, 2)]
    reaches = [
        replace(_taken((leaves, pods)[side], rows[:, side]), ep=reach.min(axis=1), stage_ep=reach)
        for side, reach in enumerate(of_stages)
    ]
    placement = placement_with(workload, instance, reaches[0], reaches[1])
    axes = PRICED_AXES if workload.model.moe is None else (*PRICED_AXES, *PRICED_EXPERT_AXES)
    key = np.concatenate([np.asarray(getattr(placement, axis)) for axis in axes], axis=1)
    if isinstance(placement, StagedPlacement):
        key = np.concatenate([key, placement.stage_ep.reshape(len(key), -1)], axis=1)
    first = np.sort(np.unique(key, axis=0, return_index=True)[1])
    # Which stage is which does not matter to slots: what is asked has them in order.
    in_order = np.sort(orders, axis=1)
    grid = Grid.of(instance.problem)
    needs = tuple(
        Need(
            grid=grid,
            leaves=replace(leaves[a].limits, expert_parts=_asked_parts(classes, "leaf_part", own)),
            pods=replace(pods[b].limits, expert_parts=_asked_parts(classes, "pod_part", own)),
        )
        for (a, b), own in zip(rows[first].tolist(), in_order[first].tolist(), strict=True)
    )
    wishes = [np.array(columns[at], dtype=np.int64)[in_order] for at in (0, 2)]
    if not isinstance(placement, StagedPlacement):
        wishes = [column[:, :1] for column in wishes]
    elif not by_stage:
        wishes = []
    names = [name for name in vars(reaches[0]) if name not in ("ep", "stage_ep")]
    of_groups = [np.asarray(getattr(reach, name)) for reach in reaches for name in names]
    strength = np.concatenate([np.stack(of_groups, axis=1).astype(np.int64), *wishes], axis=1)
    return Profiles(
        placement=placement.take(first),
        needs=needs,
        strength=strength[first],
        apart=apart,
    )


class _StageClass(NamedTuple):
    """How far a stage's expert groups reach in leaves and in pods, and what that asks of a block there."""

    leaf_ep: int
    leaf_part: int | None
    pod_ep: int
    pod_part: int | None


def _stage_classes(
    leaves: list[tuple[int, int | None]], pods: list[tuple[int, int | None]], *, leaf_seen: bool
) -> list[_StageClass]:
    """Those that differ in price: what a leaf that prices see holds, its pod holds without being asked to.

    Least first.
    """
    return [
        _StageClass(leaf_ep, leaf_part, pod_ep, pod_part)
        for leaf_ep, leaf_part in leaves
        for pod_ep, pod_part in pods
        if pod_ep == pods[0][0] or pod_ep > leaf_ep or not leaf_seen
    ]


def _best_and_others(classes: list[_StageClass]) -> list[_StageClass]:
    """Two for all: no stage is better placed than its class, and the second one asks what the best does."""
    *others, best = classes
    if not others:
        return classes
    return [
        _StageClass(max(x.leaf_ep for x in others), None, max(x.pod_ep for x in others), None),
        best._replace(
            leaf_ep=max(x.leaf_ep for x in classes), pod_ep=max(x.pod_ep for x in classes)
        ),
    ]


def _nearest(
    instance: Instance, leaf_gpus: IntArray | None, pod_gpus: IntArray | None
) -> list[_StageClass]:
    """How near the expert groups of every stage can be, in leaves and in pods, least first; None is unseen.

    No more stages have groups in parts of at least so many slots than blocks with as many have room for; nor
    whole groups than fit into blocks.
    """
    problem, reaches = instance.problem, []
    size, each = problem.traffic.expert_slots, instance.slots.gpus
    for gpus in (leaf_gpus, pod_gpus):
        by_stage = np.ones(problem.stages, dtype=np.int64)
        if gpus is None:
            reaches.append(by_stage * int(instance.layout.ep))
            continue
        for members, part in _experts(instance, gpus):
            slots = gpus // each
            room = np.where(slots >= (part or 1), slots, 0)
            room = room // size * size if (part or 1) == size else room
            stages = int(room.sum()) // size // (problem.slots // size)
            by_stage[max(problem.stages - stages, 0) :] = members
        reaches.append(by_stage)
    pairs = zip(*(reach.tolist() for reach in reaches), strict=True)
    return [_StageClass(leaf_ep, None, pod_ep, None) for leaf_ep, pod_ep in pairs]


def number_of_orders(instance: Instance, classes: int) -> int:
    """Of so many classes for the first and for the last stage, and for those between them in order.

    Parameters
    ----------
    instance
        Of at least two stages.
    classes
        Ways in which one stage can lie, at least 1.
    """
    stages = instance.problem.stages
    return classes**2 * comb(classes + stages - 3, stages - 2)


def _orders_of_alike(instance: Instance, classes: int) -> IntArray:
    """Every class for all stages, [classes, stages]."""
    return np.repeat(np.arange(classes)[:, None], instance.problem.stages, axis=1)


def _orders(instance: Instance, classes: list[_StageClass], nearest: list[_StageClass]) -> IntArray:
    """The class of every stage, [orders, stages], least first, of those that counting slots does not exclude.

    Any for the first and for the last stage, which have other work too; inner stages of one class stand side
    by side, those of the least class first.
    """
    stages, indices = instance.problem.stages, range(len(classes))
    orders = [
        (first, *between, last)
        for first, last in product(indices, repeat=2)
        for between in combinations_with_replacement(indices, stages - 2)
    ]
    table = np.array(sorted(orders, key=lambda order: (sum(order), order)), dtype=np.int64)
    fits = np.ones(len(table), dtype=bool)
    for part, ep in (("leaf_part", "leaf_ep"), ("pod_part", "pod_ep")):
        # What asks for nothing is possible, whatever its price.
        wishes = np.array([getattr(x, ep) * (getattr(x, part) is not None) for x in classes])
        reachable = np.array([getattr(x, ep) for x in nearest])
        fits &= np.all(np.sort(wishes[table], axis=1) <= reachable, axis=1)
    return table[fits]


def _asked_parts(classes: list[_StageClass], name: str, order: list[int]) -> tuple[int, ...] | None:
    """What stages ask of blocks; None where that is nothing."""
    parts = tuple(getattr(classes[each], name) or 1 for each in order)
    return None if max(parts) == 1 else parts


@dataclass(frozen=True, kw_only=True)
class _Option:
    """How far groups may reach in the blocks of a level, and what that asks."""

    reach: Reach
    limits: Limits

    @property
    def ep(self) -> int:
        """Of the groups of experts."""
        return int(np.min(self.reach.ep))


def _unseen(instance: Instance) -> _Option:
    """A level that the fabric has not: nothing is asked of it."""
    layout = instance.layout
    reach = Reach(
        dp_cp=int(layout.dp) * int(layout.cp), cp=int(layout.cp), ep=int(layout.ep), edp=int(layout.edp),
        together=True, stage_ep=int(layout.ep),
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
    most_ep = max(1, ep * (traffic.expert_slots // fewest_parts) // traffic.expert_slots)
    reach = Reach(
        dp_cp=members(problem.slots, dense, int(layout.dp) * int(layout.cp)),
        cp=members(traffic.context_slots, context, int(layout.cp)),
        ep=most_ep,
        stage_ep=most_ep,
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
    """Reaches of one level but for experts, with their limits; those that ask less come first."""
    stages, options = instance.problem.stages, []
    gradients = _gradients(instance, free, fineness)
    contexts = _thinned(_contexts(instance, free), fineness)
    for together in (False, True) if stages > 1 else (True,):
        for ((dp_cp, edp), (rings, expert_rings)), (cp, context) in product(gradients, contexts):
            limits = Limits(
                rings=rings,
                context=context,
                expert_rings=expert_rings,
                together=together and stages > 1,
            )
            reach = Reach(dp_cp=dp_cp, cp=cp, ep=1, edp=edp, together=together, stage_ep=1)
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


BoolArray = NDArray[np.bool_]

TOGETHER = 8192
"""Profiles that are bounded in one array operation."""


def _count(placements: Placements) -> int:
    return len(placements.placement.tp)


def profile_bounds(
    workload: Workload,
    layouts: Layout,
    profiles: Sequence[Placements],
    limit_gib: float,
    numbers_of_groups: Sequence[int] = (),
    *,
    below_s: float = inf,
    or_less: bool = False,
    in_order: bool = False,
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
    below_s
        Seconds of a step; bounds at or above it are not made tighter.
    or_less
        Whether a placement also stands for all that reach less far in some group. Where an outer level is
        faster than an inner one, these may be the faster ones (`best_beyond`).
    in_order
        Whether stages that lie unlike each other stand as they are, so that ranks with one virtual stage each
        are bounded one by one; else any may be the first or the last. Of one layout.

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
            placed = [profiles[row].placement for row in part]
            ordered = layouts.take(part) if in_order else None
            stages = _Stages.of(context, placed, ordered, limit_gib)
            bounds_of = _BoundsOf(context, layouts.take(part), counts, limit_gib, stages)
            seconds = bounds_of.seconds(below_s)
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
    placed = [profiles[row].placement for row in rows]
    placement = Placement(
        **{name: np.concatenate([getattr(one, name) for one in placed]) for name in GROUPS}
    )
    counts = [_count(profiles[row]) for row in rows]
    return make_context(workload, layouts.take(np.repeat(rows, counts)), placement)


class _Stages(NamedTuple):
    """What stages take that lie unlike each other, under each profile, [n]."""

    best: KindTimes
    """A layer of each kind on the stage that is best at it."""
    differ: BoolArray
    busiest_s: FloatArray
    """Where they differ: the least that the busiest takes for a micro-batch, over all splits."""

    @classmethod
    def of(
        cls,
        context: Context,
        placed: Sequence[Placement],
        ordered: Layout | None,
        limit_gib: float,
    ) -> _Stages | None:
        """None where all stages lie alike under all profiles of some layouts.

        The stages of one that is `ordered` stand as they are.

        Parameters
        ----------
        context
            Of all profiles, with the stage that reaches least far.
        placed
            Placements of the layouts, one after the other.
        ordered
            The layouts, [n], where stages stand as they are; None where any may be first or last.
        limit_gib
            What the peak on one GPU may reach.
        """
        if not any(isinstance(placement, StagedPlacement) for placement in placed):
            return None
        every = [
            placement.by_stage() if isinstance(placement, StagedPlacement) else placement
            for placement in placed
        ]
        counts = np.concatenate(
            [np.full(len(x.tp), len(y.tp) // len(x.tp)) for x, y in zip(placed, every, strict=True)]
        )
        columns = {name: np.concatenate([getattr(each, name) for each in every]) for name in GROUPS}
        owner = np.repeat(np.arange(len(counts)), counts)
        flat = replace(context, layout=context.layout.take(owner), placement=Placement(**columns))
        times = shared_times(flat, LAYER_AXES)
        assert times is not None
        starts = np.cumsum(counts) - counts
        best = times.least_of_runs(starts)
        ratios = [
            kind.seconds / np.asarray(least.seconds)[owner]
            for kind, least in zip(times.layers, best.layers, strict=True)
        ]
        slower, model = np.minimum.reduce(ratios), context.workload.model
        slowest = np.maximum.reduceat(slower, starts)
        differ = np.maximum.reduceat(np.maximum.reduce(ratios), starts) > 1.0
        layers_s = np.zeros(len(counts))
        for kind, number in ((best.dense, model.dense_layers), (best.moe, model.moe_layers)):
            layers_s = layers_s + (0.0 if kind is None else number * np.asarray(kind.seconds))
        # A stage's layers, as fast as on the best one, and the rest, by how much slower they are there at the
        # most, add up to all work: each stage has a share of no more than the busiest one's seconds.
        work_s = layers_s + (np.asarray(least_work_s(context, best)) - layers_s) / slowest
        busiest_s = work_s / np.add.reduceat(1.0 / slower, starts) * (1 - BOUND_ROUNDING)
        if not times.unlike:
            dealt = _WholeLayers.of(times, model, starts)
            busiest_s = np.maximum(busiest_s, dealt.least_busiest_s(busiest_s))
        if ordered is not None and np.all(np.asarray(ordered.vpp) == 1):
            placed_s = busiest_by_place_s(context.workload, ordered, times, limit_gib)
            busiest_s = np.maximum(busiest_s, placed_s * (1 - BOUND_ROUNDING))
        return cls(best, differ, np.where(differ, busiest_s, 0.0))


BOUND_ROUNDING = 1e-9
"""By which a sum in another order may differ."""
HALVINGS = 30
"""Of the range in which the least pace is looked for."""


class _WholeLayers(NamedTuple):
    """Layers of one kind, dealt out whole to stages: those of the first profile, then of the next."""

    layer_s: FloatArray
    """Of one layer on each stage."""
    front_s: FloatArray
    """What the first stage does besides, were it the first."""
    end_s: FloatArray
    """What the last one does besides, were it the last."""
    number: int
    """Of layers."""
    starts: IntArray
    """Where each profile's stages begin."""

    @classmethod
    def of(cls, times: KindTimes, model: ModelSpec, starts: IntArray) -> _WholeLayers:
        """Of a model's layers with experts, with times on each stage.

        Parameters
        ----------
        times
            Of a layer on every stage of every profile.
        model
            All its layers have experts alike.
        starts
            Where each profile's stages begin.
        """
        assert times.moe is not None
        layer_s = np.asarray(times.moe.seconds)
        ends = (times.embedding.seconds, last_rank_s(times, model.mtp_layers))
        front_s, end_s = (np.broadcast_to(np.asarray(each), layer_s.shape) for each in ends)
        return cls(layer_s, front_s, end_s, model.moe_layers, starts)

    def least_busiest_s(self, least_s: FloatArray) -> FloatArray:
        """What the busiest stage takes at the least, [profiles], no less than `least_s`.

        Any stage may be the first or the last: these lie where that takes the fewest layers' room.

        Parameters
        ----------
        least_s
            Seconds that are proven already, shape [profiles].
        """
        low = least_s
        high = low + 2 * np.maximum.reduceat(self.layer_s, self.starts)
        for ends in (self.front_s, self.end_s):
            high = high + np.maximum.reduceat(ends, self.starts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = self._hold(middle)
            low, high = np.where(fits, low, middle), np.where(fits, middle, high)
        return np.asarray(low * (1 - BOUND_ROUNDING))

    def _hold(self, limit_s: FloatArray) -> BoolArray:
        """Whether stages have room for all layers within some seconds each, [profiles]."""
        counts = np.diff(self.starts, append=len(self.layer_s))
        limits = np.repeat(limit_s, counts) * (1 + BOUND_ROUNDING)
        room = np.floor(limits / self.layer_s)
        layers = np.add.reduceat(room, self.starts)
        for ends in (self.front_s, self.end_s):
            beside = np.maximum(np.floor((limits - ends) / self.layer_s), 0.0)
            layers = layers - np.minimum.reduceat(room - beside, self.starts)
        return np.asarray(layers >= self.number)


class _BoundsOf(NamedTuple):
    """What some layouts take at the least under each of their profiles, those of the first one first."""

    context: Context
    """Of all profiles, one at least."""
    layouts: Layout
    counts: list[int]
    """Profiles of each layout."""
    limit_gib: float
    stages: _Stages | None

    def seconds(self, below_s: float) -> FloatArray:
        """Of a step; sequences of passes, which take most of the time, raise what is below some seconds."""
        stages = self.stages
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        times, rows, equal = times_under_mappings(self.context, owner)
        if stages is not None:
            times = replace(times, by_stage=stages.best.with_one_stage())
            rows = equal = np.arange(len(owner))
        in_two = self.context.workload.model.unlike_layers and stages is None and below_s < inf
        busiest_s = self._busiest_s(times, rows, owner, by_passes=stages is None and not in_two)
        step_s = self._steps_s(times, busiest_s[equal], np.arange(len(owner)))
        several = np.broadcast_to(np.asarray(self.context.layout.vpp) > 1, owner.shape)
        near = np.flatnonzero(several & (step_s < below_s)) if in_two else owner[:0]
        if len(near):
            again = np.unique(equal[near])
            busiest_s[again] = self._busiest_s(times, rows[again], owner, by_passes=True)
            step_s[near] = self._steps_s(times, busiest_s[equal[near]], near)
        return step_s

    def _busiest_s(
        self, times: KindTimes, rows: IntArray, owner: IntArray, *, by_passes: bool
    ) -> FloatArray:
        """`busiest_in_rooms_s` of some profiles, rows in the order of their owners."""
        stages, counts = self.stages, np.bincount(owner[rows], minlength=len(self.counts))
        best = (times if stages is None else stages.best).rows(rows, len(owner))
        busiest_s = busiest_in_rooms_s(
            rows_of_context(self.context, rows),
            best,
            self.layouts,
            counts,
            self.limit_gib,
            by_passes=by_passes,
        )
        return busiest_s if stages is None else np.maximum(busiest_s, stages.busiest_s[rows])

    def _steps_s(self, times: KindTimes, busiest_s: FloatArray, rows: IntArray) -> FloatArray:
        """`optimistic_step` of some profiles by what their busiest ranks take; infinite without a split."""
        context, fits = self.context, np.isfinite(busiest_s)
        if len(rows) < len(context.placement.tp):
            times = times.rows(rows, len(context.placement.tp))
            context = rows_of_context(context, rows)
        traffic = shared_traffic(context, GROUPS_OF_TRAFFIC)
        step = optimistic_step(context, times, np.where(fits, busiest_s, 0.0), traffic)
        return np.where(fits, np.asarray(step.seconds, dtype=np.float64), inf)


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
