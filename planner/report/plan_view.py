"""A plan as a view: what it is, the proof, the layout, the prediction, the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from meshwright.costmodel.layout import AXES
from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.drawing.quantities import counted, percent, seconds
from meshwright.planner.plan.document import Binding, Plan, Robustness, Scenario
from meshwright.planner.plan.placement import workload_of_plan
from meshwright.planner.report.baseline_view import baseline_view
from meshwright.planner.report.first_screen import first_screen
from meshwright.planner.report.prediction_view import layout_view, prediction_view
from meshwright.planner.report.proof_text import proof_text, pruning_text, space_text
from meshwright.planner.report.view import (
    NUMBER,
    SECONDS,
    Bullets,
    Column,
    Facts,
    Heading,
    Kind,
    Table,
    View,
    decimals,
    line,
)
from meshwright.planner.request.inputs import PlanInputs
from meshwright.planner.runs.prediction import planned_workload

HARMLESS = 0.001
"""A share of the step time; what may be lost beyond it is shown."""


def plan_view(plan: Plan) -> View:
    """The whole plan, or why there is none: the answer first, the proof last."""
    view = [*first_screen(plan), *infeasible_view(plan)]
    if plan.baseline is not None:
        view += [Heading("Against today"), *baseline_view(plan)[1:]]
    if plan.layout is not None:
        view += layout_view(plan.layout, plan.mapping)
        view += execution_view(plan)
        view += placed_experts_view(plan)
    if plan.predicted is not None:
        view += prediction_view(plan.predicted, workload_of_plan(plan))
        view += grades_view(plan)
    view += [*binding_view(plan.binding), *memory_risk_view(plan)]
    view += [*robustness_view(plan), *expected_view(plan)]
    return [*view, *alternatives_view(plan), *proof_view(plan)]


def grades_view(plan: Plan) -> View:
    """The plan against the usual targets."""
    rows = []
    for grade in plan.grades:
        write = percent if grade.is_share else "{:.1f}".format
        rows.append([grade.what, write(grade.value), write(grade.target), grade.mark])
    columns = [Column("figure"), Column("plan"), Column("target"), Column("mark")]
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
        ("proof", proof_text(plan)),
        ("space", "" if solver.space is None else space_text(solver.space)),
        ("search", effort),
        ("pruning", pruning_text(solver)),
    ]
    return [Heading("Proof"), Facts([(name, words) for name, words in rows if words])]


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
    set_ones = {name: value for name, value in settings.items() if value is not None}
    words = [f"{name} {_setting(value)}" for name, value in set_ones.items()]
    view: View = [line(), Facts([("execution", ", ".join(words))])]
    if not plan.choices:
        return view
    columns = [
        Column("choice"),
        Column("value"),
        Column("step time without it", SECONDS, absent="no plan"),
        Column("proven"),
        Column("needs installed"),
    ]
    rows = [
        [
            choice.choice,
            _setting(choice.value),
            choice.step_time_s_without,
            "yes" if choice.proven else "no",
            choice.installs,
        ]
        for choice in plan.choices
    ]
    return [*view, Heading("What each choice brings"), Table(columns, rows)]


def _setting(value: str | bool | float) -> str:
    """A setting as it is pinned."""
    if isinstance(value, bool):
        return ("off", "on")[value]
    return value if isinstance(value, str) else f"{value:g}"


def placed_experts_view(plan: Plan) -> View:
    """What the placement of experts brings in the step."""
    steps = (plan.expert_placement or {}).get("step_time_s")
    if not isinstance(steps, dict) or "in_order" not in steps:
        return []
    words = {
        "in_order": "in their own order",
        "by_load": "placed by load alone",
        "as_placed": "as placed",
    }
    rows = [[text, steps[name]] for name, text in words.items()]
    return [
        Heading("Where experts lie"),
        Table([Column("experts"), Column("step", SECONDS)], rows),
        line(
            f"{plan.inputs.framework} takes no placement: it deals experts out in their own order, and the "
            "first row is what its launch runs. Placements are for programs that read expert_placement, and "
            "for checkpoints permuted by it: --allow expert-placement plans for these."
        ),
    ]


def binding_view(binding: Sequence[Binding]) -> View:
    """The rules that hold the plan back."""
    if not binding:
        return []
    figure = Kind(lambda value: f"{value:,.4g}")
    columns = {
        "rule": Column("rule"),
        "value": Column("value", figure),
        "limit": Column("limit", figure),
        "slack": Column("slack", figure),
        "unit": Column("unit"),
        "note": Column("what it means"),
    }
    rows = [[getattr(item, name) for name in columns] for item in binding]
    return [Heading("What holds the plan back"), Table(list(columns.values()), rows)]


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
    head = f"Over {expected.scenarios} samples of your constants: {seconds(expected.step_time_s)} on average"
    bound = (
        f"no plan averages below {seconds(expected.lower_bound_s)} (gap {percent(expected.gap, 2)})"
    )
    lines = [line(bound)]
    if expected.regret is not None:
        words = "the fastest plan by the nominal constants loses at most"
        lines.append(line(f"{words} {percent(expected.regret, 2)} to knowing them"))
    if not expected.same_as_nominal:
        words = (
            "Chosen for its mean"
            if plan.inputs.objective == "expected"
            else "--objective expected chooses"
        )
        lines.append(line(f"{words}: {expected.chosen}"))
    return [Heading(head), *lines]


def robustness_view(plan: Plan) -> View:
    """What becomes of the plan where the cost model is off, one thing at a time."""
    robustness = plan.robustness
    if robustness is None:
        return []
    verdicts = {
        True: "the same layout wins",
        False: "another layout would win",
        None: "not all of it proven",
    }
    view: View = [Heading(f"If the prediction is off: {verdicts[robustness.same_winner]}")]
    harmless = [scenario.change for scenario in robustness.scenarios if _is_harmless(scenario)]
    if harmless:
        view.append(line(f"still the fastest, to 0.1 %, with {', '.join(harmless)}"))
    columns = [
        Column("what is off"),
        Column("this plan", SECONDS, absent="does not fit"),
        Column("it loses", Kind(lambda loss: f"at most {percent(loss)}")),
        Column("instead"),
    ]
    rows = [
        [
            scenario.change,
            scenario.step_time_s,
            scenario.loss_at_most,
            _winner(scenario, robustness, plan.inputs),
        ]
        for scenario in robustness.scenarios
        if not _is_harmless(scenario)
    ]
    if rows:
        view.append(Table(columns, rows))
    return view


def _is_harmless(scenario: Scenario) -> bool:
    loss = scenario.loss_at_most
    return scenario.winner is None and loss is not None and loss <= HARMLESS


def _winner(scenario: Scenario, robustness: Robustness, inputs: PlanInputs) -> str:
    """The layout that would be faster, or what was not searched for it."""
    winner = scenario.winner
    if winner is None:
        if scenario.proven:
            return ""
        if scenario.step_time_s is not None:
            return "not all searched"
        reserve_gib = _reserve_gib(robustness, inputs)
        return f"not searched: plan with --reserve-gib {reserve_gib:.1f}"
    names = ("tp", "cp", "pp", "dp", "ep", "vpp", "micro_batch", "recompute")
    choices = [
        f"{name} {winner[name]}" for name in names if winner.get(name) not in (1, "none", None)
    ]
    return f"{seconds(scenario.best_step_time_s or 0.0)}: {', '.join(choices)}"


def _reserve_gib(robustness: Robustness, inputs: PlanInputs) -> float:
    """What must stay free for a plan that fits although memory is underestimated as far as it was."""
    usable_gib = usable_hbm_gib(planned_workload(inputs))
    return usable_gib * (1 - 1 / robustness.memory_band[1]) + inputs.reserve_gib


def alternatives_view(plan: Plan) -> View:
    """The next best layouts, with what they lose; expert degrees only where there are any."""
    layouts = plan.alternatives
    if not layouts:
        return []
    columns = {
        "step_time_s": Column("step time", SECONDS),
        "slower_pct": Column("slower", decimals(2, sign=True), unit="%"),
        **{axis: Column(axis, NUMBER) for axis in (*AXES, "ep", "etp", "vpp")},
        "micro_batch": Column("micro", NUMBER),
        "zero_stage": Column("ZeRO", NUMBER),
        "shard_groups": Column("groups", NUMBER),
        "optimizer_offload": Column("offload", NUMBER, unit="%"),
        "recompute": Column("recompute", NUMBER),
    }
    if all(layout.get(axis, 1) == 1 for layout in layouts for axis in ("ep", "etp")):
        del columns["ep"], columns["etp"]
    if all(layout.get("shard_groups", 1) == 1 for layout in layouts):
        del columns["shard_groups"]
    if not any(layout.get("optimizer_offload") for layout in layouts):
        del columns["optimizer_offload"]
    rows = [[_choice(layout, name) for name in columns] for layout in layouts]
    return [Heading("Alternatives"), Table(list(columns.values()), rows)]


def _choice(layout: Mapping[str, object], name: str) -> object:
    value = layout.get(name)
    if name == "recompute" and value == "full" and "recompute_layers" in layout:
        return f"full, {layout['recompute_layers']}"
    return value
