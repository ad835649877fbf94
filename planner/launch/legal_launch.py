"""The last look before a launch: the plan against every rule of the framework it is launched in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan
from meshwright.costmodel.constants.stacks import stack_constants
from meshwright.costmodel.context_groups import swapping_ranks
from meshwright.costmodel.data_parallel import bucket_parameters
from meshwright.costmodel.execution import Execution
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.frameworks.record import Framework
from meshwright.planner.launch.ranks.placed import PlacedRanks, placed_ranks, planned_layout
from meshwright.planner.plan.document import Plan
from meshwright.planner.request.executions import execution_options
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.predicted import LayoutDoc, layout_from_document
from meshwright.planner.runs.prediction import planned_workload


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A plan that a framework can start, and the places of its ranks in that framework's order."""

    plan: Plan
    layout: LayoutDoc
    execution: Execution
    """Overlaps, dispatcher and graphs that the price assumes, so that the launch files ask for them."""
    placed: PlacedRanks
    bucket_parameters: int
    """Parameters whose gradients are reduced together, the framework's own number included; 0 where buckets
    are not of a set size."""

    context_sizes: tuple[str, str]
    """Ranks that swap heads for tokens, and ranks of the rings that join these groups, in a2a+p2p."""

    @property
    def inputs(self) -> PlanInputs:
        """What was planned: model, cluster, batch, precision."""
        return self.plan.inputs


def legal_launch(plan: Plan, framework: Framework) -> Launch:
    """The plan as a framework starts it.

    Memory is not judged again: that takes a cost model.

    Parameters
    ----------
    plan
        A plan, of this framework or of another.
    framework
        The one that shall start it.

    Raises
    ------
    InfeasibleError
        The plan has no layout or no place for a rank, or it breaks rules of the framework: every one of them
        with its remedy.
    """
    layout = planned_layout(plan)
    execution = _execution(plan, framework)
    workload = execution.applied(replace(planned_workload(plan.inputs), framework=framework.name))
    broken = _broken_rules(workload, layout)
    if broken:
        raise InfeasibleError(f"{framework.name} cannot start this plan.\n" + "\n".join(broken))
    degrees = layout_from_document(layout)
    bucket = bucket_parameters(workload, stack_constants(workload), degrees)
    neighbours = int(swapping_ranks(workload, degrees))
    return Launch(
        plan=plan,
        layout=layout,
        execution=execution,
        placed=placed_ranks(plan, framework),
        bucket_parameters=round(float(np.asarray(bucket))),
        context_sizes=(str(neighbours), str(layout.cp // neighbours)),
    )


def _execution(plan: Plan, framework: Framework) -> Execution:
    """The plan's own; the plainest of the framework where it was made for another, or says nothing."""
    own = plan.execution
    inputs = plan.inputs
    if own is not None and inputs.framework == framework.name:
        return own
    pins = {"moe_dispatch": inputs.pins["moe_dispatch"]} if "moe_dispatch" in inputs.pins else {}
    pins = pins if inputs.framework == framework.name else {}
    options = execution_options(
        framework, inputs.model, inputs.cluster, pins=pins, precision=inputs.precision
    )
    layout = layout_from_document(planned_layout(plan))
    return options.executions()[0].of_layout(layout)


def _broken_rules(workload: Workload, layout: LayoutDoc) -> list[str]:
    finished = FinishedPlan(
        workload=workload,
        layout=layout_from_document(layout),
        stages=tuple(tuple(rank) for rank in layout.stages),
        memory_gib=(),
        spans={},
    )
    return [finding.line for finding in findings(finished, without=(HbmCapacity.name,))]
