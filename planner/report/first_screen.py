"""What a plan says first, in twenty lines at 80 columns: speed, layout, what it needs, how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.constants.rates import peak_flops
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.drawing.quantities import (
    batch_words,
    count,
    counted,
    percent,
    rounded_seconds,
)
from meshwright.planner.plan.document import ExecutionChoice, IdleDoc, Plan, SoftwareNeed
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.report.baseline_view import headline
from meshwright.planner.report.cost_words import cost_rows
from meshwright.planner.report.plan_words import host_words, status_meaning, status_words
from meshwright.planner.report.prediction_view import recompute_text, sharding_text
from meshwright.planner.report.view import Facts, View, Words, line
from meshwright.planner.request.executions import ALLOW_PLACED
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.predicted import LayoutDoc, Predicted

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
    "unknown": "the time limit ended the search before any plan was found",
}
MOST_NODES_NAMED = 8


def first_screen(plan: Plan) -> View:
    """The answer in short; the sections that follow have the reasons."""
    view: View = []
    if plan.baseline is not None and plan.predicted is not None:
        view.append(line(Words(headline(plan), "bold")))
    gap = plan.objective.gap
    status = Words(status_words(plan.status, gap), STATUS_STYLES[plan.status])
    view.append(line(status, f": {status_meaning(plan.status, gap, _MEANINGS)}"))
    rows = [] if plan.predicted is None else _answer(plan, plan.predicted)
    if plan.idle is not None:
        rows.append(("idle", _idle_text(plan.idle)))
    rows += cost_rows(plan.cost)
    return [*view, Facts([*rows, *_question(plan.inputs)])]


def _answer(plan: Plan, predicted: Predicted) -> list[tuple[str, str]]:
    device = plan.inputs.cluster.device
    peak_tflops = peak_flops(device, plan.inputs.precision) / 1e12
    per_gpu = predicted.tokens_per_s_per_gpu
    low_s, high_s = (
        predicted.step_time_s * edge
        for edge in (predicted.error_band.low, predicted.error_band.high)
    )
    mfu = f"MFU {percent(predicted.mfu)} of {plan.inputs.precision}'s {peak_tflops:,.0f} TFLOP/s"
    tokens_per_s = plan.inputs.global_batch * plan.inputs.seq_len / predicted.step_time_s
    rows = [
        ("step", f"{rounded_seconds(predicted.step_time_s)}"),
        ("throughput", f"{count(tokens_per_s)} tokens/s, {count(per_gpu)} a GPU"),
        ("compute", f"{predicted.tflops_per_gpu:.0f} TFLOP/s a GPU, {mfu}"),
    ]
    if plan.layout is not None:
        rows.append(("layout", layout_line(plan.layout, experts=plan.inputs.model.moe is not None)))
        software = installs_text(
            plan.installs,
            plan.inputs.framework,
            choices=plan.choices or (),
            step_time_s=predicted.step_time_s,
        )
        rows.append(("installs", software))
        rows.append(("memory", _memory(plan, predicted)))
        rows += _hosts(plan, predicted)
        rows += _placed(plan)
    basis = f"90 % of {count(predicted.error_band.rows)} measured steps"
    likely = f"{rounded_seconds(low_s)} to {rounded_seconds(high_s)}, as {basis}"
    return [*rows, ("likely", likely)]


def layout_line(layout: LayoutDoc, *, experts: bool) -> str:
    """A layout in one line: `tp 4, pp 4 x 10, dp 16; 64 micro-batches of 1; ZeRO 1`."""
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
    """Degrees of a layout, those of 1 left out but for tp and dp: `tp 4, pp 4 x 10, dp 16`."""
    pipeline = f"pp {layout.pp} x {layout.vpp}" if layout.vpp > 1 else f"pp {layout.pp}"
    degrees = {
        "tp": f"tp {layout.tp}",
        "cp": f"cp {layout.cp}" if layout.cp > 1 else "",
        "pp": pipeline if layout.pp > 1 else "",
        "dp": f"dp {layout.dp}",
        "ep": f"ep {layout.ep}" if experts else "",
        "etp": f"etp {layout.etp}" if layout.etp > 1 else "",
    }
    return ", ".join(degree for degree in degrees.values() if degree)


def installs_text(
    needs: Sequence[SoftwareNeed],
    framework: str,
    *,
    choices: Sequence[ExecutionChoice] = (),
    step_time_s: float | None = None,
) -> str:
    """Software beside the framework, with what is lost without it where that was searched for."""
    measured = {choice.choice: choice for choice in choices}
    reasons = [(need, _reason(need, measured.get(need.choice), step_time_s)) for need in needs]
    words = "; ".join(f"{need.software} ({reason})" for need, reason in reasons)
    return words or f"nothing beside {framework}"


def _reason(need: SoftwareNeed, choice: ExecutionChoice | None, step_time_s: float | None) -> str:
    """What needs the software; of a choice that was searched without, how much that costs."""
    if choice is None or step_time_s is None:
        return f"for {need.needed_by}, pinned" if need.pinned else f"for {need.needed_by}"
    if choice.step_time_s_without is None:
        return "no plan without it"
    share = choice.step_time_s_without / step_time_s - 1
    return f"{percent(abs(share))} {'faster' if share < 0 else 'slower'} without"


def _hosts(plan: Plan, predicted: Predicted) -> list[tuple[str, str]]:
    """The hosts' memory that the plan needs, and what a host has where that is known."""
    assert plan.layout is not None
    words = host_words(plan.layout.optimizer_offload, predicted.host_memory_gib)
    has_gib = plan.inputs.cluster.host_memory_gib
    if words and has_gib is not None:
        words = f"{words} (it has {count(has_gib)})"
    return [("host memory", words)] if words else []


def _placed(plan: Plan) -> list[tuple[str, str]]:
    """What a placement of the experts would bring beside the headline, which is what the launch runs."""
    steps = (plan.expert_placement or {}).get("step_time_s")
    if not isinstance(steps, dict) or "in_order" not in steps:
        return []
    placed_s, in_order_s = steps["as_placed"], steps["in_order"]
    if set(ALLOW_PLACED) <= set(plan.inputs.allow):
        words = f"as placed; in their own order {rounded_seconds(in_order_s)}"
    else:
        saves = percent(1 - placed_s / in_order_s)
        words = (
            f"in their own order, as launched; placed {rounded_seconds(placed_s)} ({saves} less)"
        )
    return [("experts", words)]


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
    tokens = inputs.global_batch * inputs.seq_len
    batch = batch_words(inputs.global_batch, inputs.seq_len)
    rows = [
        ("model", inputs.model.name),
        ("cluster", f"{cluster.name}: {counted(inputs.gpus, 'GPU')}, {cluster.device.name}"),
        ("batch", f"{batch} = {count(tokens)} a step"),
        ("training", f"{inputs.precision}, {inputs.optimizer}, {inputs.framework}"),
    ]
    if inputs.pins:
        rows.append(("pinned", ", ".join(f"{name}={value}" for name, value in inputs.pins.items())))
    if inputs.without:
        rows.append(("without", ", ".join(inputs.without)))
    if inputs.allow:
        rows.append(("allowed", ", ".join(inputs.allow)))
    if inputs.inside_domain:
        rows.append(("inside one NVLink domain", ", ".join(inputs.inside_domain)))
    if inputs.max_cut_use < 1:
        rows.append(("cuts used to at most", percent(inputs.max_cut_use, 0)))
    if inputs.forbids:
        rows.append(("forbidden", ", ".join(inputs.forbids)))
    return rows


def _idle_text(idle: IdleDoc) -> str:
    where = ""
    if idle.nodes:
        dots = ", ..." if len(idle.nodes) > MOST_NODES_NAMED else ""
        where = f" ({', '.join(idle.nodes[:MOST_NODES_NAMED])}{dots})"
    return f"{counted(idle.gpus, 'GPU')}{where}: {idle.reason}"
