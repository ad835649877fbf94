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
from meshwright.planner.experts.figures import change_from, gpu_share, layer_row
from meshwright.planner.experts.files.inputs import read_routing
from meshwright.planner.experts.files.placement_reader import read_placement
from meshwright.planner.experts.files.routing import Routing, token_loads
from meshwright.planner.experts.files.writers import PlacementFile
from meshwright.planner.experts.moves.placement import improve_from
from meshwright.planner.experts.problem import Loads, PlacementLimits, Slots, SlotShape, check_shape
from meshwright.planner.experts.request import ExpertRequest, Ground, limits_of, read_ground
from meshwright.planner.experts.traffic.affinity import near_sources
from meshwright.planner.experts.traffic.flows import Flows, read_flows
from meshwright.planner.experts.traffic.grouped_traffic import less_grouped_traffic
from meshwright.planner.experts.traffic.less_traffic import layer_caps, less_traffic


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
        first["balance"], first["wall_s"] = float(state.value.mean()), time.monotonic() - start
        if progress is not None:
            progress(
                f"first answer: balance {first['balance']:.4f}, bound {state.bound.mean():.4f}"
            )

    routing = read_routing(request.loads, windows=request.windows, split=request.split)
    held_out = None
    if request.hold_out:
        routing, held_out = _halves(routing)
    _, layers, experts = routing.loads.shape
    ground = read_ground(request, experts)
    limits = limits_of(request, routing.groups, ground.model, ground.shape.nodes)
    check_shape(experts, ground.shape, limits)
    effort = PlacementEffort(
        gap=request.gap,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        workers=request.workers,
        on_first=on_first,
    )
    flows = read_flows(routing, request.co_activation, ground.shape)
    current, moved = None, None
    if request.current is not None:
        current = read_placement(
            request.current,
            layers=layers,
            gpus=ground.shape.gpus,
            experts=experts,
            layer_ids=layer_numbers(routing, ground),
        )
    if request.max_moves is not None:
        if current is None:
            raise InputError("max-moves: needs the current placement; give it with --from FILE")
        moved = improve_from(
            routing.loads,
            current,
            ground.shape,
            request.max_moves,
            limits=limits,
            time_limit_s=request.time_limit_s,
            seed=request.seed,
        )
        solved = moved.solved
    else:
        solved = _placed(request, routing, flows, ground=ground, limits=limits, effort=effort)
    plan = _scored(
        request,
        routing,
        flows=flows,
        held_out=held_out,
        solved=solved,
        current=current,
        ground=ground,
        limits=limits,
        start=start,
    )
    plan.document["first_answer"] = first or None
    plan.document["from"] = None
    if current is not None:
        plan.document["from"] = change_from(routing.loads, current, plan.document, request, moved)
    plan.document["drift"] = (
        drift(request, routing, solved.slots, ground.shape, limits)
        if request.score_windows
        else None
    )
    return plan


def drift(
    request: ExpertRequest,
    routing: Routing,
    slots: Slots,
    shape: SlotShape,
    limits: PlacementLimits,
) -> list[dict[str, Any]]:
    """Balance on windows that were not placed on: of this placement, and of each window placed alone."""
    effort = PlacementEffort(
        gap=request.gap, time_limit_s=request.time_limit_s, exact=False, workers=request.workers
    )
    alone = [
        place_layers(routing.loads[k : k + 1], shape, limits, effort).slots
        for k in range(len(routing.loads))
    ]
    by_name = dict(zip(routing.windows, alone, strict=True))
    rows = []
    for name in request.score_windows:
        loads = read_routing(request.loads, windows=(name,)).loads
        if loads.shape[1:] != routing.loads.shape[1:]:
            raise InputError(
                f"score-window: {name} has another shape than the windows that are placed on"
            )
        rows.append(drift_row(name, loads, slots, by_name))
    return rows


def _halves(routing: Routing) -> tuple[Routing, Routing]:
    """First and second half of a trace's tokens, or of the windows."""
    experts = routing.loads.shape[2]
    if routing.tokens is not None:
        middle = routing.tokens.shape[1] // 2
        if not middle:
            raise InputError("hold-out: a trace of one token cannot be halved")
        parts = (routing.tokens[:, :middle], routing.tokens[:, middle:])
        first, second = (
            replace(routing, tokens=p, loads=token_loads(p, experts)[None]) for p in parts
        )
        return first, second
    middle = len(routing.loads) // 2
    if not middle:
        raise InputError("hold-out: needs a token trace or several windows; cut steps with --split")
    return (
        replace(routing, loads=routing.loads[:middle], windows=routing.windows[:middle]),
        replace(routing, loads=routing.loads[middle:], windows=routing.windows[middle:]),
    )


def _placed(
    request: ExpertRequest,
    routing: Routing,
    flows: Flows,
    *,
    ground: Ground,
    limits: PlacementLimits,
    effort: PlacementEffort,
) -> Solved:
    """Balance first; then, where it is known which ways tokens take, less traffic under the cap."""
    lower = flows.known and ground.shape.nodes > 1
    # Under a cap the last permille of balance is given up for traffic anyway: no proof is needed first.
    solved = place_robustly(
        routing.loads,
        ground.shape,
        limits,
        replace(effort, exact=not lower),
        objective=request.robust,
        share=request.cvar_share,
    )
    if not lower:
        return solved
    # Leaves are not alike to a token that touches several nodes: with a trace over leaves the order stays.
    nodes_alike = len(ground.levels) == 1 or not flows.by_token
    if flows.sources is not None and nodes_alike:
        solved = near_sources(solved, flows.sources, ground.shape)
    cap = request.balance or 1.02
    loads = by_layer(routing.loads, ground.shape.gpus)
    if limits.groups == 1:
        return less_traffic(
            flows,
            loads,
            solved,
            shape=ground.shape,
            levels=ground.levels,
            cap=cap,
            spread=limits.spread,
            workers=request.workers,
            near=request.replica_choice == "touched",
            time_limit_s=request.time_limit_s,
        )
    solved = less_grouped_traffic(
        flows,
        loads,
        solved,
        shape=ground.shape,
        limits=limits,
        effort=effort,
        levels=ground.levels,
        caps=layer_caps(solved.value, cap),
    )
    return (
        near_sources(solved, flows.sources, ground.shape)
        if flows.sources is not None and nodes_alike
        else solved
    )


def _scored(
    request: ExpertRequest,
    routing: Routing,
    *,
    flows: Flows,
    held_out: Routing | None,
    solved: Solved,
    current: Slots | None,
    ground: Ground,
    limits: PlacementLimits,
    start: float,
) -> ExpertPlan:
    share = gpu_share(routing.loads, solved.slots)
    rows = [
        layer_row(
            layer,
            routing,
            flows=flows,
            held_out=held_out,
            solved=solved,
            current=current,
            ground=ground,
            request=request,
        )
        for layer in range(len(share))
    ]
    balance = np.array([row["balance"] for row in rows])
    document: dict[str, Any] = {
        "layers": rows,
        "balance_mean": float(balance.mean()),
        "balance_max": float(balance.max()),
        "bound_mean": float(solved.bound.mean()),
        "gap_mean": float(solved.gap.mean()),
        "gap_max": float(solved.gap.max()),
        "duplicates": int(has_duplicates(solved.slots).sum()),
        "slots": ground.shape.slots,
        "gpus": ground.shape.gpus,
        "nodes": ground.shape.nodes,
        "groups": limits.groups,
        "windows": list(routing.windows),
        "robust": request.robust,
        "cvar_mean": float(_layer_cvar(routing.loads, solved.slots, request.cvar_share).mean()),
        "wall_s": time.monotonic() - start,
    }
    for key in (
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
    ):
        values = [row[key] for row in rows if row[key] is not None]
        document[f"{key}_mean"] = float(np.mean(values)) if values else None
    ids = layer_numbers(routing, ground) or tuple(range(len(rows)))
    sums = {key: document[key] for key in ("balance_mean", "balance_max", "bound_mean", "gap_max")}
    placed = PlacementFile(
        slots=solved.slots,
        experts=routing.loads.shape[2],
        nodes=ground.shape.nodes,
        layer_ids=ids,
        summary=sums,
    )
    warnings = []
    if request.groups is None and limits.groups == 1 and routing.groups > 1:
        warnings.append(
            f"the {routing.groups} routing groups of the loads are not kept whole: they do not divide over "
            f"{ground.shape.nodes} nodes"
        )
    if request.balance is not None and balance.mean() > request.balance * (1 + 1e-9):
        warnings.append(
            f"mean balance {balance.mean():.4f} is above --balance {request.balance:g}; the proven bounds "
            f"have the mean {solved.bound.mean():.4f}"
        )
    return ExpertPlan(placed=placed, document=document, gpu_share=share, warnings=tuple(warnings))


def layer_numbers(routing: Routing, ground: Ground) -> tuple[int, ...]:
    """The model's layer of each row: the file's, else those after the model's dense ones; () if not known."""
    ids = routing.layer_ids or tuple(
        range(ground.model.dense_layers, ground.model.layers) if ground.model else ()
    )
    return ids if len(ids) == routing.loads.shape[1] else ()


def _layer_cvar(loads: Loads, slots: Slots, share: float) -> Loads:
    """CVaR of the balance over the windows, [layers]."""
    each = [gpu_share(window[None], slots).max(axis=1) for window in loads]
    return cvar(np.stack(each, axis=1), share)
