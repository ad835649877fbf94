"""`map`: the GPUs of a plan's ranks on a cluster, with a certificate, beside hostname order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal, get_args

from meshwright.cluster_specs.allocation import node_name
from meshwright.cluster_specs.reader import read_cluster
from meshwright.cluster_specs.schema import ClusterSpec
from meshwright.costmodel.workload import Workload
from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.mapping.least_traffic import (
    TIME_LIMIT_S,
    least_traffic,
    with_spares,
)
from meshwright.planner.mapping.problem import Loads, loads_of, spread_of
from meshwright.planner.mapping.slots import (
    Instance,
    MappingObjective,
    MappingSolution,
    Place,
    idle_nodes,
    instance_of,
    ranks_of,
)
from meshwright.planner.mapping.spread import EQUAL, LevelReach, SpreadSolution, least_spread
from meshwright.planner.mapping.spread_build import ReachWeights, with_short_pipelines
from meshwright.planner.plan.document import Plan, with_digest
from meshwright.planner.plan.make_plan import placed_on
from meshwright.planner.request.reader import limited_to_nodes
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
    """
    _check(objective, order, spares)
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
    return MappedPlan(
        plan=with_digest(placed_on(plan, cluster, ranks)),
        planned_s=plan.objective.step_time_s,
        instance=instance,
        solution=solution,
        ranks=ranks,
        idle=[node_name(cluster, node) for node in idle_nodes(cluster, ranks)],
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
    needed = 0 if layout is None else layout.tp * layout.cp * layout.pp * layout.dp
    if cluster is None and limited.gpus < needed:
        raise InfeasibleError(
            f"the layout needs {needed} GPUs, these nodes of {onto.name!r} have {limited.gpus} free; nodes "
            "that the plan left out count as taken: give the whole cluster with --cluster"
        )
    return limited


def _solved(
    instance: Instance, objective: str, weights: ReachWeights, time_limit_s: float
) -> MappingSolution:
    if objective == "spread":
        return least_spread(instance.problem, weights=weights, time_limit_s=time_limit_s)
    found = least_traffic(instance.problem, time_limit_s=time_limit_s)
    # Of mappings that send the same, one whose pipelines touch few blocks.
    assignment = with_short_pipelines(instance.problem, found.assignment)
    return replace(found, assignment=assignment, loads=loads_of(instance.problem, assignment))


def workload_of(plan: Plan, cluster: ClusterSpec, gpus: int) -> Workload:
    """What the cost model prices of a plan, on a cluster. Raises InfeasibleError where it is too small."""
    if gpus > cluster.gpus:
        raise InfeasibleError(
            f"the layout needs {gpus} GPUs, cluster {cluster.name!r} has {cluster.gpus} free"
        )
    inputs = plan.inputs.model_copy(update={"cluster": cluster, "gpus": gpus})
    return planned_workload(inputs, plan.execution)


def hostname_solution(instance: Instance, objective: str) -> MappingSolution:
    """Hostname order, unsolved: its bound is 0."""
    began = monotonic()
    assignment = instance.problem.hostname_assignment()
    loads = loads_of(instance.problem, assignment)
    return MappingSolution(
        objective=next(known for known in OBJECTIVES if known == objective),
        assignment=assignment,
        loads=loads,
        hostname_loads=loads,
        bound_s=0.0,
        rounds=(),
        wall_s=monotonic() - began,
    )


def _check(objective: str, order: str, spares: int) -> None:
    for name, value, allowed in (("objective", objective, OBJECTIVES), ("order", order, ORDERS)):
        if value not in allowed:
            raise InputError(f"{name}: {value[:40]!r} is not known; allowed: {', '.join(allowed)}")
    if not 0 <= spares <= MOST_SPARES:
        raise InputError(f"spares: {spares} is out of range (nodes); allowed: 0 to {MOST_SPARES}")


def mapping_document(found: MappedPlan) -> dict[str, Any]:
    """What `map --json` prints, without `schema`. `order` is the axis order that ranks are counted in."""
    solution, problem = found.solution, found.instance.problem
    mapping = found.plan.mapping
    assert mapping is not None
    hostname = problem.hostname_assignment()
    spread = solution if isinstance(solution, SpreadSolution) else None
    bounded = spread is None or spread.bounded
    return {
        "order": list(mapping.order),
        "ranks": [list(place) for place in found.ranks],
        "step_time_s": found.plan.objective.step_time_s,
        "planned_step_time_s": found.planned_s,
        "objective": solution.objective,
        "price_s": solution.price_s,
        "lower_bound_s": solution.bound_s if bounded else None,
        "gap": solution.gap if bounded else None,
        "status": "optimal" if solution.proven else "feasible",
        "hostname_order": _loads_document(solution.hostname_loads)
        | {"price_s": solution.hostname_s, "spread": _spread_document(found, hostname)},
        **_loads_document(solution.loads),
        "spread": _spread_document(found, solution.assignment),
        "spread_certificate": None if spread is None else _certificate_document(spread),
        "slots": {
            "gpus": found.instance.slots.gpus,
            "stages": problem.stages,
            "per_stage": problem.slots,
            "leaves": len(problem.leaf_slots),
            "pods": problem.pods,
            "free": sum(problem.leaf_slots),
        },
        "idle_nodes": found.idle,
        "solver": {
            "wall_s": solution.wall_s,
            "rounds": [dict(vars(one)) for one in solution.rounds],
        },
    }


def _loads_document(loads: Loads) -> dict[str, object]:
    return {
        "uplinks_busy_s": loads.total_s,
        "busiest_uplink_s": loads.busiest_s,
        "leaf_bytes_per_step": float(loads.leaf_bytes.sum()),
        "pod_bytes_per_step": float(loads.pod_bytes.sum()),
    }


def _spread_document(found: MappedPlan, assignment: Any) -> dict[str, dict[str, float]]:
    """Leaves and pods that data-parallel and pipeline groups touch."""
    pods = found.instance.problem.pod_of[assignment]
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
