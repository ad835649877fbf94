"""From a priced layout to the plan document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Literal

import numpy as np

from meshwright.cluster_specs.allocation import fabric_levels, is_irregular
from meshwright.cluster_specs.tiers import free_of
from meshwright.costmodel.data_parallel import TIMES_OWN
from meshwright.costmodel.execution_names import PRETRAINING, STEP_KINDS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.hybrid_context import padding_multiple
from meshwright.costmodel.layout import AXES, ROUNDING, Layout, Recompute
from meshwright.costmodel.lengths import DEALT, UNPACKED, PackedLengths
from meshwright.costmodel.losses import ALL_LOGITS
from meshwright.costmodel.measured_settings import optimum_band
from meshwright.costmodel.rates import peak_flops, peak_memory_band, step_time_band
from meshwright.costmodel.records import (
    POINT_ESTIMATE,
    best_measured_mfu,
    device_class,
    fit_probability,
    with_stragglers,
)
from meshwright.costmodel.step_time import StepTime
from meshwright.costmodel.workload import Execution, Workload, has_wide_heads
from meshwright.documents import program_version
from meshwright.frameworks.catalog import framework_named
from meshwright.frameworks.fsdp2 import ASKED_OF_TRL, TRL_HEAD, TRL_LOSS
from meshwright.frameworks.record import Setting, TokenDispatcher, layer_needs
from meshwright.model_specs.adapters import stored_weights_note
from meshwright.planner.bounds.exact_cost import Priced
from meshwright.planner.bounds.mappings import MEGATRON_DEFAULT, order_name, ranks_on
from meshwright.planner.mapping.cuts import MappingUse, binding_cut
from meshwright.planner.plan.document import (
    MOST_LISTED_RANKS,
    Binding,
    IdleDoc,
    Infeasible,
    LengthsDoc,
    Mapping,
    MemoryRisk,
    Objective,
    PackingDoc,
    Plan,
    ProofReport,
    PruningReport,
    SoftwareNeed,
    SolverReport,
    SpaceReport,
    without_later_choices,
)
from meshwright.planner.plan.nodes import idle_document, more_blocks
from meshwright.planner.plan.texts import Setup
from meshwright.planner.request.choices import DEGREES, NUMERICS, OF_EXECUTION, OF_LAYOUT, Choice
from meshwright.planner.request.executions import choices_made
from meshwright.planner.request.plan_request import PlanInputs, PlanRequest
from meshwright.planner.runs.prediction import grades, predict_layout, predicted_document
from meshwright.planner.runs.run_terms import (
    ErrorBandDoc,
    LayoutDoc,
    Predicted,
    layout_document,
    recompute_words,
)
from meshwright.planner.search.model import solver_version
from meshwright.planner.search.pricing import Outcome
from meshwright.planner.search.space import Space

# What holds a plan back, and what a reader should know before trusting its figures.


FULL_SHARE = 0.95
"""Of a limit: from here on a constraint is said to hold the plan back."""


def bindings(
    request: PlanRequest, workload: Workload, best: Priced, predicted: Predicted
) -> Iterator[Binding]:
    """Limits that the plan reaches, or nearly so.

    Parameters
    ----------
    request
        Whose GPUs, layers and scale-up domain are the limits.
    workload
        What the plan is priced with, on the GPUs that it uses.
    best
        The plan.
    predicted
        Its figures, with GiB by pipeline rank.
    """
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


def cut_binding(use: MappingUse) -> Iterator[Binding]:
    """The cut of the fabric that is busy for the largest share of its phase.

    Parameters
    ----------
    use
        Of the plan's mapping; a mapping that crosses no cut has none.
    """
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


FEWEST_DOUBTED_TOKENS = 10**9
"""Of a step: several times those of published trainings."""


def warnings(
    request: PlanRequest, best: Priced, predicted: Predicted, idle: IdleDoc | None
) -> Iterator[str]:
    """What the reader should know before trusting the figures.

    Parameters
    ----------
    request
        What was planned.
    best
        The plan.
    predicted
        Its figures.
    idle
        What of the GPUs it leaves over; None for nothing.
    """
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
        and _longest_tokens(request) > model.max_positions
    ):
        yield (
            f"sequences of {_longest_tokens(request):,} tokens are longer than the "
            f"{model.max_positions:,} positions that {model.name} has learned: a longer table, and so "
            "another model, is what trains"
        )
    yield from training_warnings(request)
    offload = framework_named(request.framework).optimizer_offload
    if int(best.layout.optimizer_offload) and offload is not None and not offload.measured:
        yield (
            "no measured run stands behind parameters on the host: their copies are priced from PyTorch's "
            "source as hidden under nothing, their update as one thread's work"
        )
    if framework_named(request.framework).zero_stages[int(best.layout.zero_stage)].allow:
        yield (
            f"no measured run stands behind ZeRO {best.layout.zero_stage} of {request.framework}: "
            "its gathers, reductions and buffers are priced from its source"
        )
    experts = request.model.moe is not None
    if not experts and "moe_dispatch" in request.pins:
        yield "the pin moe_dispatch changes nothing: the model has no experts"
    device = request.cluster.device.name
    if device_class(device) is None and request.calibration is None:
        yield (
            f"the constants were fitted on no step of a {device}: its price rests on rates of kernels, its "
            "band on other devices; a few runs of your own say more (`calibrate`)"
        )
    best_known = best_measured_mfu(device, request.precision, experts=experts)
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


def training_warnings(request: PlanRequest) -> Iterator[str]:
    """What the price of the training asked for leaves out or to the run, whatever its layout.

    Parameters
    ----------
    request
        On one cluster, or on one part of a mixed one.
    """
    counts = [text for text in request.model.left_out if text.rpartition(" ")[2].isdecimal()]
    if counts:
        yield (
            f"the model's file says {', '.join(counts)}, which its family does not have and no price reads: "
            "a part of the model that they stand for is left out"
        )
    batch, tokens = request.global_batch, request.global_batch * request.seq_len
    if tokens >= FEWEST_DOUBTED_TOKENS and batch >= request.seq_len:
        yield (
            f"the global batch counts sequences, here {tokens:.3g} tokens a step: a batch of {batch:,} "
            f"tokens is one of {batch // request.seq_len:,}"
        )
    if request.lengths is not None and request.lengths.packing != UNPACKED:
        yield (
            f"launch files set sequences of {request.seq_len:,} tokens: that each is a pack of samples which "
            "attend to themselves alone is for the data and its loader to see to"
        )
    if request.deals_samples:
        multiple = padding_multiple(request.gpus)
        yield (
            "no measured run stands behind hybrid context parallelism: samples are dealt as Megatron's "
            "scheduler deals them, each priced as a sequence that runs alone"
        )
        yield (
            f"samples are priced padded to a multiple of {multiple} tokens, as any team of ranks needs them: "
            "the data set has to pad them"
        )
    bits = 16 if request.adapters is None else request.adapters.base_bits
    stored = request.model.stored_as
    note = None if stored is None else stored_weights_note(stored, bits)
    if note is not None:
        yield note
    if request.loss == "liger":
        yield "of Liger's kernels the loss alone is priced, not its norms, rotations and gates"
    if has_wide_heads(request.model):
        yield (
            f"no measured run stands behind heads of {request.model.qk_head_dim}: every layer runs by "
            "PyTorch's memory-efficient attention, priced by the rate of single kernels with heads of 256, "
            "and a window saves it nothing"
        )
    yield from _of_images(request)
    # What a kind of step other than pretraining leaves to the run, and what stands behind its price.
    kind = STEP_KINDS[request.kind]
    if request.kind == PRETRAINING:
        return
    if not kind.on_preferences:
        yield (
            f"{request.kind} is priced as {PRETRAINING} is: prompts are masked in the loss alone, which is "
            "for the training script and its data to see to"
        )
        return
    setting = framework_named(request.framework).step_kinds[request.kind]
    yield (
        f"no measured run with stated settings stands behind {request.kind}: its passes are those of "
        f"{setting.source}, every sequence with all {request.seq_len:,} tokens"
    )
    if request.loss == TRL_LOSS:
        yield (
            f"its loss is that of trainers of {TRL_HEAD.installs}: {', '.join(ASKED_OF_TRL)} ask for older "
            f"ones, which hold all logits; --loss {ALL_LOGITS} plans for them"
        )
    if request.reference == "precomputed":
        yield (
            "the step leaves out what the reference scores before training: "
            f"{kind.reference_passes} forward of every sequence"
        )
    if setting.in_launch:
        yield f"no launch files are written for {request.kind}: {setting.in_launch}"


def _of_images(request: PlanRequest) -> Iterator[str]:
    """What the price of images leaves out, and whether launch files say anything of them."""
    vision = request.model.encoder
    if vision is None or vision.use is None:
        return
    setting = framework_named(request.framework).image_encoders[vision.kind]
    yield (
        "no measured run stands behind the image encoder: every sequence has the same images; FLOP/s and MFU "
        "count the language model alone"
    )
    if request.adapters is not None:
        yield "the image encoder is frozen and has no adapters"
    elif not vision.use.trained:
        yield f"a frozen image encoder is for the training script to set: {setting.freezes}"
    if vision.crosses:
        yield (
            f"{request.model.name} reads images by cross-attention, whose layers are priced as layers with "
            "attention to the text"
        )
    if setting.in_launch:
        yield f"no launch files are written for images: {setting.in_launch}"


def _longest_tokens(request: PlanRequest) -> int:
    """Positions that a sequence has: in packs every sample begins at the first."""
    if request.lengths is None:
        return request.seq_len
    return min(request.lengths.longest, request.seq_len)


# What has to be installed beside the framework before a plan can run.


def software_needs(
    inputs: PlanInputs, layout: LayoutDoc, execution: Execution
) -> list[SoftwareNeed]:
    """Software beside the framework that a plan needs, by what needs it, whoever chose it.

    Parameters
    ----------
    inputs
        What was asked for: the framework, the model, the precision and the pins.
    layout, execution
        Of the plan.

    Returns
    -------
    list of SoftwareNeed
        Kinds of layers, the precision, execution choices, then what was allowed to change the numbers.
    """
    framework = framework_named(inputs.framework)
    needs = [
        SoftwareNeed(software=packages, needed_by=kind)
        for kind, packages in layer_needs(framework, inputs.model).items()
    ]
    method = None if inputs.adapters is None else inputs.adapters.method
    place = framework.references.get(inputs.reference or "")
    # A place that one trainer alone has comes with that trainer.
    kind = inputs.kind if place is None or not place.installs else None
    vision = inputs.model.encoder
    asked = (
        (framework.adapters, method, ""),
        (framework.losses, inputs.loss, " loss"),
        (framework.image_encoders, None if vision is None else vision.kind, " image encoder"),
        (framework.step_kinds, kind, ""),
        (framework.references, inputs.reference, " reference"),
        (framework.precisions, inputs.precision, ""),
        (framework.optimizers, inputs.optimizer, ""),
    )
    for settings, name, noun in asked:
        setting = settings.get(name or "")
        if setting is not None and setting.installs:
            needs.append(SoftwareNeed(software=setting.installs, needed_by=f"{name}{noun}"))
    for choice, value in compared_choices(layout, execution):
        setting = choice.setting(framework, value)
        software = "" if setting is None else _software(setting, inputs, layout)
        if software:
            needs.append(
                SoftwareNeed(
                    software=software,
                    needed_by=f"{choice.name}={choice.word(value)}",
                    choice=choice.name,
                    pinned=choice.name in inputs.pins,
                )
            )
    for choice in NUMERICS:
        value = getattr(execution, choice.name)
        if value not in (None, choice.plain) and framework.numerics[choice.allow].installs:
            installs = framework.numerics[choice.allow].installs
            needs.append(SoftwareNeed(software=installs, needed_by=choice.allow))
    return needs


def compared_choices(
    layout: LayoutDoc, execution: Execution
) -> Iterator[tuple[Choice, int | str | bool]]:
    """Choices of which a plan says what they bring, where they differ from plain, with their values.

    Parameters
    ----------
    layout
        Of the plan.
    execution
        Of the plan, its gradient buckets aside.
    """
    for choice in (*OF_EXECUTION, *OF_LAYOUT):
        value = getattr(layout if choice.of == "layout" else execution, choice.name)
        if choice.compared and value not in (None, choice.plain):
            yield choice, value


def _software(setting: Setting, inputs: PlanInputs, layout: LayoutDoc) -> str:
    """What a setting needs: of a dispatcher more, where experts are shared beyond a scale-up domain."""
    beyond = layout.expert_group > inputs.cluster.nvlink_domain
    if beyond and isinstance(setting, TokenDispatcher) and setting.installs_between:
        return setting.installs_between
    return setting.installs


# The experts of a plan in its document: where they lie, and what that brings in the plan's step.


def placed_experts(
    request: PlanRequest, workload: Workload, best: Priced
) -> dict[str, object] | None:
    """The plan document's `expert_placement`.

    Parameters
    ----------
    request
        With the measured loads that experts were placed by.
    workload
        What the plan is priced with.
    best
        The plan.

    Returns
    -------
    dict or None
        The placement, and under `step_time_s` the plan's step with experts in their own order (`in_order`),
        placed by their loads alone (`by_load`), and as placed (`as_placed`): with a token trace the third is
        less than the second by what affinity brings, tokens finding their experts in fewer blocks of GPUs.
        The first is the plan's own step, which its launch runs; the third where a placement is allowed.
        None where nothing is placed.
    """
    loads, ep = request.expert_loads, int(best.layout.ep)
    document = None if loads is None else loads.document(ep)
    if loads is None or document is None:
        return None
    steps: dict[str, float] = {}
    for name, measured in {"as_placed": loads.as_placed(ep), **loads.other_orders(ep)}.items():
        elsewhere = replace(
            workload,
            expert_imbalance_by_ep=((ep, measured.imbalance),),
            expert_copies_by_ep=tuple((ep, *copies) for copies in measured.copies),
        )
        steps[name] = Setup.of_priced(elsewhere, best).step_time_s
    return {**document, "step_time_s": steps}


# The plan's step with its samples packed as asked, and in other ways.


def lengths_document(
    request: PlanRequest, priced: Callable[[PackedLengths], StepTime]
) -> LengthsDoc | None:
    """The plan document's `lengths`; None where sequences are of one length.

    Parameters
    ----------
    request
        With the packs, and with the same samples in other packs.
    priced
        The plan's step where sequences are packs such as these.
    """
    lengths = request.lengths
    if lengths is None:
        return None
    workload = request.workload()
    each = [
        _packing_document(replace(workload, lengths=packs), packs, priced(packs))
        for packs in (lengths, *request.other_packings)
    ]
    return LengthsDoc(
        pack_size=request.seq_len,
        samples_per_step=request.global_batch * lengths.samples_a_pack,
        tokens_per_step=workload.tokens_per_step,
        cut_samples=lengths.cut_samples,
        attended_share=lengths.attended_share,
        planned=each[0],
        others=sorted(each[1:], key=lambda each: -each.tokens_per_s),
    )


def lengths_of_plan(request: PlanRequest, workload: Workload, best: Priced) -> LengthsDoc | None:
    """The same of a plan on one cluster.

    Parameters
    ----------
    request
        With the packs, and with the same samples in other packs.
    workload
        What the plan is priced with.
    best
        The plan.
    """

    def priced(packs: PackedLengths) -> StepTime:
        setup = Setup.of_priced(replace(workload, lengths=packs), best)
        return StepTime(setup.estimate.breakdown_s)

    return lengths_document(request, priced)


def _packing_document(workload: Workload, lengths: PackedLengths, step: StepTime) -> PackingDoc:
    step_s = float(np.asarray(step.seconds))
    return PackingDoc(
        packing=DEALT if lengths.dealt else lengths.packing,
        fill=lengths.fill,
        step_time_s=step_s,
        imbalance_s=float(np.asarray(step.parts.get("length_imbalance", 0.0))),
        tokens_per_s=workload.tokens_per_step / step_s,
    )


# How likely a plan is to run out of memory, and what it pays for being unlikely to.


_LEAST_GIB = 1e-3
"""Room that is taken where a reserve leaves none: a probability needs a positive one."""


def memory_risk_document(request: PlanRequest, predicted: Predicted) -> MemoryRisk:
    """The risk that remains, by the measured errors of predicted memory.

    Parameters
    ----------
    request
        With the share of errors that may not fit, and the HBM that stays free.
    predicted
        The plan's figures; its fullest GPU counts.
    """
    workload = _as_predicted(request).workload()
    room_gib = usable_hbm_gib(workload)
    peak_gib = max(predicted.memory_gib)
    fits = fit_probability(peak_gib, max(room_gib, _LEAST_GIB), peak_memory_band(workload))
    return MemoryRisk(asked=request.memory_risk, remains=1.0 - fits, room_gib=room_gib)


def risk_with_cost(
    request: PlanRequest, plan: Plan, searched: Callable[[PlanRequest], Outcome] | None
) -> MemoryRisk | None:
    """A plan's risk with what its margin for memory costs; None for a plan without a layout.

    Parameters
    ----------
    request
        What was planned.
    plan
        The plan.
    searched
        Searches a request, beginning from the plan's layout; None where that would take long.
    """
    risk, step_time_s = plan.memory_risk, plan.objective.step_time_s
    if risk is None or step_time_s is None:
        return risk
    if request.memory_risk >= POINT_ESTIMATE:
        without_s, proven = step_time_s, plan.status == "optimal"
    elif searched is None:
        return risk
    else:
        outcome = searched(_as_predicted(request))
        times = [priced.step_time_s for priced in outcome.best]
        without_s = min([*times, step_time_s])
        bound_s = outcome.lower_bound_s
        proven = bound_s is not None and bound_s >= without_s * (1 - ROUNDING)
    cost = step_time_s / without_s - 1.0
    return risk.model_copy(
        update={"step_time_s_without": without_s, "cost": cost, "proven": proven}
    )


def _as_predicted(request: PlanRequest) -> PlanRequest:
    return replace(request, memory_risk=POINT_ESTIMATE)


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

    Parameters
    ----------
    request
        What was searched, on the nodes that were taken.
    outcome
        How its search ended.
    space
        That was searched.
    wall_s
        Seconds from request to plan.
    infeasible
        Why there is no plan, where that was looked for.
    full
        How the search over layouts on all GPUs ended; None where there was none.
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
                "warnings": list(overfull_cuts(request, outcome.certificate.least_cut_use)),
                "solver": solver,
                "inputs": request.inputs(),
            }
        )
    best = outcome.best[0]
    execution = best.execution.of_layout(best.layout)
    workload = execution.applied(space.workload.on(int(best.layout.gpus)))
    predicted, use = predicted_use(workload, best)
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
            "lengths": lengths_of_plan(request, workload, best),
            "idle": idle,
            "memory_risk": memory_risk_document(request, predicted),
            "binding": [
                *bindings(request, workload, best, predicted),
                *cut_binding(use),
            ],
            "warnings": list(warnings(request, best, predicted, idle)),
            "alternatives": [alternative(other, best.step_time_s) for other in outcome.best[1:]],
            "solver": solver,
            "inputs": request.inputs(),
        }
    )


def overfull_cuts(request: PlanRequest, least_use: float | None) -> Iterator[str]:
    """What kept a search under `--max-cut-use` from a plan, as far as it was looked for.

    Parameters
    ----------
    request
        What was planned.
    least_use
        The least that a layout which is out for that uses of its fullest cut; None or infinite without any.
    """
    if least_use is not None and least_use < inf:
        yield (
            f"every mapping that was priced uses some cut to {least_use:.1%} or more, "
            f"{request.max_cut_use:.1%} are allowed: raise --max-cut-use"
        )


def objective_of(step_time_s: float | None, lower_bound_s: float | None) -> Objective:
    """Step time, lower bound and relative gap; what is not known stays null.

    Parameters
    ----------
    step_time_s
        Of the plan; None without one.
    lower_bound_s
        No plan is faster; None where nothing is known. One above the step counts as the step.
    """
    if step_time_s is None or lower_bound_s is None:
        return Objective(step_time_s=step_time_s, lower_bound_s=lower_bound_s, gap=None)
    bound = min(lower_bound_s, step_time_s)
    return Objective(
        step_time_s=step_time_s, lower_bound_s=bound, gap=(step_time_s - bound) / step_time_s
    )


def predict(workload: Workload, best: Priced) -> Predicted:
    """What the cost model expects of a priced layout, with the band of an optimum.

    Parameters
    ----------
    workload
        On the GPUs that the layout uses, run as the plan runs it.
    best
        The plan; its own step is not used.
    """
    return predicted_use(workload, best)[0]


def predicted_use(workload: Workload, best: Priced) -> tuple[Predicted, MappingUse]:
    """The same with what the layout sends over the fabric.

    Parameters
    ----------
    workload
        As in `predict`.
    best
        As in `predict`.
    """
    placement = Setup.of_priced(workload, best).placement
    prediction = predict_layout(workload, best.layout, best.stages, placement)
    ranks = best.ranks or ranks_on(workload.cluster, best.matrix)
    use = prediction.mapping_use(workload, best.layout, ranks)
    predicted = predicted_document(workload, prediction, use)
    if predicted.band_of == "own runs" or workload.adapters is not None:
        return predicted, use
    band = optimum_band(workload, best.layout, step_time_band(workload))
    band = with_stragglers(band, workload.nodes)
    update = {"error_band": ErrorBandDoc.of(band), "band_of": "optima"}
    return predicted.model_copy(update=update), use


def mapping_of_layout(workload: Workload, best: Priced) -> Mapping:
    """Names and factors of the levels, and the GPU of every rank while the list is short.

    Without a matrix the list is the mapping, and is never left out.

    Parameters
    ----------
    workload
        On the GPUs that the layout uses.
    best
        With a matrix, or with the GPU of every rank.
    """
    matrix, names = best.matrix, list(fabric_levels(workload.cluster, workload.gpus).names)
    if best.ranks is not None:
        return Mapping(
            order=list(MEGATRON_DEFAULT),
            levels=names,
            matrix={},
            ranks=list(best.ranks),
            stage_ep=None if best.stage_ep is None else [list(row) for row in best.stage_ep],
        )
    listed = workload.gpus <= MOST_LISTED_RANKS
    return Mapping(
        order=list(order_name(matrix)),
        levels=names,
        matrix={axis: list(matrix[axis]) for axis in AXES},
        ranks=ranks_on(workload.cluster, matrix) if listed else None,
        more_blocks=more_blocks(workload, best),
    )


def alternative(other: Priced, best_s: float) -> dict[str, object]:
    """A further layout: what differs in plain numbers, and how much slower it is.

    Parameters
    ----------
    other
        Of the same search as the plan.
    best_s
        The step of the plan, above 0.
    """
    doc = layout_document(other.layout, other.stages)
    of_execution = {choice.name: getattr(other.execution, choice.name) for choice in OF_EXECUTION}
    return {
        "step_time_s": other.step_time_s,
        "slower_pct": 100.0 * (other.step_time_s / best_s - 1.0),
        **{choice.name: getattr(doc, choice.name) for choice in OF_LAYOUT},
        **without_later_choices(of_execution),
        "recompute_modules": list(doc.recompute_modules),
        "recompute_layers": doc.recompute_layers,
        "stages": doc.stages,
    }


def solver_report(
    request: PlanRequest, outcome: Outcome, objective: Objective, space: SpaceReport, wall_s: float
) -> SolverReport:
    """How the answer was found, over which space, and what its status rests on.

    Parameters
    ----------
    request
        What was searched.
    outcome
        How the search ended, with what it counted.
    objective
        Of the plan.
    space
        That was searched.
    wall_s
        Seconds from request to plan.
    """
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
    """The values of every choice that the search over `space` could make.

    Parameters
    ----------
    request
        What was planned.
    space
        That was searched for it.
    """
    loads, framework = request.expert_loads, framework_named(request.framework)
    has_buckets = framework.gradient_buckets is not None and request.max_cut_use >= 1
    executions = request.execution_options.executions()
    made = (tuple(choices_made(one).items()) for one in executions)
    return SpaceReport(
        **{name: list(getattr(space, name)) for name in DEGREES},
        schedules=list(space.schedules),
        zero_stages=list(space.zero),
        shard_groups=list(space.shard_groups),
        optimizer_offloads=sorted({share for _, share in space.offloads}),
        recompute=[_recompute_name(mask) for mask in space.recompute],
        executions=[dict(made) for made in dict.fromkeys(made)],
        gradient_buckets=list(TIMES_OWN) if has_buckets else [],
        gpus=space.workload.gpus,
        even_stages=not framework.uneven_stages,
        mapping="slots-to-leaves" if is_irregular(request.cluster) else "axes-to-levels",
        expert_gap=loads.largest_gap if loads and request.places_experts else None,
    )


def _recompute_name(mask: int) -> str:
    kind, modules, _ = recompute_words(Recompute(mask), 0)
    return "+".join(modules) or kind


# What may be said of a figure by the search behind it, in the same words wherever a search is told of.


Claim = Literal["optimal", "feasible", "infeasible", "not searched"]
"""What a search lets one say: proven best, a plan without that proof, proven that there is none, or nothing
(the search was not made, or ended without a plan)."""


WORDS = {"infeasible": "no plan exists", "not searched": "not searched", "unknown": "not searched"}
"""Of searches that left no plan."""


def claim_of(status: str) -> Claim:
    """What the status of a search lets one say.

    Parameters
    ----------
    status
        Of an `Outcome` or a plan.
    """
    if status == "optimal":
        return "optimal"
    if status == "feasible":
        return "feasible"
    return "infeasible" if status == "infeasible" else "not searched"


def is_closed(claim: Claim) -> bool:
    """Whether the search behind a claim was made to its end: only then its figure is proven.

    Parameters
    ----------
    claim
        Of `claim_of`.
    """
    return claim in ("optimal", "infeasible")
