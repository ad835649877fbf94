"""A plan on a mixed cluster, as blocks of a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from meshwright.planner.analysis.neighbours import PartsChoice, PartsNeighbour
from meshwright.planner.drawing import count, counted, percent, ranges, rounded_seconds
from meshwright.planner.mixed.document import (
    MixedPlan,
    MixedPredicted,
    RankDoc,
    mixed_document,
    mixed_text,
)
from meshwright.planner.report import plan_view
from meshwright.planner.report.explain_view import choice_document, choices_view, neighbours_view
from meshwright.planner.report.plan_page import Written, banded_cards, breakdown_section
from meshwright.planner.report.plan_words import cost_rows, status_meaning, status_words
from meshwright.planner.report.prediction_view import against_today, breakdown_view, headline
from meshwright.planner.report.view import (
    COUNT,
    Card,
    Column,
    Columns,
    Facts,
    Heading,
    Section,
    View,
    Words,
    line,
    optional,
    page,
    section,
    section_html,
    sections,
    table,
    wide,
)
from meshwright.planner.request.executions import choices_made

_MEANINGS = {
    "optimal": "no plan on these parts, alone or in one pipeline, is faster under this cost model",
    "feasible": "a plan that works; that it is the fastest was not proven",
    "infeasible": "no plan fits, on a part alone or through several",
    "unknown": "the search ended before any plan was found: there may be one",
}


def mixed_view(plan: MixedPlan, *, is_full: bool = True) -> View:
    """What is fastest, against each part alone, and what each part runs.

    Parameters
    ----------
    plan
        Of any status.
    is_full
        Whether the parts of the step and the proof follow.
    """
    predicted, objective = plan.predicted, plan.objective
    gap = objective.gap
    status = Words(status_words(plan.status, gap), plan_view.STATUS_STYLES[plan.status])
    facts = [("runs on", " then ".join(plan.runs_on) or "nothing")]
    if predicted is not None and plan.layout is not None:
        held_gib = predicted.host_memory_gib
        host = f"of a node holds {held_gib:.0f} GiB of the optimizer" if held_gib else ""
        facts += [
            *_answer(plan, predicted),
            (
                "layout",
                plan_view.layout_line(plan.layout, experts=plan.inputs.model.moe is not None),
            ),
            ("installs", plan_view.installs_text(plan, predicted.step_time_s)),
            ("host", host),
            ("lengths", optional(plan.lengths, plan_view.lengths_text)),
            ("expected", optional(plan.expected_by_pairs, plan_view.expected_by_pairs_text)),
            ("execution", _execution_text(plan)),
        ]
    elif objective.step_time_s is not None:
        words = "faster alone than in a pipeline with other parts, which stay idle"
        facts.append(("step", f"{rounded_seconds(objective.step_time_s)}; {words}"))
    has_baseline = plan.baseline is not None and predicted is not None
    view = [
        *([line(Words(headline(plan), "bold"))] if has_baseline else []),
        line(status, f": {status_meaning(plan.status, gap, _MEANINGS)}"),
        Facts([*facts, *cost_rows(plan.cost), *_question(plan)]),
        *against_today(plan),
        *_ranks(plan.ranks),
        *plan_view.what_choices_bring(plan.choices or ()),
        *plan_view.alternatives_view(plan.alternatives, _WHERE),
        Heading("Parts alone"),
        table(plan.alone, _ALONE),
    ]
    if not is_full:
        return view
    return [
        *view,
        *plan_view.lengths_view(plan.lengths),
        *([] if predicted is None else breakdown_view(predicted.breakdown_s)),
        *plan_view.robustness_view(plan.robustness, plan.inputs),
        *plan_view.expected_by_pairs_view(plan.expected_by_pairs),
        *mixed_proof_view(plan),
    ]


def mixed_proof_view(plan: MixedPlan) -> View:
    """What the status rests on: the bound, and how much was looked at."""
    solver, objective, gap = plan.solver, plan.objective, plan.objective.gap
    bound = optional(objective.lower_bound_s, rounded_seconds) or "unknown"
    looked_at = f"{count(solver.rows)} layouts with ranks on each part, "
    if solver.method == "exhaustive":
        looked_at += f"every one of them priced, {count(solver.priced)} fit"
    else:
        looked_at += f"{count(solver.priced)} priced"
    rows = [
        ("lower bound", f"{bound}, gap {percent(gap)}" if gap else bound),
        ("looked at", looked_at),
        ("took", f"{solver.wall_s:.1f} s, seed {solver.seed}, {solver.version}"),
    ]
    return [Heading("Proof"), Facts(rows)]


def _where(rival: Mapping[str, object]) -> str:
    """The parts of an alternative, with the pipeline ranks on each where there are several."""
    parts, ranks = rival.get("runs_on"), rival.get("ranks_on")
    if not isinstance(parts, list):
        return ""
    if not isinstance(ranks, list):
        return ", ".join(parts)
    return ", ".join(f"{part} {count}" for part, count in zip(parts, ranks, strict=True))


_WHERE: Columns = {"runs_on": Column("runs on", value=_where)}
_ALONE: Columns = {
    "part": "part",
    "device": "device",
    "gpus": Column("GPUs", COUNT),
    "status": "status",
    "step_time_s": "step",
}


def _answer(plan: MixedPlan, predicted: MixedPredicted) -> list[tuple[str, str]]:
    step_s, band = predicted.step_time_s, predicted.error_band
    low, high = (rounded_seconds(step_s * edge) for edge in (band.low, band.high))
    return [
        ("step", ", ".join(filter(None, (rounded_seconds(step_s), _gain_over_alone(plan))))),
        ("throughput", f"{count(predicted.tokens_per_s)} tokens/s"),
        ("compute", f"MFU {percent(predicted.mfu)} of the peaks of all GPUs in use"),
        ("likely", f"{low} to {high}: {band.basis}"),
    ]


def _gain_over_alone(plan: MixedPlan) -> str:
    """`1.21 x as fast as h100 alone`; empty where no part can do it alone."""
    alone_s = {part.part: part.step_time_s for part in plan.alone if part.step_time_s}
    if plan.predicted is None or not alone_s:
        return ""
    best = min(alone_s, key=lambda part: alone_s[part])
    return f"{alone_s[best] / plan.predicted.step_time_s:.2f} x as fast as {best} alone"


def _execution_text(plan: MixedPlan) -> str:
    if plan.execution is None:
        return ""
    made = choices_made(plan.execution)
    if plan.inputs.model.moe is None:
        made.pop("moe_dispatch", None)
    words = [name if value is True else f"{name} {value}" for name, value in made.items()]
    return ", ".join(words).replace("_", " ") or "plain"


def _question(plan: MixedPlan) -> list[tuple[str, str]]:
    inputs = plan.inputs
    parts = [
        f"{plan.cluster.name_of(index)}: {counted(part.gpus, 'GPU')}, {part.cluster.device.name}"
        for index, part in enumerate(plan.cluster.parts)
    ]
    return [
        ("model", inputs.model.name),
        ("cluster", "; ".join([plan.cluster.name, *parts])),
        *plan_view.training_rows(inputs),
        *plan_view.wish_rows(inputs),
    ]


def _ranks(ranks: list[RankDoc]) -> View:
    """Neighbouring ranks with as many layers on one part together."""
    alike = groupby(ranks, key=lambda rank: (rank.part, rank.layers, rank.dense_layers))
    groups = [list(group) for _, group in alike]
    dense = {"dense_layers": Column("dense", COUNT)}
    columns: Columns = {
        "ranks": "ranks",
        "part": "part",
        "layers": Column("layers each", COUNT),
        **(dense if any(rank.dense_layers for rank in ranks) else {}),
        "peak_gib": "peak",
        "usable_gib": "usable",
    }
    rows = [
        {
            **vars(group[0]),
            "ranks": ranges(rank.rank for rank in group),
            "peak_gib": max(rank.memory_gib for rank in group),
        }
        for group in groups
    ]
    return section("Pipeline", rows, columns)


def explain_parts_view(
    plan: MixedPlan, changes: Sequence[PartsNeighbour], choices: Sequence[PartsChoice] | None
) -> View:
    """What `explain` says of a plan on a mixed cluster: what runs where, and what else there was.

    Parameters
    ----------
    plan
        With an answer.
    changes
        Of a pipeline through parts; none where a part alone is fastest.
    choices
        None where they were not searched.
    """
    view = mixed_view(plan)
    if plan.layout is not None:
        view = [*view, *choices_view(plan, choices), *neighbours_view(changes)]
    return view


def explain_parts_document(
    plan: MixedPlan, changes: Sequence[PartsNeighbour], choices: Sequence[PartsChoice] | None
) -> dict[str, Any]:
    """What `explain --json` prints of a plan on a mixed cluster: the plan with its changes.

    Parameters
    ----------
    plan, changes, choices
        As `explain_parts_view` has them.
    """
    return mixed_document(plan) | {
        "changes": [vars(change) for change in changes],
        "single_choices": None
        if choices is None
        else [choice_document(choice) for choice in choices],
    }


# A plan on a mixed cluster as one page: where the step goes, and what each part runs.


def mixed_page(plan: MixedPlan) -> str:
    """The HTML text.

    Parameters
    ----------
    plan
        With an answer: a pipeline through parts, or a part that is fastest alone.
    """
    inputs = plan.inputs
    training = dict(plan_view.training_rows(inputs))
    words = f"{count(plan.cluster.gpus)} GPUs, {training['batch']}, {inputs.precision}, {inputs.framework}"
    title = f"{inputs.model.name} on {plan.cluster.name}"
    (_, first), *tables_by_name = sections(mixed_view(plan, is_full=False))
    answer = Section(key="plan", title="The plan", before=section_html("", _beside(first)))
    tables = [
        Section(
            key=f"table-{index}",
            title=name,
            before=wide(name, section_html("", blocks)),
            half=True,
        )
        for index, (name, blocks) in enumerate(tables_by_name)
    ]
    proof = Section(
        key="proof",
        title="How sure it is",
        words=""
        if plan.predicted is None
        else f"Likely is as 90 %: {plan.predicted.error_band.basis}.",
        more=section_html("", mixed_proof_view(plan)[1:]),
        fold="The proof",
    )
    files = {"mixed_plan.yaml": mixed_text(plan)}
    charts = [] if plan.predicted is None else [breakdown_section(plan.predicted)]
    parts = [answer, *charts, *tables, proof]
    return page(title, words, _headline(plan), _cards(plan), parts, files=files)


def _beside(first: View) -> View:
    """What the cards and the title do not say of the first screen."""
    shown = {"step", "throughput", "compute", "likely", "model", "batch", "training"}
    return [
        Facts([row for row in block.rows if row[0] not in shown])
        if isinstance(block, Facts)
        else block
        for block in first
    ]


def _headline(plan: MixedPlan) -> str:
    runs_on = " then ".join(plan.runs_on)
    if plan.predicted is None:
        return f"Fastest on {runs_on} alone, the other parts idle: its own plan says the rest."
    return f"{', '.join(filter(None, (f'A pipeline through {runs_on}', _gain_over_alone(plan))))}."


def _cards(plan: MixedPlan) -> list[Card]:
    predicted = plan.predicted
    if predicted is not None:
        rates: dict[str, tuple[float, Written]] = {
            "tokens/s": (predicted.tokens_per_s, count),
            "MFU": (predicted.mfu, percent),
        }
        return banded_cards(predicted.step_time_s, predicted.error_band, rates)
    step_s = plan.objective.step_time_s
    return [] if step_s is None else [Card("a step", rounded_seconds(step_s))]
