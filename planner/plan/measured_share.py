"""How much of what a plan promises over measured runs has itself been measured.

A search picks what the cost model flatters most. A plan is therefore held beside the fastest published run
of the same work, or, where nobody published one, beside the choices of the nearest run, priced for the plan's
work. Of the gain over it a choice counts as measured up to what published pairs of runs with and without that
choice show, and only as far as the cost model claims it: the rest is the cost model's word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.constraints.memory import HbmCapacity
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan, spans_of
from meshwright.costmodel.estimate import Stages, estimate_layout, stage_memory_gib
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout, Placement
from meshwright.costmodel.measured_recipes import MeasuredRecipe, is_same_work, nearest_recipes
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.records import choices_in_pairs, measured_gain
from meshwright.costmodel.step_kinds import STEP_KINDS
from meshwright.costmodel.workload import Execution, Workload
from meshwright.planner.bounds.layer_split import ALL_LAYERS, suiting_stages
from meshwright.planner.plan.document import GainEvidence, KnobGain, NearestRun, Plan
from meshwright.planner.plan.texts import plan_placement, workload_of_plan
from meshwright.planner.request.choices import BY_NAME
from meshwright.planner.runs.run_terms import LayoutDoc, layout_from_document

MOST_TRIED = 16
"""Runs whose choices are tried on a plan's work, the nearest first."""


@dataclass(frozen=True, kw_only=True)
class _Arranged:
    """A layout on a workload, as it is priced."""

    workload: Workload
    layout: Layout
    stages: Stages
    placement: Placement

    @property
    def step_time_s(self) -> float:
        estimate = estimate_layout(self.workload, self.layout, self.placement, self.stages)
        return float(np.asarray(estimate.step_time_s))


def evidence_of(plan: Plan) -> GainEvidence | None:
    """What measured runs say for the gain that a plan promises.

    The gain is 1 - T / T', with T the plan's step and T' the measured step of the fastest run of the same
    work, or the priced step of the nearest run's choices. Each choice k that differs between both, and of
    which pairs are published, is priced in the plan with the run's value: p_k = ln(T_k / T). With m_k what
    the pairs measured, the measured share is the sum of max(0, min(p_k, m_k)) over ln(T' / T), at most 1.

    Parameters
    ----------
    plan
        Finished, with or without a layout.

    Returns
    -------
    GainEvidence or None
        None for a plan without a layout, or of adapters, packs of samples or preferences: runs of
        `measured_recipes` train none of these.
    """
    inputs = plan.inputs
    if plan.layout is None or plan.predicted is None or plan.execution is None:
        return None
    other_work = inputs.adapters is not None or inputs.lengths is not None
    if other_work or STEP_KINDS[inputs.kind].on_preferences:
        return None
    asked = workload_of_plan(plan)
    near = nearest_recipes(asked, layout_from_document(plan.layout))
    if not near:
        return GainEvidence(nearest_run=None)
    if is_same_work(near[0], asked):
        recipe, base_s = near[0], near[0].step_time_s
        run = _nearest_run(recipe, same_work=True)
        return _compared(plan, recipe, GainEvidence(nearest_run=run, basis="measured"), base_s)
    for recipe in near[:MOST_TRIED]:
        applied = _applied(recipe, asked)
        if applied is not None:
            run = _nearest_run(recipe, same_work=False)
            held = GainEvidence(nearest_run=run, basis="priced")
            return _compared(plan, recipe, held, applied.step_time_s)
    return GainEvidence(nearest_run=_nearest_run(near[0], same_work=False))


def _nearest_run(recipe: MeasuredRecipe, *, same_work: bool) -> NearestRun:
    fields = {
        name: getattr(recipe, name) for name in NearestRun.model_fields if name != "same_work"
    }
    fields["settings"] = list(recipe.settings)
    return NearestRun(**fields, same_work=same_work)


def _compared(
    plan: Plan, recipe: MeasuredRecipe, held: GainEvidence, base_s: float
) -> GainEvidence:
    """The gain over a step, and how much of it was measured."""
    assert plan.predicted is not None
    step_s = plan.predicted.step_time_s
    knobs = sorted(_knobs(plan, recipe), key=lambda knob: (-knob.predicted_gain, knob.choice))
    promised = math.log(base_s / step_s)
    share = 1.0
    if promised > 0:
        borne_out = (
            min(_log_saved(knob.predicted_gain), _log_saved(knob.measured_gain)) for knob in knobs
        )
        share = min(1.0, sum(max(0.0, log) for log in borne_out) / promised)
    update = {
        "step_time_s": base_s,
        "gain": 1.0 - step_s / base_s,
        "measured_share": share,
        "knobs": knobs,
    }
    return held.model_copy(update=update)


def _log_saved(gain: float) -> float:
    return -math.log(1.0 - gain)


def _knobs(plan: Plan, recipe: MeasuredRecipe) -> Iterator[KnobGain]:
    """Choices that differ, of which pairs of runs are published."""
    assert plan.layout is not None
    assert plan.execution is not None
    layout = layout_from_document(plan.layout)
    workload = workload_of_plan(plan).on(int(layout.gpus))
    stages, placement = plan_placement(workload, layout, plan)
    planned = _Arranged(workload=workload, layout=layout, stages=stages, placement=placement)
    execution = plan.execution.of_layout(layout)
    run_execution = replace(Execution(), **recipe.execution)
    device, experts = plan.inputs.cluster.device.name, workload.model.moe is not None
    step_s = planned.step_time_s
    for name in choices_in_pairs():
        value, of_run = getattr(execution, name), getattr(run_execution, name)
        if value == of_run:
            continue
        of_plan = _measured_side(name, value, device, experts=experts)
        of_other = _measured_side(name, of_run, device, experts=experts)
        other = replace(execution, **{name: of_run}).of_layout(layout)
        if of_plan is None or of_other is None or other == execution:
            continue
        (log, pairs, where), (log_of_run, pairs_of_run, where_of_run) = of_plan, of_other
        if log == log_of_run:
            # One kernel under two names, as sources rarely say which they ran.
            continue
        without = replace(planned, workload=other.applied(workload)).step_time_s
        counts = [count for count in (pairs, pairs_of_run) if count]
        yield KnobGain(
            choice=name,
            value=value,
            value_of_run=of_run,
            predicted_gain=1.0 - step_s / without,
            measured_gain=1.0 - math.exp(log - log_of_run),
            pairs=min(counts, default=0),
            measured_on=" against ".join(filter(None, (where, where_of_run))),
        )


def _measured_side(
    name: str, value: Any, device: str, *, experts: bool
) -> tuple[float, int, str] | None:
    """Of a value over the plain one: logarithm of the measured ratio of steps, pairs and where."""
    plain = BY_NAME[name].plain if name in BY_NAME else False
    if value == plain:
        return 0.0, 0, ""
    gain = measured_gain(name, value, device, experts=experts)
    return None if gain is None else (math.log(1.0 - gain.gain), gain.pairs, gain.measured_on)


def _applied(recipe: MeasuredRecipe, asked: Workload) -> _Arranged | None:
    """A run's choices on another work; None where they break a rule there or a GPU would be too full."""
    of_run = dict(recipe.layout)
    degrees = {axis: of_run.get(axis, 1) for axis in AXES if axis != "dp"}
    dp, over = divmod(asked.gpus, math.prod(degrees.values()))
    micro_batch = of_run.get("micro_batch", 1)
    micro_batches, odd = divmod(asked.global_batch, max(dp, 1) * micro_batch)
    experts = of_run.get("ep", 1) * of_run.get("etp", 1)
    if over or odd or not dp or not micro_batches or (asked.gpus // degrees["pp"]) % experts:
        return None
    plain = {name: BY_NAME[name].plain for name in LayoutDoc.model_fields if name in BY_NAME}
    defaults: dict[str, Any] = {**plain, "sequence_parallel": False, "stages": []}
    fields = {**defaults, **of_run, "dp": dp, "num_micro_batches": micro_batches}
    layout = layout_from_document(LayoutDoc.model_validate(fields))
    if of_run.get("recompute") == "full":
        layout = replace(layout, recompute_layers=ALL_LAYERS)
    if (dp * degrees["cp"]) % int(layout.shard_groups):
        return None
    try:
        stages = suiting_stages(asked, layout)
        if stages is None:
            return None
        execution = replace(Execution(), **recipe.execution).of_layout(layout)
        workload = execution.applied(asked)
        # Recipes run on the edge of HBM: memory counts as it is predicted, without a margin.
        as_predicted = replace(workload, memory_margin=1.0)
        memory_gib = tuple(stage_memory_gib(workload, layout, stages))
        placement = nested_placement(workload.cluster, layout)
        finished = FinishedPlan(
            workload=workload,
            layout=layout,
            stages=stages,
            memory_gib=memory_gib,
            spans=spans_of(placement),
        )
        full = max(memory_gib) > usable_hbm_gib(as_predicted)
        if full or any(findings(finished, without=(HbmCapacity.name,))):
            return None
        found = _Arranged(workload=workload, layout=layout, stages=stages, placement=placement)
        return found if 0.0 < found.step_time_s < math.inf else None
    except (ValueError, ArithmeticError):
        return None
