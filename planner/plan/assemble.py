"""From a priced layout to the plan document."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cluster_specs.fabric import fabric_levels, is_irregular
from meshwright.costmodel.bucket_sizes import TIMES_OWN
from meshwright.costmodel.layout import AXES, Recompute
from meshwright.costmodel.workload import Workload
from meshwright.documents.versions import program_version
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.matrices import MEGATRON_DEFAULT, order_name, ranks_on
from meshwright.planner.plan.binding import bindings, cut_binding, warnings
from meshwright.planner.plan.document import (
    MOST_LISTED_RANKS,
    Mapping,
    Objective,
    Plan,
)
from meshwright.planner.plan.idle import idle_document
from meshwright.planner.plan.infeasible_document import Infeasible
from meshwright.planner.plan.installs import software_needs
from meshwright.planner.plan.memory_risk import memory_risk_document
from meshwright.planner.plan.placed_experts import placed_experts
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.plan.solver_document import (
    ProofReport,
    PruningReport,
    SolverReport,
    SpaceReport,
)
from meshwright.planner.request.executions import EXECUTION_PINS, choices_made
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.grades import grades
from meshwright.planner.runs.predicted import Predicted, layout_document, recompute_words
from meshwright.planner.runs.prediction import predict_layout, predicted_document
from meshwright.planner.search.certificate import Outcome
from meshwright.planner.search.model import solver_version
from meshwright.planner.search.space import Space


def plan_from_outcome(
    request: PlanRequest,
    outcome: Outcome,
    space: Space,
    wall_s: float,
    *,
    infeasible: Infeasible | None = None,
    full: Outcome | None = None,
) -> Plan:
    """The document for an outcome. A known bound above the price by rounding alone counts as the price.

    `full` is the outcome over layouts on all GPUs, where the plan leaves some idle.
    """
    step_time_s = outcome.best[0].step_time_s if outcome.best else None
    objective = objective_of(step_time_s, outcome.lower_bound_s)
    solver = solver_report(request, outcome, objective, space_report(request, space), wall_s)
    if not outcome.best:
        return Plan.model_validate(
            {
                "schema": 1,
                "status": outcome.status,
                "objective": objective,
                "layout": None,
                "predicted": None,
                "mapping": None,
                "infeasible": infeasible,
                "warnings": list(_overfull_cuts(request, outcome)),
                "solver": solver,
                "inputs": request.inputs(),
            }
        )
    best = outcome.best[0]
    execution = best.execution.of_layout(best.layout)
    workload = execution.applied(space.workload.on(int(best.layout.gpus)))
    predicted = predict(workload, best)
    idle = idle_document(request, best, full)
    layout = layout_document(best.layout, best.stages)
    return Plan.model_validate(
        {
            "schema": 1,
            "status": outcome.status,
            "objective": objective,
            "layout": layout,
            "execution": execution,
            "installs": software_needs(request.inputs(), layout, execution),
            "predicted": predicted,
            "host_memory_gib": predicted.host_memory_gib,
            "grades": grades(layout, predicted),
            "mapping": mapping_of_layout(workload, best),
            "expert_placement": placed_experts(request, workload, best),
            "idle": idle,
            "memory_risk": memory_risk_document(request, predicted),
            "binding": [
                *bindings(request, workload, best, predicted),
                *cut_binding(workload, best),
            ],
            "warnings": list(warnings(request, best, predicted, idle)),
            "alternatives": [alternative(other, best.step_time_s) for other in outcome.best[1:]],
            "solver": solver,
            "inputs": request.inputs(),
        }
    )


def _overfull_cuts(request: PlanRequest, outcome: Outcome) -> Iterator[str]:
    """What kept a search under `--max-cut-use` from a plan, as far as it was looked for."""
    least_use = outcome.certificate.least_cut_use
    if least_use is not None:
        yield (
            f"every mapping that was priced uses some cut to {least_use:.1%} or more, "
            f"{request.max_cut_use:.1%} are allowed: raise --max-cut-use"
        )


def objective_of(step_time_s: float | None, lower_bound_s: float | None) -> Objective:
    """Step time, lower bound and relative gap; what is not known stays null."""
    if step_time_s is None or lower_bound_s is None:
        return Objective(step_time_s=step_time_s, lower_bound_s=lower_bound_s, gap=None)
    bound = min(lower_bound_s, step_time_s)
    return Objective(
        step_time_s=step_time_s, lower_bound_s=bound, gap=(step_time_s - bound) / step_time_s
    )


def predict(workload: Workload, best: Priced) -> Predicted:
    """What the cost model expects of a priced layout."""
    placement = group_placement(workload, best.layout, best.stages, best.matrix, best.ranks)
    prediction = predict_layout(workload, best.layout, best.stages, placement)
    return predicted_document(workload, prediction)


def mapping_of_layout(workload: Workload, best: Priced) -> Mapping:
    """Names and factors of the levels, and the GPU of every rank while the list is short.

    Without a matrix the list is the mapping, and is never left out.
    """
    matrix, names = best.matrix, list(fabric_levels(workload.cluster, workload.gpus).names)
    if best.ranks is not None:
        return Mapping(
            order=list(MEGATRON_DEFAULT), levels=names, matrix={}, ranks=list(best.ranks)
        )
    listed = workload.gpus <= MOST_LISTED_RANKS
    return Mapping(
        order=list(order_name(matrix)),
        levels=names,
        matrix={axis: list(matrix[axis]) for axis in AXES},
        ranks=ranks_on(workload.cluster, matrix) if listed else None,
    )


def alternative(other: Priced, best_s: float) -> dict[str, object]:
    """A further layout: what differs in plain numbers, and how much slower it is."""
    doc = layout_document(other.layout, other.stages)
    names = (
        "tp",
        "cp",
        "pp",
        "dp",
        "ep",
        "etp",
        "vpp",
        "schedule",
        "micro_batch",
        "zero_stage",
        "shard_groups",
        "optimizer_offload",
        "recompute",
    )
    return {
        "step_time_s": other.step_time_s,
        "slower_pct": 100.0 * (other.step_time_s / best_s - 1.0),
        **{name: getattr(doc, name) for name in names},
        **{name: getattr(other.execution, name) for name in EXECUTION_PINS},
        "recompute_modules": list(doc.recompute_modules),
        "recompute_layers": doc.recompute_layers,
        "stages": doc.stages,
    }


def solver_report(
    request: PlanRequest, outcome: Outcome, objective: Objective, space: SpaceReport, wall_s: float
) -> SolverReport:
    """How the answer was found, over which space, and what its status rests on."""
    certificate = outcome.certificate
    return SolverReport(
        wall_s=wall_s,
        bound_rounds=certificate.rounds,
        workers=1,
        seed=request.seed,
        version=solver_version(),
        program=program_version(),
        method=request.method,
        layouts_considered=certificate.layouts,
        space=space,
        pruning=PruningReport(
            by_bound=certificate.bounded_out,
            by_rule=dict(sorted(certificate.ruled_out.items())),
            priced=certificate.priced,
            fewest_gpus=certificate.fewest_gpus,
        ),
        proof=ProofReport(
            method=request.method,
            incumbent_s=objective.step_time_s,
            lower_bound_s=objective.lower_bound_s,
            rounds=certificate.rounds,
            model_bound_s=certificate.model_bound_s,
            left_out_bound_s=objective.lower_bound_s if certificate.combinations else None,
            combinations=certificate.combinations,
            kernels=certificate.kernels,
        ),
    )


def space_report(request: PlanRequest, space: Space) -> SpaceReport:
    """The values of every choice that the search over `space` could make."""
    loads, framework = request.expert_loads, framework_named(request.framework)
    has_buckets = framework.gradient_buckets is not None and request.max_cut_use >= 1
    return SpaceReport(
        tp=list(space.tp),
        cp=list(space.cp),
        pp=list(space.pp),
        dp=list(space.dp),
        ep=list(space.ep),
        etp=list(space.etp),
        schedules=list(space.schedules),
        zero_stages=list(space.zero),
        shard_groups=list(space.shard_groups),
        optimizer_offloads=sorted({share for _, share in space.offloads}),
        recompute=[_recompute_name(mask) for mask in space.recompute],
        executions=[choices_made(one) for one in request.execution_options.executions()],
        gradient_buckets=list(TIMES_OWN) if has_buckets else [],
        gpus=space.workload.gpus,
        even_stages=not framework.uneven_stages,
        mapping="slots-to-leaves" if is_irregular(request.cluster) else "axes-to-levels",
        expert_gap=loads.largest_gap if loads and request.places_experts else None,
    )


def _recompute_name(mask: int) -> str:
    kind, modules, _ = recompute_words(Recompute(mask), 0)
    return "+".join(modules) or kind
