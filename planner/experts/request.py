"""From what a user asks of `experts` to a problem: cluster, slots, limits, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from meshwright.cluster_specs.allocation import allocated_gpus, expand_nodes, fabric_levels
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.documents import path_of
from meshwright.errors import InfeasibleError, InputError, near_miss
from meshwright.model_specs.reader import read_model
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.experts.flows import REPLICA_RULES, Flows, Level, read_flows
from meshwright.planner.experts.inputs import read_routing
from meshwright.planner.experts.packing import in_order
from meshwright.planner.experts.placements import read_placement
from meshwright.planner.experts.problem import PlacementLimits, Slots, SlotShape, check_shape
from meshwright.planner.experts.recorders import Routing, token_loads


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
    known = [each.name for each in fields(ExpertRequest)]
    for name in given:
        if name not in known:
            near = near_miss(name, known)
            what = "is no option of place_experts"
            raise InputError(what, where=name, allowed=known, did_you_mean=near)
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
    gb_per_s: float
    """Nominal network rate of one GPU, one direction."""
    model: ModelSpec | None


def read_ground(request: ExpertRequest, experts: int) -> Ground:
    """The cluster's GPUs and nodes, and as many slots as experts (rounded up to whole GPUs) unless asked."""
    _check_options(request)
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
        gb_per_s=cluster.nic_gbps_per_gpu / 8,
        model=model,
    )


def _levels(cluster: ClusterSpec, gpus: int, node_gpus: int) -> tuple[Level, ...]:
    """Nodes, then larger blocks of the fabric, weighted by how much slower their links are."""
    fabric = fabric_levels(cluster, gpus)
    rates = fabric.gb_per_s
    levels = [Level(name="node", gpus=node_gpus, weight=1.0)]
    for name, block, rate in zip(
        fabric.names[1:], fabric.blocks[:-1].tolist(), rates[1:].tolist(), strict=True
    ):
        if block > levels[-1].gpus and block < gpus:
            levels.append(Level(name=name, gpus=block, weight=float(rates[1] / rate)))
    return tuple(levels)


def _check_options(request: ExpertRequest) -> None:
    """Raises InputError for an option outside its range."""
    for name, value, low, high in (
        ("balance", request.balance, 1.0, 1000.0),
        ("gap", request.gap, 0.0, 1.0),
        ("time-limit", request.time_limit_s, 0.01, 86_400.0),
        ("workers", request.workers, 1, 256),
        ("tokens-per-gpu", request.tokens_per_gpu, 1, 10**8),
        ("max-moves", request.max_moves, 0, 10**9),
    ):
        if value is not None and not low <= value <= high:
            raise InputError(f"{name}: must be from {low:g} to {high:g}, got {value:g}")
    if request.replica_choice not in REPLICA_RULES:
        raise InputError(
            f"replica-choice: must be one of {', '.join(REPLICA_RULES)}, got {request.replica_choice[:40]!r}"
        )


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
    each = matrices * model.hidden * model.moe.moe_ffn_hidden * weight_bytes
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
    """
    by_model = model.moe.router_groups if model is not None and model.moe is not None else None
    implied = by_model or stated_groups
    groups = request.groups if request.groups is not None else (1 if implied % nodes else implied)
    return PlacementLimits(groups=groups, spread=request.spread)


# What one call of `experts` works on: the request with all its files read and checked.


@dataclass(frozen=True, kw_only=True)
class PlacementCase:
    """The request and what its files hold."""

    request: ExpertRequest
    routing: Routing
    """What is placed for."""
    held_out: Routing | None
    """The half that is only scored."""
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
    if request.hold_out:
        routing, held_out = _halves(routing)
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
        ground=ground,
        limits=limits,
        flows=flows,
        current=current,
    )


def layer_numbers(routing: Routing, ground: Ground) -> tuple[int, ...]:
    """The model's layer of each row: the file's, else those that have experts; () if not known."""
    numbers = routing.layer_ids
    if not numbers and ground.model is not None:
        numbers = ground.model.expert_layers
    return numbers if len(numbers) == routing.loads.shape[1] else ()


def _halves(routing: Routing) -> tuple[Routing, Routing]:
    """First and second half of a trace's tokens, or of the windows."""
    tokens, experts = routing.tokens, routing.loads.shape[2]
    if tokens is not None:
        middle = tokens.shape[1] // 2
        if not middle:
            raise InputError("hold-out: a trace of one token cannot be halved")
        first, second = (
            replace(routing, tokens=half, loads=token_loads(half, experts)[None])
            for half in (tokens[:, :middle], tokens[:, middle:])
        )
        return first, second
    middle = len(routing.loads) // 2
    if not middle:
        raise InputError("hold-out: needs a token trace or several windows; cut steps with --split")
    return (
        replace(routing, loads=routing.loads[:middle], windows=routing.windows[:middle]),
        replace(routing, loads=routing.loads[middle:], windows=routing.windows[middle:]),
    )
