"""`experts` from request to placement and figures: balance first, then traffic under the balance cap."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from meshwright.cluster_specs.allocation import allocated_gpus, expand_nodes, fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.documents import path_of
from meshwright.errors import InfeasibleError, InputError, near_miss
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.experts.inputs import (
    REPLICA_RULES,
    Flows,
    Level,
    blocks_per_token,
    cross_node_share,
    distinct,
    near_sources,
    read_flows,
    read_routing,
    slot_choices,
)
from meshwright.planner.experts.less_traffic import (
    Apart,
    layer_caps,
    less_grouped_traffic,
    less_traffic,
    replica_pairs,
)
from meshwright.planner.experts.packing import (
    SlotPacking,
    Solved,
    State,
    by_layer,
    greedy_placement,
    has_duplicates,
    in_order,
)
from meshwright.planner.experts.placements import (
    Moved,
    PlacementFile,
    count_moves,
    improve_from,
    read_placement,
)
from meshwright.planner.experts.problem import Loads, PlacementLimits, Slots, SlotShape, check_shape
from meshwright.planner.experts.recorders import Routing, affinity_of, token_loads
from meshwright.planner.experts.solve import PlacementEffort, place_layers
from meshwright.planner.solvers.clock import within


@dataclass(frozen=True, kw_only=True)
class ExpertRequest:
    """Everything that `experts` is asked; files are read later."""

    loads: Path
    cluster: str
    gpus: int | None = None
    slots: int | None = None
    groups: int | None = None
    spread: bool = False
    balance: float | None = None
    windows: tuple[str, ...] = ()
    split: int = 1
    hold_out: bool = False
    co_activation: Path | None = None
    current: Path | None = None
    max_moves: int | None = None
    model: str | None = None
    weight_bytes: float = 2.0
    tokens_per_gpu: int = 4096
    replica_choice: str = "turns"
    gap: float = 0.005
    time_limit_s: float = 30.0
    workers: int = 1
    seed: int = 0


def expert_request(given: Mapping[str, object]) -> ExpertRequest:
    """The request that a caller in Python makes, its values of the types that they must have.

    Parameters
    ----------
    given
        By name of the fields of `ExpertRequest`.

    Raises
    ------
    InputError
        A name is none of them, or a value is of another type.
    """
    names = [each.name for each in fields(ExpertRequest)]
    for name in given:
        if name not in names:
            near = near_miss(name, names)
            what = "is no option of place_experts"
            raise InputError(what, where=name, allowed=names, did_you_mean=near)
    for name in ("loads", "co_activation", "current"):
        if given.get(name) is not None or name == "loads":
            path_of(given.get(name), name)
    try:
        return TypeAdapter(ExpertRequest).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input ")
        raise InputError(what, where=where, value=first["input"]) from None


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where the experts go: the cluster, its levels above the GPU, the model if one is named."""

    cluster: ClusterSpec
    shape: SlotShape
    levels: tuple[Level, ...]
    domain_gpus: int
    """GPUs that exchange without the network: of a node, or of an NVLink domain of several nodes."""
    gb_per_s: float
    """Nominal network rate of one GPU, one direction."""
    model: ModelSpec | None


def read_ground(request: ExpertRequest, experts: int) -> Ground:
    """The cluster's GPUs and nodes, and as many slots as experts (rounded up to whole GPUs) unless asked.

    Parameters
    ----------
    request
        What is asked; InputError is raised where a figure of it is out of range.
    experts
        Of a layer.
    """
    for name, value, low, high in (
        ("balance", request.balance, 1.0, 1000.0),
        ("gap", request.gap, 0.0, 1.0),
        ("time-limit", request.time_limit_s, 0.01, 86_400.0),
        ("workers", request.workers, 1, 256),
        ("tokens-per-gpu", request.tokens_per_gpu, 1, 10**8),
        ("max-moves", request.max_moves, 0, 10**9),
        ("seed", request.seed, 0, 2**31 - 1),
        ("weight-bytes", request.weight_bytes, 0.0, 16.0),
    ):
        if value is not None and not low <= value <= high:
            raise InputError(f"{name}: must be from {low:g} to {high:g}, got {value:g}")
    if request.replica_choice not in REPLICA_RULES:
        raise InputError(
            f"replica-choice: must be one of {', '.join(REPLICA_RULES)}, got {request.replica_choice[:40]!r}"
        )
    cluster = read_cluster(request.cluster, request.gpus)
    gpus = allocated_gpus(cluster, request.gpus)
    used = {count for _, count in expand_nodes(cluster, gpus)}
    if len(used) > 1:
        raise InputError(
            f"gpus: {gpus} leave a node part-filled ({sorted(used)} GPUs); use whole nodes"
        )
    nodes = gpus // used.pop()
    slots = request.slots if request.slots is not None else -(-experts // gpus) * gpus
    shape = SlotShape(slots=slots, gpus=gpus, nodes=nodes)
    model = read_model(request.model) if request.model is not None else None
    if model is not None:
        _check_memory(model, cluster, shape, experts, request.weight_bytes)
    return Ground(
        cluster=cluster,
        shape=shape,
        levels=_levels(cluster, gpus, shape.node_gpus),
        domain_gpus=max(shape.node_gpus, min(cluster.nvlink_domain, gpus)),
        gb_per_s=cluster.nic_gbps_per_gpu / 8,
        model=model,
    )


def _levels(cluster: ClusterSpec, gpus: int, node_gpus: int) -> tuple[Level, ...]:
    """Nodes, then larger blocks of the fabric, weighted by how much slower their links are.

    Nodes of one NVLink domain reach each other over NVLink, at so much less than over the network.
    """
    fabric = fabric_levels(cluster, gpus)
    rates = fabric.gb_per_s
    weight = float(rates[1] / rates[0]) if len(rates) > 1 and node_gpus < fabric.blocks[0] else 1.0
    levels = [Level(name="node", gpus=node_gpus, weight=weight)]
    for name, block, rate in zip(
        fabric.names[1:], fabric.blocks[:-1].tolist(), rates[1:].tolist(), strict=True
    ):
        if block > levels[-1].gpus and block < gpus:
            levels.append(Level(name=name, gpus=block, weight=float(rates[1] / rate)))
    return tuple(levels)


def _check_memory(
    model: ModelSpec, cluster: ClusterSpec, shape: SlotShape, experts: int, weight_bytes: float
) -> None:
    """Raises InfeasibleError if the expert weights alone do not fit the GPU."""
    if model.moe is None:
        raise InputError(
            f"model: {model.name} has no experts; choose an MoE model or leave --model out"
        )
    if model.moe.experts != experts:
        raise InputError(
            f"model: {model.name} has {model.moe.experts} experts, the loads have {experts}"
        )
    matrices = 3 if model.gated else 2
    each = matrices * model.routed_width * model.moe.moe_ffn_hidden * weight_bytes
    layers = len(model.expert_layers)
    need_gib = each * shape.per_gpu * layers / 2**30
    if need_gib > cluster.device.hbm_gib:
        raise InfeasibleError(
            f"memory: {shape.per_gpu} experts a GPU in {layers} layers are {need_gib:.1f} GiB of "
            f"weights at {weight_bytes:g} bytes each, {cluster.device.name} has {cluster.device.hbm_gib:g} "
            "GiB; use more GPUs, fewer slots, or --weight-bytes 1"
        )


def limits_of(
    request: ExpertRequest, stated_groups: int, model: ModelSpec | None, nodes: int
) -> PlacementLimits:
    """--groups as asked; else the model's routing groups, else those that the loads file states.

    Groups that nobody asked for are kept whole only where they divide evenly over the nodes.

    Parameters
    ----------
    request
        With `groups` as asked, or None.
    stated_groups
        Routing groups that the file of the loads states, from 1.
    model
        Whose routing groups count before these; None where none is named.
    nodes
        That groups must divide over.
    """
    implied = _implied_groups(stated_groups, model)
    groups = request.groups if request.groups is not None else (1 if implied % nodes else implied)
    return PlacementLimits(groups=groups, spread=request.spread)


def _implied_groups(stated_groups: int, model: ModelSpec | None) -> int:
    by_model = model.moe.router_groups if model is not None and model.moe is not None else None
    return by_model or stated_groups


# What one call of `experts` works on: the request with all its files read and checked.


@dataclass(frozen=True, kw_only=True)
class PlacementCase:
    """The request and what its files hold."""

    request: ExpertRequest
    routing: Routing
    """What is placed for."""
    held_out: Routing | None
    """The half that is only scored."""
    unhalved: tuple[str, ...]
    """What the file records of both halves together, which is left out."""
    ground: Ground
    limits: PlacementLimits
    flows: Flows
    current: Slots | None
    """The placement in use, [layers, gpus, slots of a GPU]."""

    @property
    def start(self) -> Slots:
        """What moves are counted from: the placement in use, else the experts in order."""
        if self.current is not None:
            return self.current
        _, layers, experts = self.routing.loads.shape
        return in_order(layers, experts, self.ground.shape)


def read_case(request: ExpertRequest) -> PlacementCase:
    """Reads every file that the request names.

    Raises InputError, InfeasibleError, ClusterError or SpecError.
    """
    routing = read_routing(request.loads, windows=request.windows, split=request.split)
    held_out = None
    unhalved: tuple[str, ...] = ()
    if request.hold_out:
        whole = routing
        routing, held_out = _halves(whole)
        unhalved = tuple(
            words
            for name, words in _OF_BOTH_HALVES.items()
            if getattr(whole, name) is not None and getattr(routing, name) is None
        )
    _, layers, experts = routing.loads.shape
    ground = read_ground(request, experts)
    limits = limits_of(request, routing.groups, ground.model, ground.shape.nodes)
    check_shape(experts, ground.shape, limits)
    flows = read_flows(routing, request.co_activation, ground.shape)
    current = None
    if request.current is not None:
        current = read_placement(
            request.current,
            layers=layers,
            gpus=ground.shape.gpus,
            experts=experts,
            layer_ids=layer_numbers(routing, ground),
        )
    return PlacementCase(
        request=request,
        routing=routing,
        held_out=held_out,
        unhalved=unhalved,
        ground=ground,
        limits=limits,
        flows=flows,
        current=current,
    )


def layer_numbers(routing: Routing, ground: Ground) -> tuple[int, ...]:
    """The model's layer of each row: the file's, else those that have experts; () if not known.

    Parameters
    ----------
    routing
        The measured loads.
    ground
        The cluster, and the model where one was named.
    """
    numbers = routing.layer_ids
    if not numbers and ground.model is not None:
        numbers = ground.model.expert_layers
    return numbers if len(numbers) == routing.loads.shape[1] else ()


_OF_BOTH_HALVES = {
    "affinity": "where tokens come from",
    "co_activation": "pairs of experts",
}
"""Fields of `Routing` that a file may tell of all windows together only, in words."""


def _halves(routing: Routing) -> tuple[Routing, Routing]:
    """First and second half of a trace's tokens, or of the windows.

    What is recorded of all windows together only would tell the first half of the second: it is left out.
    """
    tokens = routing.tokens
    middle = (len(routing.loads) if tokens is None else tokens.shape[1]) // 2
    if not middle and tokens is not None:
        raise InputError("hold-out: a trace of one token cannot be halved")
    if not middle:
        raise InputError("hold-out: needs a token trace or several windows; cut steps with --split")
    halve = _half_of_windows if tokens is None else _half_of_tokens
    return halve(routing, slice(None, middle)), halve(routing, slice(middle, None))


def _half_of_tokens(routing: Routing, half: slice) -> Routing:
    assert routing.tokens is not None
    tokens = routing.tokens[:, half]
    experts = routing.loads.shape[2]
    affinity = routing.affinity
    ranks = None if routing.token_ranks is None else routing.token_ranks[half]
    if affinity is not None:
        number = affinity.shape[2]
        affinity = None if ranks is None else affinity_of(tokens, ranks, number, experts)
    return replace(
        routing,
        tokens=tokens,
        token_ranks=ranks,
        loads=token_loads(tokens, experts)[None],
        affinity=affinity,
        co_activation=None,
    )


def _half_of_windows(routing: Routing, half: slice) -> Routing:
    number = len(routing.loads)
    affinity, co_activation = (
        of_windows[half] if of_windows is not None and len(of_windows) == number else None
        for of_windows in (routing.affinity, routing.co_activation)
    )
    return replace(
        routing,
        loads=routing.loads[half],
        windows=routing.windows[half],
        affinity=affinity,
        co_activation=co_activation,
    )


# One dispatch of a layer's tokens: which GPUs exchange anything, what stays near, and who is waited for.


def exchange_row(case: PlacementCase, loads: Loads, slots: Slots) -> dict[str, Any]:
    """Figures of one dispatch of `tokens_per_gpu` tokens from every GPU of a layer.

    Parameters
    ----------
    case
        The request with its files; its model, where one is named, gives top-k and bytes.
    loads
        Tokens of each expert, [windows, experts]; the sum over the windows counts.
    slots
        Expert of each slot, [gpus, slots of a GPU].

    Returns
    -------
    dict
        `permutation_density`, and shares and seconds that need a model or several leaves, else None.
    """
    ground, request = case.ground, case.request
    # Chance of each GPU to be chosen, [gpus]: an expert's replicas take turns.
    total = loads.sum(axis=0)
    by_row = np.ascontiguousarray(total[None, None])
    gpu = SlotPacking(slots=slots[None], loads=by_row).gpu_loads()[0, 0]
    share = np.asarray(gpu / gpu.sum())
    choices = request.tokens_per_gpu * _top_k(case)
    leaf_gpus = ground.levels[1].gpus if len(ground.levels) > 1 else None
    row: dict[str, Any] = {
        "permutation_density": permutation_density(share, choices),
        "inside_node_share": inside_share(ground.shape.node_gpus, ground.shape.gpus),
        "inside_leaf_share": None,
        "even_all_to_all_s": None,
        "straggler_all_to_all_s": None,
    }
    if leaf_gpus is not None:
        row["inside_leaf_share"] = inside_share(leaf_gpus, ground.shape.gpus)
    if ground.model is not None:
        away = 1.0 - inside_share(ground.domain_gpus, ground.shape.gpus)
        received_bytes = choices * away * ground.model.routed_width * 2.0
        even_s = received_bytes / (ground.gb_per_s * 1e9)
        row["even_all_to_all_s"] = even_s
        row["straggler_all_to_all_s"] = even_s * float(share.max()) * ground.shape.gpus
    return row


def permutation_density(share: Loads, choices: int) -> float:
    """Share of the ordered pairs of GPUs that exchange at least one token in a dispatch.

    A source makes `choices` independent choices, each of GPU j by chance p_j: it sends j nothing by chance
    (1 - p_j)^choices. The mean over j is the share of pairs, a GPU with itself among them. Source: occupancy
    of cells, Feller, An Introduction to Probability Theory, volume 1, section IV.2.

    Parameters
    ----------
    share
        Chance of each GPU to be chosen, [gpus]; sums to 1.
    choices
        Experts that the tokens of one GPU choose in all, at least 1.

    Returns
    -------
    float
        From 0 to 1.
    """
    return float(np.mean(1.0 - (1.0 - share) ** choices))


def inside_share(block_gpus: int, gpus: int) -> float:
    """Share of the choices that stay in the source's block, where sources and experts are unrelated.

    Parameters
    ----------
    block_gpus, gpus
        GPUs of a node or leaf, and all of them.

    Returns
    -------
    float
        Above 0, at most 1.
    """
    return min(block_gpus / gpus, 1.0)


def _top_k(case: PlacementCase) -> int:
    """Experts of a token: the trace's, else the model's, else 1."""
    if case.routing.tokens is not None:
        return int(case.routing.tokens.shape[2])
    if case.ground.model is not None and case.ground.model.moe is not None:
        return case.ground.model.moe.top_k
    return 1


# Figures of a placement, layer by layer: balance, traffic, moves.


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
    "held_out_cross_node_share",
)
"""Figures of a layer that need a trace, pairs, source ranks, a model or a half held out."""


def gpu_share(loads: Loads, slots: Slots) -> Loads:
    """Load of every GPU over the mean, the worst window, [layers, gpus].

    Parameters
    ----------
    loads
        Tokens of each expert, [windows, layers, experts].
    slots
        Expert of each slot, [layers, gpus, slots of a GPU].
    """
    by_row = np.ascontiguousarray(np.swapaxes(loads, 0, 1))
    gpu = SlotPacking(slots=slots, loads=by_row).gpu_loads()
    return np.asarray((gpu / gpu.mean(axis=2, keepdims=True)).max(axis=1))


def layer_row(case: PlacementCase, layer: int, solved: Solved) -> dict[str, Any]:
    """The figures of one layer; None for what its files do not tell.

    Parameters
    ----------
    case
        The request with its files.
    layer
        Its number among those with experts.
    solved
        The placement of all layers.
    """
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
    if held_out.affinity is not None and case.flows.sources is not None:
        sources = held_out.affinity[:, layer].sum(axis=0)
        row["held_out_cross_node_share"] = cross_node_share(slots, sources, ground.shape.nodes)
    return row


def traffic_row(
    tokens: NDArray[np.int32], slots: Slots, experts: int, ground: Ground, request: ExpertRequest
) -> dict[str, Any]:
    """Blocks touched per token; bytes and time of one dispatch of `tokens_per_gpu` tokens from every GPU.

    A token's own node is among those that it touches by chance 1 / nodes. The slowest receiver ends the
    all-to-all, of which the network's part is told: nothing crosses it inside an NVLink domain, be that a
    node or several. Plain: every chosen expert is sent a copy, and the busiest GPU receives them over its
    NIC. Deduplicated (DeepEP's two levels): one copy to each domain, shared evenly by the busiest one's NICs.

    Parameters
    ----------
    tokens
        Experts that each token chose, [tokens, top-k].
    slots
        Of the layer, [gpus, slots of a GPU].
    experts
        Of a layer.
    ground
        The cluster, and the model if one is named, without which bytes are left out.
    request
        With tokens of a dispatch, and how a replica is chosen.
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
        total = request.tokens_per_gpu * shape.gpus
        width_bytes = ground.model.routed_width * 2
        between_nodes = (shape.nodes - 1) / shape.nodes
        row["cross_node_bytes"] = total * nodes * between_nodes * width_bytes
        gpu = choice[choice >= 0] // shape.per_gpu
        busiest = np.bincount(gpu, minlength=shape.gpus).max() / len(tokens)
        domain = choice // (shape.per_gpu * ground.domain_gpus)
        # The last domain may have fewer GPUs.
        sizes = np.diff([*range(0, shape.gpus, ground.domain_gpus), shape.gpus])
        away = float(np.sum(sizes * (shape.gpus - sizes))) / shape.gpus**2
        touched = max(float((domain == d).any(axis=1).mean() / n) for d, n in enumerate(sizes))
        for key, part in (("all_to_all_s", busiest), ("all_to_all_deduplicated_s", touched)):
            row[key] = float(part * total * away * width_bytes / (ground.gb_per_s * 1e9))
    return row


def near_gpus(request: ExpertRequest, ground: Ground) -> int | None:
    """What `slot_choices` is asked with: the GPUs of a node where tokens take replicas by `touched`.

    Parameters
    ----------
    request
        What is asked.
    ground
        The cluster that is placed on.
    """
    return ground.shape.node_gpus if request.replica_choice == "touched" else None


def pairs_apart(pairs: Loads, slots: Slots, node_gpus: int) -> float:
    """Share of the pairs of chosen experts [experts, experts] that lie on different nodes.

    Parameters
    ----------
    pairs
        How often two experts were chosen together, [experts, experts].
    slots
        Of the layer, [gpus, slots of a GPU].
    node_gpus
        GPUs of a node.
    """
    shared = replica_pairs(pairs, slots)
    node = np.arange(slots.size) // (slots.shape[1] * node_gpus)
    return Apart(shared, node, 2 / max(shared.sum(), 1e-300)).cost()


def node_balance(loads: Loads, slots: Slots, nodes: int) -> float:
    """Largest over mean node load, the worst window, for loads [windows, experts] of one layer.

    Parameters
    ----------
    loads
        Of one layer, [windows, experts].
    slots
        Of it, [gpus, slots of a GPU].
    nodes
        That GPUs are divided over.
    """
    counts = np.bincount(slots.ravel(), minlength=loads.shape[1])
    load = (loads / counts)[:, slots.ravel()].reshape(len(loads), nodes, -1).sum(axis=2)
    return float((load.max(axis=1) / load.mean(axis=1)).max())


def change_from(
    case: PlacementCase, current: Slots, document: dict[str, Any], moved: Moved | None
) -> dict[str, Any]:
    """What `from` tells: moves made, balance before, and the bound where moves were limited.

    Parameters
    ----------
    case
        The request with its files.
    current
        The placement in use, [layers, gpus, slots of a GPU].
    document
        With figures of the new one.
    moved
        How it came about, where moves were limited.
    """
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

    Parameters
    ----------
    case
        The request with its files.
    ours
        The new placement, [layers, gpus, slots of a GPU].
    ungrouped
        One that does not keep groups whole; None where there are no groups.
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
    "held_out_cross_node_share",
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

    Parameters
    ----------
    request
        What is asked.
    progress
        Called with a line; nobody hears it when None.
    """
    start = time.monotonic()
    first: dict[str, float] = {}

    def on_first(state: State) -> None:
        first["balance"] = float(state.value.mean())
        first["wall_s"] = time.monotonic() - start
        if progress is not None:
            bound = state.bound.mean()
            progress(f"first answer: balance {first['balance']:.4f}, bound {bound:.4f}")

    moved = None
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
        elif case.current is None:
            raise InputError("max-moves: needs the current placement; give it with --from FILE")
        else:
            moved = improve_from(
                case.routing.loads,
                case.current,
                case.ground.shape,
                request.max_moves,
                limits=case.limits,
                time_limit_s=request.time_limit_s,
            )
            solved = moved.solved
    plan = _scored(case, solved)
    document = plan.document
    ungrouped = _without_groups(case) if case.limits.groups > 1 else None
    document["compared"] = compared(case, solved.slots, ungrouped)
    document["wall_s"] = time.monotonic() - start
    document["first_answer"] = first or None
    document["from"] = None
    if case.current is not None:
        document["from"] = change_from(case, case.current, document, moved)
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


def _placed(case: PlacementCase, effort: PlacementEffort) -> Solved:
    """Balance first; then, where it is known which ways tokens take, less traffic under the cap."""
    request, flows, shape = case.request, case.flows, case.ground.shape
    lower_traffic = flows.known and case.ground.domain_gpus < shape.gpus
    # Under a cap the last permille of balance is given up for traffic anyway: no proof is needed first.
    first_effort = replace(effort, exact=not lower_traffic)
    solved = place_layers(case.routing.loads, shape, case.limits, first_effort)
    if not lower_traffic:
        return solved
    # Leaves are not alike to a token that touches several nodes: with a trace over leaves the order stays.
    nodes_alike = len(case.ground.levels) == 1 or not flows.by_token
    sources = flows.sources if nodes_alike else None
    if sources is not None:
        solved = near_sources(solved, sources, shape)
    loads, cap = by_layer(case.routing.loads, shape.gpus), request.balance or DEFAULT_CAP
    if case.limits.groups == 1:
        return less_traffic(
            flows,
            loads,
            solved,
            shape=shape,
            levels=case.ground.levels,
            cap=cap,
            spread=case.limits.spread,
            workers=request.workers,
            near=request.replica_choice == "touched",
            time_limit_s=request.time_limit_s,
        )
    solved = less_grouped_traffic(
        flows,
        loads,
        solved,
        shape=shape,
        limits=case.limits,
        effort=effort,
        levels=case.ground.levels,
        caps=layer_caps(solved.value, cap),
    )
    return solved if sources is None else near_sources(solved, sources, shape)


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
    request = case.request
    groups = _implied_groups(case.routing.groups, case.ground.model)
    warnings = []
    if request.groups is None and case.limits.groups == 1 and groups > 1:
        warnings.append(
            f"the {groups} routing groups are not kept whole: they do not divide over "
            f"{case.ground.shape.nodes} nodes"
        )
    if case.unhalved:
        words = " and ".join(case.unhalved)
        warnings.append(
            f"hold-out: {words} of both halves together would tell of the second: left out"
        )
    if request.balance is not None and balance > request.balance * (1 + 1e-9):
        warnings.append(
            f"mean balance {balance:.4f} is above --balance {request.balance:g}; the proven bounds "
            f"have the mean {bound:.4f}"
        )
    return tuple(warnings)
