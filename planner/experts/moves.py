"""From a placement in use to a better one by few moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.planner.experts.bound import balance_bound
from meshwright.planner.experts.exact import (
    MEAN_LOAD,
    Layer,
    hint_at,
    literals,
    post_packing,
    post_top,
    replica_literals,
    solution_slots,
)
from meshwright.planner.experts.flows import best_order
from meshwright.planner.experts.packing import has_duplicates
from meshwright.planner.experts.problem import MOVES, Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.experts.rows import Solved, by_layer
from meshwright.planner.experts.solve import PlacementEffort, place_layers
from meshwright.planner.solvers.clock import is_over
from meshwright.planner.solvers.cp_sat import repeatable_solver

# CP-SAT on a current placement and a limit on moves: all layers in one model, where it is small.


@dataclass(frozen=True, kw_only=True)
class ExactMoves:
    """Slots [layers, gpus, slots of a GPU], a bound on the mean balance, and whether it is reached."""

    slots: Slots
    bound: float
    optimal: bool


def solve_moves(
    loads: Loads,
    current: Slots,
    hint: Slots,
    max_moves: int,
    *,
    spread_nodes: int,
    work: float,
    seed: int,
) -> ExactMoves | None:
    """Minimises the sum of the layers' largest GPU loads, at most `max_moves` new (expert, GPU) pairs in all.

    Loads [layers, windows, experts] over the mean GPU load; `current` and `hint` are placements. Replica
    counts are free. None where the model would be too large or nothing was found within `work`, CP-SAT's
    deterministic time. Any solver status but the known ones raises.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    experts, (gpus, per_gpu) = loads.shape[2], current.shape[1:]
    layers = [
        Layer(
            loads=load,
            slots=gpus * per_gpu,
            gpus=gpus,
            spread_nodes=spread_nodes,
            least_replicas=np.ones(experts, dtype=np.int64),
            most_replicas=np.full(experts, min(gpus, gpus * per_gpu - experts + 1)),
        )
        for load in loads
    ]
    if sum(literals(layer) for layer in layers) > MOVES.most_literals:
        return None
    model = cp_model.CpModel()
    tops, new, places = [], [], []
    for layer, slots, start in zip(layers, current, hint, strict=True):
        chosen, on = replica_literals(model, layer)
        post_packing(model, layer, chosen, on)
        top = model.new_int_var(0, gpus * MEAN_LOAD, "")
        post_top(model, layer, on, top)
        hint_at(model, layer, chosen, on, start)
        gpu_experts = [set(row.tolist()) for row in slots]
        new += [literal for (e, _, g), literal in on.items() if e not in gpu_experts[g]]
        tops.append(top)
        places.append((layer, on))
    model.add(sum(new) <= max_moves)
    model.minimize(sum(tops))
    solver = repeatable_solver(seed, work=work)
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(
            f"CP-SAT ended with {solver.status_name(status)} on moves that may be none"
        )
    return ExactMoves(
        slots=np.stack([solution_slots(solver, layer, on) for layer, on in places]),
        bound=solver.best_objective_bound / MEAN_LOAD / len(loads),
        optimal=status == cp_model.OPTIMAL,
    )


# Few moves that help most, one after another, from a placement that is in use: a curve of balance by moves.
#
# A move puts an expert's weights on a GPU that did not hold it. Two experts change places (two moves), or a
# slot of an expert with other replicas takes another expert (one move, and the replica counts change).


@dataclass(frozen=True, kw_only=True)
class Step:
    """A placement on the way: slots [gpus, per GPU], moves from the start, largest GPU load."""

    slots: Slots
    moves: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Current:
    """One packing in use, a layer's or one of its nodes': slots [gpus, per GPU] of experts by number."""

    slots: Slots
    loads: Loads
    """Over the mean GPU load of the layer, [windows, experts]; experts that are not here have none."""
    spread_nodes: int = 1

    def value(self, slots: Slots) -> float:
        """Largest GPU load, the worst window."""
        return float(self._gpu_loads(slots).max())

    def _gpu_loads(self, slots: Slots) -> Loads:
        counts = np.maximum(np.bincount(slots.ravel(), minlength=self.loads.shape[1]), 1)
        return np.asarray((self.loads / counts)[:, slots].sum(axis=2))

    def moves(self, slots: Slots) -> int:
        """(expert, GPU) pairs of `slots` that the current placement does not hold."""
        return int((~_held_by(self.slots, slots)).sum())

    def spread(self, slots: Slots) -> bool:
        """Whether replicas are on as many nodes as they have to be."""
        if self.spread_nodes == 1:
            return True
        experts = self.loads.shape[1]
        by_node = [np.bincount(n, minlength=experts) for n in slots.reshape(self.spread_nodes, -1)]
        here = np.stack(by_node)
        return bool((here.max(axis=0) <= -(-here.sum(axis=0) // self.spread_nodes)).all())

    def steps(self, most_moves: int) -> Iterator[Step]:
        """The current placement, then better and better ones of at most so many moves."""
        slots, moves = self.slots, 0
        value = self.value(slots)
        yield Step(slots=slots, moves=0, value=value)
        # Going back over a move frees it, so the count of steps is bounded apart from that of moves.
        for _ in range(2 * most_moves):
            found = self._best(slots, moves, most_moves)
            if found is None:
                return
            slots, moves = found, self.moves(found)
            yield Step(slots=slots, moves=moves, value=self.value(slots))

    def _best(self, slots: Slots, moves: int, most_moves: int) -> Slots | None:
        """The candidate with the largest fall of the norm for each move that it costs."""
        load = self._gpu_loads(slots)
        hottest = int(load.max(axis=0).argmax())
        norm = _norm(load[None])[0]
        candidates = [
            (gain, gpu, slot, expert, other_slot)
            for gains, where in (
                self._swaps(slots, load, hottest),
                self._takes(slots, load, hottest),
            )
            for gain, (gpu, slot, expert, other_slot) in _largest(norm - gains, where)
        ]
        best: tuple[float, Slots] | None = None
        for gain, gpu, slot, expert, other_slot in sorted(candidates, key=lambda item: -item[0])[
            : MOVES.candidates
        ]:
            if gain <= 1e-9 * norm:
                break
            new = slots.copy()
            if other_slot >= 0:
                new.ravel()[other_slot] = new[gpu, slot]
            new[gpu, slot] = expert
            cost = self.moves(new) - moves
            if moves + cost > most_moves or not self.spread(new):
                continue
            gain_per_move = gain / max(cost, 0.5)
            if best is None or gain_per_move > best[0]:
                best = (gain_per_move, new)
        return None if best is None else best[1]

    def _swaps(self, slots: Slots, load: Loads, gpu: int) -> tuple[Loads, NDArray[np.int64]]:
        """Norms after each exchange of a slot of `gpu` with one elsewhere, and (gpu, slot, expert, other)."""
        counts = np.bincount(slots.ravel(), minlength=self.loads.shape[1])
        weight = (self.loads / np.maximum(counts, 1))[:, slots]
        is_on_gpu = np.zeros((len(slots), self.loads.shape[1]), dtype=bool)
        np.put_along_axis(is_on_gpu, slots, True, axis=1)
        slot, away, place = np.indices((slots.shape[1], *slots.shape)).reshape(3, -1)
        worst_expert, away_expert = slots[gpu][slot], slots[away, place]
        keep = (away != gpu) & ~is_on_gpu[away, worst_expert] & ~is_on_gpu[gpu, away_expert]
        slot, away, place, away_expert = slot[keep], away[keep], place[keep], away_expert[keep]
        shed = weight[:, gpu, slot] - weight[:, away, place]
        after = np.repeat(load[None], len(slot), axis=0)
        after[:, :, gpu] -= shed.T
        after[np.arange(len(slot)), :, away] += shed.T
        where = np.stack(
            [np.full(len(slot), gpu), slot, away_expert, away * slots.shape[1] + place], axis=1
        )
        return _norm(after), where

    def _takes(self, slots: Slots, load: Loads, gpu: int) -> tuple[Loads, NDArray[np.int64]]:
        """The same where a slot takes another expert: one of `gpu` any, one elsewhere an expert of `gpu`."""
        experts = self.loads.shape[1]
        counts = np.bincount(slots.ravel(), minlength=experts)
        is_on_gpu = np.zeros((len(slots), experts), dtype=bool)
        np.put_along_axis(is_on_gpu, slots, True, axis=1)
        here = np.stack(
            np.meshgrid(np.arange(slots.shape[1]), np.flatnonzero(counts), indexing="ij")
        )
        of_gpu = np.stack([np.full(here[0].size, gpu), here[0].ravel(), here[1].ravel()])
        elsewhere = np.indices((*slots.shape, slots.shape[1])).reshape(3, -1)
        elsewhere[2] = slots[gpu][elsewhere[2]]
        g, slot, new = np.concatenate([of_gpu, elsewhere], axis=1)
        old = slots[g, slot]
        keep = (counts[old] > 1) & ~is_on_gpu[g, new]
        g, slot, new, old = g[keep], slot[keep], new[keep], old[keep]
        share = self.loads / np.maximum(counts, 1)
        rise_of_old = (self.loads / np.maximum(counts - 1, 1) - share)[:, old]
        fall_of_new = (self.loads / (counts + 1) - share)[:, new]
        after = (
            load[None]
            + rise_of_old.T[:, :, None] * is_on_gpu.T[old][:, None, :]
            + fall_of_new.T[:, :, None] * (is_on_gpu.T[new][:, None, :])
        )
        rows = np.arange(len(g))
        after[rows, :, g] += ((self.loads / (counts + 1))[:, new] - (share[:, old] + rise_of_old)).T
        return _norm(after), np.stack([g, slot, new, np.full(len(g), -1)], axis=1)


def _held_by(current: Slots, slots: Slots) -> NDArray[np.bool_]:
    """Whether each slot's expert is on its GPU in `current` too, [gpus, per GPU]."""
    return np.asarray((slots[:, :, None] == current[:, None, :]).any(axis=2))


def _norm(load: Loads) -> Loads:
    """Sum of a high power of the loads [candidates, windows, gpus], [candidates]."""
    return np.asarray((load**MOVES.norm_power).sum(axis=(1, 2)))


def _largest(
    gain: Loads, where: NDArray[np.int64]
) -> list[tuple[float, tuple[int, int, int, int]]]:
    order = np.argsort(-gain, kind="stable")[: MOVES.candidates]
    return [
        (float(gain[i]), (int(w[0]), int(w[1]), int(w[2]), int(w[3])))
        for i in order
        for w in [where[i]]
    ]


# From a current placement to a better one by few moves: moving an expert's weights costs.
#
# A move is an (expert, GPU) pair that the current placement does not hold. What is minimised is the balance,
# mean over layers, since layers run one after the other. Every layer gets a curve of balance by moves, and
# the moves are shared out over the layers by dynamic programming; small cases go to CP-SAT.


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The placement, moves of each layer [layers], and a bound on the mean balance within the limit."""

    solved: Solved
    moves: Slots
    mean_bound: float
    before: Loads
    """Balance of the current placement, [layers]."""
    optimal: bool


def improve_from(
    loads: Loads,
    current: Slots,
    shape: SlotShape,
    max_moves: int,
    *,
    limits: PlacementLimits | None = None,
    time_limit_s: float = 30.0,
    seed: int = 0,
) -> Moved:
    """The best placement found with at most `max_moves` moves from `current` [layers, gpus, slots of a GPU].

    Loads [windows, layers, experts]. Groups stay on the nodes where they are. Raises InputError if the
    current placement has another shape, an expert twice on a GPU, or breaks the limits.
    """
    limits = limits or PlacementLimits()
    _check(current, shape, limits, loads.shape[2])
    rows = by_layer(loads, shape.gpus)
    before = np.array([_value(row, slots) for row, slots in zip(rows, current, strict=True)])
    reach = min(max_moves, current[0].size)
    bounds = [
        bound_curve(row, slots, reach, float(balance_bound(row[None], shape.slots, shape.gpus)[0]))
        for row, slots in zip(rows, current, strict=True)
    ]
    unlimited = None
    if max_moves >= current[0].size // 2 and limits.groups == 1:
        effort = PlacementEffort(exact=False, time_limit_s=time_limit_s / 4, seed=seed)
        nodes = shape.nodes if limits.spread else 1
        fresh = place_layers(loads, shape, limits, effort).slots
        unlimited = np.stack([_matched(a, b, nodes) for a, b in zip(current, fresh, strict=True)])
    slots, moves = _by_search(
        rows, current, unlimited, shape, max_moves, limits=limits, time_limit_s=time_limit_s / 2
    )
    value = np.array([_value(row, s) for row, s in zip(rows, slots, strict=True)])
    mean_bound = min(_shared(bounds, max_moves)[0] / len(rows), float(value.mean()))
    exact = None
    if limits.groups == 1 and max_moves:
        spread = shape.nodes if limits.spread else 1
        exact = solve_moves(
            rows, current, slots, max_moves, spread_nodes=spread, work=2 * time_limit_s, seed=seed
        )
    optimal = value.mean() <= mean_bound * (1 + 1e-9)
    if exact is not None:
        exact_value = np.array([_value(row, s) for row, s in zip(rows, exact.slots, strict=True)])
        if exact_value.mean() < value.mean():
            slots, value = exact.slots, exact_value
            moves = np.array([count_moves(a, b) for a, b in zip(current, slots, strict=True)])
        mean_bound = min(max(mean_bound, exact.bound), float(value.mean()))
        optimal = optimal or exact.optimal
    bound = np.minimum(np.array([curve[-1] for curve in bounds]), value)
    solved = Solved(slots=np.sort(slots, axis=2), value=value, bound=bound)
    return Moved(
        solved=solved, moves=moves, mean_bound=mean_bound, before=before, optimal=bool(optimal)
    )


def count_moves(before: Slots, after: Slots) -> int:
    """(expert, GPU) pairs of `after` that `before` does not hold; slots [gpus, slots of a GPU]."""
    return sum(
        len(set(new.tolist()) - set(old.tolist())) for old, new in zip(before, after, strict=True)
    )


def bound_curve(load: Loads, slots: Slots, moves: int, least_bound: float) -> Loads:
    """Bounds on a layer's largest GPU load after 0 .. `moves` moves, [moves + 1], convex and falling.

    Load [windows, experts], slots [gpus, per GPU]; `least` bounds every placement. Two arguments for a GPU of
    load W. One: what leaves it needs a move onto it, and a further replica elsewhere is a move too and takes
    less than the whole; so k moves take at most its k largest replicas. Two: a move puts out one replica
    somewhere, and takes at most w / (c + 1) off the other GPUs that hold the expert that comes; so m moves
    take at most m times the largest of both from all GPUs above any level.
    """
    counts = np.bincount(slots.ravel(), minlength=load.shape[1])
    share = load / np.maximum(counts, 1)
    steps = np.arange(moves + 1)
    curve = np.full(moves + 1, least_bound)
    for window in range(len(load)):
        replica_loads = -np.sort(-share[window][slots], axis=1)
        gpu = replica_loads.sum(axis=1)
        taken = np.concatenate(
            [np.zeros((len(slots), 1)), np.cumsum(replica_loads, axis=1)], axis=1
        )
        for total, taken_of_gpu in zip(gpu, taken, strict=True):
            curve = np.maximum(
                curve, total - taken_of_gpu[np.minimum(steps, len(taken_of_gpu) - 1)]
            )
        each = share[window].max() + (load[window] / (counts + 1)).max()
        curve = np.maximum(curve, _level(gpu, steps * each))
    return curve


def _level(gpu: Loads, taken: Loads) -> Loads:
    """The level T for which the loads above T, sum of max(0, load - T), are `taken`, for each of them."""
    ordered = -np.sort(-gpu)
    load_above = np.cumsum(ordered) - np.arange(1, len(gpu) + 1) * ordered
    count = np.searchsorted(load_above, taken, side="right")
    return np.asarray((np.cumsum(ordered)[count - 1] - taken) / count)


def _value(load: Loads, slots: Slots) -> float:
    return Current(slots=slots, loads=load).value(slots)


def _check(current: Slots, shape: SlotShape, limits: PlacementLimits, experts: int) -> None:
    if current.shape[1:] != (shape.gpus, shape.per_gpu):
        raise InputError(
            f"from: the placement has {current[0].size} slots on {current.shape[1]} GPUs, {shape.slots} on "
            f"{shape.gpus} are asked for"
        )
    if has_duplicates(current).any():
        raise InputError(
            "from: the placement holds an expert twice on a GPU; place anew without --max-moves"
        )
    for layer, slots in enumerate(current):
        if limits.spread and not Current(
            slots=slots, loads=np.ones((1, experts)), spread_nodes=shape.nodes
        ).spread(slots):
            raise InputError(
                f"from: layer {layer}: replicas of an expert share a node though others have none; leave "
                "--spread out, or place anew without --max-moves"
            )
        if limits.groups > 1 and shape.nodes > 1:
            group = slots.reshape(shape.nodes, -1) // (experts // limits.groups)
            node_groups = [set(node.tolist()) for node in group]
            split_groups = {
                g
                for node in node_groups
                for g in node
                if sum(g in groups for groups in node_groups) > 1
            }
            if split_groups:
                raise InputError(
                    f"from: layer {layer}: group {min(split_groups)} is on several nodes; use "
                    "--groups 1, or place anew without --max-moves"
                )


def _by_search(
    rows: Loads,
    current: Slots,
    unlimited: Slots | None,
    shape: SlotShape,
    max_moves: int,
    *,
    limits: PlacementLimits,
    time_limit_s: float,
) -> tuple[Slots, Slots]:
    """Slots and moves of each layer: curves of its parts (nodes, where groups stay), best shared out."""
    parts = shape.nodes if limits.groups > 1 else 1
    size = shape.gpus // parts
    candidates = current[0].size * (2 * shape.per_gpu + 1) // parts + rows.shape[2] * shape.per_gpu
    each_s = MOVES.candidate_s * candidates * size * rows.shape[1] + 5e-4
    most_steps = int(np.clip(time_limit_s / (each_s * len(rows) * parts), 2, MOVES.most_steps))
    curves = []
    for layer, (row, slots) in enumerate(zip(rows, current, strict=True)):
        part_placements = [
            Current(
                slots=part, loads=_only(row, part), spread_nodes=shape.nodes if limits.spread else 1
            )
            for part in slots.reshape(parts, size, -1)
        ]
        part_curves = [
            _curve(part.steps(min(max_moves, part.slots.size)), most_steps)
            for part in part_placements
        ]
        curve = part_curves[0] if parts == 1 else _joined(part_curves)
        if unlimited is not None:
            moves = count_moves(slots, unlimited[layer])
            fresh = Step(slots=unlimited[layer], moves=moves, value=_value(row, unlimited[layer]))
            curve = _curve([*curve, fresh], len(curve) + 1)
        curves.append(curve)
    _, spent = _shared([np.array([step.value for step in curve]) for curve in curves], max_moves)
    picked = [curve[m] for curve, m in zip(curves, spent, strict=True)]
    return np.stack([step.slots for step in picked]), np.array([step.moves for step in picked])


def _matched(current: Slots, unlimited: Slots, nodes: int) -> Slots:
    """A layer's slots with their GPUs where the most experts are where they were, whole nodes together."""
    both = (
        (unlimited[None, :, :, None] == current[:, None, None, :])
        .any(axis=3)
        .sum(axis=2)
        .astype(np.float64)
    )
    size = len(current) // nodes
    by_node = both.reshape(nodes, size, nodes, size)
    matched = np.empty_like(current)
    for here, there in enumerate(best_order(by_node.max(axis=3).sum(axis=1)).tolist()):
        gpus = best_order(by_node[here, :, there, :])
        matched[here * size : (here + 1) * size] = unlimited[there * size : (there + 1) * size][
            gpus
        ]
    return matched


def _only(load: Loads, slots: Slots) -> Loads:
    is_here = np.zeros(load.shape[1], dtype=bool)
    is_here[slots.ravel()] = True
    return np.where(is_here, load, 0.0)


def _curve(steps: Iterable[Step], most_steps: int) -> list[Step]:
    """The best step for 0 .. n moves, of the first `most_steps`; the first has no moves."""
    best: list[Step] = []
    for step in islice(steps, most_steps):
        if best and is_over():
            break
        while len(best) <= step.moves:
            best.append(best[-1] if best else step)
        for m in range(step.moves, len(best)):
            if step.value < best[m].value:
                best[m] = step
    return best


def _joined(curves: list[list[Step]]) -> list[Step]:
    """The least worst of the parts for 0 .. n moves together.

    The next move goes to the part that is worst, up to where it gets better; exact, as nothing else helps.
    """

    def together() -> Step:
        picked = [curve[k] for curve, k in zip(curves, position, strict=True)]
        return Step(
            slots=np.concatenate([step.slots for step in picked]),
            moves=sum(step.moves for step in picked),
            value=max(step.value for step in picked),
        )

    position = [0] * len(curves)
    joined = [together()]
    while True:
        worst = max(range(len(curves)), key=lambda i: curves[i][position[i]].value)
        curve, now = curves[worst], curves[worst][position[worst]].value
        better = next((m for m in range(position[worst], len(curve)) if curve[m].value < now), None)
        if better is None:
            return joined
        joined += [joined[-1]] * (better - position[worst] - 1)
        position[worst] = better
        joined.append(together())


def _shared(curves: list[Loads], moves: int) -> tuple[float, list[int]]:
    """The least sum of one point of each curve whose numbers sum to at most `moves`, and the numbers."""
    total = min(moves, sum(len(curve) - 1 for curve in curves))
    best = np.zeros(total + 1)
    taken = []
    for curve in curves:
        now, pick = np.full(total + 1, np.inf), np.zeros(total + 1, dtype=np.int64)
        for m in _corners(curve, total):
            cost = np.full(total + 1, np.inf)
            cost[m:] = best[: total + 1 - m] + curve[m]
            better = cost < now
            now[better], pick[better] = cost[better], m
        best = now
        taken.append(pick)
    remaining, spent = int(best.argmin()), []
    for pick in reversed(taken):
        spent.append(int(pick[remaining]))
        remaining -= spent[-1]
    return float(best.min()), spent[::-1]


def _corners(curve: Loads, most_moves: int) -> list[int]:
    """Where the curve falls, and its start."""
    falls = [m for m, (a, b) in enumerate(pairwise(curve.tolist()), start=1) if b < a]
    return [0, *(m for m in falls if m <= most_moves)]
