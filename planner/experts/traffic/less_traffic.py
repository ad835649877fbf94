"""Placements with less traffic between nodes and leaves, under a cap on the balance.

What a token touches follows from the nodes alone (every level above is made of whole nodes), so nodes are
decided first, under a cap on their loads, by tabu search. Then each node packs its GPUs, and a
second search under the cap on GPU loads mends what no packing of those nodes could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.planner.experts.balance.crew import Crew
from meshwright.planner.experts.balance.packing import SlotPacking, has_duplicates
from meshwright.planner.experts.balance.rows import Solved
from meshwright.planner.experts.params import TRAFFIC
from meshwright.planner.experts.problem import Ids, Loads, Slots, SlotShape
from meshwright.planner.experts.traffic.flows import Flows
from meshwright.planner.experts.traffic.node_packing import packed
from meshwright.planner.experts.traffic.swap_search import Cap, step_cost_s, tabu_search
from meshwright.planner.experts.traffic.swap_state import Room, SwapState
from meshwright.planner.experts.traffic.swap_terms import (
    Apart,
    FromSources,
    Term,
    Touched,
    replica_pairs,
)
from meshwright.planner.experts.traffic.touched import Level, slot_choices
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
