"""Mappings of a layout onto parts of nodes, their members counted rank by rank, and what no other one beats.

Where nodes are part-filled, or a layout needs no whole number of them, nodes hold several slots, or slots of
unlike size: members of a group then are where they are, and only counting says how many a node holds. Ranks
run through the free GPUs in many regular orders (`free_gpus`), each counted by `counted_members`. What other
mappings could reach at the most (`most_members`) bounds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import blocks_of
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.cluster_specs.tiers import SameCluster
from meshwright.costmodel.estimate import Stages, estimate_layout
from meshwright.costmodel.layout import AXES, EXPERT_AXES, GROUPS, Layout, Placement
from meshwright.costmodel.placement import members_by_level, position_of_ranks, ring_members
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.mappings import matrices_of
from meshwright.planner.mapping.effective import FreeGpus, RunOfGpus, free_gpus_of, placement_of
from meshwright.planner.mapping.joint import choice_instance
from meshwright.planner.mapping.slots import Instance, Place, regular_orders, slot_sizes

# How many members of each group blocks can hold at the most, whatever GPU every rank of a layout is on.
#
# For each kind of group on its own: no mapping reaches further in any of them, so a price under these numbers
# is at or below that of every mapping. Slots, orders and the other groups are not looked at.


IntArray = NDArray[np.int64]


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


def most_members(cluster: ClusterSpec, free: FreeGpus, layout: Layout) -> Placement:
    """Members of a group inside the block that paces it, at most; arrays [levels].

    Parameters
    ----------
    cluster
        With its nodes listed.
    free
        Its free GPUs.
    layout
        One layout, on no more GPUs than are free.
    """
    degrees = {name: int(getattr(layout, name)) for name in (*AXES, "ep", "etp")}
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
        found = []
        for level in levels:
            counted = units[level] if of_units else None
            room, groups = (every[level], world // size)
            if counted is not None:
                room, groups = counted, world // tp // size
            found.append(_of_a_ring(room, size, groups))
        return np.maximum.accumulate(np.array(found, dtype=np.int64))

    def chains() -> IntArray:
        rooms = [every[level] if room is None else room for level, room in enumerate(units)]
        pipelines = [world if room is None else world // tp for room in units]
        found = [
            _of_a_chain(room, degrees["pp"], count // degrees["pp"])
            for room, count in zip(rooms, pipelines, strict=True)
        ]
        return np.maximum.accumulate(np.array(found, dtype=np.int64))

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
    groups fit, two blocks cut one.
    """
    if size == 1 or _fits_whole(room, size, groups):
        return size
    cuts = room.blocks[room.blocks // size * size < room.least_used]
    most = int(cuts.min()) if len(cuts) else int(np.sort(room.blocks)[-2:][0])
    return max(1, min(most, size - 1))


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


@dataclass(frozen=True, kw_only=True)
class CountedParams:
    """How many mappings of a layout are counted."""

    most: int = 96
    """On few GPUs."""
    most_ranks: int = 20_000
    """Ranks of all of them together, beyond the fewest."""
    fewest: int = 6
    most_in_full: int = 500
    """Orders of tensor groups on nodes that are all counted, where there are no more."""


DEFAULT_COUNTED = CountedParams()


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
        """(node, local GPU) of every rank under one mapping."""
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
    found = _counted(same, key, priced)
    if found is None or groups == 1:
        return found
    layout = replace(layout_of(key), shard_groups=groups)
    blocks = free_gpus_of(same.cluster).blocks(int(layout.gpus))
    kept = [
        row
        for row, gpus in enumerate(found.gpus)
        if groups_lie_as_priced(found.placement, row, blocks[:, gpus], layout)
    ]
    placement, most = _rows_of(found.placement, kept), found.most
    if not len(most.tp):
        left_out = [row for row in range(len(found.gpus)) if row not in kept]
        most = _rows_of(found.placement, left_out)
    return replace(
        found,
        placement=placement,
        gpus=tuple(found.gpus[row] for row in kept),
        most=most,
        most_is_reached=_reaches(placement, most, priced),
    )


def _rows_of(placement: Placement, rows: Sequence[int]) -> Placement:
    taken = np.array(rows, dtype=np.int64)
    return Placement(**{name: column[taken] for name, column in vars(placement).items()})


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
    degrees = (int(layout.tp), int(layout.cp), int(layout.dp), int(layout.pp))
    return Placement(**members_by_level(where, degrees, int(layout.etp), int(layout.ep)))


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
    if int((free.free // tp).sum()) * tp < world:
        return None
    blocks, params = free.blocks(world), DEFAULT_COUNTED
    limit = max(params.fewest, min(params.most, params.most_ranks // world))
    found: dict[tuple[int, ...], tuple[dict[str, IntArray], IntArray]] = {}
    seen = set()
    every = None
    if cluster.nvlink_domain <= cluster.gpus_per_node:
        every = free.every_order(tp, world // tp, world, params.most_in_full)
        limit = limit if every is None else len(every)
    for gpus in _rank_orders(cluster, layout) if every is None else every:
        where = blocks[:, gpus]
        content = where.tobytes()
        if content in seen:
            continue
        seen.add(content)
        members = members_by_level(where, (tp, cp, dp, pp), etp, ep)
        of_priced = np.concatenate([members[name] for name in priced])
        found.setdefault(tuple(of_priced.tolist()), (members, gpus))
        if len(seen) >= limit:
            break
    kept = list(found.values())
    if every is None:
        rows = _not_behind(np.array(list(found), dtype=np.int64))
        kept = [pair for row, pair in enumerate(kept) if row in rows]
    placement = Placement(**{name: np.stack([one[name] for one, _ in kept]) for name in GROUPS})
    most = most_members(cluster, free, layout)
    most = Placement(**{name: column[None] for name, column in vars(most).items()})
    most = most if every is None else _rows_of(most, [])
    return CountedMappings(
        placement=placement,
        gpus=tuple(gpus.astype(np.int32) for _, gpus in kept),
        places=free.places,
        most=most,
        most_is_reached=_reaches(placement, most, priced),
    )


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
    """
    groups, pp = int(layout.shard_groups), int(layout.pp)
    tp, replicas = int(layout.tp), int(layout.cp) * int(layout.dp)
    each = int(layout.etp) * int(layout.ep)
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
            inside = max(inside, ring_members(grid.transpose(0, 1, 3, 2).reshape(-1, shards)))
            between = max(between, ring_members(grid.transpose(0, 2, 3, 1).reshape(-1, groups)))
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
    for run in free_gpus_of(cluster).runs(tp, world // tp, slot_sizes(cluster, layout)):
        yield from (run.gpus[positions] for positions in nested)
        yield from (run.gpus[positions] for positions in _matrix_positions(degrees, run))


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
    """The step under the best of the regular orders; None where the layout's groups do not fit."""
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
