"""Placements with less traffic between nodes and leaves, under a cap on the balance.

What a token touches follows from the nodes alone (every level above is made of whole nodes), so nodes are
decided first, under a cap on their loads, by tabu search. Then each node packs its GPUs, and a
second search under the cap on GPU loads mends what no packing of those nodes could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.bound import balance_bound, partitions
from meshwright.planner.experts.flows import Flows, Level, slot_choices
from meshwright.planner.experts.packing import Crew, SlotPacking, Solved, has_duplicates
from meshwright.planner.experts.problem import (
    GROUPS,
    TRAFFIC,
    Ids,
    Loads,
    PlacementLimits,
    Slots,
    SlotShape,
)
from meshwright.planner.experts.solve import PlacementEffort, solve_nodes, splits
from meshwright.planner.experts.swaps import (
    Apart,
    Cap,
    FromSources,
    Room,
    SwapState,
    Term,
    Touched,
    packed,
    replica_pairs,
    step_cost_s,
    tabu_search,
)
from meshwright.planner.solvers.clock import is_over


@dataclass(frozen=True, kw_only=True)
class NodeExchange:
    """One layer's exchange of replicas between nodes."""

    flows: Flows
    experts: int
    shape: SlotShape
    levels: tuple[Level, ...]
    cap: float
    """Largest load of a GPU over the mean."""
    node_cap: float
    """The same of a node."""
    loads: Loads
    """Over the mean GPU load, [windows, experts]."""
    spread: bool = False
    """Whether replicas of an expert are kept on different nodes, as far as there are nodes."""
    near: bool = False
    """Whether tokens take replicas in nodes that they touch anyway."""
    steps: int = TRAFFIC.most_steps

    @property
    def scale(self) -> float:
        """Tokens; 1 where only shares are known."""
        return 1.0 if self.flows.tokens is None else float(self.flows.tokens.shape[1])

    def choices(self, slots: Slots) -> Ids | None:
        """Replica of each choice [tokens, top-k], replicas numbered by their slots."""
        if self.flows.tokens is None:
            return None
        near = self.shape.node_gpus if self.near else None
        return slot_choices(self.flows.tokens[0], slots, self.experts, near)

    def terms(self, slots: Slots, choice: Ids | None, gpu: Ids) -> tuple[Term, ...]:
        """What is minimised, for replicas as numbered by `slots` on `gpu` [replicas].

        Blocks that tokens touch, or else the share of pairs apart; and the share of choices that leave their
        source's block, for each token, as a token's copy to its own block is free.
        """
        terms: list[Term] = []
        for level in self.levels:
            if level.weight <= 0:
                continue
            block = gpu // level.gpus
            if choice is not None:
                terms.append(Touched(choice, block, level.weight))
            elif self.flows.pairs is not None:
                pairs = replica_pairs(self.flows.pairs[0], slots)
                terms.append(Apart(pairs, block, level.weight * 2 / max(pairs.sum(), 1e-300)))
            if self.flows.sources is not None:
                at_block = (
                    self.flows.sources[0]
                    .reshape(int(block.max()) + 1, -1, self.experts)
                    .sum(axis=1)
                )
                weight = level.weight * self.scale / max(at_block.sum(), 1e-300)
                terms.append(FromSources(at_block, slots.ravel(), block, weight))
        return tuple(terms)

    def cost(self, slots: Slots) -> float:
        """Of a placement, replicas of an expert taken anew."""
        gpu = np.arange(self.shape.slots) // self.shape.per_gpu
        return sum(term.cost() for term in self.terms(slots, self.choices(slots), gpu))


def layer_caps(best: Loads, cap: float) -> Loads:
    """Cap of every layer [layers] such that their mean is at most `cap`, for the balance reached, [layers].

    A layer that one hot expert keeps above the cap stays where it is; the others make up for it as far as
    they can, all with one cap.
    """
    if best.max() <= cap:
        return np.full(len(best), cap)
    low, high = 1.0, cap
    for _ in range(40):
        middle = (low + high) / 2
        if np.maximum(best, middle).mean() > cap:
            high = middle
        else:
            low = middle
    return np.maximum(best, low)


def less_traffic(
    flows: Flows,
    loads: Loads,
    solved: Solved,
    *,
    shape: SlotShape,
    levels: tuple[Level, ...],
    cap: float,
    spread: bool,
    workers: int,
    near: bool = False,
    time_limit_s: float = 30.0,
) -> Solved:
    """The placement with replicas exchanged within the cap; a layer where nothing helps stays as it is.

    Loads [layers, windows, experts] over the mean GPU load. The time limit is shared out over the layers as
    steps of the search, about what 2 cores do in it.
    """
    caps = layer_caps(solved.value, cap)
    rounds = TRAFFIC.rounds if near and shape.slots > loads.shape[2] else 1
    steps = _steps(flows, loads, shape, levels=len(levels), time_limit_s=time_limit_s / rounds)
    jobs = [
        (
            NodeExchange(
                flows=flows.layer(layer),
                experts=loads.shape[2],
                shape=shape,
                levels=levels,
                cap=float(caps[layer]),
                node_cap=1 + (cap - 1) / 2,
                loads=loads[layer],
                spread=spread,
                near=near,
                steps=steps,
            ),
            solved.slots[layer],
            rounds,
        )
        for layer in range(len(loads))
    ]
    with Crew(workers) as crew:
        slots: Slots = np.stack(crew.map(_layer, jobs))
    value = SlotPacking(slots=slots, loads=loads).gpu_loads().max(axis=(1, 2))
    return Solved(slots=slots, value=value, bound=np.minimum(solved.bound, value))


def _steps(
    flows: Flows, loads: Loads, shape: SlotShape, *, levels: int, time_limit_s: float
) -> int:
    """Steps of a layer's first search; the second takes about half as many."""
    choices = (
        0
        if flows.tokens is None
        else min(flows.tokens.shape[1], TRAFFIC.most_tokens) * flows.tokens.shape[2]
    )
    rooms = 2 if shape.slots > loads.shape[2] else 0
    each_s = step_cost_s(shape.slots, loads.shape[1], levels, choices / shape.slots, rooms)
    return int(np.clip(2 * time_limit_s / (1.6 * len(loads) * each_s), 10, TRAFFIC.most_steps))


def _layer(job: tuple[NodeExchange, Slots, int]) -> Slots:
    search, slots, rounds = job
    for _ in range(rounds):
        if is_over():
            break
        slots = less_of(search, slots)
    return slots


def less_of(search: NodeExchange, slots: Slots) -> Slots:
    """Slots [gpus, per GPU] with replicas exchanged so that traffic costs less, within the caps.

    `slots` where nothing helps. An expert stays at most once on a GPU.
    """
    layer = _Layer(search, slots)
    best = slots
    least_cost = search.cost(slots)
    for candidate in layer.mended(layer.gpus_by_node()):
        if not layer.within(candidate):
            continue
        cost = search.cost(candidate)
        if cost < least_cost * (1 - 1e-12):
            best = candidate
            least_cost = cost
    return np.sort(best, axis=1)


class _Layer:
    """A layer's replicas by number; which token goes to which replica is that of the start."""

    def __init__(self, search: NodeExchange, slots: Slots) -> None:
        self._search, self._start = search, slots
        self._expert = slots.ravel()
        self._gpu: Ids = np.arange(len(self._expert)) // slots.shape[1]
        self._choice = search.choices(slots)
        counts = np.bincount(self._expert, minlength=search.experts)
        self._weight = (search.loads / counts)[:, self._expert]
        shape = search.shape
        on_node = (
            -(-counts // shape.nodes) if search.spread else np.full(search.experts, shape.node_gpus)
        )
        once = np.ones(search.experts, dtype=np.int64)
        replicas = shape.slots > search.experts
        self._node_rooms = (Room(gpus=shape.node_gpus, most_replicas=on_node),) if replicas else ()
        self._gpu_rooms = (Room(gpus=1, most_replicas=once), *self._node_rooms) if replicas else ()
        load = self._state(self._gpu).loads(shape.node_gpus).max()
        self._node_load = max(search.node_cap * shape.node_gpus, float(load))
        """The most load of a node, in mean GPU loads; no less than that of the start."""

    def within(self, slots: Slots) -> bool:
        """Whether no GPU and no node is above its cap and no GPU holds an expert twice."""
        counts = np.bincount(slots.ravel(), minlength=self._search.experts)
        load = (self._search.loads / counts)[:, slots].sum(axis=2)
        node = load.reshape(len(load), self._search.shape.nodes, -1).sum(axis=2)
        even = load.max() <= self._search.cap + 1e-9 and node.max() <= self._node_load + 1e-9
        return bool(even) and not has_duplicates(slots[None])[0]

    def gpus_by_node(self) -> Ids:
        """First search: GPUs [replicas] whose nodes cause little traffic, node loads under their cap."""
        search = self._search
        if search.shape.nodes == 1:
            return self._gpu
        cap = self._cap(((search.shape.node_gpus, self._node_load),), self._node_rooms)
        result = tabu_search(
            self._state(self._gpu), cap, steps=search.steps, patience=search.steps, seed=0
        )
        return self._gpu if result.gpu is None else result.gpu

    def mended(self, gpu: Ids) -> list[Slots]:
        """Second search: from those nodes, packed, to GPUs under the cap; the placements on the way."""
        search = self._search
        gpu = self._packed(gpu)
        placements = [self._slots(gpu)]
        # Where there are no nodes to decide first, this is the whole search.
        stages = TRAFFIC.mending if search.shape.nodes > 1 else ((0.0, 1.0),)
        for turn, (looser, share) in enumerate(stages):
            if is_over():
                break
            state = self._state(gpu)
            loads = ((1, search.cap + looser), (search.shape.node_gpus, self._node_load))
            steps = int(share * search.steps) + 5
            result = tabu_search(
                state,
                self._cap(loads, self._gpu_rooms),
                steps=steps,
                patience=TRAFFIC.patience,
                seed=turn,
            )
            gpu = self._packed(state.gpu if result.gpu is None else result.gpu)
            placements.append(self._slots(gpu))
        return placements

    def _cap(self, loads: tuple[tuple[int, float], ...], rooms: tuple[Room, ...]) -> Cap:
        return Cap(loads=loads, rooms=rooms, price=TRAFFIC.overload * self._search.scale)

    def _state(self, gpu: Ids) -> SwapState:
        terms = self._search.terms(self._start, self._choice, gpu)
        return SwapState(gpu, expert=self._expert, weight=self._weight, terms=terms)

    def _packed(self, gpu: Ids) -> Ids:
        finest = min(level.gpus for level in self._search.levels)
        blocks = self._search.shape.gpus // min(finest, self._search.shape.node_gpus)
        if blocks == self._search.shape.gpus:
            return gpu
        return packed(gpu, self._expert, self._weight, replace(self._search.shape, nodes=blocks))

    def _slots(self, gpu: Ids) -> Slots:
        by_gpu = self._expert[np.argsort(gpu, kind="stable")]
        return np.asarray(by_gpu.reshape(self._search.shape.gpus, -1))


# Less traffic where routing groups stay whole: which groups share a node, and which nodes share a leaf.
#
# Replicas of an expert then lie on one node, so what a token touches depends on the groups' nodes alone.


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
