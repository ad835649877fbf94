"""A pipeline's timeline as a picture: a row for every rank, a box for every pass."""

from __future__ import annotations

from meshwright.costmodel.pipeline.orders import Work
from meshwright.planner.analysis.timeline import Trace
from meshwright.planner.drawing.svg import Drawing
from meshwright.planner.report.parts import seconds

WIDTH, LEFT, ROW, TOP = 1180.0, 64.0, 16.0, 34.0
SMALLEST_BOX = 0.4
"""Pixels."""
_COLOURS = {
    Work.FORWARD: "#3b82c4",
    Work.BACKWARD: "#d97706",
    Work.INPUT: "#d97706",
    Work.WEIGHT: "#65a30d",
}
_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.INPUT: "gradients of inputs",
    Work.WEIGHT: "gradients of weights",
}


def timeline_svg(trace: Trace) -> str:
    """The passes of a trace; what follows the pipeline is left out."""
    timeline, drawing = trace.timeline, Drawing(WIDTH)
    scale = (WIDTH - LEFT - 8) / timeline.seconds
    row = min(ROW, 900.0 / trace.pp)
    used = {one.work for order in timeline.passes for one in order}
    x = LEFT
    for work in (work for work in Work if work in used):
        drawing.rect(x, 8, 12, 12, fill=_COLOURS[work], radius=2)
        drawing.text(x + 17, 18, _WORDS[work])
        x += 40 + 7 * len(_WORDS[work])
    every = 1 if row >= 10 else -(-10 // row)
    for rank, (order, starts, ends) in enumerate(
        zip(timeline.passes, timeline.starts_s, timeline.ends_s, strict=True)
    ):
        y = TOP + rank * row
        if rank % every == 0:
            drawing.text(LEFT - 6, y + min(row, ROW) - 4, f"rank {rank}", size=10, anchor="end")
        for one, start_s, end_s in zip(order, starts, ends, strict=True):
            width = max(SMALLEST_BOX, (end_s - start_s) * scale - 0.3)
            tip = f"{_WORDS[one.work]} of micro-batch {one.micro_batch}, chunk {one.chunk}: "
            tip += f"{seconds(end_s - start_s)} from {seconds(start_s)}"
            drawing.rect(
                LEFT + start_s * scale, y, width, row - 1, fill=_COLOURS[one.work], tip=tip
            )
    bottom = TOP + trace.pp * row
    drawing.text(LEFT, bottom + 14, "0 s", size=10)
    drawing.text(WIDTH - 8, bottom + 14, seconds(timeline.seconds), size=10, anchor="end")
    return drawing.document(
        bottom + 22, f"{trace.num_micro_batches} micro-batches through the pipeline"
    )
