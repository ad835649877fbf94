"""From loads to slots with a certified bound: heuristic first, then CP-SAT where a gap is open.

The placement of every layer: groups or not, one window or several, in one call.

A layer has experts e of load w_e, and M GPUs of m slots. A placement gives every expert c_e >= 1 replicas,
sum c_e = m M, on c_e different GPUs; a replica carries w_e / c_e. With load(g) the sum over what GPU g holds,

    balance = max_g load(g) / (sum_e w_e / M)

is minimised; over several windows of loads, the worst window counts. No placement is below the mean, nor
below the largest replica of the counts that make it smallest:

    balance >= max(1, min_c max_e (w_e / c_e) M / sum_e w_e)

which is the first bound; sharper ones stand in `bound` and in the exact model below.

>>> import numpy as np
>>> loads = np.array([[[4.0, 2.0, 1.0, 1.0]]])
>>> shape = SlotShape(slots=6, gpus=2, nodes=1)
>>> solved = place_layers(loads, shape, PlacementLimits(), PlacementEffort())
>>> solved.slots.tolist(), float(solved.value[0])
([[[0, 1, 2], [0, 1, 3]]], 1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InfeasibleError
from meshwright.planner.experts.bound import all_counts, balance_bound, partitions
from meshwright.planner.experts.heuristic import (
    SearchBudget,
    first_answer,
    search_counts,
    search_limits,
    split_gpu_pairs,
)
from meshwright.planner.experts.packing import (
    LOAD_ROUNDING,
    Crew,
    Rows,
    Solved,
    State,
    by_layer,
    exchange_to_improve,
    pack,
)
from meshwright.planner.experts.problem import (
    BALANCE,
    GROUPS,
    Loads,
    PlacementLimits,
    Slots,
    SlotShape,
    check_loads,
    check_shape,
)
from meshwright.planner.solvers.clock import is_over
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


# CP-SAT on one layer: replica counts and packing together, to proof where it is small.
#
# Variables: chosen[e, c], expert e has c replicas; on[e, c, g], one of them is on GPU g. Loads are scaled so
# that the mean GPU load is 10**7 and rounded down, so the bound stays a bound.


MEAN_LOAD = 10_000_000
MOST_LITERALS = 10_000


@dataclass(frozen=True, kw_only=True)
class ExactPacking:
    """What the solver found: slots [gpus, slots of a GPU] or None, and a bound on the largest GPU load."""

    slots: Slots | None
    bound: float
    optimal: bool


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One packing: loads over the mean GPU load, [windows, experts], and the counts that are allowed."""

    loads: Loads
    slots: int
    gpus: int
    spread_nodes: int
    least_replicas: Slots
    """Fewest and most replicas of each expert, [experts]; the bound holds over this range."""
    most_replicas: Slots


def literals(layer: Layer) -> int:
    """Size of the model."""
    return int((layer.most_replicas - layer.least_replicas + 1).sum()) * (layer.gpus + 1)


def solve_exactly(
    layer: Layer, hint: Slots, below: float, *, work: float, seed: int
) -> ExactPacking:
    """Minimises the largest GPU load, starting from `hint` with load `below` over the mean.

    Any solver status but the known ones raises.

    Parameters
    ----------
    layer
        What is packed, and which replica counts are allowed.
    hint
        A placement to begin from, [gpus, slots of a GPU].
    below
        Its largest load over the mean.
    work
        CP-SAT's deterministic time, about a second each, which ends the search at the same point on every
        machine.
    seed
        Of the solver.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    chosen, on = replica_literals(model, layer)
    post_packing(model, layer, chosen, on)
    top = model.new_int_var(0, int(np.ceil(below * MEAN_LOAD)) + layer.slots, "top")
    post_top(model, layer, on, top)
    model.minimize(top)
    if layer.spread_nodes == 1:
        # GPUs are alike: the hottest expert's replicas are on the first ones, and the hint in that order.
        hot = int(layer.loads.max(axis=0).argmax())
        for (e, c), literal in chosen.items():
            if e == hot:
                for g in range(layer.gpus):
                    model.add(on[e, c, g] == (literal if g < c else 0))
        hint = np.asarray(hint[np.argsort(~(hint == hot).any(axis=1), kind="stable")])
    hint_at(model, layer, chosen, on, hint)
    solver = repeatable_solver(seed, work=work)
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        return ExactPacking(slots=None, bound=0.0, optimal=False)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(
            f"CP-SAT ended with {solver.status_name(status)} on a packing that has a solution"
        )
    return ExactPacking(
        slots=solution_slots(solver, layer, on),
        bound=solver.best_objective_bound / MEAN_LOAD,
        optimal=status == cp_model.OPTIMAL,
    )


Chosen = dict[tuple[int, int], "cp_model.IntVar"]
On = dict[tuple[int, int, int], "cp_model.IntVar"]


def replica_literals(model: cp_model.CpModel, layer: Layer) -> tuple[Chosen, On]:
    """chosen[e, c]: expert e has c replicas; on[e, c, g]: one of them is on GPU g.

    Parameters
    ----------
    model
        The CP-SAT model that they are added to.
    layer
        The layer, with the least and the most replicas of each expert.
    """
    chosen: Chosen = {}
    on: On = {}
    for e in range(layer.loads.shape[1]):
        for c in range(int(layer.least_replicas[e]), int(layer.most_replicas[e]) + 1):
            chosen[e, c] = model.new_bool_var("")
            for g in range(layer.gpus):
                on[e, c, g] = model.new_bool_var("")
    return chosen, on


def post_packing(model: cp_model.CpModel, layer: Layer, chosen: Chosen, on: On) -> None:
    """One count for each expert, that many GPUs; every slot filled; replicas spread over nodes if asked.

    Parameters
    ----------
    model
        Gets the constraints.
    layer
        What is packed.
    chosen, on
        Literals, from `replica_literals`.
    """
    gpus, per_gpu = layer.gpus, layer.slots // layer.gpus
    for e in range(layer.loads.shape[1]):
        model.add_exactly_one(literal for (i, _), literal in chosen.items() if i == e)
    for (e, c), literal in chosen.items():
        model.add(sum(on[e, c, g] for g in range(gpus)) == c * literal)
        for g in range(gpus):
            model.add_implication(on[e, c, g], literal)
        size = gpus // layer.spread_nodes
        for start in range(0, gpus if layer.spread_nodes > 1 else 0, size):
            here = [on[e, c, g] for g in range(start, start + size)]
            model.add(sum(here) <= -(-c // layer.spread_nodes))
    for gpu in range(gpus):
        model.add(sum(on[e, c, gpu] for e, c in chosen) == per_gpu)


def post_top(model: cp_model.CpModel, layer: Layer, on: On, top: cp_model.IntVar) -> None:
    """No GPU's load is above `top`, in any window.

    Parameters
    ----------
    model
        Gets the constraints.
    layer
        What is packed.
    on
        Literals, from `replica_literals`.
    top
        In units of 1 / `MEAN_LOAD` of the mean GPU load.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    weights = np.floor(layer.loads * MEAN_LOAD).astype(np.int64)
    for gpu in range(layer.gpus):
        replicas = [(e, c, literal) for (e, c, g), literal in on.items() if g == gpu]
        literals_here = [literal for _, _, literal in replicas]
        for window in weights:
            shares = [int(window[e] // c) for e, c, _ in replicas]
            model.add(cp_model.LinearExpr.weighted_sum(literals_here, shares) <= top)


def solution_slots(solver: cp_model.CpSolver, layer: Layer, on: On) -> Slots:
    """Slots [gpus, slots of a GPU] of the solver's solution.

    Parameters
    ----------
    solver
        With a solution.
    layer
        What is packed.
    on
        Literals, from `replica_literals`.
    """
    by_gpu: list[list[int]] = [[] for _ in range(layer.gpus)]
    for (expert, _, gpu), literal in on.items():
        if solver.value(literal):
            by_gpu[gpu].append(expert)
    return np.array(by_gpu, dtype=np.int64)


def hint_at(model: cp_model.CpModel, layer: Layer, chosen: Chosen, on: On, hint: Slots) -> None:
    """Hints every literal at slots [gpus, slots of a GPU].

    Parameters
    ----------
    model
        Gets the hints.
    layer
        What is packed.
    chosen, on
        Literals, from `replica_literals`.
    hint
        A placement, [gpus, slots of a GPU].
    """
    counts = np.bincount(hint.ravel(), minlength=layer.loads.shape[1])
    gpu_experts = [set(row.tolist()) for row in hint]
    for (e, c), literal in chosen.items():
        model.add_hint(literal, bool(counts[e] == c))
    for (e, c, g), literal in on.items():
        model.add_hint(literal, bool(counts[e] == c and e in gpu_experts[g]))


# Rows so small that every choice of replica counts and every packing can be looked at: proven optimal.


_MOST_PACKINGS = 20_000
_MOST_COUNTS = 5_000
_PART = 4_000_000
_BIG = 1e30


def is_enumerable(rows: Rows) -> bool:
    """Whether all packings of all counts are few enough.

    Parameters
    ----------
    rows
        Slots, GPUs and experts of all rows, which are alike.
    """
    experts = rows.loads.shape[2]
    few = partitions(rows.slots, rows.gpus) <= _MOST_PACKINGS
    return few and comb(rows.slots - 1, experts - 1) <= _MOST_COUNTS and rows.spread_nodes == 1


def enumerate_rows(rows: Rows, state: State) -> None:
    """The best placement of every row with a gap, in place; value and bound meet.

    Parameters
    ----------
    rows
        Layers that are placed, for which `is_enumerable` holds.
    state
        The best placements so far, which are replaced by better ones.
    """
    counts = all_counts(rows.loads.shape[2], rows.slots, rows.gpus)
    for row in state.unsolved(rows, LOAD_ROUNDING).tolist():
        best = _best(rows.loads[row], counts, rows.gpus, state.value[row] * (1 - LOAD_ROUNDING / 2))
        if best is not None:
            state.offer(rows, np.array([row]), best[None])
        # Nothing is below the value by more than rounding.
        state.bound[row] = max(state.bound[row], state.value[row] * (1 - LOAD_ROUNDING / 2))


@cache
def _packings(items: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sets of `size` of some items, [sets, size], and those of every way to cut them up, [ways, sets]."""
    sets = list(combinations(range(items), size))
    number = {one_set: i for i, one_set in enumerate(sets)}
    ways = [[number[each] for each in way] for way in splits(tuple(range(items)), size)]
    return np.array(sets, dtype=np.int64), np.array(ways, dtype=np.int64)


def _best(loads: Loads, counts: Slots, gpus: int, below: float) -> Slots | None:
    """Slots [gpus, slots of a GPU] with the least largest load, if there are any with less than `below`."""
    slots = int(counts[0].sum())
    sets, packings = _packings(slots, slots // gpus)
    best: tuple[float, Slots | None] = (below, None)
    step = max(1, _PART // packings.size)
    for part in (counts[i : i + step] for i in range(0, len(counts), step)):
        expert = np.stack(
            [np.repeat(np.arange(len(row_counts)), row_counts) for row_counts in part]
        )
        replica = np.take_along_axis(loads[None] / part[:, None], expert[:, None], axis=2)
        set_experts = expert[:, sets]
        is_doubled = (set_experts[..., 1:] == set_experts[..., :-1]).any(axis=2)
        load = replica[:, :, sets].sum(axis=3).max(axis=1) + _BIG * is_doubled
        # A slot whose lightest set is too heavy rules the counts out before their packings are looked at.
        lightest = np.stack(
            [load[:, (sets == i).any(axis=1)].min(axis=1) for i in range(sets.max() + 1)]
        )
        for way in np.flatnonzero(lightest.max(axis=0) < best[0]):
            top = load[way][packings].max(axis=1)
            lightest_packing = int(top.argmin())
            if top[lightest_packing] < best[0]:
                best = (float(top[lightest_packing]), expert[way][sets[packings[lightest_packing]]])
    return best[1]


@dataclass(frozen=True, kw_only=True)
class PlacementEffort:
    """How far to go. All limits are amounts of work, so the answer does not depend on the machine's speed.

    Parameters
    ----------
    gap
        Stop where balance is within this of the bound, relative.
    time_limit_s
        Shared out over the rows as work: about so long on an idle machine of 2 cores.
    exact
        Whether CP-SAT may be used on whole layers.
    crew
        Processes that are at hand; `place_layers` starts them.
    on_first
        Called with the first answer, before it is bettered.
    """

    gap: float = 0.005
    time_limit_s: float = 60.0
    exact: bool = True
    seed: int = 0
    workers: int = 1
    crew: Crew | None = None
    on_first: Callable[[State], None] | None = None


def solve_rows(rows: Rows, effort: PlacementEffort) -> Solved:
    """First answer, search, CP-SAT. Raises InfeasibleError if none was found within the limits.

    Parameters
    ----------
    rows
        Layers to place.
    effort
        How long, on how many processes, and how near the bound.
    """
    state = first_answer(rows, effort.gap)
    if effort.on_first is not None:
        effort.on_first(state)
    if is_enumerable(rows):
        enumerate_rows(rows, state)
    improve_rows(rows, state, effort)
    if effort.exact:
        close_gaps(rows, state, effort, BALANCE.exact_share)
    if not np.isfinite(state.value).all():
        raise InfeasibleError(
            f"no placement of {rows.loads.shape[2]} experts in {rows.slots} slots on {rows.gpus} GPUs was "
            "found that keeps replicas apart; use more slots or fewer limits"
        )
    return Solved(slots=state.slots, value=state.value, bound=np.minimum(state.bound, state.value))


def search_budget(rows: Rows, count: int, effort: PlacementEffort) -> SearchBudget:
    """Work for each of `count` unsolved rows, by what its parts cost on one core.

    Parameters
    ----------
    rows
        What is placed.
    count
        Rows that are not solved.
    effort
        With the time limit that is shared out.
    """
    total_s = 2 * effort.time_limit_s / max(count, 1)
    round_s = 24e-6 * rows.slots * (1 + rows.slots / 300)
    transfer_s = (2e-5 if rows.slots == 2 * rows.gpus else 2e-4) * rows.slots
    bound_s = 0.003 + 0.007 * rows.slots / 300
    return SearchBudget(
        limits=int(np.clip(1.2 * total_s / round_s, 1, 18)),
        bound_steps=int(np.clip(0.35 * total_s / bound_s + 0.5, 0, 10)),
        recounts=int(np.clip(5 * total_s / round_s, 6, 20_000)),
        transfers=int(np.clip(0.3 * total_s / transfer_s, 0, 2400)),
    )


def improve_rows(rows: Rows, state: State, effort: PlacementEffort) -> None:
    """The search, first on all unsolved rows, then more of it on those that stay so; changes `state`.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    effort
        How far to go.
    """
    split_gpu_pairs(rows, state, effort.gap)
    for step in (search_limits, partial(search_counts, seed=effort.seed)):
        unsolved = state.unsolved(rows, effort.gap * BALANCE.search_share)
        if not len(unsolved) or is_over():
            return
        budget = search_budget(rows, len(unsolved), effort)
        crew = effort.crew or Crew(1)
        parts = [unsolved]
        if crew.workers > 1 and len(unsolved) * rows.slots >= BALANCE.parallel_slots:
            count = min(2 * crew.workers, len(unsolved))
            parts = [unsolved[i::count] for i in range(count)]
        jobs = [
            (rows.take(part), State(state.slots[part], state.value[part], state.bound[part]))
            for part in parts
        ]
        bettered = crew.map(partial(_bettered, step, effort.gap, budget), jobs)
        for part, result in zip(parts, bettered, strict=True):
            state.slots[part] = result.slots
            state.value[part] = result.value
            state.bound[part] = result.bound


def _bettered(
    step: Callable[[Rows, State, float, SearchBudget], None],
    gap: float,
    budget: SearchBudget,
    job: tuple[Rows, State],
) -> State:
    """The state of some rows after a step of the search, in whichever process that is."""
    rows, state = job
    step(rows, state, gap, budget)
    return state


@dataclass(frozen=True, kw_only=True)
class _Task:
    layer: Layer
    hint: Slots
    below: float
    covers: bool
    """Whether the counts allowed are all there are, so that the solver's bound is the layer's."""


def close_gaps(rows: Rows, state: State, effort: PlacementEffort, share: float) -> None:
    """CP-SAT on unsolved rows, widest gap first; `share` of the time limit is shared out over them.

    Parameters
    ----------
    rows
        Layers to place, with their slots and GPUs.
    state
        Their placements so far, values and bounds.
    effort
        How far to go.
    share
        Of the time limit, 0 to 1.
    """
    gap = state.value / np.maximum(state.bound, rows.needed) - 1
    widest_first = np.argsort(-gap, kind="stable")
    wide = (gap > max(effort.gap, LOAD_ROUNDING)) & np.isfinite(state.value)
    total = share * effort.time_limit_s * 2
    unsolved = [int(row) for row in widest_first if wide[row]]
    unsolved = unsolved[: int(total / BALANCE.least_exact_work)]
    if not unsolved:
        return
    work = total / len(unsolved)
    tasks = [_task(rows, state, row) for row in unsolved]
    few = sum(task is not None for task in tasks) < 4
    crew = Crew(1) if few or effort.crew is None else effort.crew
    packings = crew.map(partial(_solve, work, effort.seed), tasks)
    for row, task, packing in zip(unsolved, tasks, packings, strict=True):
        if task is None or packing is None:
            continue
        if task.covers:
            state.bound[row] = max(state.bound[row], packing.bound)
        if packing.slots is not None:
            state.offer(rows, np.array([row]), packing.slots[None])
            if task.covers and packing.optimal:
                state.bound[row] = max(state.bound[row], state.value[row] * (1 - LOAD_ROUNDING))


def _task(rows: Rows, state: State, row: int) -> _Task | None:
    """Counts as free as the model's size allows; None where even fixed counts are too large a model."""
    experts = rows.loads.shape[2]
    hint = state.slots[row]
    counts = np.bincount(hint.ravel(), minlength=experts)
    most_replicas = min(rows.gpus, rows.slots - experts + 1)
    layer = Layer(
        loads=rows.loads[row],
        slots=rows.slots,
        gpus=rows.gpus,
        spread_nodes=rows.spread_nodes,
        least_replicas=np.ones(experts, dtype=np.int64),
        most_replicas=np.full(experts, most_replicas),
    )
    covers = literals(layer) <= MOST_LITERALS // 4
    if not covers:
        covers = rows.slots == experts
        layer = replace(
            layer,
            least_replicas=np.maximum(counts - 1, 1),
            most_replicas=np.minimum(counts + 1, most_replicas),
        )
        if literals(layer) > MOST_LITERALS // 2:
            layer = replace(layer, least_replicas=counts, most_replicas=counts)
    if literals(layer) > MOST_LITERALS:
        return None
    return _Task(layer=layer, hint=hint, below=float(state.value[row]), covers=covers)


def _solve(work: float, seed: int, task: _Task | None) -> ExactPacking | None:
    if task is None or is_over():
        return None
    return solve_exactly(task.layer, task.hint, task.below, work=work, seed=seed)


# Routing groups kept whole on a node: first which groups share one, then each node as its own packing.


Sets = tuple[tuple[int, ...], ...]


def solve_grouped(
    loads: Loads, shape: SlotShape, limits: PlacementLimits, effort: PlacementEffort
) -> Solved:
    """Slots [layers, gpus, slots of a GPU] with bounds, groups whole on a node.

    Partitions of the groups over nodes are tried in the order of their bounds, until the best one found is no
    worse than the bounds of those left. With very many partitions only one is tried, by the groups' loads.

    Parameters
    ----------
    loads
        In units of the mean GPU load, [layers, windows, experts].
    shape
        Of slots, GPUs and nodes.
    limits
        With the number of groups.
    effort
        How far to go.
    """
    if partitions(limits.groups, shape.nodes) > GROUPS.most_partitions:
        # Groups to nodes by their loads, then every node; the bound is that of the groups and of all experts.
        layers, windows, _ = loads.shape
        by_group = loads.reshape(layers, windows, limits.groups, -1)
        packing = pack(
            by_group.sum(axis=3), np.ones((layers, limits.groups), dtype=np.int64), shape.nodes
        )
        exchange_to_improve(packing, 400, np.full(layers, float(shape.node_gpus)))
        bound = np.maximum(
            balance_bound(by_group.sum(axis=3), limits.groups, shape.nodes) / shape.node_gpus,
            balance_bound(loads, shape.slots, shape.gpus),
        )
        tell = effort.on_first
        if tell is not None:

            def of_layers(state: State) -> None:
                """A layer's value is that of its fullest node; what bounds a node bounds no layer."""
                value = state.value.reshape(layers, -1).max(axis=1)
                tell(State(state.slots, value, np.minimum(bound, value)))

            effort = replace(effort, on_first=of_layers)
        slots, value = solve_nodes(loads, packing.slots, shape, limits, effort)
        return Solved(slots=slots, value=value, bound=np.minimum(bound, value))
    return _Search(loads, shape, limits, effort).run()


def splits(groups: tuple[int, ...], size: int) -> Iterator[Sets]:
    """Every way to cut groups into sets of `size`, each once: the order of the sets does not count.

    Parameters
    ----------
    groups
        Their numbers, a multiple of `size`.
    size
        Groups of a set, from 1.
    """
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for rest_of_set in combinations(rest, size - 1):
        remaining = tuple(g for g in rest if g not in rest_of_set)
        for other_sets in splits(remaining, size):
            yield ((first, *rest_of_set), *other_sets)


class _Search:
    """Node sets are shared between partitions: each is solved once for a layer."""

    def __init__(
        self, loads: Loads, shape: SlotShape, limits: PlacementLimits, effort: PlacementEffort
    ) -> None:
        self._loads, self._shape, self._effort = loads, shape, effort
        self._per_group = loads.shape[2] // limits.groups
        size = limits.groups // shape.nodes
        self._sets, self._partitions = _packings(limits.groups, size)
        layers = len(loads)
        self._bound = np.stack([self._cheap(groups) for groups in self._sets], axis=1)
        self._value = np.full((layers, len(self._sets)), np.inf)
        self._searched = np.zeros(self._value.shape, dtype=bool)
        self._closed = np.zeros(self._value.shape, dtype=bool)
        self._slots: dict[tuple[int, int], Slots] = {}
        """Slots of a set by its own expert numbers."""
        self._best = np.full(layers, np.inf)
        self._choice = np.zeros(layers, dtype=np.int64)

    def run(self) -> Solved:
        """A first answer; cheap solves while a partition is promising; CP-SAT on what holds a layer back."""
        self._first()
        if self._effort.on_first is not None:
            self._effort.on_first(
                State(np.zeros(0, dtype=np.int64), self._best, self._layer_bound())
            )
        self._heuristic()
        for _ in range(GROUPS.exact_rounds if self._effort.exact else 0):
            if is_over() or not self._exact():
                break
            self._heuristic()
        if not np.isfinite(self._best).all():
            raise InfeasibleError(
                "groups: no placement was found that keeps replicas apart; use more slots"
            )
        slots = [self._joined(layer, self._choice[layer]) for layer in range(len(self._loads))]
        return Solved(
            slots=np.stack(slots),
            value=self._best,
            bound=np.minimum(self._layer_bound(), self._best),
        )

    def _by_partition(self, table: NDArray[np.float64]) -> Loads:
        """The worst set of every partition, [layers, partitions]."""
        return np.asarray(table[:, self._partitions].max(axis=2))

    def _layer_bound(self) -> Loads:
        """Bound of every layer: the least over its partitions, [layers]."""
        return np.asarray(self._by_partition(self._bound).min(axis=1))

    def _first(self) -> None:
        """Groups to nodes in falling order of load, as the greedy balancer does, then each node."""
        groups = self._partitions.shape[1] * len(self._sets[0])
        windows = self._loads.shape[1]
        by_group = self._loads.reshape(len(self._loads), windows, groups, -1).sum(axis=3)
        ones = np.ones((len(self._loads), groups), dtype=np.int64)
        nodes = np.sort(pack(by_group, ones, self._shape.nodes).slots, axis=2)
        index = {tuple(groups): i for i, groups in enumerate(self._sets.tolist())}
        chosen = np.array([[index[tuple(node)] for node in layer] for layer in nodes.tolist()])
        pairs = [(layer, int(s)) for layer, sets in enumerate(chosen) for s in sets]
        self._keep(
            pairs, first_answer(self._rows(pairs, np.zeros(len(self._loads))), self._effort.gap)
        )

    def _heuristic(self) -> None:
        """The partition with the lowest bound next, in every layer, while one could be better."""
        gap = self._effort.gap
        for _ in range(GROUPS.most_tried):
            bounds = self._by_partition(self._bound)
            good = self._best <= bounds.min(axis=1) * (1 + gap * BALANCE.search_share)
            bounds[self._searched[:, self._partitions].all(axis=2)] = np.inf
            # Among equal bounds the partition whose nodes are closest to even.
            pick = (bounds + 1e-6 * (self._bound[:, self._partitions] ** 2).sum(axis=2)).argmin(
                axis=1
            )
            promising = bounds.min(axis=1) * (1 + gap / 10) < self._best
            layers = np.flatnonzero(promising & ~good)
            if not len(layers) or is_over():
                return
            chosen = self._partitions[pick[layers]]
            new = {(int(k), int(s)) for k, sets in zip(layers, chosen, strict=True) for s in sets}
            pairs = sorted(pair for pair in new if not self._searched[pair])
            least_bound = np.zeros(len(self._loads))
            least_bound[layers] = bounds[layers, pick[layers]]
            rows = self._rows(pairs, least_bound)
            state = first_answer(rows, gap)
            improve_rows(rows, state, self._effort)
            self._keep(pairs, state)
            for pair in pairs:
                self._searched[pair] = True

    def _exact(self) -> bool:
        """CP-SAT on the sets that decide value and bound of layers with a gap; False if there is none."""
        bounds = self._by_partition(self._bound)
        least_bound, lowest = bounds.min(axis=1), bounds.argmin(axis=1)
        wanted: set[tuple[int, int]] = set()
        for layer in np.flatnonzero(
            self._best > least_bound * (1 + max(self._effort.gap, LOAD_ROUNDING))
        ).tolist():
            sets = {*self._partitions[self._choice[layer]], *self._partitions[lowest[layer]]}
            wanted |= {
                (layer, int(s)) for s in sets if self._holds_back(layer, int(s), least_bound[layer])
            }
        if not wanted:
            return False
        pairs = sorted(wanted)
        rows = self._rows(pairs, least_bound)
        state = State(
            slots=np.stack([self._slots[pair] for pair in pairs]),
            value=np.array([self._value[pair] for pair in pairs]),
            bound=np.array([self._bound[pair] for pair in pairs]),
        )
        close_gaps(rows, state, self._effort, BALANCE.exact_share / GROUPS.exact_rounds)
        self._keep(pairs, state)
        for pair in pairs:
            self._closed[pair] = True
        return True

    def _holds_back(self, layer: int, s: int, least_bound: float) -> bool:
        is_unproven = (layer, s) in self._slots and not self._closed[layer, s]
        return is_unproven and bool(
            self._value[layer, s] > max(self._bound[layer, s], least_bound) * (1 + LOAD_ROUNDING)
        )

    def _experts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        members = groups[:, None] * self._per_group + np.arange(self._per_group)
        return np.asarray(members.ravel())

    def _cheap(self, groups: NDArray[np.int64]) -> Loads:
        part = self._loads[:, :, self._experts(groups)]
        return balance_bound(part, self._shape.node_slots, self._shape.node_gpus)

    def _rows(self, pairs: list[tuple[int, int]], least_bound: Loads) -> Rows:
        return Rows(
            loads=np.stack(
                [self._loads[layer][:, self._experts(self._sets[s])] for layer, s in pairs]
            ),
            needed=least_bound[[layer for layer, _ in pairs]],
            slots=self._shape.node_slots,
            gpus=self._shape.node_gpus,
        )

    def _keep(self, pairs: list[tuple[int, int]], state: State) -> None:
        """What is better than was known; then the best partition of every layer."""
        for i, pair in enumerate(pairs):
            if state.value[i] < self._value[pair]:
                self._slots[pair], self._value[pair] = state.slots[i], state.value[i]
            self._bound[pair] = max(self._bound[pair], state.bound[i])
        reached = self._by_partition(self._value)
        self._choice, self._best = reached.argmin(axis=1), reached.min(axis=1)

    def _joined(self, layer: int, choice: int) -> Slots:
        sets = self._partitions[choice].tolist()
        return np.concatenate([self._experts(self._sets[s])[self._slots[layer, s]] for s in sets])


def solve_nodes(
    loads: Loads, groups: Slots, shape: SlotShape, limits: PlacementLimits, effort: PlacementEffort
) -> tuple[Slots, Loads]:
    """Slots [layers, gpus, slots of a GPU] and their largest GPU loads [layers], for `groups` of the nodes.

    Parameters
    ----------
    loads
        In units of the mean GPU load, [layers, windows, experts].
    groups
        Of each node, [layers, nodes, groups of a node].
    shape
        Of slots, GPUs and nodes.
    limits
        With the number of groups.
    effort
        How far to go.
    """
    layers, _, experts = loads.shape
    per_group = experts // limits.groups
    members = (groups[..., None] * per_group + np.arange(per_group)).reshape(
        layers * shape.nodes, 1, -1
    )
    spread = np.repeat(loads, shape.nodes, axis=0)
    index = np.broadcast_to(members, (*spread.shape[:2], members.shape[2]))
    rows = Rows(
        loads=np.take_along_axis(spread, index, axis=2),
        needed=np.zeros(len(members)),
        slots=shape.node_slots,
        gpus=shape.node_gpus,
    )
    solved = solve_rows(rows, effort)
    experts_of_slots = np.take_along_axis(
        members, solved.slots.reshape(len(members), 1, -1), axis=2
    )
    slots = experts_of_slots.reshape(layers, shape.gpus, shape.per_gpu)
    return slots, np.asarray(solved.value.reshape(layers, -1).max(axis=1))


def place_layers(
    loads: Loads, shape: SlotShape, limits: PlacementLimits, effort: PlacementEffort
) -> Solved:
    """The placement with the least worst balance over the windows, and a bound that none is below.

    Parameters
    ----------
    loads
        Tokens of each expert, [windows, layers, experts], at least 0, in any unit.
    shape
        Slots, GPUs and nodes; slots divide evenly over GPUs, GPUs over nodes.
    limits
        Groups that stay on a node, or replicas that are spread.
    effort
        Gap and work.

    Returns
    -------
    Solved
        Slots [layers, gpus, slots of a GPU], in rising order on a GPU; balance and bound [layers].

    Raises
    ------
    InputError
        Where loads or counts cannot be used.
    InfeasibleError
        Where no placement keeps to the limits.
    """
    check_loads(loads, "loads")
    check_shape(loads.shape[2], shape, limits)
    relative = by_layer(loads, shape.gpus)
    with Crew(effort.workers) as crew:
        effort = replace(effort, crew=crew)
        if limits.groups > 1 and shape.nodes > 1:
            solved = solve_grouped(relative, shape, limits, effort)
        else:
            rows = Rows(
                loads=relative,
                needed=np.zeros(len(relative)),
                slots=shape.slots,
                gpus=shape.gpus,
                spread_nodes=shape.nodes if limits.spread else 1,
            )
            solved = solve_rows(rows, effort)
    return replace(solved, slots=np.sort(solved.slots, axis=2))
