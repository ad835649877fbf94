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


def check_shape(experts: int, shape: SlotShape, limits: PlacementLimits) -> None:
    """Raises InputError for counts that do not divide, InfeasibleError where no placement can exist.

    Parameters
    ----------
    experts
        Of a layer.
    shape
        Of slots, GPUs and nodes.
    limits
        Groups to keep whole, replicas to spread.
    """
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


def check_size(size: int, what: str, where: str) -> None:
    """Raises InputError for more than are read of `what` a file holds.

    Parameters
    ----------
    size
        Numbers that the file holds.
    what
        These are, for the message.
    where
        The file's name.
    """
    if size > MOST_ELEMENTS:
        words = f"{size} {what}, more than the {MOST_ELEMENTS} that are read"
        raise InputError(f"{where}: {words}")


def check_loads(loads: Loads, where: str) -> None:
    """Raises InputError unless loads [windows, layers, experts] are finite, not negative, none all zero.

    Parameters
    ----------
    loads
        Tokens of each expert.
    where
        What errors call them: a file, or a field.
    """
    if loads.ndim != 3 or 0 in loads.shape:
        raise InputError(
            f"{where}: load must have the shape [layers, experts] or [windows, layers, experts], "
            f"got {list(loads.shape)}"
        )
    check_size(loads.size, "numbers", where)
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


# Numbers that tune the placement solvers, each with its unit and why it has that value.


@dataclass(frozen=True, kw_only=True)
class BalanceParams:
    """How the search for an even placement spends its work.

    Parameters
    ----------
    search_share
        Share of the gap asked for above which a layer is searched further, so that the mean over layers
        ends well within the gap.
    stop_share
        Share of the gap asked for at which one packing is not improved further.
    limit_fractions
        Limits on the GPU load whose replica counts are tried, as fractions of the way from bound to value.
    hot_load
        Load of an expert over the mean GPU load above which it may crowd other experts out of its GPUs,
        so that the bound by replica counts is worth its time.
    count_work
        Deterministic time of CP-SAT for one limit of the bound by replica counts.
    exchange_rounds
        Exchanges of one packing, at most; about ten times what packings of 72 GPUs need.
    exact_share
        Share of the time limit that CP-SAT gets for whole layers.
    least_exact_work
        Deterministic time of CP-SAT below which it does not get past its start on a layer.
    parallel_slots
        Slots of all layers under search above which starting processes takes less time than it saves.
    """

    search_share: float = 0.2
    stop_share: float = 0.12
    limit_fractions: tuple[float, ...] = (0.0005, 0.02, 0.06, 0.15, 0.3, 0.6)
    hot_load: float = 0.3
    count_work: float = 0.1
    exchange_rounds: int = 600
    exact_share: float = 0.6
    least_exact_work: float = 0.05
    parallel_slots: int = 4000


BALANCE = BalanceParams()


@dataclass(frozen=True, kw_only=True)
class RecountParams:
    """How replica counts are drawn at random where slots are few.

    Parameters
    ----------
    most_slots
        Slots of a row above which too small a part of its counts could be tried.
    finalists
        Packings that are improved by new splits of GPU pairs.
    parents
        Best counts near which new ones are drawn.
    stages
        Rounds of such draws.
    slots_at_once
        Slots packed in one batch, to bound memory.
    """

    most_slots: int = 96
    finalists: int = 12
    parents: int = 4
    stages: int = 3
    slots_at_once: int = 120_000


RECOUNT = RecountParams()


@dataclass(frozen=True, kw_only=True)
class ShareParams:
    """How the slots of hot experts are tried where few slots lie on a GPU.

    Parameters
    ----------
    cuts
        Places at which experts are cut into hot and cold ones: one for each kind of hot expert, and some for
        loads that fall off without a step.
    most_ways
        Replica counts tried for a row: about all of them up to 256 slots.
    finalists
        Packings that are improved further.
    """

    cuts: int = 4
    most_ways: int = 400
    finalists: int = 24


SHARES = ShareParams()


@dataclass(frozen=True, kw_only=True)
class TransferParams:
    """How replicas are moved from expert to expert.

    Parameters
    ----------
    drawn
        Transfers drawn and packed in a step.
    kept
        Counts handed back, and from which the search goes on when it is stuck.
    patience
        Steps without a better state after which it goes on from one of those.
    worse
        Factor by which a step may raise what lies above the limit.
    starts
        Counts that the search starts from, at most.
    apart
        Replicas in which two starts differ, at least: about one in thirty of 128 slots.
    above
        Limit that the search aims at, in gaps above the bound: closer ones are missed by more.
    twice
        What a GPU counts that would hold an expert twice, over the limit: about what parting the two costs.
    least_share
        Load over the mean of a GPU that stands for none above the limit where receivers are drawn.
    """

    drawn: int = 192
    kept: int = 12
    patience: int = 12
    worse: float = 1.1
    starts: int = 4
    apart: int = 4
    above: float = 2.0
    twice: float = 1.02
    least_share: float = 1e-4


TRANSFERS = TransferParams()


@dataclass(frozen=True, kw_only=True)
class GroupParams:
    """How routing groups that stay whole are shared out over nodes.

    Parameters
    ----------
    most_partitions
        Partitions of the groups over nodes that are listed and bounded; beyond, only one is tried.
    most_tried
        Rounds in which the partition with the lowest bound of every layer is packed.
    exact_rounds
        Rounds of CP-SAT on the node sets that decide a layer's value and bound.
    """

    most_partitions: int = 5000
    most_tried: int = 24
    exact_rounds: int = 4


GROUPS = GroupParams()


@dataclass(frozen=True, kw_only=True)
class TrafficParams:
    """How the search for less traffic spends its work.

    Parameters
    ----------
    most_tokens
        Tokens of a trace that the search looks at; more are thinned evenly. Reports count all.
    most_steps
        Exchanges of the first search on a layer, at most; it rarely betters itself later.
    patience
        Exchanges without a better state after which the second search ends.
    overload
        Price of a mean GPU load above the cap, in blocks for each token: well above what any exchange saves.
    mending
        Stages of the second search: load above the cap that is allowed, and its steps for each step of the
        first search. Passing through fuller GPUs reaches placements that tight caps bar.
    rounds
        Searches in turn with the assignment of tokens to replicas, where that follows the placement.
    packing_exchanges
        Exchanges that pack one node, at most.
    tenure
        Steps for which a replica that left a place does not come back, fewest and most.
    partitions_tried
        Partitions of groups that a layer is packed for, at most.
    group_steps
        Exchanges of groups, or of whole nodes, in one search.
    """

    most_tokens: int = 16_384
    most_steps: int = 800
    patience: int = 50
    overload: float = 20.0
    mending: tuple[tuple[float, float], ...] = ((0.02, 0.15), (0.01, 0.1), (0.0, 0.2), (0.0, 0.1))
    rounds: int = 2
    packing_exchanges: int = 200
    tenure: tuple[int, int] = (6, 14)
    partitions_tried: int = 12
    group_steps: int = 400


TRAFFIC = TrafficParams()


@dataclass(frozen=True, kw_only=True)
class MoveParams:
    """How moves from a placement in use are searched.

    Parameters
    ----------
    norm_power
        Power of the norm of GPU loads that a move is to lower: the largest load counts most, but one of
        several equal ones is worth lowering too.
    candidates
        Best candidates of a step whose limits are checked.
    candidate_s
        Seconds that a candidate costs for each GPU and window, about.
    most_steps
        Steps of one curve, at most.
    """

    norm_power: int = 24
    candidates: int = 60
    candidate_s: float = 16e-9
    most_steps: int = 400


MOVES = MoveParams()
