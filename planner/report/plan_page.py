"""A plan as one page: figures, reasons, pictures, and the document itself."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from meshwright.errors import InfeasibleError, InputError
from meshwright.planner.analysis.neighbours import neighbours
from meshwright.planner.analysis.timeline import Trace, trace_of
from meshwright.planner.analysis.traffic import plan_traffic, traffic_document
from meshwright.planner.drawing.quantities import count, percent, seconds
from meshwright.planner.launch.ranks.texts import plan_picture
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.texts import plan_text
from meshwright.planner.report.explain_view import neighbours_view, reasons_view
from meshwright.planner.report.html import page, section_html
from meshwright.planner.report.plan_view import plan_view
from meshwright.planner.report.timeline_picture import timeline_svg
from meshwright.planner.report.traffic_view import traffic_view
from meshwright.planner.report.view import Bullets, Heading, View, sections

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
    for title, blocks in sections([*_warnings(plan), *plan_view(plan)]):
        yield section_html(title, blocks)
        if title == "Layout":
            yield from _pictures(plan)
    reasons = reasons_view(plan)
    if plan.layout is not None:
        reasons += neighbours_view(neighbours(plan))
        reasons += traffic_view(traffic_document(plan_traffic(plan)))
    for title, blocks in sections(reasons):
        yield section_html(title, blocks)
    document = escape(plan_text(plan))
    yield f"<details><summary>The plan's document</summary><pre>{document}</pre></details>"


def _warnings(plan: Plan) -> View:
    return [Heading("Warnings"), Bullets(plan.warnings)] if plan.warnings else []


def _pictures(plan: Plan) -> Iterator[str]:
    trace = _drawable(plan)
    if trace is not None and plan.layout is not None:
        part = ""
        if trace.num_micro_batches != plan.layout.num_micro_batches:
            of_all = count(plan.layout.num_micro_batches)
            part = f", the first {trace.num_micro_batches} of {of_all}"
        yield f"<h2>The pipeline{part}</h2>{timeline_svg(trace)}"
    if plan.inputs.gpus <= MOST_RANKS_DRAWN:
        try:
            picture = plan_picture(plan)
        except InfeasibleError as error:
            picture = f"<p>{escape(str(error))}</p>"
        yield f"<h2>The ranks on the fabric</h2>{picture}"


def _drawable(plan: Plan) -> Trace | None:
    """As many micro-batches, in whole rounds of the ranks, as a picture takes; None without a pipeline."""
    layout = plan.layout
    if layout is None or layout.pp == 1:
        return None
    limit = MOST_PASSES_DRAWN // (3 * layout.pp * layout.vpp)
    if layout.num_micro_batches <= limit:
        return trace_of(plan)
    try:
        return trace_of(plan, max(1, limit // (2 * layout.pp)) * 2 * layout.pp)
    except InputError:
        return None
