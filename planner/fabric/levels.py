"""`traffic`: what a plan sends over each level of the fabric, and which cut holds it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster_specs.fabric import is_irregular
from costmodel.estimate import estimate
from costmodel.group_traffic import GroupTraffic, group_traffic
from costmodel.layout import Layout
from costmodel.phases import CutUse, axis_pattern
from costmodel.placement import nested_placement, placement_from_matrix
from costmodel.step_time import make_context
from costmodel.traffic import LevelBytes
from planner.assemble import layout_of, matrix_arrays, placed
from planner.fabric.cuts import binding_cut, broken_cuts, plan_cuts
from planner.fabric.instance import assignment_of_ranks, instance_of
from planner.fabric.problem import Loads, MappingError, loads_of
from planner.fabric.service import NoMappingError, workload_of
from planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanTraffic:
    """Bytes of a step by level and axis, and how busy each cut is in its phase."""

    layout: Layout
    levels: tuple[LevelBytes, ...]
    cuts: tuple[CutUse, ...]
    groups: GroupTraffic
    """What one GPU puts into each of its groups, wherever they lie."""
    uplinks: Loads | None
    """On an irregular allocation: what the mapping's ranks send up each leaf and pod."""
    broken: tuple[str, ...]
    """Cuts that need more than their phase, in words."""

    @property
    def binding(self) -> CutUse | None:
        """The cut with the highest utilisation."""
        return binding_cut(self.cuts)


def plan_traffic(plan: Plan) -> PlanTraffic:
    """Prices the traffic of a plan again. Raises NoMappingError where it has no layout."""
    if plan.layout is None:
        raise NoMappingError(f"the plan has no layout (status {plan.status}): nothing is sent")
    layout = layout_of(plan.layout)
    workload = workload_of(plan, plan.inputs.cluster, int(layout.gpus))
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    mapping = plan.mapping
    if mapping is not None and mapping.matrix:
        rows = {axis: tuple(row) for axis, row in mapping.matrix.items()}
        placement = placement_from_matrix(layout, matrix_arrays(rows))
    elif mapping is not None and is_irregular(workload.cluster):
        placement = placed(workload, layout, stages, {}, mapping.ranks)
    else:
        placement = nested_placement(workload.cluster, layout)
    context = make_context(workload, layout, placement)
    priced = estimate(workload, layout, placement, stages)
    cuts = plan_cuts(workload, layout, placement, priced)
    return PlanTraffic(
        layout=layout,
        levels=priced.level_traffic,
        cuts=cuts,
        groups=group_traffic(context, stages),
        uplinks=None if mapping is None or mapping.matrix else _uplinks(plan, layout),
        broken=tuple(broken_cuts(cuts)),
    )


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
    except MappingError:
        return None


def traffic_document(found: PlanTraffic) -> dict[str, Any]:
    """What `traffic --json` prints, without `schema`."""
    axes = sorted({axis for level in found.levels for axis in level.by_axis})
    binding = found.binding
    return {
        "levels": [
            {
                "level": level.level,
                "bytes_per_step": level.bytes_per_step,
                "by_axis": level.by_axis,
                "busy_s": level.busy_s,
                "utilisation": level.utilisation,
            }
            for level in found.levels
        ],
        "axes": {axis: axis_pattern(axis, found.layout) for axis in axes},
        "groups_bytes_per_gpu": dict(vars(found.groups)),
        "cuts": [_cut_document(cut) for cut in found.cuts],
        "binding": None if binding is None else _cut_document(binding),
        "uplinks": None
        if found.uplinks is None
        else {
            "leaf_bytes": found.uplinks.leaf_bytes.tolist(),
            "pod_bytes": found.uplinks.pod_bytes.tolist(),
            "busiest_s": found.uplinks.busiest_s,
            "total_s": found.uplinks.total_s,
        },
        "broken": list(found.broken),
    }


def _cut_document(cut: CutUse) -> dict[str, Any]:
    return dict(vars(cut)) | {"utilisation": cut.utilisation}
