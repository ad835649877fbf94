"""What one call of `experts` works on: the request with all its files read and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.errors import InputError
from meshwright.planner.experts.balance.greedy import in_order
from meshwright.planner.experts.files.inputs import read_routing
from meshwright.planner.experts.files.placement_reader import read_placement
from meshwright.planner.experts.files.routing import Routing, token_loads
from meshwright.planner.experts.problem import PlacementLimits, Slots, check_shape
from meshwright.planner.experts.request import ExpertRequest, Ground, limits_of, read_ground
from meshwright.planner.experts.traffic.flows import Flows, read_flows


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
