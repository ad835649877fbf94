"""The last look before a launch: the plan against every rule of the framework it is launched in."""

from __future__ import annotations

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import rules_for
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.workload import Overlap, Workload, planned_overlap
from meshwright.errors import InfeasibleError
from meshwright.frameworks.record import Framework
from meshwright.planner.plan.document import Plan
from meshwright.planner.runs.predicted import LayoutDoc, layout_from_document


def require_legal(plan: Plan, framework: Framework, overlap: Overlap | None = None) -> LayoutDoc:
    """The layout of a plan that the framework can start.

    `overlap` is what the launch files turn on; that of the framework's record when absent.
    Raises InfeasibleError with every broken rule otherwise. Memory is not judged again: that takes a cost
    model.
    """
    if plan.layout is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to launch."
        )
    inputs = plan.inputs
    workload = Workload(
        model=inputs.model,
        cluster=inputs.cluster,
        gpus=inputs.gpus,
        global_batch=inputs.global_batch,
        seq_len=inputs.seq_len,
        precision=inputs.precision,
        optimizer=inputs.optimizer,
        framework=framework.name,
        overlap=overlap or planned_overlap(framework),
    )
    finished = FinishedPlan(
        workload=workload,
        layout=layout_from_document(plan.layout),
        stages=tuple(tuple(rank) for rank in plan.layout.stages),
        memory_gib=(),
        spans={},
    )
    broken = []
    for rule in rules_for(workload):
        finding = None if isinstance(rule, HbmCapacity) else rule.check(finished)
        if finding is not None:
            broken.append(rule.explain(finding))
    if broken:
        raise InfeasibleError(f"{framework.name} cannot start this plan.\n" + "\n".join(broken))
    return plan.layout
