"""Plans made by hand that carry the prices of their layouts."""

from __future__ import annotations

from typing import Any

from meshwright.costmodel.placement import level_factors
from meshwright.costmodel.workload import Execution
from meshwright.model_specs.schema import ModelSpec
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.mappings import matrices
from meshwright.planner.plan.assemble import mapping_of_layout, predict
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.runs.run_terms import layout_from_document
from tests.plans import make_plan


def priced_plan(
    model: str | ModelSpec = "llama-3-8b", cluster: str = "dgx-h100", **changes: Any
) -> Plan:
    """A plan of `tests.plans.make_plan`, run plainly, under the first mapping of its fabric."""
    plan = make_plan(model, cluster, **changes)
    plan = plan.model_copy(update={"execution": Execution()})
    assert plan.layout is not None
    workload, layout = workload_of_plan(plan), layout_from_document(plan.layout)
    table = matrices(
        layout, level_factors(workload.cluster, workload.gpus).tolist(), inside=("tp",)
    )
    best = Priced(
        layout=layout,
        matrix={axis: tuple(rows[0].tolist()) for axis, rows in table.items()},
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        step_time_s=1.0,
    )
    predicted = predict(workload, best)
    objective = plan.objective.model_copy(
        update={"step_time_s": predicted.step_time_s, "lower_bound_s": predicted.step_time_s}
    )
    update = {
        "predicted": predicted,
        "mapping": mapping_of_layout(workload, best),
        "objective": objective,
    }
    return plan.model_copy(update=update)
