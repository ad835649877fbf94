"""Where experts go, as part of the planner's CP-SAT model: a layout is chosen together with a placement.

A price assumes an imbalance: the largest rank load over the mean, mean over layers. For each expert-parallel
degree e that is a choice, with loads in units of a rank's mean load of the layer:

    every expert on one rank of its group       sum_r on_{e,l,x,r} = 1
    as many on every rank                       sum_x on_{e,l,x,r} = experts / e
    the busiest rank of a layer                 sum_x load_{l,x} on_{e,l,x,r} <= top_{e,l}
    no more than the price assumes              sum_l top_{e,l} <= cap layers        where it is chosen
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.planner.experts.problem import Loads, Slots

if TYPE_CHECKING:
    from meshwright.planner.solvers.or_tools import cp_model

UNIT = 10**6
"""Of a rank's mean load: loads are rounded down to whole units, caps up."""
LARGEST_PLACEMENT = 4_000
"""Booleans (layer, expert, rank) of all degrees in one model."""


@dataclass(frozen=True, kw_only=True)
class AssumedImbalance:
    """An imbalance that a price assumes, at one expert-parallel degree."""

    ep: int
    imbalance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class JointRouting:
    """Loads [layers, experts], and a placement of each degree to begin from, [layers, ranks, experts]."""

    loads: Loads
    placements: Mapping[int, Slots]

    def fits(self, degrees: set[int]) -> bool:
        """Whether one model holds the placements of these degrees, each of them known."""
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
        """Experts of each rank, [layers, ranks, experts of a rank]."""
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
    """Ties every choice to a placement with the imbalance that its price assumes."""
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
