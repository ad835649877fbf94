"""What a plan states, against what follows from its inputs, its layout and its mapping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import isclose

from meshwright.costmodel.constants.calibrated import peak_memory_band, step_time_band
from meshwright.costmodel.execution import Execution
from meshwright.errors import shown
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.assemble import mapping_of_layout, predict
from meshwright.planner.plan.binding import bindings, cut_binding, warnings
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.idle import unused_nodes
from meshwright.planner.plan.memory_risk import memory_risk_document
from meshwright.planner.plan.robustness import changes, step_as_it_stands_s
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import layout_document, layout_from_document

TOLERANCE = 1e-9
"""Relative: figures are written with all their digits."""


def stated_figure_faults(plan: Plan) -> Iterator[str]:
    """Everything in a plan document that does not follow from the rest of it, in words.

    The rules, sums and the price are those of `planner.plan.verify`; beyond them every figure that is
    printed is worked out again and compared.
    """
    request = PlanRequest.of_inputs(plan.inputs)
    yield from faults(request, plan)
    yield from _objective_faults(plan)
    if plan.layout is None or plan.mapping is None or plan.predicted is None:
        return
    yield from _figure_faults(request, plan)
    yield from _robustness_faults(request, plan)
    yield from _alternative_faults(plan)


def _objective_faults(plan: Plan) -> Iterator[str]:
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    gap = None
    if price_s is not None and bound_s is not None:
        gap = (price_s - bound_s) / price_s
    yield from _differences("objective.gap", plan.objective.gap, gap)
    proof = plan.solver.proof
    if proof is not None:
        yield from _differences("solver.proof.incumbent_s", proof.incumbent_s, price_s)
        yield from _differences("solver.proof.lower_bound_s", proof.lower_bound_s, bound_s)
    if plan.status in ("infeasible", "unknown") and plan.layout is not None:
        yield f"status: {plan.status}, but there is a layout"


def _figure_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Every printed figure against what the cost model makes of the layout on its ranks."""
    assert plan.layout is not None
    assert plan.mapping is not None
    assert plan.predicted is not None
    priced = _priced(plan)
    execution = priced.execution.of_layout(priced.layout)
    workload = execution.applied(request.workload().on(int(priced.layout.gpus)))
    predicted = predict(workload, priced)
    yield from _differences(
        "layout",
        plan.layout.model_dump(),
        layout_document(priced.layout, priced.stages).model_dump(),
    )
    if plan.execution is not None:
        stated = asdict(plan.execution)
        # What the workload holds: a setting that the framework does not have is not among it.
        yield from _differences("execution", stated, asdict(Execution.within(workload)))
    yield from _differences("predicted", plan.predicted.model_dump(), predicted.model_dump())
    mapping = mapping_of_layout(workload, priced).model_dump()
    if plan.mapping.ranks is None:
        mapping["ranks"] = None
    if not plan.mapping.matrix and not plan.mapping.levels:
        # `map` lists ranks alone.
        mapping["levels"] = []
    yield from _differences("mapping", plan.mapping.model_dump(), mapping)
    if plan.memory_risk is not None:
        expected = memory_risk_document(request, predicted)
        for name in ("asked", "remains", "room_gib"):
            stated_figure = getattr(plan.memory_risk, name)
            yield from _differences(f"memory_risk.{name}", stated_figure, getattr(expected, name))
    yield from _idle_faults(request, plan, priced)
    reasons = [*bindings(request, workload, priced, predicted), *cut_binding(workload, priced)]
    yield from _differences(
        "binding",
        [binding.model_dump() for binding in plan.binding],
        [binding.model_dump() for binding in reasons],
    )
    spoken = list(warnings(request, priced, predicted, plan.idle))
    yield from _differences("warnings", plan.warnings, spoken)


def _priced(plan: Plan) -> Priced:
    assert plan.layout is not None
    assert plan.mapping is not None
    matrix = {axis: tuple(row) for axis, row in plan.mapping.matrix.items()}
    ranks = plan.mapping.ranks
    return Priced(
        layout=layout_from_document(plan.layout),
        matrix=matrix,
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        step_time_s=plan.objective.step_time_s or 0.0,
        ranks=None if matrix or ranks is None else tuple(ranks),
        execution=plan.execution or PlanRequest.of_inputs(plan.inputs).plainest,
    )


def _idle_faults(request: PlanRequest, plan: Plan, priced: Priced) -> Iterator[str]:
    idle_gpus = request.gpus - int(priced.layout.gpus)
    if plan.idle is None:
        if idle_gpus:
            yield f"idle: {idle_gpus} GPUs have no rank, but none is said to be idle"
        return
    yield from _differences("idle.gpus", plan.idle.gpus, idle_gpus)
    yield from _differences("idle.nodes", plan.idle.nodes, unused_nodes(request, priced))


def _robustness_faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    robustness = plan.robustness
    if robustness is None:
        return
    workload = request.workload()
    band, memory = step_time_band(workload), peak_memory_band(workload)
    stated = [list(robustness.step_time_band), list(robustness.memory_band)]
    measured = [[band.low, band.high], [memory.low, memory.high]]
    yield from _differences("robustness: bands", stated, measured)
    changed = list(changes(request, band, memory))
    words = [scenario.change for scenario in robustness.scenarios]
    yield from _differences("robustness.scenarios", words, [change.words for change in changed])
    for change, scenario in zip(changed, robustness.scenarios, strict=False):
        step_time_s = step_as_it_stands_s(request, plan, change)
        where = f"robustness.scenarios, {change.words}"
        yield from _differences(where, scenario.step_time_s, step_time_s)


def _alternative_faults(plan: Plan) -> Iterator[str]:
    best_s = plan.objective.step_time_s or 0.0
    for number, other in enumerate(plan.alternatives):
        step_time_s, slower_pct = other.get("step_time_s"), other.get("slower_pct")
        where = f"alternatives[{number}]"
        if not isinstance(step_time_s, float) or step_time_s < best_s * (1 - TOLERANCE):
            yield f"{where}.step_time_s: {shown(step_time_s)} is less than the plan's {best_s}"
        else:
            expected = 100.0 * (step_time_s / best_s - 1.0)
            yield from _differences(f"{where}.slower_pct", slower_pct, expected)


def _differences(where: str, stated: object, expected: object) -> Iterator[str]:
    """Where plain data differ, by path."""
    if isinstance(stated, dict) and isinstance(expected, dict):
        for key in dict.fromkeys((*expected, *stated)):
            yield from _differences(f"{where}.{key}", stated.get(key), expected.get(key))
    elif _are_lists(stated, expected):
        for index, (one_part, other_part) in enumerate(zip(stated, expected, strict=True)):  # type: ignore[call-overload]
            yield from _differences(f"{where}[{index}]", one_part, other_part)
    elif not _same(stated, expected):
        yield f"{where}: {shown(stated)}, worked out again {shown(expected)}"


def _are_lists(stated: object, expected: object) -> bool:
    if not isinstance(stated, list | tuple) or not isinstance(expected, list | tuple):
        return False
    return len(stated) == len(expected)


def _same(stated: object, expected: object) -> bool:
    if isinstance(stated, float) and isinstance(expected, float):
        return isclose(stated, expected, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(stated, list | tuple) and isinstance(expected, list | tuple):
        return list(stated) == list(expected)
    return stated == expected
