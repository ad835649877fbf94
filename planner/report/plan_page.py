"""A plan as one page: figures, reasons, pictures, and the document itself."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.analysis.neighbours import neighbours
from meshwright.planner.analysis.timeline import Trace, trace_of
from meshwright.planner.analysis.traffic import plan_traffic
from meshwright.planner.launch.ranks.texts import plan_picture
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.explain_view import bounds_in_words, neighbours_view
from meshwright.planner.report.html import page, sections_of
from meshwright.planner.report.parts import Renderable, bullets, count, heading, percent, seconds
from meshwright.planner.report.plan_view import plan_view
from meshwright.planner.report.timeline_picture import timeline_svg
from meshwright.planner.report.traffic_view import traffic_view

MOST_PASSES_DRAWN = 8_000
MOST_RANKS_DRAWN = 16_384


def plan_page(plan: Plan) -> str:
    """The HTML text; nothing in it runs or is loaded from elsewhere."""
    inputs = plan.inputs
    title = f"{inputs.model.name} on {inputs.cluster.name}"
    words = (
        f"{count(inputs.gpus)} GPUs ({inputs.cluster.device.name}), {count(inputs.global_batch)} sequences "
        f"of {count(inputs.seq_len)} tokens a step, {inputs.precision}, {inputs.framework}"
    )
    return page(title, words, _cards(plan), _sections(plan))


def _cards(plan: Plan) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = [("proof", plan.status)]
    if plan.predicted is not None:
        predicted = plan.predicted
        cards += [
            ("a step", seconds(predicted.step_time_s)),
            ("tokens/s on a GPU", count(predicted.tokens_per_s_per_gpu)),
            ("TFLOP/s on a GPU", f"{predicted.tflops_per_gpu:.1f}"),
            ("MFU", percent(predicted.mfu)),
            ("GiB on the fullest GPU", f"{max(predicted.memory_gib):.1f}"),
        ]
    return cards


def _sections(plan: Plan) -> Iterator[str]:
    for title, html in sections_of([*_warnings(plan), *plan_view(plan)]):
        yield html
        if title == "Layout":
            yield from _pictures(plan)
    more: list[Renderable] = []
    if reasons := bounds_in_words(plan):
        more += [heading("What bounds its speed"), bullets(reasons)]
    if plan.layout is not None:
        more += [*neighbours_view(neighbours(plan)), *traffic_view(plan_traffic(plan))]
    yield from (html for _, html in sections_of(more))
    yield f"<details><summary>The plan's document</summary><pre>{escape(plan_text(plan))}</pre></details>"


def _warnings(plan: Plan) -> list[Renderable]:
    return [heading("Warnings"), bullets(plan.warnings)] if plan.warnings else []


def _pictures(plan: Plan) -> Iterator[str]:
    trace = _drawable(plan)
    if trace is not None:
        assert plan.layout is not None
        m = plan.layout.num_micro_batches
        part = (
            ""
            if trace.num_micro_batches == m
            else f", the first {trace.num_micro_batches} of {count(m)}"
        )
        yield f"<h2>The pipeline{part}</h2>{timeline_svg(trace)}"
    if plan.inputs.gpus <= MOST_RANKS_DRAWN:
        try:
            yield f"<h2>The ranks on the fabric</h2>{plan_picture(plan)}"
        except InfeasibleError as error:
            yield f"<h2>The ranks on the fabric</h2><p>{escape(str(error))}</p>"


def _drawable(plan: Plan) -> Trace | None:
    """As many micro-batches, in whole rounds of the ranks, as a picture takes; None without a pipeline."""
    layout = plan.layout
    if layout is None or layout.pp == 1:
        return None
    most = MOST_PASSES_DRAWN // (3 * layout.pp * layout.vpp)
    if layout.num_micro_batches <= most:
        return trace_of(plan)
    try:
        return trace_of(plan, max(1, most // (2 * layout.pp)) * 2 * layout.pp)
    except InputError:
        return None
