"""A plan for people: as one page with charts, what-if controls and all figures as tables, and in a notebook.

The page is whole in itself: the chart library (Apache ECharts) lies in it, nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from meshwright.costmodel.execution_names import STEP_KINDS
from meshwright.costmodel.footprint import usable_hbm_gib
from meshwright.errors import InputError
from meshwright.planner.analysis.neighbours import NearLayout, near_optimal, neighbours
from meshwright.planner.analysis.roofline import roofline_of
from meshwright.planner.analysis.timeline import Trace, phases_document, trace_of
from meshwright.planner.analysis.traffic import PlanTraffic, plan_traffic, traffic_matrix
from meshwright.planner.drawing import (
    FallBar,
    count,
    percent,
    ramp_colour,
    rounded_seconds,
    waterfall_svg,
)
from meshwright.planner.launch.rank_files import fabric_document
from meshwright.planner.mixed.document import MixedPredicted
from meshwright.planner.plan.document import BaselineDoc, Plan
from meshwright.planner.plan.texts import plan_text, workload_of_plan
from meshwright.planner.report import plan_view
from meshwright.planner.report.explain_view import (
    level_in_words,
    memory_in_words,
    neighbours_view,
    time_in_words,
)
from meshwright.planner.report.plan_words import status_words
from meshwright.planner.report.prediction_view import (
    band_text,
    baseline_view,
    breakdown_view,
    headline,
    layout_view,
    memory_parts_view,
)
from meshwright.planner.report.traffic_view import traffic_view
from meshwright.planner.report.view import (
    Bullets,
    Card,
    Facts,
    Heading,
    Section,
    View,
    block_html,
    optional,
    page,
    section_html,
)
from meshwright.planner.runs.run_terms import ErrorBandDoc, LayoutDoc, Predicted

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


def breakdown_section(
    predicted: Predicted | MixedPredicted, words: str = "", more: str = ""
) -> Section:
    """Where the step goes, a bar for each part; those of no weight are left out.

    Parameters
    ----------
    predicted
        Of the plan.
    words
        The sentence above the chart.
    more
        HTML that unfolds beside the table of all parts.
    """
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
        charts=[("breakdown", 50 + 26 * len(parts))],
        figures={"breakdown": parts},
        more=section_html("", breakdown_view(predicted.breakdown_s)[1:]) + more,
        half=True,
    )


def waterfall_figures(baseline: BaselineDoc) -> Figures | None:
    """The bars from today's step to the plan's, without those of no weight; None where nothing changes.

    Parameters
    ----------
    baseline
        With the changes from today's layout to the plan's, in the order of the bars.
    """
    changes = baseline.waterfall
    if not changes:
        return None
    today_s = changes[0].step_time_s - changes[0].in_turn_s
    bars = [_whole_bar("today", today_s)]
    for change in changes:
        if abs(change.in_turn_s) < SMALLEST_SHARE * today_s:
            continue
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
    """The phases of the pipeline; nothing without one, or where it cannot be drawn.

    Parameters
    ----------
    plan
        With a layout; long pipelines are played with fewer micro-batches.
    """
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
        drawn, in_all = count(num_micro_batches), count(plan.layout.num_micro_batches)
        words += f" Played with {drawn} of the {in_all} micro-batches."
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
        "layout": plan_view.layout_line(LayoutDoc(**row["layout"], stages=[]), experts=experts),
        "status": _PROOFS.get(proof, proof),
    }


_CELLS = {"GPU": "A cell is a GPU", "node": "A square is a node", "leaf": "A bar is a leaf"}
RAMP_STEPS = 9
Written = Callable[[float], str]

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
    parts = [_answer_section(plan), *_charts(plan, what_if), _proof_section(plan)]
    files = {"plan.yaml": plan_text(plan)}
    return page(title, words, _headline(plan), _cards(plan), parts, files=files)


def _headline(plan: Plan) -> str:
    if plan.predicted is not None and plan.baseline is not None:
        return f"{headline(plan)}."
    return f"{status_words(plan.status, plan.objective.gap).capitalize()}: {plan_view.meaning_words(plan)}."


def banded_cards(
    step_time_s: float, band: ErrorBandDoc, rates: Mapping[str, tuple[float, Written]]
) -> list[Card]:
    """The step and rates that go with it, each with where nine of ten measured ones would lie.

    Parameters
    ----------
    step_time_s
        Predicted, above 0.
    band
        Of measured steps over predicted ones.
    rates
        By what they are: the predicted value, above 0, and how such a value is written. They fall as the
        step grows.
    """
    low, high = (rounded_seconds(step_time_s * edge) for edge in (band.low, band.high))
    cards = [Card("a step", rounded_seconds(step_time_s), f"likely {low} to {high}")]
    for what, (value, write) in rates.items():
        likely = f"likely {write(value / band.high)} to {write(value / band.low)}"
        cards.append(Card(what, write(value), likely))
    return cards


def _cards(plan: Plan) -> list[Card]:
    predicted = plan.predicted
    if predicted is None:
        return []
    rates: dict[str, tuple[float, Written]] = {
        "tokens/s on a GPU": (predicted.tokens_per_s_per_gpu, count),
        "TFLOP/s on a GPU": (predicted.tflops_per_gpu, "{:.0f}".format),
        "MFU": (predicted.mfu, percent),
    }
    # The fullest GPU, where measured runs would have it, and what there is.
    peak_gib, usable_gib = max(predicted.memory_gib), usable_hbm_gib(workload_of_plan(plan))
    note = f"{usable_gib:.1f} usable"
    if plan.robustness is not None:
        low, high = (f"{peak_gib * edge:.1f}" for edge in plan.robustness.memory_band)
        note = f"likely {low} to {high}, {note}"
    return [
        *banded_cards(predicted.step_time_s, predicted.error_band, rates),
        Card("GiB on the fullest GPU", f"{peak_gib:.1f}", note),
    ]


def _answer_section(plan: Plan) -> Section:
    """What is run, what there is to know of it, and what else there is to say of the layout."""
    warnings: View = [Heading("Warnings"), Bullets(plan.warnings)] if plan.warnings else []
    folded: View = []
    if plan.layout is not None:
        folded = layout_view(plan.layout, plan.mapping, plan.predicted)[1:]
        folded += [
            *plan_view.execution_view(plan),
            *plan_view.placed_experts_view(plan),
            *plan_view.lengths_view(plan.lengths),
        ]
    return Section(
        key="plan",
        title="The plan" if plan.layout is not None else "What was asked",
        before=section_html(
            "", [plan_view.facts_beside(plan), *plan_view.infeasible_view(plan), *warnings]
        ),
        more=section_html("", folded) if folded else "",
        fold="Layout and execution",
    )


def _proof_section(plan: Plan) -> Section:
    """What decides, what becomes of the plan where the cost model is off, and the proof."""
    words = ""
    if plan.baseline is not None:
        status = status_words(plan.status, plan.objective.gap).capitalize()
        words = f"{status}: {plan_view.meaning_words(plan)}. "
    if plan.predicted is not None:
        words += f"Likely is {band_text(plan.predicted)}."
    robustness = plan_view.robustness_view(plan.robustness, plan.inputs)
    view = [
        *plan_view.evidence_view(plan, is_full=False),
        *robustness,
        *plan_view.binding_view(plan.binding),
    ]
    view += [
        *plan_view.expected_view(plan),
        *plan_view.expected_by_pairs_view(plan.expected_by_pairs),
        *plan_view.proof_view(plan),
    ]
    return Section(
        key="proof",
        title="How sure it is",
        words=words,
        more=section_html("", view),
        fold="Measured runs, rules at their limits, what if the prediction is off, and the proof"
        if robustness
        else "Measured runs, rules at their limits, and the proof",
    )


def _sentence(*parts: str) -> str:
    """Parts in one sentence, or none."""
    text = "; ".join(filter(None, parts))
    return f"{text[0].upper()}{text[1:]}." if text else ""


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
            charts=[("waterfall", 60 + 34 * bars)] if waterfall is not None else [],
            figures={"waterfall": waterfall},
            more=section_html("", baseline_view(plan)[1:]),
            fold="Figures and edits",
        )
    experts = plan.inputs.model.moe is not None
    if what_if is not None:
        yield _what_if_section(what_if, experts=experts)
    targets = section_html("", plan_view.grades_view(plan))
    yield breakdown_section(predicted, _sentence(*time_in_words(predicted)), targets)
    yield _memory_section(plan, predicted)
    yield from pipeline_section(plan)
    yield from _fabric_sections(plan, plan_traffic(plan), predicted)
    yield _near_section(plan, near_optimal(plan), experts=experts)


def _memory_section(plan: Plan, predicted: Predicted) -> Section:
    workload = workload_of_plan(plan)
    stages = predicted.memory_parts_gib or [{"memory": gib} for gib in predicted.memory_gib]
    memory = {
        "parts": list({name: None for stage in stages for name, gib in stage.items() if gib > 0}),
        "stages": stages,
        "usable_gib": usable_hbm_gib(workload),
        "hbm_gib": plan.inputs.cluster.device.hbm_gib,
    }
    return Section(
        key="memory",
        title="Memory of each stage",
        words=_sentence(memory_in_words(plan, predicted)),
        charts=[("memory", 360)],
        figures={"memory": memory},
        more=section_html(
            "", [*memory_parts_view(predicted, workload), *plan_view.memory_risk_view(plan)]
        ),
        half=True,
    )


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
            "Each choice is a plan of its own, made beforehand. What is grey was not planned together with "
            "the other choices."
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


def _fabric_sections(plan: Plan, traffic: PlanTraffic, predicted: Predicted) -> Iterator[Section]:
    fabric = fabric_document(plan)
    if fabric is not None and fabric["axes"]:
        options = "".join(
            f'<option value="{axis}">{axis}: {row["words"]}</option>'
            for axis, row in fabric["axes"].items()
        )
        numbers = ", its number the rank" if fabric["ranks"] else ""
        frames = (
            "; a frame is a leaf" if sum(len(pod["leaves"]) for pod in fabric["pods"]) > 1 else ""
        )
        yield Section(
            key="ranks",
            title="The ranks on the fabric",
            words=f"{_CELLS[fabric['unit']]}{numbers}{frames}.",
            before=(
                '<div class="controls"><label>colour by<select id="rank-axis">'
                f'{options}</select></label><div id="fabric-legend"></div></div>'
                '<div id="fabric" role="img" aria-label="The ranks on the nodes, leaf by leaf"></div>'
            ),
            figures={
                "fabric": {
                    **fabric,
                    "ramp": [ramp_colour(step, RAMP_STEPS) for step in range(RAMP_STEPS)],
                }
            },
        )
    document = traffic.document()
    figures = {"levels": document["levels"], "matrix": traffic_matrix(traffic.use)}
    if figures["levels"]:
        yield Section(
            key="traffic",
            title="Traffic",
            words=_sentence(
                *level_in_words(predicted),
                "what a GPU sends over each level with the share of the step that its links work, and who "
                "sends how much to whom, on a logarithmic scale",
            ),
            charts=[("levels", 110 + 40 * len(figures["levels"])), ("matrix", 400)],
            figures={"traffic": figures},
            more=section_html("", traffic_view(document)),
        )
    yield Section(
        key="roofline",
        title="Roofline",
        words="The large products of a micro-batch as they are priced, under the device's nominal peaks.",
        charts=[("roofline", 380)],
        figures={"roofline": roofline_of(traffic.use.context)},
        half=True,
    )


def _near_section(plan: Plan, layouts: list[NearLayout], *, experts: bool) -> Section:
    figures = [
        {
            "step_time_s": near.step_time_s,
            "memory_gib": near.memory_gib,
            "is_plan": near.is_plan,
            "on_front": near.on_front,
            "words": plan_view.layout_line(near.layout, experts=experts),
        }
        for near in layouts
    ]
    return Section(
        key="near",
        title="Layouts near the optimum",
        words=(
            f"{count(len(layouts))} layouts a few changes away that keep every rule, as they are priced; "
            "none beats those of the front in both time and memory."
        ),
        charts=[("near", 380)],
        figures={"near": {"layouts": figures}},
        more=section_html(
            "",
            [
                *plan_view.alternatives_view(plan.alternatives, plan=plan),
                *neighbours_view(neighbours(plan)),
            ],
        ),
        fold="Alternatives, and what one change would cost",
        half=True,
    )


# A plan in a notebook: the first screen and one picture, without a script or a style sheet of its own.


SMALLEST_DRAWN = 0.005
"""Parts of the step below this share are drawn as one."""


def notebook_html(plan: Plan) -> str:
    """What a notebook shows of a plan.

    Parameters
    ----------
    plan
        Of any status.

    Returns
    -------
    str
        HTML: the first screen, the reasons where there is no plan, and a waterfall, of the parts of the step
        or, beside today's run, from today's step to the plan's.
    """
    parts = []
    for block in plan_view.first_screen(plan):
        if isinstance(block, Facts):
            rows = "".join(
                f'<tr><td style="text-align:left">{escape(name)}</td>'
                f'<td style="text-align:left">{escape(words)}</td></tr>'
                for name, words in block.rows
                if words
            )
            parts.append(f"<table><tbody>{rows}</tbody></table>")
        else:
            parts.append(block_html(block))
    bars, title = _notebook_bars(plan)
    if bars:
        picture = waterfall_svg(bars, title).replace("<svg ", '<svg style="max-width:100%" ', 1)
        parts.append(picture)
    return "<div>" + "\n".join(parts) + "</div>"


def _notebook_bars(plan: Plan) -> tuple[list[FallBar], str]:
    """The bars of a plan's waterfall and their title; none without a prediction."""
    predicted = plan.predicted
    if predicted is None:
        return [], ""
    figures = None if plan.baseline is None else waterfall_figures(plan.baseline)
    if figures is not None:
        bars = [
            FallBar(bar["name"], bar["from_s"], bar["to_s"], bar["label"], bar["whole"])
            for bar in figures["bars"]
        ]
        return bars, "From today's step to the plan's"
    step_s, bars, reached_s, rest_s = predicted.step_time_s, [], 0.0, 0.0
    largest = sorted(predicted.breakdown_s.items(), key=lambda part: -part[1])
    for name, part_s in largest:
        if part_s < SMALLEST_DRAWN * step_s:
            rest_s += part_s
            continue
        label = f"{rounded_seconds(part_s)}, {percent(part_s / step_s)}"
        bars.append(FallBar(name.replace("_", " "), reached_s, reached_s + part_s, label))
        reached_s += part_s
    if rest_s > 0:
        label = f"{rounded_seconds(rest_s)}, {percent(rest_s / step_s)}"
        bars.append(FallBar("everything else", reached_s, reached_s + rest_s, label))
    bars.append(FallBar("step", 0.0, step_s, rounded_seconds(step_s), is_whole=True))
    return bars, "Where the step's time goes"
