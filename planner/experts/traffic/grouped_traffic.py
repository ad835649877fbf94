"""Less traffic where routing groups stay whole: which groups share a node, and which nodes share a leaf.

Replicas of an expert then lie on one node, so what a token touches depends on the groups' nodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.bound import balance_bound, partitions
from meshwright.planner.experts.balance.groups import solve_nodes, splits
from meshwright.planner.experts.balance.packing import SlotPacking
from meshwright.planner.experts.balance.rows import Solved
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.params import GROUPS, TRAFFIC
from meshwright.planner.experts.problem import Ids, Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.experts.traffic.flows import Flows
from meshwright.planner.experts.traffic.swap_search import Cap, tabu_search
from meshwright.planner.experts.traffic.swap_state import SwapState
from meshwright.planner.experts.traffic.swap_terms import Apart, Term, Touched
from meshwright.planner.experts.traffic.touched import Level
from meshwright.planner.solvers.clock import is_over


@dataclass(frozen=True, kw_only=True)
class _Ties:
    """Which units (groups, or whole nodes) go together: in tokens, or in counts of pairs."""

    touched: NDArray[np.bool_] | None
    """[tokens, units]."""
    pairs: Loads | None
    """[units, units], zero diagonal."""

    def cost(self, members: Slots) -> float:
        """A set's part of the traffic: tokens that touch it, or, below 0, pairs that it keeps together."""
        if self.touched is not None:
            return float(self.touched[:, members].any(axis=1).sum())
        return (
            -float(self.pairs[np.ix_(members, members)].sum()) / 2
            if self.pairs is not None
            else 0.0
        )

    def term(self, block: Ids, weight: float) -> Term:
        """The same for the search."""
        if self.touched is not None:
            return Touched(_padded(self.touched), block, weight)
        return Apart(
            np.zeros((len(block),) * 2) if self.pairs is None else self.pairs, block, weight
        )


def _ties(flows: Flows, layer: int, unit_of: Ids) -> _Ties:
    """Of the units that experts belong to, `unit_of` [experts]."""
    units = int(unit_of.max()) + 1
    if flows.tokens is not None:
        tokens = flows.layer(layer).tokens
        touched = np.zeros((0 if tokens is None else tokens.shape[1], units), dtype=bool)
        if tokens is not None:
            row, column = np.nonzero(tokens[0] >= 0)
            touched[row, unit_of[tokens[0][row, column]]] = True
        return _Ties(touched=touched, pairs=None)
    if flows.pairs is None:
        return _Ties(touched=None, pairs=None)
    inside = np.eye(units)[unit_of]
    pairs = inside.T @ flows.pairs[layer] @ inside
    np.fill_diagonal(pairs, 0.0)
    return _Ties(touched=None, pairs=pairs)


def less_grouped_traffic(
    flows: Flows,
    loads: Loads,
    solved: Solved,
    *,
    shape: SlotShape,
    limits: PlacementLimits,
    effort: PlacementEffort,
    levels: tuple[Level, ...],
    caps: Loads,
) -> Solved:
    """The placement with groups on other nodes, tokens touching fewer, within the caps [layers].

    Loads [layers, windows, experts] over the mean GPU load. Partitions are tried by rising traffic
    (all of them where there are few, else what a search finds), until one's packing keeps to the cap. Then
    whole nodes change leaves.
    """
    if not flows.by_token:
        return solved
    layers, _, experts = loads.shape
    per_group = experts // limits.groups
    effort = replace(
        effort,
        exact=False,
        time_limit_s=effort.time_limit_s / TRAFFIC.partitions_tried,
        on_first=None,
    )
    now = solved.slots.reshape(layers, shape.nodes, -1) // per_group
    candidates = [
        _candidates(
            _ties(flows, layer, np.arange(experts) // per_group),
            loads[layer],
            np.array([np.unique(node) for node in now[layer]]),
            cap=float(caps[layer]),
            shape=shape,
        )
        for layer in range(layers)
    ]
    slots = _first_within_caps(
        candidates, loads, solved.slots, caps, shape=shape, limits=limits, effort=effort
    )
    for layer in range(layers):
        slots[layer] = nodes_to_leaves(flows, layer, slots[layer], shape, levels)
    value = SlotPacking(slots=slots, loads=loads).gpu_loads().max(axis=(1, 2))
    return Solved(slots=slots, value=value, bound=np.minimum(solved.bound, value))


def _first_within_caps(
    candidates: list[list[Slots]],
    loads: Loads,
    slots: Slots,
    caps: Loads,
    *,
    shape: SlotShape,
    limits: PlacementLimits,
    effort: PlacementEffort,
) -> Slots:
    """Slots with the first candidate of every layer whose packing keeps to the cap; else as they are."""
    slots = slots.copy()
    pending = list(range(len(loads)))
    for turn in range(TRAFFIC.partitions_tried):
        pending = [layer for layer in pending if turn < len(candidates[layer])]
        if not pending or is_over():
            break
        groups = np.stack([candidates[layer][turn] for layer in pending])
        packed_slots, value = solve_nodes(loads[pending], groups, shape, limits, effort)
        good = value <= caps[pending] * (1 + 1e-9)
        for i in np.flatnonzero(good).tolist():
            slots[pending[i]] = np.sort(packed_slots[i], axis=1)
        pending = [layer for i, layer in enumerate(pending) if not good[i]]
    return slots


def _candidates(
    ties: _Ties, load: Loads, now: Slots, *, cap: float, shape: SlotShape
) -> list[Slots]:
    """Groups of the nodes [nodes, groups of a node] with less traffic than `now`, least first.

    Left out is what the bound of a node's packing rules out.
    """
    groups, size = now.size, now.shape[1]
    if partitions(groups, shape.nodes) > GROUPS.most_partitions:
        return _searched(ties, load, now, cap=cap, shape=shape)
    every = np.array(list(splits(tuple(range(groups)), size)))
    sets, index = np.unique(every.reshape(-1, size), axis=0, return_inverse=True)
    per_group = load.shape[1] // groups
    members = (sets[..., None] * per_group + np.arange(per_group)).reshape(len(sets), -1)
    bound = balance_bound(np.swapaxes(load[:, members], 0, 1), shape.node_slots, shape.node_gpus)
    index = index.reshape(len(every), shape.nodes)
    total = np.array([ties.cost(members) for members in sets])[index].sum(axis=1)
    current_cost = sum(ties.cost(node) for node in now)
    better = np.flatnonzero(
        (bound[index].max(axis=1) <= cap * (1 + 1e-9))
        & (total < current_cost - 1e-9 * abs(current_cost))
    )
    return [
        every[k]
        for k in better[np.argsort(total[better], kind="stable")][: TRAFFIC.partitions_tried]
    ]


def _searched(ties: _Ties, load: Loads, now: Slots, *, cap: float, shape: SlotShape) -> list[Slots]:
    """The same where partitions are too many to list: what searches from `now` find, the cap and tighter."""
    node = np.argsort(now.ravel(), kind="stable") // now.shape[1]
    by_group = load.reshape(len(load), now.size, -1).sum(axis=2)
    candidates: list[tuple[float, Slots]] = []
    for part in (1.0, 0.5, 0.0):
        state = _state(ties, node, by_group, weights=((1.0, 1),))
        start = state.cost()
        most_load = max((1 + part * (cap - 1)) * shape.node_gpus, float(state.loads(1).max()))
        reached = _best(state, most_load)
        if reached is not None and reached[0] < start:
            candidates.append(
                (reached[0], np.argsort(reached[1], kind="stable").reshape(now.shape))
            )
    return [groups for _, groups in sorted(candidates, key=lambda pair: pair[0])]


def _state(
    ties: _Ties, place: Ids, weight: Loads, weights: tuple[tuple[float, int], ...]
) -> SwapState:
    units = np.arange(len(place))
    terms = tuple(ties.term(place // size, share) for share, size in weights)
    return SwapState(place, expert=units, weight=weight, terms=terms)


def _best(state: SwapState, most_load: float) -> tuple[float, Ids] | None:
    cap = Cap(loads=((1, most_load),), rooms=(), price=20.0 * max(abs(state.cost()), 1.0))
    result = tabu_search(
        state, cap, steps=TRAFFIC.group_steps, patience=TRAFFIC.group_steps // 4, seed=0
    )
    return None if result.gpu is None else (result.cost, result.gpu)


def _padded(touched: NDArray[np.bool_]) -> Ids:
    """Columns that are true in each row, [rows, the most in a row], -1 beyond."""
    row, column = np.nonzero(touched)
    first = np.searchsorted(row, row)
    width = max(int(touched.sum(axis=1).max(initial=1)), 1)
    columns = np.full((len(touched), width), -1, dtype=np.int64)
    columns[row, np.arange(len(row)) - first] = column
    return columns


def nodes_to_leaves(
    flows: Flows, layer: int, slots: Slots, shape: SlotShape, levels: tuple[Level, ...]
) -> Slots:
    """One layer's slots [gpus, per GPU] with whole nodes exchanged so that tokens touch fewer leaves.

    For experts whose replicas lie on one node. Nodes are alike: balance and nodes touched stay.
    """
    above = tuple(
        (level.weight, level.gpus // shape.node_gpus) for level in levels[1:] if level.weight > 0
    )
    if not above or shape.nodes < 3:
        return slots
    node_of = np.zeros(int(slots.max()) + 1, dtype=np.int64)
    node_of[slots.ravel()] = np.arange(shape.slots) // shape.node_slots
    state = _state(
        _ties(flows, layer, node_of), np.arange(shape.nodes), np.zeros((1, shape.nodes)), above
    )
    start = state.cost()
    reached = _best(state, np.inf)
    if reached is None or reached[0] >= start * (1 - 1e-12):
        return slots
    blocks = slots.reshape(shape.nodes, -1)
    return np.asarray(blocks[np.argsort(reached[1], kind="stable")].reshape(slots.shape))
