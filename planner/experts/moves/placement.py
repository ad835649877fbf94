"""From a current placement to a better one by few moves: moving an expert's weights costs.

A move is an (expert, GPU) pair that the current placement does not hold. What is minimised is the balance,
mean over layers, since layers run one after the other. Every layer gets a curve of balance by moves, and the
moves are shared out over the layers by dynamic programming; small cases go to CP-SAT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from meshwright.errors import InputError
from meshwright.planner.experts.balance.bound import balance_bound
from meshwright.planner.experts.balance.packing import has_duplicates
from meshwright.planner.experts.balance.place import place_layers
from meshwright.planner.experts.balance.rows import Solved, by_layer
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.moves.exact import solve_moves
from meshwright.planner.experts.moves.search import Current, Step
from meshwright.planner.experts.params import MOVES
from meshwright.planner.experts.problem import Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.experts.traffic.affinity import best_order
from meshwright.planner.solvers.clock import is_over


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
