"""The expert placement problem: measured loads, slots on GPUs, and what a placement must keep to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InfeasibleError, InputError

Loads = NDArray[np.float64]
Slots = NDArray[np.int64]
Ids = NDArray[np.int64]
"""Numbers of experts, replicas, GPUs or blocks, in any shape."""

MOST_ELEMENTS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Where experts go: `slots` in all, evenly over `gpus`, these evenly over `nodes`."""

    slots: int
    gpus: int
    nodes: int

    @property
    def per_gpu(self) -> int:
        """Slots of one GPU."""
        return self.slots // self.gpus

    @property
    def node_gpus(self) -> int:
        """GPUs of one node."""
        return self.gpus // self.nodes

    @property
    def node_slots(self) -> int:
        """Slots of one node."""
        return self.slots // self.nodes


@dataclass(frozen=True, kw_only=True)
class PlacementLimits:
    """What a placement must keep to, besides equal slots and no expert twice on a GPU."""

    groups: int = 1
    """Routing groups, runs of consecutive experts, each kept whole on one node; 1 for no such limit."""
    spread: bool = False
    """Replicas of an expert on as many nodes as it has replicas (or on all nodes)."""
    max_moves: int | None = None
    """Most (expert, GPU) pairs, over all layers, that the current placement does not hold."""


def check_shape(experts: int, shape: SlotShape, limits: PlacementLimits) -> None:
    """Raises InputError for counts that do not divide, InfeasibleError where no placement can exist."""
    slots, gpus, nodes = shape.slots, shape.gpus, shape.nodes
    for name, value in (("slots", slots), ("gpus", gpus), ("nodes", nodes)):
        if value < 1:
            raise InputError(f"{name}: must be at least 1, got {value}")
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} do not divide evenly over {nodes} nodes")
    if slots % gpus:
        below, above = slots // gpus * gpus, -(-slots // gpus) * gpus
        sufficient = [value for value in (below, above) if value >= experts] or [
            -(-experts // gpus) * gpus
        ]
        near = " or ".join(map(str, sufficient))
        raise InputError(
            f"slots: {slots} do not divide evenly over {gpus} GPUs; every GPU has the same number: use {near}"
        )
    if slots < experts:
        raise InfeasibleError(
            f"slots: {slots} are fewer than the {experts} experts, each needs one; use at least "
            f"{-(-experts // gpus) * gpus}"
        )
    if slots > experts * gpus:
        raise InfeasibleError(
            f"slots: {slots} cannot be filled, {experts} experts once on each of {gpus} GPUs are "
            f"{experts * gpus}; use fewer slots"
        )
    _check_groups(experts, shape, limits)


def _check_groups(experts: int, shape: SlotShape, limits: PlacementLimits) -> None:
    groups, nodes = limits.groups, shape.nodes
    if groups < 1 or experts % groups:
        raise InputError(
            f"groups: {experts} experts do not divide into {groups} groups of one size"
        )
    if groups == 1:
        return
    if groups % nodes:
        raise InfeasibleError(
            f"groups: {groups} whole groups do not divide evenly over {nodes} nodes; use a divisor of "
            f"{groups} nodes, or --groups 1"
        )
    if limits.spread and nodes > 1 and shape.slots > experts:
        raise InfeasibleError(
            "spread: replicas on different nodes contradict groups kept on one node; use one of the two"
        )
    per_node = experts * shape.node_gpus // nodes
    if shape.node_slots > per_node:
        raise InfeasibleError(
            f"slots: {shape.node_slots} of a node cannot be filled, the experts of its groups, once on each "
            f"GPU, are {per_node}; use fewer slots"
        )


def check_loads(loads: Loads, where: str) -> None:
    """Raises InputError unless loads [windows, layers, experts] are finite, not negative, none all zero."""
    if loads.ndim != 3 or 0 in loads.shape:
        raise InputError(
            f"{where}: load must have the shape [layers, experts] or [windows, layers, experts], "
            f"got {list(loads.shape)}"
        )
    if loads.size > MOST_ELEMENTS:
        raise InputError(
            f"{where}: {loads.size} numbers, more than the {MOST_ELEMENTS} that are read"
        )
    bad = np.argwhere(~np.isfinite(loads) | (loads < 0) | (loads > 1e18))
    if len(bad):
        k, layer, expert = (int(i) for i in bad[0])
        raise InputError(
            f"{where}: load[{k}][{layer}][{expert}] (window, layer, expert): must be finite and from 0 to "
            f"1e18, got {loads[k, layer, expert]}"
        )
    empty = np.argwhere(loads.sum(axis=2) <= 0)
    if len(empty):
        k, layer = (int(i) for i in empty[0])
        raise InputError(
            f"{where}: load[{k}][{layer}] (window, layer): all loads are zero, nothing was routed; "
            "leave dense layers and empty windows out"
        )
