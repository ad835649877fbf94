"""Measured expert loads inside `plan`: what the best placement makes of each expert-parallel degree.

In training every expert lies on one rank of its expert-parallel group, and the slowest rank ends the layer.
A placement depends on the degree alone, so it is a sub-problem with a price: the balance, mean over layers,
which multiplies the slowest rank's expert compute and what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_specs.schema import ModelSpec
from planner.experts.inputs import read_routing
from planner.experts.joint import Routing
from planner.experts.place import place
from planner.experts.problem import ExpertError, Limits, Loads, Shape, Slots
from planner.experts.solve import Effort

MOST_SECONDS = 10.0
PROVEN = 1e-6
"""Of the imbalance: the resolution of the exact models."""
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
            "layers": [
                {"balance": float(b), "bound": float(low)}
                for b, low in zip(self.balance, self.bound, strict=True)
            ],
            "physical_to_logical_map": self.slots.reshape(len(self.slots), -1).tolist(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoads:
    """Placements for every degree that a layout may have."""

    placements: tuple[DegreePlacement, ...]
    loads: Loads | None = None
    """[layers, experts] of small cases, whose placements stand in the planner's model too."""

    def routing(self) -> Routing | None:
        """Loads and placements for the planner's model; None where the case is not small."""
        if self.loads is None:
            return None
        return Routing(loads=self.loads, known={p.ep: p.slots for p in self.placements})

    def words(self) -> str:
        """What a plan's certificate says of the placements."""
        gap = max(p.imbalance / max(float(p.bound.mean()), 1.0) - 1.0 for p in self.placements)
        how = "the best placement of each degree"
        if gap > PROVEN:
            how = f"one placement of each degree, its imbalance at most {gap:.2g} above what is possible"
        return f"experts where measured loads want them ({how})"

    def by_ep(self) -> tuple[tuple[int, float], ...]:
        """Degree and imbalance, as the cost model takes them."""
        return tuple((p.ep, max(p.imbalance, 1.0)) for p in self.placements)

    def document(self, ep: int) -> dict[str, Any] | None:
        """What the plan carries for the degree it chose; None where nothing is placed."""
        return next((p.document() for p in self.placements if p.ep == ep and ep > 1), None)


def read_expert_loads(path: Path, model: ModelSpec, gpus: int) -> ExpertLoads:
    """Places the model's experts for every degree. Raises ExpertError where the file is not the model's."""
    if model.moe is None:
        raise ExpertError(f"expert-loads: {model.name} has no experts; leave --expert-loads out")
    loads = read_routing(path).loads
    _, layers, experts = loads.shape
    if (layers, experts) != (model.moe_layers, model.moe.experts):
        raise ExpertError(
            f"{path}: loads of {layers} layers x {experts} experts; {model.name} has {model.moe_layers} MoE "
            f"layers x {model.moe.experts} experts"
        )
    degrees = [ep for ep in range(1, min(experts, gpus) + 1) if experts % ep == 0]
    small = loads.shape[2] <= EXACT_EXPERTS
    effort = Effort(gap=0.0, time_limit_s=MOST_SECONDS) if small else None
    return ExpertLoads(
        placements=tuple(place_degree(loads, ep, effort) for ep in degrees),
        loads=loads[0] if small and len(loads) == 1 else None,
    )


def place_degree(loads: Loads, ep: int, effort: Effort | None = None) -> DegreePlacement:
    """Every expert once, evenly on `ep` ranks, for loads [windows, layers, experts]."""
    shape = Shape(slots=loads.shape[2], gpus=ep, nodes=1)
    solved = place(loads, shape, Limits(), effort or Effort(exact=False, time_limit_s=MOST_SECONDS))
    return DegreePlacement(ep=ep, slots=solved.slots, balance=solved.value, bound=solved.bound)
