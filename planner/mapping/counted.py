"""Mappings of a layout onto parts of nodes, their members counted rank by rank, and what no other one beats.

Where nodes are part-filled, or a layout needs no whole number of them, nodes hold several slots, or slots of
unlike size: members of a group then are where they are, and only counting says how many a node holds. Ranks
run through the free GPUs in many regular orders (`effective.FreeGpus`), each counted by `members_by_level`.
What other mappings could reach at the most (`most_members`) bounds them, and `KindsReach` asks how far groups
of several kinds reach at once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, pairwise, permutations, product
from math import inf, prod
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cluster_specs.allocation import blocks_of
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster
from meshwright.costmodel.estimate import Stages, estimate_layout
from meshwright.costmodel.layout import AXES, EXPERT_AXES, GROUPS, PLACED_AXES, Layout, Placement
from meshwright.costmodel.placement import (
    members_by_level,
    placement_in,
    position_of_ranks,
    ring_members,
)
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InternalError
from meshwright.planner.bounds.mappings import matrices_of
from meshwright.planner.mapping.effective import (
    FreeGpus,
    RunOfGpus,
    free_gpus_of,
    levelled,
    placement_of,
)
from meshwright.planner.mapping.joint import PATIENT_WORK, QUESTION_WORK, choice_instance
from meshwright.planner.mapping.problem import IntArray
from meshwright.planner.mapping.slots import Instance, Place, regular_orders, slot_sizes
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


# How many members of each group blocks can hold at the most, whatever GPU every rank of a layout is on.
#
# For each kind of group on its own: no mapping reaches further in any of them, so a price under these numbers
# is at or below that of every mapping. Slots, orders and the other groups are not looked at.


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What the blocks of one level hold, counted in some unit."""

    blocks: IntArray
    """Of each block, at least 1."""
    idle: int
    """What stays free of all of them."""

    @property
    def least_used(self) -> IntArray:
        """Of each block, where all that stays free is in it."""
        return np.maximum(self.blocks - self.idle, 0)


def most_members(cluster: ClusterSpec, layout: Layout) -> Placement:
    """Members of a group inside the block that paces it, at most; arrays [levels].

    Parameters
    ----------
    cluster
        With its nodes listed.
    layout
        One layout, on no more GPUs than are free.
    """
    return _most_members(SameCluster(cluster), degrees_of(layout))


@lru_cache(maxsize=4096)
def _most_members(same: SameCluster, key: Degrees) -> Placement:
    cluster, layout = same.cluster, layout_of(key)
    free = free_gpus_of(cluster)
    degrees = {name: int(getattr(layout, name)) for name in PLACED_AXES}
    tp, world = degrees["tp"], int(layout.gpus)
    every: list[_Room] = []
    units: list[_Room | None] = []
    node = free.places[:, 0]
    # Where a domain is no larger than a node, tensor groups lie in nodes: others see whole units of them.
    in_nodes = cluster.nvlink_domain <= cluster.gpus_per_node and tp <= cluster.gpus_per_node
    unit_of_node = (free.free // tp)[node] / np.maximum(free.free[node], 1)
    for of_level in free.blocks(world):
        gpus = np.bincount(of_level)
        gpus = gpus[gpus > 0]
        every.append(_Room(blocks=gpus, idle=len(node) - world))
        whole = gpus // tp
        if in_nodes:
            whole = np.rint(np.bincount(of_level, weights=unit_of_node)).astype(np.int64)
        if in_nodes and not _holds_nodes(of_level, node):
            units.append(None)
            continue
        whole = whole[whole > 0]
        units.append(_Room(blocks=whole, idle=int(whole.sum()) - world // tp))
    edp = tp * degrees["cp"] * degrees["dp"] // (degrees["etp"] * degrees["ep"])
    levels = range(len(every))

    def rings(size: int, *, of_units: bool = True) -> IntArray:
        by_level = []
        for level in levels:
            counted = units[level] if of_units else None
            room, groups = (every[level], world // size)
            if counted is not None:
                room, groups = counted, world // tp // size
            by_level.append(_of_a_ring(room, size, groups))
        return np.maximum.accumulate(np.array(by_level, dtype=np.int64))

    def chains() -> IntArray:
        rooms = [every[level] if room is None else room for level, room in enumerate(units)]
        pipelines = [world if room is None else world // tp for room in units]
        by_level = [
            _of_a_chain(room, degrees["pp"], count // degrees["pp"])
            for room, count in zip(rooms, pipelines, strict=True)
        ]
        return np.maximum.accumulate(np.array(by_level, dtype=np.int64))

    exchanges = [_of_an_exchange(room, degrees["ep"], world // degrees["ep"]) for room in every]
    return Placement(
        tp=np.full(len(every), tp, dtype=np.int64),
        cp=rings(degrees["cp"]),
        dp=rings(degrees["dp"]),
        pp=chains(),
        etp=rings(degrees["etp"], of_units=False),
        ep=np.maximum.accumulate(np.array(exchanges, dtype=np.int64)),
        edp=rings(edp, of_units=False),
        dp_cp=rings(degrees["dp"] * degrees["cp"]),
    )


def _holds_nodes(of_level: IntArray, node: IntArray) -> bool:
    """Whether no node is in several blocks."""
    pairs = len(np.unique(of_level * (int(node.max()) + 1) + node))
    return pairs == len(np.unique(node))


def _fits_whole(room: _Room, size: int, groups: int) -> bool:
    """Whether blocks could hold that many groups without cutting one."""
    return int((room.blocks // size).sum()) >= groups


def _of_a_ring(room: _Room, size: int, groups: int) -> int:
    """What a ring has at most: of the GPUs in use in a block, over the rings that leave it, the least.

    A block that cannot use a whole number of groups cuts one at least. Where no block must, but not all
    groups fit, two blocks cut one. Groups that no block holds are cut into parts, and as parts have so many
    members on average in every block, they have no more over all of them; blocks with fewer are not in use,
    and those with less than twice as many hold a part of one group alone.
    """
    if size == 1 or _fits_whole(room, size, groups):
        return size
    largest = int(room.blocks.max())
    if size > largest:
        most = size // -(-size // largest)
        while most > 1 and not _can_be_dealt(room.blocks[room.blocks >= most], most, size, groups):
            most -= 1
        return most
    cuts = room.blocks[room.blocks // size * size < room.least_used]
    most = int(cuts.min()) if len(cuts) else int(np.sort(room.blocks)[-2:][0])
    return max(1, min(most, size - 1))


def _can_be_dealt(blocks: IntArray, least: int, size: int, groups: int) -> bool:
    """False only where blocks cannot hold groups larger than any in parts of `least` on average."""
    if int(blocks.sum()) < groups * size:
        return False
    largest = int(blocks.max())
    if 2 * least <= largest:
        return True
    # Each block has one group. Some groups take the fewest blocks, which then have little to spare.
    fewest = -(-size // largest)
    small = int(np.count_nonzero(blocks < size - (fewest - 1) * largest))
    count = len(blocks)
    in_fewest = min(groups, (count - small) // fewest)
    if in_fewest == groups:
        return True
    return fewest * in_fewest + (fewest + 1) * (groups - in_fewest) <= count


def _of_a_chain(room: _Room, stages: int, pipelines: int) -> int:
    """Stages between two crossings of the pipeline that crosses most, on average."""
    if stages == 1 or _fits_whole(room, stages, pipelines):
        return stages
    crossings = max(1, -(-stages // int(room.blocks.max())) - 1)
    return stages // (crossings + 1)


def _of_an_exchange(room: _Room, size: int, groups: int) -> int:
    """What the smallest part of an all-to-all's groups has at most, of `size` members.

    Where not all groups fit, one is cut at least, into no fewer parts than it takes of the largest block. A
    block that can use no whole number of groups, whatever stays idle, holds parts of more than u // size
    groups, u the members in use there: the smallest is no larger than their mean.
    """
    if size == 1 or _fits_whole(room, size, groups):
        return size
    most = size // max(2, -(-size // int(room.blocks.max())))
    low, high = np.maximum(room.least_used, 1), room.blocks
    must_cut = (room.least_used > 0) & (high // size * size < low)
    if np.any(must_cut):
        most = min(most, int((high // (low // size + 1))[must_cut].min()))
    return max(1, most)


PRICED = tuple(group for group in GROUPS if group not in ("dp", *EXPERT_AXES))
PRICED_OF_EXPERTS = (*PRICED, *EXPERT_AXES)


Degrees = tuple[tuple[int, int, int, int], int, int]
"""(degrees of `AXES`, etp, ep)."""


# How many mappings of a layout are counted.


MOST_COUNTED = 96
"""On few GPUs."""
MOST_COUNTED_RANKS = 20_000
"""Ranks of all of them together, beyond the fewest."""
FEWEST_COUNTED = 6
COUNTED_AT_ONCE = 200_000
"""Ranks times levels of mappings whose members are counted together."""
MOST_IN_FULL = 500
"""Orders of tensor groups on nodes that are all counted, where there are no more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedMappings:
    """Mappings of one layout that differ in price, and the most that any other could reach."""

    placement: Placement
    """Arrays [mappings, levels]."""
    gpus: tuple[IntArray, ...]
    """Of each mapping the number of every rank's GPU, as `FreeGpus.places` has them."""
    places: IntArray
    """(node, local GPU) of every free GPU, [free GPUs, 2]."""
    most: Placement
    """Arrays [rows, levels]: every mapping that is not listed reaches no further than one of these; no rows
    where all are listed.
    """
    most_is_reached: bool
    """Whether of these mappings one reaches as far as each of `most` in every group."""

    def ranks(self, row: int) -> tuple[Place, ...]:
        """(node, local GPU) of every rank under one mapping.

        Parameters
        ----------
        row
            Which mapping.
        """
        at = self.places[self.gpus[row]]
        return tuple((node, gpu) for node, gpu in at.tolist())


def takes_parts_of_nodes(
    cluster: ClusterSpec, layout: Layout, slots_of: Callable[[Layout], Instance | None]
) -> bool:
    """Whether nodes hold several slots of a layout, or any part of them may be taken.

    Tensor groups wider than a node take whole nodes anyway.

    Parameters
    ----------
    cluster
        Its nodes as listed.
    layout
        One layout.
    slots_of
        The slots of a layout; None where none hold it. Asked only where all nodes are free as a whole.
    """
    per_node = cluster.gpus_per_node
    if not cluster.nodes or int(layout.tp) > per_node:
        return False
    if free_gpus_of(cluster).are_part_filled or cluster.takes_any_gpus:
        return True
    plain = slots_of(layout)
    return plain is None or plain.slots.gpus < per_node


def counted_mappings(
    cluster: ClusterSpec, layout: Layout, *, experts: bool
) -> CountedMappings | None:
    """The mappings of a layout that are looked at; None where no mapping keeps tensor groups inside nodes.

    Parameters
    ----------
    cluster
        With its nodes listed.
    layout
        One layout. Beside its degrees the number of shard groups counts: mappings under which these do not
        lie as prices assume are left out.
    experts
        Whether the model has experts, whose groups count too.
    """
    priced = PRICED_OF_EXPERTS if experts else PRICED
    return _with_groups(SameCluster(cluster), degrees_of(layout), int(layout.shard_groups), priced)


@lru_cache(maxsize=4096)
def _with_groups(
    same: SameCluster, key: Degrees, groups: int, priced: tuple[str, ...]
) -> CountedMappings | None:
    """Those under which so many shard groups lie as prices assume."""
    mappings = _counted(same, key, priced)
    if mappings is None or groups == 1:
        return mappings
    layout = replace(layout_of(key), shard_groups=groups)
    blocks = free_gpus_of(same.cluster).blocks(int(layout.gpus))
    kept = [
        row
        for row, gpus in enumerate(mappings.gpus)
        if groups_lie_as_priced(mappings.placement, row, blocks[:, gpus], layout)
    ]
    placement, most = mappings.placement.take(np.array(kept, dtype=np.int64)), mappings.most
    if not len(most.tp):
        left_out = [row for row in range(len(mappings.gpus)) if row not in kept]
        most = mappings.placement.take(np.array(left_out, dtype=np.int64))
    return replace(
        mappings,
        placement=placement,
        gpus=tuple(mappings.gpus[row] for row in kept),
        most=most,
        most_is_reached=_reaches(placement, most, priced),
    )


def counted_placement(cluster: ClusterSpec, layout: Layout, ranks: Sequence[Place]) -> Placement:
    """Members of the groups of one layout inside the blocks of each level, counted; arrays [levels].

    Parameters
    ----------
    cluster
        The machine.
    layout
        One layout.
    ranks
        (node, local GPU) of every rank, in Megatron's default order.
    """
    where = blocks_of(cluster, len(ranks), np.array(ranks, dtype=np.int64))
    return placement_in(where, layout)


def degrees_of(layout: Layout) -> Degrees:
    """Of one layout."""
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in AXES)
    return (tp, cp, dp, pp), int(layout.etp), int(layout.ep)


def layout_of(key: Degrees) -> Layout:
    """Of some degrees; all else as it is by default."""
    (tp, cp, dp, pp), etp, ep = key
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)


@lru_cache(maxsize=4096)
def _counted(same: SameCluster, key: Degrees, priced: tuple[str, ...]) -> CountedMappings | None:
    cluster, free = same.cluster, free_gpus_of(same.cluster)
    layout = layout_of(key)
    (tp, cp, dp, pp), etp, ep = key
    world = int(layout.gpus)
    if not _holds_tensor_groups(free, layout):
        return None
    blocks = free.blocks(world)
    orders: dict[bytes, IntArray] = {}
    every = _every_order(cluster, layout)
    limit = max(FEWEST_COUNTED, min(MOST_COUNTED, MOST_COUNTED_RANKS // world))
    limit = limit if every is None else len(every)
    for gpus in _rank_orders(cluster, layout) if every is None else every:
        orders.setdefault(blocks[:, gpus].tobytes(), gpus)
        if len(orders) >= limit:
            break
    by_reach: dict[tuple[int, ...], tuple[dict[str, IntArray], IntArray]] = {}
    for each in _chunks(list(orders.values()), COUNTED_AT_ONCE // blocks.size):
        where = blocks[:, np.stack(each)].transpose(1, 0, 2)
        members = members_by_level(where, (tp, cp, dp, pp), etp, ep)
        of_priced = np.concatenate([members[name] for name in priced], axis=1).tolist()
        for row, gpus in enumerate(each):
            row_members = {name: column[row] for name, column in members.items()}
            by_reach.setdefault(tuple(of_priced[row]), (row_members, gpus))
    kept = list(by_reach.values())
    if every is None:
        rows = _not_behind(np.array(list(by_reach), dtype=np.int64))
        kept = [pair for row, pair in enumerate(kept) if row in rows]
    placement = Placement(**{name: np.stack([one[name] for one, _ in kept]) for name in GROUPS})
    most = most_members(cluster, layout).take(None)
    most = most if every is None else most.take(np.zeros(0, dtype=np.int64))
    return CountedMappings(
        placement=placement,
        gpus=tuple(gpus.astype(np.int32) for _, gpus in kept),
        places=free.places,
        most=most,
        most_is_reached=_reaches(placement, most, priced),
    )


def _holds_tensor_groups(free: FreeGpus, layout: Layout) -> bool:
    """Whether nodes have room for all tensor groups of a layout."""
    tp = int(layout.tp)
    return int((free.free // tp).sum()) * tp >= int(layout.gpus)


def _every_order(cluster: ClusterSpec, layout: Layout) -> list[IntArray] | None:
    """The number of every rank's GPU under every mapping of a layout; None where there are too many."""
    if cluster.nvlink_domain > cluster.gpus_per_node:
        return None
    tp, gpus = int(layout.tp), int(layout.gpus)
    return free_gpus_of(cluster).every_order(tp, gpus // tp, gpus, MOST_IN_FULL)


def has_unlisted(cluster: ClusterSpec, layout: Layout) -> bool:
    """Whether a layout has mappings, and too many of them to list all.

    Parameters
    ----------
    cluster
        With its nodes listed.
    layout
        One layout that `takes_parts_of_nodes`.
    """
    holds = _holds_tensor_groups(free_gpus_of(cluster), layout)
    return holds and _every_order(cluster, layout) is None


def _chunks(orders: list[IntArray], most: int) -> Iterator[list[IntArray]]:
    for start in range(0, len(orders), max(most, 1)):
        yield orders[start : start + max(most, 1)]


def _not_behind(table: IntArray) -> set[int]:
    """Rows that no other row is at or above everywhere."""
    kept: set[int] = set()
    for row in range(len(table)):
        behind = np.all(table >= table[row], axis=1)
        if not np.any(behind & np.any(table > table[row], axis=1)):
            kept.add(row)
    return kept


def _reaches(placement: Placement, most: Placement, priced: tuple[str, ...]) -> bool:
    """Whether of the mappings one reaches as far as each row of `most` in every group that is priced."""
    far = [getattr(placement, name)[:, None] >= getattr(most, name)[None] for name in priced]
    return bool(np.all(np.any(np.all(np.concatenate(far, axis=2), axis=2), axis=0)))


def groups_lie_as_priced(placement: Placement, row: int, where: IntArray, layout: Layout) -> bool:
    """Whether shard groups have the members that prices read off those of all replicas together.

    Prices take m replicas in a block as min(m, s) of a shard group of s, and as m // s of those with the
    same shard (`costmodel.data_parallel`).

    Parameters
    ----------
    placement
        Members of groups counted over all replicas, arrays [mappings, levels].
    row
        Which mapping.
    where
        The block of every rank at each level, shape [levels, ranks].
    layout
        One layout, with its number of shard groups.
    """
    groups, pp = int(layout.shard_groups), int(layout.pp)
    tp, replicas = int(layout.tp), int(layout.cp) * int(layout.dp)
    each = int(layout.expert_group)
    for members, inner, size in (
        (placement.dp_cp[row], tp, replicas),
        (placement.edp[row], each, tp * replicas // each),
    ):
        shards = size // groups
        if size % groups:
            return False
        inside = between = 1
        for level, of_level in enumerate(where):
            grid = of_level.reshape(pp, groups, shards, inner)
            within = ring_members(grid.transpose(0, 1, 3, 2).reshape(-1, shards))
            over = ring_members(grid.transpose(0, 2, 3, 1).reshape(-1, groups))
            inside, between = max(inside, int(within)), max(between, int(over))
            priced = int(members[level])
            if inside < min(priced, shards) or between < max(1, priced // shards):
                return False
    return True


def _rank_orders(cluster: ClusterSpec, layout: Layout) -> Iterator[IntArray]:
    """The number of every rank's GPU, ranks counted tp, cp, dp, pp, under regular orders of ranks and nodes.

    Over every run of GPUs the axes nested in each order, then all parallelism matrices over its equal pieces,
    as on the same nodes without a list. Runs come with the likely ones first.
    """
    tp, world = int(layout.tp), int(layout.gpus)
    degrees = {axis: int(getattr(layout, axis)) for axis in AXES}
    orders = list(permutations([axis for axis in AXES[1:] if degrees[axis] > 1]))
    nested = [_nested_positions(degrees, order) for order in orders]
    yield from _stages_on_nodes(free_gpus_of(cluster), layout)
    for run in free_gpus_of(cluster).runs(
        tp, world // tp, slot_sizes(cluster, replace(layout, etp=1, ep=1))
    ):
        yield from (run.gpus[positions] for positions in nested)
        yield from (run.gpus[positions] for positions in _matrix_positions(degrees, run))


def _stages_on_nodes(free: FreeGpus, layout: Layout) -> Iterator[IntArray]:
    """The number of every rank's GPU where pipelines lie whole in the blocks of a level, for each level, and
    inside them each stage on nodes of its own, which give about the same; or on what is next.

    What has to stay together, context groups and groups of experts, does, as far as nodes hold it.
    """
    tp, cp, dp, pp = (int(getattr(layout, axis)) for axis in AXES)
    world = tp * cp * dp * pp
    if pp == 1:
        return
    together = max(cp * tp, int(layout.expert_group))
    if together % (cp * tp) or together % int(layout.expert_group):
        together = tp
    used = np.flatnonzero(free.free)
    paths = np.full((len(free.blocks(world)), len(free.free)), -1, dtype=np.int64)
    paths[:, used] = free.blocks(world)[:, free.first[used]]
    for each in dict.fromkeys((together, tp)):
        rooms = free.free // each
        if int(rooms.sum()) * each < world:
            continue
        order = free.in_tree(rooms)
        order = order[rooms[order] > 0]
        for level in range(len(paths)):
            blocks = list(dict.fromkeys(paths[level][order].tolist()))
            nodes = [order[paths[level][order] == block] for block in blocks]
            held = np.array([int(rooms[own].sum()) // pp for own in nodes])
            wanted = world // pp // each
            if held.sum() < wanted:
                continue
            around = [paths[level:, own[0]] for own in nodes]
            ways = {
                tuple(_dealt_out(held, np.arange(len(held)), around, depth, wanted))
                for depth in range(len(paths) - level)
            }
            for replicas, dealt in product(ways, (_on_nodes_of_their_own, _on_what_is_next)):
                stages: list[list[int]] = [[] for _ in range(pp)]
                for own, count in zip(nodes, replicas, strict=True):
                    of_block = dealt(rooms[own], count, pp)
                    for stage, taken in zip(stages, of_block, strict=False):
                        stage += [int(own[node]) for node in taken]
                units = tuple(node for stage in stages for node in stage)
                if len(units) * each == world:
                    yield free.in_order(np.arange(len(free.free)), units, each)


def _dealt_out(
    held: IntArray, blocks: IntArray, around: list[IntArray], depth: int, wanted: int
) -> list[int]:
    """What each of some blocks gives of so many that are wanted, [all blocks]: as few of the blocks around
    them at a depth as can be give about the same, and so on inside these.

    `around` has of every block the numbers of those around it, itself at depth 0; `held` is what it has.
    """
    keys = [int(around[block][depth]) for block in blocks]
    outer = list(dict.fromkeys(keys))
    rooms = np.array([int(held[blocks[np.array(keys) == key]].sum()) for key in outer])
    fullest = np.argsort(-rooms, kind="stable")
    fewest = int(np.searchsorted(np.cumsum(rooms[fullest]), wanted)) + 1
    given = levelled(rooms, fullest[:fewest], wanted)
    dealt = [0] * len(held)
    for key, own in zip(outer, given.tolist(), strict=True):
        inside = blocks[np.array(keys) == key]
        if own and depth:
            of_block = _dealt_out(held, inside, around, depth - 1, own)
            dealt = [before + more for before, more in zip(dealt, of_block, strict=True)]
        elif own:
            dealt[int(inside[0])] = own
    return dealt


def _on_nodes_of_their_own(rooms: IntArray, count: int, stages: int) -> list[list[int]]:
    """The node of each of `count` members of every stage: each stage on the next nodes that hold it, all with
    about the same, of nodes that have as much as can be; empty where there are not so many.
    """
    if not count:
        return [[] for _ in range(stages)]
    fewest = -(-count // int(rooms.max()))
    for least in sorted(
        set(rooms[(rooms > 0) & (rooms <= count // fewest)].tolist()) | {count // fewest},
        reverse=True,
    ):
        nodes = np.flatnonzero(rooms >= least)
        dealt: list[list[int]] = []
        while len(dealt) < stages and int(rooms[nodes].sum()) >= count:
            taken = int(np.searchsorted(np.cumsum(rooms[nodes]), count)) + 1
            given = levelled(rooms, nodes[:taken], count)
            dealt.append(np.repeat(nodes[:taken], given[nodes[:taken]]).tolist())
            nodes = nodes[taken:]
        if len(dealt) == stages:
            return dealt
    return []


def _on_what_is_next(rooms: IntArray, count: int, stages: int) -> list[list[int]]:
    """The node of each of `count` members of every stage, stage after stage, node after node."""
    places = np.repeat(np.arange(len(rooms)), rooms)[: count * stages]
    return [part.tolist() for part in np.split(places, stages)]


def _nested_positions(degrees: dict[str, int], order: tuple[str, ...]) -> IntArray:
    """The position of every rank where tensor groups are innermost and the others nest in an order."""
    stride = degrees["tp"]
    positions = np.arange(stride, dtype=np.int64).reshape(1, 1, 1, -1)
    for axis in order:
        shape = [1, 1, 1, 1]
        shape[-1 - AXES.index(axis)] = -1
        positions = positions + stride * np.arange(degrees[axis]).reshape(shape)
        stride *= degrees[axis]
    return np.asarray(positions.reshape(-1), dtype=np.int64)


def _matrix_positions(degrees: dict[str, int], run: RunOfGpus) -> Iterator[IntArray]:
    pieces = [1, *run.pieces]
    factors = [outer // inner for inner, outer in pairwise(pieces)]
    if factors[0] % degrees["tp"] or len(factors) < 2:
        return
    table = matrices_of([degrees[axis] for axis in AXES], factors, ("tp",))
    for row in range(len(table["tp"])):
        yield position_of_ranks(tuple(tuple(table[axis][row].tolist()) for axis in AXES))


# What a layout takes under the regular orders of its ranks: what launchers can do without a search.


def seconds_in_best_order(workload: Workload, layout: Layout, stages: Stages) -> float | None:
    """The step under the best of the regular orders; None where the layout's groups do not fit.

    Parameters
    ----------
    workload
        On as many GPUs as the layout.
    layout
        One layout.
    stages
        Layers of each [pipeline rank][virtual stage].

    Returns
    -------
    float or None
        Seconds of a step.
    """
    instance: Instance | None = None
    with contextlib.suppress(InfeasibleError):
        instance = choice_instance(workload, layout, stages)
    if takes_parts_of_nodes(workload.cluster, layout, lambda _: instance):
        experts = workload.model.moe is not None
        counted = counted_mappings(workload.cluster, layout, experts=experts)
        if counted is None or not counted.gpus:
            return None
        priced = estimate_layout(workload, layout, counted.placement, stages)
        return float(np.min(priced.step_time_s))
    if instance is None:
        return None
    orders = [instance.problem.hostname_assignment(), *regular_orders(instance.problem)]
    placed = (placement_of(workload, instance, order) for order in orders)
    return min(
        float(np.asarray(estimate_layout(workload, layout, placement, stages).step_time_s))
        for placement in placed
    )


# How far groups of several kinds reach at once, where ranks lie on parts of nodes.
#
# `most_members` bounds each kind of group on its own, and the sum of separate best cases is mostly out of
# reach: data-parallel groups that lie in nodes leave pipelines none. Here all kinds are asked about together:
# is there a mapping under which each reaches so far? CP-SAT answers with a mapping, or proves that there is
# none; then some kind of each mapping reaches less far, and what no mapping beats falls into smaller rows
# (`Cover`). Answers are of degrees and free GPUs alone: layouts of other micro-batches, and other executions,
# share them.
#
# Blocks nest, so that a group's members in a block, as the cost model counts them, are never fewer further
# out: with u GPUs in use in each inner block for v rings that it cuts, an outer block holds the sum of its
# inner ones and cuts no ring that none of them cuts; parts of an all-to-all's groups are sums of inner parts;
# and a pipeline that leaves an outer block leaves an inner one. So each level can be asked about by itself.


RINGS = ("cp", "etp", "edp", "dp_cp")
ASKED = (*RINGS, "ep", "pp")
"""Kinds of groups whose members in a block are asked for."""

Row = tuple[int, ...]
"""Members in the block of each level, of each kind of `ASKED` in turn, level by level."""


# How much is asked. Work is CP-SAT's deterministic time, about seconds on an idle core.


ALL_WORK = 12.0
"""For all questions about the same degrees, with what it takes to write them down."""
WORK_OF_A_VARIABLE = 5e-5
"""To write it down, with its rows."""
MOST_VARIABLES = 6_000
"""Tensor groups times nodes, or groups times blocks, in one question."""
MOST_JOINT_ROWS = 400
"""Rows that are looked at before there is a question."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """A block of one level in a model of where tensor groups are."""

    holds: list[cp_model.IntVar]
    """Whether each tensor group is in it."""
    used: cp_model.LinearExprT
    """How many are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kind:
    """Groups of one kind, as members by tensor group."""

    size: int
    groups: tuple[tuple[tuple[tuple[int, int], ...], int], ...]
    """(members of each tensor group that has some, how many groups are alike); none of one tensor group."""


class KindsReach:
    """What is known of the mappings of layouts with the same degrees."""

    def __init__(self, cluster: ClusterSpec, key: Degrees) -> None:
        self._work_left = ALL_WORK
        self._degrees, self._etp, self._ep = key
        self._free = free_gpus_of(cluster)
        layout = layout_of(key)
        self._world = int(layout.gpus)
        self.blocks = self._free.blocks(self._world)
        """Of every free GPU at each level, [levels, free GPUs]."""
        self._racks = cluster.nvlink_domain > cluster.gpus_per_node
        self.most = most_members(cluster, layout)
        self._known: list[tuple[IntArray, IntArray]] = []
        """What mappings reach, and the GPU of every rank."""
        self._impossible: list[IntArray] = []
        self._undecided: list[tuple[IntArray, float]] = []
        """What was asked in vain, and the work for it."""
        self.deadline = inf
        """On the clock of `time.monotonic`; no question goes on behind it."""

    @property
    def levels(self) -> int:
        """Levels of the allocation."""
        return len(self.blocks)

    @cached_property
    def can_be_asked(self) -> bool:
        """Whether tensor groups lie in nodes, nodes in one block each, and a model is not too large."""
        return self.lie_in_nodes and self._variables <= MOST_VARIABLES

    @cached_property
    def lie_in_nodes(self) -> bool:
        """Whether tensor groups lie in nodes, and nodes in one block each."""
        first = self._free.first[self._free.places[:, 0]]
        return not self._racks and np.array_equal(self.blocks, self.blocks[:, first])

    @cached_property
    def _variables(self) -> int:
        """Of one question: tensor groups, or groups if these are more, times nodes."""
        tp = self._degrees[0]
        groups = sum(len(kind.groups) for kind in self._kinds.values())
        return max(self._world // tp, groups) * int(np.count_nonzero(self._free.free // tp))

    @cached_property
    def _nodes(self) -> IntArray:
        """The nodes with room for a tensor group."""
        return np.flatnonzero(self._free.free // self._degrees[0])

    def row(self, placement: Placement) -> Row:
        """Of one placement, arrays [levels].

        Parameters
        ----------
        placement
            Arrays [levels] of the allocation that these degrees take.
        """
        return tuple(int(x) for kind in ASKED for x in getattr(placement, kind))

    def placement(self, rows: Sequence[Row] | IntArray) -> Placement:
        """Arrays [rows, levels]; what is not asked for is the most.

        Parameters
        ----------
        rows
            Of `ASKED`, one after the other.
        """
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(ASKED), self.levels)
        columns = {
            name: np.repeat(np.asarray(getattr(self.most, name))[None], len(rows), axis=0)
            for name in GROUPS
        }
        return Placement(
            **columns | {kind: table[:, position] for position, kind in enumerate(ASKED)}
        )

    def members(self, gpus: IntArray) -> dict[str, IntArray]:
        """Of the groups of a mapping, by kind, [levels].

        Parameters
        ----------
        gpus
            The number of every rank's free GPU, shape [ranks].
        """
        return members_by_level(self.blocks[:, gpus], self._degrees, self._etp, self._ep)

    def ranks(self, gpus: IntArray) -> tuple[Place, ...]:
        """(node, local GPU) of every rank of a mapping.

        Parameters
        ----------
        gpus
            The number of every rank's free GPU, shape [ranks].
        """
        return tuple((node, gpu) for node, gpu in self._free.places[gpus].tolist())

    def add(self, gpus: IntArray) -> None:
        """A mapping that is known from elsewhere: the GPU of every rank.

        Parameters
        ----------
        gpus
            The number of every rank's free GPU, shape [ranks].
        """
        members = self.members(gpus)
        reached = np.concatenate([members[kind] for kind in ASKED])
        if not any(np.array_equal(reached, reached_before) for reached_before, _ in self._known):
            self._known.append((reached, np.asarray(gpus, dtype=np.int64)))

    def find(self, row: Row, *, patiently: bool = False) -> IntArray | None:
        """The GPU of every rank under a mapping that reaches as far as a row everywhere; None where there is
        none, or none was found: `is_impossible` tells the two apart.

        Parameters
        ----------
        row
            Members of groups that are asked for at least, of `ASKED`.
        patiently
            Whether `PATIENT_WORK` may be spent on it, in place of `QUESTION_WORK`.

        Returns
        -------
        array of int, shape [ranks], or None
            Numbers of free GPUs.
        """
        work = PATIENT_WORK if patiently else QUESTION_WORK
        wanted = np.array(row, dtype=np.int64)
        fits = [pair for pair in self._known if np.all(pair[0] >= wanted)]
        if fits:
            return fits[0][1]
        in_vain = (asked for asked, spent in self._undecided if spent >= work)
        if self.is_impossible(row) or any(np.all(wanted >= asked) for asked in in_vain):
            return None
        if not self.can_be_asked or self._work_left <= 0 or time.monotonic() >= self.deadline:
            return None
        gpus, decided = self._solved(wanted, work)
        if gpus is not None:
            self.add(gpus)
            if not any(np.all(reached >= wanted) for reached, _ in self._known):
                raise InternalError("a mapping that CP-SAT found does not reach as far as asked")
        elif decided:
            self._impossible.append(wanted)
        elif time.monotonic() < self.deadline:
            self._undecided.append((wanted, work))
        return gpus

    def is_impossible(self, row: Row) -> bool:
        """Whether it is known that no mapping reaches so far.

        Parameters
        ----------
        row
            Of `ASKED`; whatever reaches as far as a row that was refuted is impossible too.
        """
        wanted = np.array(row, dtype=np.int64)
        return any(bool(np.all(wanted >= refuted)) for refuted in self._impossible)

    def joint_rows(self) -> list[Row]:
        """Rows of which one at least is reached no further by each mapping: the lesser of two, by parts of
        exchanges and by blocks with whole pipelines. Parts of pipelines, which have no price, are left out.
        """
        by_exchange, by_chain = self._rows_of_exchanges(), self._rows_of_chains()
        if len(by_exchange) * len(by_chain) > MOST_JOINT_ROWS:
            by_chain = [self.row(self.most)]
        exchanges = np.array(by_exchange, dtype=np.int64)[:, None]
        table = np.minimum(exchanges, np.array(by_chain, dtype=np.int64)[None])
        table = table.reshape(-1, len(ASKED), self.levels)
        chains = table[:, ASKED.index("pp")]
        chains[chains < self._degrees[3]] = 1
        return _widest(table.reshape(len(table), -1))

    def _rows_of_chains(self) -> list[Row]:
        """By the innermost level in whose blocks all pipelines lie whole: no level that they cross is further
        out than the one around it, and where they are cut at all, into what parts has no price.

        From that level on, a block has whole pipelines alone: as many members of each data-parallel group.
        """
        tp, cp, dp, pp = self._degrees
        if pp == 1 or not self.lie_in_nodes:
            return [self.row(self.most)]
        most = np.array(self.row(self.most), dtype=np.int64).reshape(len(ASKED), self.levels)
        chain, dense, expert = (ASKED.index(kind) for kind in ("pp", "dp_cp", "edp"))
        together = self._etp * self._ep
        size = tp * cp * dp // together
        rows = []
        for inner in np.flatnonzero(most[chain] == pp).tolist():
            used = tp * pp * int(self._pipelines(inner, self.levels - 1).max())
            for replicas in self._replicas_in_blocks(inner, self._pipelines(inner, inner)):
                row = most.copy()
                row[chain, :inner] = 1
                of_dense = np.array(replicas)
                if together <= tp:  # each tensor group has a part of every ring of experts
                    of_experts = of_dense * tp // together
                else:
                    of_experts = np.full(len(replicas), _most_of_cut_rings(used, pp * tp, size))
                row[dense, inner:] = np.minimum(row[dense, inner:], of_dense)
                row[expert, inner:] = np.minimum(row[expert, inner:], of_experts)
                # A group's members in a block are never fewer further out.
                outside_in = np.minimum.accumulate(row[[dense, expert], ::-1], axis=1)
                row[[dense, expert]] = outside_in[:, ::-1]
                rows.append(tuple(row.ravel().tolist()))
        return _widest(np.array(rows, dtype=np.int64))

    def _replicas_in_blocks(self, level: int, held: IntArray) -> Iterator[tuple[int, ...]]:
        """Members of a data-parallel group in blocks of a level and those around them, the most of each way.

        Blocks hold so many whole pipelines. Those with fewer than the members of a way are not in use there,
        so that less is left for what is around them.
        """
        _, cp, dp, _ = self._degrees
        most = _most_of_replicas(held, cp * dp)
        if level == self.levels - 1:
            yield from [(most,)] if most else []
            return
        nodes = np.flatnonzero(self._free.free)
        pairs = np.unique(self.blocks[[level, level + 1]][:, self._free.first[nodes]], axis=1)
        # With fewer members in blocks more blocks are in use, and those around them may hold more.
        values = sorted({most, *held[(held > 0) & (held < most)].tolist()}, reverse=True)
        for value in values:
            in_use = np.where(held >= value, held, 0)
            around = np.bincount(pairs[1], weights=in_use[pairs[0]]).astype(np.int64)
            for outer in self._replicas_in_blocks(level + 1, around) if value else ():
                yield (value, *outer)

    def _pipelines(self, inner: int, outer: int) -> IntArray:
        """Whole pipelines that the blocks of an outer level have room for, inside those of an inner one."""
        nodes = np.flatnonzero(self._free.free)
        blocks = self.blocks[:, self._free.first[nodes]]
        units = np.bincount(blocks[inner], weights=self._free.free[nodes] // self._degrees[0])
        pairs = np.unique(blocks[[inner, outer]], axis=1)
        held = np.bincount(pairs[1], weights=units.astype(np.int64)[pairs[0]] // self._degrees[3])
        return np.asarray(held.astype(np.int64))

    def _rows_of_exchanges(self) -> list[Row]:
        """By parts of exchanges.

        In a block that uses u GPUs, a part of an all-to-all with p members touches p rings of replicas, each
        of r members. No more than u // r of them lie in it whole, so that it cuts p - u // r or more, and a
        ring has u // (p - u // r) members there at the most. Parts with more than half of their group, but
        not all, are none: the rest would be smaller.
        """
        most = np.array(self.row(self.most), dtype=np.int64).reshape(len(ASKED), self.levels)
        tp, cp, dp, _ = self._degrees
        replicas = tp * cp * dp // (self._etp * self._ep)
        if self._ep == 1 or replicas == 1:
            return [self.row(self.most)]
        parts = [self._ep]
        while parts[-1] > 1:
            parts.append(parts[-1] // 2)
        # Sizes of parts from the least to the most, of each step.
        steps = [(self._ep, self._ep)]
        steps += [(less + 1, part) for part, less in pairwise([*parts[1:], 0])]
        room = np.array([min(int(np.bincount(row).max()), self._world) for row in self.blocks])
        exchange, ring = ASKED.index("ep"), ASKED.index("edp")
        rows = []
        for inside_out in combinations_with_replacement(reversed(steps), self.levels):
            least, largest = np.array(inside_out, dtype=np.int64).T
            if np.any(least > most[exchange]):
                continue
            cut = least - room // replicas
            of_rings = np.where(cut > 0, np.maximum(room // np.maximum(cut, 1), 1), replicas)
            row = most.copy()
            row[exchange] = np.minimum(row[exchange], largest)
            row[ring] = np.minimum(row[ring], np.maximum.accumulate(of_rings))
            rows.append(tuple(row.ravel().tolist()))
        return list(dict.fromkeys(rows))

    def less(self, row: Row) -> list[Row]:
        """Rows of which one at least is reached no further by each mapping that reaches no further than a
        row that is impossible.

        Kinds are let off one by one as long as the rest stays impossible. Each mapping then has one of those
        that are left, at some level, where it reaches less far than asked.

        Parameters
        ----------
        row
            One that `is_impossible`, of `ASKED`.
        """
        demanded = np.array(row, dtype=np.int64)
        for position in np.flatnonzero(demanded > 1):
            trial = demanded.copy()
            trial[position] = 1
            if self._refuted(trial):
                demanded = trial
        for position in np.flatnonzero(demanded > 1):
            while demanded[position] > 2:
                trial = demanded.copy()
                trial[position] = self._lower(int(position), int(demanded[position]))
                if trial[position] < 2 or not self._refuted(trial):
                    break
                demanded = trial
        rows = []
        for position in np.flatnonzero(demanded > 1):
            child = np.array(row, dtype=np.int64)
            child[position] = self._lower(int(position), int(demanded[position]))
            # A group's members in a block are never fewer further out.
            first = position - position % self.levels
            child[first:position] = np.minimum(child[first:position], child[position])
            rows.append(tuple(child.tolist()))
        return rows

    def _refuted(self, wanted: IntArray) -> bool:
        row = tuple(wanted.tolist())
        return self.find(row) is None and self.is_impossible(row)

    def ways_within(self, row: Row, limit: int) -> IntArray | None:
        """Every way in which groups can reach no further than a row, [ways, columns of a row].

        Parts of pipelines have no price, so that a pipeline lies whole in a block, or has one stage there.

        Parameters
        ----------
        row
            Of `ASKED`.
        limit
            Ways at the most; None where there are more.
        """
        limits = np.array(row, dtype=np.int64).reshape(len(ASKED), self.levels)
        context, dense = ASKED.index("cp"), ASKED.index("dp_cp")
        is_one = self._degrees[2] == 1  # context groups are those of gradients, too
        if is_one:
            limits[context] = np.minimum(limits[context], limits[dense])
        ways_of_kinds: list[list[tuple[int, ...]]] = []
        for position, kind in enumerate(ASKED):
            size = int(getattr(self.most, kind)[-1])
            cut = {"ep": range(1, size // 2 + 1), "pp": range(1, min(size, 2))}
            values = [*cut.get(kind, range(1, size)), size]
            ways: list[tuple[int, ...]] = [()]
            for level, most in enumerate(limits[position].tolist()):
                fewest = size if level == self.levels - 1 else 1
                ways = [
                    (*way, value)
                    for way in ways
                    for value in values
                    if max((fewest, *way[-1:])) <= value <= most
                ]
            ways_of_kinds.append(ways[:1] if is_one and position == dense else ways)
        if prod(map(len, ways_of_kinds)) > limit:
            return None
        each = [sum(ways, ()) for ways in product(*ways_of_kinds)]
        table = np.array(each, dtype=np.int64).reshape(len(each), len(ASKED), self.levels)
        if is_one:
            table[:, dense] = table[:, context]
        return table.reshape(len(each), len(row))

    def is_reached(self, way: IntArray, gpus: IntArray) -> bool:
        """Whether groups reach as far as a way of `ways_within` says, and no further.

        Parameters
        ----------
        way
            One of them.
        gpus
            The number of every rank's free GPU, shape [ranks].
        """
        members = self.members(gpus)
        members["pp"] = np.where(members["pp"] < self._degrees[3], 1, members["pp"])
        return np.array_equal(way, np.concatenate([members[kind] for kind in ASKED]))

    def _lower(self, position: int, value: int) -> int:
        """The most below a value that groups of a place in a row can have."""
        kind = ASKED[position // self.levels]
        if kind == "ep" and value == self._ep:
            return max(1, value // 2)
        return 1 if kind == "pp" else value - 1

    @cached_property
    def _kinds(self) -> dict[str, _Kind]:
        tp, cp, dp, pp = self._degrees
        unit = np.arange(self._world) // tp
        dense = unit.reshape(pp, dp, cp, tp)
        experts = unit.reshape(pp, -1, self._ep, self._etp)
        members = (
            dense.transpose(0, 1, 3, 2).reshape(-1, cp),
            experts.reshape(-1, self._etp),
            experts.transpose(0, 2, 3, 1).reshape(-1, experts.shape[1]),
            dense.transpose(0, 3, 1, 2).reshape(-1, dp * cp),
            experts.transpose(0, 1, 3, 2).reshape(-1, self._ep),
        )
        kinds = {}
        for kind, groups in zip(ASKED[: len(members)], members, strict=True):
            alike = Counter(tuple(sorted(Counter(group).items())) for group in groups.tolist())
            cut = tuple((group, count) for group, count in alike.items() if len(group) > 1)
            kinds[kind] = _Kind(size=groups.shape[1], groups=cut)
        return kinds

    def post(self, model: cp_model.CpModel, row: Row) -> list[list[cp_model.IntVar]]:
        """Adds a mapping under which groups reach as far as a row everywhere, where `can_be_asked`.

        Parameters
        ----------
        model
            Where variables and constraints go.
        row
            Of `ASKED`.

        Returns
        -------
        list of list of literal
            Whether each tensor group is on each of the nodes with room for one, [nodes][tensor groups].
        """
        tp = self._degrees[0]
        nodes = self._nodes
        on = [[model.new_bool_var("") for _ in range(self._world // tp)] for _ in nodes]
        for unit in zip(*on, strict=True):
            model.add_exactly_one(unit)
        paths = self.blocks[:, self._free.first[nodes]]
        # Counts are variables, and their sums are said: without them each proof would count booleans.
        used = [model.new_int_var(0, int(self._free.free[node] // tp), "") for node in nodes]
        model.add(sum(used) == self._world // tp)
        last: dict[tuple[int, ...], int] = {}
        for position, groups in enumerate(on):
            model.add(used[position] == sum(groups))
            # Nodes that are alike can be told apart by what they give: the first gives most.
            like = (int(self._free.free[nodes[position]] // tp), *paths[:, position].tolist()[1:])
            if like in last:
                model.add(used[last[like]] >= used[position])
            last[like] = position
        self._post_order_of_replicas(model, on)
        by_kind = np.array(row, dtype=np.int64).reshape(len(ASKED), self.levels)
        for level in range(self.levels):
            blocks = []
            for block in np.unique(paths[level]).tolist():
                inside = np.flatnonzero(paths[level] == block).tolist()
                rows = [on[position] for position in inside]
                blocks.append(
                    _Block(
                        holds=rows[0] if len(rows) == 1 else _joined(model, rows),
                        used=sum(used[position] for position in inside),
                    )
                )
            for position, kind in enumerate(ASKED):
                demanded = int(by_kind[position, level])
                if demanded == 1:
                    continue
                if kind == "pp":
                    self._post_chain(model, [block.holds for block in blocks], demanded)
                elif kind == "ep":
                    self._post_exchange(model, blocks, demanded)
                else:
                    self._post_ring(model, blocks, self._kinds[kind], demanded)
        return on

    def state_places(self, model: cp_model.CpModel, row: Row) -> None:
        """Adds the same to a model that others read, with names; nothing where it cannot be asked.

        Parameters
        ----------
        model
            Where variables and constraints go.
        row
            Of `ASKED`.
        """
        if not self.can_be_asked:
            return
        tp = self._degrees[0]
        for node, groups in zip(self._nodes.tolist(), self.post(model, row), strict=True):
            for first, literal in enumerate(groups):
                ranks = f"{first * tp}" if tp == 1 else f"{first * tp}_to_{(first + 1) * tp - 1}"
                model.proto.variables[literal.index].name = f"ranks_{ranks}_on_node_{node}"

    def _solved(self, wanted: IntArray, work: float) -> tuple[IntArray | None, bool]:
        """(mapping, whether the question is decided)."""
        from meshwright.planner.solvers.or_tools import cp_model

        tp, nodes = self._degrees[0], self._nodes
        model = cp_model.CpModel()
        on = self.post(model, tuple(wanted.tolist()))
        solver = repeatable_solver(work=min(work, self._work_left), deadline=self.deadline)
        status = solver.solve(model)
        self._work_left -= solver.response_proto.deterministic_time
        self._work_left -= WORK_OF_A_VARIABLE * self._variables
        if status == cp_model.INFEASIBLE:
            return None, True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, False
        order = [
            next(position for position, row in enumerate(on) if solver.boolean_value(row[unit]))
            for unit in range(self._world // tp)
        ]
        return self._free.in_order(nodes, tuple(order), tp), True

    def _post_order_of_replicas(
        self, model: cp_model.CpModel, on: list[list[cp_model.IntVar]]
    ) -> None:
        """Whole replicas, or sets of them that share experts, can be exchanged in all stages at once: those
        whose first tensor group is on the first nodes come first.
        """
        tp, cp, dp, _ = self._degrees
        size = max(cp * tp, self._ep * self._etp)
        if size % (cp * tp) or size % (self._ep * self._etp):
            return
        stage, units = cp * dp, size // tp
        where = [
            sum(position * row[first] for position, row in enumerate(on))
            for first in range(0, stage, units)
        ]
        for before, after in pairwise(where):
            model.add(before <= after)

    def _post_ring(
        self, model: cp_model.CpModel, blocks: list[_Block], kind: _Kind, demanded: int
    ) -> None:
        """A block uses `demanded` GPUs at least for each ring that it cuts, or it cuts none."""
        tp = self._degrees[0]
        domain = [0, kind.size] if demanded >= kind.size else range(kind.size + 1)
        members = self._members(model, blocks, kind, domain)
        if demanded >= kind.size:
            return
        for number, block in enumerate(blocks):
            cuts = []
            for of_group, (_, alike) in zip(members, kind.groups, strict=True):
                uncut, cut = model.new_bool_var(""), model.new_bool_var("")
                model.add(of_group[number] <= (kind.size - 1) * cut + kind.size * uncut)
                model.add(of_group[number] >= kind.size * uncut + cut)
                model.add(cut + uncut <= 1)
                cuts.append(alike * cut)
            if cuts:
                model.add(demanded * sum(cuts) <= tp * block.used)

    def _post_exchange(self, model: cp_model.CpModel, blocks: list[_Block], demanded: int) -> None:
        """Of each group a block holds nothing, or `demanded` members at least."""
        self._members(model, blocks, self._kinds["ep"], [0, *range(demanded, self._ep + 1)])

    def _members(
        self, model: cp_model.CpModel, blocks: list[_Block], kind: _Kind, numbers: Iterable[int]
    ) -> list[list[cp_model.IntVar]]:
        """How many members of each group are in each block, each one of some numbers; [groups][blocks]."""
        from meshwright.planner.solvers.or_tools import cp_model

        allowed = cp_model.Domain.from_values(list(numbers))
        members = []
        for group, _ in kind.groups:
            of_group = [model.new_int_var_from_domain(allowed, "") for _ in blocks]
            for number, block in zip(of_group, blocks, strict=True):
                model.add(number == sum(count * block.holds[unit] for unit, count in group))
            model.add(sum(of_group) == kind.size)
            members.append(of_group)
        is_all = sum(alike for _, alike in kind.groups) * kind.size == self._world
        for position, block in enumerate(blocks if is_all else []):
            of_kind = zip(members, kind.groups, strict=True)
            in_block = sum(alike * of_group[position] for of_group, (_, alike) in of_kind)
            model.add(in_block == self._degrees[0] * block.used)
        return members

    def _post_chain(
        self, model: cp_model.CpModel, blocks: list[list[cp_model.IntVar]], demanded: int
    ) -> None:
        """Each pipeline leaves its block so rarely that its parts have `demanded` stages on average."""
        _, cp, dp, pp = self._degrees
        most_exits = pp // demanded - 1
        for pipeline in range(cp * dp):
            chain = range(pipeline, cp * dp * pp, cp * dp)
            exits = []
            for unit, after in pairwise(chain):
                leaves = model.new_bool_var("")
                for block in blocks:
                    model.add(block[unit] - block[after] <= leaves)
                exits.append(leaves)
            model.add(sum(exits) <= most_exits)


def _joined(model: cp_model.CpModel, rows: list[list[cp_model.IntVar]]) -> list[cp_model.IntVar]:
    """Whether each tensor group is in one of some nodes."""
    joined = []
    for unit in zip(*rows, strict=True):
        trial = model.new_bool_var("")
        model.add(trial == sum(unit))
        joined.append(trial)
    return joined


def _most_of_replicas(rooms: IntArray, replicas: int) -> int:
    """Members of a data-parallel group in each block that has some, at the most, where blocks have room for
    so many whole pipelines each and hold nothing else; 0 where the pipelines do not fit.
    """
    falling = np.sort(rooms)[::-1]
    enough = np.cumsum(falling) >= replicas
    blocks = np.arange(1, len(rooms) + 1)
    return int(np.minimum(replicas // blocks, falling)[enough].max(initial=0))


def _most_of_cut_rings(used: int, touched: int, size: int) -> int:
    """Members, at the most, that rings of a block have on average where it has a part of so many of `size`.

    As many as can be are there whole, one member at the least of each other: 8 GPUs that have a part of 3
    rings of 5 hold one of them whole, which leaves the two others 4 each of what is in use.
    """
    whole = touched if touched * size <= used else max((used - touched) // max(size - 1, 1), 0)
    if whole >= touched:
        return size
    return max(1, min(size - 1, used // (touched - whole)))


class Cover:
    """Rows one of which at least is reached no further by each mapping of some degrees."""

    def __init__(self, reach: KindsReach) -> None:
        self.reach = reach
        self.rows: dict[Row, None] = dict.fromkeys(reach.joint_rows())

    def split(self, row: Row) -> None:
        """Puts smaller rows in the place of one that is impossible, but for those within another.

        Parameters
        ----------
        row
            One of `rows` that is impossible.
        """
        del self.rows[row]
        for child in self.reach.less(row):
            if not any(_is_within(child, wider) for wider in self.rows):
                self.rows[child] = None


def _widest(table: IntArray) -> list[Row]:
    """Of some rows those that are within no other one."""
    table = np.unique(table, axis=0)
    within = np.all(table[:, None] <= table[None], axis=2)
    np.fill_diagonal(within, val=False)
    return [tuple(row) for row in table[~within.any(axis=1)].tolist()]


def _is_within(row: Row, wider: Row) -> bool:
    return all(fewer <= further for fewer, further in zip(row, wider, strict=True))


def cover_of(cluster: ClusterSpec, layout: Layout) -> Cover:
    """What is known of the degrees of a layout on a cluster; kept for the cluster.

    Parameters
    ----------
    cluster
        With its nodes listed.
    layout
        Its degrees count alone.
    """
    return _cover(SameCluster(cluster), degrees_of(layout))


@lru_cache(maxsize=512)
def _cover(same: SameCluster, key: Degrees) -> Cover:
    return Cover(KindsReach(same.cluster, key))
