"""Figures of a placement, layer by layer: balance, traffic, moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.experts.balance.greedy import greedy_placement
from meshwright.planner.experts.balance.packing import SlotPacking, has_duplicates
from meshwright.planner.experts.balance.rows import Solved
from meshwright.planner.experts.case import PlacementCase
from meshwright.planner.experts.exchange import exchange_row
from meshwright.planner.experts.files.routing import Routing
from meshwright.planner.experts.moves.placement import Moved, count_moves
from meshwright.planner.experts.problem import Loads, Slots
from meshwright.planner.experts.request import ExpertRequest, Ground
from meshwright.planner.experts.traffic.affinity import cross_node_share
from meshwright.planner.experts.traffic.swap_terms import Apart, replica_pairs
from meshwright.planner.experts.traffic.touched import blocks_per_token, distinct, slot_choices

OPTIONAL_FIGURES = (
    "held_out_node_balance",
    "nodes_per_token",
    "leaves_per_token",
    "nodes_per_token_touched",
    "pairs_apart_share",
    "cross_node_share",
    "cross_node_bytes",
    "all_to_all_s",
    "all_to_all_deduplicated_s",
    "held_out_balance",
    "held_out_nodes_per_token",
)
"""Figures of a layer that need a trace, pairs, source ranks, a model or a half held out."""


def gpu_share(loads: Loads, slots: Slots) -> Loads:
    """Load of every GPU over the mean, the worst window, [layers, gpus]."""
    by_row = np.ascontiguousarray(np.swapaxes(loads, 0, 1))
    gpu = SlotPacking(slots=slots, loads=by_row).gpu_loads()
    return np.asarray((gpu / gpu.mean(axis=2, keepdims=True)).max(axis=1))


def layer_row(case: PlacementCase, layer: int, solved: Solved) -> dict[str, Any]:
    """The figures of one layer; None for what its files do not tell."""
    routing, ground, flows = case.routing, case.ground, case.flows
    slots = solved.slots[layer]
    experts = routing.loads.shape[2]
    moves = count_moves(case.start[layer], slots)
    row: dict[str, Any] = {
        "balance": float(gpu_share(routing.loads[:, layer : layer + 1], slots[None]).max()),
        "bound": float(solved.bound[layer]),
        "gap": float(solved.gap[layer]),
        "node_balance": node_balance(routing.loads[:, layer], slots, ground.shape.nodes),
        **dict.fromkeys(OPTIONAL_FIGURES),
        **exchange_row(case, routing.loads[:, layer], slots),
        "moved_share": moves / slots.size,
        "duplicates": int(has_duplicates(slots[None]).sum()),
        "moves": moves,
    }
    if flows.sources is not None:
        row["cross_node_share"] = cross_node_share(slots, flows.sources[layer], ground.shape.nodes)
    if flows.tokens is not None:
        row.update(traffic_row(flows.tokens[layer], slots, experts, ground, case.request))
    if flows.pairs is not None:
        row["pairs_apart_share"] = pairs_apart(flows.pairs[layer], slots, ground.shape.node_gpus)
    if case.held_out is not None:
        row.update(_held_out_row(case, case.held_out, layer, slots))
    return row


def _held_out_row(
    case: PlacementCase, held_out: Routing, layer: int, slots: Slots
) -> dict[str, float]:
    """The same of the half that was not placed for."""
    ground = case.ground
    loads = held_out.loads[:, layer : layer + 1]
    row = {
        "held_out_balance": float(gpu_share(loads, slots[None]).max()),
        "held_out_node_balance": node_balance(loads[:, 0], slots, ground.shape.nodes),
    }
    if held_out.tokens is not None:
        row["held_out_nodes_per_token"] = blocks_per_token(
            held_out.tokens[layer],
            slots,
            held_out.loads.shape[2],
            ground.shape.node_gpus,
            near_gpus(case.request, ground),
        )
    return row


def traffic_row(
    tokens: NDArray[np.int32], slots: Slots, experts: int, ground: Ground, request: ExpertRequest
) -> dict[str, Any]:
    """Blocks touched per token; bytes and time of one dispatch of `tokens_per_gpu` tokens from every GPU.

    A token's own node is among those that it touches by chance 1 / nodes. The slowest receiver ends the
    all-to-all. Plain: every chosen expert is sent a copy, and the busiest GPU receives them over its NIC.
    Deduplicated (DeepEP's two levels): one copy to each node, shared evenly by the NICs of the busiest node.
    """
    shape = ground.shape
    near = near_gpus(request, ground)
    choice = slot_choices(tokens, slots, experts, near)
    node = choice // shape.node_slots
    nodes = float(distinct(node).mean())
    row: dict[str, Any] = {"nodes_per_token": nodes}
    if shape.slots > experts:
        row["nodes_per_token_touched"] = blocks_per_token(
            tokens, slots, experts, shape.node_gpus, shape.node_gpus
        )
    if len(ground.levels) > 1:
        row["leaves_per_token"] = blocks_per_token(
            tokens, slots, experts, ground.levels[1].gpus, near
        )
    if ground.model is not None:
        away = (shape.nodes - 1) / shape.nodes
        total = request.tokens_per_gpu * shape.gpus
        width_bytes = ground.model.hidden * 2
        row["cross_node_bytes"] = total * nodes * away * width_bytes
        gpu = choice[choice >= 0] // shape.per_gpu
        busiest = np.bincount(gpu, minlength=shape.gpus).max() / len(tokens)
        touched = (
            max(float((node == n).any(axis=1).mean()) for n in range(shape.nodes)) / shape.node_gpus
        )
        for key, part in (("all_to_all_s", busiest), ("all_to_all_deduplicated_s", touched)):
            row[key] = float(part * total * away * width_bytes / (ground.gb_per_s * 1e9))
    return row


def near_gpus(request: ExpertRequest, ground: Ground) -> int | None:
    """What `slot_choices` is asked with: the GPUs of a node where tokens take replicas by `touched`."""
    return ground.shape.node_gpus if request.replica_choice == "touched" else None


def pairs_apart(pairs: Loads, slots: Slots, node_gpus: int) -> float:
    """Share of the pairs of chosen experts [experts, experts] that lie on different nodes."""
    shared = replica_pairs(pairs, slots)
    node = np.arange(slots.size) // (slots.shape[1] * node_gpus)
    return Apart(shared, node, 2 / max(shared.sum(), 1e-300)).cost()


def node_balance(loads: Loads, slots: Slots, nodes: int) -> float:
    """Largest over mean node load, the worst window, for loads [windows, experts] of one layer."""
    counts = np.bincount(slots.ravel(), minlength=loads.shape[1])
    load = (loads / counts)[:, slots.ravel()].reshape(len(loads), nodes, -1).sum(axis=2)
    return float((load.max(axis=1) / load.mean(axis=1)).max())


def change_from(
    case: PlacementCase, current: Slots, document: dict[str, Any], moved: Moved | None
) -> dict[str, Any]:
    """What `from` tells: moves made, balance before, and the bound where moves were limited."""
    before = gpu_share(case.routing.loads, current).max(axis=1)
    return {
        "moves": sum(row["moves"] for row in document["layers"]),
        "max_moves": case.request.max_moves,
        "balance_before_mean": float(before.mean()),
        "balance_before_max": float(before.max()),
        "balance_bound_mean": None if moved is None else moved.mean_bound,
        "optimal": None if moved is None else moved.optimal,
    }


def compared(case: PlacementCase, ours: Slots, ungrouped: Slots | None) -> list[dict[str, Any]]:
    """Balance and moves of what is there at the start, of the greedy balancer, and of this placement.

    With groups, `ungrouped` is a placement without them.
    """
    loads, shape, groups = case.routing.loads, case.ground.shape, case.limits.groups
    mean_loads = loads.mean(axis=0)
    greedy = np.stack([greedy_placement(load, shape, groups) for load in mean_loads])
    start = "in use" if case.current is not None else "experts in order"
    placements = [(start, case.start), ("greedy balancer", greedy), ("this placement", ours)]
    if ungrouped is not None:
        placements.append(("without groups", ungrouped))
    return [_compared_row(name, case, slots) for name, slots in placements]


def _compared_row(name: str, case: PlacementCase, slots: Slots) -> dict[str, Any]:
    balance = gpu_share(case.routing.loads, slots).max(axis=1)
    pairs = zip(case.start, slots, strict=True)
    return {
        "placement": name,
        "balance_mean": float(balance.mean()),
        "balance_max": float(balance.max()),
        "moves": sum(count_moves(before, after) for before, after in pairs),
        "duplicates": int(has_duplicates(slots).sum()),
    }
