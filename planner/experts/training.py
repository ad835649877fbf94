"""Measured expert loads inside `plan`: what they make of each expert-parallel degree.

In training every expert lies on one rank of its expert-parallel group, and the slowest rank ends the layer.
Frameworks deal experts out in their own order, and that is what layouts are priced with unless a placement is
allowed.
A placement depends on the degree alone, so it is a sub-problem with a price: the balance, mean over layers,
which multiplies the slowest rank's expert compute and what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.errors import InputError
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.experts.inputs import Flows, Level, distinct, read_routing, slot_choices
from meshwright.planner.experts.less_traffic import less_traffic
from meshwright.planner.experts.packing import SlotPacking, Solved, by_layer
from meshwright.planner.experts.problem import Loads, PlacementLimits, Slots, SlotShape
from meshwright.planner.experts.solve import PlacementEffort, place_layers
from meshwright.planner.solvers.clock import Shares, limit_left_s, within

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model


# Where experts go, as part of the planner's CP-SAT model: a layout is chosen together with a placement.
#
# A price assumes an imbalance: the largest rank load over the mean, mean over layers. For each
# expert-parallel degree e that is a choice, with loads in units of a rank's mean load of the layer:
#
#     every expert on one rank of its group       sum_r on_{e,l,x,r} = 1
#     as many on every rank                       sum_x on_{e,l,x,r} = experts / e
#     the busiest rank of a layer                 sum_x load_{l,x} on_{e,l,x,r} <= top_{e,l}
#     no more than the price assumes              sum_l top_{e,l} <= cap layers        where it is chosen


UNIT = 10**6
"""Of a rank's mean load: loads are rounded down to whole units, caps up."""
LARGEST_PLACEMENT = 4_000
"""Booleans (layer, expert, rank) of all degrees in one model."""


@dataclass(frozen=True)
class AssumedImbalance:
    """An imbalance that a price assumes, at one expert-parallel degree."""

    ep: int
    imbalance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class JointRouting:
    """Loads [layers, experts], and a placement of each degree to begin from, [layers, ranks, experts]."""

    loads: Loads
    placements: Mapping[int, Slots]

    def fits(self, asked: Iterable[AssumedImbalance | None]) -> bool:
        """Whether one model holds the placements of what is asked for, each of them known.

        Parameters
        ----------
        asked
            What the prices behind some choices assume; None where one assumes nothing.
        """
        degrees = {each.ep for each in asked if each is not None}
        return (
            degrees <= set(self.placements) and self.loads.size * sum(degrees) <= LARGEST_PLACEMENT
        )


Boxes = list[list[list["cp_model.IntVar"]]]
"""on[layer][expert][rank]"""


@dataclass(frozen=True, kw_only=True)
class PlacementVariables:
    """The variables of every degree."""

    on: dict[int, Boxes]

    def slots(self, ep: int, value: Callable[[Any], int]) -> Slots:
        """Experts of each rank, [layers, ranks, experts of a rank].

        Parameters
        ----------
        ep
            A degree that `on` has.
        value
            Of a literal in a solution, 0 or 1.
        """
        return np.array(
            [
                [[x for x, ranks in enumerate(layer) if value(ranks[rank])] for rank in range(ep)]
                for layer in self.on[ep]
            ],
            dtype=np.int64,
        )


def post_placements(
    model: cp_model.CpModel,
    choices: Sequence[Sequence[Any]],
    assumptions: Sequence[Sequence[AssumedImbalance | None]],
    routing: JointRouting,
) -> PlacementVariables:
    """Ties every choice to a placement with the imbalance that its price assumes.

    Parameters
    ----------
    model
        Gets variables and constraints.
    choices
        Literals of each choice.
    assumptions
        What the price behind each literal assumes; None where it assumes nothing.
    routing
        Loads, and placements to begin from.
    """
    literals_of: dict[AssumedImbalance, list[Any]] = {}
    for literals, assumed in zip(choices, assumptions, strict=True):
        for literal, assumption in zip(literals, assumed, strict=True):
            if assumption is not None:
                literals_of.setdefault(assumption, []).append(literal)
    on: dict[int, Boxes] = {}
    tops: dict[int, list[cp_model.IntVar]] = {}
    for ep in sorted({assumption.ep for assumption in literals_of}):
        on[ep], tops[ep] = _boxes(model, routing, ep)
    for assumption, literals in literals_of.items():
        chosen = model.new_bool_var("")
        model.add(sum(literals) == chosen)
        cap = int(np.ceil(assumption.imbalance * len(routing.loads) * UNIT))
        model.add(sum(tops[assumption.ep]) <= cap).only_enforce_if(chosen)
    return PlacementVariables(on=on)


def _boxes(
    model: cp_model.CpModel, routing: JointRouting, ep: int
) -> tuple[Boxes, list[cp_model.IntVar]]:
    layers, experts = routing.loads.shape
    weights = np.floor(routing.loads * ep / routing.loads.sum(axis=1, keepdims=True) * UNIT).astype(
        np.int64
    )
    on: Boxes = []
    tops = []
    for layer in range(layers):
        on_rank = [[model.new_bool_var("") for _ in range(ep)] for _ in range(experts)]
        top = model.new_int_var(0, ep * UNIT, "")
        for ranks in on_rank:
            model.add_exactly_one(ranks)
        for rank in range(ep):
            of_rank = [ranks[rank] for ranks in on_rank]
            model.add(sum(of_rank) == experts // ep)
            model.add(sum(int(w) * x for w, x in zip(weights[layer], of_rank, strict=True)) <= top)
        if ep in routing.placements:
            rank_of = {
                int(x): rank for rank, row in enumerate(routing.placements[ep][layer]) for x in row
            }
            for expert, ranks in enumerate(on_rank):
                for rank, literal in enumerate(ranks):
                    model.add_hint(literal, rank_of[expert] == rank)
        on.append(on_rank)
        tops.append(top)
    return on, tops


MOST_SECONDS = 10.0
PLACING_SHARE = 0.3
"""Part of a time limit that placing the experts of all degrees may take."""
_TRAFFIC_SECONDS = 2.5
"""For all degrees together, as work of 2 cores."""
_MOST_TOKENS = 1024
"""Tokens that the search looks at; all of them are counted."""
_GIVEN_UP = 0.005
"""Mean balance that is given up for fewer blocks."""
EXACT_EXPERTS = 16
"""Up to here placements are solved to proof."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DegreePlacement:
    """The placement for one expert-parallel degree."""

    ep: int
    slots: Slots
    """Experts of each rank, [layers, ranks, experts of a rank]."""
    balance: Loads
    """Largest over mean rank load, [layers]."""
    bound: Loads
    """No placement is below it, [layers]."""

    copies: tuple[tuple[int, float], ...] = ()
    """With a trace: equal blocks of the ranks, and how many of them a token touches, mean of layers."""
    by_load: Slots | None = None
    """The slots before experts were exchanged for fewer blocks; None where none were."""

    @property
    def imbalance(self) -> float:
        """Mean balance over the layers: layers run one after the other."""
        return float(self.balance.mean())

    def document(self) -> dict[str, Any]:
        """The plan document's `expert_placement`."""
        return {
            "expert_model_parallel_size": self.ep,
            "imbalance": self.imbalance,
            "lower_bound": float(self.bound.mean()),
            "blocks_per_token": [{"blocks": n, "touched": touched} for n, touched in self.copies],
            "layers": [
                {"balance": float(b), "bound": float(low)}
                for b, low in zip(self.balance, self.bound, strict=True)
            ],
            "physical_to_logical_map": self.slots.reshape(len(self.slots), -1).tolist(),
        }


@dataclass(frozen=True, kw_only=True)
class MeasuredOrder:
    """What the loads and the trace say of one order of the experts."""

    imbalance: float
    """Mean over the layers of the largest over the mean rank load, at least 1."""
    copies: tuple[tuple[int, float], ...]
    """With a trace: equal blocks of the ranks, and how many of them a token touches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoads:
    """Placements for every degree that a layout may have."""

    placements: tuple[DegreePlacement, ...]
    loads: Loads | None = None
    """[layers, experts] of small cases, whose placements stand in the planner's model too."""
    measured: Loads | None = None
    """[windows, layers, experts]."""
    flows: Flows = field(default_factory=Flows)

    def routing(self) -> JointRouting | None:
        """Loads and placements for the planner's model; None where the case is not small."""
        if self.loads is None:
            return None
        return JointRouting(loads=self.loads, placements={p.ep: p.slots for p in self.placements})

    @property
    def largest_gap(self) -> float:
        """Of all degrees, the most by which an imbalance exceeds the least possible one, relative."""
        return max(p.imbalance / max(float(p.bound.mean()), 1.0) - 1.0 for p in self.placements)

    def priced(
        self, *, placed: bool
    ) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, int, float], ...]]:
        """What the cost model takes of the loads.

        Parameters
        ----------
        placed
            Whether experts lie as placed; else in their own order, as frameworks deal them out.

        Returns
        -------
        by_ep
            Degree and imbalance.
        copies_by_ep
            Degree, blocks of its ranks, blocks that a token touches; empty without a trace.
        """
        orders = [
            (each.ep, self.as_placed(each.ep) if placed else self.in_order(each.ep))
            for each in self.placements
        ]
        return (
            tuple((ep, order.imbalance) for ep, order in orders),
            tuple((ep, *copies) for ep, order in orders for copies in order.copies),
        )

    def as_placed(self, ep: int) -> MeasuredOrder:
        """The experts of a degree as placed."""
        placed = next(each for each in self.placements if each.ep == ep)
        return MeasuredOrder(imbalance=max(placed.imbalance, 1.0), copies=placed.copies)

    def in_order(self, ep: int) -> MeasuredOrder:
        """The experts of a degree in their own order; as placed where no loads are known.

        Parameters
        ----------
        ep
            A degree of `placements`.
        """
        return self.other_orders(ep).get("in_order") or self.as_placed(ep)

    def document(self, ep: int) -> dict[str, Any] | None:
        """What the plan carries for the degree it chose; None where nothing is placed.

        Parameters
        ----------
        ep
            The expert-parallel degree of a plan, from 1.
        """
        return next((p.document() for p in self.placements if p.ep == ep and ep > 1), None)

    def other_orders(self, ep: int) -> Mapping[str, MeasuredOrder]:
        """The experts of a degree in their own order (`in_order`), and placed by their loads alone
        (`by_load`), whatever tokens they share; empty where no loads are known.

        Parameters
        ----------
        ep
            A degree of `placements`.
        """
        return self._other_orders[ep]

    @cached_property
    def _other_orders(self) -> dict[int, dict[str, MeasuredOrder]]:
        """By degree; requests with the same loads ask again and again."""
        return {each.ep: self._orders_of(each) for each in self.placements}

    def _orders_of(self, placed: DegreePlacement) -> dict[str, MeasuredOrder]:
        if self.measured is None:
            return {}
        layers, ranks, _ = placed.slots.shape
        in_order = np.arange(self.measured.shape[2]).reshape(1, ranks, -1).repeat(layers, axis=0)
        alone = placed.slots if placed.by_load is None else placed.by_load
        rows = by_layer(self.measured, placed.ep)
        return {
            name: MeasuredOrder(
                imbalance=max(float(SlotPacking(slots=slots, loads=rows).balance().mean()), 1.0),
                copies=touched_blocks(self.flows, slots),
            )
            for name, slots in (("in_order", in_order), ("by_load", alone))
        }


def read_expert_loads(path: Path, model: ModelSpec, gpus: int) -> ExpertLoads:
    """Places the model's experts for every degree. Raises InputError where the file is not the model's.

    Parameters
    ----------
    path
        As `read_routing` takes it.
    model
        With experts.
    gpus
        No degree is larger.
    """
    if model.moe is None:
        raise InputError(f"expert-loads: {model.name} has no experts; leave --expert-loads out")
    routing = read_routing(path)
    loads = routing.loads
    _, layers, experts = loads.shape
    moe_layers = len(model.expert_layers)
    if (layers, experts) != (moe_layers, model.moe.experts):
        raise InputError(
            f"{path}: loads of {layers} layers x {experts} experts; {model.name} has {moe_layers} MoE "
            f"layers x {model.moe.experts} experts"
        )
    degrees = [ep for ep in range(1, min(experts, gpus) + 1) if experts % ep == 0]
    limit_s = _TRAFFIC_SECONDS / len(degrees)
    small = loads.shape[2] <= EXACT_EXPERTS
    effort = PlacementEffort(gap=0.0, time_limit_s=MOST_SECONDS) if small else None
    flows = Flows(tokens=routing.tokens)
    placed = []
    given_s = limit_left_s()
    with within(None if given_s is None else PLACING_SHARE * given_s):
        shares = Shares(len(degrees))
        for ep in degrees:
            with within(shares.next_s()):
                degree = place_degree(loads, ep, effort)
                placed.append(less_copies(flows, loads, degree, time_limit_s=limit_s))
    alone = small and len(loads) == 1 and routing.tokens is None
    return ExpertLoads(
        placements=tuple(placed), loads=loads[0] if alone else None, measured=loads, flows=flows
    )


def place_degree(loads: Loads, ep: int, effort: PlacementEffort | None = None) -> DegreePlacement:
    """Every expert once, evenly on `ep` ranks, for loads [windows, layers, experts].

    Parameters
    ----------
    loads
        [windows, layers, experts].
    ep
        Ranks of an expert-parallel group, which divides the experts.
    effort
        How far to go; no further than `MOST_SECONDS` of search without CP-SAT when None.
    """
    shape = SlotShape(slots=loads.shape[2], gpus=ep, nodes=1)
    solved = place_layers(
        loads,
        shape,
        PlacementLimits(),
        effort or PlacementEffort(exact=False, time_limit_s=MOST_SECONDS),
    )
    return DegreePlacement(ep=ep, slots=solved.slots, balance=solved.value, bound=solved.bound)


def less_copies(
    flows: Flows, loads: Loads, degree: DegreePlacement, *, time_limit_s: float
) -> DegreePlacement:
    """The placement with experts exchanged so that tokens touch fewer blocks of ranks, and what they touch.

    Which ranks share a node is the layout's choice, so ranks, small and large blocks of them count alike.
    The mean balance rises by at most `_GIVEN_UP`.

    Parameters
    ----------
    flows
        Ways of the tokens, of all layers.
    loads
        [windows, layers, experts].
    degree
        The placement of a degree to begin from.
    time_limit_s
        Of the search.
    """
    sizes = [size for size in range(1, degree.ep + 1) if degree.ep % size == 0]
    if flows.tokens is None:
        return degree
    experts = loads.shape[2]
    slots, balance, bound = degree.slots, degree.balance, degree.bound
    if degree.ep > 1:
        few = [sizes[i] for i in sorted({0, (len(sizes) - 1) // 2, len(sizes) - 2})]
        solved = less_traffic(
            Flows(tokens=flows.tokens[:, :: -(-flows.tokens.shape[1] // _MOST_TOKENS)]),
            by_layer(loads, degree.ep),
            Solved(slots=slots, value=balance, bound=bound),
            shape=SlotShape(slots=experts, gpus=degree.ep, nodes=1),
            levels=tuple(Level(name=f"{size} ranks", gpus=size, weight=1.0) for size in few),
            cap=degree.imbalance + _GIVEN_UP,
            spread=False,
            workers=1,
            time_limit_s=time_limit_s,
        )
        slots, balance, bound = solved.slots, solved.value, solved.bound
    copies = touched_blocks(flows, slots)
    return replace(
        degree, slots=slots, balance=balance, bound=bound, copies=copies, by_load=degree.slots
    )


def touched_blocks(flows: Flows, slots: Slots) -> tuple[tuple[int, float], ...]:
    """For every number of equal blocks of the ranks, how many a token touches, mean of layers.

    Parameters
    ----------
    flows
        With a token trace.
    slots
        Experts of each rank, [layers, ranks, experts of a rank].

    Returns
    -------
    tuple of (blocks, touched)
        The fewest blocks first; empty without a trace.
    """
    if flows.tokens is None:
        return ()
    _, ranks, each = slots.shape
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    touched = np.zeros(len(sizes))
    for layer, layer_slots in zip(flows.tokens, slots, strict=True):
        choice = slot_choices(layer, layer_slots, ranks * each)
        touched += [distinct(choice // (size * each)).mean() for size in sizes]
    means = touched / len(flows.tokens)
    pairs = [(ranks // size, float(mean)) for size, mean in zip(sizes, means, strict=True)]
    return tuple(sorted(pairs))
