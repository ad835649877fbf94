"""What holds a plan back, and what a reader should know before trusting its figures."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cluster_specs.uplinks import free_of
from meshwright.costmodel.constants.measured import best_measured_mfu
from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.estimate import estimate_layout
from meshwright.costmodel.layout import Layout
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.costmodel.workload import Workload
from meshwright.frameworks.catalog import framework_named
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.matrices import ranks_on
from meshwright.planner.mapping.crossing.cuts import binding_cut, mapping_use
from meshwright.planner.plan.document import Binding, IdleDoc
from meshwright.planner.plan.placement import group_placement
from meshwright.planner.request.plan_request import PlanRequest
from meshwright.planner.runs.predicted import Predicted

FULL_SHARE = 0.95
"""Of a limit: from here on a constraint is said to hold the plan back."""


def bindings(
    request: PlanRequest, workload: Workload, best: Priced, predicted: Predicted
) -> Iterator[Binding]:
    """Limits that the plan reaches, or nearly so."""
    layout, cluster = best.layout, request.cluster
    peak, limit = max(predicted.memory_gib), usable_hbm_gib(workload)
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
    placement = group_placement(workload, best.layout, best.stages, best.matrix, best.ranks)
    priced = estimate_layout(workload, best.layout, placement, best.stages)
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
    if chunks >= request.model.layers:
        yield Binding(
            rule="layers-by-stages",
            value=chunks,
            limit=chunks,
            slack=0,
            unit="layers",
            note="no virtual stage has more than one layer",
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
        are = "is" if len(request.cluster.assumed) == 1 else "are"
        yield f"the cluster's {', '.join(request.cluster.assumed)} {are} assumed, not stated"
    model = request.model
    if (
        model.position == "learned"
        and model.max_positions
        and request.seq_len > model.max_positions
    ):
        yield (
            f"sequences of {request.seq_len:,} tokens are longer than the {model.max_positions:,} positions "
            f"that {model.name} has learned: a longer table, and so another model, is what trains"
        )
    offload = framework_named(request.framework).optimizer_offload
    if int(best.layout.optimizer_offload) and offload is not None and not offload.measured:
        yield (
            "no measured run stands behind parameters on the host: their copies are priced from PyTorch's "
            "source as hidden under nothing, their update as one thread's work"
        )
    experts = request.model.moe is not None
    if not experts and "moe_dispatch" in request.pins:
        yield "the pin moe_dispatch changes nothing: the model has no experts"
    best_known = best_measured_mfu(request.cluster.device.name, request.precision, experts=experts)
    reached = predicted.tflops_per_gpu * 1e12 / peak_flops(request.cluster.device, "bf16")
    if best_known is not None and reached > best_known.mfu:
        kind = "a model with experts" if experts else "a dense model"
        yield (
            f"the predicted {predicted.tflops_per_gpu:.0f} TFLOP/s per GPU are {reached:.1%} of the 16-bit "
            f"peak, more than the best measured run of {kind} on this class of device "
            f"({best_known.mfu:.1%}, {best_known.run}): "
            "trust the ranking of layouts more than the time"
        )
    per_node = request.cluster.gpus_per_node
    free = {free_of(node, per_node) for node in request.cluster.nodes} - {0}
    if best.ranks is None and len(free) > 1:
        yield "some nodes are part-filled: the plan is priced as if every node had the same free GPUs"
