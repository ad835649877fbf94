"""A plan as one page for people: what it brings, charts, what-if controls, and all figures as tables.

The page is whole in itself: the chart library (Apache ECharts) lies in it, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.costmodel.step_kinds import STEP_KINDS
from meshwright.errors import InputError
from meshwright.planner.analysis.neighbours import NearLayout, near_optimal, neighbours
from meshwright.planner.analysis.roofline import roofline_of
from meshwright.planner.analysis.timeline import Trace, phases_document, trace_of
from meshwright.planner.analysis.traffic import (
    PlanTraffic,
    plan_traffic,
    rank_grid,
    traffic_document,
    traffic_matrix,
)
from meshwright.planner.drawing import count, percent, rounded_seconds
from meshwright.planner.mixed.document import MixedPredicted
from meshwright.planner.plan.document import BaselineDoc, Plan
from meshwright.planner.plan.texts import plan_text, workload_of_plan
from meshwright.planner.report.explain_view import bounds_in_words, neighbours_view, reasons_view
from meshwright.planner.report.plan_view import layout_line, plan_view
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.prediction_view import baseline_view, headline
from meshwright.planner.report.traffic_view import traffic_view
from meshwright.planner.report.view import (
    Bullets,
    Heading,
    Section,
    View,
    optional,
    page,
    section_html,
    sections,
)
from meshwright.planner.runs.run_terms import LayoutDoc, Predicted

# What the charts of a page draw: documents of the analysis, with words and numbers as people read them.


Figures = dict[str, Any]

MOST_PASSES_DRAWN = 8_000
SMALLEST_SHARE = 0.0005
"""Parts of the step below this share are not drawn."""
_TITLES = {
    "gpus": ("GPUs", ""),
    "global_batch": ("batch", " sequences"),
    "seq_len": ("sequence length", " tokens"),
    "precision": ("precision", ""),
    "nic_gbps": ("network of a GPU", " Gb/s"),
    "hbm_gib": ("HBM of a GPU", " GiB"),
}
"""Of a control, and the unit of its values."""
_PROOFS = {
    "optimal": "proven: no layout is faster under this cost model",
    "feasible": "not proven to be the fastest",
    "not searched": "not searched: the time limit came first",
}


def breakdown_section(predicted: Predicted | MixedPredicted, words: str = "") -> Section:
    """Where the step goes, a bar for each part; those of no weight are left out."""
    step_s = predicted.step_time_s
    parts = [
        {
            "name": name.replace("_", " "),
            "seconds": seconds,
            "shown": rounded_seconds(seconds),
            "share": percent(seconds / step_s),
        }
        for name, seconds in predicted.breakdown_s.items()
        if seconds > SMALLEST_SHARE * step_s
    ]
    return Section(
        key="step",
        title="Where the step goes",
        words=words,
        charts=[("breakdown", 50 + 28 * len(parts))],
        figures={"breakdown": parts},
    )


def waterfall_figures(baseline: BaselineDoc) -> Figures | None:
    """The bars from today's step to the plan's; None where nothing changes."""
    changes = baseline.waterfall
    if not changes:
        return None
    bars = [_whole_bar("today", changes[0].step_time_s - changes[0].in_turn_s)]
    for change in changes:
        label = f"{change.in_turn_s:+.3f} s"
        alone = optional(change.alone_s, ", {:+.3f} s alone".format)
        bars.append(
            {
                "name": change.change,
                "from_s": change.step_time_s - change.in_turn_s,
                "to_s": change.step_time_s,
                "whole": False,
                "label": label,
                "words": f"{label} after the changes above{alone}",
            }
        )
    return {"bars": [*bars, _whole_bar("plan", changes[-1].step_time_s)]}


def _whole_bar(name: str, step_s: float) -> Figures:
    words = rounded_seconds(step_s)
    ends = {"from_s": 0.0, "to_s": step_s}
    return {"name": name, **ends, "whole": True, "label": words, "words": words}


def _drawn_trace(plan: Plan) -> Trace | None:
    """As many micro-batches, in whole rounds of the ranks, as a picture takes; None without a pipeline."""
    layout = plan.layout
    if layout is None or layout.pp == 1:
        return None
    limit = MOST_PASSES_DRAWN // (3 * layout.pp * layout.vpp)
    if layout.num_micro_batches <= limit:
        return trace_of(plan)
    rounds = max(1, limit // (2 * layout.pp))
    try:
        return trace_of(plan, min(rounds * 2 * layout.pp, layout.num_micro_batches))
    except InputError:
        return None


def pipeline_section(plan: Plan) -> Iterator[Section]:
    """The phases of the pipeline; nothing without one, or where it cannot be drawn."""
    trace = _drawn_trace(plan)
    if trace is None or plan.layout is None:
        return
    document = phases_document(trace)
    passes = [drawn for phase in document["phases"] for drawn in phase["passes"]]
    busy_s, num_micro_batches = document["busy_s"], trace.num_micro_batches
    idle = 1 - sum(busy_s) / (len(busy_s) * document["seconds"])
    words = f"Grey is idle: {percent(idle)} of the ranks' time in what is drawn."
    if document["period_s"] is not None:
        turns = round(document["steady_s"] / document["period_s"])
        words += f" Between warm-up and cool-down the period shown repeats {count(turns)} times."
    if num_micro_batches != plan.layout.num_micro_batches:
        drawn, whole = count(num_micro_batches), count(plan.layout.num_micro_batches)
        words += f" Played with {drawn} of the {whole} micro-batches."
    kinds = sorted({drawn[1] for drawn in passes})
    figures = {**document, "kinds": kinds, "micro_batches": num_micro_batches}
    yield Section(
        key="pipeline",
        title="The pipeline",
        words=words,
        charts=[("pipeline", 110 + max(90, min(len(busy_s) * 18, 640)))],
        figures={"pipeline": figures},
    )


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return count(value) if isinstance(value, int) else str(value)


def _shown(row: Mapping[str, Any], *, experts: bool) -> dict[str, str]:
    if row.get("step_time_s") is None:
        return {"status": row["message"]}
    proof = status_words(row["status"], row.get("gap"))
    return {
        "step": rounded_seconds(row["step_time_s"]),
        "throughput": count(row["tokens_per_s"]),
        "mfu": percent(row["mfu"]),
        "memory": f"{row['peak_memory_gib']:.1f}",
        "layout": layout_line(LayoutDoc(**row["layout"], stages=[]), experts=experts),
        "status": _PROOFS.get(proof, proof),
    }


_FIGURES = (
    ("step", "a step"),
    ("throughput", "tokens/s"),
    ("mfu", "MFU"),
    ("memory", "GiB on the fullest GPU"),
)
"""Of a plan that was made beforehand, with their names on the page."""


def plan_page(plan: Plan, what_if: Mapping[str, Any] | None = None) -> str:
    """The HTML text.

    Parameters
    ----------
    plan
        Of any status.
    what_if
        Plans for other inputs, as `planner.many.sweep` gives them: the page has controls over them.
    """
    inputs = plan.inputs
    title = f"{inputs.model.name} on {inputs.cluster.name}"
    sequences = inputs.global_batch * STEP_KINDS[inputs.kind].sequences
    words = (
        f"{count(inputs.gpus)} GPUs ({inputs.cluster.device.name}), {count(sequences)} sequences "
        f"of {count(inputs.seq_len)} tokens a step, {inputs.precision}, {inputs.framework}"
    )
    charts = list(_charts(plan, what_if))
    return page(title, words, _headline(plan), _cards(plan), [*charts, *_tables(plan)])


def _headline(plan: Plan) -> str:
    if plan.predicted is None:
        return f"There is no plan: {plan.status}."
    if plan.baseline is not None:
        return f"{headline(plan)}."
    predicted = plan.predicted
    tokens = count(plan.inputs.tokens_per_step / predicted.step_time_s)
    proof = "the fastest of all layouts under this cost model"
    if plan.status != "optimal":
        proof = status_words(plan.status, plan.objective.gap)
        if proof == plan.status:
            proof = "that it is the fastest is not proven"
    return f"{rounded_seconds(predicted.step_time_s)} a step, {tokens} tokens/s; {proof}."


def _cards(plan: Plan) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = [("proof", status_words(plan.status, plan.objective.gap))]
    if plan.predicted is not None:
        predicted = plan.predicted
        cards += [
            ("a step", rounded_seconds(predicted.step_time_s)),
            ("tokens/s on a GPU", count(predicted.tokens_per_s_per_gpu)),
            ("TFLOP/s on a GPU", f"{predicted.tflops_per_gpu:.1f}"),
            ("MFU", percent(predicted.mfu)),
            ("GiB on the fullest GPU", f"{max(predicted.memory_gib):.1f}"),
        ]
        if predicted.host_memory_gib:
            cards.append(("GiB of every host", count(predicted.host_memory_gib)))
    return cards


def _charts(plan: Plan, what_if: Mapping[str, Any] | None) -> Iterator[Section]:
    """The sections with charts; none without a layout."""
    predicted = plan.predicted
    if plan.layout is None or predicted is None:
        return
    if plan.baseline is not None:
        waterfall = waterfall_figures(plan.baseline)
        bars = 0 if waterfall is None else len(waterfall["bars"])
        yield Section(
            key="today",
            title="Against today",
            words="From today's step to the plan's, one change after the other.",
            charts=[("waterfall", 60 + 34 * bars)] if waterfall is not None else [],
            figures={"waterfall": waterfall},
            more=section_html("", baseline_view(plan)[1:]),
        )
    experts = plan.inputs.model.moe is not None
    if what_if is not None:
        yield _what_if_section(what_if, experts=experts)
    reasons = [f"{words[0].upper()}{words[1:]}." for words in bounds_in_words(plan)]
    yield breakdown_section(predicted, reasons[0])
    yield from pipeline_section(plan)
    stages = predicted.memory_parts_gib or [{"memory": gib} for gib in predicted.memory_gib]
    memory = {
        "parts": list({name: None for stage in stages for name, gib in stage.items() if gib > 0}),
        "stages": stages,
        "usable_gib": usable_hbm_gib(workload_of_plan(plan)),
        "hbm_gib": plan.inputs.cluster.device.hbm_gib,
    }
    yield Section(
        key="memory",
        title="Memory of each stage",
        words=reasons[-1],
        charts=[("memory", 360)],
        figures={"memory": memory},
    )
    yield from _fabric_sections(plan, plan_traffic(plan))
    yield _near_section(near_optimal(plan), experts=experts)


def _what_if_section(document: Mapping[str, Any], *, experts: bool) -> Section:
    """Controls over the plans that were made beforehand, and what they come to."""
    axes, selects = [], []
    for axis in document["axes"]:
        title, unit = _TITLES[axis["name"]]
        texts = [f"{_written(value)}{unit}" for value in axis["values"]]
        axes.append({**axis, "title": title, "shown": texts})
        options = "".join(
            f'<option value="{index}"{" selected" if index == axis["now"] else ""}>{escape(text)}</option>'
            for index, text in enumerate(texts)
        )
        selects.append(f"<label>{escape(title)}<select>{options}</select></label>")
    rows = [{**row, "shown": _shown(row, experts=experts)} for row in document["rows"]]
    cards = "".join(
        f'<div class="card"><b data-figure="{name}">-</b><span>{words}</span></div>'
        for name, words in _FIGURES
    )
    return Section(
        key="what-if",
        title="What if",
        words=(
            "Each choice below is a plan of its own, made beforehand with the same formulas. Where two "
            "changes were not planned together, the others go back to the plan's."
        ),
        before=(
            f'<div class="controls" id="controls">{"".join(selects)}'
            '<button type="button" id="what-if-reset">Back to the plan</button></div>'
            f'<div class="cards" aria-live="polite">{cards}</div>'
            '<p data-figure="layout">-</p><p class="soft" id="what-if-status"></p>'
        ),
        charts=[("variants", 300)],
        figures={"what_if": {"axes": axes, "rows": rows}},
    )


def _fabric_sections(plan: Plan, traffic: PlanTraffic) -> Iterator[Section]:
    experts = plan.inputs.model.moe is not None
    grid = rank_grid(traffic.layout, traffic.places, experts=experts)
    if grid is not None and grid["axes"]:
        options = "".join(f"<option>{axis}</option>" for axis in grid["axes"])
        rows = -(-len(grid["rank"]) // grid["columns"])
        yield Section(
            key="ranks",
            title="The ranks on the fabric",
            words=(
                f"A cell is a GPU, {count(grid['columns'])} in a row, node after node; its colour is the "
                "place of its rank on an axis."
            ),
            before=(
                '<div class="controls"><label>colour by<select id="rank-axis">'
                f"{options}</select></label></div>"
            ),
            charts=[("ranks", 90 + max(60, min(rows * 20, 520)))],
            figures={"ranks": grid},
        )
    document = traffic_document(traffic)
    figures = {"levels": document["levels"], "matrix": traffic_matrix(traffic.use)}
    if figures["levels"]:
        yield Section(
            key="traffic",
            title="Traffic",
            words=(
                "Left, what one GPU sends over each level of the fabric, and the share of the step that its "
                "links work. Right, who sends how much to whom, on a logarithmic scale."
            ),
            charts=[("levels", 110 + 40 * len(figures["levels"])), ("matrix", 440)],
            figures={"traffic": figures},
            more="\n".join(
                section_html(title, blocks) for title, blocks in sections(traffic_view(document))
            ),
        )
    yield Section(
        key="roofline",
        title="Roofline",
        words=(
            "The large matrix products of one micro-batch on one GPU, as the cost model prices them, under "
            "the nominal peaks of the device."
        ),
        charts=[("roofline", 380)],
        figures={"roofline": roofline_of(traffic.use.context)},
    )


def _near_section(layouts: list[NearLayout], *, experts: bool) -> Section:
    figures = [
        {
            "step_time_s": near.step_time_s,
            "memory_gib": near.memory_gib,
            "is_plan": near.is_plan,
            "on_front": near.on_front,
            "words": layout_line(near.layout, experts=experts),
        }
        for near in layouts
    ]
    return Section(
        key="near",
        title="Layouts near the optimum",
        words=(
            f"{count(len(layouts))} layouts, a few changes away from the plan, that keep every rule; the "
            "front are those that none beats in both time and memory. Only the plan is proven."
        ),
        charts=[("near", 400)],
        figures={"near": {"layouts": figures}},
    )


def _tables(plan: Plan) -> Iterator[Section]:
    """All figures as tables, and the document."""
    warnings: View = [Heading("Warnings"), Bullets(plan.warnings)] if plan.warnings else []
    view = [*warnings, *plan_view(plan), *reasons_view(plan)]
    if plan.layout is not None:
        view += neighbours_view(neighbours(plan))
    for index, (title, blocks) in enumerate(sections(view)):
        if title != "Against today":
            yield Section(key=f"table-{index}", title=title, more=section_html("", blocks))
    document = f"<pre>{escape(plan_text(plan))}</pre>"
    yield Section(key="document", title="", more=document, folded="The plan's document")
