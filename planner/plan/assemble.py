"""From a priced layout to the plan document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwright.cluster_specs.fabric import fabric_levels
from meshwright.costmodel.constants.measured import best_measured_mfu
from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.estimate import estimate, stage_memory_parts_gib
from meshwright.costmodel.layout import AXES, Layout, Placement, Recompute
from meshwright.costmodel.memory.footprint import context_gib, usable_hbm_gib
from meshwright.costmodel.pipeline.schedules import schedule_named
from meshwright.costmodel.placement import placement_from_matrix
from meshwright.costmodel.workload import Workload
from meshwright.planner.bounds.exact_cost import Matrix, Priced, Stages
from meshwright.planner.bounds.matrices import MEGATRON_DEFAULT, Matrices, order_name, ranks_on
from meshwright.planner.mapping.choice.effective import placement_of
from meshwright.planner.mapping.crossing.cuts import binding_cut, mapping_use
from meshwright.planner.mapping.instance import assignment_of_ranks, instance_of
from meshwright.planner.mapping.slots import Place
from meshwright.planner.plan.document import (
    MOST_LISTED_RANKS,
    Binding,
    IdleDoc,
    Infeasible,
    Mapping,
    Objective,
    Plan,
    SolverReport,
)
from meshwright.planner.plan.idle import idle_document
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import LayoutDoc, Predicted
from meshwright.planner.runs.prediction import (
    MODULES,
    RunPrediction,
    layout_document,
    predicted_document,
)
from meshwright.planner.search.loop import Certificate, Outcome
from meshwright.planner.search.model import solver_version

FULL_SHARE = 0.95
"""Of a limit: from here on a constraint is said to hold the plan back."""


def plan_document(
    request: PlanRequest,
    outcome: Outcome,
    space: str,
    wall_s: float,
    *,
    infeasible: Infeasible | None = None,
    full: Outcome | None = None,
) -> Plan:
    """The document for an outcome. A known bound above the price by rounding alone counts as the price.

    `full` is the outcome over layouts on all GPUs, where the plan leaves some idle.
    """
    solver = solver_report(request, outcome.certificate, space, wall_s)
    if not outcome.best:
        objective = Objective(step_time_s=None, lower_bound_s=outcome.lower_bound_s, gap=None)
        return Plan.model_validate(
            {
                "schema": 1,
                "status": outcome.status,
                "objective": objective,
                "layout": None,
                "predicted": None,
                "mapping": None,
                "infeasible": infeasible,
                "solver": solver,
                "inputs": request.inputs(),
            }
        )
    best = outcome.best[0]
    workload = request.workload(int(best.layout.gpus))
    predicted = predict(workload, best)
    idle = idle_document(request, best, full)
    return Plan.model_validate(
        {
            "schema": 1,
            "status": outcome.status,
            "objective": objective_of(best.step_time_s, outcome.lower_bound_s),
            "layout": layout_document(best.layout, best.stages),
            "predicted": predicted,
            "mapping": mapping_document(workload, best),
            "expert_placement": request.expert_loads.document(int(best.layout.ep))
            if request.expert_loads is not None
            else None,
            "idle": idle,
            "binding": [*bindings(request, best, predicted), *cut_binding(workload, best)],
            "warnings": list(warnings(request, best, predicted, idle)),
            "alternatives": [alternative(other, best.step_time_s) for other in outcome.best[1:]],
            "solver": solver,
            "inputs": request.inputs(),
        }
    )


def objective_of(step_time_s: float, lower_bound_s: float | None) -> Objective:
    """Price, bound and relative gap; an unknown bound stays null."""
    if lower_bound_s is None:
        return Objective(step_time_s=step_time_s, lower_bound_s=None, gap=None)
    bound = min(lower_bound_s, step_time_s)
    return Objective(
        step_time_s=step_time_s, lower_bound_s=bound, gap=(step_time_s - bound) / step_time_s
    )


def predict(workload: Workload, best: Priced) -> Predicted:
    """What the cost model expects of a priced layout."""
    placement = placed(workload, best.layout, best.stages, best.matrix, best.ranks)
    parts = stage_memory_parts_gib(workload, best.layout, best.stages)
    found = RunPrediction(
        estimate=estimate(workload, best.layout, placement, best.stages),
        stages=best.stages,
        placement=placement,
        memory_parts_gib=tuple(
            {name: float(gib[rank]) for name, gib in parts.items()}
            for rank in range(len(best.stages))
        ),
        context_gib=float(np.asarray(context_gib(best.layout))),
    )
    return predicted_document(workload, found)


def matrix_arrays(matrix: Matrix) -> Matrices:
    """A parallelism matrix as the cost model reads it."""
    return {axis: np.asarray(row, dtype=np.int64) for axis, row in matrix.items()}


def placed(
    workload: Workload,
    layout: Layout,
    stages: Stages,
    matrix: Matrix,
    ranks: Sequence[Place] | None,
) -> Placement:
    """Where groups lie: by the matrix, or rank by rank where there is none."""
    if matrix or ranks is None:
        return placement_from_matrix(layout, matrix_arrays(matrix))
    instance = instance_of(workload, layout, stages)
    return placement_of(workload, instance, assignment_of_ranks(instance, ranks))


def placed_plan(workload: Workload, layout: Layout, plan: Plan) -> tuple[Stages, Placement]:
    """The stages of a plan that has a layout, and where its groups lie on a workload's cluster."""
    assert plan.layout is not None
    assert plan.mapping is not None
    stages = tuple(tuple(rank) for rank in plan.layout.stages)
    matrix = {axis: tuple(row) for axis, row in plan.mapping.matrix.items()}
    return stages, placed(workload, layout, stages, matrix, plan.mapping.ranks)


def mapping_document(workload: Workload, best: Priced) -> Mapping:
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


def layout_of(doc: LayoutDoc) -> Layout:
    """The layout that a document describes, in plain numbers."""
    mask = Recompute.FULL if doc.recompute == "full" else Recompute.NONE
    for module in doc.recompute_modules:
        mask |= MODULES[module]
    numbers = (
        "tp",
        "cp",
        "pp",
        "dp",
        "ep",
        "etp",
        "vpp",
        "micro_batch",
        "num_micro_batches",
        "zero_stage",
    )
    return Layout(
        **{name: getattr(doc, name) for name in numbers},
        sequence_parallel=doc.sequence_parallel,
        recompute=int(mask),
        recompute_layers=doc.recompute_layers,
        schedule=int(schedule_named(doc.schedule)),
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
        "recompute",
    )
    return {
        "step_time_s": other.step_time_s,
        "slower_pct": 100.0 * (other.step_time_s / best_s - 1.0),
        **{name: getattr(doc, name) for name in names},
        "recompute_modules": list(doc.recompute_modules),
        "recompute_layers": doc.recompute_layers,
        "stages": doc.stages,
    }


def bindings(request: PlanRequest, best: Priced, predicted: Predicted) -> Iterator[Binding]:
    """Limits that the plan reaches, or nearly so."""
    layout, cluster = best.layout, request.cluster
    peak, limit = max(predicted.memory_gib), usable_hbm_gib(request.workload())
    if peak >= FULL_SHARE * limit or int(layout.recompute):
        rank = predicted.memory_gib.index(peak)
        note = f"pipeline rank {rank} is the fullest"
        if int(layout.recompute):
            note += "; recomputation is what makes the layout fit or pays for what else the memory holds"
        yield Binding(
            rule="hbm", value=peak, limit=limit, slack=limit - peak, unit="GiB", note=note
        )
    used = int(layout.gpus)
    if used >= FULL_SHARE * request.gpus:
        note = "every GPU works" if used == request.gpus else "few GPUs are left idle"
        yield Binding(
            rule="gpu-budget",
            value=used,
            limit=request.gpus,
            slack=request.gpus - used,
            unit="GPUs",
            note=note,
        )
    domain = cluster.nvlink_domain if cluster.nvlink_domain > 1 else cluster.gpus_per_node
    if int(layout.tp) == domain:
        yield Binding(
            rule="scale-up-tp",
            value=int(layout.tp),
            limit=domain,
            slack=0,
            unit="GPUs",
            note="tensor parallelism fills the scale-up domain",
        )
    yield from _pipeline_bindings(request, layout)


def cut_binding(workload: Workload, best: Priced) -> Iterator[Binding]:
    """The cut of the fabric that is busy for the largest share of its phase."""
    placement = placed(workload, best.layout, best.stages, best.matrix, best.ranks)
    priced = estimate(workload, best.layout, placement, best.stages)
    places = best.ranks if best.ranks is not None else ranks_on(workload.cluster, best.matrix)
    use = mapping_use(
        workload, best.layout, best.stages, placement=placement, priced=priced, places=places
    )
    cut = binding_cut(use.cuts)
    if cut is not None:
        yield Binding(
            rule="bisection",
            value=cut.busy_s,
            limit=cut.phase_s,
            slack=cut.phase_s - cut.busy_s,
            unit="s",
            note=f"{cut.level}, {cut.cut} of {cut.block}: busy {cut.utilisation:.1%} of the {cut.phase}",
        )


def _pipeline_bindings(request: PlanRequest, layout: Layout) -> Iterator[Binding]:
    """Layers and micro-batches that cannot be cut finer."""
    chunks = int(layout.pp) * int(layout.vpp)
    if chunks == request.model.layers:
        yield Binding(
            rule="layers-by-stages",
            value=chunks,
            limit=request.model.layers,
            slack=0,
            unit="layers",
            note="every virtual stage has a single layer",
        )
    count = int(layout.num_micro_batches)
    if int(layout.pp) > 1 and int(layout.micro_batch) == 1 and count < 4 * int(layout.pp):
        yield Binding(
            rule="batch-split",
            value=count,
            limit=count,
            slack=0,
            unit="micro-batches",
            note="fewer than four micro-batches a stage, of one sequence: a larger batch shrinks the bubble",
        )


def warnings(
    request: PlanRequest, best: Priced, predicted: Predicted, idle: IdleDoc | None
) -> Iterator[str]:
    """What the reader should know before trusting the figures."""
    if idle is not None:
        number = len(idle.nodes)
        nodes = f" ({number} node{'s' if number > 1 else ''} without a rank)" if number else ""
        yield f"{idle.gpus} of {request.gpus} GPUs{nodes} stay idle: {idle.reason}"
    if request.cluster.assumed:
        yield f"the cluster's {', '.join(request.cluster.assumed)} are assumed, not stated"
    best_known = best_measured_mfu(request.cluster.device.name, request.precision)
    reached = predicted.tflops_per_gpu * 1e12 / peak_flops(request.cluster.device, "bf16")
    if best_known is not None and reached > best_known.mfu:
        yield (
            f"the predicted {predicted.tflops_per_gpu:.0f} TFLOP/s per GPU are {reached:.1%} of the 16-bit "
            "peak, more than the best measured run on this class of device "
            f"({best_known.mfu:.1%}, {best_known.run}): "
            "trust the ranking of layouts more than the time"
        )
    if best.ranks is None and any(
        node.free_gpus not in (None, 0, request.cluster.gpus_per_node)
        for node in request.cluster.nodes
    ):
        yield "some nodes are part-filled: the plan is priced as if every node had the same free GPUs"


def solver_report(
    request: PlanRequest, certificate: Certificate, space: str, wall_s: float
) -> SolverReport:
    """How the answer was found, and over which space."""
    dropped = ", ".join(f"{name} {count}" for name, count in sorted(certificate.ruled_out.items()))
    words = [
        space,
        f"{certificate.layouts} layouts: {certificate.bounded_out} no faster by their bound, "
        f"{certificate.priced} priced exactly" + (f", ruled out: {dropped}" if dropped else ""),
    ]
    if certificate.gpu_floor > 1:
        words.append(f"none on fewer than {certificate.gpu_floor} GPUs can be faster")
    return SolverReport(
        wall_s=wall_s,
        bound_rounds=certificate.rounds,
        workers=1,
        seed=request.seed,
        version=solver_version(),
        method=request.method,
        layouts_considered=certificate.layouts,
        space="; ".join(words),
    )
