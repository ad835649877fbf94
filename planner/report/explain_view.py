"""Why a plan is as it is: the proof, what holds it back, what bounds its speed, and what else there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.planner.analysis.neighbours import (
    Neighbour,
    PartsChoice,
    PartsNeighbour,
    SingleChoice,
)
from meshwright.planner.drawing import counted, percent, ranges, seconds
from meshwright.planner.mixed.document import AnyPlan, MixedPlan
from meshwright.planner.plan.assemble import WORDS
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_document
from meshwright.planner.report.plan_view import (
    alternatives_view,
    binding_view,
    degrees_text,
    first_screen,
    proof_view,
)
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.prediction_view import layout_view, recompute_text, stages_text
from meshwright.planner.report.view import (
    COUNT,
    NUMBER,
    PERCENT,
    SECONDS,
    Bullets,
    Cell,
    Column,
    Columns,
    Facts,
    Heading,
    Table,
    View,
    Words,
    decimals,
    line,
    section,
)
from meshwright.planner.runs.prediction import planned_workload
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted

_EXPLAINED = ("status", "objective", "binding", "infeasible", "warnings", "alternatives")
"""Fields of a plan that its explanation repeats."""
_WAITING = ("pipeline_bubble", "length_imbalance", "host", "step_overhead", "scale")
_MOVING = ("pipeline_p2p", "dp_comm")
SMALLEST_SHARE = 0.001
"""Parts of the step below this share are not worth a sentence."""


def explain_view(
    plan: Plan, changes: Sequence[Neighbour] = (), choices: Sequence[SingleChoice] | None = ()
) -> View:
    """The proof, what holds the plan back, what bounds its speed, and what else there was.

    Parameters
    ----------
    plan
        Of any status.
    changes
        Single changes, priced.
    choices
        The best plan with each single choice; None where none was searched.
    """
    view = first_screen(plan)
    if plan.layout is not None:
        view += layout_view(plan.layout, plan.mapping, plan.predicted)
        view += binding_view(plan.binding) or [
            Heading("What holds the plan back"),
            line("No rule is at its limit: only the times decide."),
        ]
    view += [*reasons_view(plan), *choices_view(plan, choices)]
    view += [*neighbours_view(changes), *alternatives_view(plan.alternatives, plan=plan)]
    return [*view, *proof_view(plan)]


def explain_document(
    plan: Plan, changes: Sequence[Neighbour], choices: Sequence[SingleChoice] | None = ()
) -> dict[str, Any]:
    """What `explain --json` prints, without `schema`; single choices are null where none was searched.

    Parameters
    ----------
    plan
        Of any status.
    changes
        Single changes, priced.
    choices
        The best plan with each single choice; None where none was searched.
    """
    document = plan_document(plan)
    searched = [choice_document(choice) for choice in choices or ()]
    return {
        **{name: document[name] for name in _EXPLAINED},
        "bounds": bounds_in_words(plan),
        "changes": [vars(change) for change in changes],
        "single_choices": None if choices is None else searched,
    }


def choice_document(choice: SingleChoice) -> dict[str, Any]:
    """A single choice as plain data."""
    layout = choice.best_layout
    return {**vars(choice), "best_layout": layout and layout.model_dump(mode="json")}


def choices_view(plan: AnyPlan, choices: Sequence[SingleChoice] | None) -> View:
    """`tp 8: +11.2 % with all else kept, +5.3 % at its best`, a row for each choice; None where the searches
    were left out.

    Parameters
    ----------
    plan
        That they are of.
    choices
        The best plan with each; None where none was searched.
    """
    if choices is None:
        return [Heading("One choice otherwise"), line("not searched: explain --best searches")]
    signed = decimals(1, sign=True)
    experts = plan.inputs.model.moe is not None
    columns: Columns = {
        "choice": "choice",
        "kept_pct": Column("kept", signed, unit="%", value=_kept),
        "best_pct": Column("at best", signed, unit="%", absent=""),
        "best": Column(
            "the best plan with it", value=lambda choice: _best_words(choice, experts=experts)
        ),
    }
    return section("One choice otherwise", choices, columns)


def _kept(choice: SingleChoice) -> object:
    """What the choice costs with all else kept, or the rule that forbids it."""
    if choice.rule is None:
        return choice.kept_pct
    return choice.rule.partition(":")[0].partition(" = ")[0]


def _best_words(choice: SingleChoice, *, experts: bool) -> str:
    if choice.best_layout is None:
        return WORDS.get(choice.status, "")
    degrees = degrees_text(choice.best_layout, experts=experts)
    words = f"{degrees}, micro-batch {choice.best_layout.micro_batch}"
    if isinstance(choice, PartsChoice):
        words = f"{words}, on {' then '.join(choice.runs_on)}"
    return words if choice.proven else f"{words} (not proven)"


def reasons_view(plan: Plan) -> View:
    """What bounds the plan's speed, in sentences; nothing without a prediction."""
    reasons = bounds_in_words(plan)
    return [Heading("What bounds its speed"), Bullets(reasons)] if reasons else []


def neighbours_view(changes: Sequence[Neighbour]) -> View:
    """What each single change would cost; forbidden ones with the rule.

    Parameters
    ----------
    changes
        Single changes of a plan: priced, forbidden by a rule, or outside the space that was searched.
    """
    allowed = [change for change in changes if change.broken is None]
    outside = [change for change in allowed if change.outside is not None]
    inside = [change for change in allowed if change.outside is None]
    forbidden = [change for change in changes if change.broken is not None]
    columns: Columns = {
        "change": "change",
        "step_time_s": "step time",
        "slower_pct": Column("slower", decimals(2, sign=True), unit="%"),
    }
    if any(isinstance(change, PartsNeighbour) for change in changes):
        columns = {**columns, "layers": Column("layers", value=_layers_on_ranks)}
    title = "Changes outside the space that was searched"
    rules: Columns = {"change": "change", "broken": "rule"}
    return [
        *section("What one change would cost", inside, columns),
        *section(title, outside, {**columns, "outside": "why"}),
        *section("Changes that a rule forbids", forbidden, rules),
    ]


def _layers_on_ranks(change: PartsNeighbour) -> str:
    """`a 26; b 6, 5`: of each part the layers that its ranks have, each number once."""
    words, first = [], 0
    for part, ranks in change.ranks_on.items():
        layers = dict.fromkeys(change.layers[first : first + ranks])
        words.append(f"{part} {', '.join(map(str, layers))}")
        first += ranks
    return "; ".join(words)


def bounds_in_words(plan: Plan) -> list[str]:
    """What the step's time goes into, the busiest level and the fullest stage, in sentences."""
    predicted = plan.predicted
    if predicted is None:
        return []
    return [*time_in_words(predicted), *level_in_words(predicted), memory_in_words(plan, predicted)]


def level_in_words(predicted: Predicted) -> list[str]:
    """How busy the busiest fabric level is; nothing where nothing is sent.

    Parameters
    ----------
    predicted
        With the traffic of each fabric level.
    """
    if not predicted.level_traffic:
        return []
    busiest = max(predicted.level_traffic, key=lambda level: level.utilisation)
    works = f"works {percent(busiest.utilisation)} of the step"
    return [f"{busiest.level}, the busiest fabric level, {works}"]


def memory_in_words(plan: Plan, predicted: Predicted) -> str:
    """The fullest stage, and how far it is from the limit.

    Parameters
    ----------
    plan
        Whose cluster has the limit.
    predicted
        Figures of its layout, or of another one on the same cluster.
    """
    fullest = max(range(len(predicted.memory_gib)), key=lambda stage: predicted.memory_gib[stage])
    peak_gib = predicted.memory_gib[fullest]
    limit_gib = usable_hbm_gib(planned_workload(plan.inputs))
    distance = f"{limit_gib - peak_gib:.1f} GiB free"
    if peak_gib > limit_gib:
        distance = f"{peak_gib - limit_gib:.1f} GiB over the limit"
    usage = f"{peak_gib:.1f} of {limit_gib:.1f} usable GiB"
    return f"stage {fullest} is the fullest: {usage}, {distance}"


def time_in_words(predicted: Predicted) -> list[str]:
    """The largest part of the step, then waits and traffic where they are no trifle.

    Parameters
    ----------
    predicted
        With the parts of the step, which add up to it.
    """
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


# How two plans differ: their figures side by side, then parts of the step and choices that differ.


SMALLEST_CHANGE = 0.001
"""Parts of the step that change by less than this share of the first step are left out."""
_FIGURES = {
    "step_time_s": Column("step time", SECONDS),
    "tokens_per_s": Column("tokens/s", COUNT),
    "tokens_per_s_per_gpu": Column("tokens/s per GPU", COUNT),
    "tflops_per_gpu": Column("TFLOP/s per GPU", decimals(1)),
    "mfu": Column("MFU", PERCENT),
    "peak_memory_gib": Column("peak memory, GiB", decimals(1)),
}
_IN_WORDS = ("recompute", "recompute_modules", "recompute_layers", "schedule", "stages")
"""Fields of a layout that are not compared as they stand."""


def comparison(plans: tuple[AnyPlan, AnyPlan]) -> dict[str, Any]:
    """The two plans' figures side by side, and the second over the first: plain data.

    Parameters
    ----------
    plans
        On one cluster, or through parts of a mixed one.
    """
    sides = [_side(plan) for plan in plans]
    ratios: dict[str, float | None] = {}
    for name in _FIGURES:
        first, second = (side[name] for side in sides)
        ratios[name] = second / first if first and second is not None else None
    # Documents leave some fields out where they are plain.
    inputs, others = (_asked(plan) for plan in plans)
    names = [name for name in inputs | others if inputs.get(name) != others.get(name)]
    return {"plans": sides, "second_over_first": ratios, "differing_inputs": sorted(names)}


def _asked(plan: AnyPlan) -> dict[str, Any]:
    """What a plan answers; of one through parts, the cluster with all of them."""
    inputs: dict[str, Any] = plan.inputs.model_dump(mode="json")
    if isinstance(plan, MixedPlan):
        inputs |= {"cluster": plan.cluster.model_dump(mode="json"), "gpus": plan.cluster.gpus}
    return inputs


def _side(plan: AnyPlan) -> dict[str, Any]:
    layout, row = plan.layout, plan.figures()
    figures: dict[str, float | None] = {name: row.get(name) for name in _FIGURES}
    document = None if layout is None else layout.model_dump(mode="json")
    parts = {"runs_on": plan.runs_on} if isinstance(plan, MixedPlan) else {}
    return {"status": plan.status, **figures, "layout": document, **parts}


def compare_view(names: tuple[str, str], plans: tuple[AnyPlan, AnyPlan]) -> View:
    """A table of what differs, figures first; equal choices are left out.

    Parameters
    ----------
    names
        What the two plans are called.
    plans
        On one cluster, or through parts of a mixed one.
    """
    document = comparison(plans)
    view: View = [
        line(Words("first:  ", "dim"), names[0]),
        line(Words("second: ", "dim"), names[1]),
    ]
    if inputs := document["differing_inputs"]:
        warning = Words("the plans answer different questions: ", "bold yellow")
        view.append(line(warning, f"{', '.join(inputs)} differ{'s' * (len(inputs) == 1)}"))
    if (speed_up := document["second_over_first"]["tokens_per_s"]) is not None:
        view.append(line(f"the second is {speed_up:.2f} x as fast in tokens/s"))
    columns = [
        Column(""),
        Column("first", NUMBER),
        Column("second", NUMBER),
        Column("change", NUMBER, absent=""),
    ]
    rows: list[list[str | Cell | None]] = [
        ["status", *(status_words(plan.status, plan.objective.gap) for plan in plans), None]
    ]
    for name, figure in _FIGURES.items():
        ratio = document["second_over_first"][name]
        change = None if ratio is None else f"{100 * (ratio - 1):+.2f} %"
        first, second = (figure.cell(side[name]) for side in document["plans"])
        rows.append([figure.title, first, second, change])
    return [*view, Table(columns, [*rows, *_part_rows(plans), *_choice_rows(plans)])]


def _part_rows(plans: tuple[AnyPlan, AnyPlan]) -> list[list[str | None]]:
    """Parts of the step that change, largest change first."""
    first, second = (plan.predicted for plan in plans)
    if first is None or second is None:
        return []
    rows = []
    for name in dict.fromkeys([*first.breakdown_s, *second.breakdown_s]):
        before_s, after_s = (side.breakdown_s.get(name, 0.0) for side in (first, second))
        if abs(after_s - before_s) >= SMALLEST_CHANGE * first.step_time_s:
            rows.append((f"  {name.replace('_', ' ')}", before_s, after_s))
    rows.sort(key=lambda row: -abs(row[2] - row[1]))
    return [
        [name, f"{before_s:.3f} s", f"{after_s:.3f} s", f"{after_s - before_s:+.3f} s"]
        for name, before_s, after_s in rows
    ]


def _choice_rows(plans: tuple[AnyPlan, AnyPlan]) -> list[list[str | None]]:
    """Choices of the layouts that differ."""
    first, second = (plan.layout for plan in plans)
    if first is None or second is None:
        return []
    before, after = _choices(first), _choices(second)
    if any(isinstance(plan, MixedPlan) for plan in plans):
        before["runs on"], after["runs on"] = (_place_words(plan) for plan in plans)
    return [
        [name, before[name], after[name], None] for name in before if before[name] != after[name]
    ]


def _place_words(plan: AnyPlan) -> str:
    """`h100: ranks 0-2; a100: ranks 3`, or the name of the one cluster."""
    if isinstance(plan, Plan):
        return plan.inputs.cluster.name
    ranks = [
        (name, [rank.rank for rank in plan.ranks if rank.part == name]) for name in plan.runs_on
    ]
    return "; ".join(f"{name}: ranks {ranges(numbers)}" for name, numbers in ranks)


def _choices(layout: LayoutDoc) -> dict[str, str]:
    """Every choice of a layout in words, by name."""
    plain = {
        name.replace("_", " "): str(getattr(layout, name))
        for name in LayoutDoc.model_fields
        if name not in _IN_WORDS
    }
    return plain | {
        "recompute": recompute_text(layout),
        "schedule": layout.schedule,
        "layers": stages_text(layout.stages),
    }


# What was checked of a plan, and what is broken.


def audit_view(document: Mapping[str, Any]) -> View:
    """The view of what `verify --json` prints: a row for each check, then everything that is broken.

    Parameters
    ----------
    document
        Of one plan, as `audit_document` makes it.
    """
    outcomes = {None: "nothing to check", True: "holds"}
    rows = [
        (
            check["check"],
            outcomes.get(check["passed"]) or f"broken: {counted(len(check['broken']), 'fault')}",
        )
        for check in document["checks"]
    ]
    broken = _faults(document)
    return [Facts(rows), Bullets(broken) if broken else line("The plan holds.")]


def _faults(audit: Mapping[str, Any]) -> list[str]:
    return [f"{check['check']}: {fault}" for check in audit["checks"] for fault in check["broken"]]


def audits_view(document: Mapping[str, Any]) -> View:
    """The view of what `verify --all --json` prints: a row for each plan, then what is broken of each.

    Parameters
    ----------
    document
        Of several plans, as `audits_document` makes it.
    """
    rows: list[tuple[str, str]] = []
    faults: View = []
    for plan in document["plans"]:
        broken = _faults(plan)
        rows.append(
            (plan["plan"], f"broken: {counted(len(broken), 'fault')}" if broken else "holds")
        )
        if broken:
            faults += [Heading(plan["plan"]), Bullets(broken)]
    if document["skipped"]:
        faults += [Heading("Not plans of this program"), Bullets(document["skipped"])]
    passed = sum(plan["passed"] for plan in document["plans"])
    verdict = f"{passed} of {counted(len(rows), 'plan')} {'holds' if passed == 1 else 'hold'}."
    return [Facts(rows), line(verdict), *faults]
