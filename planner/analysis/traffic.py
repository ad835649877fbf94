"""A plan on its fabric: the GPUs of its ranks, what crosses, and which cut holds it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal, get_args

import numpy as np

from meshwright.cluster_specs.allocation import (
    allocated_places,
    fabric_levels,
    is_irregular,
    node_name,
)
from meshwright.cluster_specs.reader import is_mixed_cluster, read_cluster, read_mixed_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.estimate import Stages, estimate_layout
from meshwright.costmodel.layout import ROUNDING, Layout, Placement
from meshwright.costmodel.placement import nested_placement, placement_on
from meshwright.costmodel.volumes import (
    AxisPattern,
    CutUse,
    GroupTraffic,
    LevelBytes,
    axis_pattern,
    group_traffic,
    mean_rank_work,
    operations_of_a_step,
)
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InputError, check_choice
from meshwright.planner.bounds.mappings import ranks_on
from meshwright.planner.mapping.cuts import (
    MICRO_BATCHES,
    PARTS,
    AxisFlow,
    MappingUse,
    binding_cut,
    broken_cuts,
    level_table,
    mapping_use,
    parts_use,
)
from meshwright.planner.mapping.least_traffic import TIME_LIMIT_S, least_traffic, with_spares
from meshwright.planner.mapping.problem import FloatArray, IntArray, Loads, loads_of, spread_of
from meshwright.planner.mapping.slots import (
    Instance,
    MappingObjective,
    MappingSolution,
    Place,
    assignment_of_ranks,
    idle_nodes,
    instance_of,
    ranks_of,
)
from meshwright.planner.mapping.spread import EQUAL, LevelReach, SpreadSolution, least_spread
from meshwright.planner.mapping.spread_build import ReachWeights, with_short_pipelines
from meshwright.planner.mixed.document import AnyPlan, MixedPlan, Pipeline, stage_gpus
from meshwright.planner.mixed.service import placed_on_parts
from meshwright.planner.plan.document import MOST_LISTED_RANKS, Plan, with_digest
from meshwright.planner.plan.make_plan import placed_on
from meshwright.planner.plan.texts import group_placement, matrix_arrays, with_stages
from meshwright.planner.request.reader import limited_to_nodes, named_nodes
from meshwright.planner.runs.prediction import planned_workload
from meshwright.planner.runs.run_terms import layout_from_document
from meshwright.planner.solvers.clock import within

OBJECTIVES: tuple[MappingObjective, ...] = ("traffic", "spread")
MappingOrder = Literal["best", "hostname"]
ORDERS: tuple[str, ...] = get_args(MappingOrder)
MOST_SPARES = 131_072


@dataclass(frozen=True, kw_only=True)
class MappedPlan:
    """A plan on a cluster's free nodes."""

    plan: Plan
    """With the new mapping, priced there."""
    planned_s: float | None
    """The step as the plan given states it."""
    instance: Instance
    solution: MappingSolution
    ranks: list[Place]
    idle: list[str]
    """Free nodes that no rank is on."""


def map_plan(
    plan: Plan,
    cluster: ClusterSpec | None = None,
    *,
    objective: str = "traffic",
    order: str = "best",
    spares: int = 0,
    weights: ReachWeights = EQUAL,
    time_limit_s: float = TIME_LIMIT_S,
) -> MappedPlan:
    """Places a plan's layout on the free nodes of a cluster, the plan's own where none is given.

    `weights` are those of the objective `spread`.
    Raises InputError for a wish that is not known, InfeasibleError where the layout does not fit, or breaks a
    rule there.

    Parameters
    ----------
    plan
        With a layout.
    cluster
        On whose free nodes it is placed; the plan's own when None.
    objective
        One of `OBJECTIVES`: seconds of up-links, or blocks that groups touch.
    order
        One of `ORDERS`; `hostname` solves nothing.
    spares
        Nodes that stay free, 0 to `MOST_SPARES`.
    weights
        Of data-parallel groups against pipelines, for the objective `spread`.
    time_limit_s
        Seconds of the search, above 0.
    """
    for name, value, allowed in (("objective", objective, OBJECTIVES), ("order", order, ORDERS)):
        check_choice(value, allowed, name, "is not known")
    if not 0 <= spares <= MOST_SPARES:
        raise InputError(f"spares: {spares} is out of range (nodes); allowed: 0 to {MOST_SPARES}")
    cluster = cluster or plan.inputs.cluster
    layout_doc = plan.layout
    if layout_doc is None:
        raise InfeasibleError(
            f"the plan has no layout (status {plan.status}): there is nothing to map"
        )
    layout = layout_from_document(layout_doc)
    stages = tuple(tuple(rank) for rank in layout_doc.stages)

    def solved(on: ClusterSpec, spare: int) -> tuple[Instance, MappingSolution]:
        instance = instance_of(workload_of(plan, on, int(layout.gpus)), layout, stages, spare)
        if order == "hostname":
            return instance, hostname_solution(instance, objective)
        return instance, _solved(instance, objective, weights, time_limit_s)

    with within(time_limit_s):
        instance, solution = with_spares(cluster, spares, solved)
    ranks = ranks_of(instance, solution.assignment)
    # Of a kind of node there are as many as are wanted: none is left over.
    unused = [] if cluster.elastic else idle_nodes(cluster, ranks)
    return MappedPlan(
        plan=with_digest(placed_on(plan, cluster, ranks)),
        planned_s=plan.objective.step_time_s,
        instance=instance,
        solution=solution,
        ranks=ranks,
        idle=[node_name(cluster, node) for node in unused],
    )


def nodes_to_place_on(plan: Plan, cluster: str | None, nodes: str | None) -> ClusterSpec | None:
    """What a plan is to be placed on.

    Parameters
    ----------
    plan
        A finished plan.
    cluster
        Catalog name or cluster file; the plan's own cluster when None.
    nodes
        Host list, or a file of them, of the nodes that ranks may go to; all when None.

    Returns
    -------
    ClusterSpec or None
        None where neither is given.

    Raises
    ------
    InputError
        As `plan --nodes` does.
    InfeasibleError
        If these nodes of the plan's own cluster are too few.
    """
    if cluster is None and nodes is None:
        return None
    onto = plan.inputs.cluster if cluster is None else read_cluster(cluster)
    if nodes is None:
        return onto
    limited = limited_to_nodes(onto, nodes)
    layout = plan.layout
    needed = 0 if layout is None else layout.gpus
    if cluster is None and limited.gpus < needed:
        raise InfeasibleError(
            f"the layout needs {needed} GPUs, these nodes of {onto.name!r} have {limited.gpus} free; nodes "
            "that the plan left out count as taken: give the whole cluster with --cluster"
        )
    return limited


@dataclass(frozen=True, kw_only=True)
class MappedParts:
    """A pipeline on the nodes of its parts, ranks through those of each in turn."""

    plan: MixedPlan
    """Priced there."""
    planned_s: float | None
    """The step as the plan given states it."""
    in_turn: dict[str, Loads]
    """By part, in the order of the pipeline: what its ranks send up."""
    least: dict[str, MappingSolution]
    """What other nodes of it or another order of them could send, with a bound."""


def map_parts(
    plan: MixedPlan,
    cluster: str | None = None,
    nodes: str | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
) -> MappedParts:
    """Places a pipeline on nodes of its parts, and says what other places of a part could spare its up-links.

    What is handed over between parts goes up from a part wherever its ranks are, so that each part is placed
    by itself.

    Parameters
    ----------
    plan
        A pipeline through parts.
    cluster
        A cluster file with parts of the same names; the plan's own cluster when None.
    nodes
        Host list, or a file of them, of the nodes that ranks may go to; all when None.
    time_limit_s
        Seconds for all parts.

    Raises
    ------
    InputError
        If the nodes or the cluster cannot be used.
    InfeasibleError
        If the pipeline has no room there, or breaks a rule.
    """
    if cluster is not None and not is_mixed_cluster(cluster):
        what = "a pipeline through parts of a cluster is placed on a cluster file with parts"
        raise InputError(what, where="--cluster", value=cluster)
    onto = plan.cluster if cluster is None else read_mixed_cluster(cluster)
    names = None if nodes is None else named_nodes(nodes, onto.free_by_name)
    onto = onto if names is None else onto.only_nodes(names)
    placed = plan if onto == plan.cluster else placed_on_parts(plan, onto)
    pipeline = Pipeline.of(placed)
    in_turn: dict[str, Loads] = {}
    solutions: dict[str, MappingSolution] = {}
    with within(time_limit_s):
        for name, segment in zip(placed.runs_on, pipeline.segments, strict=True):
            part = segment.part
            stages = pipeline.stages[segment.own]
            instance = instance_of(part.workload, part.own_layout, stages)
            places = allocated_places(part.workload.cluster, part.workload.gpus)
            assignment = assignment_of_ranks(instance, places)
            in_turn[name] = loads_of(instance.problem, assignment)
            solutions[name] = least_traffic(instance.problem, time_limit_s=time_limit_s)
    return MappedParts(
        plan=placed, planned_s=plan.objective.step_time_s, in_turn=in_turn, least=solutions
    )


def mapped_parts_document(mapped: MappedParts) -> dict[str, Any]:
    """What `map --json` prints of a pipeline through parts, without `schema`."""
    return {
        "nodes": [list(each) for each in mapped.plan.nodes],
        "step_time_s": mapped.plan.objective.step_time_s,
        "planned_step_time_s": mapped.planned_s,
        "parts": {
            name: _loads_document(loads)
            | {
                "lower_bound_s": mapped.least[name].bound_s,
                "best_found_s": mapped.least[name].price_s,
                "status": "optimal"
                if loads.total_s <= mapped.least[name].bound_s * (1 + ROUNDING)
                else "feasible",
            }
            for name, loads in mapped.in_turn.items()
        },
    }


def moved(plan: AnyPlan, cluster: str | None, nodes: str | None) -> AnyPlan:
    """A plan placed on other nodes, as `map_plan` or `map_parts` places it; itself where none are named.

    Parameters
    ----------
    plan
        With a layout.
    cluster, nodes
        As `nodes_to_place_on` takes them.

    Raises
    ------
    InputError
        As there.
    InfeasibleError
        As `map_plan`.
    """
    if cluster is None and nodes is None:
        return plan
    if isinstance(plan, MixedPlan):
        return map_parts(plan, cluster, nodes).plan
    return map_plan(plan, nodes_to_place_on(plan, cluster, nodes)).plan


def _solved(
    instance: Instance, objective: str, weights: ReachWeights, time_limit_s: float
) -> MappingSolution:
    if objective == "spread":
        return least_spread(instance.problem, weights=weights, time_limit_s=time_limit_s)
    solution = least_traffic(instance.problem, time_limit_s=time_limit_s)
    # Of mappings that send the same, one whose pipelines touch few blocks.
    assignment = with_short_pipelines(instance.problem, solution.assignment)
    return replace(solution, assignment=assignment, loads=loads_of(instance.problem, assignment))


def workload_of(plan: Plan, cluster: ClusterSpec, gpus: int) -> Workload:
    """What the cost model prices of a plan, on a cluster. Raises InfeasibleError where it is too small.

    Parameters
    ----------
    plan
        Its inputs, execution and calibration count.
    cluster
        In place of the plan's own.
    gpus
        Of the layout, at most those of the cluster.
    """
    if gpus > cluster.gpus:
        raise InfeasibleError(
            f"the layout needs {gpus} GPUs, cluster {cluster.name!r} has {cluster.gpus} free"
        )
    inputs = plan.inputs.model_copy(update={"cluster": cluster, "gpus": gpus})
    return planned_workload(inputs, plan.execution)


def hostname_solution(instance: Instance, objective: str) -> MappingSolution:
    """Hostname order, unsolved: its bound is 0.

    Parameters
    ----------
    instance
        What is placed, and on which slots.
    objective
        One of `OBJECTIVES`: by which it is priced.
    """
    began = monotonic()
    assignment = instance.problem.hostname_assignment()
    loads = loads_of(instance.problem, assignment)
    return MappingSolution(
        objective=next(name for name in OBJECTIVES if name == objective),
        assignment=assignment,
        loads=loads,
        hostname_loads=loads,
        bound_s=0.0,
        rounds=(),
        wall_s=monotonic() - began,
    )


def mapping_document(mapped: MappedPlan) -> dict[str, Any]:
    """What `map --json` prints, without `schema`. `order` is the axis order that ranks are counted in."""
    solution, problem = mapped.solution, mapped.instance.problem
    mapping = mapped.plan.mapping
    assert mapping is not None
    hostname = problem.hostname_assignment()
    spread = solution if isinstance(solution, SpreadSolution) else None
    bounded = spread is None or spread.bounded
    return {
        "order": list(mapping.order),
        "ranks": [list(place) for place in mapped.ranks],
        "step_time_s": mapped.plan.objective.step_time_s,
        "planned_step_time_s": mapped.planned_s,
        "objective": solution.objective,
        "price_s": solution.price_s,
        "lower_bound_s": solution.bound_s if bounded else None,
        "gap": solution.gap if bounded else None,
        "status": "optimal" if solution.proven else "feasible",
        "hostname_order": _loads_document(solution.hostname_loads)
        | {"price_s": solution.hostname_s, "spread": _spread_document(mapped, hostname)},
        **_loads_document(solution.loads),
        "spread": _spread_document(mapped, solution.assignment),
        "spread_certificate": None if spread is None else _certificate_document(spread),
        "slots": {
            "gpus": mapped.instance.slots.gpus,
            "gpus_per_node": mapped.plan.inputs.cluster.gpus_per_node,
            "stages": problem.stages,
            "per_stage": problem.slots,
            "leaves": len(problem.leaf_slots),
            "pods": problem.pods,
            "free": sum(problem.leaf_slots),
        },
        "idle_nodes": mapped.idle,
        "solver": {
            "wall_s": solution.wall_s,
            "rounds": [dict(vars(each)) for each in solution.rounds],
        },
    }


def _loads_document(loads: Loads) -> dict[str, object]:
    return {
        "uplinks_busy_s": loads.total_s,
        "busiest_uplink_s": loads.busiest_s,
        "leaf_bytes_per_step": float(loads.leaf_bytes.sum()),
        "pod_bytes_per_step": float(loads.pod_bytes.sum()),
    }


def _spread_document(mapped: MappedPlan, assignment: Any) -> dict[str, dict[str, float]]:
    """Leaves and pods that data-parallel and pipeline groups touch."""
    pods = mapped.instance.problem.pod_of[assignment]
    return {"leaves": dict(vars(spread_of(assignment))), "pods": dict(vars(spread_of(pods)))}


def _certificate_document(solution: SpreadSolution) -> dict[str, object]:
    """What was minimised, level by level; pairs are (data-parallel groups, pipelines)."""

    def level(reach: LevelReach) -> dict[str, object]:
        return {
            "found": list(reach.reached),
            "hostname_order": list(reach.hostname),
            "lower_bound": list(reach.bound),
            "status": "optimal" if reach.proven else "feasible",
        }

    return {
        "data_parallel_weight": solution.weights.data_parallel / 1000,
        "pipeline_weight": solution.weights.pipeline / 1000,
        "pods": level(solution.pods),
        "leaves": level(solution.leaves),
    }


# What a plan sends over each level of the fabric, and which cut holds it back.


SCALE_UP = ("nvlink", "xgmi", "pcie")
"""Media inside a node or rack, where nothing is routed."""


@dataclass(frozen=True, kw_only=True)
class PlanTraffic:
    """Bytes of a step by level, axis and process group, and how busy each cut is in its phase."""

    layout: Layout
    levels: tuple[LevelBytes, ...]
    """Added up from the groups as they are mapped; the table of the plan."""
    use: MappingUse
    places: tuple[Place, ...]
    """(node, local GPU) of every rank."""
    cuts: tuple[CutUse, ...]
    groups: GroupTraffic
    """What one GPU puts into each of its groups, wherever they lie."""
    uplinks: Loads | None
    """On an irregular allocation: what the mapping's ranks send up each leaf and pod."""
    operations: dict[str, float]
    """That the mean rank starts in a step, by axis."""
    broken: tuple[str, ...]
    """Cuts that need more than their phase, in words."""
    step_time_s: float
    non_blocking_s: float | None
    """The same step on the same fabric without oversubscription; None where it has none."""

    @property
    def binding(self) -> CutUse | None:
        """The cut with the highest utilisation."""
        return binding_cut(self.cuts)

    @property
    def axes(self) -> tuple[AxisFlow, ...]:
        """What all groups send."""
        return self.use.axes

    @property
    def ranks(self) -> int:
        """In all."""
        return len(self.places)

    def document(self) -> dict[str, Any]:
        """What `traffic --json` prints, without `schema`."""
        axes = sorted({axis for level in self.levels for axis in level.by_axis})
        binding, kinds = self.binding, patterns(self)
        return {
            "levels": [dict(vars(level)) for level in self.levels],
            "axes": {axis: _axis_document(self, axis, kinds[axis]) for axis in axes},
            "groups_bytes_per_gpu": dict(vars(self.groups)),
            "groups": _groups_document(self.use),
            "cuts": [_cut_document(cut) for cut in self.cuts],
            "binding": None if binding is None else _cut_document(binding),
            "uplinks": None
            if self.uplinks is None
            else {
                "leaf_bytes": self.uplinks.leaf_bytes.tolist(),
                "pod_bytes": self.uplinks.pod_bytes.tolist(),
                "busiest_s": self.uplinks.busiest_s,
                "total_s": self.uplinks.total_s,
            },
            "broken": list(self.broken),
            "oversubscription": None
            if self.non_blocking_s is None
            else {
                "step_time_s": self.step_time_s,
                "non_blocking_step_time_s": self.non_blocking_s,
                "loss_s": self.step_time_s - self.non_blocking_s,
            },
        }


def traffic_of(plan: AnyPlan) -> PlanTraffic | PartsTraffic:
    """What a plan sends, on one cluster or through parts. Raises InfeasibleError without a layout."""
    return parts_traffic(plan) if isinstance(plan, MixedPlan) else plan_traffic(plan)


def plan_traffic(plan: Plan) -> PlanTraffic:
    """Prices the traffic of a plan again, under its own mapping. Raises InfeasibleError without a layout.

    Parameters
    ----------
    plan
        On one cluster; its own ranks or matrix say where groups lie.
    """
    if plan.layout is None:
        raise InfeasibleError(f"the plan has no layout (status {plan.status}): nothing is sent")
    layout = layout_from_document(plan.layout)
    workload = workload_of(plan, plan.inputs.cluster, int(layout.gpus))
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    placement, places = _mapped(plan, workload, layout)
    priced = estimate_layout(workload, layout, placement, stages)
    use = mapping_use(workload, layout, stages, placement=placement, priced=priced, places=places)
    mapping = plan.mapping
    return PlanTraffic(
        layout=layout,
        levels=tuple(level_table(use, float(np.asarray(priced.step_time_s)))),
        use=use,
        places=tuple(places),
        cuts=use.cuts,
        groups=group_traffic(use.context, stages),
        uplinks=None if mapping is None or mapping.matrix else _uplinks(plan, layout),
        operations=operations_of_a_step(use.context, mean_rank_work(use.context, stages)),
        broken=tuple(broken_cuts(use.cuts)),
        step_time_s=float(np.asarray(priced.step_time_s)),
        non_blocking_s=_non_blocking_s(workload, layout, placement, stages),
    )


def _non_blocking_s(
    workload: Workload, layout: Layout, placement: Placement, stages: Stages
) -> float | None:
    """The step with as many links up as down at every level, other things equal; None where that is so."""
    cluster = workload.cluster
    if all(level.oversubscription <= 1 for level in cluster.levels):
        return None
    levels = tuple(level.model_copy(update={"oversubscription": 1.0}) for level in cluster.levels)
    free = replace(workload, cluster=cluster.model_copy(update={"levels": levels}))
    if fabric_levels(free.cluster, free.gpus).names != fabric_levels(cluster, workload.gpus).names:
        return None  # links alone made the allocation irregular: its blocks are others without that
    return float(np.asarray(estimate_layout(free, layout, placement, stages).step_time_s))


def _mapped(plan: Plan, workload: Workload, layout: Layout) -> tuple[Placement, list[Place]]:
    """Where groups lie to the cost model, and the GPU of every rank."""
    mapping, cluster = plan.mapping, workload.cluster
    if mapping is not None and mapping.matrix:
        rows = {axis: tuple(row) for axis, row in mapping.matrix.items()}
        places = list(mapping.ranks) if mapping.ranks is not None else ranks_on(cluster, rows)
        return placement_on(cluster, layout, matrix_arrays(rows)), places
    if mapping is not None and mapping.ranks is not None:
        doc = plan.layout
        assert doc is not None
        stages = tuple(tuple(rank) for rank in doc.stages)
        if is_irregular(cluster):
            placement = group_placement(workload, layout, stages, {}, mapping.ranks)
            return with_stages(placement, mapping.stage_ep), list(mapping.ranks)
        return nested_placement(cluster, layout), list(mapping.ranks)
    return nested_placement(cluster, layout), allocated_places(cluster, int(layout.gpus))


def _uplinks(plan: Plan, layout: Layout) -> Loads | None:
    """What a mapping given rank by rank sends up; None where its ranks do not fill slots."""
    mapping, doc = plan.mapping, plan.layout
    if mapping is None or mapping.ranks is None or doc is None:
        return None
    stages = tuple(tuple(rank) for rank in doc.stages)
    try:
        workload = workload_of(plan, plan.inputs.cluster, int(layout.gpus))
        instance = instance_of(workload, layout, stages)
        return loads_of(instance.problem, assignment_of_ranks(instance, mapping.ranks))
    except InfeasibleError:
        return None


def patterns(traffic: PlanTraffic) -> dict[str, AxisPattern]:
    """What kind of traffic each axis makes under the plan's mapping.

    Parameters
    ----------
    traffic
        Of a plan on one cluster, or of one part.
    """
    burst = int(traffic.layout.zero_stage) != 3
    outer = [
        level
        for level in traffic.use.levels
        if traffic.use.positions.levels.media[level.positions.depth] not in SCALE_UP
    ]
    parts: dict[str, list[str]] = {}
    sent_as: dict[str, str] = {}
    for flow in traffic.use.axes:
        axis = PARTS.get(flow.axis, flow.axis)
        parts.setdefault(axis, []).append(flow.axis)
        if axis != "dp":
            swaps = flow.axis == "cp" and flow.kind == "all-to-all"
            sent_as.setdefault(axis, "cp-swaps" if swaps else flow.axis)
    return {
        axis: axis_pattern(
            axis,
            traffic.layout,
            sent_as=sent_as.get(axis),
            inside_scale_up=not any(
                np.any(level.flows[name].leaving > 0) for level in outer for name in names
            ),
            burst=burst,
        )
        for axis, names in parts.items()
    }


def _axis_document(traffic: PlanTraffic, axis: str, kind: AxisPattern) -> dict[str, Any]:
    """The kind of traffic, what a rank sends over each level in a step, and the busiest receiver."""
    row: dict[str, Any] = dict(vars(kind))
    row["operations_per_step"] = traffic.operations.get(axis)
    row["bytes_per_step"] = {
        level.level: level.by_axis[axis] for level in traffic.levels if axis in level.by_axis
    }
    if axis == "ep":
        workload, ep = traffic.use.context.workload, int(traffic.layout.ep)
        row["busiest_receiver_over_mean"] = float(np.asarray(workload.imbalance(ep)))
    return row


# A pipeline through parts of a mixed cluster: each part by itself, and the hand-overs between them.


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What the last pipeline rank of a part and the first of the next one send each other."""

    sender: str
    receiver: str
    gpus: int
    """On either side, each with one to hand over to."""
    bytes_per_gpu: float
    """Of a step, in one direction: activations on, gradients back."""
    gb_per_s: float
    """What a GPU attains out of its part, on the side that attains less."""
    step_time_s: float

    @property
    def bytes_per_step(self) -> float:
        """Of all GPUs, in one direction."""
        return self.gpus * self.bytes_per_gpu

    @property
    def busy_s(self) -> float:
        """Seconds that a GPU's link out of the part sends in a step."""
        return self.bytes_per_gpu / (self.gb_per_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class PartsTraffic:
    """What a pipeline through parts sends: over the levels of each part, and from part to part."""

    parts: dict[str, PlanTraffic]
    """By part, in the order of the pipeline; ranks are counted from the first that a part runs."""
    between: tuple[HandOver, ...]
    axes: tuple[AxisFlow, ...]
    """What all groups send, of all ranks."""
    ranks: int

    @property
    def broken(self) -> tuple[str, ...]:
        """Cuts that need more than their phase, in words."""
        cuts = [f"{part}: {words}" for part, each in self.parts.items() for words in each.broken]
        return tuple(cuts)

    def document(self) -> dict[str, Any]:
        """What `traffic --json` prints, without `schema`."""
        between = [
            {
                "from": each.sender,
                "to": each.receiver,
                "gpus": each.gpus,
                "bytes_per_gpu": each.bytes_per_gpu,
                "bytes_per_step": each.bytes_per_step,
                "gb_per_s": each.gb_per_s,
                "busy_s": each.busy_s,
                "utilisation": each.busy_s / each.step_time_s,
            }
            for each in self.between
        ]
        parts = {name: each.document() for name, each in self.parts.items()}
        return {"parts": parts, "between": between, "broken": list(self.broken)}


def parts_traffic(plan: MixedPlan) -> PartsTraffic:
    """Counts what a pipeline through parts sends. Raises InfeasibleError without a layout.

    Groups but those of the pipeline lie inside a part; each part's ranks run through its nodes in turn.

    Parameters
    ----------
    plan
        A pipeline through parts.
    """
    pipeline = Pipeline.of(plan)
    assert plan.predicted is not None
    step_time_s, each = plan.predicted.step_time_s, stage_gpus(pipeline.doc)
    parts: dict[str, PlanTraffic] = {}
    axes: list[AxisFlow] = []
    uses, cuts = parts_use(pipeline.segments, pipeline.stages, plan.predicted.breakdown_s)
    for name, segment, use in zip(plan.runs_on, pipeline.segments, uses, strict=True):
        context, workload = segment.part.context, segment.part.workload
        work = mean_rank_work(context, pipeline.stages, segment.own)
        parts[name] = PlanTraffic(
            layout=pipeline.layout,
            levels=tuple(level_table(use, step_time_s)),
            use=use,
            places=tuple(allocated_places(workload.cluster, workload.gpus)),
            cuts=use.cuts,
            groups=group_traffic(context, pipeline.stages, ranks=segment.own),
            uplinks=None,
            operations=operations_of_a_step(context, work),
            broken=tuple(broken_cuts(use.cuts)),
            step_time_s=step_time_s,
            non_blocking_s=None,
        )
        axes += [replace(flow, groups=flow.groups + segment.first * each) for flow in use.axes]
    between: list[HandOver] = []
    for cut, after in zip(cuts, pipeline.segments[1:], strict=True):
        last = np.arange(each) + (after.first - 1) * each
        ends = np.stack([last, last + each], axis=1)
        axes.append(
            AxisFlow(
                axis="pp", kind="chain", phase=MICRO_BATCHES, groups=ends, volume=cut.bytes_per_gpu
            )
        )
        between.append(
            HandOver(
                sender=plan.runs_on[len(between)],
                receiver=plan.runs_on[len(between) + 1],
                gpus=each,
                bytes_per_gpu=cut.bytes_per_gpu,
                gb_per_s=cut.gb_per_s,
                step_time_s=step_time_s,
            )
        )
    ranks = int(pipeline.layout.gpus)
    return PartsTraffic(parts=parts, between=tuple(between), axes=tuple(axes), ranks=ranks)


def _groups_document(use: MappingUse) -> dict[str, Any]:
    """The process groups of every axis with what each sends across each level in a step.

    Above `MOST_LISTED_RANKS` ranks only their sums.
    """
    listed = len(use.positions.node) <= MOST_LISTED_RANKS
    groups: dict[str, Any] = {}
    for flow in use.axes:
        sent = {
            level.positions.level: level.flows[flow.axis].crossing[flow.groups].sum(axis=1)
            for level in use.levels
        }
        row: dict[str, Any] = {
            "kind": flow.kind,
            "phase": flow.phase,
            "count": len(flow.groups),
            "members": flow.members,
            "levels": {
                level: {
                    "groups": int(np.sum(each > 0)),
                    "bytes": float(each.sum()),
                    "most": float(each.max()),
                }
                for level, each in sent.items()
                if np.any(each > 0)
            },
        }
        if listed:
            row["ranks"] = flow.groups.tolist()
            row["bytes"] = {
                level: each.tolist() for level, each in sent.items() if np.any(each > 0)
            }
        groups[flow.axis] = row
    return groups


def _cut_document(cut: CutUse) -> dict[str, Any]:
    return dict(vars(cut)) | {"utilisation": cut.utilisation}


# Who sends how much to whom: bytes of a step between blocks of neighbouring nodes.
#
# Rings send their volume to the next member, a member of an all-to-all an equal part to each other one,
# neighbours of a pipeline an activation on and a gradient back, as `axis_flows` counts them.


MOST_BLOCKS = 32
"""Rows of the matrix."""
MOST_PAIRS = 4_000_000
"""Pairs of ranks, before those of several axes are added up: about 100 MB of CSV."""


def traffic_matrix(use: MappingUse, most_blocks: int = MOST_BLOCKS) -> dict[str, Any]:
    """Bytes of a step from every block to every other.

    Parameters
    ----------
    use
        A mapping with what its groups send.
    most_blocks
        At least 1. More nodes are put together, neighbours first, until there are no more blocks than that.

    Returns
    -------
    dict
        `unit`, GPU where all are on one node; `per_block`, how many of them a block holds; and `bytes`,
        [from][to], with what stays inside a block on the diagonal.
    """
    node = use.positions.node
    is_one_node = int(node.max()) == int(node.min())
    unit = np.arange(len(node)) if is_one_node else np.unique(node, return_inverse=True)[1]
    units = int(unit.max()) + 1
    per_block = -(-units // most_blocks)
    block = unit // per_block
    blocks = -(-units // per_block)
    sent = np.zeros((blocks, blocks))
    for flow in use.axes:
        _add(sent, flow, block)
    return {
        "unit": "GPU" if is_one_node else "node",
        "per_block": per_block,
        "bytes": sent.tolist(),
    }


def rank_matrix_csv(axes: Sequence[AxisFlow], ranks: int, most_pairs: int = MOST_PAIRS) -> str:
    """Bytes of a step from rank to rank, as CSV of `source,target,bytes`, one row for each pair that sends.

    Parameters
    ----------
    axes
        What groups send.
    ranks
        In all.
    most_pairs
        Above so many pairs nothing is written.

    Raises
    ------
    InputError
        Where there are more pairs.
    """
    receivers = {"ring": 1, "chain": 2}
    pairs = sum(flow.groups.size * receivers.get(flow.kind, flow.members - 1) for flow in axes)
    if pairs > most_pairs:
        raise InputError(
            f"{pairs:,} pairs of ranks exchange something, at most {most_pairs:,} are written; the page of "
            "`report` has the matrix by blocks of nodes",
            where="--matrix",
        )
    parts = [part for flow in axes for part in _pairs(flow)]
    if not parts:
        return "source,target,bytes\n"
    key = np.concatenate([source * ranks + target for source, target, _ in parts])
    sent = np.concatenate([np.full(len(source), volume) for source, _, volume in parts])
    keys, place = np.unique(key, return_inverse=True)
    total = np.bincount(place, weights=sent)
    rows = (
        f"{pair // ranks},{pair % ranks},{volume:.0f}"
        for pair, volume in zip(keys.tolist(), total.tolist(), strict=True)
        if volume > 0 and pair // ranks != pair % ranks
    )
    return "\n".join(["source,target,bytes", *rows, ""])


def _pairs(flow: AxisFlow) -> Iterator[tuple[IntArray, IntArray, FloatArray | float]]:
    """Who sends to whom in the groups of one axis, and how much each pair."""
    groups = flow.groups
    if flow.kind == "chain":
        ends = [(groups[:, :-1].ravel(), groups[:, 1:].ravel(), flow.volume)]
        if flow.wrap:
            ends.append((groups[:, -1], groups[:, 0], flow.wrap))
        for source, target, volume in ends:
            yield source, target, volume
            yield target, source, volume
    elif flow.kind == "ring":
        each = np.repeat(flow.volumes, flow.members)
        yield groups.ravel(), np.roll(groups, -1, axis=1).ravel(), each
    else:
        for step in range(1, flow.members):
            target = np.roll(groups, -step, axis=1).ravel()
            yield groups.ravel(), target, flow.volume / flow.members


def _add(sent: FloatArray, flow: AxisFlow, block: IntArray) -> None:
    """Adds what the groups of one axis send."""
    where = block[flow.groups]
    if flow.kind == "chain":
        for member in range(flow.members - 1):
            ends = where[:, member], where[:, member + 1]
            np.add.at(sent, ends, flow.volume)
            np.add.at(sent, ends[::-1], flow.volume)
        np.add.at(sent, (where[:, -1], where[:, 0]), flow.wrap)
        np.add.at(sent, (where[:, 0], where[:, -1]), flow.wrap)
        return
    if flow.kind == "ring":
        np.add.at(sent, (where, np.roll(where, -1, axis=1)), flow.volumes[:, None])
        return
    count = np.zeros((len(where), len(sent)))
    np.add.at(count, (np.arange(len(where))[:, None], where), 1.0)
    pairs = count.T @ count
    pairs -= np.diag(count.sum(axis=0))  # nobody sends to itself
    sent += pairs * flow.volume / flow.members
