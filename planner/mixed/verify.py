"""The second opinion on a plan for a mixed cluster, from its document alone.

No solver and nothing of the search: the price is that of `costmodel.mixed`, memory that of one rank's plain
footprint, rules are asked by their `check`, groups are counted from the list of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import isclose

import numpy as np

from meshwright.cluster_specs.allocation import allocated_places
from meshwright.cluster_specs.reader import read_cluster
from meshwright.constraints.memory import HostMemory
from meshwright.constraints.registry import findings
from meshwright.constraints.rule import FinishedPlan, spans_of
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import GROUPS, ROUNDING
from meshwright.costmodel.mixed import host_memory_gib, hosts_short_gib, mixed_step
from meshwright.costmodel.rates import peak_flops, step_time_band
from meshwright.costmodel.recount import recounted_placement
from meshwright.errors import InternalError
from meshwright.planner.mapping.cuts import parts_cut_uses
from meshwright.planner.mixed.document import (
    NOT_MEASURED,
    AloneDoc,
    MixedPlan,
    MixedPredicted,
    Pipeline,
    RankDoc,
    stage_gpus,
)
from meshwright.planner.plan.verify import faults_of_pairs, length_faults, wish_faults
from meshwright.planner.runs.run_terms import LayoutDoc, layout_document

# What a plan on a mixed cluster states of its proof and of each part alone, held against itself.


def objective_faults(plan: MixedPlan) -> Iterator[str]:
    """Status, step, bound and gap that contradict each other or what the plan consists of, in words.

    Parameters
    ----------
    plan
        Of any status.
    """
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    gap = plan.objective.gap
    if (price_s is not None) != (plan.status in ("optimal", "feasible")):
        yield f"status {plan.status} with a step of {price_s} s"
    if price_s is None:
        if gap is not None or plan.layout is not None or plan.runs_on:
            yield "no step, but a gap, a layout or parts that it runs on"
        return
    if bound_s is None:
        if gap is not None:
            yield f"gap {gap} without a lower bound"
    elif bound_s > price_s:
        yield f"lower bound {bound_s} above the price {price_s}"
    elif gap is None or not isclose(gap, (price_s - bound_s) / price_s, abs_tol=ROUNDING):
        yield f"gap {gap} at price {price_s} and bound {bound_s}"
    is_met = bound_s is not None and bound_s >= price_s * (1 - ROUNDING)
    if (plan.status == "optimal") != is_met:
        yield f"called {plan.status} at price {price_s} and bound {bound_s}"
    yield from _shape_faults(plan, price_s)


def _shape_faults(plan: MixedPlan, price_s: float) -> Iterator[str]:
    """A pipeline through parts has all of its sections, a part alone none of them."""
    sections = (plan.layout, plan.execution, plan.predicted)
    if plan.layout is None:
        if any(each is not None for each in sections) or plan.ranks or plan.nodes:
            yield "no layout, but an execution, a prediction, ranks or nodes"
        if len(plan.runs_on) != 1:
            yield f"no layout, yet it runs on {plan.runs_on}: must be one part alone"
            return
        own_s = [each.step_time_s for each in plan.alone if each.part == plan.runs_on[0]]
        if own_s != [price_s]:
            yield f"the step is {price_s} s, that of {plan.runs_on[0]} alone {own_s}"
    elif plan.execution is None or plan.predicted is None:
        yield "a layout without an execution or a prediction"
    elif not isclose(price_s, plan.predicted.step_time_s, rel_tol=ROUNDING):
        yield f"objective {price_s} is not the predicted {plan.predicted.step_time_s}"


def alone_faults(plan: MixedPlan) -> Iterator[str]:
    """What is said of each part alone against the cluster, the plan's step and its bound, in words.

    Parameters
    ----------
    plan
        Of any status.
    """
    parts = plan.cluster.parts
    wanted = [
        (name, part.cluster.device.name, part.gpus)
        for name, part in zip(plan.cluster.names, parts, strict=True)
    ]
    stated = [(each.part, each.device, each.gpus) for each in plan.alone]
    if stated != wanted:
        yield f"alone: parts {stated}, the cluster has {wanted}"
    for alone in plan.alone:
        yield from _one_alone_faults(plan, alone)


def _one_alone_faults(plan: MixedPlan, alone: AloneDoc) -> Iterator[str]:
    price_s, bound_s = plan.objective.step_time_s, plan.objective.lower_bound_s
    step_s, own_bound_s = alone.step_time_s, alone.lower_bound_s
    where = f"alone, {alone.part}"
    if (step_s is not None) != (alone.status in ("optimal", "feasible")):
        yield f"{where}: status {alone.status} with a step of {step_s} s"
    is_fastest = plan.expected_by_pairs is None
    if step_s is not None and (price_s is None or (is_fastest and price_s > step_s)):
        yield f"{where}: {step_s} s a step, less than the plan's {price_s}"
    if step_s is not None and own_bound_s is not None and own_bound_s > step_s:
        yield f"{where}: lower bound {own_bound_s} above its step of {step_s} s"
    is_met = (
        step_s is not None and own_bound_s is not None and own_bound_s >= step_s * (1 - ROUNDING)
    )
    if alone.status == "optimal" and not is_met:
        yield f"{where}: called optimal at price {step_s} and bound {own_bound_s}"
    if alone.status == "infeasible" and own_bound_s is not None:
        yield f"{where}: infeasible, yet with a lower bound of {own_bound_s} s"
    # Nothing on a part alone is left out of what the bound is on.
    nothing_known = own_bound_s is None and alone.status != "infeasible"
    if bound_s is not None and (
        nothing_known or (own_bound_s or bound_s) < bound_s * (1 - ROUNDING)
    ):
        yield f"{where}: its lower bound {own_bound_s} does not carry the plan's {bound_s}"


def _alternative_faults(plan: MixedPlan) -> Iterator[str]:
    """Next best plans that are faster than the plan, or out of order, or not as much slower as they say."""
    before_s = plan.objective.step_time_s
    for place, rival in enumerate(plan.alternatives, start=2):
        step_s, slower_pct = rival.get("step_time_s"), rival.get("slower_pct")
        if not isinstance(step_s, float) or not isinstance(slower_pct, float) or before_s is None:
            yield f"alternatives: the {place}. best plan has no step, or there is no plan"
            return
        if step_s < before_s * (1 - ROUNDING):
            yield f"alternatives: the {place}. best plan takes {step_s} s, the one before {before_s} s"
        slower = step_s / (plan.objective.step_time_s or step_s) - 1.0
        if not isclose(slower_pct, 100.0 * slower, rel_tol=ROUNDING, abs_tol=100 * ROUNDING):
            yield f"alternatives: the {place}. best plan is {slower_pct} % slower, counted {slower:.2%}"
        before_s = step_s


def verify_mixed(plan: MixedPlan) -> None:
    """Raises InternalError with everything that is wrong with a plan on a mixed cluster.

    Parameters
    ----------
    plan
        Of any status.
    """
    broken = list(mixed_faults(plan))
    if broken:
        raise InternalError("the mixed plan failed its own verification: " + "; ".join(broken))


def mixed_faults(plan: MixedPlan) -> Iterator[str]:
    """Everything that is wrong with a plan on a mixed cluster, in words.

    Parameters
    ----------
    plan
        A pipeline through parts, a part that is fastest alone, or none at all.

    Raises
    ------
    InputError
        If its inputs contradict themselves, so that nothing can be worked out.
    """
    yield from objective_faults(plan)
    yield from alone_faults(plan)
    yield from _alternative_faults(plan)
    yield from faults_of_pairs(plan.expected_by_pairs, plan.objective.step_time_s)
    first = plan.cluster.parts[0]
    if plan.inputs.gpus != first.gpus:
        yield f"inputs.gpus is {plan.inputs.gpus}, the first part has {first.gpus}"
    if plan.inputs.cluster != read_cluster(first.cluster, first.gpus):
        yield "inputs.cluster is not that of the first part"
    if plan.layout is None or plan.predicted is None or plan.execution is None:
        return
    broken = [*_split_faults(plan, plan.layout), *_order_faults(plan, plan.layout)]
    yield from broken
    if broken:
        return
    pipeline = Pipeline.of(plan)
    illegal = list(_legality_faults(pipeline))
    yield from illegal
    yield from _memory_faults(pipeline)
    if not illegal:
        yield from _recount_faults(pipeline)
    yield from _figure_faults(pipeline, plan.predicted)
    predicted = plan.predicted
    yield from length_faults(
        plan.lengths, plan.inputs, predicted.breakdown_s, predicted.step_time_s
    )


def _split_faults(plan: MixedPlan, layout: LayoutDoc) -> Iterator[str]:
    """Layers, ranks and micro-batches that do not make up the model and the batch."""
    counts = [rank.layers for rank in plan.ranks]
    layers, batch = plan.inputs.model.layers, plan.inputs.global_batch
    if sum(counts) != layers:
        yield f"the ranks hold {sum(counts)} of {layers} layers"
    if min(counts, default=0) < 1:
        yield f"ranks with layers {counts}: each must have one"
    if layout.stages != [[count] for count in counts]:
        yield f"layout.stages is {layout.stages}, the ranks have {counts} layers"
    if [rank.rank for rank in plan.ranks] != list(range(layout.pp)):
        yield f"the ranks are not 0 to {layout.pp - 1} in turn (pp {layout.pp})"
    if layout.vpp != 1 or layout.schedule != "1f1b":
        yield f"vpp {layout.vpp} under {layout.schedule}: a rank has one virtual stage under 1f1b"
    if layout.micro_batch * layout.num_micro_batches * layout.dp != batch:
        yield f"the micro-batches do not make up the global batch of {batch}"


def _order_faults(plan: MixedPlan, layout: LayoutDoc) -> Iterator[str]:
    """Ranks, nodes and parts that do not stand in one order, or that have no room."""
    parts = dict(zip(plan.cluster.names, plan.cluster.parts, strict=True))
    order = [name for name, _ in groupby(rank.part for rank in plan.ranks)]
    if len(order) < 2 or len(set(order)) < len(order) or not set(order) <= set(parts):
        yield f"the ranks run on {order}: must be two or more of {list(parts)}, each at a stretch"
        return
    if plan.runs_on != order:
        yield f"runs_on is {plan.runs_on}, the ranks run on {order}"
    if [name for name, _ in plan.nodes] != order:
        yield f"nodes are of {[name for name, _ in plan.nodes]}, the ranks run on {order}"
        return
    for name, nodes in plan.nodes:
        per_node = parts[name].cluster.gpus_per_node
        gpus = sum(rank.part == name for rank in plan.ranks) * stage_gpus(layout)
        if nodes * per_node != gpus:
            yield f"{name}: its ranks are on {gpus} GPUs, {nodes} nodes have {nodes * per_node}"
        if gpus > parts[name].gpus:
            yield f"{name}: its ranks are on {gpus} GPUs, the part has {parts[name].gpus}"


def _legality_faults(pipeline: Pipeline) -> Iterator[str]:
    """Fields of the layout that contradict each other, broken rules, pins and forbids."""
    written = layout_document(pipeline.layout, pipeline.stages)
    for field in LayoutDoc.model_fields:
        stated, expected = getattr(pipeline.doc, field), getattr(written, field)
        if stated != expected:
            yield f"layout.{field} is {stated}, the rest of the layout says {expected}"
    yield from wish_faults(pipeline.requests[0], pipeline.doc)
    yield from rule_faults(pipeline)


def rule_faults(pipeline: Pipeline) -> Iterator[str]:
    """What the rules of the framework say on the device of each part, memory included, in words.

    Parameters
    ----------
    pipeline
        Whose ranks stand in order.
    """
    plan = pipeline.plan
    cut_use = None
    if plan.inputs.max_cut_use < 1:
        step = mixed_step(pipeline.segments, pipeline.stages)
        uses = parts_cut_uses(pipeline.segments, plan.runs_on, pipeline.stages, step)
        cut_use = max(uses.values())
    asked = zip(
        plan.runs_on, pipeline.requests, pipeline.segments, pipeline.memory_gib, strict=True
    )
    for name, request, segment, memory_gib in asked:
        finished = FinishedPlan(
            workload=replace(segment.part.workload, gpus=int(pipeline.layout.gpus)),
            layout=pipeline.layout,
            stages=pipeline.stages,
            memory_gib=(0.0,) * segment.first + tuple(memory_gib),
            spans=spans_of(segment.part.context.placement),
            cut_use=cut_use,
        )
        broken = findings(finished, without=(HostMemory.name,))
        yield from (f"{name}: {finding.line}" for finding in broken)
        able = request.execution_options.executions()
        if plan.execution not in [each.of_layout(pipeline.layout) for each in able]:
            yield f"{name}: cannot run the plan's execution"


def _memory_faults(pipeline: Pipeline) -> Iterator[str]:
    """Ranks whose peak, device or room is not what they have on their own part, and hosts without room."""
    plan = pipeline.plan
    for name, short_gib in zip(
        plan.runs_on, hosts_short_gib(pipeline.segments, pipeline.stages), strict=True
    ):
        if short_gib:
            yield f"{name}: a host lacks {short_gib:.1f} GiB for what its GPUs keep there"
    for segment, memory_gib in zip(pipeline.segments, pipeline.memory_gib, strict=True):
        workload = segment.part.workload
        device, usable_gib = workload.cluster.device.name, usable_hbm_gib(workload)
        model = workload.model
        leading = model.dense_layers if model.moe_layers else 0
        for rank, peak_gib in zip(plan.ranks[segment.own], memory_gib, strict=True):
            if rank.device != device:
                yield f"rank {rank.rank} is on {rank.device}, its part has {device}"
            before, until = (plan.ranks[:end] for end in (rank.rank, rank.rank + 1))
            expected = {
                "dense_layers": _before(leading, until) - _before(leading, before),
                "memory_gib": peak_gib,
                "usable_gib": usable_gib,
            }
            for field, counted in expected.items():
                stated = getattr(rank, field)
                if not _same(stated, counted):
                    yield f"rank {rank.rank}: {field} is {stated}, worked out again {counted}"


def _before(leading: int, ranks: list[RankDoc]) -> int:
    """Dense layers in front of those with experts on the first ranks."""
    return min(leading, sum(rank.layers for rank in ranks))


def _recount_faults(pipeline: Pipeline) -> Iterator[str]:
    """Groups that reach further than priced, counted from ranks that run through a part's nodes in turn."""
    for name, segment in zip(pipeline.plan.runs_on, pipeline.segments, strict=True):
        part = segment.part
        cluster, gpus = part.workload.cluster, part.workload.gpus
        counted = recounted_placement(cluster, part.own_layout, allocated_places(cluster, gpus))
        priced = part.context.placement
        for axis in (axis for axis in GROUPS if axis not in ("dp", "pp")):
            stated = np.broadcast_to(getattr(priced, axis), counted.tp.shape)
            if np.any(getattr(counted, axis) < stated):
                yield (
                    f"{name}: groups of {axis} have {getattr(counted, axis).tolist()} of their ranks in the "
                    f"blocks of the fabric, the price assumes {stated.tolist()}"
                )


def _figure_faults(pipeline: Pipeline, stated: MixedPredicted) -> Iterator[str]:
    """The price and what follows from it, worked out again."""
    inputs, segments = pipeline.plan.inputs, pipeline.segments
    step = mixed_step(segments, pipeline.stages)
    step_s = float(np.asarray(step.seconds))
    if not _same(step_s, stated.step_time_s):
        yield f"priced again, the step takes {step_s} s, not {stated.step_time_s} s"
    parts = {name: float(np.asarray(seconds)) for name, seconds in step.parts.items()}
    for name in dict.fromkeys((*parts, *stated.breakdown_s)):
        seconds, said = parts.get(name), stated.breakdown_s.get(name)
        if seconds is None or said is None or not _same(seconds, said):
            yield f"breakdown_s.{name} is {said}, worked out again {seconds}"
    tokens = inputs.tokens_per_step
    peak = sum(
        each.part.workload.gpus * peak_flops(each.part.workload.cluster.device, inputs.precision)
        for each in segments
    )
    flops_per_s = segments[0].part.workload.model_flops_per_token * tokens / step_s
    gpus = int(pipeline.layout.gpus)
    for name, figure in (
        ("tokens_per_s", tokens / step_s),
        ("tokens_per_s_per_gpu", tokens / step_s / gpus),
        ("tflops_per_gpu", flops_per_s / gpus / 1e12),
        ("mfu", flops_per_s / peak),
    ):
        said = getattr(stated, name)
        if said is not None and not _same(said, figure):
            yield f"{name} is {said}, worked out again {figure}"
    ranks_gib = [rank.memory_gib for rank in pipeline.plan.ranks]
    if stated.memory_gib not in (None, ranks_gib):
        yield f"memory_gib is {stated.memory_gib}, that of the ranks {ranks_gib}"
    on_host_gib = host_memory_gib(segments, pipeline.stages)
    if not _same(stated.host_memory_gib or 0.0, on_host_gib):
        yield f"host_memory_gib is {stated.host_memory_gib}, worked out again {on_host_gib}"
    bands = [step_time_band(each.part.workload) for each in segments]
    widest = (min(each.low for each in bands), max(each.high for each in bands))
    band = stated.error_band
    rows = min(each.rows for each in bands)
    if (band.low, band.high, band.rows, band.basis) != (*widest, rows, NOT_MEASURED):
        yield f"error_band is not the widest of the parts', {widest[0]} to {widest[1]}, unmeasured"


def _same(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=ROUNDING, abs_tol=1e-12)
