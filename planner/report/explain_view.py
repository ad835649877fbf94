"""Why a plan is as it is: the proof, what holds it back, what bounds its speed, and what else there was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.memory.footprint import usable_hbm_gib
from meshwright.planner.analysis.neighbours import Neighbour
from meshwright.planner.analysis.single_choices import SingleChoice
from meshwright.planner.drawing.quantities import percent, seconds
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.first_screen import degrees_text, first_screen
from meshwright.planner.report.plan_view import (
    alternatives_view,
    binding_view,
    infeasible_view,
    proof_view,
)
from meshwright.planner.report.prediction_view import layout_view
from meshwright.planner.report.view import (
    SECONDS,
    Bullets,
    Column,
    Heading,
    Table,
    View,
    decimals,
    line,
)
from meshwright.planner.runs.predicted import Predicted
from meshwright.planner.runs.prediction import planned_workload

_EXPLAINED = ("status", "objective", "binding", "infeasible", "warnings", "alternatives")
"""Fields of a plan that its explanation repeats."""
_WAITING = ("pipeline_bubble", "host", "step_overhead", "scale")
_MOVING = ("pipeline_p2p", "dp_comm")
SMALLEST_SHARE = 0.001
"""Parts of the step below this share are not worth a sentence."""


def explain_view(
    plan: Plan, changes: Sequence[Neighbour] = (), choices: Sequence[SingleChoice] = ()
) -> View:
    """The proof, what holds the plan back, what bounds its speed, and what else there was."""
    view = [*first_screen(plan), *infeasible_view(plan)]
    if plan.layout is not None:
        view += layout_view(plan.layout, plan.mapping)
        view += binding_view(plan.binding) or [
            Heading("What holds the plan back"),
            line("No rule is at its limit: only the times decide."),
        ]
    view += [*reasons_view(plan), *choices_view(plan, choices)]
    view += [*neighbours_view(changes), *alternatives_view(plan)]
    return [*view, *proof_view(plan)]


def explain_document(
    plan: Plan, changes: Sequence[Neighbour], choices: Sequence[SingleChoice] = ()
) -> dict[str, Any]:
    """What `explain --json` prints, without `schema`."""
    document = plan_document(plan)
    return {
        **{name: document[name] for name in _EXPLAINED},
        "bounds": bounds_in_words(plan),
        "changes": [vars(change) for change in changes],
        "single_choices": [_choice_document(choice) for choice in choices],
    }


def _choice_document(choice: SingleChoice) -> dict[str, Any]:
    layout = choice.best_layout
    document = None if layout is None else layout.model_dump(mode="json")
    return {**vars(choice), "best_layout": document}


def choices_view(plan: Plan, choices: Sequence[SingleChoice]) -> View:
    """`tp 8: +11.2 % with all else kept, +5.3 % at its best`, a row for each choice."""
    if not choices:
        return []
    signed = decimals(1, sign=True)
    columns = [
        Column("choice"),
        Column("kept", signed, unit="%"),
        Column("at best", signed, unit="%", absent="no plan"),
        Column("the best plan with it"),
    ]
    experts = plan.inputs.model.moe is not None
    rows = []
    for choice in choices:
        words = ""
        if choice.best_layout is not None:
            degrees = degrees_text(choice.best_layout, experts=experts)
            words = f"{degrees}, micro-batch {choice.best_layout.micro_batch}"
        kept: object = choice.kept_pct
        if choice.rule is not None:
            kept = choice.rule.partition(":")[0].partition(" = ")[0]
        rows.append([choice.choice, kept, choice.best_pct, words])
    return [Heading("One choice otherwise"), Table(columns, rows)]


def reasons_view(plan: Plan) -> View:
    """What bounds the plan's speed, in sentences; nothing without a prediction."""
    reasons = bounds_in_words(plan)
    return [Heading("What bounds its speed"), Bullets(reasons)] if reasons else []


def neighbours_view(changes: Sequence[Neighbour]) -> View:
    """What each single change would cost; forbidden ones with the rule."""
    view: View = []
    allowed = [change for change in changes if change.broken is None]
    columns = [
        Column("change"),
        Column("step time", SECONDS),
        Column("slower", decimals(2, sign=True), unit="%"),
    ]
    inside = [change for change in allowed if change.outside is None]
    if inside:
        rows = [[change.change, change.step_time_s, change.slower_pct] for change in inside]
        view += [Heading("What one change would cost"), Table(columns, rows)]
    outside = [change for change in allowed if change.outside is not None]
    if outside:
        reasons = [
            [change.change, change.step_time_s, change.slower_pct, change.outside]
            for change in outside
        ]
        title = "Changes outside the space that was searched"
        view += [Heading(title), Table([*columns, Column("why")], reasons)]
    forbidden = [change for change in changes if change.broken is not None]
    if forbidden:
        columns = [Column("change"), Column("rule")]
        rules = [[change.change, change.broken] for change in forbidden]
        view += [Heading("Changes that a rule forbids"), Table(columns, rules)]
    return view


def bounds_in_words(plan: Plan) -> list[str]:
    """What the step's time goes into, the busiest level and the fullest stage, in sentences."""
    predicted = plan.predicted
    if predicted is None:
        return []
    sentences = _time_in_words(predicted)
    if predicted.level_traffic:
        busiest = max(predicted.level_traffic, key=lambda level: level.utilisation)
        works = f"works {percent(busiest.utilisation)} of the step"
        sentences.append(f"{busiest.level}, the busiest fabric level, {works}")
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    peak_gib = predicted.memory_gib[fullest]
    limit_gib = usable_hbm_gib(planned_workload(plan.inputs))
    distance = f"{limit_gib - peak_gib:.1f} GiB free"
    if peak_gib > limit_gib:
        distance = f"{peak_gib - limit_gib:.1f} GiB over the limit"
    usage = f"{peak_gib:.1f} of {limit_gib:.1f} usable GiB"
    sentences.append(f"stage {fullest} is the fullest: {usage}, {distance}")
    return sentences


def _time_in_words(predicted: Predicted) -> list[str]:
    """The largest part of the step, then waits and traffic where they are no trifle."""
    step_s, parts_s = predicted.step_time_s, predicted.breakdown_s
    name = max(parts_s, key=lambda part: parts_s[part])
    largest = f"{percent(parts_s[name] / step_s)} of the step ({seconds(parts_s[name])})"
    sentences = [f"{name.replace('_', ' ')} takes {largest}"]
    for words, names in (
        ("waits and overheads", _WAITING),
        ("pipeline and gradient traffic", _MOVING),
    ):
        total_s = sum(parts_s.get(part, 0.0) for part in names)
        if total_s > SMALLEST_SHARE * step_s:
            sentences.append(f"{words} take {percent(total_s / step_s)} ({seconds(total_s)})")
    return sentences
