"""A plan as renderables: what it is, the proof, the layout, the prediction, the reasons."""

from __future__ import annotations

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.plan.document import Binding, Plan, Scenario
from meshwright.planner.report.parts import (
    Renderable,
    bullets,
    count,
    facts,
    grid,
    heading,
    line,
    percent,
    seconds,
)
from meshwright.planner.report.prediction_view import layout_view, prediction_view
from meshwright.planner.report.proof_text import proof_text, pruning_text, space_text
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.prediction import planned_workload

_STYLES = {
    "optimal": "bold green",
    "feasible": "bold yellow",
    "infeasible": "bold red",
    "unknown": "bold red",
}


HARMLESS = 0.001
"""A share of the step time; what may be lost beyond it is shown."""


def plan_view(plan: Plan) -> list[Renderable]:
    """The whole plan, or why there is none."""
    shown = [*header(plan.inputs), line(""), *status_view(plan)]
    if plan.infeasible is not None:
        shown += infeasible_view(plan)
    if plan.layout is not None:
        shown += layout_view(plan.layout, plan.mapping)
    if plan.predicted is not None:
        shown += prediction_view(plan.predicted, planned_workload(plan.inputs))
    return [*shown, *binding_view(plan.binding), *robustness_view(plan), *alternatives_view(plan)]


def header(inputs: PlanInputs) -> list[Renderable]:
    """What was asked for."""
    cluster = inputs.cluster
    tokens = inputs.global_batch * inputs.seq_len
    sequences = f"{count(inputs.global_batch)} sequences x {count(inputs.seq_len)} tokens"
    batch = f"{sequences} = {count(tokens)} a step"
    rows = [
        ("model", inputs.model.name),
        ("cluster", f"{cluster.name}: {count(inputs.gpus)} GPUs, {cluster.device.name}"),
        ("batch", batch),
        ("training", f"{inputs.precision}, {inputs.optimizer}, {inputs.framework}"),
    ]
    if inputs.pins:
        rows.append(("pinned", ", ".join(f"{name}={value}" for name, value in inputs.pins.items())))
    if inputs.forbids:
        rows.append(("forbidden", ", ".join(inputs.forbids)))
    return [facts(rows)]


def status_view(plan: Plan) -> list[Renderable]:
    """The status and what it rests on."""
    solver = plan.solver
    shown: list[Renderable] = [line((plan.status, _STYLES[plan.status]), f": {_meaning(plan)}")]
    effort = (
        solver.method if solver.wall_s is None else f"{seconds(solver.wall_s)} with {solver.method}"
    )
    if solver.layouts_considered:
        effort += f", {count(solver.layouts_considered)} layouts considered"
    rows = [
        ("proof", proof_text(plan)),
        ("space", "" if solver.space is None else space_text(solver.space)),
        ("search", effort),
        ("pruning", pruning_text(solver)),
    ]
    if plan.idle is not None:
        nodes = ", ".join(plan.idle.nodes[:8]) + (", ..." if len(plan.idle.nodes) > 8 else "")
        where = f" ({nodes})" if nodes else ""
        rows.append(("idle", f"{count(plan.idle.gpus)} GPUs{where}: {plan.idle.reason}"))
    shown.append(facts((name, words) for name, words in rows if words))
    return shown


def _meaning(plan: Plan) -> str:
    if plan.status == "optimal":
        return "no layout in this space is faster under this cost model"
    if plan.status == "feasible":
        return "a plan that works; that it is the fastest was not proven"
    if plan.status == "infeasible":
        return "no layout in this space keeps every rule"
    return "the time limit ended the search before any plan was found"


def infeasible_view(plan: Plan) -> list[Renderable]:
    """Which rules conflict, and the smallest changes that would leave a layout."""
    if plan.infeasible is None:
        return []
    shown: list[Renderable] = [
        heading("These cannot all be kept"),
        bullets(plan.infeasible.conflict),
    ]
    if plan.infeasible.smallest_changes:
        shown += [
            heading("Any one of these changes would do"),
            bullets(plan.infeasible.smallest_changes),
        ]
    return shown


def binding_view(binding: list[Binding]) -> list[Renderable]:
    """The rules that hold the plan back."""
    if not binding:
        return []
    rows = [
        [
            item.rule,
            f"{item.value:,.4g}",
            f"{item.limit:,.4g}",
            f"{item.slack:,.4g}",
            item.unit,
            item.note,
        ]
        for item in binding
    ]
    columns = ["rule", "value", "limit", "slack", "unit", "what it means"]
    return [heading("What holds the plan back"), grid(columns, rows, left=(0, 4, 5))]


def robustness_view(plan: Plan) -> list[Renderable]:
    """What becomes of the plan where the cost model is off, one thing at a time."""
    if plan.robustness is None:
        return []
    found = plan.robustness
    same = {
        True: "the same layout wins",
        False: "another layout would win",
        None: "not all of it proven",
    }
    title = heading(f"If the prediction is off: {same[found.same_winner]}")
    told = [one for one in found.scenarios if not _harmless(one)]
    kept = [one.change for one in found.scenarios if _harmless(one)]
    shown: list[Renderable] = [title]
    if kept:
        shown.append(line(f"still the fastest, to 0.1 %, with {', '.join(kept)}"))
    if told:
        rows = [
            [
                one.change,
                "does not fit" if one.step_time_s is None else seconds(one.step_time_s),
                "-" if one.loss_at_most is None else f"at most {percent(one.loss_at_most, 1)}",
                _winner(one, plan),
            ]
            for one in told
        ]
        shown.append(grid(["what is off", "this plan", "it loses", "instead"], rows, left=(0, 3)))
    return shown


def _harmless(one: Scenario) -> bool:
    return one.winner is None and one.loss_at_most is not None and one.loss_at_most <= HARMLESS


def _winner(one: Scenario, plan: Plan) -> str:
    if one.winner is None and one.step_time_s is None:
        return "" if one.proven else f"not searched: plan with --reserve-gib {_room_gib(plan):.1f}"
    if one.winner is None:
        return "" if one.proven else "not all searched"
    names = ("tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch", "recompute")
    told = [
        f"{name} {one.winner[name]}"
        for name in names
        if one.winner.get(name) not in (1, "none", None)
    ]
    return f"{seconds(one.best_step_time_s or 0.0)}: {', '.join(told)}"


def _room_gib(plan: Plan) -> float:
    """What must stay free for a plan that fits although memory is underestimated as far as it was."""
    assert plan.robustness is not None
    usable_gib = usable_hbm_gib(planned_workload(plan.inputs))
    return usable_gib * (1 - 1 / plan.robustness.memory_band[1]) + plan.inputs.reserve_gib


def alternatives_view(plan: Plan) -> list[Renderable]:
    """The next best layouts, with what they lose; expert degrees only where there are any."""
    if not plan.alternatives:
        return []
    dense = all(one.get(name, 1) == 1 for one in plan.alternatives for name in ("ep", "etp"))
    shown = {
        name: title for name, title in _ALTERNATIVE.items() if not (dense and name in ("ep", "etp"))
    }
    rows = [[_cell(name, one) for name in shown] for one in plan.alternatives]
    return [heading("Alternatives"), grid(list(shown.values()), rows, left=())]


_ALTERNATIVE = {
    "step_time_s": "step time",
    "slower_pct": "slower",
    **{axis: axis for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")},
    "micro_batch": "micro",
    "zero_stage": "ZeRO",
    "recompute": "recompute",
}


def _cell(name: str, one: dict[str, object]) -> str:
    value = one.get(name)
    if isinstance(value, int | float) and name == "step_time_s":
        return seconds(value)
    if isinstance(value, int | float) and name == "slower_pct":
        return f"{value:+.2f} %"
    if name == "recompute" and value == "full" and isinstance(one.get("recompute_layers"), int):
        return f"full, {one['recompute_layers']}"
    return "-" if value is None else str(value)
