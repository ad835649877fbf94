"""A pipeline's timeline as a picture: a row for every rank, a box for every pass."""

from __future__ import annotations

from math import ceil

from meshwright.costmodel.pipeline.orders import Work
from meshwright.planner.analysis.timeline import Trace
from meshwright.planner.drawing.quantities import seconds
from meshwright.planner.drawing.svg import Drawing

WIDTH, LEFT, RIGHT, TOP = 1180.0, 64.0, 8.0, 34.0
ROW_HEIGHT = 16.0
MOST_HEIGHT = 900.0
"""Of all rows together; with many ranks rows become lower."""
LABEL_HEIGHT = 10.0
SMALLEST_BOX = 0.4
"""Pixels, so that no pass vanishes."""
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
    """The passes of a trace as SVG text; what follows the pipeline is left out."""
    timeline, drawing = trace.timeline, Drawing(WIDTH)
    row_height = min(ROW_HEIGHT, MOST_HEIGHT / trace.pp)
    _legend(drawing, {step.work for order in timeline.passes for step in order})
    labelled_every = ceil(LABEL_HEIGHT / row_height)
    for rank in range(trace.pp):
        y = TOP + rank * row_height
        if rank % labelled_every == 0:
            base = y + row_height - 4
            drawing.text(LEFT - 6, base, f"rank {rank}", size=10, anchor="end")
        _passes(drawing, trace, rank, y, row_height)
    bottom = TOP + trace.pp * row_height
    drawing.text(LEFT, bottom + 14, "0 s", size=10)
    drawing.text(WIDTH - RIGHT, bottom + 14, seconds(timeline.seconds), size=10, anchor="end")
    title = f"{trace.num_micro_batches} micro-batches through the pipeline"
    return drawing.document(bottom + 22, title)


def _legend(drawing: Drawing, used: set[Work]) -> None:
    x = LEFT
    for work in Work:
        if work in used:
            drawing.rect(x, 8, 12, 12, fill=_COLOURS[work], radius=2)
            drawing.text(x + 17, 18, _WORDS[work])
            x += 40 + 7 * len(_WORDS[work])


def _passes(drawing: Drawing, trace: Trace, rank: int, y: float, row_height: float) -> None:
    timeline = trace.timeline
    pixels_per_s = (WIDTH - LEFT - RIGHT) / timeline.seconds
    for step, start_s, end_s in zip(
        timeline.passes[rank], timeline.starts_s[rank], timeline.ends_s[rank], strict=True
    ):
        what = f"{_WORDS[step.work]} of micro-batch {step.micro_batch}, chunk {step.chunk}"
        drawing.rect(
            LEFT + start_s * pixels_per_s,
            y,
            max(SMALLEST_BOX, (end_s - start_s) * pixels_per_s - 0.3),
            row_height - 1,
            fill=_COLOURS[step.work],
            tip=f"{what}: {seconds(end_s - start_s)} from {seconds(start_s)}",
        )
