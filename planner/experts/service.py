"""`experts` from request to placement and figures: balance first, then traffic under the balance cap."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.experts.affinity import check_affinity, cross_node_share, near_sources
from planner.experts.inputs import Routing, read_routing, token_loads
from planner.experts.less_traffic import less_traffic
from planner.experts.moves import improve_from
from planner.experts.packing import Packing, has_duplicates
from planner.experts.place import place
from planner.experts.problem import ExpertError, Limits, Loads, Shape, Slots, check_shape
from planner.experts.request import ExpertRequest, Ground, ground, limits_of
from planner.experts.robust import cvar, drift_row, place_robustly
from planner.experts.rows import Solved, State, by_layer
from planner.experts.solve import Effort
from planner.experts.traffic import blocks_per_token, slot_choices
from planner.experts.writers import Placed, read_placement

_PAIRS = 16_384


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """The placement, its figures by layer, and their sums."""

    placed: Placed
    document: dict[str, Any]
    gpu_share: Loads
    """Load of every GPU over the mean, the worst window, [layers, gpus]."""
    warnings: tuple[str, ...]


def plan_experts(request: ExpertRequest, progress: Callable[[str], None] | None = None) -> ExpertPlan:
    """Reads, places, scores; `progress` hears the first answer before it is bettered.

    Raises ExpertError, NoPlacementError, ClusterError or SpecError.
    """
    start = time.monotonic()
    first: dict[str, float] = {}

    def on_first(state: State) -> None:
        first["balance"], first["wall_s"] = float(state.value.mean()), time.monotonic() - start
        if progress is not None:
            progress(f"first answer: balance {first['balance']:.4f}, bound {state.bound.mean():.4f}")

    routing = read_routing(request.loads, windows=request.windows, split=request.split)
    held_out = None
    if request.hold_out:
        routing, held_out = _halves(routing)
    _, layers, experts = routing.loads.shape
    place_at = ground(request, experts)
    limits = limits_of(request, routing.groups, place_at.model, place_at.shape.nodes)
    check_shape(experts, place_at.shape, limits)
    effort = Effort(
        gap=request.gap,
        time_limit_s=request.time_limit_s,
        seed=request.seed,
        workers=request.workers,
        on_first=on_first,
    )
    current = None
    if request.current is not None:
        current = read_placement(request.current, layers=layers, gpus=place_at.shape.gpus, experts=experts)
    if request.max_moves is not None:
        if current is None:
            raise ExpertError("max-moves: needs the current placement; give it with --from FILE")
        solved = improve_from(routing.loads, current, place_at.shape, request.max_moves)
    else:
        tokens = _trace(request, routing, experts)
        lower = tokens is not None and place_at.shape.nodes > 1 and limits.groups == 1
        # Under a cap the last permille of balance is given up for traffic anyway: no proof is needed first.
        effort = replace(effort, exact=not lower)
        solved = place_robustly(
            routing.loads,
            place_at.shape,
            limits,
            effort,
            objective=request.robust,
            share=request.cvar_share,
        )
        if lower and tokens is not None:
            solved = less_traffic(
                tokens,
                by_layer(routing.loads, place_at.shape.gpus),
                solved,
                shape=place_at.shape,
                levels=place_at.levels,
                cap=request.balance or 1.02,
                spread=limits.spread,
                workers=request.workers,
            )
    # Leaves are not alike to a token that touches several nodes: with a trace over leaves the order stays.
    if routing.affinity is not None:
        check_affinity(routing.affinity, layers, experts, place_at.shape)
        if request.max_moves is None and (len(place_at.levels) == 1 or routing.tokens is None):
            solved = near_sources(solved, routing.affinity, place_at.shape)
    found = _scored(
        request,
        routing,
        held_out=held_out,
        solved=solved,
        current=current,
        at=place_at,
        limits=limits,
        start=start,
    )
    found.document["first_answer"] = first or None
    found.document["drift"] = (
        drift(request, routing, solved.slots, place_at.shape, limits) if request.score_windows else None
    )
    return found


def drift(
    request: ExpertRequest, routing: Routing, slots: Slots, shape: Shape, limits: Limits
) -> list[dict[str, Any]]:
    """Balance on windows that were not placed on: of this placement, and of each window placed alone."""
    effort = Effort(gap=request.gap, time_limit_s=request.time_limit_s, exact=False, workers=request.workers)
    alone = [place(routing.loads[k : k + 1], shape, limits, effort).slots for k in range(len(routing.loads))]
    by_name = dict(zip(routing.windows, alone, strict=True))
    rows = []
    for name in request.score_windows:
        loads = read_routing(request.loads, windows=(name,)).loads
        if loads.shape[1:] != routing.loads.shape[1:]:
            raise ExpertError(f"score-window: {name} has another shape than the windows that are placed on")
        rows.append(drift_row(name, loads, slots, by_name))
    return rows


def _halves(routing: Routing) -> tuple[Routing, Routing]:
    """First and second half of a trace's tokens, or of the windows."""
    experts = routing.loads.shape[2]
    if routing.tokens is not None:
        middle = routing.tokens.shape[1] // 2
        if not middle:
            raise ExpertError("hold-out: a trace of one token cannot be halved")
        parts = (routing.tokens[:, :middle], routing.tokens[:, middle:])
        first, second = (replace(routing, tokens=p, loads=token_loads(p, experts)[None]) for p in parts)
        return first, second
    middle = len(routing.loads) // 2
    if not middle:
        raise ExpertError("hold-out: needs a token trace or several windows; cut steps with --split")
    return (
        replace(routing, loads=routing.loads[:middle], windows=routing.windows[:middle]),
        replace(routing, loads=routing.loads[middle:], windows=routing.windows[middle:]),
    )


def _trace(request: ExpertRequest, routing: Routing, experts: int) -> NDArray[np.int32] | None:
    """The tokens to lower traffic for: the trace, or pairs drawn evenly from a co-activation matrix."""
    source = routing
    if request.co_activation is not None:
        source = read_routing(request.co_activation)
    if source.tokens is not None:
        tokens, layers = source.tokens, routing.loads.shape[1]
        if len(tokens) != layers or tokens.max() >= experts:
            raise ExpertError(f"co-activation: must have {layers} layers of {experts} experts")
        return tokens
    together = source.co_activation
    if (
        together is None
        and request.co_activation is not None
        and source.loads.shape[1:] == (experts, experts)
    ):
        together = source.loads
    if together is None:
        return None
    if together.shape != (routing.loads.shape[1], experts, experts):
        raise ExpertError(
            f"co-activation: must have the shape [layers, experts, experts], got {list(together.shape)}"
        )
    out = []
    for layer in together:
        upper = np.triu(np.maximum(layer, 0), 1).ravel()
        marks = (np.arange(_PAIRS) + 0.5) / _PAIRS * upper.sum()
        out.append(np.stack(np.divmod(np.searchsorted(np.cumsum(upper), marks), experts), axis=1))
    return np.asarray(np.minimum(np.stack(out), experts - 1), dtype=np.int32)


def _scored(
    request: ExpertRequest,
    routing: Routing,
    *,
    held_out: Routing | None,
    solved: Solved,
    current: Slots | None,
    at: Ground,
    limits: Limits,
    start: float,
) -> ExpertPlan:
    share = gpu_share(routing.loads, solved.slots)
    rows = [
        _layer_row(layer, routing, held_out=held_out, solved=solved, current=current, at=at, request=request)
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
        "slots": at.shape.slots,
        "gpus": at.shape.gpus,
        "nodes": at.shape.nodes,
        "groups": limits.groups,
        "windows": list(routing.windows),
        "robust": request.robust,
        "cvar_mean": float(_layer_cvar(routing.loads, solved.slots, request.cvar_share).mean()),
        "wall_s": time.monotonic() - start,
    }
    for key in (
        "nodes_per_token",
        "node_balance",
        "cross_node_share",
        "held_out_balance",
        "held_out_node_balance",
        "held_out_nodes_per_token",
    ):
        known = [row[key] for row in rows if row[key] is not None]
        document[f"{key}_mean"] = float(np.mean(known)) if known else None
    ids = routing.layer_ids or tuple(range(at.model.dense_layers, at.model.layers) if at.model else ())
    if len(ids) != len(rows):
        ids = tuple(range(len(rows)))
    sums = {key: document[key] for key in ("balance_mean", "balance_max", "bound_mean", "gap_max")}
    placed = Placed(
        slots=solved.slots, experts=routing.loads.shape[2], nodes=at.shape.nodes, layer_ids=ids, summary=sums
    )
    warnings = []
    if request.groups is None and limits.groups == 1 and routing.groups > 1:
        warnings.append(
            f"the {routing.groups} routing groups of the loads are not kept whole: they do not divide over "
            f"{at.shape.nodes} nodes"
        )
    if request.balance is not None and balance.mean() > request.balance * (1 + 1e-9):
        warnings.append(
            f"mean balance {balance.mean():.4f} is above --balance {request.balance:g}; the proven bounds "
            f"have the mean {solved.bound.mean():.4f}"
        )
    return ExpertPlan(placed=placed, document=document, gpu_share=share, warnings=tuple(warnings))


def gpu_share(loads: Loads, slots: Slots) -> Loads:
    """Load of every GPU over the mean, the worst window, [layers, gpus]."""
    by_row = np.ascontiguousarray(np.swapaxes(loads, 0, 1))
    gpu = Packing(slots=slots, loads=by_row).gpu_loads()
    return np.asarray((gpu / gpu.mean(axis=2, keepdims=True)).max(axis=1))


def _layer_cvar(loads: Loads, slots: Slots, share: float) -> Loads:
    """CVaR of the balance over the windows, [layers]."""
    each = [gpu_share(window[None], slots).max(axis=1) for window in loads]
    return cvar(np.stack(each, axis=1), share)


def _layer_row(
    layer: int,
    routing: Routing,
    *,
    held_out: Routing | None,
    solved: Solved,
    current: Slots | None,
    at: Ground,
    request: ExpertRequest,
) -> dict[str, Any]:
    slots = solved.slots[layer]
    experts = routing.loads.shape[2]
    row: dict[str, Any] = {
        "balance": float(gpu_share(routing.loads[:, layer : layer + 1], slots[None]).max()),
        "bound": float(solved.bound[layer]),
        "gap": float(solved.gap[layer]),
        "node_balance": node_balance(routing.loads[:, layer], slots, at.shape.nodes),
        "held_out_node_balance": None,
        "nodes_per_token": None,
        "leaves_per_token": None,
        "cross_node_share": None,
        "cross_node_bytes": None,
        "all_to_all_s": None,
        "held_out_balance": None,
        "held_out_nodes_per_token": None,
        "permutation_density": float((slots.ravel() != np.arange(slots.size) % experts).mean()),
        "duplicates": int(has_duplicates(slots[None]).sum()),
        "moves": None if current is None else moves_between(current[layer], slots),
    }
    if routing.affinity is not None:
        row["cross_node_share"] = cross_node_share(slots, routing.affinity[layer], at.shape.nodes)
    if routing.tokens is not None:
        row.update(_traffic_row(routing.tokens[layer], slots, experts, at, request))
    if held_out is not None:
        row["held_out_balance"] = float(gpu_share(held_out.loads[:, layer : layer + 1], slots[None]).max())
        row["held_out_node_balance"] = node_balance(held_out.loads[:, layer], slots, at.shape.nodes)
        if held_out.tokens is not None:
            row["held_out_nodes_per_token"] = blocks_per_token(
                held_out.tokens[layer], slots, experts, at.shape.node_gpus
            )
    return row


def _traffic_row(
    tokens: NDArray[np.int32], slots: Slots, experts: int, at: Ground, request: ExpertRequest
) -> dict[str, Any]:
    """Blocks touched per token; bytes and time of one dispatch of `tokens_per_gpu` tokens from every GPU.

    One copy goes to each node that a token touches, its own among them by chance 1 / nodes. The slowest
    receiver ends the all-to-all: copies that arrive at the busiest GPU from other nodes, over its NIC's rate.
    """
    shape = at.shape
    nodes = blocks_per_token(tokens, slots, experts, shape.node_gpus)
    row: dict[str, Any] = {"nodes_per_token": nodes}
    if len(at.levels) > 1:
        row["leaves_per_token"] = blocks_per_token(tokens, slots, experts, at.levels[1].gpus)
    if at.model is not None:
        away = (shape.nodes - 1) / shape.nodes
        total = request.tokens_per_gpu * shape.gpus
        width_bytes = at.model.hidden * 2
        row["cross_node_bytes"] = total * nodes * away * width_bytes
        gpu = slot_choices(tokens, slots, experts) // shape.per_gpu
        gpu = gpu[gpu >= 0]
        busiest = np.bincount(gpu, minlength=shape.gpus).max() / len(tokens)
        row["all_to_all_s"] = float(busiest * total * away * width_bytes / (at.gb_per_s * 1e9))
    return row


def node_balance(loads: Loads, slots: Slots, nodes: int) -> float:
    """Largest over mean node load, the worst window, for loads [windows, experts] of one layer."""
    counts = np.bincount(slots.ravel(), minlength=loads.shape[1])
    load = (loads / counts)[:, slots.ravel()].reshape(len(loads), nodes, -1).sum(axis=2)
    return float((load.max(axis=1) / load.mean(axis=1)).max())


def moves_between(before: Slots, after: Slots) -> int:
    """(expert, GPU) pairs of `after` that `before` does not hold; slots [gpus, slots of a GPU]."""
    return sum(len(set(new.tolist()) - set(old.tolist())) for old, new in zip(before, after, strict=True))
