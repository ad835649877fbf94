"""`experts` from request to placement and figures: balance first, then traffic under the balance cap."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.planner.experts.balance.packing import has_duplicates
from meshwright.planner.experts.balance.place import place_layers
from meshwright.planner.experts.balance.robust import cvar, drift_row, place_robustly
from meshwright.planner.experts.balance.rows import Solved, State, by_layer
from meshwright.planner.experts.balance.solve import PlacementEffort
from meshwright.planner.experts.case import PlacementCase, layer_numbers, read_case
from meshwright.planner.experts.figures import change_from, compared, gpu_share, layer_row
from meshwright.planner.experts.files.inputs import read_routing
from meshwright.planner.experts.files.writers import PlacementFile
from meshwright.planner.experts.moves.placement import Moved, improve_from
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.experts.request import ExpertRequest
from meshwright.planner.experts.traffic.affinity import near_sources
from meshwright.planner.experts.traffic.grouped_traffic import less_grouped_traffic
from meshwright.planner.experts.traffic.less_traffic import layer_caps, less_traffic
from meshwright.planner.solvers.clock import within

DEFAULT_CAP = 1.02
"""Mean balance up to which traffic is lowered where the request names none."""
MEAN_FIGURES = (
    "nodes_per_token",
    "nodes_per_token_touched",
    "leaves_per_token",
    "pairs_apart_share",
    "cross_node_bytes",
    "all_to_all_s",
    "all_to_all_deduplicated_s",
    "node_balance",
    "cross_node_share",
    "held_out_balance",
    "held_out_node_balance",
    "held_out_nodes_per_token",
    "permutation_density",
    "inside_node_share",
    "inside_leaf_share",
    "even_all_to_all_s",
    "straggler_all_to_all_s",
)
"""Figures of a layer whose means over the layers stand in the document."""


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """The placement, its figures by layer, and their sums."""

    placed: PlacementFile
    document: dict[str, Any]
    gpu_share: Loads
    """Load of every GPU over the mean, the worst window, [layers, gpus]."""
    warnings: tuple[str, ...]


def plan_experts(
    request: ExpertRequest, progress: Callable[[str], None] | None = None
) -> ExpertPlan:
    """Reads, places, scores; `progress` hears the first answer before it is bettered.

    Raises InputError, InfeasibleError, ClusterError or SpecError.
    """
    start = time.monotonic()
    first: dict[str, float] = {}

    def on_first(state: State) -> None:
        first["balance"] = float(state.value.mean())
        first["wall_s"] = time.monotonic() - start
        if progress is not None:
            bound = state.bound.mean()
            progress(f"first answer: balance {first['balance']:.4f}, bound {bound:.4f}")

    moved = drifted = None
    with within(request.time_limit_s):
        case = read_case(request)
        if request.max_moves is None:
            effort = PlacementEffort(
                gap=request.gap,
                time_limit_s=request.time_limit_s,
                seed=request.seed,
                workers=request.workers,
                on_first=on_first,
            )
            solved = _placed(case, effort)
        else:
            moved = _moved(case, request.max_moves)
            solved = moved.solved
        if request.score_windows:
            drifted = drift(case, solved.slots)
    plan = _scored(case, solved)
    document = plan.document
    ungrouped = _without_groups(case) if case.limits.groups > 1 else None
    document["compared"] = compared(case, solved.slots, ungrouped)
    document["wall_s"] = time.monotonic() - start
    document["first_answer"] = first or None
    document["from"] = None
    if case.current is not None:
        document["from"] = change_from(case, case.current, document, moved)
    document["drift"] = drifted
    return plan


def _without_groups(case: PlacementCase) -> Slots:
    """What a tenth of the work finds where groups may be torn apart."""
    request = case.request
    effort = PlacementEffort(
        gap=request.gap,
        time_limit_s=0.1 * request.time_limit_s,
        exact=False,
        workers=request.workers,
    )
    limits = replace(case.limits, groups=1)
    return place_layers(case.routing.loads, case.ground.shape, limits, effort).slots


def _moved(case: PlacementCase, max_moves: int) -> Moved:
    if case.current is None:
        raise InputError("max-moves: needs the current placement; give it with --from FILE")
    return improve_from(
        case.routing.loads,
        case.current,
        case.ground.shape,
        max_moves,
        limits=case.limits,
        time_limit_s=case.request.time_limit_s,
        seed=case.request.seed,
    )


def drift(case: PlacementCase, slots: Slots) -> list[dict[str, Any]]:
    """Balance on windows that were not placed on: of this placement, and of each window placed alone."""
    request, routing = case.request, case.routing
    effort = PlacementEffort(
        gap=request.gap, time_limit_s=request.time_limit_s, exact=False, workers=request.workers
    )
    alone = {
        name: place_layers(window[None], case.ground.shape, case.limits, effort).slots
        for name, window in zip(routing.windows, routing.loads, strict=True)
    }
    rows = []
    for name in request.score_windows:
        loads = read_routing(request.loads, windows=(name,)).loads
        if loads.shape[1:] != routing.loads.shape[1:]:
            raise InputError(
                f"score-window: {name} has another shape than the windows that are placed on"
            )
        rows.append(drift_row(name, loads, slots, alone))
    return rows


def _placed(case: PlacementCase, effort: PlacementEffort) -> Solved:
    """Balance first; then, where it is known which ways tokens take, less traffic under the cap."""
    request, flows, shape = case.request, case.flows, case.ground.shape
    lower_traffic = flows.known and shape.nodes > 1
    # Under a cap the last permille of balance is given up for traffic anyway: no proof is needed first.
    solved = place_robustly(
        case.routing.loads,
        shape,
        case.limits,
        replace(effort, exact=not lower_traffic),
        objective=request.robust,
        share=request.cvar_share,
    )
    if not lower_traffic:
        return solved
    # Leaves are not alike to a token that touches several nodes: with a trace over leaves the order stays.
    nodes_alike = len(case.ground.levels) == 1 or not flows.by_token
    sources = flows.sources if nodes_alike else None
    if sources is not None:
        solved = near_sources(solved, sources, shape)
    if case.limits.groups == 1:
        return _less_traffic(case, solved)
    solved = less_grouped_traffic(
        flows,
        by_layer(case.routing.loads, shape.gpus),
        solved,
        shape=shape,
        limits=case.limits,
        effort=effort,
        levels=case.ground.levels,
        caps=layer_caps(solved.value, request.balance or DEFAULT_CAP),
    )
    return solved if sources is None else near_sources(solved, sources, shape)


def _less_traffic(case: PlacementCase, solved: Solved) -> Solved:
    request, ground = case.request, case.ground
    return less_traffic(
        case.flows,
        by_layer(case.routing.loads, ground.shape.gpus),
        solved,
        shape=ground.shape,
        levels=ground.levels,
        cap=request.balance or DEFAULT_CAP,
        spread=case.limits.spread,
        workers=request.workers,
        near=request.replica_choice == "touched",
        time_limit_s=request.time_limit_s,
    )


def _scored(case: PlacementCase, solved: Solved) -> ExpertPlan:
    """The placement's figures: layer by layer, and their means."""
    routing, shape = case.routing, case.ground.shape
    share = gpu_share(routing.loads, solved.slots)
    rows = [layer_row(case, layer, solved) for layer in range(len(share))]
    balance = np.array([row["balance"] for row in rows])
    document: dict[str, Any] = {
        "layers": rows,
        "balance_mean": float(balance.mean()),
        "balance_max": float(balance.max()),
        "bound_mean": float(solved.bound.mean()),
        "gap_mean": float(solved.gap.mean()),
        "gap_max": float(solved.gap.max()),
        "duplicates": int(has_duplicates(solved.slots).sum()),
        "slots": shape.slots,
        "gpus": shape.gpus,
        "nodes": shape.nodes,
        "groups": case.limits.groups,
        "windows": list(routing.windows),
        "robust": case.request.robust,
        "cvar_mean": _mean_cvar(routing.loads, solved.slots, case.request.cvar_share),
        "wall_s": None,
    }
    for key in MEAN_FIGURES:
        values = [row[key] for row in rows if row[key] is not None]
        document[f"{key}_mean"] = float(np.mean(values)) if values else None
    summary = ("balance_mean", "balance_max", "bound_mean", "gap_max")
    placed = PlacementFile(
        slots=solved.slots,
        experts=routing.loads.shape[2],
        nodes=shape.nodes,
        layer_ids=layer_numbers(routing, case.ground) or tuple(range(len(rows))),
        summary={key: document[key] for key in summary},
    )
    warnings = _warnings(case, float(balance.mean()), float(solved.bound.mean()))
    return ExpertPlan(placed=placed, document=document, gpu_share=share, warnings=warnings)


def _warnings(case: PlacementCase, balance: float, bound: float) -> tuple[str, ...]:
    """What the user asked for or the file states and the placement does not keep to."""
    request, groups = case.request, case.routing.groups
    warnings = []
    if request.groups is None and case.limits.groups == 1 and groups > 1:
        warnings.append(
            f"the {groups} routing groups of the loads are not kept whole: they do not divide over "
            f"{case.ground.shape.nodes} nodes"
        )
    if request.balance is not None and balance > request.balance * (1 + 1e-9):
        warnings.append(
            f"mean balance {balance:.4f} is above --balance {request.balance:g}; the proven bounds "
            f"have the mean {bound:.4f}"
        )
    return tuple(warnings)


def _mean_cvar(loads: Loads, slots: Slots, share: float) -> float:
    """CVaR of the balance over the windows, mean over layers."""
    by_window = [gpu_share(window[None], slots).max(axis=1) for window in loads]
    return float(cvar(np.stack(by_window, axis=1), share).mean())
