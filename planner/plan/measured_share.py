"""How much of what a plan promises over measured runs has itself been measured.

A search picks what the cost model flatters most. A plan is therefore held beside the fastest published run
of the same work, or, where nobody published one, beside the choices of the nearest run, priced for the plan's
work. Of the gain over it a choice counts as measured up to what published pairs of runs with and without that
choice show, and only as far as the cost model claims it: the rest is the cost model's word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import log2
from typing import Any

from meshwright.constraints.memory import HbmCapacity
from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES, Layout
from meshwright.costmodel.measured_settings import model_kind, priced_settings
from meshwright.costmodel.placement import nested_placement
from meshwright.costmodel.records import choices_in_pairs, device_class, measured_gain
from meshwright.costmodel.workload import Execution, Workload
from meshwright.frameworks.catalog import framework_of_stack
from meshwright.model_specs.parameters import parameter_count
from meshwright.planner.bounds.layer_split import ALL_LAYERS, suiting_stages
from meshwright.planner.plan.document import GainEvidence, KnobGain, NearestRun, Plan
from meshwright.planner.plan.texts import Setup, setup_of, workload_of_plan
from meshwright.planner.request.choices import BY_NAME
from meshwright.planner.runs.run_terms import LayoutDoc, layout_from_document

# The fastest published run of each work, and which of them lies nearest to a plan.
#
# A work is a model on so many GPUs of a kind, with a batch, a sequence length and a precision.
# `costmodel/data/measured_recipes.json` has the runs of the repository's measured rows that are trusted;
# `python -m benchmarks.recipes --measured` writes it.


RECIPES_TABLE = "measured_recipes.json"
SAME_SIZE = 0.005
"""Relative difference of parameter counts up to which models with as many layers are the same one."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRecipe:
    """One published run: what it trained, on what, how, and how long a step took."""

    id: str
    """Of its row in the repository's measured runs."""
    source: str
    """Who published it."""
    model: str
    kind: str
    """dense or experts."""
    layers: int
    parameters: int
    device: str
    gpus: int
    global_batch: int
    """Sequences of a step."""
    seq_len: int
    """Tokens of a sequence."""
    precision: str
    framework: str
    """Software profile."""
    step_time_s: float
    """Measured."""
    settings: tuple[str, ...]
    """`priced_settings` of the run."""
    layout: Mapping[str, Any]
    """Degrees and settings as a plan's document writes them, those that are plain left out."""
    execution: Mapping[str, Any]
    """Execution choices likewise."""


@cache
def measured_recipes() -> tuple[MeasuredRecipe, ...]:
    """The fastest trusted run of each work, read once.

    Returns
    -------
    tuple of MeasuredRecipe
        In the order of the file.
    """
    text = files("meshwright.costmodel").joinpath("data", RECIPES_TABLE).read_text(encoding="utf-8")
    rows = json.loads(text)["recipes"]
    return tuple(MeasuredRecipe(**{**row, "settings": tuple(row["settings"])}) for row in rows)


def is_same_work(recipe: MeasuredRecipe, workload: Workload) -> bool:
    """Whether a run did the work of a workload: the model on the same machine, batch and precision.

    Parameters
    ----------
    recipe : MeasuredRecipe
    workload : Workload
        Its model, device, GPUs, sequences, tokens and precision are used.

    Returns
    -------
    bool
        Models are the same with as many layers and parameters (within 0.5 %), whatever they are called.
    """
    return (
        _is_same_model(recipe, workload)
        and recipe.device == workload.cluster.device.name
        and recipe.gpus == workload.gpus
        and recipe.global_batch == workload.global_batch
        and recipe.seq_len == workload.seq_len
        and recipe.precision == workload.precision
    )


def _is_same_model(recipe: MeasuredRecipe, workload: Workload) -> bool:
    apart = abs(recipe.parameters / parameter_count(workload.model) - 1.0)
    return recipe.layers == workload.model.layers and apart <= SAME_SIZE


def distance(recipe: MeasuredRecipe, workload: Workload, layout: Layout) -> float:
    """How far a run lies from a plan: settings that one of both has, plus differences of size.

    Parameters
    ----------
    recipe : MeasuredRecipe
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.

    Returns
    -------
    float
        At least 0: one for each setting of `priced_settings` that only one of both has, one for each doubling
        of parameters, a half for each doubling of GPUs and of tokens in a sequence, one each for another
        device of the class, for another framework and for another model of the same size.
    """
    size = parameter_count(workload.model)
    apart = len(priced_settings(workload, layout).symmetric_difference(recipe.settings))
    scale = abs(log2(recipe.gpus / workload.gpus)) + abs(log2(recipe.seq_len / workload.seq_len))
    others = (
        recipe.device != workload.cluster.device.name,
        framework_of_stack(recipe.framework) is not framework_of_stack(workload.framework),
        not _is_same_model(recipe, workload),
    )
    return apart + abs(log2(recipe.parameters / size)) + scale / 2.0 + sum(others)


def nearest_recipes(workload: Workload, layout: Layout) -> list[MeasuredRecipe]:
    """Measured runs by how near they lie to a plan, those of the same work first and the fastest of these.

    Parameters
    ----------
    workload : Workload
        Run as the plan is.
    layout : Layout
        The plan's.

    Returns
    -------
    list of MeasuredRecipe
        With the plan's kind of model, on its class of device, or on any where none was measured there.
    """
    name, kind = workload.cluster.device.name, model_kind(workload)
    group = device_class(name)
    of_kind = [recipe for recipe in measured_recipes() if recipe.kind == kind]
    near = [
        recipe
        for recipe in of_kind
        if name == recipe.device or (group is not None and group == device_class(recipe.device))
    ]

    def nearness(recipe: MeasuredRecipe) -> tuple[bool, float, str]:
        if is_same_work(recipe, workload):
            return False, recipe.step_time_s, recipe.id
        return True, distance(recipe, workload, layout), recipe.id

    return sorted(near or of_kind, key=nearness)


# The share itself: a plan held beside one of them.


MOST_TRIED = 16
"""Runs whose choices are tried on a plan's work, the nearest first."""


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
    assert plan.execution is not None
    planned = setup_of(plan)
    workload, layout = planned.workload, planned.layout
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


def _applied(recipe: MeasuredRecipe, asked: Workload) -> Setup | None:
    """A run's choices on another work; None where they break a rule there or a GPU would be too full."""
    of_run = dict(recipe.layout)
    degrees = {axis: of_run.get(axis, 1) for axis in AXES if axis != "dp"}
    dp, over = divmod(asked.gpus, math.prod(degrees.values()))
    micro_batch = of_run.get("micro_batch", 1)
    micro_batches, odd = divmod(asked.global_batch, max(dp, 1) * micro_batch)
    if over or odd or not dp or not micro_batches:
        return None
    plain = {name: BY_NAME[name].plain for name in LayoutDoc.model_fields if name in BY_NAME}
    defaults: dict[str, Any] = {**plain, "sequence_parallel": False, "stages": []}
    fields = {**defaults, **of_run, "dp": dp, "num_micro_batches": micro_batches}
    layout = layout_from_document(LayoutDoc.model_validate(fields))
    if of_run.get("recompute") == "full":
        layout = replace(layout, recompute_layers=ALL_LAYERS)
    whole_experts = (asked.gpus // degrees["pp"]) % int(layout.expert_group) == 0
    if not whole_experts or (dp * degrees["cp"]) % int(layout.shard_groups):
        return None
    try:
        stages = suiting_stages(asked, layout)
        if stages is None:
            return None
        execution = replace(Execution(), **recipe.execution).of_layout(layout)
        workload = execution.applied(asked)
        # Recipes run on the edge of HBM: memory counts as it is predicted, without a margin.
        as_predicted = replace(workload, memory_margin=1.0)
        placement = nested_placement(workload.cluster, layout)
        setup = Setup(workload=workload, layout=layout, stages=stages, placement=placement)
        full = max(setup.memory_gib) > usable_hbm_gib(as_predicted)
        if full or setup.broken_rules(without=(HbmCapacity.name,)):
            return None
        return setup if 0.0 < setup.step_time_s < math.inf else None
    except (ValueError, ArithmeticError):
        return None
