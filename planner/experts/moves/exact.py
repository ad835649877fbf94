"""CP-SAT on a current placement and a limit on moves: all layers in one model, where it is small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.planner.experts.balance.exact import (
    MEAN_LOAD,
    Layer,
    hint_at,
    literals,
    post_packing,
    post_top,
    replica_literals,
    solution_slots,
)
from meshwright.planner.experts.params import MOVES
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.solvers.cp_sat import repeatable_solver


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
