"""One way to train a model, with nothing left open: what a baseline is, and every step from it to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.constraints.registry import findings
from meshwright.constraints.rule import Finding, FinishedPlan, spans_of
from meshwright.costmodel.estimate import Stages, estimate_layout, stage_memory_gib
from meshwright.costmodel.layout import Layout, Placement, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.stages import ALL_LAYERS
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.placement import plan_placement, workload_of_plan
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.predicted import layout_from_document
from meshwright.planner.runs.prediction import arrangement
from meshwright.planner.runs.run_file import Run


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A layout with its workload, its split of the layers and the places of its groups."""

    workload: Workload
    """On as many GPUs as the layout has."""
    layout: Layout
    """Plain integers."""
    stages: Stages
    """Transformer layers of each [pipeline rank][virtual stage]."""
    placement: Placement

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.workload.global_batch * self.workload.seq_len

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        estimate = estimate_layout(self.workload, self.layout, self.placement, self.stages)
        return float(np.asarray(estimate.step_time_s))

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Peak on one GPU of each pipeline rank."""
        memory = stage_memory_gib(self.workload, self.layout, self.stages)
        return tuple(float(gib) for gib in memory)

    def broken_rules(self) -> list[Finding]:
        """Rules of arithmetic, hardware and framework that the setup breaks."""
        finished = FinishedPlan(
            workload=self.workload,
            layout=self.layout,
            stages=self.stages,
            memory_gib=self.memory_gib,
            spans=spans_of(self.placement),
        )
        return list(findings(finished))


def setup_of_plan(plan: Plan) -> Setup:
    """A plan that has a layout, as it stands."""
    assert plan.layout is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    stages, placement = plan_placement(workload, layout, plan)
    layout = _with_all_layers(layout, stages)
    return Setup(workload=workload, layout=layout, stages=stages, placement=placement)


def setup_of_run(run: Run, inputs: PlanInputs) -> Setup:
    """A run of a plan's model, its experts as unevenly loaded as in the plan's inputs.

    Raises ValueError where its layers cannot be dealt out.
    """
    stages, placement = arrangement(run)
    workload = replace(
        run.workload,
        model=inputs.model,
        expert_imbalance_by_ep=inputs.expert_imbalance_by_ep,
        expert_copies_by_ep=inputs.expert_copies_by_ep,
    )
    layout = _with_all_layers(run.layout, stages)
    return Setup(workload=workload, layout=layout, stages=stages, placement=placement)


def _with_all_layers(layout: Layout, stages: Stages) -> Layout:
    """Full recomputation of the longest virtual stage is that of every layer, also when stages change."""
    longest = max(max(rank) for rank in stages)
    full = bool(int(layout.recompute) & Recompute.FULL)
    if full and int(layout.recompute_layers) >= longest:
        return replace(layout, recompute_layers=ALL_LAYERS)
    return layout
