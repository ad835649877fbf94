"""Routing groups kept whole on a node: first which groups share one, then each node as its own packing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from planner.experts.bound import balance_bound, partitions
from planner.experts.packing import improve, pack
from planner.experts.problem import Limits, Loads, Shape, Slots
from planner.experts.solve import Effort, Rows, Solved, solve_rows

MOST_PARTITIONS = 5000
MOST_TRIED = 24
Sets = tuple[tuple[int, ...], ...]


def solve_grouped(loads: Loads, shape: Shape, limits: Limits, effort: Effort) -> Solved:
    """Slots [layers, gpus, slots of a GPU] for loads [windows, layers, experts], groups whole, with bounds.

    Partitions of the groups over nodes are tried in the order of their bounds, until the best one found is no
    worse than the bounds of those left. With very many partitions only one is tried, by the groups' loads.
    """
    by_row = np.swapaxes(loads, 0, 1)
    if partitions(limits.groups, shape.nodes) > MOST_PARTITIONS:
        return _one_partition(by_row, shape, limits, effort)
    return _Search(by_row, shape, limits, effort).run()


def _split(groups: tuple[int, ...], size: int) -> Iterator[Sets]:
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for more in combinations(rest, size - 1):
        left = tuple(g for g in rest if g not in more)
        for others in _split(left, size):
            yield ((first, *more), *others)


class _Search:
    """Node sets are shared between partitions: each is solved once for a layer."""

    def __init__(self, loads: Loads, shape: Shape, limits: Limits, effort: Effort) -> None:
        self._loads, self._shape, self._effort = loads, shape, effort
        self._per_group = loads.shape[2] // limits.groups
        self._scale = loads.sum(axis=2) / shape.gpus
        size = limits.groups // shape.nodes
        self._sets: list[tuple[int, ...]] = list(combinations(range(limits.groups), size))
        index = {groups: i for i, groups in enumerate(self._sets)}
        self._partitions = np.array(
            [[index[s] for s in p] for p in _split(tuple(range(limits.groups)), size)]
        )
        layers = len(loads)
        self._bound = np.stack([self._cheap(groups) for groups in self._sets], axis=1)
        self._value = np.full((layers, len(self._sets)), np.inf)
        self._slots: dict[tuple[int, int], Slots] = {}
        self._refined = np.zeros_like(self._value, dtype=bool)

    def run(self) -> Solved:
        layers = len(self._loads)
        best = np.full(layers, np.inf)
        choice = np.zeros(layers, dtype=np.int64)
        tried = np.zeros((layers, len(self._partitions)), dtype=bool)
        for _ in range(MOST_TRIED):
            bounds = self._bound[:, self._partitions].max(axis=2)
            bounds[tried] = np.inf
            # Among equal bounds the partition whose nodes are closest to even.
            spread = (self._bound[:, self._partitions] ** 2).sum(axis=2)
            order = bounds + 1e-6 * spread
            pick = order.argmin(axis=1)
            open_layers = np.flatnonzero(bounds.min(axis=1) * (1 + self._effort.gap / 10) < best)
            if not len(open_layers):
                break
            self._refine(open_layers, pick, best)
            still = self._bound[open_layers[:, None], self._partitions[pick[open_layers]]].max(axis=1)
            tried[open_layers, pick[open_layers]] = True
            open_layers = open_layers[still * (1 + self._effort.gap / 10) < best[open_layers]]
            if not len(open_layers):
                continue
            self._solve(open_layers, self._partitions[pick[open_layers]])
            reached = self._value[open_layers[:, None], self._partitions[pick[open_layers]]].max(axis=1)
            better = reached < best[open_layers]
            best[open_layers[better]] = reached[better]
            choice[open_layers[better]] = pick[open_layers[better]]
        bound = self._bound[:, self._partitions].max(axis=2).min(axis=1)
        slots = [self._joined(layer, choice[layer]) for layer in range(layers)]
        return Solved(slots=np.stack(slots), value=best, bound=np.minimum(bound, best))

    def _refine(self, layers: NDArray[np.int64], pick: NDArray[np.int64], best: Loads) -> None:
        """Sharper bounds for the node sets of the partitions picked: they may need no solving."""
        for layer in layers[np.isfinite(best[layers])]:
            for s in self._partitions[pick[layer]]:
                if not self._refined[layer, s] and self._bound[layer, s] < best[layer]:
                    self._refined[layer, s] = True
                    part = self._loads[layer : layer + 1][:, :, self._experts(self._sets[s])]
                    scale = self._scale[layer : layer + 1]
                    shape, top = self._shape, best[layer : layer + 1]
                    bound = balance_bound(part, shape.node_slots, shape.node_gpus, scale, top)
                    self._bound[layer, s] = max(self._bound[layer, s], bound[0])

    def _experts(self, groups: tuple[int, ...]) -> NDArray[np.int64]:
        return np.asarray(
            (np.array(groups)[:, None] * self._per_group + np.arange(self._per_group)).ravel(), dtype=np.int64
        )

    def _cheap(self, groups: tuple[int, ...]) -> Loads:
        part = self._loads[:, :, self._experts(groups)]
        return balance_bound(part, self._shape.node_slots, self._shape.node_gpus, self._scale)

    def _solve(self, layers: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        wanted = [
            (int(layer), int(s))
            for layer, sets in zip(layers, chosen, strict=True)
            for s in sets
            if (int(layer), int(s)) not in self._slots
        ]
        if not wanted:
            return
        experts = [self._experts(self._sets[s]) for _, s in wanted]
        rows = Rows(
            loads=np.stack([self._loads[layer][:, e] for (layer, _), e in zip(wanted, experts, strict=True)]),
            scale=self._scale[[layer for layer, _ in wanted]],
            slots=self._shape.node_slots,
            gpus=self._shape.node_gpus,
        )
        found = solve_rows(rows, self._effort)
        for i, (layer, s) in enumerate(wanted):
            self._slots[layer, s] = experts[i][found.slots[i]]
            self._value[layer, s] = found.value[i]
            self._bound[layer, s] = max(self._bound[layer, s], found.bound[i])

    def _joined(self, layer: int, choice: int) -> Slots:
        return np.concatenate([self._slots[layer, int(s)] for s in self._partitions[choice]])


def _one_partition(loads: Loads, shape: Shape, limits: Limits, effort: Effort) -> Solved:
    """Groups to nodes by their loads, then every node; the bound is that of the groups and of all experts."""
    layers, windows, experts = loads.shape
    scale = loads.sum(axis=2) / shape.gpus
    by_group = loads.reshape(layers, windows, limits.groups, -1)
    packing = pack(by_group.sum(axis=3), np.ones((layers, limits.groups), dtype=np.int64), shape.nodes)
    improve(packing, 400, np.ones(layers))
    per_group = experts // limits.groups
    members = packing.slots[..., None] * per_group + np.arange(per_group)
    members = members.reshape(layers * shape.nodes, 1, -1)
    spread = np.repeat(loads, shape.nodes, axis=0)
    rows = Rows(
        loads=np.take_along_axis(
            spread, np.broadcast_to(members, (*spread.shape[:2], members.shape[2])), axis=2
        ),
        scale=np.repeat(scale, shape.nodes, axis=0),
        slots=shape.node_slots,
        gpus=shape.node_gpus,
    )
    found = solve_rows(rows, effort)
    own = np.take_along_axis(members, found.slots.reshape(len(members), 1, -1), axis=2)
    value = found.value.reshape(layers, -1).max(axis=1)
    node_mean = by_group.sum(axis=(2, 3)) / shape.nodes
    bound = np.maximum(
        balance_bound(by_group.sum(axis=3), limits.groups, shape.nodes, node_mean),
        balance_bound(loads, shape.slots, shape.gpus, scale),
    )
    return Solved(
        slots=own.reshape(layers, shape.gpus, shape.per_gpu), value=value, bound=np.minimum(bound, value)
    )
