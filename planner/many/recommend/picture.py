"""The sweep as a picture: GPUs against step time, both logarithmic, the Pareto front joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.drawing.charts import Chart, LogScale, empty_chart
from meshwright.planner.drawing.quantities import seconds
from meshwright.planner.drawing.svg import distinct_colour

_TITLE = "Step time by GPUs; filled: on the Pareto front of time, GPUs and free memory"


@dataclass(frozen=True, kw_only=True)
class SweepDot:
    """A plan of the sweep."""

    cluster: str
    gpus: int
    step_time_s: float
    headroom_gib: float
    on_front: bool


def sweep_svg(dots: Sequence[SweepDot]) -> str:
    """The SVG text; an ideal speed-up is a straight line down."""
    if not dots:
        return empty_chart(_TITLE, "no plan at any size")
    chart = Chart(
        across=LogScale.of_twos([dot.gpus for dot in dots]),
        down=LogScale.of_twos([dot.step_time_s for dot in dots]),
        title=_TITLE,
        across_title="GPUs",
        down_title="step, s",
    )
    for index, name in enumerate(dict.fromkeys(dot.cluster for dot in dots)):
        colour = distinct_colour(index)
        front = [dot for dot in dots if dot.cluster == name and dot.on_front]
        front.sort(key=lambda dot: (dot.gpus, -dot.step_time_s))
        chart.line([(dot.gpus, dot.step_time_s) for dot in front], colour)
        for dot in (dot for dot in dots if dot.cluster == name):
            free = f"{dot.headroom_gib:.1f} GiB free"
            tip = f"{name}, {dot.gpus} GPUs: {seconds(dot.step_time_s)}, {free}"
            chart.dot((dot.gpus, dot.step_time_s), colour, hollow=not dot.on_front, tip=tip)
        chart.name(name, colour)
    return chart.document()
