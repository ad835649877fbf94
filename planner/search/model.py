"""The planning problem as one CP-SAT model.

    choose exactly one layout                      sum_i layout_i = 1
    and exactly one mapping of it                  sum_k mapping_{i,k} = layout_i
    whose slots find their leaves                  mapping_{i,k} => limits on n_{leaf,stage}
                                                   (irregular allocations: `mapping.joint`)
    whose experts find their ranks                 mapping_{i,k} => imbalance of on_{layer,expert,rank}
                                                   (measured loads: `experts.training`)
    so that the step is shortest                   min sum_{i,k} time_{i,k} mapping_{i,k}

One literal per layout and one per (layout, mapping) make every limit linear and its relaxation tight. The
times are integer nanoseconds: exact prices where they are known, bounds where not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.layout import Layout
from meshwright.costmodel.workload import Workload
from meshwright.errors import InternalError
from meshwright.planner.mapping.joint import Cells, Grid, post_mappings
from meshwright.planner.solvers.programmes import repeatable_solver

if TYPE_CHECKING:
    from meshwright.planner.experts.training import (
        AssumedImbalance,
        JointRouting,
        PlacementVariables,
    )
    from meshwright.planner.mapping.joint import Need
    from meshwright.planner.solvers.or_tools import cp_model

NANOSECONDS = 1_000_000_000
"""The objective's unit, in seconds: scaled here and nowhere else."""

LARGEST_TOTAL = 2**62
"""CP-SAT's objective is a 64-bit integer; the sum over all literals must fit."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Layouts to choose from, as the rules read them (`constraints.rule.LayoutTable`). Arrays have shape
    [n].
    """

    workload: Workload
    layouts: Layout
    memory_gib: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PlanModel:
    """The model and its literals."""

    model: cp_model.CpModel
    layouts: list[cp_model.IntVar]
    mappings: list[list[cp_model.IntVar]]
    mapped: dict[Grid, Cells]
    """The counts of slots on leaves, by grid."""
    placed: PlacementVariables | None = None


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the solver chose, and how well that is known. `status` is optimal, feasible, infeasible or
    unknown.
    """

    status: str
    layout: int = -1
    mapping: int = -1
    bound_ns: int | None = None
    value: Callable[[Any], int] | None = None
    """Of any expression of the model."""


Needs = Sequence[Sequence["Need | None"]]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Measured loads, and the imbalance that each mapping's time assumes."""

    routing: JointRouting
    asked: Sequence[Sequence[AssumedImbalance | None]]


def build_model(
    time_ns: Sequence[NDArray[np.int64]],
    needs: Needs | None = None,
    experts: Experts | None = None,
) -> PlanModel:
    """The whole problem. `time_ns[i][k]` is the time of layout i under its mapping k, `needs[i][k]` what it
    asks of the slots of an irregular allocation, `experts.asked[i][k]` what of a placement of experts; None,
    or no `needs` and `experts`, where it asks nothing.

    Raises OverflowError if the times do not fit the solver's integers.

    Parameters
    ----------
    time_ns
        Nanoseconds of a step: a price, or a bound of one; shape [mappings] for each layout.
    needs
        What mappings ask of slots, [layouts][mappings].
    experts
        Measured loads with what each mapping assumes of them.

    Returns
    -------
    PlanModel
        With the objective; nothing is solved yet.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    model = cp_model.CpModel()
    layouts = [model.new_bool_var(f"layout_{i}") for i in range(len(time_ns))]
    mappings = [
        [model.new_bool_var(f"mapping_{i}_{k}") for k in range(len(times))]
        for i, times in enumerate(time_ns)
    ]
    model.add_exactly_one(layouts)
    for chosen, ways in zip(layouts, mappings, strict=True):
        model.add(sum(ways) == chosen)
    mapped = post_mappings(model, mappings, needs or [[None] * len(ways) for ways in mappings])
    placed = None
    if experts is not None:
        from meshwright.planner.experts.training import post_placements

        placed = post_placements(model, mappings, experts.asked, experts.routing)
    _minimise(model, mappings, time_ns)
    return PlanModel(model=model, layouts=layouts, mappings=mappings, mapped=mapped, placed=placed)


def _minimise(
    model: cp_model.CpModel,
    mappings: list[list[cp_model.IntVar]],
    time_ns: Sequence[NDArray[np.int64]],
) -> None:
    if sum(int(times.sum()) for times in time_ns) > LARGEST_TOTAL:
        raise OverflowError(
            "step times in nanoseconds exceed the solver's 64-bit integers: are they realistic?"
        )
    model.minimize(
        sum(
            int(time) * way
            for ways, times in zip(mappings, time_ns, strict=True)
            for way, time in zip(ways, times, strict=True)
        )
    )


def bound_ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Seconds as integer nanoseconds, rounded down: a bound stays a bound.

    Parameters
    ----------
    seconds
        Of any shape, below 2**63 nanoseconds (292 years).
    """
    return np.floor(np.asarray(seconds, dtype=np.float64) * NANOSECONDS).astype(np.int64)


def price_ns(seconds: float) -> int:
    """Seconds as integer nanoseconds, rounded up: a price stays attainable."""
    return int(np.ceil(seconds * NANOSECONDS))


def floor_ns(seconds: float) -> int:
    """Seconds as integer nanoseconds, rounded down: a bound stays one."""
    return int(np.floor(seconds * NANOSECONDS))


def solve(plan: PlanModel, seed: int, time_limit_s: float | None) -> ModelChoice:
    """Solves with one worker and a fixed seed, so that the same model gives the same choice.

    Raises InternalError where the model is invalid or the status is none of the known ones.

    Parameters
    ----------
    plan
        As `build_model` gives it, perhaps with further rows.
    seed
        Of CP-SAT's random numbers.
    time_limit_s
        Seconds of the clock; None for the command's own limit alone.
    """
    from meshwright.planner.solvers.or_tools import cp_model

    solver = repeatable_solver(seed)
    if time_limit_s is not None:
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
    status = solver.solve(plan.model)
    if status == cp_model.INFEASIBLE:
        return ModelChoice(status="infeasible")
    if status == cp_model.UNKNOWN:
        return ModelChoice(status="unknown")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InternalError(
            f"CP-SAT answered {solver.status_name(status)}: {plan.model.validate() or 'no reason given'}"
        )
    layout = next(i for i, literal in enumerate(plan.layouts) if solver.boolean_value(literal))
    mapping = next(
        k for k, literal in enumerate(plan.mappings[layout]) if solver.boolean_value(literal)
    )
    bound = solver.best_objective_bound
    return ModelChoice(
        status="optimal" if status == cp_model.OPTIMAL else "feasible",
        layout=layout,
        mapping=mapping,
        bound_ns=int(np.floor(bound + 0.5)) if np.isfinite(bound) else None,
        value=solver.value,
    )


def solver_version() -> str:
    """The version of OR-Tools."""
    from importlib.metadata import version

    return f"OR-Tools {version('ortools')}"
