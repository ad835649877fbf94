"""A plan on a mixed cluster, as blocks of a view."""

from __future__ import annotations

from html import escape
from itertools import groupby

from meshwright.planner.drawing import batch_words, count, counted, percent, rounded_seconds
from meshwright.planner.mixed.document import (
    AloneDoc,
    MixedPlan,
    MixedPredicted,
    RankDoc,
    mixed_text,
)
from meshwright.planner.report.plan_page import breakdown_figures
from meshwright.planner.report.plan_view import STATUS_STYLES, installs_text, layout_line
from meshwright.planner.report.plan_words import cost_rows, status_meaning, status_words
from meshwright.planner.report.prediction_view import breakdown_view
from meshwright.planner.report.view import (
    COUNT,
    SECONDS,
    Column,
    Facts,
    Heading,
    Section,
    Table,
    View,
    Words,
    decimals,
    line,
    page,
    section_html,
    sections,
)
from meshwright.planner.request.executions import choices_made

_MEANINGS = {
    "optimal": "no plan on these parts, alone or in one pipeline, is faster under this cost model",
    "feasible": "a plan that works; that it is the fastest was not proven",
    "infeasible": "no plan fits, on a part alone or through several",
    "unknown": "the time limit ended the search before any plan was found",
}


def mixed_view(plan: MixedPlan) -> View:
    """What is fastest, against each part alone, and what each part runs."""
    status = Words(status_words(plan.status, plan.objective.gap), STATUS_STYLES[plan.status])
    view: View = [line(status, f": {status_meaning(plan.status, plan.objective.gap, _MEANINGS)}")]
    facts = [("runs on", " then ".join(plan.runs_on) or "nothing")]
    if plan.predicted is not None and plan.layout is not None:
        facts += _answer(plan, plan.predicted)
        facts.append(
            ("layout", layout_line(plan.layout, experts=plan.inputs.model.moe is not None))
        )
        facts.append(("installs", installs_text(plan.installs, plan.inputs.framework)))
        if plan.predicted.host_memory_gib:
            held_gib = plan.predicted.host_memory_gib
            facts.append(("host", f"of a node holds {held_gib:.0f} GiB of the optimizer"))
        if plan.execution is not None:
            facts.append(("execution", _execution_text(plan)))
    elif plan.objective.step_time_s is not None:
        words = "faster alone than in a pipeline with other parts, which stay idle"
        facts.append(("step", f"{rounded_seconds(plan.objective.step_time_s)}; {words}"))
    facts += [*cost_rows(plan.cost), *_question(plan)]
    view.append(Facts(facts))
    if plan.ranks:
        view += [Heading("Pipeline"), _ranks_table(plan.ranks)]
    view += [Heading("Parts alone"), _alone_table(plan)]
    if plan.predicted is not None:
        view += breakdown_view(plan.predicted.breakdown_s)
    return [*view, Heading("Proof"), Facts(_proof(plan))]


def _answer(plan: MixedPlan, predicted: MixedPredicted) -> list[tuple[str, str]]:
    step_s = predicted.step_time_s
    band = predicted.error_band
    low, high = (rounded_seconds(step_s * edge) for edge in (band.low, band.high))
    return [
        ("step", compared_with_alone(plan, predicted)),
        ("throughput", f"{count(predicted.tokens_per_s)} tokens/s"),
        ("compute", f"MFU {percent(predicted.mfu)} of the peaks of all GPUs in use"),
        ("likely", f"{low} to {high}: {band.basis}"),
    ]


def compared_with_alone(plan: MixedPlan, predicted: MixedPredicted) -> str:
    """The step of a pipeline through parts, and how much faster it is than the best part alone."""
    words = rounded_seconds(predicted.step_time_s)
    best = min((each for each in plan.alone if each.step_time_s), key=_alone_s, default=None)
    if best is not None:
        words += f", {_alone_s(best) / predicted.step_time_s:.2f} x as fast as {best.part} alone"
    return words


def _alone_s(alone: AloneDoc) -> float:
    return alone.step_time_s or float("inf")


def _execution_text(plan: MixedPlan) -> str:
    assert plan.execution is not None
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
    tokens = inputs.global_batch * inputs.seq_len
    return [
        ("model", inputs.model.name),
        ("cluster", f"{plan.cluster.name}; " + "; ".join(parts)),
        (
            "batch",
            f"{batch_words(inputs.global_batch, inputs.seq_len)} = {count(tokens)} a step",
        ),
        ("training", f"{inputs.precision}, {inputs.optimizer}, {inputs.framework}"),
    ]


def _ranks_table(ranks: list[RankDoc]) -> Table:
    """Neighbouring ranks with as many layers on one part together."""
    has_leading = any(rank.dense_layers for rank in ranks)
    columns = [
        Column("ranks"),
        Column("part"),
        Column("layers each", COUNT),
        *([Column("dense", COUNT)] if has_leading else []),
        Column("peak", decimals(1), unit="GiB"),
        Column("usable", decimals(1), unit="GiB"),
    ]
    rows = []
    for _, group in groupby(ranks, key=lambda rank: (rank.part, rank.layers, rank.dense_layers)):
        own = list(group)
        numbers = str(own[0].rank)
        if len(own) > 1:
            numbers += f"-{own[-1].rank}"
        peak_gib = max(rank.memory_gib for rank in own)
        layers = [own[0].layers, *([own[0].dense_layers] if has_leading else [])]
        rows.append([numbers, own[0].part, *layers, peak_gib, own[0].usable_gib])
    return Table(columns, rows)


def _alone_table(plan: MixedPlan) -> Table:
    columns = [
        Column("part"),
        Column("device"),
        Column("GPUs", COUNT),
        Column("status"),
        Column("step", SECONDS),
    ]
    rows = [[a.part, a.device, a.gpus, a.status, a.step_time_s] for a in plan.alone]
    return Table(columns, rows)


def _proof(plan: MixedPlan) -> list[tuple[str, str]]:
    solver, bound_s = plan.solver, plan.objective.lower_bound_s
    said = "unknown" if bound_s is None else rounded_seconds(bound_s)
    if plan.objective.gap:
        said += f", gap {percent(plan.objective.gap)}"
    return [
        ("lower bound", said),
        (
            "looked at",
            f"{count(solver.rows)} layouts with ranks on each part, {count(solver.priced)} priced, "
            f"{counted(solver.rounds, 'CP-SAT model')} of up to {count(solver.kernels)}",
        ),
        ("took", f"{solver.wall_s:.1f} s, seed {solver.seed}, {solver.version}"),
    ]


# A plan on a mixed cluster as one page: where the step goes, and what each part runs.


def mixed_page(plan: MixedPlan) -> str:
    """The HTML text.

    Parameters
    ----------
    plan
        With an answer: a pipeline through parts, or a part that is fastest alone.
    """
    inputs = plan.inputs
    words = (
        f"{count(plan.cluster.gpus)} GPUs, {count(inputs.global_batch)} sequences of {count(inputs.seq_len)} "
        f"tokens a step, {inputs.precision}, {inputs.framework}"
    )
    title = f"{inputs.model.name} on {plan.cluster.name}"
    tables = [
        Section(key=f"table-{index}", title=name, more=section_html("", blocks))
        for index, (name, blocks) in enumerate(sections(mixed_view(plan)))
    ]
    text = f"<pre>{escape(mixed_text(plan))}</pre>"
    document = Section(key="document", title="", more=text, folded="The plan's document")
    return page(title, words, _headline(plan), _cards(plan), [*_charts(plan), *tables, document])


def _headline(plan: MixedPlan) -> str:
    runs_on = " then ".join(plan.runs_on)
    if plan.predicted is None:
        return f"Fastest on {runs_on} alone, the other parts idle: its own plan says the rest."
    return f"A pipeline through {runs_on}: {compared_with_alone(plan, plan.predicted)}."


def _cards(plan: MixedPlan) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = [("proof", status_words(plan.status, plan.objective.gap))]
    if plan.objective.step_time_s is not None:
        cards.append(("a step", rounded_seconds(plan.objective.step_time_s)))
    if plan.predicted is not None:
        cards.append(("tokens/s", count(plan.predicted.tokens_per_s)))
        cards.append(("MFU", percent(plan.predicted.mfu)))
    return cards


def _charts(plan: MixedPlan) -> list[Section]:
    """Where the step goes; nothing where a part alone is fastest."""
    if plan.predicted is None:
        return []
    parts = breakdown_figures(plan.predicted)
    return [
        Section(
            key="step",
            title="Where the step goes",
            charts=[("breakdown", 50 + 28 * len(parts))],
            figures={"breakdown": parts},
        )
    ]
