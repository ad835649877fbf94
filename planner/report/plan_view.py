"""A plan as a view: what it is, the proof, the layout, the prediction, the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.layout import AXES
from meshwright.costmodel.lengths import DEALT
from meshwright.costmodel.optimizers import OPTIMIZER_TRAITS
from meshwright.costmodel.rates import peak_flops
from meshwright.costmodel.states import parameters_go_with_states
from meshwright.model_specs.parameters import encoder_parameters
from meshwright.planner.analysis.neighbours import Rival, rivals
from meshwright.planner.drawing import (
    batch_words,
    count,
    counted,
    percent,
    rounded_seconds,
    seconds,
)
from meshwright.planner.mixed.document import AnyPlan
from meshwright.planner.plan.document import (
    LATER_CHOICES,
    Binding,
    ExecutionChoice,
    ExpectedByPairs,
    GainEvidence,
    IdleDoc,
    LengthsDoc,
    Plan,
    Robustness,
    Scenario,
    SoftwareNeed,
)
from meshwright.planner.plan.texts import workload_of_plan
from meshwright.planner.report import plan_words
from meshwright.planner.report.prediction_view import (
    against_today,
    band_text,
    headline,
    layout_view,
    prediction_view,
    recompute_text,
    sharding_text,
)
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Bullets,
    Column,
    Columns,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    Words,
    decimals,
    line,
    optional,
    section,
    table,
)
from meshwright.planner.request.choices import (
    ALLOW_PLACED,
    DEGREES,
    DOUBLED,
    OF_EXECUTION,
    OF_LAYOUT,
    Choice,
)
from meshwright.planner.request.plan_request import PlanInputs
from meshwright.planner.runs.prediction import planned_workload
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted

# What a plan says first, in twenty lines at 80 columns: speed, layout, what it needs, how sure it is.


STATUS_STYLES = {
    "optimal": "bold green",
    "feasible": "bold yellow",
    "infeasible": "bold red",
    "unknown": "bold red",
}
_MEANINGS = {
    "optimal": "no layout in this space is faster under this cost model",
    "feasible": "a plan that works; that it is the fastest was not proven",
    "infeasible": "no layout in this space keeps every rule",
    "unknown": "the search ended before any plan was found: there may be one",
}
MOST_NODES_NAMED = 8
FEW_PLANS = 10
"""Plans below which the band of the next wider set weighs more than their own (docs/recipes.md)."""
HARMLESS = 0.001
"""A share of the step time; what may be lost beyond it is shown."""


def first_screen(plan: Plan) -> View:
    """The answer in short, or why there is none; the sections that follow have the reasons.

    Parameters
    ----------
    plan
        Of any status.
    """
    view: View = []
    if plan.baseline is not None and plan.predicted is not None:
        view.append(line(Words(headline(plan), "bold")))
    status = plan_words.status_words(plan.status, plan.objective.gap)
    view.append(line(Words(status, STATUS_STYLES[plan.status]), f": {meaning_words(plan)}"))
    return [*view, Facts(_facts(plan)), *infeasible_view(plan)]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """The answer, and what was asked."""
    rows = [] if plan.predicted is None else _answer(plan, plan.predicted)
    rows += [("idle", optional(plan.idle, _idle_text)), *plan_words.cost_rows(plan.cost)]
    return rows + _question(plan.inputs)


_ON_CARDS = {"step", "throughput", "compute", "likely", "memory"}
_IN_TITLE = {"model", "cluster", "batch", "training"}


def facts_beside(plan: Plan) -> Facts:
    """What the first screen says beyond the cards and the title of a page."""
    return Facts([row for row in _facts(plan) if row[0] not in _ON_CARDS | _IN_TITLE])


def meaning_words(plan: Plan) -> str:
    """What the status of a plan says."""
    return plan_words.status_meaning(plan.status, plan.objective.gap, _MEANINGS)


def _answer(plan: Plan, predicted: Predicted) -> list[tuple[str, str]]:
    inputs, band = plan.inputs, predicted.error_band
    peak_tflops = peak_flops(inputs.cluster.device, inputs.precision) / 1e12
    low, high = (rounded_seconds(predicted.step_time_s * edge) for edge in (band.low, band.high))
    mfu = f"MFU {percent(predicted.mfu)} of {inputs.precision}'s {peak_tflops:,.0f} TFLOP/s"
    tokens_per_s = inputs.tokens_per_step / predicted.step_time_s
    per_gpu = count(predicted.tokens_per_s_per_gpu)
    rows = [
        ("step", rounded_seconds(predicted.step_time_s)),
        ("throughput", f"{count(tokens_per_s)} tokens/s, {per_gpu} a GPU"),
        ("compute", f"{predicted.tflops_per_gpu:.0f} TFLOP/s a GPU, {mfu}"),
    ]
    if plan.layout is not None:
        rows += [
            ("layout", layout_line(plan.layout, experts=inputs.model.moe is not None)),
            ("installs", installs_text(plan, predicted.step_time_s)),
            ("memory", _memory(plan, predicted)),
            ("host memory", _host_memory(plan, predicted)),
            ("experts", _placed(plan)),
            ("lengths", optional(plan.lengths, lengths_text)),
        ]
    return [
        *rows,
        ("likely", f"{low} to {high}{_whose_band(predicted)}"),
        ("evidence", optional(plan.evidence, evidence_text)),
        ("expected", optional(plan.expected_by_pairs, expected_by_pairs_text)),
    ]


def _whose_band(predicted: Predicted) -> str:
    """What lay in the band of a prediction, behind its two ends."""
    measured = predicted.error_band.rows
    if predicted.band_of != "optima":
        return f", {band_text(predicted)}"
    near = "the fastest measured step was so near its plan"
    if measured >= FEW_PLANS:
        return f": in 9 of 10 comparable jobs ({count(measured)} measured) {near}"
    was = "was" if measured == 1 else "were"
    return f": in 9 of 10 jobs {near}; only {counted(measured, 'comparable job')} {was} measured"


def evidence_text(evidence: GainEvidence) -> str:
    """How much of a plan's gain over the nearest measured run was measured, in a sentence.

    Parameters
    ----------
    evidence
        What measured runs say for a plan.
    """
    run, gain = evidence.nearest_run, evidence.gain
    if run is None:
        return "no run of such a model was published"
    if gain is None or evidence.step_time_s is None or evidence.measured_share is None:
        return f"no measured run's choices fit here (nearest: {run.id}): all is the model's word"
    compared = f"the choices of the nearest measured run, {run.id}"
    if evidence.basis == "measured":
        compared = (
            f"the fastest step measured of this work, {rounded_seconds(run.step_time_s)} ({run.id})"
        )
    if abs(gain) <= HARMLESS:
        return f"as long as {compared}"
    if gain < 0.0:
        return f"{percent(-gain)} above {compared}"
    borne_out = gain * evidence.measured_share
    parts = f"{percent(borne_out)} measured elsewhere, {percent(gain - borne_out)} the model's word"
    return f"{percent(gain)} below {compared}: {parts}"


def evidence_view(plan: Plan, *, is_full: bool = True) -> View:
    """The nearest measured run, and what was measured of the choices that the plan makes otherwise.

    Parameters
    ----------
    plan
        Of any status.
    is_full
        Whether the sentence of the first screen stands here too.
    """
    evidence = plan.evidence
    if evidence is None or evidence.nearest_run is None:
        return []
    run = evidence.nearest_run
    where = f"{run.model} on {counted(run.gpus, 'GPU')} of {run.device}, {run.precision}, {run.framework}"
    facts = [
        ("nearest run", run.id),
        ("source", run.source),
        ("that ran", f"{where}, {batch_words(run.global_batch, run.seq_len)}"),
        ("settings", ", ".join(run.settings)),
        ("measured", rounded_seconds(run.step_time_s)),
        ("evidence", evidence_text(evidence) if is_full else ""),
    ]
    saved = Column("predicted gain", PERCENT)
    columns: Columns = {
        "choice": "choice",
        "value": Column("value", value=lambda knob: _setting(knob.value)),
        "value_of_run": Column("in the run", value=lambda knob: _setting(knob.value_of_run)),
        "predicted_gain": saved,
        "measured_gain": Column("measured gain", PERCENT),
        "pairs": Column("pairs", COUNT),
        "measured_on": "measured on",
    }
    return [
        Heading("Evidence"),
        Facts(facts),
        *section("Measured elsewhere", evidence.knobs, columns),
    ]


def layout_line(layout: LayoutDoc, *, experts: bool) -> str:
    """A layout in one line: `tp 4, pp 4 x 10, dp 16; 64 micro-batches of 1; ZeRO 1`.

    Parameters
    ----------
    layout
        Of a plan.
    experts
        Whether the model has any: ep is said then, whatever it is.
    """
    micro_batches = counted(layout.num_micro_batches, "micro-batch", "micro-batches")
    recompute = recompute_text(layout)
    parts = [
        degrees_text(layout, experts=experts),
        f"{micro_batches} of {layout.micro_batch}",
        f"ZeRO {sharding_text(layout)}",
        "" if recompute == "none" else f"recompute {recompute}",
    ]
    return "; ".join(filter(None, parts))


def degrees_text(layout: LayoutDoc, *, experts: bool) -> str:
    """Degrees of a layout, those of 1 left out but for tp and dp: `tp 4, pp 4 x 10, dp 16`.

    Parameters
    ----------
    layout
        Of a plan.
    experts
        Whether the model has any: ep is said then, whatever it is.
    """
    always = {"tp", "dp"} | ({"ep"} if experts else set())
    virtual = {"pp": f" x {layout.vpp}"} if layout.vpp > 1 else {}
    return ", ".join(
        f"{name} {getattr(layout, name)}{virtual.get(name, '')}"
        for name in DEGREES
        if name in always or getattr(layout, name) > 1
    )


def installs_text(plan: AnyPlan, step_time_s: float) -> str:
    """Software beside the framework, with what is lost without it where that was searched for.

    Parameters
    ----------
    plan
        With what it needs installed.
    step_time_s
        Of it, above 0.
    """
    searched = {choice.choice: choice for choice in plan.choices or ()}
    words = [
        f"{need.software} ({_reason(need, searched.get(need.choice), step_time_s)})"
        for need in plan.installs
    ]
    return "; ".join(words) or f"nothing beside {plan.inputs.framework}"


def _reason(need: SoftwareNeed, choice: ExecutionChoice | None, step_time_s: float) -> str:
    """What needs the software; of a choice that was searched without, how much that costs."""
    if choice is None:
        return f"for {need.needed_by}, pinned" if need.pinned else f"for {need.needed_by}"
    if choice.step_time_s_without is None:
        return "no plan without it" if choice.proven else "not searched without"
    share = choice.step_time_s_without / step_time_s - 1
    return f"{percent(abs(share))} {'faster' if share < 0 else 'slower'} without"


def _host_memory(plan: Plan, predicted: Predicted) -> str:
    """The hosts' memory that the plan needs, and what a host has where that is known."""
    assert plan.layout is not None
    inputs, execution = plan.inputs, plan.execution
    there = {
        "moments": OPTIMIZER_TRAITS[inputs.optimizer].paged,
        "reference": inputs.reference == "offloaded",
        "activations": execution is not None and execution.offload_modules != "none",
        "parameters": (execution is not None and execution.parameter_offload == "cpu")
        or (plan.layout.optimizer_offload > 0 and parameters_go_with_states(inputs.framework)),
    }
    on_hosts = [what for what, is_there in there.items() if is_there]
    words = plan_words.host_words(
        plan.layout.optimizer_offload, predicted.host_memory_gib, on_hosts
    )
    has_gib = inputs.cluster.host_memory_gib
    return f"{words} (it has {count(has_gib)})" if words and has_gib is not None else words


def _expert_steps(plan: Plan) -> Mapping[str, float]:
    """Seconds of a step by how the experts lie; empty where no placement was made."""
    steps = (plan.expert_placement or {}).get("step_time_s")
    return steps if isinstance(steps, dict) and "in_order" in steps else {}


def _placed(plan: Plan) -> str:
    """What a placement of the experts would bring beside the headline, which is what the launch runs."""
    steps = _expert_steps(plan)
    if not steps:
        return ""
    placed_s, in_order_s = steps["as_placed"], steps["in_order"]
    if set(ALLOW_PLACED) <= set(plan.inputs.allow):
        return f"as placed; in their own order {rounded_seconds(in_order_s)}"
    saves = percent(1 - placed_s / in_order_s)
    return f"in their own order, as launched; placed {rounded_seconds(placed_s)} ({saves} less)"


def _memory(plan: Plan, predicted: Predicted) -> str:
    """The fullest GPU, and whether the cost model's error in memory would overfill it."""
    usable_gib, peak_gib = usable_hbm_gib(workload_of_plan(plan)), max(predicted.memory_gib)
    words = f"{peak_gib:.1f} of {usable_gib:.1f} usable GiB ({percent(peak_gib / usable_gib, 0)})"
    if plan.memory_risk is not None:
        return f"{words}; risk of running out {percent(plan.memory_risk.remains, 0)}"
    if plan.robustness is None:
        return words
    factor = plan.robustness.memory_band[1]
    if peak_gib * factor <= usable_gib:
        return f"{words}; fits also if {percent(factor - 1, 0)} more is needed"
    return f"{words}; at risk: 5 % of measured runs needed {percent(factor - 1, 0)} more"


def _question(inputs: PlanInputs) -> list[tuple[str, str]]:
    """What was asked for."""
    cluster = inputs.cluster
    return [
        ("model", inputs.model.name),
        ("cluster", f"{cluster.name}: {counted(inputs.gpus, 'GPU')}, {cluster.device.name}"),
        *training_rows(inputs),
        *wish_rows(inputs),
    ]


def wish_rows(inputs: PlanInputs) -> list[tuple[str, str]]:
    """What was pinned, allowed, limited and forbidden, in words by name."""
    cut_use = inputs.max_cut_use
    return [
        ("pinned", ", ".join(f"{name}={value}" for name, value in inputs.pins.items())),
        ("without", ", ".join(inputs.without)),
        ("allowed", ", ".join(inputs.allow)),
        ("inside one NVLink domain", ", ".join(inputs.inside_domain)),
        ("cuts used to at most", percent(cut_use, 0) if cut_use < 1 else ""),
        ("forbidden", ", ".join(inputs.forbids)),
    ]


def training_rows(inputs: PlanInputs) -> list[tuple[str, str]]:
    """Batch, kind of step, and what is trained on what, in words by name."""
    sequences = STEP_KINDS[inputs.kind].sequences
    batch = batch_words(inputs.global_batch, inputs.seq_len, sequences)
    if inputs.lengths is not None:
        batch = f"{batch}, {percent(inputs.lengths.fill)} full"
    return [
        ("batch", f"{batch} = {count(inputs.tokens_per_step)} a step"),
        ("training", plan_words.training_text(inputs)),
        ("constants", optional(inputs.calibration, lambda own: f"calibrated: {own.name}")),
        *plan_words.trained_line(inputs),
        *_images_line(inputs),
    ]


def _images_line(inputs: PlanInputs) -> list[tuple[str, str]]:
    """What sequences hold of images, and the encoder that reads them."""
    vision = inputs.model.encoder
    if vision is None or vision.use is None:
        return []
    use = vision.use
    place = "shared by the tensor ranks" if use.tensor_parallel else "whole on every tensor rank"
    words = (
        f"{use.tokens:,} tokens of a sequence, of {counted(use.images, 'image')}; encoder of "
        f"{encoder_parameters(vision):,} parameters {'trained' if use.trained else 'frozen'}, {place} of the "
        "first pipeline rank"
    )
    return [("images", words)]


def lengths_text(lengths: LengthsDoc) -> str:
    """How samples are packed, what that packs are unlike costs, and what another packing would bring.

    Parameters
    ----------
    lengths
        Of a plan, on one cluster or through parts.
    """
    planned = lengths.planned
    parts = [
        f"{count(lengths.samples_per_step)} samples a step, {planned.packing}, {percent(planned.fill)} full"
    ]
    if planned.imbalance_s > HARMLESS * planned.step_time_s:
        unlike = "uneven rounds" if planned.packing == DEALT else "unlike packs"
        parts.append(f"{unlike} cost {percent(planned.imbalance_s / planned.step_time_s)}")
    for packed in lengths.others[:1]:
        gain = packed.tokens_per_s / planned.tokens_per_s - 1.0
        if gain > HARMLESS:
            parts.append(f"{packed.packing}: {percent(gain)} more tokens/s")
    return "; ".join(parts)


def lengths_view(lengths: LengthsDoc | None) -> View:
    """A plan's layout with its samples packed in each way; nothing where sequences are of one length.

    Parameters
    ----------
    lengths
        Of a plan, on one cluster or through parts.
    """
    if lengths is None:
        return []
    facts = [
        ("pack", f"{count(lengths.pack_size)} tokens"),
        (
            "step",
            f"{count(lengths.samples_per_step)} samples, {count(lengths.tokens_per_step)} tokens",
        ),
        ("attention", f"{percent(lengths.attended_share)} of that of sequences as long"),
        (
            "cut",
            f"{counted(lengths.cut_samples, 'sample')} to a pack" if lengths.cut_samples else "",
        ),
    ]
    columns: Columns = {
        "packing": "packing",
        "fill": Column("full", PERCENT),
        "step_time_s": Column("step time", SECONDS),
        "imbalance_s": Column("of it for unlike packs", SECONDS),
        "tokens_per_s": Column("tokens/s", COUNT),
    }
    heading = section("Samples of unlike lengths", [lengths.planned, *lengths.others], columns)
    return [*heading, Facts(facts)]


def _idle_text(idle: IdleDoc) -> str:
    where = ""
    if idle.nodes:
        dots = ", ..." if len(idle.nodes) > MOST_NODES_NAMED else ""
        where = f" ({', '.join(idle.nodes[:MOST_NODES_NAMED])}{dots})"
    return f"{counted(idle.gpus, 'GPU')}{where}: {idle.reason}"


def plan_view(plan: Plan) -> View:
    """The whole plan, or why there is none: the answer first, the proof last."""
    view = [*first_screen(plan), *against_today(plan)]
    if plan.layout is not None:
        view += layout_view(plan.layout, plan.mapping, plan.predicted)
        view += execution_view(plan)
        view += evidence_view(plan)
        view += placed_experts_view(plan)
        view += lengths_view(plan.lengths)
    if plan.predicted is not None:
        view += prediction_view(plan.predicted, workload_of_plan(plan))
        view += grades_view(plan)
    view += [*binding_view(plan.binding), *memory_risk_view(plan)]
    view += [
        *robustness_view(plan.robustness, plan.inputs),
        *expected_view(plan),
        *expected_by_pairs_view(plan.expected_by_pairs),
    ]
    return [*view, *alternatives_view(plan.alternatives, plan=plan), *proof_view(plan)]


def short_view(plan: Plan) -> View:
    """What `plan` prints without --full: the answer, today's run beside it, and what comes next to it."""
    view = [*first_screen(plan), *against_today(plan)]
    view += rivals_view(rivals(plan))
    if plan.layout is not None:
        words = "--full adds where time and memory go, what holds the plan back, and the proof."
        view += [line(), line(words)]
    return view


_BASES = {
    "proven": "proven: of its kind none is faster",
    "found": "found: by a search that ended before it proved as much",
    "priced": "priced: near the plan",
}


def rivals_view(shown: Sequence[Rival]) -> View:
    """The fastest plans beside this one, with what they do otherwise and how they are known.

    Parameters
    ----------
    shown
        The plan itself is not among them.
    """
    bases = [words for basis, words in _BASES.items() if any(basis == each.basis for each in shown)]
    columns: Columns = {
        "step_time_s": "step time",
        "slower_pct": Column("slower", decimals(2, sign=True), unit="%"),
        "basis": "that is",
        "differs": "instead",
    }
    return [*section("Rivals", shown, columns), *([line("; ".join(bases))] if bases else [])]


def grades_view(plan: Plan) -> View:
    """The plan against the usual targets."""
    rows = []
    for grade in plan.grades:
        write = percent if grade.is_share else "{:.1f}".format
        rows.append([grade.what, write(grade.value), write(grade.target), grade.mark])
    columns = [Column(title) for title in ("figure", "plan", "target", "mark")]
    return [Heading("Against the usual targets"), Table(columns, rows)]


def proof_view(plan: Plan) -> View:
    """What the status rests on: bound and price, the space, what was left out of it."""
    solver = plan.solver
    effort = solver.method
    if solver.wall_s is not None:
        effort = f"{seconds(solver.wall_s)} with {solver.method}"
    if solver.layouts_considered:
        effort += f", {counted(solver.layouts_considered, 'layout')} considered"
    rows = [
        ("proof", plan_words.proof_text(plan)),
        ("space", optional(solver.space, plan_words.space_text)),
        ("search", effort),
        ("pruning", plan_words.pruning_text(solver)),
    ]
    return [Heading("Proof"), Facts(rows)]


def infeasible_view(plan: Plan) -> View:
    """Which rules conflict, and the smallest changes that would leave a layout."""
    if plan.infeasible is None:
        return []
    view: View = [Heading("These cannot all be kept"), Bullets(plan.infeasible.conflict)]
    changes = plan.infeasible.smallest_changes
    if changes:
        view += [Heading("Any one of these changes would do"), Bullets(changes)]
    return view


def execution_view(plan: Plan) -> View:
    """How the plan is run, and what each choice brings."""
    if plan.execution is None:
        return []
    settings = asdict(plan.execution)
    words = [f"{name} {_setting(value)}" for name, value in settings.items() if value is not None]
    brings = what_choices_bring(plan.choices or ())
    return [line(), Facts([("execution", ", ".join(words))]), *brings]


def what_choices_bring(choices: Sequence[ExecutionChoice]) -> View:
    """The best plan without each choice of a plan; nothing where there is none.

    Parameters
    ----------
    choices
        Of a plan, the largest gain first.
    """
    columns: Columns = {
        "choice": "choice",
        "value": Column("value", value=lambda choice: _setting(choice.value)),
        "step_time_s_without": Column("step time without it", SECONDS, absent=""),
        "claim": Column("that is", value=choice_words),
        "measured_gain": Column("measured (pairs)", value=measured_words),
        "installs": "needs installed",
    }
    return section("What each choice brings", choices, columns)


def choice_words(choice: ExecutionChoice) -> str:
    """What is known of the best plan without a choice; earlier versions only said if it is proven.

    Parameters
    ----------
    choice
        With its status where the plan's version wrote one.
    """
    step_s, status = choice.step_time_s_without, choice.status
    if not status:
        unproven = "feasible" if step_s is not None else "not searched"
        proven = "optimal" if step_s is not None else "infeasible"
        status = proven if choice.proven else unproven
    return plan_words.claim_words(status, step_s, choice.lower_bound_s_without)


def measured_words(choice: ExecutionChoice) -> str:
    """What a choice did to the step where somebody published runs with and without it; by how many pairs.

    Parameters
    ----------
    choice
        With `measured_gain` as a share of the step: 0.05 is shown as -5.0 %.
    """
    if choice.measured_gain is None:
        return "never"
    return f"{-100 * choice.measured_gain:+.1f} % ({choice.pairs})"


def _setting(value: str | bool | float) -> str:
    """A setting as it is pinned."""
    if isinstance(value, bool):
        return ("off", "on")[value]
    return value if isinstance(value, str) else f"{value:g}"


def placed_experts_view(plan: Plan) -> View:
    """What the placement of experts brings in the step."""
    steps = _expert_steps(plan)
    words = {
        "in_order": "in their own order",
        "by_load": "placed by load alone",
        "as_placed": "as placed",
    }
    if not steps:
        return []
    return [
        Heading("Where experts lie"),
        Table(
            [Column("experts"), Column("step", SECONDS)],
            [[text, steps[name]] for name, text in words.items()],
        ),
        line(
            f"{plan.inputs.framework} takes no placement: it deals experts out in their own order, and the "
            "first row is what its launch runs. Placements are for programs that read expert_placement, and "
            "for checkpoints permuted by it: --allow expert-placement plans for these."
        ),
    ]


def binding_view(binding: Sequence[Binding]) -> View:
    """The rules that hold the plan back.

    Parameters
    ----------
    binding
        Limits that the plan reaches, or nearly so, each in its own unit.
    """
    figure = Kind("{:,.4g}".format)
    columns: Columns = {
        "rule": "rule",
        "value": Column("value", figure),
        "limit": Column("limit", figure),
        "slack": Column("slack", figure),
        "unit": "unit",
        "note": "what it means",
    }
    return section("What holds the plan back", binding, columns)


def memory_risk_view(plan: Plan) -> View:
    """How likely the plan is not to fit, and what its margin costs."""
    risk = plan.memory_risk
    if risk is None:
        return []
    text = (
        f"memory risk: {percent(risk.remains, 1)} of measured errors would not fit into the "
        f"{risk.room_gib:.1f} GiB of a GPU, asked for at most {percent(risk.asked)}"
    )
    if risk.cost is not None and risk.step_time_s_without is not None:
        without = seconds(risk.step_time_s_without)
        costs = "costs nothing"
        if risk.cost > 0:
            costs = f"costs {percent(risk.cost, 2)} of the step ({without} without)"
        text += f"; the safety {costs}"
    return [line(text)]


def expected_view(plan: Plan) -> View:
    """How the plan does over the posterior of a calibration, and whether another does better on average."""
    expected = plan.expected
    if expected is None:
        return []
    mean, bound = seconds(expected.step_time_s), seconds(expected.lower_bound_s)
    lines = [f"no plan averages below {bound} (gap {percent(expected.gap, 2)})"]
    if expected.regret is not None:
        words = "the fastest plan by the nominal constants loses at most"
        lines.append(f"{words} {percent(expected.regret, 2)} to knowing them")
    if not expected.same_as_nominal:
        is_chosen = plan.inputs.objective == "expected"
        words = "Chosen for its mean" if is_chosen else "--objective expected chooses"
        lines.append(f"{words}: {expected.chosen}")
    head = f"Over {expected.scenarios} samples of your constants: {mean} on average"
    return [Heading(head), *map(line, lines)]


def expected_by_pairs_text(expected: ExpectedByPairs) -> str:
    """What the plan of the least expected step and the fastest one promise, in a sentence.

    Parameters
    ----------
    expected
        The plan of the least expected step and the fastest one, which may be the same.
    """
    chosen, fastest = expected.chosen, expected.fastest
    figure = rounded_seconds(chosen.expected_step_time_s)
    proof = "the least, proven" if expected.proven else "not proven to be the least"
    if expected.same_as_fastest:
        return f"{figure} by measured pairs of runs, {proof}; the fastest plan is the same"
    of_fastest = rounded_seconds(fastest.expected_step_time_s)
    return (
        f"{figure} by measured pairs of runs, {proof}; the fastest plan by price promises "
        f"{rounded_seconds(fastest.step_time_s)}, expected {of_fastest}: {fastest.plan}"
    )


def expected_by_pairs_view(expected: ExpectedByPairs | None) -> View:
    """What measured pairs correct of both plans."""
    if expected is None:
        return []
    view: View = [Heading("What measured pairs of runs make of the step")]
    columns: Columns = {
        "setting": "setting",
        "factor": Column("step times", Kind("{:.3f}".format)),
        "deviation": Column("deviation", PERCENT),
        "pairs": Column("pairs", COUNT),
    }
    shown = [("this plan", expected.chosen), ("the fastest plan", expected.fastest)]
    for name, promised in shown[: 1 if expected.same_as_fastest else 2]:
        figures = [seconds(promised.step_time_s), seconds(promised.expected_step_time_s)]
        view.append(line(f"{name}: {figures[0]} by price, {figures[1]} expected"))
        view.append(table(promised.corrections, columns))
    return view


def robustness_view(robustness: Robustness | None, inputs: PlanInputs) -> View:
    """What becomes of a plan where the cost model is off, one thing at a time.

    Parameters
    ----------
    robustness
        Of a plan; None where it was not searched.
    inputs
        Of the plan.
    """
    if robustness is None:
        return []
    verdicts = {
        True: "the same layout wins",
        False: "another layout would win",
        None: "not all of it proven",
    }
    view: View = [Heading(f"If the prediction is off: {verdicts[robustness.same_winner]}")]
    harmful: list[Scenario] = []
    harmless: list[Scenario] = []
    for scenario in robustness.scenarios:
        loss = scenario.loss_at_most
        is_harmless = scenario.winner is None and loss is not None and loss <= HARMLESS
        (harmless if is_harmless else harmful).append(scenario)
    if harmless:
        changes = ", ".join(scenario.change for scenario in harmless)
        view.append(line(f"still the fastest, to 0.1 %, with {changes}"))
    columns: Columns = {
        "change": "what is off",
        "step_time_s": Column("this plan", SECONDS, absent="does not fit"),
        "loss_at_most": Column("it loses", Kind(lambda loss: f"at most {percent(loss)}")),
        "winner": Column("instead", value=lambda scenario: _winner(scenario, robustness, inputs)),
    }
    return [*view, table(harmful, columns)] if harmful else view


def _winner(scenario: Scenario, robustness: Robustness, inputs: PlanInputs) -> str:
    """The layout that would be faster, or what was not searched for it."""
    winner = scenario.winner
    if winner is not None:
        choices = [
            f"{name} {winner[name]}"
            for name in (*DOUBLED, "recompute")
            if winner.get(name) not in (1, "none", None)
        ]
        return f"{seconds(scenario.best_step_time_s or 0.0)}: {', '.join(choices)}"
    if scenario.proven:
        return "" if scenario.best_step_time_s is not None else "no plan fits"
    if scenario.step_time_s is not None:
        return "not all searched"
    # A plan fits although memory is underestimated as far as it was, where this much stays free.
    usable_gib = usable_hbm_gib(planned_workload(inputs))
    reserve_gib = usable_gib * (1 - 1 / robustness.memory_band[1]) + inputs.reserve_gib
    return f"not searched: plan with --reserve-gib {reserve_gib:.1f}"


def alternatives_view(
    layouts: Sequence[Mapping[str, object]],
    in_front: Columns | None = None,
    plan: Plan | None = None,
) -> View:
    """The next best layouts, with what they lose; choices that all leave plain are not shown.

    Parameters
    ----------
    layouts
        The next best, as documents have them.
    in_front
        Columns that stand in front of the choices.
    plan
        Whose choices are shown too; rows that are run otherwise are named below.
    """
    beside = [] if plan is None or plan.layout is None else [plan.layout.model_dump()]
    every = [*layouts, *beside]
    shown_for = {"", *(each.shown_for for each in OF_LAYOUT if not _is_plain(each, every))}
    choices = [choice for choice in _COLUMNS if choice.shown_for in shown_for]
    columns: Columns = {
        "step_time_s": "step time",
        "slower_pct": Column("slower", decimals(2, sign=True), unit="%"),
        **(in_front or {}),
        **{choice.name: Column(choice.column, NUMBER, unit=choice.unit) for choice in choices},
        "recompute": Column("recompute", NUMBER, value=_recompute),
    }
    rows: dict[str, list[str]] = {}
    for place, layout in enumerate([] if plan is None else layouts, start=1):
        rows.setdefault(_run_otherwise(plan, layout), []).append(str(place))
    runs = [
        line(f"run with {pins}: row {', '.join(places)}") for pins, places in rows.items() if pins
    ]
    return [*section("Alternatives", layouts, columns), *runs]


def _run_otherwise(plan: Plan | None, layout: Mapping[str, object]) -> str:
    """Choices of an alternative's execution that the plan makes otherwise, as pins write them."""
    planned = {} if plan is None or plan.execution is None else vars(plan.execution)
    alternative = {**LATER_CHOICES, **layout}
    differing = [
        choice
        for choice in OF_EXECUTION
        if {choice.name} <= planned.keys() & alternative.keys()
        and alternative[choice.name] != planned[choice.name]
    ]
    pins = [f"{choice.name}={choice.word(alternative[choice.name])}" for choice in differing]
    return ", ".join(pins)


_COLUMNS = sorted(
    (choice for choice in OF_LAYOUT if choice.column),
    key=lambda choice: AXES.index(choice.name) if choice.name in AXES else len(AXES),
)
"""Choices with a column, the axes in the order of ranks first."""


def _is_plain(choice: Choice, layouts: Sequence[Mapping[str, object]]) -> bool:
    """Whether all of some layouts have the plain value; plans of earlier versions do not say some."""
    return all(layout.get(choice.name, choice.plain) == choice.plain for layout in layouts)


def _recompute(layout: Mapping[str, object]) -> object:
    layers, value = layout.get("recompute_layers"), layout.get("recompute")
    return f"full, {layers}" if value == "full" and layers is not None else value
