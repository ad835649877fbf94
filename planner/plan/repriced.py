"""A finished plan with the prices of another calibration."""

from __future__ import annotations

from meshwright.costmodel.constants.calibration import Calibration
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.plan.assemble import objective_of, predict
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import workload_of_plan
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
