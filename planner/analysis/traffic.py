"""`traffic`: what a plan sends over each level of the fabric, and which cut holds it back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cluster_specs.fabric import fabric_levels, is_irregular
from meshwright.cluster_specs.places import Place, allocated_places
from meshwright.costmodel.estimate import Stages, estimate_layout
from meshwright.costmodel.layout import Layout, Placement
from meshwright.costmodel.placement import nested_placement, placement_on
from meshwright.costmodel.traffic.group_traffic import GroupTraffic, group_traffic
from meshwright.costmodel.traffic.level_traffic import LevelBytes
from meshwright.costmodel.traffic.phases import AxisPattern, CutUse, axis_pattern
from meshwright.costmodel.traffic.volumes import mean_rank_work, operations_of_a_step
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError
from meshwright.planner.analysis.rank_mapping import workload_of
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.mapping.crossing.cuts import (
    MappingUse,
    binding_cut,
    broken_cuts,
    mapping_use,
)
from meshwright.planner.mapping.crossing.flows import PARTS
from meshwright.planner.mapping.crossing.level_table import level_table
from meshwright.planner.mapping.instance import assignment_of_ranks, instance_of
from meshwright.planner.mapping.problem import Loads, loads_of
from meshwright.planner.plan.document import MOST_LISTED_RANKS, Plan
from meshwright.planner.plan.placement import group_placement, matrix_arrays
from meshwright.planner.runs.predicted import layout_from_document

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


def plan_traffic(plan: Plan) -> PlanTraffic:
    """Prices the traffic of a plan again, under its own mapping. Raises InfeasibleError without a layout."""
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
            return group_placement(workload, layout, stages, {}, mapping.ranks), list(mapping.ranks)
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


def traffic_document(traffic: PlanTraffic) -> dict[str, Any]:
    """What `traffic --json` prints, without `schema`."""
    axes = sorted({axis for level in traffic.levels for axis in level.by_axis})
    binding = traffic.binding
    return {
        "levels": [dict(vars(level)) for level in traffic.levels],
        "axes": {axis: _axis_document(traffic, axis) for axis in axes},
        "groups_bytes_per_gpu": dict(vars(traffic.groups)),
        "groups": _groups_document(traffic.use),
        "cuts": [_cut_document(cut) for cut in traffic.cuts],
        "binding": None if binding is None else _cut_document(binding),
        "uplinks": None
        if traffic.uplinks is None
        else {
            "leaf_bytes": traffic.uplinks.leaf_bytes.tolist(),
            "pod_bytes": traffic.uplinks.pod_bytes.tolist(),
            "busiest_s": traffic.uplinks.busiest_s,
            "total_s": traffic.uplinks.total_s,
        },
        "broken": list(traffic.broken),
        "oversubscription": None
        if traffic.non_blocking_s is None
        else {
            "step_time_s": traffic.step_time_s,
            "non_blocking_step_time_s": traffic.non_blocking_s,
            "loss_s": traffic.step_time_s - traffic.non_blocking_s,
        },
    }


def patterns(traffic: PlanTraffic) -> dict[str, AxisPattern]:
    """What kind of traffic each axis makes under the plan's mapping."""
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


def _axis_document(traffic: PlanTraffic, axis: str) -> dict[str, Any]:
    """The kind of traffic, what a rank sends over each level in a step, and the busiest receiver."""
    row: dict[str, Any] = dict(vars(patterns(traffic)[axis]))
    row["operations_per_step"] = traffic.operations.get(axis)
    row["bytes_per_step"] = {
        level.level: level.by_axis[axis] for level in traffic.levels if axis in level.by_axis
    }
    if axis == "ep":
        row["busiest_receiver_over_mean"] = receive_imbalance(traffic)
    return row


def receive_imbalance(traffic: PlanTraffic) -> float:
    """What the rank with the hottest experts receives, over the mean."""
    return float(np.asarray(traffic.use.context.workload.imbalance(int(traffic.layout.ep))))


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
