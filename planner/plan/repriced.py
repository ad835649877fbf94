"""A finished plan with the prices of another calibration, or of other places."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.constants.calibration import Calibration
from meshwright.errors import InfeasibleError
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.mapping.slots import Place
from meshwright.planner.plan.assemble import mapping_of_layout, objective_of, predict
from meshwright.planner.plan.binding import bindings, cut_binding, warnings
from meshwright.planner.plan.document import IdleDoc, Plan
from meshwright.planner.plan.idle import unused_nodes
from meshwright.planner.plan.memory_risk import memory_risk_document
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.plan.verify import faults
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.grades import grades
from meshwright.planner.runs.predicted import layout_from_document


def repriced(plan: Plan, calibration: Calibration | None) -> Plan:
    """The same layout and mapping, priced anew.

    Parameters
    ----------
    plan
        With a layout.
    calibration
        What the user's own runs say of the constants.

    Returns
    -------
    Plan
        Feasible, without a bound: the proof was made with other prices. The plan itself where there is
        no calibration.
    """
    if calibration is None:
        return plan
    assert plan.layout is not None
    assert plan.mapping is not None
    inputs = plan.inputs.model_copy(update={"calibration": calibration})
    changed = plan.model_copy(update={"inputs": inputs})
    layout = layout_from_document(plan.layout)
    priced = Priced(
        layout=layout,
        matrix={axis: tuple(row) for axis, row in plan.mapping.matrix.items()},
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        step_time_s=0.0,
        ranks=None if plan.mapping.ranks is None else tuple(plan.mapping.ranks),
    )
    predicted = predict(workload_of_plan(changed).on(int(layout.gpus)), priced)
    update = {
        "status": "feasible",
        "objective": objective_of(predicted.step_time_s, None),
        "predicted": predicted,
        "robustness": None,
        "choices": None,
        "alternatives": [],
    }
    return changed.model_copy(update=update)


def placed_on(plan: Plan, cluster: ClusterSpec, ranks: Sequence[Place]) -> Plan:
    """The same layout, run in the same way, with its ranks on other GPUs.

    Parameters
    ----------
    plan
        With a layout.
    cluster
        Where the ranks are, with the GPUs free that the plan may use.
    ranks
        (node, local GPU) of every rank in the order tp, cp, dp, pp.

    Returns
    -------
    Plan
        Feasible, without a bound: whether another layout is faster there was not asked. All that follows
        from where ranks are is worked out again.

    Raises
    ------
    InfeasibleError
        Where a rule does not hold there, memory included.
    """
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    gpus = max(int(layout.gpus), min(cluster.gpus, plan.inputs.gpus))
    inputs = plan.inputs.model_copy(update={"cluster": cluster, "gpus": gpus})
    request = PlanRequest.of_inputs(inputs)
    priced = Priced(
        layout=layout,
        matrix={},
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        step_time_s=0.0,
        ranks=tuple(ranks),
        execution=plan.execution or request.plainest,
    )
    moved = plan.model_copy(update={"inputs": inputs})
    workload = workload_of_plan(moved).on(int(layout.gpus))
    predicted = predict(workload, priced)
    idle = None
    if gpus > int(layout.gpus):
        idle = IdleDoc(
            gpus=gpus - int(layout.gpus),
            nodes=unused_nodes(request, priced),
            full_step_time_s=None,
            full_lower_bound_s=None,
            reason="the plan was placed as it is; a layout on all GPUs of these nodes was not looked for",
        )
    update = {
        "status": "feasible",
        "objective": objective_of(predicted.step_time_s, None),
        "predicted": predicted,
        "grades": grades(plan.layout, predicted),
        "mapping": mapping_of_layout(workload, priced),
        "idle": idle,
        "memory_risk": memory_risk_document(request, predicted),
        "binding": [
            *bindings(request, workload, priced, predicted),
            *cut_binding(workload, priced),
        ],
        "warnings": list(warnings(request, priced, predicted, idle)),
        "solver": plan.solver.model_copy(update={"proof": None}),
        "left_out": None,
        "robustness": None,
        "choices": None,
        "expected": None,
        "baseline": None,
        "alternatives": [],
    }
    moved = moved.model_copy(update=update)
    broken = list(faults(request, moved))
    if broken:
        raise InfeasibleError(f"on these nodes of {cluster.name!r}: {'; '.join(broken)}")
    return moved
