"""The second opinion on a finished plan: no solver, no search, nothing taken on trust but the cost
formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isclose, prod

import numpy as np

from meshwright.cluster_specs.allocation import allocated_places
from meshwright.costmodel.layout import AXES, ROUNDING, Layout, Placement
from meshwright.costmodel.placement import level_factors
from meshwright.costmodel.recount import blocks_left, recounted_placement
from meshwright.costmodel.workload import Workload
from meshwright.errors import InternalError
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.mapping.pricing import cut_uses
from meshwright.planner.plan.document import ExpectedByPairs, LengthsDoc, Mapping, Plan
from meshwright.planner.plan.texts import Setup, priced_of, setup_of
from meshwright.planner.request.choices import IDLE_GPUS, is_forbidden
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted, layout_from_document


def verify(request: PlanRequest, plan: Plan) -> None:
    """Raises InternalError with everything that is wrong with a plan.

    Parameters
    ----------
    request
        What was planned, on the nodes that were taken.
    plan
        Just made, of any status.
    """
    broken = list(faults(request, plan))
    if broken:
        raise InternalError("the plan failed its own verification: " + "; ".join(broken))


def faults(request: PlanRequest, plan: Plan) -> Iterator[str]:
    """Everything that is wrong with a plan, in words.

    Parameters
    ----------
    request
        That the plan should answer, which may be another one than its inputs say.
    plan
        Of any status.
    """
    yield from _objective_faults(plan)
    yield from faults_of_pairs(plan.expected_by_pairs, plan.objective.step_time_s)
    yield from _cost_faults(plan)
    if plan.predicted is not None:
        predicted = plan.predicted
        yield from length_faults(
            plan.lengths, plan.inputs, predicted.breakdown_s, predicted.step_time_s
        )
    if plan.layout is None or plan.predicted is None or plan.mapping is None:
        if plan.status in ("optimal", "feasible"):
            yield f"status {plan.status} without a layout"
        return
    layout = layout_from_document(plan.layout)
    execution = plan.execution
    all_gpus = request.workload() if execution is None else execution.applied(request.workload())
    workload = all_gpus.on(int(layout.gpus))
    yield from split_faults(request, plan.layout)
    yield from _mapping_faults(workload, layout, plan.mapping)
    setup = setup_of(plan, all_gpus)
    yield from _price_faults(setup, plan.predicted)
    yield from _recount_faults(setup, plan.mapping)
    cut_use = None
    if all_gpus.max_cut_use < 1:
        # A plan that was placed on other nodes has the GPU of every rank in place of a matrix.
        uses = cut_uses(all_gpus, priced_of(plan), setup.placement)
        cut_use = max(uses.values(), default=0.0)
    broken = replace(setup, workload=all_gpus).broken_rules(cut_use=cut_use)
    yield from (finding.line for finding in broken)
    yield from wish_faults(request, plan.layout)


def _objective_faults(plan: Plan) -> Iterator[str]:
    objective = plan.objective
    price, bound = objective.step_time_s, objective.lower_bound_s
    if (
        price is not None
        and plan.predicted is not None
        and not _same(price, plan.predicted.step_time_s)
    ):
        yield f"objective {price} is not the predicted {plan.predicted.step_time_s}"
    if price is not None and bound is not None and bound > price:
        yield f"lower bound {bound} above the price {price}"
    if plan.status == "optimal" and (price is None or bound is None or not _same(price, bound)):
        yield f"called optimal at price {price} and bound {bound}"


def faults_of_pairs(expected: ExpectedByPairs | None, price: float | None) -> Iterator[str]:
    """What a document says of measured pairs that its own price, factors and bound do not.

    Parameters
    ----------
    expected
        None where nothing is said.
    price
        The step of the plan, seconds.
    """
    if expected is None:
        return
    if price is None or not _same(expected.chosen.step_time_s, price):
        yield f"the plan by pairs takes {expected.chosen.step_time_s} s, the objective says {price}"
    for promised in (expected.chosen, expected.fastest):
        factor = prod(each.factor for each in promised.corrections)
        if not _same(promised.expected_step_time_s, promised.step_time_s * factor):
            yield (
                f"expected step {promised.expected_step_time_s} is not {promised.step_time_s} times "
                f"its corrections, {factor}"
            )
    least_s, bound_s = expected.chosen.expected_step_time_s, expected.lower_bound_s
    if least_s > expected.fastest.expected_step_time_s * (1.0 + ROUNDING):
        yield f"expected step {least_s} is above that of the fastest plan"
    if bound_s is not None and bound_s > least_s:
        yield f"lower bound {bound_s} above the expected step {least_s}"
    if expected.proven and (bound_s is None or not _same(bound_s, least_s)):
        yield f"called proven at an expected step of {least_s} and bound {bound_s}"


def _cost_faults(plan: Plan) -> Iterator[str]:
    """What the document says of the training and of the hosts that its own step and parts do not."""
    predicted, cost, inputs = plan.predicted, plan.cost, plan.inputs
    if predicted is None:
        return
    if plan.host_memory_gib not in (None, predicted.host_memory_gib):
        yield f"host memory {plan.host_memory_gib} is not the predicted {predicted.host_memory_gib}"
    if cost is None:
        return
    in_time = (
        None if cost.days_asked is None else cost.plan.days <= cost.days_asked * (1 + ROUNDING)
    )
    if cost.in_time != in_time:
        yield f"in_time {cost.in_time} at {cost.plan.days} days of {cost.days_asked}"
    steps = cost.tokens / inputs.tokens_per_step
    hours, power_w = steps * predicted.step_time_s / 3600, inputs.cluster.device.tdp_w
    gpu_hours, price = hours * inputs.gpus, cost.gpu_hour_price
    for name, told, counted in (
        ("days", cost.plan.days, hours / 24),
        ("gpu_hours", cost.plan.gpu_hours, gpu_hours),
        ("dollars", cost.plan.dollars, gpu_hours * (price or 0.0)),
        ("kwh", cost.plan.kwh, gpu_hours * power_w / 1000),
        ("gpu_power_w", cost.gpu_power_w, power_w),
    ):
        if told is not None and not _same(told, counted):
            yield f"{name} of the training are {counted}, not {told}"


def length_faults(
    told: LengthsDoc | None, inputs: PlanInputs, breakdown_s: dict[str, float], step_s: float
) -> Iterator[str]:
    """What a document says of packs that its inputs and its own step do not, in words.

    Parameters
    ----------
    told
        What it says; None where it says nothing.
    inputs
        What was asked.
    breakdown_s, step_s
        Its step, and the parts of it, in seconds.
    """
    packed = inputs.lengths
    if told is None:
        return
    if packed is None:
        yield "lengths of samples are told of, the inputs have none"
        return
    tokens = inputs.tokens_per_step
    for name, stated, counted in (
        ("pack_size", told.pack_size, inputs.seq_len),
        ("samples_per_step", told.samples_per_step, inputs.global_batch * packed.samples_a_pack),
        ("tokens_per_step", told.tokens_per_step, tokens),
        ("cut_samples", told.cut_samples, packed.cut_samples),
        ("attended_share", told.attended_share, packed.attended_share),
        ("fill", told.planned.fill, packed.fill),
        ("step_time_s", told.planned.step_time_s, step_s),
        ("imbalance_s", told.planned.imbalance_s, breakdown_s.get("length_imbalance", 0.0)),
        ("tokens_per_s", told.planned.tokens_per_s, tokens / step_s),
    ):
        if not _same(stated, counted):
            yield f"lengths: {name} is {counted}, not {stated}"


def split_faults(request: PlanRequest, doc: LayoutDoc) -> Iterator[str]:
    """Layers and micro-batches of a layout that do not make up the model and the batch, in words.

    Parameters
    ----------
    request
        With the model and the batch.
    doc
        Whose micro-batches and layers of each [pipeline rank][virtual stage] are added up.
    """
    layer_counts = [count for rank in doc.stages for count in rank]
    if sum(layer_counts) != request.model.layers:
        yield f"the stages hold {sum(layer_counts)} of {request.model.layers} layers"
    if (
        len(doc.stages) != doc.pp
        or any(len(rank) != doc.vpp for rank in doc.stages)
        or min(layer_counts) < 0
    ):
        yield f"stages {doc.stages} are not pp {doc.pp} x vpp {doc.vpp}"
    if doc.micro_batch * doc.num_micro_batches * doc.dp != request.global_batch:
        yield "the micro-batches do not make up the global batch"


def _mapping_faults(workload: Workload, layout: Layout, mapping: Mapping) -> Iterator[str]:
    if not mapping.matrix:
        yield from _rank_faults(workload, layout, mapping)
        return
    sizes = level_factors(workload.cluster, workload.gpus).tolist()
    for axis in AXES:
        if prod(mapping.matrix[axis]) != int(getattr(layout, axis)):
            yield f"mapping of {axis}: factors {mapping.matrix[axis]} do not make {getattr(layout, axis)}"
    columns = [prod(mapping.matrix[axis][level] for axis in AXES) for level in range(len(sizes))]
    if columns != sizes:
        yield f"mapping fills levels of {columns}, the fabric has {sizes}"
    if mapping.ranks is None:
        return
    gpus = workload.gpus
    expected = {
        place: position for position, place in enumerate(allocated_places(workload.cluster, gpus))
    }
    if len(mapping.ranks) != gpus or {(node, gpu) for node, gpu in mapping.ranks} != set(expected):
        yield "the ranks are not a permutation of the GPUs"
        return
    tp, block = int(layout.tp), sizes[0]
    positions = [expected[node, gpu] for node, gpu in mapping.ranks]
    if any(
        len({p // block for p in positions[position : position + tp]}) > 1
        for position in range(0, gpus, tp)
    ):
        yield "a tensor-parallel group leaves the scale-up domain"


def _rank_faults(workload: Workload, layout: Layout, mapping: Mapping) -> Iterator[str]:
    """What is wrong with a mapping that is given rank by rank, on the free GPUs of a cluster's nodes."""
    cluster, ranks = workload.cluster, mapping.ranks or []
    free = {
        (index, gpu)
        for index, node in enumerate(cluster.nodes)
        for gpu in range(cluster.gpus_per_node if node.free_gpus is None else node.free_gpus)
    }
    if not cluster.nodes:
        free = {divmod(gpu, cluster.gpus_per_node) for gpu in range(cluster.gpus)}
    if len(ranks) != workload.gpus or len(set(ranks)) != len(ranks) or not set(ranks) <= free:
        yield "the ranks are not on free GPUs, one each"
    domain, tp = max(cluster.nvlink_domain // cluster.gpus_per_node, 1), int(layout.tp)
    for first_rank in range(0, len(ranks), tp):
        nodes = {node for node, _ in ranks[first_rank : first_rank + tp]}
        leaves = {
            (cluster.nodes[node].pod, cluster.nodes[node].leaf) for node in nodes if cluster.nodes
        }
        domains = {node // domain for node in nodes if not cluster.nodes}
        if len(nodes) > domain or len(leaves) > 1 or len(domains) > 1:
            yield "a tensor-parallel group leaves the scale-up domain"
            return


def _price_faults(setup: Setup, predicted: Predicted) -> Iterator[str]:
    priced_s = setup.step_time_s
    if not _same(priced_s, predicted.step_time_s):
        yield f"priced again, the step takes {priced_s} s, not {predicted.step_time_s} s"
    total = sum(predicted.breakdown_s.values())
    if not _same(total, predicted.step_time_s):
        yield f"the breakdown adds up to {total} s, not {predicted.step_time_s} s"
    if not np.allclose(setup.memory_gib, predicted.memory_gib, rtol=ROUNDING, atol=0):
        yield "the memory of the stages is not what the layout needs"


def recounted(workload: Workload, layout: Layout, mapping: Mapping) -> Placement:
    """Where the groups of a mapping lie, counted from its rank list alone; by stage, if it says so.

    Parameters
    ----------
    workload
        On the GPUs that the layout uses.
    layout
        Plain integers.
    mapping
        With the GPU of every rank, or a matrix that means one.
    """
    return recounted_placement(
        workload.cluster,
        layout,
        _ranks_of(workload, mapping),
        by_stage=mapping.stage_ep is not None,
    )


def _ranks_of(workload: Workload, mapping: Mapping) -> list[tuple[int, int]]:
    """The rank list of a mapping, or the one that its matrix means."""
    matrix = {axis: tuple(row) for axis, row in mapping.matrix.items()}
    return list(mapping.ranks or ranks_on(workload.cluster, matrix))


def _recount_faults(setup: Setup, mapping: Mapping) -> Iterator[str]:
    """Groups that lie elsewhere than priced, by the rank list."""
    workload, placement = setup.workload, setup.placement
    counted = recounted(workload, setup.layout, mapping)
    yield from blocks_left(workload.cluster, _ranks_of(workload, mapping))
    seconds = [setup.step_time_s, replace(setup, placement=counted).step_time_s]
    if not _same(*seconds):
        different = [
            f"{name} {getattr(placement, name).tolist()} for {members.tolist()}"
            for name, members in vars(counted).items()
            if not np.array_equal(members, getattr(placement, name))
        ]
        yield (
            f"by its rank list the step takes {seconds[1]} s, not {seconds[0]} s: members by level, priced "
            f"for counted: {', '.join(different)}"
        )


def wish_faults(request: PlanRequest, doc: LayoutDoc) -> Iterator[str]:
    """Pins that a layout does not keep, and what it has though the request forbids it, in words.

    Parameters
    ----------
    request
        With pins and forbidden choices.
    doc
        Of a plan, or of a further layout of it.
    """
    for name, value in request.layout_pins.items():
        if getattr(doc, name) != value:
            yield f"{name} is {getattr(doc, name)}, pinned to {value}"
    leaves_idle = doc.gpus < request.gpus
    for name in request.forbids:
        if leaves_idle if name == IDLE_GPUS else is_forbidden(name, partial(getattr, doc)):
            yield f"{name} is forbidden, yet in the plan"


def _same(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=ROUNDING)
