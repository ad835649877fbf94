"""Where ranks could stand on listed nodes, and how many members of a group that leaves in a block.

Written from the words of docs/fabric.md and of `Placement` alone: nothing of `planner.mapping`,
`planner.bounds` or `costmodel.recount` is used, so that what they say can be held against it. A placement is
a list of slots, each `unit` GPUs of one node; unit u holds the ranks u x unit and on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import numpy as np
from numpy.typing import NDArray

from meshwright.cluster_specs.allocation import fabric_levels
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.layout import Layout, Placement, StagedPlacement

IntArray = NDArray[np.int64]
Place = tuple[int, int]
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "dp_cp")


def free_places(cluster: ClusterSpec) -> list[list[Place]]:
    """The free GPUs of every node."""
    return [
        [(index, gpu) for gpu in range(_free(cluster, index))]
        for index in range(len(cluster.nodes))
    ]


def _free(cluster: ClusterSpec, index: int) -> int:
    free = cluster.nodes[index].free_gpus
    return cluster.gpus_per_node if free is None else free


def blocks_by_level(cluster: ClusterSpec, gpus: int, places: Sequence[Place]) -> list[IntArray]:
    """The block that each place is in, by level of the prices; the last level is one block."""
    names = fabric_levels(cluster, gpus).names
    switches = [level.name for level in cluster.levels]
    racks = cluster.nvlink_domain > cluster.gpus_per_node
    rows = []
    for name in names:
        keys = [_block(cluster, name, switches, racks, place) for place in places]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        rows.append(np.array([numbers[key] for key in keys], dtype=np.int64))
    rows[-1] = np.zeros(len(places), dtype=np.int64)
    return rows


def _block(
    cluster: ClusterSpec, name: str, switches: list[str], racks: bool, place: Place
) -> object:
    index, gpu = place
    node = cluster.nodes[index]
    per_node = cluster.gpus_per_node
    if name == "node":
        return index
    if name not in switches:
        if racks and node.leaf is not None:
            return (node.pod, node.leaf)
        return (index * per_node + gpu) // cluster.nvlink_domain if name != "fabric" else 0
    depth = switches.index(name) + (1 if racks else 0)
    if node.leaf is not None and depth == 0:
        return (node.pod, node.leaf)
    if node.leaf is not None and depth == 1:
        return node.pod
    return (index * per_node + gpu) // cluster.levels[switches.index(name)].gpus


@dataclass(frozen=True, eq=False)
class Groups:
    """The ranks of every group of each axis of one layout."""

    layout: Layout

    @cached_property
    def members(self) -> dict[str, IntArray]:
        """[groups, size] of rank numbers, in the order of the axis."""
        tp, cp, dp, pp, etp, ep = (
            int(getattr(self.layout, axis)) for axis in ("tp", "cp", "dp", "pp", "etp", "ep")
        )
        world = tp * cp * dp * pp
        rank = np.arange(world)
        stage, within = rank // (tp * cp * dp), rank % (tp * cp * dp)
        at = {
            "tp": within % tp,
            "cp": within // tp % cp,
            "dp": within // (tp * cp),
            "etp": within % etp,
            "ep": within // etp % ep,
            "edp": within // (etp * ep),
        }
        sizes = {"tp": tp, "cp": cp, "dp": dp, "etp": etp, "ep": ep}
        sizes["edp"] = tp * cp * dp // (etp * ep)
        dense, experts = ("tp", "cp", "dp"), ("etp", "ep", "edp")
        groups = {}
        for family in (dense, experts):
            for axis in family:
                key = stage
                for other in family:
                    if other != axis:
                        key = key * sizes[other] + at[other]
                groups[axis] = np.lexsort((at[axis], key)).reshape(-1, sizes[axis])
        groups["dp_cp"] = np.lexsort((within, stage * tp + at["tp"])).reshape(-1, dp * cp)
        groups["pp"] = np.lexsort((stage, within)).reshape(-1, pp)
        return groups


def counted(groups: Groups, levels: Sequence[IntArray]) -> dict[str, list[int]]:
    """Members inside a block, by axis and level; `levels` hold the block of every rank."""
    counts: dict[str, list[int]] = {axis: [] for axis in AXES}
    for block in levels:
        blocks = int(block.max()) + 1
        used = np.bincount(block, minlength=blocks)
        for axis in AXES:
            ranks = groups.members[axis]
            rows, size = ranks.shape
            if axis == "pp":
                hops = (block[ranks][:, 1:] != block[ranks][:, :-1]).sum(axis=1)
                inside = size // (int(hops.max(initial=0)) + 1)
            else:
                flat = np.arange(rows).repeat(size) * blocks + block[ranks].ravel()
                held = np.bincount(flat, minlength=rows * blocks).reshape(rows, blocks)
                inside = _exchanged(held) if axis == "ep" else _in_rings(held, size, used)
            counts[axis].append(max([inside, 1, *counts[axis][-1:]]))
    return counts


def _in_rings(held: IntArray, size: int, used: IntArray) -> int:
    """GPUs in use of a block for each ring that leaves it, in the block that has fewest."""
    cut = ((held > 0) & (held < size)).sum(axis=0)
    if not cut.any():
        return size
    least = min(int(used[b]) // int(cut[b]) for b in np.flatnonzero(cut).tolist())
    return max(1, min(least, size - 1))


def _exchanged(held: IntArray) -> int:
    """Of all-to-alls: the members in a block of the rank that has fewest beside it."""
    return min(int(members) for row in held for members in row if members)


def placement_of_counts(counts: dict[str, list[int]]) -> Placement:
    """As the cost model takes it."""
    return Placement(**{axis: np.array(row, dtype=np.int64) for axis, row in counts.items()})


def placement_of_ranks(
    cluster: ClusterSpec, gpus: int, layout: Layout, ranks: Sequence[Place]
) -> Placement:
    """Where groups lie by a rank list."""
    levels = blocks_by_level(cluster, gpus, ranks)
    return placement_of_counts(counted(Groups(layout), levels))


def placement_by_stage(
    cluster: ClusterSpec, gpus: int, layout: Layout, ranks: Sequence[Place]
) -> Placement:
    """The same with the expert groups of each pipeline stage counted by themselves."""
    levels, stages = blocks_by_level(cluster, gpus, ranks), int(layout.pp)
    groups = Groups(layout)
    of_stages = []
    for experts in np.split(groups.members["ep"], stages):
        inside = [
            min(int(np.sum(block[own] == each)) for own in experts for each in block[own].tolist())
            for block in levels
        ]
        of_stages.append(np.maximum.accumulate(np.maximum(inside, 1)))
    plain = placement_of_counts(counted(groups, levels))
    return StagedPlacement(**vars(plain), stage_ep=np.array(of_stages, dtype=np.int64))


Prices = Callable[[Sequence[Placement]], NDArray[np.float64]]


@dataclass(eq=False)
class PlaceSearch:
    """Random placements of one layout, and swaps that make them better."""

    cluster: ClusterSpec
    layout: Layout
    prices: Prices
    chance: random.Random
    per_turn: int = 12
    """Placements priced together."""

    def __post_init__(self) -> None:
        self._unit = lcm(int(self.layout.tp), int(self.layout.etp))
        self._units = int(self.layout.gpus) // self._unit
        self._groups = Groups(self.layout)
        self._known: dict[bytes, float] = {}
        self._slots: list[tuple[Place, ...]] = []
        for gpus in free_places(self.cluster):
            cuts = range(0, len(gpus) - self._unit + 1, self._unit)
            self._slots += [tuple(gpus[first : first + self._unit]) for first in cuts]
        if self.holds:
            places = [place for slot in self._slots for place in slot]
            rows = blocks_by_level(self.cluster, int(self.layout.gpus), places)
            self._levels = [row.reshape(-1, self._unit) for row in rows]

    @property
    def holds(self) -> bool:
        """Whether the nodes have room for the layout's units."""
        return self._units * self._unit == int(self.layout.gpus) and self._units <= len(self._slots)

    def ranks(self, slots: IntArray) -> list[Place]:
        """The rank list of a placement."""
        return [place for slot in slots[: self._units].tolist() for place in self._slots[slot]]

    def best(
        self, turns: int, enough_s: float, known: Sequence[Place] = ()
    ) -> tuple[float, list[Place]]:
        """The fastest placement met, until one is below `enough_s`; infinite where nothing is held.

        `known` is a rank list to begin with too.
        """
        best_s, best = np.inf, np.arange(len(self._slots))
        if not self.holds:
            return best_s, []
        starts = [*self._as_slots(known), *self._orders()]
        seconds = self._seconds(starts)
        for start in np.argsort(seconds)[: max(1, turns // 8)].tolist():
            now_s, now = float(seconds[start]), starts[start]
            for _ in range(min(turns, 8)):
                if min(now_s, best_s) < enough_s:
                    break
                tries = [self._changed(now) for _ in range(self.per_turn)]
                priced = self._seconds(tries)
                pick = int(np.argmin(priced))
                if priced[pick] <= now_s:
                    now_s, now = float(priced[pick]), tries[pick]
            if now_s < best_s:
                best_s, best = now_s, now
            if best_s < enough_s:
                break
        return best_s, self.ranks(best)

    def _as_slots(self, ranks: Sequence[Place]) -> Iterator[IntArray]:
        """A rank list as slots, those that it leaves free behind; nothing where it cuts nodes otherwise."""
        number = {slot: position for position, slot in enumerate(self._slots)}
        cuts = range(0, len(ranks), self._unit)
        taken = [number.get(tuple(ranks[first : first + self._unit])) for first in cuts]
        used = [slot for slot in taken if slot is not None]
        if ranks and len(used) == len(taken) == self._units:
            rest = sorted(set(range(len(self._slots))) - set(used))
            yield np.array([*used, *rest], dtype=np.int64)

    def _seconds(self, placements: Sequence[IntArray]) -> NDArray[np.float64]:
        """One price for all placements with the same counts."""
        keys, fresh = [], {}
        for slots in placements:
            used = slots[: self._units]
            levels = [row[used].ravel() for row in self._levels]
            counts = counted(self._groups, [np.unique(r, return_inverse=True)[1] for r in levels])
            key = repr(counts).encode()
            keys.append(key)
            if key not in self._known:
                fresh[key] = placement_of_counts(counts)
        if fresh:
            priced = self.prices(list(fresh.values())).tolist()
            self._known.update(zip(fresh, priced, strict=True))
        return np.array([self._known[key] for key in keys])

    def _orders(self) -> Iterator[IntArray]:
        """Every order of nodes with every nesting of the axes."""
        nestings = list(self._nestings())
        self.chance.shuffle(nestings)
        for of_nodes in self._node_orders():
            slots = np.array(of_nodes, dtype=np.int64)
            for nesting in nestings[:8]:
                placed = slots.copy()
                placed[nesting] = slots[: self._units]
                yield placed

    def _node_orders(self) -> Iterator[list[int]]:
        """Slots node by node: as listed, fullest nodes or leaves first, leaf by leaf, at random."""
        by_node: dict[int, list[int]] = {}
        for number, slot in enumerate(self._slots):
            by_node.setdefault(slot[0][0], []).append(number)
        nodes = list(by_node)
        leaf = {
            n: (self.cluster.nodes[n].pod or "", self.cluster.nodes[n].leaf or "") for n in nodes
        }
        room: dict[tuple[str, str], int] = {}
        for node in nodes:
            room[leaf[node]] = room.get(leaf[node], 0) + len(by_node[node])

        def dealt(order: list[int]) -> list[int]:
            return [slot for node in order for slot in by_node[node]]

        yield dealt(nodes)
        yield dealt(sorted(nodes, key=lambda n: -len(by_node[n])))
        yield dealt(
            sorted(nodes, key=lambda n: (leaf[n][0], -room[leaf[n]], leaf[n], -len(by_node[n])))
        )
        yield dealt(sorted(nodes, key=lambda n: (-room[leaf[n]], leaf[n], -len(by_node[n]))))
        for _ in range(2):
            mixed = {key: self.chance.random() for key in room}
            yield dealt(sorted(nodes, key=lambda n: (mixed[leaf[n]], -len(by_node[n]))))
        yield dealt(self.chance.sample(nodes, len(nodes)))
        # The units of a group side by side, one to a node.
        deepest = max(len(own) for own in by_node.values())
        yield [own[k] for k in range(deepest) for own in by_node.values() if k < len(own)]

    def _nestings(self) -> Iterator[IntArray]:
        """Units in the order of nested axes, any of them innermost; experts part data parallelism."""
        cp, dp, pp = (int(getattr(self.layout, axis)) for axis in ("cp", "dp", "pp"))
        ways = int(self.layout.tp)
        if self._unit != ways or self._units != cp * dp * pp:
            yield np.arange(self._units)
            return
        inner = max(1, int(self.layout.etp) * int(self.layout.ep) // (ways * cp))
        inner = inner if dp % inner == 0 else 1
        grid = np.arange(self._units).reshape(pp, dp // inner, inner, cp)
        seen = set()
        for order in (
            (0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 2, 1, 3),
            (2, 0, 1, 3), (2, 1, 0, 3), (3, 0, 1, 2), (1, 3, 0, 2), (2, 1, 3, 0), (3, 1, 2, 0),
        ):  # fmt: skip
            nesting = grid.transpose(order).ravel()
            if nesting.tobytes() not in seen:
                seen.add(nesting.tobytes())
                yield nesting

    def _changed(self, slots: IntArray) -> IntArray:
        """Two units, or two runs of them, change places; a unit may move to a slot that is not used."""
        changed = slots.copy()
        longest = max(1, len(slots) // 2)
        run = self.chance.choice((1, 1, 2, 4, 8, self.chance.randint(1, longest)))
        run = min(run, longest)
        one, two = sorted(self.chance.sample(range(max(2, len(slots) - run + 1)), 2))
        if one + run > two or two + run > len(slots):
            run = 1
        if two >= len(slots):
            return changed
        changed[one : one + run], changed[two : two + run] = (
            slots[two : two + run],
            slots[one : one + run],
        )
        return changed
